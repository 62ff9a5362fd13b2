"""Ordinary kernel launches, sent to the emulator: what tests of launch code use."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime import interpreter

from .rewrite import Program
from .run import Launch, Report, emulate

_LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "ctas_per_cga", "cluster_dims", "launch_cluster"}


@contextmanager
def emulated_launches(launch: Launch = Launch(), program: Program | None = None) -> Iterator[list[Report]]:  # noqa: B008
    """Send every ``kernel[grid](...)`` in the block to the emulator; yield the list of their reports.

    Launch options of the call that matter (``num_warps``, ``ctas_per_cga``) override those of ``launch``;
    ``outputs`` and ``scratch`` apply to the kernels that have such arguments. ``program`` is a kernel with a fault.
    """
    reports: list[Report] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {k: kwargs.pop(k) for k in list(kwargs) if k in _LAUNCH_OPTIONS and k not in self.arg_names}
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        where = grid(bound.arguments) if callable(grid) else grid
        reports.append(emulate(self, where, bound.arguments, _adapt(launch, options, self.arg_names), program))

    original = interpreter.InterpretedFunction.run
    module: Any = interpreter.InterpretedFunction
    module.run = run
    try:
        yield reports
    finally:
        module.run = original


def _adapt(launch: Launch, options: dict[str, Any], names: Sequence[str]) -> Launch:
    values = dict(vars(launch))
    values["outputs"] = [n for n in launch.outputs if n in names]
    values["scratch"] = [n for n in launch.scratch if n in names]
    values["num_warps"] = options.get("num_warps", launch.num_warps)
    dims = options.get("ctas_per_cga") or options.get("cluster_dims")
    if dims:
        values["cluster"] = int(np.prod(dims))
    return Launch(**values)
