"""Wrong command lines of the benchmarks: one line that names the option, exit code 2, nothing measured or written."""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import exit_code, refusal

from jagged_attn.bench import __main__ as bench
from jagged_attn.bench import arguments, kunlun, kunlun_steps, scaling, serving

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "bench": bench.main,
    "kunlun": lambda given: kunlun.main(["speed", *given]),
    "serving": serving.main,
    "scaling": lambda given: scaling.main(["speed", *given]),
}
WRONG = [
    ("bench", ["--seed", "99999999999999999999999"], "--seed must be at most 4294967295, got 99999999999999999999999"),
    ("bench", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("bench", ["--check", "few"], "--check must be a whole number, got few"),
    ("bench", ["--repeat", "1"], "unrecognized arguments: --repeat"),
    ("bench", ["--device", "meta"], "--device must be cpu or cuda, got meta"),
    (
        "bench",
        ["--out", "{file}/x.csv"],
        "--out must be a file that can be written, got {file}/x.csv (Not a directory)",
    ),
    ("bench", ["--out", "{dir}"], "--out must be a file that can be written, got {dir} (Is a directory)"),
    ("bench", ["--plot", "{file}/p.png"], "--plot must be a file that can be written, got {file}/p.png"),
    ("bench", ["--plot", "{dir}/p.jpg"], "--plot must be a file that ends with .png or .svg or .pdf, got {dir}/p.jpg"),
    ("kunlun", ["--contestants", "jaged"], "'jaged' (choose from "),
    ("kunlun", ["--contestants", "jagged", "padded_sdpa+compiled"], "'padded_sdpa+compiled'"),
    ("kunlun", ["--batches", "-1"], "--batches must be at least 1, got -1"),
    ("kunlun", ["--batches", "0"], "--batches must be at least 1, got 0"),
    ("kunlun", ["--batch", "0"], "unrecognized arguments: --batch 0"),
    ("kunlun", ["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ("kunlun", ["--limit", "nan"], "--limit must be a number above 0, up to 1e9, got nan"),
    ("kunlun", ["--seed", "-1"], "--seed must be at least 0, got -1"),
    ("kunlun", ["--device", "nosuch"], "--device must be cpu or cuda, got nosuch"),
    ("kunlun", ["--device", "cuda:99"], "--device must be "),
    ("kunlun", ["--backend", "zz"], "--backend: invalid choice: 'zz' (choose from "),
    ("serving", ["--device", "nosuch"], "--device must be cpu or cuda, got nosuch"),
    ("serving", ["--device", "cuda:99"], "--device must be "),
    ("serving", ["--rate", "nan"], "--rate must be a number above 0, up to 1e9, got nan"),
    ("serving", ["--rate", "0"], "--rate must be a number above 0, up to 1e9, got 0"),
    ("serving", ["--limit", "-1"], "--limit must be a number from 0 to 1e9, got -1"),
    ("serving", ["--batch", "4", "0"], "--batch must be at least 1, got 0"),
    ("serving", ["--backend", "zz"], "--backend: invalid choice: 'zz' (choose from "),
    ("serving", ["--seed", "1e3"], "--seed must be a whole number, got 1e3"),
    ("serving", ["--out", "{file}/x.csv"], "--out must be a file that can be written, got {file}/x.csv"),
    ("serving", ["--out", "{dir}"], "--out must be a file that can be written, got {dir} (Is a directory)"),
    ("scaling", ["--out", "{file}/x.csv"], "--out must be a file that can be written, got {file}/x.csv"),
    ("scaling", ["--timeout", "inf"], "--timeout must be a number above 0, up to 1e9, got inf"),
    ("scaling", ["--steps", "0"], "--steps must be at least 1, got 0"),
    ("scaling", ["--backend", "zz"], "--backend: invalid choice: 'zz' (choose from "),
]


@pytest.mark.parametrize(
    ("command", "given", "message"), WRONG, ids=lambda x: " ".join(x) if isinstance(x, list) else ""
)
def test_a_wrong_command_line_is_one_line_and_leaves_nothing(
    command: str, given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    names = {"file": str(file), "dir": str(tmp_path)}
    error = refusal(COMMANDS[command], [word.format(**names) for word in given], capsys)
    assert message.format(**names) in error
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() == "kept"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("command", "option"),
    [("bench", "--device cuda"), ("kunlun", "--device cuda"), ("serving", "--device cuda"),
     ("scaling", "--backend-comm nccl")],
)  # fmt: skip
def test_a_gpu_that_is_not_there_is_refused(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{option.split()[0]} must be " in refusal(COMMANDS[command], option.split(), capsys)


def test_a_later_process_of_a_host_leaves_the_line_to_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert exit_code(scaling.main, ["speed", "--steps", "0"]) == 2
    assert capsys.readouterr().err == ""


def test_a_file_that_can_be_written_is_neither_made_nor_changed(tmp_path: Path) -> None:
    there = tmp_path / "there.csv"
    there.write_text("rows")
    os.utime(there, (1, 1))
    for path in (there, tmp_path / "new" / "folder" / "x.csv"):
        assert arguments.output_file(".csv")(str(path)) == path
    assert list(tmp_path.iterdir()) == [there]
    assert there.read_text() == "rows"
    assert there.stat().st_mtime == 1


def test_a_folder_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "out" / "metrics.csv").mkdir(parents=True)
    for folder in ("link", "link/deep", "out"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a folder in which metrics"):
            arguments.output_folder(["metrics.csv"])(str(tmp_path / folder))
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("the superuser may write anywhere")
    with pytest.raises(argparse.ArgumentTypeError, match="Permission denied"):
        arguments.output_file()(str(tmp_path / "x.csv"))


def test_an_unknown_contestant_gets_no_model() -> None:
    ranker = kunlun_steps.Ranker(kunlun_steps.SCENARIOS["speed"].small(), "auto")
    for name in ("jaged", "padded_sdpaa", "jagged+compiled", "jagged+"):
        with pytest.raises(ValueError, match="name must be one of jagged, "):
            kunlun_steps.make_contestant(name, ranker)


def test_a_command_goes_on_when_nobody_reads_its_output(tmp_path: Path) -> None:
    """What was measured must not be lost because ``| head`` has seen enough."""
    rows = tmp_path / "rows.csv"
    wanted = ["--case", "cpu/all-128", "--scale", "small", "--repeats", "1", "--peers", "none", "--out", str(rows)]
    command = [sys.executable, "-m", "jagged_attn.bench", "--device", "cpu", *wanted]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        complaint = process.stderr.read()
    assert process.returncode == 0, complaint
    assert "BrokenPipe" not in complaint
    assert rows.read_text().count("\n") > 1
