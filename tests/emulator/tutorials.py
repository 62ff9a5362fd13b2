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
from jagged_attn.testing.emulator.rewrite import base_function

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


def _backward_maps(module: ModuleType, values: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """Descriptors as the tutorial's host code makes them; dQ is accumulated in a packed layout."""
    batch, heads, length, dim = tensors["q"].shape
    shape, strides = [batch, heads, length, dim], [heads * length * dim, length * dim, dim, 1]
    packed = [batch, heads, 2 * length, dim // 2], [heads * length * dim, length * dim, dim // 2, 1]
    maps = {f"desc_{n}": TensorDescriptor(tensors[n], shape, strides, [1] * 4) for n in ("q", "v", "do", "dk", "dv")}
    maps |= {"desc_k": TensorDescriptor(tensors["scaled_k"], shape, strides, [1] * 4)}
    maps |= {"desc_kt": TensorDescriptor(tensors["scaled_k"], shape, strides, [1] * 4)}
    maps |= {"desc_qt": TensorDescriptor(tensors["q"], shape, strides, [1] * 4)}
    maps |= {"desc_dot": TensorDescriptor(tensors["do"], shape, strides, [1] * 4)}
    maps |= {"desc_dq": TensorDescriptor(tensors["dq"], *packed, [1] * 4)}
    rows = batch * heads * length
    maps |= {
        f"desc_{n}": TensorDescriptor(tensors[t], [rows], [1], [1]) for n, t in (("m", "lse2"), ("delta", "delta"))
    }
    module._bwd_host_descriptor_pre_hook_tlx({**values, **maps})
    return maps


def backward(config: int, launch: Launch, causal: bool = False, length: int = 256) -> Report:
    """Run the backward tutorial with one of its configurations; check dK and dV and, of a pair of CTAs, dQ."""
    module = load("blackwell_fa_ws_pipelined_persistent")
    chosen = module.configs_bwd_tlx[config]
    batch, heads, dim = 1, 1, 128
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(batch, heads, length, dim, generator=generator).bfloat16() for _ in range(4))
    scale = 0.5 * dim**-0.5
    grads = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention_reference(*grads, scale, causal)
    out.backward(do.double())
    log2e = 1.4426950408889634
    tensors = {"q": q, "v": v, "do": do, "scaled_k": (k * (scale * log2e)).bfloat16()}
    tensors |= {"dq": torch.zeros(q.shape), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    tensors |= {"lse2": (lse.detach() * log2e).float(), "delta": (out.detach() * do.double()).sum(-1).float()}
    values = {**chosen.kwargs, "HEAD_DIM": dim, "BLK_SLICE_FACTOR": 2, "STAGE": 3 if causal else 1}
    arguments = {**values, **_backward_maps(module, values, tensors), "sm_scale": scale, "N_CTX": length}
    arguments |= {"M": tensors["lse2"], "D": tensors["delta"], "H": heads, "Z": batch}
    names = base_function(module._attn_bwd_ws).__code__.co_varnames[
        : base_function(module._attn_bwd_ws).__code__.co_argcount
    ]
    arguments |= {"M_ptr": tensors["lse2"], "delta_ptr": tensors["delta"], "BATCH": batch}
    options = {**vars(launch), "cluster": chosen.kwargs["NUM_CTAS"], "num_warps": chosen.num_warps}
    grid = (length // 128, heads, batch)
    function = module._attn_bwd_ws
    report = emulate(function, grid, {n: arguments[n] for n in names if n in arguments}, Launch(**options))
    checked = {"dk": grads[1].grad, "dv": grads[2].grad}
    if options["cluster"] == 2:
        # Packed as tensor memory has it: the left halves of 64 rows, then their right halves.
        tensors["dq"] = tensors["dq"].view(-1, 2, 64, dim // 2).transpose(1, 2).reshape(q.shape)
        checked["dq"] = grads[0].grad
    for name, want in checked.items():
        error = float((tensors[name].double() - want).abs().max() / want.abs().max())
        assert error < 2e-2, f"{name} error {error}"
    return report


def cross_attention(kernel: str, config: dict[str, Any], launch: Launch) -> Report:
    """Run a variant of the SiLU cross-attention tutorial over jagged sequences."""
    module = load("blackwell-cross-attention")
    heads, dim, queries, keys = 2, 128, (130, 64, 128), (300, 65, 128)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(n), heads, dim, generator=generator).bfloat16() for n in (queries, keys, keys))
    out = torch.zeros_like(q)
    q_offsets, offsets = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (queries, keys))
    alpha, longest = dim**-0.5, 300
    maps = {
        f"desc_{n}": TensorDescriptor(x, [len(x), heads * dim], [heads * dim, 1], [1, 1])
        for n, x in zip("qkv", (q, k, v), strict=True)
    }
    values = {**config, "HEAD_DIM": dim, "BLOCK_D_V": dim, "AUTOTUNE_MAX_Q_LEN": 256}
    hook = module._host_descriptor_pre_hook_ws if kernel == "_attn_fwd_single_q" else module._host_descriptor_pre_hook
    hook({**values, **maps})
    strides = {"stride_qh": dim, "stride_kh": dim, "stride_vh": dim, "stride_om": heads * dim, "stride_oh": dim}
    arguments = {**values, **maps, **strides, "alpha": alpha, "Z": len(keys), "H": heads, "Out": out}
    arguments |= {"seq_offsets_q": q_offsets, "seq_offsets": offsets, "max_seq_len": longest}
    grid = (-(-130 // config["BLOCK_M"]), len(keys) * heads)
    report = emulate(getattr(module, kernel), grid, arguments, launch)
    for i, (a, b) in enumerate(zip(queries, keys, strict=True)):
        rows, columns = slice(q_offsets[i], q_offsets[i] + a), slice(offsets[i], offsets[i] + b)
        scores = torch.einsum("ihd,jhd->hij", q[rows].double(), k[columns].double()) * alpha
        want = torch.einsum("hij,jhd->ihd", scores * scores.sigmoid(), v[columns].double()) / longest
        error = float((out[rows].double() - want).abs().max() / want.abs().max())
        assert error < 2e-2, f"{kernel}: error {error}"
    return report


CROSS = {
    "_attn_fwd_single_q": {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_BUFFERS_KV": 3, "NUM_MMA_GROUPS": 2},
    "_attn_fwd_pipeline": {"BLOCK_M": 256, "BLOCK_N": 128, "NUM_BUFFERS_KV": 2, "NUM_MMA_GROUPS": 2},
}


def gdpa(launch: Launch) -> Report:
    """Launch the GDPA tutorial on a small problem."""
    module = load("blackwell-gdpa")
    config = module.get_cuda_autotune_config()[0].kwargs
    dim, length = 128, 256
    q, k, v, o = (torch.randn(length, 1, dim).bfloat16() for _ in range(4))
    offsets = torch.tensor([0, length])
    axes = {"q": "mhk", "k": "nhk", "v": "nhk", "o": "mhk"}
    strides = {f"stride_{t}{a}": s for t in axes for a, s in zip(axes[t], (dim, dim, 1), strict=True)}
    arguments = {**config, **strides, "Q": q, "K": k, "V": v, "Out": o, "Z": 1, "H": 1, "G": 1, "N_CTX": length}
    arguments |= dict.fromkeys(("Q_offsets", "K_offsets", "Out_offsets"), offsets)
    arguments |= {"ad_to_request_offset_ptr": None, "seq_index": None, "N_CTX_KV": length, "qk_scale": 1.0}
    arguments |= {"is_predict": False, "Q_SHAPE_0": length, "FUSED_QKV": False, "FUSED_KV": False, "STAGE": 1}
    arguments |= {"SORT_BY_SEQ_LENGTH": False, "HEAD_DIM": dim, "BLOCK_D": dim, "USE_START_END_OFFSETS": False}
    arguments |= {"WINDOW_SIZE": None, "BROADCAST_Q": False, "IS_DENSE_KV": True, "activation_enum_int": 3}
    arguments |= {"USE_ON_DEVICE_TMA": True, "MERGE_EPI": False, "ENABLE_PROTON": False, "PROTON_TILE": 10}
    return emulate(module.gdpa_kernel_tma_ws_blackwell, (1,), arguments, launch)
