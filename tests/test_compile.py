"""The operators under PyTorch's tracers: opcheck, torch.compile, export and fx."""

from typing import Any

import pytest
import torch
from cases import Case, run
from targets import Target
from torch._dynamo.testing import CompileCounterWithBackend

import jagged_attn as ja

# opcheck runs each operator a dozen times and looks at shapes, strides and aliases, which few rows and heads show.
_FEW: dict[str, Any] = {"lengths": (3, 0, 5), "heads": (2, 2)}
OPCHECK_CASES = [
    Case("self", lengths=(3, 0, 5), heads=(2, 1), dims=(16, 8)),
    Case("cross", **_FEW, lengths_q=(2, 2, 0)),
    Case("broadcast-q", **_FEW, num_shared_queries=4),
    Case("elementwise", **_FEW, options={"activation": "gelu"}),
    Case("mix", **_FEW, options={"activation": ("gelu", "softmax"), "mask": ja.Causal()}),
]


def ragged_batches(device: str, count: int = 20, heads: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of other B, total and longest length each: ``(fused qkv values, offsets)``."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for index in range(count):
        lengths = torch.randint(0, 3 + 2 * index, (2 + index % 7,), generator=generator)
        lengths[0] = 2
        offsets = ja.JaggedLayout.from_lengths(lengths).offsets
        values = torch.randn(int(lengths.sum()), 3 * heads * 16, generator=generator)
        batches.append((values.to(device), offsets.to(device)))
    return batches


def opcheck_arguments(case: Case, target: Target) -> tuple[object, ...]:
    inputs = case.inputs(torch.float32, target.device)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    offsets_q = None if inputs.layout_q is None else inputs.layout_q.offsets
    offsets_kv = inputs.layout_kv.offsets
    from jagged_attn import functional  # what the public function computes on its way to the operator

    mask, names = case.options.get("mask", ja.Full()), case.options.get("activation", "softmax")
    options = (mask, names, 0.25, 1.0, False, target.backend)
    *_, decision = functional._decide(*leaves, inputs.layout_q, inputs.layout_kv, *options)
    return (*leaves, offsets_q, offsets_kv, decision.tables, *decision.static)


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=lambda case: case.name)
def test_the_operator_reads_the_facts_that_the_function_decided_on(case: Case, target: Target) -> None:
    """A call past the dispatcher and one through it ask a backend the same."""
    from jagged_attn import custom_ops, functional

    inputs = case.inputs(torch.float32, target.device)
    options = (case.options.get("mask", ja.Full()), case.options.get("activation", "softmax"), 0.25, 1.0, False)
    *_, decision = functional._decide(
        inputs.q, inputs.k, inputs.v, inputs.layout_q, inputs.layout_kv, *options, target.backend
    )  # fmt: skip
    offsets_q = None if inputs.layout_q is None else inputs.layout_q.offsets
    *static, backend = decision.static
    assert decision.spec == custom_ops.spec_of(inputs.q, inputs.v, offsets_q, inputs.layout_kv.offsets, *static)
    assert backend == target.backend


@pytest.mark.parametrize("case", OPCHECK_CASES, ids=lambda case: case.name)
def test_operators_pass_opcheck(case: Case, target: Target) -> None:
    arguments = opcheck_arguments(case, target)
    torch.library.opcheck(torch.ops.jagged_attn.attention, arguments)
    q, k, v, *jagged = arguments
    out, lse = (x.detach() for x in torch.ops.jagged_attn.attention(*arguments))
    backward = (torch.randn_like(out), q.detach(), k.detach(), v.detach(), out, lse, *jagged)  # type: ignore[attr-defined]
    torch.library.opcheck(torch.ops.jagged_attn.attention_backward, backward)


def test_the_tile_table_operator_passes_opcheck() -> None:
    offsets = torch.tensor([0, 3, 3, 80])
    torch.library.opcheck(torch.ops.jagged_attn.tile_table, (offsets, offsets, 90, 90, 16))


@pytest.mark.parametrize("kind", ["self", "broadcast_q", "cross"])
def test_one_graph_serves_every_batch_forward_and_backward(kind: str, target: Target) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    # The interpreter takes 30 ms a tile and head; a graph that served one kind of batch alone fails at the third.
    count, heads = (4, 2) if target == Target("triton", "cpu") else (20, 4)
    seeds = torch.randn(5, heads, 16, device=target.device, requires_grad=True)

    def model(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        q, k, v = values.unflatten(1, (3, heads, 16)).unbind(1)
        if kind == "broadcast_q":
            return ja.broadcast_q_attention(seeds, k, v, offsets, backend=target.backend)
        layout_kv = ja.JaggedLayout(offsets.clone()) if kind == "cross" else None
        return ja.jagged_attention(q, k, v, offsets, layout_kv, mask=ja.Causal(), backend=target.backend)

    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for values, offsets in ragged_batches(target.device, count, heads):
        results = []
        for function in (model, compiled):
            leaf = values.clone().requires_grad_()
            out = function(leaf, offsets)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaf)))
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_sizes_and_numbers_that_dynamo_makes_symbols_stay_constants(target: Target) -> None:
    def model(x: torch.Tensor, offsets: torch.Tensor, scale: float, reach: int) -> torch.Tensor:
        mask = ja.SlidingWindow(reach, 0)
        return ja.jagged_attention(x, x, x, offsets, mask=mask, scale=scale, backend=target.backend)

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    offsets = torch.tensor([0, 3, 3, 7], device=target.device)
    for heads, scale, reach in ((4, 0.5, 1), (2, 1, 2), (3, 2, 3)):
        x = torch.randn(7, heads, 16, device=target.device)
        assert torch.equal(compiled(x, offsets, scale, reach), model(x, offsets, scale, reach))
    torch._dynamo.reset()


@pytest.mark.parametrize("enabled", [False, True])
def test_what_dynamo_of_torch_2_11_cannot_trace_breaks_no_graph(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # A break makes it take the facts of the call for symbols, and raise InternalTorchDynamoError at another shape.
    available = torch._dynamo.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, "is_autocast_available", available)

    def model(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled):
            return ja.jagged_attention(x, x, x, offsets)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for values, offsets in ragged_batches("cpu", 3):
        x = values.unflatten(1, (3, 4, 16))[:, 0]
        assert compiled(x, offsets).dtype == (torch.bfloat16 if enabled else torch.float32)
        assert torch.equal(compiled(x, offsets), model(x, offsets))
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_runs_what_eager_runs(target: Target) -> None:
    def model(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        layout = ja.JaggedLayout(offsets)
        for _ in range(2):
            q, k, v = values.unflatten(1, (3, 4, 16)).unbind(1)
            out = ja.jagged_attention(q * 1.5, k, v, layout, backend=target.backend).flatten(1)
            values = torch.cat([out, out, out], dim=1) + values
        return values

    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for values, offsets in ragged_batches(target.device, 4):
        torch.testing.assert_close(compiled(values, offsets), model(values, offsets), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


def test_a_stack_makes_its_tile_tables_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = torch.ops.jagged_attn.tile_table
    from jagged_attn import functional

    class Ops:
        attention = torch.ops.jagged_attn.attention

        @staticmethod
        def tile_table(*args: object) -> torch.Tensor:
            made.append(args)
            return real(*args)

    class Torch:
        def __getattr__(self, name: str) -> object:
            return getattr(torch, name)

        class ops:
            jagged_attn = Ops

    monkeypatch.setattr(functional, "torch", Torch())
    case = Case("self")
    inputs = case.inputs(torch.float32, target.device)
    run(inputs, target.backend)
    first = len(made)
    run(inputs, target.backend)
    assert len(made) == first


def test_export_keeps_the_operator(target: Target) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return ja.jagged_attention(q, q, q, offsets, backend=target.backend)

    rows, ends = torch.export.Dim("rows", min=2), torch.export.Dim("ends", min=3)
    q, offsets = torch.randn(9, 2, 16, device=target.device), torch.tensor([0, 4, 9], device=target.device)
    program = torch.export.export(Model(), (q, offsets), dynamic_shapes=({0: rows}, {0: ends}))
    assert any("jagged_attn.attention" in str(node.target) for node in program.graph.nodes)
    q, offsets = torch.randn(30, 2, 16, device=target.device), torch.tensor([0, 4, 9, 9, 30], device=target.device)
    assert torch.equal(program.module()(q, offsets), Model()(q, offsets))


def test_fx_traces_a_wrapped_call(target: Target) -> None:
    def attend(q: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return wrapped_attention(q, offsets, target.backend)

    graph = torch.fx.symbolic_trace(attend)
    q, offsets = torch.randn(9, 2, 16, device=target.device), torch.tensor([0, 4, 9], device=target.device)
    assert torch.equal(graph(q, offsets), attend(q, offsets))


@torch.fx.wrap
def wrapped_attention(q: torch.Tensor, offsets: torch.Tensor, backend: str) -> torch.Tensor:
    return ja.jagged_attention(q, q, q, offsets, backend=backend)
