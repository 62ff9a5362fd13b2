"""``python -m jagged_attn.bench.scaling``, under torchrun: the Kunlun model on many ranks, right and how fast.

    torchrun --standalone --nproc-per-node 2 -m jagged_attn.bench.scaling check --backend-comm nccl
    torchrun --standalone --nproc-per-node 2 -m jagged_attn.bench.scaling speed --backend-comm nccl --out s.csv
    torchrun --standalone --nproc-per-node 2 -m jagged_attn.bench.scaling check --backend-comm gloo --small

``check`` trains on all ranks and on one process, and compares losses and parameters (``scaling_checks``): with equal
shares, with gradients accumulated over two micro-batches, with a rank whose histories are all empty or that has no
sample at all, and in mixed precision.

``speed`` measures weak scaling: rank 0 alone trains on the batches of all ranks in turn, the others idle; then all
ranks train on theirs at once. Efficiency is ``W · t_alone / t_all``, W ranks being the most that it can be. A figure is
printed only after the losses of the first steps were checked.

FSDP2 has the parameters of a group packed into one, unless ``--unpacked`` is given, in ``check`` and ``speed`` alike.
With ``--captured`` the steps are CUDA graphs, all of it: forward, backward, collectives and update, alone and together.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .arguments import (
    BACKEND_NAMES,
    Parser,
    has_gpu_for_each_process,
    natural,
    output_file,
    positive,
    run_command,
    seed_number,
)
from .kunlun_steps import SCENARIOS, Batch, Contestant, Ranker, Scenario, capture, make_batch
from .provenance import collect_provenance
from .report import write_rows
from .scaling_checks import CHECKS, PARALLEL, Parallel, check, parallelize

# Samples of a rank in the checks, which run on one process too.
_CHECKED = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line on this rank; 0 if everything is right."""
    options = _parse(argv)
    if "RANK" not in os.environ:
        print("scaling: must be started by torchrun, see --help.", file=sys.stderr)
        return 2
    device = _device(options.backend_comm)
    bound: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(options.backend_comm, timeout=timedelta(seconds=options.timeout), **bound)
    try:
        return _check(options, device) if options.what == "check" else _speed(options, device, argv)
    finally:
        dist.destroy_process_group()


def _device(communication: str) -> torch.device:
    if communication == "gloo":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def scenario_of(options: argparse.Namespace) -> Scenario:
    """The sizes that the options ask for: those of the Kunlun speed benchmark unless ``--small``."""
    scenario = SCENARIOS["speed"].small() if options.small else SCENARIOS["speed"]
    batch = options.batch or (min(_CHECKED, scenario.batch) if options.what == "check" else scenario.batch)
    return replace(scenario, batch=batch)


def _ways(options: argparse.Namespace) -> dict[str, bool]:
    """What the options say of the way that the model is trained in checks and in speed."""
    return {"compiled": options.compile, "pack": not options.unpacked, "captured": options.captured}


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def _check(options: argparse.Namespace, device: torch.device) -> int:
    """All checks; a rank that fails one raises, which ends the others."""
    for how in options.parallel:
        for what in options.checks:
            ratios = check(what, how, scenario_of(options), device, options.backend, **_ways(options))
            shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
            _say(f"{how:11s} {what:12s} right: {shown} of what is allowed")
    return 0


def _speed(options: argparse.Namespace, device: torch.device, argv: Sequence[str] | None) -> int:
    rank, world_size, scenario = dist.get_rank(), dist.get_world_size(), scenario_of(options)
    program = ("torchrun", "--nproc-per-node", str(world_size), "-m", "jagged_attn.bench.scaling")
    provenance = collect_provenance(device, argv, options.commit, program)
    _say(f"# {provenance.command}\n# {world_size} x {provenance.device}, torch {provenance.torch}, {provenance.date}")
    _say(f"# B = {scenario.batch} a rank, longest {scenario.longest}, mean_fill {scenario.mean_fill}, {options.dtype}")
    for how in options.parallel:
        checked = replace(scenario, batch=min(_CHECKED, scenario.batch))
        check("plain", how, checked, device, options.backend, **_ways(options))
        _say(f"# {how}: losses and parameters are right with {checked.batch} samples a rank")
    dtype = getattr(torch, options.dtype)
    # Those of all ranks, the own ones first; only rank 0 keeps the others'.
    ranks = [rank, *(other for other in range(world_size) if other != rank and rank == 0)]
    batches = [make_batch(scenario, who * 1000 + i, device, dtype) for who in ranks for i in range(options.batches)]
    own = batches[: options.batches]
    rows: list[dict[str, Any]] = []
    alone = 0.0
    for how in ("none", *options.parallel):
        torch.manual_seed(options.seed)
        ranker = Ranker(scenario, options.backend).to(device, dtype)
        model = parallelize(ranker, how, device, keep=not options.reshard, **_ways(options))
        step_ms = 0.0
        if how != "none" or rank == 0:
            timed = batches if how == "none" else own
            # One capacity alone and together.
            room = batches if options.captured else []
            step_ms = _time_steps(model, timed, options.steps, device, together=how != "none", room=room)
        step_ms = _largest(step_ms, device)
        alone = step_ms if how == "none" else alone
        ranks_now = 1 if how == "none" else world_size
        efficiency = ranks_now * alone / step_ms
        rows.append({"parallel": how, "ranks": ranks_now, "step_ms": step_ms, "scaling": efficiency})
        _say(f"{how:11s} {ranks_now} ranks {step_ms:10.2f} ms a step, {efficiency:.3f} of {ranks_now}")
        if rank == 0 and options.out:
            facts = asdict(provenance)
            write_rows(options.out, [*rows[0], *facts], (row | facts for row in rows))
        del model
    return 0


def _time_steps(
    model: nn.Module, batches: Sequence[Batch], steps: int, device: torch.device, together: bool, room: Sequence[Batch]
) -> float:
    """Mean milliseconds of a step, the batches in turn; whole turns, so that each counts alike.

    With ``room`` the step is captured, with room for the largest of these batches.
    """
    contestant = Contestant("", Batch.packed, model, model)
    step = contestant.make_step(capturable=bool(room))
    prepared: list[Any] = list(batches)
    if room:
        step = capture(step, room)
    else:
        prepared = [(contestant.prepare(batch), batch.labels) for batch in batches]
    turns = max(steps // len(batches), 1)
    for _ in range(2):
        for arguments in prepared:
            step(arguments)
    _wait(device, together)
    started = time.perf_counter()
    for _ in range(turns):
        for arguments in prepared:
            step(arguments)
    _wait(device, together=False)
    return (time.perf_counter() - started) * 1e3 / (turns * len(batches))


def _wait(device: torch.device, together: bool) -> None:
    if together:
        dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _largest(x: float, device: torch.device) -> float:
    tensor = torch.tensor(x, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m jagged_attn.bench.scaling", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("what", choices=["check", "speed"])
    parser.add_argument("--backend-comm", choices=["gloo", "nccl"], default="gloo", help="gloo: CPUs; nccl: GPUs")
    choices: list[Parallel] = [how for how in PARALLEL if how != "none"]
    parser.add_argument("--parallel", nargs="+", choices=choices, default=choices)
    parser.add_argument("--checks", nargs="+", choices=CHECKS, help="default: all, with --captured the plain one")
    parser.add_argument("--backend", default="auto", choices=BACKEND_NAMES, help="what runs the attention")
    parser.add_argument("--compile", action="store_true", help="the layers, one by one, on all ranks and alone")
    parser.add_argument("--unpacked", action="store_true", help="FSDP2 sees each parameter, in place of one a group")
    parser.add_argument("--captured", action="store_true", help="steps are CUDA graphs")
    parser.add_argument("--reshard", action="store_true", help="speed: FSDP2 gathers again for the backward")
    parser.add_argument("--small", action="store_true", help="a size for a CPU and for tests")
    parser.add_argument("--batch", type=natural, help=f"samples of a rank (default: 512; {_CHECKED} in checks)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of speed (default: bfloat16 on a GPU)")
    parser.add_argument("--batches", type=natural, default=4, help="batches of a rank, in turn")
    parser.add_argument("--steps", type=natural, default=40, help="timed steps")
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--timeout", type=positive, default=120, help="seconds to wait for another process")
    parser.add_argument("--out", type=output_file(), metavar="CSV", help="write the figures, each with its provenance")
    parser.add_argument("--commit", help="what to say where the package does not lie in its repository")
    options = parser.parse_args(argv)
    options.dtype = options.dtype or ("bfloat16" if options.backend_comm == "nccl" else "float32")
    allowed = ["plain"] if options.captured else list(CHECKS)
    options.checks = options.checks or allowed
    if not set(options.checks) <= set(allowed):
        parser.error(f"--checks must be plain with --captured, got {' '.join(options.checks)}")
    if options.backend_comm == "nccl" and not has_gpu_for_each_process():
        parser.error("--backend-comm must be gloo where there is not a CUDA GPU for each process, got nccl")
    return options


if __name__ == "__main__":
    run_command(main)
