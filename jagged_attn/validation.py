"""The tensor contract of the public operations, stated once."""

import math

import torch
from torch import Tensor

from .layout import JaggedLayout
from .masks import BlockDiagonal, Full, Mask, SlidingWindow

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def as_layout(name: str, layout: object) -> JaggedLayout:
    """The layout that an argument gives, as a layout or as a plain offsets tensor."""
    if isinstance(layout, JaggedLayout):
        return layout
    if isinstance(layout, Tensor):
        return JaggedLayout(layout)
    raise TypeError(f"{name} must be a JaggedLayout or an offsets tensor, got {type(layout).__name__}.")


def check_kinds(q: Tensor, k: Tensor, v: Tensor, query_rows: str) -> None:
    """Check each of q, k and v by itself; messages call q's first dimension ``query_rows``."""
    shapes = (f"[{query_rows}, H, D]", "[T_kv, H_kv, D]", "[T_kv, H_kv, Dv]")
    for name, x, shape in zip("qkv", (q, k, v), shapes, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
        if len(x.shape) != 3:
            raise ValueError(f"{name} must have shape {shape}, got {list(x.shape)}.")
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, got {x.dtype}.")
        _, heads, dim = x.shape
        if heads < 1 or dim < 1:
            raise ValueError(f"{name} must have at least one head and one column, {shape}, got {list(x.shape)}.")
        if dim > 1 and x.stride(2) != 1:
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {x.stride()}; call {name}.contiguous()."
            )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q, k and v, each of the right kind, against each other."""
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}.")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}.")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have q's head dim D = {q.shape[2]}, got {k.shape[2]}.")
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(f"v must have k's rows and heads {list(k.shape[:2])}, got {list(v.shape[:2])}.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]}.")


def check_layouts(q: Tensor, k: Tensor, layout_q: JaggedLayout | None, layout_kv: JaggedLayout, mask: Mask) -> None:
    """Check the layouts against the tensors, each other and the mask; ``layout_q`` is None for broadcast-Q."""
    check_mask("mask", mask)
    is_self = layout_q is not None and layout_q.offsets is layout_kv.offsets
    for name, layout in (("layout_q", layout_q), ("layout_kv", layout_kv)):
        if layout is not None and layout.offsets.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got offsets on {layout.offsets.device}.")
    if layout_q is not None and layout_q.num_sequences != layout_kv.num_sequences:
        raise ValueError(
            f"layout_kv must have layout_q's {layout_q.num_sequences} sequences, got {layout_kv.num_sequences}."
        )
    if is_self and q.shape[0] != k.shape[0]:
        raise ValueError(
            f"k must have q's {q.shape[0]} rows when both have one layout, got {k.shape[0]}; pass layout_kv for others."
        )
    if isinstance(mask, BlockDiagonal) and not is_self:
        raise ValueError(f"mask must not be {mask} unless keys have the queries' layout (leave out layout_kv).")


def check_mask(name: str, mask: object) -> None:
    """Raise ``TypeError`` unless ``mask`` is of one of the kinds that there are."""
    if not isinstance(mask, (Full, SlidingWindow, BlockDiagonal)):
        raise TypeError(f"{name} must be Full(), Causal(), SlidingWindow(...) or BlockDiagonal(...), got {mask!r}.")


def check_flags(**flags: bool) -> None:
    """Raise ``TypeError`` unless each is True or False: of other objects almost all count as true, ``"no"`` too."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}.")


def check_number(name: str, number: float) -> float:
    """``number`` as a finite float."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"{name} must be a float, got {type(number).__name__}.")
    # Under torch.compile(dynamic=True) a number is a symbol; __float__ makes it the constant that it is to us.
    try:
        as_float = float(number).__float__()
    except OverflowError:
        raise ValueError(f"{name} must be finite as a float, got an int that is too large for one.") from None
    if not math.isfinite(as_float):
        raise ValueError(f"{name} must be finite, got {as_float}.")
    return as_float
