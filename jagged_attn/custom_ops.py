"""The operators as PyTorch knows them: schemas, fakes, and the lazy step to a backend's kernels.

Three operators carry the library through autograd, ``torch.compile``, ``torch.export`` and fx:

- ``jagged_attn::attention``, forward of self, cross and broadcast-Q attention (``offsets_q`` is None for the last);
- ``jagged_attn::attention_backward``;
- ``jagged_attn::tile_table``, which makes a tile table inside a compiled graph.

``rotation.py`` adds ``jagged_attn::rotate``, for eager execution alone.

The static facts of a call travel as strings and numbers, so that a graph dump reads well and a saved graph needs no
object of ours. A backend's kernels are imported when an operator executes, never before.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .activations import SOFTMAX
from .backends.base import Geometry, new_gradients, new_outputs
from .masks import parse_mask
from .schedule.tiles import max_tiles
from .schedule.tiles import tile_table as build_tile_table
from .spec import AttentionSpec, Kind

_STATIC = "str mask, str activation, float scale, float out_scale, bool deterministic, str backend"
_JAGGED = f"Tensor? offsets_q, Tensor offsets_kv, Tensor[] tables, {_STATIC}"

library = torch.library.Library("jagged_attn", "DEF")
library.define(f"attention(Tensor q, Tensor k, Tensor v, {_JAGGED}) -> (Tensor, Tensor)")
library.define(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_JAGGED}) -> (Tensor, Tensor, Tensor)"
)
library.define(
    "tile_table(Tensor offsets, Tensor cost_offsets, SymInt total_rows, SymInt cost_rows, int block) -> Tensor"
)


def _outside_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with autocast off: its inputs are cast already, and what it accumulates must stay in fp32."""

    @wraps(kernel)
    def run(first: Tensor, *args: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return kernel(first, *args)
        with torch.autocast(first.device.type, enabled=False):
            return kernel(first, *args)

    return run


@lru_cache(maxsize=4096)
def _spec(
    kind: Kind,
    dtype: torch.dtype,
    heads: tuple[int, int, int, int],
    mask: str,
    activation: str,
    scale: float,
    out_scale: float,
    deterministic: bool,
) -> AttentionSpec:
    names = tuple(activation.split(","))
    return AttentionSpec(kind, dtype, *heads, parse_mask(mask), names, scale, out_scale, deterministic)


def spec_of(q: Tensor, v: Tensor, offsets_q: Tensor | None, offsets_kv: Tensor, *static: str | float) -> AttentionSpec:
    """The facts that an operator's arguments spell out; ``static`` are those after the tables, but for the backend."""
    kind: Kind = "broadcast_q" if offsets_q is None else "self" if offsets_q is offsets_kv else "cross"
    (_, heads, dim), (_, kv_heads, value_dim) = q.shape, v.shape
    return _spec(kind, q.dtype, (heads, kv_heads, dim, value_dim), *static)


@_outside_autocast
def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, geometry: Geometry, spec: AttentionSpec, backend: str
) -> tuple[Tensor, Tensor]:
    """What the operator ``attention`` executes, of the facts that its arguments spell out."""
    return dispatch.load(backend).forward(q, k, v, geometry, spec)


def _attention(
    q: Tensor, k: Tensor, v: Tensor,
    offsets_q: Tensor | None, offsets_kv: Tensor, tables: list[Tensor],
    mask: str, activation: str, scale: float, out_scale: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    spec = spec_of(q, v, offsets_q, offsets_kv, mask, activation, scale, out_scale, deterministic)
    return launch_forward(q, k, v, Geometry(offsets_q, offsets_kv, tuple(tables)), spec, backend)


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor,
    offsets_q: Tensor | None, offsets_kv: Tensor, tables: list[Tensor],
    mask: str, activation: str, scale: float, out_scale: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return new_outputs(q, v, Geometry(offsets_q, offsets_kv, ()), has_softmax=SOFTMAX in activation)


def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    offsets_q: Tensor | None, offsets_kv: Tensor, tables: list[Tensor],
    mask: str, activation: str, scale: float, out_scale: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    spec = spec_of(q, v, offsets_q, offsets_kv, mask, activation, scale, out_scale, deterministic)
    geometry = Geometry(offsets_q, offsets_kv, tuple(tables))
    return dispatch.load(backend).backward(dout, q, k, v, out, lse, geometry, spec)


def _attention_backward_fake(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    offsets_q: Tensor | None, offsets_kv: Tensor, tables: list[Tensor],
    mask: str, activation: str, scale: float, out_scale: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return new_gradients(q, k, v)


def _tile_table(offsets: Tensor, cost_offsets: Tensor, total_rows: int, cost_rows: int, block: int) -> Tensor:
    """One kernel on a GPU, where PyTorch's fifteen cost more than some of the attention that they prepare."""
    if offsets.is_cuda:
        from .backends._jit import tile_tables

        if offsets.numel() <= tile_tables.MAX_SEQUENCES:
            return tile_tables.tile_table(offsets, cost_offsets, total_rows, cost_rows, block)
    return build_tile_table(offsets, cost_offsets, total_rows, cost_rows, block)


def _tile_table_fake(offsets: Tensor, cost_offsets: Tensor, total_rows: int, cost_rows: int, block: int) -> Tensor:
    tiles = max_tiles(total_rows, torch.sym_max(offsets.shape[0] - 1, 0), block)
    return offsets.new_empty((tiles, 2), dtype=torch.int32)


attention_backward_kernel = _outside_autocast(_attention_backward)
for _name, _kernel, _fake in (
    ("attention", _attention, _attention_fake),
    ("attention_backward", attention_backward_kernel, _attention_backward_fake),
    ("tile_table", _tile_table, _tile_table_fake),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"jagged_attn::{_name}", _fake, lib=library)
