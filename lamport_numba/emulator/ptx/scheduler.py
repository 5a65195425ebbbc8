"""The scheduler of a kernel: LLVM code with the kernel's step function inlined.

``run(grid, ctas, quantum)`` makes passes over the resident CTAs. In a pass every lane that is ready takes one step;
then collectives
and barriers that are complete let their lanes go. A CTA that has ended gives its slot to the next one.

Most passes are *brief*: once a lane has found what it polls unchanged, the other lanes of its warp that polled in vain
before are left out. They wait for words that come together, mostly, and their frames are more memory than a cache
holds.

*Progress* is strict: a lane that exits, comes out of a collective or a barrier, or has changed memory since its last
step. Coming
back from a loop that only looks is none. A whole pass without any is answered STALLED.
"""

from __future__ import annotations

from collections.abc import Callable

from . import layout
from .adversary import chance, draw, preempt, tick
from .ir import Code, Value, Variable
from .layout import CTA, FABRIC, GRID, LANE, WARP
from .runtime import lane_at, warp_at

__all__ = ["scheduler"]

_FAULTED = 2  # what a pass over a CTA answers beside 0 and 1 (progress)
_BRIEF = 4  # in one pass of so many every lane has a step
_TURNS = 64  # how often a warp goes on at once after a collective, before the next has its turn


def _turn() -> Code:
    """One pass over a CTA: 0, 1 (progress) or 2 (fault)."""
    c = Code("turn", "i32", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    brief = c.get(grid, GRID, "brief").eq(0).select(c.const("i32", 0), -1)
    progress, rest = c.variable("i32", 0), c.variable("i32", 0)
    stride = c.get(grid, GRID, "stride").to("i64")
    steps = c.variable("i64", 0)
    with c.each(c.get(grid, GRID, "warps")) as index:
        warp, first = _come_to(c, grid, slot, index, progress)
        turns = c.variable("i32")
        turns.set(_TURNS)
        again = c.fresh("again")
        c.label(again)
        ready = c.get(warp, WARP, "ready")
        alike = c.get(warp, WARP, "spinning") & ready & brief
        rest.set(ready)

        def skip(mine: Value, alike: Value = alike) -> None:
            rest.set(rest.get() & ~(alike & mine).ne(0).select(alike, 0))

        with c.each_bit(rest) as bit:
            lane = first + bit.to("i64") * stride
            steps.set(steps.get() + 1)
            why = c.call("i32", "step", lane, slot, grid)
            _settle(c, grid, slot, warp, lane, bit, index, why, progress, skip)
        with c.when(_to_answer(c, warp)):
            answered = c.call("i1", "resolve", grid, slot, warp, index)
            progress.set(progress.get() | answered.to("i32"))
            with c.when(answered):
                turns.set(turns.get() - 1)
                on = c.fresh("on")
                c.branch(turns.get().ne(0), again, on)
                c.label(on)
    with c.when(c.get(slot, CTA, "barred").ne(0)), c.when(c.call("i1", "barriers", grid, slot)):
        progress.set(1)
    _end(c, grid, slot, steps, progress)
    return c


def _come_to(c: Code, grid: Value, slot: Value, index: Value, progress: Variable) -> tuple[Value, Value]:
    """A warp's turn in a pass: the warp, its first lane. Lanes whose wait for the grid before is over are ready."""
    warp = warp_at(c, slot, index)
    with c.when(c.get(warp, WARP, "depending").ne(0) & c.get(grid, GRID, "released").ne(0)):
        _move(c, warp, "depending", "ready", c.get(warp, WARP, "depending"))
        progress.set(1)
    return warp, lane_at(c, grid, slot, index * 32)


def _end(c: Code, grid: Value, slot: Value, steps: Variable, progress: Variable) -> None:
    """The end of a pass over a CTA: whether anybody got on, or a fault if nobody there ever can."""
    c.put(grid, GRID, "steps", c.get(grid, GRID, "steps") + steps.get())
    with c.when(progress.get().eq(0) & c.get(slot, CTA, "live").ne(0)), c.when(c.call("i1", "stuck", grid, slot)):
        c.ret(c.const("i32", _FAULTED))
    c.ret(progress.get())


def _to_answer(c: Code, warp: Value) -> Value:
    """Whether lanes have come to a collective since those that wait there were last asked for."""
    return c.get(warp, WARP, "collective").ne(c.get(warp, WARP, "asked")) | c.get(warp, WARP, "sampling").ne(0)


def _move(c: Code, warp: Value, source: str, target: str, mask: Value) -> None:
    c.put(warp, WARP, source, c.get(warp, WARP, source) & ~mask)
    c.put(warp, WARP, target, c.get(warp, WARP, target) | mask)


def _settle(
    c: Code,
    grid: Value,
    slot: Value,
    warp: Value,
    lane: Value,
    bit: Value,
    index: Value,
    why: Value,
    progress: Variable,
    skip: Callable[[Value], None] | None = None,
) -> None:
    """Do what a lane came back for; ``skip`` is told of one that spins."""
    mine = c.const("i32", 1) << bit
    end = c.fresh("settled")
    names = [c.fresh(f"why{n}") for n in range(layout.FAULT + 1)]
    cases = " ".join(f"i32 {n}, label %{name}" for n, name in enumerate(names))
    c.do(f"switch {why}, label %{end} [{cases}]")
    c.open = False

    c.label(names[layout.EXIT])
    c.put(lane, LANE, "state", 0)
    for name in ("ready", "live"):
        c.put(warp, WARP, name, c.get(warp, WARP, name) & ~mine)
    c.put(warp, WARP, "asked", 0)  # those that wait at a collective may have waited for this lane
    c.bump(slot, CTA, "live", -1)
    progress.set(1)
    c.jump(end)

    c.label(names[layout.SPIN])
    if skip is not None:
        skip(mine)
    c.put(warp, WARP, "spinning", c.get(warp, WARP, "spinning") | mine)
    c.jump(end)

    c.label(names[layout.LOOKED])
    c.put(warp, WARP, "spinning", c.get(warp, WARP, "spinning") | mine)
    progress.set(1)
    c.jump(end)

    c.label(names[layout.YIELD])
    c.put(warp, WARP, "spinning", c.get(warp, WARP, "spinning") & ~mine)
    progress.set(1)
    c.jump(end)

    waits = {layout.COLLECTIVE: "collective", layout.GRID_WAIT: "depending", layout.SAMPLE: "sampling"}
    for number, target in waits.items():
        c.label(names[number])
        _move(c, warp, "ready", target, mine)
        c.jump(end)

    c.label(names[layout.BARRIER_WAIT])
    with c.choose(c.call("i1", "arrive", slot, lane)) as (waits_, goes_on):
        with waits_:
            _move(c, warp, "ready", "barred", mine)
        with goes_on:
            progress.set(1)
    c.jump(end)

    c.label(names[layout.FAULT])
    c.put(grid, GRID, "fault_lane", index * 32 + bit)
    for axis in "xyz":
        c.put(grid, GRID, f"fault_{axis}", c.get(slot, CTA, axis))
    c.ret(c.const("i32", _FAULTED))
    c.label(end)


def _retire(c: Code, grid: Value, slot: Value) -> None:
    """A CTA whose last lane has left: its slot is free, and it counts as having triggered."""
    c.call("void", "trigger", grid, slot)
    c.bump(grid, GRID, "finished")
    c.bump(grid, GRID, "resident", -1)


def _stop_if_told(c: Code, grid: Value) -> None:
    stop = grid + GRID.offsets["stop"]
    with c.when(c.op("i32", f"load atomic i32, {stop} monotonic, align 4").ne(0)):
        c.put(grid, GRID, "fault_kind", layout.F_STOPPED)
        c.ret(c.const("i32", layout.FAULTED))


def _run() -> Code:
    c = Code("run", "i32", [("ptr", "grid"), ("i32", "ctas"), ("i64", "quantum")])
    grid, ctas = c.params["grid"], c.params["ctas"]
    total = c.get(grid, GRID, "total")
    end = c.get(grid, GRID, "steps") + c.params["quantum"]
    slots = c.get(grid, GRID, "slots")
    high = c.get(grid, GRID, "high")
    progress = c.variable("i32", 0)
    with c.forever():
        progress.set(0)
        _stop_if_told(c, grid)
        brief = c.get(grid, GRID, "brief") + 1
        c.put(grid, GRID, "brief", brief.lt(_BRIEF).select(brief, 0))
        with c.each(high) as index:
            slot = (slots + index.to("i64") * 8).load("ptr")
            with c.forever() as (again, leave):
                with c.when(c.get(slot, CTA, "live").eq(0)):
                    full = ~c.get(grid, GRID, "next").lt(total) | ~c.get(grid, GRID, "resident").lt(ctas)
                    fill = c.fresh("fill")
                    c.branch(full, leave, fill)
                    c.label(fill)
                    c.call("void", "dispatch", grid, slot)
                    progress.set(1)
                what = c.call("i32", "turn", grid, slot)
                with c.when(what.eq(_FAULTED)):
                    c.ret(c.const("i32", layout.FAULTED))
                progress.set(progress.get() | what)
                ended = c.fresh("ended")
                c.branch(c.get(slot, CTA, "live").eq(0), ended, leave)
                c.label(ended)
                _retire(c, grid, slot)
                c.branch(c.get(grid, GRID, "steps").lt(end), again, leave)
        with c.when(c.get(grid, GRID, "finished").eq(total)):
            c.ret(c.const("i32", layout.FINISHED))
        with c.when(progress.get().eq(0)):
            c.ret(c.const("i32", layout.STALLED))
        with c.when(~c.get(grid, GRID, "steps").lt(end)):
            c.ret(c.const("i32", layout.RUNNING))
    c.ret(c.const("i32", layout.RUNNING))
    return c


# -- the adversarial scheduler ---------------------------------------------------------------------------------------

_BURST = 3  # a warp that got on has its turn ended by one draw of 2**n
_IDLE, _HASTY = 4, 2  # passes without progress before a pass in which nobody is left out


def _chosen(c: Code, fabric: Value, ready: Value) -> Value:
    """Which of the ready lanes have a turn: all, about a half, a quarter, or few."""
    mask = c.variable("i32", ready)
    kind = draw(c, fabric, 2)
    for at_least in (1, 2, 3):
        with c.when(~kind.lt(at_least)):
            mask.set(mask.get() & draw(c, fabric, 32))
    return mask.get()


def _fetch(c: Code, lane: Value) -> None:
    """Have the frame of the lane that comes next at hand: in random order no processor foresees it."""
    hints = [Value(c, "i32", n) for n in ("1", "3", "1")]
    for line in range(3):
        c.call("void", "llvm.prefetch.p0", lane + 64 * line, *hints)


def _wild_turn() -> Code:
    """A pass over a CTA that begins anywhere, leaves lanes out, and lets words land after each round of a warp."""
    c = Code("turn", "i32", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    fabric, warps = c.get(grid, GRID, "fabric"), c.get(grid, GRID, "warps")
    calm, patient = c.get(grid, GRID, "calm").ne(0), c.get(fabric, FABRIC, "hasty").eq(0)
    stride = c.get(grid, GRID, "stride").to("i64")
    brief = c.get(grid, GRID, "brief").eq(0).select(c.const("i32", 0), -1)
    progress, moved, place = (c.variable("i32", 0) for _ in range(3))
    steps = c.variable("i64", 0)
    start = draw(c, fabric, 16)
    with c.each(warps) as i:
        index = (start + i) % warps
        warp, first = _come_to(c, grid, slot, index, progress)
        again, done, some = c.fresh("again"), c.fresh("done"), c.fresh("some")
        ready = c.get(warp, WARP, "ready")
        c.branch(ready.eq(0), done, some)
        c.label(some)
        idle = (ready & ~c.get(warp, WARP, "spinning")).eq(0)
        c.branch(~calm & idle & draw(c, fabric, 2).ne(0), done, again)  # who only polls is mostly left out
        c.label(again)
        moved.set(0)
        mask = c.variable("i32")
        mask.set(c.get(warp, WARP, "ready"))
        with c.when(~calm):
            mask.set(_chosen(c, fabric, mask.get()))
        turned = draw(c, fabric, 5)
        rest = c.variable("i32")
        rest.set(c.call("i32", "llvm.fshr.i32", mask.get(), mask.get(), turned))
        alike = c.get(warp, WARP, "spinning") & brief
        alike = c.call("i32", "llvm.fshr.i32", alike, alike, turned)

        def skip(_: Value, rest: Variable = rest, alike: Value = alike) -> None:
            mine = c.const("i32", 1) << place.get()
            rest.set(rest.get() & ~(alike & mine).ne(0).select(alike, 0))

        before = steps.get()
        with c.each_bit(rest) as at:
            place.set(at)
            bit = (at + turned) & 31
            lane = first + bit.to("i64") * stride
            _fetch(c, first + ((rest.get() | (1 << 31)).lowest_bit() + turned & 31).to("i64") * stride)
            steps.set(steps.get() + 1)
            why = c.call("i32", "step", lane, slot, grid)
            _settle(c, grid, slot, warp, lane, bit, index, why, moved, skip)
        progress.set(progress.get() | (tick(c, fabric, steps.get() - before) & patient).to("i32"))
        with c.when((c.get(slot, CTA, "buffered") | c.get(grid, GRID, "orphans")).ne(0)):
            bits = c.call("i64", "chance", fabric)
            with c.when((bits >> 63).eq(0)):
                c.call("void", "buffer_leak", grid, slot)
            with c.when((bits & (1 << 62)).eq(0)):
                c.call("void", "orphan_leak", grid)
        with c.when(_to_answer(c, warp)):
            moved.set(moved.get() | c.call("i1", "resolve", grid, slot, warp, index).to("i32"))
        progress.set(progress.get() | moved.get())
        with c.when(moved.get().ne(0)):  # mostly a warp goes on for a while: its frames are at hand
            c.branch(draw(c, fabric, _BURST).ne(0), again, done)
            c.label(c.fresh("never"))
        c.label(done)
    with c.when(c.get(slot, CTA, "barred").ne(0)):
        progress.set(progress.get() | c.call("i1", "barriers", grid, slot).to("i32"))
    with c.when(calm & c.get(slot, CTA, "buffered").ne(0)):
        c.call("void", "buffer_leak", grid, slot)
        progress.set(1)
    _end(c, grid, slot, steps, progress)
    return c


def _skip(c: Code, fabric: Value, slot: Value, calm: Value) -> Value:
    """Whether a CTA is left out of this pass; some are for many."""
    skipped = c.variable("i1", 0)
    with c.when(~calm & c.get(slot, CTA, "live").ne(0)):
        held = c.get(slot, CTA, "held")
        with c.choose(held.ne(0)) as (yes, no):
            with yes:
                c.put(slot, CTA, "held", held - 1)
                skipped.set(1)
            with no, c.when(draw(c, fabric, 5).eq(0)):
                c.put(slot, CTA, "held", draw(c, fabric, 5))
    return skipped.get()


def _wild_run() -> Code:
    c = Code("run", "i32", [("ptr", "grid"), ("i32", "ctas"), ("i64", "quantum")])
    grid, ctas = c.params["grid"], c.params["ctas"]
    fabric = c.get(grid, GRID, "fabric")
    total, high = c.get(grid, GRID, "total"), c.get(grid, GRID, "high")
    end = c.get(grid, GRID, "steps") + c.params["quantum"]
    slots = c.get(grid, GRID, "slots")
    hasty = c.get(fabric, FABRIC, "hasty").ne(0)
    progress, idle = c.variable("i32", 0), c.variable("i32", 0)
    with c.forever():
        progress.set(0)
        _stop_if_told(c, grid)
        calm = ~idle.get().lt(hasty.select(_HASTY, c.const("i32", _IDLE)))
        lingers = (c.get(fabric, FABRIC, "flying") | c.get(grid, GRID, "orphans").to("i64")).ne(0)
        c.put(grid, GRID, "calm", calm.to("i32"))
        c.put(grid, GRID, "brief", (lingers | ~calm | (hasty & draw(c, fabric, 2).ne(0))).to("i32"))
        start = draw(c, fabric, 16)
        with c.each(high) as i:
            index = (start + i) % high
            slot = (slots + index.to("i64") * 8).load("ptr")
            full = ~c.get(grid, GRID, "next").lt(total) | ~c.get(grid, GRID, "resident").lt(ctas)
            with c.when(c.get(slot, CTA, "live").eq(0) & ~full):
                c.call("void", "dispatch", grid, slot)
                progress.set(1)
            with c.when(c.get(slot, CTA, "live").ne(0) & ~_skip(c, fabric, slot, calm)):
                what = c.call("i32", "turn", grid, slot)
                with c.when(what.eq(_FAULTED)):
                    c.ret(c.const("i32", layout.FAULTED))
                progress.set(progress.get() | what)
                with c.when(c.get(slot, CTA, "live").eq(0)):
                    c.call("void", "buffer_orphan", grid, slot)
                    _retire(c, grid, slot)
        with c.when(c.get(grid, GRID, "finished").eq(total)):
            with c.each(c.get(grid, GRID, "orphans")):
                c.call("void", "orphan_leak", grid)
            c.ret(c.const("i32", layout.FINISHED))
        with c.when(calm):  # nobody got on: what lingers moves, if it is only a little
            flying = c.get(fabric, FABRIC, "flying")
            with c.when(flying.ne(0)):
                bits = c.call("i64", "chance", fabric)  # one by one, or many at a time; in haste many, or all
                most = flying >> ((bits >> 8) & hasty.select(c.const("i64", 0), 7))
                times = (hasty & (bits & 64).ne(0)).select(flying, (bits >> 40) % (most + 1) + 1)
                c.call("i64", "fabric_land", fabric, times, c.const("i32", 1))
            with c.when(c.get(grid, GRID, "orphans").ne(0)):
                c.call("void", "orphan_leak", grid)
        with c.when(progress.get().ne(0)):
            idle.set(0)
            with c.when(~c.get(grid, GRID, "steps").lt(end)):  # only then: RUNNING means that somebody got on
                c.ret(c.const("i32", layout.RUNNING))
        with c.when(progress.get().eq(0)):
            with c.when(calm & ~lingers):
                c.ret(c.const("i32", layout.STALLED))
            idle.set(idle.get() + 1)
    c.ret(c.const("i32", layout.RUNNING))
    return c


def scheduler(step: Code, *, adversarial: bool = False) -> list[Code]:
    """The functions of a kernel's unit: the step, a pass over a CTA, and the run."""
    return [chance(), preempt(), step, _wild_turn(), _wild_run()] if adversarial else [step, _turn(), _run()]
