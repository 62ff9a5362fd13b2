"""Asynchronous matrix products: wgmma (sm_90) and tcgen05 (sm_100, one CTA or a pair)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl

from .barrier_ops import in_cta
from .barriers import Mbarrier
from .clocks import Clock
from .errors import EmulatorError, Verdict
from .machine import Cta, Op, machine
from .memory import SMEM, TMEM, Buffer
from .numerics import Handle, PendingHandle, decode, is_true, raw_data, unwrap
from .parameters import TENSOR_LANES


def async_dot(
    A: Any,
    B: Buffer,
    acc: Any = None,
    use_acc: Any = None,
    pred: Any = None,
    mBarriers: Sequence[Mbarrier] = (),
    two_ctas: bool = False,
    force_async: bool = False,
    input_precision: Any = None,
    out_dtype: Any = tl.float32,
) -> Any:
    """Multiply: into tensor memory through the tcgen05 queue, or into registers through the task's wgmma queue."""
    a_shape, b_shape = list(A.shape), B.shape
    if int(unwrap(a_shape[1])) != b_shape[0]:
        raise machine().fail(Verdict.SHAPE, f"a product of {a_shape} and {b_shape}")
    if not isinstance(B, Buffer) or B.storage != SMEM:
        raise machine().fail(Verdict.SHAPE, "operand B must lie in shared memory")
    if isinstance(acc, Buffer):
        if is_true(pred):
            _tcgen05(A, B, acc, use_acc, list(mBarriers), bool(unwrap(two_ctas)), bool(unwrap(force_async)))
        return None
    if mBarriers or two_ctas:
        raise machine().fail(Verdict.SHAPE, "mBarriers and two_ctas need an accumulator in tensor memory")
    if use_acc is not None and not is_true(use_acc):
        raise machine().fail(Verdict.SHAPE, "fbtriton ignores use_acc on sm_90: pass a zero accumulator, or none")
    return _wgmma(A, B, acc)


def _wgmma(A: Any, B: Buffer, acc: tl.tensor | None) -> tl.tensor:
    run = machine()
    if run.arch == 100:
        raise run.fail(Verdict.SHAPE, "on sm_100 the accumulator of async_dot must lie in tensor memory")
    task = run.running
    m, n = int(unwrap(A.shape[0])), B.shape[1]
    if m % 64 or n % 8 or n > 256 * task.warps // 4:
        raise run.fail(Verdict.SHAPE, f"a wgmma of {m} rows and {n} columns")
    run.compiler_fence()
    op = run.issue("wgmma", [task.cta], task.release(), ("wgmma", task.number))
    for operand in (A, B):
        if isinstance(operand, Buffer):
            op.access(operand, write=False)
    left = None if isinstance(A, Buffer) else np.array(A.handle.data)
    out = np.full((m, n), np.nan, np.float32)
    base = None if acc is None else raw_data(acc)

    def finish() -> None:
        a = decode(A.data if left is None else left, A.dtype)
        product = a @ decode(B.data, B.dtype)
        out[...] = product if base is None else product + base

    op.action = finish
    run.submit(op)
    task.wgmmas.append(op)
    run.pause()
    handle = PendingHandle(out, op, op.where)
    return tl.tensor(handle, tl.block_type(tl.float32, [m, n]))


def async_dot_wait(pendings: Any, inp: tl.tensor) -> tl.tensor:
    """Wait until at most ``pendings`` products of this task are in flight; ``inp`` becomes usable if it is not."""
    run = machine()
    task, left = run.running, int(unwrap(pendings))
    finished = task.wgmmas[: max(0, len(task.wgmmas) - left)]
    run.block(lambda: all(op.done for op in finished), lambda: f"waits for wgmma: {len(task.wgmmas)} in flight")
    for op in finished:
        task.clock.join(op.clock)
    task.wgmmas = task.wgmmas[len(finished) :]
    handle = inp.handle
    if isinstance(handle, PendingHandle) and task.clock.knows_op(handle.op.number):
        return tl.tensor(Handle(handle.raw, tl.float32), inp.type)
    return inp


def _pair(run: Any, two_ctas: bool) -> list[Cta]:
    """The CTAs that a tcgen05 operation works for; none, if another one leads."""
    cta = run.running.cta
    if not two_ctas:
        return [cta]
    if len(cta.cluster) < 2:
        raise run.fail(Verdict.SHAPE, "two_ctas in a cluster of one")
    # The compiler predicates the instruction to the leader of the pair.
    return [] if cta.rank % 2 else cta.cluster[cta.rank : cta.rank + 2]


def _check_tcgen05(run: Any, A: Any, B: Buffer, acc: Buffer, pair: int) -> None:
    if run.arch == 90:
        raise run.fail(Verdict.SHAPE, "sm_90 has no tensor memory")
    m, n = A.shape[0], B.shape[1] * pair
    if (
        not isinstance(A, Buffer)
        or acc.storage != TMEM
        or acc.shape != [m, n]
        or m not in (TENSOR_LANES // 2, TENSOR_LANES)
    ):
        raise run.fail(Verdict.SHAPE, f"a tcgen05 product of {A.shape} and {B.shape} x {pair} CTAs into {acc.shape}")
    if acc.halved != (pair > 1 and m < TENSOR_LANES) or (acc.halved and A.storage == TMEM):
        text = "64 rows a CTA, in a cluster: a product of a pair, with its left operand in shared memory, is emulated"
        raise run.fail(Verdict.UNSUPPORTED, text)
    if A.storage == TMEM:
        if A.data.strides[1] != A.data.itemsize:
            raise run.fail(Verdict.SHAPE, "an operand in tensor memory cannot be transposed")
        if np.shares_memory(A.data, acc.data):
            raise run.fail(Verdict.RACE, f"the accumulator {acc.name} overlaps operand {A.name}")


def _tcgen05(
    A: Any, B: Buffer, acc: Buffer, use_acc: Any, barriers: list[Mbarrier], two_ctas: bool, force: bool
) -> None:
    run = machine()
    ctas = _pair(run, two_ctas)
    if not ctas:
        return
    _check_tcgen05(run, A, B, acc, len(ctas))
    accumulate = is_true(use_acc)
    op = _queue_op(run, ctas, acc)
    lefts, rights, outs = ([x.at(cta) for cta in ctas] for x in (A, B, acc))
    for operand in lefts + rights:
        op.access(operand, write=False)
    for out in outs:
        if accumulate:
            op.access(out, write=False)
        op.access(out, write=True)
    cta = ctas[0]
    cta.queue_clock.join(op.clock)
    cta.accumulators.append((acc, op.clock))
    known = cta.queue_clock.copy()
    signals = [in_cta(b, c) for b in barriers for c in ctas]

    def finish() -> None:
        right = np.concatenate([decode(b.data, b.dtype) for b in rights], 1)
        for left, out in zip(lefts, outs, strict=True):
            product = (decode(left.data, left.dtype) @ right).reshape(out.data.shape)
            out.data[...] = out.data + product if accumulate else product
        _signal(cta, signals, known, op.where)

    op.action = finish
    run.submit(op)
    if barriers or force:
        run.pause()
    else:
        run.block(lambda: op.done, lambda: "waits for a synchronous product")
        run.running.clock.join(op.clock)


def _queue_op(run: Any, ctas: list[Cta], acc: Buffer) -> Op:
    """A product, ordered after earlier ones of its queue."""
    cta = ctas[0]
    run.compiler_fence()
    op: Op = run.issue("mma", ctas, run.running.release(), ("tcgen05", cta.index))
    if not run.checks.strict_mma:
        op.clock.join(cta.queue_clock)
        return op
    for other, clock in cta.accumulators:
        if other.shape == acc.shape and np.shares_memory(other.data, acc.data):
            op.clock.join(clock)
    return op


def _signal(cta: Cta, barriers: list[Mbarrier], known: Clock, where: str) -> None:
    """Arrive at barriers with what the queue knows, which includes the phases that it completed itself."""
    for number, phase in cta.queue_phases.items():
        known.phases[number] = max(phase, known.phases.get(number, 0))
    for barrier in barriers:
        barrier.arrive(known, 1, where)
        cta.queue_phases[barrier.number] = barrier.phase


def tcgen05_commit(mBarrier: Mbarrier, two_ctas: bool = False) -> None:
    """Arrive at ``mBarrier`` (of both CTAs of a pair) when every earlier product of the queue is complete."""
    run = machine()
    ctas = _pair(run, bool(unwrap(two_ctas)))
    if not ctas:
        return
    cta = ctas[0]
    known = cta.queue_clock.copy()
    # Not a memory access: nothing has to wait for the commit itself.
    op = Op(run, "mma", [], known, ("tcgen05", cta.index), cta.name)
    signals = [in_cta(mBarrier, c) for c in ctas]
    op.action = lambda: _signal(cta, signals, known, f"commit of {op.where}")
    run.submit(op)
    run.pause()


def async_dot_scaled(*args: Any, **kwargs: Any) -> None:
    """Refuse: MX formats are not emulated."""
    raise EmulatorError(Verdict.UNSUPPORTED, "tlx.async_dot_scaled is not emulated")
