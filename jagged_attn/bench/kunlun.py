"""``python -m jagged_attn.bench.kunlun``: training steps of the Kunlun model, jagged against padded, time and memory.

    python -m jagged_attn.bench.kunlun speed --device cuda      two towers of width 512, B = 512, bf16
    python -m jagged_attn.bench.kunlun memory --device cpu      the published click and impression towers, B = 256, fp32

No figure is printed of a contestant that has not passed the gate: on some samples of the batch, its logits and the
gradients of all parameters are no further from the padded model in float64 than twice what the padded model in the same
dtype is. Each contestant runs in a process of its own, so that one that compiles for too long (``--limit``), or runs
out of memory, takes nothing from the others.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from . import kunlun_steps
from .arguments import BACKEND_NAMES, Parser, default_device, device_here, natural, positive, run_command, seed_number
from .kunlun_steps import (
    CONTESTANTS,
    SCENARIOS,
    Ranker,
    Scenario,
    check,
    lengths_of,
    make_batch,
    make_contestant,
    peak_mib,
    time_steps,
)
from .provenance import collect_provenance
from .timing import compiled_throughout

_PACKAGE = Path(__file__).parents[1]
_HARNESS = (__file__, kunlun_steps.__file__)
# What the processes of a contestant do: on a CPU the peak memory of a check would hide that of a step.
# Samples that the gate looks at: a size that nothing else has, or a compiler would take the two for one.
_CHECKED = 13
_STEPS = {"speed": ("check-and-time",), "memory": ("check", "peak")}


def reason_of(error: BaseException) -> str:
    """What an exception says in its first line, and where it went through this package, innermost last."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    # The compiler's exceptions have the frames that it traced in their message.
    frames += re.findall(r'File "([^"]+)", line (\d+)', str(error))
    own = [
        f"{Path(name).relative_to(_PACKAGE.parent)}:{line}"
        for name, line in frames
        if Path(name).is_relative_to(_PACKAGE) and name not in _HARNESS
    ]
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    # "An exception occurred in a subprocess:" says what only in the end.
    reason = " ".join(lines[:: max(len(lines) - 1, 1)]) if lines[0].endswith(":") else lines[0]
    return f"{reason} (at {', '.join(own[-3:])})" if own else reason


@compiled_throughout()
def _run_child(arguments: argparse.Namespace) -> float:
    """One step of ``_STEPS``, for one contestant, in this process."""
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    scenario = _scenario_of(arguments)
    torch.manual_seed(arguments.seed)
    ranker = Ranker(scenario, arguments.backend).to(device, dtype)
    contestant = make_contestant(arguments.contestants[0], ranker)
    batches = [make_batch(scenario, arguments.seed + i, device, dtype) for i in range(arguments.batches)]
    if "check" in arguments.child:
        check(ranker, batches[0], min(_CHECKED, scenario.batch), contestant)
    if "time" in arguments.child:
        return time_steps(contestant, batches, arguments.repeats, device)
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
            words = child.stderr.strip().splitlines()[-1:]
            return ": ".join([f"its process ended with {child.returncode}", *words])
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
    scenario = _scenario_of(arguments)
    program = ("python", "-m", "jagged_attn.bench.kunlun")
    provenance = collect_provenance(arguments.device, arguments.given, arguments.commit, program)
    drawn = [lengths_of(scenario, arguments.seed + i) for i in range(arguments.batches)]
    fill = statistics.mean(x.float().mean().item() / scenario.longest for lengths in drawn for x in lengths.values())
    print(f"# {provenance.command}")
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
    parser = Parser(prog="python -m jagged_attn.bench.kunlun", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=list(SCENARIOS))
    parser.add_argument("--device", type=device_here, default=default_device())
    parser.add_argument("--dtype", choices=["bfloat16", "float32", "float64"], help="default: bfloat16 on a GPU")
    parser.add_argument("--backend", default="auto", choices=BACKEND_NAMES, help="of the jagged model")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, metavar="NAME", help=", ".join(CONTESTANTS))
    parser.add_argument("--small", action="store_true", help="a size for a CPU and for tests")
    parser.add_argument("--batches", type=natural, help="batches of different lengths, in turn (speed: 4, memory: 1)")
    parser.add_argument("--repeats", type=natural, default=20, help="timed steps of each contestant")
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--commit", help="what to say where the package does not lie in its repository")
    parser.add_argument("--limit", type=positive, default=600.0, help="seconds that one contestant may take in all")
    parser.add_argument("--child", choices=[*_STEPS["speed"], *_STEPS["memory"]], help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.given = argv
    on_gpu = arguments.device.type == "cuda"
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
    run_command(main)
