"""The ranking model on many ranks: sharded embedding tables, data-parallel attention, TorchRec's train pipeline.

    batch → copy, layouts → input all-to-all → lookup, output all-to-all → dense forward and backward → dense optimiser
                                                    └── in its backward: the tables' own optimiser

Rank r of W takes every W-th request of each global batch. Its loss is ``W / C · Σ`` over its candidates, with C those
of the global batch, so that the mean over ranks, which all-reduce and all-to-all take, is the mean over candidates
whatever their distribution over ranks.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.metrics.metrics_config import RecTaskInfo
from torchrec.metrics.ne import NEMetric
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm

from jagged_attn.modules import JaggedMultiHeadAttention, JaggedTargetAttention
from jagged_attn.pipeline import AttentionCall, JaggedBatch, LayoutStage

from .checkpoints import adamw_pattern, read_checkpoint, require_epochs, require_generators, require_like
from .errors import InputError
from .model import RankingModel
from .outputs import write_atomically
from .requests import FEATURES, Batch, Dataset, Hide, Requests, Schema, make_batch
from .training import TrainConfig, identity

Sharding = Literal["table_wise", "row_wise", "column_wise"]
SHARDINGS: tuple[Sharding, ...] = ("table_wise", "row_wise", "column_wise")
ADAGRAD_EPS = 1e-8
_KEYS = {"run", "model", "dense_optimizer", "fused_optimizer", "epochs", "rng"}
_COLUMNS = ("epoch", "train_loss", "ne", "seconds")
_TASK = "click"


class RankingTask(nn.Module):
    """Model and loss, as a train pipeline wants them.

    Args:
        model: what is trained.
        world_size: W.
    """

    def __init__(self, model: RankingModel, world_size: int) -> None:
        super().__init__()
        self.model, self.world_size = model, world_size

    def forward(self, batch: JaggedBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The loss, and what is kept of the step: this rank's part of the global loss, logits, labels."""
        logits = self.model(batch.features, batch.layouts)
        total = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        part = total / batch.dense["global_candidates"]
        return part * self.world_size, (part.detach(), logits.detach(), batch.labels)


def layout_stage(model: RankingModel) -> LayoutStage:
    """Prepares the layouts and tables of all attention layers of ``model``."""
    calls = []
    for module in model.modules():
        if isinstance(module, JaggedMultiHeadAttention):
            calls.append(AttentionCall.of(module, keys="history_item"))
        elif isinstance(module, JaggedTargetAttention):
            calls.append(AttentionCall.of(module, keys="history_item", queries="candidate_item"))
    return LayoutStage(calls, features=["history_item", "candidate_item"])


def batches(
    requests: Requests, schema: Schema, order: np.ndarray, batch_size: int, stage: LayoutStage, rank: int = 0,
    world_size: int = 1, hide: Hide | None = None,
) -> Iterator[JaggedBatch]:  # fmt: skip
    """A rank's part of each global batch; every rank gets as many batches, some of them perhaps without a request."""
    for start in range(0, len(order), batch_size):
        index = order[start : start + batch_size]
        candidates = int((requests.candidate_offsets[index + 1] - requests.candidate_offsets[index]).sum())
        index = index[rank::world_size]
        mine = make_batch(requests, index, schema, hide) if len(index) else _no_request()
        count = torch.tensor(max(candidates, 1), dtype=torch.float32)
        yield JaggedBatch(mine.features, mine.label, {"global_candidates": count}, stage)


def _no_request() -> Batch:
    """One request without events and candidates: TorchRec 1.8's sharded collections fail on a batch of none."""
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=list(FEATURES),
        values=torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(len(FEATURES), dtype=torch.int64),
    )
    return Batch(features, torch.zeros(0))


def shard(
    task: RankingTask, device: torch.device, sharding: Sharding, learning_rate: float
) -> DistributedModelParallel:
    """Tables over the ranks, with row-wise Adagrad in their backward; everything else data parallel."""
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": learning_rate, "eps": ADAGRAD_EPS}
    sharders = [EmbeddingCollectionSharder(fused_params=fused)]
    tables = [config.name for config in task.model.embedding.embedding_configs()]
    world_size = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size, device.type, local_world_size=get_local_size(world_size)),
        storage_reservation=FixedPercentageStorageReservation(0.15),
        constraints={name: ParameterConstraints(sharding_types=[sharding], min_partition=4) for name in tables},
    )
    plan = planner.collective_plan(task, sharders, dist.GroupMember.WORLD)
    with warnings.catch_warnings():
        # TorchRec 1.8 says broadcast_buffers to DDP, which torch 2.13 calls by another name.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedModelParallel(task, device=device, plan=plan, sharders=sharders)


class ShardedTrainer:
    """A run on all ranks of the default process group.

    Args:
        dataset: what to learn and what to predict; every rank has all of it.
        config: decides the numbers; ``batch_size`` is that of all ranks together. The highest learning rate of the
            tables is ``learning_rate * embedding_boost``.
        device: of this rank.
        sharding: how each table is cut.
        backend: what runs the attention.
    """

    def __init__(
        self, dataset: Dataset, config: TrainConfig, device: torch.device, sharding: Sharding = "table_wise",
        backend: str = "auto",
    ) -> None:  # fmt: skip
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.dataset, self.config, self.device, self.sharding = dataset, config, device, sharding
        # The same weights on every rank; dropout differs.
        torch.manual_seed(config.seed)
        task = RankingTask(RankingModel(dataset.schema, config.model, config.pooling, backend), self.world_size)
        torch.manual_seed(config.seed + 1_000_003 * self.rank)
        self.stage = layout_stage(task.model)
        self.model = shard(task, device, sharding, config.learning_rate * config.embedding_boost)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense = torch.optim.AdamW(dense.values(), config.learning_rate, weight_decay=config.weight_decay)
        keyed = KeyedOptimizerWrapper(dense, lambda _: self.dense)
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, keyed])
        self.pipeline = TrainPipelineSparseDist(self.model, self.optimizer, device, execute_all_batches=True)
        # Checkpoints travel through the host whatever the training uses.
        self._host_group = dist.new_group(backend="gloo")
        self.epochs: list[dict[str, float]] = []
        self.losses: list[float] = []

    def run(self, on_epoch: Callable[["ShardedTrainer"], None] = lambda trainer: None) -> None:
        """Train the epochs that are left, and call ``on_epoch`` after each, on all ranks."""
        while len(self.epochs) < self.config.epochs:
            started = time.perf_counter()
            train_loss = self._train_epoch(len(self.epochs))
            ne = self.evaluate()
            row = {"epoch": len(self.epochs) + 1, "train_loss": train_loss, "ne": ne}
            self.epochs.append({**row, "seconds": time.perf_counter() - started})
            on_epoch(self)

    def _train_epoch(self, epoch: int) -> float:
        self.model.train()
        config, requests = self.config, self.dataset.train
        order = np.random.default_rng((config.seed, epoch)).permutation(len(requests))
        rng = np.random.default_rng((config.seed, epoch, 1 + self.rank))
        hide = Hide(rng, config.hide_items, config.hide_users)
        steps = -(-len(order) // config.batch_size)
        parts = []
        for step, (part, _, _) in enumerate(self._progress(requests, order, f"epoch {epoch + 1}", hide), start=1):
            parts.append(part)
            self._set_learning_rates((epoch * steps + step) / max(config.epochs * steps, 1))
        losses = torch.stack(parts).double()
        dist.all_reduce(losses)
        self.losses += losses.tolist()
        mean = losses.mean().item()
        if not math.isfinite(mean):
            raise InputError(f"training loss must be finite, got {mean} in epoch {epoch + 1}.")
        return mean

    def _set_learning_rates(self, progress: float) -> None:
        """A half cosine from the highest to 0. The fused optimiser takes its rate over when a step zeroes gradients."""
        factor = 0.5 * (1 + math.cos(math.pi * progress))
        for optimizer, highest in (
            (self.dense, self.config.learning_rate),
            (self.model.fused_optimizer, self.config.learning_rate * self.config.embedding_boost),
        ):
            for group in optimizer.param_groups:
                group["lr"] = highest * factor

    @torch.no_grad()
    def evaluate(self) -> float:
        """NE on the held-out part, the same on all ranks."""
        self.model.eval()
        metric = NEMetric(
            world_size=self.world_size, my_rank=self.rank, batch_size=self.config.batch_size,
            tasks=[RecTaskInfo(name=_TASK)], window_size=10_000_000, compute_on_all_ranks=True,
        ).to(self.device)  # fmt: skip
        requests = self.dataset.held_out
        for _, logits, labels in self._progress(requests, np.arange(len(requests)), "held out"):
            probability = logits.double().sigmoid()
            metric.update(
                predictions={_TASK: probability}, labels={_TASK: labels.double()},
                weights={_TASK: torch.ones_like(probability)},
            )  # fmt: skip
        return metric.compute()[f"ne-{_TASK}|lifetime_ne"].item()

    def _progress(
        self, requests: Requests, order: np.ndarray, title: str, hide: Hide | None = None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """What the task keeps of each step of the pipeline."""
        size, schema = self.config.batch_size, self.dataset.schema
        iterator = batches(requests, schema, order, size, self.stage, self.rank, self.world_size, hide)
        if self.device.type == "cuda":
            iterator = (batch.pin_memory() for batch in iterator)
        steps = range(0, len(order), size)
        # disable=None: no bar where the output is not a terminal.
        for _ in tqdm(steps, desc=title, leave=False, disable=None if self.rank == 0 else True):
            yield self.pipeline.progress(iterator)

    def save(self, path: Path) -> None:
        """Gather everything on rank 0, which writes it; all ranks call this, and all raise if it fails."""
        mine = {
            "model": {name: _pieces(x) for name, x in self.model.state_dict().items()},
            "fused": {name: _pieces(x) for name, x in self._fused_state().items()},
            "rng": self._rng_state(),
        }
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(mine, gathered, group=self._host_group)
        failure: list[Exception | None] = [None]
        if gathered is not None:
            state = {
                "run": self._identity(),
                "model": _whole([rank["model"] for rank in gathered]),
                "fused_optimizer": _whole([rank["fused"] for rank in gathered]),
                "dense_optimizer": self.dense.state_dict(),
                "epochs": self.epochs,
                "rng": [rank["rng"] for rank in gathered],
            }
            try:
                write_atomically(path, lambda temporary: torch.save(state, temporary))
            except OSError as error:
                failure = [error]
        dist.broadcast_object_list(failure, group=self._host_group)
        if failure[0] is not None:
            raise failure[0]

    def load(self, path: Path) -> None:
        """Go on from a file that ``save`` wrote, which every rank reads.

        Raises:
            InputError: on all ranks, if for one of them the file is missing or damaged, or is of a run with other data
                or another configuration, or of other code. Nothing of it has been taken over.
        """
        state = self._read(path)
        # Sharded modules take their parts out of whole tables by themselves.
        self.model.load_state_dict(state["model"])
        for name, sharded in self._fused_state().items():
            whole = state["fused_optimizer"][name]
            for piece in sharded.local_shards():
                place = _place(piece.metadata.shard_offsets, piece.metadata.shard_sizes)
                piece.tensor.copy_(whole[place].reshape(piece.tensor.shape))
        self.dense.load_state_dict(state["dense_optimizer"])
        self.epochs = state["epochs"]
        rng = state["rng"][self.rank]
        torch.set_rng_state(rng["cpu"])
        if self.device.type == "cuda" and rng["cuda"] is not None:
            torch.cuda.set_rng_state(rng["cuda"], self.device)
        self._set_learning_rates(len(self.epochs) / max(self.config.epochs, 1))

    def _read(self, path: Path) -> dict[str, Any]:
        state: dict[str, Any] = {}
        fault = None
        try:
            state = read_checkpoint(path, _KEYS, self._identity())
            self._check(path, state)
        except InputError as error:
            fault = str(error)
        faults: list[str | None] = [None] * self.world_size
        # A rank that stopped alone would leave the others waiting, and perhaps the line unsaid.
        dist.all_gather_object(faults, fault, group=self._host_group)
        for fault in filter(None, faults):
            raise InputError(fault)
        return state

    def _check(self, path: Path, state: dict[str, Any]) -> None:
        theirs, fused = state["fused_optimizer"], _patterns(self._fused_state())
        if isinstance(theirs, dict):  # of which a rank knows the states of its own tables only
            theirs = {name: theirs.get(name) for name in fused}
        pattern = {
            "model": _patterns(self.model.state_dict()),
            "fused_optimizer": fused,
            "dense_optimizer": adamw_pattern(self.dense),
            "rng": [{"cpu": ..., "cuda": ...}] * self.world_size,
        }
        require_like(path, {**state, "fused_optimizer": theirs}, pattern)
        require_generators(path, **state["rng"][self.rank], device=self.device)
        require_epochs(path, state["epochs"], self.config.epochs, _COLUMNS)

    def _rng_state(self) -> dict[str, Tensor | None]:
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {"cpu": torch.get_rng_state(), "cuda": cuda}

    def _fused_state(self) -> dict[str, ShardedTensor]:
        """The tables' optimiser states: the very tensors that the optimiser reads."""
        states = self.model.fused_optimizer.state_dict()["state"]
        return {f"{table}/{name}": x for table, state in states.items() for name, x in state.items()}

    def _identity(self) -> dict[str, Any]:
        layout = {"sharding": self.sharding, "processes": self.world_size}
        return {**identity(self.dataset, self.config), **layout}


_Pieces = list[tuple[tuple[slice, ...], Tensor]]


def _place(offsets: list[int], sizes: list[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _pieces(x: Tensor | ShardedTensor) -> _Pieces:
    """This rank's part of a tensor, on the host, each with its place in the whole."""
    if not isinstance(x, ShardedTensor):
        return [(tuple(slice(0, size) for size in x.shape), x.detach().cpu())]
    return [
        (_place(piece.metadata.shard_offsets, piece.metadata.shard_sizes), piece.tensor.detach().cpu())
        for piece in x.local_shards()
    ]


def _patterns(tensors: Mapping[str, Tensor | ShardedTensor]) -> dict[str, Tensor]:
    """Tensors like the whole ones, without storage."""
    patterns = {}
    for name, x in tensors.items():
        if isinstance(x, ShardedTensor):
            shape, dtype = x.metadata().size, x.metadata().tensor_properties.dtype
        else:
            shape, dtype = x.shape, x.dtype
        patterns[name] = torch.empty(shape, dtype=dtype, device="meta")
    return patterns


def _whole(ranks: list[dict[str, _Pieces]]) -> dict[str, Tensor]:
    """The tensors that the ranks have pieces of."""
    result = {}
    # A rank knows the optimiser states of its own tables only.
    for name in dict.fromkeys(chain.from_iterable(ranks)):
        pieces = list(chain.from_iterable(rank.get(name, []) for rank in ranks))
        shape = [max(place[axis].stop for place, _ in pieces) for axis in range(len(pieces[0][0]))]
        result[name] = torch.empty(shape, dtype=pieces[0][1].dtype)
        for place, piece in pieces:
            result[name][place] = piece.reshape(result[name][place].shape)
    return result
