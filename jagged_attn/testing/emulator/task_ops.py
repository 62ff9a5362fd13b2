"""Async tasks: from the list of a ``with tlx.async_tasks()`` block to running roles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .errors import Verdict
from .machine import Machine, machine
from .numerics import unwrap
from .parameters import MAX_REGISTERS, MAX_WARPS, MIN_REGISTERS, REGISTER_FILE, THREADS_PER_WARP

# The block of a task becomes a function whose name begins so.
TASK_NAME = "__task"
_GROUP = 4
_OPTIONS = {"num_warps", "registers", "num_regs", "replicate", "warp_group_start_id"}


class Unbound:
    """Stands for a captured name that has no value when the tasks start."""


class TaskSpec:
    """One ``with tlx.async_task(...)`` block.

    Args:
        body: The block, as a function without arguments.
        role: Name for reports and schedules.
        args: Positional arguments: ``"default"`` or nothing.
        options: Keyword arguments.
    """

    def __init__(self, body: Callable[[], None], role: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        unknown = set(options) - _OPTIONS
        if unknown:
            raise machine().fail(
                Verdict.UNSUPPORTED, f"tlx.async_task({', '.join(sorted(unknown))}=...) is not emulated"
            )
        self.body = body
        self.role = role
        self.default = bool(args) and unwrap(args[0]) == "default"
        self.replicas = int(unwrap(options.get("replicate", 1)))
        warps = unwrap(options.get("num_warps"))
        self.warps = machine().num_warps if warps is None else int(warps)
        registers = unwrap(options.get("registers", options.get("num_regs")))
        self.registers = None if registers is None else int(registers)
        if self.default and registers is not None:
            raise machine().fail(Verdict.BUDGET, "the default task gets what is left: it cannot ask for registers")


class TaskList:
    """The blocks of one ``async_tasks``."""

    def __init__(self) -> None:
        self.specs: list[TaskSpec] = []

    def add(self, body: Callable[[], None], role: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note a block."""
        self.specs.append(TaskSpec(body, role, args, options))


def capture(read: Callable[[], Any]) -> Any:
    """The value of a name at the start of the tasks, if it has one."""
    try:
        return read()
    except NameError:
        return Unbound()


def run_tasks(tasks: TaskList) -> None:
    """Run all blocks concurrently and wait for them."""
    run = machine()
    if sum(spec.default for spec in tasks.specs) != 1:
        raise run.fail(Verdict.SHAPE, "async_tasks needs exactly one default task")
    run.note_warps(check_budget(run, tasks.specs))
    parent = run.running
    parent.cta.specialised = True
    known = parent.release()
    children = []
    for spec in tasks.specs:
        for replica in range(spec.replicas):
            role = spec.role if spec.replicas == 1 else f"{spec.role}.{replica}"
            task = run.spawn(parent.cta, role, spec.body, known)
            task.replica, task.warps = replica, spec.warps
            children.append(task)
    run.block(lambda: all(t.done for t in children), lambda: "waits for its tasks")
    for task in children:
        parent.clock.join(task.clock)


def check_budget(run: Machine, specs: list[TaskSpec]) -> int:
    """Warps of the CTA, padded to whole groups; reports too many warps or registers."""
    partitions = [(s.warps, s.registers) for s in specs if not s.default for _ in range(s.replicas)]
    base = sum(s.warps * s.replicas for s in specs if s.default)
    others = sum(w for w, _ in partitions)
    total = base + -(-others // _GROUP) * _GROUP
    if not run.checks.budgets:
        return total
    if total > MAX_WARPS:
        raise run.fail(Verdict.BUDGET, f"{total} warps, {MAX_WARPS} fit a CTA")
    requests = [r for _, r in partitions if r is not None]
    if requests:
        if len(requests) != len(partitions):
            raise run.fail(Verdict.BUDGET, "registers= is given for some tasks and not for others")
        _check_registers(run, partitions, base, total)
    return total


def _check_registers(run: Machine, partitions: list[tuple[int, int | None]], base: int, total: int) -> None:
    """Each warp group gets the largest request of its warps; the default task gets what is left."""
    warps = sorted(((w, int(r or 0)) for w, r in partitions), reverse=True)
    for _, request in warps:
        if request % 8 or not MIN_REGISTERS <= request <= MAX_REGISTERS:
            text = f"registers={request}: a multiple of 8 from {MIN_REGISTERS} to {MAX_REGISTERS}"
            raise run.fail(Verdict.BUDGET, text)
    lanes = [request for count, request in warps for _ in range(count)]
    groups = [max(lanes[i : i + _GROUP]) for i in range(0, len(lanes), _GROUP)]
    budget = REGISTER_FILE // (THREADS_PER_WARP * total) // 8 * 8 * (total // _GROUP)
    left = (budget - sum(groups)) // max(1, base // _GROUP)
    if left < MIN_REGISTERS:
        text = f"register requests {groups} of {budget} leave {left} for the default task"
        raise run.fail(Verdict.BUDGET, text)


def async_task_replica_id() -> int:
    """Number of this replica, in the task's own block."""
    if not sys._getframe(1).f_code.co_name.startswith(TASK_NAME):
        text = (
            "tlx.async_task_replica_id() in a function: fbtriton compiles a function once for equal arguments, so all "
            "replicas would get the first one's number; call it in the task's own block and pass it on as a constexpr"
        )
        raise machine().fail(Verdict.UNSUPPORTED, text)
    return machine().running.replica or 0
