"""The Kunlun model on padded tensors: the same parameters, every sequence as long as the batch's longest.

What somebody would run without jagged attention, written to be fast: fused attention with a mask where PyTorch has one
(FlexAttention or ``scaled_dot_product_attention``), dense products elsewhere. It borrows the modules of a ``Kunlun``
for everything that has no sequence in it, so both models have one set of parameters and gradients can be compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..activations import ELEMENTWISE
from ..masks import Mask
from ..modules.gdpa import PersonalizedFeedForward
from ..modules.kunlun import Kunlun, KunlunLayer
from ..modules.kunlun_blocks import KunlunTransformerBlock
from ..modules.rotary import TemporalSelfAttention
from ..modules.seed_pooling import HierarchicalSeedPooling

Windowed = Literal["sdpa", "flex"]


@dataclass(frozen=True)
class PaddedEvents:
    """Events of one type, padded.

    Attributes:
        rows: ``[B, L, E_t]``.
        lengths: ``[B]``; every sequence has at least one event.
        timestamps: ``[B, L]``.
    """

    rows: Tensor
    lengths: Tensor
    timestamps: Tensor

    @property
    def exists(self) -> Tensor:
        """``[B, L]``: whether a row is an event."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.lengths[:, None]


class PaddedKunlun(nn.Module):
    """A ``Kunlun`` stack on padded events.

    Args:
        stack: whose parameters and dense modules are used.
        windowed: how windowed self-attention is computed.
    """

    def __init__(self, stack: Kunlun, windowed: Windowed) -> None:
        super().__init__()
        self.stack, self.windowed = stack, windowed

    def forward(self, tokens: Tensor, events: Mapping[str, PaddedEvents]) -> Tensor:
        """``[B, n, E]``, as ``Kunlun.forward``."""
        x, summaries = tokens, cast(dict[str, Tensor], {})
        rows = {name: e.rows for name, e in events.items()}
        rotations = {name: self._rotation(name, e) for name, e in events.items()}
        masks = {name: self._window(name, e) for name, e in events.items()}
        layers = [*self.stack.layers, *([self.stack.closing] if self.stack.closing is not None else [])]
        for layer in cast(list[KunlunLayer], layers):
            block = layer.interaction
            x_sum = block.weight_generation(x)
            for name, pool in block.pools.items():
                summaries[name] = _pool(cast(HierarchicalSeedPooling, pool), rows[name], events[name].exists)
            joined = [x_sum, *(block.projections[name](summaries[name]) for name in block.names)]
            x = block.interaction(torch.cat(joined, dim=1))
            for name, module in layer.transformers.items():
                transformer = cast(KunlunTransformerBlock, module)
                if transformer.feed_forward is not None:
                    rows[name] = _feed_forward(transformer.feed_forward, rows[name], x_sum)
                if transformer.attention is not None and transformer.norm is not None:
                    update = self._attend(transformer.attention, rows[name], masks[name], rotations[name])
                    rows[name] = transformer.norm(rows[name] + update)
        return x

    def _rotation(self, name: str, events: PaddedEvents) -> Tensor | None:
        """``[2, B, 1, L, D/2]``, for gaps to the event before, summed with positions."""
        if name not in self.stack.rotary:
            return None
        rotary = cast(Any, self.stack.rotary[name])
        if (rotary.gap, rotary.combine) != ("previous", "sum"):
            raise ValueError(f"events[{name!r}] must use gap='previous' and combine='sum' in the padded model.")
        dtype = torch.float64 if events.rows.dtype == torch.float64 else torch.float32
        gap = F.pad(events.timestamps.diff(dim=1).clamp_min(0), (1, 0)).to(dtype)
        position = torch.arange(gap.shape[1], device=gap.device, dtype=dtype)
        power = torch.arange(0, rotary.head_dim, 2, device=gap.device, dtype=dtype) / -rotary.head_dim
        angle = (position + torch.log1p(gap / rotary.time_scale))[..., None] * rotary.base**power
        return torch.stack([angle.cos(), angle.sin()])[:, :, None]

    def _window(self, name: str, events: PaddedEvents) -> Any:
        """The mask of the tower's self-attention, made once a batch: a block mask, or ``[B, 1, L, L]`` for SDPA."""
        mask = _mask_of(self.stack, name)
        if mask is None:
            return None
        longest = events.rows.shape[1]
        if self.windowed == "flex":
            return _block_mask(mask, events.lengths, longest)
        i = torch.arange(longest, device=events.rows.device)
        lo, hi = mask.key_range(i[:, None], longest, longest)
        # A padded row sees itself: it is never read, and a row without any key would be NaN in some kernels.
        return ((lo <= i) & (i < hi) & (events.exists[:, None, :] | (i[:, None] == i)))[:, None]

    def _attend(self, attention: TemporalSelfAttention, rows: Tensor, mask: Any, rotation: Tensor | None) -> Tensor:
        projection = attention.in_proj
        qkv = F.linear(rows, cast(Tensor, projection.weight), projection.bias)
        q, k, v = qkv.unflatten(-1, (3, attention.heads.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if rotation is not None:
            q, k = _turn(q, rotation), _turn(k, rotation)
            v = _turn(v, rotation) if attention.rotate_values else v
        if self.windowed == "flex":
            out = _flex()(q, k, v, block_mask=mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attention.out_proj(out.transpose(1, 2).flatten(2))


def _mask_of(stack: Kunlun, name: str) -> Mask | None:
    for layer in cast(list[KunlunLayer], list(stack.layers)):
        attention = layer.transformers[name].attention if name in layer.transformers else None
        if attention is not None:
            return cast(TemporalSelfAttention, attention).options.mask
    return None


def _pool(pool: HierarchicalSeedPooling, rows: Tensor, exists: Tensor) -> Tensor:
    attention = pool.attention
    seeds = pool.norm(pool.seeds)
    q = attention.q_proj(seeds).unflatten(-1, (attention.heads.num_heads, -1)).transpose(0, 1)
    kv = attention.kv_proj(rows).unflatten(-1, (2, attention.heads.num_heads, -1))
    k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
    mask = exists[:, None, None, :].expand(-1, -1, q.shape[1], -1)
    read = F.scaled_dot_product_attention(q.expand(rows.shape[0], -1, -1, -1), k, v, attn_mask=mask)
    read = attention.out_proj(read.transpose(1, 2).flatten(2))
    return pool.kron(read + seeds if pool.residual else read)


def _feed_forward(layer: PersonalizedFeedForward, rows: Tensor, context: Tensor) -> Tensor:
    x = layer.norm(rows)
    k, v = (y.transpose(1, 2) for y in layer.generate(context))
    q = x.unflatten(-1, (k.shape[1], -1)).transpose(1, 2)
    scores = cast(float, layer.options.scale) * torch.matmul(q, k.transpose(-1, -2))
    names = layer.options.activation
    if isinstance(names, str):
        activated = F.gelu(scores) if names == "gelu" else ELEMENTWISE[names].value(scores)
    else:
        activated = torch.stack([ELEMENTWISE[name].value(scores[:, h]) for h, name in enumerate(names)], dim=1)
    out = torch.matmul(activated, v).transpose(1, 2).flatten(2)
    return layer.out_norm(out + x) + rows


def _turn(heads: Tensor, rotation: Tensor) -> Tensor:
    cos, sin = rotation.unbind(0)
    a, b = heads.to(rotation.dtype).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(heads.dtype)


def _block_mask(mask: Mask, lengths: Tensor, longest: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        lo, hi = mask.key_range(q, longest, longest)
        return (lo <= kv) & (kv < hi) & ((kv < lengths[b]) | (kv == q))

    return create_block_mask(
        allowed, lengths.shape[0], None, longest, longest, device=lengths.device, _compile=lengths.is_cuda
    )


@cache
def _flex() -> Callable[..., Tensor]:
    """FlexAttention is only fused when it is compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=False))
