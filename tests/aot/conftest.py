"""Ahead-of-time compilation needs a process whose kernels are not decorated for the interpreter."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

COMMAND = "pytest tests/aot"
# The kernels are those of the emulator's tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "emulator"))


def _reason() -> str:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return f"ahead-of-time compilation needs its own process, without TRITON_INTERPRET: {COMMAND}"
    try:
        found = importlib.util.find_spec("triton.language.extra.tlx")
    except ModuleNotFoundError:
        found = None
    return "" if found else "ahead-of-time compilation needs fbtriton==3.7.4"


REASON = _reason()


class _Skipped(pytest.Module):
    """A test module that is not even imported."""

    def _getobj(self) -> object:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if REASON else None
