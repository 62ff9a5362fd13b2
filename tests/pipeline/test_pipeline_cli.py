"""``examples/train_pipeline.py`` as its users start it, and one line for each wrong input."""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pipeline_jobs  # noqa: F401  (imports TorchRec without its warnings)
import pytest
import torch
import train_pipeline
from commands import refusal

SCRIPT = Path(train_pipeline.__file__)
TINY = ["--requests", "700", "--epochs", "3"]
TIMEOUT = 120


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Two processes of the script; all of them are gone when this returns."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*launcher, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        # Each worker leads a session of its own, and torchrun ends them when it is told to end.
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=40)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(launcher, process.returncode, out, err)


@contextmanager
def two_processes(*arguments: str, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The same without torchrun, which would end a process whose peer has failed; killed at the end."""
    common = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    try:
        for rank in ("0", "1"):
            environment = {**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank}
            with (folder / f"log{rank}").open("w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPT), *arguments], cwd=folder, env=environment, stdout=log, stderr=log
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def contents(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def test_runs_write_their_results_and_a_killed_rank_ends_the_others_who_then_resume(tmp_path: Path) -> None:
    ran = torchrun(*TINY, "--out", "whole", folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["checkpoint.pt", "metrics.csv"]
    with (tmp_path / "whole" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    for row in rows:
        assert ran.stdout.count(f"held-out NE {float(row['ne']):.4f}") >= 1
    assert ran.stdout.count("2 processes on cpu, table_wise tables") == 1

    with two_processes(*TINY, "--out", "cut", "--timeout", "20", folder=tmp_path) as processes:
        deadline = time.monotonic() + TIMEOUT
        while not (tmp_path / "cut" / "metrics.csv").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        processes[1].kill()
        assert processes[0].wait(timeout=30) not in (0, 2)
    cut = contents(tmp_path / "cut")
    assert len(cut["epochs"]) < 3

    with two_processes(*TINY, "--out", "cut", "--resume", "cut/checkpoint.pt", folder=tmp_path) as processes:
        codes = [process.wait(timeout=TIMEOUT) for process in processes]
    assert codes == [0, 0], (tmp_path / "log0").read_text()
    whole, resumed = contents(tmp_path / "whole"), contents(tmp_path / "cut")
    for part in ("model", "fused_optimizer"):
        for name, tensor in whole[part].items():
            assert torch.equal(tensor, resumed[part][name]), name
    assert [row["train_loss"] for row in whole["epochs"]] == [row["train_loss"] for row in resumed["epochs"]]


WRONG = {
    "no epochs": (["--epochs", "0"], "--epochs must be at least 1, got 0"),
    "negative seed": (["--seed", "-1"], "--seed must be at least 0, got -1"),
    "no batch": (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    "too few requests": (["--requests", "9"], "--requests must be at least 10, got 9"),
    "missing file": (["--data", "movielens", "--movielens-file", "no.inter"], "no.inter: cannot be read"),
    "missing checkpoint": ([*TINY, "--resume", "no.pt"], "no.pt: there is no such checkpoint"),
    "damaged checkpoint": ([*TINY, "--resume", "bad.pt"], "bad.pt: is not a readable checkpoint"),
    "foreign checkpoint": ([*TINY, "--resume", "foreign.pt"], "foreign.pt: is not a checkpoint of this program"),
    "absent GPU": (["--backend-comm", "nccl"], "--backend-comm must be gloo where there is not a GPU for each process"),
    "endless timeout": (["--timeout", "inf"], "--timeout must be a number above 0, up to 1e9, got inf"),
    "output below a file": (["--out", "bad.pt/out"], "--out must be a folder in which metrics.csv, checkpoint.pt can"),
    "refusing backend": ([*TINY, "--backend", "tlx_hopper"], "'tlx_hopper' does not run this call"),
}


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """As torchrun would start a single process here, in a folder with damaged files."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 cut short")
    torch.save({"model": {}}, tmp_path / "foreign.pt")
    yield tmp_path
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_stops_with_one_line_and_writes_nothing(
    case: str, one_process: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if case == "absent GPU" and torch.cuda.is_available():
        pytest.skip("there is one")
    before = sorted(one_process.rglob("*"))
    arguments, message = WRONG[case]
    error = refusal(train_pipeline.main, arguments, capsys, silent=case != "refusing backend")
    assert error.startswith("train_pipeline: ")
    assert message in error
    assert sorted(one_process.rglob("*")) == before


def test_without_torchrun_it_says_how_to_start_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert train_pipeline.main(TINY) == 2
    assert "train_pipeline: must be started by torchrun: torchrun --standalone" in capsys.readouterr().err
