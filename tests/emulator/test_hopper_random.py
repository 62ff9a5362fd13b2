"""The Hopper kernels in the emulator on cases drawn at random: shapes, masks, activations, CTAs, schedules."""

import random
from typing import Any

import pytest
import test_hopper_backward as backwards
import test_hopper_forward as forwards
import torch

from jagged_attn.masks import BlockDiagonal, Causal, Full, SlidingWindow
from jagged_attn.testing.emulator import Schedule

LENGTHS = (0, 1, 3, 5, 31, 63, 64, 65, 70, 100, 127, 128, 129, 130, 150, 191, 192, 193, 200, 257, 300)
POLICIES = (
    "random",
    "eager",
    "lazy",
    "round_robin",
    "starve:load",
    "starve:tma_load",
    "starve:tma_store",
    "starve:wgmma",
)
# A softmax over one key has no gradient, and its roundings are as large as those of others.
SMALLEST = 1e-2


def _lengths(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.choice(LENGTHS) for _ in range(count))


def _common(draw: random.Random, is_self: bool) -> dict[str, Any]:
    """What forward and backward take alike."""
    windows = [SlidingWindow(draw.randint(0, 120), draw.randint(0, 30)), SlidingWindow(None, draw.randint(0, 20))]
    other = BlockDiagonal(draw.choice([13, 64, 100])) if is_self else Causal("top_left")
    return {
        "mask": draw.choice([Full(), Full(), Causal(), *windows, SlidingWindow(draw.randint(0, 400), None), other]),
        "heads": draw.choice([(1, 1), (2, 1), (2, 2), (3, 1)]),
        "dim": draw.choice([64, 64, 128]),
        "activation": draw.choice(["softmax", "softmax", "gelu", "fast_gelu", "silu"]),
        "dtype": draw.choice([torch.bfloat16, torch.float16]),
    }


def _schedule(draw: random.Random) -> Schedule:
    return Schedule(draw.choice(("random", "random", *POLICIES)), draw.randrange(10**6))


def run_backward(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 5)
    lengths_q = _lengths(draw, count) if draw.random() < 0.4 else None
    case = backwards.Case(
        _lengths(draw, count), lengths_q, extra_rows=draw.choice([0, 0, 1, 70]), deterministic=draw.random() < 0.1,
        apart=draw.random() < 0.4, **_common(draw, lengths_q is None),
    )  # fmt: skip
    got, want = backwards._run(case, _schedule(draw), processors=draw.choice([1, 1, 2, 3, 5]))
    tolerance = 4 * torch.finfo(case.dtype).eps
    for name, exact in want.items():
        if exact.numel():
            error, largest = (got[name].double() - exact).abs().max(), exact.abs().max()
            assert error <= tolerance * largest.clamp(min=SMALLEST), f"{name} of {case}"


def run_forward(seed: int) -> None:
    draw = random.Random(seed)
    kind, count = draw.choice(["self", "cross", "broadcast_q"]), draw.randint(1, 6)
    call = _common(draw, kind == "self") | {"lengths_q": _lengths(draw, count), "tail": draw.choice([1, 5, 70])}
    if kind == "cross":
        call["lengths_kv"] = _lengths(draw, count)
    if kind == "broadcast_q":
        shared = {
            "num_queries": draw.choice([1, 17, 64, 65, 128, 129, 256, 300]),
            "heads": draw.choice([(1, 1), (2, 2)]),
        }
        call |= shared | {"mask": None}
    elif draw.random() < 0.5:
        call["short"] = False
    elif call["mask"] == Full():
        call["run"] = draw.choice([1, 2, 4, 4, 8])
    with pytest.MonkeyPatch.context() as patch:
        forwards.check(_schedule(draw), kind, processors=draw.choice([1, 1, 2, 3, 5]), monkeypatch=patch, **call)


RUNS = {"forward": run_forward, "backward": run_backward}


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("first", range(0, 24, 6))
def test_random_cases(name: str, first: int) -> None:
    for seed in range(first, first + 6):
        RUNS[name](seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_thousand_random_cases(name: str) -> None:
    for seed in range(1000, 2000):
        RUNS[name](seed)
