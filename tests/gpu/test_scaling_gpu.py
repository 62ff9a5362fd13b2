"""What many ranks and servers need of a GPU: no wait for the device, graphs captured once, few compilations."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from waiting import no_waiting

from jagged_attn import SlidingWindow, modules
from jagged_attn.bench.kunlun_steps import Batch, Ranker, Scenario, loss_of, make_batch
from jagged_attn.capturing import CapturedStep, with_capacity
from jagged_attn.compiling import mark_dynamic
from jagged_attn.jagged_tensor import to_jagged_tensor
from jagged_attn.modules import EventTowerConfig, InteractionConfig, SubBlocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = "cuda"
LENGTHS = (3, 0, 65, 128, 1, 200)
B, E, N = len(LENGTHS), 128, 5
TOWERS = {
    "click": EventTowerConfig(128, 2, num_tokens=4, num_layers=2, window=16, num_seeds=16, num_keys=32),
    "impression": EventTowerConfig(64, 1, num_tokens=3, num_layers=1, window=16, num_seeds=8, num_keys=32),
}
SCENARIO = Scenario(TOWERS, batch=8, longest=150, lengths="uniform_from_one", num_tokens=N, embed_dim=E)


def rows(width: int = E) -> Any:
    """A jagged tensor of other values each time."""
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE)
    return to_jagged_tensor(torch.randn(sum(LENGTHS), width, device=DEVICE, requires_grad=True), offsets)


def dense(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def events() -> dict[str, Any]:
    return {name: rows(tower.embed_dim) for name, tower in TOWERS.items()}


def seconds() -> Tensor:
    return torch.arange(sum(LENGTHS), device=DEVICE) * 1000


def rotation() -> Tensor:
    return modules.RotaryTemporalEmbedding(64)(rows(), seconds())


_PLAN = SubBlocks(True, True, True)
_SIZES = InteractionConfig(num_summary_tokens=3)
Call = tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]
CALLS: dict[str, Call] = {
    "HeadNorm": (lambda: modules.HeadNorm(64), lambda: (dense(7, 2, 64),)),
    "HierarchicalSeedPooling": (
        lambda: modules.HierarchicalSeedPooling(E, 2, num_seeds=16, num_tokens=4), lambda: (rows(),)
    ),
    "JaggedMultiHeadAttention": (
        lambda: modules.JaggedMultiHeadAttention(E, 2, mask=SlidingWindow(9, 9), qk_norm=True), lambda: (rows(),)
    ),
    "JaggedTargetAttention": (lambda: modules.JaggedTargetAttention(E, 2), lambda: (rows(), rows())),
    "KeyValueGeneration": (lambda: modules.KeyValueGeneration(N, E, 32, E, 2), lambda: (dense(B, N, E),)),
    "Kunlun": (
        lambda: modules.Kunlun(N, E, TOWERS, _SIZES),
        lambda: (dense(B, N, E), events(), {"click": seconds()}),
    ),
    "KunlunInteractionBlock": (
        lambda: modules.KunlunInteractionBlock(N, E, TOWERS, dict.fromkeys(TOWERS, True), _SIZES),
        lambda: (dense(B, N, E), events(), {}),
    ),
    "KunlunLayer": (
        lambda: modules.KunlunLayer(N, E, TOWERS, dict.fromkeys(TOWERS, _PLAN), _SIZES),
        lambda: (dense(B, N, E), events(), {}, {"click": rotation(), "impression": None}),
    ),
    "KunlunTransformerBlock": (
        lambda: modules.KunlunTransformerBlock(TOWERS["click"], _PLAN, 3, E),
        lambda: (rows(), dense(B, 3, E), rotation()),
    ),
    "PersonalizedFeedForward": (
        lambda: modules.PersonalizedFeedForward(E, 2, N, num_keys=32), lambda: (rows(), dense(B, N, E))
    ),
    "RankingHead": (lambda: modules.RankingHead(N, E), lambda: (dense(B, N, E),)),
    "RotaryTemporalEmbedding": (lambda: modules.RotaryTemporalEmbedding(64), lambda: (rows(), seconds())),
    "SeedPooling": (lambda: modules.SeedPooling(E, 2, num_seeds=6), lambda: (rows(),)),
    "SumKronLinear": (lambda: modules.SumKronLinear(16, 4, E), lambda: (dense(B, 16, E),)),
    "TemporalSelfAttention": (
        lambda: modules.TemporalSelfAttention(E, 2, mask=SlidingWindow(9, 9)), lambda: (rows(), rotation())
    ),
    "TokenLinear": (lambda: modules.TokenLinear(N, 3), lambda: (dense(B, N, E),)),
    "WeightGeneration": (lambda: modules.WeightGeneration(N, 3, E), lambda: (dense(B, N, E),)),
    "WukongExperts": (lambda: modules.WukongExperts(N, N, E), lambda: (dense(B, N, E),)),
    "WukongLayer": (lambda: modules.WukongLayer(N, E, num_fmb=3, num_lcb=2), lambda: (dense(B, N, E),)),
}  # fmt: skip


def tensors(x: Any) -> list[Tensor]:
    """All floating tensors of a result."""
    if isinstance(x, dict):
        return [t for value in x.values() for t in tensors(value)]
    if isinstance(x, tuple):
        return [t for value in x for t in tensors(value)]
    return [x if isinstance(x, Tensor) else x.values()]


def step(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    results = [x for x in tensors(module(*arguments)) if x.requires_grad]
    if results:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])


def test_every_module_is_listed() -> None:
    kinds = {name for name, x in vars(modules).items() if isinstance(x, type) and issubclass(x, nn.Module)}
    assert kinds == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_no_module_waits_for_the_device(name: str) -> None:
    build, inputs = CALLS[name]
    module = build().to(DEVICE)
    step(module, inputs())  # kernels are compiled and handles made
    arguments = inputs()  # whose layouts nothing knows yet
    with no_waiting():
        step(module, arguments)


Inputs = tuple[Tensor, dict[str, Any], dict[str, Tensor], Tensor, Tensor]


def inputs_of(batch: Batch) -> Inputs:
    """Tokens, events, timestamps, labels, and the weights of the samples in the loss."""
    tokens, events, timestamps, labels = batch.jagged()
    weights = torch.full_like(labels, 1 / max(len(labels), 1), dtype=torch.float32)
    return tokens, events, timestamps, labels.float(), weights


def room_for(batches: Sequence[Batch], samples: int) -> Inputs:
    """Inputs of so many samples, and of as many rows as the largest batch has."""
    tokens, events, timestamps, labels, weights = inputs_of(batches[0])
    rows_of = {name: max(x.values[name].shape[0] for x in batches) for name in TOWERS}
    return (
        tokens.new_zeros(samples, *tokens.shape[1:]),
        {name: with_capacity(x, rows_of[name], samples) for name, x in events.items()},
        {name: x.new_zeros(rows_of[name]) for name, x in timestamps.items()},
        labels.new_zeros(samples),
        weights.new_zeros(samples),
    )


def make_step(model: nn.Module, rate: float = 0.01) -> Callable[..., Tensor]:
    """A whole training step: forward, backward, update."""
    optimizer = torch.optim.SGD(model.parameters(), rate)

    def train(
        tokens: Tensor, events: dict[str, Any], stamps: dict[str, Tensor], labels: Tensor, weights: Tensor
    ) -> Tensor:
        values = {name: x.values() for name, x in events.items()}
        logits = model(tokens, values, {name: x.offsets() for name, x in events.items()}, stamps)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, weights, reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return train


def exact_batch(batch: Batch) -> Batch:
    return batch.first(len(batch.labels), torch.float64)


def in_dtype(x: Any, dtype: torch.dtype) -> Any:
    """The same numbers, floating ones in another dtype."""
    return torch.utils._pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, x)


def in_float64(model: Ranker) -> Ranker:
    """The same weights in float64, which no backend that ``"auto"`` chooses on a GPU takes."""
    exact = Ranker(SCENARIO, "eager").to(DEVICE, torch.float64)
    exact.load_state_dict(model.state_dict())
    return exact


def assert_as_right(
    name: str, actual: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor], terms: int = 1
) -> None:
    """No further from float64 than twice what the plain run is, and sums of so many terms in another order, in norm."""
    roundings = math.sqrt(terms) * torch.finfo(plain[0].dtype).eps
    a, p, e = (torch.cat([x.detach().double().flatten() for x in tensors]) for tensors in (actual, plain, exact))
    error, allowed = (a - e).norm(), 2 * (p - e).norm() + roundings * e.norm()
    assert error <= allowed, f"{name}: {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_is_captured_once_and_replayed_with_other_offsets(dtype: torch.dtype) -> None:
    """Each step from the same weights, no further from float64 than twice what a step without a graph is."""
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    model = Ranker(SCENARIO, "auto").to(device, dtype)
    # From an eighth to all of the samples and rows.
    batches = [
        make_batch(replace(SCENARIO, batch=1 + seed % 8, longest=20 + 6 * seed), seed, device, dtype)
        for seed in range(21)
    ]
    models = {"captured": model, "plain": copy.deepcopy(model), "exact": in_float64(model)}
    start = copy.deepcopy(model.state_dict())
    replay = CapturedStep(make_step(model), *room_for(batches, 8), warmup=3)
    steps = {name: make_step(models[name]) for name in ("plain", "exact")}
    found: dict[str, list[Tensor]] = {name: [] for name in models}
    for batch in batches[1:]:
        for each in models.values():
            each.load_state_dict(start)
        losses = {
            "captured": replay(*inputs_of(batch)),
            # The uncaptured runs have batches of their own size: nothing is left over in them.
            "plain": steps["plain"](*inputs_of(batch)),
            "exact": steps["exact"](*inputs_of(exact_batch(batch))),
        }
        for name, each in models.items():
            found[name] += [losses[name].clone(), *(p.detach().clone() for p in each.parameters())]
    count = 1 + len(start)  # of the loss and the parameters; there are no buffers
    for index in range(count):
        # The loss is made in fp32, from logits of the dtype.
        captured, plain = ([x.to(dtype) for x in found[name][index::count]] for name in ("captured", "plain"))
        assert_as_right(["loss", *start][index], captured, plain, found["exact"][index::count])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_dense_part_compiles_at_most_twice_for_20_batches(backend: str) -> None:
    torch.manual_seed(0)
    device = torch.device(DEVICE)
    model = Ranker(SCENARIO, "auto").to(device)
    exact = in_float64(model)
    # Inductor's worker processes do not find the GPU with PyTorch before 2.13 and a Triton of 3.7.
    torch._inductor.config.compile_threads = 1
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    # First the lengths alone change, then the number of samples too: what costs three compilations unmarked.
    for seed in range(20):
        scenario = replace(SCENARIO, batch=8 if seed < 3 else 2 + seed % 9, longest=20 + 7 * seed)
        batch = make_batch(scenario, seed, device, torch.float32)
        arguments = batch.packed()
        mark_dynamic(*arguments)
        results = []
        for function, of in ((compiled, model), (model, model), (exact, exact)):
            given = in_dtype(arguments, torch.float64) if of is exact else arguments
            logits = function(*given)
            gradients = torch.autograd.grad(loss_of(logits, batch.labels), list(of.parameters()))
            results.append((logits, gradients))
        logits, gradients = zip(*results, strict=True)
        # Not bit for bit: where a compiler sees them, rotations are not made by the kernel of their own.
        terms = E + sum(x.shape[0] for x in batch.values.values())
        assert_as_right(f"logits {seed}", *([x] for x in logits), terms=terms)
        assert_as_right(f"gradients {seed}", *gradients, terms=terms)
    assert counter.frame_count <= 2
    torch._dynamo.reset()
