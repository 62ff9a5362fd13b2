"""The mutant language changes what it says, where it says."""

import ast

import pytest
from tlx_kernels.blackwell_attention import blackwell_attention
from tlx_kernels.matmul import matmul
from tlx_kernels.pair_matmul import pair_matmul
from tlx_kernels.problems import matmul_problem, pair_problem

from jagged_attn.testing.emulator import Schedule, Verdict, hunt
from jagged_attn.testing.emulator.faults import EXPECTED, functions, standard_mutants
from jagged_attn.testing.emulator.mutants import (
    Mutant,
    Site,
    argument,
    double,
    drop,
    hoist,
    retarget,
    sink,
    without,
    without_barrier,
)


def _difference(kernel, site, operator):
    """Lines that a mutant takes away from the module's source, and lines that it adds."""
    unchanged = Mutant("same", Site("nowhere", "x"), drop, frozenset()).source(kernel).splitlines()
    changed = Mutant("x", site, operator, frozenset()).source(kernel).splitlines()
    gone, new = list(unchanged), list(changed)
    for line in unchanged:
        if line in new:
            new.remove(line)
            gone.remove(line)
    return [line.strip() for line in gone], [line.strip() for line in new]


_FENCE = Site("_mma", "fence")
_WAIT = Site("_load", "barrier_wait", "empty")
_DOT = Site("_mma", "async_dot")


@pytest.mark.parametrize(
    ("kernel", "site", "operator", "gone", "new"),
    [
        (matmul, _FENCE, drop, ["tlx.fence('async_shared')"], ["pass"]),
        (matmul, _FENCE, double, [], ["tlx.fence('async_shared')"]),
        (matmul, Site("_mma", "async_dot_wait", "", 0), drop, ["acc = tlx.async_dot_wait(1, acc)"], ["acc = acc"]),
        (
            *(matmul, _WAIT, argument(1, "1 - (_)")),
            *(["tlx.barrier_wait(empty[buf], phase ^ 1)"], ["tlx.barrier_wait(empty[buf], 1 - (phase ^ 1))"]),
        ),
        (
            *(matmul, _WAIT, retarget("full")),
            *(["tlx.barrier_wait(empty[buf], phase ^ 1)"], ["tlx.barrier_wait(full[buf], phase ^ 1)"]),
        ),
        (
            *(pair_matmul, Site("_mma", "tcgen05_commit", "done"), without("two_ctas")),
            *(["tlx.tcgen05_commit(done[0], two_ctas=True)"], ["tlx.tcgen05_commit(done[0])"]),
        ),
    ],
)
def test_operators(kernel, site, operator, gone, new):
    assert _difference(kernel, site, operator) == (gone, new)


def test_a_product_can_lose_one_signal():
    gone, new = _difference(blackwell_attention, Site("_mma", "async_dot", "q_tile"), without_barrier(1))
    assert "mBarriers=[s_full[s_buf], kv_empty[buf]]" in gone[0]
    assert "mBarriers=[s_full[s_buf]]" in new[0]


def _order(site, operator):
    tree = ast.parse(Mutant("x", site, operator, frozenset()).source(matmul))
    (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_mma"]
    return [ast.unparse(s) for s in ast.walk(function) if isinstance(s, ast.stmt)]


def test_moves():
    def place(lines, text):
        return next(i for i, line in enumerate(lines) if line == text)

    fence, store = (
        "tlx.fence('async_shared')",
        "tlx.local_store(tlx.local_slice(c_tile[0], [g * BM, 0], [BM, BN]), acc.to(tl.bfloat16))",
    )
    meet = "tlx.named_barrier_wait(10, 128 * GROUPS)"
    for operator, order in ((hoist, [fence, store, meet]), (sink, [store, meet, fence])):
        lines = _order(_FENCE, operator)
        assert sorted(order, key=lambda text, lines=lines: place(lines, text)) == order


def test_a_site_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="must find its site"):
        Mutant("x", Site("_mma", "fence", "nothing"), drop, frozenset()).source(matmul)


def test_a_kernel_is_its_module_s_functions():
    assert set(functions(matmul)) == {"matmul", "_load", "_mma", "_slot", "_tile"}


def test_standard_mutants_cover_the_kinds():
    kinds = {m.name.split(" | ")[0] for k in (matmul, blackwell_attention, pair_matmul) for m in standard_mutants(k)}
    assert {
        "wait dropped",
        "wait of the other parity",
        "half the bytes",
        "fence dropped",
        "store wait dropped",
    } <= kinds
    assert {"product wait off by one", "named barrier dropped", "count too low", "one trip too many"} <= kinds
    assert {"arrival too early", "signal of a product dropped", "always accumulates", "commit dropped"} <= kinds


_PEER = [
    (Site("_mma", "barrier_wait", "both"), drop, {Verdict.RACE, Verdict.UNWRITTEN}),
    (Site("_mma", "barrier_arrive", "both"), without("remote_cta_rank"), {Verdict.DEADLOCK, Verdict.OVERFLOW}),
    (Site("_mma", "tcgen05_commit", "done"), without("two_ctas"), {Verdict.RACE}),
    (Site("_mma", "async_dot"), without("two_ctas"), {Verdict.SHAPE}),
]


@pytest.mark.parametrize(("site", "operator", "expected"), _PEER, ids=[str(s) for s, _, _ in _PEER])
def test_faults_between_the_ctas_of_a_pair(site, operator, expected):
    assert hunt(pair_problem(), Mutant(f"peer | {site}", site, operator, frozenset(expected))).caught


def test_swapped_barriers():
    site = Site("_mma", "barrier_arrive", "empty", 1)
    mutant = Mutant("wrong barrier", site, retarget("full"), EXPECTED["wrong barrier"])
    assert hunt(matmul_problem(), mutant).caught


def test_an_unmutated_program_is_the_kernel():
    case = matmul_problem()
    case.check(Schedule(), Mutant("same", Site("nowhere", "x"), drop, frozenset()).program())
