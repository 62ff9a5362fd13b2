"""A broadcast-Q call whose backward is run in the emulator, of either TLX backend, and its gradients in float64."""

from dataclasses import dataclass, replace

import torch

from jagged_attn.backends import reference
from jagged_attn.backends.base import Geometry
from jagged_attn.masks import Full
from jagged_attn.spec import AttentionSpec
from jagged_attn.testing.inputs import AttentionInputs, attention_inputs

TAIL = 70


@dataclass(frozen=True)
class BroadcastQCase:
    inputs: AttentionInputs
    spec: AttentionSpec
    out: torch.Tensor
    lse: torch.Tensor
    exact: tuple[torch.Tensor, ...]

    @classmethod
    def make(cls, num_queries, lengths, act="softmax", heads=1, dim=64, dtype=torch.bfloat16, tail=TAIL, out_scale=1.0):
        inputs = attention_inputs(
            torch.tensor(lengths, dtype=torch.int64),
            num_shared_queries=num_queries, num_heads=heads, head_dim=dim, dtype=dtype, extra_rows=tail,
        )  # fmt: skip
        spec = AttentionSpec(
            "broadcast_q", dtype, heads, heads, dim, dim, Full(), (act,), dim**-0.5, out_scale, deterministic=False
        )
        x, exact_spec = inputs.to(torch.float64), replace(spec, dtype=torch.float64)
        geometry = Geometry(None, inputs.layout_kv.offsets, ())
        out, lse = reference.forward(x.q, x.k, x.v, geometry, exact_spec)
        exact = reference.backward(x.dout, x.q, x.k, x.v, out, lse, geometry, exact_spec)
        return cls(inputs, spec, out.to(dtype), lse.float(), exact)

    def check(self, grads):
        """P and dS are rounded to the dtype, and so is what is stored; half of ``eps`` each."""
        for name, got, want in zip(("dq", "dk", "dv"), grads, self.exact, strict=True):
            assert got.dtype == self.spec.dtype
            error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1e-30)
            assert error <= torch.finfo(got.dtype).eps, (name, float(error))
