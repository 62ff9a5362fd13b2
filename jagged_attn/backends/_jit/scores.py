# mypy: allow-untyped-defs
"""What happens to a score: the mask as ranges, and the activations with their derivatives.

A kernel gets the mask as one constant, its ``Mask.code``, and the activations as another, their names joined by commas:
one for all heads, or one a head. Both ends of a mask's ranges grow with the row, so the range of a tile follows from
its first and last row.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
# 2 sqrt(2 / pi): gelu_tanh(x) = x sigmoid(2 a (x + b x^3)).
_GELU_2A = tl.constexpr(1.5957691216057308)
_GELU_B = tl.constexpr(0.044715)


@triton.constexpr_function
def mask_kind(mask):
    """``"full"``, ``"window"`` or ``"block"``."""
    return mask.split(":")[0]


@triton.constexpr_function
def mask_size(mask, field):
    """A field of the code after the kind: left and right of a window, or a block's size; -1 for an open side."""
    text = mask.split(":")[1 + field]
    return -1 if text == "-" else int(text)


@triton.constexpr_function
def mask_opens(mask, side):
    """Whether all ranges begin with the sequence: those of keys (side 0), those of queries (side 1)."""
    kind, *fields = mask.split(":")
    return kind == "full" or (kind == "window" and fields[side] == "-")


@triton.constexpr_function
def mask_is_bottom_right(mask):
    """Whether a window is anchored at the ends of the sequences."""
    return mask.endswith(":bottom_right")


@triton.constexpr_function
def num_activations(acts):
    """How many distinct activations the heads have."""
    return len(set(acts.split(",")))


@triton.constexpr_function
def activation_name(acts, a):
    """The a-th of the distinct activations."""
    return list(dict.fromkeys(acts.split(",")))[a]


@triton.constexpr_function
def num_heads_named(acts):
    """Heads whose activation is named; 1 if all have the same."""
    return len(acts.split(","))


@triton.constexpr_function
def activation_index(acts, head):
    """Which of the distinct activations a head has."""
    names = acts.split(",")
    return list(dict.fromkeys(names)).index(names[head])


@triton.constexpr_function
def has_softmax(acts):
    """Whether any head is a softmax."""
    return "softmax" in acts.split(",")


@triton.jit
def activation_of(head, ACTS: tl.constexpr):
    """Which of the call's distinct activations ``head`` has."""
    chosen = head * 0
    for h in tl.static_range(num_heads_named(ACTS)):
        chosen = tl.where(head == h, activation_index(ACTS, h), chosen)
    return chosen


@triton.jit
def key_range(i, len_q, len_kv, MASK: tl.constexpr):
    """The keys ``[lo, hi)`` that query ``i`` sees, within ``[0, len_kv]``."""
    lo = i * 0
    hi = i * 0 + len_kv
    if mask_kind(MASK) == "window":
        own = i
        if mask_is_bottom_right(MASK):
            own = i + (len_kv - len_q)
        if mask_size(MASK, 0) >= 0:
            lo = own - mask_size(MASK, 0)
        if mask_size(MASK, 1) >= 0:
            hi = own + mask_size(MASK, 1) + 1
    if mask_kind(MASK) == "block":
        lo = i // mask_size(MASK, 0) * mask_size(MASK, 0)
        hi = lo + mask_size(MASK, 0)
    return tl.minimum(tl.maximum(lo, 0), len_kv), tl.minimum(tl.maximum(hi, 0), len_kv)


@triton.jit
def query_range(j, len_q, len_kv, MASK: tl.constexpr):
    """The queries ``[lo, hi)`` that see key ``j``, within ``[0, len_q]``: ``key_range`` read the other way round."""
    lo = j * 0
    hi = j * 0 + len_q
    if mask_kind(MASK) == "window":
        own = j
        if mask_is_bottom_right(MASK):
            own = j - (len_kv - len_q)
        if mask_size(MASK, 1) >= 0:
            lo = own - mask_size(MASK, 1)
        if mask_size(MASK, 0) >= 0:
            hi = own + mask_size(MASK, 0) + 1
    if mask_kind(MASK) == "block":
        lo = j // mask_size(MASK, 0) * mask_size(MASK, 0)
        hi = lo + mask_size(MASK, 0)
    return tl.minimum(tl.maximum(lo, 0), len_q), tl.minimum(tl.maximum(hi, 0), len_q)


@triton.jit
def pairs_allowed(index, lo, hi, length, MASK: tl.constexpr):
    """Which pairs the mask allows, where the ``index`` on one side must lie in the other side's ranges ``[lo, hi)``.

    All of these broadcast against the scores. Without a mask the ranges are the whole of ``length``: one comparison,
    and no registers for the ranges.
    """
    if mask_kind(MASK) == "full":
        return index < length
    else:
        return (lo <= index) & (index < hi)


@triton.jit
def split_range(lo_first, hi_first, lo_last, hi_last, BLOCK: tl.constexpr):
    """Cut what a tile sees into blocks that need the mask and blocks that do not.

    Args:
        lo_first: range of the tile's first row, from here
        hi_first: to here.
        lo_last: range of its last row, from here
        hi_last: to here.
        BLOCK: rows of a block.

    Returns:
        ``begin, main_begin, main_end, end``: blocks of ``[begin, main_begin)`` and ``[main_end, end)`` need the mask,
        those of ``[main_begin, main_end)`` are allowed as a whole. All but ``end`` are multiples of BLOCK apart.
    """
    begin = lo_first // BLOCK * BLOCK
    main_begin = tl.maximum((lo_last + BLOCK - 1) // BLOCK * BLOCK, begin)
    main_end = tl.maximum(hi_first // BLOCK * BLOCK, main_begin)
    return begin, main_begin, main_end, hi_last


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def _hardware_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fast_sigmoid(x, FAST_TANH: tl.constexpr):
    """``(1 + tanh(x / 2)) / 2`` with the hardware's tanh."""
    if FAST_TANH:
        return 0.5 * _hardware_tanh(0.5 * x) + 0.5
    else:
        return _sigmoid(x)


@triton.jit
def _gate(x, ACT: tl.constexpr, FAST_TANH: tl.constexpr):
    """The g of the activations ``x g(x)``, and the slope of the g's argument where g is a sigmoid."""
    if ACT == "silu":
        return _sigmoid(x), 1.0
    elif ACT == "fast_silu":
        return _fast_sigmoid(x, FAST_TANH), 1.0
    else:
        inner = x * _GELU_2A * (1.0 + x * x * _GELU_B)
        slope = (1.0 + x * x * (3.0 * _GELU_B)) * _GELU_2A
        if ACT == "fast_gelu":
            return _fast_sigmoid(inner, FAST_TANH), slope
        else:
            return _sigmoid(inner), slope


@triton.jit
def activate(x, ACT: tl.constexpr, FAST_TANH: tl.constexpr):
    """An element-wise activation; the formulas are those of ``jagged_attn.activations``."""
    if ACT == "identity":
        return x
    elif ACT == "relu":
        return tl.maximum(x, 0.0)
    elif ACT == "relu_square":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    elif ACT == "leaky_relu":
        return tl.where(x > 0.0, x, 0.01 * x)
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.math.erf(x * _SQRT_HALF))
    elif ACT == "hardswish":
        return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        gate, _ = _gate(x, ACT, FAST_TANH)
        return x * gate


@triton.jit
def activate_product(s, scale, ACT: tl.constexpr, FAST_TANH: tl.constexpr):
    """``activate(s * scale)``; the fast ones with the scale folded into their constants, three operations fewer."""
    if FAST_TANH and ACT == "fast_gelu":
        half = s * (0.5 * scale)
        linear = scale * (0.5 * _GELU_2A)
        return half * _hardware_tanh(s * (linear + s * s * (linear * scale * scale * _GELU_B))) + half
    elif FAST_TANH and ACT == "fast_silu":
        half = s * (0.5 * scale)
        return half * _hardware_tanh(half) + half
    else:
        return activate(s * scale, ACT, FAST_TANH)


@triton.constexpr_function
def leaves_factor_out(act, dtype):
    """Whether weights take an operation fewer without a factor, and cannot overflow without it: in bfloat16."""
    return act == "fast_gelu" and dtype == tl.bfloat16


@triton.jit
def activate_but_factor(s, scale):
    """``activate_product`` of ``fast_gelu``, divided by ``scale / 2``."""
    linear = scale * (0.5 * _GELU_2A)
    return s * _hardware_tanh(s * (linear + s * s * (linear * scale * scale * _GELU_B))) + s


@triton.jit
def derivative(x, ACT: tl.constexpr, FAST_TANH: tl.constexpr):
    """The derivative of ``activate``; at a kink, that of the left side."""
    if ACT == "identity":
        return tl.full(x.shape, 1.0, tl.float32)
    elif ACT == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    elif ACT == "relu_square":
        return 2.0 * tl.maximum(x, 0.0)
    elif ACT == "leaky_relu":
        return tl.where(x > 0.0, 1.0, 0.01)
    elif ACT == "gelu":
        cdf = 0.5 * (1.0 + tl.math.erf(x * _SQRT_HALF))
        return cdf + x * _INV_SQRT_2PI * tl.exp2(x * x * (-0.5 * LOG2E))
    elif ACT == "hardswish":
        return tl.where(x >= 3.0, 1.0, tl.where(x <= -3.0, 0.0, x * (1.0 / 3.0) + 0.5))
    else:
        gate, slope = _gate(x, ACT, FAST_TANH)
        return gate + x * gate * (1.0 - gate) * slope
