"""The attention tutorials in fbtriton's wheel, run from the installed package as test subjects."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

from jagged_attn.testing.emulator import Launch, Report, emulate

_PACKAGE = "triton.language.extra.tlx.tutorials"


def load(name: str) -> ModuleType:
    """Import a tutorial; at import it asks for a GPU, so it gets the name of one."""
    full = f"{_PACKAGE}.{name}"
    if full in sys.modules:
        return sys.modules[full]
    target = GPUTarget("cuda", 100, 32)
    stub = SimpleNamespace(get_current_target=lambda: target, get_active_torch_device=lambda: torch.device("cpu"))
    driver: Any = triton.runtime.driver
    before, driver._active = driver._active, stub
    try:
        return importlib.import_module(full)
    finally:
        driver._active = before


def attention_reference(q: Any, k: Any, v: Any, scale: float, causal: bool = False) -> tuple[Any, Any]:
    """Output and natural-log lse in float64."""
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), k.double()) * scale
    if causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def forward(
    name: str, kernel: str, grid: tuple[int, ...], config: dict[str, Any], launch: Launch, **extra: Any
) -> Report:
    """Run a forward tutorial and check its numbers. ``extra`` holds constexpr arguments beyond the config's."""
    module = load(name)
    batch, heads, length, dim = 1, extra.pop("heads", 1), extra.pop("length", 512), extra.pop("dim", 128)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, dim, generator=generator).bfloat16() for _ in range(3))
    o, lse = torch.empty_like(q), torch.empty(batch, heads, length)
    rows, scale = batch * heads * length, 0.5 * dim**-0.5
    maps = {
        f"desc_{n}": TensorDescriptor(x, [rows, dim], [dim, 1], [1, 1])
        for n, x in zip("qkvo", (q, k, v, o), strict=True)
    }
    values = {**config, **extra, "HEAD_DIM": dim, "FP8_OUTPUT": False}
    module._host_descriptor_pre_hook({**values, **maps})
    arguments = {"sm_scale": scale, "M": lse, "Z": batch, "H": heads, **maps, "N_CTX": length, **values}
    function = getattr(module, kernel)
    names = function.arg_names if hasattr(function, "arg_names") else function.fn.arg_names
    launch = Launch(**{**vars(launch), "outputs": ("desc_o", "M")})
    report = emulate(function, grid, {n: arguments[n] for n in names if n in arguments}, launch)
    want, want_lse = attention_reference(q, k, v, scale, causal=extra.get("STAGE", 1) == 3)
    error = float((o.double() - want).abs().max() / want.abs().max())
    lse_error = float((lse.double() - want_lse / 0.6931471805599453).abs().max())
    assert error < 2**-7, f"{name}: output error {error}"
    assert lse_error < 1e-4, f"{name}: lse error {lse_error}"
    return report


_BLOCKS = {"BLOCK_M": 256, "BLOCK_N": 128, "NUM_MMA_GROUPS": 2}
_HOPPER = {"BLOCK_M": 128, "BLOCK_N": 128, "NUM_MMA_WARPS": 8, "NUM_MMA_GROUPS": 2}
_PIPELINED = {**_BLOCKS, "NUM_BUFFERS_Q": 1, "NUM_BUFFERS_KV": 3, "NUM_BUFFERS_QK": 1, "NUM_MMA_SLICES": 2}

# Name: module, kernel, grid, config, constexpr arguments beyond it.
FORWARDS: dict[str, tuple[str, str, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "hopper_fa_ws": ("hopper_fa_ws", "_attn_fwd_ws", (2, 1), {**_HOPPER, "NUM_BUFFERS": 2}, {"length": 256}),
    "hopper_fa_ws_pipelined": (
        *("hopper_fa_ws_pipelined", "_attn_fwd_ws_pipelined", (2, 1)),
        *({**_HOPPER, "NUM_BUFFERS": 2}, {"length": 256}),
    ),
    "hopper_fa_ws_pipelined_pingpong": (
        *("hopper_fa_ws_pipelined_pingpong", "_attn_fwd_ws_pipelined_pingpong", (2, 1)),
        *({**_HOPPER, "NUM_BUFFERS": 2}, {"length": 256}),
    ),
    "hopper_fa_ws_pipelined_pingpong_persistent": (
        *("hopper_fa_ws_pipelined_pingpong_persistent", "_attn_fwd_ws_pipelined_pingpong_persistent", (2,)),
        *({**_HOPPER, "NUM_BUFFERS_Q": 1, "NUM_BUFFERS_KV": 2}, {"length": 384, "heads": 2}),
    ),
    "blackwell_fa_ws": (
        *("blackwell_fa_ws", "_attn_fwd_ws", (2, 1)),
        *({**_BLOCKS, "NUM_BUFFERS_KV": 3, "NUM_BUFFERS_QK": 1}, {"length": 512}),
    ),
    "blackwell_fa_ws_persistent": (
        *("blackwell_fa_ws_persistent", "_attn_fwd_ws", (1,)),
        *({**_BLOCKS, "NUM_BUFFERS_Q": 1, "NUM_BUFFERS_KV": 3, "NUM_BUFFERS_QK": 1}, {"STAGE": 1}),
    ),
    "blackwell_fa_ws_pipelined": (
        *("blackwell_fa_ws_pipelined", "_attn_fwd_ws", (2, 1)),
        *({**_BLOCKS, "NUM_BUFFERS_KV": 3, "NUM_BUFFERS_QK": 1}, {"STAGE": 1}),
    ),
    "blackwell_fa_ws_pipelined_persistent": (
        *("blackwell_fa_ws_pipelined_persistent", "_attn_fwd_ws", (2,)),
        *(
            {**_PIPELINED, "GROUP_SIZE_N": 1, "RESCALE_OPT": False, "USE_WHERE": False, "USE_WARP_BARRIER": False},
            {"STAGE": 1},
        ),
    ),
    "blackwell_fa_ws_pipelined_persistent_causal": (
        *("blackwell_fa_ws_pipelined_persistent", "_attn_fwd_ws", (2,)),
        *(
            {**_PIPELINED, "GROUP_SIZE_N": 4, "RESCALE_OPT": True, "USE_WHERE": True, "USE_WARP_BARRIER": True},
            {"STAGE": 3},
        ),
    ),
    "blackwell_fa_clc": (
        *("blackwell_fa_clc", "_attn_fwd_clc", (4,)),
        *({**_PIPELINED, "GROUP_SIZE_N": 1, "RESCALE_OPT": True, "USE_WHERE": False, "USE_WARP_BARRIER": False}, {}),
    ),
    "blackwell_fa_clc_causal": (
        *("blackwell_fa_clc", "_attn_fwd_clc", (4,)),
        *({**_PIPELINED, "GROUP_SIZE_N": 4, "RESCALE_OPT": True, "USE_WHERE": False, "USE_WARP_BARRIER": True}, {}),
    ),
}
FORWARDS["blackwell_fa_clc"][4].update(STAGE=1, NUM_SMS=2, NUM_CLC_STAGES=1, heads=2)
FORWARDS["blackwell_fa_clc_causal"][4].update(STAGE=3, NUM_SMS=2, NUM_CLC_STAGES=1, heads=2)
