"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from targets import Target, targets

# A machine that others use too may stop for seconds: that says nothing of a test.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


@pytest.fixture(params=targets())
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
