"""The two models that are compared: Kunlun, and the ranking example's with the gaps as features.

dense ──────────────── MLP ──────────────┐
sparse ─ EmbeddingBagCollection ─────────┼→ tokens ──→ Kunlun → RankingHead → logit
sequences ─ EmbeddingCollection → events ┴→ towers ─↗
"""

from dataclasses import dataclass
from functools import partial

import torch
from ranking.model import ModelConfig, RankingModel
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

from jagged_attn.jagged_tensor import with_values
from jagged_attn.modules.kunlun import Kunlun
from jagged_attn.modules.kunlun_blocks import RankingHead
from jagged_attn.modules.kunlun_config import EventTowerConfig, InteractionConfig
from jagged_attn.modules.wukong import mlp

from .batches import NUM_DENSE, NUM_GAPS, Batch, ranking_schema
from .synthetic import EVENT_TYPES, Log

_SPARSE = ("break",)
_TOKENS = ("dense", "candidate_item", *_SPARSE)


@dataclass(frozen=True)
class KunlunConfig:
    """Sizes of the Kunlun model.

    Attributes:
        embed_dim: E, of tokens and events.
        towers: by event type.
        num_summary_tokens: n_sum.
        hidden: width of the MLPs.
        dropout: probability, on embedded events and tokens.
        embedding_std: standard deviation of the initial embeddings.
    """

    embed_dim: int = 32
    towers: tuple[tuple[str, EventTowerConfig], ...] = (
        (
            "click",
            EventTowerConfig(32, 2, num_tokens=4, num_layers=3, window=1, num_seeds=16, kron_rank=2, num_keys=32),
        ),
        (
            "impression",
            EventTowerConfig(32, 2, num_tokens=2, num_layers=1, window=1, num_seeds=8, kron_rank=2, num_keys=32),
        ),
    )
    num_summary_tokens: int = 8
    hidden: int = 64
    dropout: float = 0.1
    embedding_std: float = 0.1


class KunlunRanker(nn.Module):
    """Click logits of requests.

    Args:
        num_items: rows of the item tables.
        config: sizes.
        backend: what runs the attention.
    """

    def __init__(self, num_items: int, config: KunlunConfig, backend: str = "auto") -> None:
        super().__init__()
        dim, num_tokens = config.embed_dim, len(_TOKENS)
        init = partial(nn.init.normal_, std=config.embedding_std)
        names = {part: [f"{event}_{part}" for event in EVENT_TYPES] for part in ("item", "age", "gap")}
        names["item"].append("candidate_item")  # one table: what is clicked and what is shown are the same items
        self.sequences = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=part, embedding_dim=dim, num_embeddings=num_items if part == "item" else NUM_GAPS,
                    feature_names=names[part], init_fn=init,
                )
                for part in names
            ]
        )  # fmt: skip
        self.sparse = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=key, embedding_dim=dim, num_embeddings=NUM_GAPS, feature_names=[key], init_fn=init
                )
                for key in _SPARSE
            ]
        )
        self.dense = mlp(NUM_DENSE, config.hidden, dim)
        self.token_norm = nn.LayerNorm(dim)
        self.event_norm = nn.ModuleDict({name: nn.LayerNorm(dim) for name in EVENT_TYPES})
        self.dropout = nn.Dropout(config.dropout)
        sizes = InteractionConfig(config.num_summary_tokens, num_experts=1, rank=8, hidden=config.hidden)
        self.stack = Kunlun(num_tokens, dim, dict(config.towers), sizes, backend=backend)
        self.head = RankingHead(num_tokens, dim, config.hidden)

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B]``."""
        embedded = self.sequences(batch.sequences)
        events = {}
        for name in EVENT_TYPES:
            item = embedded[f"{name}_item"]
            summed = item.values() + embedded[f"{name}_age"].values() + embedded[f"{name}_gap"].values()
            events[name] = with_values(item, self.dropout(self.event_norm[name](summed)))
        sparse = self.sparse(batch.sparse)
        candidate = embedded["candidate_item"].values()
        tokens = torch.stack([self.dense(batch.dense), candidate, *(sparse[key] for key in _SPARSE)], dim=1)
        return self.head(self.stack(self.dropout(self.token_norm(tokens)), events, batch.timestamps)).squeeze(1)


class RankingBaseline(nn.Module):
    """The ranking example's model, unchanged, on the same facts: gaps and ages are features of each event.

    Its hidden layers are as wide as it takes to have at least ``num_parameters`` parameters.
    """

    def __init__(self, log: Log, num_parameters: int, backend: str = "auto") -> None:
        super().__init__()
        schema = ranking_schema(log)
        for hidden in range(64, 1024, 8):
            self.model = RankingModel(schema, ModelConfig(embed_dim=32, num_heads=2, hidden=hidden), backend=backend)
            if count_parameters(self.model) >= num_parameters:
                break

    def forward(self, batch: Batch) -> Tensor:
        """Logits ``[B]``."""
        return self.model(batch.ranking)


def count_parameters(model: nn.Module) -> int:
    """All parameters, embeddings included."""
    return sum(p.numel() for p in model.parameters())


def make_model(name: str, log: Log, config: KunlunConfig, backend: str) -> nn.Module:
    """``"kunlun"``, or ``"ranking"`` with at least as many parameters."""
    if name == "kunlun":
        return KunlunRanker(log.config.num_items + 1, config, backend)
    with torch.random.fork_rng(devices=[]):
        num_parameters = count_parameters(KunlunRanker(log.config.num_items + 1, config, backend))
    return RankingBaseline(log, num_parameters, backend)
