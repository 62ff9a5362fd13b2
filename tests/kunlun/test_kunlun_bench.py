"""The benchmark's padded model is the jagged one, and what is wrong gets no figure."""

import pytest
import torch

import jagged_attn as ja
from jagged_attn.bench import kunlun as command
from jagged_attn.bench import kunlun_padded
from jagged_attn.bench import kunlun_steps as bench
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


def test_times_are_measured(ranker):
    batches = [bench.make_batch(SCENARIO, seed, CPU, torch.float64) for seed in range(2)]
    for name in ("jagged", "padded_sdpa"):
        assert bench.time_steps(bench.make_contestant(name, ranker), batches, 2, CPU) > 0


def test_a_reason_says_where_in_the_package():
    with pytest.raises(TypeError) as caught:
        ja.jagged_attention(0, 0, 0, torch.tensor([0, 1]))
    reason = command.reason_of(caught.value)
    assert reason.startswith("TypeError: q must be a torch.Tensor, got int. (at jagged_attn/")
    assert "jagged_attn/functional.py:" in reason
    assert reason.rsplit(", ", maxsplit=1)[-1].startswith("jagged_attn/validation.py:")


def test_a_reason_has_the_frames_that_a_compiler_traced():
    error = RuntimeError(f'no\n  File "{ja.__file__}", line 7, in f\n  File "/elsewhere/x.py", line 1, in g')
    assert command.reason_of(error) == "RuntimeError: no (at jagged_attn/__init__.py:7)"
    assert command.reason_of(RuntimeError("out of memory\nand more")) == "RuntimeError: out of memory"


def test_the_command_goes_on_after_a_contestant_without_a_figure(monkeypatch, capsys):
    results = {"jagged": 2.0, "jagged+compile": "TypeError: no", "padded_sdpa": 5.0}
    monkeypatch.setattr(command, "_figure_of", lambda arguments, name: results[name])
    given = ["speed", "--small", "--device", "cpu", "--contestants", "jagged", "jagged+compile", "padded_sdpa"]
    assert command.main(given) == 1
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert lines == [
        ["jagged", "2.0 ms a step"],
        ["jagged+compile", "no figure: TypeError: no"],
        ["padded_sdpa", "5.0 ms a step"],
        ["best", "jagged against best padded: 2.50 times as fast"],
    ]


@pytest.mark.parametrize(("limit", "status"), [("0.1", 1), ("300", 0)])
def test_a_contestant_runs_in_a_process_of_its_own_and_for_so_long_only(limit, status, capsys):
    given = ["speed", "--small", "--device", "cpu", "--contestants", "jagged", "--batches", "1", "--repeats", "1"]
    assert command.main([*given, "--limit", limit]) == status
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.endswith("no figure: not done within 0.1 s" if status else "ms a step")


def test_the_gates_samples_compile_nothing_that_the_batches_do_not(ranker):
    from torch._dynamo.testing import CompileCounter

    ranker, counter = ranker.float(), CompileCounter()
    logits = torch.compile(ranker, backend=counter, dynamic=True)
    contestant = bench.Contestant("jagged", bench.Batch.packed, logits, ranker)
    batches = [bench.make_batch(SCENARIO, seed, CPU, torch.float32) for seed in range(2)]
    bench.check(ranker, batches[0], 6, contestant)
    bench.time_steps(contestant, batches, 1, CPU)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_the_whole_jagged_model_compiles_at_most_twice_for_any_lengths():
    from torch._dynamo.testing import CompileCounter

    tower = EventTowerConfig(8, 2, num_tokens=1, num_layers=2, window=3, num_seeds=2, num_keys=3)
    scenario = bench.Scenario({"click": tower}, 5, 13, "uniform_from_one", num_tokens=4, embed_dim=8)
    ranker, counter = bench.Ranker(scenario, "auto"), CompileCounter()
    compiled = torch.compile(ranker, backend=counter, fullgraph=True)
    for seed in range(4):
        arguments = bench.make_batch(scenario, seed, CPU, torch.float32).packed()
        torch.testing.assert_close(compiled(*arguments), ranker(*arguments))
    assert 1 <= counter.frame_count <= 2
