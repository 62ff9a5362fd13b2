"""Configs, capability and launches of the portable backend, as far as they need neither Triton nor a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs

from jagged_attn.backends._jit import prepared as prepared_module
from jagged_attn.backends._jit.prepared import PreparedKernel
from jagged_attn.backends.base import Arch
from jagged_attn.backends.triton import capability
from jagged_attn.masks import Full
from jagged_attn.schedule.arch import shared_bytes_per_program
from jagged_attn.schedule.choose import is_wide, pad_head_dim, triton_configs
from jagged_attn.schedule.config import Problem, TileConfig
from jagged_attn.spec import AttentionSpec, Kind

ARCHES = {
    "sm_80": Arch("cuda", (8, 0)),
    "sm_86": Arch("cuda", (8, 6)),
    "sm_90": Arch("cuda", (9, 0)),
    "sm_100": Arch("cuda", (10, 0)),
    "sm_121": Arch("cuda", (12, 1)),
    "hip": Arch("cuda", (9, 4), is_hip=True),
}


def spec(kind: Kind = "self", dtype: torch.dtype = torch.bfloat16, dims: tuple[int, int] = (128, 128)) -> AttentionSpec:
    return AttentionSpec(kind, dtype, 4, 2, *dims, Full(), ("softmax",), 0.1, 1.0, False)


@pytest.mark.parametrize(("block", "warps", "stages"), [(24, 4, 2), (8, 4, 2), (64, 3, 2), (64, 32, 2), (64, 4, 0)])
def test_an_illegal_tile_refuses_to_exist(block: int, warps: int, stages: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        TileConfig(block, 64, warps, stages)


def test_the_predicate_names_the_shared_memory_it_misses() -> None:
    problem = Problem(256, 256, 2, 99 * 1024)
    assert TileConfig(16, 16, 4, 1).refusal("forward", problem) is None
    assert "of 101376" in str(TileConfig(128, 128, 8, 3).refusal("forward", problem))


@pytest.mark.parametrize("arch", ARCHES.values(), ids=ARCHES.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(1, 3), (8, 8), (64, 64), (96, 128), (192, 40), (256, 256)], ids=str)
def test_every_architecture_has_a_legal_config_for_every_head_dim_or_refuses(
    arch: Arch, dtype: torch.dtype, dims: tuple[int, int]
) -> None:
    chosen = triton_configs(*dims, dtype.itemsize, arch.device_type, arch.capability, arch.is_hip)
    if chosen is None:
        assert arch.is_hip
        assert "shared memory" in str(capability.supports(spec(dtype=dtype, dims=dims), arch))
        return
    limit = shared_bytes_per_program(arch.capability, arch.is_hip)
    problem = Problem(pad_head_dim(dims[0]), pad_head_dim(dims[1]), dtype.itemsize, limit)
    assert chosen.forward.refusal("forward", problem) is None
    assert chosen.broadcast_q_forward_wide.refusal("forward", problem) is None
    assert chosen.backward_q.refusal("backward_q", problem) is None
    assert chosen.backward_kv.refusal("backward_kv", problem) is None
    for tile in (chosen.broadcast_q_partial, *chosen.broadcast_q_fused):
        assert tile.refusal("broadcast_q_backward", problem) is None
        # Both are launched on one table.
        assert tile.block_kv == chosen.broadcast_q_partial.block_kv


@pytest.mark.parametrize("arch", ARCHES.values(), ids=ARCHES.keys())
def test_tables_do_not_depend_on_whether_a_call_reads_as_self_or_cross(arch: Arch) -> None:
    assert capability.table_requests(spec("self"), arch) == capability.table_requests(spec("cross"), arch)
    assert len(capability.table_requests(spec("broadcast_q"), arch)) == 3


def test_refusals_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in str(capability.supports(spec(), Arch("cpu")))
    assert "'mps'" in str(capability.supports(spec(), Arch("mps")))
    assert "(7, 5)" in str(capability.supports(spec(), Arch("cuda", (7, 5))))
    assert "float64" in str(capability.supports(spec(dtype=torch.float64), ARCHES["sm_90"]))
    assert "head dim of at most 256, got 257" in str(capability.supports(spec(dims=(257, 8)), ARCHES["sm_90"]))
    assert "value head dim of at most 256, got 300" in str(capability.supports(spec(dims=(8, 300)), ARCHES["sm_90"]))
    monkeypatch.setattr(capability, "find_spec", lambda name: None)
    assert "not installed" in str(capability.supports(spec(), ARCHES["sm_90"]))


def test_the_wide_tile_is_for_many_queries_against_long_sequences() -> None:
    assert is_wide(128, 3, 3 * 512)
    assert not is_wide(128, 3, 3 * 512 - 1)
    assert not is_wide(64, 3, 10_000)


class FakeKernel:
    """Stands for a function under ``triton.jit``: counts how a launch reaches it."""

    arg_names = ("x", "size", "scale", "FIRST", "SECOND")

    def __init__(self) -> None:
        self.compilations: list[dict[str, Any]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.observed: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Any:
            self.compilations.append(constants)
            return FakeCompiled(self)

        return launch


class FakeCompiled:
    """Stands for what Triton compiled: how it is launched as it is, and with its launcher."""

    function, packed_metadata, metadata = 1, "packed", SimpleNamespace()

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.kernel.observed.append((grid, *args))

    def run(self, *args: Any) -> None:
        self.kernel.direct.append(args)


@pytest.fixture(autouse=True)
def fake_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's driver, which is there with a GPU alone."""
    active = SimpleNamespace(get_current_stream=lambda index: "stream")
    monkeypatch.setattr(prepared_module, "driver", SimpleNamespace(active=active))


def test_a_launch_goes_straight_to_what_was_compiled_for_such_arguments() -> None:
    kernel = FakeKernel()
    prepared = PreparedKernel(kernel, {"SECOND": 2, "FIRST": 1, "ELSEWHERE": 3}, {"num_warps": 4})
    x = torch.zeros(64)
    prepared.launch(5, (x,), (7,), (0.5,))
    prepared.launch(6, (x,), (9,), (0.5,))
    assert kernel.compilations == [{"FIRST": 1, "SECOND": 2, "num_warps": 4}]
    launch = (6, 1, 1, "stream", 1, "packed", None, None, None)
    assert kernel.direct == [(*launch, x.data_ptr(), 9, 0.5, 1, 2)]


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_a_launch_and_its_tensors(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    prepared = PreparedKernel(kernel, {"SECOND": 2, "FIRST": 1}, {})
    x = torch.zeros(64)
    prepared.launch(5, (x,), (7,), (0.5,))
    monkeypatch.setattr(knobs.runtime, hook, print)
    prepared.launch(6, (x,), (9,), (0.5,))
    assert kernel.observed == [((6, 1, 1), x, 9, 0.5, 1, 2)]
    assert not kernel.direct


def test_a_chain_of_no_hooks_is_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel()
    prepared = PreparedKernel(kernel, {"SECOND": 2, "FIRST": 1}, {})
    x = torch.zeros(64)
    prepared.launch(5, (x,), (7,), (0.5,))
    # As in Triton 3.6, whose chains have no truth value of their own; 3.7's do.
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", SimpleNamespace(calls=[]))
    prepared.launch(6, (x,), (9,), (0.5,))
    assert len(kernel.direct) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ((x[1:],), (7,), (0.5,)),  # not aligned
        lambda x: ((x,), (2**31,), (0.5,)),  # 64 bits
        lambda x: ((x,), (7,), (0.25,)),
        lambda x: ((x.long(),), (7,), (0.5,)),
    ],
    ids=["alignment", "size", "factor", "dtype"],
)
def test_what_triton_would_compile_anew_takes_its_own_way(other: Any) -> None:
    kernel = FakeKernel()
    prepared = PreparedKernel(kernel, {"FIRST": 1, "SECOND": 2}, {})
    x = torch.zeros(64)
    prepared.launch(5, (x,), (7,), (0.5,))
    prepared.launch(5, *other(x))
    assert len(kernel.compilations) == 2
    assert not kernel.direct
