"""Peak memory of one forward and backward, beyond the inputs.

On a GPU the allocator counts. On a CPU nothing does, so each contestant runs in a fresh process, whose peak resident
size the kernel keeps: ``python -m jagged_attn.bench.memory`` with the arguments as JSON is that process.
"""

import contextlib
import ctypes
import json
import subprocess
import sys
from pathlib import Path

import torch

from .contestants import PEERS, Attempt, Backend
from .problem import make_problem
from .workloads import WORKLOADS

_MIB = 2**20
_CHILD_TIMEOUT_S = 600


def peak_mib_cuda(attempt: Attempt, device: torch.device) -> float:
    """MiB that the CUDA allocator handed out at most, less what was in use before."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    attempt.run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / _MIB


def peak_mib_cpu(workload: str, contestant: str, dtype: torch.dtype, seed: int, small: bool) -> float:
    """MiB by which the resident size of a fresh process grows at most.

    Raises:
        RuntimeError: the process failed; the message is its last line.
    """
    arguments = {
        "workload": workload, "contestant": contestant, "dtype": str(dtype).removeprefix("torch."), "seed": seed,
        "small": small, "threads": torch.get_num_threads(),
    }  # fmt: skip
    command = [sys.executable, "-m", __name__, json.dumps(arguments)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S)
    if child.returncode:
        last_lines = child.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"the process that measures memory failed: {last_lines[0]}")
    return float(child.stdout)


def _measure(workload: str, contestant: str, dtype: str, seed: int, small: bool, threads: int) -> float:
    torch.set_num_threads(threads)
    shape, device = WORKLOADS[workload], torch.device("cpu")
    runner = PEERS.get(contestant) or Backend(contestant)
    # At a small size first: the libraries and threads that a first call loads are not the contestant's memory.
    warm = make_problem(shape.small(), getattr(torch, dtype), device, seed)
    runner.attempt(runner.posed(warm)).run()
    attempt = runner.attempt(
        runner.posed(make_problem(shape.small() if small else shape, getattr(torch, dtype), device, seed))
    )
    return_freed_memory()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status_kib("VmRSS")
    attempt.run()
    return max(status_kib("VmHWM") - before, 0) / 1024


def return_freed_memory() -> None:
    """Make the C library give back what is free, so that the next call cannot reuse it unseen."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def status_kib(key: str) -> int:
    """A line of this process's ``/proc/self/status``, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {key}.")


if __name__ == "__main__":
    print(_measure(**json.loads(sys.argv[1])))
