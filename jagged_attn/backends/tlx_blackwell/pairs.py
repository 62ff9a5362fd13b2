# mypy: allow-untyped-defs
"""What the kernels of one CTA and of pairs of CTAs share."""

import triton
import triton.language as tl

from .._jit.tlx import tlx


@triton.jit
def arrive(bar, C: tl.constexpr):
    """Arrive at the barrier of the CTA that issues the products."""
    if C.two_ctas:
        tlx.barrier_arrive(bar, 1, remote_cta_rank=0)
    else:
        tlx.barrier_arrive(bar, 1)
