"""Training steps of the Kunlun model, jagged and padded: batches, contestants, the gate, what is measured."""

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..capturing import CapturedStep, with_capacity
from ..jagged_tensor import to_jagged_tensor
from ..layout import JaggedLayout
from ..modules.kunlun import Kunlun
from ..modules.kunlun_blocks import RankingHead
from ..modules.kunlun_config import EventTowerConfig, InteractionConfig
from ..testing.inputs import draw_lengths
from .kunlun_padded import PaddedEvents, PaddedKunlun, Windowed
from .memory import return_freed_memory, status_kib
from .timing import make_clock


@dataclass(frozen=True)
class Scenario:
    """A model and its batches.

    Attributes:
        towers: event towers by event type.
        batch: B.
        longest: lengths are cut here.
        lengths: a name that ``draw_lengths`` knows.
        mean_fill: mean length over longest length, where the distribution takes one.
        num_tokens: n. Public sources give no number; ours.
        embed_dim: E, likewise.
    """

    towers: dict[str, EventTowerConfig]
    batch: int
    longest: int
    lengths: str
    mean_fill: float = 0.3
    num_tokens: int = 16
    embed_dim: int = 256

    def times(self, count: int) -> "Scenario":
        """The same with ``count`` times as many samples."""
        return replace(self, batch=self.batch * count)

    def small(self) -> "Scenario":
        """The same at a size that a CPU runs in seconds."""
        towers = {
            name: replace(
                t, embed_dim=t.embed_dim // 8, num_seeds=(t.num_seeds or 0) // 4, num_tokens=t.num_tokens // 4,
                window=16, num_keys=32,
            )
            for name, t in self.towers.items()
        }  # fmt: skip
        return replace(self, towers=towers, batch=24, longest=self.longest // 8, embed_dim=32)


_WIDE = EventTowerConfig(512, 4, num_tokens=32, num_layers=4, window=100, num_seeds=128)
SCENARIOS = {
    "speed": Scenario({"click": _WIDE, "impression": _WIDE}, 512, 1024, "log_normal_fill", embed_dim=512),
    "memory": Scenario(
        {
            "click": EventTowerConfig(256, 8, num_tokens=32, num_layers=3, window=100),
            "impression": EventTowerConfig(128, 4, num_tokens=16, num_layers=2, window=50),
        },
        256, 512, "log_normal",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """One batch in both forms; the values are leaves, since embeddings get gradients.

    Attributes:
        tokens: ``[B, n, E]``.
        values: by event type, ``[T, E_t]``.
        offsets: by event type, ``[B + 1]``.
        timestamps: by event type, ``[T]``.
        labels: ``[B]``.
    """

    tokens: Tensor
    values: dict[str, Tensor]
    offsets: dict[str, Tensor]
    timestamps: dict[str, Tensor]
    labels: Tensor

    def packed(self) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Tokens, values, offsets, timestamps: the arguments of a ``Ranker``."""
        return self.tokens, self.values, self.offsets, self.timestamps

    def padded(self) -> dict[str, PaddedEvents]:
        """The events padded to the batch's longest; waits for the device."""
        events = {}
        for name, values in self.values.items():
            lengths = self.offsets[name].diff()
            longest = int(lengths.max())
            here = torch.arange(longest, device=values.device) < lengths[:, None]
            rows = values.new_zeros(len(lengths), longest, values.shape[1])
            stamps = self.timestamps[name].new_zeros(len(lengths), longest)
            rows = rows.index_put((here,), values.detach()).requires_grad_()
            events[name] = PaddedEvents(rows, lengths, stamps.index_put((here,), self.timestamps[name]))
        return events

    def jagged(self) -> tuple[Tensor, dict[str, Any], dict[str, Tensor], Tensor]:
        """Tokens, events as jagged tensors, timestamps, labels: inputs of a captured step."""
        events = {name: to_jagged_tensor(x, self.offsets[name]) for name, x in self.values.items()}
        return self.tokens, events, self.timestamps, self.labels

    def first(self, count: int, dtype: torch.dtype) -> "Batch":
        """The first samples, in another dtype; no views, for which a compiled model would be compiled again."""
        ends = {name: int(offsets[count]) for name, offsets in self.offsets.items()}
        return Batch(
            self.tokens[:count].detach().to(dtype, copy=True),
            {name: v[: ends[name]].detach().to(dtype, copy=True).requires_grad_() for name, v in self.values.items()},
            {name: o[: count + 1].clone() for name, o in self.offsets.items()},
            {name: t[: ends[name]].clone() for name, t in self.timestamps.items()},
            self.labels[:count].clone(),
        )


def make_batch(scenario: Scenario, seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """A seeded batch: normal embeddings, gaps from a second to weeks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    values, offsets, timestamps = {}, {}, {}
    for name, lengths in lengths_of(scenario, seed).items():
        values[name] = normal(int(lengths.sum()), scenario.towers[name].embed_dim).requires_grad_()
        offsets[name] = JaggedLayout.from_lengths(lengths).offsets.to(device)
        gaps = torch.rand(int(lengths.sum()), generator=generator).mul(14).exp().long()
        timestamps[name] = torch.cat([part.cumsum(0) for part in gaps.split(lengths.tolist())]).to(device)
    labels = torch.randint(0, 2, (scenario.batch,), generator=generator).to(device)
    return Batch(normal(scenario.batch, scenario.num_tokens, scenario.embed_dim), values, offsets, timestamps, labels)


def lengths_of(scenario: Scenario, seed: int) -> dict[str, Tensor]:
    """``[B]`` by event type, of a seeded batch."""
    facts = (scenario.lengths, scenario.batch, scenario.longest, scenario.mean_fill)
    return {name: draw_lengths(*facts, seed=seed * 16 + index) for index, name in enumerate(scenario.towers)}


class Ranker(nn.Module):
    """Stack and head; ``forward`` reads a batch in jagged form, ``padded`` in padded form."""

    def __init__(self, scenario: Scenario, backend: str) -> None:
        super().__init__()
        config = InteractionConfig(num_summary_tokens=scenario.num_tokens // 2)
        self.stack = Kunlun(scenario.num_tokens, scenario.embed_dim, scenario.towers, config, backend=backend)
        self.head = RankingHead(scenario.num_tokens, scenario.embed_dim)

    def forward(
        self, tokens: Tensor, values: dict[str, Tensor], offsets: dict[str, Tensor], timestamps: dict[str, Tensor]
    ) -> Tensor:
        """Logits ``[B]``."""
        events = {name: to_jagged_tensor(values[name], offsets[name]) for name in values}
        return self.head(self.stack(tokens, events, timestamps)).squeeze(1)


class PaddedRanker(nn.Module):
    """The same model on padded events."""

    def __init__(self, ranker: Ranker, windowed: Windowed) -> None:
        super().__init__()
        self.stack, self.head = PaddedKunlun(ranker.stack, windowed), ranker.head

    def forward(self, tokens: Tensor, events: dict[str, PaddedEvents]) -> Tensor:
        """Logits ``[B]``."""
        return self.head(self.stack(tokens, events)).squeeze(1)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-loss, at least in fp32."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return nn.functional.binary_cross_entropy_with_logits(logits.to(dtype), labels.to(dtype))


# A step: forward, backward, update. What it computes of a batch before the clock starts is ``prepare``.
Step = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        name: in rows.
        prepare: a batch to the form that the model reads (padded lookups yield padded rows, so that is not timed).
        logits: of a prepared batch.
        model: whose parameters are trained.
    """

    name: str
    prepare: Callable[[Batch], tuple[Any, ...]]
    logits: Callable[..., Tensor]
    model: nn.Module

    def make_step(self, capturable: bool = False) -> Step:
        """A training step of AdamW on a prepared batch and its labels."""
        fused = next(self.model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused, capturable=capturable and fused)

        def step(prepared: tuple[tuple[Any, ...], Tensor]) -> Tensor:
            arguments, labels = prepared
            loss = loss_of(self.logits(*arguments), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for leaf in _leaves(arguments):
                leaf.grad = None
            return loss.detach()

        return step


def capture(step: Step, batches: Sequence[Batch]) -> Callable[[Batch], Tensor]:
    """A step of jagged batches, captured with room for the largest of these, all of one number of samples."""
    tokens, events, timestamps, labels = batches[0].jagged()
    rows = {name: max(batch.values[name].shape[0] for batch in batches) for name in events}
    room = {name: with_capacity(x, rows[name], len(labels)) for name, x in events.items()}
    stamps = {name: x.new_zeros(rows[name]) for name, x in timestamps.items()}

    def run(tokens: Tensor, events: dict[str, Any], timestamps: dict[str, Tensor], labels: Tensor) -> Tensor:
        values = {name: x.values() for name, x in events.items()}
        offsets = {name: x.offsets() for name, x in events.items()}
        return step(((tokens, values, offsets, timestamps), labels))

    captured = CapturedStep(run, tokens, room, stamps, labels)
    return lambda batch: captured(*batch.jagged())


def _leaves(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    parts = arguments[1].values()
    return (part.rows if isinstance(part, PaddedEvents) else part for part in parts)


def _padded_form(batch: Batch) -> tuple[Any, ...]:
    return batch.tokens, batch.padded()


# One way each; with ``+compile`` behind it, the same compiled.
CONTESTANTS = tuple(kind + how for kind in ("jagged", "padded_sdpa", "padded_flex") for how in ("", "+compile"))


def make_contestant(name: str, ranker: Ranker) -> Contestant:
    """One of ``CONTESTANTS``."""
    if name not in CONTESTANTS:
        raise ValueError(f"name must be one of {', '.join(CONTESTANTS)}, got {name!r}.")
    kind, _, compiled = name.partition("+")
    model = ranker if kind == "jagged" else PaddedRanker(ranker, "flex" if kind == "padded_flex" else "sdpa")
    # Once for all lengths and batch sizes: compiling for those of the gate first takes minutes more.
    logits = torch.compile(model, dynamic=True) if compiled else model
    return Contestant(name, Batch.packed if kind == "jagged" else _padded_form, logits, model)


def check(ranker: Ranker, batch: Batch, count: int, contestant: Contestant) -> None:
    """Raise ``ValueError`` unless a contestant's logits and gradients are right on the first samples of a batch.

    Errors are norms over all logits, and over all gradients; see the module's docstring for what is allowed.
    """
    dtype = batch.tokens.dtype
    exact_ranker = copy.deepcopy(ranker).double()
    exact = _solve(make_contestant("padded_sdpa", exact_ranker), batch.first(count, torch.float64))
    yardstick = _solve(make_contestant("padded_sdpa", ranker), batch.first(count, dtype))
    actual = _solve(contestant, batch.first(count, dtype))
    for part, a, y, e in zip(("logits", "gradients"), actual, yardstick, exact, strict=True):
        allowed = 2 * (y - e).norm() + torch.finfo(dtype).eps * e.norm()
        error = (a - e).norm()
        if not error <= allowed:
            raise ValueError(f"{part} of {contestant.name} are off by {error:.3g}, allowed {allowed:.3g}.")


def _solve(contestant: Contestant, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits, and all gradients of parameters in one vector, in float64."""
    logits = contestant.logits(*contestant.prepare(batch))
    params = [p for _, p in sorted(_trained(contestant.model).items())]
    grads = torch.autograd.grad(loss_of(logits, batch.labels), params)
    return logits.detach().double(), torch.cat([g.detach().double().flatten() for g in grads])


def _trained(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under the names that they have in a ``Ranker``."""
    return {name.replace("stack.stack.", "stack."): p for name, p in model.named_parameters()}


def time_steps(contestant: Contestant, batches: list[Batch], repeats: int, device: torch.device) -> float:
    """Median milliseconds of a step, the batches in turn."""
    clock, step, samples = make_clock(device), contestant.make_step(), []
    prepared = [(contestant.prepare(batch), batch.labels) for batch in batches]
    for round_ in range(-2 * len(batches), repeats):
        start = clock.mark()
        step(prepared[round_ % len(batches)])
        end = clock.mark()
        clock.wait()
        if round_ >= 0:
            samples.append(clock.elapsed(start, end))
    return statistics.median(samples)


def peak_mib(contestant: Contestant, batch: Batch, device: torch.device) -> float:
    """MiB by which memory in use grows at most during one training step, the prepared batch included before."""
    step, prepared = contestant.make_step(), (contestant.prepare(batch), batch.labels)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step(prepared)
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return_freed_memory()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_kib("VmRSS")
    step(prepared)
    return (status_kib("VmHWM") - before) / 1024
