"""The ``emulator`` marker: a test that takes ``schedule`` runs once for each.

Import the two hooks in a ``conftest.py``:

    from jagged_attn.testing.emulator.pytest_plugin import pytest_configure, pytest_generate_tests

A kernel test is then::

    @pytest.mark.emulator(roles=("load", "mma"), seeds=3)
    def test_forward(schedule):
        KernelCase(kernel, grid, arguments, references, tolerances).check(schedule)
"""

from __future__ import annotations

import pytest

from .schedules import standard_schedules


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    text = "emulator(seeds=3, roles=()): run in the TLX emulator, under every schedule policy; needs TRITON_INTERPRET=1"
    config.addinivalue_line("markers", text)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``schedule`` for marked tests."""
    marker = metafunc.definition.get_closest_marker("emulator")
    if marker is not None and "schedule" in metafunc.fixturenames:
        schedules = standard_schedules(**marker.kwargs)
        metafunc.parametrize("schedule", schedules, ids=[str(s) for s in schedules])
