"""The training loop: seeded, resumable bit for bit, and silent but for a progress bar and one line an epoch."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .checkpoints import adamw_pattern, read_checkpoint, require_epochs, require_generators, require_like
from .errors import InputError
from .metrics import Metrics, evaluate
from .model import ModelConfig, Pooling, RankingModel
from .outputs import write_atomically
from .requests import Batch, Dataset, Hide, Requests, make_batch

_KEYS = {"run", "model", "optimizer", "schedule", "epochs", "rng", "cuda_rng"}
_COLUMNS = ("epoch", "train_loss", "ne", "auc", "seconds")


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the numbers of a run, apart from the data.

    Attributes:
        pooling: see ``RankingModel``.
        seed: of the weights, the order of the requests, dropout and hiding.
        epochs: passes over the training requests.
        batch_size: requests of a batch.
        learning_rate: the highest; it falls to 0 along a half cosine.
        embedding_boost: by how much the embeddings learn faster: most rows are in few batches.
        weight_decay: of AdamW.
        hide_items: part of the item ids to hide in training.
        hide_users: part of the user ids to hide in training.
        model: sizes of the model.
    """

    pooling: Pooling = "attention"
    seed: int = 0
    epochs: int = 3
    batch_size: int = 128
    learning_rate: float = 4e-3
    embedding_boost: float = 10.0
    weight_decay: float = 1e-4
    hide_items: float = 0.0
    hide_users: float = 0.0
    model: ModelConfig = field(default_factory=ModelConfig)


class Trainer:
    """A run: model, optimiser, and how far it has come.

    Args:
        dataset: what to learn and what to predict.
        config: decides the numbers.
        device: where the model lives.
        backend: what runs the attention.
    """

    def __init__(self, dataset: Dataset, config: TrainConfig, device: torch.device, backend: str = "auto") -> None:
        torch.manual_seed(config.seed)
        self.dataset, self.config, self.device = dataset, config, device
        self.model = RankingModel(dataset.schema, config.model, config.pooling, backend).to(device)
        self.optimizer = _optimizer(self.model, config)
        steps = config.epochs * -(-len(dataset.train) // config.batch_size)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=max(steps, 1))
        self.epochs: list[dict[str, float]] = []

    @property
    def bayes(self) -> Metrics | None:
        """What the true click probabilities of the held-out part score, where the source knows them."""
        held_out = self.dataset.held_out
        if held_out.probability is None:
            return None
        return evaluate(torch.from_numpy(held_out.probability), torch.from_numpy(held_out.label))

    def run(self, on_epoch: Callable[["Trainer"], None] = lambda trainer: None) -> None:
        """Train the epochs that are left, and call ``on_epoch`` after each."""
        while len(self.epochs) < self.config.epochs:
            started = time.perf_counter()
            train_loss = self._train_epoch(len(self.epochs))
            metrics = self.evaluate()
            seconds = time.perf_counter() - started
            row = {"epoch": len(self.epochs) + 1, "train_loss": train_loss, **asdict(metrics), "seconds": seconds}
            self.epochs.append(row)
            on_epoch(self)

    def _train_epoch(self, epoch: int) -> float:
        self.model.train()
        # What an epoch draws on the host follows from the seed and its number, so a resumed run draws it again.
        rng = np.random.default_rng((self.config.seed, epoch))
        hide = Hide(rng, self.config.hide_items, self.config.hide_users)
        order = rng.permutation(len(self.dataset.train))
        title = f"epoch {epoch + 1}/{self.config.epochs}"
        total, count = 0.0, 0
        for batch in self._batches(self.dataset.train, order, title, hide):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(batch.features), batch.label)
            if not torch.isfinite(loss):
                raise InputError(f"training loss must be finite, got {loss.item()} in epoch {epoch + 1}.")
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            total, count = total + loss.item() * len(batch.label), count + len(batch.label)
        return total / count

    @torch.no_grad()
    def predict(self, requests: Requests) -> Tensor:
        """Click probabilities ``[C]`` of all candidates, on the CPU."""
        self.model.eval()
        order = np.arange(len(requests))
        logits = [self.model(batch.features).cpu() for batch in self._batches(requests, order, "held out")]
        return torch.cat(logits).double().sigmoid()

    def evaluate(self) -> Metrics:
        """NE and AUC on the held-out part."""
        return evaluate(self.predict(self.dataset.held_out), torch.from_numpy(self.dataset.held_out.label))

    def _batches(self, requests: Requests, order: np.ndarray, title: str, hide: Hide | None = None) -> Iterator[Batch]:
        size = self.config.batch_size
        # disable=None: no bar where the output is not a terminal.
        for start in tqdm(range(0, len(order), size), desc=title, leave=False, disable=None):
            batch = make_batch(requests, order[start : start + size], self.dataset.schema, hide)
            yield batch.to(self.device)

    def save(self, path: Path) -> None:
        """Write all that a run needs to go on as if it had never stopped."""
        state = {
            "run": identity(self.dataset, self.config),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "epochs": self.epochs,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        write_atomically(path, lambda temporary: torch.save(state, temporary))

    def load(self, path: Path) -> None:
        """Go on from a file that ``save`` wrote.

        Raises:
            InputError: the file is missing or damaged, or is of a run with other data or another configuration, or of
                other code. Nothing of it has been taken over.
        """
        state = read_checkpoint(path, _KEYS, identity(self.dataset, self.config))
        self._check(path, state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.epochs = state["epochs"]
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)

    def _check(self, path: Path, state: dict[str, Any]) -> None:
        pattern = {
            "model": self.model.state_dict(),
            "optimizer": adamw_pattern(self.optimizer),
            "schedule": self.schedule.state_dict(),
        }
        require_like(path, state, pattern)
        require_generators(path, state["rng"], state["cuda_rng"], self.device)
        require_epochs(path, state["epochs"], self.config.epochs, _COLUMNS)


def identity(dataset: Dataset, config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint says of its run: data and configuration."""
    fields = asdict(config)
    return {
        "data": dataset.name,
        **{f"schema.{name}": value for name, value in asdict(dataset.schema).items()},
        "training requests": len(dataset.train),
        **{f"model.{name}": value for name, value in fields.pop("model").items()},
        **fields,
    }


def _optimizer(model: RankingModel, config: TrainConfig) -> torch.optim.Optimizer:
    embeddings = set(model.embedding.parameters())
    others = [parameter for parameter in model.parameters() if parameter not in embeddings]
    groups = [
        {"params": others, "lr": config.learning_rate},
        {"params": list(model.embedding.parameters()), "lr": config.learning_rate * config.embedding_boost},
    ]
    return torch.optim.AdamW(groups, weight_decay=config.weight_decay)
