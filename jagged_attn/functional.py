"""The public operations: attention over jagged sequences, and the question which backend would run it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from operator import index
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import autograd, dispatch, validation
from .activations import SOFTMAX, normalize_activation
from .backends.base import Geometry, arch_of
from .errors import BackendReport
from .layout import JaggedLayout, derived
from .masks import Full, Mask, parse_mask
from .schedule.tiles import TableRequest
from .spec import AttentionSpec, Kind

_FULL = Full()


class _Static(NamedTuple):
    """The operator's static arguments, in its order."""

    mask: str
    activation: str
    scale: float
    out_scale: float
    deterministic: bool
    backend: str


class _Decision(NamedTuple):
    """What is settled of a call before it runs: the operator's arguments past the offsets, and what they spell out.

    A traced graph has no use for the last, and ``spec`` is ``None`` there.
    """

    tables: tuple[Tensor, ...]
    static: _Static
    spec: AttentionSpec | None


@lru_cache(maxsize=4096)
def _make_spec(
    kind: Kind, dtype: torch.dtype, heads: tuple[int, int, int, int], mask: str, activation: str | tuple[str, ...],
    scale: float, out_scale: float, deterministic: bool,
) -> AttentionSpec:  # fmt: skip
    names = normalize_activation(activation, heads[0])
    return AttentionSpec(kind, dtype, *heads, parse_mask(mask), names, scale, out_scale, deterministic)


@lru_cache(maxsize=4096)
def _make_plan(
    device: torch.device, backend: str, *facts: Any
) -> tuple[tuple[TableRequest, ...], tuple[Any, ...], AttentionSpec]:
    """What the static facts of a call decide: the tables that its backend wants, the fields of ``_Static``, spec."""
    spec, arch = _make_spec(*facts), arch_of(device)
    name = dispatch.choose(backend, spec, arch)
    requests = dispatch.capability(name).table_requests(spec, arch)
    activation = ",".join(spec.activation)
    return requests, (spec.mask.code, activation, spec.scale, spec.out_scale, spec.deterministic, name), spec


def _make_plan_constant(*arguments: Any) -> tuple[tuple[TableRequest, ...], tuple[Any, ...], None]:
    requests, static, _ = _make_plan(*arguments)
    return requests, static, None


# In a traced graph the plan is a constant: it depends on nothing but what dynamo guards on anyway. This is what
# torch.compiler.assume_constant_result sets, which would import all of dynamo when this library is imported.
_make_plan_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def prepare_tables(
    spec: AttentionSpec,
    backend: str,
    layout_q: JaggedLayout | None,
    layout_kv: JaggedLayout,
    rows_q: int,
    rows_kv: int,
) -> list[Tensor]:
    """Make the tables of a call ahead of it: with these layouts it will find them beside their offsets.

    Args:
        spec: the call's static facts.
        backend: as for the call.
        layout_q: of the queries; ``None`` for broadcast-Q.
        layout_kv: of keys and values.
        rows_q: rows that q will have.
        rows_kv: rows that k and v will have.

    Raises:
        UnsupportedError: no backend runs such a call.
    """
    if torch.are_deterministic_algorithms_enabled():
        spec = replace(spec, deterministic=True)
    offsets_kv = layout_kv.offsets
    arch = arch_of(offsets_kv.device)
    requests = dispatch.capability(dispatch.choose(backend, spec, arch)).table_requests(spec, arch)
    return _tables(requests, rows_q, rows_kv, None if layout_q is None else layout_q.offsets, offsets_kv)


def _tables(
    requests: tuple[TableRequest, ...], rows_q: int, rows_kv: int, offsets_q: Tensor | None, offsets_kv: Tensor
) -> list[Tensor]:
    """The tables that a backend asked for, kept beside the offsets; made in the graph when one is traced."""

    def build() -> list[Tensor]:
        sides = {"q": (offsets_q, rows_q), "kv": (offsets_kv, rows_kv)}
        tables: dict[TableRequest, Tensor] = {}
        for request in dict.fromkeys(requests):
            (rows, total_rows), (cost, cost_rows) = sides[request.rows], sides[request.cost]
            tables[request] = torch.ops.jagged_attn.tile_table(rows, cost, total_rows, cost_rows, request.block)
        return [tables[request] for request in requests]

    if not requests:
        return []
    if torch.compiler.is_compiling():
        return build()
    other = offsets_kv if offsets_q is None else offsets_q
    return derived(offsets_kv, other, ("tables", requests, rows_q, rows_kv), build)


def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


# Dynamo of torch 2.11 cannot trace what it calls, and after a break of the graph takes the facts of a call for symbols.
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast, if it is on for a tensor's kind of device."""
    if not torch._C._is_any_autocast_enabled():
        return None
    device_type = x.device.type
    is_on = _has_autocast(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the autocast dtype, if autocast is on for their device; float64 stays, as in PyTorch."""
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout_q: JaggedLayout | None, layout_kv: JaggedLayout, mask: Mask,
    activation: str | Sequence[str], scale: float | None, out_scale: float, deterministic: bool,
    return_lse: bool, backend: str,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    options = (mask, activation, scale, out_scale, deterministic, backend)
    offsets_q, offsets_kv = None if layout_q is None else layout_q.offsets, layout_kv.offsets
    is_compiling = torch.compiler.is_compiling()
    is_plain = not is_compiling and autograd.is_plain(q, k, v)
    if is_plain:
        q, k, v, decision = _recall(q, k, v, layout_q, layout_kv, options)
    else:
        if not is_compiling:
            autograd.refuse_tracing()
        q, k, v, decision = _decide(q, k, v, layout_q, layout_kv, *options)
    tables, static, spec = decision
    if return_lse is not False:
        validation.check_flags(return_lse=return_lse)
        if static.activation != SOFTMAX:
            raise ValueError(f"return_lse must be False unless every head is a softmax, got activation={activation!r}.")
    if is_compiling:
        out, lse = torch.ops.jagged_attn.attention(q, k, v, offsets_q, offsets_kv, tables, *static)
    else:
        geometry = Geometry(offsets_q, offsets_kv, tables)
        out, lse = autograd.attention(q, k, v, geometry, static, spec if is_plain else None)
    return (out, lse) if return_lse else out


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout_q: JaggedLayout | None, layout_kv: JaggedLayout, mask: Mask,
    activation: str | Sequence[str], scale: float | None, out_scale: float, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:  # fmt: skip
    """The inputs after autocast, and the arguments of ``_make_spec``; raises what the public docstrings list."""
    query_rows = "S" if layout_q is None else "T_q"
    validation.check_kinds(q, k, v, query_rows)
    q, k, v = _autocast(q, k, v)
    validation.check_tensors(q, k, v)
    validation.check_layouts(q, k, layout_q, layout_kv, mask)
    kind: Kind = "broadcast_q" if layout_q is None else "self" if layout_q.offsets is layout_kv.offsets else "cross"
    # operator.index, unlike int, makes a constant of a symbolic size under torch.compile(dynamic=True).
    heads = (index(q.shape[1]), index(k.shape[1]), index(q.shape[2]), index(v.shape[2]))
    scale = heads[2] ** -0.5 if scale is None else validation.check_number("scale", scale)
    out_scale = validation.check_number("out_scale", out_scale)
    if not isinstance(activation, str):
        names = normalize_activation(activation, heads[0])
        activation = names[0] if len(names) == 1 else names
    validation.check_flags(deterministic=deterministic)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    return q, k, v, (kind, q.dtype, heads, mask.code, activation, scale, out_scale, deterministic)


def _decide(
    q: Tensor, k: Tensor, v: Tensor, layout_q: JaggedLayout | None, layout_kv: JaggedLayout, mask: Mask,
    activation: str | Sequence[str], scale: float | None, out_scale: float, deterministic: bool, backend: str,
) -> tuple[Tensor, Tensor, Tensor, _Decision]:  # fmt: skip
    """The inputs after autocast, and the decision; raises what the public docstrings list, but for ``return_lse``."""
    q, k, v, facts = _check(q, k, v, layout_q, layout_kv, mask, activation, scale, out_scale, deterministic)
    dispatch.check_name(backend)
    make_plan = _make_plan_constant if torch.compiler.is_compiling() else _make_plan
    requests, static, spec = make_plan(q.device, backend, *facts)
    offsets_q = None if layout_q is None else layout_q.offsets
    tables = _tables(requests, q.shape[0], k.shape[0], offsets_q, layout_kv.offsets)
    return q, k, v, _Decision(tuple(tables), _Static(*static), spec)


def _recall(
    q: Tensor, k: Tensor, v: Tensor, layout_q: JaggedLayout | None, layout_kv: JaggedLayout, options: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor, _Decision]:
    """What ``_decide`` says of such a call on these offsets: a look into a table in place of all its checks."""
    _, _, scale, out_scale, deterministic, _ = options
    cast_dtype = autocast_dtype(q)
    key = (
        layout_q is None,
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device,
        cast_dtype,
        torch.are_deterministic_algorithms_enabled(),
        # 1, 1.0 and True are one key otherwise.
        type(scale), type(out_scale), type(deterministic), options,
    )  # fmt: skip
    offsets_kv = layout_kv.offsets
    other = offsets_kv if layout_q is None else layout_q.offsets
    decision = derived(offsets_kv, other, key, lambda: _decide(q, k, v, layout_q, layout_kv, *options)[3])
    if cast_dtype is not None:
        q, k, v = _autocast(q, k, v)
    return q, k, v, decision


@overload
def jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, layout_q: JaggedLayout | Tensor, layout_kv: JaggedLayout | Tensor | None = None, *,
    mask: Mask = ..., activation: str | Sequence[str] = ..., scale: float | None = ..., out_scale: float = ...,
    deterministic: bool = ..., return_lse: Literal[False] = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, layout_q: JaggedLayout | Tensor, layout_kv: JaggedLayout | Tensor | None = None, *,
    mask: Mask = ..., activation: str | Sequence[str] = ..., scale: float | None = ..., out_scale: float = ...,
    deterministic: bool = ..., return_lse: Literal[True], backend: str = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: JaggedLayout | Tensor,
    layout_kv: JaggedLayout | Tensor | None = None,
    *,
    mask: Mask = _FULL,
    activation: str | Sequence[str] = SOFTMAX,
    scale: float | None = None,
    out_scale: float = 1.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = dispatch.AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's queries to the same sequence's keys.

    For sequence b and each head: ``O_b = out_scale * act(scale * Q_b K_b^T) V_b`` over the pairs that ``mask`` allows.
    A softmax normalises each row over its allowed keys; an element-wise activation (GDPA) does not normalise.

    Args:
        q: ``[T_q, H, D]``; bfloat16, float16, float32, or float64 (``eager`` and ``reference``). Any strides whose last
            is 1, as for k and v.
        k: ``[T_kv, H_kv, D]``, q's dtype and device. ``H_kv`` divides H: query head h reads key head
            ``h // (H // H_kv)``.
        v: ``[T_kv, H_kv, Dv]``, likewise.
        layout_q: where the sequences of q begin and end: a layout, or its offsets tensor ``[B + 1]``. Rows past the
            last offset belong to no sequence; their output and gradients are 0.
        layout_kv: the same for k and v; ``None``: they have the queries' layout (self-attention).
        mask: ``Full()``, ``Causal()``, ``SlidingWindow(left, right)`` or ``BlockDiagonal(size)``.
        activation: ``"softmax"``, the name of an element-wise function (``jagged_attn.activations.ELEMENTWISE``), or
            a tuple with one name for each head.
        scale: factor of the scores; ``None`` means ``D ** -0.5``, for every activation.
        out_scale: factor of the output.
        deterministic: make gradients repeatable bit for bit on one device;
            ``torch.use_deterministic_algorithms(True)`` asks for the same.
        return_lse: also return the rows' log-sum-exp; every head must be a softmax.
        backend: ``"auto"``, or a name, which is run or refused, never replaced. See ``explain_backend``.

    Returns:
        ``[T_q, H, Dv]`` in v's dtype (the autocast dtype under autocast), contiguous; with ``return_lse=True`` also the
        natural-log ``lse``, ``[T_q, H]``, fp32 (float64 for float64 inputs), -inf for rows without a key, not
        differentiable.

    Raises:
        TypeError: an argument is the wrong kind of object.
        ValueError: a shape, dtype, device, stride or number breaks the contract above; the message names the argument.
        UnsupportedError: no backend runs this valid call; it carries each backend's reason. Also inside the transforms
            of ``torch.func``, forward-mode differentiation and ``torch.jit.trace``.

    Numerics: scores and sums accumulate in fp32 (float64 for float64 inputs). A row without an allowed key gives 0. One
    sequence never affects another, not even by NaN. No call waits for the device. Not twice differentiable.

    Source: Vaswani et al., arXiv 1706.03762, equation 1; for element-wise activations, PyTorch's posts on GDPA.

    Example:
        >>> layout = JaggedLayout.from_lengths(torch.tensor([3, 0, 2]))
        >>> q, k, v = torch.randn(3, 5, 4, 8).unbind(0)  # five rows in all, H = 4, D = 8
        >>> jagged_attention(q, k, v, layout, mask=Causal()).shape
        torch.Size([5, 4, 8])
    """
    layout_q = validation.as_layout("layout_q", layout_q)
    layout_kv = layout_q if layout_kv is None else validation.as_layout("layout_kv", layout_kv)
    return _attend(q, k, v, layout_q, layout_kv, mask, activation, scale, out_scale, deterministic, return_lse, backend)


@overload
def broadcast_q_attention(
    q: Tensor, k: Tensor, v: Tensor, layout_kv: JaggedLayout | Tensor, *,
    mask: Mask = ..., activation: str | Sequence[str] = ..., scale: float | None = ..., out_scale: float = ...,
    deterministic: bool = ..., return_lse: Literal[False] = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def broadcast_q_attention(
    q: Tensor, k: Tensor, v: Tensor, layout_kv: JaggedLayout | Tensor, *,
    mask: Mask = ..., activation: str | Sequence[str] = ..., scale: float | None = ..., out_scale: float = ...,
    deterministic: bool = ..., return_lse: Literal[True], backend: str = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def broadcast_q_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_kv: JaggedLayout | Tensor,
    *,
    mask: Mask = _FULL,
    activation: str | Sequence[str] = SOFTMAX,
    scale: float | None = None,
    out_scale: float = 1.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = dispatch.AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one set of queries, shared by the batch, to every sequence's keys.

    ``O[b] = out_scale * act(scale * Q K_b^T) V_b``. The gradient of Q is summed over the batch in fp32; neither the
    queries nor their gradient is ever materialised for each sequence, which is what the operation is for.

    Args:
        q: ``[S, H, D]``, the shared queries: learned seeds or candidate items.
        k: ``[T_kv, H_kv, D]``.
        v: ``[T_kv, H_kv, Dv]``.
        layout_kv: where the sequences of k and v begin and end.
        mask: as for ``jagged_attention``, with S queries in each sequence; not ``BlockDiagonal``.
        activation: as for ``jagged_attention``.
        scale: as for ``jagged_attention``.
        out_scale: as for ``jagged_attention``.
        deterministic: as for ``jagged_attention``.
        return_lse: as for ``jagged_attention``.
        backend: as for ``jagged_attention``.

    Returns:
        ``[B, S, H, Dv]``, contiguous; a sequence without keys gives 0 and adds nothing to Q's gradient. With
        ``return_lse=True`` also ``lse``, ``[B, S, H]``.

    Raises:
        TypeError: as ``jagged_attention``.
        ValueError: as ``jagged_attention``.
        UnsupportedError: as ``jagged_attention``.

    Source: the pooling by multi-head attention of Lee et al., arXiv 1810.00825, section 3.2.

    Example:
        >>> layout = JaggedLayout.from_lengths(torch.tensor([3, 0, 2]))
        >>> seeds, history = torch.randn(7, 4, 8), torch.randn(5, 4, 8)
        >>> broadcast_q_attention(seeds, history, history, layout).shape
        torch.Size([3, 7, 4, 8])
    """
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
    activation: str | Sequence[str] = SOFTMAX,
    scale: float | None = None,
    out_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[BackendReport, ...]:
    """What every backend says of a call, in the order in which ``backend="auto"`` asks them.

    Args:
        q: as for ``jagged_attention``; for ``broadcast_q_attention`` pass the shared queries and ``layout_q=None``.
        k: as for the call.
        v: as for the call.
        layout_q: as for the call; ``None`` asks about ``broadcast_q_attention``.
        layout_kv: as for the call.
        mask: as for the call.
        activation: as for the call.
        scale: as for the call.
        out_scale: as for the call.
        deterministic: as for the call.

    Returns:
        A ``BackendReport`` for each backend: its name, and why it refuses, or ``None`` if it takes the call. It does
        not raise for a refusal, only for a call that is wrong by itself.

    Raises:
        TypeError: as the call itself.
        ValueError: as the call itself.

    Example:
        >>> layout = JaggedLayout.uniform(2, 3)
        >>> q = torch.randn(6, 4, 8, dtype=torch.float64)
        >>> {report.backend: report.supported for report in explain_backend(q, q, q, layout)}["eager"]
        True
    """
    if layout_q is not None:
        layout_q = validation.as_layout("layout_q", layout_q)
    layout_kv = validation.as_layout("layout_kv", layout_q if layout_kv is None else layout_kv)
    q, _, _, facts = _check(q, k, v, layout_q, layout_kv, mask, activation, scale, out_scale, deterministic)
    return dispatch.explain(_make_spec(*facts), arch_of(q.device))
