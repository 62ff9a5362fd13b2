"""From the source of a Triton function to a Python function that runs in the emulator.

``with tlx.async_task(...)`` blocks become nested functions; names that a block assigns are captured by value; assigned
numbers become Triton scalars, and so do the values of dynamic loops. Line numbers stay those of the source.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from .buffer_ops import settled
from .errors import EmulatorError, Verdict
from .language import BUILTINS, LIBDEVICE, PTX_HELPERS, TLX, ModuleProxy, loop, triton_language
from .machine import KERNEL_FILES
from .memory import Buffer, ReuseGroup
from .scalars import integer
from .task_ops import TASK_NAME, TaskList, capture, run_tasks

_TLX_MODULE = "triton.language.extra.tlx"
_NAMED = {"local_alloc", "alloc_barriers", "alloc_warp_barrier"}
# Changes a parsed function before it is rewritten; used by mutants.
Edit = Callable[[str, ast.FunctionDef], None]


class Runtime:
    """What rewritten code calls under the name ``__emu__``."""

    task_list = TaskList
    capture = staticmethod(capture)
    run_tasks = staticmethod(run_tasks)
    loop = staticmethod(loop)
    settled = staticmethod(settled)

    @staticmethod
    def assign(value: Any) -> Any:
        """A number that is assigned becomes a scalar tensor, as in Triton."""
        if isinstance(value, tl.tensor | Buffer | tuple):
            return value
        if isinstance(value, ReuseGroup):
            raise EmulatorError(Verdict.SHAPE, "a reuse_group is assigned to a name, which fbtriton refuses")
        if type(value) is int and -(2**31) <= value < 2**31:
            return integer(value)
        return interpreter.interpreter_semantic.to_tensor(value, False)


def assigned(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Target and value of an assignment, or of each of its parts: ``a, b = f(), g()`` has two."""
    target, value = node.targets[0], node.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def call_name(node: ast.AST) -> str:
    """The last part of the name a call goes to."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_with(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.With) and call_name(node.items[0].context_expr) == name


def _role(block: ast.With, number: int) -> str:
    """A task's name: the function that it consists of, else ``default`` or its number."""
    calls = [s.value for s in block.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)]
    if len(block.body) == 1 and calls and isinstance(calls[0].func, ast.Name):
        return calls[0].func.id.strip("_")
    call = block.items[0].context_expr
    is_default = isinstance(call, ast.Call) and bool(call.args)
    return "default" if is_default else f"task{number}"


def _expression(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _stored(statements: list[ast.stmt]) -> list[str]:
    """The names that statements assign."""
    names = (n for s in statements for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return sorted({n.id for n in names})


def _handing_on(loop: ast.For | ast.While, names: list[str]) -> list[ast.stmt]:
    """A loop before which, and at whose end, the names that it assigns stand for values that it hands on."""

    def settle() -> list[ast.stmt]:
        lines = (f"try: {name} = __emu__.settled({name})\nexcept NameError: pass" for name in names)
        made = [statement for line in lines for statement in ast.parse(line).body]
        for part in (part for statement in made for part in ast.walk(statement)):
            ast.copy_location(part, loop)
        return made

    loop.body += settle()
    return [*settle(), loop]


class _Rewriter(ast.NodeTransformer):
    """Rewrites one function."""

    def __init__(self) -> None:
        self.tasks = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Drop what only Triton's frontend reads."""
        node.decorator_list, node.returns = [], None
        for arg in node.args.args:
            arg.annotation = None
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Make scalars of numbers, and tell allocations their names."""
        self.generic_visit(node)
        for target, value in assigned(node):
            if isinstance(target, ast.Name) and isinstance(value, ast.Call) and call_name(value) in _NAMED:
                value.keywords.append(ast.keyword("_name", ast.Constant(target.id)))
        node.value = ast.Call(_expression("__emu__.assign"), [node.value], [])
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """A constexpr stays a Python value."""
        self.generic_visit(node)
        return ast.Pass() if node.value is None else ast.Assign([node.target], node.value)

    def visit_For(self, node: ast.For) -> Any:
        """Give dynamic loops Triton integers."""
        names = _stored(node.body)
        self.generic_visit(node)
        if call_name(node.iter) != "range":
            return node
        node.iter = ast.Call(_expression("__emu__.loop"), [node.iter], [])
        return _handing_on(node, names)

    def visit_While(self, node: ast.While) -> Any:
        """A loop that is dynamic."""
        names = _stored(node.body)
        self.generic_visit(node)
        return _handing_on(node, names)

    def visit_With(self, node: ast.With) -> Any:
        """Turn ``async_tasks`` into functions and a call that runs them."""
        if not _is_with(node, "async_tasks"):
            return self.generic_visit(node)
        start = ast.parse("__tasks = __emu__.task_list()").body[0]
        end = ast.parse("__emu__.run_tasks(__tasks)").body[0]
        body = [new for old in node.body for new in self._task(old)]
        for new in (start, end):
            for part in ast.walk(new):
                # One line only: Python names a call's last line.
                ast.copy_location(part, node.items[0].context_expr)
        return [start, *body, end]

    def _statements(self, nodes: list[ast.stmt]) -> list[ast.stmt]:
        """What statements become, each one or several."""
        made = [self.visit(node) for node in nodes]
        return [new for part in made for new in (part if isinstance(part, list) else [part])]

    def _task(self, node: ast.stmt) -> list[ast.stmt]:
        if isinstance(node, ast.If):
            node.body = [new for old in node.body for new in self._task(old)]
            node.orelse = [new for old in node.orelse for new in self._task(old)]
            return [node]
        if not isinstance(node, ast.With) or not _is_with(node, "async_task"):
            return self._statements([node])
        call = node.items[0].context_expr
        assert isinstance(call, ast.Call)
        number, role = self.tasks, _role(node, self.tasks)
        self.tasks += 1
        names = _stored(node.body)
        arguments = ast.arguments(
            [],
            [ast.arg(n) for n in names],
            None,
            [],
            [],
            None,
            [_expression(f"__emu__.capture(lambda: {n})") for n in names],
        )
        function = ast.FunctionDef(f"{TASK_NAME}{number}", arguments, self._statements(node.body), [])
        add = ast.parse(f"__tasks.add({TASK_NAME}{number}, {role!r}, (), dict())").body[0]
        assert isinstance(add, ast.Expr)
        assert isinstance(add.value, ast.Call)
        add.value.args[2] = ast.Tuple(call.args, ast.Load())
        add.value.args[3] = ast.Call(ast.Name("dict", ast.Load()), [], call.keywords)
        for new in (function, add):
            ast.copy_location(new, node)
        return [function, add]


def parse(function: Callable[..., Any]) -> ast.FunctionDef:
    """The syntax tree of a function, without decorators, with the line numbers of its file."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition


def base_function(kernel: Any) -> Callable[..., Any]:
    """The Python function under jit, autotune and heuristics."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    function: Callable[..., Any] = kernel
    return function


class Program:
    """The rewritten functions of a kernel, by function.

    Args:
        edit: A change to apply to each parsed function.
    """

    def __init__(self, edit: Edit | None = None) -> None:
        self.edit = edit
        self._done: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._tl = triton_language(self.function)

    def function(self, kernel: Any) -> Callable[..., Any]:
        """The emulated form of a jit function."""
        function = base_function(kernel)
        if function not in self._done:
            self._done[function] = self._compile(function)
        return self._done[function]

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        definition = parse(function)
        if self.edit is not None:
            self.edit(function.__name__, definition)
        _Rewriter().visit(definition)
        module = ast.Module([definition], [])
        ast.fix_missing_locations(module)
        path = function.__code__.co_filename
        KERNEL_FILES.add(path)
        names = {name: self._replace(value) for name, value in function.__globals__.items()}
        names |= {k: v for k, v in BUILTINS.items() if k not in function.__globals__}
        names["__emu__"] = Runtime
        local: dict[str, Any] = {}
        exec(compile(module, path, "exec"), names, local)
        result = local[function.__name__]
        names[function.__name__] = result
        compiled: Callable[..., Any] = result
        return compiled

    def _replace(self, value: Any) -> Any:
        """What a global name of a kernel stands for in the emulator."""
        if isinstance(value, JITFunction | InterpretedFunction):
            return _Lazy(self, value)
        if isinstance(value, ModuleType):
            if value is tl:
                return self._tl
            if value.__name__ == _TLX_MODULE:
                return TLX
            return ModuleProxy(value, self.function, {}) if value.__name__.startswith("triton.language") else value
        home = getattr(value, "__module__", None) or ""
        if home.endswith("inline_ptx_lib") and getattr(value, "__name__", "") in PTX_HELPERS:
            return PTX_HELPERS[value.__name__]
        if home.endswith("extra.libdevice"):
            return LIBDEVICE.get(value.__name__, value)
        if home.startswith(_TLX_MODULE) and callable(value):
            return _tlx_function(value)
        if home == "triton.language.core" and tl.core.is_builtin(value):
            return getattr(self._tl, value.__name__)
        return value


def _tlx_function(value: Any) -> Any:
    """The emulator's form of a function imported from TLX by name; missing ones raise when they are called."""
    name = getattr(value, "__name__", "")
    if name in vars(TLX):
        return vars(TLX)[name]

    def missing(*args: Any, **kwargs: Any) -> None:
        raise EmulatorError(Verdict.UNSUPPORTED, f"tlx.{name} is not emulated")

    return missing


class _Lazy:
    """A jit function that is rewritten at its first call, so that unused ones cost nothing."""

    def __init__(self, program: Program, kernel: Any) -> None:
        self._program = program
        self._kernel = kernel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.function(self._kernel)(*args, **kwargs)
