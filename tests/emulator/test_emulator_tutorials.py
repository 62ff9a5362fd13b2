"""False alarms: the attention tutorials that fbtriton ships give right numbers and no report, in the default mode."""

from pathlib import Path

import pytest

from jagged_attn.testing.emulator import HOUSE_RULES, Checks, EmulatorError, Launch, Schedule
from jagged_attn.testing.emulator.language import TLX

from . import tutorials

SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("starve:mma"), Schedule("starve:tma_load")]
SCHEDULES += [Schedule("random", s) for s in range(2)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", tutorials.FORWARDS)
def test_forward(name, schedule):
    module, kernel, grid, config, extra = tutorials.FORWARDS[name]
    tutorials.forward(module, kernel, grid, config, Launch(schedule, resident=2), **extra)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_backward(causal, schedule):
    tutorials.backward(int(causal), Launch(schedule), causal)


@pytest.mark.parametrize("schedule", [*SCHEDULES, Schedule("starve:remote")], ids=str)
def test_backward_of_two_ctas(schedule):
    """A commit for both CTAs leaves a barrier that only the first one uses half full in the second."""
    tutorials.backward(2, Launch(schedule, Checks(exits=False, cluster_end=True)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kernel", tutorials.CROSS)
def test_cross_attention(kernel, schedule):
    tutorials.cross_attention(kernel, tutorials.CROSS[kernel], Launch(schedule, resident=2))


# What is not run, and why. Each reason is what the emulator says.


def test_gdpa_asks_for_registers_in_its_default_task():
    """A fault of the tutorial: the TLX in the same wheel refuses that, so the kernel cannot be compiled either."""
    with pytest.raises(EmulatorError, match=r"BUDGET.*the default task gets what is left"):
        tutorials.gdpa(Launch())


def test_mxfp8_needs_block_scaled_products():
    # Not imported: it wants torchao.
    folder = Path(tutorials.load("blackwell_fa_clc").__file__).parent
    assert "tlx.async_dot_scaled" in (folder / "blackwell_fa_ws_pipelined_persistent_mxfp8.py").read_text()
    with pytest.raises(EmulatorError, match=r"UNSUPPORTED: tlx\.async_dot_scaled"):
        TLX.async_dot_scaled()


@pytest.mark.parametrize("name", ["blackwell_fa_ws_pipelined_persistent", "blackwell_fa_clc"])
def test_tutorials_that_leave_the_fence_to_the_compiler(name):
    """Not a fault as compiled; the rules of this library want the writer's fence, and say so."""
    module, kernel, grid, config, extra = tutorials.FORWARDS[name]
    with pytest.raises(EmulatorError, match=r"FENCE.*o_tiles"):
        tutorials.forward(module, kernel, grid, config, Launch(checks=HOUSE_RULES, resident=2), **extra)
