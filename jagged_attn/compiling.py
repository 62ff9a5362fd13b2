"""What ``torch.compile`` is told of jagged inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .jagged_tensor import check_jagged


def mark_dynamic(*inputs: Any) -> None:
    """Tell ``torch.compile`` that numbers of rows and of samples vary, before it compiles for those of the first batch.

    Call it on the arguments of a compiled model, at least for the first batch; then one compilation serves batches of
    any number of samples, of rows and any lengths. Without it there is one more when the numbers of rows first change,
    and another when the number of samples first does. Batches of 0 or 1 samples or rows are compiled for themselves,
    as in all of ``torch.compile``. It waits for nothing and changes no number.

    Args:
        inputs: tensors whose first dimension varies, jagged tensors, and dicts of these.

    Raises:
        TypeError: an input is something else.

    Example:
        >>> from torchrec import JaggedTensor
        >>> clicks = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> layer = torch.compile(JaggedMultiHeadAttention(8, 2), backend="eager")
        >>> mark_dynamic(clicks)
        >>> layer(clicks).values().shape
        torch.Size([5, 8])
    """
    for x in inputs:
        if isinstance(x, Mapping):
            mark_dynamic(*x.values())
        elif isinstance(x, Tensor):
            torch._dynamo.maybe_mark_dynamic(x, 0)
        else:
            check_jagged("inputs", x)
            parts = (x.values(), x.weights_or_none(), x.lengths_or_none(), x.offsets_or_none())
            mark_dynamic(*(part for part in parts if part is not None))
