"""Every backend on every device where this process might run it."""

import os
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


def targets() -> list[object]:
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
