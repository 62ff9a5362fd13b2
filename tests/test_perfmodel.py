"""The performance model: hand-computed schedules, conservation of operations and bytes, and what it must not break."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import refusal

from jagged_attn import SlidingWindow, bench
from jagged_attn.bench.problem import BACKWARD, FORWARD, make_problem
from jagged_attn.bench.workloads import Workload
from jagged_attn.perfmodel import blackwell
from jagged_attn.perfmodel.__main__ import compare, main
from jagged_attn.perfmodel.hopper import Forward, ForwardItem, Keys, KeysItem, Queries, QueriesItem
from jagged_attn.perfmodel.machine import B200, H200
from jagged_attn.perfmodel.predict import Lengths, draw, hand_out, predict_backward, predict_forward
from jagged_attn.perfmodel.simulate import Barrier, Clock, Processor, Rates
from jagged_attn.schedule.hopper import ForwardConfig

# No latency, no waiting for shared memory, tensor cores at their peak: a schedule that can be added up by hand.
IDEAL = replace(
    H200, mma_efficiency=1, mma_latency=0, shared_bytes=1e12, shared_latency=0, barrier_latency=0, named_barrier=0,
    shuffle_latency=0, arithmetic_latency=0, tma_issue=10, l2_latency=100, memory_latency=100, global_latency=0,
)  # fmt: skip
DENSE = Workload("dense", "self", 3, 256, "constant", num_heads=2)
# More than those for which dQ is a kernel of its own.
MANY_KEYS = replace(DENSE, longest_kv=384)
MEMORY_BOUND = Workload("stream", "broadcast_q", 1152, 1024, "constant", num_shared_queries=64)


def problem(workload):
    return make_problem(workload, torch.bfloat16, torch.device("cpu"), 0)


def test_a_forward_item_of_one_block_takes_what_its_parts_take_one_after_the_other():
    sm = Processor(IDEAL, Rates(64, 64))
    config = ForwardConfig(64, 1, 2, 2, 208, turns=False)
    Forward(sm, config, "softmax", [ForwardItem(1, 1, kv_miss=0, q_miss=0, out_miss=0)], 0).start()
    sm.clock.run()
    # K, then Q, through the port after one issue; latency; 8 steps of 64 x 64 x 16; mask, maxima, exponentials, sums;
    # 4 steps of 64 x 128 x 16; the end's instructions; the store through the port.
    tile, product, arithmetic = 64 * 128 * 2 / 64, 8 * 32 + 4 * 64, 2 * 147 + 2 * 36 + 34 * 8 + 62 + 422
    assert sm.clock.now == pytest.approx(10 + 2 * tile + 100 + product + arithmetic + tile)


def test_a_product_waits_for_shared_memory_where_that_is_slower():
    slow = replace(IDEAL, shared_bytes=32)
    sm = Processor(slow, Rates(64, 64))
    done = sm.product(0, 64, 64, 128)
    sm.clock.run()
    # 4 KiB a step at 32 bytes a cycle; the last step's 32 cycles of tensor core come after its operands.
    assert done.fired
    assert sm.clock.now == pytest.approx(8 * 4096 / 32 + 32)


def test_two_groups_share_the_tensor_cores():
    sm = Processor(IDEAL, Rates(64, 64))
    for g in range(2):
        sm.product(g, 64, 128, 128)
    sm.clock.run()
    assert sm.clock.now == pytest.approx(2 * 8 * 64)


def test_a_barrier_refuses_an_arrival_too_many():
    barrier = Barrier(Clock(), 2, 0)
    barrier.arrive(0)
    barrier.arrive(0)
    with pytest.raises(RuntimeError, match="2 arrivals"):
        barrier.arrive(0)


def test_the_first_worker_that_is_free_gets_the_next_item():
    assert hand_out([5, 4, 3, 3, 1], 2) == 8


def test_forward_operations_and_bytes_are_those_of_the_problem():
    found, wanted = predict_forward(H200, DENSE, draw(DENSE)), problem(DENSE)
    lse = 4 * 3 * 256 * 2
    assert found.flop == pytest.approx(wanted.flops(FORWARD))
    assert found.memory_bytes == pytest.approx(wanted.bytes_moved(FORWARD) - lse)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_no_byte_of_padding_is_moved(kind):
    jagged = replace(DENSE, kind=kind, lengths_kv="uniform_from_one", longest_q=333 if kind == "cross" else 0, batch=17)
    found, wanted = predict_forward(H200, jagged, draw(jagged)), problem(jagged)
    lse = 4 * int(wanted.lengths_q.sum()) * 2
    assert found.memory_bytes == pytest.approx(wanted.bytes_moved(FORWARD) - lse)


def test_backward_operations_are_those_of_the_problem():
    found, wanted = predict_backward(H200, MANY_KEYS, draw(MANY_KEYS)), problem(MANY_KEYS)
    assert found.flop == pytest.approx(wanted.flops(BACKWARD))


def test_with_dq_apart_two_of_seven_products_are_made_anew():
    found, wanted = predict_backward(H200, DENSE, draw(DENSE)), problem(DENSE)
    assert found.flop == pytest.approx(wanted.flops(BACKWARD) * 7 / 5)


def test_backward_bytes_are_inputs_outputs_and_the_sum_of_dq():
    found = predict_backward(H200, MANY_KEYS, draw(MANY_KEYS))
    elements, statistics = 3 * 384 * 2 * 128, 2 * 4 * 3 * 384 * 2
    # Q, dO, K, V, dK, dV in two bytes, the sum read and written in four.
    assert found.memory_bytes == pytest.approx(elements * (6 * 2 + 2 * 4) + statistics)


def test_with_dq_apart_the_inputs_are_read_twice():
    found = predict_backward(H200, DENSE, draw(DENSE))
    elements, statistics = 3 * 256 * 2 * 128, 2 * 2 * 4 * 3 * 256 * 2
    # Q, dO, K and V for each kernel, dQ, dK and dV.
    assert found.memory_bytes == pytest.approx(elements * (2 * 4 + 3) * 2 + statistics)


@pytest.mark.parametrize("shared", [32, 64, 128])
def test_broadcast_q_backward_moves_its_bytes_once(shared):
    workload = replace(MEMORY_BOUND, batch=66, num_shared_queries=shared)
    found = predict_backward(H200, workload, draw(workload))
    # dO once for every chunk of 8 tiles of 64 keys.
    keys, queries = 66 * 1024 * 4 * 128, 66 * 2 * shared * 4 * 128
    assert found.memory_bytes == pytest.approx(2 * (4 * keys + queries))
    assert found.flop == pytest.approx(10.0 * 66 * 1024 * shared * 4 * 128)


@pytest.mark.parametrize(("predict", "phase"), [(predict_forward, FORWARD), (predict_backward, BACKWARD)])
def test_what_is_bound_by_memory_moves_its_bytes_at_the_speed_of_a_copy(predict, phase):
    found = predict(H200, MEMORY_BOUND, draw(MEMORY_BOUND))
    copy_ms = problem(replace(MEMORY_BOUND, batch=2)).bytes_moved(phase) * 576 / H200.memory_gb_per_s * 1e-6
    assert copy_ms <= found.ms <= 1.12 * copy_ms


def test_longer_sequences_take_longer():
    times = [
        predict(H200, w, draw(w)).ms
        for predict in (predict_forward, predict_backward)
        for longest in (64, 192, 448)
        for w in [replace(DENSE, batch=400, longest_kv=longest)]
    ]
    assert times[:3] == sorted(times[:3])
    assert times[3:] == sorted(times[3:])


@pytest.mark.parametrize(
    "changes",
    [
        {"mma_flop": 2048}, {"exponentials": 4}, {"shared_bytes": 64}, {"barrier_latency": 1000}, {"l2_latency": 3000},
        {"memory_gb_per_s": 400}, {"clock_ghz": 1.2}, {"processors": 66},
    ],
    ids=str,
)  # fmt: skip
def test_a_much_slower_part_makes_nothing_faster(changes):
    # A little slower may be a little faster: events change places, and groups fall into another step.
    workload = replace(DENSE, batch=200)
    slower, lengths = replace(H200, **changes), draw(workload)
    for predict in (predict_forward, predict_backward):
        assert predict(slower, workload, lengths).ms > predict(H200, workload, lengths).ms


@pytest.mark.parametrize(
    ("forward", "backward", "machine"),
    [(predict_forward, predict_backward, H200), (blackwell.predict_forward, blackwell.predict_backward, B200)],
)
def test_sequences_may_have_no_queries(forward, backward, machine):
    lengths = Lengths((0, 65, 0, 128), (64, 64, 1, 129))
    some = replace(DENSE, kind="cross", batch=4, longest_q=128)
    assert forward(machine, some, lengths).ms > 0
    assert backward(machine, some, lengths).ms > 0


def test_a_window_costs_less_than_what_it_hides():
    full = replace(DENSE, batch=40, longest_kv=1024)
    window = replace(full, mask=SlidingWindow(100, 100))
    for predict in (predict_forward, predict_backward):
        assert predict(H200, window, draw(window)).ms < predict(H200, full, draw(full)).ms


def test_no_role_waits_for_ever():
    for roles in (
        lambda sm: Forward(sm, ForwardConfig(128, 2, 2, 2, 232, turns=True), "softmax",
                           [ForwardItem(1, 1), ForwardItem(3, 2), ForwardItem(2, 1)], 0).start(),
        lambda sm: Keys(sm, "fast_gelu", [KeysItem(1), KeysItem(5), KeysItem(2)]).start(),
        lambda sm: Keys(sm, "softmax", [KeysItem(1), KeysItem(5), KeysItem(2)], sums=False).start(),
        lambda sm: Queries(sm, "softmax", [QueriesItem(1), QueriesItem(5, 1), QueriesItem(2)]).start(),
    ):  # fmt: skip
        sm = Processor(H200, Rates(32, 19))
        ended = roles(sm)
        sm.clock.run()
        assert all(signal.fired for signal in ended)


def test_blackwell_operations_are_those_of_the_problem():
    lengths = draw(DENSE)
    forward, backward = (
        blackwell.predict_forward(B200, DENSE, lengths),
        blackwell.predict_backward(B200, DENSE, lengths),
    )
    assert forward.flop == pytest.approx(problem(DENSE).flops(FORWARD))
    assert backward.flop == pytest.approx(problem(DENSE).flops(BACKWARD))


def test_every_number_has_a_source():
    for machine in (H200, B200):
        numbers = set(vars(machine)) - {"name", "sources"}
        assert set(machine.sources) >= numbers - ({"tensor_memory_bytes"} if machine is H200 else set())


def test_what_the_microbenchmark_writes_replaces_what_was_assumed(tmp_path):
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps({"date": "2026-12-01", "parameters": {"barrier_latency": 77.0}}))
    fitted = H200.fitted(path)
    assert fitted.barrier_latency == 77
    assert fitted.sources["barrier_latency"].startswith("measured: parameters.json")


def test_the_command_lists_the_parameters(capsys):
    main(["parameters", "--set", "barrier_latency=99"])
    assert "barrier_latency      99" in capsys.readouterr().out


HEADER = "workload,contestant,phase,status,median_ms,seed,ceiling_tflops,ceiling_gb_per_s"
FILES = {
    "words.txt": "not a table",
    "other.csv": f"{HEADER}\nself/512,triton,forward,ok,1,0,700,4000\n",
    "short.csv": f"{HEADER}\nself/512,tlx_hopper,forward,ok,1\n",
    "unknown.csv": f"{HEADER}\nself/5,tlx_hopper,forward,ok,1,0,700,4000\n",
    "zero.csv": f"{HEADER}\nself/512,tlx_hopper,forward,ok,0,0,700,4000\n",
    "list.json": "[1]",
    "text.json": '{"date": "x", "parameters": {"clock_ghz": "fast"}}',
}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("predict --csv nope", "--csv must be a CSV of the bench, got nope (No such file or directory)"),
        ("predict --csv .", "--csv must be a CSV of the bench, got . (Is a directory)"),
        ("predict --csv words.txt", "--csv must be a CSV of the bench, got words.txt (it has no forward or"),
        ("predict --csv other.csv", "got other.csv (it has no forward or backward of tlx_hopper)"),
        ("predict --csv short.csv", "got short.csv (TypeError: "),
        ("predict --csv unknown.csv", "got unknown.csv (self/5: there is no such workload)"),
        ("predict --csv zero.csv", "got zero.csv (self/512: time and ceilings must be positive)"),
        ("predict --csv bytes", "--csv must be a CSV of the bench, got bytes ("),
        ("parameters --parameters nope", "--parameters must be what `measure` wrote, got nope (No such file"),
        ("parameters --parameters words.txt", "--parameters must be what `measure` wrote, got words.txt (Expecting"),
        ("parameters --parameters list.json", "got list.json (it has no date and parameters)"),
        ("parameters --parameters text.json", "got text.json (clock_ghz must be a number, got fast)"),
        ("parameters --set foo=1", "--set must be NAME=VALUE, got foo=1 (foo is none of processors, clock_ghz, "),
        ("parameters --set x", "--set must be NAME=VALUE, got x (x is none of processors"),
        ("parameters --set clock_ghz=abc", "--set must be NAME=VALUE, got clock_ghz=abc (clock_ghz must be a number,"),
        ("parameters --set clock_ghz=0", "(clock_ghz must be finite and above 0, got 0)"),
        ("parameters --set tma_issue=-1", "(tma_issue must be finite and not negative, got -1)"),
        ("parameters --set clock_ghz=nan", "(clock_ghz must be finite and above 0, got nan)"),
        ("parameters --set processors=1.5", "(processors must be a whole number, got 1.5)"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(given, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    assert message in refusal(main, given.split(), capsys)


def test_rows_of_other_head_dims_are_left_out():
    row = {"contestant": "tlx_hopper", "status": "ok", "phase": FORWARD, "workload": "self/512", "seed": "0"}
    row |= {"median_ms": "1", "ceiling_tflops": "800", "ceiling_gb_per_s": "4200"}
    rows = [row, row | {"workload": "d64/self-512"}]
    assert [found.case for found in compare(H200, rows)] == ["self/512"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_without_a_gpu_is_refused(capsys):
    assert "measure must run on a CUDA GPU, got none" in refusal(main, ["measure"], capsys)


@pytest.mark.sweep
def test_eight_of_the_ten_cases_are_within_a_fifth():
    path = Path(bench.__path__[0]) / "results" / "h200_hopper.csv"
    with path.open() as file:
        found = list(compare(H200, list(csv.DictReader(file))))
    for phase in (FORWARD, BACKWARD):
        assert sum(c.counts for c in found if c.phase == phase) >= 8
