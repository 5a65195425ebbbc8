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

from . import layout
from .ir import Code, Value
from .layout import CTA, ENTRY, FABRIC, GRID, MEMBER, QUEUE, WORD

__all__ = ["functions", "store_unit"]

_CLOCK_STEP = 16  # nanoseconds of the virtual clock that a lane's step takes
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


def _random() -> Code:
    """64 random bits (xorshift64*)."""
    c = Code("fabric_random", "i64", [("ptr", "fabric")], "inlinehint")
    fabric = c.params["fabric"]
    x = c.get(fabric, FABRIC, "random")
    x = x ^ (x >> 12)
    x = x ^ (x << 25)
    x = x ^ (x >> 27)
    c.put(fabric, FABRIC, "random", x)
    c.ret(x * 0x2545F4914F6CDD1D)
    return c


def draw(c: Code, fabric: Value, bits: int) -> Value:
    """A random i32 of so many bits."""
    return (c.call("i64", "fabric_random", fabric) >> (64 - bits)).to("i32")


def _preempt() -> Code:
    """Whether a lane loses its turn before an access."""
    c = Code("fabric_preempt", "i1", [("ptr", "grid")], "noinline")
    grid = c.params["grid"]
    with c.when(c.get(grid, GRID, "calm").ne(0)):
        c.ret(c.const("i1", 0))
    c.ret(draw(c, c.get(grid, GRID, "fabric"), 3).eq(0))
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
    c.bump(queue, QUEUE, "count", -1)
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
        _hold(c, fabric, queue)
    word = _word(fabric, index, c.get(queue, QUEUE, "head") + count)
    for name, field in (("address", address), ("value", value), ("size", size), ("sender", sender)):
        c.put(word, WORD, name, field)
    c.put(queue, QUEUE, "count", count + 1)
    c.bump(fabric, FABRIC, "flying")
    with c.when(size.eq(8)):
        c.bump(fabric, FABRIC, "wide")
    c.ret()
    return c


def _hold(c: Code, fabric: Value, queue: Value) -> None:
    """Now and then a queue is held: mostly for short, sometimes for a thousand chances."""
    with c.when(draw(c, fabric, 2).eq(0)):
        c.put(queue, QUEUE, "held", draw(c, fabric, 10) >> (draw(c, fabric, 16) % 10))


def _land() -> Code:
    """Let one word land, if one is found that is not held: 1, else 0. Held queues come free as they are passed over."""
    c = Code("fabric_land", "i64", [("ptr", "fabric")], "noinline")
    fabric = c.params["fabric"]
    with c.when(c.get(fabric, FABRIC, "flying").eq(0)):
        c.ret(c.const("i64", 0))
    start = draw(c, fabric, 6)
    with c.each(c.const("i32", layout.QUEUES)) as i:
        index = (start + i) & (layout.QUEUES - 1)
        queue = _queue(fabric, index)
        with c.when(c.get(queue, QUEUE, "count").ne(0)):
            held = c.get(queue, QUEUE, "held")
            with c.choose(held.ne(0)) as (yes, no):
                with yes:
                    c.put(queue, QUEUE, "held", held - 1)
                with no:
                    c.call("void", "fabric_pop", fabric, index)
                    _hold(c, fabric, queue)
                    c.ret(c.const("i64", 1))
    c.ret(c.const("i64", 0))
    return c


def _hurry() -> Code:
    """Nothing else can happen: the queue that is held least (of several, any) lets a word land, and all holds get
    shorter."""
    c = Code("fabric_hurry", "void", [("ptr", "fabric")], "noinline")
    fabric = c.params["fabric"]
    start = draw(c, fabric, 6)
    least, best = c.variable("i32", -1), c.variable("i32", 0)
    with c.each(c.const("i32", layout.QUEUES)) as i:
        index = (start + i) & (layout.QUEUES - 1)
        queue = _queue(fabric, index)
        held = c.get(queue, QUEUE, "held")
        with c.when(c.get(queue, QUEUE, "count").ne(0) & held.lt(least.get())):
            least.set(held)
            best.set(index)
    with c.each(c.const("i32", layout.QUEUES)) as index:
        queue = _queue(fabric, index)
        held = c.get(queue, QUEUE, "held")
        c.put(queue, QUEUE, "held", held.lt(least.get()).select(0, held - least.get()))
    c.call("void", "fabric_pop", fabric, best.get())
    _hold(c, fabric, _queue(fabric, best.get()))
    c.ret()
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


def _tick() -> Code:
    """After a lane's step: time goes on, the weather changes, a word may land. Whether one did."""
    c = Code("fabric_tick", "i1", [("ptr", "fabric")], "noinline")
    fabric = c.params["fabric"]
    c.bump(fabric, FABRIC, "clock", _CLOCK_STEP)
    left = c.get(fabric, FABRIC, "weather_left")
    c.put(fabric, FABRIC, "weather_left", left - 1)
    with c.when(left.eq(0)):
        c.put(fabric, FABRIC, "weather_left", draw(c, fabric, 10) + 64)
        which = draw(c, fabric, 16) % len(_WEATHERS)
        weather = c.variable("i32", _WEATHERS[0])
        for number, kind in enumerate(_WEATHERS):
            with c.when(which.eq(number)):
                weather.set(kind)
        c.put(fabric, FABRIC, "weather", weather.get())
    with c.when(c.get(fabric, FABRIC, "flying").eq(0)):
        c.ret(c.const("i1", 0))
    mask = (c.const("i32", 1) << c.get(fabric, FABRIC, "weather")) - 1
    with c.when((draw(c, fabric, 16) & mask).ne(0)):
        c.ret(c.const("i1", 0))
    # one word, or a few if many are on their way: else most steps would be spent on waiting for thousands
    landed = c.variable("i64", 0)
    some = (c.get(fabric, FABRIC, "flying").to("i32") >> 6) + 1
    with c.each(draw(c, fabric, 16) % some + 1):
        landed.set(landed.get() + c.call("i64", "fabric_land", fabric))
    c.ret(landed.get().ne(0))
    return c


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


def _store() -> Code:
    """A store of a thread to device memory."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("ptr", "entry"), ("ptr", "pointer"), ("i64", "value"), ("i32", "size")]
    c = Code("fabric_store", "void", params, "noinline")
    grid, slot, entry, pointer, value, size = (c.params[n] for _, n in params)
    with c.when(entry.eq(0)):  # memory of the thread or of the CTA
        store_unit(c, pointer, value, size)
        c.ret()
    fabric = c.get(grid, GRID, "fabric")
    address = pointer.to("i64")
    with c.when(c.get(entry, ENTRY, "kind").eq(layout.REMOTE)):
        key = c.get(entry, ENTRY, "key") + address - c.get(entry, ENTRY, "base")
        c.call("void", "fabric_send", fabric, c.get(grid, GRID, "device"), pointer, key, value, size)
        c.ret()
    exact, other = _find(c, grid, slot, address, size)
    with c.when(other):
        c.call("void", "buffer_flush", grid, slot, address, size.to("i64"))
        store_unit(c, pointer, value, size)
        c.ret()
    with c.when(exact.ne(0)):
        c.put(exact, WORD, "value", value)
        c.ret()
    with c.when(draw(c, fabric, 2).eq(0)):  # some are done at once
        store_unit(c, pointer, value, size)
        c.ret()
    with c.when(c.get(slot, CTA, "buffered").eq(layout.BUFFER_LENGTH)):
        c.call("void", "buffer_leak", grid, slot)
    count = c.get(slot, CTA, "buffered")
    new = _entry(_buffer(c, grid, slot), count)
    for name, field in (("address", pointer), ("value", value), ("size", size)):
        c.put(new, WORD, name, field)
    c.put(slot, CTA, "buffered", count + 1)
    c.ret()
    return c


def _load() -> Code:
    """A load of a thread from device memory: the CTA's own buffered stores are seen."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("ptr", "entry"), ("ptr", "pointer"), ("i32", "size")]
    c = Code("fabric_load", "i64", params, "noinline")
    grid, slot, entry, pointer, size = (c.params[n] for _, n in params)
    with c.when(entry.ne(0)):
        address = pointer.to("i64")
        with c.when(c.get(entry, ENTRY, "kind").eq(layout.REMOTE)):
            key = c.get(entry, ENTRY, "key") + address - c.get(entry, ENTRY, "base")
            c.call("void", "fabric_meet", c.get(grid, GRID, "fabric"), key, address, size)
        with c.when(c.get(slot, CTA, "buffered").ne(0)):
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
    flying = (_random, _preempt, _now, _pop, _settle, _meet, _send, _land, _hurry, _drain, _drain_range, _tick)
    buffered = (_flush, _leak, _store, _load, _fence, _atomic, _multicast, _orphan, _orphan_leak)
    return [maker() for maker in (*flying, *buffered)]
