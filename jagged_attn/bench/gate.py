"""The gate in front of every speed: is the result right?

Output and gradients are compared with the ``reference`` backend in float64, by groups of sequences. What is allowed is
derived from that result and a yardstick in the problem's dtype; for a tensor whose elements are sums of n terms,

    allowed = 2 max|yardstick - exact| + eps max|exact| + sqrt(n) eps_acc (max|exact| + c)

which is ``testing.tolerance``. Its yardstick here is ``reference`` in the problem's dtype: ``eager`` cannot be, since
it stands at this gate itself. The last term is what summing in another order, in the accumulator's
precision, is expected to cost (Higham & Mary, SIAM J. Sci. Comput. 41, 2019): a contestant owes us no order, and for
float32 inputs one lucky yardstick would decide. In dQ and dK terms of up to ``c = scale max|k| max||dO|| max||v||``, or
with q for k, may cancel: with a single key they are 0, and what is left of them is rounding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..testing.tolerance import tolerance
from .problem import Problem, Solution

# One tolerance for all sequences would be set by the shortest, whose outputs and gradients are the largest.
_GROUP = 8


@dataclass
class Verdict:
    """What the gate says of one solution.

    Attributes:
        worst: for each tensor, its largest error as a fraction of what is allowed.
        faults: what is wrong, in words.
    """

    worst: dict[str, float] = field(default_factory=dict)
    _squares: dict[str, tuple[float, float]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every tensor was compared and is right."""
        return not self.faults and set(self.worst) == set(Solution._fields)

    def relative_error(self, name: str) -> float:
        """``||actual - exact|| / ||exact||`` of one tensor, over all that was compared."""
        error, norm = self._squares.get(name, (math.nan, math.nan))
        return math.sqrt(error / norm) if norm else 0.0 if error == 0.0 else math.inf

    def compare(
        self, name: str, actual: Tensor, exact: Tensor, yardstick: Tensor, terms: int, cancelled: float, where: str
    ) -> None:
        """Take one tensor, whose elements are sums of so many terms of at most that size, into account."""
        difference = actual.double() - exact
        error = difference.abs().max().item() if actual.numel() else 0.0
        squares = self._squares.get(name, (0.0, 0.0))
        self._squares[name] = (squares[0] + float(difference.square().sum()), squares[1] + float(exact.square().sum()))
        allowed = tolerance(exact, yardstick, terms, cancelled=cancelled)
        # Where nothing is allowed, only no error passes; NaN passes nowhere.
        ratio = error / allowed if allowed else (0.0 if error == 0.0 else float("inf"))
        self.worst[name] = max(self.worst.get(name, 0.0), ratio if ratio == ratio else float("inf"))
        if not error <= allowed:
            self.faults.append(f"{name} of {where} is off by {error:.2e}, allowed {allowed:.2e}")


@dataclass(frozen=True)
class _Group:
    """Some sequences, the float64 result, the yardstick's, and how many terms, and how large, cancel in a gradient."""

    sequences: Tensor
    exact: Solution
    yardstick: Solution
    terms: int
    cancelled: dict[str, float]
    where: str


class Gate:
    """Judges solutions of one problem.

    Args:
        problem: the problem.
        sample: sequences to compare: the shortest and longest, the first and the last, the rest spread evenly. In
            broadcast-Q all are compared, because the query gradient sums over all of them.
    """

    def __init__(self, problem: Problem, sample: int) -> None:
        self.problem = problem
        self._groups = [_solve_group(problem, sequences) for sequences in _groups(problem, sample)]

    def judge(self, solution: Solution) -> Verdict:
        """Compare a solution of the whole problem."""
        verdict = Verdict()
        self._check_form(solution, verdict)
        if verdict.faults:
            return verdict
        for group in self._groups:
            actual = self.problem.take_solution(solution, group.sequences)
            for name, a, e, y in zip(Solution._fields, actual, group.exact, group.yardstick, strict=True):
                if not (self.problem.is_broadcast and name == "dq"):
                    verdict.compare(name, a, e, y, group.terms, group.cancelled.get(name, 0.0), group.where)
        if self.problem.is_broadcast:
            exact = torch.stack([group.exact.dq for group in self._groups]).sum(0)
            yardstick = torch.stack([group.yardstick.dq.double() for group in self._groups]).sum(0)
            terms = self.problem.inputs.k.shape[0]
            cancelled = max(group.cancelled["dq"] for group in self._groups)
            verdict.compare("dq", solution.dq, exact, yardstick.to(solution.dq.dtype), terms, cancelled, "the batch")
        return verdict

    def _check_form(self, solution: Solution, verdict: Verdict) -> None:
        x = self.problem.inputs
        for name, actual, like in zip(Solution._fields, solution, (x.dout, x.q, x.k, x.v), strict=True):
            if actual.shape != like.shape or actual.dtype != like.dtype:
                verdict.faults.append(
                    f"{name} is {actual.dtype} {list(actual.shape)} instead of {like.dtype} {list(like.shape)}"
                )
            elif not actual.isfinite().all():
                verdict.faults.append(f"{name} has elements that are not finite")


def _groups(problem: Problem, sample: int) -> Iterator[Tensor]:
    """Sequences to compare, in groups of similar length."""
    order = problem.lengths_kv.argsort(stable=True)
    if not problem.is_broadcast and problem.batch > sample:
        spread = torch.linspace(0, problem.batch - 1, max(sample - 2 * _GROUP, 2)).round().long()
        chosen = torch.cat([order[:_GROUP], order[-_GROUP:], spread]).unique()
        order = chosen[problem.lengths_kv[chosen].argsort(stable=True)]
    yield from order.split(_GROUP)


def _solve_group(problem: Problem, sequences: Tensor) -> _Group:
    part = problem.take(sequences)
    lengths = part.lengths_kv
    where = f"{len(sequences)} sequences of {int(lengths.min())} to {int(lengths.max())} keys"
    # A gradient is a sum over keys or queries of products that themselves are sums over a head's columns.
    terms = max(part.longest_q, part.longest_kv) + part.inputs.q.shape[2]
    exact = part.to(torch.float64).solve("reference")
    return _Group(sequences, exact, part.solve("reference"), terms, part.inputs.cancelled(), where)


def poison(problem: Problem) -> None:
    """Leave NaN in freed memory of the results' sizes, so that an element nobody writes is likely to be seen."""
    x = problem.inputs
    poisoned = [torch.full_like(tensor, torch.nan) for tensor in (x.dout, x.q, x.k, x.v)]
    del poisoned
