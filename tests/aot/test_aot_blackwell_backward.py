"""The Blackwell backward compiles for sm_100a: what it may take, by head dim, dtype, mask and activation."""

import re
from typing import Any

import pytest
import torch

from jagged_attn.backends.tlx_blackwell.backward import backward_kv
from jagged_attn.backends.tlx_blackwell.backward_pair import backward_pair
from jagged_attn.backends.tlx_blackwell.launch_backward import constants, options
from jagged_attn.masks import BlockDiagonal, Causal, Full, Mask, SlidingWindow
from jagged_attn.schedule.blackwell_backward import TWO_CTAS, BackwardConfig, backward_config
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.aot import Compilation, Gate, Resources, compile_kernel, unmet_stores

_CONTAINS = (
    "tcgen05_mma", "tcgen05_ld", "tcgen05_st", "tcgen05_commit", "tma_load", "tma_store", "setmaxnreg", "proxy_fence",
)  # fmt: skip
_LACKS = ("cp_async", "local_load", "local_store")
_PAIRS = ("tcgen05_mma_pair", "multicast", "mapa")


def _config(dim: int, rows: int | None = None, ctas: int = 1, **_: Any) -> BackwardConfig:
    return TWO_CTAS if ctas == 2 else backward_config(dim, rows)


def _compilation(
    dim: int,
    rows: int | None = None,
    dtype: str = "bf16",
    mask: Mask = Full(),  # noqa: B008 - frozen
    act: str = "softmax",
    group: int = 1,
    kind: str = "self",
    ctas: int = 1,
) -> Compilation:
    height, config = (rows or 128) // ctas, _config(dim, rows, ctas)
    queries, keys = (f"tensordesc<{dtype}[1, 1, {n}, {dim}]>" for n in (height, 128))
    out = f"tensordesc<{dtype}[1, 1, {height}, 64]>" if rows is None else keys
    signature = {"desc_q": queries if rows is None else f"tensordesc<{dtype}[{rows}, {dim}]>", "desc_do": queries}
    signature |= {"desc_k": keys, "desc_v": keys, "desc_dk": out, "desc_dv": out}
    signature |= {"desc_dq": f"tensordesc<fp32[{f'1, 1, {height}' if rows is None else rows}, 32]>"}
    if ctas == 2:
        signature |= dict.fromkeys(("desc_qc", "desc_kc", "desc_doc"), f"tensordesc<{dtype}[1, 1, 128, {dim // 2}]>")
    signature |= {"row_stats": "*fp32", "table": "*i32", "counters": "*i32", "turns": "*i32", "slots": "*i32"}
    signature |= {"offsets_q": "*i64", "offsets_kv": "*i64", "scale": "fp32", "out_scale": "fp32"}
    signature |= dict.fromkeys(("num_sequences", "rows_q", "total_kv", "work"), "i32")
    kind = kind if rows is None else "broadcast_q"
    spec = AttentionSpec(kind, torch.bfloat16, 4, 4 // group, dim, dim, mask, (act,), 0.1, 1.0, False)
    values = {"C": constants(spec, config, True, rows)}
    name = f"D{dim} S{rows} {dtype} {mask.code} {act} {group} {kind} {ctas}"
    kernel = backward_pair if ctas == 2 else backward_kv
    return Compilation(name, kernel, signature, values, 100, options(config))


# One of each kind; the rest of the masks and activations in the sweep.
KEYS_STAY: list[dict[str, Any]] = [
    {"dim": 128},
    {"dim": 64, "act": "gelu", "mask": SlidingWindow(100, 20)},
]
QUERIES_STAY: list[dict[str, Any]] = [{"dim": 128, "rows": 128}, {"dim": 64, "rows": 64, "act": "silu"}]
PAIRS: list[dict[str, Any]] = [{"dim": 128, "ctas": 2}]
MORE: list[dict[str, Any]] = [
    {"dim": 128, "ctas": 2, "mask": Causal(), "group": 2, "dtype": "fp16"},
    {"dim": 128, "ctas": 2, "kind": "broadcast_q"},
    {"dim": 128, "ctas": 2, "mask": SlidingWindow(100, 20, "top_left"), "act": "fast_gelu"},
    {"dim": 128, "ctas": 2, "mask": BlockDiagonal(64), "act": "silu", "group": 4},
    {"dim": 128, "ctas": 2, "mask": Causal(), "act": "gelu"},
    {"dim": 128, "mask": Causal(), "group": 2, "dtype": "fp16"},
    {"dim": 128, "kind": "broadcast_q"},
    {"dim": 128, "mask": SlidingWindow(100, 20, "top_left"), "act": "fast_gelu"},
    {"dim": 128, "mask": BlockDiagonal(64), "act": "silu", "group": 4},
    {"dim": 128, "act": "gelu", "mask": Causal()},
    {"dim": 128, "act": "hardswish"},
    {"dim": 64},
    {"dim": 64, "mask": Causal(), "dtype": "fp16"},
    {"dim": 64, "mask": BlockDiagonal(13), "act": "gelu_tanh"},
    {"dim": 128, "rows": 64},
    {"dim": 128, "rows": 128, "act": "gelu"},
    {"dim": 128, "rows": 64, "act": "fast_gelu", "dtype": "fp16"},
    {"dim": 64, "rows": 64},
    {"dim": 64, "rows": 128, "act": "gelu"},
    {"dim": 64, "rows": 128, "dtype": "fp16"},
]


def _check(case: dict[str, Any]) -> Resources:
    config, rows, dim = _config(**case), case.get("rows"), case["dim"]
    found = compile_kernel(_compilation(**case))
    reduce = ("tma_reduce",) if rows is None else ()
    requested = (config.registers, config.scalar_registers)
    # No bytes are spilled, so none in a loop.
    more, less = (_PAIRS, ()) if config.two_ctas else ((), _PAIRS)
    gate = Gate(
        spills=0, registers=requested, contains=(*_CONTAINS, *reduce, *more), lacks=(*_LACKS, *less)
    )  # fmt: skip
    assert not gate.violations(found), "\n".join(gate.violations(found))
    # The predicate that refuses a config counts what the compiler takes.
    stays = "keys" if rows is None else "queries"
    assert config.refusal(dim, rows or 128, stays) is None
    assert 0 <= config.shared_bytes(dim, rows or 128, stays) - found.shared <= 4096
    columns = config.tensor_columns(dim, rows or 128)
    assert found.tensor_columns == 1 << (columns - 1).bit_length()
    return found


def _check_meetings(found: Resources) -> None:
    """The warps of a role meet around each TMA store."""
    stores, faults = unmet_stores(found.ptx, meet=r"bar(?:rier)?\.sync")
    assert stores
    assert not faults


def _check_pair(found: Resources) -> None:
    """Products are of both CTAs, and dS goes over in stores of 16 bytes."""
    # Each thread of a group sends its key's row of dS, 64 queries.
    stores = re.findall(r"st\.async\.shared::cluster\.mbarrier::complete_tx::bytes(\.v4)?\.b32", found.ptx)
    assert stores == [".v4"] * 2 * 8
    assert not re.search(r"tcgen05\.(mma|commit)\.cta_group::1", found.ptx)
    # Rows of a product of both CTAs, from its descriptor: 256, but for dQ, 128.
    words = re.findall(r"mov\.b32\s+%r\d+, (\d{9});", found.ptx)
    assert {int(word) >> 24 << 4 for word in words if int(word) & 0xFFFF in (0x490, 0x8490)} == {128, 256}
    # Nobody leaves while the other CTA may still arrive at its barriers, or send.
    end = found.ptx[found.ptx.rindex("barrier.cluster.wait") :]
    assert "mbarrier" not in end
    assert "tcgen05.dealloc" in end


@pytest.mark.parametrize("case", KEYS_STAY + QUERIES_STAY + PAIRS, ids=lambda case: " ".join(map(str, case.values())))
def test_the_backward_passes_its_gate(case):
    found = _check(case)
    _check_meetings(found)
    if case in PAIRS:
        _check_pair(found)


@pytest.mark.sweep
@pytest.mark.parametrize("case", MORE, ids=lambda case: " ".join(map(str, case.values())))
def test_every_other_kind_passes_its_gate(case):
    _check(case)
