"""What data-parallel training of the Kunlun model must satisfy, whatever the number of ranks and the device.

Every check trains the same weights on the same global batches twice: on one process without any wrapper, and on all
ranks, each with its share of the samples. The loss of a rank is ``W / C · Σ`` over its samples, C those of the global
batch, so that the mean over ranks, which DDP and FSDP2 take, is the mean over the samples however they are shared out.

What is allowed is derived: the process alone also trains with each gradient summed up share by share, which differs by
the order of sums alone; the ranks may differ by twice as much plus eight roundings.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ..distributed import fully_shard
from .kunlun_steps import Batch, Ranker, Scenario, capture, make_batch

Parallel = Literal["none", "ddp", "fsdp2", "fsdp2_whole"]
PARALLEL: tuple[Parallel, ...] = get_args(Parallel)
_FULLY_SHARDED = ("fsdp2", "fsdp2_whole")
_RATE = 0.02
# Of all layers of the models that are compiled in a run.
_COMPILATIONS = 256
# Processors of a GPU that a collective may take while the layers compute.
_NCCL_CTAS = 4
_ROUNDINGS = 8


def compile_layers(ranker: Ranker) -> None:
    """Compile the layers of the stack, each on its own: hooks of FSDP2 stay outside, sizes are unknown throughout."""
    # Layers share their code, and PyTorch counts the compilations of one code.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILATIONS)
    for layer in _layers(ranker):
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True)


def _layers(ranker: Ranker) -> list[nn.Module]:
    closing = [] if ranker.stack.closing is None else [ranker.stack.closing]
    return [*ranker.stack.layers, *closing]


def parallelize(
    ranker: Ranker,
    how: Parallel,
    device: torch.device,
    *,
    mixed: bool = False,
    keep: bool = False,
    compiled: bool = False,
    pack: bool = True,
    captured: bool = False,
) -> nn.Module:
    """The model on all ranks of the default process group.

    Args:
        ranker: what is trained, with the same weights on all ranks.
        how: ``"none"``: as it is; ``"ddp"``: ``DistributedDataParallel``; ``"fsdp2"``: ``fully_shard``, a group of
            parameters for each layer of the stack and one for the rest; ``"fsdp2_whole"``: one group for all.
        device: of this rank.
        mixed: bfloat16 parameters in forward and backward of FSDP2, gradients reduced in float32. For the others,
            autocast does that.
        keep: the parameters that FSDP2 gathered for the forward, for the backward.
        compiled: the layers are.
        pack: the parameters of a group of FSDP2 lie in one, see ``jagged_attn.distributed.fully_shard``.
        captured: its steps will be. Nothing that is captured may use the stream that all others wait for.
    """
    if captured and device.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            model = parallelize(ranker, how, device, mixed=mixed, keep=keep, compiled=compiled, pack=pack)
            torch.cuda.synchronize()
            return model
    if compiled:
        compile_layers(ranker)
    if how == "ddp":
        ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(ranker, device_ids=ids, gradient_as_bucket_view=True)
    if how in _FULLY_SHARDED:
        mesh = _mesh(device, beside_kernels=how == "fsdp2")
        dtypes: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
        # The root casts what comes in; a layer's rotations stay as exact as they are.
        inner = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": False if keep else None, "pack": pack}
        for layer in _layers(ranker) if how == "fsdp2" else []:
            fully_shard(layer, mp_policy=inner, **options)
        fully_shard(ranker, mp_policy=MixedPrecisionPolicy(**dtypes), **options)
    return ranker


def _mesh(device: torch.device, beside_kernels: bool) -> DeviceMesh:
    """All ranks; collectives that run beside kernels hold few processors of a GPU, see docs/scaling.md."""
    if device.type != "cuda" or not beside_kernels:
        return init_device_mesh(device.type, (dist.get_world_size(),))
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = _NCCL_CTAS
    return DeviceMesh.from_group(dist.new_group(backend="nccl", pg_options=options), device.type)


def samples_of(batch: Batch, start: int, stop: int) -> Batch:
    """Samples ``start`` to ``stop`` of a batch, on memory of their own."""
    bounds = {name: (int(offsets[start]), int(offsets[stop])) for name, offsets in batch.offsets.items()}
    return Batch(
        batch.tokens[start:stop].clone(),
        {name: batch.values[name].detach()[a:b].clone().requires_grad_() for name, (a, b) in bounds.items()},
        {name: batch.offsets[name][start : stop + 1] - a for name, (a, _) in bounds.items()},
        {name: batch.timestamps[name][a:b].clone() for name, (a, b) in bounds.items()},
        batch.labels[start:stop].clone(),
    )


def without_events(batch: Batch, start: int) -> Batch:
    """The batch with all histories from sample ``start`` on empty."""
    ends = {name: int(offsets[start]) for name, offsets in batch.offsets.items()}
    return Batch(
        batch.tokens,
        {name: batch.values[name].detach()[:end].clone().requires_grad_() for name, end in ends.items()},
        {name: offsets.clamp(max=ends[name]) for name, offsets in batch.offsets.items()},
        {name: batch.timestamps[name][:end].clone() for name, end in ends.items()},
        batch.labels,
    )


@dataclass(frozen=True)
class Step:
    """A global batch and how it is shared out.

    Attributes:
        batch: of all ranks.
        bounds: rank r has samples ``bounds[r]`` to ``bounds[r + 1]``.
        micro: parts of each rank's share, whose gradients are accumulated.
    """

    batch: Batch
    bounds: tuple[int, ...]
    micro: int = 1

    @property
    def size(self) -> int:
        """C."""
        return len(self.batch.labels)

    def share(self, rank: int) -> list[Batch]:
        """The micro-batches of a rank; some of them perhaps without a sample."""
        first, last = self.bounds[rank], self.bounds[rank + 1]
        cuts = [first + (last - first) * i // self.micro for i in range(self.micro + 1)]
        return [samples_of(self.batch, a, b) for a, b in itertools.pairwise(cuts)]

    def shares(self) -> list[Batch]:
        """The micro-batches of all ranks."""
        return [batch for rank in range(len(self.bounds) - 1) for batch in self.share(rank)]


def make_steps(scenario: Scenario, world_size: int, device: torch.device, what: str) -> list[Step]:
    """Steps that train on other batches each.

    Args:
        scenario: sizes; ``batch`` is that of one rank.
        world_size: W.
        device: where the batches are.
        what: ``"plain"``; ``"accumulated"``: two micro-batches; ``"empty"``: the last rank's histories are all empty
            in every other step, and in the others it has no sample at all.
    """
    steps = []
    for index in range(2):
        batch = make_batch(scenario.times(world_size), index, device, torch.float32)
        bounds = [rank * scenario.batch for rank in range(world_size + 1)]
        if what == "empty" and world_size > 1:
            if index % 2:
                bounds[-2] = bounds[-1]
            else:
                batch = without_events(batch, bounds[-2])
        steps.append(Step(batch, tuple(bounds), micro=2 if what == "accumulated" else 1))
    return steps


@dataclass(frozen=True)
class Run:
    """What a training run gave.

    Attributes:
        losses: ``[steps]``, of the global batches, float64 on the host.
        parameters: all of them after the last step in one vector, likewise.
        update: how far they are from those before the first step.
    """

    losses: Tensor
    parameters: Tensor
    update: Tensor

    @classmethod
    def of(cls, ranker: Ranker, losses: Tensor, parameters: Tensor) -> "Run":
        """A run that began with the parameters of ``ranker``."""
        return cls(losses, parameters, parameters - _vector(ranker, ranker))

    def difference(self, other: "Run") -> dict[str, float]:
        """Norms of the differences over norms, by what differs."""
        pairs = {"losses": (self.losses, other.losses), "updates": (self.update, other.update)}
        return {name: ((a - b).norm() / b.norm()).item() for name, (a, b) in pairs.items()}


def _train(
    model: nn.Module,
    steps: Sequence[Step],
    shares: Callable[[Step], list[Batch]],
    factor: float,
    autocast: bool,
    captured: bool = False,
) -> list[Tensor]:
    """SGD, which unlike AdamW sees a factor in all gradients; this process's part of each loss."""
    optimizer, losses = torch.optim.SGD(model.parameters(), _RATE), []

    def backward(batch: tuple[Any, ...], size: int) -> Tensor:
        arguments, labels = batch
        kind = labels.device.type
        with torch.autocast(kind, torch.bfloat16) if autocast else nullcontext():
            logits = model(*arguments)
        part = F.binary_cross_entropy_with_logits(logits.float(), labels.to(torch.float32), reduction="sum") / size
        (part * factor).backward()
        return part.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    if captured:
        return _train_captured(model, [shares(step)[0] for step in steps], steps[0].size, backward, update)
    for step in steps:
        batches, total = shares(step), torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            with _synchronized(model, index == len(batches) - 1):
                total += backward((batch.packed(), batch.labels), step.size).double().cpu()
        update()
        losses.append(total)
    return losses


def _train_captured(
    model: nn.Module,
    batches: Sequence[Batch],
    size: int,
    backward: Callable[[tuple[Any, ...], int], Tensor],
    update: Callable[[], None],
) -> list[Tensor]:
    """The same with a captured step, from the parameters before the steps that are run to capture it."""

    def step(batch: tuple[Any, ...]) -> Tensor:
        part = backward(batch, size)
        update()
        return part

    before = [parameter.detach().clone() for parameter in model.parameters()]
    train = capture(step, batches)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    return [train(batch).double().cpu() for batch in batches]


def _synchronized(model: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
    """Gradients are reduced in the backward of the last micro-batch alone."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext() if is_last else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    return nullcontext()


def _vector(trained: Ranker, ranker: Ranker) -> Tensor:
    """The parameters that ``ranker`` has, as they are in ``trained``, which may be sharded."""
    state = trained.state_dict()
    found = [state[name] for name, _ in sorted(ranker.named_parameters())]
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in found]
    return torch.cat([p.detach().double().cpu().flatten() for p in whole])


class _Cast(nn.Module):
    """A model as FSDP2's mixed precision computes it: parameters and inputs in bfloat16, their gradients in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> Any:
        def cast(x: Tensor) -> Tensor:
            return x.to(torch.bfloat16) if x.is_floating_point() else x

        parameters = {name: cast(p) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, parameters, torch.utils._pytree.tree_map(cast, arguments))


def train_alone(
    ranker: Ranker,
    steps: Sequence[Step],
    *,
    in_shares: bool,
    mixed: Literal["", "autocast", "cast"] = "",
    compiled: bool = False,
) -> Run:
    """Train a copy of a model on this process.

    Args:
        ranker: left as it is.
        steps: the global batches.
        in_shares: sum each gradient up share by share, in place of all at once.
        mixed: under autocast to bfloat16, or with parameters cast to it.
        compiled: the layers are.
    """

    def shares(step: Step) -> list[Batch]:
        return [batch for batch in step.shares() if len(batch.labels)] if in_shares else [step.batch]

    model = copy.deepcopy(ranker)
    if compiled:
        compile_layers(model)
    losses = _train(_Cast(model) if mixed == "cast" else model, steps, shares, 1.0, autocast=mixed == "autocast")
    return Run.of(ranker, torch.stack(losses), _vector(model, ranker))


def train_on_ranks(
    ranker: Ranker,
    steps: Sequence[Step],
    how: Parallel,
    device: torch.device,
    *,
    mixed: bool = False,
    compiled: bool = False,
    pack: bool = True,
    captured: bool = False,
) -> Run:
    """Train a copy of a model on all ranks; every rank returns the same.

    Raises:
        ValueError: the ranks have different parameters at the end.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trained = copy.deepcopy(ranker)
    model = parallelize(trained, how, device, mixed=mixed, compiled=compiled, pack=pack, captured=captured)
    autocast = mixed and how not in _FULLY_SHARDED
    losses = _train(model, steps, lambda step: step.share(rank), float(world_size), autocast, captured)
    all_losses, vector = torch.stack(losses).to(device), _vector(trained, ranker)
    dist.all_reduce(all_losses)
    first = vector.to(device)
    dist.broadcast(first, 0)
    if not torch.equal(first.cpu(), vector):
        raise ValueError(f"parameters must be the same on all ranks, got others on rank {rank}.")
    return Run.of(ranker, all_losses.cpu(), vector)


CHECKS = ("plain", "accumulated", "empty", "mixed")


def check(
    what: str,
    how: Parallel,
    scenario: Scenario,
    device: torch.device,
    backend: str = "auto",
    *,
    compiled: bool = False,
    pack: bool = True,
    captured: bool = False,
) -> dict[str, float]:
    """Compare training on all ranks with training on one process.

    Args:
        what: one of ``CHECKS``.
        how: see ``parallelize``.
        scenario: sizes; ``batch`` is that of one rank.
        device: of this rank.
        backend: what runs the attention.
        compiled: the layers are, on the ranks and on the one process.
        pack: see ``parallelize``.
        captured: the steps of the ranks are CUDA graphs; ``"plain"`` alone.

    Returns:
        The relative differences of losses and of parameters' updates over what is allowed; at most 1.

    Raises:
        ValueError: one is larger.
    """
    mixed = what == "mixed"
    torch.manual_seed(0)
    ranker = Ranker(scenario, backend).to(device)
    steps = make_steps(scenario, dist.get_world_size(), device, what)
    alone = train_alone(ranker, steps, in_shares=False, compiled=compiled)
    # What one process makes of the same roundings.
    kind: Literal["", "autocast", "cast"] = "" if not mixed else "cast" if how in _FULLY_SHARDED else "autocast"
    other = train_alone(ranker, steps, in_shares=not mixed, mixed=kind, compiled=compiled)
    ways = {"mixed": mixed, "compiled": compiled, "pack": pack, "captured": captured}
    run = train_on_ranks(ranker, steps, how, device, **ways)
    found, spread = run.difference(alone), other.difference(alone)
    rounding = _ROUNDINGS * torch.finfo(torch.bfloat16 if mixed else torch.float32).eps
    # Parameters are rounded as they are stored, however small their updates.
    stored = torch.finfo(torch.float32).eps * (alone.parameters.norm() / alone.update.norm()).item()
    allowed = {name: 2 * spread[name] + rounding + (stored if name == "updates" else 0.0) for name in found}
    for name, limit in allowed.items():
        if not found[name] <= limit:
            raise ValueError(
                f"{how}, {what}: {name} differ by {found[name]:.3g} from those of one process, allowed are {limit:.3g}."
            )
    return {name: found[name] / limit for name, limit in allowed.items()}
