"""JaggedMultiHeadAttention against nn.MultiheadAttention and against attention written anew on padded tensors."""

import copy
import pickle
from typing import Any

import pytest
import torch
from module_inputs import (
    BACKEND,
    LENGTHS,
    OTHER_LENGTHS,
    JaggedTensor,
    assert_same,
    gradients,
    is_row,
    jagged,
    pad,
    padded_attention,
    randomize,
    rms_norm,
    unpad,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jagged_attn import BlockDiagonal, Causal, Full, Mask, SlidingWindow
from jagged_attn.jagged_tensor import with_values
from jagged_attn.modules import HeadNorm, JaggedMultiHeadAttention
from jagged_attn.testing.tolerance import assert_within

E, KDIM, VDIM = 14, 11, 9


def make(**options: Any) -> JaggedMultiHeadAttention:
    options = {"num_heads": 2, "backend": BACKEND, "dtype": torch.float64} | options
    return randomize(JaggedMultiHeadAttention(E, **options))


def padded_formulation(module: JaggedMultiHeadAttention, *inputs: Any) -> Tensor:
    """The module's values, from its parameters, by ``padded_attention``."""
    query, key, value = (*inputs, *[inputs[-1]] * (3 - len(inputs)))
    state = dict(module.named_parameters())
    heads, sizes = module.heads, module.in_proj.block_sizes
    if "in_proj.weight" in state:
        weights = state["in_proj.weight"].split(sizes)
    else:
        weights = [state[f"in_proj.{x}_weight"] for x in "qkv"]
    biases = state["in_proj.bias"].split(sizes) if "in_proj.bias" in state else [0.0, 0.0, 0.0]
    lengths = [tuple(x.lengths().tolist()) for x in (query, key, value)]
    q, k, v = (
        pad((x.values() @ w.T + b).unflatten(-1, (-1, heads.head_dim)), n)
        for x, w, b, n in zip((query, key, value), weights, biases, lengths, strict=True)
    )
    q, k = rms_norm(q, state.get("q_norm.weight")), rms_norm(k, state.get("k_norm.weight"))
    i, j = torch.arange(q.shape[1])[None, :, None], torch.arange(k.shape[1])[None, None, :]
    len_q, len_kv = (torch.tensor(n)[:, None, None] for n in lengths[:2])
    low, high = module.options.mask.key_range(i, len_q, len_kv)
    allowed = (low <= j) & (j < high) & (j < len_kv)
    names = module.options.activation
    names = (names,) * heads.num_heads if isinstance(names, str) else names
    scale = heads.head_dim**-0.5 if module.options.scale is None else module.options.scale
    out = unpad(padded_attention(q, k, v, allowed, names, scale), lengths[0]) @ state["out_proj.weight"].T
    return out + state.get("out_proj.bias", 0.0)


SELF_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "grouped-heads": {"num_heads": 6, "num_kv_heads": 3, "head_dim": 5},
    "multi-query": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 7},
    "qk-norm": {"qk_norm": True},
    "scale": {"scale": 0.21},
    "causal": {"mask": Causal()},
    "window": {"mask": SlidingWindow(4, 2)},
    "blocks": {"mask": BlockDiagonal(32)},
    "gdpa": {"activation": "silu", "scale": 0.1},
    "mixed-heads": {"activation": ("softmax", "gelu_tanh"), "mask": Causal(), "qk_norm": True},
}


@pytest.mark.parametrize("options", SELF_OPTIONS.values(), ids=SELF_OPTIONS)
def test_self_attention_equals_a_padded_formulation_with_gradients(options: dict[str, Any]) -> None:
    module, x = make(**options), jagged(LENGTHS, E)
    out, expected = module(x).values(), padded_formulation(module, x)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    assert_same({"out": out}, {"out": expected})
    assert_same(gradients((out * weight).sum(), module, x), gradients((expected * weight).sum(), module, x))


CROSS_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "causal": {"mask": Causal()},
    "causal-top-left": {"mask": Causal("top_left")},
    "grouped-heads-qk-norm": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "qk_norm": True},
}


@pytest.mark.parametrize("widths", [(E, E), (KDIM, E), (KDIM, VDIM)], ids=str)
@pytest.mark.parametrize("options", CROSS_OPTIONS.values(), ids=CROSS_OPTIONS)
def test_cross_attention_equals_a_padded_formulation_with_gradients(
    options: dict[str, Any], widths: tuple[int, int]
) -> None:
    module = make(kdim=widths[0], vdim=widths[1], **options)
    inputs = [jagged(LENGTHS, E, seed=1), jagged(OTHER_LENGTHS, widths[0], seed=2)]
    inputs += [jagged(OTHER_LENGTHS, widths[1], seed=3)]
    out, expected = module(*inputs), padded_formulation(module, *inputs)
    assert out.offsets() is inputs[0].offsets()
    weight = torch.randn(expected.shape, dtype=torch.float64)
    assert_same({"out": out.values()}, {"out": expected})
    assert_same(
        gradients((out.values() * weight).sum(), module, *inputs), gradients((expected * weight).sum(), module, *inputs)
    )


def test_a_key_alone_is_the_value_too() -> None:
    module, x, key = make(), jagged(LENGTHS, E), jagged(OTHER_LENGTHS, E, seed=2)
    twin = JaggedTensor(key.values().clone(), lengths=key.lengths())
    assert_same({"out": module(x, key).values()}, {"out": module(x, key, twin).values()})
    assert_same({"out": module(x, x, x).values()}, {"out": module(x).values()})


def test_self_attention_projects_at_once_and_q_k_v_are_views_of_the_result() -> None:
    module, x = make(num_heads=6, num_kv_heads=2, head_dim=5), jagged(LENGTHS, E)
    q, k, v = module.in_proj(x)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert [y.shape for y in (q, k, v)] == [(sum(LENGTHS), 6, 5), (sum(LENGTHS), 2, 5), (sum(LENGTHS), 2, 5)]
    assert {y.stride(0) for y in (q, k, v)} == {50}


MHA_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch-first": {"batch_first": True},
    "no-bias": {"bias": False},
    "kdim-vdim": {"kdim": KDIM, "vdim": VDIM},
}


def run_padded(mha: nn.MultiheadAttention, inputs: list[Any], lengths: list[tuple[int, ...]]) -> Tensor:
    """``mha`` on padded inputs with a key_padding_mask, as its users run it."""
    padded = [pad(x.values(), n) for x, n in zip(inputs, lengths, strict=True)]
    if not mha.batch_first:
        padded = [x.transpose(0, 1) for x in padded]
    out, _ = mha(*padded, key_padding_mask=~is_row(lengths[1]), need_weights=False)
    return unpad(out if mha.batch_first else out.transpose(0, 1), lengths[0])


STATE_NAMES = {
    "in_proj_weight": "in_proj.weight",
    "in_proj_bias": "in_proj.bias",
    "q_proj_weight": "in_proj.q_weight",
    "k_proj_weight": "in_proj.k_weight",
    "v_proj_weight": "in_proj.v_weight",
}


def run_both(options: dict[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Output and gradients of the module and of the nn.MultiheadAttention that it was made of, from float32 numbers."""
    # Without keys the padded module gives NaN; every sequence here has one.
    lengths = [(1, 31, 32, 33, 63, 65, 7), (33, 1, 2, 40, 5, 64, 64), (33, 1, 2, 40, 5, 64, 64)]
    mha = randomize(nn.MultiheadAttention(E, 2, **options)).to(dtype)
    module = JaggedMultiHeadAttention.from_multihead_attention(mha, backend=BACKEND)
    widths = (E, mha.kdim, mha.vdim)
    inputs = [jagged(n, w, torch.float32, seed) for seed, (n, w) in enumerate(zip(lengths, widths, strict=True))]
    inputs = [with_values(x, x.values().detach().to(dtype).requires_grad_()) for x in inputs]
    weight = torch.randn(sum(lengths[0]), E, generator=torch.Generator().manual_seed(5)).to(dtype)
    ours, theirs = module(*inputs).values(), run_padded(mha, inputs, lengths)
    their_gradients = gradients((theirs * weight).sum(), mha, *inputs)
    return (
        {"out": ours.detach(), **gradients((ours * weight).sum(), module, *inputs)},
        {"out": theirs.detach(), **{STATE_NAMES.get(name, name): x for name, x in their_gradients.items()}},
    )


@pytest.mark.parametrize("options", MHA_OPTIONS.values(), ids=MHA_OPTIONS)
def test_gives_the_numbers_of_the_multihead_attention_that_it_was_made_of(options: dict[str, Any]) -> None:
    ours, exact = run_both(options, torch.float64)
    assert_same(ours, exact)
    ours, theirs = run_both(options, torch.float32)
    for name in exact:
        assert_within(name, ours[name], exact[name], theirs[name])


def test_a_module_made_of_another_copies_its_weights_and_its_mode() -> None:
    mha = nn.MultiheadAttention(E, 2).eval()
    module = JaggedMultiHeadAttention.from_multihead_attention(mha, mask=Causal(), backend=BACKEND)
    assert not module.training
    assert module.options.mask == Causal()
    with torch.no_grad():
        mha.in_proj_weight.zero_()
    assert module.in_proj.weight.any()


@pytest.mark.parametrize(
    ("options", "name"),
    [({"dropout": 0.1}, "dropout"), ({"add_bias_kv": True}, "add_bias_kv"), ({"add_zero_attn": True}, "add_zero_attn")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_jagged_attention_does_not_have_is_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"attention must have {name}=.*, got {name}="):
        JaggedMultiHeadAttention.from_multihead_attention(nn.MultiheadAttention(E, 2, **options))


def test_only_a_multihead_attention_is_taken() -> None:
    with pytest.raises(TypeError, match=r"attention must be a torch.nn.MultiheadAttention, got Linear"):
        JaggedMultiHeadAttention.from_multihead_attention(nn.Linear(3, 3))


def test_a_stack_shares_the_offsets_that_were_computed_once() -> None:
    x = jagged(LENGTHS, E)
    layers = nn.ModuleList([make(mask=Causal()) for _ in range(3)])
    y = x
    for layer in layers:
        y = with_values(y, y.values() + layer(y).values())
        assert y.offsets() is x.offsets()


@pytest.mark.parametrize("lengths", [(0, 0, 0), ()], ids=["all-empty", "no-sequence"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"kdim": KDIM, "vdim": VDIM}], ids=str)
def test_a_batch_without_rows_gives_every_parameter_a_zero_gradient(
    lengths: tuple[int, ...], options: dict[str, Any]
) -> None:
    module = make(**options)
    inputs = [jagged(lengths, width) for width in (E, module.kdim, module.vdim)]
    out = module(*inputs)
    assert out.values().shape == (0, E)
    out.values().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_rows_of_no_sequence_and_queries_without_keys_get_the_output_bias() -> None:
    module, x = make(), jagged((2, 3, 4), E)
    tail = module(JaggedTensor(x.values(), offsets=torch.tensor([0, 2, 5]))).values()[5:]
    no_keys = module(jagged((2, 3), E), jagged((0, 3), E)).values()[:2]
    for rows in (tail, no_keys):
        assert torch.equal(rows, module.out_proj.bias.expand_as(rows))


def test_autocast_takes_float32_and_keeps_normed_queries_in_its_dtype() -> None:
    module, x = make(qk_norm=True, dtype=torch.float32), jagged(LENGTHS, E, torch.float32)
    seen = {}
    for name in ("q_norm", "k_norm"):
        getattr(module, name).register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.dtype}))
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x).values()
    assert seen == {"q_norm": torch.bfloat16, "k_norm": torch.bfloat16}
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float32}
    assert x.values().grad.dtype == torch.float32
    exact = make(qk_norm=True)(with_values(x, x.values().double())).values()
    padded = padded_formulation(copy.deepcopy(module).bfloat16(), with_values(x, x.values().bfloat16()))
    assert_within("out", out, exact, padded)


def test_head_norm_keeps_the_dtype_where_autocast_runs_norms_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    rms_norm = nn.functional.rms_norm

    def in_float32(x: Tensor, shape: Any, weight: Tensor, eps: float | None) -> Tensor:
        return rms_norm(x.float(), shape, weight.float(), eps)

    monkeypatch.setattr(nn.functional, "rms_norm", in_float32)
    norm = HeadNorm(7)
    assert norm(torch.randn(5, 3, 7).bfloat16()).dtype == torch.bfloat16
    assert norm(torch.randn(5, 3, 7)).dtype == torch.float32


def test_checkpointing_gives_the_same_gradients() -> None:
    module, x = make(mask=Causal(), qk_norm=True), jagged(LENGTHS, E)
    plain = gradients(module(x).values().square().sum(), module, x)
    again = gradients(checkpoint(module, x, use_reentrant=False).values().square().sum(), module, x)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluation_gives_the_same_numbers_and_training_goes_on_after_it(context: Any) -> None:
    module, x = make(), jagged(LENGTHS, E)
    with context():
        evaluated = module.eval()(x).values()
    trained = module.train()(x).values()
    assert torch.equal(evaluated, trained)
    trained.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_copies_give_the_same_numbers() -> None:
    module, x = (
        make(num_heads=6, num_kv_heads=2, head_dim=5, qk_norm=True, mask=SlidingWindow(4, 2)),
        jagged(LENGTHS, E),
    )
    loaded = JaggedMultiHeadAttention(
        E, 6, num_kv_heads=2, head_dim=5, qk_norm=True, mask=SlidingWindow(4, 2), backend=BACKEND, dtype=torch.float64
    )
    loaded.load_state_dict(module.state_dict())
    for twin in (loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x).values(), module(x).values())


def test_state_dict_names() -> None:
    fused = {"in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"}
    separate = fused - {"in_proj.weight"} | {"in_proj.q_weight", "in_proj.k_weight", "in_proj.v_weight"}
    assert make().state_dict().keys() == fused
    assert make(kdim=KDIM).state_dict().keys() == separate
    assert make(bias=False, qk_norm=True).state_dict().keys() == {
        "in_proj.weight", "out_proj.weight", "q_norm.weight", "k_norm.weight"
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"kdim": KDIM, "vdim": VDIM}], ids=["fused", "separate"])
def test_made_on_meta_and_reset_as_if_made_at_once(options: dict[str, Any]) -> None:
    options = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 50, "qk_norm": True, **options}
    module = JaggedMultiHeadAttention(E, device="meta", **options)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    widths, rows = (E, module.kdim, module.vdim), module.in_proj.block_sizes
    for weight, width, size in zip(module.in_proj._weights(), widths, rows, strict=True):
        bound = (6 / (width + size)) ** 0.5
        # A uniform draw of hundreds of numbers comes within 5 % of its bound.
        assert 0.95 * bound < weight.abs().max() <= bound
    assert module.out_proj.weight.abs().max() <= (6 * 50) ** -0.5
    assert not module.in_proj.bias.any()
    assert not module.out_proj.bias.any()
    assert (module.q_norm.weight == 1).all()
    assert (module.k_norm.weight == 1).all()


def test_every_module_with_parameters_resets_its_own() -> None:
    # Sharded training makes modules on meta and calls reset_parameters of each owner of parameters, not of the root.
    module = JaggedMultiHeadAttention(E, 2, qk_norm=True)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    for owner in module.modules():
        if next(owner.parameters(recurse=False), None) is not None:
            owner.reset_parameters()
    assert not module.out_proj.bias.any()
    assert all(p.isfinite().all() for p in module.parameters())


def test_printing_shows_sizes_and_what_differs_from_the_defaults() -> None:
    shown = repr(
        make(num_heads=6, num_kv_heads=2, head_dim=5, kdim=KDIM, activation="silu", mask=SlidingWindow(4, None))
    )
    assert "embed_dim=14, num_heads=6, num_kv_heads=2, head_dim=5, kdim=11, vdim=14" in shown
    assert "activation='silu'" in shown
    assert "left=4, right=None" in shown
    assert "scale" not in shown.split("(in_proj)")[0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 3}, ValueError, "num_heads must divide embed_dim = 14 unless head_dim is given, got 3"),
        ({"num_heads": 0}, ValueError, "num_heads must be a positive int, got 0"),
        ({"num_heads": 2.0}, TypeError, "num_heads must be a positive int, got 2.0"),
        ({"num_kv_heads": 3, "head_dim": 5}, ValueError, "num_kv_heads must divide num_heads = 2, got 3"),
        ({"head_dim": -1}, ValueError, "head_dim must be a positive int, got -1"),
        ({"kdim": 0}, ValueError, "kdim must be a positive int, got 0"),
        ({"vdim": "9"}, TypeError, "vdim must be a positive int, got '9'"),
        ({"mask": "causal"}, TypeError, "mask must be Full"),
        ({"mask": Mask()}, TypeError, r"mask must be Full.* got Mask\(\)"),
        ({"bias": "no"}, TypeError, "bias must be True or False, got 'no'"),
        ({"qk_norm": 1}, TypeError, "qk_norm must be True or False, got 1"),
        ({"scale": 10**400}, ValueError, "scale must be finite as a float, got an int that is too large"),
        ({"activation": "swish"}, ValueError, "activation must be one of .* got 'swish'"),
        ({"activation": ("softmax",) * 3}, ValueError, "activation must have one name for each of the 2 heads, got 3"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ({"backend": "cuda"}, ValueError, "backend must be one of .* got 'cuda'"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_wrong_option_is_refused_when_the_module_is_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (lambda: (jagged((2, 3), E), None, jagged((2, 3), E)), "value must be None unless key is given"),
        (lambda: (jagged((2, 3), E), jagged((2, 3, 1), E)), "key must have the query's 2 sequences, got 3"),
        (lambda: (jagged((2, 3), E), jagged((2, 3), KDIM)), r"key must have values of shape \[T, 14\], got \[5, 11\]"),
        (lambda: (jagged((2, 3), E), jagged((2, 3), E), jagged((2, 2), E)), "value must have the key's 5 rows, got 4"),
        (lambda: (jagged((2, 3), E),) * 2 + (jagged((2, 3, 0), E),), "value must have the key's 2 sequences, got 3"),
    ],
    ids=["value-without-key", "sequences", "width", "rows", "sequences-of-value"],
)
def test_inputs_that_do_not_fit_are_refused_by_name(inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(*inputs())


@pytest.mark.parametrize("is_autocast", [False, True])
def test_inputs_of_another_dtype_or_device_are_refused_by_name(is_autocast: bool) -> None:
    module, x, meta = make(), jagged((2, 3), E), jagged((2, 3), E).to(torch.device("meta"))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        for inputs, words in [
            ((meta,), "query must be on the module's device cpu, got meta"),
            ((x, meta), "key must be on the module's device cpu, got meta"),
            ((x, x, meta), "value must be on the module's device cpu, got meta"),
            (
                (jagged((2, 3), E, torch.float32),),
                "query must have .* torch.float64, got torch.float32; convert .* two.$",
            ),
            (
                (x, jagged((2, 3), E, torch.float32)),
                "key must have .* torch.float64, got torch.float32; convert .* two.$",
            ),
        ]:
            with pytest.raises(ValueError, match=words):
                module(*inputs)
        assert module(x).values().dtype == torch.float64
        with pytest.raises(ValueError, match=r"query must have .* torch.float32, got torch.float64; convert .* two.$"):
            make().float()(x)
    with pytest.raises(ValueError, match=r"got torch.float16; convert one of the two or run under torch.autocast.$"):
        make().float()(jagged((2, 3), E, torch.float16))
    with pytest.raises(ValueError, match=r"query must have .* torch.float32, got torch.float16"):
        make().float().to("meta")(jagged((2, 3), E, torch.float16).to(torch.device("meta")))


def test_blocks_refuse_keys_of_another_layout() -> None:
    with pytest.raises(ValueError, match="mask must not be BlockDiagonal"):
        make(mask=BlockDiagonal(4))(jagged((2, 3), E), jagged((2, 3), E, seed=2))


def test_defaults_are_full_softmax_attention_on_auto() -> None:
    options = JaggedMultiHeadAttention(E, 2).options
    assert options.keywords() == {"mask": Full(), "activation": "softmax", "scale": None, "backend": "auto"}
