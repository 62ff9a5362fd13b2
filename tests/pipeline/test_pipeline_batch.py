"""``JaggedBatch`` and ``LayoutStage`` by themselves."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from waiting import no_waiting

import jagged_attn
from jagged_attn import JaggedMultiHeadAttention, JaggedTargetAttention, UnsupportedError
from jagged_attn.jagged_tensor import to_jagged_tensor

with warnings.catch_warnings():
    # fbgemm's CPU build warns of operators that it does not have.
    warnings.simplefilter("ignore")
    from torchrec import KeyedJaggedTensor

    from jagged_attn.pipeline import AttentionCall, JaggedBatch, LayoutStage

CPU = torch.device("cpu")
# Per key: clicks of five users, then ads. With 0, 1 and both sides of a block.
CLICKS, ADS = [0, 1, 63, 64, 65], [2, 1, 1, 0, 3]


def features() -> Any:
    values = torch.arange(sum(CLICKS) + sum(ADS))
    return KeyedJaggedTensor.from_lengths_sync(["clicks", "ads"], values, torch.tensor(CLICKS + ADS))


def layers() -> tuple[JaggedMultiHeadAttention, JaggedTargetAttention, JaggedTargetAttention]:
    return (
        JaggedMultiHeadAttention(24, 3),
        JaggedTargetAttention(24, 3),
        JaggedTargetAttention(24, 3, num_queries=5),
    )


def stage() -> LayoutStage:
    attention, target, pool = layers()
    calls = [
        AttentionCall.of(attention, keys="clicks"),
        AttentionCall.of(target, keys="clicks", queries="ads"),
        AttentionCall.of(pool, keys="clicks"),
    ]
    return LayoutStage(calls)


def test_to_moves_everything_and_runs_the_stage_on_what_has_arrived() -> None:
    seen = []

    def record(batch: JaggedBatch) -> JaggedBatch:
        seen.append(batch)
        return batch

    batch = JaggedBatch(features(), torch.ones(7), {"age": torch.ones(5, 2)}, record)
    moved = batch.to(torch.device("meta"), non_blocking=True)
    assert seen == [moved]
    tensors = [moved.features.values(), moved.features.lengths(), moved.labels, moved.dense["age"]]
    assert all(x.is_meta for x in tensors)
    assert moved.features.length_per_key() == [sum(CLICKS), sum(ADS)]


def test_record_stream_covers_ids_labels_dense_layouts_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[int] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append(id(self)))
    batch = stage()(JaggedBatch(features(), torch.ones(7), {"age": torch.ones(5, 2)}))
    batch = JaggedBatch(batch.features, batch.labels, batch.dense, None, batch.layouts, (torch.zeros(3),))
    batch.record_stream(None)  # type: ignore[arg-type]
    wanted = [
        batch.features.values(), batch.features.lengths(), batch.labels, batch.dense["age"],
        batch.layouts["clicks"].offsets, batch.layouts["ads"].offsets, batch.tables[0],
    ]  # fmt: skip
    assert set(map(id, wanted)) <= set(recorded)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_pinned_batch_is_prepared_on_the_copy_stream_without_waiting() -> None:
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    batch = JaggedBatch(features(), torch.ones(7), {"age": torch.ones(5, 2)}, stage()).pin_memory()
    assert batch.features.values().is_pinned()
    batch.to(device)  # what is made once a process
    with no_waiting():
        with torch.cuda.stream(stream):
            moved = batch.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        moved.record_stream(torch.cuda.current_stream())
    assert moved.tables
    assert moved.layouts["clicks"].offsets.diff().tolist() == CLICKS


def test_the_stage_makes_the_layouts_of_the_calls_and_of_further_features() -> None:
    attention, _, _ = layers()
    calls = [AttentionCall.of(attention, keys="clicks")]
    batch = JaggedBatch(features(), torch.ones(7), stage=LayoutStage(calls, features=["ads"])).to(CPU)
    lengths = {name: layout.offsets.diff().tolist() for name, layout in batch.layouts.items()}
    assert lengths == {"clicks": CLICKS, "ads": ADS}


def test_layers_give_the_same_on_prepared_layouts() -> None:
    batch = JaggedBatch(features(), torch.ones(7), stage=stage()).to(CPU)
    attention, target, pool = layers()
    embedded = torch.randn(sum(CLICKS) + sum(ADS), 24)
    rows = dict(zip(["clicks", "ads"], embedded.split([sum(CLICKS), sum(ADS)]), strict=True))
    results = []
    for offsets in ({key: x.offsets for key, x in batch.layouts.items()}, None):
        clicks, ads = (
            to_jagged_tensor(rows[key], batch.features[key].offsets() if offsets is None else offsets[key])
            for key in ("clicks", "ads")
        )
        results.append([attention(clicks).values(), target(clicks, ads).values(), pool(clicks)])
    for prepared, plain in zip(*results, strict=True):
        assert torch.equal(prepared, plain)


def test_calls_of_layers_are_what_the_layers_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from jagged_attn import functional

    asked: list[Any] = []
    choose: Callable[..., str] = functional.dispatch.choose
    monkeypatch.setattr(functional.dispatch, "choose", lambda *args: (asked.append(args), choose(*args))[1])
    functional._make_plan.cache_clear()
    batch = JaggedBatch(features(), torch.ones(7), stage=stage()).to(CPU)
    prepared, asked[:] = list(asked), []
    attention, target, pool = layers()
    clicks = to_jagged_tensor(torch.randn(sum(CLICKS), 24), batch.layouts["clicks"])
    ads = to_jagged_tensor(torch.randn(sum(ADS), 24), batch.layouts["ads"])
    attention(clicks), target(clicks, ads), pool(clicks)
    assert asked == prepared


def test_a_missing_feature_is_named() -> None:
    wanted = LayoutStage([AttentionCall.of(JaggedMultiHeadAttention(8, 2), keys="likes")])
    with pytest.raises(ValueError, match=r"features must have the keys \['likes'\], got \['clicks', 'ads'\]"):
        JaggedBatch(features(), torch.ones(7), stage=wanted).to(CPU)


def test_a_layer_without_one_attention_call_is_refused() -> None:
    with pytest.raises(TypeError, match="module must be a JaggedMultiHeadAttention or JaggedTargetAttention, got Lin"):
        AttentionCall.of(torch.nn.Linear(3, 3), keys="clicks")


def test_a_backend_that_refuses_the_call_refuses_in_the_stage() -> None:
    wanted = LayoutStage([AttentionCall.of(JaggedMultiHeadAttention(8, 2, backend="tlx_hopper"), keys="clicks")])
    with pytest.raises(UnsupportedError, match="'tlx_hopper' does not run this call"):
        wanted(JaggedBatch(features(), torch.ones(7)))


def test_importing_the_library_does_not_import_the_pipeline() -> None:
    code = (
        "import sys, jagged_attn; assert not [m for m in sys.modules if 'torchrec' in m or 'pipeline' in m.split('.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert not hasattr(jagged_attn, "JaggedBatch")
