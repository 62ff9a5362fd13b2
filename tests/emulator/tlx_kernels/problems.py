"""Inputs, references and launches of the test kernels: the same for the emulator, the compiler and a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tlx_kernels.blackwell_attention import blackwell_attention
from tlx_kernels.hopper_attention import hopper_attention
from tlx_kernels.matmul import matmul
from tlx_kernels.pair_matmul import pair_matmul
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

_LOG2E = 1.4426950408889634


@dataclass
class Problem:
    """A kernel with everything it needs.

    Args:
        kernel: The jit function.
        grid: CTAs.
        arguments: By name.
        outputs: Names of arguments that are written, every element once.
        results: Output tensors.
        references: What they should hold, in float64.
        tolerances: Largest absolute error of each, relative to its largest reference value.
        cluster: CTAs of a cluster.
        arch: 90 or 100.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    results: list[torch.Tensor]
    references: list[torch.Tensor]
    tolerances: list[float]
    cluster: int = 1
    arch: int = 90

    def error(self) -> float:
        """Largest error, in units of the tolerance; NaN and infinities count as infinite."""
        worst = 0.0
        for got, want, limit in zip(self.results, self.references, self.tolerances, strict=True):
            difference = (got.double().cpu() - want).abs().max() / want.abs().max() / limit
            worst = max(worst, float(difference)) if torch.isfinite(difference) else float("inf")
        return worst


def _random(*shape: int, device: str, seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16().to(device)


def matmul_problem(device: str = "cpu", groups: int = 2, steps: int = 5, ctas: int = 2) -> Problem:
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
        **{"BM": bm, "BN": bn, "BK": bk, "STAGES": 2, "GROUPS": groups},
    }
    want = a.double().cpu() @ b.double().cpu()
    # Half a bf16 ulp, and fp32 accumulation.
    return Problem(matmul, (ctas,), arguments, ("desc_c",), [c], [want], [2**-8])


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
) -> Problem:
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
        **{"desc_q": q_map, "desc_k": k_map, "desc_v": v_map, "desc_o": o_map, "lse": lse, "total": total},
        "table": torch.tensor(table, dtype=torch.int32, device=device),
        **{"offsets": offsets, "items": len(table) * heads, "H": heads, "scale": scale * _LOG2E},
        **{"D": dim, "BN": block, "STAGES": stages or (2 if arch == 90 else 3)},
    }
    if arch == 90:
        arguments["BM"] = per_descriptor
    kernel = hopper_attention if arch == 90 else blackwell_attention
    want_o, want_lse = attention_reference(q, k, v, lengths, scale)
    # P is rounded to bf16 before it meets V, and O is rounded to bf16.
    limits = [2**-7, 1e-5]
    return Problem(kernel, (ctas,), arguments, ("desc_o", "lse"), [o, lse], [want_o, want_lse], limits, arch=arch)


def pair_problem(device: str = "cpu", steps: int = 5, pairs: int = 1) -> Problem:
    """256 rows a pair, 64 columns."""
    bn, bk = 64, 32
    a, b = _random(256 * pairs, bk * steps, device=device, seed=1), _random(bk * steps, bn, device=device, seed=2)
    c = torch.empty(256 * pairs, bn, dtype=torch.float32, device=device)
    describe = TensorDescriptor.from_tensor
    arguments = {
        **{"desc_a": describe(a, [128, bk]), "desc_b": describe(b, [bk, bn // 2]), "C": c},
        **{"steps": steps, "BN": bn, "BK": bk, "STAGES": 2},
    }
    want = a.double().cpu() @ b.double().cpu()
    return Problem(pair_matmul, (2 * pairs,), arguments, ("C",), [c], [want], [1e-5], cluster=2, arch=100)
