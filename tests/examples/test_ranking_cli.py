"""The command lines: what they write, that a resumed run writes the same, and one line for each wrong input."""

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest
import ranking_results
import torch
import train_ranking
from commands import refusal
from ranking import summary
from ranking.movielens import HEADER
from ranking.outputs import read_csv
from ranking.recipes import CHOSEN, DATA, EMBEDDING_BOOSTS, LEARNING_RATES, POOLINGS, recipe

EXAMPLES = Path(train_ranking.__file__).parent
TINY = ["--requests", "300", "--epochs", "2"]
ONE_EPOCH = ["--requests", "50", "--epochs", "1", "--pooling", "mean"]


def test_a_run_writes_metrics_curves_and_checkpoint_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    assert train_ranking.main([*TINY, "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["checkpoint.pt", "curves.png", "metrics.csv"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    rows = read_csv(out / "metrics.csv")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    printed = capsys.readouterr().out
    assert "the true probabilities score NE 0." in printed
    for row in rows:
        assert f"held-out NE {float(row['ne']):.4f}, AUC {float(row['auc']):.4f}" in printed


def test_a_run_that_was_interrupted_resumes_to_the_same_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*TINY, "--pooling", "mean"]
    assert train_ranking.main([*arguments, "--out", str(tmp_path / "whole")]) == 0
    report, calls = train_ranking._report_epoch, []

    def interrupt(*args: object) -> None:
        report(*args)
        calls.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(train_ranking, "_report_epoch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_ranking.main([*arguments, "--out", str(tmp_path / "cut")])
    assert len(calls) == 1
    monkeypatch.setattr(train_ranking, "_report_epoch", report)
    checkpoint = str(tmp_path / "cut" / "checkpoint.pt")
    assert train_ranking.main([*arguments, "--out", str(tmp_path / "cut"), "--resume", checkpoint]) == 0
    whole, cut = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "cut"))
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, cut["model"][name]), name
    assert torch.equal(whole["rng"], cut["rng"])
    assert [row["ne"] for row in whole["epochs"]] == [row["ne"] for row in cut["epochs"]]


def test_movielens_trains_from_a_file(ratings_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--data", "movielens", "--movielens-file", str(ratings_file), "--epochs", "1", "--out", str(out)]
    assert train_ranking.main(arguments) == 0
    assert len(read_csv(out / "metrics.csv")) == 1


WRONG = {
    "missing file": (["--data", "movielens", "--movielens-file", "{dir}/no.inter"], "no.inter: cannot be read"),
    "malformed file": (["--data", "movielens", "--movielens-file", "{dir}/bad.inter"], "bad.inter:2: must have 4"),
    "NaN": (
        ["--data", "movielens", "--movielens-file", "{dir}/nan.inter"],
        "nan.inter:2: rating must be a whole",
    ),
    "id out of range": (
        ["--data", "movielens", "--movielens-file", "{dir}/range.inter"],
        "range.inter:2: item_id must",
    ),
    "folder as file": (["--data", "movielens", "--movielens-file", "{dir}"], "cannot be read: Is a directory"),
    "file for synthetic": (["--movielens-file", "{dir}/bad.inter"], "--movielens-file must not be given"),
    "requests for movielens": (["--data", "movielens", "--requests", "50"], "--requests must not be given"),
    "too few requests": (["--requests", "9"], "--requests must be at least 10, got 9"),
    "no epochs": (["--epochs", "0"], "--epochs must be at least 1, got 0"),
    "negative seed": (["--seed", "-1"], "--seed must be at least 0, got -1"),
    "unknown device": (["--device", "abacus"], "--device must be cpu or cuda, got abacus"),
    "absent device": (["--device", "cuda:63"], "--device must be "),
    "missing checkpoint": ([*TINY, "--resume", "{dir}/no.pt"], "no.pt: there is no such checkpoint"),
    "damaged checkpoint": ([*TINY, "--resume", "{dir}/bad.inter"], "bad.inter: is not a readable checkpoint"),
    "output folder is a file": (
        ["--out", "{dir}/bad.inter"],
        "--out must be a folder in which metrics.csv, curves.png, checkpoint.pt can be written, got {dir}/bad.inter",
    ),
    "output folder below a file": (["--out", "{dir}/bad.inter/out"], "--out must be a folder in which "),
    "abbreviation": (["--epoch", "1"], "unrecognized arguments: --epoch"),
}


@pytest.fixture
def bad_files(tmp_path: Path) -> Path:
    for name, line in (("bad", "1 2 3 4"), ("nan", "1\t2\tnan\t4"), ("range", "1\t99999\t3\t4")):
        (tmp_path / f"{name}.inter").write_text(f"{HEADER}\n{line}\n")
    return tmp_path


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_stops_with_one_line_and_writes_nothing(
    case: str, bad_files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bad_files)
    before = sorted(bad_files.rglob("*"))
    arguments, message = WRONG[case]
    error = refusal(train_ranking.main, [argument.format(dir=bad_files) for argument in arguments], capsys)
    assert error.startswith("train_ranking: ")
    assert message.format(dir=bad_files) in error
    assert sorted(bad_files.rglob("*")) == before


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of one epoch."""
    out = tmp_path_factory.mktemp("trained")
    assert train_ranking.main([*ONE_EPOCH, "--out", str(out)]) == 0
    return out


def test_a_default_output_folder_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").write_text("a file")
    assert "got out/ranking-synthetic-mean-seed0 (Not a directory)" in refusal(train_ranking.main, ONE_EPOCH, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_that_is_done_says_that_nothing_was_left(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, out = str(trained / "checkpoint.pt"), tmp_path / "other"
    assert train_ranking.main([*ONE_EPOCH, "--out", str(out), "--resume", checkpoint]) == 0
    printed = capsys.readouterr().out
    assert f"nothing left to train, nothing written: {checkpoint} has all epochs (1)" in printed
    assert "wrote" not in printed
    assert not out.exists()


def first_moment(state: dict) -> dict:
    return state["optimizer"]["state"][0]


# What is changed in a good checkpoint, and what is said of it.
FOREIGN: dict[str, tuple[Callable[[dict], object], str]] = {
    "no run": (lambda s: s.update(run=None), "is not a checkpoint of this program"),
    "no weights": (lambda s: s.update(model={}), "model must have "),
    "model is a list": (lambda s: s.update(model=[1, 2]), "model must be a dict, got 2 values"),
    "another weight": (lambda s: s["model"].update(extra=torch.ones(1)), "model must not have extra"),
    "another shape": (lambda s: s["model"].update({"norm.weight": torch.ones(3)}), "model.norm.weight must be "),
    "no optimiser": (lambda s: s.update(optimizer=None), "optimizer must be a dict, got nothing"),
    "fresh optimiser": (lambda s: s["optimizer"].update(state={}), "optimizer.state must have "),
    "another moment": (lambda s: first_moment(s).update(exp_avg=torch.ones(2, 2)), "optimizer.state.0.exp_avg must be"),
    "one group": (lambda s: s["optimizer"]["param_groups"].pop(), "optimizer.param_groups must be 2"),
    "bare group": (lambda s: s["optimizer"]["param_groups"][0].pop("betas"), "optimizer.param_groups[0] must"),
    "no schedule": (lambda s: s.update(schedule=None), "schedule must be a dict, got nothing"),
    "empty schedule": (lambda s: s.update(schedule={}), "schedule must have "),
    "schedule of words": (lambda s: s["schedule"].update(last_epoch="x"), "schedule.last_epoch must be a number, got"),
    "no generator": (lambda s: s.update(rng=None), "rng must be a tensor [5056] of torch.uint8, got nothing"),
    "zeroed generator": (lambda s: s["rng"].zero_(), "rng must be the state of a generator, got other bytes"),
    "no epochs": (lambda s: s.update(epochs=[]), "epochs must be a list of 1 to 1 rows, got 0 values"),
    "empty epoch": (lambda s: s.update(epochs=[{}]), "epochs[0] must have "),
    "other epochs": (lambda s: s["epochs"][0].update(epoch=7), "epochs must be numbered 1 to 1, got [7]"),
    "too many epochs": (lambda s: s["epochs"].append(s["epochs"][0]), "epochs must be a list of 1 to 1 rows, got 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_a_checkpoint_of_other_code_is_refused_and_nothing_is_written(
    case: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = FOREIGN[case]
    state = torch.load(trained / "checkpoint.pt", weights_only=True)
    damage(state)
    path, out = tmp_path / "foreign.pt", tmp_path / "out"
    torch.save(state, path)
    error = refusal(train_ranking.main, [*ONE_EPOCH, "--resume", str(path), "--out", str(out)], capsys)
    assert error.startswith(f"train_ranking: {path}: {message}")
    assert not out.exists()


def test_a_backend_that_refuses_stops_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    if torch.cuda.is_available():
        pytest.skip("triton runs on this machine")
    assert train_ranking.main([*TINY, "--backend", "triton", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "'triton' does not run this call" in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("arguments", [["--data", "netflix"], ["--epochs", "many"], ["--nonsense"]])
def test_wrong_options_stop_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        train_ranking.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_script_runs_from_any_folder_without_a_traceback(bad_files: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "train_ranking.py")]
    arguments = ["--data", "movielens", "--movielens-file", "nan.inter"]
    ran = subprocess.run([*script, *arguments], cwd=bad_files, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (2, "")
    expected = "train_ranking: nan.inter:2: rating must be a whole number in [1, 5], got nan.\n"
    assert ran.stderr == expected


def row(data: str, pooling: str, seed: int, epoch: int, ne: float, auc: float, bayes: str = "") -> summary.Row:
    made = dict.fromkeys(("date", "command", "commit", "python", "torch", "torchrec", "device", "threads"), "x")
    figures = {"epoch": epoch, "ne": ne, "auc": auc, "bayes_ne": bayes, "seconds": 2, "seed": seed}
    return {**made, "data": data, "pooling": pooling, **{name: str(value) for name, value in figures.items()}}


def log(attention_ne: list[float], mean_ne: list[float], attention_auc: list[float], mean_auc: list[float]) -> list:
    return [
        *(row("synthetic", "attention", i, 1, 0.99, 0.5, "0.6") for i in range(len(attention_ne))),
        *(row("synthetic", "attention", i, 2, ne, 0.8, "0.6") for i, ne in enumerate(attention_ne)),
        *(row("synthetic", "mean", i, 2, ne, 0.7, "0.6") for i, ne in enumerate(mean_ne)),
        *(row("movielens", "attention", i, 1, 0.9, auc) for i, auc in enumerate(attention_auc)),
        *(row("movielens", "mean", i, 1, 0.9, auc) for i, auc in enumerate(mean_auc)),
    ]


@pytest.mark.parametrize(
    ("rows", "met"),
    [
        (log([0.79, 0.799, 0.78], [0.9, 0.91, 0.9], [0.75, 0.76], [0.75, 0.76]), [True, True, True]),
        (log([0.79, 0.81, 0.78], [0.9, 0.91, 0.9], [0.75, 0.76], [0.75, 0.76]), [False, True, True]),
        (log([0.79, 0.70, 0.78], [0.8, 0.81, 0.8], [0.75, 0.76], [0.75, 0.76]), [True, False, True]),
        (log([0.79, 0.799, 0.78], [0.9, 0.91, 0.9], [0.744, 0.754], [0.75, 0.76]), [True, True, False]),
        (log([0.79, 0.799, 0.78], [0.9, 0.91, 0.9], [0.746, 0.756], [0.75, 0.76]), [True, True, True]),
    ],
)
def test_verdicts_apply_the_bars_to_the_last_epochs(rows: list[summary.Row], met: list[bool]) -> None:
    assert [verdict for verdict, _ in summary.verdicts(rows)] == met


@pytest.fixture
def script() -> ModuleType:
    return ranking_results


def test_results_are_written_with_provenance_table_and_picture(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "ranking.md").write_text(f"before\n{summary.BEGIN}\nold\n{summary.END}\nafter\n")
    options = ["--data", "synthetic", "--pooling", "mean", "--seeds", "0", "1", "--requests", "60"]
    assert script.main([*options, "--out", str(tmp_path), "--docs", str(tmp_path)]) == 0
    rows = read_csv(tmp_path / "ranking.csv")
    assert {row["seed"] for row in rows} == {"0", "1"}
    assert all(row[name] for row in rows for name in ("date", "command", "torch", "torchrec", "device", "commit"))
    page = (tmp_path / "ranking.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    assert "| synthetic | mean | 0, 1 |" in page
    assert (tmp_path / "ranking.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nosuch"], "--device must be cpu or cuda, got nosuch"),
        (["--seeds", "-1"], "--seeds must be at least 0, got -1"),
        (["--requests", "9"], "--requests must be at least 10, got 9"),
        (["--out", "{dir}/file/x"], "--out must be a folder in which ranking.csv, ranking_tuning.csv can be"),
        (["--docs", "{dir}"], "--docs must be a folder with a page of results, got {dir} ([Errno 2] No such file"),
        (["--docs", "{dir}/docs"], "--docs must be a folder with a page of results, got {dir}/docs ("),
        (["--docs", "{dir}/page", "--out", "{dir}/page", "--keep"], "--keep needs a table with a column data, got "),
    ],
)  # fmt: skip
def test_wrong_arguments_of_the_results_are_refused_before_training(
    arguments: list[str], message: str, script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for name, text in (("docs", f"{summary.END}{summary.BEGIN}"), ("page", f"{summary.BEGIN}{summary.END}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ranking.md").write_text(text)
    (tmp_path / "page" / "ranking.csv").write_text("seed\n1\n")
    before = sorted(tmp_path.rglob("*"))
    error = refusal(script.main, [argument.format(dir=tmp_path) for argument in arguments], capsys)
    assert message.format(dir=tmp_path) in error
    assert sorted(tmp_path.rglob("*")) == before


def test_recipes_are_the_best_rows_of_the_tuning_table() -> None:
    rows = read_csv(EXAMPLES / "results" / "ranking_tuning.csv")
    assert {row["held_out"] for row in rows} == {"validation"}
    assert {row["seed"] for row in rows} == {str(ranking_results.TUNING_SEED)}
    points = {(row["data"], row["pooling"], float(row["learning_rate"]), float(row["embedding_boost"])) for row in rows}
    assert points == set(product(DATA, POOLINGS, LEARNING_RATES, EMBEDDING_BOOSTS))
    assert summary.tuned(rows) == CHOSEN


def test_runs_that_are_kept_are_not_repeated(script: ModuleType, tmp_path: Path) -> None:
    options = ["--tune", "--data", "synthetic", "--pooling", "mean", "--requests", "60", "--out", str(tmp_path)]
    assert script.main(options) == 0
    table = tmp_path / "ranking_tuning.csv"
    lines = table.read_text().splitlines(keepends=True)
    epochs = recipe("synthetic", "mean", 0).epochs
    assert len(lines) == 1 + epochs * len(LEARNING_RATES) * len(EMBEDDING_BOOSTS)
    # Without its last run and with a mark in the others, the table shows what was run again.
    table.write_text("".join(lines[:-epochs]).replace("validation", "kept"))
    assert script.main([*options, "--keep"]) == 0
    assert [row["held_out"] for row in read_csv(table)] == ["kept"] * (len(lines) - 1 - epochs) + [
        "validation"
    ] * epochs
