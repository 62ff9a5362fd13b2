"""Every fault of a standard kind that fits a kernel, with the checks that are meant to find it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .errors import Verdict
from .mutants import (
    Mutant,
    Operator,
    Place,
    Site,
    argument,
    call_name,
    double,
    drop,
    group_start,
    hoist,
    places,
    substitute,
    target,
    without_barrier,
)
from .rewrite import assigned, base_function, parse


def _trips(nth: int, new: str) -> Callable[[ast.FunctionDef], None]:
    def change(definition: ast.FunctionDef) -> None:
        loops = [n for n in ast.walk(definition) if isinstance(n, ast.For) and call_name(n.iter) == "range"]
        call = loops[nth].iter
        assert isinstance(call, ast.Call)
        at = 0 if len(call.args) == 1 else 1
        call.args[at] = substitute(new, call.args[at])

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


def standard_mutants(kernel: Any, helpers: Mapping[str, str] = MappingProxyType({})) -> list[Mutant]:
    """Every fault of a standard kind that has a site in ``kernel``.

    Args:
        kernel: The jit function.
        helpers: Functions of its module that stand for an operation, as ``{"_arrive": "barrier_arrive"}``: faults go to
            where they are called, not into them.
    """
    made: list[Mutant] = []
    for name, function in functions(kernel).items():
        if name in helpers:
            continue
        definition = parse(function)
        for operation, kind, operator in _PER_CALL:
            for called in (operation, *(h for h, meant in helpers.items() if meant == operation)):
                sites = _sites(name, definition, called)
                made += [_mutant(kind, site, operator) for site, place in sites if _fits(kind, place)]
        made += _dot_mutants(name, definition)
        made += _count_mutants(name, definition)
        made += _trip_mutants(name, definition)
    return made


def _sites(function: str, definition: ast.FunctionDef, operation: str) -> list[tuple[Site, Place]]:
    """A site for each call, numbered among those on the same target."""
    seen: dict[str, int] = {}
    found = []
    for place in places(definition, operation):
        name = target(place.call)
        found.append((Site(function, operation, name, seen.get(name, 0)), place))
        seen[name] = seen.get(name, 0) + 1
    return found


def _fits(kind: str, place: Place) -> bool:
    """Moving up needs a statement above."""
    return group_start(place) > 0 if kind.endswith("too early") else True


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
    for number, place in enumerate(places(definition, "alloc_barriers")):
        assert isinstance(place.statement, ast.Assign)
        barrier = next(ast.unparse(t) for t, value in assigned(place.statement) if value is place.call)
        site = Site(name, "alloc_barriers", "", number)
        counted = len(place.call.args) > 1
        higher = argument(1, "_ + 1") if counted else argument("arrive_count", "2")
        made.append(Mutant(f"count too high | {name}: {barrier}", site, higher, EXPECTED["count too high"]))
        if counted:
            lower = argument(1, "_ - 1")
            made.append(Mutant(f"count too low | {name}: {barrier}", site, lower, EXPECTED["count too low"]))
    return made


def _trip_mutants(name: str, definition: ast.FunctionDef) -> list[Mutant]:
    loops = [n for n in ast.walk(definition) if isinstance(n, ast.For) and call_name(n.iter) == "range"]
    made: list[Mutant] = []
    for nth, loop in enumerate(loops):
        for kind, bound in (("one trip too few", "_ - 1"), ("one trip too many", "_ + 1")):
            label = f"{kind} | {name}: {ast.unparse(loop.iter)} #{nth}"
            site = Site(name, "range")
            made.append(TripMutant(label, site, drop, EXPECTED[kind], nth, bound))
    return made
