"""The serving benchmark: both models give the same scores, waiting is counted, and what is wrong gets no figure."""

import csv
import functools
import itertools
import time
from pathlib import Path

import pytest
import torch

from jagged_attn.bench import serving
from jagged_attn.bench.serving import Server
from jagged_attn.bench.serving_model import Request, Scorer, Sizes, make_requests
from jagged_attn.bench.timing import compiled_throughout

CPU = torch.device("cpu")
SIZES = Sizes(embed_dim=6, num_heads=3, num_layers=2, num_items=19, requests=7, longest=13, candidates=5)


def scorer(seed: int = 0) -> Scorer:
    torch.manual_seed(seed)
    return Scorer(SIZES).double().eval()


def requests() -> list[Request]:
    ids = torch.arange(40) % 19
    lengths = [(1, 1), (8, 5), (13, 1), (2, 3)]
    return make_requests(SIZES, 0) + [Request(ids[:history], ids[:count]) for history, count in lengths]


@pytest.mark.parametrize("size", [1, 3, 11])
def test_packed_and_padded_requests_get_the_same_scores_in_the_same_order(size: int) -> None:
    jagged, padded = (Server(name, scorer(), CPU) for name in ("jagged", "padded_sdpa"))
    done: list[int] = []
    one_by_one = torch.cat([jagged.start([request])() for request in requests()])
    for server in (jagged, padded):
        scores = serving.score_all(server, requests(), size, done.append)
        torch.testing.assert_close(scores, one_by_one, rtol=1e-10, atol=1e-12)
    assert sum(done) == 2 * len(requests())


def test_requests_are_within_the_sizes_and_seeded() -> None:
    for request in make_requests(SIZES, 3):
        assert 1 <= len(request.history) <= SIZES.longest
        assert 1 <= len(request.candidates) <= SIZES.candidates
        assert int(request.history.max()) < SIZES.num_items
    first, again, other = (torch.cat([r.history for r in make_requests(SIZES, seed)]) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_request_waits_for_the_batches_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneSecond:
        def __init__(self) -> None:
            self.batches: list[int] = []

        def start(self, batch: list[Request]) -> object:
            self.batches.append(len(batch))
            return lambda: None

    monkeypatch.setattr(serving.time, "perf_counter", itertools.count().__next__)  # each batch takes a second
    server = OneSecond()
    waited = serving.latencies(server, requests()[:5], [0.0, 0.1, 0.2, 0.9, 5.0], 2, lambda count: None)
    assert server.batches == [1, 2, 1, 1]
    assert waited == pytest.approx([1.0, 1.9, 1.8, 2.1, 1.0])


def pairs_and_singles() -> list[list[Request]]:
    """What a server may meet in a pass of latencies."""
    both = requests()
    return [[request] for request in both] + [both[i : i + n] for n in (2, 3) for i in range(len(both) - n)]


@pytest.mark.parametrize("name", ["jagged+compile", "padded_sdpa+compile"])
def test_whatever_batches_come_after_warming_up_nothing_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is traced and guarded does not depend on the compiler behind.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    server = Server(name, scorer(), CPU)
    score = server.start
    score(requests()[:5])()
    serving.warm_up(server, requests(), 3)
    before = serving._compilations()
    assert before > 0
    for batch in pairs_and_singles():
        score(batch)()
    assert serving._compilations() == before
    torch._dynamo.reset()


class Compiles:
    """A server that compiles something in its first batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def start(self, batch: list[Request]) -> object:
        from torch._dynamo.utils import counters

        if self.left:
            self.left -= 1
            counters["stats"]["unique_graphs"] += 1
            time.sleep(0.02)
        return lambda: None


def test_a_pass_during_which_something_was_compiled_does_not_count() -> None:
    stream, arrivals = requests()[:4], [0.0, 1.0, 2.0, 3.0]
    # Two batches and as many single ones as differ before, four batches a pass: the third pass compiles one more.
    warm = 1 + len({(len(r.history) == 1, len(r.candidates) == 1) for r in stream})
    waited = serving.settled_latencies(Compiles(warm + 2 * 4 + 1), stream, arrivals, 2, lambda count: None)
    assert len(waited) == 4
    assert max(waited) < 0.02
    with pytest.raises(RuntimeError, match="something was compiled during each of 4 passes"):
        serving.settled_latencies(Compiles(1000), stream, arrivals, 2, lambda count: None)


def test_a_contestant_that_is_always_compiled_anew_has_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "sizes_of", lambda options: SIZES)
    monkeypatch.setattr(serving, "_compilations", itertools.count().__next__)
    command = ["--device", "cpu", "--limit", "0", "--batch", "2", "--repeats", "1", "--contestants", "jagged"]
    assert serving.main(command) == 1
    assert "no figure: RuntimeError: something was compiled during each of 4 passes" in capsys.readouterr().out


def test_what_dynamo_gives_up_on_is_not_timed_as_compiled() -> None:
    doubled = torch.compile(lambda x: 2 * x, dynamic=False, backend="eager")
    with compiled_throughout(), pytest.raises(Exception, match="recompile"):
        list(map(doubled, (torch.ones(n) for n in range(1, 20))))
    torch._dynamo.reset()


def test_arrivals_ascend_at_the_rate() -> None:
    arrivals = serving.make_arrivals(2000, rate=50.0, seed=0)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(40.0, rel=0.1)


def test_a_model_with_wrong_scores_gets_no_figure() -> None:
    with pytest.raises(ValueError, match="scores are off by"):
        serving.check(Server("jagged", scorer(1).float(), CPU), scorer().float(), requests(), CPU)
    error, _ = serving.check(Server("jagged", scorer().float(), CPU), scorer().float(), requests(), CPU)
    assert error <= 1


def test_a_run_prints_a_ratio_and_writes_rows_with_their_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "sizes_of", lambda options: SIZES)
    command = ["--device", "cpu", "--limit", "0", "--batch", "2", "3", "--repeats", "1", "--out", f"{tmp_path}/s.csv"]
    assert serving.main([*command, "--contestants", "padded_sdpa", "jagged"]) == 0
    assert "best jagged against best padded: " in capsys.readouterr().out
    with (tmp_path / "s.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["contestant"] for row in rows] == ["padded_sdpa", "jagged"]
    assert len({row["rate"] for row in rows}) == 1
    for row in rows:
        assert 0 < float(row["p50_ms"]) <= float(row["p99_ms"])
        assert float(row["candidates_per_s"]) > 0
        assert row["command"].startswith("python -m jagged_attn.bench.serving --device cpu")
        assert row["torch"] == torch.__version__


def test_a_contestant_that_takes_too_long_has_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main(["--device", "cpu", "--small", "--contestants", "jagged", "--limit", "0.01"]) == 1
    assert "no figure: not done within 0.01 s" in capsys.readouterr().out


@pytest.mark.parametrize("option", [["--batch", "0"], ["--repeats", "0"], ["--requests", "0"], ["--rate", "-1"]])
def test_wrong_options_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serving.main(option)
    assert f"{option[0]} must be" in capsys.readouterr().err
