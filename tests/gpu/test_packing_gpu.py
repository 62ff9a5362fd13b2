"""Packed parameters on a GPU: one kernel each way, right and without a wait."""

import pytest
import torch
from torch import nn
from waiting import no_waiting

from jagged_attn.packing import Pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [(5, 3), (1,), (1, 2, 7), (512, 33), (288,)]
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whole_parameters_and_gradients_come_out_of_the_pack(world_size: int, dtype: torch.dtype) -> None:
    module = _Odd().to("cuda", dtype)
    expected = [weight.detach().clone() for weight in module.weights]
    pack = Pack(module, world_size)

    def turn() -> None:
        module.packed.grad = None
        pack._show_wholes()
        torch.autograd.backward(list(module.weights), expected)

    turn()
    with no_waiting():
        turn()
    for whole, value in zip(module.weights, expected, strict=True):
        assert torch.equal(whole, value)
        assert whole.data_ptr() % 512 == 0
    # Each gradient is the parameter, so that of the pack is the pack; its padding has none.
    assert torch.equal(module.packed.grad, module.packed)
