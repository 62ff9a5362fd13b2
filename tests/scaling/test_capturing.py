"""Captured steps without a GPU: batches of any sizes in static inputs, and what is refused. Graphs: tests/gpu."""

import math
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from jagged_attn import JaggedMultiHeadAttention
from jagged_attn.capturing import CapturedStep, with_capacity

E, ROWS, SAMPLES = 8, 12, 4


def jagged(*lengths: int, seed: int = 0) -> JaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), E, generator=generator).requires_grad_()
    return JaggedTensor(values, lengths=torch.tensor(lengths, dtype=torch.int64))


class Model(nn.Module):
    """Attention, and a logit for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = JaggedMultiHeadAttention(E, 2), nn.Linear(E, 1)

    def forward(self, x: Any) -> Tensor:
        y = self.attention(x)
        sums = torch.segment_reduce(y.values(), "sum", offsets=y.offsets(), initial=0.0, unsafe=True)
        return self.head(sums).squeeze(1)


def make_step(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x: Any, labels: Tensor, weights: Tensor) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), labels, weights, reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


def batch(*lengths: int, seed: int = 0) -> tuple[Any, Tensor, Tensor]:
    labels = (torch.arange(len(lengths)) % 2).float()
    return jagged(*lengths, seed=seed), labels, torch.full((len(lengths),), 1 / max(len(lengths), 1))


BATCHES = [(3, 0, 2), (12,), (), (0, 0, 0, 0), (1, 4, 4, 3), (5,)]


def test_training_in_static_inputs_is_training() -> None:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    capacity = (with_capacity(jagged(1), ROWS, SAMPLES), torch.zeros(SAMPLES), torch.zeros(SAMPLES))
    captured, step = CapturedStep(make_step(model), *capacity), make_step(plain)
    for seed, lengths in enumerate(BATCHES):
        inputs = batch(*lengths, seed=seed)
        want, got = step(*inputs), captured(*inputs)
        torch.testing.assert_close(got, want)
        x = captured.inputs[0]
        count = sum(lengths)
        torch.testing.assert_close(x.values().grad[:count], inputs[0].values().grad)
        assert not x.values().grad[count:].any()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_nothing_is_left_of_a_larger_batch() -> None:
    seen = []
    example = with_capacity(jagged(2, 1), 5, 3), {"s": [torch.full((4, 2), 7.0), 3]}
    step = CapturedStep(
        lambda x, more: seen.append((x.values().clone(), x.offsets().clone(), more["s"][0].clone())), *example
    )
    step(jagged(5, seed=1), {"s": [torch.ones(4, 2), 3]})
    step(jagged(1, 1, seed=2), {"s": [torch.ones(1, 2), 3]})
    (_, _, _), (values, offsets, more) = seen
    assert torch.equal(values, torch.cat([jagged(1, 1, seed=2).values(), torch.zeros(3, E)]))
    assert offsets.tolist() == [0, 1, 2, 2]
    assert more.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]


def test_the_inputs_stay_the_same_tensors_and_are_copies() -> None:
    x, y = jagged(2, 1), torch.ones(3)
    step = CapturedStep(lambda x, y: (x.values() + 1, y * 2), x, y)
    places = [t.data_ptr() for t in (step.inputs[0].values(), step.inputs[0].offsets(), step.inputs[1])]
    assert step.inputs[0].values().requires_grad
    assert not step.inputs[1].requires_grad
    for seed in range(2):
        given = jagged(1, 2, seed=seed)
        values, doubled = step(given, torch.full((3,), float(seed)))
        assert torch.equal(values, given.values() + 1)
        assert doubled.tolist() == [2.0 * seed] * 3
        assert places == [t.data_ptr() for t in (step.inputs[0].values(), step.inputs[0].offsets(), step.inputs[1])]
    assert torch.equal(y, torch.ones(3))


def test_lengths_are_those_of_the_batch() -> None:
    step = CapturedStep(lambda x: x.lengths().tolist(), with_capacity(jagged(2), ROWS, SAMPLES))
    assert step(jagged(3, 4)) == [3, 4, 0, 0]
    assert step(jagged(1, 0, 5)) == [1, 0, 5, 0]
    assert step.inputs[0].lengths().tolist() == [1, 0, 5, 0]


@pytest.mark.parametrize("inference", [False, True])
def test_attention_sees_the_offsets_of_the_batch(inference: bool) -> None:
    """Layouts and tile tables are remembered beside the static offsets, which are written to."""
    layer = JaggedMultiHeadAttention(E, 2)
    with torch.inference_mode(inference):
        step = CapturedStep(lambda x: layer(x).values(), with_capacity(jagged(2), ROWS, SAMPLES))
    for lengths in BATCHES:
        x = jagged(*lengths)
        with torch.inference_mode(inference):
            torch.testing.assert_close(step(x)[: sum(lengths)], layer(x).values())
        assert not x.offsets().is_inference()


def test_a_step_may_change_what_holds_its_inputs() -> None:
    step = CapturedStep(lambda x: x.pop("a") * 2, {"a": torch.zeros(2)})
    for number in range(2):
        assert step({"a": torch.full((2,), float(number))}).tolist() == [2.0 * number] * 2


class Pair(NamedTuple):
    left: Any
    right: Any


def test_named_tuples() -> None:
    step = CapturedStep(lambda x: x.left + x.right.values(), Pair(torch.zeros(2, E), with_capacity(jagged(1), 2, 1)))
    x = jagged(2)
    assert torch.equal(step(Pair(torch.ones(2, E), x)), x.values() + 1)


@pytest.mark.parametrize("constant", [math.nan, None, "name", 0.5, (1, "a"), torch.Size([2, 3])])
def test_constants(constant: Any) -> None:
    step = CapturedStep(lambda x, y: y, torch.zeros(1), constant)
    # Another object, as a batch's would be.
    assert repr(step(torch.ones(1), float("nan") if constant is math.nan else constant)) == repr(constant)


def test_arrays_are_constants_that_equal_themselves_alone() -> None:
    array = torch.ones(2).numpy()
    step = CapturedStep(lambda x: x.sum(), array)
    assert step(array) == 2
    with pytest.raises(ValueError, match=r"inputs\[0\] must be array.*, which was captured, got array"):
        step(array.copy())


def test_inputs_may_lie_in_the_static_inputs() -> None:
    step = CapturedStep(lambda a, b: (a.tolist(), b.tolist()), torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))
    a, b = step.inputs
    assert step(b, a) == ([4, 5, 6], [1, 2, 3])
    assert step(a[1:], b) == ([5, 6, 0], [1, 2, 3])


@pytest.mark.parametrize("offsets", [torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)])
def test_a_batch_without_anything(offsets: Tensor) -> None:
    x = JaggedTensor(torch.zeros(0), offsets=offsets)  # as JaggedTensor.empty(), with and without an offset
    step = CapturedStep(lambda x: (x.values().clone(), x.offsets().tolist()), with_capacity(jagged(3), ROWS, SAMPLES))
    values, found = step(x)
    assert not values.any()
    assert found == [0] * (SAMPLES + 1)
    assert with_capacity(x, 3, 2).offsets().tolist() == [0, 0, 0]


def test_capacity() -> None:
    x = with_capacity(jagged(2, 0, 3), 7, 5)
    assert x.values().shape == (7, E)
    assert not x.values()[5:].any()
    assert x.offsets().tolist() == [0, 2, 2, 5, 5, 5]
    assert x.values().requires_grad
    assert x.values().is_leaf
    assert with_capacity(jagged(), 0, 0).offsets().tolist() == [0]


X, Y, N = jagged(1), torch.zeros(4), {"n": 3}
REFUSED: dict[str, tuple[tuple[Any, ...], Any]] = {
    r"inputs[0].values() must have shape [at most 12, 8], got [13, 8]": ((jagged(13), Y, N), ValueError),
    r"inputs[0].offsets() must have shape [at most 5], got [6]": ((jagged(1, 1, 1, 1, 1), Y, N), ValueError),
    r"inputs[1] must have shape [at most 4], got [5]": ((X, torch.zeros(5), N), ValueError),
    r"inputs[1] must have shape [at most 4], got [2, 2]": ((X, torch.zeros(2, 2), N), ValueError),
    r"inputs[1] must have dtype torch.float32, got torch.float64": ((X, Y.double(), N), ValueError),
    r"inputs[2]['n'] must be 3, which was captured, got 4": ((X, Y, {"n": 4}), ValueError),
    r"inputs[2]['n'] must be 3, which was captured, got 3.0": ((X, Y, {"n": 3.0}), ValueError),
    r"inputs[2] must be a dict with the keys ['n'], got a dict with the keys ['m']": ((X, Y, {"m": 3}), TypeError),
    r"inputs[2] must be a dict with the keys ['n'], got a list of 1": ((X, Y, [3]), TypeError),
    r"inputs[1] must be a torch.strided tensor, got a tuple of 2": ((X, (Y, Y), N), TypeError),
    r"inputs[2] must be a dict with the keys ['n'], got int": ((X, Y, 3), TypeError),
    r"inputs must be 3 inputs, got 2": ((X, Y), TypeError),
    r"inputs[0] must be a torchrec.JaggedTensor, got Tensor": ((torch.zeros(3, 8), Y, N), TypeError),
    r"inputs[1] must be a torch.strided tensor, got NoneType": ((X, None, N), TypeError),
}


@pytest.mark.parametrize("message", REFUSED)
def test_inputs_that_do_not_fit_are_refused_before_anything_runs(message: str) -> None:
    inputs, kind = REFUSED[message]
    ran: list[Any] = []
    step = CapturedStep(lambda *x: ran.append(x), with_capacity(jagged(2), ROWS, SAMPLES), torch.ones(4), {"n": 3})

    def contents() -> list[Tensor]:
        return [step.inputs[0].values(), step.inputs[0].offsets(), step.inputs[1]]

    before = [x.clone() for x in contents()]
    with pytest.raises(kind, match=re.escape(message)):
        step(*inputs)
    assert not ran
    assert all(torch.equal(a, b) for a, b in zip(before, contents(), strict=True))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="step must be callable, got int"):
        CapturedStep(3)
    with pytest.raises(TypeError, match=r"warmup must be an int, got 1\.5"):
        CapturedStep(print, warmup=1.5)
    with pytest.raises(ValueError, match="warmup must be at least 1, got 0"):
        CapturedStep(print, warmup=0)
    with pytest.raises(ValueError, match="rows must be at least the 5 that x has, got 4"):
        with_capacity(jagged(2, 3), 4, 2)
    with pytest.raises(ValueError, match="samples must be at least the 2 that x has, got 1"):
        with_capacity(jagged(2, 3), 5, 1)
    with pytest.raises(TypeError, match=r"x must be a torchrec\.JaggedTensor"):
        with_capacity(torch.zeros(3, 2), 5, 1)
    weighted = JaggedTensor(torch.zeros(2, 3), lengths=torch.tensor([2]), weights=torch.ones(2))
    with pytest.raises(ValueError, match="x must have no weights"):
        with_capacity(weighted, 5, 1)
    with pytest.raises(ValueError, match="example must have its tensors on one device, got cpu, meta"):
        CapturedStep(print, torch.zeros(2), torch.zeros(2, device="meta"))
    keyed = KeyedJaggedTensor(keys=["a"], values=torch.ones(2), lengths=torch.tensor([2]))
    with pytest.raises(TypeError, match=r"example\[0\]\['k'\] must be .* got KeyedJaggedTensor; take one feature"):
        CapturedStep(print, {"k": keyed})
    with pytest.raises(TypeError, match=r"example\[0\] must be a torch\.strided tensor, got torch\.sparse_coo"):
        CapturedStep(print, torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"inputs\[0\] must be a list or tuple of 2, got a list of 1"):
        CapturedStep(print, [1, 2])([1])
