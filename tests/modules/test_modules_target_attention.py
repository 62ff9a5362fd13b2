"""JaggedTargetAttention against attention written anew on padded tensors, and its ways of taking queries."""

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
from torch import Tensor

from jagged_attn import BlockDiagonal, Causal, JaggedLayout, Mask
from jagged_attn.modules import JaggedTargetAttention

E, KDIM, S, C = 14, 11, 5, 3
B = len(LENGTHS)


def make(num_queries: int | None = None, **options: Any) -> JaggedTargetAttention:
    options = {"num_heads": 2, "kdim": KDIM, "backend": BACKEND, "dtype": torch.float64} | options
    return randomize(JaggedTargetAttention(E, num_queries=num_queries, **options))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).requires_grad_()


def padded_formulation(module: JaggedTargetAttention, history: Any, queries: Tensor) -> Tensor:
    """``[B, L_q, E]`` for queries ``[B, L_q, E]``, from the module's parameters."""
    state, heads = dict(module.named_parameters()), module.heads
    lengths = tuple(history.lengths().tolist())
    q = (queries @ state["q_proj.weight"].T + state.get("q_proj.bias", 0.0)).unflatten(-1, (-1, heads.head_dim))
    kv = pad(history.values() @ state["kv_proj.weight"].T + state.get("kv_proj.bias", 0.0), lengths)
    k, v = kv.unflatten(-1, (-1, heads.head_dim)).split(heads.num_kv_heads, dim=2)
    q, k = rms_norm(q, state.get("q_norm.weight")), rms_norm(k, state.get("k_norm.weight"))
    allowed = is_row(lengths)[:, None].expand(-1, q.shape[1], -1)
    scale = heads.head_dim**-0.5 if module.options.scale is None else module.options.scale
    out = padded_attention(q, k, v, allowed, (module.options.activation,) * heads.num_heads, scale)
    return out @ state["out_proj.weight"].T + state.get("out_proj.bias", 0.0)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "grouped-heads-qk-norm": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "qk_norm": True},
    "gdpa": {"activation": "gelu", "scale": 0.3},
}


def check(module: JaggedTargetAttention, out: Tensor, expected: Tensor, *inputs: Any) -> None:
    weight = torch.randn(expected.shape, dtype=torch.float64)
    assert_same({"out": out}, {"out": expected})
    assert_same(gradients((out * weight).sum(), module, *inputs), gradients((expected * weight).sum(), module, *inputs))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
class TestEqualsAPaddedFormulationWithGradients:
    def test_for_learned_queries(self, options: dict[str, Any]) -> None:
        module, history = make(num_queries=S, **options), jagged(LENGTHS, KDIM)
        expected = padded_formulation(module, history, module.queries.expand(B, S, E))
        check(module, module(history), expected, history)

    def test_for_shared_queries(self, options: dict[str, Any]) -> None:
        module, history, queries = make(**options), jagged(LENGTHS, KDIM), normal(S, E)
        expected = padded_formulation(module, history, queries.expand(B, S, E))
        check(module, module(history, queries), expected, history, queries)

    def test_for_dense_candidates(self, options: dict[str, Any]) -> None:
        module, history, queries = make(**options), jagged(LENGTHS, KDIM), normal(B, C, E)
        check(module, module(history, queries), padded_formulation(module, history, queries), history, queries)

    def test_for_jagged_candidates(self, options: dict[str, Any]) -> None:
        module, history, queries = make(**options), jagged(LENGTHS, KDIM), jagged(OTHER_LENGTHS, E, seed=3)
        out = module(history, queries)
        assert out.offsets() is queries.offsets()
        expected = unpad(padded_formulation(module, history, pad(queries.values(), OTHER_LENGTHS)), OTHER_LENGTHS)
        check(module, out.values(), expected, history, queries)


def test_the_mask_counts_positions_as_cross_attention_does() -> None:
    module, history = make(mask=Causal("top_left")), jagged((4, 2), KDIM)
    out = module(history, normal(2, 3, E))
    first = make()(JaggedTensor(history.values()[[0, 4]], lengths=torch.tensor([1, 1])), normal(2, 3, E))
    torch.testing.assert_close(out[:, 0], first[:, 0], rtol=1e-11, atol=1e-11)


def test_a_sample_without_history_gets_the_output_bias() -> None:
    history = jagged((0, 3, 0), KDIM)
    for module, queries in ((make(S), None), (make(), normal(S, E)), (make(), normal(3, C, E))):
        out = module(history, queries)[[0, 2]]
        assert torch.equal(out, module.out_proj.bias.expand_as(out))


@pytest.mark.parametrize("lengths", [(0, 0, 0), ()], ids=["all-empty", "no-sequence"])
@pytest.mark.parametrize("kind", ["learned", "shared", "dense", "jagged"])
def test_a_batch_without_rows_gives_every_parameter_a_zero_gradient(kind: str, lengths: tuple[int, ...]) -> None:
    module = make(S if kind == "learned" else None, qk_norm=True, bias=False)
    queries = {
        "learned": lambda: None,
        "shared": lambda: normal(S, E),
        "dense": lambda: normal(len(lengths), C, E),
        "jagged": lambda: jagged(lengths, E),
    }[kind]()
    out = module(jagged(lengths, KDIM), queries)
    out = out.values() if kind == "jagged" else out
    out.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_training_goes_on_after_evaluation_in_inference_mode_with_the_same_history() -> None:
    module, history, queries = make(), jagged(LENGTHS, KDIM), normal(B, C, E)
    with torch.inference_mode():
        evaluated = module(history, queries)
    trained = module(history, queries)
    assert torch.equal(evaluated, trained)
    trained.sum().backward()
    assert module.q_proj.weight.grad is not None


def test_dense_candidates_share_one_layout_over_the_layers_of_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    uniform = JaggedLayout.uniform
    monkeypatch.setattr(JaggedLayout, "uniform", lambda *args: made.append(args) or uniform(*args))
    module, history, queries = make(), jagged(LENGTHS, KDIM), normal(B, C, E)
    for _ in range(3):
        module(history, queries)
    assert made == [(B, C, queries.device)]


def test_autocast_takes_float32_in_every_way_of_passing_queries() -> None:
    history = jagged(LENGTHS, KDIM, torch.float32)
    learned, plain = make(S, dtype=torch.float32, qk_norm=True), make(dtype=torch.float32, qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [learned(history), plain(history, normal(S, E).float()), plain(history, normal(B, C, E).float())]
        outs.append(plain(history, jagged(OTHER_LENGTHS, E, torch.float32)).values())
    assert {out.dtype for out in outs} == {torch.bfloat16}
    sum(out.float().sum() for out in outs).backward()
    assert {p.grad.dtype for module in (learned, plain) for p in module.parameters()} == {torch.float32}


def test_copies_give_the_same_numbers() -> None:
    module, history = make(S, qk_norm=True), jagged(LENGTHS, KDIM)
    loaded = JaggedTargetAttention(E, 2, S, kdim=KDIM, qk_norm=True, backend=BACKEND, dtype=torch.float64)
    loaded.load_state_dict(module.state_dict())
    for twin in (loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(history), module(history))


def test_state_dict_names() -> None:
    names = {f"{module}.{part}" for module in ("q_proj", "kv_proj", "out_proj") for part in ("weight", "bias")}
    assert make().state_dict().keys() == names
    assert make(S, qk_norm=True).state_dict().keys() == names | {"queries", "q_norm.weight", "k_norm.weight"}


def test_made_on_meta_and_reset_as_if_made_at_once() -> None:
    module = JaggedTargetAttention(E, 6, S, num_kv_heads=2, head_dim=50, kdim=KDIM, qk_norm=True, device="meta")
    assert {p.device.type for p in module.parameters()} == {"meta"}
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    k, v = module.kv_proj.weight.split(100)
    drawn = ((module.q_proj.weight, E + 300), (k, KDIM + 100), (v, KDIM + 100), (module.queries, S + E))
    for weight, fans in drawn:
        bound = (6 / fans) ** 0.5
        assert 0.9 * bound < weight.abs().max() <= bound
    assert not any(linear.bias.any() for linear in (module.q_proj, module.kv_proj, module.out_proj))
    assert all(p.isfinite().all() for p in module.parameters())


def test_printing_shows_sizes_and_what_differs_from_the_defaults() -> None:
    shown = repr(make(S, scale=0.5))
    assert "embed_dim=14, num_heads=2, head_dim=7, num_queries=5, kdim=11, mask=Full(), scale=0.5" in shown


@pytest.mark.parametrize(
    ("num_queries", "queries", "error", "message"),
    [
        (None, lambda: None, ValueError, "queries must be given, since the module has no learned ones"),
        (S, lambda: normal(S, E), ValueError, "queries must be None, since the module has learned ones"),
        (None, lambda: [1.0], TypeError, r"queries must be a tensor or a torchrec.JaggedTensor, got list"),
        (None, lambda: normal(E), ValueError, r"queries must have shape \[S, 14\] or \[B, C, 14\], got \[14\]"),
        (None, lambda: normal(S, KDIM), ValueError, r"queries must have shape .* got \[5, 11\]"),
        (
            None,
            lambda: normal(S, E).float(),
            ValueError,
            "queries must have values of the module's dtype torch.float64",
        ),
        (None, lambda: normal(S, E).to("meta"), ValueError, "queries must be on the module's device cpu, got meta"),
        (None, lambda: normal(3, C, E), ValueError, "queries must be for the history's 2 samples, got 3"),
        (None, lambda: jagged((1, 2, 3), E), ValueError, "queries must be for the history's 2 samples, got 3"),
        (None, lambda: jagged((1, 2), KDIM), ValueError, r"queries must have values of shape \[T, 14\], got \[3, 11\]"),
    ],
    ids=[
        "missing",
        "twice",
        "list",
        "vector",
        "width",
        "dtype",
        "device",
        "dense-samples",
        "jagged-samples",
        "jagged-width",
    ],
)
def test_queries_that_do_not_fit_are_refused_by_name(
    num_queries: int | None, queries: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(num_queries)(jagged((4, 2), KDIM), queries())


def test_a_history_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"history must have values of shape \[T, 11\], got \[6, 14\]"):
        make(S)(jagged((4, 2), E))
    with pytest.raises(ValueError, match="history must be on the module's device cpu, got meta"):
        make(S)(jagged((4, 2), KDIM).to(torch.device("meta")))
    with pytest.raises(TypeError, match=r"history must be a torchrec.JaggedTensor, got Tensor"):
        make(S)(normal(3, 4, KDIM))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_queries": 0}, ValueError, "num_queries must be a positive int, got 0"),
        ({"kdim": -2}, ValueError, "kdim must be a positive int"),
        ({"mask": BlockDiagonal(2)}, ValueError, r"mask must not be BlockDiagonal\(size=2\)"),
        ({"mask": Mask()}, TypeError, r"mask must be Full.* got Mask\(\)"),
        ({"bias": "no"}, TypeError, "bias must be True or False, got 'no'"),
        ({"qk_norm": "no"}, TypeError, "qk_norm must be True or False, got 'no'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_when_the_module_is_made(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**options)
