"""The performance model issues what the kernels issue: products, TMA loads and stores, as the emulator counts them."""

import pytest
import torch

from jagged_attn import Full
from jagged_attn.backends.base import Arch, Geometry
from jagged_attn.backends.tlx_hopper import launch_backward, launch_broadcast_q, launch_forward
from jagged_attn.backends.tlx_hopper.capability import table_requests
from jagged_attn.bench.workloads import Workload
from jagged_attn.functional import _tables
from jagged_attn.perfmodel.hopper import Forward, Halves, Keys, Queries, Run, Turns
from jagged_attn.perfmodel.machine import H200
from jagged_attn.perfmodel.predict import Lengths, Tile, forward_items, keys_items, queries_items
from jagged_attn.perfmodel.simulate import Processor, Rates
from jagged_attn.schedule.hopper import forward_config
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.emulator.launches import emulated_launches
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch
from jagged_attn.testing.emulator.schedules import Schedule

LENGTH, DIM = 300, 128


def _simulated(kernel):
    sm = Processor(H200, Rates(32, 19))
    kernel(sm).start()
    sm.clock.run()
    return {"products": sm.products, "loads": sm.loads, "stores": sm.stores}


def _emulated(kind, num_queries, phase, monkeypatch):
    """Operations of the kernels of a phase that multiply, in order. "apart": a backward whose dQ is one of its own."""
    spec = AttentionSpec(kind, torch.bfloat16, 1, 1, DIM, DIM, Full(), ("softmax",), DIM**-0.5, 1.0, False)
    k, v = (torch.randn(LENGTH, 1, DIM).bfloat16() for _ in range(2))
    q = torch.randn(num_queries or LENGTH, 1, DIM).bfloat16()
    offsets = torch.tensor([0, LENGTH])
    offsets_q = offsets if kind == "self" else None
    tables = tuple(_tables(table_requests(spec, Arch("cuda", (9, 0))), q.shape[0], LENGTH, offsets_q, offsets))
    for module in (launch_forward, launch_backward, launch_broadcast_q):
        monkeypatch.setattr(module, "num_processors", lambda device: 1)
    monkeypatch.setattr(launch_backward, "adds_up_dq", lambda *call: phase != "apart")
    geometry = Geometry(offsets_q, offsets, tables)
    with emulated_launches(Launch(Schedule("eager"), HOUSE_RULES, arch=90)) as reports:
        out, lse = launch_forward.forward(q, k, v, geometry, spec)
        if phase == "forward":
            return [reports[-1].ops]
        dout = torch.randn(out.shape).bfloat16()
        if kind == "self":
            launch_backward.backward(dout, q, k, v, out, lse, geometry, spec, tables[1:])
        else:
            launch_broadcast_q.backward(dout, q, k, v, out, lse, geometry, spec, tables[1])
        return [r.ops for r in reports[1:] if "wgmma" in r.ops]


CONFIG = forward_config(DIM, None, Full())
SELF, LENGTHS = Workload("one", "self", 1, LENGTH, "constant", num_heads=1), Lengths((LENGTH,), (LENGTH,))
FORWARD_ITEMS = forward_items(SELF, LENGTHS, Tile(CONFIG.block_kv, 64, CONFIG.groups))
# With one processor a chunk is one tile.
RUNS = [Run(1)] * -(-LENGTH // 64)
ITEMS = keys_items(SELF, LENGTHS, groups=True)
# Kind, shared queries, phase, which of its kernels, roles of the model, and what a CTA does once in its life and the
# model leaves out: the shared queries' tiles, dQ on its way out, and the tile of no rows.
CASES = {
    "forward": ("self", None, "forward", 0, lambda sm: Forward(sm, CONFIG, "softmax", FORWARD_ITEMS, 0), (0, 0, 0)),
    "keys": ("self", None, "sums", 0, lambda sm: Keys(sm, "softmax", ITEMS), (0, 0, 0)),
    "keys, dQ apart": ("self", None, "apart", 0, lambda sm: Keys(sm, "softmax", ITEMS, False), (0, 0, 0)),
    "queries": ("self", None, "apart", 1, lambda sm: Queries(sm, "softmax", queries_items(SELF, LENGTHS)), (0, 0, 0)),
    "64 queries": ("broadcast_q", 64, "sums", 0, lambda sm: Turns(sm, 64, 4, 3, RUNS), (0, 1, 2)),
    "128 queries": ("broadcast_q", 128, "sums", 0, lambda sm: Halves(sm, RUNS), (6, 6, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_model_issues_what_the_kernel_issues(name, monkeypatch):
    kind, num_queries, phase, which, kernel, (products, loads, stores) = CASES[name]
    wanted = _emulated(kind, num_queries, phase, monkeypatch)[which]
    found = _simulated(kernel)
    assert found["products"] + products == wanted["wgmma"]
    assert found["loads"] + loads == wanted["tma_load"]
    assert found["stores"] + stores == wanted["tma_store"]
