"""Rotary embedding of positions and time gaps (ROTE) over packed rows, and the self-attention that uses it."""

from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..angles import Angles, Combine, Gap, bounds_of_rows, rotation_of
from ..functional import jagged_attention
from ..jagged_tensor import Jagged, check_jagged, is_jagged, layout_of, num_sequences_of, with_values
from ..masks import Full, Mask
from ..rotation import rotate_heads, split_rotated
from ..validation import check_flags, check_number
from .options import AttentionOptions, Heads
from .projections import InProjection, OutProjection, is_bare

_FULL = Full()
SECONDS_A_DAY = 86_400.0


class RotaryTemporalEmbedding(nn.Module):
    """Angles by which queries and keys are rotated, from each row's position and time gap; no parameters.

    Row t of a sequence, with timestamp ``s_t`` and frequencies ``ω_j = base^(-2j / D)``, ``j = 0 .. D/2 - 1``, gets::

        τ_t  = log(1 + gap_t / time_scale)
        θ_tj = (t + τ_t) ω_j                             combine="sum"
        θ_tj = t ω_j for j < D/4, τ_t ω_(j - D/4) else   combine="split"
        θ_tj = t ω_j                                     without timestamps

    ``rotate`` then turns each pair of columns ``(j, j + D/2)`` of q and k by ``θ_tj``.

    Args:
        head_dim: D, even; a multiple of 4 with ``combine="split"``.
        base: of the frequencies.
        time_scale: the gap at which the logarithm begins to bend, in the unit of the timestamps; a day in seconds.
        gap: ``"previous"``: to the event before, 0 for a sequence's first; ``"to_last"``: to the sequence's last event.
        combine: how positions and gaps share the frequencies. Sources say that they are combined, not how: the
            default is ours.

    Raises:
        TypeError: ``head_dim`` is not an int, or ``base`` or ``time_scale`` not a number.
        ValueError: ``head_dim`` is not a positive even number (or multiple of 4), ``base`` or ``time_scale`` is not a
            positive number, or ``gap`` or ``combine`` is not known.

    Source: Su et al., arXiv 2104.09864, for the rotation; readings of arXiv 2602.10016 for the logarithm of the gap,
    the scale and the base; one reading for the gap to the event before.

    Example:
        >>> from torchrec import JaggedTensor
        >>> x = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> RotaryTemporalEmbedding(head_dim=4)(x, torch.tensor([10, 70, 5, 5, 900])).shape
        torch.Size([2, 5, 2])
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10_000.0,
        time_scale: float = SECONDS_A_DAY,
        gap: Gap = "previous",
        combine: Combine = "sum",
    ) -> None:
        super().__init__()
        for name, value, known in (("gap", gap, get_args(Gap)), ("combine", combine, get_args(Combine))):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
        if not isinstance(head_dim, int) or isinstance(head_dim, bool):
            raise TypeError(f"head_dim must be an int, got {head_dim!r}.")
        divisor = 4 if combine == "split" else 2
        if head_dim < 1 or head_dim % divisor:
            raise ValueError(f"head_dim must be a positive multiple of {divisor}, got {head_dim}.")
        self.head_dim, self.base, self.time_scale = (
            head_dim,
            _positive("base", base),
            _positive("time_scale", time_scale),
        )
        self.gap: Gap = gap
        self.combine: Combine = combine

    def forward(self, x: Jagged, timestamps: Jagged | Tensor | None = None) -> Tensor:
        """Cosines and sines of the angles; once for all layers and heads of a stack, and on a GPU by one kernel.

        Args:
            x: a jagged tensor; its layout counts, and its values' dtype and device.
            timestamps: ``[T]``, one a row of ``x``, int32, int64, float32 or float64, finite and ascending in each
                sequence; or a jagged tensor of such values in the layout of ``x``. Differences are taken in
                int64 or in their own floating dtype: give integers or float64 for seconds since 1970.

        Returns:
            ``[2, T, D/2]``, fp32 (float64 for float64 values).

        Raises:
            TypeError: ``x`` is not jagged, or the timestamps are not a tensor.
            ValueError: the timestamps' shape, dtype, device or number of sequences is wrong. On a CPU also when they
                are not finite, descend in a sequence or have other offsets than ``x``; on other devices looking would
                wait (``validate_timestamps_sync`` does), and a negative gap counts as 0.
        """
        return _rotation(x, timestamps, self.head_dim, self.base, self.time_scale, self.gap, self.combine)

    def extra_repr(self) -> str:
        """Sizes and options."""
        return (
            f"head_dim={self.head_dim}, base={self.base}, time_scale={self.time_scale}, gap={self.gap!r}, "
            f"combine={self.combine!r}"
        )


def _positive(name: str, number: float) -> float:
    number = check_number(name, number)
    if number <= 0:
        raise ValueError(f"{name} must be a positive number, got {number}.")
    return number


def validate_timestamps_sync(x: Jagged, timestamps: Jagged | Tensor) -> None:
    """Check what ``RotaryTemporalEmbedding`` wants of timestamps, their values included; waits for the device.

    Args:
        x: a jagged tensor.
        timestamps: as for ``RotaryTemporalEmbedding``.

    Raises:
        TypeError: ``x`` is not jagged, or the timestamps are not a tensor.
        ValueError: the timestamps' shape, dtype, device or layout is wrong, or they are not finite or descend within a
            sequence.
    """
    check_jagged("x", x)
    timestamps = _timestamps(timestamps, x, may_read=True)
    _check_values(timestamps, *bounds_of_rows(layout_of(x).offsets, timestamps.shape[0]))


def _check_values(timestamps: Tensor, starts: Tensor, ends: Tensor) -> None:
    if not timestamps.isfinite().all():
        row = int((~timestamps.isfinite()).nonzero()[0])
        raise ValueError(f"timestamps must be finite, got {timestamps[row].item()} in row {row}.")
    index = torch.arange(timestamps.shape[0], device=timestamps.device)
    follows = ((index > starts) & (index < ends))[1:]
    late = (follows & (timestamps[1:] < timestamps[:-1])).nonzero()
    if late.numel():
        row = int(late[0]) + 1
        raise ValueError(
            f"timestamps must ascend in each sequence, got {timestamps[row].item()} after "
            f"{timestamps[row - 1].item()} in row {row}."
        )


@torch.fx.wrap
def _rotation(
    x: Any, timestamps: Any, head_dim: int, base: float, time_scale: float, gap: Gap, combine: Combine
) -> Tensor:
    check_jagged("x", x)
    values, offsets, bounds = x.values(), layout_of(x).offsets, None
    if timestamps is not None:
        may_read = values.device.type == "cpu" and not torch.compiler.is_compiling()
        timestamps = _timestamps(timestamps, x, may_read)
        if may_read:
            bounds = bounds_of_rows(offsets, values.shape[0])
            _check_values(timestamps, *bounds)
    return rotation_of(values, offsets, timestamps, Angles(head_dim, base, time_scale, gap, combine), bounds)


def _timestamps(timestamps: Any, x: Any, may_read: bool) -> Tensor:
    """``[T]``, checked, but for its values; the offsets of jagged ones are compared with those of x if ``may_read``."""
    values = x.values()
    if is_jagged(timestamps):
        _check_layout(timestamps, x, may_read)
        timestamps = timestamps.values()
    if not isinstance(timestamps, Tensor):
        raise TypeError(f"timestamps must be a tensor or a torchrec.JaggedTensor, got {type(timestamps).__name__}.")
    if timestamps.shape != values.shape[:1]:
        raise ValueError(
            f"timestamps must have shape [{values.shape[0]}], one a row of x, got {list(timestamps.shape)}."
        )
    if timestamps.dtype not in (torch.int32, torch.int64, torch.float32, torch.float64):
        raise ValueError(f"timestamps must be int32, int64, float32 or float64, got {timestamps.dtype}.")
    if timestamps.device != values.device:
        raise ValueError(f"timestamps must be on the device of x, {values.device}, got {timestamps.device}.")
    return timestamps


def _check_layout(timestamps: Any, x: Any, may_read: bool) -> None:
    is_nested = isinstance(timestamps, Tensor)  # [B, *], which check_jagged takes for rows without columns
    if not is_nested:
        check_jagged("timestamps", timestamps)
    expected, given = num_sequences_of(x), num_sequences_of(timestamps)
    if given != expected:
        raise ValueError(f"timestamps must have the {expected} sequences of x, got {given}.")
    device = x.values().device
    if not may_read or timestamps.values().device != device:
        return
    offsets = timestamps.offsets() if is_nested else layout_of(timestamps).offsets
    other = (offsets != layout_of(x).offsets).nonzero()
    if other.numel():
        b = int(other[0])
        raise ValueError(
            f"timestamps must have the offsets of x, got offsets[{b}] = {int(offsets[b])} in place of "
            f"{int(layout_of(x).offsets[b])}."
        )


def rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair of columns ``(j, j + D/2)`` of every head by the row's angle ``θ_tj``.

    ``(a, b) → (a cos θ - b sin θ, a sin θ + b cos θ)``, computed in the dtype of ``rotation`` and rounded once. One
    kernel on a GPU with Triton, for fp32, bf16 and fp16 heads and an fp32 rotation without a gradient; under
    ``torch.compile`` the formula, which Inductor fuses. Differentiable any number of times, and usable in a module that
    ``torch.fx`` traces.

    Args:
        heads: ``[T, H, D]``, D even.
        rotation: ``[2, T, D/2]``, from ``RotaryTemporalEmbedding``.

    Returns:
        ``[T, H, D]`` in the dtype of ``heads``.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: a shape or device is wrong, D is odd, or ``rotation`` is not floating.
    """
    return _rotate(heads, rotation)


@torch.fx.wrap
def _rotate(heads: Tensor, rotation: Tensor) -> Tensor:
    _check_rotation(heads, rotation)
    return rotate_heads(heads, rotation)


def _check_rotation(heads: Any, rotation: Any) -> None:
    for name, x in (("heads", heads), ("rotation", rotation)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating, got {x.dtype}.")
    if heads.dim() != 3 or heads.shape[2] % 2:
        raise ValueError(f"heads must have shape [T, H, D] with an even D, got {list(heads.shape)}.")
    rows, _, dim = heads.shape
    if rotation.shape != (2, rows, dim // 2):
        raise ValueError(f"rotation must have shape [2, {rows}, {dim // 2}], got {list(rotation.shape)}.")
    if rotation.device != heads.device:
        raise ValueError(f"rotation must be on the device of heads, {heads.device}, got {rotation.device}.")


class TemporalSelfAttention(nn.Module):
    """Self-attention whose queries and keys are rotated by ``RotaryTemporalEmbedding``; softmax, scale ``D ** -0.5``.

    For each sequence and head, with ``R_t`` the rotation of row t::

        o_t = Σ_j softmax_j(D^-½ (R_t q_t)·(R_j k_j)) v_j       over the rows j that the mask allows
        out = concat_h(o) W_outᵀ + b_out

    Args:
        embed_dim: E.
        num_heads: H.
        mask: ``SlidingWindow(w, w)`` for the windowed layers of Kunlun, ``BlockDiagonal(64)`` for block attention.
        rotate_values: rotate ``v_j`` by ``R_j`` too. That block attention may do so is public, its exact form is not:
            here the output is not rotated back, and the default False is ours.
        bias: whether the projections have biases.
        backend: which backend runs the attention.
        device: where the parameters are made; ``"meta"`` makes none until ``to_empty`` and ``reset_parameters``.
        dtype: of the parameters.

    Attributes:
        in_proj: ``InProjection``, one weight ``[3 E, E]``.
        out_proj: linear, ``[E, E]``.

    Raises:
        TypeError: a size is not an int, a flag not a bool, or the mask not one.
        ValueError: a size is not positive, H does not divide E, or the backend is not known.

    Example:
        >>> from torchrec import JaggedTensor
        >>> from jagged_attn import SlidingWindow
        >>> x = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> rotation = RotaryTemporalEmbedding(head_dim=4)(x, torch.tensor([10, 70, 5, 5, 900]))
        >>> TemporalSelfAttention(8, 2, mask=SlidingWindow(100, 100))(x, rotation).values().shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        mask: Mask = _FULL,
        rotate_values: bool = False,
        bias: bool = True,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        heads = Heads.checked(embed_dim, num_heads, None, None)
        check_flags(rotate_values=rotate_values, bias=bias)
        self.embed_dim, self.heads, self.rotate_values = embed_dim, heads, rotate_values
        self.options = AttentionOptions.checked(num_heads, mask, "softmax", None, backend)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = InProjection(
            embed_dim, embed_dim, embed_dim, num_heads, num_heads, heads.head_dim, bias=bias, **made
        )
        self.out_proj = OutProjection(embed_dim, embed_dim, bias=bias, **made)

    def reset_parameters(self) -> None:
        """Initialise all parameters anew, as ``JaggedMultiHeadAttention`` does."""
        self.in_proj.reset_parameters()
        self.out_proj.reset_parameters()

    def forward(self, x: Jagged, rotation: Tensor | None = None) -> Any:
        """Attend.

        Args:
            x: TorchRec ``JaggedTensor`` or jagged nested tensor, values ``[T, E]``.
            rotation: ``[2, T, D/2]``, for an even D; None: no rotation.

        Returns:
            A jagged tensor of the type of ``x``, values ``[T, E]``, with its offsets, lengths and weights.

        Raises:
            TypeError: ``x`` is not jagged, or ``rotation`` is not a tensor.
            ValueError: a shape, dtype or device is wrong, or D is odd and there is a rotation.
            UnsupportedError: no backend, or not the one named, runs such a call.
        """
        # Another module in its place, or a hook, knows q, k and v.
        parts = self.in_proj(x, split=False) if is_bare(self.in_proj, InProjection) else self.in_proj(x)
        out = _attend(parts, x, rotation, self.rotate_values, self.options)
        return with_values(x, self.out_proj(out))

    def extra_repr(self) -> str:
        """Sizes and options."""
        values = ", rotate_values=True" if self.rotate_values else ""
        return f"embed_dim={self.embed_dim}, {self.heads.extra_repr()}{values}, {self.options.extra_repr()}"


@torch.fx.wrap
def _attend(
    parts: tuple[Tensor, ...], x: Any, rotation: Tensor | None, rotate_values: bool, options: AttentionOptions
) -> Tensor:
    """``[T, E]`` of q, k and v ``[T, H, D]``, or of one piece of their heads, ``[T, 3 H, D]``."""
    num_turned = 3 if rotate_values else 2
    if rotation is None:
        q, k, v = parts if len(parts) == 3 else parts[0].chunk(3, 1)
    elif len(parts) == 3:
        q, k, v = (*(rotate(part, rotation) for part in parts[:num_turned]), *parts[num_turned:])
    else:
        (qkv,) = parts
        sizes = [qkv.shape[1] // 3] * 3
        # Its heads are of the shape [T, H, D] that a message would tell of.
        _check_rotation(qkv.narrow(1, 0, sizes[0]), rotation)
        q, k, v = split_rotated(qkv, rotation, sizes, num_turned)
    return jagged_attention(q, k, v, layout_of(x), **options.keywords()).flatten(-2)
