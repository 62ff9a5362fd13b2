"""Makes the modules of ``examples/`` importable, and runs the job whose results most tests here look at."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks reports of ``pipeline_jobs.everything``: one start of two processes for all tests."""
    # Not above: the tests that need a GPU run without the parts of TorchRec that this imports.
    import pipeline_jobs
    from ranks import run_ranks

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The folder that the workers of this run of pytest share.
        folder = folder.parent
    kept = folder / "results-of-two-ranks.pt"
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            torch.save(run_ranks(pipeline_jobs.everything, tmp_path_factory.mktemp("ranks"), timeout=150), kept)
        return torch.load(kept, weights_only=False)
