"""The public operations: attention over jagged sequences, and the question which backend would run it."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import autograd as _register_autograd  # noqa: F401  the operators exist and are differentiable from here on
from . import dispatch, validation
from .activations import SOFTMAX, normalize_activation
from .errors import BackendReport
from .layout import JaggedLayout, derived
from .masks import Full, Mask, parse_mask
from .schedule.tiles import TableRequest
from .spec import AttentionSpec, Kind

_FULL = Full()


class _Plan(NamedTuple):
    """What the static facts of a call decide."""

    backend: str
    tables: tuple[TableRequest, ...]
    activation: str
    has_elementwise: bool


@lru_cache(maxsize=4096)
def _make_spec(
    kind: Kind, dtype: torch.dtype, heads: tuple[int, int, int, int], mask: str, activation: str | tuple[str, ...],
    scale: float, out_scale: float, deterministic: bool,
) -> AttentionSpec:  # fmt: skip
    names = normalize_activation(activation, heads[0])
    return AttentionSpec(kind, dtype, *heads, parse_mask(mask), names, scale, out_scale, deterministic)


@lru_cache(maxsize=4096)
def _make_plan(device: torch.device, backend: str, *facts: Any) -> _Plan:
    dispatch.check_name(backend)
    spec, arch = _make_spec(*facts), dispatch.arch_of(device)
    name = dispatch.choose(backend, spec, arch)
    tables = dispatch.capability(name).table_requests(spec, arch)
    return _Plan(name, tables, ",".join(spec.activation), spec.activation != (SOFTMAX,))


# In a traced graph the plan is a constant: it depends on nothing but what dynamo guards on anyway.
_make_plan_constant = torch.compiler.assume_constant_result(lambda *facts: tuple(_make_plan(*facts)))


def _tables(
    requests: tuple[TableRequest, ...], q: Tensor, k: Tensor, offsets_q: Tensor | None, offsets_kv: Tensor
) -> list[Tensor]:
    sides = {"q": (offsets_q, q.shape[0]), "kv": (offsets_kv, k.shape[0])}
    tables = []
    for request in requests:
        rows, total_rows = cast(tuple[Tensor, int], sides[request.rows])
        cost, cost_rows = cast(tuple[Tensor, int], sides[request.cost])

        def build(rows=rows, cost=cost, total_rows=total_rows, cost_rows=cost_rows, block=request.block):  # type: ignore[no-untyped-def]
            return torch.ops.jagged_attn.tile_table(rows, cost, total_rows, cost_rows, block)

        if torch.compiler.is_compiling():
            tables.append(build())
        else:
            tables.append(derived(rows, cost, ("tile_table", request.block, total_rows, cost_rows), build))
    return tables


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype, if autocast is on for their device; float64 stays, as in PyTorch."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout_q: JaggedLayout | None, layout_kv: JaggedLayout, mask: Mask,
    activation: str | Sequence[str], scale: float | None, out_scale: float, deterministic: bool,
    return_lse: bool, backend: str,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v, facts = _check(q, k, v, layout_q, layout_kv, mask, activation, scale, out_scale, deterministic)
    make_plan = _make_plan_constant if torch.compiler.is_compiling() else _make_plan
    plan = _Plan(*make_plan(q.device, backend, *facts))
    if return_lse and plan.has_elementwise:
        raise ValueError(f"return_lse must be False unless every head is a softmax, got activation={activation!r}.")
    offsets_q = None if layout_q is None else layout_q.offsets
    tables = _tables(plan.tables, q, k, offsets_q, layout_kv.offsets)
    _, _, _, mask_code, _, scale_, out_scale_, deterministic_ = facts
    out, lse = torch.ops.jagged_attn.attention(
        q, k, v, offsets_q, layout_kv.offsets, tables,
        mask_code, plan.activation, scale_, out_scale_, deterministic_, plan.backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout_q: JaggedLayout | None, layout_kv: JaggedLayout, mask: Mask,
    activation: str | Sequence[str], scale: float | None, out_scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:  # fmt: skip
    """The inputs after autocast, and the arguments of ``_make_spec``; raises what the public docstrings list."""
    q, k, v = _autocast(q, k, v)
    validation.check_tensors(q, k, v, "S" if layout_q is None else "T_q")
    validation.check_layouts(q, k, layout_q, layout_kv, mask)
    kind: Kind = "broadcast_q" if layout_q is None else "self" if layout_q.offsets is layout_kv.offsets else "cross"
    heads = (int(q.shape[1]), int(k.shape[1]), int(q.shape[2]), int(v.shape[2]))
    scale = heads[2] ** -0.5 if scale is None else validation.check_scale("scale", scale)
    out_scale = validation.check_scale("out_scale", out_scale)
    if not isinstance(activation, str):
        activation = tuple(activation)
    deterministic = bool(deterministic) or torch.are_deterministic_algorithms_enabled()
    return q, k, v, (kind, q.dtype, heads, mask.code, activation, scale, out_scale, deterministic)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: JaggedLayout | Tensor,
    layout_kv: JaggedLayout | Tensor | None = None,
    *,
    mask: Mask = _FULL,
    activation: str | Sequence[str] = "softmax",
    scale: float | None = None,
    out_scale: float = 1.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    layout_q = validation.as_layout("layout_q", layout_q)
    layout_kv = layout_q if layout_kv is None else validation.as_layout("layout_kv", layout_kv)
    return _attend(q, k, v, layout_q, layout_kv, mask, activation, scale, out_scale, deterministic, return_lse, backend)


def broadcast_q_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_kv: JaggedLayout | Tensor,
    *,
    mask: Mask = _FULL,
    activation: str | Sequence[str] = "softmax",
    scale: float | None = None,
    out_scale: float = 1.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    layout_kv = validation.as_layout("layout_kv", layout_kv)
    return _attend(q, k, v, None, layout_kv, mask, activation, scale, out_scale, deterministic, return_lse, backend)


def explain_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: JaggedLayout | Tensor | None,
    layout_kv: JaggedLayout | Tensor | None = None,
    *,
    mask: Mask = _FULL,
    activation: str | Sequence[str] = "softmax",
    scale: float | None = None,
    out_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[BackendReport, ...]:
    layouts = [
        None if x is None else validation.as_layout(n, x) for n, x in (("layout_q", layout_q), ("layout_kv", layout_kv))
    ]
    if layouts[1] is None:
        layouts[1] = layouts[0]
    if layouts[1] is None:
        raise TypeError("layout_kv must be given when layout_q is None (broadcast-Q).")
    q, _, _, facts = _check(q, k, v, layouts[0], layouts[1], mask, activation, scale, out_scale, deterministic)
    return dispatch.explain(_make_spec(*facts), dispatch.arch_of(q.device))
