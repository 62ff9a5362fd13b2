"""One sharded parameter in place of a module's hundreds: ``fully_shard(..., pack=True)`` of ``distributed``."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

NAME = "packed"
# Elements: a whole parameter begins as an allocation of its own would, at 512 bytes, in 16 bits as in more.
_ALIGNMENT = 256


@dataclass(frozen=True)
class _Slot:
    """Where a parameter lies in the pack.

    Attributes:
        names: of the parameter below the module, as in its state dict; several if it is shared.
        owners: for each name the module that has the parameter, and what it is called there.
        shape: of the parameter.
        rows: of the first dimension on the first rank: ``⌈shape[0] / W⌉``, to which the others are padded.
        start: of its elements in a rank's part of the pack.
    """

    names: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    shape: torch.Size
    rows: int
    start: int

    @property
    def row_size(self) -> int:
        """Elements of one index of the first dimension."""
        return self.shape[1:].numel()

    @property
    def size(self) -> int:
        """Elements in the part of one rank, with padding."""
        return self.rows * self.row_size

    def shard(self, part: Tensor, rank: int) -> Tensor:
        """What a rank has of the parameter, in its part of the pack; a view."""
        count = min(max(self.shape[0] - rank * self.rows, 0), self.rows)
        return part.narrow(0, self.start, count * self.row_size).view(count, *self.shape[1:])


class Pack:
    """The trained parameters of a module in one, ``module.packed``, of ``[W * N]`` elements.

    Part r of W has what rank r has of each parameter with ``Shard(0)``, one behind the other, padded to equal sizes. So
    FSDP2's shard of the pack is the shards that it would make of the parameters, and these stay, under their own
    names, views of it: attributes of their modules and entries of the state dict, ``DTensor``s as without a pack. In
    the forward the attributes are the whole parameters.

    Args:
        module: its parameters are taken out, but for those that are frozen, empty, ignored or ``DTensor``s already.
        world_size: W.
        ignored: parameters to leave alone.

    Raises:
        ValueError: a parameter is on the meta device, a scalar or of another dtype than the others, or its module has
            a ``__setattr__`` of its own; or the module has something called ``packed``.
    """

    def __init__(self, module: nn.Module, world_size: int, ignored: Collection[nn.Parameter] = ()) -> None:
        if hasattr(module, NAME):
            found_there = _described(module.packed)
            raise ValueError(f"module must have no attribute {NAME!r} before it is packed, got {found_there}.")
        found = _find(module, ignored)
        _check(found)
        self.module, self.world_size = module, world_size
        self.slots = tuple(_slots(found, world_size))
        self.size = sum(slot.size for slot in self.slots)
        self._sizes = [slot.size for slot in self.slots]
        self._copies, self._wholes, self._memory = _places(self.slots, world_size)
        # Where attributes are set in every step: past ``nn.Module.__setattr__``, which takes its time.
        self._attributes = [
            (index, owner.__dict__, name) for index, slot in enumerate(self.slots) for owner, name in slot.owners
        ]
        self._shards: list[DTensor] = []
        self._shards_of: Tensor | None = None
        owners = {owner for slot in self.slots for owner, _ in slot.owners} | {module}
        self._taken_from = [(owner._parameters, dict(owner._parameters)) for owner in owners]
        for _, attributes, name in self._attributes:
            attributes[name] = attributes["_parameters"].pop(name, attributes.get(name))
        if found:
            with torch.no_grad():
                module.register_parameter(NAME, nn.Parameter(_joined(list(found), world_size)))

    def attach(self) -> None:
        """Hang the hooks on the module; after FSDP's, whose pack they read."""
        self._taken_from.clear()
        if not self.slots:
            return
        module = self.module
        module.register_forward_pre_hook(lambda module, args: self._show_wholes())
        module.register_forward_hook(lambda module, args, output: self._show_shards(), always_call=True)
        # It marks the hook, which a method does not take.
        module.register_state_dict_post_hook(lambda *args: self._save(*args))
        module.register_load_state_dict_pre_hook(self._load)
        module.__dict__["_apply"] = functools.partial(self._convert, module._apply)
        self._show_shards()

    def undo(self) -> None:
        """Put the parameters back, before ``attach``."""
        for _, attributes, name in self._attributes:
            attributes.pop(name, None)
        for parameters, before in self._taken_from:
            parameters.clear()
            parameters.update(before)

    def wholes(self, pack: Tensor) -> tuple[Tensor, ...]:
        """The whole parameters in memory of their own, of a gathered pack ``[W * N]``."""
        memory = pack.new_empty(self._memory)
        copies = [memory.as_strided(*where) for where in self._copies]
        torch.split_with_sizes_copy(pack.view(self.world_size, self.size), self._sizes, 1, out=copies)
        return tuple(memory.as_strided(*where) for where in self._wholes)

    @torch.no_grad()
    def shards(self) -> list[DTensor]:
        """This rank's part of each parameter, ``DTensor``s that share memory with the pack's shard."""
        module: Any = self.module
        if not isinstance(module.packed, DTensor):
            module.reshard()  # gathered for a forward whose backward is still to come, or never comes
        pack = module.packed
        part = pack.to_local()
        if part is not self._shards_of:
            mesh = pack.device_mesh
            rank = mesh.get_local_rank(mesh.ndim - 1)
            self._shards = [
                DTensor.from_local(
                    slot.shard(part, rank), mesh, pack.placements, run_check=False, shape=slot.shape,
                    stride=_strides_of(slot.shape),
                )
                for slot in self.slots
            ]  # fmt: skip
            self._shards_of = part
        return self._shards

    def _convert(self, apply: Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
        """``module.to(...)`` and the like: the shards are those of the new pack."""
        result = apply(*args, **options)
        self.shards()
        self._show_shards()
        return result

    def _show_wholes(self) -> None:
        wholes = _Unpack.apply(self.module.packed, self)
        for index, attributes, name in self._attributes:
            attributes[name] = wholes[index]

    def _show_shards(self) -> None:
        shards = self._shards if self._shards_of is not None else self.shards()
        for index, attributes, name in self._attributes:
            attributes[name] = shards[index]

    def _save(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state.pop(prefix + NAME)
        for slot, shard in zip(self.slots, self.shards(), strict=True):
            state |= {prefix + name: shard for name in slot.names}

    def _load(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        for slot, shard in zip(self.slots, self.shards(), strict=True):
            for key in (prefix + name for name in slot.names):
                if key not in state:
                    missing.append(key)
                    continue
                value = state.pop(key)
                if not isinstance(value, Tensor) or value.shape != slot.shape:
                    errors.append(f"{key} must be a tensor of shape {tuple(slot.shape)}, got {_described(value)}.")
                else:
                    _copy(slot, shard, value)
        # What the module loads itself has its values already.
        state[prefix + NAME] = self.module.packed


class _Unpack(torch.autograd.Function):
    """From a gathered pack to whole parameters; back from their gradients to that of the pack."""

    @staticmethod
    def forward(ctx: Any, pack: Tensor, packing: Pack) -> tuple[Tensor, ...]:
        ctx.world_size = packing.world_size
        return packing.wholes(pack)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _joined(gradients, ctx.world_size), None


@torch.no_grad()
def _copy(slot: _Slot, shard: DTensor, value: Tensor) -> None:
    """Into a shard, from a sharded or from a whole parameter."""
    if isinstance(value, DTensor):
        shard.copy_(value)
        return
    mesh, part = shard.device_mesh, shard.to_local()
    start = mesh.get_local_rank(mesh.ndim - 1) * slot.rows
    part.copy_(value[start : start + part.shape[0]])


def _joined(tensors: Sequence[Tensor], world_size: int) -> Tensor:
    """``[W * N]``: each cut into W parts of its first dimension, the last ones padded; part by part."""
    # One kernel, as FSDP2 has it, where all are contiguous.
    return torch._chunk_cat([tensor.contiguous() for tensor in tensors], 0, world_size).view(-1)


def _find(module: nn.Module, ignored: Collection[nn.Parameter]) -> dict[nn.Parameter, list[tuple[str, nn.Module, str]]]:
    """The parameters to pack, each with all its names: below the module, and in the module that has it."""
    left_alone = {id(parameter) for parameter in ignored}
    found: dict[nn.Parameter, list[tuple[str, nn.Module, str]]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            is_packed = parameter.requires_grad and not isinstance(parameter, DTensor) and parameter.numel()
            if is_packed and id(parameter) not in left_alone:
                found.setdefault(parameter, []).append((f"{prefix}.{name}" if prefix else name, owner, name))
    return found


def _check(found: dict[nn.Parameter, list[tuple[str, nn.Module, str]]]) -> None:
    first = next(iter(found), None)
    for parameter, uses in found.items():
        for name, owner, _ in uses:
            if type(owner).__setattr__ is not nn.Module.__setattr__:
                kind = type(owner).__name__
                raise ValueError(f"pack must be False for modules with a __setattr__ of their own, got {kind}: {name}.")
        if parameter.is_meta:
            raise ValueError(f"parameters must not be on the meta device to be packed, got {name}.")
        if parameter.ndim == 0:
            raise ValueError(f"parameters must have a dimension to shard, got the scalar {name}.")
        if first is not None and parameter.dtype != first.dtype:
            raise ValueError(
                f"parameters must be of one dtype to be packed, got {first.dtype} and {parameter.dtype}: {name}."
            )


def _slots(found: dict[nn.Parameter, list[tuple[str, nn.Module, str]]], world_size: int) -> Iterator[_Slot]:
    start = 0
    for parameter, uses in found.items():
        names = tuple(name for name, _, _ in uses)
        owners = tuple((owner, name) for _, owner, name in uses)
        slot = _Slot(names, owners, parameter.shape, -(-parameter.shape[0] // world_size), start)
        yield slot
        start += slot.size


# Sizes, strides and offset of a view.
_Place = tuple[Sequence[int], Sequence[int], int]


def _places(slots: Sequence[_Slot], world_size: int) -> tuple[list[_Place], list[_Place], int]:
    """Where whole parameters lie in memory of their own: as ``[W, size]``, and in their shape; its elements."""
    copies: list[_Place] = []
    wholes: list[_Place] = []
    start = 0
    for slot in slots:
        copies.append(((world_size, slot.size), (slot.size, 1), start))
        wholes.append((slot.shape, _strides_of(slot.shape), start))
        start += -(-world_size * slot.size // _ALIGNMENT) * _ALIGNMENT
    return copies, wholes, start


def _strides_of(shape: torch.Size) -> tuple[int, ...]:
    """Of contiguous memory."""
    return tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))


def _described(value: Any) -> str:
    return f"a {type(value).__name__} of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
