"""How good predicted click probabilities are: NE and AUC."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

with warnings.catch_warnings():
    # torchmetrics 1.0.3 asks for distutils' version class while it is imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torchmetrics.functional.classification import binary_auroc


@dataclass(frozen=True)
class Metrics:
    """Quality of predictions on held-out data.

    Attributes:
        ne: normalised entropy, lower is better; 1 is what the best constant scores.
        auc: area under the ROC curve, ties counted half.
    """

    ne: float
    auc: float


def normalized_entropy(probability: Tensor, label: Tensor) -> float:
    """Log-loss divided by the entropy of the base rate of these very labels.

        NE = mean(-y log p - (1 - y) log(1 - p)) / (-r log r - (1 - r) log(1 - r)),   r = mean(y)

    So the best constant predictor scores 1, and an NE of 1 is no skill beyond knowing the base rate.
    Source: X. He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 3.

    Args:
        probability: ``[n]``, any float dtype; computed in float64.
        label: ``[n]``, zeros and ones, both present.
    """
    probability, label = probability.double(), label.double()
    return (_cross_entropy(label, probability) / _cross_entropy(label, label.mean().expand_as(label))).item()


def _cross_entropy(label: Tensor, probability: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy(probability, label)


def evaluate(probability: Tensor, label: Tensor) -> Metrics:
    """NE and AUC of ``probability`` ``[n]`` against ``label`` ``[n]``."""
    return Metrics(normalized_entropy(probability, label), binary_auroc(probability, label.long()).item())
