"""Tolerances derived from what the dtype permits, never chosen."""

import math

import torch
from torch import Tensor


def tolerance(
    exact: Tensor, eager: Tensor, terms: int = 1, largest_score: float = 0.0, cancelled: float = 0.0
) -> float:
    """The largest absolute error that a backend may have.

    ``2 max|eager - exact| + (eps + (sqrt(terms) + largest_score) eps_acc) max|exact| + sqrt(terms) eps_acc cancelled``:
    twice the error that ``eager`` has in the same dtype; one rounding of the largest element to that dtype; and, in the
    dtype of accumulation, the roundings of a sum of ``terms`` terms in another order and of ``exp(s)``, whose relative
    error is that of s times s.
    Elements of ``exact`` that are not finite are left out.

    Args:
        exact: the result in float64, from the same inputs (rounded to the dtype first).
        eager: the ``eager`` backend's result in the dtype under test.
        terms: of the longest sum behind an element.
        largest_score: the largest magnitude that is exponentiated.
        cancelled: the largest magnitude of what is summed up, where sums of large terms are small or 0.
    """
    finite = exact.isfinite()
    if not finite.any():
        return 0.0
    exact = exact[finite].double()
    error = (eager[finite].double() - exact).abs().max().item()
    eps_acc = torch.finfo(torch.float64 if eager.dtype == torch.float64 else torch.float32).eps
    roundings = torch.finfo(eager.dtype).eps + (math.sqrt(terms) + largest_score) * eps_acc
    return 2 * error + roundings * exact.abs().max().item() + math.sqrt(terms) * eps_acc * cancelled


def assert_within(
    name: str, actual: Tensor, exact: Tensor, eager: Tensor, terms: int = 1, largest_score: float = 0.0,
    cancelled: float = 0.0,
) -> None:  # fmt: skip
    """Raise ``AssertionError`` unless ``actual`` is as close to ``exact`` as ``tolerance`` says.

    Infinities must stand in the same places; NaN never passes.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, expected {list(exact.shape)}")
    if actual.dtype != eager.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, expected {eager.dtype}")
    infinite = exact.isinf()
    if not torch.equal(actual[infinite].double(), exact[infinite].double()):
        raise AssertionError(f"{name}: infinities are not where they belong")
    if exact[~infinite].numel() == 0:
        return
    error = (actual[~infinite].double() - exact[~infinite].double()).abs()
    allowed = tolerance(exact, eager, terms, largest_score, cancelled)
    if not error.max().item() <= allowed:  # also when it is NaN
        bad = int((~(error <= allowed)).sum())
        raise AssertionError(
            f"{name}: {bad} of {error.numel()} elements off; "
            f"largest error {error.max().item():.3g}, allowed {allowed:.3g}"
        )
