"""The Kunlun example: the log's facts reach both models as they are, and the command line trains."""

import csv

import export_models
import kunlun_results
import numpy as np
import pytest
import torch
import train_kunlun
from commands import refusal
from kunlun.batches import EVENT_KEYS, NUM_GAPS, bucket, make_batch
from kunlun.model import KunlunConfig, count_parameters, make_model
from kunlun.synthetic import CONTINUED, DAY, Log, LogConfig, generate
from kunlun.training import TrainConfig, Trainer
from ranking.metrics import evaluate


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def log() -> Log:
    return generate(3, LogConfig(num_requests=301, median_clicks=7.0, median_impressions=5.0, max_events=23))


def test_events_are_sorted_by_time_and_lie_before_the_request(log):
    for events in log.events.values():
        user = np.repeat(np.arange(len(log.time)), np.diff(events.offsets))
        assert (events.time < log.time[user]).all()
        same_user = user[1:] == user[:-1]
        assert (np.diff(events.time)[same_user] >= 0).all()
        assert (events.item >= 1).all()
        assert (events.item <= log.config.num_items).all()
    assert (np.diff(log.events["click"].offsets) == 0).any()


def test_probabilities_follow_the_formula_of_the_docstring(log):
    # The interest of a request, computed event by event from item co-occurrence alone is not possible without the
    # categories, so they are recovered from the log's own generator: the seed draws the same permutation first.
    items = np.random.default_rng(3).permutation(log.config.num_items).reshape(log.config.num_categories, -1) + 1
    category = {int(item): row for row, group in enumerate(items) for item in group}
    clicks, shown = log.events["click"], log.events["impression"]
    residuals: dict[int, list[float]] = {}
    for n in range(60):
        mine = category[int(log.candidate[n])]
        rows = range(clicks.offsets[n], clicks.offsets[n + 1])
        continued = [
            category[int(clicks.item[r])]
            for r in rows[1:]
            if category[int(clicks.item[r])] == category[int(clicks.item[r - 1])]
            and clicks.time[r] - clicks.time[r - 1] < CONTINUED
        ]
        interest = continued.count(mine) / len(continued) if continued else 0.0
        rows = range(shown.offsets[n], shown.offsets[n + 1])
        recent = sum(category[int(shown.item[r])] == mine and log.time[n] - shown.time[r] < 2 * DAY for r in rows)
        logit = np.log(log.probability[n] / (1 - log.probability[n]))
        c = log.config
        residual = logit - c.bias - c.taste * interest + c.fatigue * np.log1p(recent)
        residuals.setdefault(int(log.candidate[n]), []).append(residual)
    # What is left is the item's quality: the same number for each request of an item.
    spreads = [max(r) - min(r) for r in residuals.values() if len(r) > 1]
    assert len(spreads) > 5
    assert max(spreads) < 1e-9


def test_neither_gaps_nor_shares_alone_tell_what_is_pursued():
    # Of a large log: within minutes or not, and of the same category or not, are two independent coins; only the two
    # together say whether the click is of a pursued interest.
    log = generate(3, LogConfig(num_requests=5000))
    items = np.random.default_rng(3).permutation(log.config.num_items).reshape(log.config.num_categories, -1) + 1
    category = np.zeros(log.config.num_items + 1, dtype=np.int64)
    category[items] = np.arange(log.config.num_categories)[:, None]
    clicks = log.events["click"]
    kind, user = category[clicks.item], np.repeat(np.arange(5000), np.diff(clicks.offsets))
    follows = user[1:] == user[:-1]
    same = (kind[1:] == kind[:-1])[follows]
    short = (np.diff(clicks.time) < CONTINUED)[follows]
    assert abs(same.mean() - 0.5) < 0.01
    assert abs(short.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(same, short)[0, 1]) < 0.02


def test_both_models_are_given_the_same_events(log):
    index = np.array([5, 0, 17, 300, 2])
    batch = make_batch(log, index)
    assert batch.sequences.keys() == [*EVENT_KEYS, "candidate_item"]
    ranking = batch.ranking.to_dict()
    assert torch.equal(ranking["candidate_item"].values(), batch.sequences["candidate_item"].values())
    lengths = sum(batch.sequences[f"{name}_item"].lengths() for name in log.events)
    assert torch.equal(ranking["history_item"].lengths(), lengths)
    for key, theirs in (("item", "item"), ("age", "age"), ("gap", "rating")):
        apart = NUM_GAPS if key == "gap" else 0  # clicks and impressions have gaps of their own
        columns = [batch.sequences[f"{name}_{key}"].values() + apart * kind for kind, name in enumerate(log.events)]
        assert torch.equal(torch.cat(columns).sort().values, ranking[f"history_{theirs}"].values().sort().values)
    # Merged by time: within a request, ages never grow.
    for ages in ranking["history_age"].to_dense():
        assert (ages.diff() <= 0).all()


def test_gaps_start_anew_with_each_request(log):
    batch = make_batch(log, np.array([5, 0, 17]))
    click = batch.sequences["click_gap"]
    stamps = torch.split(batch.timestamps["click"], click.lengths().tolist())
    expected = [bucket(np.diff(t.numpy(), prepend=t[:1].numpy())) for t in stamps]
    assert np.array_equal(click.values().numpy(), np.concatenate(expected))


def test_the_baseline_has_as_many_parameters(log):
    kunlun, ranking = (make_model(name, log, KunlunConfig(), "auto") for name in ("kunlun", "ranking"))
    assert count_parameters(kunlun) <= count_parameters(ranking) < 1.1 * count_parameters(kunlun)


def test_true_probabilities_score_best(log):
    labels = torch.from_numpy(log.label)
    true = evaluate(torch.from_numpy(log.probability), labels)
    assert true.ne < evaluate(torch.from_numpy(1 - log.probability), labels).ne
    assert true.ne < 1


@pytest.mark.parametrize("model", ["kunlun", "ranking"])
def test_training_learns_and_repeats_bit_for_bit(log, model):
    config = TrainConfig(model=model, seed=1, epochs=2, batch_size=64, learning_rate=3e-3)
    epochs = []
    for _ in range(2):
        trainer = Trainer(log, config, torch.device("cpu"))
        trainer.run()
        epochs.append(trainer.epochs)
    assert epochs[0] == epochs[1]
    assert epochs[0][-1]["train_loss"] < epochs[0][0]["train_loss"]


def test_tiny_command_writes_metrics_and_a_picture(tmp_path, capsys):
    out = tmp_path / "out"
    assert train_kunlun.main(["--tiny", "--requests", "200", "--epochs", "1", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["curves.png", "metrics.csv"]
    rows = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 1
    assert f"{float(rows[0]['ne']):.4f}" in capsys.readouterr().out
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be at least 1, got 0."),
        (["--requests", "3"], "--requests must be at least 10, got 3."),
        (["--threads", "99999999999999999999"], "--threads must be at most 2147483647, got 99999999999999999999."),
        (["--seed", "-1"], "--seed must be at least 0, got -1."),
        (["--device", "abacus"], "--device must be cpu or cuda, got abacus."),
    ],
)
def test_a_wrong_option_is_one_line_and_leaves_nothing(arguments, message, tmp_path, capsys):
    out = tmp_path / "out"
    assert message in refusal(train_kunlun.main, [*arguments, "--out", str(out)], capsys)
    assert not out.exists()


def test_an_output_folder_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").touch()
    error = refusal(train_kunlun.main, ["--out", str(tmp_path / "file" / "out")], capsys)
    assert f"--out must be a folder in which metrics.csv, curves.png can be written, got {tmp_path}/file/out (" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "nosuch"], "--device must be cpu or cuda, got nosuch."),
        (["--seeds", "0", "-1"], "--seeds must be at least 0, got -1."),
        (["--model", "other"], "--model: invalid choice: 'other' (choose from "),
    ],
)
def test_wrong_arguments_of_the_results_are_refused(arguments, message, capsys):
    assert message in refusal(kunlun_results.main, ["train", *arguments], capsys)


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("x.zip", "must be a file that ends with .pt2, got {dir}/x.zip."),
        ("", "must be a file that ends with .pt2, got {dir}/."),
        ("folder.pt2", "must be a file that can be written, got {dir}/folder.pt2 (Is a directory)."),
        ("file/x.pt2", "must be a file that can be written, got {dir}/file/x.pt2 (Not a directory)."),
    ],
)
def test_a_package_that_cannot_be_written_is_refused_before_exporting(out, reason, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "folder.pt2").mkdir()
    error = refusal(export_models.main, ["kunlun", "--out", f"{tmp_path}/{out}"], capsys)
    assert error == f"export_models: --out {reason.format(dir=tmp_path)}\n"
