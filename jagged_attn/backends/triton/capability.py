"""What the portable backend runs, and the tile tables it wants. Imports torch alone."""

import os
from importlib.util import find_spec

import torch

from ...schedule.choose import TritonConfigs, triton_configs
from ...schedule.tiles import WHOLE_SEQUENCE, TableRequest
from ...spec import AttentionSpec
from ..base import Arch

MAX_HEAD_DIM = 256
_NO_INTERPRETER = "runs on a CPU only in Triton's interpreter, for tests (TRITON_INTERPRET=1)"


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter: Triton itself reads this variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def refuses_device(arch: Arch) -> str | None:
    """Why plain Triton kernels do not run on a device; ``None`` if they do where Triton is installed."""
    if arch.device_type == "cpu":
        return None if is_interpreted() else _NO_INTERPRETER
    if arch.device_type != "cuda":
        return f"does not run on device type {arch.device_type!r}"
    if not arch.is_hip and (arch.capability or (0, 0)) < (8, 0):
        return f"needs compute capability 8.0 or newer, got {arch.capability}"
    return None


def supports(spec: AttentionSpec, arch: Arch) -> str | None:
    """See ``Capability.supports``."""
    refusal = refuses_device(arch)
    if refusal is not None:
        return refusal
    if spec.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16 and float32, got {spec.dtype}"
    for name, dim in (("head dim", spec.head_dim), ("value head dim", spec.value_head_dim)):
        if dim > MAX_HEAD_DIM:
            return f"takes a {name} of at most {MAX_HEAD_DIM}, got {dim}"
    if _configs(spec, arch) is None:
        return f"has no tile of head dims {spec.head_dim} and {spec.value_head_dim} that fits into shared memory"
    if find_spec("triton") is None:
        return "needs the triton package, which is not installed"
    return None


def configs(spec: AttentionSpec, arch: Arch) -> TritonConfigs:
    """The configs of a call that is supported."""
    found = _configs(spec, arch)
    if found is None:
        raise ValueError(f"spec must be supported, got {spec} on {arch}.")
    return found


def _configs(spec: AttentionSpec, arch: Arch) -> TritonConfigs | None:
    return triton_configs(
        spec.head_dim, spec.value_head_dim, spec.dtype.itemsize, arch.device_type, arch.capability, arch.is_hip
    )


def table_requests(spec: AttentionSpec, arch: Arch) -> tuple[TableRequest, ...]:
    """See ``Capability.table_requests``: of the forward, of dQ, of dK and dV."""
    sizes = configs(spec, arch)
    if spec.kind == "broadcast_q":
        return (
            TableRequest("kv", WHOLE_SEQUENCE, "kv"),
            TableRequest("kv", sizes.broadcast_q_partial.block_kv, "kv"),
            TableRequest("kv", sizes.backward_kv.block_kv, "kv"),
        )
    return (
        TableRequest("q", sizes.forward.block_q, "kv"),
        TableRequest("q", sizes.backward_q.block_q, "kv"),
        TableRequest("kv", sizes.backward_kv.block_kv, "q"),
    )
