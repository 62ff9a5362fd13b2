"""Graphs of the modules: torch.fx as TorchRec's train pipeline traces, and torch.compile."""

import pickle
import warnings
from typing import Any

import pytest
import torch
from module_inputs import BACKEND, EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor, jagged
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from jagged_attn import Causal, SlidingWindow
from jagged_attn.jagged_tensor import with_values
from jagged_attn.modules import JaggedMultiHeadAttention, JaggedTargetAttention

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec.distributed.train_pipeline import Tracer

E = 6


class Model(nn.Module):
    """A ranking model in small: embeddings, a stack of attention layers, candidates, seeds."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingConfig(name="t", num_embeddings=19, embedding_dim=E, feature_names=["history", "candidate"])]
        self.embed = EmbeddingCollection(tables=tables)
        self.layers = nn.ModuleList(
            [
                JaggedMultiHeadAttention(E, 2, mask=Causal(), qk_norm=True, backend=BACKEND),
                JaggedMultiHeadAttention(
                    E, 2, mask=SlidingWindow(3, 0), activation=("softmax", "silu"), backend=BACKEND
                ),
            ]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(E) for _ in self.layers])
        self.target = JaggedTargetAttention(E, 2, backend=BACKEND)
        self.pool = JaggedTargetAttention(E, 3, num_queries=2, backend=BACKEND)

    def forward(self, kjt: Any) -> tuple[Tensor, Tensor]:
        embedded = self.embed(kjt)
        x = embedded["history"]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = with_values(x, x.values() + layer(with_values(x, norm(x.values()))).values())
        return self.target(x, embedded["candidate"]).values(), self.pool(x)


def batch(history: list[int], candidates: list[int]) -> Any:
    values = torch.arange(sum(history) + sum(candidates)) % 19
    return KeyedJaggedTensor.from_lengths_sync(["history", "candidate"], values, torch.tensor(history + candidates))


BATCHES = [([3, 0, 5], [1, 1, 1]), ([0, 0], [2, 1]), ([1, 40, 0, 0, 7], [0, 3, 1, 1, 2])]


@pytest.mark.parametrize("leaves", [[], ["embed"]], ids=["all-traced", "embeddings-are-a-leaf"])
def test_the_train_pipelines_tracer_traces_a_stack_beside_an_embedding_collection(leaves: list[str]) -> None:
    model = Model()
    traced = torch.fx.GraphModule(model, Tracer(leaf_modules=leaves).trace(model))
    for history, candidates in BATCHES if leaves else BATCHES[:1]:
        expected, out = model(batch(history, candidates)), traced(batch(history, candidates))
        assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    sum(x.sum() for x in traced(batch(*BATCHES[2]))).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk-norm"])
def test_a_symbolic_trace_of_attention_runs_with_and_without_keys(qk_norm: bool) -> None:
    module = JaggedMultiHeadAttention(E, 2, mask=Causal(), qk_norm=qk_norm, backend=BACKEND)
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(module)))
    x, key = jagged((3, 0, 5), E, torch.float32), jagged((1, 4, 2), E, torch.float32)
    for inputs in ((x,), (x, key), (x, key, key)):
        assert torch.equal(traced(*inputs).values(), module(*inputs).values())


def test_a_symbolic_trace_of_target_attention_takes_every_kind_of_queries() -> None:
    history = jagged((3, 0, 5), E, torch.float32)
    module = JaggedTargetAttention(E, 2, qk_norm=True, backend=BACKEND)
    traced = torch.fx.symbolic_trace(module)
    for queries in (torch.randn(4, E), torch.randn(3, 2, E)):
        assert torch.equal(traced(history, queries), module(history, queries))
    assert torch.equal(traced(history, history).values(), module(history, history).values())
    learned = JaggedTargetAttention(E, 2, num_queries=4, backend=BACKEND)
    assert torch.equal(torch.fx.symbolic_trace(learned)(history), learned(history))


def stack(x: Any, candidates: Tensor, model: Model) -> tuple[Tensor, ...]:
    for layer in model.layers:
        x = with_values(x, x.values() + layer(x).values())
    return x.values(), model.target(x, candidates), model.pool(x)


# Sizes 0 and 1 are compiled for themselves by torch.compile, whatever is compiled; see docs/modules.md.
LENGTHS = [[2, 0, 3], [5, 1, 7, 0, 11], [20, 3], [0, 0, 0, 2], [1, 1], [0, 130, 0, 31, 32, 33]]
KINDS = {
    "values-and-offsets": lambda values, offsets: (values, offsets),
    "lengths": lambda values, offsets: (JaggedTensor(values, lengths=offsets.diff()),),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_compiles_at_most_twice_for_any_lengths(kind: str) -> None:
    model = Model()

    def run(*args: Any) -> tuple[Tensor, ...]:
        *jagged_parts, candidates = args
        x = JaggedTensor(jagged_parts[0], offsets=jagged_parts[1]) if len(jagged_parts) == 2 else jagged_parts[0]
        return stack(x, candidates, model)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for lengths in LENGTHS:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        results = []
        for function in (compiled, run):
            values = torch.randn(sum(lengths), E, generator=torch.Generator().manual_seed(3)).requires_grad_()
            candidates = torch.randn(len(lengths), 3, E, generator=torch.Generator().manual_seed(4))
            out = function(*KINDS[kind](values, offsets), candidates)
            leaves = {"values": values, **dict(model.named_parameters())}
            leaves = {name: leaf for name, leaf in leaves.items() if not name.startswith(("embed", "norms"))}
            results.append([*out, *torch.autograd.grad(sum(x.square().sum() for x in out), list(leaves.values()))])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_a_stack_compiles_with_inductor() -> None:
    model = Model()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, candidates: stack(x, candidates, model), fullgraph=True)
    for lengths in LENGTHS[:3]:
        x, candidates = jagged(tuple(lengths), E, torch.float32), torch.randn(len(lengths), 3, E)
        expected, out = stack(x, candidates, model), compiled(x, candidates)
        for actual, wanted in zip(out, expected, strict=True):
            torch.testing.assert_close(actual, wanted)
        sum(y.sum() for y in out).backward()
