"""``torch.compile`` of the dense part: few compilations for batches of any sizes, and the numbers of eager mode."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchrec import JaggedTensor

from jagged_attn import Causal, JaggedMultiHeadAttention, JaggedTargetAttention
from jagged_attn.compiling import mark_dynamic
from jagged_attn.jagged_tensor import with_values


class Dense(nn.Module):
    """The dense part of a ranking model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.layer, self.target = JaggedMultiHeadAttention(6, 2, mask=Causal()), JaggedTargetAttention(6, 3)

    def forward(self, history: JaggedTensor, candidates: JaggedTensor) -> torch.Tensor:
        history = with_values(history, history.values() + self.layer(history).values())
        normed = with_values(history, self.norm(history.values()))
        return self.target(normed, candidates).values().square().sum(1)


def batch(seed: int, samples: int, longest: int) -> tuple[JaggedTensor, JaggedTensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> JaggedTensor:
        lengths = torch.randint(low, high, (samples,), generator=generator)
        return JaggedTensor(torch.randn(int(lengths.sum()), 6, generator=generator), lengths=lengths)

    return draw(1, longest), draw(1, 4)


def test_twenty_batches_of_which_the_first_differ_in_lengths_alone_compile_at_most_twice() -> None:
    torch.manual_seed(0)
    model, counter = Dense(), CompileCounterWithBackend("aot_eager")
    parameters = list(model.parameters())
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for seed in range(20):
        samples = 5 if seed < 3 else 2 + seed % 7
        results = []
        for function in (compiled, model):
            history, candidates = batch(seed, samples, 3 + 2 * seed)
            mark_dynamic(history, candidates)
            out = function(history, candidates)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), parameters)))
        assert torch.equal(results[0][0], results[1][0])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_what_can_be_marked() -> None:
    history, candidates = batch(0, 3, 5)
    mark_dynamic({"history": history, "more": {"candidates": candidates}}, torch.ones(3, 2))
    mark_dynamic(JaggedTensor(torch.ones(3, 2), offsets=torch.tensor([0, 3]), weights=torch.ones(3)))
    with pytest.raises(TypeError, match=r"inputs must be a torchrec\.JaggedTensor, got int"):
        mark_dynamic(3)
