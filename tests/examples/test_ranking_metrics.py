"""NE and AUC against their formulas, written out."""

import itertools
import math

import pytest
import torch
from ranking.metrics import evaluate, normalized_entropy


def test_ne_is_log_loss_over_the_entropy_of_the_base_rate() -> None:
    p, y = [0.1, 0.8, 0.35, 0.5, 0.9], [0, 1, 1, 0, 1]
    loss = -sum(math.log(a if b else 1 - a) for a, b in zip(p, y, strict=True)) / 5
    entropy = -(0.6 * math.log(0.6) + 0.4 * math.log(0.4))
    got = normalized_entropy(torch.tensor(p, dtype=torch.float64), torch.tensor(y, dtype=torch.float32))
    assert got == pytest.approx(loss / entropy, rel=1e-14)


def test_the_base_rate_scores_ne_one_and_auc_one_half() -> None:
    label = torch.tensor([1.0, 0, 0, 1, 0, 0, 0])
    metrics = evaluate(torch.full((7,), 2 / 7, dtype=torch.float64), label)
    assert metrics.ne == pytest.approx(1.0, rel=1e-6)
    assert metrics.auc == 0.5


def test_auc_is_the_part_of_pairs_in_order_with_ties_counted_half() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randint(0, 11, (97,), generator=generator).double() / 11
    y = torch.randint(0, 2, (97,), generator=generator)
    pairs = itertools.product(p[y == 1].tolist(), p[y == 0].tolist())
    order = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs]
    assert evaluate(p, y.float()).auc == pytest.approx(sum(order) / len(order), abs=1e-6)
