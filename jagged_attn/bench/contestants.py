"""Who runs in a benchmark: our backends, and the peers that a user would otherwise take.

A contestant is handed a problem and makes an ``Attempt``: calls that are timed, with everything that a user would do
once (padding a batch, making a mask) done before. Where a peer must be fed more than our operation, the feeding is
part of its call: for broadcast-Q the shared queries are expanded to the batch, and their gradient is summed over it.
"""

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from ..backends import BACKENDS
from ..functional import explain_backend
from ..masks import Full, SlidingWindow
from .problem import Problem, Solution

# Beyond this many bytes of padded q, k, v and mask, padding is not what anybody would do.
_PADDED_LIMIT = 4 * 2**30


@dataclass(frozen=True)
class Attempt:
    """A problem as one contestant takes it.

    Attributes:
        leaves: the tensors whose gradients are wanted, in the contestant's own form.
        dout: the incoming gradient in that form.
        forward: makes the output from the leaves.
        packed: output and gradients of the leaves to a solution of the problem.
    """

    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    forward: Callable[[], Tensor]
    packed: Callable[[Tensor, Tensor, Tensor, Tensor], Solution] = Solution

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One forward and backward: output and gradients in the contestant's own form."""
        out = self.forward()
        dq, dk, dv = torch.autograd.grad(out, self.leaves, self.dout)
        return out.detach(), dq, dk, dv

    def solve(self) -> Solution:
        """One forward and backward, in the problem's form."""
        return self.packed(*self.run())


class Contestant:
    """One way to compute attention.

    Attributes:
        name: how rows and options call it.
        is_ours: whether it is a backend of this library.
    """

    name: str
    is_ours = False

    def refusal(self, problem: Problem) -> str | None:
        """Why it does not take the problem; ``None`` if it does."""
        raise NotImplementedError

    def posed(self, problem: Problem) -> Problem:
        """The problem that it solves when handed this one: the same, unless it says otherwise."""
        return problem

    def attempt(self, problem: Problem) -> Attempt:
        """Everything that precedes the timed calls, and the calls."""
        raise NotImplementedError


@dataclass(frozen=True)
class Backend(Contestant):
    """A backend of this library, called through the public operation."""

    name: str
    is_ours = True

    def refusal(self, problem: Problem) -> str | None:
        """See ``Contestant.refusal``: what ``explain_backend`` says."""
        x, w = problem.inputs, problem.workload
        reports = explain_backend(x.q, x.k, x.v, x.layout_q, x.layout_kv, mask=w.mask, activation=w.activation)
        return next(report.refusal for report in reports if report.backend == self.name)

    def attempt(self, problem: Problem) -> Attempt:
        """See ``Contestant.attempt``."""
        leaves = problem.leaves()
        return Attempt(leaves, problem.inputs.dout, lambda: problem.attend(*leaves, backend=self.name))


@dataclass(frozen=True)
class _Varlen(Contestant):
    """A fused attention over packed sequences that takes offsets and longest lengths."""

    def refusal(self, problem: Problem) -> str | None:
        """See ``Contestant.refusal``."""
        dtype = problem.inputs.q.dtype
        if problem.inputs.q.device.type != "cuda":
            return "runs on CUDA only"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"takes bfloat16 and float16 only, not {str(dtype).removeprefix('torch.')}"
        if problem.workload.activation != "softmax":
            return f"computes softmax only, not {problem.workload.activation}"
        if not isinstance(problem.workload.mask, (Full, SlidingWindow)):
            return f"has no mask {problem.workload.mask}"
        return self._missing(_window(problem) is not None)

    def attempt(self, problem: Problem) -> Attempt:
        """See ``Contestant.attempt``."""
        x, batch = problem.inputs, problem.batch
        q, k, v = problem.leaves()
        cu_kv = x.layout_kv.offsets.int()
        if x.layout_q is not None:
            cu_q = cu_kv if x.layout_q is x.layout_kv else x.layout_q.offsets.int()
            return Attempt((q, k, v), x.dout, lambda: self._call(problem, q, k, v, cu_q, cu_kv))
        cu_q = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * q.shape[0]

        def forward() -> Tensor:
            expanded = q.expand(batch, *q.shape).flatten(0, 1)
            return self._call(problem, expanded, k, v, cu_q, cu_kv).unflatten(0, (batch, q.shape[0]))

        return Attempt((q, k, v), x.dout, forward)

    def _missing(self, needs_window: bool) -> str | None:
        """Why the function cannot be called on this machine, if so."""
        raise NotImplementedError

    def _call(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class FlashAttention4(_Varlen):
    """FlashAttention-4, ``flash_attn.cute.interface.flash_attn_varlen_func``."""

    name: str = "fa4"

    def _missing(self, needs_window: bool) -> str | None:
        function = _flash_attention_4()
        return function if isinstance(function, str) else None

    def _call(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor) -> Tensor:
        window = _window(problem)
        out = cast(Callable[..., Any], _flash_attention_4())(
            q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_kv,
            max_seqlen_q=problem.longest_q, max_seqlen_k=problem.longest_kv,
            **({} if window is None else {"window_size": window}),
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out


@cache
def _flash_attention_4() -> Callable[..., Any] | str:
    """The function, or why there is none."""
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func
    except Exception as error:  # a broken install fails in more ways than ImportError
        return f"flash_attn.cute cannot be imported: {type(error).__name__}: {error}"
    return flash_attn_varlen_func


@dataclass(frozen=True)
class TorchVarlen(_Varlen):
    """PyTorch's ``torch.nn.attention.varlen.varlen_attn``."""

    name: str = "varlen_attn"

    def _missing(self, needs_window: bool) -> str | None:
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            return f"PyTorch {torch.__version__} has no torch.nn.attention.varlen"
        from torch.nn.attention.varlen import varlen_attn

        if needs_window and "window_size" not in inspect.signature(varlen_attn).parameters:
            return f"varlen_attn of PyTorch {torch.__version__} takes no window"
        return None

    def _call(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_kv: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        window = _window(problem)
        options: dict[str, Any] = {}
        if window is not None:
            options["window_size"] = tuple(-1 if reach is None else reach for reach in window)
        return varlen_attn(q, k, v, cu_q, cu_kv, problem.longest_q, problem.longest_kv, **options)  # type: ignore[return-value]


@dataclass(frozen=True)
class PaddedSdpa(Contestant):
    """``scaled_dot_product_attention`` on the batch padded to its longest sequence.

    The batch is padded before the clock starts, and the mask is made before it too.

    Attributes:
        masked: whether a mask keeps the padding out. Without one it is another function, which attends to the
            padding: its time bounds from below what padding costs, and it is checked as the function that it is.
    """

    name: str
    masked: bool

    def refusal(self, problem: Problem) -> str | None:
        """See ``Contestant.refusal``."""
        if problem.workload.activation != "softmax":
            return f"computes softmax only, not {problem.workload.activation}"
        if not self.masked and problem.workload.mask != Full():
            return "has no mask"
        x, rows_q, rows_kv = problem.inputs, problem.longest_q, problem.longest_kv
        if problem.is_broadcast and not self.masked:
            return "left out for broadcast-Q"
        row_bytes = x.q.shape[1] * x.q.shape[2] * x.q.element_size()
        size = problem.batch * ((rows_q + 2 * rows_kv) * row_bytes + self._mask_rows(problem) * rows_kv)
        if size > _PADDED_LIMIT:
            return f"the padded batch would hold {size / 2**30:.1f} GiB"
        return None

    def posed(self, problem: Problem) -> Problem:
        """See ``Contestant.posed``."""
        return problem if self.masked else problem.padded()

    def attempt(self, problem: Problem) -> Attempt:
        """See ``Contestant.attempt``."""
        x = problem.inputs

        def heads_first(padded: Tensor) -> Tensor:
            return padded.transpose(1, 2).contiguous()

        k, v = (heads_first(problem.pad_kv(y)).requires_grad_() for y in (x.k, x.v))
        dout = x.dout.transpose(1, 2) if problem.is_broadcast else heads_first(problem.pad_q(x.dout))
        q = x.q.transpose(0, 1).contiguous() if problem.is_broadcast else heads_first(problem.pad_q(x.q))
        q.requires_grad_()
        mask = self._mask(problem) if self.masked else None

        def forward() -> Tensor:
            queries = q.expand(problem.batch, *q.shape) if problem.is_broadcast else q
            return torch.nn.functional.scaled_dot_product_attention(queries, k, v, attn_mask=mask)

        def packed(out: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Solution:
            dk, dv = (problem.unpad_kv(y.transpose(1, 2)) for y in (dk, dv))
            if problem.is_broadcast:
                return Solution(out.transpose(1, 2), dq.transpose(0, 1), dk, dv)
            out, dq = (problem.unpad_q(y.transpose(1, 2)) for y in (out, dq))
            return Solution(out, dq, dk, dv)

        return Attempt((q, k, v), dout, forward, packed)

    @staticmethod
    def _mask_rows(problem: Problem) -> int:
        return 1 if problem.workload.mask == Full() else problem.longest_q

    def _mask(self, problem: Problem) -> Tensor:
        """``[B, 1, longest_q or 1, longest_kv]``, True where a query may attend."""
        device = problem.inputs.k.device
        j = torch.arange(problem.longest_kv, device=device)
        len_q, len_kv = (n.to(device)[:, None, None] for n in (problem.lengths_q, problem.lengths_kv))
        i = torch.arange(self._mask_rows(problem), device=device)[:, None]
        lo, hi = problem.workload.mask.key_range(i, len_q, len_kv)
        return ((lo <= j) & (j < hi) & (j < len_kv))[:, None]


def _window(problem: Problem) -> tuple[int | None, int | None] | None:
    """How far the mask reaches to the left and right; ``None`` for no mask."""
    mask = problem.workload.mask
    return (mask.left, mask.right) if isinstance(mask, SlidingWindow) else None


PEERS: dict[str, Contestant] = {
    peer.name: peer
    for peer in (FlashAttention4(), TorchVarlen(), PaddedSdpa("sdpa_masked", True), PaddedSdpa("sdpa_unmasked", False))
}


def select_contestants(backends: Sequence[str], peers: Sequence[str], device_type: str) -> list[Contestant]:
    """The contestants of a run, ours first.

    Args:
        backends: names; empty for all but ``reference``, and on a CPU for ``eager`` alone.
        peers: names; empty for those that may run on the device; ``["none"]`` for none.
        device_type: where it runs.

    Raises:
        ValueError: a name is not known.
    """
    for option, names, known in (("--backend", backends, BACKENDS), ("--peers", peers, [*PEERS, "none"])):
        for name in names:
            if name not in known:
                raise ValueError(f"{option} must be one of {', '.join(known)}, got {name!r}.")
    default = [name for name in BACKENDS if name != "reference"] if device_type == "cuda" else ["eager"]
    ours: list[Contestant] = [Backend(name) for name in backends or default]
    if "none" in peers:
        return ours
    default = ["fa4", "varlen_attn", "sdpa_masked"] if device_type == "cuda" else ["sdpa_masked", "sdpa_unmasked"]
    return ours + [PEERS[name] for name in peers or default]
