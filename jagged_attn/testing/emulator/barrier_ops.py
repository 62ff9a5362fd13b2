"""TLX operations on barriers and clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from .barriers import BarrierArray, Mbarrier, Rendezvous
from .errors import Verdict
from .machine import Cta, Machine, Op, machine
from .memory import SMEM
from .numerics import is_true, tensor, unwrap
from .parameters import NAMED_BARRIERS, THREADS_PER_WARP

_BARRIER_BYTES = 8


def alloc_barriers(
    num_barriers: Any, arrive_count: Any = 1, _name: str = "barrier", _threads: bool = False
) -> BarrierArray:
    """Allocate mbarriers that complete a phase at ``arrive_count`` arrivals."""
    run, count = machine(), int(unwrap(num_barriers))
    cta = run.running.cta
    cta.arenas[SMEM].allocate(_BARRIER_BYTES * count, _BARRIER_BYTES)
    arrivals = int(unwrap(arrive_count))
    if arrivals < 1:
        raise run.fail(Verdict.SHAPE, f"{_name}: an mbarrier needs a count of at least 1, got {arrivals}")
    made = [Mbarrier(run.next_barrier(), f"{_name}[{i}]", arrivals, cta, _threads) for i in range(count)]
    cta.barriers += made
    cta.barrier_groups.append(made)
    return BarrierArray(made)


def alloc_warp_barrier(
    num_barriers: Any, num_warps: Any = 1, num_arrivals: Any = 1, _name: str = "barrier"
) -> BarrierArray:
    """Allocate mbarriers at which every thread arrives for itself."""
    count = THREADS_PER_WARP * int(unwrap(num_warps)) * int(unwrap(num_arrivals))
    return alloc_barriers(num_barriers, count, _name=_name, _threads=True)


def in_cta(barrier: Mbarrier, cta: Cta) -> Mbarrier:
    """The barrier at the same place in another CTA of the cluster."""
    if barrier.cta is cta:
        return barrier
    for number, group in enumerate(barrier.cta.barrier_groups):
        if barrier in group:
            _await_start(cta, number)
            return cta.barrier_groups[number][group.index(barrier)]
    raise machine().fail(Verdict.REMOTE, f"{barrier.name} is not a barrier of this cluster")


def _await_start(cta: Cta, number: int) -> None:
    """Behind the initialisation of mbarriers the compiler puts a barrier of the cluster."""
    if len(cta.barrier_groups) <= number:
        machine().block(lambda: len(cta.barrier_groups) > number, lambda: f"waits for {cta.name} to start")


def by_rank(rank: Any) -> Cta:
    """A CTA of the running task's cluster."""
    cluster, number = machine().running.cta.cluster, int(unwrap(rank))
    if not 0 <= number < len(cluster):
        raise machine().fail(Verdict.REMOTE, f"rank {number} in a cluster of {len(cluster)}")
    return cluster[number]


def remote_view(local_allocated_buffer: Mbarrier, remote_cta_rank: Any) -> Mbarrier:
    """The same barrier in another CTA."""
    return in_cta(local_allocated_buffer, by_rank(remote_cta_rank))


def barrier_expect_bytes(bar: Mbarrier, size: Any, pred: Any = None) -> None:
    """Await ``size`` bytes in this phase, and arrive once."""
    if is_true(pred):
        bar.expect(int(unwrap(size)))
        _arrive(bar, 1)
        machine().pause()


def _arrive(bar: Mbarrier, count: int) -> None:
    """Arrive for the running task; whoever completes a phase knows that it is complete, and keeps that to itself."""
    task, before = machine().running, bar.phase
    bar.arrive(task.release(), count, machine().here())
    if bar.phase > before:
        task.completed_phases[bar.number] = bar.phase


def barrier_wait(bar: Mbarrier, phase: Any, pred: Any = None) -> None:
    """Wait until the phase of this parity has completed."""
    if not is_true(pred):
        return
    run, parity = machine(), int(unwrap(phase))
    task, who = run.running, run.here()
    if parity not in (0, 1):
        raise run.fail(Verdict.PHASE, f"parity {parity} of {bar.name}")
    if bar.cta is not task.cta:
        raise run.fail(
            Verdict.REMOTE, f"waits for {bar.name} of {bar.cta.name}: only a local mbarrier can be waited for"
        )
    known = max(task.clock.phases.get(bar.number, 0), task.completed_phases.get(bar.number, 0))
    needed = bar.phases_needed(known, parity)

    def ready() -> bool:
        bar.check_lap(needed, parity, who)
        return bar.open_to(parity)

    run.block(ready, lambda: f"waits for parity {parity} of {bar.name}: {bar.state}")
    task.clock.join(bar.completed)


def barrier_arrive(bar: Mbarrier, arrive_count: Any = 1, remote_cta_rank: Any = None, pred: Any = None) -> None:
    """Arrive; at a warp barrier, once for each thread of the task. By rank, some time later, as from another CTA."""
    if not is_true(pred):
        return
    run = machine()
    target = bar if remote_cta_rank is None else in_cta(bar, by_rank(remote_cta_rank))
    count = int(unwrap(arrive_count)) * (run.running.threads if target.per_thread else 1)
    if remote_cta_rank is None:
        _arrive(target, count)
    else:
        _arrive_later(target, count)
    run.pause()


def _arrive_later(target: Mbarrier, count: int) -> None:
    """Send an arrival to another CTA: those of a task may overtake each other."""
    run, known, who = machine(), machine().running.release(), machine().here()
    # Not a memory access: nothing has to wait for the arrival itself but the end of the cluster.
    op = Op(run, "remote", [], known, ("alone", run.next_op()), run.running.cta.name)
    sent = run.running.cta.arrivals

    def finish() -> None:
        sent.remove(op)
        target.arrive(known, count, who)

    op.action = finish
    sent.append(op)
    run.submit(op)


def _named(bar: Any, arrive_count: Any, wait: bool) -> None:
    run, number, expected = machine(), int(unwrap(bar)), int(unwrap(arrive_count))
    task = run.running
    if not 0 <= number < NAMED_BARRIERS:
        raise run.fail(Verdict.OUTSIDE, f"named barrier {number} of {NAMED_BARRIERS}")
    meeting = task.cta.named.setdefault(number, Rendezvous())
    generation = meeting.arrive(task, task.threads, expected, f"named barrier {number}")
    if wait:
        text = f"waits at named barrier {number}"
        run.block(
            lambda: meeting.generation != generation, lambda: f"{text}: {meeting.here} of {expected} threads are there"
        )
        task.clock.join(meeting.released)
    else:
        run.pause()


def named_barrier_wait(bar: Any, arrive_count: Any) -> None:
    """Arrive at a named barrier and wait for the rest."""
    _named(bar, arrive_count, True)


def named_barrier_arrive(bar: Any, arrive_count: Any) -> None:
    """Arrive at a named barrier without waiting."""
    _named(bar, arrive_count, False)


def cluster_barrier() -> None:
    """Wait for every CTA of the cluster."""
    run = machine()
    if run.running.cta.specialised:
        text = "a cluster barrier in a specialised kernel hangs: the warps of its tasks arrive once, at the end"
        raise run.fail(Verdict.REMOTE, text)
    meet_cluster(run)


def meet_cluster(run: Machine) -> None:
    """Wait for every CTA of the cluster, one task each; arrivals that it sent are there before it is."""
    cluster, sent = run.running.cta.cluster, run.running.cta.arrivals
    if sent:
        run.block(lambda: not sent, lambda: f"waits for {len(sent)} arrivals on their way")
    meeting = cluster[0].named.setdefault(-1, Rendezvous())
    generation = meeting.arrive(run.running, 1, len(cluster), "the cluster barrier")
    text = "waits at the cluster barrier"
    run.block(
        lambda: meeting.generation != generation, lambda: f"{text}: {meeting.here} of {len(cluster)} CTAs are there"
    )
    run.running.clock.join(meeting.released)


def fence_mbarrier_init_cluster() -> None:
    """Make the initialisation of mbarriers visible to the cluster; here it always is."""


def cluster_cta_rank() -> tl.tensor:
    """Rank of this CTA in its cluster."""
    return tensor(np.array(machine().running.cta.rank, np.int32), tl.int32)


def cluster_size_1d() -> tl.tensor:
    """CTAs of the cluster."""
    return tensor(np.array(len(machine().running.cta.cluster), np.int32), tl.int32)
