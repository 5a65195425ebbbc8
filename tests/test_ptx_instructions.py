"""Single instructions that compilers emit rarely, each against a model in Python integers."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import numpy as np
import pytest
from helpers.ptx import HEADER, launch

from lamport_numba.emulator import ptx
from lamport_numba.errors import PtxError

RANDOM = np.random.default_rng(3)
U32 = 0xFFFFFFFF


def values(n: int = 64) -> np.ndarray:
    edges = [0, 1, 2, 31, 32, 33, 63, 64, 255, 256, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]
    edges += [
        0x3F800000,
        0xBF800000,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0x7F800001,
        0x007FFFFF,
        0x80000003,
        0x00800000,
    ]
    found = RANDOM.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32)
    found[: len(edges)] = edges
    return RANDOM.permutation(found)


def apply(instructions: str, inputs: int = 3, outputs: int = 1) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Run instructions on registers %a, %b, %c (32 bits) of 64 threads; results are %o0, %o1."""
    arrays = [values() for _ in range(inputs)]
    out = np.zeros((outputs, 64), np.uint32)
    names = "abc"[:inputs]
    loads = "\n".join(f"ld.param.u64 %x, [p{n}]; add.s64 %x, %x, %off; ld.global.u32 %{n}, [%x];" for n in names)
    stores = "\n".join(f"st.global.u32 [%y+{256 * i}], %o{i};" for i in range(outputs))
    params = ", ".join(f".param .u64 p{n}" for n in names)
    text = f"""{HEADER}
    .visible .entry k({params}, .param .u64 out) {{
    .reg .b64 %x, %y, %off, %w<4>; .reg .b32 %a, %b, %c, %t, %o<4>, %r<8>; .reg .pred %p, %q, %s; .reg .b16 %h<4>;
    .reg .f32 %f<4>; .reg .f64 %d<4>;
    mov.u32 %t, %tid.x; mul.wide.u32 %off, %t, 4; {loads} ld.param.u64 %y, [out]; add.s64 %y, %y, %off;
    {instructions}
    {stores} ret; }}"""
    launch(text, (*arrays, out), block=(64, 1, 1))
    return list(zip(*(map(int, a) for a in arrays), strict=True)), out


def check(instructions: str, model: Callable[..., int], inputs: int = 3) -> None:
    rows, out = apply(instructions, inputs)
    expect = [model(*row) & U32 for row in rows]
    wrong = [(tuple(map(hex, r)), hex(int(o)), hex(e)) for r, o, e in zip(rows, out[0], expect, strict=True) if o != e]
    assert not wrong, wrong[:3]


def signed(x: int, bits: int = 32) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def f32(x: int) -> float:
    return struct.unpack("<f", struct.pack("<I", x))[0]


def test_prmt_sign_mode() -> None:
    def model(a: int, b: int, c: int) -> int:
        both = (a | b << 32).to_bytes(8, "little")
        found = 0
        for i in range(4):
            nibble = c >> (4 * i) & 15
            byte = both[nibble & 7]
            found |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << (8 * i)
        return found

    check("prmt.b32 %o0, %a, %b, %c;", model)


PRMT = {
    "f4e": [(3, 2, 1, 0), (4, 3, 2, 1), (5, 4, 3, 2), (6, 5, 4, 3)],
    "b4e": [(5, 6, 7, 0), (6, 7, 0, 1), (7, 0, 1, 2), (0, 1, 2, 3)],
    "rc8": [(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)],
    "ecl": [(3, 2, 1, 0), (3, 2, 1, 1), (3, 2, 2, 2), (3, 3, 3, 3)],
    "ecr": [(0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 1, 0), (3, 2, 1, 0)],
    "rc16": [(1, 0, 1, 0), (3, 2, 3, 2), (1, 0, 1, 0), (3, 2, 3, 2)],
}


@pytest.mark.parametrize("mode", PRMT)
def test_prmt_modes(mode: str) -> None:
    def model(a: int, b: int, c: int) -> int:
        both = (a | b << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(both[i] for i in PRMT[mode][c & 3]), "big")

    check(f"prmt.b32.{mode} %o0, %a, %b, %c;", model)


@pytest.mark.parametrize("table", [0x00, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x1B, 0x3C, 0xFF])
def test_lop3(table: int) -> None:
    def model(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))

    check(f"lop3.b32 %o0, %a, %b, %c, {table};", model)


def test_lop3_with_predicate() -> None:
    code = "setp.lt.u32 %q, %a, 100; lop3.or.b32 %o0|%p, %a, %b, %c, 0x80, %q; selp.u32 %o0, 1, 0, %p;"
    check(code, lambda a, b, c: int((a & b & c) != 0 or a < 100))


def test_shifts_clamp() -> None:
    check("shl.b32 %o0, %a, %b;", lambda a, b: a << b if b < 32 else 0, 2)
    check("shr.u32 %o0, %a, %b;", lambda a, b: a >> b if b < 32 else 0, 2)
    check("shr.s32 %o0, %a, %b;", lambda a, b: signed(a) >> min(b, 31), 2)
    check(
        "cvt.u16.u32 %h0, %a; shr.s16 %h1, %h0, %b; cvt.u32.u16 %o0, %h1;",
        lambda a, b: signed(a, 16) >> min(b, 15) & 0xFFFF,
        2,
    )
    code = "cvt.u64.u32 %w0, %a; shl.b64 %w0, %w0, %b; shr.u64 %w0, %w0, 32; cvt.u32.u64 %o0, %w0;"
    check(code, lambda a, b: (a << b if b < 64 else 0) >> 32, 2)


@pytest.mark.parametrize("how", ["clamp", "wrap"])
def test_funnel_shifts(how: str) -> None:
    def amount(c: int) -> int:
        return min(c, 32) if how == "clamp" else c & 31

    check(f"shf.l.{how}.b32 %o0, %a, %b, %c;", lambda a, b, c: ((b << 32 | a) << amount(c)) >> 32)
    check(f"shf.r.{how}.b32 %o0, %a, %b, %c;", lambda a, b, c: (b << 32 | a) >> amount(c))
    check(f"bmsk.{how}.b32 %o0, %a, %b;", lambda a, b: mask(a, b, how), 2)
    check(f"szext.{how}.s32 %o0, %a, %b;", lambda a, b: extended(a, b, how), 2)
    check(f"szext.{how}.u32 %o0, %a, %b;", lambda a, b: a & (1 << (min(b, 32) if how == "clamp" else b & 31)) - 1, 2)


def mask(a: int, b: int, how: str) -> int:
    if how == "wrap":
        a, b = a & 31, b & 31
    return 0 if a >= 32 else ((1 << min(b, 32)) - 1) << a


def extended(a: int, b: int, how: str) -> int:
    b = min(b, 32) if how == "clamp" else b & 31
    return 0 if b == 0 else signed(a & ((1 << b) - 1), b)


def test_integer_extras() -> None:
    check("sad.s32 %o0, %a, %b, %c;", lambda a, b, c: abs(signed(a) - signed(b)) + c)
    check(
        "dp2a.lo.s32.u32 %o0, %a, %b, %c;",
        lambda a, b, c: c + signed(a, 16) * (b & 255) + signed(a >> 16, 16) * (b >> 8 & 255),
    )
    check(
        "dp2a.hi.u32.s32 %o0, %a, %b, %c;",
        lambda a, b, c: c + (a & 0xFFFF) * signed(b >> 16, 8) + (a >> 16) * signed(b >> 24, 8),
    )
    check("add.sat.s32 %o0, %a, %b;", lambda a, b: min(max(signed(a) + signed(b), -(1 << 31)), (1 << 31) - 1), 2)
    check("sub.sat.s32 %o0, %a, %b;", lambda a, b: min(max(signed(a) - signed(b), -(1 << 31)), (1 << 31) - 1), 2)
    check("cnot.b32 %o0, %a;", lambda a: int(a == 0), 1)
    check("bfind.shiftamt.u32 %o0, %a;", lambda a: 32 - a.bit_length() if a else -1, 1)
    check("mul24.hi.u32 %o0, %a, %b;", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16, 2)
    check("min.relu.s32 %o0, %a, %b;", lambda a, b: max(min(signed(a), signed(b)), 0), 2)
    check("mad.hi.s32 %o0, %a, %b, %c;", lambda a, b, c: (signed(a) * signed(b) >> 32) + c)
    check(
        "mul.wide.u16 %o0, %h0, %h1;".join(("cvt.u16.u32 %h0, %a; cvt.u16.u32 %h1, %b;", "")),
        lambda a, b: (a & 0xFFFF) * (b & 0xFFFF),
        2,
    )


def test_division_by_zero_and_overflow() -> None:
    def quotient(a: int, b: int) -> int:
        return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)

    check(
        "and.b32 %r0, %b, 3; sub.u32 %r0, %r0, 1; div.s32 %o0, %a, %r0;",
        lambda a, b: quotient(signed(a), (b & 3) - 1),
        2,
    )
    check("and.b32 %r0, %b, 1; div.u32 %o0, %a, %r0;", lambda a, b: a if b & 1 else -1, 2)
    check("and.b32 %r0, %b, 1; neg.s32 %r0, %r0; rem.s32 %o0, %a, %r0;", lambda a, b: 0 if b & 1 else a, 2)


def test_set_selp_slct() -> None:
    check("set.lt.u32.s32 %o0, %a, %b;", lambda a, b: -(signed(a) < signed(b)), 2)
    check(
        "set.ge.and.f32.u32 %f0, %a, %b, %p; mov.b32 %o0, %f0;".replace("set", "setp.ne.u32 %p, %c, 0; set"),
        lambda a, b, c: 0x3F800000 if a >= b and c else 0,
    )
    check("slct.u32.s32 %o0, %a, %b, %c;", lambda a, b, c: a if signed(c) >= 0 else b)
    check("mov.b32 %f0, %c; slct.u32.f32 %o0, %a, %b, %f0;", lambda a, b, c: a if f32(c) >= 0 else b)
    code = """setp.gt.u32 %s, %c, 99; setp.lt.xor.u32 %p|%q, %a, %b, !%s; selp.u32 %r0, 1, 0, %p;
    selp.u32 %r1, 2, 0, %q; or.b32 %o0, %r0, %r1;"""
    check(code, lambda a, b, c: ((a < b) ^ (c <= 99)) + 2 * ((a >= b) ^ (c <= 99)))


COMPARE = {
    "eq": lambda x, y: x == y, "ne": lambda x, y: x < y or x > y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y, "ge": lambda x, y: x >= y, "num": lambda x, y: x == x and y == y,
}  # fmt: skip


def or_unordered(ordered: Callable[[float, float], bool]) -> Callable[[float, float], bool]:
    return lambda x, y: x != x or y != y or ordered(x, y)


COMPARE |= {f"{name}u": or_unordered(how) for name, how in COMPARE.items() if name != "num"}
COMPARE["nan"] = lambda x, y: x != x or y != y


@pytest.mark.parametrize("how", COMPARE)
def test_float_comparisons(how: str) -> None:
    code = f"mov.b32 %f0, %a; mov.b32 %f1, %b; setp.{how}.f32 %p, %f0, %f1; selp.u32 %o0, 1, 0, %p;"
    check(code, lambda a, b: int(COMPARE[how](f32(a), f32(b))), 2)


@pytest.mark.parametrize("what", ["finite", "infinite", "number", "notanumber", "normal", "subnormal"])
def test_testp(what: str) -> None:
    def model(a: int) -> int:
        x = f32(a)
        tiny = 0 < abs(x) < 2.0**-126
        return int({
            "finite": math.isfinite(x), "infinite": math.isinf(x), "number": x == x, "notanumber": x != x,
            "normal": math.isfinite(x) and x != 0 and not tiny, "subnormal": tiny,
        }[what])  # fmt: skip

    check(f"mov.b32 %f0, %a; testp.{what}.f32 %p, %f0; selp.u32 %o0, 1, 0, %p;", model, 1)


def is_nan(a: int) -> bool:
    return a & 0x7FFFFFFF > 0x7F800000


def test_min_max_of_nans_and_zeros() -> None:
    def model(a: int, b: int, nan: bool = False) -> int:
        if (is_nan(a) or is_nan(b)) if nan else (is_nan(a) and is_nan(b)):
            return 0x7FFFFFFF
        if is_nan(a) or is_nan(b):
            return b if is_nan(a) else a
        order = (f32(a), -(a >> 31)) < (f32(b), -(b >> 31))
        return a if order else b

    code = "mov.b32 %f0, %a; mov.b32 %f1, %b; min{}.f32 %f2, %f0, %f1; mov.b32 %o0, %f2;"
    check(code.format(""), model, 2)
    check(code.format(".NaN"), lambda a, b: model(a, b, True), 2)
    zeros = "mov.f32 %f0, 0f00000000; mov.f32 %f1, 0f80000000; {}.f32 %f2, %f0, %f1; mov.b32 %o0, %f2;"
    check(zeros.format("min"), lambda a: 0x80000000, 1)
    check(zeros.format("max"), lambda a: 0, 1)


def flushed(a: int) -> int:
    return a if a & 0x7F800000 else a & 0x80000000


def test_flush_to_zero() -> None:
    code = "mov.b32 %f0, %a; add.ftz.f32 %f1, %f0, 0f80000000; mov.b32 %o0, %f1;"
    check(code, lambda a: 0x7FFFFFFF if is_nan(a) else flushed(a), 1)
    code = "mov.b32 %f0, %a; mul.f32 %f1, %f0, 0f3F800000; mov.b32 %o0, %f1;"  # without, subnormals stay
    check(code, lambda a: 0x7FFFFFFF if is_nan(a) else a, 1)
    code = "mov.b32 %f0, %a; setp.eq.ftz.f32 %p, %f0, 0f00000000; selp.u32 %o0, 1, 0, %p;"
    check(code, lambda a: int(flushed(a) << 1 & U32 == 0), 1)
    code = "mov.b32 %f0, %a; mul.ftz.f32 %f1, %f0, 0f3F000000; mov.b32 %o0, %f1;"
    check(code, lambda a: 0x7FFFFFFF if is_nan(a) else flushed(half_of(flushed(a))), 1)


def half_of(a: int) -> int:
    return struct.unpack("<I", struct.pack("<f", f32(a) / 2))[0]


def test_bits_pass_through_moves_and_memory() -> None:
    """Signalling NaNs and subnormals are moved, selected and stored as they are."""
    code = """mov.b32 %f0, %a; mov.f32 %f1, %f0; setp.eq.u32 %p, %a, %a; selp.f32 %f2, %f1, 0f00000000, %p;
    st.global.f32 [%y], %f2; ld.global.f32 %f3, [%y]; mov.b32 %o0, %f3;"""
    check(code, lambda a: a, 1)


def test_saturation() -> None:
    code = "mov.b32 %f0, %a; add.sat.f32 %f1, %f0, 0f00000000; mov.b32 %o0, %f1;"

    def model(a: int) -> int:
        x = f32(a)
        return struct.unpack("<I", struct.pack("<f", 0.0 if not x > 0 else min(x, 1.0)))[0]

    check(code, model, 1)
    check("cvt.sat.u8.s32 %h0, %a; cvt.u32.u16 %o0, %h0;", lambda a: min(max(signed(a), 0), 255), 1)
    check("cvt.sat.s16.u32 %h0, %a; cvt.s32.s16 %o0, %h0;", lambda a: min(a, 32767), 1)
    check(
        "cvt.u64.u32 %w0, %a; shl.b64 %w0, %w0, 8; cvt.sat.s32.u64 %o0, %w0;", lambda a: min(a << 8, (1 << 31) - 1), 1
    )
    check("cvt.s8.s32 %o0, %a;", lambda a: signed(a, 8), 1)
    check("cvt.u8.u32 %o0, %a;", lambda a: a & 255, 1)


def test_canonical_nan() -> None:
    code = "mov.f32 %f0, 0f7F800001; mov.b32 %f1, %a; {} mov.b32 %o0, %f2;"
    sums = ("add.f32 %f2, %f0, %f1;", "mul.f32 %f2, %f1, %f0;", "fma.rn.f32 %f2, %f1, %f1, %f0;")
    for op in (*sums, "sqrt.rn.f32 %f2, %f0;"):
        check(code.format(op), lambda a: 0x7FFFFFFF, 1)


@pytest.mark.parametrize(
    "text",
    [
        "tex.2d.v4.f32.f32 {%f0, %f1, %f2, %f3}, [t, {%f0, %f1}];",
        "wmma.load.a.sync.aligned.row.m16n16k16.f16 {%o0}, [%y];",
        "cp.async.ca.shared.global [%a], [%y], 16;",
        "mbarrier.init.shared.b64 [%a], 1;",
        "add.f16x4 %o0, %a, %b;",
        "cvt.rn.satfinite.e4m3x2.f32 %h0, %f0, %f1;",
        "ld.global.v3.u32 {%o0, %o1, %o2}, [%y];",
        "st.relaxed.global.u32 [%y], %a;",
        "st.acquire.gpu.global.u32 [%y], %a;",
        "atom.global.add.b8 %o0, [%y], %a;",
        "setp.wibble.u32 %p, %a, %b;",
        "shfl.sync.sideways.b32 %o0, %a, %b, %c, -1;",
        "multimem.ld_reduce.relaxed.sys.global.add.f32 %f0, [%y];",
        "mov.u32 %o0, %unknown.x;",
        "call (%o0), %w0, (%a);",
        "ld.param.u32 %o0, [out+6];",
    ],
)
def test_what_is_not_emulated_is_refused(text: str) -> None:
    with pytest.raises(PtxError) as caught:
        apply(text)
    assert caught.value.line is not None
    assert "line" in str(caught.value)


def test_recursion_is_refused() -> None:
    text = f"{HEADER}.func f() {{ call f; ret; }}\n.entry k() {{ call f; ret; }}"
    with pytest.raises(PtxError, match="recursive"):
        ptx.load(text)
