# mypy: allow-untyped-defs
"""Rings of buffers, coordinates of ragged TMA maps, and the hand-out of work to the roles of a persistent kernel.

A work item is one entry of a tile table for one head: item ``w`` is head ``w % H`` of entry ``w // H``, so that the
heads of a tile, which read the same rows, run side by side. The forward's items may come in runs of entries, one head
after the other (``forward_items``). The load role takes items or runs from one counter of the launch and passes each
item on through a slot, guarded by a ring of two barriers: in shared memory, ``pass_on`` and ``receive_numbers``; or in
global memory, which two CTAs can read, ``publish`` and ``read_item``.
"""

import triton
import triton.language as tl

from .tlx import tlx

# Numbers that a load role hands over with an item, at most, and what the two slots of a CTA take in global memory.
ITEM_SLOT = tl.constexpr(8)
CTA_SLOTS = 2 * ITEM_SLOT.value
# The extent of the ragged dimension in the maps of ``triton.tools.ragged_tma``.
_EXTENT = tl.constexpr(2**30)


@triton.constexpr_function
def _log2(number):
    """The exponent of a power of two; -1 of any other number."""
    return number.bit_length() - 1 if number & (number - 1) == 0 else -1


@triton.jit
def ring(count, STAGES: tl.constexpr):
    """Buffer and phase of the ``count``-th use of a ring. A consumer waits for ``phase``, a producer for its flip.

    Counts are not negative, which the compiler does not know: its division by a power of two would be several steps.
    """
    LOG2: tl.constexpr = _log2(STAGES)
    if LOG2 >= 0:
        return count & (STAGES - 1), (count >> LOG2) & 1
    else:
        return count % STAGES, (count // STAGES) & 1


@triton.jit
def tile_to_store(tiles, buf, FIRST: tl.constexpr, END: tl.constexpr, STEP: tl.constexpr):
    """``tiles[buf]``, ``buf`` in ``range(FIRST, END, STEP)``, for a store to what products read at other times.

    Branches choose it, which the compiler does not see through. Where it sees that what a product reads is stored to,
    it puts a fence before each such product, in loops, too; the one that every store needs behind it is enough.
    """
    tile = tiles[FIRST]
    for i in tl.static_range(FIRST + STEP, END, STEP):
        if buf == i:
            tile = tiles[i]
    return tile


@triton.jit
def ragged(start, length, row, column):
    """Coordinates of row ``row`` of a sequence in a ragged map: loads give 0 past its end, stores write nothing."""
    start = tl.cast(start, tl.int32)
    return _EXTENT, start + length, _EXTENT - length + row, column


@triton.jit
def bulk_groups_done():
    """Wait until all bulk stores and additions of this thread are in memory.

    The compiler's own ``async_descriptor_store_wait`` is for them to be read from shared memory, which says less.
    """
    tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r", [],
                              dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def slot_of(slots, buf, WIDTH: tl.constexpr):
    """Where this CTA's numbers of a buffer of the hand-out's ring are."""
    return slots + (tl.program_id(0) * 2 + buf) * WIDTH


@triton.jit
def publish(slots, item_full, item_empty, turn, numbers, WIDTH: tl.constexpr):
    """Hand an item to the other roles as up to WIDTH ``numbers``; ``turn`` counts the items of this CTA."""
    buf, phase = ring(turn, 2)
    tlx.barrier_wait(item_empty[buf], phase ^ 1)
    slot = slot_of(slots, buf, WIDTH)
    for i in tl.static_range(len(numbers)):
        tl.store(slot + i, numbers[i])
    tlx.barrier_arrive(item_full[buf], 1)


@triton.jit
def open_slot(slots, item_full, turn, WIDTH: tl.constexpr):
    """Where the numbers of this turn's item are, once they are there; the reader's until it frees ``item_empty``."""
    buf, phase = ring(turn, 2)
    tlx.barrier_wait(item_full[buf], phase)
    return slot_of(slots, buf, WIDTH)


@triton.jit
def read_item(slots, item_full, turn):
    """The eight numbers of this turn's item, once ``publish`` has put them there; as ``open_slot``."""
    slot = open_slot(slots, item_full, turn, ITEM_SLOT)
    return (
        tl.load(slot, volatile=True), tl.load(slot + 1, volatile=True), tl.load(slot + 2, volatile=True),
        tl.load(slot + 3, volatile=True), tl.load(slot + 4, volatile=True), tl.load(slot + 5, volatile=True),
        tl.load(slot + 6, volatile=True), tl.load(slot + 7, volatile=True),
    )  # fmt: skip


@triton.jit
def receive(slots, item_full, item_empty, turn):
    """The item that ``publish`` handed out at this turn as a single number."""
    item = tl.load(open_slot(slots, item_full, turn, 1), volatile=True)
    tlx.barrier_arrive(item_empty[turn % 2], 1)
    return item


@triton.jit
def pass_on(slots, item_full, item_empty, turn, numbers):
    """``publish`` through shared memory: ``slots`` are two times ITEM_SLOT buffers of a number."""
    buf, phase = ring(turn, 2)
    tlx.barrier_wait(item_empty[buf], phase ^ 1)
    for i in tl.static_range(len(numbers)):
        tlx.local_store(slots[buf * ITEM_SLOT + i], tl.full([1], numbers[i], tl.int32))
    tlx.barrier_arrive(item_full[buf], 1)


@triton.jit
def receive_numbers(slots, item_full, turn, FIRST: tl.constexpr, END: tl.constexpr):
    """The numbers ``[FIRST, END)`` of this turn's item, once they are there; see ``read_numbers``."""
    buf, phase = ring(turn, 2)
    tlx.barrier_wait(item_full[buf], phase)
    return read_numbers(slots, turn, FIRST, END)


@triton.jit
def read_numbers(slots, turn, FIRST: tl.constexpr, END: tl.constexpr):
    """The numbers ``[FIRST, END)`` of an item that has come; the slot is the reader's until it frees ``item_empty``."""
    numbers = ()
    for i in tl.static_range(FIRST, END):
        number = tl.sum(tlx.local_load(slots[turn % 2 * ITEM_SLOT + i]), 0)
        numbers = numbers + (number,)  # type: ignore[assignment]
    return numbers


@triton.jit
def next_item(counter):
    """A new item or run: those of the first round are the CTAs' own numbers, the rest come from the counter, from 0."""
    return tl.num_programs(0) + tl.atomic_add(counter, 1)
