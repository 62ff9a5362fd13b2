"""The cases of the semantics suite: what every backend must compute."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import jagged_attn as ja
from jagged_attn.activations import ELEMENTWISE
from jagged_attn.testing.inputs import AttentionInputs, attention_inputs, lower_scores

# 0, 1 and both sides of the tile sizes in use.
EDGES = (0, 1, 31, 32, 33, 0, 63, 64, 65, 127, 128, 129, 0)
SHORT = (5, 0, 1, 17, 33)


@dataclass(frozen=True)
class Case:
    """One call, by its static facts and lengths; ``num_shared_queries`` makes it broadcast-Q.

    Scores have mean 0 and variance 1, or a ``mean_score`` below 0: see ``lower_scores``.
    """

    name: str
    lengths: tuple[int, ...] = SHORT
    lengths_q: tuple[int, ...] | None = None
    num_shared_queries: int | None = None
    heads: tuple[int, int] = (3, 3)
    dims: tuple[int, int] = (16, 16)
    extra_rows: int = 0
    mean_score: float = 0.0
    offsets_dtype: torch.dtype = torch.int64
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self, dtype: torch.dtype, device: str, magnitude: float = 1.0) -> AttentionInputs:
        """The case's tensors."""
        inputs = attention_inputs(
            torch.tensor(self.lengths, dtype=torch.int64),
            None if self.lengths_q is None else torch.tensor(self.lengths_q, dtype=torch.int64),
            num_shared_queries=self.num_shared_queries,
            num_heads=self.heads[0], num_kv_heads=self.heads[1], head_dim=self.dims[0], value_head_dim=self.dims[1],
            dtype=dtype, device=device, offsets_dtype=self.offsets_dtype, extra_rows=self.extra_rows,
        )  # fmt: skip
        if self.mean_score:
            lower_scores(inputs.q, inputs.k, self.mean_score)
        inputs.q.mul_(magnitude)
        return inputs


def call(inputs: AttentionInputs, backend: str, **options: Any) -> Any:
    """The public operation that these inputs are for."""
    if inputs.layout_q is None:
        return ja.broadcast_q_attention(inputs.q, inputs.k, inputs.v, inputs.layout_kv, backend=backend, **options)
    layout_kv = None if inputs.layout_kv is inputs.layout_q else inputs.layout_kv
    return ja.jagged_attention(inputs.q, inputs.k, inputs.v, inputs.layout_q, layout_kv, backend=backend, **options)


def run(inputs: AttentionInputs, backend: str, **options: Any) -> dict[str, Tensor]:
    """Output and gradients of a call, and its ``lse`` where it has one."""
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    inputs = AttentionInputs(*leaves, inputs.layout_q, inputs.layout_kv, inputs.dout)
    results = {}
    if options.get("activation", "softmax") == "softmax":
        out, results["lse"] = call(inputs, backend, return_lse=True, **options)
    else:
        out = call(inputs, backend, **options)
    results["out"] = out
    results |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, inputs.dout), strict=True)
    return {name: x.detach() for name, x in results.items()}


def _masked(name: str, mask: ja.Mask, **fields: Any) -> Case:
    return Case(name, options={"mask": mask}, **fields)


_CROSS = {"lengths": (2, 0, 19, 40, 7, 65), "lengths_q": (5, 3, 0, 33, 70, 1)}
_MIX = ("softmax", "gelu", "silu", "softmax", "relu_square", "gelu")

CASES = [
    Case("self", lengths=EDGES, dims=(24, 24)),
    Case("self-short"),
    Case("self-one-sequence", lengths=(150,), heads=(2, 2)),
    Case("self-int32-offsets", offsets_dtype=torch.int32),
    Case("self-rows-of-no-sequence", extra_rows=150),
    Case("self-grouped-heads", lengths=(33, 0, 70), heads=(6, 2)),
    Case("self-multi-query", heads=(5, 1)),
    Case("self-narrow-values", dims=(40, 8)),
    Case("self-wide-values", dims=(8, 80)),
    Case("self-odd-head-dim", dims=(12, 12)),
    Case("self-scales", options={"scale": 0.3, "out_scale": -1.7}),
    Case("self-zero-scale", options={"scale": 0.0}),
    Case("self-negative-scale", options={"scale": -0.4}),
    Case("self-deterministic", options={"deterministic": True}),
    Case("cross", **_CROSS, dims=(16, 24)),
    Case("cross-grouped-heads", **_CROSS, heads=(4, 2)),
    Case("cross-alternately-empty", lengths=(0, 2, 0, 2), lengths_q=(1, 2, 1, 2)),
    Case("cross-keys-without-queries", lengths=(100, 100, 100), lengths_q=(150, 0, 150), heads=(2, 2)),
    Case("cross-many-trailing-empty", lengths=(9, 4) + (0,) * 40, lengths_q=(3, 8) + (0,) * 40),
    _masked("causal", ja.Causal(), lengths=EDGES, heads=(2, 2)),
    Case("causal-negative-scale", options={"mask": ja.Causal(), "scale": -0.4}),
    Case("causal-zero-scale", options={"mask": ja.Causal(), "scale": 0.0}),
    _masked("causal-cross", ja.Causal(), **_CROSS),
    _masked("causal-cross-top-left", ja.Causal("top_left"), **_CROSS),
    _masked("causal-grouped", ja.Causal(), lengths=(70, 3, 0, 129), heads=(4, 2)),
    _masked("window", ja.SlidingWindow(7, 3), lengths=EDGES, heads=(2, 2)),
    _masked("window-wide", ja.SlidingWindow(70, 65), lengths=(1, 200, 70, 0), heads=(2, 1)),
    _masked("window-own-key-only", ja.SlidingWindow(0, 0)),
    _masked("window-open-left", ja.SlidingWindow(None, 2), lengths=(70, 9)),
    _masked("window-open-right", ja.SlidingWindow(1, None), lengths=(70, 9)),
    _masked("window-cross", ja.SlidingWindow(4, 2), **_CROSS),
    _masked("window-cross-top-left", ja.SlidingWindow(4, 2, "top_left"), **_CROSS),
    _masked("block-diagonal", ja.BlockDiagonal(64), lengths=EDGES, heads=(2, 2)),
    _masked("block-diagonal-odd", ja.BlockDiagonal(13), lengths=(5, 0, 13, 14, 70)),
    *(Case(f"activation-{name}", options={"activation": name}) for name in ELEMENTWISE),
    # Where x act(x) nearly cancels, an error that is small beside x is not small beside the result.
    *(
        Case(f"activation-{name}-negative", mean_score=-2.5, options={"activation": name})
        for name in ("gelu", "gelu_tanh", "silu", "fast_gelu", "fast_silu")
    ),
    Case("activation-causal", lengths=(70, 0, 9), options={"activation": "gelu", "mask": ja.Causal()}),
    Case("activation-window", lengths=(70, 0, 9), options={"activation": "silu", "mask": ja.SlidingWindow(9, 5)}),
    Case("activation-cross", **_CROSS, options={"activation": "fast_gelu", "scale": 1.0, "out_scale": 0.5}),
    Case("activation-mix", heads=(6, 6), options={"activation": _MIX}),
    Case("activation-mix-grouped", heads=(6, 2), options={"activation": _MIX}),
    Case("activation-mix-without-softmax", options={"activation": ("gelu", "silu", "relu")}),
    Case("broadcast-q", lengths=EDGES, num_shared_queries=5, dims=(24, 16)),
    Case("broadcast-q-short", num_shared_queries=9),
    Case("broadcast-q-one-query", num_shared_queries=1),
    Case("broadcast-q-many-queries", num_shared_queries=129, heads=(2, 2), lengths=(3, 0, 65)),
    Case("broadcast-q-grouped-heads", num_shared_queries=33, heads=(4, 2)),
    Case("broadcast-q-rows-of-no-sequence", num_shared_queries=7, extra_rows=90),
    Case("broadcast-q-activation", num_shared_queries=7, options={"activation": "gelu", "scale": 1.0}),
    Case("broadcast-q-mix", num_shared_queries=7, heads=(6, 2), options={"activation": _MIX, "out_scale": 0.5}),
    Case("broadcast-q-window", num_shared_queries=20, lengths=(30, 0, 3, 65), options={"mask": ja.SlidingWindow(6, 2)}),
    Case("broadcast-q-causal", num_shared_queries=20, lengths=(30, 0, 3, 65), options={"mask": ja.Causal()}),
    Case("broadcast-q-deterministic", num_shared_queries=9, options={"deterministic": True}),
    Case("all-empty", lengths=(0, 0, 0)),
    Case("all-empty-rows-of-no-sequence", lengths=(0, 0, 0), extra_rows=3),
    Case("no-sequence", lengths=()),
    Case("no-sequence-rows-of-no-sequence", lengths=(), extra_rows=3),
    Case("cross-no-keys-at-all", lengths=(0, 0), lengths_q=(3, 2)),
    Case("cross-no-queries-at-all", lengths=(3, 2), lengths_q=(0, 0)),
    Case("broadcast-q-all-empty", lengths=(0, 0), num_shared_queries=3),
    Case("broadcast-q-no-sequence", lengths=(), num_shared_queries=3),
    Case("broadcast-q-no-queries", lengths=(3, 2), num_shared_queries=0),
]
