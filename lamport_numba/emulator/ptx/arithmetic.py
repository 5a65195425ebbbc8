"""Arithmetic on integers and floats.

Registers hold bits; a float instruction casts them. What PTX defines exactly (rounding, NaN bits, order of zeros,
clamped shifts,
division by zero) is made explicit, since LLVM leaves most of it undefined.
"""

from __future__ import annotations

from collections.abc import Callable

from .ir import Value
from .syntax import TYPES, Instruction, Operand
from .translate import Mods, Translator, instruction

FLOAT = {"f16": "half", "f32": "float", "f64": "double"}
ROUNDINGS = ("rn", "rz", "rm", "rp")
_INTRINSIC = {"half": "f16", "float": "f32", "double": "f64"}
_INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")


# -- floats: in and out ----------------------------------------------------------------------------------------------


def flush(t: Translator, value: Value) -> Value:
    """Subnormal f32 (as i32) to a zero of its sign."""
    tiny = (value & 0x7F800000).eq(0)
    return tiny.select(value & 0x80000000, value)


def float_in(t: Translator, operand: Operand, kind: str, ftz: bool = False) -> Value:
    """A float operand as an LLVM float; bf16 comes as a float."""
    bits = t.read(operand, TYPES[kind][0], real=kind)
    return from_bits(t, bits, kind, ftz)


def from_bits(t: Translator, bits: Value, kind: str, ftz: bool = False) -> Value:
    if kind == "bf16":
        return (bits.to("i32") << 16).cast("float")
    return (flush(t, bits) if ftz and kind == "f32" else bits).cast(FLOAT[kind])


def to_bits(
    t: Translator, value: Value, kind: str, *, ftz: bool = False, sat: bool = False, clean: bool = True
) -> Value:
    """The bits of a result: saturated to [0, 1], rounded to bf16, NaN made canonical, subnormals flushed, as asked
    for."""
    c = t.c
    if sat:
        zero, one = (c.op(value.type, f"fadd {value.type} {x}, -0.0") for x in ("0.0", "1.0"))
        above = c.op("i1", f"fcmp ogt {value}, {zero.name}")
        value = c.op(value.type, f"select {above}, {value}, {zero}")  # NaN becomes 0
        below = c.op("i1", f"fcmp olt {value}, {one.name}")
        value = c.op(value.type, f"select {below}, {value}, {one}")
        clean = False
    if kind == "bf16":
        return round_to_bf16(t, value)
    bits = value.cast(f"i{value.bits}")
    if clean and kind in ("f32", "f16"):
        nan = c.op("i1", f"fcmp uno {value}, {value.name}")
        bits = nan.select(0x7FFFFFFF if kind == "f32" else 0x7FFF, bits)
    return flush(t, bits) if ftz and kind == "f32" else bits


def round_to_bf16(t: Translator, value: Value) -> Value:
    """f32 to the 16 bits of the nearest bfloat16, ties to even."""
    bits = value.cast("i32")
    nan = t.c.op("i1", f"fcmp uno {value}, {value.name}")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return nan.select(0x7FFF, rounded.to("i16"))


def lanes_of(t: Translator, operand: Operand, kind: str) -> list[Value]:
    """The two halves of a packed operand, as 16 bits each."""
    bits = t.read(operand, 32)
    return [bits.to("i16"), (bits >> 16).to("i16")]


def pack(low: Value, high: Value) -> Value:
    return low.to("i32") | (high.to("i32") << 16)


def each_float(
    t: Translator, kind: str, operands: list[Operand], compute: Callable[[str, list[Value]], Value]
) -> Value:
    """Apply ``compute(kind, values as bits) -> bits`` to a scalar, or to both halves of a pack."""
    if not kind.endswith("x2"):
        return compute(kind, [t.read(o, TYPES[kind][0], real=kind) for o in operands])
    halves = [lanes_of(t, o, kind) for o in operands]
    single = kind[:-2]
    return pack(*(compute(single, [h[i] for h in halves]) for i in range(2)))


def fp(t: Translator, op: str, kind: str, values: list[Value], rounding: str = "rn") -> Value:
    """One exactly rounded operation: fadd, fsub, fmul, fdiv, fma or sqrt."""
    c = t.c
    type_ = values[0].type
    name = _INTRINSIC[type_]
    if rounding != "rn":
        if kind not in ("f32", "f64"):
            raise t.fail(f"rounding .{rounding} of .{kind} is not emulated")
        return c.call(type_, f"rounded.{op}.{name}.{rounding}", *values)
    if op == "fma":
        if kind in ("f16", "bf16"):  # exact in double, so that it is rounded once
            wide = [c.op("double", f"fpext {v} to double") for v in values]
            exact = c.call("double", "llvm.fma.f64", *wide)
            return narrow(t, exact) if kind == "f16" else odd_float(t, exact)
        return c.call(type_, f"llvm.fma.{name}", *values)
    if op == "sqrt":
        return c.call(type_, f"llvm.sqrt.{name}", *values)
    return c.op(type_, f"{op} {values[0]}, {values[1].name}")


def odd_float(t: Translator, value: Value) -> Value:
    """double to float, rounded to odd: a second rounding of the result is then right."""
    c = t.c
    near = c.op("float", f"fptrunc {value} to float")
    back = c.op("double", f"fpext {near} to double")
    bits = near.cast("i32")
    inexact = c.op("i1", f"fcmp one {back}, {value.name}") & (bits & 1).eq(0)
    mask = (1 << 63) - 1
    above = (value.cast("i64") & mask).lt(back.cast("i64") & mask)
    moved = above.select(bits - 1, bits + 1)
    return inexact.select(moved, bits).cast("float")


def narrow(t: Translator, value: Value) -> Value:
    """double to half, rounded once."""
    return t.c.op("half", f"fptrunc {odd_float(t, value)} to half")


# -- add, sub, mul, fma, mad, div ------------------------------------------------------------------------------------


def _float_op(t: Translator, mods: Mods, op: str, kind: str, count: int) -> None:
    t.count(count + 1)
    rounding = mods.one_of(ROUNDINGS) or "rn"
    ftz, sat, relu = mods.take("ftz"), mods.take("sat"), mods.take("relu")
    mods.done()

    def compute(single: str, bits: list[Value]) -> Value:
        values = [from_bits(t, b, single, ftz) for b in bits]
        result = to_bits(t, fp(t, op, single, values, rounding), single, ftz=ftz, sat=sat)
        if relu:
            negative = (result >> (result.bits - 1)).ne(0)
            result = negative.select(0, result)
        return result

    t.write(t.operand(0), each_float(t, kind, list(t.item.operands[1:]), compute))


@instruction("add", "sub")
def _add(t: Translator, item: Instruction, mods: Mods) -> None:
    kind = mods.type()
    op = item.op
    if kind in _FLOATS:
        _float_op(t, mods, f"f{op}", kind, 2)
        return
    t.count(3)
    sat, carry_out = mods.take("sat"), mods.take("cc")
    mods.done()
    if kind in ("u16x2", "s16x2"):
        raise t.fail("packed integers are not emulated")
    bits = TYPES[kind][0]
    a, b = t.read(t.operand(1), bits), t.read(t.operand(2), bits)
    if sat:
        t.write(t.operand(0), t.c.call(a.type, f"llvm.s{op}.sat.{a.type}", a, b))
        return
    result = a.op(op, b)
    if carry_out:
        _set_carry(t, result.lt(a) if op == "add" else a.lt(b))
    t.write(t.operand(0), result, signed=TYPES[kind][1] == "s")


def _carry(t: Translator) -> Value:
    return t.read(t.flat.carry, 1)


def _set_carry(t: Translator, value: Value) -> None:
    t.c.do(f"store {value}, ptr {t.slot(t.flat.carry)}")


@instruction("addc", "subc")
def _addc(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    bits = TYPES[mods.type("u32", "s32", "u64", "s64", "b32", "b64")][0]
    carry_out = mods.take("cc")
    mods.done()
    a, b = (t.read(t.operand(i), bits).to(f"i{bits + 8}") for i in (1, 2))
    wide = a.op(item.op[:3], b).op(item.op[:3], _carry(t).to(a.type))
    if carry_out:
        _set_carry(t, ((wide >> bits) & 1).ne(0))
    t.write(t.operand(0), wide.to(f"i{bits}"))


@instruction("mul", "mad", "madc", "fma", "mul24", "mad24")
def _mul(t: Translator, item: Instruction, mods: Mods) -> None:
    kind = mods.type()
    adds = item.op not in ("mul", "mul24")
    if kind in _FLOATS:
        _float_op(t, mods, "fma" if adds else "fmul", kind, 3 if adds else 2)
        return
    t.count(4 if adds else 3)
    if kind not in _INTEGERS:
        raise t.fail(f"{item.op} of .{kind} is not emulated")
    part = mods.one_of(("lo", "hi", "wide"))
    sat, carry_out = mods.take("sat"), mods.take("cc")
    mods.done()
    if part is None or item.op == "fma":
        raise t.fail("one of .lo, .hi and .wide is needed")
    bits, signed = TYPES[kind][0], TYPES[kind][1] == "s"
    wide = f"i{2 * bits}"
    a, b = (t.read(t.operand(i), bits) for i in (1, 2))
    if "24" in item.op:
        shift = "ashr" if signed else "lshr"
        a, b = ((v << 8).op(shift, 8) for v in (a, b))
    if part == "lo" and "24" not in item.op:
        result = a * b
    else:
        product = a.to(wide, signed=signed) * b.to(wide, signed=signed)
        if "24" in item.op:
            result = product.to(a.type) if part == "lo" else (product >> 16).to(a.type)
        else:
            result = product if part == "wide" else (product >> bits).to(a.type) if part == "hi" else product.to(a.type)
    if adds:
        addend = t.read(t.operand(3), result.bits)
        if sat:
            result = t.c.call(result.type, f"llvm.sadd.sat.{result.type}", result, addend)
        else:
            total = result.to(f"i{result.bits + 8}") + addend.to(f"i{result.bits + 8}")
            if item.op == "madc":
                total = total + _carry(t).to(total.type)
            if carry_out:
                _set_carry(t, ((total >> result.bits) & 1).ne(0))
            result = total.to(result.type)
    t.write(t.operand(0), result, signed=signed)


@instruction("div", "rem")
def _div(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    kind = mods.type()
    if kind in ("f32", "f64"):
        mods.take("approx", "full")
        _float_op(t, mods, "fdiv", kind, 2)
        return
    mods.done()
    if kind not in _INTEGERS:
        raise t.fail(f"{item.op} of .{kind} is not emulated")
    bits, signed = TYPES[kind][0], TYPES[kind][1] == "s"
    a, b = (t.read(t.operand(i), bits) for i in (1, 2))
    zero = b.eq(0)
    unsafe = zero
    if signed:  # the smallest number by -1 overflows
        overflow = a.eq(1 << (bits - 1)) & b.eq(-1)
        unsafe = zero | overflow
    safe = unsafe.select(1, b)
    result = a.op(("s" if signed else "u") + item.op, safe)
    t.write(t.operand(0), zero.select(-1 if item.op == "div" else a, result), signed=signed)


@instruction("abs", "neg")
def _sign(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2)
    kind = mods.type()
    ftz = mods.take("ftz")
    mods.done()
    if kind in _FLOATS:

        def compute(single: str, bits: list[Value]) -> Value:
            value = flush(t, bits[0]) if ftz and single == "f32" else bits[0]
            top = 1 << (value.bits - 1)
            return value ^ top if item.op == "neg" else value & (top - 1)

        t.write(t.operand(0), each_float(t, kind, [t.operand(1)], compute))
        return
    a = t.read(t.operand(1), TYPES[kind][0])
    negative = t.c.const(a.type, 0) - a
    result = negative if item.op == "neg" else a.cmp("slt", 0).select(negative, a)
    t.write(t.operand(0), result, signed=True)


@instruction("min", "max")
def _minmax(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    kind = mods.type()
    least = item.op == "min"
    if kind in _FLOATS:
        ftz, nan, xorsign = mods.take("ftz"), mods.take("NaN"), mods.take("xorsign")
        absolute = mods.take("abs")
        mods.done()
        if xorsign != absolute:
            raise t.fail(".xorsign and .abs come together")

        def compute(single: str, bits: list[Value]) -> Value:
            return _float_minmax(t, bits, single, least, ftz, nan, xorsign)

        t.write(t.operand(0), each_float(t, kind, list(item.operands[1:]), compute))
        return
    relu = mods.take("relu")
    mods.done()
    bits, signed = TYPES[kind][0], TYPES[kind][1] == "s"
    a, b = (t.read(t.operand(i), bits) for i in (1, 2))
    how = ("s" if signed else "u") + ("lt" if least else "gt")
    result = a.cmp(how, b).select(a, b)
    if relu:
        result = result.cmp("slt", 0).select(0, result)
    t.write(t.operand(0), result, signed=signed)


def _float_minmax(
    t: Translator, bits: list[Value], kind: str, least: bool, ftz: bool, nan: bool, xorsign: bool
) -> Value:
    """-0 is less than +0; one NaN gives the other operand (or, with .NaN, a NaN)."""
    c = t.c
    if ftz and kind == "f32":
        bits = [flush(t, b) for b in bits]
    a, b = bits
    top = 1 << (a.bits - 1)
    sign = (a ^ b) & top
    if xorsign:
        a, b = a & (top - 1), b & (top - 1)
    x, y = from_bits(t, a, kind), from_bits(t, b, kind)
    wins = c.op("i1", f"fcmp {'olt' if least else 'ogt'} {x}, {y.name}")
    equal = c.op("i1", f"fcmp oeq {x}, {y.name}")
    result = wins.select(a, b)
    result = equal.select(a | b if least else a & b, result)
    a_nan, b_nan = (c.op("i1", f"fcmp uno {v}, {v.name}") for v in (x, y))
    result = a_nan.select(b, b_nan.select(a, result))
    if xorsign:
        result = (result & (top - 1)) | sign
    canonical = {"f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}[kind]
    return ((a_nan | b_nan) if nan else (a_nan & b_nan)).select(canonical, result)


# -- functions that PTX leaves approximate: computed as exactly as is cheap ------------------------------------------


@instruction("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh")
def _function(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2)
    c = t.c
    kind = mods.type("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
    approx = mods.take("approx")
    rounding = mods.one_of(ROUNDINGS) or "rn"
    ftz = mods.take("ftz")
    mods.done()
    names = {"sin": "sin", "cos": "cos", "lg2": "log2", "ex2": "exp2"}

    def compute(single: str, bits: list[Value]) -> Value:
        value = from_bits(t, bits[0], single, ftz and single == "f32")
        wide = value
        if value.type == "half":
            wide = c.op("float", f"fpext {value} to float")
        name = _INTRINSIC[wide.type]
        one = c.op(wide.type, f"fadd {wide.type} 1.0, -0.0")
        if item.op in names:
            result = c.call(wide.type, f"llvm.{names[item.op]}.{name}", wide)
        elif item.op == "tanh":
            result = c.call("float", "tanhf", wide)
        elif item.op == "rcp":
            result = fp(t, "fdiv", single, [one, wide], rounding)
        elif item.op == "sqrt":
            result = fp(t, "sqrt", single, [wide], rounding)
        else:
            result = c.op(wide.type, f"fdiv {one}, {fp(t, 'sqrt', single, [wide]).name}")
        if value.type == "half":
            result = c.op("half", f"fptrunc {result} to half")
        out = to_bits(t, result, single, ftz=ftz)
        if single == "f64" and approx and ftz:
            out = out & ~0xFFFFFFFF  # the hardware's start value for a Newton iteration has 20 bits
        return out

    t.write(t.operand(0), each_float(t, kind, [t.operand(1)], compute))


@instruction("copysign")
def _copysign(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(3)
    bits = TYPES[mods.type("f32", "f64")][0]
    mods.done()
    top = 1 << (bits - 1)
    a, b = t.read(t.operand(1), bits), t.read(t.operand(2), bits)
    t.write(t.operand(0), (a & top) | (b & (top - 1)))


@instruction("testp")
def _testp(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(2)
    kind = mods.type("f32", "f64")
    what = mods.one_of(("finite", "infinite", "number", "notanumber", "normal", "subnormal"))
    mods.done()
    bits, mantissa = (32, 23) if kind == "f32" else (64, 52)
    a = t.read(t.operand(1), bits) & ((1 << (bits - 1)) - 1)
    infinite = ((1 << (bits - 1 - mantissa)) - 1) << mantissa
    least = 1 << mantissa
    answers = {
        "finite": lambda: a.lt(infinite),
        "infinite": lambda: a.eq(infinite),
        "number": lambda: a.le(infinite),
        "notanumber": lambda: ~a.le(infinite),
        "normal": lambda: a.lt(infinite) & ~a.lt(least),
        "subnormal": lambda: a.lt(least) & a.ne(0),
    }
    if what is None:
        raise t.fail("testp needs a property")
    t.write(t.operand(0), answers[what]())


@instruction("sad")
def _sad(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(4)
    bits, letter = TYPES[mods.type(*_INTEGERS)]
    mods.done()
    a, b, c = (t.read(t.operand(i), bits) for i in (1, 2, 3))
    less = a.cmp("slt" if letter == "s" else "ult", b)
    t.write(t.operand(0), c + less.select(b - a, a - b), signed=letter == "s")


@instruction("dp4a", "dp2a")
def _dot(t: Translator, item: Instruction, mods: Mods) -> None:
    t.count(4)
    half = mods.one_of(("lo", "hi")) if item.op == "dp2a" else None
    kinds = [mods.type("u32", "s32"), mods.type("u32", "s32")]
    mods.done()
    a, b, total = (t.read(t.operand(i), 32) for i in (1, 2, 3))
    count, width = (4, 8) if item.op == "dp4a" else (2, 16)
    base = 16 if half == "hi" else 0
    for i in range(count):
        x = (a >> (width * i)).to(f"i{width}").to("i32", signed=kinds[0] == "s32")
        y = (b >> (base + 8 * i)).to("i8").to("i32", signed=kinds[1] == "s32")
        total = total + x * y
    t.write(t.operand(0), total)
