"""The TorchRec edge: ``JaggedTensor`` (or a ``torch.nested`` jagged tensor) ⇄ ``values`` and ``JaggedLayout``.

Inputs are recognised by what they offer, so that TorchRec is imported only by ``to_jagged_tensor``, which makes one.
"""

from contextlib import nullcontext
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .layout import JaggedLayout


class JaggedTensorLike(Protocol):
    """What this library asks of a TorchRec ``JaggedTensor``."""

    def values(self) -> Tensor:
        """``[T, ...]``."""
        ...

    def offsets(self) -> Tensor:
        """``[B + 1]``; computed from the lengths on the first call and kept."""
        ...

    def offsets_or_none(self) -> Tensor | None:
        """The offsets if they are known."""
        ...

    def lengths_or_none(self) -> Tensor | None:
        """The lengths if they are known."""
        ...

    def weights_or_none(self) -> Tensor | None:
        """One weight a row, if there are any."""
        ...


Jagged: TypeAlias = JaggedTensorLike | Tensor
J = TypeVar("J")

_METHODS = ("values", "offsets", "offsets_or_none", "lengths_or_none", "weights_or_none")


def is_jagged(x: object) -> bool:
    """Whether ``x`` is a TorchRec ``JaggedTensor`` or a ``torch.nested`` tensor in the jagged layout."""
    return _is_nested(x) or _is_torchrec(x)


def _is_nested(x: object) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.jagged


def _is_torchrec(x: object) -> bool:
    if isinstance(x, Tensor):
        return False
    if torch.compiler.is_compiling():
        return _offers_methods(x)
    # A class is asked once. An object of another may still offer what it stands for has, as TorchRec's awaitables do.
    kind: type = type(x)
    known = _IS_JAGGED.get(kind)
    if known is None:
        known = _IS_JAGGED[kind] = _offers_methods(kind)
    return (known and not hasattr(x, "keys")) or _offers_methods(x)


def _offers_methods(x: object) -> bool:
    # A KeyedJaggedTensor has these methods too, and keys.
    return not hasattr(x, "keys") and all(hasattr(x, method) for method in _METHODS)


_IS_JAGGED: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def check_jagged(name: str, x: object) -> None:
    """Raise unless ``x`` is jagged and its parts lie on one device.

    Args:
        name: the argument's name in messages.
        x: what was passed for it.

    Raises:
        TypeError: ``x`` is something else; the message says how to get a jagged tensor from it where that is known.
        ValueError: its lengths or offsets are on another device than its values or neither int32 nor int64, or it is a
            nested tensor that is not ``[B, *, E]`` with contiguous rows.
    """
    if _is_nested(x):
        _check_nested(name, x)
    elif _is_torchrec(x):
        _check_torchrec(name, x)
    else:
        raise TypeError(f"{name} must be a torchrec.JaggedTensor, got {type(x).__name__}{_hint(x)}.")


def _check_torchrec(name: str, x: Any) -> None:
    device = x.values().device
    for part, tensor in (("offsets", x.offsets_or_none()), ("lengths", x.lengths_or_none())):
        if tensor is None:
            continue
        if tensor.device != device:
            raise ValueError(
                f"{name} must have its {part} on the device of its values, got values on {device} and {part} on "
                f"{tensor.device}; move it as a whole with {name}.to(device)."
            )
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must have int32 or int64 {part}, got {tensor.dtype}.")


def _check_nested(name: str, x: Any) -> None:
    if x.dim() != 3 or x._ragged_idx != 1:
        raise ValueError(f"{name} must be a nested tensor of shape [B, *, E], got {list(x.shape)}.")
    if x.lengths() is not None:
        raise ValueError(f"{name} must have no holes between its sequences; call {name}.contiguous().")


def _hint(x: object) -> str:
    if isinstance(x, Tensor):
        return "; give it a layout with jagged_attn.jagged_tensor.to_jagged_tensor(values, offsets)"
    if hasattr(x, "keys"):
        return "; take one feature of it, x[key]"
    return ""


def values_of(name: str, x: Jagged, width: int) -> Tensor:
    """The packed rows of a jagged tensor, checked.

    Args:
        name: the argument's name in messages.
        x: a TorchRec ``JaggedTensor`` or a jagged nested tensor.
        width: columns that the rows must have.

    Returns:
        ``[T, width]``. The values of ``JaggedTensor.empty()``, which have one dimension, become ``[0, width]``.

    Raises:
        TypeError: ``x`` is not jagged.
        ValueError: the values have another shape or are not of a floating dtype, or the devices differ.
    """
    check_jagged(name, x)
    values = x.values()
    if not values.is_floating_point():
        raise ValueError(f"{name} must have floating values, such as embeddings, got {values.dtype}.")
    if values.dim() == 1 and values.shape[0] == 0:
        values = values.reshape(0, width)
    if values.dim() != 2 or values.shape[1] != width:
        raise ValueError(f"{name} must have values of shape [T, {width}], got {list(values.shape)}.")
    return values


def layout_of(x: Jagged) -> JaggedLayout:
    """The layout of a jagged tensor, on its own offsets object.

    A TorchRec ``JaggedTensor`` that knows only its lengths computes its offsets here and keeps them.

    Args:
        x: a TorchRec ``JaggedTensor`` or a jagged nested tensor.

    Raises:
        TypeError: ``x`` is not jagged.
        ValueError: see ``check_jagged``.
        ImportError: its offsets have to be computed and fbgemm, which TorchRec does that with, does not work.
    """
    check_jagged("x", x)
    return JaggedLayout(_offsets(x))


def num_sequences_of(x: Jagged) -> int:
    """B of a jagged tensor, without the offsets that ``layout_of`` would compute from lengths."""
    if not _is_nested(x) and x.offsets_or_none() is None:  # type: ignore[union-attr]
        lengths = x.lengths_or_none()  # type: ignore[union-attr]
        if lengths is not None:
            return lengths.numel()
    return JaggedLayout(_offsets(x)).num_sequences


def _offsets(x: Any) -> Tensor:
    if _is_nested(x):
        return x.offsets()
    # TorchRec's `offsets` writes to x even where they are known, which torch.compile forbids in a checkpointed layer.
    known = x.offsets_or_none()
    if known is not None:
        return known
    is_inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    try:
        # Offsets made in inference mode, and kept by x, would fail in a training step with the same x.
        with torch.inference_mode(False) if is_inference else nullcontext():
            return x.offsets()
    except (AttributeError, NotImplementedError) as error:
        raise ImportError(f"TorchRec could not compute offsets from lengths. {_BROKEN}") from error


def with_values(x: J, values: Tensor) -> J:
    """A jagged tensor of the same kind and layout with other values.

    It holds the very same offsets, lengths and weights objects as ``x``, so the layers of a stack that goes through
    here share one layout and what backends derive from it. Usable in a module that ``torch.fx`` traces.

    Args:
        x: a TorchRec ``JaggedTensor`` or a jagged nested tensor.
        values: ``[T, ...]``, as many rows as the values of ``x``.

    Returns:
        A jagged tensor of the type of ``x``.

    Raises:
        TypeError: ``x`` is not jagged, or ``values`` is not a tensor.
        ValueError: ``values`` has another number of rows or is on another device.

    Example:
        >>> from torchrec import JaggedTensor
        >>> x = JaggedTensor(torch.ones(5, 3), offsets=torch.tensor([0, 2, 2, 5]))
        >>> y = with_values(x, 2 * x.values())
        >>> y.offsets() is x.offsets()
        True
    """
    return _with_values(x, values)


# torch.fx patches a wrapped function in the module that defines it, so a public function of one line calls it there.
@torch.fx.wrap
def _with_values(x: Any, values: Tensor) -> Any:
    check_jagged("x", x)
    _check_values(values)
    if values.shape[0] != x.values().shape[0]:
        raise ValueError(f"values must have the {x.values().shape[0]} rows of x, got {values.shape[0]}.")
    if values.device != x.values().device:
        raise ValueError(f"values must be on the device of x, {x.values().device}, got {values.device}.")
    if _is_nested(x):
        return torch.nested.nested_tensor_from_jagged(values, offsets=_offsets(x))
    return type(x)(values=values, weights=x.weights_or_none(), lengths=x.lengths_or_none(), offsets=_offsets(x))


def _check_values(values: object) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"values must be a torch.Tensor, got {type(values).__name__}.")
    if not values.dim():
        raise ValueError("values must have shape [T, ...], got [].")


def to_jagged_tensor(values: Tensor, layout: JaggedLayout | Tensor) -> JaggedTensorLike:
    """A TorchRec ``JaggedTensor`` on these values and offsets; imports TorchRec.

    Usable in a module that ``torch.fx`` traces.

    Args:
        values: ``[T, ...]``.
        layout: a ``JaggedLayout`` or a plain offsets tensor ``[B + 1]``; the result holds that very tensor.

    Raises:
        ImportError: TorchRec, or the fbgemm that it needs, is missing or broken.
        TypeError: ``values`` is not a tensor, or ``layout`` neither a layout nor a tensor.
        ValueError: ``values`` has no dimension, or ``layout`` is not valid as offsets.
    """
    return _to_jagged_tensor(values, layout)


@torch.fx.wrap
def _to_jagged_tensor(values: Tensor, layout: JaggedLayout | Tensor) -> JaggedTensorLike:
    _check_values(values)
    if not isinstance(layout, JaggedLayout):
        layout = JaggedLayout(layout)
    return _jagged_tensor_class()(values=values, offsets=layout.offsets)


_BROKEN = (
    "jagged_attn needs a torchrec and an fbgemm_gpu that were built for the installed torch "
    f"({torch.__version__}): install the fbgemm-gpu build of the matching release and device (cpu, cuda, rocm), then "
    "torchrec of the same release; `python -c 'import torchrec'` must work."
)


def _jagged_tensor_class() -> Any:
    try:
        from torchrec.sparse.jagged_tensor import JaggedTensor
    # A missing package is an ImportError; an fbgemm built for another torch fails with OSError or RuntimeError.
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ImportError(f"TorchRec could not be imported: {error}. {_BROKEN}") from error
    return JaggedTensor
