"""The native functions that every kernel shares: faults, the search of the address table, collectives, barriers,
rounding.

They are written once, compiled once, and linked to each kernel. What runs in each step is inlined there; here is what
is rare.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from . import adversary, layout
from .adversary import store_unit
from .ir import Code, Value, unit
from .layout import BARRIER, CACHE, CTA, ENTRY, GRID, LANE, MEMBER, TABLE, WARP

__all__ = ["source", "symbols"]

_MULTIMEM = 4
_FOLDS = ("add", "and", "or", "xor")


def lane_at(c: Code, grid: Value, slot: Value, thread: Value) -> Value:
    """The frame of a thread, by its number in the CTA."""
    stride = c.get(grid, GRID, "stride")
    return slot + c.get(grid, GRID, "lanes_at").to("i64") + (thread * stride).to("i64")


def warp_at(c: Code, slot: Value, warp: Value) -> Value:
    return slot + layout.WARPS_AT + (warp * WARP.size).to("i64")


def _fault() -> Code:
    """Note what went wrong; the scheduler adds who it was."""
    params = [("ptr", "grid"), ("i32", "kind"), ("i32", "site"), ("i64", "address"), ("i32", "size")]
    c = Code("fault", "void", params, "cold noinline")
    for name in ("kind", "site", "address", "size"):
        c.put(c.params["grid"], GRID, f"fault_{name}", c.params[name])
    c.ret()
    return c


def _admit() -> Code:
    """Find the entry of an address, check alignment, kind and rights; remember it for the site. Null after a fault."""
    params = [("ptr", "grid"), ("i64", "address"), ("i32", "site"), ("i32", "size"), ("i32", "need")]
    c = Code("admit", "ptr", params, "noinline")
    grid, address, site, size, need = (c.params[n] for _, n in params)

    def refuse(kind: int) -> None:
        c.call("void", "fault", grid, c.const("i32", kind), site, address, size)
        c.ret(c.const("ptr", 0))

    wide = size.to("i64")
    with c.when((address & (wide - 1)).ne(0)):
        refuse(layout.F_ALIGN)
    table = c.get(grid, GRID, "table")
    entries = c.get(table, TABLE, "entries")
    low, high = c.variable("i64", 0), c.variable("i64", c.get(table, TABLE, "count"))
    with c.forever() as (_, leave):  # the first entry that begins above the address
        more = c.fresh("more")
        c.branch(low.get().lt(high.get()), more, leave)
        c.label(more)
        middle = (low.get() + high.get()) >> 1
        above = address.lt(c.get(entries + middle * ENTRY.size, ENTRY, "base"))
        with c.choose(above) as (yes, no):
            with yes:
                high.set(middle)
            with no:
                low.set(middle + 1)
    with c.when(low.get().eq(0)):
        refuse(layout.F_ADDRESS)
    entry = entries + (low.get() - 1) * ENTRY.size
    base, end = c.get(entry, ENTRY, "base"), c.get(entry, ENTRY, "end")
    with c.when(end.lt(address + wide)):
        refuse(layout.F_ADDRESS)
    multicast = c.get(entry, ENTRY, "kind").eq(layout.MULTICAST)
    multimem = (need & _MULTIMEM).ne(0)
    with c.when(multicast & ~multimem):
        refuse(layout.F_MULTICAST)
    with c.when(multimem & ~multicast):
        refuse(layout.F_NOT_MULTICAST)
    rights = need & (layout.READ | layout.WRITE)
    with c.when((rights & ~c.get(entry, ENTRY, "access")).ne(0)):
        refuse(layout.F_ACCESS)
    with c.when(~multicast):
        cache = c.get(grid, GRID, "caches") + (site * CACHE.size).to("i64")
        c.put(cache, CACHE, "base", base)
        c.put(cache, CACHE, "span", end - base - wide + 1)
        c.put(cache, CACHE, "entry", entry)
    c.ret(entry)
    return c


def _window() -> Code:
    """Memory behind a generic address with a window: shared, local or parameter."""
    params = [("ptr", "grid"), ("ptr", "slot"), ("ptr", "local"), ("i64", "address")]
    params += [("i32", "site"), ("i32", "size"), ("i32", "local_bytes")]
    c = Code("window", "ptr", params, "noinline")
    grid, slot, local, address, site, size, local_bytes = (c.params[n] for _, n in params)

    def refuse(kind: int) -> None:
        c.call("void", "fault", grid, c.const("i32", kind), site, address, size)
        c.ret(c.const("ptr", 0))

    wide = size.to("i64")
    with c.when((address & (wide - 1)).ne(0)):
        refuse(layout.F_ALIGN)
    offset = address & ((1 << 56) - 1)
    choices = (
        (
            layout.SHARED_WINDOW,
            slot + c.get(grid, GRID, "shared_at").to("i64"),
            c.get(grid, GRID, "shared_bytes"),
            layout.F_SHARED,
        ),
        (layout.LOCAL_WINDOW, local, local_bytes, layout.F_LOCAL),
        (layout.PARAM_WINDOW, c.get(grid, GRID, "params"), c.get(grid, GRID, "param_bytes"), layout.F_PARAM),
    )
    for number, base, total, kind in choices:
        with c.when((address >> 56).eq(number >> 56)):
            with c.when(~(offset + wide).le(total.to("i64"))):
                refuse(kind)
            c.ret(base + offset)
    refuse(layout.F_ADDRESS)
    return c


def _multicast() -> Code:
    """Store one unit in every member's memory."""
    params = [("ptr", "grid"), ("ptr", "entry"), ("i64", "address"), ("i64", "value"), ("i32", "size")]
    c = Code("multicast", "void", params, "noinline")
    entry, size = c.params["entry"], c.params["size"]
    offset = c.params["address"] - c.get(entry, ENTRY, "base")
    members = c.get(entry, ENTRY, "members")
    with c.each(c.get(entry, ENTRY, "member_count")) as i:
        member = members + (i * MEMBER.size).to("i64")
        store_unit(c, c.get(member, MEMBER, "address") + offset, c.params["value"], size)
    c.ret()
    return c


def _trigger() -> Code:
    """This CTA lets dependent grids start (once)."""
    c = Code("trigger", "void", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    with c.when(c.get(slot, CTA, "triggered").eq(0)):
        c.put(slot, CTA, "triggered", 1)
        c.bump(grid, GRID, "triggered")
    c.ret()
    return c


def _dispatch() -> Code:
    """Put the next CTA in a slot: every lane at the beginning."""
    c = Code("dispatch", "void", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    turn = c.get(grid, GRID, "next")
    c.put(grid, GRID, "next", turn + 1)
    # the order is drawn by the adversarial fabric; else it is (1 * turn + 0) % total
    step, start, total = (c.get(grid, GRID, name).to("i64") for name in ("order_step", "order_start", "total"))
    rank = ((turn.to("i64") * step + start) % total).to("i32")
    c.bump(grid, GRID, "resident")
    threads = c.get(grid, GRID, "threads")
    x, y = c.get(grid, GRID, "nctaid_x"), c.get(grid, GRID, "nctaid_y")
    c.put(slot, CTA, "live", threads)
    c.put(slot, CTA, "rank", rank)
    c.put(slot, CTA, "x", rank % x)
    c.put(slot, CTA, "y", (rank // x) % y)
    c.put(slot, CTA, "z", rank // (x * y))
    for name in ("triggered", "barred", "buffered", "held", "marks"):
        c.put(slot, CTA, name, 0)
    size = layout.BARRIERS * BARRIER.size
    c.call(
        "void",
        "llvm.memset.p0.i64",
        slot + layout.BARRIERS_AT,
        c.const("i8", 0),
        c.const("i64", size),
        c.const("i1", 0),
    )
    with c.each(c.get(grid, GRID, "warps")) as index:
        warp = warp_at(c, slot, index)
        left = threads - index * 32
        mask = left.lt(32).select((c.const("i32", 1) << (left & 31)) - 1, -1)
        for name in WARP.offsets:
            c.put(warp, WARP, name, mask if name in ("ready", "live") else 0)
    with c.when(c.get(slot, CTA, "laid_out").ne(0)):  # lanes that exit leave their frames as they should begin
        c.ret()
    c.put(slot, CTA, "laid_out", 1)
    dx, dy = c.get(grid, GRID, "ntid_x"), c.get(grid, GRID, "ntid_y")
    tx, ty, tz = (c.variable("i32", 0) for _ in range(3))
    lane = c.variable("ptr")
    lane.set(lane_at(c, grid, slot, c.const("i32", 0)))
    stride = c.get(grid, GRID, "stride").to("i64")
    with c.each(threads) as thread:
        frame = lane.get()
        for name, value in (("tid_x", tx.get()), ("tid_y", ty.get()), ("tid_z", tz.get())):
            c.put(frame, LANE, name, value)
        c.put(frame, LANE, "state", 0)
        c.put(frame, LANE, "lane", thread & 31)
        c.put(frame, LANE, "warp", thread >> 5)
        tx.set(tx.get() + 1)
        with c.when(tx.get().eq(dx)):
            tx.set(0)
            ty.set(ty.get() + 1)
            with c.when(ty.get().eq(dy)):
                ty.set(0)
                tz.set(tz.get() + 1)
        lane.set(frame + stride)
    c.ret()
    return c


# -- collectives -----------------------------------------------------------------------------------------------------


def _resolve() -> Code:
    """Answer every collective of a warp whose lanes have all come; say whether a lane was let go."""
    from . import warp as w

    c = Code("resolve", "i1", [("ptr", "grid"), ("ptr", "slot"), ("ptr", "warp"), ("i32", "index")], "noinline")
    grid, slot, warp = c.params["grid"], c.params["slot"], c.params["warp"]
    stride = c.get(grid, GRID, "stride").to("i64")
    first = lane_at(c, grid, slot, c.params["index"] * 32)
    moved = c.variable("i1", 0)

    def frame(lane: Value) -> Value:
        return first + lane.to("i64") * stride

    arrived = c.variable("i32", c.get(warp, WARP, "collective"))
    rest = c.variable("i32", arrived.get())
    with c.each_bit(rest) as one:
        head = frame(one)
        mask, op = c.get(head, LANE, "mask"), c.get(head, LANE, "op")
        members = mask & c.get(warp, WARP, "live")
        together = c.variable("i1", (members & ~arrived.get()).eq(0))
        with c.when(together.get()), c.each_bit(members) as lane:
            same = c.get(frame(lane), LANE, "mask").eq(mask) & c.get(frame(lane), LANE, "op").eq(op)
            together.set(together.get() & same)
        with c.when(together.get()):
            _answer(c, w, frame, members, op)
            rest.set(rest.get() & ~members)
            arrived.set(arrived.get() & ~members)
            c.put(warp, WARP, "ready", c.get(warp, WARP, "ready") | members)
            c.put(warp, WARP, "spinning", c.get(warp, WARP, "spinning") & ~members)
            moved.set(1)
    for name in ("collective", "asked"):
        c.put(warp, WARP, name, arrived.get())

    # activemask: whoever waits at the same place is answered together
    waiting = c.variable("i32", c.get(warp, WARP, "sampling"))
    c.put(warp, WARP, "ready", c.get(warp, WARP, "ready") | waiting.get())
    c.put(warp, WARP, "spinning", c.get(warp, WARP, "spinning") & ~waiting.get())
    c.put(warp, WARP, "sampling", 0)
    with c.forever() as (_, leave):
        more = c.fresh("more")
        c.branch(waiting.get().ne(0), more, leave)
        c.label(more)
        place = c.get(frame(waiting.get().lowest_bit()), LANE, "op")
        group = c.variable("i32", 0)
        with c.each_bit(waiting.get()) as lane:
            here = c.get(frame(lane), LANE, "op").eq(place)
            group.set(group.get() | (here.to("i32") << lane))
        with c.each_bit(group.get()) as lane:
            c.put(frame(lane), LANE, "result", group.get().to("i64"))
        waiting.set(waiting.get() & ~group.get())
        moved.set(1)
    c.ret(moved.get())
    return c


def _answer(c: Code, w: ModuleType, frame: Callable[[Value], Value], members: Value, op: Value) -> None:
    """Compute the results of one collective."""
    end = c.fresh("answered")
    names = {n: c.fresh(f"op{n}") for n in range(w.OP_SMAX + 1)}
    cases = " ".join(f"i32 {n}, label %{name}" for n, name in names.items())
    c.do(f"switch {op}, label %{end} [{cases}]")
    c.open = False

    c.label(names[w.OP_SYNC])
    c.jump(end)

    c.label(names[w.OP_BALLOT])
    ballot = c.variable("i32", 0)
    with c.each_bit(members) as lane:
        ballot.set(ballot.get() | (c.get(frame(lane), LANE, "a").to("i32") << lane))
    with c.each_bit(members) as lane:
        c.put(frame(lane), LANE, "result", ballot.get().to("i64"))
    c.jump(end)

    c.label(names[w.OP_MATCH])
    with c.each_bit(members) as lane:
        same = c.variable("i32", 0)
        mine = c.get(frame(lane), LANE, "a")
        with c.each_bit(members) as other:
            same.set(same.get() | (c.get(frame(other), LANE, "a").eq(mine).to("i32") << other))
        c.put(frame(lane), LANE, "result", same.get().to("i64"))
    c.jump(end)

    for how in ("IDX", "UP", "DOWN", "BFLY"):
        c.label(names[getattr(w, f"OP_SHUFFLE_{how}")])
        with c.each_bit(members) as lane:
            b, control = c.get(frame(lane), LANE, "b") & 31, c.get(frame(lane), LANE, "c")
            segment, clamp = (control >> 8) & 31, control & 31
            low = lane & segment
            high = low | (clamp & ~segment)
            if how == "IDX":
                source = low | (b & ~segment)
            else:
                source = lane.op({"UP": "sub", "DOWN": "add", "BFLY": "xor"}[how], b)
            inside = source.cmp("sge" if how == "UP" else "sle", high)
            source = inside.select(source, lane)
            there = ((members >> (source & 31)) & 1).ne(
                0
            )  # what a lane outside the mask gives is undefined: the own value
            source = there.select(source, lane)
            value = c.get(frame(source), LANE, "a") | (inside.to("i64") << 32)
            c.put(frame(lane), LANE, "result", value)
        c.jump(end)

    folds = {
        "ADD": "add",
        "AND": "and",
        "OR": "or",
        "XOR": "xor",
        "UMIN": "ult",
        "UMAX": "ugt",
        "SMIN": "slt",
        "SMAX": "sgt",
    }
    for name, fold in folds.items():
        c.label(names[getattr(w, f"OP_{name}")])
        start = c.get(frame(members.lowest_bit()), LANE, "a").to("i32")
        total = c.variable("i32")
        total.set(start)
        with c.each_bit(members & (members - 1)) as lane:
            value = c.get(frame(lane), LANE, "a").to("i32")
            now = total.get()
            total.set(now.op(fold, value) if fold in _FOLDS else now.cmp(fold, value).select(now, value))
        with c.each_bit(members) as lane:
            c.put(frame(lane), LANE, "result", total.get().to("i64"))
        c.jump(end)
    c.label(end)


# -- barriers --------------------------------------------------------------------------------------------------------


def _arrive() -> Code:
    """A lane has come to a barrier of its CTA; say whether it waits there."""
    c = Code("arrive", "i1", [("ptr", "slot"), ("ptr", "lane")], "noinline")
    slot, lane = c.params["slot"], c.params["lane"]
    barrier = slot + layout.BARRIERS_AT + (c.get(lane, LANE, "mask") * BARRIER.size).to("i64")
    c.bump(barrier, BARRIER, "arrived")
    c.bump(barrier, BARRIER, "ones", c.get(lane, LANE, "c"))
    c.put(barrier, BARRIER, "expected", c.get(lane, LANE, "b"))
    c.put(slot, CTA, "barred", 1)
    c.ret(c.get(lane, LANE, "op").eq(0))
    return c


def _barriers() -> Code:
    """Open every barrier of a CTA that all have come to; say whether a lane was let go."""
    c = Code("barriers", "i1", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    moved, pending = c.variable("i1", 0), c.variable("i32", 0)
    threads, live = c.get(grid, GRID, "threads"), c.get(slot, CTA, "live")
    with c.each(c.const("i32", layout.BARRIERS)) as number:
        barrier = slot + layout.BARRIERS_AT + (number * BARRIER.size).to("i64")
        arrived, expected = c.get(barrier, BARRIER, "arrived"), c.get(barrier, BARRIER, "expected")
        ones = c.get(barrier, BARRIER, "ones")
        with c.when(arrived.ne(0)):
            needed = expected.eq(0).select(live, expected.lt(threads).select(expected, threads))
            with c.choose(arrived.lt(needed)) as (short, complete):
                with short:
                    pending.set(1)
                with complete:
                    for name in ("arrived", "expected", "ones"):
                        c.put(barrier, BARRIER, name, 0)
                    with c.each(c.get(grid, GRID, "warps")) as index:
                        warp = warp_at(c, slot, index)
                        with c.each_bit(c.get(warp, WARP, "barred")) as bit:
                            lane = lane_at(c, grid, slot, index * 32 + bit)
                            with c.when(c.get(lane, LANE, "mask").eq(number)):
                                mine = c.const("i32", 1) << bit
                                c.put(lane, LANE, "ones", ones)
                                c.put(lane, LANE, "result", arrived.to("i64"))
                                c.put(warp, WARP, "barred", c.get(warp, WARP, "barred") & ~mine)
                                c.put(warp, WARP, "ready", c.get(warp, WARP, "ready") | mine)
                                c.put(warp, WARP, "spinning", c.get(warp, WARP, "spinning") & ~mine)
                                moved.set(1)
    c.put(slot, CTA, "barred", pending.get())
    c.ret(moved.get())
    return c


def _stuck() -> Code:
    """Whether all that is left of a CTA waits for lanes of its own that can never come; then that is its fault."""
    c = Code("stuck", "i1", [("ptr", "grid"), ("ptr", "slot")], "noinline")
    grid, slot = c.params["grid"], c.params["slot"]
    waiting = c.variable("i32", -1)
    with c.each(c.get(grid, GRID, "warps")) as index:
        warp = warp_at(c, slot, index)
        able = c.get(warp, WARP, "ready") | c.get(warp, WARP, "depending") | c.get(warp, WARP, "sampling")
        with c.when(able.ne(0)):
            c.ret(c.const("i1", 0))
        here = c.get(warp, WARP, "collective") | c.get(warp, WARP, "barred")
        with c.when(here.ne(0)):
            waiting.set(index * 32 + here.lowest_bit())
    who = waiting.get()
    with c.when(who.eq(-1)):
        c.ret(c.const("i1", 0))
    c.put(grid, GRID, "fault_kind", layout.F_BARRIER)
    c.put(grid, GRID, "fault_site", c.get(lane_at(c, grid, slot, who), LANE, "site"))
    c.put(grid, GRID, "fault_size", 0)
    c.put(grid, GRID, "fault_lane", who)
    for axis in "xyz":
        c.put(grid, GRID, f"fault_{axis}", c.get(slot, CTA, axis))
    c.ret(c.const("i1", 1))
    return c


# -- directed rounding -----------------------------------------------------------------------------------------------

_MODES = {"rz": 0, "rp": 2, "rm": 3}  # numbers of llvm.set.rounding


def _rounded(name: str, result: str, params: list[str], intrinsic: str, mode: int) -> str:
    """One operation in another rounding mode; optimisers keep away from it."""
    listed = ", ".join(f"{t} %{i}" for i, t in enumerate(params))
    types = ", ".join([*params, "metadata", "metadata"])
    return f"""
declare {result} @{intrinsic}({types})
define {result} @{name}({listed}) strictfp noinline {{
  call void @llvm.set.rounding(i32 {mode}) strictfp
  %r = call {result} @{intrinsic}({listed}, metadata !"round.dynamic", metadata !"fpexcept.strict") strictfp
  call void @llvm.set.rounding(i32 1) strictfp
  ret {result} %r
}}"""


def _rounding_functions() -> dict[str, str]:
    found = {}
    counts = {"fadd": 2, "fsub": 2, "fmul": 2, "fdiv": 2, "fma": 3, "sqrt": 1}
    prefix = "llvm.experimental.constrained"
    for mode, number in _MODES.items():
        for kind, type_ in (("f32", "float"), ("f64", "double")):
            for op, count in counts.items():
                name = f"rounded.{op}.{kind}.{mode}"
                found[name] = _rounded(name, type_, [type_] * count, f"{prefix}.{op}.{kind}", number)
            for sign in ("si", "ui"):
                name = f"rounded.{sign}tofp.{kind}.{mode}"
                found[name] = _rounded(name, type_, ["i64"], f"{prefix}.{sign}tofp.{kind}.i64", number)
        name = f"rounded.fptrunc.f32.{mode}"
        found[name] = _rounded(name, "float", ["double"], f"{prefix}.fptrunc.f32.f64", number)
    return found


def _once(text: str) -> str:
    """Without repeated declarations."""
    seen: set[str] = set()
    lines = []
    for line in text.split("\n"):
        if not line.startswith("declare") or line not in seen:
            lines.append(line)
        seen.add(line)
    return "\n".join(lines)


_CLOCK = """
declare i32 @clock_gettime(i32, ptr)
define i64 @machine_now() {
  %time = alloca [2 x i64]
  %answer = call i32 @clock_gettime(i32 4, ptr %time)
  %seconds = load i64, ptr %time
  %at = getelementptr i64, ptr %time, i64 1
  %rest = load i64, ptr %at
  %nanoseconds = mul i64 %seconds, 1000000000
  %now = add i64 %nanoseconds, %rest
  ret i64 %now
}"""


def _functions() -> list[Code]:
    return [
        _fault(),
        _admit(),
        _window(),
        _multicast(),
        _trigger(),
        _dispatch(),
        _resolve(),
        _arrive(),
        _barriers(),
        _stuck(),
        *adversary.functions(),
    ]


def symbols() -> list[str]:
    """The names of all functions that kernels may call."""
    return [f.name for f in _functions() if not f.internal] + list(_rounding_functions())


def source() -> str:
    """The LLVM text of the whole runtime."""
    rounding = _once("\n".join(["declare void @llvm.set.rounding(i32)", *_rounding_functions().values()]))
    return unit(_functions(), extra=_CLOCK + rounding)
