"""Teeth: every standard fault in the test kernels is found by the check meant for it, or is shown to be harmless."""

import pytest
import torch

from jagged_attn.testing.emulator import hunt
from jagged_attn.testing.emulator.checking import KernelCase
from jagged_attn.testing.emulator.faults import standard_mutants

from .test_emulator_kernels import SMALL

# Mutants that change nothing, with the reason.
EQUIVALENT = {
    ("pair matmul", "wait dropped | _mma: barrier_wait(done) #0"): (
        "the write task of the same CTA waits for the same barrier, and the CTA ends only after both tasks"
    ),
    ("hopper attention", "arrival too early | _attend: barrier_arrive(k_empty) #1"): (
        "before K(i + stages) the load task waits for the slot of V(i - 1), which is released after S(i) is complete"
    ),
    ("blackwell attention", "wait dropped | _mma: barrier_wait(s_empty) #0"): (
        "before S(i + 2) the mma task waits for P(i), which softmax writes after it has read S(i)"
    ),
    ("blackwell attention", "arrival too early | _softmax: barrier_arrive(s_empty) #0"): (
        "before S(i + 2) the mma task waits for P(i), which softmax writes after it has read S(i)"
    ),
}
MUTANTS = [(name, mutant) for name, make in SMALL.items() for mutant in standard_mutants(make().kernel)]


def test_there_are_at_least_100_mutants():
    assert len(MUTANTS) >= 100
    assert len({(n, m.name) for n, m in MUTANTS}) == len(MUTANTS)
    assert set(EQUIVALENT) <= {(n, m.name) for n, m in MUTANTS}


@pytest.mark.parametrize(("name", "mutant"), MUTANTS, ids=[f"{n}: {m.name}" for n, m in MUTANTS])
def test_mutant_is_found(name, mutant):
    result = hunt(SMALL[name](), mutant)
    if (name, mutant.name) in EQUIVALENT:
        assert not result.reported, f"{result.verdicts}: not equivalent after all"
    else:
        assert result.caught, f"expected one of {sorted(mutant.expected)}, got {result.verdicts}"


def test_a_case_that_is_wrong_without_a_fault_proves_nothing():
    case = SMALL["pair matmul"]()
    next(iter(case.references.values())).add_(1.0)
    with pytest.raises(ValueError, match="right without a fault, got VALUE on seed=3"):
        hunt(case, standard_mutants(case.kernel)[0], seeds=[3])


@pytest.mark.parametrize(
    ("got", "error"),
    [
        ([2.0, float("-inf"), 1.0], 0.0),
        ([2.0, float("-inf"), 1.2], 1.0),
        ([2.0, float("inf"), 1.0], float("inf")),
        ([2.0, 5.0, 1.0], float("inf")),
        ([float("-inf"), float("-inf"), 1.0], float("inf")),
        ([2.0, float("-inf"), float("nan")], float("inf")),
    ],
)
def test_infinities_that_are_right_are_no_error_and_hide_none(got, error):
    want = torch.tensor([2.0, float("-inf"), 1.0])
    case = KernelCase(None, (1,), {"lse": torch.tensor(got)}, {"lse": want}, {"lse": 0.1})
    assert case.error() == pytest.approx(error, abs=1e-6)


@pytest.mark.slow
def test_full_sweep_over_all_seeds():
    """On how many of the eight seeds anything at all reports each mutant; printed with -s."""
    for name, mutant in MUTANTS:
        found = sum(hunt(SMALL[name](), mutant, seeds=[seed]).reported for seed in range(8))
        print(f"{found}/8 {name}: {mutant.name}")
        assert bool(found) != ((name, mutant.name) in EQUIVALENT)
