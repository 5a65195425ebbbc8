"""The cases. Each is collective over the ranks of its world, and leaves all mailboxes as it found them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .world import PACK, SENTINEL, Words, World

CASES: dict[str, Callable[[World], None]] = {}

# Packs of successive calls: dips and growth, as batches of tokens come and go.
DIPS = (8, 8, 8, 2, 7, 8, 1, 1, 64, 3, 32, 33, 1, 2, 1, 65, 31, 1, 1, 1, 2)

SPECIAL = {
    "quiet NaN": 0x7FC00000,
    "signalling NaN": 0x7F800001,
    "negative signalling NaN": 0xFFBFFFFF,
    "NaN with all bits": 0xFFFFFFFF,
    "infinity": 0x7F800000,
    "negative infinity": 0xFF800000,
    "smallest subnormal": 0x00000001,
    "smallest negative subnormal": 0x80000001,
    "largest subnormal": 0x007FFFFF,
    "largest negative subnormal": 0x807FFFFF,
    "zero": 0x00000000,
    "largest": 0x7F7FFFFF,
    "bf16 zero and smallest negative subnormal": 0x80010000,
    "bf16 largest negative subnormal and zero": 0x0000807F,
    "bf16 negative zeros": 0x80008000,
    "half of the sentinel": 0x00008000,
}

DTYPES = "?bhilqpBHILQPefdgFDGMm"  # numpy's characters, of all that have no objects or fields; SUV have their own


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    """Enter a case under its name."""
    CASES[function.__name__] = function
    return function


@case
def every_size(world: World) -> None:
    """From 16 bytes to the capacity: every pack count to 70, then about powers of two."""
    packs = {*range(1, 71)}
    while max(packs) * 2 * PACK <= world.largest:
        packs |= {2 * max(packs) - 1, 2 * max(packs)}
    with world.gather(world.largest) as gather:
        for count in [*sorted(p for p in packs if p * PACK <= world.largest), world.largest // PACK]:
            world.queue(gather, count * PACK)
            world.settle()


@case
def one_pack_many_times(world: World) -> None:
    """The smallest call, back to back."""
    with world.gather(PACK) as gather:
        for _ in range(100):
            world.queue(gather, PACK)
        world.settle()


@case
def dips_and_growth_queued(world: World) -> None:
    """Sizes that alternate, all calls queued before any is waited for, the ranks never joined."""
    with world.gather(max(DIPS) * PACK) as gather:
        for packs in DIPS * 3:
            world.queue(gather, packs * PACK)
        world.settle()


@case
def dips_and_growth_with_late_ranks(world: World) -> None:
    """Before each call one rank, drawn at random, is some milliseconds late."""
    draw = random.Random(7)
    with world.gather(max(DIPS) * PACK) as gather:
        for packs in DIPS:
            late, seconds = draw.randrange(world.size), draw.uniform(0.0005, 0.004)
            if late == world.rank:
                time.sleep(seconds)
            world.queue(gather, packs * PACK)
            world.settle()


@case
def far_apart_sizes(world: World) -> None:
    """The capacity and one pack in turn."""
    with world.gather(world.largest) as gather:
        for nbytes in (world.largest, PACK, PACK, world.largest, PACK, world.largest) * 2:
            world.queue(gather, nbytes)
        world.settle()


@case
def sentinel_in_each_word(world: World) -> None:
    """A payload word that is the sentinel arrives as 0: in each of the four words of a pack, alone and together."""

    def part(call: int, rank: int, packs: int) -> Words:
        words = world.payload(call, packs * PACK, rank).reshape(packs, 4)
        for pack in range(packs):
            mask = (pack + call + rank) % 16
            words[pack, [lane for lane in range(4) if mask >> lane & 1]] = SENTINEL
        return words.reshape(-1)

    with world.gather(16 * PACK) as gather:
        for call in range(16):
            for packs in (16, 1):
                out = world.empty(packs * PACK * world.size)
                gather(world.floats(part(call, world.rank, packs)), out=out)
                world.calls += 1
                parts = [part(call, rank, packs) for rank in range(world.size)]
                world.expect(out, parts, f"{packs} packs with masks from {call}")
        nothing_else = np.full(64, SENTINEL)
        out = world.empty(64 * 4 * world.size)
        gather(world.floats(nothing_else), out=out)
        world.expect(out, [nothing_else] * world.size, "a payload of nothing but the sentinel")


@case
def special_bits(world: World) -> None:
    """NaNs, quiet and signalling, infinities, subnormals and pairs of bf16 keep every bit, in each word of a pack."""
    with world.gather(4 * PACK) as gather:
        for number, (name, word) in enumerate(SPECIAL.items()):
            parts = []
            for rank in range(world.size):
                words = world.payload(number, 4 * PACK, rank).reshape(4, 4)
                words[range(4), [(lane + rank) % 4 for lane in range(4)]] = word
                parts.append(words.reshape(-1))
            out = world.empty(4 * PACK * world.size)
            gather(world.floats(parts[world.rank]), out=out)
            world.calls += 1
            world.expect(out, parts, name)


@case
def dtypes(world: World) -> None:
    """Every numpy dtype without objects or fields travels as its bits; the output has the input's dtype."""
    dtypes = [np.dtype("M8[ns]" if c == "M" else "m8[ms]" if c == "m" else c) for c in DTYPES]
    if world.drv.kind == "cuda":  # numba's device arrays have no others
        dtypes = [dtype for dtype in dtypes if dtype.char not in "gG"]
    count = 48
    options = {} if world.exact else {"raw_words": True}
    with world.gather(count * 32, **options) as gather:
        for number, dtype in enumerate(dtypes):
            parts = [_of_dtype(world.payload(number, count * dtype.itemsize, r), dtype) for r in range(world.size)]
            out = gather(world.array(parts[world.rank]))
            world.calls += 1
            world.require(np.dtype(out.dtype) == dtype, f"{dtype} came out as {out.dtype}")
            world.require(out.shape == (count * world.size,), f"{dtype} came out with shape {out.shape}")
            world.expect(out, [part.view(np.uint32) for part in parts], str(dtype))


def _of_dtype(words: Words, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """These bits as ``dtype``; a bool is 0 or 1."""
    if dtype.kind == "b":
        return (words.view(np.uint8) & 1).view(dtype)
    return words.view(dtype)


@case
def shapes(world: World) -> None:
    """Any number of dimensions: dim 0 is concatenated in rank order, the others stay."""
    with world.gather(96 * PACK) as gather:
        for number, shape in enumerate([(4,), (1, 4), (3, 8), (2, 3, 4), (1, 1, 1, 4), (5, 1, 12), (4, 2, 2, 2)]):
            nbytes = 4 * int(np.prod(shape))
            parts = [world.payload(number, nbytes, rank) for rank in range(world.size)]
            out = gather(world.array(parts[world.rank].view(np.float32).reshape(shape)))
            world.calls += 1
            world.require(out.shape == (world.size * shape[0], *shape[1:]), f"{shape} gave {out.shape}")
            world.expect(out, parts, f"shape {shape}")


@case
def layouts(world: World) -> None:
    """Views that are not contiguous, or not aligned to 16 bytes, are gathered by value; so are such outputs."""
    views: dict[str, tuple[np.dtype[Any], tuple[int, ...], Callable[[Any], Any]]] = {
        "transposed": (np.dtype(np.float32), (8, 12), lambda a: a.T),
        "every second": (np.dtype(np.float32), (32,), lambda a: a[::2]),
        "columns": (np.dtype(np.float32), (6, 8), lambda a: a[:, 2:6]),
        "a plane of three": (np.dtype(np.float32), (3, 4, 5), lambda a: a[1:, :, 1:3]),
        "2 bytes on": (np.dtype(np.float16), (41,), lambda a: a[1:]),
        "4 bytes on": (np.dtype(np.float32), (33,), lambda a: a[1:]),
        "8 bytes on": (np.dtype(np.float32), (34,), lambda a: a[2:]),
    }
    with world.gather(128 * PACK) as gather:
        for number, (name, (dtype, shape, view)) in enumerate(views.items()):
            count = int(np.prod(shape))
            hosts = [
                world.payload(number, 4 * (count + 3), rank).view(dtype)[:count].reshape(shape)
                for rank in range(world.size)
            ]
            out = gather(view(world.array(hosts[world.rank])))
            world.calls += 1
            parts = [np.array(view(host), order="C").reshape(-1).view(np.uint32) for host in hosts]
            world.expect(out, parts, name)
        for skipped in (1, 2):
            nbytes = 5 * PACK
            whole = world.empty(nbytes * world.size + 4 * skipped)
            parts = [world.payload(skipped, nbytes, rank) for rank in range(world.size)]
            gather(world.floats(parts[world.rank]), out=whole[skipped:])
            world.calls += 1
            world.expect(whole[skipped:], parts, f"an output {4 * skipped} bytes on")


@case
def output_holds_the_input(world: World) -> None:
    """The input may be this rank's part of the output."""
    nbytes = 6 * PACK
    with world.gather(nbytes) as gather:
        parts = [world.payload(3, nbytes, rank) for rank in range(world.size)]
        out = world.empty(nbytes * world.size)
        mine = out[world.rank * nbytes // 4 : (world.rank + 1) * nbytes // 4]
        world.write(mine, parts[world.rank].view(np.float32))
        gather(mine, out=out)
        world.calls += 1
        world.expect(out, parts, "in place")


@case
def graphs(world: World) -> None:
    """Graphs of 1, 2 and 3 calls, replayed with fresh inputs, with eager calls of other sizes in between."""
    replays = 100 if world.drv.kind == "cuda" else 8
    with world.stream() as stream, world.gather(max(DIPS) * PACK) as gather:
        for sizes in ((40,), (3, 64), (1, 33, 2)):
            inputs = [world.empty(packs * PACK) for packs in sizes]
            outs = [world.empty(packs * PACK * world.size) for packs in sizes]
            calls = [gather.prepare(x, out, stream) for x, out in zip(inputs, outs, strict=True)]

            def capture(calls: list[Any] = calls) -> None:
                for call in calls:
                    call()

            with world.graph(stream, capture) as launch:
                for replay in range(replays):
                    base = 1000 * (replay + 1)
                    for number, (x, packs) in enumerate(zip(inputs, sizes, strict=True)):
                        world.write(x, world.payload(base + number, packs * PACK).view(np.float32), stream)
                    launch()
                    world.calls += len(sizes)
                    for number, (out, packs) in enumerate(zip(outs, sizes, strict=True)):
                        parts = [world.payload(base + number, packs * PACK, rank) for rank in range(world.size)]
                        world.expect(out, parts, f"replay {replay} of a graph of {len(sizes)}, call {number}", stream)
                    if replay % 2:
                        world.queue(gather, DIPS[replay % len(DIPS)] * PACK, stream)
                        world.settle(stream)


@case
def graph_replays_back_to_back(world: World) -> None:
    """A graph launched many times in a row, nobody waiting for anybody, then eager calls behind it."""
    with world.stream() as stream, world.gather(20 * PACK) as gather:
        parts = [world.payload(5, 20 * PACK, rank) for rank in range(world.size)]
        x, out = world.floats(parts[world.rank], stream), world.empty(20 * PACK * world.size)
        small, small_out = x[: PACK // 4], world.empty(PACK * world.size)

        def capture() -> None:
            gather(x, out=out, stream=stream)
            gather(small, out=small_out, stream=stream)

        with world.graph(stream, capture) as launch:
            for _ in range(25):
                launch()
                world.calls += 2
            world.queue(gather, 7 * PACK, stream)
            world.settle(stream)
            world.expect(out, parts, "the large call of the graph", stream)
            world.expect(small_out, [part[: PACK // 4] for part in parts], "the small call of the graph", stream)


@case
def prepared_calls(world: World) -> None:
    """A prepared call, queued again and again with new contents of its input."""
    nbytes = 9 * PACK
    with world.stream() as stream, world.gather(nbytes) as gather:
        x, out = world.empty(nbytes), world.empty(nbytes * world.size)
        call = gather.prepare(x, out, stream)
        for number in range(12):
            world.write(x, world.payload(number, nbytes).view(np.float32), stream)
            world.require(call() is out, "a prepared call returns its output")
            world.calls += 1
            parts = [world.payload(number, nbytes, rank) for rank in range(world.size)]
            world.expect(out, parts, f"prepared call {number}", stream)


@case
def same_buffers_again(world: World) -> None:
    """The same arrays call after call, and other arrays in between."""
    nbytes = 4 * PACK
    with world.gather(nbytes) as gather:
        x, out = world.empty(nbytes), world.empty(nbytes * world.size)
        for number in range(12):
            world.write(x, world.payload(100 + number, nbytes).view(np.float32))
            gather(x, out=out)
            world.calls += 1
            parts = [world.payload(100 + number, nbytes, rank) for rank in range(world.size)]
            world.expect(out, parts, f"call {number} with the same buffers")
            if number % 3 == 2:
                world.queue(gather, PACK)
                world.settle()


class _Stream:
    """A stream as other libraries have it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@case
def streams(world: World) -> None:
    """The default stream, a handle and a stream object, one after the other."""
    nbytes = 3 * PACK
    with world.stream() as one, world.stream() as two, world.gather(nbytes) as gather:
        for number, (stream, handle) in enumerate([(None, 0), (one, one), (_Stream(two), two), (None, 0)]):
            parts = [world.payload(number, nbytes, rank) for rank in range(world.size)]
            out = world.empty(nbytes * world.size)
            gather(world.floats(parts[world.rank], handle), out=out, stream=stream)
            world.calls += 1
            world.expect(out, parts, f"stream {number}", handle)


@case
def two_gathers_in_turn(world: World) -> None:
    """Two all-gathers, the second by peer whatever the first uses, called in one order by one program."""
    with world.gather(64 * PACK) as first, world.gather(32 * PACK, transport="peer") as second:
        for packs in DIPS:
            world.queue(first, min(packs, 64) * PACK)
            world.queue(second, min(packs, 32) * PACK)
        world.settle()


@case
def refusals(world: World) -> None:
    """What is refused on all ranks touches nothing, and the next call is right."""
    nbytes = 4 * PACK
    with world.gather(nbytes) as gather:
        fitting = world.floats(world.payload(1, nbytes))
        out = world.empty(nbytes * world.size)
        before = world.payload(2, nbytes * world.size)
        world.write(out, before.view(np.float32))
        world.require(gather.accepts(fitting), "an array of the capacity is accepted")
        sizes = {"an array over the capacity": world.empty(nbytes + PACK), "an empty array": world.empty(0)}
        if not world.exact:  # the exact protocol takes any number of bytes
            sizes["an array of 20 bytes"] = world.empty(20)
        for name, array in sizes.items():
            world.require(not gather.accepts(array), f"{name} is not accepted")
            world.refuses(ValueError, name, gather, array, out=out)
        for name, wrong in {
            "an output of another size": world.empty(nbytes * world.size + PACK),
            "an output of another dtype": world.empty(nbytes * world.size, np.int32),
            "an output with gaps": world.empty(2 * nbytes * world.size)[::2],
        }.items():
            world.refuses(ValueError, name, gather, fitting, out=wrong)
        world.refuses(TypeError, "a host array", gather, np.zeros(4, np.float32), out=out)
        world.refuses(TypeError, "a bool for a stream", gather, fitting, out=out, stream=True)
        found = world.read(out, nbytes * world.size)
        world.require(bool((found == before).all()), "a refused call touched its output")
        world.check_mailbox(gather)
        world.queue(gather, nbytes)
        world.settle()
    for capacity in (0, -16, 8, 24, 16.0, True):
        world.refuses(ValueError, f"a capacity of {capacity!r}", world.build, capacity)


@case
def without_programmatic_launch(world: World) -> None:
    """pdl=False: each kernel starts when all before it is complete."""
    with world.gather(max(DIPS) * PACK, pdl=False) as gather:
        for packs in DIPS:
            world.queue(gather, packs * PACK)
        world.settle()


@case
def reset(world: World) -> None:
    """After a reset everything works as on the first day."""
    with world.gather(33 * PACK) as gather:
        for _ in range(3):
            for packs in (33, 1, 2, 1):
                world.queue(gather, packs * PACK)
            world.settle()
            gather.reset()
        world.queue(gather, PACK)
        world.settle()


@case
def built_and_closed_again(world: World) -> None:
    """Several all-gathers one after the other; closing twice is allowed, and a closed one refuses."""
    for number in range(4):
        with world.gather((number + 1) * PACK) as gather:
            world.queue(gather, (number + 1) * PACK)
            world.settle()
        gather.close()
        x = world.floats(world.payload(0, PACK))
        world.refuses(RuntimeError, "a call after close", gather, x)
