"""DDP and FSDP2 train what one process trains; two gloo processes, started and ended here."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from ranks import run_ranks

from jagged_attn.bench.scaling_checks import CHECKS

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of two ranks reports of ``scaling_jobs.everything``: one start of two processes for all tests."""
    import scaling_jobs

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the workers of this run of pytest share it
    kept = folder / "results-of-data-parallel-ranks.pt"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            ranks = tmp_path_factory.mktemp("ranks")
            found = run_ranks(scaling_jobs.everything, ranks, timeout=150)
            with (ranks / "speed.csv").open() as file:
                found[0]["rows"] = list(csv.DictReader(file))
            torch.save(found, kept)
        return torch.load(kept, weights_only=False)


@pytest.mark.parametrize("what", CHECKS)
@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp2_whole"])
def test_ranks_train_what_one_process_trains(how: str, what: str, results: Results) -> None:
    # Among others with a rank that has no events, or no samples, in a step.
    for rank in results:
        assert all(ratio <= 1 for ratio in rank[f"{how} {what}"].values())


@pytest.mark.parametrize("how", ["fsdp2", "fsdp2_whole"])
def test_ranks_with_parameters_that_are_not_packed_train_alike(how: str, results: Results) -> None:
    for rank in results:
        assert all(ratio <= 1 for ratio in rank[f"{how} unpacked"].values())


@pytest.mark.parametrize("how", ["ddp", "fsdp2", "fsdp2_whole"])
def test_ranks_with_steps_in_inputs_of_fixed_capacity_train_alike(how: str, results: Results) -> None:
    for rank in results:
        assert all(ratio <= 1 for ratio in rank[f"{how} captured"].values())


def test_a_wrong_factor_of_the_gradients_is_seen(results: Results) -> None:
    for rank in results:
        assert "ddp, mixed: " in rank["wrong factor"]


def test_layers_that_return_jagged_tensors_alone_are_sharded(results: Results) -> None:
    for rank in results:
        stack = rank["stack"]
        assert stack["is jagged"]
        for name, gradient in stack["gradients"].items():
            torch.testing.assert_close(gradient, stack["expected"][name])


def test_a_sharded_stack_shares_one_layout(results: Results) -> None:
    assert all(rank["stack"]["one layout"] for rank in results)


def test_weak_scaling_is_printed_and_written_by_the_first_rank(results: Results) -> None:
    first, second = (rank["speed"] for rank in results)
    assert second == ""
    rows = results[0]["rows"]
    expected = [("none", "1"), ("ddp", "2"), ("fsdp2", "2"), ("fsdp2_whole", "2")]
    assert [(row["parallel"], row["ranks"]) for row in rows] == expected
    assert [tuple(line.split()[:2]) for line in first.splitlines() if " ms a step" in line] == expected
    for row in rows:
        assert float(row["scaling"]) == pytest.approx(
            int(row["ranks"]) * float(rows[0]["step_ms"]) / float(row["step_ms"])
        )
        assert "jagged_attn.bench.scaling speed" in row["command"]


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_ranks_train_compiled_layers_alike(tmp_path: Path) -> None:
    import scaling_jobs

    for rank in run_ranks(scaling_jobs.compiled, tmp_path, timeout=540):
        assert all(ratio <= 1 for ratios in rank.values() for ratio in ratios.values())


def test_checks_that_are_not_captured_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from jagged_attn.bench.scaling import _parse

    assert _parse(["check", "--captured"]).checks == ["plain"]
    assert _parse(["check"]).checks == list(CHECKS)
    with pytest.raises(SystemExit):
        _parse(["check", "--captured", "--checks", "plain", "empty"])
    assert "--checks must be plain with --captured, got plain empty" in capsys.readouterr().err
