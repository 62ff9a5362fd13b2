"""``python -m jagged_attn.bench.kunlun``: training steps of the Kunlun model, jagged against padded, time and memory.

    python -m jagged_attn.bench.kunlun speed --device cuda      two towers of width 512, B = 512, bf16
    python -m jagged_attn.bench.kunlun memory --device cpu      the published click and impression towers, B = 256, fp32

No figure is printed of a contestant that has not passed the gate: on some samples of the batch, its logits and the
gradients of all parameters are no further from the padded model in float64 than twice what the padded model in the same
dtype is. Each contestant runs in a process of its own, so that one that compiles for too long (``--limit``), or runs
out of memory, takes nothing from the others.
"""

import argparse
import contextlib
import copy
import json
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..jagged_tensor import to_jagged_tensor
from ..layout import JaggedLayout
from ..modules.kunlun import Kunlun
from ..modules.kunlun_blocks import RankingHead
from ..modules.kunlun_config import EventTowerConfig, InteractionConfig
from ..testing.inputs import draw_lengths
from .kunlun_padded import PaddedEvents, PaddedKunlun, Windowed
from .memory import return_freed_memory, status_kib
from .provenance import collect_provenance
from .timing import make_clock

_PACKAGE = Path(__file__).parents[1]
# What the process of a contestant does; a check would leave a CPU's peak memory where it was.
_STEPS = {"speed": ("check-and-time",), "memory": ("check", "peak")}


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

    def first(self, count: int, dtype: torch.dtype) -> "Batch":
        """The first samples, in another dtype."""
        ends = {name: int(offsets[count]) for name, offsets in self.offsets.items()}
        return Batch(
            self.tokens[:count].detach().to(dtype),
            {name: v[: ends[name]].detach().to(dtype).requires_grad_() for name, v in self.values.items()},
            {name: o[: count + 1] for name, o in self.offsets.items()},
            {name: t[: ends[name]] for name, t in self.timestamps.items()},
            self.labels[:count],
        )


def make_batch(scenario: Scenario, seed: int, device: torch.device, dtype: torch.dtype) -> Batch:
    """A seeded batch: normal embeddings, gaps from a second to weeks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    values, offsets, timestamps = {}, {}, {}
    for name, lengths in _draw_lengths(scenario, seed).items():
        values[name] = normal(int(lengths.sum()), scenario.towers[name].embed_dim).requires_grad_()
        offsets[name] = JaggedLayout.from_lengths(lengths).offsets.to(device)
        gaps = torch.rand(int(lengths.sum()), generator=generator).mul(14).exp().long()
        timestamps[name] = torch.cat([part.cumsum(0) for part in gaps.split(lengths.tolist())]).to(device)
    labels = torch.randint(0, 2, (scenario.batch,), generator=generator).to(device)
    return Batch(normal(scenario.batch, scenario.num_tokens, scenario.embed_dim), values, offsets, timestamps, labels)


def _draw_lengths(scenario: Scenario, seed: int) -> dict[str, Tensor]:
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

    def make_step(self) -> Step:
        """A training step of AdamW on a prepared batch and its labels."""
        fused = next(self.model.parameters()).is_cuda
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)

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


def _leaves(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    parts = arguments[1].values()
    return (part.rows if isinstance(part, PaddedEvents) else part for part in parts)


def _jagged_form(batch: Batch) -> tuple[Any, ...]:
    return batch.tokens, batch.values, batch.offsets, batch.timestamps


def _padded_form(batch: Batch) -> tuple[Any, ...]:
    return batch.tokens, batch.padded()


def make_contestant(name: str, ranker: Ranker) -> Contestant:
    """``jagged``, ``padded_sdpa`` or ``padded_flex``, each with ``+compile`` behind it or not."""
    kind, _, compiled = name.partition("+")
    model = ranker if kind == "jagged" else PaddedRanker(ranker, "flex" if kind == "padded_flex" else "sdpa")
    logits = torch.compile(model) if compiled else model
    return Contestant(name, _jagged_form if kind == "jagged" else _padded_form, logits, model)


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


def reason_of(error: BaseException) -> str:
    """What an exception says in its first line, and where it went through this package, innermost last."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # The compiler's exceptions have the frames that it traced in their message.
    frames += re.findall(r'File "([^"]+)", line (\d+)', str(error))
    own = [
        f"{Path(name).relative_to(_PACKAGE.parent)}:{line}"
        for name, line in frames
        if Path(name).is_relative_to(_PACKAGE) and name != __file__
    ]
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{reason} (at {', '.join(own[-3:])})" if own else reason


def _run_child(arguments: argparse.Namespace) -> float:
    """One step of ``_STEPS``, for one contestant, in this process."""
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    scenario, repeats = _scenario_of(arguments), arguments.repeats
    torch.manual_seed(arguments.seed)
    ranker = Ranker(scenario, arguments.backend).to(device, dtype)
    contestant = make_contestant(arguments.contestants[0], ranker)
    batches = [make_batch(scenario, arguments.seed + i, device, dtype) for i in range(arguments.batches)]
    if "check" in arguments.child:
        check(ranker, batches[0], min(16, scenario.batch), contestant)
    if "time" in arguments.child:
        return time_steps(contestant, batches, repeats, device)
    return peak_mib(contestant, batches[0], device) if arguments.child == "peak" else 0.0


def _figure_of(arguments: argparse.Namespace, name: str) -> float | str:
    """A contestant's figure, from processes of its own; or why there is none."""
    command = [sys.executable, "-m", __spec__.name, arguments.what, "--contestants", name]
    for option in ("device", "dtype", "backend", "seed", "batches", "repeats"):
        command += [f"--{option}", str(getattr(arguments, option))]
    command += ["--small"] if arguments.small else []
    end, figure = time.monotonic() + arguments.limit, 0.0
    for step in _STEPS[arguments.what]:
        try:
            left = max(end - time.monotonic(), 0.0)
            child = subprocess.run([*command, "--child", step], capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return f"not done within {arguments.limit:g} s"
        if child.returncode:
            return (child.stderr.strip().splitlines() or [f"its process ended with {child.returncode}"])[-1]
        result = json.loads(child.stdout.strip().splitlines()[-1])
        if isinstance(result, str):
            return result
        figure = result
    return figure


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 0 if every jagged contestant has a figure."""
    arguments = _parse(argv)
    if arguments.child:
        try:
            print(json.dumps(_run_child(arguments)))
        except Exception as error:  # whatever a contestant raises is its result
            print(json.dumps(reason_of(error)))
        return 0
    _print_facts(arguments)
    unit, figures = "ms a step" if arguments.what == "speed" else "MiB peak", {}
    for name in arguments.contestants:
        figures[name] = figure = _figure_of(arguments, name)
        shown = f"no figure: {figure}" if isinstance(figure, str) else f"{figure:10.1f} {unit}"
        print(f"{name:22s} {shown}", flush=True)
    numbers = {name: figure for name, figure in figures.items() if not isinstance(figure, str)}
    _print_ratio(arguments.what, numbers)
    return 0 if all(name in numbers for name in figures if name.startswith("jagged")) else 1


def _scenario_of(arguments: argparse.Namespace) -> Scenario:
    scenario = SCENARIOS[arguments.what]
    return scenario.small() if arguments.small else scenario


def _print_facts(arguments: argparse.Namespace) -> None:
    scenario, provenance = (
        _scenario_of(arguments),
        collect_provenance(torch.device(arguments.device), [], arguments.commit),
    )
    drawn = [_draw_lengths(scenario, arguments.seed + i) for i in range(arguments.batches)]
    fill = statistics.mean(x.float().mean().item() / scenario.longest for lengths in drawn for x in lengths.values())
    print(f"# python -m jagged_attn.bench.kunlun {' '.join(arguments.given)}")
    print(f"# {provenance.device}, torch {provenance.torch}, {provenance.date}, commit {provenance.commit}")
    print(f"# B = {scenario.batch}, longest {scenario.longest}, mean_fill {fill:.2f}, {arguments.dtype}", flush=True)


def _print_ratio(what: str, numbers: dict[str, float]) -> None:
    jagged = [figure for name, figure in numbers.items() if name.startswith("jagged")]
    padded = [figure for name, figure in numbers.items() if name.startswith("padded")]
    if jagged and padded:
        better = "times as fast" if what == "speed" else "of the memory"
        ratio = min(padded) / min(jagged) if what == "speed" else min(jagged) / min(padded)
        print(f"best jagged against best padded: {ratio:.2f} {better}")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jagged_attn.bench.kunlun", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("what", choices=list(SCENARIOS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float64"], help="default: bfloat16 on a GPU")
    parser.add_argument("--backend", default="auto", help="of the jagged model")
    parser.add_argument("--contestants", nargs="+", help="jagged, padded_sdpa, padded_flex, each also with +compile")
    parser.add_argument("--small", action="store_true", help="a size for a CPU and for tests")
    parser.add_argument("--batches", type=int, help="batches of different lengths, in turn (speed: 4, memory: 1)")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each contestant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what to say where the package does not lie in its repository")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that one contestant may take in all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.given = sys.argv[1:] if argv is None else argv
    on_gpu = arguments.device.startswith("cuda")
    arguments.dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    arguments.batches = arguments.batches or (4 if arguments.what == "speed" else 1)
    if arguments.contestants is None:
        arguments.contestants = ["jagged", "padded_sdpa"]
        if on_gpu and arguments.what == "speed":
            # What compiles longest comes last.
            slow = ["jagged+compile", "padded_sdpa+compile", "padded_flex", "padded_flex+compile"]
            arguments.contestants += slow
    return arguments


if __name__ == "__main__":
    sys.exit(main())
