"""The ranking model: jagged histories in, one click logit a candidate out.

    KeyedJaggedTensor → EmbeddingCollection → 2 × (x + attention(norm(x))) → target attention of the candidates → MLP

With ``pooling="mean"`` each attention gives way to a plain mean over the same keys, and nothing else changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor

from jagged_attn import JaggedLayout
from jagged_attn.jagged_tensor import to_jagged_tensor, with_values
from jagged_attn.modules import JaggedMultiHeadAttention, JaggedTargetAttention

from .requests import Schema

Pooling = Literal["attention", "mean"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        embed_dim: E.
        num_heads: H.
        num_layers: self-attention layers.
        hidden: width of the MLP.
        dropout: probability, on the embedded events and inside the MLP.
        embedding_std: standard deviation of the initial embeddings.
    """

    embed_dim: int = 32
    num_heads: int = 2
    num_layers: int = 2
    hidden: int = 64
    dropout: float = 0.1
    embedding_std: float = 0.3


class RankingModel(nn.Module):
    """Click logits of candidates, given the user's history.

    Args:
        schema: sizes of the embedding tables.
        config: sizes of the model.
        pooling: ``"attention"``, or ``"mean"`` for the same model with means in place of attention.
        backend: what runs the attention; see ``jagged_attn.jagged_attention``.
    """

    def __init__(
        self, schema: Schema, config: ModelConfig, pooling: Pooling = "attention", backend: str = "auto"
    ) -> None:
        super().__init__()
        dim = config.embed_dim
        self.embedding = _embedding(schema, config)
        self.layers = nn.ModuleList(HistoryLayer(config, pooling, backend) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(dim)
        self.candidate_norm, self.target = _target(config, pooling, backend)
        self.dropout = nn.Dropout(config.dropout)
        self.mlp = nn.Sequential(
            nn.Linear(4 * dim, config.hidden), nn.ReLU(), nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden), nn.ReLU(), nn.Linear(config.hidden, 1),
        )  # fmt: skip

    def forward(self, features: KeyedJaggedTensor, layouts: Mapping[str, JaggedLayout] | None = None) -> Tensor:
        """Logits ``[C]``, one a row of ``candidate_item``; the features are those of ``Batch``.

        Args:
            features: ids of events and candidates.
            layouts: of ``history_item`` and ``candidate_item``, if they were prepared (``jagged_attn.pipeline``).
        """
        embedded = self.embedding(features)
        events = _on_layout(embedded["history_item"], layouts, "history_item")
        candidate = _on_layout(embedded["candidate_item"], layouts, "candidate_item")
        summed = events.values() + embedded["history_rating"].values() + embedded["history_age"].values()
        history = with_values(events, self.dropout(summed))
        for layer in self.layers:
            history = layer(history)
        history = with_values(history, self.norm(history.values()))
        query = with_values(candidate, self.candidate_norm(candidate.values()))
        taste = self.target(history, query).values()
        item, user = candidate.values(), embedded["user"].values()
        return self.mlp(torch.cat([item, taste, item * taste, user], dim=1)).squeeze(1)


# Not traced by torch.fx, to which `layouts` would never be None.
@torch.fx.wrap
def _on_layout(x: JaggedTensor, layouts: Mapping[str, JaggedLayout] | None, key: str) -> JaggedTensor:
    return x if layouts is None else to_jagged_tensor(x.values(), layouts[key])


def _target(config: ModelConfig, pooling: Pooling, backend: str) -> tuple[nn.Module, nn.Module]:
    """What is done to the candidates' queries, and what answers them; a mean asks for no query."""
    dim = config.embed_dim
    if pooling == "mean":
        return nn.Identity(), MeanPool(dim)
    # Embeddings start small; as plain queries they would score all events alike, and leave that state slowly.
    return nn.LayerNorm(dim), JaggedTargetAttention(dim, config.num_heads, backend=backend)


def _embedding(schema: Schema, config: ModelConfig) -> EmbeddingCollection:
    init = partial(nn.init.normal_, std=config.embedding_std)
    tables = (
        ("item", schema.num_items, ["history_item", "candidate_item"]),
        ("rating", schema.num_ratings, ["history_rating"]),
        ("age", schema.num_ages, ["history_age"]),
        ("user", schema.num_users, ["user"]),
    )
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name=name, embedding_dim=config.embed_dim, num_embeddings=rows, feature_names=features, init_fn=init
            )
            for name, rows, features in tables
        ]
    )


class HistoryLayer(nn.Module):
    """``x + attention(norm(x))`` over each history: every event sees every other."""

    def __init__(self, config: ModelConfig, pooling: Pooling, backend: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.attention: nn.Module = (
            JaggedMultiHeadAttention(config.embed_dim, config.num_heads, backend=backend)
            if pooling == "attention"
            else MeanPool(config.embed_dim)
        )

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        """Values ``[T, E]`` to values ``[T, E]``, in the same layout."""
        update = self.attention(with_values(x, self.norm(x.values())))
        return with_values(x, x.values() + update.values())


class MeanPool(nn.Module):
    """An attention without its scores: every query of a sequence gets the mean of the sequence's projected values.

    O_b = out(mean_j value(x_bj)),   0 in place of the mean of an empty sequence
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.value = nn.Linear(embed_dim, embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, history: JaggedTensor, query: JaggedTensor | None = None) -> JaggedTensor:
        """Values ``[T_q, E]`` in the layout of ``query``, or of ``history`` if that is None."""
        query = history if query is None else query
        pooled = _mean_rows(self.value(history.values()), history, query)
        return with_values(query, self.out(pooled))


@torch.fx.wrap
def _mean_rows(values: Tensor, history: JaggedTensor, query: JaggedTensor) -> Tensor:
    """For each row of ``query``, the mean of the rows of ``values`` that are of the same sequence of ``history``."""
    lengths, rows = history.lengths(), values.shape[0]
    sequence = torch.repeat_interleave(lengths, output_size=rows)
    total = values.new_zeros(lengths.numel(), values.shape[1]).index_add(0, sequence, values)
    mean = total / lengths.clamp(min=1)[:, None]
    return mean.repeat_interleave(query.lengths(), dim=0, output_size=query.values().shape[0])
