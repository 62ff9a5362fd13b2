"""Packed parameters: FSDP2 sees one, the rest of the world what it sees without a pack."""

import re
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from jagged_attn.distributed import fully_shard
from jagged_attn.packing import Pack

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    import packing_jobs

    return run_ranks(packing_jobs.everything, tmp_path_factory.mktemp("ranks"))


def _close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert sorted(a) == sorted(b)
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_fsdp_sees_one_trained_parameter_a_group(results: Results) -> None:
    for rank in results:
        assert [name for name in rank["names"] if "frozen" not in name] == [
            "packed", "blocks.0.packed", "blocks.1.packed",
        ]  # fmt: skip


def test_the_state_dict_is_that_of_parameters_sharded_one_by_one(results: Results) -> None:
    for rank in results:
        each, packed = rank["described"]
        assert packed == each
        assert rank["shared"]


def test_weights_are_whole_in_the_forward_alone(results: Results) -> None:
    for rank in results:
        assert rank["kinds"] == {
            "within": "Tensor", "after": "DTensor", "after an error": "DTensor",
            "ignored": "Parameter", "not ignored": "DTensor",
        }  # fmt: skip


@pytest.mark.parametrize(
    "how",
    ["packed", "packed whole", "packed, replayed", "packed, gathered again", "packed, replicas",
     "packed, two dimensions"],
)  # fmt: skip
def test_training_is_that_of_parameters_sharded_one_by_one(how: str, results: Results) -> None:
    for rank in results:
        (expected, norms), (found, found_norms) = rank["trained"]["each"], rank["trained"][how]
        _close(expected, found)
        assert found_norms == pytest.approx(norms)


def test_state_dicts_are_exchanged_with_modules_that_are_not_packed(results: Results) -> None:
    for rank in results:
        each, packed, before = rank["loaded"]
        _close(each, packed)
        assert not torch.equal(before["last.weight"], packed["last.weight"])
        _close(*rank["loaded back"])
        torch.testing.assert_close(*rank["forward"])
        _close(*rank["loaded after a forward"])


def test_whole_tensors_are_loaded(results: Results) -> None:
    for rank in results:
        _close(*rank["loaded whole"])


def test_parameters_are_views_of_a_pack_that_is_converted(results: Results) -> None:
    for rank in results:
        assert rank["converted"] == {"dtypes": {torch.float64}, "ones": True}


def test_a_module_that_fsdp_refuses_is_left_as_it_is(results: Results) -> None:
    for rank in results:
        message, before, after = rank["refused"]
        assert re.match(r"fully_shard does not support containers .*Linear\(in_features=5", message, re.DOTALL)
        assert sorted(after) == sorted(before)


def test_what_is_empty_is_not_packed(results: Results) -> None:
    for rank in results:
        shapes, parameters = rank["empty"]
        assert shapes == {"weight": (3, 5), "bias": (3,), "none": (0, 4)}
        assert parameters == ["none", "packed"]


def test_what_does_not_fit_is_not_loaded(results: Results) -> None:
    for rank in results:
        said = rank["said"]
        assert 'Missing key(s) in state_dict: "last.weight"' in said["missing"]
        assert "last.weight must be a tensor of shape (3, 5), got 3." in said["number"]
        assert "last.weight must be a tensor of shape (3, 5), got a DTensor of (3,)." in said["shape"]


@pytest.mark.parametrize("pack", [False, True])
def test_training_resumes_from_a_distributed_checkpoint(pack: bool, results: Results) -> None:
    for rank in results:
        _close(*rank["resumed"][pack])


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 3))
        self.row = nn.Parameter(torch.randn(1, 2, 7))
        self.vector = nn.Parameter(torch.randn(11))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_whole_parameters_and_gradients_come_out_of_the_pack(world_size: int) -> None:
    module = _Odd()
    expected = {name: p.detach().clone() for name, p in module.named_parameters()}
    pack = Pack(module, world_size)
    assert module.packed.numel() == world_size * pack.size
    pack._show_wholes()
    for name, value in expected.items():
        whole = getattr(module, name)
        torch.testing.assert_close(whole, value, rtol=0, atol=0)
        # As an allocation of its own: 512 bytes in 16 bits.
        assert whole.storage_offset() % 256 == 0
    loss = sum((getattr(module, name) * value).sum() for name, value in expected.items())
    loss.backward()
    # Each gradient is the parameter, so that of the pack is the pack; its padding has none.
    torch.testing.assert_close(module.packed.grad, module.packed.detach(), rtol=0, atol=0)


def test_a_parameter_that_nothing_reads_has_a_gradient_of_zeros() -> None:
    module = _Odd()
    Pack(module, 2)._show_wholes()
    module.matrix.sum().backward()
    assert module.packed.grad.count_nonzero() == module.matrix.numel()


def _with(name: str, value: Any) -> nn.Module:
    module = _Odd()
    setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.GRU(3, 5), "pack must be False for modules with a __setattr__ of their own, got GRU: "),
        (nn.Linear(3, 5, device="meta"), "parameters must not be on the meta device to be packed, got weight."),
        (_with("scale", nn.Parameter(torch.tensor(1.0))), "must have a dimension to shard, got the scalar scale."),
        (_with("rough", nn.Parameter(torch.randn(3).half())), "of one dtype .*, got torch.float32 and torch.float16: "),
        (_with("packed", "a lunch"), "module must have no attribute 'packed' before it is packed, got 'a lunch'."),
        (_with("packed", torch.ones(9)), r"no attribute 'packed' before it is packed, got a Tensor of \(9,\)."),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_is_refused_and_left_as_it_is(module: nn.Module, message: str) -> None:
    names = [name for name, _ in module.named_parameters()]
    with pytest.raises(ValueError, match=message):
        Pack(module, 2)
    assert [name for name, _ in module.named_parameters()] == names


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="pack must be True or False, got 'no'"):
        fully_shard(nn.Linear(3, 5), pack="no")
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got list"):
        fully_shard([nn.Linear(3, 5)])
    with pytest.raises(ValueError, match="shard_placement_fn must be None with pack=True"):
        fully_shard(nn.Linear(3, 5), pack=True, shard_placement_fn=lambda parameter: None)
