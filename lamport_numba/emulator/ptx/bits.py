"""Logic, shifts and bit fields. Shift amounts and field limits beyond the width are clamped, as PTX defines them."""

from __future__ import annotations

from .ir import Value
from .syntax import TYPES, Instruction, Pair
from .translate import Mods, Translator, instruction


@instruction("and", "or", "xor")
def _logic(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    bits = TYPES[mods.type("pred", "b16", "b32", "b64")][0]
    mods.done()
    t.write(t.operand(0), t.read(t.operand(1), bits).op(item.op, t.read(t.operand(2), bits)))


@instruction("not", "cnot")
def _not(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2)
    bits = TYPES[mods.type("pred", "b16", "b32", "b64")][0]
    mods.done()
    a = t.read(t.operand(1), bits)
    t.write(t.operand(0), ~a if item.op == "not" else a.eq(0).to(a.type))


@instruction("shl", "shr")
def _shift(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    bits, letter = TYPES[mods.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")]
    mods.done()
    a = t.read(t.operand(1), bits)
    amount = t.read(t.operand(2), 32)
    too_far = ~amount.lt(bits)
    safe = too_far.select(0, amount).to(a.type)
    if item.op == "shr" and letter == "s":
        safe = too_far.select(bits - 1, amount).to(a.type)
        t.write(t.operand(0), a.op("ashr", safe), signed=True)
        return
    t.write(t.operand(0), too_far.select(0, a.op("shl" if item.op == "shl" else "lshr", safe)))


@instruction("shf")
def _funnel(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(4)
    left = mods.one_of(("l", "r")) == "l"
    clamp = mods.one_of(("clamp", "wrap")) == "clamp"
    mods.type("b32")
    mods.done()
    low, high, amount = (t.read(t.operand(i), 32) for i in (1, 2, 3))
    amount = amount.lt(32).select(amount, 32) if clamp else amount & 31
    both = low.to("i64") | (high.to("i64") << 32)
    result = ((both << amount.to("i64")) >> 32) if left else both >> amount.to("i64")
    t.write(t.operand(0), result.to("i32"))


@instruction("lop3")
def _lop3(t: Translator, item: Instruction, mods: Mods) -> None:
    boolean = mods.one_of(("or", "and"))
    mods.type("b32")
    mods.done()
    t.count(6 if boolean else 5)
    inputs = [t.read(t.operand(i), 32) for i in (1, 2, 3)]
    table = t.read(t.operand(4), 32)
    if not table.name.lstrip("-").isdigit():
        raise t.fail("the table of lop3 is a constant")
    lut = int(table.name) & 0xFF
    result = t.c.const("i32", 0)
    for row in range(8):
        if lut >> row & 1:
            term = t.c.const("i32", -1)
            for place, value in zip((4, 2, 1), inputs, strict=True):
                term = term & (value if row & place else ~value)
            result = result | term
    target = t.operand(0)
    if boolean:
        if not isinstance(target, Pair):
            raise t.fail("lop3 with a boolean operation has two results")
        t.write(target.second, result.ne(0).op(boolean, t.read(t.operand(5), 1)))
        target = target.first
    t.write(target, result)


@instruction("popc", "clz", "brev")
def _count(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2)
    bits = TYPES[mods.type("b32", "b64")][0]
    mods.done()
    a = t.read(t.operand(1), bits)
    name = {"popc": "ctpop", "clz": "ctlz", "brev": "bitreverse"}[item.op]
    extra = [Value(t.c, "i1", "false")] if item.op == "clz" else []
    result = t.c.call(a.type, f"llvm.{name}.{a.type}", a, *extra)
    t.write(t.operand(0), result if item.op == "brev" else result.to("i32"))


@instruction("bfind")
def _bfind(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2)
    bits, letter = TYPES[mods.type("u32", "s32", "u64", "s64")]
    shift = mods.take("shiftamt")
    mods.done()
    a = t.read(t.operand(1), bits)
    if letter == "s":
        a = a.cmp("slt", 0).select(~a, a)
    zeros = t.c.call(a.type, f"llvm.ctlz.{a.type}", a, Value(t.c, "i1", "false")).to("i32")
    result = zeros if shift else t.c.const("i32", bits - 1) - zeros
    t.write(t.operand(0), a.eq(0).select(-1, result))


def _low_mask(t: Translator, length: Value, bits: int) -> Value:
    """``length`` ones (all, if it is ``bits`` or more)."""
    full = ~length.lt(bits)
    return full.select(-1, (t.c.const(f"i{bits}", 1) << full.select(0, length).to(f"i{bits}")) - 1)


@instruction("bfe")
def _bfe(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(4)
    bits, letter = TYPES[mods.type("u32", "s32", "u64", "s64")]
    mods.done()
    signed = letter == "s"
    a = t.read(t.operand(1), bits)
    position, length = (t.read(t.operand(i), 32) & 0xFF for i in (2, 3))
    far = ~position.lt(bits)
    if not signed:
        shifted = far.select(0, a >> far.select(0, position).to(a.type))
        t.write(t.operand(0), shifted & _low_mask(t, length, bits))
        return
    shifted = a.op("ashr", far.select(bits - 1, position).to(a.type))
    whole = ~length.lt(bits)
    rest = (t.c.const("i32", bits) - whole.select(bits, length)).to(a.type)
    rest = rest.lt(bits).select(rest, 0)
    result = length.eq(0).select(0, (shifted << rest).op("ashr", rest))
    t.write(t.operand(0), result, signed=True)


@instruction("bfi")
def _bfi(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(5)
    bits = TYPES[mods.type("b32", "b64")][0]
    mods.done()
    a, b = t.read(t.operand(1), bits), t.read(t.operand(2), bits)
    position, length = (t.read(t.operand(i), 32) & 0xFF for i in (3, 4))
    far = ~position.lt(bits)
    shift = far.select(0, position).to(a.type)
    mask = far.select(0, _low_mask(t, length, bits) << shift)
    t.write(t.operand(0), (b & ~mask) | ((a << shift) & mask))


@instruction("bmsk")
def _bmsk(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    clamp = mods.one_of(("clamp", "wrap")) == "clamp"
    mods.type("b32")
    mods.done()
    position, length = t.read(t.operand(1), 32), t.read(t.operand(2), 32)
    if not clamp:
        position, length = position & 31, length & 31
    far = ~position.lt(32)
    mask = _low_mask(t, length, 32) << far.select(0, position)
    t.write(t.operand(0), far.select(0, mask))


@instruction("szext")
def _szext(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    clamp = mods.one_of(("clamp", "wrap")) == "clamp"
    signed = mods.type("u32", "s32") == "s32"
    mods.done()
    a, length = t.read(t.operand(1), 32), t.read(t.operand(2), 32)
    if not clamp:
        length = length & 31
    whole = ~length.lt(32)
    if not signed:
        t.write(t.operand(0), a & _low_mask(t, length, 32))
        return
    rest = whole.select(0, t.c.const("i32", 32) - length)
    rest = rest.lt(32).select(rest, 0)
    t.write(t.operand(0), length.eq(0).select(0, (a << rest).op("ashr", rest)))


@instruction("prmt")
def _prmt(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(4)
    mods.type("b32")
    mode = mods.one_of(("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"))
    mods.done()
    a, b, select = (t.read(t.operand(i), 32) for i in (1, 2, 3))
    both = a.to("i64") | (b.to("i64") << 32)
    result = t.c.const("i32", 0)
    low = select & 3
    for i in range(4):
        spread: Value | None = None
        if mode is None:
            index = (select >> (4 * i)) & 7
            spread = ((select >> (4 * i)) & 8).ne(0)
        elif mode == "f4e":
            index = low + i
        elif mode == "b4e":
            index = (low - i) & 7
        elif mode == "rc8":
            index = low
        elif mode == "ecl":
            index = low.lt(i).select(i, low)
        elif mode == "ecr":
            index = low.lt(i).select(low, t.c.const("i32", i))
        else:
            index = ((low & 1) << 1) + (i & 1)
        byte = (both >> (index.to("i64") << 3)).to("i8")
        if spread is not None:
            byte = spread.select(byte.op("ashr", 7), byte)
        result = result | (byte.to("i32") << (8 * i))
    t.write(t.operand(0), result)
