"""False alarms: the attention tutorials that fbtriton ships give right numbers and no report, in the default mode."""

import pytest
import tutorials

from jagged_attn.testing.emulator import HOUSE_RULES, EmulatorError, Launch, Schedule

SCHEDULES = [Schedule("eager"), Schedule("lazy"), Schedule("starve:mma"), Schedule("starve:tma_load")]
SCHEDULES += [Schedule("random", s) for s in range(2)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", tutorials.FORWARDS)
def test_forward(name, schedule):
    module, kernel, grid, config, extra = tutorials.FORWARDS[name]
    tutorials.forward(module, kernel, grid, config, Launch(schedule, resident=2), **extra)


@pytest.mark.parametrize("name", ["blackwell_fa_ws_pipelined_persistent", "blackwell_fa_clc"])
def test_tutorials_that_leave_the_fence_to_the_compiler(name):
    """Not a fault as compiled; the rules of this library want the writer's fence, and say so."""
    module, kernel, grid, config, extra = tutorials.FORWARDS[name]
    with pytest.raises(EmulatorError, match=r"FENCE.*o_tiles"):
        tutorials.forward(module, kernel, grid, config, Launch(checks=HOUSE_RULES, resident=2), **extra)
