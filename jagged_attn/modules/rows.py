"""What the Kunlun-style blocks share: the rows of a jagged tensor in a traced module, and layouts of dense tokens."""

from typing import Any

import torch
from torch import Tensor

from ..jagged_tensor import Jagged, values_of
from ..layout import JaggedLayout, derived


def rows_of(name: str, x: Jagged, width: int) -> Tensor:
    """``jagged_tensor.values_of``, usable in a module that ``torch.fx`` traces."""
    return _rows_of(name, x, width)


# torch.fx patches a wrapped function in the module that defines it, so a public function of one line calls it there.
@torch.fx.wrap
def _rows_of(name: str, x: Any, width: int) -> Tensor:
    return values_of(name, x, width)


def uniform_layout(layout: JaggedLayout, length: int) -> JaggedLayout:
    """The layout of as many sequences of ``length`` rows, kept beside the other's offsets as its own tables are."""

    def build() -> JaggedLayout:
        # Also in inference mode a tensor that autograd may save: a later training step finds it in the cache.
        with torch.inference_mode(False):
            return JaggedLayout.uniform(layout.num_sequences, length, layout.offsets.device)

    if torch.compiler.is_compiling():
        return JaggedLayout.uniform(layout.num_sequences, length, layout.offsets.device)
    return derived(layout.offsets, layout.offsets, ("uniform", length), build)
