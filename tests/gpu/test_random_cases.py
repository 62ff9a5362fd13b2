"""A thousand random calls of the backend that ``"auto"`` chooses, against ``reference`` in float64.

What a kernel is compiled for is drawn once a group, shapes, strides and lengths anew for each case, so that the time
goes into running. A group is a process of its own with a time limit: a wrong barrier hangs, and a hang of the device
cannot be interrupted from within.

    python tests/gpu/test_random_cases.py GROUP     one group alone, to look at
"""

import random
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cases import Case, run
from test_semantics import largest_score, long_sequences

import jagged_attn as ja
from jagged_attn.testing.inputs import AttentionInputs
from jagged_attn.testing.tolerance import assert_within

GROUPS, CASES_OF_GROUP, SECONDS = 40, 25, 240
DEVICE = "cuda"
EDGES = (0, 0, 1, 2, 15, 31, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257)
MASKS = (
    ja.Full(), ja.Full(), ja.Causal(), ja.Causal("top_left"), ja.SlidingWindow(100, 20), ja.SlidingWindow(9, None),
    ja.SlidingWindow(300, 300, "top_left"), ja.SlidingWindow(900, 200), ja.BlockDiagonal(64), ja.BlockDiagonal(13),
)  # fmt: skip
ACTIVATIONS = ("softmax", "softmax", "gelu", "silu", "relu", "gelu_tanh", "fast_gelu")


def static_facts(draw: random.Random) -> dict[str, Any]:
    """What a kernel is compiled for."""
    kind = draw.choice(("self", "self", "cross", "broadcast_q"))
    heads = draw.choice(((4, 4), (4, 4), (4, 2), (3, 1)))
    shared = kind == "broadcast_q"
    return {
        "kind": kind,
        "dtype": draw.choice((torch.bfloat16, torch.float16)),
        "dim": draw.choice((64, 128)),
        "heads": (heads[0], heads[0]) if shared else heads,
        "shared": draw.choice((1, 17, 32, 50, 64, 100, 128, 129, 200, 256)) if shared else None,
        "options": {
            "mask": ja.Full() if shared else draw.choice(MASKS),
            "activation": draw.choice(ACTIVATIONS),
            **draw.choice(({}, {"scale": 0.05}, {"scale": 1.0})),
            "out_scale": draw.choice((1.0, 1.0, -0.5)),
            "deterministic": draw.random() < 0.25,
        },
        # Of the Hopper backend, which would choose by the number of rows.
        "adds_up_dq": draw.random() < 0.5,
        "run": draw.choice((1, 4)),
        "short": draw.random() < 0.5,
    }


def take_ways(facts: dict[str, Any]) -> None:
    """Have the Hopper backend, where it can be imported, go the ways that were drawn, few rows or many."""
    try:
        from jagged_attn.backends.tlx_hopper import launch_backward, launch_forward
    except ImportError:
        return
    launch_backward.adds_up_dq = lambda *call: facts["adds_up_dq"]
    few_keys = facts["short"] and facts["run"] > 1
    launch_forward.are_short = lambda *call: facts["short"]
    launch_forward.has_few_keys = lambda dim, mask, *call: mask == ja.Full() and few_keys
    # Shared queries have no runs: an entry of theirs is a whole sequence.
    launch_forward.forward_run = lambda kind, dim, few_keys, *call: (
        facts["run"] if few_keys and kind != "broadcast_q" else 1
    )


def draw_case(draw: random.Random, facts: dict[str, Any]) -> Case:
    """Lengths at the edges of tiles and anywhere, for up to 12 sequences."""

    def lengths(count: int) -> tuple[int, ...]:
        return tuple(draw.choice(EDGES) if draw.random() < 0.5 else draw.randrange(500) for _ in range(count))

    count = draw.choice((0, 1, 2, 5, 12))
    return Case(
        facts["kind"], lengths(count), lengths(count) if facts["kind"] == "cross" else None, facts["shared"],
        heads=facts["heads"], dims=(facts["dim"], facts["dim"]), extra_rows=draw.choice((0, 0, 1, 70)),
        offsets_dtype=draw.choice((torch.int32, torch.int64)), options=facts["options"],
    )  # fmt: skip


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values with other strides: as part of a fused projection, with the heads first, or off alignment."""
    if how == "fused":
        return torch.stack([x, x], dim=1)[:, 1]
    if how == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if how == "shifted":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


def check(case: Case, dtype: torch.dtype, how: str) -> None:
    """Compare one call, forward and backward, with the reference."""
    # All on the GPU: in float64 the reference would take minutes on a CPU.
    inputs = case.inputs(dtype, DEVICE)
    exact = run(inputs.to(torch.float64), "reference", **case.options)
    yardstick = run(inputs, "eager", **case.options)
    x = inputs
    x = AttentionInputs(*(strided(t, how) for t in (x.q, x.k, x.v)), x.layout_q, x.layout_kv, x.dout)
    actual = run(x, "auto", **case.options)
    facts = {"terms": max(inputs.k.shape[0], inputs.q.shape[0]), "largest_score": largest_score(inputs, case)}
    # Of a softmax over one key, the gradient of scores is what rounding leaves of terms that cancel.
    cancelled = inputs.cancelled(case.options.get("scale")) if case.options["activation"] == "softmax" else {}
    for name in exact:
        results = actual[name], exact[name], yardstick[name]
        facts["cancelled"] = abs(case.options["out_scale"]) * cancelled.get(name, 0.0)
        assert_within(f"{case} {how} {name}", *results, **facts)
        for rows in long_sequences(case, name):
            assert_within(f"{case} {how} {name}, {rows}", *(t[rows] for t in results), **facts)


def run_group(group: int) -> None:
    """All cases of a group; raises at the first that is wrong."""
    draw = random.Random(group)
    facts = static_facts(draw)
    take_ways(facts)
    for number in range(CASES_OF_GROUP):
        case, how = draw_case(draw, facts), draw.choice(("plain", "plain", "fused", "heads first", "shifted"))
        try:
            check(case, facts["dtype"], how)
        except Exception as error:
            raise AssertionError(f"group {group}, case {number}, {facts['dtype']}: {case}, {how}") from error


@pytest.mark.gpu
@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("group", range(GROUPS))
def test_random_cases(group: int) -> None:
    command = [sys.executable, __file__, str(group)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_draws_reach_every_kind() -> None:
    facts = [static_facts(random.Random(group)) for group in range(GROUPS)]
    assert {x["kind"] for x in facts} == {"self", "cross", "broadcast_q"}
    assert {x["dim"] for x in facts} == {64, 128}
    assert {str(x["options"]["mask"]) for x in facts} == {str(mask) for mask in MASKS}
    assert {x["options"]["activation"] for x in facts} == set(ACTIVATIONS)
    assert {x["options"]["deterministic"] for x in facts} == {True, False}
    assert {(x["dim"], x["adds_up_dq"], x["run"]) for x in facts} == set(product((64, 128), (True, False), (1, 4)))


if __name__ == "__main__":
    run_group(int(sys.argv[1]))
