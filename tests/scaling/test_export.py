"""Exported programs in PyTorch's own operators: every kind of call, and models that load without this library."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import CASES, Case, call
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import export_models
from export_models import Arguments, ServedRanking, kunlun_batch, ranking_batch
from ranking.model import ModelConfig, RankingModel

import jagged_attn as ja
from jagged_attn import export, functional
from jagged_attn.bench.kunlun_steps import Ranker, Scenario
from jagged_attn.modules import EventTowerConfig, InteractionConfig, Kunlun
from jagged_attn.testing.tolerance import assert_within

# A program is for at least one sequence.
DECOMPOSED = [case for case in CASES if case.lengths]


def decomposed(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What the decomposition computes, run as it stands."""
    inputs = case.inputs(dtype, "cpu")
    mask, names = case.options.get("mask", ja.Full()), case.options.get("activation", "softmax")
    factors = (case.options.get("scale"), case.options.get("out_scale", 1.0))
    q, k, v = inputs.q, inputs.k, inputs.v
    *_, decision = functional._decide(
        q, k, v, inputs.layout_q, inputs.layout_kv, mask, names, *factors, False, "eager"
    )  # fmt: skip
    offsets_q = None if inputs.layout_q is None else inputs.layout_q.offsets
    attention = export.decompositions()[torch.ops.jagged_attn.attention.default]
    return attention(q, k, v, offsets_q, inputs.layout_kv.offsets, [], *decision.static)


@pytest.mark.parametrize("case", DECOMPOSED, ids=lambda case: case.name)
def test_the_decomposition_computes_every_kind_of_call(case: Case) -> None:
    out, lse = decomposed(case, torch.float64)
    expected = call(case.inputs(torch.float64, "cpu"), "reference", **case.options)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    assert out.is_contiguous()
    if case.options.get("activation", "softmax") == "softmax":
        _, expected = call(case.inputs(torch.float64, "cpu"), "reference", return_lse=True, **case.options)
        torch.testing.assert_close(lse, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_decomposition_accumulates_in_fp32(dtype: torch.dtype) -> None:
    case = Case("self", lengths=(3, 0, 70))
    inputs = case.inputs(dtype, "cpu")
    exact = call(inputs.to(torch.float64), "reference")
    assert_within("out", decomposed(case, dtype)[0], exact, call(inputs, "eager"), terms=70 + 16)


SCENARIO = Scenario(
    {"click": EventTowerConfig(12, 3, num_tokens=2, num_layers=1, window=3, num_seeds=5, num_keys=7)},
    batch=5, longest=13, lengths="uniform_from_one", num_tokens=5, embed_dim=8,
)  # fmt: skip
Model = tuple[nn.Module, Callable[[int, int], Arguments]]


def ranking() -> Model:
    torch.manual_seed(0)
    model = RankingModel(export_models.SCHEMA, ModelConfig(embed_dim=8, num_layers=1, hidden=12))
    return ServedRanking(model).eval(), ranking_batch


def kunlun() -> Model:
    torch.manual_seed(0)
    model = Ranker(SCENARIO, "auto")
    # One layer with everything in it, to be read by the closing pool: compiling takes its time.
    sizes = InteractionConfig(num_summary_tokens=2, num_experts=1, rank=3)
    model.stack = Kunlun(SCENARIO.num_tokens, SCENARIO.embed_dim, SCENARIO.towers, sizes, pattern=("full",))
    return model.eval(), lambda seed, samples: kunlun_batch(SCENARIO, seed, samples)


MODELS = {"ranking": ranking, "kunlun": kunlun}
# Loads a package in a process that has PyTorch alone.
SERVER = """
import sys
import torch
package, batches = torch._inductor.aoti_load_package(sys.argv[1]), torch.load(sys.argv[2], weights_only=True)
results = [package(*batch) for batch in batches]
assert not {"jagged_attn", "torchrec", "fbgemm_gpu"} & set(sys.modules)
torch.save(results, sys.argv[3])
"""


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)  # inside torch
@pytest.mark.parametrize("name", MODELS)
def test_a_package_gives_the_models_numbers_without_this_library(name: str, tmp_path: Path) -> None:
    model, batch = MODELS[name]()
    with torch._inductor.config.patch({"cpp.simdlen": 0, "aot_inductor.compile_wrapper_opt_level": "O0"}):
        export_models.package(model, batch(0, 5), tmp_path / "model.pt2")
    # Others than the example's number of samples and lengths; one sample is a batch too.
    batches = [batch(seed, 1 + seed % 11) for seed in range(1, 21)]
    torch.save(batches, tmp_path / "batches")
    server = [sys.executable, "-c", SERVER, *(str(tmp_path / part) for part in ("model.pt2", "batches", "results"))]
    done = subprocess.run(server, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        for arguments, result in zip(batches, torch.load(tmp_path / "results"), strict=True):
            torch.testing.assert_close(result, model(*arguments), rtol=1e-5, atol=1e-5)


def test_a_program_that_would_still_need_this_library_is_refused() -> None:
    class Training(nn.Module):
        def forward(self, q: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return torch.ops.jagged_attn.tile_table(offsets, offsets, q.shape[0], q.shape[0], 16)

    program = torch.export.export(Training(), (torch.randn(5, 2, 8), torch.tensor([0, 2, 5])))
    with pytest.raises(ValueError, match=r"program must hold forward passes alone, got jagged_attn\.tile_table"):
        export.decompose(program)


def test_a_first_call_that_is_traced_leaves_the_library_usable() -> None:
    # Modules that are imported while a graph is traced must not keep tensors of the trace.
    program = """
import torch
import jagged_attn as ja
class Model(torch.nn.Module):
    def forward(self, q, offsets):
        return ja.jagged_attention(q, q, q, offsets)
arguments = torch.randn(5, 2, 8), torch.tensor([0, 2, 2, 5])
torch.export.export(Model(), arguments)
assert Model()(*arguments).isfinite().all()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
