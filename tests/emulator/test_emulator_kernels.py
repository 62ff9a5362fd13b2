"""Truth: the test kernels compute the reference's numbers under every schedule, and never raise a finding."""

import time
from dataclasses import replace

import pytest
from tlx_kernels.problems import attention_problem, matmul_problem, pair_problem

from jagged_attn.testing.emulator import Schedule, emulate

CASES = {
    "matmul": matmul_problem,
    "hopper attention": lambda: attention_problem(90),
    "blackwell attention": lambda: attention_problem(100),
    "pair matmul": pair_problem,
}
# Small enough for hundreds of runs, long enough that every ring wraps.
SMALL = {
    "matmul": matmul_problem,
    "hopper attention": lambda: attention_problem(90, lengths=(65, 200, 1)),
    "blackwell attention": lambda: attention_problem(100, lengths=(65, 200, 1)),
    "pair matmul": pair_problem,
}


@pytest.mark.emulator(seeds=3, roles=("load", "mma", "attend", "softmax", "correct", "store"))
@pytest.mark.parametrize("name", CASES)
def test_right_under_every_policy(name, schedule):
    CASES[name]().check(schedule)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("block", range(4), ids=lambda b: f"seeds {50 * b} to {50 * b + 49}")
def test_no_report_over_200_seeds(name, block):
    case = SMALL[name]()
    for seed in range(50 * block, 50 * block + 50):
        case.check(Schedule("random", seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_report_over_1000_more_seeds(name):
    case = CASES[name]()
    for seed in range(1000, 2000):
        case.check(Schedule("random", seed))


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("block", [32, 64, 128])
def test_lengths_around_the_block(arch, block):
    lengths = (0, 1, block - 1, block, block + 1, 0)
    attention_problem(arch, lengths=lengths, block=block).check(Schedule("random", block))


@pytest.mark.parametrize("arch", [90, 100])
def test_no_work_items(arch):
    case = attention_problem(arch, lengths=(0, 0, 1))
    report = emulate(case.kernel, case.grid, {**case.arguments, "items": 0}, case.launch)
    assert report.ops == {}


@pytest.mark.parametrize("arch", [90, 100])
def test_one_cta_at_a_time(arch):
    case = attention_problem(arch, ctas=5)
    replace(case, launch=replace(case.launch, resident=1)).check(Schedule("random", 0))


def test_more_pairs_than_fit():
    case = pair_problem(pairs=3)
    replace(case, launch=replace(case.launch, resident=1)).check(Schedule("random", 0))


@pytest.mark.parametrize("arch", [90, 100])
def test_an_attention_problem_takes_less_than_two_seconds(arch):
    case = attention_problem(arch, lengths=(256, 129, 64, 256), heads=2)
    case.check(Schedule("random", 0))
    # CPU time, so that a busy machine does not fail the test.
    start = time.process_time()
    case.check(Schedule("random", 1))
    assert time.process_time() - start < 2
