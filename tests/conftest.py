"""Which backend runs on which device in this process, as fixtures and marks."""

import os
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Target(NamedTuple):
    """A backend on a device."""

    backend: str
    device: str

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}"


def _targets() -> list[object]:
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 (make test-interpret)")
    marks = {
        Target("reference", "cpu"): (),
        Target("eager", "cpu"): (),
        Target("triton", "cpu"): (pytest.mark.interpret, interpreter),
        Target("eager", "cuda"): (pytest.mark.gpu, no_gpu),
        Target("triton", "cuda"): (pytest.mark.gpu, no_gpu),
    }
    return [pytest.param(target, marks=mark, id=str(target)) for target, mark in marks.items()]


@pytest.fixture(params=_targets())
def target(request: pytest.FixtureRequest) -> Target:
    """Every backend on every device where it can run."""
    return request.param


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill what ``torch.empty`` returns with NaN, so that an element nobody writes is seen."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
