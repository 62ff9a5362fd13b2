"""What the command lines take: sizes in range, devices and backends that exist, files that can be written.

Each is a ``type`` of an ``argparse`` option, so what is wrong is said before anything else is done, in one line with
the option, what it must be and what it got, and the exit code is 2. Looking whether a file can be written leaves
nothing behind, and what an existing file holds as it is.
"""

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

import torch

from ..backends import BACKENDS

BACKEND_NAMES = ("auto", *BACKENDS)


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations, and says what is wrong in one line, without the usage; one process of each host does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """End with one line on standard error and exit code 2."""
        line = message.removeprefix("argument ").replace(": must ", " must ", 1).rstrip(".")
        # Torchrun starts several processes of one command line.
        self.exit(2, f"{self.prog}: {line}.\n" if os.environ.get("LOCAL_RANK", "0") == "0" else None)

    def convert(self, option: str, kind: Callable[[str], Any], text: str) -> Any:
        """The value of an option whose text was made up where none was given."""
        try:
            return kind(text)
        except argparse.ArgumentTypeError as error:
            self.error(f"{option} {error}")


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command as a process, to its end and its files even if nobody reads its output any more (``| head``).

    Args:
        main: returns the exit code; ``None`` is 0.
    """
    sys.stdout = cast(TextIO, _Patient(sys.stdout))
    sys.exit(main())


class _Patient:
    """Standard output that goes nowhere once its reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except BrokenPipeError:
            # What the stream still holds goes there, too, when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    """Whole numbers from ``least`` to ``most``."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {number}")
        if number > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, got {number}")
        return number

    return convert


natural = whole(1)
# What both PyTorch's and NumPy's generators take.
seed_number = whole(0, 2**32 - 1)


def positive(text: str) -> float:
    """A number above 0, up to 1e9."""
    number = _number(text)
    if not 0 < number <= 1e9:
        raise argparse.ArgumentTypeError(f"must be a number above 0, up to 1e9, got {text}")
    return number


def not_negative(text: str) -> float:
    """A number from 0 to 1e9."""
    number = _number(text)
    if not 0 <= number <= 1e9:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1e9, got {text}")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def device_here(text: str) -> torch.device:
    """A CPU, or a CUDA GPU that is here."""
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text}") from None
    if found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"must be cpu or cuda, got {text}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= gpus:
        here = f"cuda:0 to cuda:{gpus - 1} or cpu" if gpus else "cpu where there is no CUDA GPU"
        raise argparse.ArgumentTypeError(f"must be {here}, got {text}")
    return found


def has_gpu_for_each_process() -> bool:
    """Whether each of the processes that torchrun started on this host can have a CUDA GPU of its own."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.cuda.is_available() and torch.cuda.device_count() >= processes


def default_device() -> str:
    """``cuda`` where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def output_file(*suffixes: str) -> Callable[[str], Path]:
    """Files that can be written, with one of the suffixes if any are named; their folders need not exist yet."""

    def convert(text: str) -> Path:
        path = Path(text)
        if suffixes and path.suffix not in suffixes:
            raise argparse.ArgumentTypeError(f"must be a file that ends with {' or '.join(suffixes)}, got {text}")
        try:
            _check_writable(path)
        except OSError as error:
            reason = f"{text} ({error.strerror})"
            raise argparse.ArgumentTypeError(f"must be a file that can be written, got {reason}") from None
        return path

    return convert


def output_folder(names: Sequence[str]) -> Callable[[str], Path]:
    """Folders, there already or not, in which files of these names can be written."""

    def convert(text: str) -> Path:
        try:
            for name in names:
                _check_writable(Path(text) / name)
        except OSError as error:
            wanted = f"a folder in which {', '.join(names)} can be written"
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text} ({error.strerror})") from None
        return Path(text)

    return convert


def _check_writable(path: Path) -> None:
    """Raise ``OSError`` unless a file can be made at ``path``, or written if it is there; changes nothing."""
    if path.exists():
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return
    folder = path.parent
    # A link that leads nowhere does not exist, but no folder can be made in its place.
    while not folder.exists() and not folder.is_symlink():
        folder = folder.parent
    tempfile.TemporaryFile(dir=folder).close()
