"""Exported programs that need no module of this library to run: the attention operator in PyTorch's own operators.

    program = torch.export.export(model, arguments, dynamic_shapes=...)
    program = decompose(program)
    torch._inductor.aoti_compile_and_package(program, package_path="model.pt2")

The operator ``jagged_attn::attention`` is implemented in Python, so a program that holds it runs where this library is
imported. ``decompose`` replaces it by padded attention out of ATen operators, whose padded length is read from the
offsets when the program runs: it fits any lengths, and a package of it loads with nothing but PyTorch.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram

from .activations import ELEMENTWISE, SOFTMAX
from .backends.base import lse_dtype
from .layout import row_bounds
from .masks import parse_mask

# Inductor asks whether a dimension that it does not know is 1: a padded length is at least this.
_SHORTEST = 2


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for ``ExportedProgram.run_decompositions`` that has an entry for the attention operator alone."""
    return {torch.ops.jagged_attn.attention.default: partial(_attention, _Measures())}


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Replace all attention operators of an exported program by PyTorch's own operators.

    The result computes the same numbers, up to rounding, for the forward pass of every kind of call, mask and
    activation, in any dtype and on any device. It pads all sequences of a call to the longest of the batch and keeps
    all scores, ``[B, H, L_q, L_kv]`` in fp32: that is what portability costs, and why this is for serving.

    Args:
        program: from ``torch.export.export`` of a model in inference.

    Returns:
        Another program with the same inputs and outputs.

    Raises:
        ValueError: the program has operators of this library that are not decomposed, such as a backward pass.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x, offsets):
        ...         return jagged_attention(x, x, x, offsets)
        >>> arguments = (torch.randn(5, 2, 8), torch.tensor([0, 2, 2, 5]))
        >>> dynamic = torch.export.Dim.DYNAMIC
        >>> program = decompose(torch.export.export(Model(), arguments, dynamic_shapes=({0: dynamic}, {0: dynamic})))
        >>> any("jagged_attn" in str(node.target) for node in program.graph.nodes)
        False
    """
    program = program.run_decompositions(decompositions())
    left = sorted({str(n.target) for n in program.graph.nodes if str(n.target).startswith("jagged_attn.")})
    if left:
        raise ValueError(f"program must hold forward passes alone, got {', '.join(left)}.")
    return program


class _Extent(NamedTuple):
    """First row and length of each sequence, and the padded length, which the program finds out as it runs."""

    starts: Tensor
    lengths: Tensor
    longest: int


class _Measures:
    """The extents of offsets tensors: once for all calls on the same ones, which halves the program of a stack."""

    def __init__(self) -> None:
        # With the tensors themselves, so that no other gets the id of one of them.
        self._known: dict[tuple[int, Any], tuple[Tensor, _Extent]] = {}

    def of(self, offsets: Tensor, rows: int) -> _Extent:
        """The extent of ``offsets`` in a tensor of so many rows."""
        key = (id(offsets), str(rows))
        if key not in self._known:
            self._known[key] = offsets, _measure(offsets, rows)
        return self._known[key][1]


def _attention(
    measures: _Measures, q: Tensor, k: Tensor, v: Tensor,
    offsets_q: Tensor | None, offsets_kv: Tensor, tables: list[Tensor],
    mask: str, activation: str, scale: float, out_scale: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = lse_dtype(q.dtype)
    extent_kv = measures.of(offsets_kv, k.shape[0])
    k_padded, v_padded = (_padded(x, extent_kv, q.shape[1], dtype) for x in (k, v))
    names = tuple(activation.split(","))
    if offsets_q is None:
        q_padded = q.to(dtype).transpose(0, 1).expand(k_padded.shape[0], -1, -1, -1)
        out, lse = _attend(q_padded, k_padded, v_padded, q.shape[0], extent_kv.lengths, mask, names, scale, out_scale)
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    else:
        extent_q = measures.of(offsets_q, q.shape[0])
        q_padded = _padded(q, extent_q, q.shape[1], dtype)
        out, lse = _attend(
            q_padded, k_padded, v_padded, extent_q.lengths, extent_kv.lengths, mask, names, scale, out_scale
        )
        out, lse = _packed(out, extent_q, q.shape[0], 0.0), _packed(lse, extent_q, q.shape[0], -torch.inf)
    lse = lse.contiguous() if SOFTMAX in names else lse.new_empty((*lse.shape[:-1], 0))
    return out.to(v.dtype).contiguous(), lse


def _measure(offsets: Tensor, rows: int) -> _Extent:
    starts, ends = row_bounds(offsets, rows)
    lengths = ends - starts
    # Not int(): that would ask for the number while the program is traced.
    longest = cast(int, torch.cat([lengths, lengths.new_full((1,), _SHORTEST)]).max().item())
    torch._check(longest >= _SHORTEST)
    return _Extent(starts, lengths, longest)


def _padded(x: Tensor, extent: _Extent, heads: int, dtype: torch.dtype) -> Tensor:
    """``[B, H, L, D]`` of packed ``[T, H_kv, D]``; padding is a row of zeros behind the packed ones."""
    place = torch.arange(extent.longest, device=x.device)
    index = torch.where(place < extent.lengths[:, None], extent.starts[:, None] + place, x.shape[0])
    rows = torch.cat([x.to(dtype), x.new_zeros((1, *x.shape[1:]), dtype=dtype)])
    padded = rows[index].transpose(1, 2)
    return padded if x.shape[1] == heads else padded.repeat_interleave(heads // x.shape[1], dim=1)


def _packed(x: Tensor, extent: _Extent, total: int, background: float) -> Tensor:
    """``[T, H, ...]`` of ``[B, H, L, ...]``; rows of no sequence hold ``background``."""
    starts, lengths, _ = extent
    row = torch.arange(total, device=x.device)
    sequence = torch.searchsorted(starts + lengths, row, right=True).clamp(max=starts.shape[0] - 1)
    place = row - starts[sequence]
    exists = (place >= 0) & (place < lengths[sequence])
    rows = x.transpose(1, 2)[sequence, place.clamp(0, x.shape[2] - 1)]
    return torch.where(exists.view(-1, *[1] * (rows.dim() - 1)), rows, background)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: Tensor | int, lengths_kv: Tensor, mask: str, names: tuple[str, ...],
    scale: float, out_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``out [B, H, L_q, Dv]`` and ``lse [B, H, L_q]``, which is 0 for element-wise heads."""
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    i = torch.arange(q.shape[2], device=q.device)[:, None]
    j = torch.arange(k.shape[2], device=q.device)
    len_q, len_kv = (x if isinstance(x, int) else x[:, None, None, None] for x in (lengths_q, lengths_kv))
    low, high = parse_mask(mask).key_range(i, len_q, len_kv)
    seen = (j >= low) & (j < high) & (j < len_kv)
    weights, sums = [], []
    for name, heads in _runs(names, q.shape[1]):
        part = scores[:, heads]
        if name == SOFTMAX:
            p, lse = _softmax(part, seen)
        else:
            p, lse = torch.where(seen, ELEMENTWISE[name].value(part), 0.0), torch.zeros_like(part[..., 0])
        weights.append(p)
        sums.append(lse)
    p, lse = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in (weights, sums))
    return torch.matmul(p, v) * out_scale, lse


def _softmax(scores: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and lse; a row that sees no key has weights 0 and lse -inf."""
    scores = torch.where(seen, scores, -torch.inf)
    top = scores.amax(dim=3, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    p = torch.exp(scores - top)
    total = p.sum(dim=3, keepdim=True)
    return p / torch.where(total == 0.0, 1.0, total), (top + total.log()).squeeze(3)


def _runs(names: tuple[str, ...], num_heads: int) -> list[tuple[str, slice]]:
    """The heads, as few slices of one activation each."""
    if len(names) == 1:
        return [(names[0], slice(0, num_heads))]
    runs = [list(run) for _, run in groupby(range(num_heads), key=names.__getitem__)]
    return [(names[run[0]], slice(run[0], run[-1] + 1)) for run in runs]
