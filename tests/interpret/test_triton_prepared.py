"""What a ``LayoutStage`` makes is what the portable backend's calls look for."""

import warnings
from typing import Any

import pytest
import torch
from targets import INTERPRETED

from jagged_attn import JaggedMultiHeadAttention, JaggedTargetAttention, functional
from jagged_attn.jagged_tensor import to_jagged_tensor

with warnings.catch_warnings():
    # fbgemm's CPU build warns of operators that it does not have.
    warnings.simplefilter("ignore")
    from torchrec import KeyedJaggedTensor

    from jagged_attn.pipeline import AttentionCall, JaggedBatch, LayoutStage

pytestmark = [
    pytest.mark.interpret,
    pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 (make test-interpret)"),
]
CLICKS, ADS = [0, 3, 17], [2, 1, 0]


def test_forward_and_backward_on_prepared_layouts_make_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    derived = functional.derived

    def spy(offsets: Any, other: Any, key: Any, build: Any) -> Any:
        return derived(offsets, other, key, lambda: (made.append(key), build())[1])

    monkeypatch.setattr(functional, "derived", spy)
    attention = JaggedMultiHeadAttention(16, 2, backend="triton")
    target = JaggedTargetAttention(16, 2, backend="triton")
    pool = JaggedTargetAttention(16, 2, num_queries=3, backend="triton")
    stage = LayoutStage(
        [
            AttentionCall.of(attention, keys="clicks"),
            AttentionCall.of(target, keys="clicks", queries="ads"),
            AttentionCall.of(pool, keys="clicks"),
        ]
    )
    ids = torch.arange(sum(CLICKS) + sum(ADS))
    features = KeyedJaggedTensor.from_lengths_sync(["clicks", "ads"], ids, torch.tensor(CLICKS + ADS))

    def tables_of_a_step(batch: JaggedBatch) -> int:
        made.clear()
        clicks = to_jagged_tensor(torch.randn(sum(CLICKS), 16), batch.layouts["clicks"])
        ads = to_jagged_tensor(torch.randn(sum(ADS), 16), batch.layouts["ads"])
        out = attention(clicks).values().sum() + target(clicks, ads).values().sum() + pool(clicks).sum()
        out.backward()
        return sum(key[0] == "tables" for key in made)

    batch = JaggedBatch(features, torch.ones(3), stage=stage).to(torch.device("cpu"))
    assert batch.tables
    assert sum(key[0] == "tables" for key in made) == 3
    assert tables_of_a_step(batch) == 0
    plain = LayoutStage([], features=["clicks", "ads"])
    assert tables_of_a_step(JaggedBatch(features, torch.ones(3), stage=plain).to(torch.device("cpu"))) == 3
