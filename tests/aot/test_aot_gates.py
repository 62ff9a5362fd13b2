"""Every configuration of the emulator's test kernels compiles for its GPU within its gate."""

import functools
from pathlib import Path

import pytest
from tlx_kernels.blackwell_attention import blackwell_attention
from tlx_kernels.hopper_attention import hopper_attention
from tlx_kernels.matmul import matmul
from tlx_kernels.pair_matmul import pair_matmul

from jagged_attn.backends import tlx_blackwell
from jagged_attn.testing.aot import Compilation, Gate, Resources, compile_kernel, count_instructions, parse_ptxas


def _ragged(rows, columns):
    return f"tensordesc<bf16[1, 1, {rows}, {columns}]>"


def _attention(kernel, arch, dim, block, stages):
    rows = 64 if arch == 90 else 128
    tiles = {n: _ragged(r, dim) for n, r in zip("qkvo", (rows, block, block, rows), strict=True)}
    signature = {f"desc_{n}": t for n, t in tiles.items()}
    signature |= {"lse": "*fp32", "total": "i32", "table": "*i32", "offsets": "*i32", "items": "i32", "H": "i32"}
    constexprs = {"D": dim, "BN": block, "STAGES": stages} | ({"BM": rows} if arch == 90 else {})
    return Compilation(f"{kernel.__name__} D{dim} BN{block}", kernel, {**signature, "scale": "fp32"}, constexprs, arch)


def _matmul(bm, bn, bk, stages, groups):
    shapes = {"desc_a": (bm, bk), "desc_b": (bk, bn), "desc_c": (bm * groups, bn)}
    signature = {n: f"tensordesc<bf16[{r}, {c}]>" for n, (r, c) in shapes.items()}
    signature |= dict.fromkeys(("m_tiles", "n_tiles", "steps"), "i32")
    constexprs = {"BM": bm, "BN": bn, "BK": bk, "STAGES": stages, "GROUPS": groups}
    return Compilation(f"matmul {bm}x{bn}x{bk}", matmul, signature, constexprs, 90)


def _pair(bn, bk, stages):
    signature = {"desc_a": f"tensordesc<bf16[128, {bk}]>", "desc_b": f"tensordesc<bf16[{bk}, {bn // 2}]>"}
    signature |= {"C": "*fp32", "steps": "i32"}
    constexprs = {"BN": bn, "BK": bk, "STAGES": stages}
    return Compilation(f"pair_matmul {bn}x{bk}", pair_matmul, signature, constexprs, 100, {"ctas_per_cga": (2, 1, 1)})


_HOPPER = ("wgmma", "tma_load", "tma_store", "setmaxnreg", "proxy_fence", "named_barrier")
_BLACKWELL = ("tcgen05_mma", "tcgen05_ld", "tcgen05_st", "tcgen05_commit", "tma_load", "tma_store", "setmaxnreg")
CONFIGURATIONS = [
    (_matmul(64, 64, 32, 2, 2), Gate(shared=41_984, warps=12, contains=_HOPPER, lacks=("tcgen05_mma", "cp_async"))),
    (_matmul(64, 128, 64, 3, 2), Gate(warps=12, registers=(232,), contains=_HOPPER)),
    (_attention(hopper_attention, 90, 64, 64, 2), Gate(shared=67_584, warps=12, contains=_HOPPER)),
    (_attention(hopper_attention, 90, 128, 128, 2), Gate(warps=12, spills=88, registers=(232,), contains=_HOPPER)),
    (
        _attention(blackwell_attention, 100, 64, 64, 3),
        Gate(shared=59_392, tensor_columns=256, contains=_BLACKWELL, lacks=("wgmma", "tcgen05_mma_pair")),
    ),
    (
        _attention(blackwell_attention, 100, 128, 128, 3),
        Gate(warps=12, spills=820, registers=(48, 192), contains=_BLACKWELL),
    ),
    (
        _pair(64, 32, 2),
        Gate(
            shared=29_696,
            tensor_columns=64,
            contains=("tcgen05_mma_pair", "tcgen05_commit", "multicast", "mapa", "tma_load"),
        ),
    ),
]


@functools.cache
def _compiled(index: int) -> Resources:
    return compile_kernel(CONFIGURATIONS[index][0])


@pytest.mark.parametrize("index", range(len(CONFIGURATIONS)), ids=[c.name for c, _ in CONFIGURATIONS])
def test_configuration_passes_its_gate(index):
    violations = CONFIGURATIONS[index][1].violations(_compiled(index))
    assert not violations, "\n".join(violations)


_SERIALISED = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"


def _resources(**changes):
    values = dict.fromkeys(("shared", "tensor_columns", "warps", "registers", "spill_stores", "spill_loads"), 0)
    return Resources(
        **{"name": "x", **values, "register_requests": (), "warnings": (), "instructions": {}, "ptx": "", **changes}
    )


@pytest.mark.parametrize(
    ("changes", "gate", "word"),
    [
        ({"shared": 232_449}, Gate(), "shared"),
        ({"tensor_columns": 513}, Gate(), "tensor memory"),
        ({"warps": 17}, Gate(), "warps"),
        ({"spill_loads": 4}, Gate(), "spilled"),
        ({"warnings": (_SERIALISED,)}, Gate(), "C7510"),
        ({"register_requests": (24, 240)}, Gate(registers=[232]), "setmaxnreg 232"),
        ({}, Gate(contains=["wgmma"]), "no wgmma"),
        ({"instructions": {"local_store": 2}}, Gate(lacks=["local_store"]), "local_store"),
    ],
)  # fmt: skip
def test_a_gate_names_what_it_stops(changes, gate, word):
    assert not Gate().violations(_resources())
    (message,) = gate.violations(_resources(**changes))
    assert word in message


def test_a_gate_refuses_unknown_kinds():
    with pytest.raises(ValueError, match="kinds"):
        Gate(contains=["wgmmma"]).violations(_resources())


def test_arguments_without_a_type_are_named():
    with pytest.raises(ValueError, match="n_tiles"):
        compile_kernel(Compilation("x", matmul, {"desc_a": "i32"}, {}, 90))


def test_ptxas_output_is_read():
    text = "Used 168 registers\n 16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads\nwarning: (C7510) x"
    assert parse_ptxas(text) == (168, 24, 32, ["warning: (C7510) x"])


def test_a_serialised_product_is_seen():
    found = _resources(warnings=(_SERIALISED,))
    assert found.serialised


def test_line_markers_are_not_instructions():
    assert count_instructions("\t.loc 1 2 3 // mapa.shared\n\tmapa.shared::cluster.u32 %r1;")["mapa"] == 1


def test_the_blackwell_backend_stays_small():
    folder = Path(tlx_blackwell.__path__[0])
    lines = [line for file in folder.glob("*.py") for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) <= 2000
    assert max(map(len, lines)) <= 100
