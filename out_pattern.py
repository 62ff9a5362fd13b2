"""How fast a GPU reads [T, 4, 128] bf16 in several orders, in plain Triton. Run: python out_pattern.py

Prints GB/s of the bytes that each kernel reads (medians of 20, L2 flushed before each). All kernels only read and add
up int32 words; sums are compared with torch's. "walk" kernels are persistent: item w goes to program w modulo the
number of programs, adjacent programs have adjacent heads of one sequence, and loads are pipelined across items, with
the bytes in flight that the table names. By "cp.async" each thread loads 16 bytes; by "tma" a tile of 256 bytes a row
is brought as the attention kernel brings it, in boxes of 128 bytes a row (one instruction for each).

TRITON_INTERPRET=1 python out_pattern.py --check   a tiny problem on the CPU, numbers only
"""

import argparse
import statistics
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

HEADS = tl.constexpr(4)
# int32 words of a head's slice of a row, 256 bytes, and of a row.
SLICE = tl.constexpr(64)
ROW = tl.constexpr(256)
# Sequences begin this many rows apart; the last 8 rows are not read, so that blocks of rows come out even.
APART, READ = 1032, 1024


@triton.jit
def shot(x, out, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """A program for each tile of ROWS rows of AT_ONCE heads; those of the same rows are adjacent in the grid."""
    UNITS: tl.constexpr = HEADS // AT_ONCE
    WIDTH: tl.constexpr = AT_ONCE * SLICE
    pid = tl.program_id(0)
    base = x + (pid // UNITS * ROWS).to(tl.int64) * ROW + pid % UNITS * WIDTH
    words = tl.load(base + tl.arange(0, ROWS)[:, None] * ROW + tl.arange(0, WIDTH)[None, :])
    tl.store(out + pid, tl.sum(tl.sum(words, 1), 0))


@triton.jit
def _place(t, apart, BLOCKS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """First row and unit of heads of this program's block t."""
    item = tl.program_id(0) + t // BLOCKS * tl.num_programs(0)
    return item // UNITS * apart + t % BLOCKS * ROWS, item % UNITS


@triton.jit
def walk(x, out, num_items, apart, BLOCKS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
         TILES: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Items of BLOCKS blocks of ROWS rows, AT_ONCE heads; a block is TILES loads, one after the other."""
    UNITS: tl.constexpr = HEADS // AT_ONCE
    WIDTH: tl.constexpr = AT_ONCE // TILES * SLICE
    at = tl.arange(0, ROWS)[:, None] * ROW + tl.arange(0, WIDTH)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.int32)
    own = tl.cdiv(num_items - tl.program_id(0), tl.num_programs(0)) * BLOCKS
    for t in tl.range(0, own, num_stages=STAGES):
        row, unit = _place(t, apart, BLOCKS, ROWS, UNITS)
        base = x + row.to(tl.int64) * ROW + unit * (AT_ONCE * SLICE)
        for tile in tl.static_range(TILES):
            total += tl.load(base + tile * WIDTH + at)
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


@triton.jit
def walk_tma(x, out, num_items, apart, BLOCKS: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
             TILES: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """As ``walk``, by TMA."""
    UNITS: tl.constexpr = HEADS // AT_ONCE
    WIDTH: tl.constexpr = AT_ONCE // TILES * SLICE
    total = tl.zeros((ROWS, WIDTH), tl.int32)
    own = tl.cdiv(num_items - tl.program_id(0), tl.num_programs(0)) * BLOCKS
    for t in tl.range(0, own, num_stages=STAGES):
        row, unit = _place(t, apart, BLOCKS, ROWS, UNITS)
        for tile in tl.static_range(TILES):
            total += x.load([row, unit * (AT_ONCE * SLICE) + tile * WIDTH])
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


class Case(NamedTuple):
    """An order: ``per_processor`` 0 is a program for each tile, else a walk of so many programs a multiprocessor."""

    name: str
    rows: int
    at_once: int
    per_processor: int = 0
    tiles: int = 1
    # Blocks in flight of a program.
    buffers: int = 0
    linear: bool = False
    tma: bool = False

    @property
    def in_flight(self) -> int:
        """Bytes in flight of a multiprocessor."""
        return self.per_processor * self.buffers * self.rows * self.at_once * 256

    @property
    def apart(self) -> int:
        """Rows between the beginnings of two items."""
        return self.rows if self.linear else APART

    @property
    def blocks(self) -> int:
        """Blocks of an item."""
        return 1 if self.linear else READ // self.rows


# fbtriton 3.7.4 gives a loop of N stages N - 1 buffers, by cp.async and by TMA: shared memory as compiled for sm_90a.
_WALKS = [
    Case("a' linear, persistent", 16, 4, 2, buffers=5, linear=True),
    Case("c  one head of a sequence", 64, 1, 2, buffers=5),
    Case("c1 the same, one program a processor", 64, 1, 1, buffers=10),
    Case("d  two heads, 64 rows of one, then of the other", 64, 2, 1, tiles=2, buffers=5),
    Case("d2 the same, 32 rows, two programs a processor", 32, 2, 2, tiles=2, buffers=5),
    Case("d' two heads, 32 rows of 512 bytes", 32, 2, 2, buffers=5),
    Case("e  four heads, 16 rows of 1 KiB", 16, 4, 2, buffers=5),
    Case("e4 four heads, 16 rows of one, then of the next", 16, 4, 2, tiles=4, buffers=5),
]
CASES = [
    Case("a  linear, 16 KiB a program", 16, 4),
    Case("b  64 rows of a head a program", 64, 1),
    Case("b2 32 rows of two heads a program", 32, 2),
    *_WALKS,
    *(case._replace(tma=True) for case in _WALKS),
]


def prepare(case: Case, x: torch.Tensor, processors: int):
    """A function that launches, its sums, and the bytes that it reads."""
    total_rows = x.shape[0]
    units = 4 // case.at_once
    if not case.per_processor:
        programs = total_rows // case.rows * units
        out = torch.zeros(programs, dtype=torch.int32, device=x.device)
        read = total_rows // case.rows * case.rows
        return lambda: shot[(programs,)](x, out, case.rows, case.at_once, num_warps=4), out, read * 1024
    sequences = total_rows // case.apart
    items, programs = sequences * units, processors * case.per_processor
    out = torch.zeros(programs, dtype=torch.int32, device=x.device)
    kernel, source = walk, x
    if case.tma:
        block = [case.rows, case.at_once // case.tiles * 64]
        kernel, source = walk_tma, TensorDescriptor(x, [total_rows, 256], [256, 1], block)
    constants = (case.blocks, case.rows, case.at_once, case.tiles, case.buffers + 1)
    launch = lambda: kernel[(programs,)](source, out, items, case.apart, *constants, num_warps=4)  # noqa: E731
    return launch, out, sequences * case.blocks * case.rows * 1024


def expected(case: Case, x: torch.Tensor) -> int:
    """The sum of the words that a case reads."""
    if case.per_processor and not case.linear:
        sequences = x.shape[0] // APART
        taken = x[: sequences * APART].view(sequences, APART, 256)[:, :READ]
    else:
        taken = x[: x.shape[0] // case.rows * case.rows]
    return int(taken.sum(dtype=torch.int64))


def main() -> None:
    """Check every case, and time it on a GPU."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="numbers only, on a tiny problem")
    parser.add_argument("--sequences", type=int, default=2272, help="of 1032 rows of 1 KiB: 2.4 GB")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose name begins with this")
    args = parser.parse_args()
    device = "cpu" if args.check else "cuda"
    sequences = 3 if args.check else args.sequences
    x = torch.arange(sequences * APART * 256, dtype=torch.int32, device=device).remainder_(127).view(-1, 256)
    flush = None if args.check else torch.empty(2**28, dtype=torch.int8, device=device)
    processors = 2 if args.check else torch.cuda.get_device_properties(0).multi_processor_count
    if not args.check:
        print(torch.cuda.get_device_name(), processors, "multiprocessors;", torch.__version__, triton.__version__)
        print(f"{'GB/s':>6} {'ms':>7} {'best':>6}  in flight a multiprocessor, how, order")
    for case in CASES:
        if not case.name.startswith(args.only):
            continue
        how = "tma" if case.tma else "cp.async" if case.per_processor else "ld"
        try:
            launch, out, size = prepare(case, x, processors)
            launch()
            got = int(out.sum(dtype=torch.int64))
        except Exception as error:  # one order that does not run must not end the others
            print(f"{case.name} ({how}) failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        right = got == expected(case, x)
        if args.check:
            print(f"{case.name} ({how}): {'right' if right else 'WRONG'}", flush=True)
            continue
        times = []
        for _ in range(args.repeats):
            flush.fill_(1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        ms = statistics.median(times)
        print(
            f"{size / ms / 1e6:6.0f} {ms:7.4f} {size / min(times) / 1e6:6.0f}  {case.in_flight >> 10:4d} KiB {how:8s} "
            f"{case.name}{'' if right else '  WRONG SUM'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
