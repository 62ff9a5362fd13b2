"""Schedules reproduce from a seed, and reports say all that is needed to find and repeat a fault."""

import re
from pathlib import Path

import pytest
import torch
from tlx_kernels import small

from jagged_attn.testing.emulator import (
    HOUSE_RULES,
    EmulatorError,
    Launch,
    Schedule,
    emulate,
    emulated_launches,
    standard_schedules,
)

from .test_emulator_checks import hand_over, pointers, ring


def _steps(monkeypatch, schedule):
    """The sequence of choices of one run."""
    from jagged_attn.testing.emulator import schedules

    chosen = []
    choose = schedules.Chooser.choose
    monkeypatch.setattr(schedules.Chooser, "choose", lambda *a: chosen.append(choose(*a)) or chosen[-1])
    subject = ring()
    emulate(subject.kernel, subject.grid, {**subject.arguments, "FAULT": ""}, Launch(schedule))
    return [c.label for c in chosen]


@pytest.mark.parametrize("schedule", standard_schedules(2, ("task1",)), ids=str)
def test_a_schedule_reproduces(monkeypatch, schedule):
    assert _steps(monkeypatch, schedule) == _steps(monkeypatch, Schedule.parse(str(schedule)))


def test_seeds_differ(monkeypatch):
    assert len({tuple(_steps(monkeypatch, Schedule("random", s))) for s in range(5)}) > 1


def test_eager_and_lazy_are_opposites(monkeypatch):
    eager, lazy = _steps(monkeypatch, Schedule("eager")), _steps(monkeypatch, Schedule("lazy"))
    assert eager.index("cta0.tma_load") < lazy.index("cta0.tma_load")


def test_a_starved_role_comes_last(monkeypatch):
    starved = _steps(monkeypatch, Schedule("starve:default"))
    # The consumer goes only when both tiles of the ring are full.
    assert starved.count("cta0.tma_load") == 5
    assert starved[: starved.index("cta0.default")].count("cta0.tma_load") == 2


@pytest.mark.parametrize("text", ["starve", "fair", "starve_cta@3"])
def test_unknown_policies_are_refused(text):
    with pytest.raises(ValueError, match="policy must be one of"):
        Schedule.parse(text)


def test_the_environment_overrides_the_schedule(monkeypatch):
    monkeypatch.setenv("EMULATOR_SCHEDULE", "starve:tma_load@5")
    subject = ring()
    report = emulate(subject.kernel, subject.grid, {**subject.arguments, "FAULT": ""}, Launch(Schedule("eager")))
    assert report.schedule == Schedule("starve:tma_load", 5)


def _finding(make, fault, schedule=Schedule("random", 3)):  # noqa: B008 - frozen
    subject = make()
    with pytest.raises(EmulatorError) as caught:
        emulate(subject.kernel, subject.grid, {**subject.arguments, "FAULT": fault}, Launch(schedule, HOUSE_RULES))
    return str(caught.value)


def test_a_deadlock_report_names_everything():
    text = _finding(ring, "no release")
    for task in ("cta0.default", "cta0.task1", "cta0.main"):
        assert re.search(rf"{task} at small\.py:\d+ waits for", text)
    assert "waits for parity 1 of full[1]: phase 1, 1 of 1 arrivals pending, 0 bytes pending" in text
    assert "waits for parity 0 of empty[1]: phase 0, 1 of 1 arrivals pending, 0 bytes pending" in text
    source = Path(small.__file__).read_text().splitlines()
    (line,) = re.findall(r"cta0\.main at small\.py:(\d+) waits for its tasks", text)
    assert source[int(line) - 1].strip() == "with tlx.async_tasks():"


def test_a_deadlock_report_shows_missing_bytes():
    assert "full[0]: phase 0, 0 of 1 arrivals pending, 128 bytes pending" in _finding(ring, "too many bytes")


def test_a_report_names_task_line_buffer_and_how_to_repeat_it():
    text = _finding(hand_over, "no fence")
    assert re.search(r"FENCE: smem of cta0: tma_store of cta0\.task1 at small\.py:\d+ \(tile\[0\]\)", text)
    assert re.search(r"the write by cta0\.default at small\.py:\d+ \(tile\[0\]\)", text)
    assert "schedule: random@3" in text
    test = "tests/emulator/test_emulator_schedules.py::test_a_report_names_task_line_buffer_and_how_to_repeat_it"
    assert f"EMULATOR_SCHEDULE='random@3' TRITON_INTERPRET=1 pytest '{test}'" in text


def test_line_numbers_are_those_of_the_source():
    source = Path(small.__file__).read_text().splitlines()
    (fence,) = re.findall(r"tma_store of cta0\.task1 at small\.py:(\d+)", _finding(hand_over, "no fence"))
    assert "async_descriptor_store(desc_y" in source[int(fence) - 1]


def test_other_exceptions_carry_the_schedule():
    subject = pointers()
    with pytest.raises(AttributeError) as caught:
        emulate(
            subject.kernel, subject.grid, {**subject.arguments, "FAULT": "", "x": None}, Launch(Schedule("lazy", 4))
        )
    assert "under schedule lazy@4" in "".join(caught.value.__notes__)


def test_ordinary_launches_can_be_sent_to_the_emulator():
    subject = pointers()
    with emulated_launches(Launch(outputs=("y", "o"))) as reports:
        small.pointers[(3,)](*(subject.arguments[n] for n in ("x", "y", "n")), FAULT="", num_warps=8)
        small.pointers[lambda meta: (3,)](**subject.arguments, FAULT="")
    torch.testing.assert_close(subject.got, subject.want)
    assert [r.warps for r in reports] == [8, 4]


def test_launches_carry_their_cluster():
    x, y = torch.randn(2, 128), torch.empty(2, 128)
    with emulated_launches():
        small.exchange[(2,)](x, y, HOW="store", FAULT="", ctas_per_cga=(2, 1, 1))
    torch.testing.assert_close(y, x.flip(0))


@pytest.mark.parametrize(
    ("launch", "grid", "words"),
    [
        (Launch(cluster=2), (3,), "grid must be a multiple of the cluster"),
        (Launch(outputs=("z",)), (3,), "outputs and scratch must name arguments"),
    ],
)
def test_launches_that_make_no_sense_are_refused(launch, grid, words):
    subject = pointers()
    with pytest.raises(ValueError, match=words):
        emulate(subject.kernel, grid, {**subject.arguments, "FAULT": ""}, launch)
