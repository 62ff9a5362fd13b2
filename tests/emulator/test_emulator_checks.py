"""Each check reports what it is for, and stays silent on the kernel without the fault."""

from typing import Any, NamedTuple

import pytest
import torch
from tlx_kernels import small
from triton.tools.tensor_descriptor import TensorDescriptor

from jagged_attn.testing.emulator import HOUSE_RULES, Checks, EmulatorError, Launch, Schedule, Verdict, emulate

V = Verdict
SCHEDULES = [Schedule(p) for p in ("eager", "lazy", "round_robin")] + [Schedule("random", s) for s in range(5)]


class Subject(NamedTuple):
    """A kernel with its launch, made anew for each run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    want: torch.Tensor
    got: torch.Tensor
    cluster: int = 1
    scratch: tuple[str, ...] = ()


def _x(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(torch.float32)


def hand_over():
    x, y = _x(64, 32), torch.empty(64, 32)
    return Subject(
        small.hand_over, (1,), {"x": x, "desc_y": TensorDescriptor.from_tensor(y, [64, 32])}, ("desc_y",), x, y
    )


def ring():
    x, y = _x(80, 32), torch.empty(16, 32)
    arguments = {"desc_x": TensorDescriptor.from_tensor(x, [16, 32]), "y": y, "n": 5}
    return Subject(small.ring, (1,), arguments, ("y",), x.view(5, 16, 32).sum(0), y)


def products():
    a, b = (torch.randn(64, 64, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    y = torch.empty(64, 64)
    arguments = {
        "desc_a": TensorDescriptor.from_tensor(a, [64, 64]),
        "desc_b": TensorDescriptor.from_tensor(b, [64, 64]),
    }
    want = 2 * a.float() @ b.float() + a.float() @ b.float().T
    return Subject(small.products, (1,), {**arguments, "y": y}, ("y",), want, y)


def held_operand(how):
    a, b = _x(192, 64).to(torch.float32 if how == "rounded" else torch.bfloat16), _x(64, 64).bfloat16()
    y = torch.empty(192, 64)
    arguments = {
        "desc_a": TensorDescriptor.from_tensor(a, [64, 64]),
        "desc_b": TensorDescriptor.from_tensor(b, [64, 64]),
    }
    want = {"doubled": 4, "handed on": 3}.get(how, 2) * a.bfloat16().float() @ b.float()
    return Subject(small.held_operand, (1,), {**arguments, "y": y, "n": 3, "HOW": how}, ("y",), want, y)


def shifted():
    y = torch.empty(64, dtype=torch.int32)
    return Subject(small.shifted, (1,), {"y": y}, ("y",), (torch.arange(64) - 32 >> 1).int(), y)


def tensor_memory():
    a, b = _x(128, 64).bfloat16(), _x(64, 64).bfloat16()
    y = torch.empty(128, 64)
    arguments = {
        "desc_a": TensorDescriptor.from_tensor(a, [128, 64]),
        "desc_b": TensorDescriptor.from_tensor(b, [64, 64]),
    }
    want = (0.5 * a.float() @ b.float()).bfloat16().float() @ b.float()
    return Subject(small.tensor_memory, (1,), {**arguments, "y": y}, ("y",), want, y)


def pointers():
    x, y = _x(70), torch.empty(70)
    return Subject(small.pointers, (3,), {"x": x, "y": y, "n": 70}, ("y",), x, y)


def cp_async():
    x, y = _x(256), torch.empty(256)
    want = torch.where((torch.arange(256) >= 100) & (torch.arange(256) < 128), torch.tensor(7.0), x)
    return Subject(small.cp_async, (1,), {"x": x, "y": y}, ("y",), want, y)


def bulk():
    x, y = _x(128), torch.empty(128)
    return Subject(small.bulk, (1,), {"x": x, "y": y}, ("y",), x, y)


def multicast():
    x, y = _x(16, 32), torch.empty(2, 16, 32)
    arguments = {"desc_x": TensorDescriptor.from_tensor(x, [16, 32]), "y": y}
    return Subject(small.multicast, (2,), arguments, ("y",), torch.stack([x, x]), y, cluster=2)


def exchange(how):
    x, y = _x(2, 128), torch.empty(2, 128)
    return Subject(small.exchange, (2,), {"x": x, "y": y, "HOW": how}, ("y",), x.flip(0), y, cluster=2)


def relay():
    x, b, y = _x(256, 128).bfloat16(), _x(256, 64).bfloat16(), torch.empty(128, 64)
    arguments = {"x": x, "desc_b": TensorDescriptor.from_tensor(b, [128, 32]), "y": y}
    return Subject(small.relay, (2,), arguments, ("y",), x.float().T @ b.float(), y, cluster=2)


def launch_control():
    y = torch.empty(14, dtype=torch.int32)
    want = torch.tensor([s * (t + 1) for t in range(7) for s in (1, -1)], dtype=torch.int32)
    return Subject(small.launch_control, (7,), {"y": y, "PAIR": False}, ("y",), want, y)


def hand_out():
    y, slot = torch.empty(9, dtype=torch.int32), torch.empty(6, dtype=torch.int32)
    arguments = {"counter": torch.zeros(1, dtype=torch.int32), "slot": slot, "y": y, "n": 9}
    return Subject(
        small.hand_out, (3,), arguments, ("y",), torch.arange(1, 10, dtype=torch.int32), y, scratch=("slot",)
    )


def message(how):
    y = torch.empty(1)
    arguments = {"flag": torch.zeros(1, dtype=torch.int32), "data": torch.zeros(1), "y": y, "HOW": how}
    return Subject(small.message, (2,), arguments, ("y",), torch.tensor([42.0]), y)


def reduction():
    x, y = _x(4, 16, 32), torch.zeros(16, 32)
    return Subject(
        small.reduction, (4,), {"x": x, "desc_y": TensorDescriptor.from_tensor(y, [16, 32])}, (), x.sum(0), y
    )


def aliases():
    y = torch.empty(512)
    want = (torch.arange(256)[None] + 1000 * torch.arange(2)[:, None]).float().reshape(-1)
    return Subject(small.aliases, (1,), {"y": y}, ("y",), want, y)


def _run(make, fault, schedule, checks=HOUSE_RULES, **launch):
    subject = make()
    options = {"outputs": subject.outputs, "scratch": subject.scratch, "cluster": subject.cluster, "max_steps": 20_000}
    emulate(
        subject.kernel,
        subject.grid,
        {**subject.arguments, "FAULT": fault},
        Launch(schedule, checks, **options, **launch),
    )
    return subject


RIGHT = {
    **{
        f.__name__: f
        for f in (hand_over, ring, products, shifted, tensor_memory, pointers, cp_async, bulk, multicast, aliases)
    },
    **{f.__name__: f for f in (launch_control, hand_out, reduction, relay)},
    **{
        f"operand held {how}": lambda how=how: held_operand(how)
        for how in ("as loaded", "doubled", "rounded", "unrolled", "handed on")
    },
    **{f"exchange by {how}": lambda how=how: exchange(how) for how in ("store", "async store", "copy")},
    **{f"message by {how}": lambda how=how: message(how) for how in ("fence", "release")},
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_are_right_and_silent(name):
    for schedule in SCHEDULES:
        subject = _run(RIGHT[name], "", schedule)
        torch.testing.assert_close(subject.got, subject.want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("make", "fault", "expected"),
    [
        (hand_over, "no wait", {V.RACE, V.UNWRITTEN}),
        (hand_over, "early arrival", {V.RACE, V.UNWRITTEN, V.FENCE}),
        (hand_over, "wrong parity", {V.RACE, V.UNWRITTEN, V.LAPPED}),
        (hand_over, "never written", {V.UNWRITTEN}),
        (hand_over, "no fence", {V.FENCE}),
        (hand_over, "no store wait", {V.EXIT}),
        (hand_over, "no arrival", {V.DEADLOCK}),
        (hand_over, "double arrival", {V.OVERFLOW}),
        (hand_over, "no parity", {V.PHASE}),
        (ring, "no empty wait", {V.RACE, V.LAPPED, V.OVERFLOW}),
        (ring, "no release", {V.DEADLOCK}),
        (ring, "one load too many", {V.EXIT}),
        (ring, "too few bytes", {V.BYTES}),
        (ring, "too many bytes", {V.DEADLOCK}),
        (ring, "not armed", {V.DEADLOCK}),
        (products, "used in flight", {V.WGMMA}),
        (products, "wait off by one", {V.WGMMA}),
        (products, "another's wait", {V.WGMMA}),
        (lambda: held_operand("as loaded"), "early arrival", {V.RACE}),
        (lambda: held_operand("as loaded"), "cast to its own type", {V.RACE}),
        (lambda: held_operand("as loaded"), "cast there and back", {V.RACE}),
        (lambda: held_operand("as loaded"), "cast further and back", {V.RACE}),
        (lambda: held_operand("as loaded"), "changed in the loop", {V.RACE}),
        (lambda: held_operand("as loaded"), "written over", {V.RACE}),
        (tensor_memory, "no wait for S", {V.RACE, V.UNWRITTEN}),
        (tensor_memory, "P not written", {V.RACE, V.UNWRITTEN, V.VALUE}),
        (tensor_memory, "S reused too early", {V.RACE}),
        (tensor_memory, "accumulates", {V.UNWRITTEN}),
        (pointers, "no mask", {V.OUTSIDE}),
        (pointers, "tile of another CTA", {V.RACE}),
        (pointers, "twice", {V.OVERWRITTEN}),
        (pointers, "one short", {V.MISSING}),
        (cp_async, "wait off by one", {V.RACE}),
        (cp_async, "no last wait", {V.RACE}),
        (bulk, "no fence", {V.FENCE}),
        (multicast, "peer does not wait", {V.RACE, V.UNWRITTEN, V.EXIT}),
        (multicast, "peer not armed", {V.DEADLOCK}),
        (lambda: exchange("store"), "no cluster barrier", {V.RACE, V.UNWRITTEN, V.EXIT}),
        (lambda: exchange("async store"), "no wait", {V.RACE, V.UNWRITTEN, V.EXIT}),
        (lambda: exchange("copy"), "no wait", {V.RACE, V.UNWRITTEN, V.EXIT}),
        (lambda: exchange("copy"), "no fence", {V.FENCE}),
        (lambda: exchange("copy"), "leaves early", {V.EXIT}),
        (relay, "no wait", {V.RACE, V.UNWRITTEN}),
        (relay, "no fence", {V.FENCE}),
        (relay, "no relay", {V.DEADLOCK}),
        (relay, "no wait for the relay", {V.RACE, V.UNWRITTEN, V.FENCE}),
        (relay, "reads 64 rows", {V.UNSUPPORTED}),
        (hand_out, "slot reused too early", {V.RACE, V.LAPPED}),
        (lambda: message("fence"), "no fence", {V.RACE}),
        (lambda: message("release"), "relaxed", {V.RACE}),
        (reduction, "plain store", {V.RACE}),
        (aliases, "too small", {V.ALIAS}),
    ],
)
def test_fault_is_reported(make, fault, expected):
    found = set()
    for schedule in SCHEDULES:
        try:
            subject = _run(make, fault, schedule)
        except EmulatorError as error:
            found.add(error.verdict)
        else:
            if not torch.allclose(subject.got, subject.want, rtol=1e-2, atol=1e-2):
                found.add(V.VALUE)
    assert found
    assert found <= expected


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("pair", [False, True])
def test_launch_control_hands_out_what_has_not_started(pair, schedule):
    y = torch.empty(16, dtype=torch.int32)
    launch = Launch(schedule, HOUSE_RULES, cluster=1 + pair, resident=2 - pair, outputs=("y",))
    report = emulate(small.launch_control, (8,), {"y": y, "PAIR": pair, "FAULT": ""}, launch)
    assert y.tolist() == [s * (t + 1) for t in range(8) for s in (1, -1)]
    # One request for each of the eight tiles (or four pairs of tiles): the two CTAs that run ask for all others.
    assert report.ops["clc"] == (4 if pair else 8)


def test_launch_control_with_a_consumer_that_leaves_early():
    arguments = {"y": torch.empty(16, dtype=torch.int32), "PAIR": False, "FAULT": "one consumer fewer"}
    with pytest.raises(EmulatorError, match=r"DEADLOCK(.|\n)*clc_empty\[0\]: phase \d+, 1 of 2 arrivals pending"):
        emulate(small.launch_control, (8,), arguments, Launch(resident=2))


def test_races_are_found_without_luck():
    """Under a schedule that happens to give the right numbers, happens-before still reports the missing wait."""
    lucky = Schedule("eager")
    blind = Checks(races=False, fences=False, laps=False)
    subject = _run(ring, "no empty wait", Schedule("starve:task1"), blind)
    torch.testing.assert_close(subject.got, subject.want)
    with pytest.raises(EmulatorError, match=r"RACE|LAPPED"):
        _run(ring, "no empty wait", lucky)


def _add_up(fault, seed):
    sums, y = torch.full((16, 32), 2.0), torch.empty(16, 32)
    desc = TensorDescriptor.from_tensor(sums, [16, 32])
    arguments = {"desc_sum": desc, "sums": sums, "y": y, "FAULT": fault}
    emulate(small.add_up, (1,), arguments, Launch(Schedule("random", seed), outputs=("y",)))
    return y


@pytest.mark.parametrize("seed", range(4))
def test_a_sum_is_read_after_all_additions_are_in_memory(seed):
    assert (_add_up("", seed) == 3).all()
    for fault in ("only read", "no wait"):
        with pytest.raises(EmulatorError, match=r"RACE: desc_sum: .* is not ordered after"):
            _add_up(fault, seed)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ((232_449, 0, 4, 24), "232449 bytes of shared memory asked for, 232448 exist"),
        ((128, 513, 4, 24), "513 columns of tensor memory"),
        ((128, 0, 29, 24), "36 warps, 32 fit"),
        ((128, 0, 4, 250), "registers=250: a multiple of 8"),
        ((128, 0, 4, 264), "from 24 to 256"),
        ((128, 0, 8, 248), "leave 8 for the default task"),
    ],
)
def test_budgets(wanted, words):
    names = ("BYTES", "COLUMNS", "WARPS", "REGISTERS")
    with pytest.raises(EmulatorError, match=f"BUDGET.*{words}"):
        emulate(small.budget, (1,), {"y": torch.empty(1), **dict(zip(names, wanted, strict=True))})


def test_what_a_run_used_is_reported():
    arguments = {"y": torch.empty(1), "BYTES": 232_448, "COLUMNS": 65, "WARPS": 1, "REGISTERS": 24}
    report = emulate(small.budget, (1,), arguments)
    assert (report.shared_bytes, report.tensor_columns, report.warps) == (232_448, 128, 8)


def test_a_tensor_memory_alias_must_be_of_equal_size():
    emulate(small.reuse_of_unequal_size, (1,), {})
    with pytest.raises(EmulatorError, match="ALIAS"):
        emulate(small.reuse_of_unequal_size, (1,), {}, Launch(checks=HOUSE_RULES))


def test_a_reuse_group_cannot_be_assigned():
    with pytest.raises(EmulatorError, match=r"SHAPE.*reuse_group"):
        emulate(small.named_group, (1,), {})


def test_a_specialised_kernel_ends_with_a_barrier_of_the_cluster():
    def run(barrier, **checks):
        launch = Launch(Schedule("starve_cta:1", 0), Checks(**checks), cluster=2)
        return emulate(small.last_words, (2,), {"y": torch.empty(2), "BARRIER": barrier}, launch)

    with pytest.raises(EmulatorError, match=r"EXIT.*arrives at bar\[0\] of cta0, which has ended"):
        run(False)
    run(False, cluster_end=True)
    with pytest.raises(EmulatorError, match=r"REMOTE.*a cluster barrier in a specialised kernel hangs"):
        run(True, cluster_end=True)


@pytest.mark.parametrize("seed", range(4))
def test_an_arrival_in_another_cta_may_be_late(seed):
    def run(**checks):
        launch = Launch(Schedule("starve:remote", seed), Checks(**checks), cluster=2)
        emulate(small.last_words, (2,), {"y": torch.empty(2), "BARRIER": False}, launch)

    with pytest.raises(EmulatorError, match=r"EXIT.*arrives at bar\[0\] of cta0, which has ended"):
        run()
    # The barrier at the end of a cluster is reached after all that was sent before it.
    run(cluster_end=True)


def test_only_a_local_barrier_can_be_waited_for():
    with pytest.raises(EmulatorError, match=r"REMOTE.*only a local mbarrier"):
        emulate(small.remote_wait, (2,), {"y": torch.empty(1)}, Launch(cluster=2))


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("operation", r"tlx\.async_dot_scaled_more is not emulated"),
        ("known", r"tlx\.thread_id is not emulated"),
        ("ptx", r"inline PTX is not emulated: brev\.b32"),
    ],
)
def test_what_the_emulator_lacks_is_named_at_once(which, words):
    with pytest.raises(EmulatorError, match=f"UNSUPPORTED: {words}"):
        emulate(small.unknown, (1,), {"y": torch.zeros(1, dtype=torch.int32), "WHICH": which})


def test_a_function_cannot_ask_for_the_replica():
    with pytest.raises(EmulatorError, match=r"(?s)UNSUPPORTED.*replica_id\(\) in a function"):
        emulate(small.replica_in_a_function, (1,), {"y": torch.zeros(2)})


def test_an_unknown_keyword_is_named_at_once():
    with pytest.raises(TypeError, match="how"):
        emulate(small.unknown, (1,), {"y": torch.zeros(1, dtype=torch.int32), "WHICH": "keyword"})


def test_the_default_task_cannot_ask_for_registers():
    with pytest.raises(EmulatorError, match=r"BUDGET.*the default task gets what is left"):
        emulate(small.default_with_registers, (1,), {})


def test_strict_mma_takes_the_ptx_text_at_its_word():
    """S(i + 1) over P(i) relies on the queue being in order, which PTX promises only for one accumulator and shape."""
    subject = small_queue()
    emulate(*subject, Launch())
    with pytest.raises(EmulatorError, match=r"RACE: tmem"):
        emulate(*subject, Launch(checks=Checks(strict_mma=True)))


def small_queue():
    a, b, y = torch.randn(128, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.empty(128, 64)
    maps = {"desc_a": TensorDescriptor.from_tensor(a, [128, 64]), "desc_b": TensorDescriptor.from_tensor(b, [64, 64])}
    return small.queue_order, (1,), {**maps, "y": y}


def test_compiler_fences_make_a_missing_fence_harmless():
    """As fbtriton compiles it; the rules of this library still want it."""
    subject = _run(hand_over, "no fence", Schedule(), Checks())
    torch.testing.assert_close(subject.got, subject.want)


def test_clusters_that_cannot_be_resident_together_do_not_talk():
    arguments = {"flag": torch.zeros(1, dtype=torch.int32), "y": torch.zeros(1)}
    emulate(small.wait_for_next, (2,), arguments)
    arguments["flag"].zero_()
    with pytest.raises(EmulatorError, match=r"LIVELOCK(.|\n)*1 clusters wait for a free place: 1 are resident"):
        # CTA 0 waits for CTA 1, which starts only when CTA 0 has ended.
        emulate(small.wait_for_next, (2,), arguments, Launch(resident=1, max_steps=500))
