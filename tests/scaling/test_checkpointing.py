"""Activation checkpointing: the gradients stay, and selective checkpointing launches each attention forward once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchrec import JaggedTensor

from jagged_attn import Causal, EventTowerConfig, JaggedMultiHeadAttention, JaggedTargetAttention, Kunlun
from jagged_attn.backends import eager
from jagged_attn.checkpointing import keep_attention
from jagged_attn.jagged_tensor import with_values

LAYERS = 3
LENGTHS = (3, 0, 5, 1)
Run = Callable[..., Any]


def plain(layer: nn.Module, *args: Any) -> Any:
    return layer(*args)


KINDS: dict[str, tuple[Run, int]] = {
    "none": (plain, 1),
    "plain": (partial(checkpoint, use_reentrant=False), 2),
    "selective": (partial(checkpoint, use_reentrant=False, context_fn=keep_attention), 1),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = JaggedMultiHeadAttention(8, 2, mask=Causal())

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        return with_values(x, x.values() + self.attention(with_values(x, self.norm(x.values()))).values())


class Ranking(nn.Module):
    """Self-attention, candidates, seeds: every kind of call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS - 2))
        self.target, self.pool = JaggedTargetAttention(8, 2), JaggedTargetAttention(8, 2, num_queries=3)

    def forward(self, run: Run, values: Tensor, offsets: Tensor) -> Tensor:
        x = JaggedTensor(values, offsets=offsets)
        for layer in self.layers:
            x = run(layer, x)
        candidates = JaggedTensor(values[:4], lengths=torch.tensor([1, 1, 2, 0]))
        return run(self.target, x, candidates).values().square().sum() + run(self.pool, x).square().sum()


def inputs() -> tuple[Tensor, Tensor]:
    values = torch.randn(sum(LENGTHS), 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return values, torch.tensor([0, *LENGTHS]).cumsum(0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the backend's kernels ran."""
    counts = {"forward": 0, "backward": 0}

    def counted(name: str, kernel: Run) -> Run:
        def run(*args: Any) -> Any:
            counts[name] += 1
            return kernel(*args)

        return run

    for name in counts:
        monkeypatch.setattr(eager, name, counted(name, getattr(eager, name)))
    return counts


def gradients(model: nn.Module, run: Run, x: tuple[Tensor, Tensor]) -> list[Tensor]:
    leaves = [x[0], *model.parameters()]
    return list(torch.autograd.grad(model(run, *x), leaves))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", range(2), ids=["first-step", "later-step"])
def test_how_often_the_attention_forward_runs(kind: str, step: int, launches: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Ranking(), inputs()
    expected = gradients(model, plain, x)
    run, times = KINDS[kind]
    for _ in range(step):
        gradients(model, run, x)
    launches.update(forward=0, backward=0)
    for actual, wanted in zip(gradients(model, run, x), expected, strict=True):
        assert torch.equal(actual, wanted)
    assert launches == {"forward": times * LAYERS, "backward": LAYERS}


@pytest.mark.parametrize(("kind", "times"), [("plain", 2), ("selective", 1)])
def test_kunlun_layers_are_checkpointed(kind: str, times: int, launches: dict[str, int]) -> None:
    torch.manual_seed(0)
    towers = {"click": EventTowerConfig(8, 2, num_tokens=3, num_layers=2, window=5, num_seeds=4, num_keys=6)}
    model = Kunlun(4, 16, towers, closing_pool=False)
    tokens, (values, offsets) = torch.randn(len(LENGTHS), 4, 16), inputs()
    results = []
    for run in (plain, KINDS[kind][0]):
        launches.update(forward=0, backward=0)
        x, sequences, summaries = tokens, {"click": JaggedTensor(values, offsets=offsets)}, {}
        rotations = {"click": model.rotary["click"](sequences["click"])}
        for layer in model.layers:
            x, sequences, summaries = run(layer, x, sequences, summaries, rotations)
        used = [p for p in model.parameters() if p.requires_grad]
        results.append(torch.autograd.grad(x.square().sum(), used, allow_unused=True))
    assert launches["forward"] == times * launches["backward"]
    for actual, wanted in zip(*results, strict=True):
        assert (actual is None and wanted is None) or torch.equal(actual, wanted)


@pytest.mark.parametrize(("kind", "forwards"), [("plain", 2), ("selective", 1)])
def test_a_compiled_step_recomputes_the_same(kind: str, forwards: int, launches: dict[str, int]) -> None:
    torch.manual_seed(0)
    layer, (values, offsets) = Layer(), inputs()

    def step(values: Tensor, offsets: Tensor) -> Tensor:
        return KINDS[kind][0](layer, JaggedTensor(values, offsets=offsets)).values().square().sum()

    expected = torch.autograd.grad(layer(JaggedTensor(values, offsets=offsets)).values().square().sum(), values)[0]
    launches.update(forward=0, backward=0)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
    actual = torch.autograd.grad(compiled(values, offsets), values)[0]
    torch.testing.assert_close(actual, expected)
    assert launches == {"forward": forwards, "backward": 1}
    torch._dynamo.reset()
