"""The benchmark command: its workloads are what they say, its gate refuses, its rows can be traced."""

import csv
import math
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from jagged_attn import Causal, Full, JaggedLayout, SlidingWindow, jagged_attention
from jagged_attn.backends import eager
from jagged_attn.bench import memory, plot
from jagged_attn.bench.__main__ import main
from jagged_attn.bench.contestants import PEERS, Backend, select_contestants
from jagged_attn.bench.gate import Gate
from jagged_attn.bench.problem import BACKWARD, BOTH, FORWARD, Problem, Solution, make_problem
from jagged_attn.bench.provenance import Provenance, collect_provenance
from jagged_attn.bench.report import COLUMNS, OK, WRONG, Row, exit_code
from jagged_attn.bench.timing import HostClock, Quantiles, time_calls
from jagged_attn.bench.workloads import WORKLOADS, Workload, select_workloads
from jagged_attn.testing.inputs import AttentionInputs

CPU = torch.device("cpu")
TRIAL = ["--scale", "small", "--repeats", "2", "--device", "cpu", "--no-memory"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Trials are so small that threads would only wait for one another.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(kind="self", mask=None, dtype=torch.float32, **changes) -> Problem:
    base = {"batch": 11, "longest_kv": 37, "num_heads": 3, "head_dim": 7}
    if kind == "cross":
        base["longest_q"] = 23
    if kind == "broadcast_q":
        base["num_shared_queries"] = 5
    if mask is not None:
        base["mask"] = mask
    return make_problem(Workload("test", kind, **(base | changes)), dtype, CPU, seed=3)


def with_lengths(lengths: list[int], heads: int = 2, dim: int = 5) -> Problem:
    rows = torch.tensor(lengths)
    layout = JaggedLayout.from_lengths(rows)
    q, k, v, dout = torch.randn(4, int(rows.sum()), heads, dim, generator=torch.Generator().manual_seed(5))
    workload = Workload("test", "self", len(lengths), max(lengths), num_heads=heads, head_dim=dim)
    return Problem(workload, AttentionInputs(q, k, v, layout, layout, dout), rows, rows)


# --- workloads


def test_default_workloads_are_the_promised_ones_on_each_device():
    on_gpu = [w.name for w in select_workloads([], "cuda")]
    assert {"self/512", "self/1024", "self/2048", "self/1024-dense", "cross/1024x256"} <= set(on_gpu)
    assert {f"broadcast_q/s{s}-kv2048" for s in (32, 64, 128, 256)} | {"broadcast_q/s128-kv512"} <= set(on_gpu)
    assert {"window/4096-w100", "overhead/self"} <= set(on_gpu)
    assert [w.name for w in select_workloads([], "cpu") if w.measures == "time"] == ["cpu/log_normal", "cpu/all-128"]


def test_what_a_gpu_should_be_fast_at_is_there_with_narrow_heads_too():
    wide = [w for w in WORKLOADS.values() if "cuda" in w.default_on and w.head_dim == 128]
    narrow = [w for name, w in WORKLOADS.items() if name.startswith("d64/")]
    assert len(narrow) == len(wide) >= 12
    for one, other in zip(narrow, wide, strict=True):
        assert one == replace(other, name=one.name, head_dim=64, default_on=())


@pytest.mark.parametrize("name", [n for n in WORKLOADS if not n.startswith("grid/broadcast_q")])
def test_every_workload_makes_a_problem_whose_parts_fit(name):
    problem = make_problem(WORKLOADS[name].small(), torch.float32, CPU, seed=0)
    x = problem.inputs
    assert x.layout_kv.validate_sync(x.k.shape[0]).num_sequences == problem.batch
    assert int(problem.lengths_kv.sum()) == x.k.shape[0] == x.v.shape[0]
    for tensor in (x.q, x.k, x.v, x.dout):
        assert tensor.isfinite().all()
        assert (tensor != 0).float().mean() > 0.999
    if problem.is_broadcast:
        assert x.dout.shape == (problem.batch, *x.q.shape)
    else:
        assert x.layout_q.validate_sync(x.q.shape[0])
        assert (x.layout_q is x.layout_kv) == (WORKLOADS[name].kind == "self")
        assert x.dout.shape == x.q.shape


@pytest.mark.parametrize(
    ("name", "mean", "spread"),
    [
        # U[1, max]: mean (max + 1) / 2, standard deviation max / sqrt(12).
        ("self/2048", 1024.5, 2048 / math.sqrt(12)),
        ("grid/self-1024-fill0.5", 512, 1024 / math.sqrt(12)),
        ("grid/self-1024-fill1", 1024, 0),
        ("grid/broadcast_q-s64-d128-kv4096-fill0.3", 0.3 * 4096, 0.6 * 4096 / math.sqrt(12)),
        ("self/1024-dense", 1024, 0),
    ],
)
def test_lengths_follow_their_rule(name, mean, spread):
    lengths, _ = WORKLOADS[name].draw_lengths(seed=0)
    assert abs(lengths.double().mean() - mean) <= 4 * spread / math.sqrt(len(lengths)) + 1
    assert lengths.max() <= WORKLOADS[name].longest_kv


def test_log_normal_lengths_have_the_median_and_the_cap():
    lengths, _ = WORKLOADS["cpu/log_normal"].draw_lengths(seed=0)
    # The median of n log-normal draws has a relative standard error of sigma sqrt(pi / 2 / n).
    assert abs(lengths.double().quantile(0.5) / 75 - 1) <= 4 * 0.83 * math.sqrt(math.pi / 2 / 256)
    assert lengths.min() >= 1
    assert lengths.max() <= 848


def test_globs_select_and_unknown_names_are_refused():
    assert [w.name for w in select_workloads(["broadcast_q/s128*"], "cpu")] == [
        "broadcast_q/s128-kv2048",
        "broadcast_q/s128-kv512",
    ]
    with pytest.raises(ValueError, match="--case must match"):
        select_workloads(["self/512", "nothing*"], "cpu")
    with pytest.raises(ValueError, match="--backend must be one of"):
        select_contestants(["fastest"], [], "cpu")
    with pytest.raises(ValueError, match="--peers must be one of"):
        select_contestants([], ["fa5"], "cpu")


@pytest.mark.parametrize("mask", [None, Causal(), SlidingWindow(3, 1), SlidingWindow(None, 2, "top_left")])
@pytest.mark.parametrize("kind", ["self", "cross", "broadcast_q"])
def test_useful_operations_count_the_pairs_that_the_mask_allows(kind, mask):
    problem = make(kind, mask)
    pairs = 0
    for len_q, len_kv in zip(problem.lengths_q.tolist(), problem.lengths_kv.tolist(), strict=True):
        for i in range(len_q):
            lo, hi = problem.workload.mask.key_range(i, len_q, len_kv)
            pairs += sum(lo <= j < hi for j in range(len_kv))
    assert problem.flops(FORWARD) == 2 * 3 * pairs * 2 * 7
    assert problem.flops(BACKWARD) == 2.5 * problem.flops(FORWARD)
    assert problem.flops(BOTH) == problem.flops(FORWARD) + problem.flops(BACKWARD)


def test_necessary_bytes_of_broadcast_q_hold_the_queries_once():
    problem = make("broadcast_q")
    row = 3 * 7 * 4
    kv, out, lse = 2 * problem.inputs.k.shape[0] * row, 11 * 5 * row, 11 * 5 * 3 * 4
    assert problem.bytes_moved(FORWARD) == 5 * row + kv + out + lse
    assert problem.bytes_moved(BACKWARD) == 2 * (5 * row + kv + out) + lse


def test_taking_sequences_leaves_their_rows():
    problem = with_lengths([3, 0, 4, 1])
    part = problem.take(torch.tensor([3, 1, 0]))
    assert part.lengths_kv.tolist() == [1, 0, 3]
    assert torch.equal(part.inputs.k, problem.inputs.k[[7, 0, 1, 2]])
    assert torch.equal(part.inputs.dout, problem.inputs.dout[[7, 0, 1, 2]])
    assert part.inputs.layout_q is part.inputs.layout_kv


def test_padding_puts_zeros_behind_each_sequence_and_unpadding_removes_them():
    problem = with_lengths([3, 0, 4, 1])
    padded = problem.pad_kv(problem.inputs.k)
    assert padded.shape == (4, 4, 2, 5)
    assert padded.count_nonzero() == problem.inputs.k.count_nonzero()
    assert torch.equal(problem.unpad_kv(padded), problem.inputs.k)
    assert torch.equal(padded[2], problem.inputs.k[3:7])


# --- contestants


@pytest.mark.parametrize("kind", ["self", "cross", "broadcast_q"])
@pytest.mark.parametrize("name", ["eager", "sdpa_masked", "sdpa_unmasked"])
def test_contestants_pass_the_gate(name, kind):
    problem = make(kind)
    contestant = PEERS.get(name) or Backend(name)
    if contestant.refusal(problem) is not None:
        assert (name, kind) == ("sdpa_unmasked", "broadcast_q")
        return
    posed = contestant.posed(problem)
    assert (posed is problem) == (name != "sdpa_unmasked")
    verdict = Gate(posed, sample=5).judge(contestant.attempt(posed).solve())
    assert verdict.passed, verdict.faults


def test_masked_sdpa_honours_a_window():
    problem = make(mask=SlidingWindow(4, 2))
    assert Gate(problem, sample=11).judge(PEERS["sdpa_masked"].attempt(problem).solve()).passed
    assert PEERS["sdpa_unmasked"].refusal(problem) == "has no mask"


def test_peers_for_cuda_refuse_a_cpu_in_words():
    for name in ("fa4", "varlen_attn"):
        assert PEERS[name].refusal(make()) == "runs on CUDA only"


@pytest.mark.parametrize("kind", ["self", "cross", "broadcast_q"])
@pytest.mark.parametrize("name", ["fa4", "varlen_attn"])
def test_packed_peers_are_fed_the_problem(name, kind, monkeypatch):
    mask = SlidingWindow(3, 2) if kind == "self" else None
    problem = make(kind, mask)

    def stand_in(q, k, v, cu_q, cu_kv, longest_q, longest_kv, window_size=None):
        assert cu_q.dtype == cu_kv.dtype == torch.int32
        assert (longest_q, longest_kv) == (int(cu_q.diff().max()), int(cu_kv.diff().max()))
        window = Full() if window_size is None else SlidingWindow(*window_size)
        return jagged_attention(q, k, v, cu_q, cu_kv, mask=window, backend="reference")

    def like_fa4(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **window):
        return stand_in(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **window), None

    monkeypatch.setattr("jagged_attn.bench.contestants._flash_attention_4", lambda: like_fa4)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    verdict = Gate(problem, sample=5).judge(PEERS[name].attempt(problem).solve())
    assert verdict.passed, verdict.faults


def test_a_padded_batch_of_many_gibibytes_is_refused():
    huge = Workload("test", "self", 3, 2**20, "constant", num_heads=4, head_dim=128)
    meta = torch.empty(3 * 2**20, 4, 128, device="meta")
    lengths = torch.full((3,), 2**20)
    layout = JaggedLayout.from_lengths(lengths)
    problem = Problem(huge, AttentionInputs(meta, meta, meta, layout, layout, meta), lengths, lengths)
    assert "GiB" in PEERS["sdpa_masked"].refusal(problem)


# --- gate


def spoil(solution: Solution, name: str, value: float, row: int = -1) -> Solution:
    tensor = getattr(solution, name).clone()
    tensor[row, ..., 0] = value
    return solution._replace(**{name: tensor})


@pytest.mark.parametrize("kind", ["self", "broadcast_q"])
@pytest.mark.parametrize("name", Solution._fields)
@pytest.mark.parametrize("value", [0.0, 0.3, math.nan, math.inf])
def test_gate_refuses_one_wrong_row_of_any_result(kind, name, value):
    problem = make(kind, lengths_kv="constant")
    gate, right = Gate(problem, sample=11), problem.solve("eager")
    assert gate.judge(right).passed
    verdict = gate.judge(spoil(right, name, value))
    assert not verdict.passed
    assert all(fault.startswith(name) for fault in verdict.faults)


def test_gate_refuses_another_dtype_shape_or_a_missing_mask():
    problem = make(mask=SlidingWindow(4, 2))
    gate, right = Gate(problem, sample=11), problem.solve("eager")
    assert "float64" in gate.judge(right._replace(dq=right.dq.double())).faults[0]
    assert "instead of" in gate.judge(right._replace(dv=right.dv[:-1])).faults[0]
    unmasked = Problem(make().workload, problem.inputs, problem.lengths_q, problem.lengths_kv)
    assert not gate.judge(unmasked.solve("eager")).passed


def test_gate_is_not_blinded_by_short_sequences():
    # Outputs of the longest sequences are small: against the error that the shortest are allowed, zeros would pass.
    lengths = [1] * 8 + [293] * 8
    problem = with_lengths(lengths).to(torch.bfloat16)
    gate, right = Gate(problem, sample=16), problem.solve("eager")
    assert gate.judge(right).passed
    spoiled = right.out.clone()
    spoiled[8:] *= 0.9
    assert not gate.judge(right._replace(out=spoiled)).passed


def test_gate_allows_what_is_left_of_terms_that_cancel():
    # With a single key dQ is 0, and a sum in another order leaves roundings of its terms.
    problem = with_lengths([1] * 8).to(torch.bfloat16)
    gate, right = Gate(problem, sample=8), problem.solve("reference")
    assert right.dq.abs().max() < 1e-5
    for left, passes in ((1e-7, True), (1e-4, False)):
        assert gate.judge(right._replace(dq=torch.full_like(right.dq, left))).passed is passes


def test_gate_sums_the_query_gradient_over_all_sequences():
    problem = make("broadcast_q")
    right = problem.solve("eager")
    all_but_one = problem.take(torch.arange(10)).solve("eager")
    assert not Gate(problem, sample=3).judge(right._replace(dq=all_but_one.dq)).passed


# --- the command


def test_a_run_prints_speeds_and_writes_rows_with_their_provenance(tmp_path, capsys):
    out, png = tmp_path / "deep" / "rows.csv", tmp_path / "chart.png"
    arguments = ["--case", "cpu/all-128", "overhead/self", *TRIAL, "--commit", "abc123", "--out", str(out)]
    assert main([*arguments, "--plot", str(png)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) == set(COLUMNS)
    assert {(r["workload"], r["contestant"], r["phase"]) for r in rows} >= {
        ("cpu/all-128", who, phase)
        for who in ("eager", "sdpa_masked", "sdpa_unmasked")
        for phase in (FORWARD, BACKWARD, BOTH)
    }
    for row in rows:
        assert row["status"] == OK, row["reason"]
        assert 0 < float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert row["torch"] == torch.__version__
        assert row["commit"] == "abc123"
        assert row["command"].startswith("python -m jagged_attn.bench --case cpu/all-128")
        assert row["device"].endswith("1 threads")
        assert row["date"].endswith("Z")
        assert row["scale"] == "small"
        assert float(row["error_of_allowed"]) <= 1
        assert all(0 < float(row[f"error_{x}"]) < 1e-5 for x in ("out", "dq", "dk", "dv"))
    ours = [r for r in rows if r["contestant"] == "eager" and r["workload"] == "cpu/all-128"]
    best = min(float(r["median_ms"]) for r in rows if r["phase"] == BOTH and r["contestant"] != "eager")
    both = next(r for r in ours if r["phase"] == BOTH)
    assert float(both["vs_best_peer"]) == pytest.approx(float(both["median_ms"]) / best, rel=1e-4)
    assert png.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "ceilings of this run" in printed
    assert "0 refused" in printed


@pytest.mark.parametrize("fault", ["forward", "backward", "raise"])
def test_a_wrong_backend_gets_no_speed_and_a_nonzero_exit(fault, tmp_path, capsys, monkeypatch):
    right_forward, right_backward = eager.forward, eager.backward

    def forward(q, k, v, geometry, spec):
        if fault == "raise":
            raise RuntimeError("out of luck")
        out, lse = right_forward(q, k, v, geometry, spec)
        if fault == "forward":
            out[-1] *= 1.05
        return out, lse

    def backward(*arguments):
        dq, dk, dv = right_backward(*arguments)
        if fault == "backward":
            dk[0] = 0.0
        return dq, dk, dv

    monkeypatch.setattr(eager, "forward", forward)
    monkeypatch.setattr(eager, "backward", backward)
    out = tmp_path / "rows.csv"
    assert main(["--case", "cpu/log_normal", *TRIAL, "--out", str(out)]) == 1
    with out.open() as file:
        rows = {r["contestant"]: r for r in csv.DictReader(file)}
    assert rows["eager"]["status"] == ("failed" if fault == "raise" else WRONG)
    assert rows["eager"]["median_ms"] == rows["eager"]["tflops"] == rows["eager"]["vs_best_peer"] == ""
    expected = {"forward": "out of", "backward": "dk of", "raise": "out of luck"}[fault]
    assert expected in rows["eager"]["reason"]
    assert rows["sdpa_masked"]["status"] == OK
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  eager"))
    assert ("FAILED" if fault == "raise" else "WRONG") in line


def test_nothing_measured_is_not_success(capsys):
    assert main(["--case", "self/512", "--backend", "triton", "--peers", "none", *TRIAL]) == 1
    assert "UNSUPPORTED" in capsys.readouterr().out


def test_a_wrong_peer_is_refused_but_does_not_fail_the_run():
    rows = [Row("w", "eager", True, FORWARD, OK), Row("w", "fa4", False, FORWARD, WRONG)]
    assert exit_code(rows) == 0
    assert exit_code([Row("w", "eager", True, FORWARD, WRONG), *rows]) == 1


@pytest.mark.parametrize(
    "arguments",
    [["--case", "nothing"], ["--device", "tpu"], ["--repeats", "0"], ["--peers", "fa5"], ["--dtype", "int8"]],
)
def test_bad_arguments_exit_with_2_and_name_the_option(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--device", "cpu"] if arguments[0] != "--device" else arguments)
    assert caught.value.code == 2
    assert arguments[0].removeprefix("--") in capsys.readouterr().err


def test_list_names_every_workload(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in WORKLOADS)


def test_without_matplotlib_the_command_says_so(capsys, monkeypatch, tmp_path):
    def missing(*arguments):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr("jagged_attn.bench.__main__.plot_rows", missing)
    arguments = ["--case", "cpu/all-128", "--peers", "none", *TRIAL, "--plot", str(tmp_path / "x.png")]
    assert main(arguments) == 0
    assert "no chart: No module named 'matplotlib'" in capsys.readouterr().out


def test_chart_refuses_rows_without_times(tmp_path):
    provenance = Provenance(*["x"] * 9)
    with pytest.raises(ValueError, match="rows must hold"):
        plot.plot_rows(tmp_path / "x.png", [Row("w", "eager", True, FORWARD, WRONG)], provenance)


# --- clocks, memory, provenance


def test_quantiles_are_those_of_the_samples():
    assert Quantiles.of([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]) == Quantiles(3.5, 2.0, 5.0, 6)


def test_call_overhead_counts_one_call():
    calls = []
    times = time_calls(lambda: calls.append(0), HostClock().wait, calls=50, batches=4)
    assert len(calls) == 50 * 5
    assert times.passes == 4
    assert 0 < times.median < 1


def test_peak_memory_of_a_process_grows_with_what_it_computes():
    peak = memory.peak_mib_cpu("cpu/all-128", "eager", torch.float32, seed=0, small=False)
    # Output and three gradients of [256 * 128, 4, 32] floats must exist at the end.
    assert peak >= 4 * 256 * 128 * 4 * 32 * 4 / 2**20


def test_a_failed_memory_process_is_reported_with_its_last_line(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nKeyError: 'no/such'\n")
    monkeypatch.setattr(memory.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(RuntimeError, match="KeyError: 'no/such'"):
        memory.peak_mib_cpu("no/such", "eager", torch.float32, seed=0, small=True)


def test_provenance_is_complete():
    arguments = ["--case", "self/*", "--out", "/home/somebody/rows.csv", "--plot=/home/somebody/chart.png"]
    found = collect_provenance(CPU, arguments, None)
    assert found.command == "python -m jagged_attn.bench --case 'self/*' --out rows.csv --plot=chart.png"
    assert found.torch == torch.__version__
    assert found.driver == ""
    assert found.commit
