"""The TLX backend of this GPU: the cases of the semantics suite in half precision, at the head dims it takes."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from cases import CASES, Case, run
from targets import Target
from test_semantics import check
from waiting import no_waiting

import jagged_attn as ja
from jagged_attn.activations import ELEMENTWISE
from jagged_attn.backends._jit.capability import HEAD_DIMS
from jagged_attn.schedule.tiles import tile_table
from jagged_attn.testing.tolerance import assert_within


def _chosen() -> tuple[str, str]:
    """The TLX backend of this GPU, and why there is none."""
    if not torch.cuda.is_available():
        return "", "needs a CUDA GPU"
    q = torch.empty(1, 1, 64, dtype=torch.bfloat16, device="cuda")
    reports = ja.explain_backend(q, q, q, ja.JaggedLayout.uniform(1, 1, "cuda"))
    refusals = {r.backend: r.refusal for r in reports if r.backend.startswith("tlx_")}
    for name, refusal in refusals.items():
        if refusal is None:
            return name, ""
    return "", "; ".join(f"{name} {refusal}" for name, refusal in refusals.items())


BACKEND, REASON = _chosen()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON)]
TARGET = Target(BACKEND, "cuda")
LONG = (0, 1, 63, 300, 64, 65, 127, 128, 129, 0, 513)
# So many keys a sequence, on average, that other kernels are chosen.
LONGER = (1000, 0, 577)
# Kernels that are there on request.
SWITCHES = {
    "tlx_blackwell": [
        "JAGGED_ATTN_BLACKWELL_FORWARD=two_ctas=1,k_stages=6,v_stages=6",
        "JAGGED_ATTN_BLACKWELL_BACKWARD=two_ctas=1,q_stages=1",
    ],
}


@pytest.fixture
def stale() -> None:
    """Leave NaN in the memory that ``torch.empty`` is about to return, so that an element nobody writes is seen."""
    blocks = [
        torch.full((n,), torch.nan, device="cuda") for n in (1 << 22, 1 << 18, 1 << 14, *[1 << 10] * 8, *[64] * 16)
    ]
    del blocks


def _at(case: Case, dim: int) -> Case:
    return dataclasses.replace(case, dims=(dim, dim))


def check_or_refusal(case: Case, dtype: torch.dtype) -> None:
    """Right, or refused for a reason that the capability module gives."""
    try:
        check(case, TARGET, dtype)
    except ja.UnsupportedError as error:
        (report,) = error.refusals
        assert report.backend == BACKEND
        pytest.skip(report.refusal)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_the_reference(case: Case, dim: int, stale: None) -> None:
    check_or_refusal(_at(case, dim), torch.bfloat16)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("self", LONG, heads=(4, 4)),
        Case("grouped", LONG, heads=(4, 2)),
        Case("cross", LONG, tuple(reversed(LONG)), heads=(4, 4)),
        Case("many keys", LONGER, heads=(4, 4)),
        Case("many keys, cross", LONGER, (129, 0, 300), heads=(4, 2)),
        Case("many keys, gelu", LONGER, heads=(4, 4), options={"activation": "gelu"}),
        Case("many keys, fast_gelu", LONGER, heads=(4, 4), options={"activation": "fast_gelu"}),
        Case("many keys, wide window", LONGER, heads=(4, 4), options={"mask": ja.SlidingWindow(900, 200)}),
        Case("causal, fast_gelu", LONG, heads=(4, 4), options={"mask": ja.Causal(), "activation": "fast_gelu"}),
        Case("causal", LONG, heads=(4, 4), options={"mask": ja.Causal()}),
        Case("window", LONG, heads=(4, 4), options={"mask": ja.SlidingWindow(100, 0)}),
        Case("blocks", LONG, heads=(4, 4), options={"mask": ja.BlockDiagonal(64)}),
        Case("gelu", LONG, heads=(4, 4), options={"activation": "gelu"}),
        *(
            Case(f"broadcast-q-{s}", LONG, num_shared_queries=s, heads=(4, 4))
            for s in (1, 32, 33, 64, 65, 128, 129, 256)
        ),
    ],
    ids=lambda case: case.name,
)
def test_long_sequences(case: Case, dtype: torch.dtype, dim: int, stale: None) -> None:
    check(_at(case, dim), TARGET, dtype)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("switch", SWITCHES.get(BACKEND, []))
def test_kernels_on_request(switch: str) -> None:
    """In a process of its own, since a switch is read once, and a wrong barrier hangs."""
    name, _, value = switch.partition("=")
    chosen = "test_long_sequences and 128 and bfloat16 and (self or grouped or cross or causal or window or gelu)"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    environment = {**os.environ, name: value}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("activation", ELEMENTWISE)
def test_activations(activation: str, stale: None) -> None:
    check(Case(activation, LONG, dims=(64, 64), options={"activation": activation}), TARGET, torch.bfloat16)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("shared", [None, 9, 100, 150])
def test_a_bad_sequence_leaves_the_bits_of_all_others(bad: float, shared: int | None) -> None:
    case = Case("bad", LONG, num_shared_queries=shared, dims=(64, 64), extra_rows=3)
    clean = case.inputs(torch.bfloat16, "cuda")
    before = run(clean, BACKEND)
    start, end = clean.layout_kv.offsets[3:5].tolist()
    dirty = dataclasses.replace(clean, **{x: getattr(clean, x).clone() for x in ("q", "k", "v", "dout")})
    names = ("k", "v") if shared else ("q", "k", "v", "dout")
    for name in names:
        getattr(dirty, name)[start:end] = bad
        getattr(dirty, name)[-3:] = bad
    after = run(dirty, BACKEND)
    for name in before:
        if shared and name == "dq":
            continue
        rows = torch.ones(before[name].shape[0], dtype=torch.bool, device="cuda")
        if shared and name in ("out", "lse"):
            rows[3] = False
        else:
            rows[start:end] = False
        if name == "dq":
            # Sums of a sequence's key tiles in any order: the last bits may differ, but no NaN gets in.
            assert_within(name, after[name][rows].cpu(), before[name][rows].double().cpu(), before[name][rows].cpu())
        else:
            assert torch.equal(after[name][rows], before[name][rows]), name


def test_deterministic_broadcast_q_repeats_bit_for_bit() -> None:
    case = Case("deterministic", LONG * 20, num_shared_queries=64, dims=(64, 64), options={"deterministic": True})
    inputs = case.inputs(torch.bfloat16, "cuda")
    first, second = (run(inputs, BACKEND, **case.options) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_capture_serves_other_offsets(stale: None) -> None:
    case = Case("capture", LONG, dims=(64, 64), heads=(2, 2))
    inputs = case.inputs(torch.bfloat16, "cuda")
    offsets = inputs.layout_kv.offsets.clone()

    def step():
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = ja.jagged_attention(*leaves, offsets, backend=BACKEND)
        return out, *torch.autograd.grad(out, leaves, inputs.dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    total = int(offsets[-1])
    for cut in (total // 2, 1, 0, total):
        offsets.copy_(torch.linspace(0, cut, offsets.numel()).long())
        graph.replay()
        replayed = [x.clone() for x in results]
        for got, want in zip(replayed, step(), strict=True):
            torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


def test_two_streams_and_two_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    case = Case("threads", LONG * 4, dims=(64, 64))
    inputs = case.inputs(torch.bfloat16, "cuda")
    alone = run(inputs, BACKEND)

    def work(_: int) -> dict[str, torch.Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [run(inputs, BACKEND) for _ in range(20)]
            stream.synchronize()
        return results[-1]

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(work, range(2)):
            for name in ("out", "lse", "dk", "dv"):
                assert torch.equal(results[name], alone[name]), name
            torch.testing.assert_close(results["dq"], alone["dq"], atol=1e-2, rtol=1e-2)


def test_strided_inputs() -> None:
    rows = sum(LONG)
    base = torch.randn(rows, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
    layout = ja.JaggedLayout.from_lengths(torch.tensor(LONG, device="cuda"))
    fused = ja.jagged_attention(*base.unbind(1), layout, backend=BACKEND)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in base.unbind(1)]
    assert torch.equal(fused, ja.jagged_attention(*heads_first, layout, backend=BACKEND))
    odd = torch.randn(rows, 4 * 64 + 3, dtype=torch.bfloat16, device="cuda")[:, 1:257].view(rows, 4, 64)
    got = ja.jagged_attention(odd, odd, odd, layout, backend=BACKEND)
    assert torch.equal(got, ja.jagged_attention(*[odd.contiguous()] * 3, layout, backend=BACKEND))


@pytest.mark.parametrize("block", [64, 128, 2**30])
def test_tile_tables_are_those_of_pytorch_and_wait_for_nothing(block: int, stale: None) -> None:
    generator = torch.Generator().manual_seed(0)
    for batch in (0, 1, 31, 32, 1152, 5000):
        rows, costs = (torch.randint(0, 700, (batch,), generator=generator).cumsum(0) for _ in range(2))
        offsets = [torch.nn.functional.pad(x, (1, 0)).to("cuda", torch.int32) for x in (rows, costs)]
        sizes = [int(x[-1]) + 3 if batch else 3 for x in (rows, costs)]
        with no_waiting():
            got = torch.ops.jagged_attn.tile_table(*offsets, *sizes, block)
        assert torch.equal(got, tile_table(*offsets, *sizes, block))
