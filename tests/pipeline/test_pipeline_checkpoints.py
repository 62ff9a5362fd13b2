"""Damaged and foreign checkpoint files are refused in one line, and the last good one stays as it is."""

import shutil
from collections.abc import Callable
from pathlib import Path

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


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (cut(0.0), "is not a readable checkpoint"),
    "half": (cut(0.5), "is not a readable checkpoint"),
    "almost whole": (cut(0.999), "is not a readable checkpoint"),
    "words": (lambda path: path.write_text("epoch 1\n" * 99) and None, "is not a readable checkpoint"),
    "a tensor": (lambda path: torch.save(torch.ones(3), path), "is not a readable checkpoint"),
    "without optimiser": (change("dense_optimizer"), "is not a checkpoint of this program"),
    "of another sharding": (change("sharding"), "is of a run with sharding = other, this one has"),
}  # fmt: skip


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
