"""``python -m jagged_attn.bench.serving``: a stream of requests, scored by the jagged and by the padded model.

    python -m jagged_attn.bench.serving --device cuda --out out/serving.csv
    python -m jagged_attn.bench.serving --device cpu --small

A request has one history and some candidates. A *batch* is what the server scores at once: the waiting requests in
the order of their arrival, at most so many. Two things are measured of each contestant:

- throughput: all requests wait; candidates per second from the first batch to the last score on the host, one batch
  prepared on the host while the device computes the one before; for each ``--batch``, of which the best one counts;
- latency: requests arrive at random (Poisson) at ``--rate``, the same moments for all contestants; a request's latency
  runs from its arrival to its scores on the host. Arrivals are moments of a simulated clock, which moves by the
  measured time of each batch: the server, when it is done, takes what has arrived, oldest first. Which requests meet in
  a batch thus depends on measured times, and a size of one is compiled for by itself: batches of all sizes are scored
  before, and a pass during which something was compiled does not count.

Both begin with ids on the host and end with scores on the host: packing or padding and copies count. A contestant has
no figure unless its scores are right: on the first requests no further from the padded model in float64 than twice
what the padded model in the same dtype is, and in all of the stream equal to the padded model's within that.
"""

import argparse
import copy
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .arguments import (
    BACKEND_NAMES,
    Parser,
    default_device,
    device_here,
    natural,
    not_negative,
    output_file,
    positive,
    run_command,
    seed_number,
)
from .kunlun import reason_of
from .provenance import Provenance, collect_provenance
from .report import write_rows
from .serving_model import Form, PaddedScorer, Request, Scorer, Sizes, make_requests, packed, padded
from .timing import compiled_throughout

_NAMES = ("padded_sdpa", "jagged", "padded_sdpa+compile", "jagged+compile")
# Requests of the check in float64.
_CHECKED = 8
# Passes over the stream, at most, to find one during which nothing is compiled.
_PASSES = 4


@dataclass(frozen=True)
class Figure:
    """What was measured of one contestant.

    Attributes:
        contestant: its name.
        batch: the most requests of a batch, the best of those tried.
        candidates_per_s: throughput.
        requests_per_s: throughput.
        rate: requests per second that arrived while latencies were measured.
        p50_ms: latency.
        p99_ms: latency.
        error: largest of the errors over what is allowed; at most 1.
        reason: why there is no figure, or empty.
    """

    contestant: str
    batch: int = 0
    candidates_per_s: float = float("nan")
    requests_per_s: float = float("nan")
    rate: float = float("nan")
    p50_ms: float = float("nan")
    p99_ms: float = float("nan")
    error: float = float("nan")
    reason: str = ""


class Server:
    """Scores batches of requests on a device.

    Args:
        name: ``jagged`` or ``padded_sdpa``, with ``+compile`` behind it or not.
        scorer: the parameters.
        device: where it runs.
    """

    def __init__(self, name: str, scorer: Scorer, device: torch.device) -> None:
        if name not in _NAMES:
            raise ValueError(f"name must be one of {', '.join(_NAMES)}, got {name!r}.")
        kind, _, compiled = name.partition("+")
        model = scorer if kind == "jagged" else PaddedScorer(scorer)
        self._form: Form = packed if kind == "jagged" else padded
        self._model: Callable[..., Tensor] = torch.compile(model, dynamic=True) if compiled else model
        self._device = device

    @torch.no_grad()
    def start(self, requests: Sequence[Request]) -> Callable[[], Tensor]:
        """Begin to score a batch; the result waits for the scores, ``[T_c]`` fp32 (float64) on the host."""
        on_gpu = self._device.type == "cuda"
        arguments = self._form(requests)
        if on_gpu:
            arguments = tuple(x.pin_memory().to(self._device, non_blocking=True) for x in arguments)
        scores = self._model(*arguments)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).to("cpu", non_blocking=True)
        if not on_gpu:
            return lambda: scores
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))

        def finish() -> Tensor:
            event.synchronize()
            return scores

        return finish


def batches_of(requests: Sequence[Request], size: int) -> Iterator[Sequence[Request]]:
    """The requests in order, ``size`` at a time."""
    return (requests[start : start + size] for start in range(0, len(requests), size))


def score_all(server: Server, requests: Sequence[Request], size: int, on_batch: Callable[[int], Any]) -> Tensor:
    """Scores of all candidates; the host prepares one batch while the device computes the one before."""
    pending: deque[tuple[Callable[[], Tensor], int]] = deque()
    scores = []
    for batch in batches_of(requests, size):
        pending.append((server.start(batch), len(batch)))
        if len(pending) == 2:
            finish, count = pending.popleft()
            scores.append(finish())
            on_batch(count)
    for finish, count in pending:
        scores.append(finish())
        on_batch(count)
    return torch.cat(scores)


def latencies(
    server: Server, requests: Sequence[Request], arrivals: Sequence[float], size: int, on_batch: Callable[[int], Any]
) -> list[float]:
    """Seconds from the arrival of each request to its scores.

    Args:
        server: which scores one batch after the other.
        requests: in the order of arrival.
        arrivals: when each arrives, ascending seconds of the simulated clock.
        size: the most requests of a batch.
        on_batch: called with the number of requests of each batch.
    """
    now, first, waited = 0.0, 0, []
    while first < len(requests):
        now = max(now, arrivals[first])
        end = first + 1
        while end < min(first + size, len(requests)) and arrivals[end] <= now:
            end += 1
        started = time.perf_counter()
        server.start(requests[first:end])()
        now += time.perf_counter() - started
        waited += [now - arrival for arrival in arrivals[first:end]]
        on_batch(end - first)
        first = end
    return waited


def warm_up(server: Server, requests: Sequence[Request], size: int) -> None:
    """Score batches of every size; of one request those that a compiler tells apart, with one event or candidate."""
    alone = {(len(request.history) == 1, len(request.candidates) == 1): request for request in requests}
    for batch in [*([request] for request in alone.values()), *(requests[:n] for n in range(2, size + 1))]:
        server.start(batch)()


def settled_latencies(
    server: Server, requests: Sequence[Request], arrivals: Sequence[float], size: int, on_batch: Callable[[int], Any]
) -> list[float]:
    """``latencies`` of a pass during which nothing was compiled.

    Raises:
        RuntimeError: something was compiled during each of several passes.
    """
    warm_up(server, requests, size)
    latencies(server, requests, arrivals, size, on_batch)  # batches of these sizes for the first time
    for _ in range(_PASSES):
        before = _compilations()
        waited = latencies(server, requests, arrivals, size, on_batch)
        if _compilations() == before:
            return waited
    raise RuntimeError(f"something was compiled during each of {_PASSES} passes that latencies were taken of")


def _compilations() -> int:
    """How many graphs this process has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def make_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Moments of a Poisson process."""
    gaps = torch.empty(count, dtype=torch.float64).exponential_(rate, generator=torch.Generator().manual_seed(seed))
    return gaps.cumsum(0).tolist()


def check(server: Server, scorer: Scorer, requests: Sequence[Request], device: torch.device) -> tuple[float, float]:
    """Compare a server's scores with the padded model in float64.

    Returns:
        The error over what is allowed, and the relative error of the padded model itself, both of norms over all
        scores.

    Raises:
        ValueError: the error is larger than allowed.
    """
    exact_model = copy.deepcopy(scorer).double()
    exact = Server("padded_sdpa", exact_model, device).start(requests)()
    yardstick = Server("padded_sdpa", scorer, device).start(requests)().double()
    actual = server.start(requests)().double()
    floor = torch.finfo(scorer.item.weight.dtype).eps * exact.norm()
    spread = ((yardstick - exact).norm() + floor) / exact.norm()
    error = (actual - exact).norm() / (2 * spread * exact.norm())
    if not error <= 1:
        raise ValueError(f"scores are off by {2 * error:.3g} times the padded model's own error, allowed are 2.")
    return error.item(), spread.item()


@compiled_throughout()
def measure(name: str, options: argparse.Namespace, on_batch: Callable[[int], Any] = lambda count: None) -> Figure:
    """The figure of one contestant, in this process.

    Args:
        name: of the contestant.
        options: of the command line.
        on_batch: called with a number of requests whenever they are done.

    Raises:
        ValueError: its scores are wrong.
        RuntimeError: it is compiled anew in every pass, or too often for dynamo.
    """
    device, sizes = options.device, sizes_of(options)
    requests = make_requests(sizes, options.seed)
    torch.manual_seed(options.seed)
    scorer = Scorer(sizes, options.backend).to(device, getattr(torch, options.dtype)).eval()
    server = Server(name, scorer, device)
    error, spread = check(server, scorer, requests[:_CHECKED], device)
    candidates = sum(len(request.candidates) for request in requests)
    expected = score_all(Server("padded_sdpa", scorer, device), requests, min(options.batch), lambda count: None)
    best = (float("inf"), 0)
    for size in options.batch:
        # The first time everything is compiled, tuned and allocated; and looked at.
        actual = score_all(server, requests, size, on_batch)
        # Each is at most twice, the other once, that spread from what is exact; the rest is for the other requests.
        error = max(error, ((actual - expected).norm() / (4 * spread * expected.norm())).item())
        if not error <= 1:
            raise ValueError(f"scores of batches of {size} are {error:.3g} times as far from the padded as allowed.")
        for _ in range(options.repeats):
            started = time.perf_counter()
            score_all(server, requests, size, on_batch)
            seconds = time.perf_counter() - started
            best = min(best, (seconds, size))
    seconds, size = best
    rate = options.rate or len(requests) / seconds / 2
    arrivals = make_arrivals(len(requests), rate, options.seed)
    waited = torch.tensor(settled_latencies(server, requests, arrivals, size, on_batch), dtype=torch.float64) * 1e3
    p50, p99 = torch.quantile(waited, torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
    return Figure(name, size, candidates / seconds, len(requests) / seconds, rate, p50, p99, error)


def sizes_of(options: argparse.Namespace) -> Sizes:
    """The sizes that the options ask for."""
    sizes = Sizes().small() if options.small else Sizes()
    return sizes if options.requests is None else replace(sizes, requests=options.requests)


def _measure_here(name: str, options: argparse.Namespace) -> Figure:
    with _progress(name, options) as on_batch:
        try:
            return measure(name, options, on_batch)
        except Exception as error:  # whatever a contestant raises is its result
            return Figure(name, reason=reason_of(error))


@contextmanager
def _progress(name: str, options: argparse.Namespace) -> Iterator[Callable[[int], Any]]:
    """What to call with a number of requests that are done: a progress bar if tqdm is installed, silence otherwise."""
    bar: Any = None
    with suppress(ImportError):
        from tqdm import tqdm

        passes = len(options.batch) * (1 + options.repeats) + 2  # and more where something is compiled
        # disable=None: no bar where the output is not a terminal.
        total = passes * sizes_of(options).requests
        bar = tqdm(total=total, desc=name, unit="request", leave=False, disable=None)
    yield (lambda count: None) if bar is None else bar.update
    if bar is not None:
        bar.close()


def _measure_apart(name: str, options: argparse.Namespace) -> Figure:
    """``_measure_here`` in a process of its own, so that one that compiles for too long takes nothing from others."""
    command = [sys.executable, "-m", __spec__.name, "--child", name]
    for option in ("device", "dtype", "backend", "seed", "repeats"):
        command += [f"--{option}", str(getattr(options, option))]
    command += ["--batch", *map(str, options.batch)]
    command += [] if options.rate is None else ["--rate", str(options.rate)]
    command += [] if options.requests is None else ["--requests", str(options.requests)]
    command += ["--small"] if options.small else []
    try:
        # Its standard error is ours: that is where the progress bar goes.
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return Figure(name, reason=f"not done within {options.limit:g} s")
    if child.returncode:
        return Figure(name, reason=f"its process ended with {child.returncode}")
    return Figure(**json.loads(child.stdout.strip().splitlines()[-1]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; 0 if a jagged contestant has a figure, and none of them was refused one."""
    options = _parse(argv)
    if options.child:
        print(json.dumps(asdict(_measure_here(options.child, options))))
        return 0
    program = ("python", "-m", "jagged_attn.bench.serving")
    provenance = collect_provenance(options.device, argv, options.commit, program)
    print(_head(options, provenance), flush=True)
    figures: list[Figure] = []
    for name in options.contestants:
        figure = (_measure_apart if options.limit else _measure_here)(name, options)
        figures.append(figure)
        print(_line(figure), flush=True)
        if options.rate is None and not figure.reason:
            # The first contestant decides how fast requests come, for all of them.
            options.rate = figure.rate
        if options.out:  # after every contestant, so that a run cut short leaves what it has
            write_csv(options.out, figures, options, provenance)
    print(_ratio(figures))
    jagged = [figure for figure in figures if figure.contestant.startswith("jagged")]
    return 0 if jagged and not any(figure.reason for figure in jagged) else 1


def write_csv(path: Path, figures: Iterable[Figure], options: argparse.Namespace, provenance: Provenance) -> None:
    """Write the figures, each with the sizes and the whole provenance, so that a row can be quoted on its own."""
    facts = {**asdict(sizes_of(options)), "dtype": options.dtype, "seed": options.seed, **asdict(provenance)}
    columns = [f.name for f in fields(Figure)] + [*facts]
    write_rows(path, columns, (asdict(figure) | facts for figure in figures))


def _head(options: argparse.Namespace, provenance: Provenance) -> str:
    sizes = sizes_of(options)
    return "\n".join(
        [
            f"# {provenance.command}",
            f"# {provenance.device}, torch {provenance.torch}, {provenance.date}, commit {provenance.commit}",
            f"# {sizes.requests} requests of 1 to {sizes.candidates} candidates, histories of 1 to {sizes.longest} "
            f"(mean_fill {sizes.mean_fill}), E = {sizes.embed_dim}, H = {sizes.num_heads}, {sizes.num_layers} layers, "
            f"{options.dtype}",
        ]
    )


def _line(figure: Figure) -> str:
    if figure.reason:
        return f"{figure.contestant:20s} no figure: {figure.reason}"
    return (
        f"{figure.contestant:20s} {figure.candidates_per_s:12,.0f} candidates/s (batches of {figure.batch}); "
        f"p50 {figure.p50_ms:.2f} ms, p99 {figure.p99_ms:.2f} ms at {figure.rate:,.0f} requests/s; "
        f"error {figure.error:.2f} of allowed"
    )


def _ratio(figures: Sequence[Figure]) -> str:
    best = {
        kind: max((f.candidates_per_s for f in figures if f.contestant.startswith(kind) and not f.reason), default=None)
        for kind in ("jagged", "padded")
    }
    if best["jagged"] is None or best["padded"] is None:
        return "no ratio: a jagged and a padded figure are needed"
    return f"best jagged against best padded: {best['jagged'] / best['padded']:.2f} times the throughput"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m jagged_attn.bench.serving", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", type=device_here, default=default_device())
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU")
    parser.add_argument("--backend", default="auto", choices=BACKEND_NAMES, help="of the jagged model")
    parser.add_argument("--contestants", nargs="+", default=_NAMES, choices=_NAMES)
    parser.add_argument("--small", action="store_true", help="a size for a CPU and for tests")
    parser.add_argument("--requests", type=natural, help="how many come (default: 1000)")
    parser.add_argument("--batch", type=natural, nargs="+", help="most requests of a batch (default: 8 32 64)")
    parser.add_argument("--rate", type=positive, help="requests per second (default: half of the first throughput)")
    parser.add_argument("--repeats", type=natural, default=3, help="timed passes of the stream; the fastest counts")
    parser.add_argument("--seed", type=seed_number, default=0)
    parser.add_argument("--out", type=output_file(), metavar="CSV", help="write the figures, each with its provenance")
    parser.add_argument("--commit", help="what to say where the package does not lie in its repository")
    parser.add_argument(
        "--limit", type=not_negative, default=300.0,
        help="seconds for each contestant, in a process of its own; 0: in this one, without a limit",
    )  # fmt: skip
    parser.add_argument("--child", choices=_NAMES, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.dtype = options.dtype or ("bfloat16" if options.device.type == "cuda" else "float32")
    options.batch = options.batch or ([4, 8] if options.small else [8, 32, 64])
    return options


if __name__ == "__main__":
    run_command(main)
