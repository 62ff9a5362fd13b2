"""What the ranks of the pipeline tests do, and the plain loop that they are compared with."""

import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

with warnings.catch_warnings():
    # fbgemm's CPU build warns of operators that it does not have.
    warnings.simplefilter("ignore")
    from ranking import sharded
    from ranking.metrics import normalized_entropy
    from ranking.model import ModelConfig, RankingModel
    from ranking.requests import Dataset, Requests, make_batch
    from ranking.sharded import RankingTask, ShardedTrainer, batches, layout_stage
    from ranking.synthetic import SyntheticConfig, load
    from ranking.training import TrainConfig
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from jagged_attn import Causal, JaggedMultiHeadAttention, JaggedTargetAttention
from jagged_attn.jagged_tensor import with_values
from jagged_attn.pipeline import JaggedBatch, LayoutStage

CPU = torch.device("cpu")
Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]
# The last of a rank's batches of an epoch has no request on rank 1: 40 · 8 + 1 requests to learn from.
CONFIG = TrainConfig(
    seed=11,
    epochs=2,
    batch_size=40,
    learning_rate=4e-3,
    embedding_boost=25.0,
    model=ModelConfig(embed_dim=16, num_heads=2, hidden=24, dropout=0.0),
)


def dataset() -> Dataset:
    log = load(3, config=SyntheticConfig(num_requests=500, max_length=61, median_length=13.0))
    return replace(log, train=log.train.select(np.arange(321)))


def plain_run(data: Dataset, config: TrainConfig) -> tuple[RankingTask, LayoutStage, Optimizers, tuple[float, float]]:
    """Model, stage, optimisers of the dense part and of the tables, and their highest learning rates."""
    torch.manual_seed(config.seed)
    model = RankingModel(data.schema, config.model)
    tables = list(model.embedding.parameters())
    dense = [p for p in model.parameters() if all(p is not table for table in tables)]
    highest = config.learning_rate, config.learning_rate * config.embedding_boost
    optimizers = (
        torch.optim.AdamW(dense, highest[0], weight_decay=config.weight_decay),
        RowWiseAdagrad(tables, highest[1], eps=sharded.ADAGRAD_EPS),
    )
    return RankingTask(model, world_size=1), layout_stage(model), optimizers, highest


def plain_first_step(data: Dataset) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the dense part, and the tables' mean squared gradients by row, of the first global batch."""
    task, stage, _, _ = plain_run(data, CONFIG)
    batch = next(batches(data.train, data.schema, np.arange(len(data.train)), CONFIG.batch_size, stage))
    task(batch.to(CPU))[0].backward()
    gradients = {name: p.grad for name, p in task.named_parameters()}
    tables = {name: gradients.pop(name).square().mean(1) for name in list(gradients) if ".embedding." in name}
    return gradients, tables


def plain_losses(data: Dataset, config: TrainConfig, parts: int = 1) -> list[float]:
    """The losses of a loop on one process without TorchRec's engines.

    Args:
        data: what to learn.
        config: of the run.
        parts: how many sums each gradient is made of; the result differs by rounding alone.
    """
    task, stage, optimizers, highest = plain_run(data, config)
    steps = config.epochs * -(-len(data.train) // config.batch_size)
    losses: list[float] = []
    for epoch in range(config.epochs):
        order = np.random.default_rng((config.seed, epoch)).permutation(len(data.train))
        ranks = [
            batches(data.train, data.schema, order, config.batch_size, stage, part, parts) for part in range(parts)
        ]
        for of_step in zip(*ranks, strict=True):
            factor = 0.5 * (1 + np.cos(np.pi * len(losses) / steps))
            for optimizer, rate in zip(optimizers, highest, strict=True):
                optimizer.param_groups[0]["lr"] = rate * factor
                optimizer.zero_grad()
            total = 0.0
            for batch in of_step:
                loss, _ = task(batch.to(CPU))
                loss.backward()
                total += loss.item()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(total)
    return losses


@torch.no_grad()
def evaluate_plainly(data: Dataset, state: dict[str, Tensor]) -> float:
    """NE of a checkpoint's model on the held-out part, on one process."""
    task = RankingTask(RankingModel(data.schema, CONFIG.model), world_size=1).eval()
    task.load_state_dict(state)
    held_out = data.held_out
    batch = make_batch(held_out, np.arange(len(held_out)), data.schema)
    return normalized_entropy(task.model(batch.features).double().sigmoid(), batch.label)


class Stack(nn.Module):
    """Attention layers in an ``nn.ModuleList`` beside the collection, without a stage."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="t", num_embeddings=19, embedding_dim=8, feature_names=["history", "candidate"])
        self.embed = EmbeddingCollection(tables=[table])
        self.layers = nn.ModuleList(JaggedMultiHeadAttention(8, 2, mask=Causal(), qk_norm=True) for _ in range(2))
        self.pool = JaggedTargetAttention(8, 2)

    def forward(self, batch: JaggedBatch) -> tuple[Tensor, Tensor]:
        embedded = self.embed(batch.features)
        x = embedded["history"]
        for layer in self.layers:
            x = with_values(x, x.values() + layer(x).values())
        out = self.pool(x, embedded["candidate"]).values().sum(1)
        return (out - batch.labels).square().mean(), out


def stack_batch(seed: int) -> JaggedBatch:
    rng = np.random.default_rng(seed)
    lengths = torch.from_numpy(np.concatenate([rng.integers(0, 6, 5), rng.integers(1, 3, 5)]))
    ids = torch.from_numpy(rng.integers(0, 19, int(lengths.sum())))
    features = KeyedJaggedTensor.from_lengths_sync(["history", "candidate"], ids, lengths)
    return JaggedBatch(features, labels=torch.ones(int(lengths[5:].sum())))


def everything(folder: Path) -> dict[str, Any]:
    """All that needs two ranks, in one start of the processes."""
    logging.disable(logging.WARNING)
    data = dataset()
    return {
        **_train(data, folder),
        **_first_step(data, folder),
        **_shardings(data),
        **_empty_histories(data),
        **_stack(),
        **_failing_save(data, folder),
    }


def _train(data: Dataset, folder: Path) -> dict[str, Any]:
    trainer = ShardedTrainer(data, CONFIG, CPU)
    trainer.run(lambda trainer: trainer.save(folder / f"epoch{len(trainer.epochs)}.pt"))
    resumed = ShardedTrainer(data, CONFIG, CPU)
    resumed.load(folder / "epoch1.pt")
    resumed.run(lambda trainer: trainer.save(folder / "resumed.pt"))
    return {
        "losses": trainer.losses,
        "ne": [row["ne"] for row in trainer.epochs],
        "pipelined": _pipelined(trainer.pipeline),
        "resumed losses": resumed.losses,
        "checkpoints": [torch.load(folder / name, weights_only=True) for name in ("epoch2.pt", "resumed.pt")],
        "local tables": sorted(trainer._fused_state()),
        "dense parameters": _dense(trainer),
    }


def _first_step(data: Dataset, folder: Path) -> dict[str, Any]:
    """What ``plain_first_step`` returns; row-wise Adagrad's state after one step is the mean squared gradient."""
    trainer = ShardedTrainer(data, CONFIG, CPU)
    order = np.arange(len(data.train))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trainer.pipeline.progress(
        batches(data.train, data.schema, order, CONFIG.batch_size, trainer.stage, rank, world_size)
    )
    trainer.save(folder / "first.pt")
    sums = torch.load(folder / "first.pt", weights_only=True)["fused_optimizer"]
    gradients = {name: x.grad.clone() for name, x in trainer.model.named_parameters() if "embedding." not in name}
    return {"gradients": gradients, "squares": {name.split("/")[0]: x for name, x in sums.items()}}


def _pipelined(pipeline: TrainPipelineSparseDist) -> list[tuple[str, str]]:
    """Name and kind of forward of the modules whose input all-to-all the pipeline runs ahead."""
    return [(module.forward.name, type(module.forward).__name__) for module in pipeline._pipelined_modules]


def _dense(trainer: ShardedTrainer) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in trainer.model.named_parameters() if "embedding." not in name}


def _shardings(data: Dataset) -> dict[str, Any]:
    config = replace(CONFIG, epochs=1)
    losses = {}
    for sharding in sharded.SHARDINGS:
        trainer = ShardedTrainer(data, config, CPU, sharding)
        trainer._train_epoch(0)
        losses[sharding] = trainer.losses
    return {"losses by sharding": losses}


def _without_histories(requests: Requests) -> Requests:
    return replace(requests, history_stop=requests.history_start)


def _empty_histories(data: Dataset) -> dict[str, Any]:
    """Rank 1 has no event in its second batch, and no request at all in its third."""
    trainer = ShardedTrainer(data, CONFIG, CPU)

    def local() -> Iterator[JaggedBatch]:
        for step in range(4):
            rank = dist.get_rank()
            requests = _without_histories(data.train) if (rank, step) == (1, 1) else data.train
            order = np.arange(6 * step, 6 * step + (1 if step == 2 else 6))
            yield from batches(requests, data.schema, order, 6, trainer.stage, rank, 2)

    iterator = local()
    parts = [trainer.pipeline.progress(iterator)[0].item() for _ in range(4)]
    return {"empty: parts": parts, "empty: dense parameters": _dense(trainer)}


def _stack() -> dict[str, Any]:
    torch.manual_seed(0)
    sharders = [EmbeddingCollectionSharder(fused_params={"learning_rate": 0.01})]
    model = DistributedModelParallel(Stack(), device=CPU, sharders=sharders)
    before = [x.detach().clone() for x in model.module.layers.parameters()]
    dense = torch.optim.SGD(model.module.layers.parameters(), 0.1)
    pipeline = TrainPipelineSparseDist(model, dense, CPU)
    iterator = iter([stack_batch(10 * dist.get_rank() + step) for step in range(3)])
    for _ in range(3):
        pipeline.progress(iterator)
    after = [x.detach().clone() for x in model.module.layers.parameters()]
    return {"stack: pipelined": _pipelined(pipeline), "stack: before": before, "stack: after": after}


def _failing_save(data: Dataset, folder: Path) -> dict[str, Any]:
    """The message with which a checkpoint that rank 0 cannot write fails on this rank."""
    trainer = ShardedTrainer(data, CONFIG, CPU)
    blocked = folder / "a file"
    if dist.get_rank() == 0:
        blocked.write_text("")
    try:
        trainer.save(blocked / "checkpoint.pt")
    except OSError as error:
        return {"failed save": str(error)}
    return {"failed save": None}
