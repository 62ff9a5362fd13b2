"""Starts processes that form a process group, and ends them whatever happens."""

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

GRACE = 5.0


def run_ranks(job: Callable[[Path], Any], folder: Path, world_size: int = 2, timeout: float = 60) -> list[Any]:
    """``job(folder)`` on each rank of a gloo group; what the ranks return, through ``torch.save``.

    The test fails with the tracebacks of the ranks that failed, or because the ranks were not done in time. In either
    case no process is left.

    Args:
        job: a function that a new interpreter can import.
        folder: where the ranks meet and leave their results; empty.
        world_size: number of processes.
        timeout: seconds for everything.
    """
    processes = [
        mp.get_context("spawn").Process(target=_run_rank, args=(job, folder, rank, world_size, timeout), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
            if any(process.exitcode for process in processes):
                # The others may be about to say why they fail too; or they wait for the one that is gone.
                deadline = min(deadline, time.monotonic() + GRACE)
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [path.read_text() for path in sorted(folder.glob("error*"))]
    if errors:
        pytest.fail("\n".join(errors))
    if late:
        pytest.fail(f"ranks {late} were not done after {timeout:.0f} s")
    return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(world_size)]


def _run_rank(job: Callable[[Path], Any], folder: Path, rank: int, world_size: int, timeout: float) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{folder}/meeting", timedelta(seconds=timeout), rank=rank, world_size=world_size
        )
        torch.save(job(folder), folder / f"result{rank}")
        dist.destroy_process_group()
    except BaseException:
        (folder / f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
