"""Train one model on one log; both models go through the same lines."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from ranking.errors import InputError
from ranking.metrics import Metrics, evaluate
from torch import Tensor, nn
from tqdm import tqdm

from .batches import make_batch
from .model import KunlunConfig, make_model
from .synthetic import Log


@dataclass(frozen=True)
class TrainConfig:
    """What decides the numbers of a run, apart from the log.

    Attributes:
        model: ``"kunlun"`` or ``"ranking"``.
        seed: of weights, order and dropout.
        epochs: passes over the training part.
        batch_size: requests of a batch.
        learning_rate: the highest; it rises over the first tenth of all steps, and falls along a half cosine.
        weight_decay: of AdamW.
        held_out: ``"test"``, or ``"validation"`` for tuning.
        kunlun: sizes.
    """

    model: str = "kunlun"
    seed: int = 0
    epochs: int = 10
    batch_size: int = 128
    learning_rate: float = 4e-3
    weight_decay: float = 1e-4
    held_out: str = "test"
    kunlun: KunlunConfig = KunlunConfig()  # noqa: RUF009  it is frozen


class Trainer:
    """A run.

    Args:
        log: what to learn and what to predict.
        config: decides the numbers.
        device: where the model lives.
        backend: what runs the attention.
    """

    def __init__(self, log: Log, config: TrainConfig, device: torch.device, backend: str = "auto") -> None:
        torch.manual_seed(config.seed)
        self.log, self.config, self.device = log, config, device
        self.train, self.held_out = log.split(config.held_out)
        self.model: nn.Module = make_model(config.model, log, config.kunlun, backend).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        steps = config.epochs * -(-len(self.train) // config.batch_size)
        # Without the rise, some seeds lose the whole of their first epochs.
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, config.learning_rate, steps, pct_start=0.1, cycle_momentum=False
        )
        self.epochs: list[dict[str, float]] = []

    @property
    def bayes(self) -> Metrics:
        """What the true probabilities of the held-out part score."""
        return evaluate(torch.from_numpy(self.log.probability[self.held_out]), self._labels())

    def run(self, on_epoch: Callable[["Trainer"], None] = lambda trainer: None) -> dict[str, float]:
        """Train; calls ``on_epoch`` after each epoch; returns the last epoch's row."""
        for epoch in range(self.config.epochs):
            loss = self._train_epoch(epoch)
            metrics = evaluate(self.predict(self.held_out), self._labels())
            self.epochs.append({"epoch": epoch + 1, "train_loss": loss, **asdict(metrics)})
            on_epoch(self)
        return self.epochs[-1]

    def _labels(self) -> Tensor:
        return torch.from_numpy(self.log.label[self.held_out])

    def _train_epoch(self, epoch: int) -> float:
        self.model.train()
        order = np.random.default_rng((self.config.seed, epoch)).permutation(self.train)
        total = 0.0
        for index in self._slices(order, f"epoch {epoch + 1}/{self.config.epochs}"):
            batch = make_batch(self.log, index).to(self.device)
            loss = nn.functional.binary_cross_entropy_with_logits(self.model(batch), batch.label)
            if not torch.isfinite(loss):
                raise InputError(f"training loss must be finite, got {loss.item()} in epoch {epoch + 1}.")
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.schedule.step()
            total += loss.item() * len(index)
        return total / len(order)

    @torch.no_grad()
    def predict(self, index: np.ndarray) -> Tensor:
        """Click probabilities ``[n]`` of the requests at ``index``, on the CPU."""
        self.model.eval()
        batches = (make_batch(self.log, part).to(self.device) for part in self._slices(index, "held out"))
        return torch.cat([self.model(batch).cpu() for batch in batches]).double().sigmoid()

    def _slices(self, order: np.ndarray, title: str) -> Iterator[np.ndarray]:
        size = self.config.batch_size
        # disable=None: no bar where the output is not a terminal.
        for start in tqdm(range(0, len(order), size), desc=title, leave=False, disable=None):
            yield order[start : start + size]
