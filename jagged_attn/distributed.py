"""``fully_shard`` (FSDP2) for modules that take and return jagged tensors."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from .jagged_tensor import Jagged, layout_of
from .validation import check_flags

if TYPE_CHECKING:
    from .packing import Pack

M = TypeVar("M", bound=nn.Module)


class _Opened(NamedTuple):
    """What a TorchRec ``JaggedTensor`` is made of, in a container that FSDP looks into."""

    values: Tensor
    weights: Tensor | None
    lengths: Tensor | None
    offsets: Tensor
    kind: type


def fully_shard(module: M, *, pack: bool = False, **options: Any) -> M:
    """``torch.distributed.fsdp.fully_shard``, for a module whose arguments or results hold ``JaggedTensor``s.

    FSDP2 gathers the parameters of a module again when the first gradient of its outputs arrives, and reduces their
    gradients when those of its inputs are complete. It knows inputs and outputs by looking into tuples, lists and
    dicts. PyTorch from 2.12 on does not look into a ``JaggedTensor``: the backward of a layer that returns nothing
    else then fails, because its parameters are not there. Here hooks around FSDP's own show it the rows.

    Modules that take and return plain tensors need no more than PyTorch's function; this one does the same to them.
    Offsets and lengths stay the very same objects, so a stack still shares one layout.

    For each parameter FSDP2 has work in Python in every step, which shows where a model has hundreds that are small.
    With ``pack`` it sees one, ``module.packed``: the shards that it would have made, one behind the other. The
    optimizer gets it from ``parameters()``, and must work element by element, as Adam and SGD do. The state dict has
    the names and ``DTensor``s that it has without. Whole parameters are kept from the forward to the backward.

    Args:
        module: one, not a list of them. With ``pack``, parameters that need no gradient or have no element are sharded
            one by one.
        pack: all parameters of the module as one, but for those of modules that were sharded before.
        options: its keywords: ``mesh``, ``reshard_after_forward``, ``mp_policy``, ... With a ``mp_policy``, FSDP casts
            every floating input of the module, which would round the ``rotation`` of ``RotaryTemporalEmbedding`` and
            timestamps: give layers below the root ``cast_forward_inputs=False``, and timestamps as integers.

    Returns:
        ``module``.

    Raises:
        TypeError: ``pack`` is not a bool, or ``module`` not a module.
        ValueError: ``pack`` with ``shard_placement_fn`` or ``dp_mesh_dims``; a parameter cannot be packed: it is a
            scalar, on the meta device or of another dtype than the others, or its module has a ``__setattr__`` of its
            own, such as ``nn.GRU``; or the module has an attribute ``packed``.
    """
    from torch.distributed.fsdp import fully_shard

    check_flags(pack=pack)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}.")
    packing = _pack(module, options) if pack else None
    try:
        fully_shard(module, **options)
    except BaseException:
        if packing is not None:
            packing.undo()
        raise
    # FSDP's own hooks are there already: the first of each pair goes before them, the second after them.
    module.register_forward_pre_hook(_before(_open), prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(_before(_close), with_kwargs=True)
    module.register_forward_hook(_after(_open), prepend=True)
    module.register_forward_hook(_after(_close))
    if packing is not None:
        packing.attach()
    return module


def _pack(module: nn.Module, options: Mapping[str, Any]) -> "Pack":
    from .packing import Pack

    for name in ("shard_placement_fn", "dp_mesh_dims"):
        if options.get(name) is not None:
            raise ValueError(f"{name} must be None with pack=True, which shards the first dimension over one mesh.")
    mesh = options.get("mesh")
    # The last dimension of a mesh shards, one before it replicates.
    world_size = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    return Pack(module, world_size, options.get("ignored_params") or ())


def _before(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda module, args, kwargs: (change(args), change(kwargs))


def _after(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda module, args, output: change(output)


def _open(x: Any) -> Any:
    return _map(x, lambda leaf: _parts(leaf) if _is_jagged_tensor(leaf) else leaf)


def _close(x: Any) -> Any:
    if isinstance(x, _Opened):
        return x.kind(values=x.values, weights=x.weights, lengths=x.lengths, offsets=x.offsets)
    return _map(x, lambda leaf: _close(leaf) if isinstance(leaf, _Opened) else leaf)


def _parts(x: Any) -> _Opened:
    # The offsets are computed here if they were not known, and kept by x: once for all layers.
    return _Opened(x.values(), x.weights_or_none(), x.lengths_or_none(), layout_of(x).offsets, type(x))


def _is_jagged_tensor(x: Jagged) -> bool:
    return not isinstance(x, Tensor) and not hasattr(x, "keys") and hasattr(x, "weights_or_none")


def _map(x: Any, change: Callable[[Any], Any]) -> Any:
    """``x`` with its leaves changed, inside dicts, lists and plain tuples."""
    if type(x) is dict:
        return {key: _map(value, change) for key, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(_map(item, change) for item in x)
    return change(x)
