"""What goes into a module that ``torch.fx`` traces, checked: the rows of a jagged tensor, the tokens of samples."""

from typing import Any

import torch
from torch import Tensor

from ..jagged_tensor import Jagged, values_of
from .projections import check_fits


def rows_of(name: str, x: Jagged, width: int, weight: Tensor) -> Tensor:
    """The rows ``[T, width]`` of a jagged tensor, for a module that has this weight.

    Usable in a module that ``torch.fx`` traces, as is ``tokens_of``. A module passes a weight of its own, not one of a
    part that may be sharded apart: between its forwards such a weight need not have the dtype that it computes in.

    Raises:
        TypeError: ``x`` is not jagged.
        ValueError: its values have another shape, or a dtype or device that does not fit the weight's.
    """
    return _rows_of(name, x, width, weight)


def tokens_of(name: str, x: Tensor, num_tokens: int, width: int, weight: Tensor) -> Tensor:
    """The tokens ``[B, num_tokens, width]`` themselves, for a module that has this weight.

    Raises:
        TypeError: ``x`` is not a tensor.
        ValueError: it has another shape, or a dtype or device that does not fit the weight's.
    """
    return _tokens_of(name, x, num_tokens, width, weight)


# torch.fx patches a wrapped function in the module that defines it, so public functions of one line call these there.
@torch.fx.wrap
def _rows_of(name: str, x: Any, width: int, weight: Tensor) -> Tensor:
    values = values_of(name, x, width)
    check_fits(name, values, weight)
    return values


@torch.fx.wrap
def _tokens_of(name: str, x: Any, num_tokens: int, width: int, weight: Tensor) -> Tensor:
    check_tokens(name, x, num_tokens, width)
    check_fits(name, x, weight)
    return x


def check_tokens(name: str, x: object, num_tokens: int, width: int) -> None:
    """Raise unless ``x`` is a tensor ``[B, num_tokens, width]``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    if x.dim() != 3 or x.shape[1:] != (num_tokens, width):
        raise ValueError(f"{name} must have shape [B, {num_tokens}, {width}], got {list(x.shape)}.")
