"""Ahead-of-time gates: compile a kernel for a GPU that is not there, and look at what came out.

What the emulator cannot see is seen here: shared memory as the compiler lays it out, tensor memory, warps, registers,
spilled bytes, serialised wgmma, and whether the instructions asked for are there. Needs fbtriton, no GPU, and a process
*without* ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jagged_attn.testing.emulator.parameters import SHARED_BYTES, TENSOR_COLUMNS

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Kinds of instruction, by what their PTX looks like.
KINDS: dict[str, str] = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05_mma": r"tcgen05\.mma\.",
    "tcgen05_mma_pair": r"tcgen05\.mma\.cta_group::2",
    "tcgen05_ld": r"tcgen05\.ld\.",
    "tcgen05_st": r"tcgen05\.st\.",
    "tcgen05_commit": r"tcgen05\.commit\.",
    "tma_load": r"cp\.async\.bulk\.tensor\.\d+d\.shared::",
    "tma_store": r"cp\.async\.bulk\.tensor\.\d+d\.global\.",
    "tma_reduce": r"cp\.reduce\.async\.bulk",
    "multicast": r"\.multicast::cluster",
    "mapa": r"\bmapa\.",
    "cp_async": r"cp\.async\.(ca|cg)\.",
    "proxy_fence": r"fence\.proxy\.async",
    "setmaxnreg": r"setmaxnreg\.",
    "try_cancel": r"clusterlaunchcontrol\.try_cancel",
    "mbarrier_wait": r"mbarrier\.try_wait",
    "named_barrier": r"\bbar(rier)?\.(sync|arrive)(\.aligned)?\s+\d+,",
    "local_load": r"\bld\.local\.",
    "local_store": r"\bst\.local\.",
}


@dataclass(frozen=True)
class Compilation:
    """One kernel configuration to compile.

    Args:
        name: For reports.
        kernel: The jit function.
        signature: Type of every argument that is not a constexpr: ``"*bf16"``, ``"i32"``, ``"fp32"``,
            ``"tensordesc<bf16[64, 128]>"``.
        constexprs: Value of every constexpr argument.
        arch: 90 (sm_90a) or 100 (sm_100a).
        options: Compiler options beyond ``num_warps=4, num_stages=1``; ``ctas_per_cga`` for clusters.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    arch: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, and the instructions it is made of.

    Args:
        name: Configuration.
        shared: Bytes of shared memory.
        tensor_columns: Columns of tensor memory.
        warps: Warps of the CTA.
        registers: Registers of a thread at launch.
        register_requests: Values that ``setmaxnreg`` asks for.
        spill_stores: Bytes spilled, as ptxas counts them.
        spill_loads: Bytes filled.
        warnings: Everything ptxas warned about.
        instructions: Count of each kind in ``KINDS``.
        ptx: The PTX.
    """

    name: str
    shared: int
    tensor_columns: int
    warps: int
    registers: int
    register_requests: tuple[int, ...]
    spill_stores: int
    spill_loads: int
    warnings: tuple[str, ...]
    instructions: Mapping[str, int]
    ptx: str = field(repr=False)

    @property
    def serialised(self) -> tuple[str, ...]:
        """Warnings that a wgmma had to be serialised: it runs at a fraction of its speed."""
        return tuple(w for w in self.warnings if re.search(r"wgmma.*serializ|C75\d\d", w))


@dataclass(frozen=True)
class Gate:
    """What a configuration may take and must contain.

    Args:
        shared: Most bytes of shared memory.
        tensor_columns: Most columns of tensor memory.
        warps: Most warps.
        spills: Most bytes spilled, stores and loads together.
        registers: Values that ``setmaxnreg`` must ask for: the compiler rewrites requests that do not fit.
        contains: Kinds of instruction that must occur.
        lacks: Kinds that must not.
    """

    shared: int = SHARED_BYTES
    tensor_columns: int = TENSOR_COLUMNS
    warps: int = 16
    spills: int = 0
    registers: Sequence[int] = ()
    contains: Sequence[str] = ()
    lacks: Sequence[str] = ()

    def violations(self, found: Resources) -> list[str]:
        """Everything about ``found`` that the gate does not let pass, in words."""
        unknown = [k for k in (*self.contains, *self.lacks) if k not in KINDS]
        if unknown:
            raise ValueError(f"contains and lacks must name kinds of {sorted(KINDS)}, got {unknown}.")
        spilled = found.spill_stores + found.spill_loads
        limits = [
            ("bytes of shared memory", found.shared, self.shared),
            ("columns of tensor memory", found.tensor_columns, self.tensor_columns),
            ("warps", found.warps, self.warps),
            ("bytes spilled", spilled, self.spills),
        ]
        told = [f"{value} {what}, {limit} allowed" for what, value, limit in limits if value > limit]
        told += [f"ptxas: {w}" for w in found.serialised]
        told += [f"no setmaxnreg {n}" for n in self.registers if n not in found.register_requests]
        told += [f"no {kind} instruction" for kind in self.contains if not found.instructions.get(kind)]
        told += [f"{found.instructions[k]} {k} instructions" for k in self.lacks if found.instructions.get(k)]
        return [f"{found.name}: {line}" for line in told]


def compile_kernel(wanted: Compilation) -> Resources:
    """Compile for ``sm_90a`` or ``sm_100a`` and measure.

    Raises:
        RuntimeError: In a process that decorates kernels for the interpreter.
        ValueError: An argument of the kernel has neither a type nor a value.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("ahead-of-time compilation needs a process without TRITON_INTERPRET=1.")
    made = triton.compile(
        ASTSource(fn=wanted.kernel, **_source(wanted)),
        target=GPUTarget("cuda", wanted.arch, 32),
        options={"num_warps": 4, "num_stages": 1, **wanted.options},
    )
    ptx = made.asm["ptx"]
    registers, stores, loads, warnings = _assemble(ptx, wanted.arch)
    return Resources(
        name=wanted.name,
        shared=made.metadata.shared,
        tensor_columns=getattr(made.metadata, "tmem_size", 0) or 0,
        warps=made.metadata.num_warps,
        registers=registers,
        register_requests=tuple(sorted({int(n) for n in re.findall(r"setmaxnreg\.\w+\.\S+\s+(\d+)", ptx)})),
        spill_stores=stores,
        spill_loads=loads,
        warnings=tuple(warnings),
        instructions=count_instructions(ptx),
        ptx=ptx,
    )


def _source(wanted: Compilation) -> dict[str, Any]:
    """Signature, constants and pointer alignment, in the order of the kernel's arguments."""
    names = wanted.kernel.arg_names
    missing = [n for n in names if n not in wanted.signature and n not in wanted.constexprs]
    if missing:
        raise ValueError(f"every argument must have a type or a value, got none for {missing} of {wanted.name}.")
    signature = {n: "constexpr" if n in wanted.constexprs else wanted.signature[n] for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    return {"signature": signature, "constexprs": dict(wanted.constexprs), "attrs": aligned}


def count_instructions(ptx: str) -> Counter[str]:
    """Instructions of each kind; comments and line markers do not count."""
    code = "\n".join(line for line in ptx.splitlines() if not line.lstrip().startswith((".loc", "//", ".file")))
    return Counter({kind: len(re.findall(pattern, code)) for kind, pattern in KINDS.items()})


def unmet_stores(ptx: str, meet: str = r"bar\.sync") -> tuple[int, list[str]]:
    """Stores and additions by TMA, and where the threads of a group do not meet around one.

    Sources have no barrier there. They rely on those that the compiler puts between the threads that write a buffer and
    the one that hands it to TMA, and after that one has waited for TMA to have read it; ``meet`` is their pattern.
    """
    kinds = {
        "write": r"st\.shared\.v\d|stmatrix",
        "meet": meet,
        "store": r"cp\.(?:reduce\.)?async\.bulk\.tensor\.\dd\.global",
        "read": r"cp\.async\.bulk\.wait_group\.read",
    }
    pattern = "|".join(f"(?P<{kind}>{regex})" for kind, regex in kinds.items())
    events = [str(match.lastgroup) for match in re.finditer(pattern, ptx)]
    faults = []
    for i, event in enumerate(events):
        if event == "store":
            before = next((e for e in reversed(events[:i]) if e != "store"), "nothing")
            if before != "meet":
                faults.append(f"a store by TMA behind a {before}")
        if event == "read" and i + 1 < len(events) and events[i + 1] != "meet":
            faults.append(f"a {events[i + 1]} behind a wait for TMA to have read")
    return events.count("store"), faults


def _assemble(ptx: str, arch: int) -> tuple[int, int, int, list[str]]:
    """Registers, bytes spilled and filled, and warnings, from ptxas."""
    tool = _TOOLS / "ptxas-blackwell" if arch >= 100 and (_TOOLS / "ptxas-blackwell").exists() else _TOOLS / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(tool), "-v", f"--gpu-name=sm_{arch}a", str(path), "-o", str(path.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas failed: {done.stderr}")
    return parse_ptxas(done.stderr)


def parse_ptxas(text: str) -> tuple[int, int, int, list[str]]:
    """Read the output of ``ptxas -v``: registers, spilled bytes stored and loaded, warnings."""

    def largest(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, text)), default=0)

    warnings = [line.strip() for line in text.splitlines() if re.search(r"warning|C75\d\d", line, re.IGNORECASE)]
    counts = largest(r"Used (\d+) registers"), largest(r"(\d+) bytes spill stores"), largest(r"(\d+) bytes spill loads")
    return (*counts, warnings)
