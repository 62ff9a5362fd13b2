"""The benchmark's padded model is the jagged one, and what is wrong gets no figure."""

import pytest
import torch

from jagged_attn.bench import kunlun as bench
from jagged_attn.bench import kunlun_padded
from jagged_attn.masks import BlockDiagonal
from jagged_attn.modules.kunlun_config import EventTowerConfig

SCENARIO = bench.Scenario(
    {
        "click": EventTowerConfig(12, 3, num_tokens=2, num_layers=3, window=3, num_seeds=5, num_keys=7),
        "impression": EventTowerConfig(
            10, 5, num_tokens=3, num_layers=2, window=BlockDiagonal(4), num_seeds=5, num_keys=7, rotate_values=True,
            activation=("relu", "gelu", "silu", "gelu_tanh", "identity"),
        ),
    },
    batch=7, longest=13, lengths="uniform_from_one", num_tokens=5, embed_dim=8,
)  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture
def ranker() -> bench.Ranker:
    torch.manual_seed(0)
    return bench.Ranker(SCENARIO, "auto").double()


def test_padded_and_jagged_model_agree_in_logits_and_gradients(ranker):
    batch = bench.make_batch(SCENARIO, 0, CPU, torch.float64)
    jagged, padded = (bench._solve(bench.make_contestant(n, ranker), batch) for n in ("jagged", "padded_sdpa"))
    for a, b in zip(jagged, padded, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    bench.check(
        ranker.float(), bench.make_batch(SCENARIO, 0, CPU, torch.float32), 5, bench.make_contestant("jagged", ranker)
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.no_grad()
def test_flex_attention_gets_the_same_masks(ranker, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(kunlun_padded, "_flex", lambda: flex_attention)  # it runs unfused
    batch = bench.make_batch(SCENARIO, 0, CPU, torch.float64)
    flex, sdpa = (bench.make_contestant(f"padded_{name}", ranker) for name in ("flex", "sdpa"))
    torch.testing.assert_close(flex.logits(*flex.prepare(batch)), sdpa.logits(*sdpa.prepare(batch)))


def test_a_wrong_model_gets_no_figure(ranker):
    ranker = ranker.float()
    batch = bench.make_batch(SCENARIO, 0, CPU, torch.float32)
    other = bench.Ranker(SCENARIO, "auto")
    with pytest.raises(ValueError, match="logits of jagged are off by"):
        bench.check(ranker, batch, 5, bench.make_contestant("jagged", other))


def test_times_are_measured_and_a_failure_is_its_contestants_result(ranker):
    batches = [bench.make_batch(SCENARIO, seed, CPU, torch.float64) for seed in range(2)]
    contestants = [bench.make_contestant(n, ranker) for n in ("jagged", "padded_sdpa")]

    def fail(*arguments: object) -> torch.Tensor:
        raise RuntimeError("out of memory\nand more")

    broken = bench.Contestant("padded_flex", contestants[1].prepare, fail, contestants[1].model)
    figures = bench.time_steps([*contestants, broken], batches, 2, CPU)
    assert figures["jagged"] > 0
    assert figures["padded_sdpa"] > 0
    assert figures["padded_flex"] == "RuntimeError: out of memory"


def test_the_whole_jagged_model_compiles_at_most_twice_for_any_lengths():
    from torch._dynamo.testing import CompileCounter

    tower = EventTowerConfig(8, 2, num_tokens=1, num_layers=2, window=3, num_seeds=2, num_keys=3)
    scenario = bench.Scenario({"click": tower}, 5, 13, "uniform_from_one", num_tokens=4, embed_dim=8)
    ranker, counter = bench.Ranker(scenario, "auto"), CompileCounter()
    compiled = torch.compile(ranker, backend=counter, fullgraph=True)
    for seed in range(4):
        arguments = bench._jagged_form(bench.make_batch(scenario, seed, CPU, torch.float32))
        torch.testing.assert_close(compiled(*arguments), ranker(*arguments))
    assert 1 <= counter.frame_count <= 2
