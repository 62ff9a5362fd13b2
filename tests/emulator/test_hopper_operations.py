"""The Hopper backend's two operations in the emulator: forward, then backward on its results, with its own tables."""

import dataclasses

import pytest
import torch

from jagged_attn.backends import reference
from jagged_attn.backends.base import Arch, Geometry
from jagged_attn.backends.tlx_hopper import capability, launch, launch_backward, launch_broadcast_q, launch_forward
from jagged_attn.functional import _tables
from jagged_attn.masks import Causal, Full
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.emulator.launches import emulated_launches
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch
from jagged_attn.testing.emulator.schedules import Schedule
from jagged_attn.testing.inputs import attention_inputs

HOPPER = Arch("cuda", (9, 0))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_queries", [None, 20, 130, 200])
def test_both_operations(num_queries: int | None, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = attention_inputs(
        torch.tensor([65, 0, 130, 1]), num_shared_queries=num_queries, num_heads=2, head_dim=64, dtype=torch.bfloat16,
        extra_rows=3,
    )  # fmt: skip
    kind, mask = ("self", Causal()) if num_queries is None else ("broadcast_q", Full())
    spec = AttentionSpec(kind, torch.bfloat16, 2, 2, 64, 64, mask, ("softmax",), 0.125, 1.0, deterministic)
    assert capability.supports(spec, HOPPER) in (None, capability.NO_TLX)
    offsets_q = None if inputs.layout_q is None else inputs.layout_q.offsets
    requests, offsets_kv = capability.table_requests(spec, HOPPER), inputs.layout_kv.offsets
    tables = _tables(requests, inputs.q.shape[0], inputs.k.shape[0], offsets_q, offsets_kv)
    geometry = Geometry(offsets_q, offsets_kv, tuple(tables))
    for module in (launch_forward, launch_backward, launch_broadcast_q):
        monkeypatch.setattr(module, "num_processors", lambda device: 2)
    with emulated_launches(Launch(Schedule("random", 0), HOUSE_RULES, arch=90)):
        out, lse = launch.forward(inputs.q, inputs.k, inputs.v, geometry, spec)
        grads = launch.backward(inputs.dout, inputs.q, inputs.k, inputs.v, out, lse, geometry, spec)
    x, exact = inputs.to(torch.float64), dataclasses.replace(spec, dtype=torch.float64)
    want = reference.forward(x.q, x.k, x.v, geometry, exact)
    want_grads = reference.backward(x.dout, x.q, x.k, x.v, *want, geometry, exact)
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *grads), (want[0], *want_grads), strict=True):
        # P, O and dS are rounded to bfloat16 before they are multiplied, results after.
        error = (got.double() - right).abs().max() / right.abs().max()
        assert error <= 4 * torch.finfo(torch.bfloat16).eps, (name, float(error))
