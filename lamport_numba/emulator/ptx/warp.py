"""What the lanes of a warp and the warps of a CTA do together.

A lane that comes to such an instruction leaves its operands in its frame and returns. The scheduler answers all lanes
of a
collective at once, when the last of them has come, and each goes on from its own result.
"""

from __future__ import annotations

from . import layout
from .ir import Value
from .layout import CTA, GRID, LANE
from .syntax import Instruction, Pair
from .translate import _COLD, Mods, Translator, instruction

# Numbers of the collectives, for the scheduler.
(
    OP_SYNC,
    OP_BALLOT,
    OP_SHUFFLE_IDX,
    OP_SHUFFLE_UP,
    OP_SHUFFLE_DOWN,
    OP_SHUFFLE_BFLY,
    OP_MATCH,
    OP_ADD,
    OP_AND,
    OP_OR,
    OP_XOR,
    OP_UMIN,
    OP_UMAX,
    OP_SMIN,
    OP_SMAX,
) = range(15)


def _collective(
    t: Translator, op: int, mask: Value, a: Value | int = 0, b: Value | int = 0, c: Value | int = 0
) -> Value:
    """Wait for the lanes of ``mask``; the 64 bits that the scheduler answers."""
    code = t.c
    me = code.const("i32", 1) << code.get(t.lane, LANE, "lane", ", !invariant.load !1")
    t.require((mask & me).ne(0), layout.F_MASK)
    operands = (("mask", mask), ("op", op), ("a", a), ("b", b), ("c", c))
    for name, value in operands[:2] if op == OP_SYNC else operands:
        wide = value.to(LANE.types[name]) if isinstance(value, Value) else value
        code.put(t.lane, LANE, name, wide)
    code.put(t.lane, LANE, "site", t.site())
    t.leave(layout.COLLECTIVE, t.live_after())
    return code.get(t.lane, LANE, "result")


@instruction("vote")
def _vote(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    mods.take("sync")
    how = mods.one_of(("all", "any", "uni", "ballot"))
    mods.type("pred", "b32")
    mods.done()
    mask = t.read(t.operand(2), 32)
    # the member mask is an operand that must outlive the wait, so it is read back from the lane's frame
    ballot = _collective(t, OP_BALLOT, mask, t.read(t.operand(1), 1)).to("i32")
    mask = t.c.get(t.lane, LANE, "mask")
    if how == "ballot":
        t.write(t.operand(0), ballot)
    elif how == "any":
        t.write(t.operand(0), ballot.ne(0))
    elif how == "all":
        t.write(t.operand(0), ballot.eq(mask))
    elif how == "uni":
        t.write(t.operand(0), ballot.eq(mask) | ballot.eq(0))
    else:
        raise t.fail("vote needs a mode")


@instruction("activemask")
def _activemask(t: Translator, item: Instruction, mods: Mods) -> None:
    """The lanes that are here too. Any set with the caller is allowed; the scheduler takes all that have come."""
    t.count(1)
    mods.type("b32")
    mods.done()
    code = t.c
    code.put(t.lane, LANE, "op", t.at)
    t.leave(layout.SAMPLE, t.live_after())
    t.write(t.operand(0), code.get(t.lane, LANE, "result").to("i32"))


@instruction("shfl")
def _shuffle(t: Translator, item: Instruction, mods: Mods) -> None:
    """Bit 32 of the answer says whether the source lane was in range."""
    t.count(5)
    if not mods.take("sync"):
        raise t.fail("shfl without .sync is not part of this architecture")
    how = mods.one_of(("idx", "up", "down", "bfly"))
    mods.type("b32")
    mods.done()
    ops = {"idx": OP_SHUFFLE_IDX, "up": OP_SHUFFLE_UP, "down": OP_SHUFFLE_DOWN, "bfly": OP_SHUFFLE_BFLY}
    if how is None:
        raise t.fail("shfl needs a mode")
    a, b, c, mask = (t.read(t.operand(i), 32) for i in (1, 2, 3, 4))
    answer = _collective(t, ops[how], mask, a, b, c)
    target = t.operand(0)
    if isinstance(target, Pair):
        t.write(target.second, (answer >> 32).to("i1"))
        target = target.first
    t.write(target, answer.to("i32"))


@instruction("match")
def _match(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    mods.take("sync")
    how = mods.one_of(("any", "all"))
    bits = {"b32": 32, "b64": 64}[mods.type("b32", "b64")]
    mods.done()
    same = _collective(t, OP_MATCH, t.read(t.operand(2), 32), t.read(t.operand(1), bits).to("i64")).to("i32")
    target = t.operand(0)
    if how == "any":
        t.write(target, same)
        return
    mask = t.c.get(t.lane, LANE, "mask")
    everybody = same.eq(mask)
    if isinstance(target, Pair):
        t.write(target.second, everybody)
        target = target.first
    t.write(target, everybody.select(mask, 0))


@instruction("redux")
def _redux(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    mods.take("sync")
    how = mods.one_of(("add", "and", "or", "xor", "min", "max"))
    kind = mods.type("u32", "s32", "b32")
    mods.done()
    ops = {"add": OP_ADD, "and": OP_AND, "or": OP_OR, "xor": OP_XOR, "min": OP_UMIN, "max": OP_UMAX}
    if how is None:
        raise t.fail("redux needs an operation")
    op = {"min": OP_SMIN, "max": OP_SMAX}.get(how, ops[how]) if kind == "s32" else ops[how]
    answer = _collective(t, op, t.read(t.operand(2), 32), t.read(t.operand(1), 32))
    t.write(t.operand(0), answer.to("i32"))


@instruction("elect")
def _elect(t: Translator, item: Instruction, mods: Mods) -> None:
    """The lowest lane of the mask leads."""
    t.count(2)
    mods.take("sync")
    mods.done()
    _collective(t, OP_SYNC, t.read(t.operand(1), 32))
    leader = t.c.get(t.lane, LANE, "mask").lowest_bit()
    target = t.operand(0)
    if not isinstance(target, Pair):
        raise t.fail("elect has two results")
    t.write(target.first, leader)
    t.write(target.second, t.c.get(t.lane, LANE, "lane").eq(leader))


@instruction("bar", "barrier")
def _barrier(t: Translator, item: Instruction, mods: Mods) -> None:
    """bar.warp.sync; and the CTA's 16 barriers: sync, arrive, red."""
    code = t.c
    if mods.take("warp"):
        mods.take("sync")
        mods.done()
        t.count(1)
        _collective(t, OP_SYNC, t.read(t.operand(0), 32))
        return
    mods.take("cta")
    mods.take("aligned")
    how = mods.one_of(("sync", "arrive", "red"))
    reduce = mods.one_of(("popc", "and", "or"))
    if reduce is not None:
        mods.type("u32", "pred")
    mods.done()
    if how is None or (how == "red") != (reduce is not None):
        raise t.fail(f"{item.name} is not emulated")
    operands = list(item.operands)
    value = code.const("i1", 0)
    if how == "red":
        t.count(3, 4)
        value = t.read(operands.pop(), 1)
        operands.pop(0)
    else:
        t.count(1, 2)
    if how == "arrive" and len(operands) != 2:
        raise t.fail("arrive needs the number of threads")
    number = t.read(operands[0], 32)
    count = t.read(operands[1], 32) if len(operands) > 1 else code.const("i32", 0)
    t.require(number.lt(layout.BARRIERS), layout.F_BARRIER_ID)
    for name, what in (("mask", number), ("b", count), ("c", value.to("i32")), ("op", int(how == "arrive"))):
        code.put(t.lane, LANE, name, what)
    code.put(t.lane, LANE, "site", t.site())
    t.leave(layout.BARRIER_WAIT, t.live_after())
    if reduce is not None:
        ones, arrived = code.get(t.lane, LANE, "ones"), code.get(t.lane, LANE, "result").to("i32")
        answer = {"popc": lambda: ones, "and": lambda: ones.eq(arrived), "or": lambda: ones.ne(0)}[reduce]()
        t.write(t.operand(0), answer)


@instruction("griddepcontrol")
def _dependency(t: Translator, item: Instruction, mods: Mods) -> None:
    code = t.c
    if mods.take("launch_dependents"):
        mods.done()
        with code.when(code.get(t.cta, CTA, "triggered").eq(0)):
            code.call("void", "trigger", t.grid, t.cta)
        return
    if not mods.take("wait"):
        raise t.fail("griddepcontrol waits, or launches dependents")
    mods.done()
    on, wait = code.fresh("on"), code.fresh("wait")
    released = code.get(t.grid, GRID, "released")
    code.branch(released.ne(0), on, wait, _COLD)
    code.label(wait)
    t.leave(layout.GRID_WAIT, t.live_after())
    code.label(on)


@instruction("nanosleep")
def _nanosleep(t: Translator, item: Instruction, mods: Mods) -> None:
    """Let others run. How long is the scheduler's choice: PTX promises no more than twice the time asked for."""
    t.count(1)
    mods.type("u32")
    mods.done()
    why = t.moved.get().select(t.c.const("i32", layout.LOOKED), layout.SPIN)
    t.leave(why, t.live_after())
