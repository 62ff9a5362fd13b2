"""The Hopper backward compiles for sm_90a: what it may take, by head dim, dtype, mask and activation."""

import functools

import pytest

from jagged_attn.backends._jit.backward_rows import finish_dq, prepare_backward
from jagged_attn.backends._jit.constants import Constants
from jagged_attn.backends.tlx_hopper.backward import backward_kv
from jagged_attn.backends.tlx_hopper.backward_queries import backward_q
from jagged_attn.masks import BlockDiagonal, Causal, Full, SlidingWindow
from jagged_attn.testing.aot import Compilation, Gate, compile_kernel, unmet_stores

_CONTAINS = ("wgmma", "tma_load", "tma_store", "tma_reduce", "setmaxnreg", "proxy_fence", "named_barrier")


def _main(name, dim=128, dtype="bf16", mask=Full(), act="softmax", group=1, offsets="i64", sums=True):  # noqa: B008 - frozen
    queries, keys = (f"tensordesc<{dtype}[1, 1, {rows}, {dim}]>" for rows in (64, 128))
    signature = {"desc_q": queries, "desc_k": keys, "desc_v": keys, "desc_do": queries}
    signature |= {"desc_sum": "tensordesc<fp32[1, 1, 64, 64]>", "desc_dk": queries, "desc_dv": queries}
    signature |= {"row_stats": "*fp32", "table": "*i32", "counter": "*i32"}
    signature |= {"offsets_q": f"*{offsets}", "offsets_kv": f"*{offsets}"}
    signature |= dict.fromkeys(("num_sequences", "total_q", "total_kv", "items"), "i32")
    signature |= {"scale": "fp32", "out_scale": "fp32"}
    constants = Constants(
        heads=4, group=group, dim=dim, mask=mask.code, act=act, fast_tanh=True, rows=64, keys=128,
        stages=4 if dim == 64 else 2 if sums or act != "softmax" else 3, ds_stages=2, replicas=0,
        dq="none" if not sums else "role" if dim == 64 else "groups",
    )  # fmt: skip
    return Compilation(name, backward_kv, signature, {"C": constants}, 90)


def _queries(name, dim=128, mask=Full(), act="softmax"):  # noqa: B008 - frozen
    signature = dict.fromkeys(
        ("desc_q", "desc_k", "desc_v", "desc_do", "desc_dq"), f"tensordesc<bf16[1, 1, 64, {dim}]>"
    )
    signature |= {"row_stats": "*fp32", "table": "*i32", "counter": "*i32"}
    signature |= {"offsets_q": "*i64", "offsets_kv": "*i64"}
    signature |= dict.fromkeys(("num_sequences", "total_q", "total_kv", "items"), "i32")
    signature |= {"scale": "fp32", "out_scale": "fp32"}
    constants = Constants(
        heads=4, group=1, dim=dim, mask=mask.code, act=act, fast_tanh=True, rows=128, keys=64, stages=3
    )
    return Compilation(name, backward_q, signature, {"C": constants}, 90)


APART = [
    _main("keys, D128", sums=False),
    _main("keys, D128, window", mask=SlidingWindow(100, 20), sums=False),
    _main("keys, D128, fast_gelu", act="fast_gelu", sums=False),
    _main("keys, D64", dim=64, sums=False),
    _main("keys, D128, fast_gelu, causal", act="fast_gelu", mask=Causal(), sums=False),
    _queries("queries, D128"),
    _queries("queries, D128, causal", mask=Causal()),
    _queries("queries, D128, window", mask=SlidingWindow(100, 20)),
    _queries("queries, D128, fast_gelu", act="fast_gelu"),
    _queries("queries, D64, gelu", dim=64, act="gelu"),
]


@pytest.mark.parametrize("wanted", APART, ids=[c.name for c in APART])
def test_with_dq_apart_two_kernels_spill_nothing(wanted):
    gate = Gate(warps=12, registers=(24, 240), contains=("wgmma", "tma_load", "tma_store"), lacks=("tma_reduce",))
    found = compile_kernel(wanted)
    violations = gate.violations(found)
    assert not violations, "\n".join(violations)
    # One behind each store of both groups, dV and dK or dQ, and none before a product: see ``tile_to_store``. That must
    # not hide where a group's threads have to meet.
    stores = 4 if "keys" in wanted.name else 2
    assert found.instructions["proxy_fence"] == stores
    assert unmet_stores(found.ptx) == (stores, [])


# The most bytes spilled, stored and loaded, by all three roles.
CONFIGURATIONS = [
    (_main("D128"), 0),
    (_main("D128, int32 offsets", offsets="i32"), 0),
    (_main("D128, fp16", dtype="fp16"), 8),
    (_main("D128, causal", mask=Causal()), 96),
    (_main("D128, window", mask=SlidingWindow(100, 20, "top_left")), 96),
    (_main("D128, blocks", mask=BlockDiagonal(64)), 96),
    (_main("D128, grouped", group=4), 0),
    (_main("D128, fast_gelu", act="fast_gelu"), 152),
    (_main("D128, silu, causal, grouped", act="silu", mask=Causal(), group=2), 128),
    (_main("D64", dim=64), 0),
    (_main("D64, fp16, causal", dim=64, dtype="fp16", mask=Causal()), 0),
    (_main("D64, fast_gelu", dim=64, act="fast_gelu"), 0),
    (_main("D64, gelu, window", dim=64, act="gelu", mask=SlidingWindow(100, 20)), 0),
]


@functools.cache
def _compiled(name):
    return compile_kernel(next(c for c, _ in CONFIGURATIONS if c.name == name))


@pytest.mark.parametrize(("wanted", "spills"), CONFIGURATIONS, ids=[c.name for c, _ in CONFIGURATIONS])
def test_the_gradients_pass_their_gate(wanted, spills):
    found = _compiled(wanted.name)
    # At D = 64 a role of four warps more makes dQ.
    warps, registers = (16, (24, 72, 208)) if "D64" in wanted.name else (12, (24, 240))
    gate = Gate(warps=warps, spills=spills, registers=registers, contains=_CONTAINS, lacks=("cp_async",))
    assert not gate.violations(found), "\n".join(gate.violations(found))


@pytest.mark.parametrize("name", [c.name for c, _ in CONFIGURATIONS])
def test_the_warps_of_a_group_meet_around_each_tma_store(name):
    stores, faults = unmet_stores(_compiled(name).ptx)
    # Both groups: dV, dK; reductions in the loop and after the last item; where tiles are passed by, by one or both. At
    # D = 64 the role of dQ has the one reduction.
    by_groups = 10 if any(mask in name for mask in ("causal", "window", "blocks")) else 9
    assert stores == (5 if "D64" in name else by_groups)
    assert not faults


def test_the_kernels_around_them_spill_nothing():
    pointers = {"dout": "*bf16", "out": "*bf16", "lse": "*fp32", "stats": "*fp32"}
    pointers |= {"counters": "*i32", "offsets_q": "*i64"}
    sizes = {**dict.fromkeys(("num_sequences", "total_q", "dout_row"), "i32"), "inverse_out_scale": "fp32"}
    constexprs = {"H": 4, "D": 128, "BM": 64, "COUNTERS": 8}
    prepare = compile_kernel(Compilation("prepare", prepare_backward, {**pointers, **sizes}, constexprs, 90))
    signature = {"dq_sum": "*fp32", "dq": "*bf16", "total_q": "i32", "factor": "fp32"}
    constexprs = {"WIDTH": 512, "BLOCK": 2048}
    finish = compile_kernel(Compilation("finish", finish_dq, signature, constexprs, 90, {"num_warps": 8}))
    for found in (prepare, finish):
        assert not Gate().violations(found), "\n".join(Gate().violations(found))
