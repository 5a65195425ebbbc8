"""Moves and conversions: mov, cvt, cvta, isspacep."""

from __future__ import annotations

from . import layout
from .arithmetic import FLOAT, ROUNDINGS, float_in, from_bits, narrow, pack, to_bits
from .ir import Value
from .syntax import TYPES, Instruction, Vector
from .translate import Mods, Translator, instruction

_TO_INTEGER = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@instruction("mov")
def _mov(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2)
    kind = mods.type()
    mods.done()
    bits = TYPES[kind][0]
    target, source = t.operand(0), t.operand(1)
    if isinstance(source, Vector):  # the first element is the lowest
        part = bits // len(source.items)
        whole = t.c.const(f"i{bits}", 0)
        for i, element in enumerate(source.items):
            whole = whole | (t.read(element, part).to(f"i{bits}") << (i * part))
        t.write(target, whole)
    elif isinstance(target, Vector):
        part = bits // len(target.items)
        whole = t.read(source, bits)
        for i, element in enumerate(target.items):
            t.write(element, (whole >> (i * part)).to(f"i{part}"))
    else:
        t.write(target, t.read(source, bits, real=kind))


@instruction("cvta")
def _cvta(t: Translator, item: Instruction, mods: Mods) -> None:
    """Between the address of a space and the generic address. Global and constant addresses are generic already."""
    t.count(2)
    back = mods.take("to")
    space = mods.one_of(("global", "const", "shared", "shared::cta", "local", "param", "param::entry"))
    bits = TYPES[mods.type("u32", "u64")][0]
    mods.done()
    if space is None or bits != 64:
        raise t.fail("cvta needs a space and 64 bits")
    value = t.read(t.operand(1), 64)
    window = {"shared": layout.SHARED_WINDOW, "local": layout.LOCAL_WINDOW}.get(space.split("::")[0], 0)
    if window:  # parameters carry their window from the start
        value = value - window if back else value + window
    t.write(t.operand(0), value)


@instruction("isspacep")
def _isspacep(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2)
    space = mods.one_of(
        ("global", "const", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry")
    )
    mods.done()
    if space is None:
        raise t.fail("isspacep needs a space")
    window = t.read(t.operand(1), 64) >> 56
    number = {"shared": layout.SHARED_WINDOW, "local": layout.LOCAL_WINDOW, "param": layout.PARAM_WINDOW}
    which = number.get(space.split("::")[0], 0) >> 56
    if space == "const":
        t.write(t.operand(0), t.c.const("i1", 0))
        return
    t.write(t.operand(0), window.eq(which))


@instruction("cvt")
def _cvt(t: Translator, item: Instruction, mods: Mods) -> None:
    rounding = mods.one_of(ROUNDINGS)
    to_integer = mods.one_of(list(_TO_INTEGER))
    ftz, sat, relu = mods.take("ftz"), mods.take("sat"), mods.take("relu")
    finite = mods.take("satfinite")
    if finite:
        raise t.fail("cvt.satfinite is not emulated")
    to, source = mods.type(), mods.type()
    mods.done()
    if to in ("f16x2", "bf16x2"):
        _pack_two(t, to, source, rounding, relu)
        return
    t.count(2)
    to_bits_, to_letter = TYPES[to]
    bits, letter = TYPES[source]
    to_float, from_float = to_letter in ("f", "bf"), letter in ("f", "bf")
    c = t.c
    if not to_float and not from_float:
        value = t.read(t.operand(1), bits)
        if sat:
            value = _saturate(t, value, letter == "s", to_bits_, to_letter == "s")
        t.write(t.operand(0), value.to(f"i{to_bits_}", signed=letter == "s"), signed=to_letter == "s")
        return
    if not to_float:
        _float_to_integer(t, source, to, to_integer or "rzi", ftz)
        return
    if not from_float:
        value = t.read(t.operand(1), bits)
        sign = "si" if letter == "s" else "ui"
        if to in ("f32", "f64") and rounding not in (None, "rn"):
            wide = value.to("i64", signed=letter == "s")
            number = c.call(FLOAT[to], f"rounded.{sign}tofp.{to}.{rounding}", wide)
        elif to in ("f32", "f64"):
            number = c.op(FLOAT[to], f"{sign}tofp {value} to {FLOAT[to]}")
        elif rounding in (None, "rn") and bits <= 32:
            exact = c.op("double", f"{sign}tofp {value} to double")
            number = _shrink(t, exact, to)
        else:
            raise t.fail(f"cvt from .{source} to .{to} is not emulated")
        t.write(t.operand(0), to_bits(t, number, to, sat=sat, clean=False))
        return
    number = float_in(t, t.operand(1), source, ftz)
    if to_integer is not None:
        number = c.call(number.type, f"llvm.{_TO_INTEGER[to_integer]}.{_name(number)}", number)
    number = _resize(t, number, source, to, rounding)
    result = to_bits(t, number, to, ftz=ftz, sat=sat)
    if relu:
        result = (result >> (result.bits - 1)).ne(0).select(0, result)
    t.write(t.operand(0), result)


def _name(value: Value) -> str:
    return {"half": "f16", "float": "f32", "double": "f64"}[value.type]


def _resize(t: Translator, number: Value, source: str, to: str, rounding: str | None) -> Value:
    """Float to float; a bf16 is held as a float until its bits are asked for."""
    c = t.c
    target = "float" if to == "bf16" else FLOAT[to]
    if TYPES[to][0] < TYPES[source][0] and rounding not in (None, "rn"):
        if (source, to) == ("f64", "f32"):
            return c.call("float", f"rounded.fptrunc.f32.{rounding}", number)
        if rounding == "rz" and to == "bf16" and source == "f32":  # to_bits rounds what is exact already
            nan = c.op("i1", f"fcmp uno {number}, {number.name}")
            cut = (number.cast("i32") & 0xFFFF0000).cast("float")
            return c.op("float", f"select {nan}, {number}, {cut}")
        raise t.fail(f"cvt.{rounding} from .{source} to .{to} is not emulated")
    if number.type == "double" and to in ("f16", "bf16"):
        return _shrink(t, number, to)
    if number.type == target:
        return number
    wider = ("half", "float", "double").index(target) > ("half", "float", "double").index(number.type)
    return c.op(target, f"{'fpext' if wider else 'fptrunc'} {number} to {target}")


def _shrink(t: Translator, exact: Value, to: str) -> Value:
    from .arithmetic import odd_float

    return narrow(t, exact) if to == "f16" else odd_float(t, exact)


def _pack_two(t: Translator, to: str, source: str, rounding: str | None, relu: bool) -> None:
    """cvt.rn.f16x2.f32 d, a, b: a becomes the upper half."""
    t.count(3)
    if source != "f32":
        raise t.fail(f"cvt from .{source} to .{to} is not emulated")
    single = to[:-2]
    halves = []
    for index in (2, 1):
        number = _resize(t, float_in(t, t.operand(index), "f32"), "f32", single, rounding)
        bits = to_bits(t, number, single)
        halves.append((bits >> 15).ne(0).select(0, bits) if relu else bits)
    t.write(t.operand(0), pack(halves[0], halves[1]))


def _float_to_integer(t: Translator, source: str, to: str, how: str, ftz: bool) -> None:
    """Rounded as asked for, clamped to the range of the result; NaN becomes 0."""
    c = t.c
    number = from_bits(t, t.read(t.operand(1), TYPES[source][0], real=source), source, ftz)
    if number.type == "half":
        number = c.op("float", f"fpext {number} to float")
    rounded = c.call(number.type, f"llvm.{_TO_INTEGER[how]}.{_name(number)}", number)
    bits, letter = TYPES[to]
    sign = "s" if letter == "s" else "u"
    result = c.call(f"i{bits}", f"llvm.fpto{sign}i.sat.i{bits}.{_name(rounded)}", rounded)
    t.write(t.operand(0), result, signed=letter == "s")


def _saturate(t: Translator, value: Value, signed: bool, bits: int, to_signed: bool) -> Value:
    wide = value.to("i128", signed=signed)
    low = -(1 << (bits - 1)) if to_signed else 0
    high = (1 << (bits - 1)) - 1 if to_signed else (1 << bits) - 1
    wide = wide.cmp("slt", low).select(low, wide)
    wide = wide.cmp("sgt", high).select(high, wide)
    return wide.to(value.type) if bits <= value.bits else wide.to(f"i{bits}")
