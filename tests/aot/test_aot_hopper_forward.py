"""The Hopper forward compiles for sm_90a: the configurations that are shipped, by dtype, mask and activation."""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from jagged_attn.backends.tlx_hopper.forward import forward
from jagged_attn.backends.tlx_hopper.launch_forward import constants
from jagged_attn.masks import BlockDiagonal, Causal, Full, SlidingWindow
from jagged_attn.schedule.hopper import (
    _PAIR,
    _PAIR_SHARED,
    _SINGLE,
    _TRIPLE,
    ROWS,
    RUN,
    ForwardConfig,
    forward_config,
)
from jagged_attn.spec import AttentionSpec, Kind
from jagged_attn.testing.aot import Compilation, Gate, Resources, compile_kernel, unmet_stores

_HOPPER = ("wgmma", "tma_load", "tma_store", "setmaxnreg", "proxy_fence")
# Shared memory of a CTA, by the CTAs that share a multiprocessor.
_SHARED = {1: 232_448, 2: 115_712}
_MASKS = {
    "full": Full(),
    "causal": Causal(),
    "right window": SlidingWindow(100, None, "top_left"),
    "window": SlidingWindow(1000, 200, "top_left"),
    "blocks": BlockDiagonal(512),
    "narrow window": SlidingWindow(100, 20),
    "narrow blocks": BlockDiagonal(64),
}
_ACTIVATIONS = ("softmax", "fast_gelu")


class Case(NamedTuple):
    """A kernel: of self and cross attention, or of broadcast-Q with so many queries."""

    num_queries: int | None
    dim: int
    dtype: str = "bf16"
    mask: str = "full"
    act: str = "softmax"
    run: int = 1
    short: bool = True

    def __str__(self) -> str:
        kind = "self" if self.num_queries is None else f"broadcast-Q {self.num_queries}"
        kind += "" if self.short else " of many keys"
        kind += f" in runs of {self.run}" if self.run > 1 else ""
        return f"{kind}, D{self.dim}, {self.dtype}, {self.mask}, {self.act}"

    @property
    def config(self) -> ForwardConfig:
        return replace(forward_config(self.dim, self.num_queries, _MASKS[self.mask], self.short), run=self.run)


# Every shipped configuration, head dim, dtype and activation.
CASES = [
    Case(None, 128),
    Case(None, 128, mask="causal"),
    Case(None, 64, "fp16", "causal"),
    Case(None, 64, "fp16", act="fast_gelu"),
    Case(None, 128, short=False),
    Case(None, 128, "fp16", "blocks", "fast_gelu"),
    Case(None, 64, mask="window"),
    Case(None, 128, "bf16", "narrow window"),
    Case(64, 128),
    Case(64, 64, "fp16", act="fast_gelu"),
    Case(128, 64),
    Case(128, 128),
    Case(None, 128, run=RUN),
    Case(None, 128, act="fast_gelu", run=RUN),
    Case(None, 64, run=RUN),
]
OTHERS = [
    case
    for case in itertools.starmap(
        Case,
        [
            *itertools.product((None,), (128, 64), ("bf16", "fp16"), _MASKS, _ACTIVATIONS),
            *itertools.product((None,), (128,), ("bf16", "fp16"), _MASKS, _ACTIVATIONS, (1,), (False,)),
            *itertools.product((None,), (128, 64), ("bf16", "fp16"), ("full",), _ACTIVATIONS, (RUN,)),
            *itertools.product((64, 128, 192), (128, 64), ("bf16", "fp16"), ("full",), _ACTIVATIONS),
        ],
    )
    if case not in CASES
]


@functools.cache
def _compiled(case: Case) -> Resources:
    config, dim = case.config, case.dim
    rows, keys = (f"tensordesc<{case.dtype}[1, 1, {n}, {dim}]>" for n in (ROWS, config.block_kv))
    signature = {"desc_q": rows, "desc_k": keys, "desc_v": keys, "desc_o": rows, "out": f"*{case.dtype}"}
    signature |= {"lse": "*fp32", "offsets_q": "*i64", "offsets_kv": "*i64"}
    signature |= dict.fromkeys(("table", "counter"), "*i32")
    signature |= dict.fromkeys(("max_entries", "num_sequences", "num_queries", "total_kv", "query_tiles"), "i32")
    signature |= {"scale": "fp32", "out_scale": "fp32"}
    kind: Kind = "self" if case.num_queries is None else "broadcast_q"
    spec = AttentionSpec(kind, torch.bfloat16, 4, 4, dim, dim, _MASKS[case.mask], (case.act,), 1.0, 1.0, False)
    options = {"maxnreg": config.max_registers} if config.max_registers is not None else {}
    return compile_kernel(Compilation(str(case), forward, signature, {"C": constants(spec, config)}, 90, options))


def _check(case: Case) -> None:
    config = case.config
    kinds = (*_HOPPER, "named_barrier") if config.turns else _HOPPER
    gate = Gate(
        shared=_SHARED[config.ctas_per_processor],
        warps=4 + 4 * config.groups,
        registers=(config.registers,),
        contains=kinds,
        lacks=("cp_async", "tma_reduce"),
    )
    found = _compiled(case)
    violations = gate.violations(found)
    assert not violations, "\n".join(violations)
    # One behind each group's store of its output. The compiler puts one before each product, in the loop, where it sees
    # that the queries' tiles are stored to.
    assert found.instructions["proxy_fence"] == config.groups
    # What hides the store from it must not hide where a group's threads have to meet.
    assert unmet_stores(found.ptx) == (config.groups, [])


def _check_memory(case: Case) -> None:
    """What ``ForwardConfig`` counts before a launch is what the compiler takes, but for its own scratch memory."""
    assert abs(_compiled(case).shared - case.config.shared_bytes(case.dim, 2)) <= 1024
    assert case.config.refusal(case.dim, 2) is None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_shipped_configuration_passes_its_gate(case: Case) -> None:
    _check(case)
    _check_memory(case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_every_other_combination_passes_its_gate(case: Case) -> None:
    _check(case)


def test_every_shipped_configuration_is_among_the_cases() -> None:
    triples = {replace(config, run=run) for config in _TRIPLE.values() for run in (1, RUN)}
    assert {case.config for case in CASES} == {*triples, *_PAIR.values(), *_PAIR_SHARED.values(), *_SINGLE.values()}
