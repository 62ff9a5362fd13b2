"""A small language of faults: what to change in a kernel's source, by syntax rather than by text.

A fault is a *site* (the n-th call of an operation on a named buffer or barrier, in a named function) and an *operator*
(drop it, move it, change an argument). Faults also come wholesale: ``standard_mutants`` makes all that fit a kernel.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .errors import Verdict
from .rewrite import Program, _call_name, base_function, parse

_BODIES = ("body", "orelse")


def _target(call: ast.Call) -> str:
    """The buffer or barrier that a call is about: the name in its first argument."""
    node: ast.AST | None = call.args[0] if call.args else None
    while node is not None and not isinstance(node, ast.Name):
        node = getattr(node, "value", None) or (node.args[0] if isinstance(node, ast.Call) and node.args else None)
    return node.id if isinstance(node, ast.Name) else ""


@dataclass
class Place:
    """A statement, the list that holds it, and the call in it that a site names."""

    block: list[ast.stmt]
    statement: ast.stmt
    call: ast.Call

    @property
    def index(self) -> int:
        """Position in the list."""
        return self.block.index(self.statement)


def _places(node: ast.AST, operation: str) -> Iterator[Place]:
    for name in _BODIES:
        block = getattr(node, name, None)
        if not isinstance(block, list):
            continue
        for statement in block:
            if any(isinstance(getattr(statement, b, None), list) for b in _BODIES):
                yield from _places(statement, operation)
                continue
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Call) and _call_name(inner) == operation:
                    yield Place(block, statement, inner)


@dataclass(frozen=True)
class Site:
    """Where a fault goes.

    Args:
        function: Name of the jit function.
        operation: Name of the operation, without ``tlx.``.
        target: Name of the buffer or barrier; empty for any.
        nth: Which of those; None for all.
    """

    function: str
    operation: str
    target: str = ""
    nth: int | None = None

    def find(self, definition: ast.FunctionDef) -> list[Place]:
        """The places in a function."""
        found = [p for p in _places(definition, self.operation) if self.target in ("", _target(p.call))]
        return found if self.nth is None else found[self.nth : self.nth + 1]

    def __str__(self) -> str:
        number = "" if self.nth is None else f" #{self.nth}"
        return f"{self.function}: {self.operation}({self.target}){number}"


Operator = Callable[[Place], None]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Args:
        name: What is wrong, in words; unique for a kernel.
        site: Where.
        operator: How.
        expected: The checks that are meant to find it.
    """

    name: str
    site: Site
    operator: Operator
    expected: frozenset[Verdict]

    def apply(self, name: str, definition: ast.FunctionDef) -> None:
        """Change a parsed function, if it is the one."""
        if name != self.site.function:
            return
        places = self.site.find(definition)
        if not places:
            raise ValueError(f"mutant {self.name!r} must find its site, got none for {self.site}.")
        for place in places:
            self.operator(place)
        ast.fix_missing_locations(definition)

    def program(self) -> Program:
        """The kernel with this fault, for ``emulate``."""
        return Program(self.apply)

    def source(self, kernel: Any) -> str:
        """The source of the kernel's module with this fault, for a compiler or a GPU."""
        module = ast.parse(inspect.getsource(inspect.getmodule(base_function(kernel))))  # type: ignore[arg-type]
        for node in module.body:
            if isinstance(node, ast.FunctionDef):
                self.apply(node.name, node)
        return ast.unparse(module)


# Operators.


def drop(place: Place) -> None:
    """Leave the call out; a value that it passes through stays."""
    if isinstance(place.statement, ast.Expr):
        place.block[place.index] = ast.copy_location(ast.Pass(), place.statement)
    elif isinstance(place.statement, ast.Assign) and place.statement.value is place.call:
        place.statement.value = place.call.args[-1]
    else:
        raise ValueError(f"a call inside an expression cannot be dropped: {ast.unparse(place.statement)}.")


def double(place: Place) -> None:
    """Do it twice."""
    place.block.insert(place.index, copy.deepcopy(place.statement))


def _group_start(place: Place) -> int:
    """Where the statement begins together with the assignments right above it that it needs."""
    at = place.index
    used = {n.id for n in ast.walk(place.statement) if isinstance(n, ast.Name)}
    while at > 0 and isinstance(place.block[at - 1], ast.Assign):
        targets = {n.id for t in place.block[at - 1].targets for n in ast.walk(t) if isinstance(n, ast.Name)}  # type: ignore[attr-defined]
        value = place.block[at - 1].value  # type: ignore[attr-defined]
        if not targets & used or _call_name(value).startswith("async_"):
            break
        at -= 1
    return at


def hoist(place: Place) -> None:
    """Do it, with the assignments that it needs, one statement earlier."""
    start, end = _group_start(place), place.index + 1
    group = place.block[start:end]
    del place.block[start:end]
    place.block[start - 1 : start - 1] = group


def sink(place: Place) -> None:
    """Do it one statement later."""
    at = place.index
    place.block.insert(at + 1, place.block.pop(at))


def argument(which: int | str, new: str) -> Operator:
    """Replace an argument; in ``new``, ``_`` stands for the old expression."""

    def change(place: Place) -> None:
        call = place.call
        if isinstance(which, int):
            call.args[which] = _substitute(new, call.args[which])
            return
        for keyword in call.keywords:
            if keyword.arg == which:
                keyword.value = _substitute(new, keyword.value)
                return
        call.keywords.append(ast.keyword(which, ast.parse(new, mode="eval").body))

    return change


def without(which: str) -> Operator:
    """Leave a keyword argument out."""

    def change(place: Place) -> None:
        place.call.keywords = [k for k in place.call.keywords if k.arg != which]

    return change


def retarget(new: str) -> Operator:
    """Name another buffer or barrier."""

    def change(place: Place) -> None:
        for node in ast.walk(place.call.args[0]):
            if isinstance(node, ast.Name) and node.id == _target(place.call):
                node.id = new
                return

    return change


def without_barrier(position: int) -> Operator:
    """Leave one of a product's ``mBarriers`` out."""

    def change(place: Place) -> None:
        for keyword in place.call.keywords:
            if keyword.arg == "mBarriers" and isinstance(keyword.value, ast.List):
                del keyword.value.elts[position]

    return change


def _substitute(text: str, old: ast.expr) -> ast.expr:
    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return old if node.id == "_" else node

    new: ast.expr = Put().visit(ast.parse(text, mode="eval").body)
    return new


def _trips(nth: int, new: str) -> Callable[[ast.FunctionDef], None]:
    def change(definition: ast.FunctionDef) -> None:
        loops = [n for n in ast.walk(definition) if isinstance(n, ast.For) and _call_name(n.iter) == "range"]
        call = loops[nth].iter
        assert isinstance(call, ast.Call)
        at = 0 if len(call.args) == 1 else 1
        call.args[at] = _substitute(new, call.args[at])

    return change


@dataclass(frozen=True)
class TripMutant(Mutant):
    """A loop of one role that runs once too often or too rarely."""

    nth: int = 0
    bound: str = "_ - 1"

    def apply(self, name: str, definition: ast.FunctionDef) -> None:
        """Change the bound of the loop."""
        if name == self.site.function:
            _trips(self.nth, self.bound)(definition)
            ast.fix_missing_locations(definition)


# What each kind of fault should be found by.

_V = Verdict
_ORDER = {_V.RACE, _V.UNWRITTEN, _V.LAPPED, _V.EXIT, _V.WGMMA}
EXPECTED: dict[str, frozenset[Verdict]] = {
    "wait dropped": frozenset({*_ORDER, _V.OVERFLOW}),
    "wait of the other parity": frozenset({*_ORDER, _V.DEADLOCK, _V.OVERFLOW}),
    "arrival dropped": frozenset({_V.DEADLOCK, _V.EXIT}),
    "arrival doubled": frozenset({_V.OVERFLOW, _V.RACE, _V.LAPPED, _V.EXIT}),
    "arrival too early": frozenset({_V.RACE, _V.FENCE, _V.EXIT, _V.LAPPED, _V.UNWRITTEN}),
    "half the bytes": frozenset({_V.BYTES, _V.RACE, _V.DEADLOCK, _V.UNWRITTEN, _V.LAPPED, _V.EXIT}),
    "twice the bytes": frozenset({_V.DEADLOCK, _V.BYTES}),
    "fence dropped": frozenset({_V.FENCE}),
    "store wait dropped": frozenset({_V.RACE, _V.EXIT}),
    "product wait off by one": frozenset({_V.RACE, _V.WGMMA, _V.EXIT}),
    "named barrier dropped": frozenset({_V.RACE, _V.DEADLOCK, _V.OVERFLOW, _V.FENCE}),
    "commit dropped": frozenset({_V.DEADLOCK, _V.EXIT}),
    "commit too early": frozenset({_V.RACE, _V.EXIT, _V.DEADLOCK, _V.LAPPED}),
    "signal of a product dropped": frozenset({_V.DEADLOCK, _V.EXIT, _V.RACE}),
    "always accumulates": frozenset({_V.UNWRITTEN, _V.VALUE, _V.RACE}),
    "count too high": frozenset({_V.DEADLOCK, _V.EXIT}),
    "count too low": frozenset({_V.OVERFLOW, _V.RACE, _V.LAPPED, _V.UNWRITTEN, _V.EXIT}),
    "one trip too few": frozenset({*_ORDER, _V.DEADLOCK, _V.MISSING, _V.VALUE, _V.BYTES}),
    "one trip too many": frozenset({*_ORDER, _V.DEADLOCK, _V.OVERWRITTEN, _V.OUTSIDE, _V.OVERFLOW, _V.BYTES, _V.VALUE}),
    "peer not waited for": frozenset({*_ORDER, _V.REMOTE}),
    "arrives at home": frozenset({_V.DEADLOCK, _V.OVERFLOW, _V.EXIT, _V.RACE}),
    "wrong barrier": frozenset({*_ORDER, _V.DEADLOCK, _V.OVERFLOW}),
}

_PER_CALL: list[tuple[str, str, Operator]] = [
    ("barrier_wait", "wait dropped", drop),
    ("barrier_wait", "wait of the other parity", argument(1, "_ ^ 1")),
    ("barrier_arrive", "arrival dropped", drop),
    ("barrier_arrive", "arrival doubled", double),
    ("barrier_arrive", "arrival too early", hoist),
    ("barrier_expect_bytes", "half the bytes", argument(1, "_ // 2")),
    ("barrier_expect_bytes", "twice the bytes", argument(1, "_ * 2")),
    ("fence", "fence dropped", drop),
    ("async_descriptor_store_wait", "store wait dropped", drop),
    ("async_dot_wait", "product wait off by one", argument(0, "_ + 1")),
    ("named_barrier_wait", "named barrier dropped", drop),
    ("named_barrier_arrive", "named barrier dropped", drop),
    ("tcgen05_commit", "commit dropped", drop),
    ("tcgen05_commit", "commit too early", hoist),
]


def functions(kernel: Any) -> dict[str, Callable[..., Any]]:
    """The kernel and every jit function of its module that it uses, by name."""
    root = base_function(kernel)
    found: dict[str, Callable[..., Any]] = {}
    pending = [root]
    while pending:
        function = pending.pop()
        if function.__name__ in found:
            continue
        found[function.__name__] = function
        for node in ast.walk(parse(function)):
            value = function.__globals__.get(node.id) if isinstance(node, ast.Name) else None
            if isinstance(value, JITFunction | InterpretedFunction):
                inner = base_function(value)
                if inner.__module__ == root.__module__:
                    pending.append(inner)
    return found


def _mutant(kind: str, site: Site, operator: Operator) -> Mutant:
    return Mutant(f"{kind} | {site}", site, operator, EXPECTED[kind])


def standard_mutants(kernel: Any) -> list[Mutant]:
    """Every fault of a standard kind that has a site in ``kernel``."""
    made: list[Mutant] = []
    for name, function in functions(kernel).items():
        definition = parse(function)
        for operation, kind, operator in _PER_CALL:
            made += [
                _mutant(kind, site, operator)
                for site, place in _sites(name, definition, operation)
                if _fits(kind, place)
            ]
        made += _dot_mutants(name, definition)
        made += _count_mutants(name, definition)
        made += _trip_mutants(name, definition)
    return made


def _sites(function: str, definition: ast.FunctionDef, operation: str) -> list[tuple[Site, Place]]:
    """A site for each call, numbered among those on the same target."""
    seen: dict[str, int] = {}
    found = []
    for place in _places(definition, operation):
        target = _target(place.call)
        found.append((Site(function, operation, target, seen.get(target, 0)), place))
        seen[target] = seen.get(target, 0) + 1
    return found


def _fits(kind: str, place: Place) -> bool:
    """Moving up needs a statement above."""
    return _group_start(place) > 0 if kind.endswith("too early") else True


def _dot_mutants(name: str, definition: ast.FunctionDef) -> list[Mutant]:
    made = []
    for site, place in _sites(name, definition, "async_dot"):
        for keyword in place.call.keywords:
            if keyword.arg == "use_acc" and not isinstance(keyword.value, ast.Constant):
                made.append(_mutant("always accumulates", site, argument("use_acc", "True")))
            if keyword.arg == "mBarriers" and isinstance(keyword.value, ast.List):
                for i, barrier in enumerate(keyword.value.elts):
                    kind = "signal of a product dropped"
                    label = f"{kind} | {site} {ast.unparse(barrier)}"
                    made.append(Mutant(label, site, without_barrier(i), EXPECTED[kind]))
    return made


def _count_mutants(name: str, definition: ast.FunctionDef) -> list[Mutant]:
    made = []
    for number, place in enumerate(_places(definition, "alloc_barriers")):
        assert isinstance(place.statement, ast.Assign)
        barrier = ast.unparse(place.statement.targets[0])
        site = Site(name, "alloc_barriers", "", number)
        counted = len(place.call.args) > 1
        higher = argument(1, "_ + 1") if counted else argument("arrive_count", "2")
        made.append(Mutant(f"count too high | {name}: {barrier}", site, higher, EXPECTED["count too high"]))
        if counted:
            lower = argument(1, "_ - 1")
            made.append(Mutant(f"count too low | {name}: {barrier}", site, lower, EXPECTED["count too low"]))
    return made


def _trip_mutants(name: str, definition: ast.FunctionDef) -> list[Mutant]:
    loops = [n for n in ast.walk(definition) if isinstance(n, ast.For) and _call_name(n.iter) == "range"]
    made: list[Mutant] = []
    for nth, loop in enumerate(loops):
        for kind, bound in (("one trip too few", "_ - 1"), ("one trip too many", "_ + 1")):
            label = f"{kind} | {name}: {ast.unparse(loop.iter)} #{nth}"
            site = Site(name, "range")
            made.append(TripMutant(label, site, drop, EXPECTED[kind], nth, bound))
    return made
