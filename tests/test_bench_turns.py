"""``python -m jagged_attn.bench.turns``: checkouts side by side, each in a process of its own."""

import csv
import shutil
from pathlib import Path

import pytest

from jagged_attn.bench.turns import Checkout, main

_ROOT = Path(__file__).parents[1]
_SMALL = ["--case", "cpu/log_normal", "--backend", "eager", "--device", "cpu", "--scale", "small"]
_SMALL += ["--rounds", "2", "--passes", "1"]


def _copy(folder: Path, name: str, old: str, new: str) -> Path:
    """A checkout in which one file has other text."""
    ignored = shutil.ignore_patterns("__pycache__", "results")
    shutil.copytree(_ROOT / "jagged_attn", folder / "jagged_attn", ignore=ignored)
    file = folder / "jagged_attn" / name
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return folder


def _package(folder: Path, text: str) -> Path:
    """A checkout whose package is one line."""
    (folder / "jagged_attn").mkdir(parents=True)
    (folder / "jagged_attn" / "__init__.py").write_text(text)
    return folder


def test_checkouts_take_turns_and_what_is_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = _copy(tmp_path / "wrong", "bench/contestants.py", "backend=self.name))", "backend=self.name) * 1.5)")
    dead = _package(tmp_path / "dead", "raise SystemExit('no such luck')\n")
    checkouts = [f"here={_ROOT}", f"wrong={wrong}", f"dead={dead}", f"again={_ROOT}"]
    out = tmp_path / "new" / "turns.csv"
    assert main(["--checkout", *checkouts, *_SMALL, "--sustained", "--out", str(out)]) == 1

    rows = list(csv.DictReader(out.read_text().splitlines()))
    status = {row["checkout"]: row["status"] for row in rows}
    assert status["here"] == status["again"] == "ok"
    assert "is off by" in status["wrong"]
    assert status["dead"] == "its process ended: no such luck"
    timed = [row for row in rows if row["status"] == "ok"]
    phases = ["forward", "backward", "forward, sustained", "backward, sustained"]
    assert [row["phase"] for row in timed] == [phase for phase in phases for _ in range(2)]
    assert [float(row["over_first"]) for row in timed[::2]] == [1.0] * 4
    assert all(float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"]) for row in timed)
    assert all(row["command"].startswith("python -m jagged_attn.bench.turns") and row["commit"] for row in rows)
    assert "no such luck" in capsys.readouterr().out


def test_a_checkout_that_hangs_is_ended(tmp_path: Path) -> None:
    slow = Checkout("slow", _package(tmp_path, "import time\ntime.sleep(600)\n"), patience=1)
    slow.tell({"case": "cpu/log_normal", "device": "cpu"})
    with pytest.raises(RuntimeError, match="nothing was heard of it for 1 s"):
        slow.hear()
    slow.tell({"phase": "forward", "passes": 1})
    with pytest.raises(RuntimeError, match="nothing was heard"):
        slow.hear()
    slow.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--checkout", "here", *_SMALL], "--checkout must be NAME=FOLDER, a folder with jagged_attn in it, got here"),
        (["--checkout", "a=/nowhere", *_SMALL], "--checkout must be NAME=FOLDER"),
        (["--checkout", f"a={_ROOT}", f"a={_ROOT}", *_SMALL], "--checkout must have a name for each, got a a"),
        (["--checkout", f"a={_ROOT}", *_SMALL, "--case", "nothing"], "--case must match a workload, got 'nothing'"),
        (["--checkout", f"a={_ROOT}", *_SMALL, "--rounds", "0"], "--rounds must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
