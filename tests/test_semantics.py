"""What ``semantics`` promises, for every backend: values, gradients, and what must not happen."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CASES, SHORT, Case, call, run
from targets import Target
from torch import Tensor

import jagged_attn as ja
from jagged_attn.testing.inputs import AttentionInputs
from jagged_attn.testing.tolerance import assert_within

BY_NAME = {case.name: case for case in CASES}
# Every edge of a tile is met once, in float32; what follows uses short sequences, since an interpreter is slow.
HALF_CASES = (
    "self", "self-grouped-heads", "cross", "causal-cross", "window-cross", "activation-gelu", "activation-mix-grouped",
    "activation-gelu-negative", "broadcast-q-short",
)  # fmt: skip
ISOLATION_CASES = (
    "self-short", "cross", "causal-cross", "window-cross", "activation-gelu", "broadcast-q-short", "block-diagonal-odd",
)  # fmt: skip
SHORT_CASES = ("self-short", "cross", "causal-cross", "broadcast-q-short")


def check(case: Case, target: Target, dtype: torch.dtype, magnitude: float = 1.0, each_sequence: bool = True) -> None:
    """Compare a backend with the reference in float64, as closely as eager in the same dtype permits."""
    inputs = case.inputs(dtype, "cpu", magnitude)
    exact = run(inputs.to(torch.float64), "reference", **case.options)
    eager = run(inputs, "eager", **case.options)
    on_device = case.inputs(dtype, target.device, magnitude)
    assert all(torch.equal(getattr(on_device, x).cpu(), getattr(inputs, x)) for x in ("q", "k", "v", "dout"))
    actual = run(on_device, target.backend, **case.options)
    facts = {"terms": max(inputs.k.shape[0], inputs.q.shape[0]), "largest_score": largest_score(inputs, case)}
    for name in exact:
        results = actual[name].cpu(), exact[name], eager[name]
        if target.device == "cuda" and str(case.options.get("activation")).startswith("fast_"):
            # The hardware's tanh: what the activations' own test holds to a thousandth, beside what the dtype costs.
            error, of_dtype = ((x.double() - exact[name]).norm() for x in (results[0], eager[name]))
            assert error <= 2 * of_dtype + 1e-3 * exact[name].norm(), name
            continue
        assert_within(f"{case.name} {name}", *results, **facts)
        # Outputs shrink as sequences grow: a tolerance for the whole batch would be blind on the longest of them.
        for rows in long_sequences(case, name) if each_sequence else ():
            assert_within(f"{case.name} {name}, {rows}", *(x[rows] for x in results), **facts)


def largest_score(inputs: AttentionInputs, case: Case) -> float:
    """A bound of what is exponentiated: ``scale`` times the largest norms of a query and a key."""
    norms = [x.double().norm(dim=-1).max().item() if x.numel() else 0.0 for x in (inputs.q, inputs.k)]
    return abs(case.options.get("scale", case.dims[0] ** -0.5)) * norms[0] * norms[1]


def long_sequences(case: Case, name: str) -> list[slice]:
    """The rows of each sequence of more than 30 keys in one of the results of ``run``."""
    if case.num_shared_queries is not None and name not in ("dk", "dv"):
        return [] if name == "dq" else [slice(b, b + 1) for b, n in enumerate(case.lengths) if n > 30]
    lengths = case.lengths if name in ("dk", "dv") or case.lengths_q is None else case.lengths_q
    ends = list(itertools.accumulate(lengths))
    return [slice(end - n, end) for n, end, keys in zip(lengths, ends, case.lengths, strict=True) if n and keys > 30]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_matches_the_reference_in_float32(case: Case, target: Target, poisoned: None) -> None:
    check(case, target, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HALF_CASES)
def test_matches_the_reference_in_half_precision(name: str, dtype: torch.dtype, target: Target, poisoned: None) -> None:
    check(BY_NAME[name], target, dtype)


@pytest.mark.parametrize("name", SHORT_CASES)
def test_large_logits_stay_finite(name: str, target: Target) -> None:
    # Gradients are small differences of large terms here: only their largest elements have a tolerance to speak of.
    check(BY_NAME[name], target, torch.float32, magnitude=30.0, each_sequence=False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_backend_that_takes_float64_is_exact_in_it(case: Case) -> None:
    inputs = case.inputs(torch.float64, "cpu")
    exact, eager = (run(inputs, backend, **case.options) for backend in ("reference", "eager"))
    for name in exact:
        torch.testing.assert_close(eager[name], exact[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("name", ISOLATION_CASES)
def test_a_bad_sequence_leaves_the_bits_of_all_others(name: str, bad: float, target: Target) -> None:
    case = dataclasses.replace(BY_NAME[name], extra_rows=3)
    clean = case.inputs(torch.float32, target.device)
    before = run(clean, target.backend, **case.options)
    victim = next(b for b, n in enumerate(case.lengths) if n > 1 and (case.lengths_q is None or case.lengths_q[b]))
    rows = [
        slice(*layout.offsets[victim : victim + 2].tolist())
        for layout in (clean.layout_q or clean.layout_kv, clean.layout_kv)
    ]
    dirty = dataclasses.replace(clean, **{x: getattr(clean, x).clone() for x in ("q", "k", "v", "dout")})
    dirty.k[rows[1]] = bad
    dirty.v[rows[1]] = bad
    if clean.layout_q is not None:
        dirty.q[rows[0]] = bad
        dirty.dout[rows[0]] = bad
        dirty.q[-3:] = dirty.dout[-3:] = bad  # rows of no sequence
    dirty.k[-3:] = dirty.v[-3:] = bad
    after = run(dirty, target.backend, **case.options)
    for x in before:
        if clean.layout_q is None and x == "dq":  # a sum over the batch
            continue
        keep = torch.ones(before[x].shape[0], dtype=torch.bool)
        if clean.layout_q is None and x in ("out", "lse"):
            keep[victim] = False
        else:
            keep[rows[x in ("dk", "dv")]] = False
        assert torch.equal(before[x][keep], after[x][keep]), x


def test_rows_of_no_sequence_give_exact_zeros(target: Target, poisoned: None) -> None:
    case = BY_NAME["self-rows-of-no-sequence"]
    results = run(case.inputs(torch.float32, target.device), target.backend)
    assert not results["out"][-case.extra_rows :].any()
    assert (results["lse"][-case.extra_rows :] == -torch.inf).all()
    for name in ("dq", "dk", "dv"):
        assert not results[name][-case.extra_rows :].any(), name


@pytest.mark.parametrize("name", SHORT_CASES)
def test_deterministic_gradients_repeat_bit_for_bit(name: str, target: Target) -> None:
    case = BY_NAME[name]
    inputs = case.inputs(torch.float32, target.device)
    first, second = (run(inputs, target.backend, deterministic=True, **case.options) for _ in range(2))
    for x in first:
        assert torch.equal(first[x], second[x]), x


def _strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The same numbers under other strides."""
    rows, heads, dim = x.shape
    if kind == "fused":  # a block of columns of a fused projection
        wide = x.new_full((rows, 3 * heads * dim + 5), torch.nan)
        view = wide[:, heads * dim + 5 : 2 * heads * dim + 5].view(rows, heads, dim)
    elif kind == "heads-first":
        view = x.new_full((heads, rows, dim), torch.nan).transpose(0, 1)
    elif kind == "every-other-head":
        view = x.new_full((rows, 2 * heads, dim + 3), torch.nan)[:, ::2, 1 : dim + 1]
    else:
        assert kind == "every-other-row"
        view = x.new_full((2 * rows, heads, dim), torch.nan)[::2]
    view.copy_(x)
    return view


@pytest.mark.parametrize("kind", ["fused", "heads-first", "every-other-head", "every-other-row"])
@pytest.mark.parametrize("name", ["self-short", "cross", "broadcast-q-short"])
def test_strides_do_not_matter(name: str, kind: str, target: Target) -> None:
    case = BY_NAME[name]
    plain = case.inputs(torch.float32, target.device)
    views = dataclasses.replace(plain, **{x: _strided(getattr(plain, x), kind) for x in ("q", "k", "v")})
    expected, actual = (run(x, target.backend, **case.options) for x in (plain, views))
    for x in expected:
        torch.testing.assert_close(actual[x], expected[x], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["expanded-scalar", "expanded-row", "transposed", "slice-of-cat", "last-dim-strided"])
@pytest.mark.parametrize("name", ["self-short", "broadcast-q-short"])
def test_strides_of_the_incoming_gradient_do_not_matter(name: str, kind: str, target: Target) -> None:
    case = BY_NAME[name]
    inputs = case.inputs(torch.float32, target.device)
    shape = inputs.dout.shape
    dout = {
        "expanded-scalar": lambda: inputs.dout.new_ones(()).expand(shape),
        "expanded-row": lambda: inputs.dout[:1].expand(shape),
        "transposed": lambda: torch.empty_like(inputs.dout.transpose(0, -2)).normal_().transpose(0, -2),
        "slice-of-cat": lambda: torch.cat([inputs.dout, inputs.dout], dim=-1)[..., shape[-1] :],
        "last-dim-strided": lambda: torch.stack([inputs.dout, inputs.dout], dim=-1)[..., 1],
    }[kind]()
    expected = run(dataclasses.replace(inputs, dout=dout.contiguous()), target.backend)
    actual = run(dataclasses.replace(inputs, dout=dout), target.backend)
    for x in expected:
        torch.testing.assert_close(actual[x], expected[x], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["self-short", "broadcast-q-short"])
def test_addresses_past_two_to_the_31_elements(name: str, target: Target) -> None:
    case = dataclasses.replace(BY_NAME[name], lengths=(20, 0, 21), dims=(16, 16))
    inputs = case.inputs(torch.float32, target.device)
    expected = run(inputs, target.backend)
    pitch = 2**31 // 30  # rows from the 31st on lie past 2**31 elements; untouched pages cost no memory on a CPU

    def spread(x: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = x.shape
        buffer = torch.empty((rows - 1) * pitch + heads * dim, dtype=x.dtype, device=x.device)
        return buffer.as_strided(x.shape, (pitch, dim, 1)).copy_(x)

    wide = dataclasses.replace(inputs, k=spread(inputs.k), v=spread(inputs.v))
    actual = run(wide, target.backend)
    for x in expected:
        torch.testing.assert_close(actual[x], expected[x], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "offsets",
    [(0, 500, 3, 7), (-4, 2, 5, 5), (0, 2**31 - 1, 2**31 - 1, 2**31 - 1), (0, 4, 3, 7), (0, -1, -1, -1)],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True])
def test_bad_offsets_touch_nothing_outside_the_tensors(offsets: tuple[int, ...], shared: bool, target: Target) -> None:
    guarded = [torch.full((7 + 200, 2, 16), torch.nan, device=target.device) for _ in range(3)]
    q, k, v = (x[100:107].normal_().requires_grad_() for x in guarded)
    layout = ja.JaggedLayout(torch.tensor(offsets, device=target.device))
    if shared:
        out = ja.broadcast_q_attention(q, k, v, layout, backend=target.backend)
    else:
        out = ja.jagged_attention(q, k, v, layout, backend=target.backend)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.shape == ((3, 7, 2, 16) if shared else (7, 2, 16))
    for x in (out, *grads):
        assert not x.isnan().any()
    with pytest.raises(ValueError, match="offsets must"):
        layout.validate_sync(7)


def test_offsets_without_an_element_mean_no_sequence(target: Target) -> None:
    q = torch.zeros(0, 2, 16, device=target.device, requires_grad=True)
    offsets = torch.zeros(0, dtype=torch.int64, device=target.device)
    out = ja.jagged_attention(q, q, q, offsets, backend=target.backend)
    assert out.shape == (0, 2, 16)
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert dq.shape == q.shape
    shared = torch.ones(3, 2, 16, device=target.device, requires_grad=True)
    out = ja.broadcast_q_attention(shared, q, q, offsets, backend=target.backend)
    assert out.shape == (0, 3, 2, 16)
    (dq,) = torch.autograd.grad(out.sum(), shared)
    assert torch.equal(dq, torch.zeros_like(shared))


def test_offsets_of_different_dtypes_go_together(target: Target) -> None:
    case = BY_NAME["cross"]
    inputs = case.inputs(torch.float32, target.device)
    assert inputs.layout_q is not None
    mixed = dataclasses.replace(inputs, layout_q=ja.JaggedLayout(inputs.layout_q.offsets.int()))
    expected, actual = run(inputs, target.backend), run(mixed, target.backend)
    assert all(torch.equal(expected[x], actual[x]) for x in expected)


def test_offsets_written_in_place_are_noticed(target: Target) -> None:
    offsets = torch.tensor([0, 2, 9], device=target.device)
    q, k, v = torch.randn(3, 9, 2, 16, device=target.device).unbind(0)
    ja.jagged_attention(q, k, v, offsets, backend=target.backend)
    offsets[1] = 6
    actual = ja.jagged_attention(q, k, v, offsets, backend=target.backend)
    expected = ja.jagged_attention(q, k, v, offsets.clone(), backend=target.backend)
    assert torch.equal(actual, expected)


def test_autocast_casts_the_inputs(target: Target) -> None:
    inputs = BY_NAME["self-short"].inputs(torch.float32, target.device)
    with torch.autocast(target.device, dtype=torch.float16):
        results = run(inputs, target.backend)
    expected = run(inputs.to(torch.float16), target.backend)
    assert results["out"].dtype == torch.float16
    assert torch.equal(results["out"], expected["out"])
    assert results["dq"].dtype == torch.float32
    assert torch.equal(results["dq"], expected["dq"].float())


def test_gradients_exist_when_only_one_input_wants_one(target: Target) -> None:
    inputs = BY_NAME["self-short"].inputs(torch.float32, target.device)
    all_of_them = run(inputs, target.backend)
    for name in "qkv":
        leaf = getattr(inputs, name).detach().requires_grad_()
        out = call(dataclasses.replace(inputs, **{name: leaf}), target.backend)
        (grad,) = torch.autograd.grad(out, leaf, inputs.dout)
        assert torch.equal(grad, all_of_them[f"d{name}"])


def test_double_backward_is_refused_clearly(target: Target) -> None:
    inputs = BY_NAME["self-one-sequence"].inputs(torch.float32, target.device)
    leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = call(inputs, target.backend)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    with pytest.raises(ja.UnsupportedError, match="does not support double backward"):
        grads[0].sum().backward()


def test_forward_mode_is_refused_clearly(target: Target) -> None:
    inputs = BY_NAME["self-one-sequence"].inputs(torch.float32, target.device)
    with pytest.raises(ja.UnsupportedError, match="does not support forward-mode"):
        torch.func.jvp(
            lambda q: call(dataclasses.replace(inputs, q=q), target.backend), (inputs.q,), (torch.ones_like(inputs.q),)
        )


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "grad": lambda f, q: torch.func.grad(lambda x: f(x).sum())(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "vmap": lambda f, q: torch.vmap(f)(q[None]),
    "vmap-with-gradients": lambda f, q: torch.vmap(f)(q[None].requires_grad_()),
    "batched-gradients": lambda f, q: torch.autograd.functional.jacobian(f, q, vectorize=True),
    "compiled-grad": lambda f, q: torch.compile(torch.func.grad(lambda x: f(x).sum()), backend="eager")(q),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_are_refused_clearly(transform: Any, target: Target) -> None:
    inputs = BY_NAME["self-one-sequence"].inputs(torch.float32, target.device)
    with pytest.raises(ja.UnsupportedError, match=r"does not support the transforms of torch\.func"):
        transform(lambda q: call(dataclasses.replace(inputs, q=q), target.backend), inputs.q)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_jit_tracing_is_refused_clearly(requires_grad: bool, target: Target) -> None:
    inputs = BY_NAME["self-one-sequence"].inputs(torch.float32, target.device)
    with pytest.raises(ja.UnsupportedError, match=r"does not support torch\.jit\.trace"):
        torch.jit.trace(
            lambda q: call(dataclasses.replace(inputs, q=q), target.backend), (inputs.q.requires_grad_(requires_grad),)
        )


def test_the_output_may_be_written_in_place(target: Target) -> None:
    inputs = BY_NAME["self-short"].inputs(torch.float32, target.device)
    q = inputs.q.requires_grad_()
    out = call(dataclasses.replace(inputs, q=q), target.backend).clone()
    written = call(dataclasses.replace(inputs, q=q), target.backend)
    with torch.no_grad():
        written += 1
    assert torch.equal(written, out + 1)
    assert written._base is None


def test_a_layout_made_in_inference_mode_serves_a_training_step(target: Target) -> None:
    inputs = BY_NAME["self-short"].inputs(torch.float32, target.device)
    with torch.inference_mode():
        layout = ja.JaggedLayout.from_lengths(torch.tensor(SHORT, device=target.device))
    expected = run(inputs, target.backend)
    actual = run(dataclasses.replace(inputs, layout_q=layout, layout_kv=layout), target.backend)
    assert all(torch.equal(actual[x], expected[x]) for x in expected)


def test_lse_is_not_differentiable(target: Target) -> None:
    inputs = BY_NAME["self-one-sequence"].inputs(torch.float32, target.device)
    out, lse = call(dataclasses.replace(inputs, q=inputs.q.requires_grad_()), target.backend, return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad


def test_inference_mode_gives_the_same_numbers(target: Target) -> None:
    inputs = BY_NAME["self-short"].inputs(torch.float32, target.device)
    expected = call(inputs, target.backend)
    with torch.inference_mode():
        lengths = torch.tensor(SHORT, device=target.device)
        fresh = dataclasses.replace(
            inputs, layout_q=(layout := ja.JaggedLayout.from_lengths(lengths)), layout_kv=layout
        )
        for x in (inputs, fresh):
            assert torch.equal(call(x, target.backend), expected)


def test_outputs_are_contiguous_and_own_their_memory(target: Target) -> None:
    results = run(BY_NAME["cross"].inputs(torch.float32, target.device), target.backend)
    for name, x in results.items():
        assert x.is_contiguous(), name
        assert x.storage_offset() == 0, name


def test_inputs_are_left_alone(target: Target) -> None:
    inputs = BY_NAME["activation-mix-grouped"].inputs(torch.float32, target.device)
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.layout_kv.offsets)]
    run(inputs, target.backend, **BY_NAME["activation-mix-grouped"].options)
    after = (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.layout_kv.offsets)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_global_state_is_left_alone(target: Target) -> None:
    def state() -> tuple[object, ...]:
        return (
            torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_rng_state().tolist(),
            torch.backends.cuda.matmul.allow_tf32, torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip

    inputs = BY_NAME["broadcast-q-short"].inputs(torch.float32, target.device)
    before = state()
    run(inputs, target.backend)
    assert state() == before


@pytest.mark.parametrize(("fast", "slow"), [("fast_gelu", "gelu_tanh"), ("fast_silu", "silu")])
def test_fast_activations_differ_by_at_most_a_thousandth(fast: str, slow: str, target: Target) -> None:
    # 241 queries of one key of 1: out = act(q k) v with v = 1, so out is the activation itself.
    x = torch.linspace(-12, 12, 241, device=target.device).view(-1, 1, 1)
    one, pad = torch.ones_like(x[:1]), torch.nn.functional.pad
    layout_q, layout_kv = (ja.JaggedLayout.uniform(1, length, target.device) for length in (241, 1))
    inputs = AttentionInputs(
        pad(x, (0, 15)), pad(one, (0, 15)), one.expand(-1, -1, 16).contiguous(), layout_q, layout_kv, torch.ones_like(x)
    )
    outs = [call(inputs, target.backend, activation=name, scale=1.0) for name in (fast, slow)]
    assert (outs[0] - outs[1]).abs().max() <= 1e-3
