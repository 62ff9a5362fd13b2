"""Checkpoint files: read, and compared with what this program writes before anything in them is used."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import InputError


def read_checkpoint(path: Path, keys: set[str], run: dict[str, Any]) -> dict[str, Any]:
    """What ``torch.save`` wrote for such a run.

    Args:
        path: of the file.
        keys: what it must hold, ``"run"`` among them.
        run: the ``identity`` that it must have.

    Raises:
        InputError: the file is missing or damaged, or is of another program or run.
    """
    if not path.is_file():
        raise InputError(f"{path}: there is no such checkpoint.")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        is_ours = keys <= state.keys() and isinstance(state["run"], Mapping)
    # A damaged file can fail anywhere in unpickling, with almost any error.
    except Exception as error:
        raise InputError(f"{path}: is not a readable checkpoint ({type(error).__name__}).") from error
    if not is_ours:
        raise InputError(f"{path}: is not a checkpoint of this program.")
    for name, mine in run.items():
        theirs = state["run"].get(name)
        if theirs != mine:
            raise InputError(f"{path}: is of a run with {name} = {theirs}, this one has {name} = {mine}.")
    return state


def require_like(path: Path, state: Mapping[str, Any], pattern: Mapping[str, Any]) -> None:
    """Compare parts of a checkpoint with a pattern: keys, lengths, types, shapes and dtypes; no values.

    Args:
        path: of the checkpoint.
        state: what it holds.
        pattern: what must be there; ``...`` stands for anything.

    Raises:
        InputError: something is not like it.
    """
    for name, mine in pattern.items():
        for fault in _differences(name, state[name], mine):
            raise InputError(f"{path}: {fault}.")


def require_epochs(path: Path, epochs: Any, most: int, columns: Sequence[str]) -> None:
    """Require rows of the epochs 1, 2 and so on, at least one and at most so many, with these columns.

    Raises:
        InputError: the rows are others.
    """
    if not isinstance(epochs, list) or not 1 <= len(epochs) <= most:
        raise InputError(f"{path}: epochs must be a list of 1 to {most} rows, got {_described(epochs)}.")
    require_like(path, {"epochs": epochs}, {"epochs": [dict.fromkeys(columns, 0.0)] * len(epochs)})
    numbers = [row["epoch"] for row in epochs]
    if numbers != list(range(1, len(epochs) + 1)):
        raise InputError(f"{path}: epochs must be numbered 1 to {len(epochs)}, got {numbers}.")


def require_generators(path: Path, cpu: Any, cuda: Any, device: torch.device) -> None:
    """Require the states of the generators of the CPU and, unless ``cuda`` is ``None``, of a GPU if ``device`` is one.

    Raises:
        InputError: they are something else.
    """
    require_like(path, {"rng": cpu}, {"rng": torch.get_rng_state()})
    if device.type == "cuda" and cuda is not None:
        require_like(path, {"rng of the GPU": cuda}, {"rng of the GPU": torch.cuda.get_rng_state(device)})
    try:
        torch.Generator().set_state(cpu)
    except RuntimeError as error:
        raise InputError(f"{path}: rng must be the state of a generator, got other bytes.") from error


def adamw_pattern(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the ``state_dict`` of an ``AdamW`` is like after its first step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {i: {"step": torch.tensor(0.0), "exp_avg": p, "exp_avg_sq": p} for i, p in enumerate(parameters)}
    return {**optimizer.state_dict(), "state": state}


def _differences(where: str, theirs: Any, mine: Any) -> Iterator[str]:
    """What is wrong with a part, in words, the outermost first."""
    if mine is ...:
        return
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        yield from (f"{where} must have {key}" for key in mine if key not in theirs)
        yield from (f"{where} must not have {key}" for key in theirs if key not in mine)
        for key, value in mine.items():
            yield from _differences(f"{where}.{key}", theirs[key], value)
    elif _kind(mine) != _kind(theirs):
        yield f"{where} must be {_described(mine)}, got {_described(theirs)}"
    elif isinstance(mine, list | tuple):
        for i, (a, b) in enumerate(zip(theirs, mine, strict=True)):
            yield from _differences(f"{where}[{i}]", a, b)


def _kind(x: Any) -> Any:
    """What must be equal of two parts that are not both dicts."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    if isinstance(x, list | tuple):
        return type(x), len(x)
    return float if type(x) is int else type(x)


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor {list(x.shape)} of {x.dtype}"
    if isinstance(x, list | tuple):
        return f"{len(x)} {'values' if len(x) != 1 else 'value'}"
    if isinstance(x, Mapping):
        return "a dict"
    names = {type(None): "nothing", float: "a number", int: "a number"}
    return names.get(type(x), f"a {type(x).__name__}")
