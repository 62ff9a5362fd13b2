"""The TorchRec edge: what is taken, what is handed on, and what is refused in which words."""

import importlib.abc
import subprocess
import sys

import pytest
import torch
from module_inputs import (
    BACKEND,
    LENGTHS,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    jagged,
    randomize,
)

from jagged_attn import JaggedLayout
from jagged_attn.jagged_tensor import is_jagged, layout_of, num_sequences_of, to_jagged_tensor, with_values
from jagged_attn.modules import JaggedMultiHeadAttention, JaggedTargetAttention

WIDTH = 10


def attention() -> JaggedMultiHeadAttention:
    return randomize(JaggedMultiHeadAttention(WIDTH, 2, head_dim=3, backend=BACKEND, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("given", [("lengths",), ("offsets",), ("lengths", "offsets")], ids="+".join)
def test_lengths_or_offsets_of_either_type_give_the_same_numbers(given: tuple[str, ...], dtype: torch.dtype) -> None:
    x, module = jagged(LENGTHS, WIDTH), attention()
    parts = {"lengths": x.lengths().to(dtype), "offsets": x.offsets().to(dtype)}
    given_x = JaggedTensor(x.values(), **{part: parts[part] for part in given})
    out = module(given_x)
    assert torch.equal(out.values(), module(x).values())
    assert isinstance(out, JaggedTensor)
    assert out.offsets() is given_x.offsets()
    assert out.offsets().dtype == dtype
    assert out.lengths_or_none() is given_x.lengths_or_none()


def test_values_may_be_views_that_start_anywhere() -> None:
    lengths = {"a": (3, 0, 2), "b": (1, 4, 0), "c": (0, 0, 5)}
    values = torch.randn(15, WIDTH, dtype=torch.float64)
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=list(lengths), values=values, lengths=torch.tensor([n for row in lengths.values() for n in row])
    )
    module, start = attention(), 0
    for key, row in lengths.items():
        rows = values[start : start + sum(row)].clone()
        start += sum(row)
        expected = module(JaggedTensor(rows, lengths=torch.tensor(row))).values()
        for x in (kjt[key], kjt.to_dict()[key]):
            assert x.values().untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
            assert torch.equal(module(x).values(), expected)


def test_takes_what_an_embedding_collection_returns_and_trains_its_table() -> None:
    tables = [EmbeddingConfig(name="item", num_embeddings=13, embedding_dim=WIDTH, feature_names=["seen", "liked"])]
    embed = EmbeddingCollection(tables=tables)
    kjt = KeyedJaggedTensor.from_lengths_sync(
        keys=["seen", "liked"], values=torch.arange(9), lengths=torch.tensor([2, 0, 3, 1, 0, 3])
    )
    module = attention().float()
    out = module(embed(kjt)["liked"])
    expected = module(JaggedTensor(embed.embeddings["item"].weight[5:9], lengths=torch.tensor([1, 0, 3])))
    assert torch.equal(out.values(), expected.values())
    out.values().sum().backward()
    rows = embed.embeddings["item"].weight.grad.abs().sum(1) > 0
    assert rows.tolist() == [False] * 5 + [True] * 4 + [False] * 4


def test_with_values_hands_on_the_same_offsets_lengths_and_weights() -> None:
    x = jagged((2, 0, 3), WIDTH)
    x = JaggedTensor(x.values(), lengths=x.lengths(), weights=torch.arange(5))
    y = with_values(x, torch.zeros(5, 1))
    assert y.offsets() is x.offsets()
    assert y.lengths() is x.lengths()
    assert y.weights() is x.weights()
    assert layout_of(y).offsets is x.offsets()


def test_with_values_wants_as_many_rows() -> None:
    with pytest.raises(ValueError, match="values must have the 5 rows of x, got 4"):
        with_values(jagged((2, 0, 3), WIDTH), torch.zeros(4, 1))


def test_values_that_are_no_rows_are_refused_by_name() -> None:
    x, layout = jagged((2, 0, 3), WIDTH), torch.tensor([0, 2, 2, 5])
    for call in (lambda values: with_values(x, values), lambda values: to_jagged_tensor(values, layout)):
        with pytest.raises(TypeError, match=r"values must be a torch.Tensor, got NoneType"):
            call(None)
        with pytest.raises(ValueError, match=r"values must have shape \[T, ...\], got \[\]"):
            call(torch.tensor(1.0))
    with pytest.raises(ValueError, match="values must be on the device of x, cpu, got meta"):
        with_values(x, torch.zeros(5, 1, device="meta"))


def test_the_number_of_sequences_is_known_without_offsets() -> None:
    x = jagged((2, 0, 3), WIDTH)
    assert num_sequences_of(x) == 3
    assert x.offsets_or_none() is None
    assert num_sequences_of(JaggedTensor(x.values(), offsets=torch.tensor([0, 2, 2, 5]))) == 3
    assert num_sequences_of(JaggedTensor.empty()) == 0


@pytest.mark.parametrize("part", ["lengths", "offsets"])
def test_parts_on_two_devices_are_refused_and_both_named(part: str) -> None:
    x = JaggedTensor(torch.randn(2, WIDTH), **{part: torch.tensor([0, 2], device="meta")})
    with pytest.raises(ValueError, match=f"query must have its {part} on .* values on cpu and {part} on meta"):
        attention()(x)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.randn(5, WIDTH), TypeError, "query must be a torchrec.JaggedTensor, got Tensor; give it a layout"),
        ({"item": 1}, TypeError, r"query must be a torchrec.JaggedTensor, got dict; take one feature of it, x\[key\]"),
        (
            KeyedJaggedTensor.from_lengths_sync(["item"], torch.randn(2, WIDTH), torch.tensor([2])),
            TypeError,
            "got KeyedJaggedTensor; take one feature",
        ),
        (None, TypeError, "query must be a torchrec.JaggedTensor, got NoneType"),
        (JaggedTensor(torch.arange(5), lengths=torch.tensor([5])), ValueError, "floating values.*got torch.int64"),
        (JaggedTensor(torch.randn(5), lengths=torch.tensor([5])), ValueError, r"shape \[T, 10\], got \[5\]"),
        (JaggedTensor(torch.randn(5, 7), lengths=torch.tensor([5])), ValueError, r"shape \[T, 10\], got \[5, 7\]"),
        (JaggedTensor(torch.randn(5, WIDTH), lengths=torch.tensor([5])), ValueError, "float64, got torch.float32"),
        (
            JaggedTensor(torch.randn(5, WIDTH), lengths=torch.tensor([5], dtype=torch.int16)),
            ValueError,
            "query must have int32 or int64 lengths, got torch.int16",
        ),
    ],
    ids=["tensor", "dict", "keyed", "none", "ids", "vector", "width", "dtype", "lengths-dtype"],
)
def test_other_inputs_are_refused_by_name(x: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention()(x)


def test_nested_tensors_give_the_same_numbers_and_keep_their_ragged_size() -> None:
    x, module = jagged(LENGTHS, WIDTH), attention()
    nested = torch.nested.nested_tensor_from_jagged(x.values().detach().clone(), offsets=x.offsets()).requires_grad_()
    out = module(nested)
    assert is_jagged(nested)
    assert torch.equal(out.values(), module(x).values())
    assert (out + nested).shape == nested.shape
    out.values().square().sum().backward()
    module(x).values().square().sum().backward()
    assert torch.equal(nested.grad.values(), x.values().grad)


def test_nested_tensors_with_another_ragged_dimension_or_holes_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(1, WIDTH)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"query must be a nested tensor of shape \[B, \*, E\]"):
        attention()(nested.transpose(1, 2))
    holes = torch.nested.narrow(torch.randn(2, 5, WIDTH), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), torch.jagged)
    with pytest.raises(ValueError, match="query must have no holes"):
        attention()(holes)


def test_to_jagged_tensor_holds_the_very_offsets() -> None:
    offsets = torch.tensor([0, 2, 5])
    for layout in (offsets, JaggedLayout(offsets)):
        x = to_jagged_tensor(torch.randn(5, 3), layout)
        assert isinstance(x, JaggedTensor)
        assert x.offsets() is offsets


class _Broken(importlib.abc.MetaPathFinder):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name.startswith("torchrec"):
            raise self.error


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'torchrec'"), OSError("undefined symbol"), RuntimeError("no op")]
)
def test_a_missing_or_broken_torchrec_gives_one_readable_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchrec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Broken(error), *sys.meta_path])
    with pytest.raises(ImportError, match=f"TorchRec could not be imported: {error}.*fbgemm-gpu build") as caught:
        to_jagged_tensor(torch.randn(5, 3), torch.tensor([0, 2, 5]))
    assert caught.value.__cause__ is error


def test_offsets_that_fbgemm_cannot_compute_give_the_same_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def offsets(self: object) -> None:
        raise AttributeError("'_OpNamespace' 'fbgemm' object has no attribute 'asynchronous_complete_cumsum'")

    monkeypatch.setattr(JaggedTensor, "offsets", offsets)
    with pytest.raises(ImportError, match=r"could not compute offsets from lengths.*fbgemm-gpu build"):
        layout_of(jagged((2, 3), WIDTH))


def test_neither_import_nor_nested_tensors_bring_torchrec_in() -> None:
    code = """
import sys, torch
from jagged_attn.modules import JaggedMultiHeadAttention, JaggedTargetAttention
print([name for name in ("torchrec", "fbgemm_gpu", "triton") if name in sys.modules])
x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(1, 8)], layout=torch.jagged)
JaggedTargetAttention(8, 2, num_queries=3)(JaggedMultiHeadAttention(8, 2)(x))
print([name for name in ("torchrec", "fbgemm_gpu") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]"]


def test_an_empty_jagged_tensor_keeps_every_parameter_in_the_graph() -> None:
    history = JaggedTensor.empty(values_dtype=torch.float64)
    pooled = JaggedTargetAttention(WIDTH, 2, num_queries=3, backend=BACKEND, dtype=torch.float64)
    module = attention()
    out = module(history)
    assert out.values().shape == (0, WIDTH)
    pool = pooled(out)
    assert pool.shape == (0, 3, WIDTH)
    pool.sum().backward()
    for name, parameter in [*module.named_parameters(), *pooled.named_parameters()]:
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
