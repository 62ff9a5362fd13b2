"""The Hopper kernels of the broadcast-Q backward compile within their gates."""

import pytest

from jagged_attn.backends._jit.backward_shared import prepare_shared, reduce_parts
from jagged_attn.backends._jit.constants import Constants
from jagged_attn.backends.tlx_hopper import backward_broadcast_q as kernels
from jagged_attn.backends.tlx_hopper.capability import BROADCAST_Q_BLOCK_KV
from jagged_attn.backends.tlx_hopper.launch_broadcast_q import _ring_sizes
from jagged_attn.testing.aot import Compilation, Gate, compile_kernel

_HOPPER = ("wgmma", "tma_load", "tma_store", "setmaxnreg", "proxy_fence", "named_barrier")
_SIZES = ("num_sequences", "num_queries", "total_kv", "chunk_tiles")
_FACTORS = ("score_scale", "grad_scale", "out_scale")
# Rows of queries, D, dtype, activation, bytes spilled and filled. What spills are scalars of the loops, where dQ, dV or
# dK, S and dP are in registers at once.
CONFIGURATIONS = [
    (32, 128, "bf16", "softmax", 0),
    (64, 128, "bf16", "softmax", 0),
    (128, 128, "bf16", "softmax", 124),
    (64, 128, "fp16", "softmax", 0),
    (128, 128, "fp16", "softmax", 124),
    (32, 64, "bf16", "softmax", 0),
    (64, 64, "bf16", "softmax", 0),
    (128, 64, "bf16", "softmax", 0),
    (64, 128, "bf16", "fast_gelu", 0),
    (128, 128, "bf16", "fast_gelu", 196),
]


def _signature(rows, dim, dtype):
    queries, keys = min(rows, 64), f"tensordesc<{dtype}[1, 1, {BROADCAST_Q_BLOCK_KV}, {dim}]>"
    maps = {
        "desc_q": f"tensordesc<{dtype}[{queries}, {dim}]>",
        **dict.fromkeys(("desc_k", "desc_v", "desc_dk", "desc_dv"), keys),
        "desc_do": f"tensordesc<{dtype}[1, 1, {queries}, {dim}]>",
        "desc_parts": f"tensordesc<fp32[{dim}, {rows}]>" if rows == 32 else f"tensordesc<fp32[{queries}, {dim}]>",
    }
    pointers = {"stats": "*fp32", "table": "*i32", "offsets": "*i64", "control": "*i32"}
    return maps | pointers | dict.fromkeys(_SIZES, "i32") | dict.fromkeys(_FACTORS, "fp32")


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: " ".join(map(str, c[:4])))
def test_main_kernel(config):
    rows, dim, dtype, act, spills = config
    constants = Constants(
        heads=4, dim=dim, act=act, fast_tanh=True, rows=rows, dynamic=True, scales_out=False, **_ring_sizes(rows, dim)
    )
    kernel = kernels.backward_64 if rows <= 64 else kernels.backward_128
    wanted = Compilation(f"{rows} D{dim} {dtype} {act}", kernel, _signature(rows, dim, dtype), {"C": constants}, 90)
    gate = Gate(warps=12, spills=spills, registers=(240,), contains=_HOPPER, lacks=("cp_async",))
    violations = gate.violations(compile_kernel(wanted))
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize("act", ["softmax", "silu"])
def test_prepare(act):
    signature = {"do": "*bf16", "out": "*bf16", "lse": "*fp32", "stats": "*fp32", "table": "*i32", "control": "*i32"}
    signature |= dict.fromkeys(("num_sequences", "num_queries", "max_tiles", "do_row"), "i32") | {"scale": "fp32"}
    constants = {"H": 4, "D": 128, "ROWS": 128, "BLOCK": 64, "ACT": act}
    assert not Gate().violations(compile_kernel(Compilation("prepare", prepare_shared, signature, constants, 90)))


@pytest.mark.parametrize("rows", [32, 128])
def test_reduce_parts(rows):
    signature = {"parts": "*fp32", "dq": "*bf16", "num_parts": "i32", "num_queries": "i32"}
    constants = {"H": 4, "D": 128, "ROWS": rows, "TRANSPOSED": rows == 32, "PARTS": 32, "BLOCK": 64}
    assert not Gate().violations(compile_kernel(Compilation("reduce", reduce_parts, signature, constants, 90)))
