"""Model and training loop: the mean, tracing, resuming bit for bit, learning, files that are whole or absent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranking.errors import InputError
from ranking.model import MeanPool, ModelConfig, RankingModel
from ranking.outputs import write_atomically
from ranking.requests import Dataset, Requests, Schema, make_batch
from ranking.training import TrainConfig, Trainer
from torchrec import JaggedTensor

from jagged_attn.modules import JaggedTargetAttention

CPU = torch.device("cpu")
CONFIG = TrainConfig(epochs=3, batch_size=37, seed=11, hide_items=0.1, model=ModelConfig(embed_dim=8, hidden=16))


def trainer(dataset: Dataset, **changes: Any) -> Trainer:
    return Trainer(dataset, replace(CONFIG, **changes), CPU)


def assert_same(a: Any, b: Any) -> None:
    """Equal to the last bit, through dicts and lists."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("query_lengths", [None, (2, 1, 0, 3, 1, 0)])
def test_mean_pool_is_attention_with_equal_scores(query_lengths: tuple[int, ...] | None) -> None:
    lengths = (0, 1, 31, 32, 33, 0)
    history = JaggedTensor(torch.randn(sum(lengths), 6).double(), lengths=torch.tensor(lengths))
    query = history
    if query_lengths is not None:
        query = JaggedTensor(torch.randn(sum(query_lengths), 6).double(), lengths=torch.tensor(query_lengths))
    mean, attention = MeanPool(6).double(), JaggedTargetAttention(6, 2, dtype=torch.float64)
    with torch.no_grad():
        attention.q_proj.weight.zero_()
        attention.kv_proj.weight[6:] = mean.value.weight
        attention.kv_proj.bias[6:] = mean.value.bias
    attention.out_proj.load_state_dict(mean.out.state_dict())
    got, expected = mean(history, query), attention(history, query)
    torch.testing.assert_close(got.values(), expected.values())
    assert got.lengths() is query.lengths()


@pytest.mark.parametrize("pooling", ["attention", "mean"])
def test_model_traces_and_the_graph_computes_the_same(small_log: Dataset, pooling: Any) -> None:
    from torchrec.fx import Tracer

    model = RankingModel(small_log.schema, CONFIG.model, pooling).eval()
    graph = torch.fx.GraphModule(model, Tracer().trace(model))
    for index in (np.arange(53), np.array([7])):
        features = make_batch(small_log.train, index, small_log.schema).features
        assert torch.equal(graph(features), model(features))


@pytest.mark.parametrize("pooling", ["attention", "mean"])
def test_batch_without_any_history_gives_every_parameter_a_gradient(small_log: Dataset, pooling: Any) -> None:
    train = small_log.train
    empty = np.flatnonzero(train.history_start == train.history_stop)
    assert len(empty) > 2
    model = RankingModel(small_log.schema, CONFIG.model, pooling)
    model(make_batch(train, empty, small_log.schema).features).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("pooling", ["attention", "mean"])
def test_a_prediction_depends_on_its_own_request_alone(small_log: Dataset, pooling: Any) -> None:
    part, mine = small_log.held_out, 29
    model = RankingModel(small_log.schema, CONFIG.model, pooling).eval()
    rng = np.random.default_rng(0)
    items = rng.integers(0, small_log.schema.num_items, len(part.event_item))
    candidates = rng.integers(0, small_log.schema.num_items, len(part.candidate_item))
    events = slice(part.history_start[mine], part.history_stop[mine])
    rows = slice(part.candidate_offsets[mine], part.candidate_offsets[mine + 1])
    items[events], candidates[rows] = part.event_item[events], part.candidate_item[rows]
    others_changed = replace(part, event_item=items, candidate_item=candidates)
    before, after = (
        model(make_batch(requests, np.arange(len(part)), small_log.schema).features)
        for requests in (part, others_changed)
    )
    assert torch.equal(before[rows], after[rows])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("pooling", ["attention", "mean"])
def test_a_resumed_run_ends_in_the_same_bits(small_log: Dataset, tmp_path: Path, pooling: Any) -> None:
    whole = trainer(small_log, pooling=pooling)
    whole.run(lambda run: run.save(tmp_path / "first.pt") if len(run.epochs) == 1 else None)
    torch.rand(5)  # whatever happens in between
    resumed = trainer(small_log, pooling=pooling)
    resumed.load(tmp_path / "first.pt")
    assert len(resumed.epochs) == 1
    resumed.run()
    for name in ("model", "optimizer", "schedule"):
        assert_same(getattr(whole, name).state_dict(), getattr(resumed, name).state_dict())
    figures = [[{k: v for k, v in row.items() if k != "seconds"} for row in run.epochs] for run in (whole, resumed)]
    assert figures[0] == figures[1]


def test_a_run_of_another_seed_differs(small_log: Dataset) -> None:
    runs = [trainer(small_log, seed=seed, epochs=1) for seed in (1, 2)]
    for run in runs:
        run.run()
    assert runs[0].epochs[0]["ne"] != runs[1].epochs[0]["ne"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 12}, "with seed = 11, this one has seed = 12"),
        ({"pooling": "mean"}, "with pooling = attention, this one has pooling = mean"),
        ({"model": ModelConfig(embed_dim=12, num_heads=3)}, r"with model\.embed_dim = 8, this one has"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    small_log: Dataset, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    trainer(small_log).save(tmp_path / "a.pt")
    with pytest.raises(InputError, match=message):
        trainer(small_log, **changes).load(tmp_path / "a.pt")


def test_a_damaged_or_missing_checkpoint_is_refused(small_log: Dataset, tmp_path: Path) -> None:
    run, path = trainer(small_log), tmp_path / "a.pt"
    with pytest.raises(InputError, match=r"a\.pt: there is no such checkpoint"):
        run.load(path)
    run.save(path)
    whole = path.read_bytes()
    for damaged in (b"", b"not a checkpoint", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.pt: is not a readable checkpoint"):
            run.load(path)
    torch.save({"model": {}}, path)
    with pytest.raises(InputError, match=r"a\.pt: is not a checkpoint of this program"):
        run.load(path)


def test_a_loss_that_is_not_finite_stops_the_run(small_log: Dataset) -> None:
    run = trainer(small_log)
    with torch.no_grad():
        run.model.mlp[0].weight.fill_(torch.nan)
    with pytest.raises(InputError, match="training loss must be finite, got nan in epoch 1"):
        run.run()


def matching_log(count: int, seed: int) -> Requests:
    """A click if and only if the candidate is the last item of the history; items are seen equally often."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 8, count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = rng.integers(1, 6, offsets[-1])
    last, label = items[offsets[1:] - 1], rng.random(count) < 0.5
    return Requests(
        event_item=items,
        event_rating=np.zeros_like(items),
        event_time=np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths),
        user=np.zeros(count, dtype=np.int64),
        time=lengths,
        history_start=offsets[:-1],
        history_stop=offsets[1:],
        candidate_offsets=np.arange(count + 1),
        candidate_item=np.where(label, last, (last - 1 + rng.integers(1, 5, count)) % 5 + 1),
        label=label.astype(np.float32),
    )


def test_attention_learns_that_the_last_event_decides() -> None:
    dataset = Dataset("matching", Schema(6, 1, 1), matching_log(1500, seed=0), matching_log(500, seed=1))
    model = ModelConfig(embed_dim=16, dropout=0.0)
    run = trainer(dataset, epochs=6, batch_size=64, learning_rate=1e-2, hide_items=0.0, model=model)
    run.run()
    assert run.epochs[0]["train_loss"] > run.epochs[-1]["train_loss"]
    assert run.epochs[-1]["auc"] > 0.95


def test_a_file_that_cannot_be_finished_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    write_atomically(path, lambda temporary: temporary.write_text("whole") and None)

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("full disk")

    with pytest.raises(RuntimeError, match="full disk"):
        write_atomically(path, fail)
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]
