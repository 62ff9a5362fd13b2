"""Numbers are those of the GPU: bf16 rounds to nearest even, integers divide toward zero and wrap around."""

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tlx_kernels import small

from jagged_attn.testing.emulator import Checks, Launch, emulate
from jagged_attn.testing.emulator.numerics import decode, encode, round_bf16

_BITS = st.integers(0, 2**32 - 1)


def _torch_bf16(x):
    return torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)


@given(st.lists(_BITS, min_size=1, max_size=64))
def test_bf16_rounds_as_torch_does(bits):
    x = np.array(bits, np.uint32).view(np.float32)
    got, want = round_bf16(x), _torch_bf16(x)
    nan = np.isnan(x)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert np.isnan(decode(got, tl.bfloat16)[nan]).all()


def test_every_bf16_survives_a_round_trip():
    bits = np.arange(2**16, dtype=np.uint16)
    x = decode(bits, tl.bfloat16)
    good = ~np.isnan(x)
    np.testing.assert_array_equal(encode(x, tl.bfloat16)[good], bits[good])


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_ties_go_to_even(offset):
    # 1 + 2**-8 lies between two bf16 numbers; the even one is 1. Its successor's tie goes up.
    for base, even in ((0x3F808000, 0x3F80), (0x3F818000, 0x3F82)):
        want = even if offset == 0 else (base + offset + 0x8000 >> 16 if offset > 0 else base >> 16)
        assert round_bf16(np.array([base + offset], np.uint32).view(np.float32))[0] == want


def test_bf16_arithmetic_in_kernels():
    n = 64
    a, b = torch.randn(n).bfloat16(), torch.randn(n).bfloat16()
    out = torch.empty(5 * n).bfloat16()
    emulate(small.bf16_arithmetic, (1,), {"a": a, "b": b, "out": out, "n": n})
    want = torch.cat([a * b, a + b, (a.float() / 3).bfloat16(), torch.maximum(a, b), a * 0.5])
    torch.testing.assert_close(out, want, rtol=0, atol=0)


_INTS = st.integers(-(2**31), 2**31 - 1)


def _c_results(x, y):
    quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
    exact = [quotient, x - quotient * y, x * y, x - y, 7 - x, 0]
    return [(v + 2**31) % 2**32 - 2**31 for v in exact]


@given(x=_INTS, y=_INTS.filter(bool))
@settings(max_examples=40)
def test_integer_scalars_behave_as_in_c(x, y):
    a, b, out = (torch.tensor(v, dtype=torch.int32) for v in ([x], [y], [0] * 6))
    emulate(small.arithmetic, (1,), {"a": a, "b": b, "out": out})
    assert out.tolist() == _c_results(x, y)


def test_overflow_can_be_an_error():
    a, b, out = (torch.tensor(v, dtype=torch.int32) for v in ([2**30], [4], [0] * 6))
    with pytest.raises(AssertionError, match="overflow"):
        emulate(small.arithmetic, (1,), {"a": a, "b": b, "out": out}, Launch(checks=Checks(overflow=True)))


@pytest.mark.parametrize("kernel", [small.device_descriptor, small.descriptor_slots])
def test_the_tma_clips_at_the_end_of_the_map(kernel):
    x, y = torch.randn(32, 32), torch.empty(16, 32)
    extra = {"FAULT": ""} if kernel is small.descriptor_slots else {}
    emulate(kernel, (1,), {"x": x, "y": y, "n": 13, **extra}, Launch(outputs=("y",)))
    want = torch.zeros(16, 32)
    want[:5] = x[8:13]
    torch.testing.assert_close(y, want)


def test_a_descriptor_is_made_before_it_is_used():
    with pytest.raises(Exception, match="UNWRITTEN: a tensor descriptor is used before it is made"):
        emulate(small.descriptor_slots, (1,), {"x": torch.zeros(9), "y": torch.zeros(9), "n": 1, "FAULT": "not made"})


def test_a_map_larger_than_its_tensor_is_reported():
    x, y = torch.randn(10, 32), torch.empty(16, 32)
    with pytest.raises(Exception, match=r"OUTSIDE.*covers bytes 1024 to 3072 of 1280"):
        emulate(small.device_descriptor, (1,), {"x": x, "y": y, "n": 32})


def test_warp_barriers_count_threads():
    y = torch.zeros(1)
    emulate(small.warp_barrier, (1,), {"y": y, "ARRIVALS": 1})
    assert y.item() == 1
    with pytest.raises(Exception, match="128 of 256 arrivals pending"):
        emulate(small.warp_barrier, (1,), {"y": y, "ARRIVALS": 2})
