"""The kernels under ``compute-sanitizer --tool memcheck``: forward and backward of small calls touch no wrong address.

A group is a process of its own with a time limit, run twice: once alone, so that its kernels are compiled and cached,
then under the sanitizer. Nothing is compared here, since the other tests do that; results only have to be finite.

    python tests/gpu/test_memcheck.py GROUP     one group alone, to look at
"""

import faulthandler
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cases import Case, run

import jagged_attn as ja

SECONDS, FOUND, DEVICE = 200, 9, "cuda"
LENGTHS = (0, 1, 63, 130, 257)
# On PATH, of the CUDA toolkit, or of the package.
HOMES = os.environ.get("CUDA_HOME", "/usr/local/cuda"), f"{sysconfig.get_path('purelib')}/nvidia/cu13"
PATH = [*os.get_exec_path(), *(f"{home}/bin" for home in HOMES)]
SANITIZER = shutil.which("compute-sanitizer", path=os.pathsep.join(PATH))
# A tile may end 128 rows past a tensor: 64 KiB. What an API call returns is for its caller to check.
OPTIONS = f"""--tool memcheck --error-exitcode {FOUND} --padding 65536 --report-api-errors no --launch-timeout 120
    --target-processes application-only --show-backtrace device --print-limit 5""".split()


def _case(name: str, dim: int = 128, shared: int | None = None, **options: Any) -> Case:
    heads, lengths_q = (4, 2) if "grouped" in name else (2, 2), LENGTHS[::-1] if "cross" in name else None
    lengths = (600, 385) if name == "long" else LENGTHS
    return Case(name, lengths, lengths_q, shared, heads=heads, dims=(dim, dim), options=options)


GROUPS = {
    "plain": [
        _case("self"), _case("cross"), _case("grouped"), _case("deterministic", deterministic=True), _case("long"),
    ],
    "others": [
        _case("causal", mask=ja.Causal()), _case("window", mask=ja.SlidingWindow(100, 20)),
        _case("gelu", activation="gelu"), _case("self-64", dim=64),
    ],
    "shared": [*(_case(f"S={s}", shared=s) for s in (17, 64, 100, 256)), _case("gelu", shared=64, activation="gelu")],
    "triton": [_case("self"), _case("cross-grouped-causal", mask=ja.Causal()), _case("S=100", shared=100)],
    "past_the_end": [],
}  # fmt: skip


def run_group(group: str) -> None:
    """All calls of a group by the backend that ``"auto"`` chooses, or by ``triton``."""
    for case in GROUPS[group]:
        x = case.inputs(torch.bfloat16, DEVICE)
        reports = ja.explain_backend(x.q, x.k, x.v, x.layout_q, x.layout_kv, **case.options)
        backend = "triton" if group == "triton" else next(r.backend for r in reports if r.supported)
        results = run(x, backend, **case.options)
        # A query without keys has a log-sum-exp of minus infinity.
        bad = [n for n, t in results.items() if (t.isnan() if n == "lse" else ~t.isfinite()).any()]
        assert not bad, f"{case.name}: {', '.join(bad)} not finite"
        print(f"{case.name}: finite, by {backend}", flush=True)
    if group == "past_the_end":  # what has to be found: a thousand numbers are read where there are five hundred
        x = torch.ones(1000, device=DEVICE)
        x.untyped_storage().resize_(2000)
        x.sum().item()


def child(group: str, *prefix: str) -> subprocess.CompletedProcess[str]:
    # Each tensor is then an allocation of its own, and the sanitizer sees an access past its end.
    options = {"env": {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "timeout": SECONDS + 60, "check": False}
    return subprocess.run([*prefix, sys.executable, __file__, group], capture_output=True, text=True, **options)


@pytest.mark.gpu
@pytest.mark.timeout(2 * SECONDS + 150)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(SANITIZER is None, reason="no compute-sanitizer: pip install 'nvidia-cuda-sanitizer-api>=13.5'")
@pytest.mark.parametrize("group", GROUPS)
def test_memcheck(group: str) -> None:
    alone = child(group)
    assert alone.returncode == 0, alone.stderr[-3000:]
    done = child(group, str(SANITIZER), *OPTIONS)
    print(done.stdout)  # which backend ran: pytest -rP
    report = f"{done.stderr[-3000:]}\n{done.stdout[-3000:]}"
    if "Device not supported" in report:
        pytest.skip("compute-sanitizer does not support this device, or is kept from it")
    status, said = (FOUND, "Invalid __global__ read") if group == "past_the_end" else (0, "ERROR SUMMARY: 0 errors")
    assert (done.returncode, said in done.stdout) == (status, True), report
    assert done.stdout.count(": finite") == len(GROUPS[group]), report


def test_the_groups_reach_every_kind() -> None:
    cases = [case for group, cases in GROUPS.items() if group != "triton" for case in cases]
    assert {case.lengths_q is None for case in cases} == {True, False}
    assert {case.num_shared_queries for case in cases} == {None, 17, 64, 100, 256}
    assert {type(case.options.get("mask", ja.Full())) for case in cases} == {ja.Full, ja.Causal, ja.SlidingWindow}
    assert {(case.dims[0], case.heads) for case in cases} == {(64, (2, 2)), (128, (2, 2)), (128, (4, 2))}
    assert {case.options.get("deterministic", False) for case in cases} == {True, False}
    assert [case.num_shared_queries for case in cases if "activation" in case.options] == [None, 64]


if __name__ == "__main__":
    # A hang of the device cannot be interrupted from within, but the process can be left.
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    run_group(sys.argv[1])
