"""Damaged and foreign checkpoint files are refused in one line, and the last good one stays as it is."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pipeline_jobs  # noqa: F401  (imports TorchRec without its warnings)
import pytest
import torch
import train_pipeline
from test_pipeline_cli import free_port

TINY = ["--requests", "60", "--epochs", "1", "--out", "run"]


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the results of a run, as torchrun would start a single process in it."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.chdir(tmp_path)
    assert train_pipeline.main(TINY) == 0
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return tmp_path


def cut(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return damage


def change(key: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        if key in state["run"]:
            state["run"][key] = "other"
        else:
            del state[key]
        torch.save(state, path)

    return damage


def put(**parts: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        torch.save(torch.load(path, weights_only=True) | parts, path)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (cut(0.0), "is not a readable checkpoint"),
    "half": (cut(0.5), "is not a readable checkpoint"),
    "almost whole": (cut(0.999), "is not a readable checkpoint"),
    "words": (lambda path: path.write_text("epoch 1\n" * 99) and None, "is not a readable checkpoint"),
    "a tensor": (lambda path: torch.save(torch.ones(3), path), "is not a readable checkpoint"),
    "without optimiser": (change("dense_optimizer"), "is not a checkpoint of this program"),
    "no run": (put(run=None), "is not a checkpoint of this program"),
    "no weights": (put(model={}), "model must have "),
    "no fused optimiser": (put(fused_optimizer=None), "fused_optimizer must be a dict, got nothing"),
    "empty fused optimiser": (put(fused_optimizer={}), "must be a tensor [501] of torch.float32, got nothing"),
    "no dense optimiser": (put(dense_optimizer=None), "dense_optimizer must be a dict, got nothing"),
    "fresh dense optimiser": (put(dense_optimizer={"state": {}, "param_groups": []}), "dense_optimizer.state must "),
    "no generator": (put(rng=None), "rng must be 1 value, got nothing"),
    "half a generator": (put(rng=[{"cpu": torch.ones(3), "cuda": None}]), "rng must be a tensor [5056] of torch.uint8"),
    "empty epoch": (put(epochs=[{}]), "epochs[0] must have "),
    "of another sharding": (change("sharding"), "is of a run with sharding = other, this one has"),
}  # fmt: skip


def test_a_run_that_is_done_says_that_nothing_was_left(one_process: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed = ["--requests", "60", "--epochs", "1", "--out", "other", "--resume", "run/checkpoint.pt"]
    assert train_pipeline.main(resumed) == 0
    printed = capsys.readouterr().out
    assert "nothing left to train, nothing written: run/checkpoint.pt has all epochs (1)" in printed
    assert not (one_process / "other").exists()


def test_each_is_refused_in_one_line_and_the_last_good_one_stays(
    one_process: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (one_process / "run" / "checkpoint.pt").read_bytes()
    for damage, message in DAMAGE.values():
        shutil.copy(one_process / "run" / "checkpoint.pt", "damaged.pt")
        damage(Path("damaged.pt"))
        capsys.readouterr()
        monkeypatch.setenv("MASTER_PORT", str(free_port()))
        assert train_pipeline.main([*TINY, "--resume", "damaged.pt"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("train_pipeline: damaged.pt: ")
        assert message in error
        assert error.count("\n") == 1
        assert (one_process / "run" / "checkpoint.pt").read_bytes() == good
