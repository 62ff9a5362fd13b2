"""The model that the serving benchmark runs, on packed and on padded requests, with one set of parameters.

    history ids → item table → num_layers × (x + attention(norm(x)), x + MLP(norm(x))), causal     [L, E] a request
    candidate ids → item table → target attention of the candidates to the history                [C, E]
    MLP(candidate, taste, candidate · taste) → a score for each candidate                          [C]

A history is encoded once, and all candidates of its request attend to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..jagged_tensor import to_jagged_tensor, with_values
from ..masks import Causal
from ..modules.self_attention import JaggedMultiHeadAttention
from ..modules.target_attention import JaggedTargetAttention
from ..testing.inputs import draw_lengths

# Longest lengths are rounded up to this, for the fused kernels that SDPA has for such lengths only.
_PAD_TO = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the stream.

    Attributes:
        embed_dim: E.
        num_heads: H.
        num_layers: of the encoder.
        num_items: rows of the item table.
        requests: how many come.
        longest: a history has 1 to so many events.
        mean_fill: their mean over ``longest``.
        candidates: a request has 1 to so many, all equally likely.
    """

    embed_dim: int = 512
    num_heads: int = 4
    num_layers: int = 4
    num_items: int = 100_000
    requests: int = 1000
    longest: int = 2048
    mean_fill: float = 0.3
    candidates: int = 500

    def small(self) -> "Sizes":
        """The same at a size that a CPU runs in seconds."""
        return replace(
            self, embed_dim=32, num_heads=2, num_layers=2, num_items=500, requests=30, longest=64, candidates=20
        )


@dataclass(frozen=True)
class Request:
    """One user's request, on the host.

    Attributes:
        history: ``[L]``, ids of the user's events, oldest first.
        candidates: ``[C]``, ids of the items to score.
    """

    history: Tensor
    candidates: Tensor


def make_requests(sizes: Sizes, seed: int) -> list[Request]:
    """A seeded stream: log-normal history lengths (σ 0.83), numbers of candidates and ids uniform."""
    generator = torch.Generator().manual_seed(seed)
    lengths = draw_lengths("log_normal_fill", sizes.requests, sizes.longest, sizes.mean_fill, seed)
    counts = torch.randint(1, sizes.candidates + 1, (sizes.requests,), generator=generator)

    def ids(counts: Tensor) -> list[Tensor]:
        drawn = torch.randint(0, sizes.num_items, (int(counts.sum()),), generator=generator)
        return list(drawn.split(counts.tolist()))

    return [Request(*pair) for pair in zip(ids(lengths), ids(counts), strict=True)]


class EncoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + MLP(norm(x))``."""

    def __init__(self, sizes: Sizes, backend: str) -> None:
        super().__init__()
        width = sizes.embed_dim
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = JaggedMultiHeadAttention(width, sizes.num_heads, mask=Causal(), backend=backend)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Scorer(nn.Module):
    """Scores of the candidates of packed requests.

    Args:
        sizes: of the model.
        backend: what runs the attention.
    """

    def __init__(self, sizes: Sizes, backend: str = "auto") -> None:
        super().__init__()
        width = sizes.embed_dim
        self.item = nn.Embedding(sizes.num_items, width)
        self.layers = nn.ModuleList(EncoderLayer(sizes, backend) for _ in range(sizes.num_layers))
        self.norm, self.candidate_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.target = JaggedTargetAttention(width, sizes.num_heads, backend=backend)
        self.head = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, history: Tensor, offsets: Tensor, candidates: Tensor, candidate_offsets: Tensor) -> Tensor:
        """``[T_c]``.

        Args:
            history: ``[T]``, ids of all events.
            offsets: ``[B + 1]``, of the histories.
            candidates: ``[T_c]``, ids of all candidates.
            candidate_offsets: ``[B + 1]``.
        """
        x = to_jagged_tensor(self.item(history), offsets)
        for module in self.layers:
            layer = cast(EncoderLayer, module)
            x = with_values(x, x.values() + layer.attention(with_values(x, layer.norm(x.values()))).values())
            x = with_values(x, x.values() + layer.mlp(layer.mlp_norm(x.values())))
        items = self.item(candidates)
        queries = to_jagged_tensor(self.candidate_norm(items), candidate_offsets)
        taste = self.target(with_values(x, self.norm(x.values())), queries).values()
        return self.score(items, taste)

    def score(self, items: Tensor, taste: Tensor) -> Tensor:
        """``[...]``, of ``[..., E]`` each."""
        return self.head(torch.cat([items, taste, items * taste], dim=-1)).squeeze(-1)


class PaddedScorer(nn.Module):
    """The same scores from requests padded to the longest of their batch, with ``scaled_dot_product_attention``.

    Args:
        scorer: whose parameters are used.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, history: Tensor, lengths: Tensor, candidates: Tensor, real: Tensor) -> Tensor:
        """``[T_c]``, in the order of ``Scorer``.

        Args:
            history: ``[B, L]``, padded at the end.
            lengths: ``[B]``, of the histories.
            candidates: ``[B, C]``, padded at the end.
            real: ``[T_c]``, where the candidates lie in the flat ``[B, C]``.
        """
        scorer = self.scorer
        x = scorer.item(history)
        for module in scorer.layers:
            layer = cast(EncoderLayer, module)
            # Padding comes last, so no event sees it under a causal mask and the fastest kernel needs no other mask.
            x = x + _self_attention(layer.attention, layer.norm(x))
            x = x + layer.mlp(layer.mlp_norm(x))
        items = scorer.item(candidates)
        exists = torch.arange(history.shape[1], device=history.device) < lengths[:, None]
        taste = _target_attention(scorer.target, scorer.candidate_norm(items), scorer.norm(x), exists)
        return scorer.score(items, taste).flatten()[real]


def _self_attention(attention: JaggedMultiHeadAttention, x: Tensor) -> Tensor:
    projection = attention.in_proj
    qkv = F.linear(x, cast(Tensor, projection.weight), projection.bias)
    q, k, v = qkv.unflatten(-1, (3, attention.heads.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return attention.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def _target_attention(attention: JaggedTargetAttention, queries: Tensor, history: Tensor, exists: Tensor) -> Tensor:
    heads = attention.heads.num_heads
    q = attention.q_proj(queries).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = attention.kv_proj(history).unflatten(-1, (2, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=exists[:, None, None])
    return attention.out_proj(out.transpose(1, 2).flatten(2))


Arguments = tuple[Tensor, ...]


class Form(Protocol):
    """From a batch of requests on the host to the arguments of a model, on the host."""

    def __call__(self, requests: Sequence[Request]) -> Arguments:
        """The arguments."""
        ...


def packed(requests: Sequence[Request]) -> Arguments:
    """The arguments of ``Scorer``."""
    histories, candidates = [r.history for r in requests], [r.candidates for r in requests]
    return torch.cat(histories), _offsets(histories), torch.cat(candidates), _offsets(candidates)


def padded(requests: Sequence[Request]) -> Arguments:
    """The arguments of ``PaddedScorer``."""
    history, candidates = (_padded([getattr(r, name) for r in requests]) for name in ("history", "candidates"))
    lengths = torch.tensor([len(r.history) for r in requests])
    counts = torch.tensor([len(r.candidates) for r in requests])
    real = (torch.arange(candidates.shape[1]) < counts[:, None]).flatten().nonzero().squeeze(1)
    return history, lengths, candidates, real


def _offsets(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)


def _padded(parts: Sequence[Tensor]) -> Tensor:
    rows = pad_sequence(list(parts), batch_first=True)
    return F.pad(rows, (0, -rows.shape[1] % _PAD_TO))
