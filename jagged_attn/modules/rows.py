"""The rows of a jagged tensor, in a module that ``torch.fx`` traces."""

from typing import Any

import torch
from torch import Tensor

from ..jagged_tensor import Jagged, values_of


def rows_of(name: str, x: Jagged, width: int) -> Tensor:
    """``jagged_tensor.values_of``, usable in a module that ``torch.fx`` traces."""
    return _rows_of(name, x, width)


# torch.fx patches a wrapped function in the module that defines it, so a public function of one line calls it there.
@torch.fx.wrap
def _rows_of(name: str, x: Any, width: int) -> Tensor:
    return values_of(name, x, width)
