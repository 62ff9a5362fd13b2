"""Cluster launch control (sm_100): running clusters take over the work of clusters that have not started."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from .barrier_ops import alloc_barriers, barrier_arrive, barrier_expect_bytes, barrier_wait, in_cta
from .barriers import BarrierArray
from .buffer_ops import fence, local_alloc
from .machine import machine
from .memory import Buffer
from .numerics import tensor, unwrap

_RESPONSE_BYTES = 16


class Context:
    """Responses and their barriers, one set a stage."""

    def __init__(self, empty: BarrierArray, full: BarrierArray, responses: Buffer) -> None:
        self.empty = empty
        self.full = full
        self.responses = responses


def clc_create_context(num_consumers: Any, num_stages: Any = 1) -> Context:
    """Allocate responses and barriers for ``num_consumers`` readers."""
    stages = int(unwrap(num_stages))
    empty = alloc_barriers(stages, num_consumers, _name="clc_empty")
    full = alloc_barriers(stages, 1, _name="clc_full")
    return Context(empty, full, local_alloc((4,), tl.int32, stages, _name="clc_response"))


def clc_producer(context: Context, p_producer: Any = None, multi_ctas: Any = False, k: Any = 0) -> None:
    """Ask for one more cluster's work; the answer lands in every CTA of this one."""
    run = machine()
    cta = run.running.cta
    first = cta.rank == 0
    shared = bool(unwrap(multi_ctas))
    barrier_wait(context.empty[k], p_producer, pred=first if shared else None)
    barrier_expect_bytes(context.full[k], _RESPONSE_BYTES)
    if shared and not first:
        return
    _issue(context, k, shared)


def _issue(context: Context, k: Any, shared: bool) -> None:
    run = machine()
    cta = run.running.cta
    ctas = cta.cluster if shared else [cta]
    signals = [in_cta(context.full[k], c) for c in ctas]
    op = run.issue("clc", ctas, run.running.release())
    answers = [context.responses[k].at(c) for c in ctas]
    for answer in answers:
        op.access(answer, write=True)

    def finish() -> None:
        taken = run.waiting_clusters.popleft() if run.waiting_clusters else None
        first = (-1, -1, -1) if taken is None else taken[0].position
        for answer, signal in zip(answers, signals, strict=True):
            answer.data[...] = (*first, 0)
            signal.complete(op.clock, _RESPONSE_BYTES, op.where)

    op.action = finish
    run.submit(op)
    run.pause()


def clc_consumer(
    context: Context, p_consumer: Any = None, multi_ctas: Any = False, k: Any = 0, return_3d: Any = False
) -> Any:
    """The next tile, -1 when there is none left, and then without an arrival at the empty barrier."""
    run = machine()
    rank = run.running.cta.rank
    barrier_wait(context.full[k], p_consumer)
    answer = context.responses[k]
    run.access(answer, write=False)
    x, y, z = (int(v) for v in answer.data[:3])
    fence("async_shared")
    if x >= 0:
        x += rank
        barrier_arrive(context.empty[k], 1, remote_cta_rank=0 if unwrap(multi_ctas) else None)
    values = tuple(tensor(np.array(v, np.int32), tl.int32) for v in (x, y, z))
    return values if unwrap(return_3d) else values[0]
