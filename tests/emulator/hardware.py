"""The Hopper test kernels and some of their mutants on a real H200, beside the emulator's verdicts.

    python tests/emulator/hardware.py --record emulated.pt    # no GPU: what the emulator says, and its outputs
    python tests/emulator/hardware.py --against emulated.pt   # an sm_90 GPU and fbtriton: prints a Markdown table
    python tests/emulator/hardware.py --compile               # no GPU: only compiles everything for sm_90a

Each kernel and each mutant runs in a process of its own with a time limit, because a wrong barrier hangs the GPU until
the process that holds it is killed. The emulator's side runs in processes with TRITON_INTERPRET=1; the GPU's side does
without greenlet.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
LIMIT_S = 30
_SMALL = {"lengths": (65, 0, 200, 1, 129), "ctas": 2}
# Enough work for a race to show on 132 SMs.
_LARGE = {"lengths": tuple(1 + 97 * i % 1500 for i in range(96)), "ctas": 132, "heads": 8}

# Kernel, and the names of mutants as `standard_mutants` gives them.
MUTANTS = [
    ("matmul", "wait dropped | _mma: barrier_wait(full) #0"),
    ("matmul", "wait dropped | _load: barrier_wait(empty) #0"),
    ("matmul", "half the bytes | _load: barrier_expect_bytes(full) #0"),
    ("matmul", "named barrier dropped | _mma: named_barrier_wait() #1"),
    ("matmul", "arrival dropped | _mma: barrier_arrive(empty) #1"),
    ("attention", "wait dropped | _attend: barrier_wait(k_full) #1"),
    ("attention", "wait dropped | _attend: barrier_wait(v_full) #0"),
    ("attention", "wait of the other parity | _attend: barrier_wait(k_full) #1"),
    ("attention", "count too low | hopper_attention: k_empty"),
    ("attention", "count too high | hopper_attention: k_empty"),
    ("attention", "twice the bytes | _load: barrier_expect_bytes(v_full) #0"),
    ("attention", "store wait dropped | _attend: async_descriptor_store_wait() #0"),
]


KERNELS = ("matmul", "attention")


def _without_greenlet() -> None:
    """Let the emulator's package be imported, not run, where greenlet is missing."""
    if importlib.util.find_spec("greenlet") is None:
        sys.modules["greenlet"] = ModuleType("greenlet")


def _case(name: str, device: str, large: bool) -> Any:
    from tlx_kernels.problems import attention_problem, matmul_problem

    if name == "matmul":
        return matmul_problem(device, steps=64 if large else 5, ctas=4 if large else 2)
    return attention_problem(90, device, **(_LARGE if large else _SMALL))


def _mutant(name: str, mutant: str) -> Any:
    from jagged_attn.testing.emulator.faults import standard_mutants

    (found,) = [m for m in standard_mutants(_case(name, "cpu", False).kernel) if m.name == mutant]
    return found


def _module(source: str) -> ModuleType:
    """Import a source text; Triton reads functions from files."""
    path = Path(tempfile.mkdtemp()) / "mutated_kernel.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("mutated_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kernel(name: str, mutant: str, case: Any) -> Any:
    if not mutant:
        return case.kernel
    return getattr(_module(_mutant(name, mutant).source(case.kernel)), case.kernel.__name__)


def child_gpu(name: str, mutant: str, save: str) -> str:
    """Run on the GPU: how far from the reference, in units of the tolerance."""
    _without_greenlet()
    import torch

    case = _case(name, "cuda", large=bool(mutant))
    kernel = _kernel(name, mutant, case)
    kernel[case.grid](**case.arguments, num_warps=4, num_stages=1)
    torch.cuda.synchronize()
    if save:
        torch.save([case.result(n).cpu() for n in case.references], save)
    error = case.error()
    return "right" if error <= 1 else f"wrong numbers ({error:.3g} times the tolerance)"


def child_emulator(name: str, mutant: str, save: str) -> str:
    """Run in the emulator."""
    import torch

    from jagged_attn.testing.emulator import Schedule, hunt

    case = _case(name, "cpu", large=False)
    if mutant:
        return ", ".join(sorted({str(v) for v in hunt(case, _mutant(name, mutant)).verdicts}))
    case.check(Schedule("random", 0))
    torch.save([case.result(n) for n in case.references], save)
    return "right"


def child_compile(name: str, mutant: str, save: str) -> str:
    """Compile for sm_90a."""
    from jagged_attn.testing.aot import Compilation, compile_kernel

    case = _case(name, "cpu", large=False)
    kernel = _kernel(name, mutant, case)
    annotated = case.kernel.fn.__annotations__
    constexprs = {n: v for n, v in case.arguments.items() if n in annotated}
    signature = {n: _type(v) for n, v in case.arguments.items() if n not in annotated}
    found = compile_kernel(Compilation(name, kernel, signature, constexprs, 90))
    return f"compiles, {found.shared} bytes of shared memory"


def _type(value: Any) -> str:
    if hasattr(value, "block_shape"):
        return f"tensordesc<bf16{[int(n) for n in value.block_shape]}>"
    if isinstance(value, float):
        return "fp32"
    return "i32" if isinstance(value, int) else f"*{'fp32' if value.is_floating_point() else 'i32'}"


def _child(where: str, name: str, mutant: str = "", save: str = "") -> str:
    """Run this file again as a child; a child that does not end in time hangs."""
    command = [sys.executable, __file__, "--child", json.dumps([where, name, mutant, save])]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if where == "emulator":
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"hangs (killed after {LIMIT_S} s)"
    last = (done.stdout.strip().splitlines() or [""])[-1]
    return last if done.returncode == 0 else f"fails: {done.stderr.strip().splitlines()[-1][:120]}"


def record(path: str) -> None:
    """Save the emulator's outputs and verdicts."""
    import torch

    outputs, verdicts = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in KERNELS:
            file = f"{folder}/{name}.pt"
            assert _child("emulator", name, save=file) == "right"
            outputs[name] = torch.load(file)
    for name, mutant in MUTANTS:
        verdicts[name, mutant] = _child("emulator", name, mutant)
        print(f"{name}: {mutant}: {verdicts[name, mutant]}", flush=True)
    torch.save({"outputs": outputs, "verdicts": verdicts}, path)


def _apart(name: str, outputs: list[Any]) -> str:
    """The unmutated kernel on the GPU, and how far its outputs are from the emulator's."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        verdict = _child("gpu", name, save=f"{folder}/gpu.pt")
        if verdict != "right":
            return verdict
        pairs = zip(outputs, torch.load(f"{folder}/gpu.pt"), strict=True)
        apart = max(float((a.double() - b.double()).abs().max() / a.double().abs().max()) for a, b in pairs)
    return f"right; largest difference from the emulator {apart:.2g} of the largest value"


def compare(path: str) -> None:
    """Print the table: what was recorded, and what this machine's GPU does."""
    import torch

    recorded = torch.load(path)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, limit {LIMIT_S} s\n")
    print("| kernel | fault | emulator, 8 seeds | hardware |\n|---|---|---|---|")
    for name in KERNELS:
        print(f"| {name} | none | right | {_apart(name, recorded['outputs'][name])} |", flush=True)
    # A few at a time: most of a child's life is imports, compilation, or the wait for one that hangs.
    with ThreadPoolExecutor(4) as pool:
        reals = pool.map(lambda pair: _child("gpu", *pair), MUTANTS)
        for (name, mutant), real in zip(MUTANTS, reals, strict=True):
            verdict = recorded["verdicts"][name, mutant]
            print(f"| {name} | {mutant.replace(' | ', ': ')} | {verdict} | {real} |", flush=True)


def compile_all() -> None:
    """Compile every kernel and mutant for sm_90a."""
    for name, mutant in [(name, "") for name in KERNELS] + MUTANTS:
        print(f"{name}: {mutant or 'no fault'}: {_child('compile', name, mutant)}", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="FILE", help="run the emulator's side and save it")
    parser.add_argument("--against", metavar="FILE", help="run the GPU's side and print both")
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        where, name, mutant, save = json.loads(chosen.child)
        children = {"gpu": child_gpu, "emulator": child_emulator, "compile": child_compile}
        print(children[where](name, mutant, save))
    elif chosen.record:
        record(chosen.record)
    elif chosen.against:
        compare(chosen.against)
    elif chosen.compile:
        compile_all()
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
