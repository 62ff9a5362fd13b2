"""Export the ranking model or a Kunlun model, package it with AOTInductor, and compare the package with the model.

    python examples/export_models.py ranking --out out/ranking.pt2
    python examples/export_models.py kunlun --out out/kunlun.pt2

The package loads where PyTorch is, without this library, TorchRec or fbgemm (``docs/compile.md``):

    package = torch._inductor.aoti_load_package("out/kunlun.pt2")
    logits = package(tokens, values, offsets, timestamps)

Weights are random here; a trained ``RankingModel`` or ``Kunlun`` goes through the same functions.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

with warnings.catch_warnings():
    # fbgemm's CPU build warns of operators that it does not have.
    warnings.simplefilter("ignore")
    from ranking.model import ModelConfig, RankingModel
    from ranking.requests import Schema
    from torchrec import JaggedTensor

from jagged_attn.bench.arguments import Parser, output_file, run_command
from jagged_attn.bench.kunlun_steps import SCENARIOS, Ranker, Scenario, make_batch
from jagged_attn.export import decompose

Arguments = tuple[Any, ...]
SCHEMA = Schema(num_items=1000, num_users=200, num_ratings=5, num_ages=40)


class Lookup(nn.Module):
    """What an ``EmbeddingCollection`` looks up, in plain PyTorch: fbgemm's operators are not in a package.

    Args:
        collection: whose tables are used.
    """

    def __init__(self, collection: Any) -> None:
        super().__init__()
        self.tables = collection.embeddings
        self.table_of = {key: c.name for c in collection.embedding_configs() for key in c.feature_names}

    def forward(self, features: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, JaggedTensor]:
        """Rows by feature, of ids ``[T]`` and offsets ``[B + 1]``."""
        return {
            key: JaggedTensor(F.embedding(ids, self.tables[self.table_of[key]].weight), offsets=offsets)
            for key, (ids, offsets) in features.items()
        }


class ServedRanking(nn.Module):
    """The ranking model with tensors in the place of a ``KeyedJaggedTensor``.

    Args:
        model: trained; its embedding is replaced.
    """

    def __init__(self, model: RankingModel) -> None:
        super().__init__()
        model.embedding = Lookup(model.embedding)
        self.model = model

    def forward(
        self, events: dict[str, Tensor], offsets: Tensor, candidates: dict[str, Tensor], ends: Tensor
    ) -> Tensor:
        """Logits ``[C]``.

        Args:
            events: ``item``, ``rating`` and ``age`` of all events, ``[T]`` each.
            offsets: ``[B + 1]``, of the histories.
            candidates: ``item`` and ``user`` of all candidates, ``[C]`` each.
            ends: ``[B + 1]``, offsets of the candidates.
        """
        features = {f"history_{name}": (ids, offsets) for name, ids in events.items()}
        features |= {"candidate_item": (candidates["item"], ends), "user": (candidates["user"], ends)}
        return self.model(features)


def ranking_batch(seed: int, requests: int, longest: int = 60) -> Arguments:
    """Arguments of ``ServedRanking``."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    lengths, counts = draw(longest + 1, requests), 1 + draw(5, requests)
    lengths[0] = max(int(lengths[0]), 2)
    offsets, ends = (F.pad(x.cumsum(0), (1, 0)) for x in (lengths, counts))
    events, rows = int(offsets[-1]), int(ends[-1])
    history = {"item": SCHEMA.num_items, "rating": SCHEMA.num_ratings, "age": SCHEMA.num_ages}
    return (
        {name: draw(high, events) for name, high in history.items()},
        offsets,
        {"item": draw(SCHEMA.num_items, rows), "user": draw(SCHEMA.num_users, rows)},
        ends,
    )


def kunlun_batch(scenario: Scenario, seed: int, samples: int) -> Arguments:
    """Arguments of the Kunlun ``Ranker``: tokens, and by event type rows, offsets and timestamps."""
    batch = make_batch(replace(scenario, batch=samples), seed, torch.device("cpu"), torch.float32)
    values = {name: x.detach() for name, x in batch.values.items()}
    return batch.tokens, values, batch.offsets, batch.timestamps


def package(model: nn.Module, example: Arguments, path: Path) -> None:
    """Write a package of a model that takes batches of any number and any lengths of sequences.

    Args:
        model: on a CPU; takes tensors, or dicts of them, whose first dimension alone varies.
        example: arguments with at least two sequences, two rows in all of each kind and different numbers of them.
        path: ends with ``.pt2``.
    """
    with torch.no_grad():
        dynamic = tree_map(lambda x: {0: torch.export.Dim.AUTO}, example)
        program = decompose(torch.export.export(model.eval(), example, dynamic_shapes=dynamic))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


@torch.no_grad()
def largest_error(
    packaged: Callable[..., Tensor], model: nn.Module, batch: Callable[[int], Arguments], count: int
) -> float:
    """Largest difference of logits over the largest logit, of ``count`` batches."""
    worst = 0.0
    for seed in range(count):
        expected = model(*batch(seed))
        worst = max(worst, ((packaged(*batch(seed)) - expected).abs().max() / expected.abs().max()).item())
    return worst


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = Parser(prog="export_models", description=__doc__.split("\n")[0])
    parser.add_argument("model", choices=["ranking", "kunlun"])
    parser.add_argument("--out", type=output_file(".pt2"), required=True, help="the package, PATH.pt2")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    if options.model == "ranking":
        model: nn.Module = ServedRanking(RankingModel(SCHEMA, ModelConfig())).eval()
        batch: Callable[[int], Arguments] = lambda seed: ranking_batch(seed, 3 + seed % 9)  # noqa: E731
    else:
        scenario = SCENARIOS["speed"].small()
        model = Ranker(scenario, "auto").eval()
        batch = lambda seed: kunlun_batch(scenario, seed, 3 + seed % 9)  # noqa: E731
    package(model, batch(0), options.out)
    error = largest_error(torch._inductor.aoti_load_package(str(options.out)), model, batch, 20)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB; largest error over 20 batches {error:.1e}")
    return 0 if error < 1e-4 else 1


if __name__ == "__main__":
    run_command(main)
