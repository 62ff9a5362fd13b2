"""A small language of faults: what to change in a kernel's source, by syntax rather than by text.

A fault is a *site* (the n-th call of an operation on a named buffer or barrier, in a named function) and an *operator*
(drop it, move it, change an argument). ``faults.standard_mutants`` makes all that fit a kernel.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import Verdict
from .rewrite import Program, base_function, call_name

_BODIES = ("body", "orelse")


def target(call: ast.Call) -> str:
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


def places(node: ast.AST, operation: str) -> Iterator[Place]:
    """Every call of an operation under ``node``."""
    for name in _BODIES:
        block = getattr(node, name, None)
        if not isinstance(block, list):
            continue
        for statement in block:
            if any(isinstance(getattr(statement, b, None), list) for b in _BODIES):
                yield from places(statement, operation)
                continue
            for inner in ast.walk(statement):
                if isinstance(inner, ast.Call) and call_name(inner) == operation:
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
        found = [p for p in places(definition, self.operation) if self.target in ("", target(p.call))]
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
        found = self.site.find(definition)
        if not found:
            raise ValueError(f"mutant {self.name!r} must find its site, got none for {self.site}.")
        for place in found:
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


def group_start(place: Place) -> int:
    """Where the statement begins together with the assignments right above it that it needs."""
    at = place.index
    used = {n.id for n in ast.walk(place.statement) if isinstance(n, ast.Name)}
    while at > 0 and isinstance(place.block[at - 1], ast.Assign):
        targets = {n.id for t in place.block[at - 1].targets for n in ast.walk(t) if isinstance(n, ast.Name)}  # type: ignore[attr-defined]
        value = place.block[at - 1].value  # type: ignore[attr-defined]
        if not targets & used or call_name(value).startswith("async_"):
            break
        at -= 1
    return at


def hoist(place: Place) -> None:
    """Do it, with the assignments that it needs, one statement earlier."""
    start, end = group_start(place), place.index + 1
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
            call.args[which] = substitute(new, call.args[which])
            return
        for keyword in call.keywords:
            if keyword.arg == which:
                keyword.value = substitute(new, keyword.value)
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
            if isinstance(node, ast.Name) and node.id == target(place.call):
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


def substitute(text: str, old: ast.expr) -> ast.expr:
    """Parse an expression in which ``_`` stands for ``old``."""

    class Put(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return old if node.id == "_" else node

    new: ast.expr = Put().visit(ast.parse(text, mode="eval").body)
    return new
