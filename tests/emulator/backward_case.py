"""A call of self or cross attention whose backward is run in the emulator, of either TLX backend."""

from dataclasses import dataclass

import torch

from jagged_attn.backends.base import Geometry
from jagged_attn.masks import Full, Mask
from jagged_attn.spec import AttentionSpec


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@dataclass(frozen=True)
class BackwardCase:
    """One call: lengths, static facts, and rows of no sequence."""

    lengths_kv: tuple[int, ...] = ()
    lengths_q: tuple[int, ...] | None = None
    heads: tuple[int, int] = (1, 1)
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    mask: Mask = Full()  # noqa: RUF009 - frozen
    activation: str = "softmax"
    scale: float | None = None
    out_scale: float = 1.0
    extra_rows: int = 0
    deterministic: bool = False

    @property
    def spec(self) -> AttentionSpec:
        """The call's static facts."""
        return AttentionSpec(
            "self" if self.lengths_q is None else "cross", self.dtype, *self.heads, self.dim, self.dim, self.mask,
            (self.activation,), self.dim**-0.5 if self.scale is None else self.scale, self.out_scale,
            self.deterministic,
        )  # fmt: skip

    def geometry(self) -> Geometry:
        """The call's offsets."""
        kv = offsets(self.lengths_kv)
        return Geometry(kv if self.lengths_q is None else offsets(self.lengths_q), kv, ())

    def tensors(self) -> dict[str, torch.Tensor]:
        """q, k, v and dout."""
        rows_kv = sum(self.lengths_kv) + self.extra_rows
        rows_q = rows_kv if self.lengths_q is None else sum(self.lengths_q) + self.extra_rows
        g = torch.Generator().manual_seed(0)
        shapes = {
            "dout": (rows_q, self.heads[0], self.dim),
            "q": (rows_q, self.heads[0], self.dim),
            "k": (rows_kv, self.heads[1], self.dim),
            "v": (rows_kv, self.heads[1], self.dim),
        }
        return {name: torch.randn(shape, generator=g).to(self.dtype) for name, shape in shapes.items()}
