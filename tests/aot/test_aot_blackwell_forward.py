"""The Blackwell forward compiles for sm_100a: the configurations that are shipped, by dtype, mask and activation."""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from jagged_attn.backends.tlx_blackwell.forward import forward
from jagged_attn.backends.tlx_blackwell.launch_forward import constants, options
from jagged_attn.masks import BlockDiagonal, Causal, Full, SlidingWindow
from jagged_attn.schedule.blackwell import _PAIR, _SPLIT, _TWO_PAIR, _TWO_SPLIT, ROWS, ForwardConfig
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.aot import Compilation, Gate, Resources, compile_kernel

_CONTAINS = ("tcgen05_mma", "tcgen05_ld", "tcgen05_st", "tcgen05_commit", "tma_load", "tma_store", "setmaxnreg")
_PAIRS = ("tcgen05_mma_pair", "multicast", "mapa")
_MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": SlidingWindow(1000, 200, "top_left"),
    "blocks": BlockDiagonal(512),
}
_ACTIVATIONS = ("softmax", "fast_gelu", "silu")
_CONFIGS = {
    "self 64": _PAIR[64],
    "self 128": _PAIR[128],
    "two CTAs, self 128": _TWO_PAIR,
    "broadcast-Q 64": _SPLIT[64],
    "broadcast-Q 128": _SPLIT[128],
    "two CTAs, broadcast-Q 128": _TWO_SPLIT,
}
# What the switches give.
_SWITCHES = {
    "weights over scores": replace(_PAIR[128], p_over_s=True),
    "weights over scores, blocks of 128": replace(
        _PAIR[128],
        p_over_s=True,
        block_kv=128,
        k_stages=2,
        v_stages=2,
        o_stages=1,
        softmax_registers=200,
        scalar_registers=24,
    ),
    "dealt out": replace(_PAIR[128], deal="alternate"),
    "rescaled always": replace(_PAIR[128], threshold=0.0),
    "unpacked": replace(_PAIR[128], packed=False),
    "no polynomial": replace(_PAIR[128], polynomial=0),
    "polynomial for half": replace(_PAIR[128], polynomial=2),
}


# Bytes spilled and filled, once an item, outside the loop over the blocks; 16 at most where no more is said.
_SPILLS = {"weights over scores, blocks of 128": 64}


class Case(NamedTuple):
    """A kernel."""

    name: str
    dtype: str = "bf16"
    mask: str = "full"
    act: str = "softmax"

    def __str__(self) -> str:
        return ", ".join(self)

    @property
    def config(self) -> ForwardConfig:
        return {**_CONFIGS, **_SWITCHES}[self.name]

    @property
    def dim(self) -> int:
        return 64 if self.name.endswith(" 64") else 128


# Every shipped configuration, and a mask, a dtype and an activation.
CASES = [*map(Case, _CONFIGS), Case("two CTAs, self 128", "fp16", "blocks", "fast_gelu")]
OTHERS = [
    *map(Case, _SWITCHES),
    *(
        case
        for case in itertools.starmap(Case, itertools.product(_CONFIGS, ("bf16", "fp16"), _MASKS, _ACTIVATIONS))
        if case not in CASES and (case.mask == "full" or "broadcast" not in case.name)
    ),
]


@functools.cache
def _compiled(case: Case) -> Resources:
    config, dim = case.config, case.dim
    kind = "broadcast_q" if "broadcast-Q" in case.name else "self"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[case.dtype]
    spec = AttentionSpec(kind, dtype, 4, 4, dim, dim, _MASKS[case.mask], (case.act,), 0.125, 1.0, False)
    keys, columns = config.block_kv // config.ctas, dim // config.ctas
    tiles = {"desc_q": (ROWS, dim), "desc_k": (keys, dim), "desc_v": (config.block_kv, columns), "desc_o": (ROWS, dim)}
    signature = {name: f"tensordesc<{case.dtype}[1, 1, {rows}, {cols}]>" for name, (rows, cols) in tiles.items()}
    signature |= {"out": f"*{case.dtype}", "lse": "*fp32", "offsets_q": "*i64", "offsets_kv": "*i64"}
    signature |= dict.fromkeys(("table", "counters", "slots"), "*i32")
    sizes = ("max_entries", "num_sequences", "num_queries", "total_kv", "query_tiles", "columns")
    signature |= {**dict.fromkeys(sizes, "i32"), "scale": "fp32", "out_scale": "fp32"}
    return compile_kernel(
        Compilation(str(case), forward, signature, {"C": constants(spec, config)}, 100, options(config))
    )


def _check(case: Case) -> None:
    config = case.config
    gate = Gate(
        spills=_SPILLS.get(case.name, 16),
        registers=(config.softmax_registers, config.scalar_registers),
        contains=(*_CONTAINS, *(_PAIRS if config.two_ctas else ())),
        lacks=("cp_async", "tma_reduce", "wgmma", *(() if config.two_ctas else _PAIRS)),
    )
    found = _compiled(case)
    violations = gate.violations(found)
    assert not violations, "\n".join(violations)
    if config.two_ctas:
        # Nobody leaves while the other CTA may still arrive at its barriers: the last thing but freeing memory.
        end = found.ptx[found.ptx.rindex("barrier.cluster.wait") :]
        assert "mbarrier" not in end
        assert "tcgen05.dealloc" in end


def _check_memory(case: Case) -> None:
    """What ``ForwardConfig`` counts before a launch is no less than what the compiler takes."""
    found, config = _compiled(case), case.config
    assert 0 <= config.shared_bytes(case.dim, 2) - found.shared <= 2048
    assert found.tensor_columns >= config.tensor_columns(case.dim) > found.tensor_columns // 2
    assert config.refusal(case.dim, 2, 300 if "broadcast-Q" in case.name else None) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_shipped_configuration_passes_its_gate(case: Case) -> None:
    _check(case)
    _check_memory(case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_every_other_combination_passes_its_gate(case: Case) -> None:
    _check(case)
