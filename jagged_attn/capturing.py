"""Training steps captured as CUDA graphs: inputs of a fixed capacity, filled with batches of any lengths."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .jagged_tensor import Jagged, check_jagged, is_jagged, layout_of, to_jagged_tensor


def with_capacity(x: Jagged, rows: int, samples: int) -> Any:
    """A copy of a jagged tensor with room for more rows and samples.

    Args:
        x: a TorchRec ``JaggedTensor`` of T rows and B samples, without weights.
        rows: of the copy's values; those from T on are 0 and belong to no sample.
        samples: of the copy; those from B on are empty.

    Returns:
        A ``JaggedTensor`` with values ``[rows, ...]``, which require a gradient if those of ``x`` do, and offsets
        ``[samples + 1]``.

    Raises:
        TypeError: ``x`` is not jagged, or a size is not an int.
        ValueError: ``x`` has weights, or more rows or samples.

    Example:
        >>> from torchrec import JaggedTensor
        >>> x = JaggedTensor(torch.ones(5, 8), lengths=torch.tensor([2, 0, 3]))
        >>> with_capacity(x, rows=7, samples=4).offsets()
        tensor([0, 2, 2, 5, 5])
    """
    values, offsets = _parts("x", x)
    for name, size, found in (("rows", rows, values.shape[0]), ("samples", samples, offsets.shape[0] - 1)):
        _check_int(name, size)
        if size < found:
            raise ValueError(f"{name} must be at least the {found} that x has, got {size}.")
    more = values.new_zeros((rows, *values.shape[1:]), requires_grad=False)
    result = to_jagged_tensor(more.requires_grad_(values.requires_grad), offsets.new_zeros(samples + 1))
    _fill(result, x)
    return result


class CapturedStep:
    """A step captured as one CUDA graph, and replayed for other batches: the host launches a graph, not its kernels.

    What a graph reads and writes stays where it is. So the step sees the same tensors each time, *static inputs* as
    large as the largest batch, and a call first copies its batch into them: rows behind a batch's last are 0 and
    belong to no sample, samples behind its last are empty. A loss must not count these: give it a weight for each
    sample, which is 0 behind the last, in place of a mean. What is made from the offsets (tile tables) is made inside
    the graph, so lengths may be any that fit. Nothing waits for the device.

    On a CPU nothing is captured, and a call runs the step on the static inputs.

    Args:
        step: forward, backward and update, or a part of these, called with the static inputs. It must not wait for
            the device, nor choose by what tensors hold; what it does in Python is done once. Optimizers need
            ``capturable=True`` where they have it. Attention must not run on the ``eager`` or ``reference`` backend.
        example: inputs that show the capacity: tensors, TorchRec ``JaggedTensor``s (see ``with_capacity``), and dicts,
            lists and tuples of these; copied, each apart, offsets that several share too. What requires a gradient
            does so in the copy. Anything else is a constant.
        warmup: how often the step runs before it is captured, with all its effects: these are steps on the example.
            ``DistributedDataParallel`` needs 11.

    Raises:
        TypeError: ``step`` cannot be called, ``warmup`` is not an int, or the example has a nested or sparse tensor or
            a ``KeyedJaggedTensor``.
        ValueError: ``warmup`` is less than 1, the example's tensors are on several devices, or a ``JaggedTensor`` has
            weights.

    Example:
        >>> layer = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        >>> def train(x, weights):
        ...     loss = (layer(x).squeeze(1) * weights).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss.detach()
        >>> step = CapturedStep(train, torch.zeros(4, 8), torch.zeros(4))
        >>> loss = step(torch.randn(3, 8), torch.full((3,), 1 / 3))  # one row and one weight of 0 behind them
    """

    def __init__(self, step: Callable[..., Any], *example: Any, warmup: int = 11) -> None:
        if not callable(step):
            raise TypeError(f"step must be callable, got {type(step).__name__}.")
        _check_int("warmup", warmup)
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1, got {warmup}.")
        self._step = step
        # Also for a step in inference mode: PyTorch counts the writes to these, and what is derived is made anew.
        with torch.inference_mode(False):
            self._static = _rebuilt("example", example, _copy)
        devices = {x.device for x in _leaves(self._static)}
        if len(devices) > 1:
            raise ValueError(
                f"example must have its tensors on one device, got {', '.join(sorted(map(str, devices)))}."
            )
        self._graph: torch.cuda.CUDAGraph | None = None
        if devices and next(iter(devices)).type == "cuda":
            with torch.cuda.device(next(iter(devices))):
                self._capture(warmup)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The static inputs: the same tensors each time.

        Gradients that a step leaves on them are those of the last call, which overwrites them, like its results; do
        not take them away.
        """
        # A JaggedTensor keeps the lengths that it was asked for, and a step may change a dict.
        return _rebuilt("inputs", self._static, lambda name, x: x)

    def _run(self) -> Any:
        # Else a gradient would be added to that of the batch before.
        for x in _leaves(self._static):
            x.grad = None
        return self._step(*self.inputs)

    def _capture(self, warmup: int) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog, a thread of its own, asks for events meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._results = self._run()

    def __call__(self, *inputs: Any) -> Any:
        """Run the step on a batch.

        Args:
            inputs: as ``example``; tensors of the same dtype and device and at most as long in the first dimension, the
                others equal. Constants are equal to the example's.

        Returns:
            What the step returns; the same tensors each time, which the next call overwrites.

        Raises:
            TypeError: an input is of another kind than the example's.
            ValueError: it does not fit; nothing has run then.
        """
        if len(inputs) != len(self._static):
            raise TypeError(f"inputs must be {len(self._static)} inputs, got {len(inputs)}.")
        _check("inputs", self._static, inputs)
        _fill(self._static, inputs)
        if self._graph is None:
            return self._run()
        self._graph.replay()
        return self._results


def _check_int(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"{name} must be an int, got {number!r}.")


def _parts(name: str, x: Any, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Values and offsets of a jagged tensor without weights; ``JaggedTensor.empty()`` gets the columns of ``rows``."""
    check_jagged(name, x)
    if isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torchrec.JaggedTensor here, got a nested tensor.")
    if x.weights_or_none() is not None:
        raise ValueError(f"{name} must have no weights; give them as a tensor of their own.")
    values, offsets = x.values(), layout_of(x).offsets
    if rows is not None and values.shape == (0,):
        values = values.reshape(0, *rows.shape[1:])
    return values, offsets if offsets.numel() else offsets.new_zeros(1)


def _rebuilt(name: str, x: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """The same containers made anew, around changed tensors."""
    if isinstance(x, Mapping):
        return {key: _rebuilt(f"{name}[{key!r}]", value, change) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        items = [_rebuilt(f"{name}[{i}]", item, change) for i, item in enumerate(x)]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    if is_jagged(x):
        values, offsets = _parts(name, x)
        return to_jagged_tensor(change(name, values), change(name, offsets))
    return change(name, x) if isinstance(x, Tensor) else _constant(name, x)


def _constant(name: str, x: Any) -> Any:
    if hasattr(x, "values") and hasattr(x, "keys"):
        check_jagged(name, x)  # which says what to do with a KeyedJaggedTensor
    return x


def _copy(name: str, x: Tensor) -> Tensor:
    if x.layout is not torch.strided:
        raise TypeError(f"{name} must be a torch.strided tensor, got {x.layout}.")
    return x.detach().clone().requires_grad_(x.requires_grad)


def _leaves(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (Mapping, list, tuple)):
        for item in x.values() if isinstance(x, Mapping) else x:
            yield from _leaves(item)
    elif is_jagged(x):
        yield from _parts("", x)


def _check(name: str, static: Any, given: Any) -> None:
    """Raise unless an input fits into the static one."""
    if isinstance(static, Mapping):
        if not isinstance(given, Mapping) or given.keys() != static.keys():
            raise TypeError(f"{name} must be a dict with the keys {list(static)}, got {_described(given)}.")
        for key, value in static.items():
            _check(f"{name}[{key!r}]", value, given[key])
    elif isinstance(static, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(static):
            raise TypeError(f"{name} must be a list or tuple of {len(static)}, got {_described(given)}.")
        for index, (item, other) in enumerate(zip(static, given, strict=True)):
            _check(f"{name}[{index}]", item, other)
    elif isinstance(static, Tensor):
        _check_tensor(name, static, given)
    elif is_jagged(static):
        mine = _parts(name, static)
        for part, tensor, other in zip(("values", "offsets"), mine, _parts(name, given, mine[0]), strict=True):
            _check_tensor(f"{name}.{part}()", tensor, other)
    elif not _is_equal(static, given):
        raise ValueError(f"{name} must be {static!r}, which was captured, got {given!r}.")


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two constants are; NaN is equal to NaN, and what cannot be compared, as arrays, to itself alone."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b or (a != a and b != b)))
    except (RuntimeError, TypeError, ValueError):
        return False


def _check_tensor(name: str, static: Tensor, given: Any) -> None:
    if not isinstance(given, Tensor) or given.layout != static.layout:
        raise TypeError(f"{name} must be a {static.layout} tensor, got {_described(given)}.")
    for what in ("dtype", "device"):
        if getattr(given, what) != getattr(static, what):
            raise ValueError(f"{name} must have {what} {getattr(static, what)}, got {getattr(given, what)}.")
    fits = given.shape == static.shape or (
        given.dim() == static.dim() > 0 and given.shape[1:] == static.shape[1:] and given.shape[0] < static.shape[0]
    )
    if not fits:
        wanted = ", ".join(["at most " + str(static.shape[0]), *map(str, static.shape[1:])]) if static.dim() else ""
        raise ValueError(f"{name} must have shape [{wanted}], got {list(given.shape)}.")


@torch.no_grad()
def _fill(static: Any, given: Any) -> None:
    pairs = list(_pairs(static, given))
    places = {mine.untyped_storage().data_ptr() for mine, _, _ in pairs}
    # What lies in the static inputs themselves, before it is overwritten.
    pairs = [(m, x.clone() if x.untyped_storage().data_ptr() in places else x, rest) for m, x, rest in pairs]
    for mine, new, rest in pairs:
        if mine.shape == new.shape:
            mine.copy_(new)
        else:
            mine[: new.shape[0]].copy_(new)
            mine[new.shape[0] :] = rest


def _pairs(static: Any, given: Any) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """The tensors of the static inputs, those to fill them with, and what is behind these."""
    if isinstance(static, Mapping):
        for key, value in static.items():
            yield from _pairs(value, given[key])
    elif isinstance(static, (list, tuple)):
        for item, other in zip(static, given, strict=True):
            yield from _pairs(item, other)
    elif isinstance(static, Tensor):
        yield static, given, 0
    elif is_jagged(static):
        values, offsets = _parts("", static)
        new_values, new_offsets = _parts("", given, values)
        yield values, new_values, 0
        # Samples behind the last are empty.
        yield offsets, new_offsets, new_offsets[-1:]


def _described(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} of {len(x)}"
    return f"a dict with the keys {list(x)}" if isinstance(x, Mapping) else type(x).__name__
