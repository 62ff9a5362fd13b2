"""From a call's static facts and device to a backend, or to an error that lists every refusal."""

import importlib
from functools import cache, lru_cache
from typing import cast

from .backends import BACKENDS
from .backends.base import Arch, Capability, Launch
from .errors import BackendReport, UnsupportedError
from .spec import AttentionSpec

AUTO = "auto"


@cache
def capability(backend: str) -> Capability:
    """The capability module of a backend; imports torch alone."""
    return cast(Capability, importlib.import_module(f".backends.{BACKENDS[backend].capability}", __package__))


@cache
def load(backend: str) -> Launch:
    """The launch module of a backend; imports its kernels."""
    return cast(Launch, importlib.import_module(f".backends.{BACKENDS[backend].launch}", __package__))


def check_name(backend: object) -> None:
    """Raise unless ``backend`` is ``"auto"`` or names a backend."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a string, got {type(backend).__name__}.")
    if backend != AUTO and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join([AUTO, *BACKENDS])}, got {backend!r}.")


@lru_cache(maxsize=4096)
def explain(spec: AttentionSpec, arch: Arch) -> tuple[BackendReport, ...]:
    """What each backend says of such a call, in the order in which ``"auto"`` asks."""
    return tuple(BackendReport(name, capability(name).supports(spec, arch)) for name in BACKENDS)


@lru_cache(maxsize=4096)
def choose(backend: str, spec: AttentionSpec, arch: Arch) -> str:
    """The backend that runs such a call.

    Args:
        backend: a name, which is run or refused, never replaced; or ``"auto"``: the first that takes the call among
            those meant for the device.
        spec: the call's static facts.
        arch: its device.

    Raises:
        UnsupportedError: there is none; it lists what each backend that was asked said.
    """
    if backend != AUTO:
        refusal = capability(backend).supports(spec, arch)
        if refusal is not None:
            raise UnsupportedError(f"backend {backend!r} does not run this call.", [BackendReport(backend, refusal)])
        return backend
    reports = explain(spec, arch)
    for report in reports:
        if report.supported and arch.device_type in BACKENDS[report.backend].auto_devices:
            return report.backend
    passed_over = f"runs it, but 'auto' does not choose it on {arch.device_type!r}; name it to use it"
    raise UnsupportedError(
        f"no backend that backend='auto' may choose on {arch.device_type!r} runs this call.",
        [report._replace(refusal=report.refusal or passed_over) for report in reports],
    )
