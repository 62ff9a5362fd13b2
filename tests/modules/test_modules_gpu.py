"""The modules on a GPU: numbers, and no wait for the device. Needs no TorchRec: any object with its methods will do."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from waiting import no_waiting

from jagged_attn import Causal
from jagged_attn.jagged_tensor import with_values
from jagged_attn.modules import JaggedMultiHeadAttention, JaggedTargetAttention
from jagged_attn.testing.tolerance import assert_within

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = "cuda"
LENGTHS = (0, 1, 127, 128, 129, 0, 300, 0)
E = 64


@dataclass
class Packed:
    """The methods of a JaggedTensor that the library calls."""

    packed: Tensor
    bounds: Tensor

    def __init__(self, values: Tensor, offsets: Tensor, weights: None = None, lengths: None = None) -> None:
        self.packed, self.bounds = values, offsets

    def values(self) -> Tensor:
        return self.packed

    def offsets(self) -> Tensor:
        return self.bounds

    def offsets_or_none(self) -> Tensor:
        return self.bounds

    def lengths_or_none(self) -> None:
        return None

    def weights_or_none(self) -> None:
        return None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                JaggedMultiHeadAttention(E, 4, num_kv_heads=2, mask=Causal(), qk_norm=True),
                JaggedMultiHeadAttention(E, 2, activation="silu", scale=0.02),
            ]
        )
        self.target = JaggedTargetAttention(E, 2)
        self.pool = JaggedTargetAttention(E, 4, num_queries=5)

    def forward(self, x: Packed, candidates: Tensor) -> tuple[Tensor, ...]:
        for layer in self.layers:
            x = with_values(x, x.values() + layer(x).values())
        return x.values(), self.target(x, candidates), self.pool(x)


def inputs(device: str, dtype: torch.dtype = torch.float32) -> tuple[Packed, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values, candidates = (torch.randn(n, E, generator=generator) for n in (sum(LENGTHS), 3 * len(LENGTHS)))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    x = Packed(values.to(device, dtype), offsets.to(device))
    return x, candidates.to(device, dtype).unflatten(0, (len(LENGTHS), 3))


def run(model: Model, x: Packed, candidates: Tensor) -> dict[str, Tensor]:
    """Outputs and the gradients of all parameters."""
    model.zero_grad()
    outputs = model(x, candidates)
    sum(y.float().square().mean() for y in outputs).backward()
    results = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return results | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_autocast_on_a_gpu_is_as_close_to_float64_as_autocast_on_a_cpu() -> None:
    torch.manual_seed(0)
    model = Model()
    exact = run(model.double(), *inputs("cpu", torch.float64))
    model.float()
    results = {}
    for device in ("cpu", DEVICE):
        with torch.autocast(device, torch.bfloat16):
            results[device] = run(model.to(device), *inputs(device))
    assert results[DEVICE].keys() == exact.keys()
    for name, expected in exact.items():
        assert_within(name, results[DEVICE][name].cpu(), expected, results["cpu"][name])


def test_no_call_waits_for_the_device() -> None:
    model, batch = Model().to(DEVICE), inputs(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        run(model, *batch)  # compiles the kernels
        fresh = inputs(DEVICE)
        with no_waiting():
            run(model, *fresh)


def test_offsets_left_on_the_cpu_are_refused_and_both_devices_named() -> None:
    x, _ = inputs(DEVICE)
    with pytest.raises(ValueError, match=r"query must have its offsets on .* values on cuda:0 and offsets on cpu"):
        Model().to(DEVICE).layers[0](Packed(x.values(), x.offsets().cpu()))
