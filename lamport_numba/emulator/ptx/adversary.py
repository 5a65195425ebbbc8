"""The adversarial fabric in native code: everything that the protocol allows a store to suffer.

*In flight.* A word to another device (and every copy of a multicast) goes to one of 64 queues, chosen by a salted
hash of where it
goes; queues are emptied in random order, some are held for long. So words overtake each other, except those to one
address.

*Buffered.* A CTA's stores to its own device's memory may sit in its buffer: the CTA itself sees them, nobody else
does. They leak out
at random, all are done when the grid ends, and a CTA that ends leaves the rest to its grid as *orphans*.

*Fences* of gpu or sys scope empty the CTA's buffer and land what the device has in flight. Atomics act on memory
itself.

Doing something early is always allowed; so what would need care (overlapping words of different sizes) is simply done
at once.
"""

from __future__ import annotations

from collections.abc import Callable

from . import layout
from .ir import Code, Value
from .layout import CTA, ENTRY, FABRIC, GRID, MEMBER, QUEUE, WORD

__all__ = ["chance", "draw", "functions", "preempt", "store_unit", "tick"]

_CLOCK_STEP = 16  # nanoseconds of the virtual clock that a lane's step takes
_STEADY = (7, 31)  # a lane loses its turn before one of n + 1 accesses: in some spells more often, in others less
_WEATHERS = (0, 1, 3, 5, 8)  # in such weather one of 2**n steps lets a word land


def store_unit(c: Code, pointer: Value, value: Value, size: Value) -> None:
    """Store the low ``size`` bytes (1, 2, 4 or 8) of a value, whole."""
    for width in (1, 2, 4, 8):
        with c.when(size.eq(width)):
            c.do(f"store atomic {value.to(f'i{8 * width}')}, {pointer} release, align {width}")


def _load_unit(c: Code, pointer: Value, size: Value) -> Value:
    found = c.variable("i64", 0)
    for width in (1, 2, 4, 8):
        with c.when(size.eq(width)):
            value = c.op(f"i{8 * width}", f"load atomic i{8 * width}, {pointer} acquire, align {width}")
            found.set(value.to("i64"))
    return found.get()


def _overlap(c: Code, a: Value, a_size: Value, b: Value, b_size: Value) -> Value:
    """Whether two pieces of memory (addresses as i64, sizes as i32) share a byte."""
    return a.lt(b + b_size.to("i64")) & b.lt(a + a_size.to("i64"))


# -- chance ----------------------------------------------------------------------------------------------------------


def chance() -> Code:
    """64 random bits (xorshift64*). Each unit that draws has its own copy: a call would cost more than the draw."""
    c = Code("chance", "i64", [("ptr", "fabric")], "alwaysinline")
    fabric = c.params["fabric"]
    x = c.get(fabric, FABRIC, "random")
    x = x ^ (x >> 12)
    x = x ^ (x << 25)
    x = x ^ (x >> 27)
    c.put(fabric, FABRIC, "random", x)
    c.ret(x * 0x2545F4914F6CDD1D)
    return c


def _random() -> Code:
    """64 random bits, for Python."""
    c = Code("fabric_random", "i64", [("ptr", "fabric")], "noinline")
    c.ret(c.call("i64", "chance", c.params["fabric"]))
    return c


def draw(c: Code, fabric: Value, bits: int) -> Value:
    """A random i32 of so many bits."""
    return (c.call("i64", "chance", fabric) >> (64 - bits)).to("i32")


def preempt() -> Code:
    """Whether a lane loses its turn before an access."""
    c = Code("preempt", "i1", [("ptr", "grid")], "alwaysinline")
    grid = c.params["grid"]
    with c.when(c.get(grid, GRID, "calm").ne(0)):
        c.ret(c.const("i1", 0))
    fabric = c.get(grid, GRID, "fabric")
    c.ret((draw(c, fabric, 16) & c.get(fabric, FABRIC, "steady")).eq(0))
    return c


def _now() -> Code:
    """Nanoseconds: of the machine, or of the fabric's virtual clock."""
    c = Code("fabric_now", "i64", [("ptr", "fabric")], "noinline")
    fabric = c.params["fabric"]
    with c.when(fabric.eq(0)):
        c.ret(c.call("i64", "machine_now"))
    c.ret(c.bump(fabric, FABRIC, "clock"))
    return c


# -- words in flight -------------------------------------------------------------------------------------------------


def _queue(fabric: Value, index: Value) -> Value:
    return fabric + layout.FABRIC.size + (index * QUEUE.size).to("i64")


def _word(fabric: Value, index: Value, place: Value) -> Value:
    at = index * layout.QUEUE_LENGTH + (place & (layout.QUEUE_LENGTH - 1))
    return fabric + layout.WORDS_AT + (at * WORD.size).to("i64")


def _bit(c: Code, index: Value) -> Value:
    return c.const("i64", 1) << index.to("i64")


def _set(c: Code, fabric: Value, name: str, bits: Value) -> None:
    c.put(fabric, FABRIC, name, c.get(fabric, FABRIC, name) | bits)


def _clear(c: Code, fabric: Value, name: str, bits: Value) -> None:
    c.put(fabric, FABRIC, name, c.get(fabric, FABRIC, name) & ~bits)


def _which(c: Code, fabric: Value, key: Value) -> Value:
    """The queue of a place: a hash of the word's offset, never of a host address, so that a run can be replayed."""
    mixed = ((key >> 2) ^ c.get(fabric, FABRIC, "salt")) * 0x9E3779B97F4A7C15
    return (mixed >> 58).to("i32")


def _pop() -> Code:
    """Let the first word of a queue land."""
    c = Code("fabric_pop", "void", [("ptr", "fabric"), ("i32", "index")], "noinline")
    fabric, index = c.params["fabric"], c.params["index"]
    queue = _queue(fabric, index)
    head = c.get(queue, QUEUE, "head")
    word = _word(fabric, index, head)
    size = c.get(word, WORD, "size")
    store_unit(c, c.get(word, WORD, "address"), c.get(word, WORD, "value"), size)
    c.put(queue, QUEUE, "head", head + 1)
    with c.when(c.bump(queue, QUEUE, "count", -1).eq(0)):
        _clear(c, fabric, "filled", _bit(c, index))
    c.bump(fabric, FABRIC, "flying", -1)
    c.bump(fabric, FABRIC, "landed")
    with c.when(size.eq(8)):
        c.bump(fabric, FABRIC, "wide", -1)
    c.ret()
    return c


def _settle() -> Code:
    """Let a queue's words land up to the last one that overlaps [address, address + size). How many did."""
    params = [("ptr", "fabric"), ("i32", "index"), ("i64", "address"), ("i64", "size")]
    c = Code("fabric_settle", "i64", params, "noinline")
    fabric, index = c.params["fabric"], c.params["index"]
    start, size = c.params["address"], c.params["size"]
    queue = _queue(fabric, index)
    head = c.get(queue, QUEUE, "head")
    upto = c.variable("i32", 0)
    with c.each(c.get(queue, QUEUE, "count")) as i:
        word = _word(fabric, index, head + i)
        at = c.get(word, WORD, "address").to("i64")
        hit = at.lt(start + size) & start.lt(at + c.get(word, WORD, "size").to("i64"))
        with c.when(hit):
            upto.set(i + 1)
    with c.each(upto.get()):
        c.call("void", "fabric_pop", fabric, index)
    c.ret(upto.get().to("i64"))
    return c


def _meet() -> Code:
    """Before an access of a place on another device: words of ours that are on their way there land first."""
    params = [("ptr", "fabric"), ("i64", "key"), ("i64", "address"), ("i32", "size")]
    c = Code("fabric_meet", "void", params, "noinline")
    fabric, key, address, size = (c.params[n] for _, n in params)
    with c.when(c.get(fabric, FABRIC, "flying").eq(0)):
        c.ret()
    wide = size.to("i64")
    for shift in (-4, 0, 4):  # an 8-byte word may lie in the queue of either half
        c.call("i64", "fabric_settle", fabric, _which(c, fabric, key + shift), address, wide)
    c.ret()
    return c


def _send() -> Code:
    """Put a word in flight. ``key`` names where it goes."""
    params = [
        ("ptr", "fabric"),
        ("i32", "sender"),
        ("ptr", "address"),
        ("i64", "key"),
        ("i64", "value"),
        ("i32", "size"),
    ]
    c = Code("fabric_send", "void", params, "noinline")
    fabric, sender, address, key, value, size = (c.params[n] for _, n in params)
    index = _which(c, fabric, key)
    wide, flying = c.get(fabric, FABRIC, "wide"), c.get(fabric, FABRIC, "flying")
    with c.when(size.eq(8) & wide.lt(flying)):  # a word of the upper half, elsewhere
        c.call("i64", "fabric_settle", fabric, _which(c, fabric, key + 4), address.to("i64"), c.const("i64", 8))
    with c.when(size.ne(8) & wide.ne(0)):  # a pair of which this is the upper half
        c.call("i64", "fabric_settle", fabric, _which(c, fabric, key - 4), address.to("i64"), size.to("i64"))
    queue = _queue(fabric, index)
    with c.when(c.get(queue, QUEUE, "count").eq(layout.QUEUE_LENGTH)):
        c.call("void", "fabric_pop", fabric, index)
    count = c.get(queue, QUEUE, "count")
    with c.when(count.eq(0)):
        _set(c, fabric, "filled", _bit(c, index))
        _hold(c, fabric, index, c.call("i64", "chance", fabric) >> 32)
    word = _word(fabric, index, c.get(queue, QUEUE, "head") + count)
    for name, field in (("address", address), ("value", value), ("size", size), ("sender", sender)):
        c.put(word, WORD, name, field)
    c.put(queue, QUEUE, "count", count + 1)
    c.bump(fabric, FABRIC, "flying")
    with c.when(size.eq(8)):
        c.bump(fabric, FABRIC, "wide")
    c.ret()
    return c


def _hold(c: Code, fabric: Value, index: Value, bits: Value) -> None:
    """Now and then a queue is held, for a while or for long. ``bits``: 5 random ones."""
    with c.when((bits & 3).eq(0)), c.choose((bits & 31).eq(0)) as (yes, no):
        with yes:
            _set(c, fabric, "long", _bit(c, index))
        with no:
            _set(c, fabric, "held", _bit(c, index))


def _any(c: Code, mask: Value, bits: Value) -> Value:
    """One of the bits set in ``mask``, which is not 0; from 6 random bits."""
    start = bits & 63
    return (c.call("i64", "llvm.fshr.i64", mask, mask, start).lowest_bit() + start) & 63


def _let_go(c: Code, fabric: Value, name: str, bits: Value) -> None:
    """One of the queues that are held comes free, if any is."""
    held = c.get(fabric, FABRIC, name)
    with c.when(held.ne(0)):
        _clear(c, fabric, name, _bit(c, _any(c, held, bits)))


def _land() -> Code:
    """Give words a chance to land, so many times; how many did. ``hurry``: nothing else can happen, so if all are held,
    one is let go."""
    c = Code("fabric_land", "i64", [("ptr", "fabric"), ("i64", "times"), ("i32", "hurry")], "noinline")
    fabric, hurry = c.params["fabric"], c.params["hurry"].ne(0)
    before = c.get(fabric, FABRIC, "landed")
    with c.each(c.params["times"]):
        filled = c.get(fabric, FABRIC, "filled")
        with c.when(filled.eq(0)):
            c.ret(c.get(fabric, FABRIC, "landed") - before)
        bits = c.call("i64", "chance", fabric)
        with c.when(((bits >> 56) & 3).eq(0)):
            _let_go(c, fabric, "held", bits >> 32)
        with c.when(((bits >> 50) & 31).eq(0)):
            _let_go(c, fabric, "long", bits >> 32)
        held, long = c.get(fabric, FABRIC, "held"), c.get(fabric, FABRIC, "long")
        free = c.variable("i64")
        free.set(filled & ~held & ~long)
        with c.when(hurry & free.get().eq(0)):
            short = filled & ~long
            free.set(short.ne(0).select(short, filled))
        with c.when(free.get().ne(0)):
            index = _any(c, free.get(), bits >> 40)
            for name in ("held", "long"):
                _clear(c, fabric, name, _bit(c, index))
            c.call("void", "fabric_pop", fabric, index.to("i32"))
            _hold(c, fabric, index.to("i32"), bits >> 26)
    c.ret(c.get(fabric, FABRIC, "landed") - before)
    return c


def _drain() -> Code:
    """Land every word of one sender (or of all: -1). How many did."""
    c = Code("fabric_drain", "i64", [("ptr", "fabric"), ("i32", "sender")], "noinline")
    fabric, sender = c.params["fabric"], c.params["sender"]
    before = c.get(fabric, FABRIC, "landed")
    with c.when(c.get(fabric, FABRIC, "flying").eq(0)):
        c.ret(c.const("i64", 0))
    with c.each(c.const("i32", layout.QUEUES)) as index:
        queue = _queue(fabric, index)
        head = c.get(queue, QUEUE, "head")
        upto = c.variable("i32", 0)
        with c.each(c.get(queue, QUEUE, "count")) as i:
            theirs = c.get(_word(fabric, index, head + i), WORD, "sender")
            with c.when(theirs.eq(sender) | sender.eq(-1)):
                upto.set(i + 1)
        with c.each(upto.get()):
            c.call("void", "fabric_pop", fabric, index)
    c.ret(c.get(fabric, FABRIC, "landed") - before)
    return c


def _drain_range() -> Code:
    """Land every word on its way to [address, address + size)."""
    c = Code("fabric_drain_range", "i64", [("ptr", "fabric"), ("i64", "address"), ("i64", "size")], "noinline")
    fabric = c.params["fabric"]
    total = c.variable("i64", 0)
    with c.each(c.const("i32", layout.QUEUES)) as index:
        landed = c.call("i64", "fabric_settle", fabric, index, c.params["address"], c.params["size"])
        total.set(total.get() + landed)
    c.ret(total.get())
    return c


def _weather() -> Code:
    """The weather changes."""
    c = Code("fabric_weather", "void", [("ptr", "fabric")], "noinline")
    fabric = c.params["fabric"]
    c.put(fabric, FABRIC, "weather_left", draw(c, fabric, 10) + 64)
    c.put(fabric, FABRIC, "steady", draw(c, fabric, 1).eq(0).select(c.const("i32", _STEADY[0]), _STEADY[1]))
    which = draw(c, fabric, 16) % len(_WEATHERS)
    weather = c.variable("i32", _WEATHERS[0])
    for number, kind in enumerate(_WEATHERS):
        with c.when(which.eq(number)):
            weather.set(kind)
    c.put(fabric, FABRIC, "weather", weather.get())
    c.ret()
    return c


def tick(c: Code, fabric: Value, steps: Value) -> Value:
    """After some lanes' steps: time goes on, the weather changes, words may land. Whether any did."""
    c.bump(fabric, FABRIC, "clock", steps * _CLOCK_STEP)
    left = c.get(fabric, FABRIC, "weather_left") - steps.to("i32")
    c.put(fabric, FABRIC, "weather_left", left)
    with c.when(left.cmp("slt", 0)):
        c.call("void", "fabric_weather", fabric)
    landed = c.variable("i1", 0)
    flying = c.get(fabric, FABRIC, "flying")
    with c.when(flying.ne(0)):
        # a word, or a few if many are on their way: else most steps would be spent on waiting for thousands
        bits = c.call("i64", "chance", fabric)
        weather = c.get(fabric, FABRIC, "weather").to("i64")
        spare = ((bits >> 48) & ((c.const("i64", 1) << weather) - 1)) + steps
        times = (spare >> weather) * (((bits >> 24) & 0xFFFF) % ((flying >> 6) + 1) + 1)
        landed.set(c.call("i64", "fabric_land", fabric, times, c.const("i32", 0)).ne(0))
    return landed.get()


# -- a CTA's own stores ----------------------------------------------------------------------------------------------


def _buffer(c: Code, grid: Value, slot: Value) -> Value:
    return slot + c.get(grid, GRID, "buffers_at").to("i64")


def _entry(base: Value, index: Value) -> Value:
    return base + (index * WORD.size).to("i64")


def _copy(c: Code, source: Value, target: Value) -> None:
    for name in WORD.offsets:
        c.put(target, WORD, name, c.get(source, WORD, name))


def _perform(c: Code, entry: Value) -> None:
    store_unit(c, c.get(entry, WORD, "address"), c.get(entry, WORD, "value"), c.get(entry, WORD, "size"))


def _flush() -> Code:
    """Perform every buffered store of a CTA that overlaps [address, address + size), and close the gaps."""
    c = Code(
        "buffer_flush", "void", [("ptr", "grid"), ("ptr", "slot"), ("i64", "address"), ("i64", "size")], "noinline"
    )
    slot = c.params["slot"]
    base = _buffer(c, c.params["grid"], slot)
    start, size = c.params["address"], c.params["size"]
    kept = c.variable("i32", 0)
    with c.each(c.get(slot, CTA, "buffered")) as i:
        entry = _entry(base, i)
        at = c.get(entry, WORD, "address").to("i64")
        hit = at.lt(start + size) & start.lt(at + c.get(entry, WORD, "size").to("i64"))
        with c.choose(hit) as (yes, no):
            with yes:
                _perform(c, entry)
            with no:
                _copy(c, entry, _entry(base, kept.get()))
                kept.set(kept.get() + 1)
    c.put(slot, CTA, "buffered", kept.get())
    c.ret()
    return c


def _leak() -> Code:
    """Perform one buffered store of a CTA, drawn at random (entries never overlap: any order is right)."""
    c = Code("buffer_leak", "void", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    count = c.get(slot, CTA, "buffered")
    with c.when(count.eq(0)):
        c.ret()
    base = _buffer(c, grid, slot)
    entry = _entry(base, draw(c, c.get(grid, GRID, "fabric"), 16) % count)
    _perform(c, entry)
    _copy(c, _entry(base, count - 1), entry)
    c.put(slot, CTA, "buffered", count - 1)
    c.ret()
    return c


def _find(c: Code, grid: Value, slot: Value, address: Value, size: Value) -> tuple[Value, Value]:
    """The buffered store of exactly this place (or null), and whether any other overlaps it."""
    base = _buffer(c, grid, slot)
    exact, other = c.variable("ptr"), c.variable("i1", 0)
    exact.set(c.const("ptr", 0))
    with c.each(c.get(slot, CTA, "buffered")) as i:
        entry = _entry(base, i)
        at, length = c.get(entry, WORD, "address").to("i64"), c.get(entry, WORD, "size")
        with c.when(_overlap(c, at, length, address, size)):
            same = at.eq(address) & length.eq(size)
            with c.choose(same) as (yes, no):
                with yes:
                    exact.set(entry)
                with no:
                    other.set(1)
    return exact.get(), other.get()


def _mark(c: Code, address: Value) -> Value:
    """The bit of a CTA's ``marks`` that is set if its buffer holds any of these 16 bytes (or of some others)."""
    return c.const("i64", 1) << ((address >> 4) & 63)


def _keep() -> Code:
    """Put a store of a place that no other in the buffer overlaps into a CTA's buffer."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("ptr", "pointer"), ("i64", "value"), ("i32", "size")]
    c = Code("buffer_keep", "void", params, "noinline")
    grid, slot, pointer, value, size = (c.params[n] for _, n in params)
    with c.when(c.get(slot, CTA, "buffered").eq(layout.BUFFER_LENGTH)):
        c.call("void", "buffer_leak", grid, slot)
    count = c.get(slot, CTA, "buffered")
    new = _entry(_buffer(c, grid, slot), count)
    for name, field in (("address", pointer), ("value", value), ("size", size)):
        c.put(new, WORD, name, field)
    c.put(slot, CTA, "buffered", count + 1)
    c.put(slot, CTA, "marks", c.get(slot, CTA, "marks") | _mark(c, pointer.to("i64")))
    c.ret()
    return c


def _again() -> Code:
    """Store one unit where the CTA's buffer holds something already."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("ptr", "pointer"), ("i64", "value"), ("i32", "size")]
    c = Code("buffer_again", "void", params, "noinline")
    grid, slot, pointer, value, size = (c.params[n] for _, n in params)
    address = pointer.to("i64")
    exact, other = _find(c, grid, slot, address, size)
    with c.when(~other & exact.ne(0)):
        c.put(exact, WORD, "value", value)
        c.ret()
    with c.when(other):
        c.call("void", "buffer_flush", grid, slot, address, size.to("i64"))
    store_unit(c, pointer, value, size)
    c.ret()
    return c


def _holds() -> Code:
    """Whether a CTA's buffer holds any byte of [address, address + bytes)."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("i64", "address"), ("i32", "bytes")]
    c = Code("buffer_holds", "i1", params, "noinline")
    slot, address, last = c.params["slot"], c.params["address"], c.params["bytes"].to("i64") - 1
    sought = _mark(c, address) | _mark(c, address + last)
    with c.when((c.get(slot, CTA, "marks") & sought).eq(0)):
        c.ret(c.const("i1", 0))
    base = _buffer(c, c.params["grid"], slot)
    marks = c.variable("i64", 0)
    with c.each(c.get(slot, CTA, "buffered")) as i:
        entry = _entry(base, i)
        at = c.get(entry, WORD, "address").to("i64")
        with c.when(_overlap(c, at, c.get(entry, WORD, "size"), address, c.params["bytes"])):
            c.ret(c.const("i1", 1))
        marks.set(marks.get() | _mark(c, at))
    c.put(slot, CTA, "marks", marks.get())
    c.ret(c.const("i1", 0))
    return c


def _store() -> Code:
    """A store of a thread to device memory: so many units, each by itself."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("ptr", "entry"), ("ptr", "pointer"), ("ptr", "values")]
    params += [("i32", "size"), ("i32", "count")]
    c = Code("fabric_store", "void", params, "noinline")
    grid, slot, entry, pointer, values, size, count = (c.params[n] for _, n in params)
    fabric = c.get(grid, GRID, "fabric")
    address = pointer.to("i64")

    def each_unit(do: Callable[[Value, Value, Value], None]) -> None:
        with c.each(count) as i:
            do(i, pointer + (i * size).to("i64"), (values + (i * 8).to("i64")).load("i64"))
        c.ret()

    with c.when(entry.eq(0)):  # memory of the thread or of the CTA
        each_unit(lambda i, at, value: store_unit(c, at, value, size))
    with c.when(c.get(entry, ENTRY, "kind").eq(layout.REMOTE)):
        key = c.get(entry, ENTRY, "key") + address - c.get(entry, ENTRY, "base")
        sender = c.get(grid, GRID, "device")

        def send(i: Value, at: Value, value: Value) -> None:
            c.call("void", "fabric_send", fabric, sender, at, key + (i * size).to("i64"), value, size)

        each_unit(send)

    def again(i: Value, at: Value, value: Value) -> None:
        c.call("void", "buffer_again", grid, slot, at, value, size)

    with (
        c.when(c.get(slot, CTA, "buffered").ne(0)),
        c.when(c.call("i1", "buffer_holds", grid, slot, address, size * count)),
    ):
        each_unit(again)
    # an access is done at once, or each of its units lingers or does not
    bits = c.call("i64", "chance", fabric)
    lingers = (bits >> 62).eq(0).select(((bits >> 40) | (bits >> 48)).to("i32"), 0)

    def linger(i: Value, at: Value, value: Value) -> None:
        with c.choose(((lingers >> i) & 1).ne(0)) as (yes, no):
            with yes:
                c.call("void", "buffer_keep", grid, slot, at, value, size)
            with no:
                store_unit(c, at, value, size)

    each_unit(linger)
    return c


def _look() -> Code:
    """Before a load of device memory: words of ours that are on their way there land. Whether the CTA's buffer holds
    anything of it."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("ptr", "entry"), ("ptr", "pointer"), ("i32", "size"), ("i32", "count")]
    c = Code("fabric_look", "i1", params, "noinline")
    grid, slot, entry, pointer, size, count = (c.params[n] for _, n in params)
    address = pointer.to("i64")
    with c.when(c.get(entry, ENTRY, "kind").eq(layout.REMOTE)):
        key = c.get(entry, ENTRY, "key") + address - c.get(entry, ENTRY, "base")
        with c.each(count) as i:
            at = (i * size).to("i64")
            c.call("void", "fabric_meet", c.get(grid, GRID, "fabric"), key + at, address + at, size)
    c.ret(c.call("i1", "buffer_holds", grid, slot, address, size * count))
    return c


def _load() -> Code:
    """Load a unit of which the CTA's buffer may hold something: the CTA's own stores are seen."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("ptr", "pointer"), ("i32", "size")]
    c = Code("fabric_load", "i64", params, "noinline")
    grid, slot, pointer, size = (c.params[n] for _, n in params)
    address = pointer.to("i64")
    exact, other = _find(c, grid, slot, address, size)
    with c.when(other):
        c.call("void", "buffer_flush", grid, slot, address, size.to("i64"))
    with c.when(~other & exact.ne(0)):
        c.ret(c.get(exact, WORD, "value"))
    c.ret(_load_unit(c, pointer, size))
    return c


def _fence() -> Code:
    """A fence of gpu or sys scope: what this CTA has buffered and this device has in flight is done before anything
    later."""
    c = Code("fabric_fence", "void", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    c.call("void", "buffer_flush", grid, slot, c.const("i64", 0), c.const("i64", -1))
    c.call("i64", "fabric_drain", c.get(grid, GRID, "fabric"), c.get(grid, GRID, "device"))
    c.ret()
    return c


def _atomic() -> Code:
    """Before an atomic: what is outstanding at its place is done; all of it, for a release."""
    params = [
        ("ptr", "grid"),
        ("ptr", "slot"),
        ("ptr", "entry"),
        ("ptr", "pointer"),
        ("i32", "size"),
        ("i32", "release"),
    ]
    c = Code("fabric_atomic", "void", params, "noinline")
    grid, slot, entry, pointer, size, release = (c.params[n] for _, n in params)
    with c.when(entry.eq(0)):
        c.ret()
    address = pointer.to("i64")
    with c.when(release.ne(0)):
        c.call("void", "fabric_fence", grid, slot)
    c.call("void", "buffer_flush", grid, slot, address, size.to("i64"))
    with c.when(c.get(entry, ENTRY, "kind").eq(layout.REMOTE)):
        key = c.get(entry, ENTRY, "key") + address - c.get(entry, ENTRY, "base")
        c.call("void", "fabric_meet", c.get(grid, GRID, "fabric"), key, address, size)
    c.ret()
    return c


def _multicast() -> Code:
    """One unit to every member, each copy on its own way (the own copy too)."""
    params = [("ptr", "grid"), ("ptr", "entry"), ("i64", "address"), ("i64", "value"), ("i32", "size")]
    c = Code("fabric_multicast", "void", params, "noinline")
    grid, entry, address, value, size = (c.params[n] for _, n in params)
    offset = address - c.get(entry, ENTRY, "base")
    fabric, sender = c.get(grid, GRID, "fabric"), c.get(grid, GRID, "device")
    with c.each(c.get(entry, ENTRY, "member_count")) as i:
        member = c.get(entry, ENTRY, "members") + (i * MEMBER.size).to("i64")
        key = c.get(member, MEMBER, "key") + offset
        c.call("void", "fabric_send", fabric, sender, c.get(member, MEMBER, "address") + offset, key, value, size)
    c.ret()
    return c


def _orphan() -> Code:
    """A CTA has ended: what its buffer still holds may linger until the grid ends."""
    c = Code("buffer_orphan", "void", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    base, list_ = _buffer(c, grid, slot), c.get(grid, GRID, "orphan_list")
    with c.each(c.get(slot, CTA, "buffered")) as i:
        with c.when(c.get(grid, GRID, "orphans").eq(layout.ORPHANS)):
            c.call("void", "orphan_leak", grid)
        count = c.get(grid, GRID, "orphans")
        _copy(c, _entry(base, i), _entry(list_, count))
        c.put(grid, GRID, "orphans", count + 1)
    c.put(slot, CTA, "buffered", 0)
    c.ret()
    return c


def _orphan_leak() -> Code:
    """Perform one orphan, drawn at random."""
    c = Code("orphan_leak", "void", [("ptr", "grid")], "noinline")
    grid = c.params["grid"]
    count = c.get(grid, GRID, "orphans")
    with c.when(count.eq(0)):
        c.ret()
    list_ = c.get(grid, GRID, "orphan_list")
    entry = _entry(list_, draw(c, c.get(grid, GRID, "fabric"), 16) % count)
    _perform(c, entry)
    _copy(c, _entry(list_, count - 1), entry)
    c.put(grid, GRID, "orphans", count - 1)
    c.ret()
    return c


def functions() -> list[Code]:
    """All functions of the fabric."""
    flying = (chance, _random, _now, _pop, _settle, _meet, _send, _land, _drain, _drain_range, _weather)
    buffered = (_flush, _leak, _keep, _again, _holds, _store, _look, _load, _fence, _atomic, _multicast)
    orphans = (_orphan, _orphan_leak)
    return [maker() for maker in (*flying, *buffered, *orphans)]
