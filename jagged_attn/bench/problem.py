"""A workload made into tensors, and what must be computed and moved to solve it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..functional import broadcast_q_attention, jagged_attention
from ..layout import JaggedLayout
from ..masks import Full
from ..testing.inputs import AttentionInputs
from .workloads import Workload

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"


class Solution(NamedTuple):
    """What a contestant computed: the output and the gradients, packed as the inputs are."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """The tensors of one workload, or of some of its sequences.

    Attributes:
        workload: the shape.
        inputs: q, k, v, layouts and the incoming gradient.
        lengths_q: ``[B]`` query lengths on the CPU; S for each sequence in broadcast-Q.
        lengths_kv: ``[B]`` key lengths on the CPU.
    """

    workload: Workload
    inputs: AttentionInputs
    lengths_q: Tensor
    lengths_kv: Tensor

    @property
    def is_broadcast(self) -> bool:
        """Whether the queries are shared by all sequences."""
        return self.inputs.layout_q is None

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths_kv)

    @cached_property
    def longest_q(self) -> int:
        """The longest query length."""
        return int(self.lengths_q.max())

    @cached_property
    def longest_kv(self) -> int:
        """The longest key length."""
        return int(self.lengths_kv.max())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        """The public operation on these tensors, through the named backend."""
        layout_q, layout_kv, w = self.inputs.layout_q, self.inputs.layout_kv, self.workload
        if layout_q is None:
            return broadcast_q_attention(q, k, v, layout_kv, mask=w.mask, activation=w.activation, backend=backend)
        return jagged_attention(q, k, v, layout_q, layout_kv, mask=w.mask, activation=w.activation, backend=backend)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as leaves that want a gradient; the memory is shared."""
        q, k, v = (x.detach().requires_grad_() for x in (self.inputs.q, self.inputs.k, self.inputs.v))
        return q, k, v

    def solve(self, backend: str) -> Solution:
        """Output and gradients through the named backend."""
        leaves = self.leaves()
        out = self.attend(*leaves, backend=backend)
        return Solution(out.detach(), *torch.autograd.grad(out, leaves, self.inputs.dout))

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same problem in another dtype."""
        return replace(self, inputs=self.inputs.to(dtype))

    def take(self, sequences: Tensor) -> "Problem":
        """The problem of these sequences alone, in this order; ``sequences`` ``[n]`` is on the CPU."""
        x, lengths_q, lengths_kv = self.inputs, self.lengths_q[sequences], self.lengths_kv[sequences]
        dout, q, k, v = self.take_solution(Solution(x.dout, x.q, x.k, x.v), sequences)
        layout_kv = JaggedLayout.from_lengths(lengths_kv.to(k.device))
        layout_q = layout_kv if x.layout_q is x.layout_kv else JaggedLayout.from_lengths(lengths_q.to(k.device))
        inputs = AttentionInputs(q, k, v, None if self.is_broadcast else layout_q, layout_kv, dout)
        return Problem(self.workload, inputs, lengths_q, lengths_kv)

    def take_solution(self, solution: Solution, sequences: Tensor) -> Solution:
        """What a solution says of these sequences; a broadcast-Q ``dq`` belongs to all of them and is left whole."""
        out, dq, dk, dv = solution
        device = dk.device
        at_kv = _packed_rows(self.lengths_kv, sequences).to(device)
        if self.is_broadcast:
            return Solution(out[sequences.to(device)], dq, dk[at_kv], dv[at_kv])
        at_q = _packed_rows(self.lengths_q, sequences).to(device)
        return Solution(out[at_q], dq[at_q], dk[at_kv], dv[at_kv])

    def padded(self) -> "Problem":
        """The problem with every sequence lengthened to the longest by rows of zeros, which are attended to.

        It has another solution: what attention over the padded batch computes where nothing masks the padding.
        """
        x = self.inputs
        layout_kv = JaggedLayout.uniform(self.batch, self.longest_kv, x.k.device)
        layout_q = layout_kv if x.layout_q is x.layout_kv else None
        if x.layout_q is not None and layout_q is None:
            layout_q = JaggedLayout.uniform(self.batch, self.longest_q, x.q.device)
        q, dout = (
            (x.q, x.dout) if self.is_broadcast else (self.pad_q(x.q).flatten(0, 1), self.pad_q(x.dout).flatten(0, 1))
        )
        k, v = self.pad_kv(x.k).flatten(0, 1), self.pad_kv(x.v).flatten(0, 1)
        lengths_q, lengths_kv = (torch.full((self.batch,), n) for n in (self.longest_q, self.longest_kv))
        return Problem(self.workload, AttentionInputs(q, k, v, layout_q, layout_kv, dout), lengths_q, lengths_kv)

    def pad_q(self, packed: Tensor) -> Tensor:
        """``[T_q, H, D]`` to ``[B, longest_q, H, D]``, zeros behind each sequence."""
        return _pad(packed, self.lengths_q, self.longest_q)

    def pad_kv(self, packed: Tensor) -> Tensor:
        """``[T_kv, H, D]`` to ``[B, longest_kv, H, D]``, zeros behind each sequence."""
        return _pad(packed, self.lengths_kv, self.longest_kv)

    def unpad_q(self, padded: Tensor) -> Tensor:
        """The inverse of ``pad_q``."""
        return padded[_is_row(self.lengths_q, self.longest_q).to(padded.device)]

    def unpad_kv(self, padded: Tensor) -> Tensor:
        """The inverse of ``pad_kv``."""
        return padded[_is_row(self.lengths_kv, self.longest_kv).to(padded.device)]

    @cached_property
    def _pairs(self) -> int:
        """Pairs of a query and a key that the mask allows, in one head."""
        if self.workload.mask == Full():
            return int((self.lengths_q * self.lengths_kv).sum())
        lens_q = self.lengths_q.repeat_interleave(self.lengths_q)
        lens_kv = self.lengths_kv.repeat_interleave(self.lengths_q)
        i = _packed_rows(self.lengths_q, torch.arange(self.batch)) - (
            (self.lengths_q.cumsum(0) - self.lengths_q).repeat_interleave(self.lengths_q)
        )
        lo, hi = self.workload.mask.key_range(i, lens_q, lens_kv)
        return int((torch.minimum(hi, lens_kv) - lo.clamp(min=0)).clamp(min=0).sum())

    def flops(self, phase: str) -> float:
        """Useful operations, padding and recomputation of what the forward knew left out.

        Forward: the products for the scores and the output. Backward: scores again, dV, dP, dQ, dK.
        """
        d, dv = self.inputs.q.shape[2], self.inputs.v.shape[2]
        columns = {FORWARD: d + dv, BACKWARD: 3 * d + 2 * dv, BOTH: 4 * d + 3 * dv}[phase]
        return 2.0 * self._pairs * self.workload.num_heads * columns

    def bytes_moved(self, phase: str) -> float:
        """The fewest bytes that device memory must move: every input read once, every output written once."""
        q, k, v, out = (
            x.numel() * x.element_size() for x in (self.inputs.q, self.inputs.k, self.inputs.v, self.inputs.dout)
        )
        lse = 4 * self.inputs.dout.numel() // self.inputs.dout.shape[-1] if self.workload.activation == "softmax" else 0
        forward = q + k + v + out + lse
        backward = 2 * (q + k + v + out) + lse
        return float({FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[phase])


def make_problem(workload: Workload, dtype: torch.dtype, device: torch.device, seed: int) -> Problem:
    """The tensors of a workload: normal values, drawn on the device, since a CPU would take long for the large ones."""
    lengths_kv, lengths_q = workload.draw_lengths(seed)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    layout_kv = JaggedLayout.from_lengths(lengths_kv.to(device=device, dtype=torch.int32))
    heads, dim, rows_kv = workload.num_heads, workload.head_dim, int(lengths_kv.sum())
    layout_q: JaggedLayout | None = layout_kv
    if workload.kind == "broadcast_q":
        shared = workload.num_shared_queries or 0
        layout_q, lengths_q = None, torch.full((workload.batch,), shared)
        q = normal(shared, heads, dim)
        out_shape: tuple[int, ...] = (workload.batch, *q.shape)
    else:
        if lengths_q is None:
            lengths_q = lengths_kv
        else:
            layout_q = JaggedLayout.from_lengths(lengths_q.to(device=device, dtype=torch.int32))
        q = normal(int(lengths_q.sum()), heads, dim)
        out_shape = tuple(q.shape)
    k, v, dout = normal(rows_kv, heads, dim), normal(rows_kv, heads, dim), normal(*out_shape)
    return Problem(workload, AttentionInputs(q, k, v, layout_q, layout_kv, dout), lengths_q, lengths_kv)


def _packed_rows(lengths: Tensor, sequences: Tensor) -> Tensor:
    """``[n]`` rows that these sequences occupy in a packed tensor, in the order of ``sequences``."""
    starts, taken = (lengths.cumsum(0) - lengths)[sequences], lengths[sequences]
    shift = starts - (taken.cumsum(0) - taken)
    return torch.arange(int(taken.sum())) + shift.repeat_interleave(taken)


def _is_row(lengths: Tensor, longest: int) -> Tensor:
    """``[B, longest]``, whether a padded row is a row of its sequence."""
    return torch.arange(longest) < lengths[:, None]


def _pad(packed: Tensor, lengths: Tensor, longest: int) -> Tensor:
    padded = packed.new_zeros((len(lengths), longest, *packed.shape[1:]))
    padded[_is_row(lengths, longest).to(packed.device)] = packed
    return padded
