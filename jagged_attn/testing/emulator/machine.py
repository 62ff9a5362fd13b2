"""One emulated grid: CTAs, their tasks (greenlets), pending asynchronous operations, and the scheduler loop."""

from __future__ import annotations

import contextvars
import sys
from collections import deque
from collections.abc import Callable, Hashable
from types import FrameType
from typing import TYPE_CHECKING, Any

import greenlet

from .barriers import Mbarrier, Rendezvous
from .clocks import Access, Clock
from .errors import EmulatorError, Verdict
from .memory import SMEM, TMEM, Arena, Buffer
from .parameters import THREADS_PER_WARP, Checks
from .schedules import Chooser, Schedule

if TYPE_CHECKING:
    from .global_memory import GlobalMemory

# Files of kernels under emulation: the frames whose line numbers reports name.
KERNEL_FILES: set[str] = set()


def _kernel_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename not in KERNEL_FILES:
        frame = frame.f_back
    return frame


class Op:
    """An asynchronous operation: queued at issue, carried out when the schedule says so.

    Args:
        machine: The run.
        kind: Engine, one of ``schedules.ENGINES``.
        ctas: CTAs whose memory it touches; the first one issued it.
        clock: What happened before it; it is ordered with itself.
        queue: Operations of one queue complete in order.
        name: CTA that issued it, if not the first of ``ctas``.
    """

    def __init__(
        self, machine: Machine, kind: str, ctas: list[Cta], clock: Clock, queue: Hashable, name: str = ""
    ) -> None:
        self.number = machine.next_op()
        self.kind = kind
        self.clock = clock
        self.clock.ops |= 1 << self.number
        self.queue = queue
        self.where = f"{kind} of {machine.here()}"
        self.label = f"{name or ctas[0].name}.{kind}"
        self.done = False
        # Under what number its write to global memory is known, where that is another.
        self.written = self.number
        self.action: Callable[[], None] = lambda: None
        for cta in ctas:
            cta.issued |= 1 << self.number

    def access(self, buffer: Buffer, write: bool, generic: bool = False) -> None:
        """Check and record what it does to a buffer, some time between issue and completion."""
        history = buffer.arena.history
        record = Access(0, 0, self.number, write, False, generic, f"{self.where} ({buffer.name})")
        (history.write if write else history.read)(buffer.arena.cells(buffer.data), record, self.clock)


class Cta:
    """A thread block: its memories, barriers and, while it runs, its place in a cluster.

    Args:
        machine: The run.
        index: Linear index in the grid.
        position: Index in the grid, (x, y, z).
    """

    def __init__(self, machine: Machine, index: int, position: tuple[int, int, int]) -> None:
        self.machine = machine
        self.index = index
        self.position = position
        self.name = f"cta{index}"
        self.arenas = {s: Arena(s, f"{s} of {self.name}", machine.checks) for s in (SMEM, TMEM)}
        self.barriers: list[Mbarrier] = []
        self.barrier_groups: list[list[Mbarrier]] = []
        self.named: dict[int, Rendezvous] = {}
        self.cluster: list[Cta] = [self]
        # Everything that the tcgen05 queue was given, and phases that it completed.
        self.queue_clock = Clock()
        self.queue_phases: dict[int, int] = {}
        self.accumulators: list[tuple[Buffer, Clock]] = []
        self.issued = 0
        # Arrivals on their way to another CTA.
        self.arrivals: list[Op] = []
        self.started = False
        self.specialised = False
        self.ended = False

    @property
    def rank(self) -> int:
        """Rank in the cluster."""
        return self.cluster.index(self)


class Task:
    """One role of one CTA, in a greenlet of its own."""

    def __init__(self, machine: Machine, cta: Cta, role: str, body: Callable[[], None], clock: Clock) -> None:
        self.machine = machine
        self.cta = cta
        self.role = role
        self.name = self.label = f"{cta.name}.{role}"
        self.number = machine.next_task()
        self.clock = clock.copy()
        self.clock.tasks[self.number] = 1
        self.condition: Callable[[], bool] | None = None
        self.reason: Callable[[], str] = lambda: ""
        self.done = False
        self.warps = machine.num_warps
        self.replica: int | None = None
        # Phases that its own arrivals completed.
        self.completed_phases: dict[int, int] = {}
        self.wgmmas: list[Op] = []
        # Dynamic loops that it is in.
        self.loops = 0
        # Bulk groups whose source may still be read; whose writes are not known to be done.
        self.stores: list[Op] = []
        self.writes: list[Op] = []
        self.copies: list[Op] = []
        self.copy_groups: list[list[Op]] = []
        # For `fence("gpu")`: what was known at the last one, and what relaxed reads have seen since.
        self.published: Clock | None = None
        self.observed = Clock()
        self.greenlet = greenlet.greenlet(self._run(body), machine.loop)
        # numpy keeps its error state in a context variable, and a new greenlet would start without it.
        self.greenlet.gr_context = contextvars.copy_context()

    def _run(self, body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            body()
            self.done = True
            if self.stores and self.machine.checks.exits:
                text = f"{self.name} ends with a TMA store that may still read shared memory"
                raise EmulatorError(Verdict.EXIT, text)

        return run

    @property
    def threads(self) -> int:
        """Threads that take part in a barrier."""
        return self.warps * THREADS_PER_WARP

    def release(self) -> Clock:
        """What the task knows now, to be handed on; what it does from here on is a new epoch."""
        clock = self.clock.copy()
        self.clock.tasks[self.number] += 1
        return clock

    def line(self) -> str:
        """Where the task stands, as ``file:line``."""
        frame = _kernel_frame(self.greenlet.gr_frame)
        return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}" if frame else "?"


class Machine:
    """One run of one grid.

    Args:
        schedule: Interleaving.
        checks: Which checks run.
        num_warps: Warps of the default task.
        max_steps: Steps after which a run counts as livelocked.
        arch: 90 or 100 to refuse the other one's instructions.
    """

    current: Machine

    memory: GlobalMemory

    def __init__(
        self, schedule: Schedule, checks: Checks, num_warps: int, max_steps: int, arch: int | None = None
    ) -> None:
        self.arch = arch
        self.schedule = schedule
        self.checks = checks
        self.num_warps = num_warps
        self.max_steps = max_steps
        self.chooser = Chooser(schedule)
        self.loop = greenlet.getcurrent()
        self.tasks: list[Task] = []
        self.queues: dict[Hashable, deque[Op]] = {}
        self.task: Task | None = None
        self.steps = 0
        self.op_counts: dict[str, int] = {}
        # Clusters that have not started, for residency limits and for launch control.
        self.waiting_clusters: deque[list[Any]] = deque()
        self.live_clusters = 0
        self.warps = num_warps
        self._op_names: dict[int, str] = {}
        self._ops = 0
        self._task_count = 0
        self._barrier_count = 0

    def next_op(self) -> int:
        """A fresh operation number."""
        self._ops += 1
        return self._ops

    def describe_ops(self, numbers: int) -> str:
        """Where the operations of a bit set were issued."""
        return ", ".join(sorted({name for i, name in self._op_names.items() if numbers >> i & 1}))

    def note_warps(self, warps: int) -> None:
        """Remember the largest CTA."""
        self.warps = max(self.warps, warps)

    def next_task(self) -> int:
        """A fresh task number."""
        self._task_count += 1
        return self._task_count

    def next_barrier(self) -> int:
        """A fresh barrier number."""
        self._barrier_count += 1
        return self._barrier_count

    @property
    def running(self) -> Task:
        """The task that runs now."""
        if self.task is None:
            raise RuntimeError("this TLX operation was called outside a task of an emulated kernel")
        return self.task

    def here(self) -> str:
        """The running task and its source line."""
        frame = _kernel_frame(sys._getframe(1))
        where = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}" if frame else "?"
        return f"{self.task.name} at {where}" if self.task else where

    def fail(self, verdict: Verdict, text: str) -> EmulatorError:
        """An error that names the running task and line."""
        return EmulatorError(verdict, f"{self.here()}: {text}")

    def access(self, buffer: Buffer, write: bool, remark: str = "") -> None:
        """Check and record an access by the running task; ``remark`` goes into reports."""
        task, history = self.running, buffer.arena.history
        where = f"{self.here()} ({buffer.name}{remark})"
        record = Access(task.number, task.clock.tasks[task.number], 0, write, False, True, where)
        cells = buffer.arena.cells(buffer.data)
        if write:
            history.write(cells, record, task.clock)
        else:
            # Loads from tensor memory may find poison: rescaling an accumulator that the next product overwrites is in
            # use. Poison that is stored again does not count as written, see ``local_store``.
            history.read(cells, record, task.clock, tolerant=buffer.storage == TMEM)

    def issue(self, kind: str, ctas: list[Cta], clock: Clock, queue: Hashable = None) -> Op:
        """Make an operation of the running task; ``submit`` it once its action is set."""
        op = Op(self, kind, ctas, clock, queue if queue is not None else ("alone", self._ops))
        self._op_names[op.number] = op.where
        self.op_counts[kind] = self.op_counts.get(kind, 0) + 1
        return op

    def compiler_fence(self) -> None:
        """The proxy fence that the compiler puts before what the running task is about to issue."""
        if self.checks.compiler_fences:
            self.running.clock.fence()

    def submit(self, op: Op) -> None:
        """Queue an operation."""
        self.queues.setdefault(op.queue, deque()).append(op)

    def spawn(self, cta: Cta, role: str, body: Callable[[], None], clock: Clock) -> Task:
        """Start a task; it runs when chosen."""
        task = Task(self, cta, role, body, clock)
        self.tasks.append(task)
        return task

    def block(self, condition: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Let others run until ``condition`` holds."""
        task = self.running
        task.condition, task.reason = condition, reason
        self.loop.switch()

    def pause(self) -> None:
        """Let others run."""
        self.running.condition = None
        self.loop.switch()

    def run(self) -> None:
        """Run until every task has ended and every operation is complete."""
        while True:
            self.tasks = [t for t in self.tasks if not t.done]
            ops: list[Any] = [queue[0] for queue in self.queues.values()]
            if not self.tasks and not ops:
                return
            ready: list[Any] = [t for t in self.tasks if t.condition is None or t.condition()]
            if not ready and not ops:
                raise EmulatorError(Verdict.DEADLOCK, self._deadlock())
            self.steps += 1
            if self.steps > self.max_steps:
                raise EmulatorError(Verdict.LIVELOCK, f"{self.max_steps} steps\n{self._deadlock()}")
            self._step(self.chooser.choose(ready, ops))

    def _step(self, chosen: Any) -> None:
        if isinstance(chosen, Task):
            chosen.condition = None
            self.task = chosen
            chosen.greenlet.switch()
            self.task = None
            return
        queue = self.queues[chosen.queue]
        queue.popleft()
        if not queue:
            del self.queues[chosen.queue]
        chosen.action()
        chosen.done = True

    def _deadlock(self) -> str:
        lines = [f"  {t.name} at {t.line()} {t.reason() if t.condition else 'can run'}" for t in self.tasks]
        if self.waiting_clusters:
            lines.append(
                f"  {len(self.waiting_clusters)} clusters wait for a free place: {self.live_clusters} are resident"
            )
        return "no task can go on and no operation is pending\n" + "\n".join(lines)


def machine() -> Machine:
    """The run in progress."""
    return Machine.current
