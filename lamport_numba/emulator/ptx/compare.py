"""Comparisons and selections: setp, set, selp, slct."""

from __future__ import annotations

from .arithmetic import float_in
from .ir import Value
from .syntax import TYPES, Instruction, Operand, Pair
from .translate import Mods, Translator, instruction

_COMPARE = {
    **{n: n for n in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")},
    "lo": "lt",
    "ls": "le",
    "hi": "gt",
    "hs": "ge",
}
_BOOL = {"and": "and", "or": "or", "xor": "xor"}


def compare(t: Translator, how: str, kind: str, a: Operand, b: Operand, ftz: bool) -> Value:
    c = t.c
    if kind in ("f32", "f64", "f16", "bf16"):
        x, y = float_in(t, a, kind, ftz), float_in(t, b, kind, ftz)
        unordered = {"num": "ord", "nan": "uno", "ne": "one"}
        name = unordered.get(how) or (f"u{how[:2]}" if how.endswith("u") else f"o{how}")
        return c.op("i1", f"fcmp {name} {x}, {y.name}")
    if how in ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        raise t.fail(f".{how} compares floats")
    bits, letter = TYPES[kind]
    if letter not in "bus":
        raise t.fail(f"comparison of .{kind} is not emulated")
    name = how if how in ("eq", "ne") else ("s" if letter == "s" else "u") + how
    return t.read(a, bits).cmp(name, t.read(b, bits))


@instruction("setp", "set")
def _setp(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3, 4)
    how = mods.one_of(list(_COMPARE))
    boolean = mods.one_of(list(_BOOL))
    result_kind = mods.type() if item.op == "set" else "pred"
    kind = mods.type()
    ftz = mods.take("ftz")
    mods.done()
    if how is None:
        raise t.fail("the comparison is missing")
    if (boolean is not None) != (len(item.operands) == 4):
        raise t.fail("a boolean operation and a predicate operand come together")
    how = _COMPARE[how]
    found = compare(t, how, kind, t.operand(1), t.operand(2), ftz)
    other = ~found
    if boolean is not None:
        with_ = t.read(t.operand(3), 1)
        found, other = found.op(boolean, with_), other.op(boolean, with_)
    target = t.operand(0)
    if item.op == "set":
        if result_kind == "f32":
            t.write(target, found.select(t.c.const("i32", 0x3F800000), 0))
        else:
            t.write(target, found.to(f"i{TYPES[result_kind][0]}", signed=True))
        return
    if isinstance(target, Pair):
        t.write(target.first, found)
        t.write(target.second, other)
    else:
        t.write(target, found)


@instruction("selp")
def _selp(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(4)
    kind = mods.type()
    mods.done()
    a, b = (t.read(t.operand(i), TYPES[kind][0], real=kind) for i in (1, 2))
    t.write(t.operand(0), t.read(t.operand(3), 1).select(a, b))


@instruction("slct")
def _slct(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(4)
    kind, by = mods.type(), mods.type("s32", "f32")
    ftz = mods.take("ftz")
    mods.done()
    a, b = (t.read(t.operand(i), TYPES[kind][0], real=kind) for i in (1, 2))
    if by == "s32":
        first = t.read(t.operand(3), 32).cmp("sge", 0)
    else:
        first = t.c.op("i1", f"fcmp oge {float_in(t, t.operand(3), 'f32', ftz)}, 0.0")
    t.write(t.operand(0), first.select(a, b))
