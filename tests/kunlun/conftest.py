"""TorchRec warns while it is imported (a CPU build of fbgemm lacks operators); warnings here are errors."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrec  # noqa: F401

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small to share among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
