"""A check that nothing waits for the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises; without a GPU nothing is checked."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    # The warning that this sets off, once, is filtered in pyproject.toml: as an error it would leave the mode set.
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
