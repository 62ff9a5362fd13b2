"""The emulator's tests run in a process of their own: kernels have to be decorated for the interpreter."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# The kernels under test are a package of this folder.
sys.path.insert(0, str(Path(__file__).parent))
COMMAND = "TRITON_INTERPRET=1 pytest tests/emulator"


def _reason() -> str:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return f"the emulator needs its own process: {COMMAND}"
    for module in ("triton.language.extra.tlx", "greenlet"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"the emulator needs {module} (pip install -r requirements-dev.txt; fbtriton==3.7.4)"
    return ""


REASON = _reason()

if not REASON:
    from jagged_attn.testing.emulator.pytest_plugin import pytest_configure as pytest_configure
    from jagged_attn.testing.emulator.pytest_plugin import pytest_generate_tests as pytest_generate_tests


class _Skipped(pytest.Module):
    """A test module that is not even imported."""

    def _getobj(self) -> object:
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if REASON else None
