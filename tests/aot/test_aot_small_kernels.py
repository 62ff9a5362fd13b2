"""The emulator's small kernels are TLX that fbtriton compiles: what the emulator accepts is the real language."""

import pytest
from tlx_kernels import small

from jagged_attn.testing.aot import Compilation, compile_kernel

_F32, _I32 = {"x": "*fp32", "y": "*fp32"}, {"y": "*i32"}
_PAIR = {"ctas_per_cga": (2, 1, 1)}
_OPERANDS = {"desc_a": "tensordesc<bf16[64, 64]>", "desc_b": "tensordesc<bf16[64, 64]>", "y": "*fp32"}
_TALL = {**_OPERANDS, "desc_a": "tensordesc<bf16[128, 64]>"}
_RELAY = {"x": "*bf16", "desc_b": "tensordesc<bf16[128, 32]>", "y": "*fp32"}
_TILE = "tensordesc<fp32[16, 32]>"
_RIGHT = {"FAULT": ""}

# Kernel, architecture, argument types, constexprs beyond FAULT, options, an instruction that it is about.
KERNELS = [
    (small.hand_over, 90, {"x": "*fp32", "desc_y": "tensordesc<fp32[64, 32]>"}, {}, {}, "tma_store"),
    (small.ring, 90, {"desc_x": _TILE, "y": "*fp32", "n": "i32"}, {}, {}, "tma_load"),
    (small.products, 90, _OPERANDS, {}, {}, "wgmma"),
    (small.held_operand, 90, {**_OPERANDS, "n": "i32"}, {"HOW": "as loaded"}, {}, "wgmma"),
    (small.shifted, 90, {"y": "*i32"}, {}, {}, None),
    (small.tensor_memory, 100, _TALL, {}, {}, "tcgen05_mma"),
    (small.queue_order, 100, _TALL, None, {}, "tcgen05_mma"),
    (small.pointers, 90, {**_F32, "n": "i32"}, {}, {}, None),
    (small.cp_async, 90, _F32, {}, {}, "cp_async"),
    (small.bulk, 90, _F32, {}, {}, "mbarrier_wait"),
    (small.multicast, 90, {"desc_x": _TILE, "y": "*fp32"}, {}, _PAIR, "multicast"),
    (small.exchange, 90, _F32, {"HOW": "store"}, _PAIR, "mapa"),
    (small.exchange, 90, _F32, {"HOW": "async store"}, _PAIR, "mapa"),
    (small.exchange, 90, _F32, {"HOW": "copy"}, _PAIR, "mapa"),
    (small.relay, 100, _RELAY, {}, _PAIR, "tcgen05_mma_pair"),
    (small.launch_control, 100, _I32, {"PAIR": False}, {}, "try_cancel"),
    (small.launch_control, 100, _I32, {"PAIR": True}, _PAIR, "try_cancel"),
    (small.message, 90, {"flag": "*i32", "data": "*fp32", "y": "*fp32"}, {"HOW": "fence"}, {}, None),
    (small.message, 90, {"flag": "*i32", "data": "*fp32", "y": "*fp32"}, {"HOW": "release"}, {}, None),
    (small.descriptor_slots, 90, {**_F32, "n": "i32"}, {}, {}, "tma_load"),
    (small.device_descriptor, 90, {**_F32, "n": "i32"}, {}, {}, "tma_load"),
    (small.hand_out, 90, {"counter": "*i32", "slot": "*i32", "y": "*i32", "n": "i32"}, {}, {}, None),
    (small.reduction, 90, {"desc_y": _TILE, "x": "*fp32"}, {}, {}, "tma_reduce"),
    (small.aliases, 90, {"y": "*fp32"}, {}, {}, None),
    (small.warp_barrier, 90, {"y": "*fp32"}, {"ARRIVALS": 1}, {}, "mbarrier_wait"),
]


def _name(case):
    return " ".join([case[0].__name__, *(str(v) for v in (case[3] or {}).values())])


@pytest.mark.parametrize("case", KERNELS, ids=_name)
def test_small_kernel_compiles(case):
    kernel, arch, signature, constexprs, options, kind = case
    values = {k: v for k, v in {**_RIGHT, **(constexprs or {})}.items() if k in kernel.arg_names}
    found = compile_kernel(Compilation(kernel.__name__, kernel, signature, values, arch, options))
    assert kind is None or found.instructions[kind]
