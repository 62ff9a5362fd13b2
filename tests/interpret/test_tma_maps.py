"""TMA maps on the host: what they say, and that launches remember them only as long as they are right."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from jagged_attn.backends._jit.descriptors import for_tma, matrix_map, ragged_map
from jagged_attn.backends._jit.launchers import _MOST_MAPS, launcher_of, remember_maps


class Launches:
    """``remember_maps`` of two maps, with what it encodes and launches written down."""

    def __init__(self) -> None:
        self.encoded: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self._launch = remember_maps(lambda *args: self.launched.append(args), self._encode, ["first", "second"])

    def _encode(self, descriptor: TensorDescriptor, metadata: str, others: Any) -> list[Any]:
        self.encoded.append((metadata, descriptor.base.data_ptr(), descriptor.shape, descriptor.strides))
        return [f"map {len(self.encoded)}", *descriptor.shape[-1:], *descriptor.strides[-1:]]

    def __call__(self, *kernel_arguments: Any) -> None:
        self._launch("grid", "stream", kernel_arguments)


def test_a_map_is_encoded_once_for_each_use_of_it() -> None:
    launches, x = Launches(), torch.zeros(8, 2, 16)
    launches(ragged_map(x, 4, 16), ragged_map(x, 4, 16), 5, 0.5)
    launches(ragged_map(x, 4, 16), ragged_map(x, 4, 16), 6, 0.25)
    assert [metadata for metadata, *_ in launches.encoded] == ["first", "second"]
    maps = ("map 1", 32, 1, "map 2", 32, 1)
    assert launches.launched == [("grid", "stream", (*maps, 5, 0.5)), ("grid", "stream", (*maps, 6, 0.25))]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: ragged_map(x[4:], 4, 16),
        lambda x: ragged_map(x[:, :1], 4, 16),
        lambda x: ragged_map(x[::2], 4, 16),
        lambda x: matrix_map(x, 8, 32, 4, 16),
    ],
    ids=["address", "width", "stride", "kind"],
)
def test_another_map_is_encoded_anew(other: Any) -> None:
    launches, x = Launches(), torch.zeros(8, 2, 16)
    launches(ragged_map(x, 4, 16), ragged_map(x, 4, 16))
    launches(ragged_map(x, 4, 16), other(x))
    assert len(launches.encoded) == 3
    expected = other(x)
    assert launches.encoded[2] == ("second", expected.base.data_ptr(), expected.shape, expected.strides)


def test_another_part_of_a_matrix_is_encoded_anew() -> None:
    launches, x = Launches(), torch.zeros(8, 32)
    for rows, columns in ((8, 32), (4, 32), (8, 16), (8, 32)):
        launches(matrix_map(x, rows, columns, 4, 16), matrix_map(x, 8, 32, 4, 16))
    assert [shape for metadata, _, shape, _ in launches.encoded if metadata == "first"] == [[8, 32], [4, 32], [8, 16]]


def test_few_maps_are_remembered() -> None:
    launches, x = Launches(), torch.zeros(_MOST_MAPS + 1, 1, 16)
    for first in (*range(_MOST_MAPS + 1), 0):
        launches(ragged_map(x[first:], 4, 16), ragged_map(x, 4, 16))
    assert len(launches.encoded) == _MOST_MAPS + 3


def test_a_ragged_map_is_that_of_triton() -> None:
    x = torch.zeros(8, 2, 16, dtype=torch.bfloat16)
    ours, theirs = ragged_map(x, 4, 16), create_ragged_descriptor(x.view(8, 32), [4, 16])
    assert (ours.shape, ours.strides, ours.block_shape) == (theirs.shape, theirs.strides, theirs.block_shape)
    assert (ours.padding, ours.base.data_ptr()) == (theirs.padding, x.data_ptr())


def test_a_ragged_map_counts_the_rows_of_all_leading_dimensions() -> None:
    x = torch.zeros(3, 8, 2, 16)
    ours, flat = ragged_map(x, 4, 16), ragged_map(x.view(-1, 2, 16), 4, 16)
    assert (ours.shape, ours.strides, ours.block_shape) == (flat.shape, flat.strides, flat.block_shape)


def test_a_map_keeps_the_copy_that_tma_needs() -> None:
    x = torch.zeros(2, 8, 16).transpose(0, 1)
    descriptor = ragged_map(for_tma(x), 4, 16)
    assert descriptor.base.is_contiguous()
    assert descriptor.base.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("meta", [None, [], [{"swizzle": 3}]], ids=["stock", "no maps", "another launcher"])
def test_another_launcher_is_left_as_it_is(meta: Any) -> None:
    compiled = SimpleNamespace(run=object(), metadata=SimpleNamespace(tensordesc_meta=meta))
    assert launcher_of(compiled) is compiled.run


def test_the_kernel_is_given_what_triton_would_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own launcher on a driver that writes down what reaches it."""
    if not hasattr(nvidia, "wrap_handle_tensordesc_impl"):
        pytest.skip("this Triton makes another launcher for each kernel, which stays as it is")
    launched: list[Any] = []
    utils = SimpleNamespace(
        launch=lambda *args: launched.append(args),
        build_signature_metadata=bytes,
        fill_tma_descriptor_tiled=lambda *facts: ("map", facts),
    )
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils))
    monkeypatch.setattr(nvidia, "make_kernel_signature", lambda signature: b"")
    monkeypatch.setattr(nvidia, "annotate_arguments", list)
    block = {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": [1, 1, 4, 16], "fp4_padded": False}
    metadata = SimpleNamespace(
        tensordesc_meta=[block, dict(block)], global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False, num_ctas=1,
    )  # fmt: skip
    tensordesc = "tensordesc<bf16[1, 1, 4, 16]>"
    signature = {"q": tensordesc, "k": tensordesc, "out": "*bf16", "rows": "i32", "D": "constexpr"}
    compiled = SimpleNamespace(
        run=nvidia.CudaLauncher(SimpleNamespace(signature=signature), metadata), metadata=metadata
    )
    x = torch.zeros(8, 2, 16, dtype=torch.bfloat16)
    launch = (6, 1, 1, "stream", 1, "packed", None, None, None)
    arguments = (*launch, ragged_map(x, 4, 16), ragged_map(x[4:], 4, 16), 1, 2, 16)
    remembering = launcher_of(compiled)
    assert remembering is not compiled.run
    for run in (compiled.run, remembering, remembering):
        run(*arguments)
    theirs, first, second = ([*others, list(kernel_arguments)] for *others, kernel_arguments in launched)
    assert theirs == first == second
