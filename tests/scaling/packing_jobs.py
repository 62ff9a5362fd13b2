"""What two ranks do for the tests of packed parameters."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from jagged_attn.distributed import fully_shard


class Rows(nn.Module):
    """Parameters of one row, of odd numbers of rows, a frozen one, and one under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.bend = nn.Parameter(torch.randn(1, 7))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.again = nn.Linear(5, 7)
        self.again.weight = self.first.weight
        self.register_buffer("kept", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.bend + self.frozen
        return self.second(hidden.tanh() + self.again(x))


class Model(nn.Module):
    """Two of them, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rows() for _ in range(2))
        self.last = nn.Linear(5, 3)
        self.replay = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.replay else block(x)
        return self.last(x)


def sharded(pack: bool, mesh: DeviceMesh | None = None, by_block: bool = True, **options: Any) -> Model:
    """The same model on all ranks, a group of parameters for each block or one for all."""
    torch.manual_seed(3)
    model = Model()
    for module in [*model.blocks, model] if by_block else [model]:
        fully_shard(module, mesh=mesh, pack=pack, **options)
    return model


def train(model: Model, steps: int = 2, clip: float = 0.5) -> tuple[torch.optim.Optimizer, list[float]]:
    """AdamW on other rows each step and rank, with clipped gradients; their norms."""
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, norms


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def described(model: nn.Module) -> dict[str, Any]:
    """What a checkpoint needs to know of each entry of the state dict."""
    return {
        name: (value.shape, value.placements, value.to_local().shape) if isinstance(value, DTensor) else value.shape
        for name, value in model.state_dict().items()
    }


def trained(pack: bool, replay: bool = False, **options: Any) -> tuple[dict[str, Tensor], list[float]]:
    model = sharded(pack, **options)
    model.replay = replay
    _, norms = train(model)
    return whole(model), norms


def messages_of_loading(model: nn.Module) -> dict[str, str]:
    """What is said of state dicts that do not fit."""
    good, said = model.state_dict(), {}
    wrong = {
        "missing": {name: value for name, value in good.items() if name != "last.weight"},
        "number": good | {"last.weight": 3},
        "shape": good | {"last.weight": good["last.bias"]},
    }
    for what, state in wrong.items():
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            said[what] = str(error)
    return said


def resumed(folder: Path, pack: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Three steps, and three steps interrupted by a checkpoint after the first two."""
    straight = sharded(pack)
    optimizer, _ = train(straight)
    states = get_state_dict(straight, optimizer)
    saved = {"model": states[0], "optimizer": states[1]}
    dcp.save(copy.copy(saved), checkpoint_id=folder / f"checkpoint {pack}")
    again = sharded(pack)
    other, _ = train(again, steps=1)
    model_state, optimizer_state = get_state_dict(again, other)
    loaded = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder / f"checkpoint {pack}")
    set_state_dict(again, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for model, steps in ((straight, optimizer), (again, other)):
        model(torch.ones(2, 5)).sum().backward()
        steps.step()
    return whole(straight), whole(again)


def kinds() -> dict[str, str]:
    """What a weight is, to those that look."""
    model = sharded(True)
    weight, found = model.blocks[0].second, {}
    weight.register_forward_hook(lambda module, args, out: found.update(within=type(module.weight).__name__))
    model(torch.ones(2, 5))
    found["after"] = type(weight.weight).__name__
    weight.register_forward_hook(lambda module, args, out: 1 // 0)
    with contextlib.suppress(ZeroDivisionError):
        model(torch.ones(2, 5))
    found["after an error"] = type(weight.weight).__name__
    left_alone = nn.Linear(5, 3)
    fully_shard(left_alone, pack=True, ignored_params={left_alone.bias})
    return found | {"ignored": type(left_alone.bias).__name__, "not ignored": type(left_alone.weight).__name__}


def loaded_whole(plain: Model) -> dict[str, Tensor]:
    """What every rank has whole, loaded by PyTorch's function."""
    options, packed = StateDictOptions(full_state_dict=True), sharded(True)
    set_model_state_dict(packed, get_model_state_dict(plain, options=options), options=options)
    return whole(packed)


def converted() -> dict[str, Any]:
    """A model in another dtype."""
    model = sharded(True, by_block=False).double()
    weight = model.last.weight
    nn.init.ones_(weight)
    state = whole(model)["last.weight"]
    return {"dtypes": {weight.dtype, model.packed.dtype, state.dtype}, "ones": bool((state == 1).all())}


def refused_by_fsdp() -> tuple[str, list[str], list[str]]:
    """What FSDP says, and the parameters before and after."""
    layers = Model().blocks
    before = [name for name, _ in layers.named_parameters()]
    try:
        fully_shard(layers, pack=True)
    except ValueError as error:
        return str(error), before, [name for name, x in layers.named_parameters() if layers.get_parameter(name) is x]
    raise AssertionError("a ModuleList has no forward")


def empty_parameter() -> tuple[Any, Any]:
    """Parameters without an element: where they are in the state dict, and what is packed."""
    model = nn.Linear(5, 3)
    model.none = nn.Parameter(torch.zeros(0, 4))
    fully_shard(model, pack=True)
    model(torch.ones(2, 5)).sum().backward()
    return {name: tuple(x.shape) for name, x in model.state_dict().items()}, [n for n, _ in model.named_parameters()]


def everything(folder: Path) -> dict[str, Any]:
    """All of it, in one start of two processes."""
    plain, packed = sharded(False), sharded(True)
    results: dict[str, Any] = {
        "names": [name for name, _ in packed.named_parameters()],
        "described": (described(plain), described(packed)),
        "shared": packed.blocks[0].first.weight.to_local().untyped_storage().data_ptr()
        == packed.blocks[0].packed.to_local().untyped_storage().data_ptr(),
        "trained": {
            "each": trained(False),
            "packed": trained(True),
            "packed whole": trained(True, by_block=False),
            "packed, replayed": trained(True, replay=True),
            "packed, gathered again": trained(True, reshard_after_forward=True),
            "packed, replicas": trained(True, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))),
            "packed, two dimensions": trained(True, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))),
        },
    }
    results["kinds"] = kinds()
    train(plain)
    before = whole(packed)
    packed.load_state_dict(plain.state_dict())
    results["loaded"] = (whole(plain), whole(packed), before)
    plain = sharded(False)
    plain.load_state_dict(packed.state_dict())
    results["loaded back"] = (whole(packed), whole(plain))
    results["said"] = messages_of_loading(packed)
    results["loaded whole"] = (whole(plain), loaded_whole(plain))
    results["converted"] = converted()
    results["refused"] = refused_by_fsdp()
    results["empty"] = empty_parameter()
    results["resumed"] = {pack: resumed(folder, pack) for pack in (False, True)}
    with torch.no_grad():
        results["forward"] = (plain(torch.ones(2, 5)), packed(torch.ones(2, 5)))
    # The root's parameters are gathered still.
    packed.load_state_dict(sharded(False).state_dict())
    results["loaded after a forward"] = (whole(sharded(False)), whole(packed))
    return results
