"""Kernels that nvcc made of tests/data/*.cu, compared with numpy: bit for bit where PTX defines the result exactly."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers.ptx import launch, variables_of

from lamport_numba.emulator import ptx
from lamport_numba.emulator.grid import Fabric
from lamport_numba.emulator.ptx.translate import translate

DATA = Path(__file__).parent / "data"


@cache
def module(name: str) -> ptx.Module:
    return ptx.load((DATA / f"{name}.ptx").read_text())


def run(file: str, kernel: str, *args, n: int | None = None, **shape) -> None:
    if n is not None:
        args = (*args, n)
        shape = {"grid": (-(-n // 64), 1, 1), "block": (64, 1, 1), **shape}
    launch(module(file), args, name=kernel, **shape)


RANDOM = np.random.default_rng(7)


def integers(dtype: type, n: int) -> np.ndarray:
    """Random integers of every magnitude, the edges among them."""
    info = np.iinfo(dtype)
    bits = RANDOM.integers(0, info.bits + 1, n)
    values = [int(RANDOM.integers(0, 1 << 63)) * 2 + 1 >> (64 - int(b)) for b in bits]
    values[:6] = [0, 1, info.max, info.min, info.max - 1, 2]
    signs = RANDOM.integers(0, 2, n)
    values = [-v if s and info.min < 0 else v for v, s in zip(values, signs, strict=True)]
    return np.array([wrap(v, dtype) for v in values], dtype)


def wrap(value: int, dtype: type) -> int:
    info = np.iinfo(dtype)
    value &= (1 << info.bits) - 1
    return value - (1 << info.bits) if info.min < 0 and value >> (info.bits - 1) else value


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize("name", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_basic_integers(name: str) -> None:
    dtype = {"s": np.int8, "u": np.uint8}[name[0]]
    dtype = np.dtype(f"{'i' if name[0] == 's' else 'u'}{int(name[1:]) // 8}").type
    a, b = integers(dtype, 300), integers(dtype, 300)
    a[:40], b[:40] = np.resize(a[:6], 40), np.repeat(b[:6], 7)[:40]
    bits = np.iinfo(dtype).bits
    out = np.zeros((300, 16), dtype)
    run("integers", f"basic_{name}", a, b, out, n=300)
    for x, y, row in zip(map(int, a), map(int, b), out.astype(object), strict=True):
        d = y or 1
        q = quotient(x, d)
        s = y & (bits - 1)
        compared = (x < y) + 2 * (x <= y) + 4 * (x == y) + 8 * (x != y)
        expect = [x + y, x - y, x * y, q, x - q * d, x & y, x | y, x ^ y, ~x, x << s, x >> s, min(x, y), max(x, y)]
        expect += [-x, compared, x * y + x]
        assert list(row) == [wrap(e, dtype) for e in expect], (x, y)


def signed(x: int, bits: int = 32) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def permuted(x: int, y: int, selector: int) -> int:
    both = (x | y << 32).to_bytes(8, "little")
    found = []
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = both[nibble & 7]
        found.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(found), "little")


def test_bits32() -> None:
    a, b = integers(np.uint32, 200), integers(np.uint32, 200)
    out = np.zeros((200, 20), np.uint32)
    run("integers", "bits32", a, b, out, n=200)
    for x, y, row in zip(map(int, a), map(int, b), out, strict=True):
        sx, sy, both = signed(x), signed(y), x | y << 32
        bytes_of = [[v >> 8 * i & 255 for i in range(4)] for v in (x, y)]
        expect = [
            x.bit_count(),
            32 - x.bit_length(),
            (x & -x).bit_length(),
            int(f"{x:032b}"[::-1], 2),
            permuted(x, y, 0x3175),
            permuted(x, y, y & 0x7777),
            (both << (y & 31)) >> 32,
            both >> (x & 31),
            (both << min(y & 63, 32)) >> 32,
            both >> min(x & 63, 32),
            x * y >> 32,
            sx * sy >> 32,
            abs(x - y) + 7,
            abs(sx - sy) + 7,
            5 + sum(signed(p, 8) * signed(q, 8) for p, q in zip(*bytes_of, strict=True)),
            5 + sum(p * q for p, q in zip(*bytes_of, strict=True)),
            ~(x ^ y),
            (x & 0xFFFFFF) * (y & 0xFFFFFF),
            signed(x & 0xFFFFFF, 24) * signed(y & 0xFFFFFF, 24),
            (x + y) >> 1,
        ]
        assert [int(v) for v in row] == [e & 0xFFFFFFFF for e in expect], (hex(x), hex(y))


def test_bits64() -> None:
    a, b = integers(np.uint64, 200), integers(np.uint64, 200)
    out = np.zeros((200, 8), np.uint64)
    run("integers", "bits64", a, b, out, n=200)
    for x, y, row in zip(map(int, a), map(int, b), out, strict=True):
        wide = x * y + x
        expect = [x.bit_count(), 64 - x.bit_length(), (x & -x).bit_length(), int(f"{x:064b}"[::-1], 2), x * y >> 64]
        expect += [signed(x, 64) * signed(y, 64) >> 64, wide, wide >> 64]
        assert [int(v) for v in row] == [e & (1 << 64) - 1 for e in expect], (hex(x), hex(y))


def test_carries_and_fields() -> None:
    a, b = integers(np.uint32, 400), integers(np.uint32, 400)
    out = np.zeros((200, 12), np.uint32)
    run("integers", "carries", a, b, out, n=200)
    pairs = zip(*(np.reshape(v, (200, 2)).tolist() for v in (a, b)), out, strict=True)
    for (a0, a1), (b0, b1), row in pairs:
        x, y = a0 | a1 << 32, b0 | b1 << 32
        difference = x - y
        low = (a0 * b0 & 0xFFFFFFFF) + a1
        fused = (low & 0xFFFFFFFF) | (((a0 * b0 >> 32) + b1 + (low >> 32)) << 32)
        pos, length = b0 & 63, b1 & 63
        field = a0 >> pos & ((1 << length) - 1)
        wide = signed(a0) >> pos & ((1 << length) - 1)
        sign = length and (signed(a0) >> min(pos + length - 1, 31)) & 1
        extended = 0 if length == 0 else (wide | (-1 << length) if sign and length < 32 else wide)
        inserted = (a1 & ~(((1 << length) - 1) << pos)) | ((a0 & ((1 << length) - 1)) << pos)
        top = signed(a0)
        top = ~top if top < 0 else top
        expect = [x + y, (x + y) >> 32, (x + y) >> 64, difference, difference >> 32, -1 if difference < 0 else 0]
        expect += [fused, fused >> 32, field, extended, inserted, top.bit_length() - 1]
        assert [int(v) for v in row] == [e & 0xFFFFFFFF for e in expect], (hex(a0), hex(a1), b0 & 63, b1 & 63)


# -- floats ----------------------------------------------------------------------------------------------------------


def floats(dtype: type, n: int) -> np.ndarray:
    """Random bit patterns (NaNs, infinities and subnormals among them), and numbers of like size."""
    size = np.dtype(dtype).itemsize
    raw = RANDOM.integers(0, 256, n * size, dtype=np.uint8).view(dtype)
    raw[::3] = (RANDOM.standard_normal(len(raw[::3])) * 10).astype(dtype)
    raw[1:12] = np.array([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -2.5], dtype)
    return raw


def same(found: np.ndarray, expect: np.ndarray) -> None:
    """Equal bits; for NaNs it is enough that both are."""
    kind = f"u{expect.dtype.itemsize}"
    equal = (found.view(kind) == expect.view(kind)) | (np.isnan(found) & np.isnan(expect))
    at = np.argwhere(~equal)
    assert not len(at), (at[:5], found[tuple(at[0])], expect[tuple(at[0])])


@cache
def exact(operation: str, bits: int, *values: float) -> Fraction | None:
    """The exact result, or None where there is no finite one."""
    if not all(map(math.isfinite, values)):
        return None
    a, *rest = map(Fraction, values)
    if operation == "add":
        return a + rest[0]
    if operation == "sub":
        return a - rest[0]
    if operation == "mul":
        return a * rest[0]
    if operation == "fma":
        return a * rest[0] + rest[1]
    return a / rest[0] if rest[0] else None


def rounded(value: Fraction, dtype: type, how: str) -> float:
    """A rational in a float type, rounded down, up, to zero or to nearest even."""
    info = np.finfo(dtype)
    digits, least = info.nmant, info.minexp - info.nmant
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > magnitude
    unit = Fraction(2) ** max(exponent - digits, least)
    whole, rest = divmod(magnitude, unit)
    away = {
        "rz": False,
        "ru": value > 0,
        "rd": value < 0,
        "rn": rest * 2 > unit or (rest * 2 == unit and whole % 2 == 1),
    }
    result = (whole + (away[how] and rest > 0)) * unit
    if result > Fraction(float(info.max)):
        size = math.inf if away[how] or how == "rn" else float(info.max)
    else:
        size = float(result)
    return size if value > 0 else -size


@pytest.mark.parametrize(("name", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_exact_floats(name: str, dtype: type) -> None:
    n = 500
    a, b = floats(dtype, n), floats(dtype, n)
    out = np.zeros((n, 16), dtype)
    run("floats", f"exact_{name}", a, b, out, n=n)
    with np.errstate(all="ignore"):
        rows = [a + b, a - b, a * b, a / b, np.sqrt(np.abs(a)), None, None, None]
        rows += [np.rint(a), np.floor(a), np.ceil(a), np.trunc(a), np.copysign(a, b), -a]
        rows += [np.where(a < b, 1, 2), np.where(a != a, 1, 2)]
    for i, row in enumerate(rows):
        if row is not None:
            same(out[:, i].copy(), row.astype(dtype))
    for x, y, found in zip(a, b, out[:, 5], strict=True):
        value = exact("fma", 0, float(x), float(y), float(x))
        if value:
            assert float(found) == rounded(value, dtype, "rn"), (x, y)
    least, most = out[:, 6].copy(), out[:, 7].copy()
    same(least, np.fmin(a, b))
    same(most, np.fmax(a, b))


@pytest.mark.parametrize("how", ["rz", "ru", "rd"])
@pytest.mark.parametrize(("name", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_directed_rounding(name: str, dtype: type, how: str) -> None:
    n = 200
    a, b = floats(dtype, n), floats(dtype, n)
    out = np.zeros((n, 5), dtype)
    run("floats", f"directed_{name}_{how}", a, b, out, n=n)
    checked = 0
    for x, y, row in zip(map(float, a), map(float, b), out, strict=True):
        for place, operation in ((0, "add"), (1, "mul"), (2, "div"), (4, "sub")):
            value = exact(operation, 0, x, y)
            if value:
                assert float(row[place]) == rounded(value, dtype, how), (operation, x, y)
                checked += 1
        root = float(row[3])
        if 0 < abs(x) < math.inf:
            below, above = Fraction(root), Fraction(float(np.nextafter(dtype(root), dtype(np.inf))))
            if how == "ru":
                below, above = Fraction(float(np.nextafter(dtype(root), dtype(0)))), below
                assert below * below < Fraction(abs(x)) <= above * above
            else:
                assert below * below <= Fraction(abs(x)) < above * above
    assert checked > n


def test_double_to_everything() -> None:
    n = 300
    a = floats(np.float64, n)
    a[::2] = RANDOM.standard_normal(n // 2) * 10.0 ** RANDOM.integers(-2, 20, n // 2)
    ints, reals = np.zeros((n, 16), np.int64), np.zeros((n, 4))
    run("floats", "from_double", a, ints, reals, n=n)

    def to_int(value: float, bits: int, is_signed: bool, how: str = "rz") -> int:
        if math.isnan(value):
            return 0
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
        if math.isinf(value):
            return high if value > 0 else low
        whole = {"rz": math.trunc, "rn": round, "ru": math.ceil, "rd": math.floor}[how](value)
        return min(max(whole, low), high)

    with np.errstate(all="ignore"):
        single = a.astype(np.float32)
    for x, f, row, real in zip(map(float, a), map(float, single), ints, reals, strict=True):
        if abs(x) < 100:  # what narrow C casts do outside their range is undefined
            assert row[0] == to_int(x, 8, True)
            assert row[2] == to_int(x, 16, True)
            assert x <= -1 or (row[1] == to_int(x, 8, False) and row[3] == to_int(x, 16, False))
        expect = [to_int(x, 32, True), to_int(x, 32, False), to_int(x, 64, True)]
        expect += [wrap(to_int(x, 64, False), np.int64), to_int(x, 32, True, "rn"), to_int(x, 32, True, "ru")]
        expect += [to_int(x, 32, True, "rd"), to_int(f, 32, True, "rn"), to_int(f, 32, False, "ru")]
        expect += [to_int(f, 64, True, "rd"), to_int(x, 64, True, "rn"), wrap(to_int(x, 64, False, "ru"), np.int64)]
        if not math.isnan(x):
            assert [int(v) for v in row[4:]] == expect, x
        if math.isfinite(x) and x:
            assert list(real) == [rounded(Fraction(x), np.float32, how) for how in ("rn", "rz", "ru", "rd")], x


def test_integers_to_floats() -> None:
    a = integers(np.int64, 300)
    out = np.zeros((300, 12))
    run("floats", "from_integers", a, out, n=300)
    for x, row in zip(map(int, a), out, strict=True):
        u, s32, u32 = x & (1 << 64) - 1, signed(x & 0xFFFFFFFF), x & 0xFFFFFFFF
        kinds = [(x, "f", "rn"), (x, "d", "rn"), (u, "f", "rn"), (u, "d", "rn"), (s32, "f", "rn"), (u32, "f", "rn")]
        kinds += [(s32, "d", "rn"), (u32, "d", "rn"), (x, "f", "rz"), (x, "f", "ru"), (s32, "f", "rd"), (u, "d", "rz")]
        types = {"f": np.float32, "d": np.float64}
        assert list(row) == [rounded(Fraction(v), types[t], how) for v, t, how in kinds], x


def test_halves() -> None:
    n = 600
    a, b = floats(np.float16, n), floats(np.float16, n)
    out = np.zeros((n, 9), np.float16)
    run("floats", "halves", a, b, out, n=n)
    with np.errstate(all="ignore"):
        fused = (a.astype(np.float64) * b.astype(np.float64) + a.astype(np.float64)).astype(np.float16)
        rows = [a + b, a - b, a * b, fused, -a, np.abs(a), np.fmin(a, b), np.where(a < b, 1, 2), a * b + b * b]
    for i, row in enumerate(rows):
        same(out[:, i].copy(), row.astype(np.float16))


def brain(x: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest bfloat16."""
    bits = x.view(np.uint32).astype(np.uint64)
    found = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), found)


def real(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_bfloat16() -> None:
    n = 600
    a, b = (RANDOM.integers(0, 1 << 16, n, dtype=np.uint16) for _ in range(2))
    a[::2], b[::2] = (brain(RANDOM.standard_normal(n // 2).astype(np.float32)) for _ in range(2))
    out = np.zeros((n, 6), np.uint16)
    run("floats", "brains", a, b, out, n=n)
    x, y = real(a), real(b)
    with np.errstate(all="ignore"):
        rows = [x + y, x - y, x * y, None, np.fmax(x, y)]
    for i, row in enumerate(rows):
        if row is not None:
            same(real(out[:, i].copy()), real(brain(row)))
    assert (out[:, 5] == a ^ 0x8000).all()
    usual = slice(0, None, 2)
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64) * y + x
    same(real(out[usual, 3].copy()), real(brain(wide[usual].astype(np.float32))))


def test_half_conversions() -> None:
    n = 400
    f, d = floats(np.float32, n), floats(np.float64, n)
    f[::2], d[::2] = RANDOM.standard_normal(n // 2) * 1e-3, RANDOM.standard_normal(n // 2) * 1e-5
    out, back = np.zeros((n, 6), np.uint16), np.zeros((n, 2), np.float32)
    run("floats", "half_conversions", f, d, out, back, n=n)
    with np.errstate(all="ignore"):
        halves = [f.astype(np.float16), d.astype(np.float16), None, None]
        halves += [f.astype(np.float16), d.astype(np.float32).astype(np.float16)]
    for i, row in enumerate(halves):
        if row is not None:
            same(out[:, i].copy().view(np.float16), row)
    same(real(out[:, 2].copy()), real(brain(f)))
    cut = np.where(np.isnan(f), np.uint32(0x7FFF), f.view(np.uint32) >> 16).astype(np.uint16)
    same(real(out[:, 3].copy()), real(cut))
    same(back[:, 0].copy(), halves[0].astype(np.float32))
    same(back[:, 1].copy(), real(out[:, 2]))


def test_library_functions() -> None:
    n = 200
    for dtype, kernel, columns, limit in ((np.float32, "library", 12, 2e-6), (np.float64, "library64", 8, 4e-15)):
        a = (RANDOM.standard_normal(n) * 5).astype(dtype)
        a[:4] = [0, 1e5 if dtype is np.float32 else 1e8, -3e4, 1]
        a[1:3] = np.where(np.abs(a[1:3]) > 50, a[1:3], 1)
        a[1:3] = [70, -70]
        out = np.zeros((n, columns), dtype)
        run("floats", kernel, a, out, n=n)
        x = a.astype(np.float64)
        positive = np.abs(a) + dtype(1e-3)
        rows = [np.sin(x), np.cos(x), np.exp(x), np.log(positive.astype(np.float64)), np.abs(x) ** float(dtype(1.7))]
        rows += [np.tanh(x), np.arctan2(x, 2), 1 / np.sqrt(positive.astype(np.float64))]
        if columns == 12:
            rows += [np.exp(x), np.vectorize(math.erf)(x), np.cbrt(x), np.fmod(a, np.float32(0.7))]
        for i, row in enumerate(rows):
            np.testing.assert_allclose(
                out[:, i], row, rtol=limit * (8 if i == 8 else 1), atol=limit / 4, err_msg=f"{kernel} {i}"
            )


# -- whole kernels ---------------------------------------------------------------------------------------------------


FABRICS = [Fabric.immediate, lambda: Fabric.adversarial(11)]


@pytest.fixture(params=FABRICS, ids=["immediate", "adversarial"])
def fabric(request: pytest.FixtureRequest) -> Fabric:
    return request.param()


def test_reduce(fabric: Fabric) -> None:
    x = RANDOM.integers(-100, 100, 5000).astype(np.float64)
    out = np.zeros(4)
    run("programs", "reduce_tree", x, out, 5000, grid=(4, 1, 1), block=(256, 1, 1), fabric=fabric)
    assert out.sum() == x.sum()


def test_reduce_by_the_last_block(fabric: Fabric) -> None:
    x = RANDOM.integers(-1000, 1000, 3000).astype(np.int32)
    partial, total = np.zeros(5, np.int64), np.zeros(1, np.int64)
    memory = variables_of(module("programs"))
    for _ in range(3):  # the counter wraps back to 0
        shape = {"grid": (5, 1, 1), "block": (128, 1, 1)}
        run("programs", "reduce_last", x, partial, total, 3000, fabric=fabric, variables=memory, **shape)
        assert total[0] == x.sum()
        total[0] = 0


def test_scan(fabric: Fabric) -> None:
    x = RANDOM.integers(-50, 50, 512).astype(np.int32)
    out = np.zeros(512, np.int32)
    run("programs", "scan_block", x, out, grid=(2, 1, 1), block=(256, 1, 1), shared=128, fabric=fabric)
    assert (out.reshape(2, 256) == np.cumsum(x.reshape(2, 256), axis=1)).all()


def test_histogram(fabric: Fabric) -> None:
    x = RANDOM.integers(0, 256, 4000).astype(np.uint8)
    bins = np.zeros(256, np.uint32)
    run("programs", "histogram", x, bins, 4000, grid=(3, 1, 1), block=(96, 1, 1), fabric=fabric)
    assert (bins == np.bincount(x, minlength=256)).all()


def test_transpose_and_matmul(fabric: Fabric) -> None:
    a = RANDOM.standard_normal((45, 37)).astype(np.float32)
    out = np.zeros((37, 45), np.float32)
    run("programs", "transpose", a, out, 37, 45, grid=(3, 3, 1), block=(16, 16, 1), fabric=fabric)
    assert (out == a.T).all()
    b = RANDOM.integers(-9, 9, (20, 20)).astype(np.float32)
    c = np.zeros((20, 20), np.float32)
    run("programs", "matmul", b, b.T.copy(), c, 20, grid=(2, 2, 1), block=(16, 16, 1), fabric=fabric)
    assert (c == b @ b.T).all()


def test_structs_through_device_functions(fabric: Fabric) -> None:
    layout = np.dtype([("position", "f8", 3), ("mass", "f4"), ("kind", "i2"), ("pad", "i2")])
    n = 40
    p = np.zeros(n, layout)
    p["position"], p["mass"], p["kind"] = RANDOM.standard_normal((n, 3)), RANDOM.integers(1, 9, n), np.arange(n)
    v = RANDOM.integers(-5, 5, (n, 3)).astype(np.float64)
    out, energy = np.zeros(n, layout), np.zeros(n)
    run("programs", "particles", p, out, v, energy, n=n, fabric=fabric)
    assert (out["position"] == p["position"] + 0.25 * v).all()
    assert (out["mass"] == p["mass"] / 2).all()
    assert (out["kind"] == -p["kind"]).all()
    square = (v * v).sum(axis=1)
    assert (energy == 0.5 * out["mass"] * square + square).all()


def test_local_arrays_and_barriers_in_functions(fabric: Fabric) -> None:
    x = RANDOM.integers(-99, 99, (96, 20)).astype(np.int32)
    out = np.zeros_like(x)
    run("programs", "sort_rows", x, out, 20, block=(96, 1, 1), fabric=fabric)
    assert (out == np.sort(x, axis=1)[::-1]).all()


def test_module_variables(fabric: Fabric) -> None:
    out = np.zeros(32, np.int32)
    memory = variables_of(module("programs"))
    for extra in (0, 100):
        run("programs", "module_variables", out, fabric=fabric, variables=memory)
        expect = [[3, 1, 4, 1, 5, 9, 2, 6][t & 7] + [10, 20 + extra, 30, 40][t & 3] for t in range(32)]
        assert list(out) == expect


def test_switch() -> None:
    text = RANDOM.integers(0, 256, 200).astype(np.uint8)
    out = np.zeros(200, np.int32)
    run("programs", "automaton", text, out, n=200)
    for i in range(200):
        state = total = 0
        for k in range(64):
            case = int(text[(i + k) % 200]) % 11
            if case == 3:
                total += state
            elif case == 5:
                total ^= state
            elif case == 8:
                total -= 5
            else:
                state = {0: state + 3, 1: state ^ 0x55, 2: state * 7 + 1, 4: -state, 6: state >> 1, 7: state | 8}.get(
                    case, state + 1
                )
                state = wrap(state, np.int32)
        assert out[i] == wrap(state * 31 + total, np.int32)


def test_cooperative_groups(fabric: Fabric) -> None:
    x = RANDOM.integers(0, 100, 64).astype(np.int32)
    out = np.zeros(64, np.int32)
    run("programs", "groups", x, out, block=(64, 1, 1), fabric=fabric)
    for t in range(64):
        tile = x[t // 16 * 16 :][:16].astype(np.int64)
        assert out[t] == wrap(
            int(tile.sum() + 1000 * tile.max() + 1000000 * (tile > 90).any() + (tile[0] << 24)), np.int32
        )


def test_warp_tools(fabric: Fabric) -> None:
    x = RANDOM.integers(0, 64, 96).astype(np.int32)
    out = np.zeros((96, 8), np.uint32)
    run("programs", "warp_tools", x, out, block=(96, 1, 1), fabric=fabric)
    for t in range(96):
        warp, lane = x[t // 32 * 32 :][:32], t % 32
        shuffled = int(warp[lane ^ 9])
        if lane < 12:
            shuffled += int(warp[(lane & ~3) + (lane + 5) % 4])
        expect = [
            sum(1 << i for i in range(32) if warp[i] & 1),
            sum(1 << i for i in range(32) if warp[i] & 7 == warp[lane] & 7),
            int(warp.sum()),
            int(warp.max()),
            int((warp == 3).any()) + 2,
            shuffled,
            int((x & 1).sum()),
            int(np.bitwise_xor.reduce(warp)),
        ]
        assert list(out[t]) == expect


def test_atomics(fabric: Fabric) -> None:
    n = 200
    i32, u32 = np.zeros(16, np.int32), np.full(4, 0, np.uint32)
    i32[2], i32[3], i32[4], u32[2] = 5, -5, -1, 1 << 31
    u64, f32, f64 = np.zeros(2, np.uint64), np.zeros(1, np.float32), np.zeros(2)
    run("programs", "atomics", i32, u32, u64, f32, f64, n, grid=(4, 1, 1), block=(64, 1, 1), fabric=fabric)
    total = n * (n - 1) // 2
    assert list(i32[:4]) == [total, -total, 100 - (n - 1), n - 1 - 100]
    assert list(i32[4:7]) == [0, -1, int(np.bitwise_xor.reduce(np.arange(n)))]
    assert list(i32[8:12]) == [128, 128, 128, 16]
    assert list(u32[:3]) == [n % 7, (7 - n % 7) % 7, 1000000 - (n - 1)]
    assert list(u64) == [total << 32, (n - 1) << 40]
    assert f32[0] == n / 2
    assert list(f64) == [total / 4, (n - 1) * 1.5]


def test_ticket_lock(fabric: Fabric) -> None:
    lock, counter = np.zeros(2, np.uint32), np.zeros(1, np.int32)
    run("programs", "ticket_lock", lock, counter, grid=(3, 1, 1), block=(40, 1, 1), fabric=fabric)
    assert counter[0] == 120


def test_vectors() -> None:
    a, b, c = (RANDOM.integers(0, 99, (32, k)) for k in (4, 4, 2))
    a, b, c = a.astype(np.float32), b.astype(np.uint8), c.astype(np.float64)
    out, outd = np.zeros_like(a), np.zeros_like(c)
    run("programs", "vectors", a, b, c, out, outd)
    assert (out == a[:, ::-1] + b).all()
    assert (outd == c[:, ::-1] * [2, 3]).all()


@pytest.mark.parametrize("file", ["integers", "floats", "programs"])
def test_both_variants_name_the_same_places(file: str) -> None:
    """A fault of the adversarial variant is told by the list of places that the immediate one made."""
    source = module(file).source
    for function in source.functions.values():
        if function.is_kernel:
            plain, wild = (translate(source, function, adversarial=a) for a in (False, True))
            assert plain.sites == wild.sites
