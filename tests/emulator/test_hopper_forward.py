"""The Hopper forward kernel in the emulator, launched by the library's own launch code."""

import pytest
import torch

from jagged_attn import BlockDiagonal, Causal, Full, SlidingWindow
from jagged_attn.backends import reference
from jagged_attn.backends.base import Arch, Geometry
from jagged_attn.backends.tlx_hopper import launch_forward
from jagged_attn.backends.tlx_hopper.capability import table_requests
from jagged_attn.functional import _tables
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.emulator.launches import emulated_launches
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch
from jagged_attn.testing.emulator.schedules import Schedule

HOPPER = Arch("cuda", (9, 0))
LENGTHS = (0, 1, 63, 300, 64, 65, 127, 128, 129, 0)
OTHERS = (5, 0, 64, 129, 300, 1, 128, 0, 65, 2)


def _offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def check(schedule, kind="self", lengths_q=LENGTHS, lengths_kv=None, tail=5, num_queries=3, heads=(2, 2), dim=64,
          mask=None, activation="softmax", dtype=torch.bfloat16, processors=3, monkeypatch=None):  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    lengths_kv = lengths_q if lengths_kv is None else lengths_kv
    rows_kv = sum(lengths_kv) + tail
    rows_q = num_queries if kind == "broadcast_q" else sum(lengths_q) + (tail if kind == "self" else 3)
    q = torch.randn(rows_q, heads[0], dim, generator=generator).to(dtype)
    k, v = (torch.randn(rows_kv, heads[1], dim, generator=generator).to(dtype) for _ in range(2))
    offsets_kv = _offsets(lengths_kv)
    offsets_q = None if kind == "broadcast_q" else offsets_kv if kind == "self" else _offsets(lengths_q)
    spec = AttentionSpec(
        kind, dtype, *heads, dim, dim, mask or Full(), (activation,), dim**-0.5,
        1.0 if activation == "softmax" else 0.5, False,
    )  # fmt: skip
    tables = tuple(_tables(table_requests(spec, HOPPER), rows_q, rows_kv, offsets_q, offsets_kv))
    monkeypatch.setattr(launch_forward, "num_processors", lambda device: processors)
    launch = Launch(checks=HOUSE_RULES, arch=90, schedule=schedule, outputs=("desc_o", "lse"), scratch=("slots",))
    with emulated_launches(launch):
        out, lse = launch_forward.forward(q, k, v, Geometry(offsets_q, offsets_kv, tables), spec)
    want, want_lse = reference.forward(q.double(), k.double(), v.double(), Geometry(offsets_q, offsets_kv, ()), spec)
    # The weights and the output are rounded to the dtype; sums are in fp32.
    limit = 2 * torch.finfo(dtype).eps * max(want.abs().max().item(), 1e-30)
    assert (out.double() - want).abs().max() <= limit
    if activation == "softmax":
        assert torch.equal(lse.isneginf(), want_lse.isneginf())
        finite = ~want_lse.isneginf()
        assert torch.allclose(lse[finite].double(), want_lse[finite], atol=1e-4)


@pytest.mark.emulator(seeds=1, roles=("load", "attend"))
def test_self_attention(schedule, monkeypatch):
    check(schedule, lengths_q=(0, 65, 300, 1, 129), monkeypatch=monkeypatch)


@pytest.mark.emulator(seeds=1, roles=("load", "attend"))
@pytest.mark.parametrize("num_queries", [3, 65])
def test_broadcast_q(schedule, num_queries, monkeypatch):
    check(schedule, "broadcast_q", (0, 65, 300, 1, 0), num_queries=num_queries, monkeypatch=monkeypatch)


_RANDOM = Schedule("random", 0)
CASES = {
    "lengths around the tiles": {},
    "cross": {"kind": "cross", "lengths_kv": OTHERS},
    "grouped heads": {"heads": (4, 2)},
    "width 128": {"dim": 128, "lengths_q": (300, 0, 129)},
    "fp16": {"dtype": torch.float16, "lengths_q": (300, 0, 129)},
    "causal": {"mask": Causal()},
    "causal cross": {"kind": "cross", "mask": Causal(), "lengths_kv": OTHERS},
    "window": {"mask": SlidingWindow(100, 30)},
    "window to the right": {"mask": SlidingWindow(3, None)},
    "window cross top left": {"kind": "cross", "mask": SlidingWindow(10, 140, "top_left"), "lengths_kv": OTHERS},
    "blocks": {"mask": BlockDiagonal(64)},
    "odd blocks": {"mask": BlockDiagonal(37)},
    "relu": {"activation": "relu"},
    "fast gelu, causal": {"activation": "fast_gelu", "mask": Causal()},
    "no keys at all": {"kind": "cross", "lengths_q": (3, 65), "lengths_kv": (0, 0), "tail": 2},
    "all empty": {"lengths_q": (0, 0), "tail": 3},
    "broadcast-Q, two tiles of queries": {"kind": "broadcast_q", "num_queries": 200, "lengths_q": (130, 0, 70)},
    "broadcast-Q, all empty": {"kind": "broadcast_q", "lengths_q": (0, 0, 0), "tail": 2},
    "broadcast-Q, gelu": {"kind": "broadcast_q", "activation": "gelu", "lengths_q": (130, 0, 70)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name, monkeypatch):
    check(_RANDOM, **CASES[name], monkeypatch=monkeypatch)
