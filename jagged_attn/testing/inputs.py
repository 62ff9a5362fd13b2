"""Seeded jagged inputs: named length distributions, and q, k, v that fit them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import JaggedLayout


def _uniform(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
    # The rule of the published benchmarks: U[(2f - 1) max, max] for f >= 0.5, else U[0, 2f max]; the mean is f max.
    low, high = (round((2 * fill - 1) * longest), longest) if fill >= 0.5 else (0, round(2 * fill * longest))
    return torch.randint(low, high + 1, (b,), generator=g)


def _uniform_from_one(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
    return torch.randint(1, longest + 1, (b,), generator=g)


def _log_normal(median: float, sigma: float) -> Callable[[int, int, float, torch.Generator], Tensor]:
    def draw(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
        return (median * torch.exp(sigma * torch.randn(b, generator=g))).round().long().clamp(1, longest)

    return draw


def _log_normal_fill(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
    # sigma 0.83 as in logs of user behaviour; the median is sought so that the clipped mean is fill * longest.
    noise = torch.exp(0.83 * torch.randn(b, generator=g))
    low, high = 0.0, float(longest) * 8
    for _ in range(60):
        median = (low + high) / 2
        mean = (median * noise).round().clamp(1, longest).mean().item() if b else 0.0
        low, high = (median, high) if mean < fill * longest else (low, median)
    return (high * noise).round().long().clamp(1, longest)


def _zipf(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
    weights = torch.arange(1, longest + 1, dtype=torch.float64) ** -1.2
    return torch.multinomial(weights, b, replacement=True, generator=g) + 1 if b else torch.zeros(0, dtype=torch.long)


def _constant(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
    return torch.full((b,), longest)


def _adversarial(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
    lengths = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, longest]).clamp(max=longest)
    return lengths.repeat(math.ceil(b / len(lengths)))[:b]


def _cold(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
    lengths = _log_normal(75, 0.83)(b, longest, fill, g)
    return torch.where(torch.rand(b, generator=g) < 0.05, 0, lengths)


def _spike(b: int, longest: int, fill: float, g: torch.Generator) -> Tensor:
    lengths = _uniform(b, longest, 0.3, g)
    return torch.where(torch.rand(b, generator=g) < 0.25, longest, lengths)


LENGTHS: dict[str, Callable[[int, int, float, torch.Generator], Tensor]] = {
    "uniform": _uniform,
    "uniform_from_one": _uniform_from_one,
    "log_normal": _log_normal(75, 0.83),  # Taobao UserBehavior
    "log_normal_long": _log_normal(3379, 0.89),  # KuaiRand-1K
    "log_normal_fill": _log_normal_fill,
    "zipf": _zipf,
    "constant": _constant,
    "adversarial": _adversarial,
    "cold": _cold,
    "spike": _spike,
}


def draw_lengths(name: str, num_sequences: int, longest: int, mean_fill: float = 0.5, seed: int = 0) -> Tensor:
    """Lengths of ``num_sequences`` sequences.

    Args:
        name: a key of ``LENGTHS``: ``uniform`` (mean ``mean_fill * longest``), ``uniform_from_one`` (U[1, longest]),
            ``log_normal`` (median 75, sigma 0.83), ``log_normal_long`` (median 3379, sigma 0.89), ``log_normal_fill``
            (sigma 0.83, mean ``mean_fill * longest``), ``zipf`` (exponent 1.2), ``constant``, ``adversarial`` (0, 1,
            63 to 65, 127 to 129, longest, in turn), ``cold`` (log-normal, 5 % without history), ``spike`` (a quarter at
            the cap).
        num_sequences: B.
        longest: no length exceeds it.
        mean_fill: mean length over longest length, where the distribution takes one.
        seed: same seed, same lengths.

    Returns:
        ``[B]``, int64, on the CPU.
    """
    if name not in LENGTHS:
        raise ValueError(f"name must be one of {', '.join(LENGTHS)}, got {name!r}.")
    if not 0.0 <= mean_fill <= 1.0:
        raise ValueError(f"mean_fill must be in [0, 1], got {mean_fill}.")
    generator = torch.Generator().manual_seed(seed)
    return LENGTHS[name](num_sequences, longest, mean_fill, generator).long()


@dataclass(frozen=True)
class AttentionInputs:
    """Tensors of one call.

    Attributes:
        q: ``[T_q, H, D]``, or ``[S, H, D]`` for broadcast-Q.
        k: ``[T_kv, H_kv, D]``.
        v: ``[T_kv, H_kv, Dv]``.
        layout_q: ``None`` for broadcast-Q.
        layout_kv: the queries' own layout object in self-attention.
        dout: an incoming gradient, of the output's shape.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout_q: JaggedLayout | None
    layout_kv: JaggedLayout
    dout: Tensor

    def to(self, dtype: torch.dtype) -> "AttentionInputs":
        """The same inputs in another dtype."""
        q, k, v, dout = (x.to(dtype) for x in (self.q, self.k, self.v, self.dout))
        return AttentionInputs(q, k, v, self.layout_q, self.layout_kv, dout)

    def cancelled(self, scale: float | None = None) -> dict[str, float]:
        """The largest terms of dQ and of dK, which a softmax may cancel; with a single key, what is left is rounding.

        ``scale max|k| max||dout|| max||v||`` for ``"dq"``, with q for k for ``"dk"``; scale is 1 / sqrt(D) by default.
        """
        factor = abs(self.q.shape[-1] ** -0.5 if scale is None else scale)
        of_scores = factor * _largest(self.dout.norm(dim=-1)) * _largest(self.v.norm(dim=-1))
        return {"dq": of_scores * _largest(self.k), "dk": of_scores * _largest(self.q)}


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def lower_scores(q: Tensor, k: Tensor, mean_score: float) -> None:
    """Turn normal ``[..., D]`` queries and keys into such whose scaled scores have this mean below 0, in place.

    With a mean of -2.5 they deviate by 0.3, so that nearly all are negative.
    """
    shift = (-mean_score * q.shape[-1] ** -0.5) ** 0.5
    # Rounded once: in half precision, the CPU and a GPU do not add the same number.
    q.copy_(0.3 * q.double() + shift)
    k.copy_(0.3 * k.double() - shift)


def attention_inputs(
    lengths_kv: Tensor,
    lengths_q: Tensor | None = None,
    *,
    num_shared_queries: int | None = None,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int,
    value_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    offsets_dtype: torch.dtype = torch.int64,
    extra_rows: int = 0,
    seed: int = 0,
) -> AttentionInputs:
    """Normal q, k, v and dout for given lengths.

    Args:
        lengths_kv: ``[B]`` lengths of keys and values, and of the queries in self-attention.
        lengths_q: ``[B]`` lengths of the queries in cross-attention; ``None`` for self-attention and broadcast-Q.
        num_shared_queries: S, for broadcast-Q.
        num_heads: H.
        num_kv_heads: heads of k and v; H by default.
        head_dim: D.
        value_head_dim: Dv; D by default.
        dtype: of the tensors.
        device: of everything.
        offsets_dtype: int32 or int64.
        extra_rows: rows that q, k and v hold past their last sequence.
        seed: same seed, same numbers, whatever the dtype and device.
    """
    generator = torch.Generator().manual_seed(seed)
    num_kv_heads, value_head_dim = num_kv_heads or num_heads, value_head_dim or head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device=device, dtype=dtype)

    layout_kv = JaggedLayout.from_lengths(lengths_kv.to(device=device, dtype=offsets_dtype))
    rows_kv = int(lengths_kv.sum()) + extra_rows
    if num_shared_queries is not None:
        layout_q, rows_q = None, num_shared_queries
        out_shape: tuple[int, ...] = (len(lengths_kv), num_shared_queries, num_heads, value_head_dim)
    else:
        is_self = lengths_q is None
        lengths_q = lengths_kv if lengths_q is None else lengths_q
        layout_q = layout_kv if is_self else JaggedLayout.from_lengths(lengths_q.to(device=device, dtype=offsets_dtype))
        rows_q = int(lengths_q.sum()) + extra_rows
        out_shape = (rows_q, num_heads, value_head_dim)
    q, k = normal(rows_q, num_heads, head_dim), normal(rows_kv, num_kv_heads, head_dim)
    v, dout = normal(rows_kv, num_kv_heads, value_head_dim), normal(*out_shape)
    return AttentionInputs(q, k, v, layout_q, layout_kv, dout)
