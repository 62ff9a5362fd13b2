"""What two ranks do for the tests of data-parallel training."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchrec import JaggedTensor

from jagged_attn import Causal, JaggedMultiHeadAttention, JaggedTargetAttention
from jagged_attn.bench import scaling, scaling_checks
from jagged_attn.bench.kunlun_steps import Scenario
from jagged_attn.bench.scaling_checks import CHECKS, check
from jagged_attn.distributed import fully_shard
from jagged_attn.modules.kunlun_config import EventTowerConfig

CPU = torch.device("cpu")
SCENARIO = Scenario(
    {
        "click": EventTowerConfig(12, 3, num_tokens=2, num_layers=2, window=3, num_seeds=5, num_keys=7),
        "impression": EventTowerConfig(8, 2, num_tokens=3, num_layers=1, window=3, num_seeds=5, num_keys=7),
    },
    batch=5, longest=13, lengths="uniform_from_one", num_tokens=5, embed_dim=8,
)  # fmt: skip


class Stack(nn.Module):
    """Layers that return nothing but a ``JaggedTensor``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(JaggedMultiHeadAttention(8, 2, mask=Causal()) for _ in range(2))
        self.target = JaggedTargetAttention(8, 2)

    def forward(self, history: JaggedTensor, candidates: JaggedTensor) -> JaggedTensor:
        for layer in self.layers:
            history = layer(history)
        return self.target(history, candidates)


def stack_gradients(rank: int) -> dict[str, Any]:
    """Gradients of a sharded stack, and those of one process; what became of lengths and offsets."""
    torch.manual_seed(1)
    plain = Stack()
    lengths = torch.tensor([[3, 0, 2], [0, 0, 0]])[rank]  # the second rank has no event
    torch.manual_seed(2)
    values, queries = torch.randn(5, 8), torch.randn(4, 8)
    history = JaggedTensor(values[: int(lengths.sum())], lengths=lengths)
    candidates = JaggedTensor(queries, lengths=torch.tensor([1, 1, 2]))
    plain(history, candidates).values().square().sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for gradient in expected.values():
        dist.all_reduce(gradient)
        gradient /= 2

    torch.manual_seed(1)
    sharded = Stack()
    mesh = init_device_mesh("cpu", (2,))
    for layer in [*sharded.layers, sharded.target, sharded]:
        fully_shard(layer, mesh=mesh)
    seen = []
    sharded.layers[0].register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    history = JaggedTensor(history.values(), lengths=lengths)
    result = sharded(history, candidates)
    result.values().square().sum().backward()
    return {
        "expected": expected,
        "gradients": {name: p.grad.full_tensor() for name, p in sharded.named_parameters()},
        "is jagged": type(result) is JaggedTensor,
        "one layout": all(x.offsets() is history.offsets_or_none() for x in seen[0]),
    }


def speed(folder: Path) -> str:
    """What ``python -m jagged_attn.bench.scaling speed`` prints; its CSV is in ``folder``."""
    given = ["speed", "--small", "--batch", "3", "--batches", "1", "--steps", "1", "--out", str(folder / "speed.csv")]
    printed = io.StringIO()
    scaling.scenario_of = lambda options: SCENARIO
    with contextlib.redirect_stdout(printed):
        assert scaling._speed(scaling._parse(given), CPU, given) == 0
    return printed.getvalue()


def wrong_factor() -> str:
    """What the check says of ranks that add gradients up in place of taking their mean."""
    parallelized = scaling_checks.parallelize

    def summed(*args: Any, **options: Any) -> nn.Module:
        model = parallelized(*args, **options)
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)
        return model

    scaling_checks.parallelize = summed
    try:
        check("mixed", "ddp", SCENARIO, CPU)
    except ValueError as error:
        return str(error)
    finally:
        scaling_checks.parallelize = parallelized
    return "nothing"


def compiled(folder: Path) -> dict[str, Any]:
    """The layers compiled one by one, under each way of training on many ranks; one of two ranks without a sample."""
    return {how: check("empty", how, SCENARIO, CPU, compiled=True) for how in ("ddp", "fsdp2", "fsdp2_whole")}


def everything(folder: Path) -> dict[str, Any]:
    """All of it, in one start of two processes."""
    results: dict[str, Any] = {"stack": stack_gradients(dist.get_rank())}
    for how in ("ddp", "fsdp2", "fsdp2_whole"):
        for what in CHECKS:
            results[f"{how} {what}"] = check(what, how, SCENARIO, CPU)
        if how != "ddp":
            results[f"{how} unpacked"] = check("plain", how, SCENARIO, CPU, pack=False)
        results[f"{how} captured"] = check("plain", how, SCENARIO, CPU, captured=True)
    results["wrong factor"] = wrong_factor()
    results["speed"] = speed(folder)
    return results
