"""Inputs, references and launches of the test kernels: the same for the emulator, the compiler and a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tlx_kernels.blackwell_attention import blackwell_attention
from tlx_kernels.hopper_attention import hopper_attention
from tlx_kernels.matmul import matmul
from tlx_kernels.pair_matmul import pair_matmul
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from jagged_attn.testing.emulator.checking import KernelCase
from jagged_attn.testing.emulator.parameters import HOUSE_RULES
from jagged_attn.testing.emulator.run import Launch

_LOG2E = 1.4426950408889634


def _launch(arch: int, cluster: int = 1) -> Launch:
    return Launch(checks=HOUSE_RULES, cluster=cluster, arch=arch)


def _random(*shape: int, device: str, seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16().to(device)


def matmul_problem(device: str = "cpu", groups: int = 2, steps: int = 5, ctas: int = 2) -> KernelCase:
    """256 x 128 x 160 by tiles of 64: more tiles than CTAs, more steps than stages."""
    bm, bn, bk = 64, 64, 32
    m, n, k = 2 * bm * groups, 2 * bn, bk * steps
    a, b = _random(m, k, device=device, seed=1), _random(k, n, device=device, seed=2)
    c = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    describe = TensorDescriptor.from_tensor
    arguments = {
        "desc_a": describe(a, [bm, bk]),
        "desc_b": describe(b, [bk, bn]),
        "desc_c": describe(c, [bm * groups, bn]),
        "m_tiles": 2,
        "n_tiles": 2,
        "steps": steps,
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "STAGES": 2,
        "GROUPS": groups,
    }
    want = a.double().cpu() @ b.double().cpu()
    # Half a bf16 ulp, and fp32 accumulation.
    return KernelCase(matmul, (ctas,), arguments, {"desc_c": want}, {"desc_c": 2**-8}, _launch(90))


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output ``[T, H, D]`` and lse ``[H, T]`` in float64, sequence by sequence."""
    outs, sums = [], []
    q, k, v = (x.double().cpu().split(list(lengths)) for x in (q, k, v))
    for x, y, z in zip(q, k, v, strict=True):
        scores = torch.einsum("ihd,jhd->hij", x, y) * scale
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), z))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


def attention_problem(
    arch: int,
    device: str = "cpu",
    lengths: Sequence[int] = (65, 0, 200, 1, 129),
    heads: int = 2,
    dim: int = 64,
    block: int = 64,
    ctas: int = 2,
    stages: int = 0,
) -> KernelCase:
    """Self-attention over jagged sequences, with the Hopper or the Blackwell kernel."""
    rows = 128
    total = sum(lengths)
    q, k, v = (_random(total, heads, dim, device=device, seed=s) for s in (1, 2, 3))
    o = torch.empty_like(q)
    lse = torch.empty(heads, total, dtype=torch.float32, device=device)
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    table = [(b, m) for b, n in enumerate(lengths) for m in range(0, n, rows)]
    scale = dim**-0.5
    per_descriptor = rows // 2 if arch == 90 else rows
    flat = [x.view(total, heads * dim) for x in (q, k, v, o)]
    blocks = (per_descriptor, block, block, per_descriptor)
    q_map, k_map, v_map, o_map = (create_ragged_descriptor(x, [n, dim]) for x, n in zip(flat, blocks, strict=True))
    arguments = {
        "desc_q": q_map,
        "desc_k": k_map,
        "desc_v": v_map,
        "desc_o": o_map,
        "lse": lse,
        "total": total,
        "table": torch.tensor(table, dtype=torch.int32, device=device),
        "offsets": offsets,
        "items": len(table) * heads,
        "H": heads,
        "scale": scale * _LOG2E,
        "D": dim,
        "BN": block,
        "STAGES": stages or (2 if arch == 90 else 3),
    }
    if arch == 90:
        arguments["BM"] = per_descriptor
    kernel = hopper_attention if arch == 90 else blackwell_attention
    want_o, want_lse = attention_reference(q, k, v, lengths, scale)
    # P is rounded to bf16 before it meets V, and O is rounded to bf16.
    limits = {"desc_o": 2**-7, "lse": 1e-5}
    return KernelCase(kernel, (ctas,), arguments, {"desc_o": want_o, "lse": want_lse}, limits, _launch(arch))


def pair_problem(device: str = "cpu", steps: int = 5, pairs: int = 1) -> KernelCase:
    """256 rows a pair, 64 columns."""
    bn, bk = 64, 32
    a, b = _random(256 * pairs, bk * steps, device=device, seed=1), _random(bk * steps, bn, device=device, seed=2)
    c = torch.empty(256 * pairs, bn, dtype=torch.float32, device=device)
    describe = TensorDescriptor.from_tensor
    arguments = {
        "desc_a": describe(a, [128, bk]),
        "desc_b": describe(b, [bk, bn // 2]),
        "C": c,
        "steps": steps,
        "BN": bn,
        "BK": bk,
        "STAGES": 2,
    }
    want = a.double().cpu() @ b.double().cpu()
    return KernelCase(pair_matmul, (2 * pairs,), arguments, {"C": want}, {"C": 1e-5}, _launch(100, cluster=2))
