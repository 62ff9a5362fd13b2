"""Run a TLX kernel in the emulator."""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import greenlet
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from . import scalars
from .barrier_ops import meet_cluster
from .clocks import Clock
from .errors import EmulatorError, Verdict
from .global_memory import GlobalMemory
from .machine import Cta, Machine, Task
from .memory import SMEM, TMEM
from .numerics import Builder, Handle, semantic
from .parameters import Checks
from .rewrite import Program, base_function
from .schedules import Schedule

SCHEDULE_VARIABLE = "EMULATOR_SCHEDULE"
_MAX_STEPS = 2_000_000


@dataclass
class Report:
    """What a run without findings used.

    Args:
        schedule: The interleaving.
        steps: Scheduler steps.
        ops: Asynchronous operations by engine.
        shared_bytes: Shared memory of a CTA, a lower bound: the compiler adds scratch and alignment.
        tensor_columns: Columns of tensor memory, rounded to a power of two.
        warps: Warps of a CTA.
    """

    schedule: Schedule
    steps: int = 0
    ops: dict[str, int] = field(default_factory=dict)
    shared_bytes: int = 0
    tensor_columns: int = 0
    warps: int = 0


@dataclass(frozen=True)
class Launch:
    """How to run: everything about a launch that is not a kernel argument.

    Args:
        schedule: Interleaving; the environment variable ``EMULATOR_SCHEDULE`` overrides it.
        checks: Which checks run.
        cluster: CTAs of a cluster.
        resident: Clusters that run at a time; None for all.
        outputs: Arguments of which every element is to be written once; they are poisoned first.
        scratch: Arguments that the caller has not filled; they are poisoned first.
        num_warps: Warps of the default task.
        arch: 90 or 100, to refuse the other's instructions.
        max_steps: Steps after which a run counts as livelocked.
    """

    schedule: Schedule = field(default_factory=Schedule)
    checks: Checks = field(default_factory=Checks)
    cluster: int = 1
    resident: int | None = None
    outputs: Sequence[str] = ()
    scratch: Sequence[str] = ()
    num_warps: int = 4
    arch: int | None = None
    max_steps: int = _MAX_STEPS


def emulate(
    kernel: Any,
    grid: Sequence[int],
    arguments: Mapping[str, Any],
    launch: Launch = Launch(),  # noqa: B008 - frozen
    program: Program | None = None,
) -> Report:
    """Run ``kernel`` over ``grid`` on CPU tensors.

    Args:
        kernel: A ``triton.jit`` function, autotuned or not, decorated in a process with ``TRITON_INTERPRET=1``.
        grid: CTAs along up to three axes.
        arguments: Every argument by name: CPU tensors, ``TensorDescriptor``, numbers, constexpr values.
        launch: The rest.
        program: Rewritten functions to reuse or, for mutants, to run in place of the source.

    Returns:
        What the run used.

    Raises:
        EmulatorError: The first finding; it names the schedule and how to repeat it.

    Example:
        >>> emulate(kernel, (2,), {"desc_x": desc, "n": 5}, Launch(Schedule("lazy")))  # doctest: +SKIP
    """
    schedule = launch.schedule
    if SCHEDULE_VARIABLE in os.environ:
        schedule = Schedule.parse(os.environ[SCHEDULE_VARIABLE])
    try:
        with np.errstate(all="ignore"):
            return _Run(kernel, grid, arguments, launch, schedule, program or _PROGRAM).run()
    except EmulatorError as error:
        error.schedule, error.repeat = str(schedule), repeat_command(schedule)
        raise
    except Exception as error:
        error.add_note(f"in the emulator under schedule {schedule}; repeat with: {repeat_command(schedule)}")
        raise


def repeat_command(schedule: Schedule) -> str:
    """A shell command that runs the present test again under ``schedule``."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
    command = f"pytest '{test}'" if test else "the same command"
    return f"{SCHEDULE_VARIABLE}='{schedule}' TRITON_INTERPRET=1 {command}"


_PROGRAM = Program()
_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.bool: tl.int1,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def _storage_bytes(x: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor's storage, shared with it."""
    if x.device.type != "cpu":
        raise ValueError(f"arguments must be CPU tensors, got {x.device}.")
    storage = x.untyped_storage()
    if not storage.nbytes():
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))


class _Run:
    """One launch."""

    def __init__(
        self,
        kernel: Any,
        grid: Sequence[int],
        arguments: Mapping[str, Any],
        launch: Launch,
        schedule: Schedule,
        program: Program,
    ) -> None:
        x, y, z = (*(int(g) for g in grid), 1, 1)[:3]
        if x * y * z % launch.cluster:
            raise ValueError(f"grid must be a multiple of the cluster, got {(x, y, z)} and {launch.cluster}.")
        self.kernel, self.launch, self.program = kernel, launch, program
        self.grid = (x, y, z)
        self.report = Report(schedule)
        self.machine = Machine(schedule, launch.checks, launch.num_warps, launch.max_steps, launch.arch)
        self.machine.warps = launch.num_warps
        self.memory = self.machine.memory = GlobalMemory(self.machine)
        self.builder = Builder(self.machine, self.memory, self.grid)
        self.arguments = self._bind(arguments)

    def _bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(base_function(self.kernel)).bind(**given)
        bound.apply_defaults()
        unknown = (set(self.launch.outputs) | set(self.launch.scratch)) - set(bound.arguments)
        if unknown:
            raise ValueError(f"outputs and scratch must name arguments, got {sorted(unknown)}.")
        fixed = self._constexprs()
        # Outputs first: a tensor given twice keeps the stricter rules.
        order = sorted(bound.arguments, key=lambda n: n not in self.launch.outputs)
        converted = {n: v if n in fixed else self._convert(n, v) for n in order for v in [bound.arguments[n]]}
        return {name: converted[name] for name in bound.arguments}

    def _constexprs(self) -> set[str]:
        annotations = base_function(self.kernel).__annotations__
        return {n for n, a in annotations.items() if a is tl.constexpr or "constexpr" in str(a)}

    def _convert(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._register(name, value)
            kind = tl.pointer_type(_DTYPES[value.dtype])
            return tl.tensor(Handle(np.array([value.data_ptr()], np.uint64), kind), kind)
        if isinstance(value, TensorDescriptor):
            base = value.base
            self._register(name, base)
            address = base.data_ptr()
            shape, strides, block = ([int(v) for v in part] for part in (value.shape, value.strides, value.block_shape))
            return self.memory.descriptor(address, shape, strides, block, _DTYPES[base.dtype])
        if isinstance(value, bool | int):
            return interpreter._implicit_cvt(value)
        if isinstance(value, float):
            return tl.tensor(Handle(np.array([value], np.float32), tl.float32), tl.float32)
        return value

    def _register(self, name: str, x: torch.Tensor) -> None:
        once = name in self.launch.outputs
        data = _storage_bytes(x)
        if once or name in self.launch.scratch:
            data[...] = 0xFF
        written = not once and name not in self.launch.scratch
        self.memory.add(name, data, x.element_size(), written, once)

    def run(self) -> Report:
        """Run to the end, or to the first finding."""
        previous = getattr(Machine, "current", None)
        Machine.current = self.machine
        try:
            with _patched(self.builder):
                body = self.program.function(self.kernel)
                self._start(lambda: body(**self.arguments))
                self.machine.run()
            self._check_end()
        finally:
            for task in self.machine.tasks:
                task.greenlet.throw(greenlet.GreenletExit)
            if previous is not None:
                Machine.current = previous
        self.report.steps = self.machine.steps
        self.report.ops = dict(self.machine.op_counts)
        self.report.warps = self.machine.warps
        return self.report

    def _start(self, body: Callable[[], None]) -> None:
        """Make the CTAs, and start as many clusters as are resident at a time."""
        nx, ny, nz = self.grid
        positions = [(x, y, z) for z in range(nz) for y in range(ny) for x in range(nx)]
        size = self.launch.cluster
        for first in range(0, len(positions), size):
            indices = range(first, first + size)
            self.machine.waiting_clusters.append([_LazyCta(self.machine, i, positions[i]) for i in indices])
        self.ctas: list[Cta] = []
        room = self.launch.resident or len(positions)
        for _ in range(min(room, len(self.machine.waiting_clusters))):
            self._start_cluster(body)

    def _start_cluster(self, body: Callable[[], None]) -> None:
        if not self.machine.waiting_clusters:
            return
        planned: Any = self.machine.waiting_clusters.popleft()
        cluster = [plan.make() for plan in planned]
        self.machine.live_clusters += 1
        self.ctas += cluster
        for cta in cluster:
            cta.cluster = cluster
            task: list[Task] = []
            task.append(self.machine.spawn(cta, "main", partial(self._main_of, body, cta, task), Clock()))

    def _main_of(self, body: Callable[[], None], cta: Cta, task: list[Task]) -> None:
        self._main(body, cta, task[0])

    def _main(self, body: Callable[[], None], cta: Cta, task: Task) -> None:
        body()
        if self.machine.checks.cluster_end and cta.specialised and len(cta.cluster) > 1:
            meet_cluster(self.machine)
        cta.ended = True
        pending = cta.issued & ~task.clock.ops
        if pending and self.machine.checks.exits:
            text = f"{cta.name} ends while {pending.bit_count()} of its asynchronous operations may be in flight"
            names = self.machine.describe_ops(pending)
            raise EmulatorError(Verdict.EXIT, f"{text}: {names}")
        self.report.shared_bytes = max(self.report.shared_bytes, cta.arenas[SMEM].used)
        self.report.tensor_columns = max(self.report.tensor_columns, cta.arenas[TMEM].columns)
        if all(c.ended for c in cta.cluster):
            self.machine.live_clusters -= 1
            self._start_cluster(body)

    def _check_end(self) -> None:
        if self.machine.checks.exits:
            for cta in self.ctas:
                for barrier in cta.barriers:
                    if barrier.bytes or barrier.pending != barrier.count:
                        text = f"{barrier.name} of {cta.name} is left half full: {barrier.state}"
                        raise EmulatorError(Verdict.EXIT, text)
        for held in self.memory.tensors:
            if held.once and held.missing():
                text = (
                    f"{held.missing()} of {held.data.nbytes // held.itemsize} elements of {held.name} were not written"
                )
                raise EmulatorError(Verdict.MISSING, text)


@dataclass(frozen=True)
class _LazyCta:
    """A CTA before it starts."""

    machine: Machine
    index: int
    position: tuple[int, int, int]

    def make(self) -> Cta:
        """Give it memory."""
        return Cta(self.machine, self.index, self.position)


@contextmanager
def _patched(builder: Builder) -> Iterator[None]:
    """Put Triton's language into interpreter mode, with the emulator's builder."""
    saved = interpreter.interpreter_builder, interpreter.interpreter_semantic
    module: Any = interpreter
    module.interpreter_builder, module.interpreter_semantic = builder, semantic(builder)
    # `_patch_lang` reads only the modules that a function sees.
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    if not builder.options.sanitize_overflow:
        scalars.install(scope)
    try:
        yield
    finally:
        scope.restore()
        module.interpreter_builder, module.interpreter_semantic = saved
