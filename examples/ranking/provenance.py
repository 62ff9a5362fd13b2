"""Where a figure comes from: date, command, versions, machine."""

import datetime
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def provenance(device: torch.device) -> dict[str, str]:
    """Columns that say when, how and on what a figure was made."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": shlex.join(["python", *(Path(sys.argv[0]).name if i == 0 else a for i, a in enumerate(sys.argv))]),
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchrec": _version("torchrec"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(),
        "threads": str(torch.get_num_threads()),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _commit() -> str:
    """The commit that is checked out; ``+`` says that tracked files differ from it."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        dirty = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", here.parent], cwd=here, capture_output=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + "+" * (dirty.returncode == 1) if head.returncode == 0 else "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
