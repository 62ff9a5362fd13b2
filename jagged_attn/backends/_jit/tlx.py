"""The one import of TLX: kernels write ``from jagged_attn.backends._jit.tlx import tlx``.

TLX comes with fbtriton. The emulator needs no switch here: it recognises this module object among the names that a
kernel uses and puts its own ``tlx`` in its place, so the source that the GPU runs is the source that the CPU checks.
"""

import importlib.util

if importlib.util.find_spec("triton.language.extra.tlx") is None:
    raise ImportError(
        "TLX is missing from the installed triton. Install fbtriton (pip install --no-deps fbtriton==3.7.4), "
        "which replaces the triton package."
    )

import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

__all__ = ["get_bufidx_phase", "tlx"]
