"""Where a figure comes from: device, date, command, versions."""

import importlib.metadata
import importlib.util
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Provenance:
    """The birth certificate that every row of a run carries.

    Attributes:
        date: UTC, to the second.
        device: name of the GPU, or of the processor with the number of threads.
        driver: of the GPU; empty on a CPU.
        command: what was run.
        commit: of this repository; ``+changes`` behind it if files differ from it.
        python: version.
        torch: version.
        triton: version of the ``triton`` module, and whether it has TLX; empty if there is none.
        fa4: version of FlashAttention-4; empty if there is none.
    """

    date: str
    device: str
    driver: str
    command: str
    commit: str
    python: str
    torch: str
    triton: str
    fa4: str


def collect_provenance(
    device: torch.device,
    arguments: Sequence[str] | None,
    commit: str | None,
    program: Sequence[str] = ("python", "-m", "jagged_attn.bench"),
) -> Provenance:
    """The facts of this run.

    Args:
        device: where it runs.
        arguments: of the command line, without the program's name; ``None``: those of the process.
        commit: what to say where the package does not lie in its repository; asked of git otherwise.
        program: what is typed before the arguments.
    """
    on_gpu = device.type == "cuda"
    return Provenance(
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=torch.cuda.get_device_name(device) if on_gpu else f"{_processor()}, {torch.get_num_threads()} threads",
        driver=_run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
        if on_gpu
        else "",
        command=_command_line(*program, *(sys.argv[1:] if arguments is None else arguments)),
        commit=commit or commit_of(Path(__file__).parents[1]),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_triton(),
        fa4=_flash_attention_4(),
    )


def _command_line(*words: str) -> str:
    """A command as others would type it: files by their names, since their folders say where somebody works."""

    def short(word: str) -> str:
        option, equals, value = word.rpartition("=")
        return option + equals + (Path(value).name if Path(value).is_absolute() else value)

    return shlex.join(map(short, words))


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN


def commit_of(package: Path) -> str:
    """The commit that a folder of the package is at, ``+changes`` behind it if its files differ."""
    commit = _run("git", "-C", str(package), "rev-parse", "--short=12", "HEAD")
    if commit == UNKNOWN:
        return UNKNOWN
    # Only files that can change a figure count.
    changes = _run("git", "-C", str(package), "status", "--porcelain", "--untracked-files=no", "--", ".")
    return f"{commit}+changes" if changes else commit


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _triton() -> str:
    # Several distributions provide this module, and more than one may be installed: the module itself is asked.
    try:
        import triton
    except Exception:  # a broken install fails in more ways than ImportError
        return ""
    has_tlx = importlib.util.find_spec("triton.language.extra.tlx") is not None
    return f"{triton.__version__}{' with TLX' if has_tlx else ''}"


def _flash_attention_4() -> str:
    try:
        return importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return ""
