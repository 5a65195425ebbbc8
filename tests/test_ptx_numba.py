"""Kernels that numba compiles live (no GPU is needed for that), run from their PTX and compared with numpy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest
from helpers.ptx import finish, launch, pack, table_of, variables_of
from numba import cuda

from lamport_numba.emulator import ptx
from lamport_numba.emulator.grid import Fabric, Grid, Status

RANDOM = np.random.default_rng(5)


def flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as numba's kernels take them: an array is meminfo, parent, items, item size, data, shape, strides."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, np.ndarray):
            found += [0, 0, arg.size, arg.itemsize, arg, *arg.shape, *(s % (1 << 64) for s in arg.strides)]
        else:
            found.append(arg)
    return tuple(found)


def compiled(kernel: Callable[..., None], args: tuple[Any, ...], **options: Any) -> ptx.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        signature = tuple(numba.typeof(a) for a in args)
        text, _ = cuda.compile_ptx(kernel, signature, cc=(9, 0), **options)
    return ptx.load(text)


def run(kernel: Callable[..., None], *args: Any, grid: int = 1, block: int = 32, **options: Any) -> Grid:
    fabric = options.pop("fabric", None)
    module = compiled(kernel, args, **options)
    return launch(module, flat(args), grid=(grid, 1, 1), block=(block, 1, 1), fabric=fabric)


MODES = pytest.mark.parametrize("options", [{}, {"debug": True, "opt": False}], ids=["optimised", "debug"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_math(dtype: type) -> None:
    def kernel(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i, 0] = math.sin(x[i])
            y[i, 1] = math.exp(x[i])
            y[i, 2] = math.log(abs(x[i]) + 1)
            y[i, 3] = math.sqrt(abs(x[i]))
            y[i, 4] = x[i] ** 3
            y[i, 5] = math.tanh(x[i])

    x = RANDOM.standard_normal(50).astype(dtype)
    y = np.zeros((50, 6), dtype)
    run(kernel, x, y, grid=2)
    expect = np.stack([np.sin(x), np.exp(x), np.log(np.abs(x) + 1), np.sqrt(np.abs(x)), x**3, np.tanh(x)], axis=1)
    np.testing.assert_allclose(y, expect, rtol=4e-6 if dtype is np.float32 else 1e-14)


@MODES
def test_shared_memory_reduction(options: dict[str, bool]) -> None:
    def kernel(x, y):
        part = cuda.shared.array(128, numba.float64)
        t = cuda.threadIdx.x
        part[t] = x[cuda.grid(1)]
        cuda.syncthreads()
        n = 64
        while n > 0:
            if t < n:
                part[t] += part[t + n]
            cuda.syncthreads()
            n //= 2
        if t == 0:
            y[cuda.blockIdx.x] = part[0]

    x = RANDOM.integers(-99, 99, 512).astype(np.float64)
    for fabric in (Fabric.immediate(), Fabric.adversarial(2)):
        y = np.zeros(4)
        run(kernel, x, y, grid=4, block=128, fabric=fabric, **options)
        assert (y == x.reshape(4, 128).sum(axis=1)).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_warp_reduction_by_shuffles(dtype: type) -> None:
    def kernel(x, y):
        i = cuda.grid(1)
        v = x[i]
        for d in (16, 8, 4, 2, 1):
            v += cuda.shfl_xor_sync(0xFFFFFFFF, v, d)
        y[i] = v

    x = RANDOM.integers(0, 99, 64).astype(dtype)
    y = np.zeros(64, dtype)
    run(kernel, x, y, block=64)
    assert (y == np.repeat(x.reshape(2, 32).sum(axis=1), 32)).all()


def test_votes_and_bits() -> None:
    def kernel(x, y):
        i = cuda.grid(1)
        v = x[i]
        y[i, 0] = cuda.popc(v)
        y[i, 1] = cuda.clz(v)
        y[i, 2] = cuda.ffs(v)
        y[i, 3] = cuda.brev(v)
        y[i, 4] = cuda.ballot_sync(0xFFFFFFFF, v > 5)
        y[i, 5] = cuda.all_sync(0xFFFFFFFF, v > 5) + 2 * cuda.any_sync(0xFFFFFFFF, v > 5)
        y[i, 6] = cuda.selp(v > 5, v, x[0])
        y[i, 7] = cuda.laneid

    x = RANDOM.integers(0, 12, 32).astype(np.uint32)
    y = np.zeros((32, 8), np.uint32)
    run(kernel, x, y)
    for i, v in enumerate(map(int, x)):
        ballot = sum(1 << n for n in range(32) if x[n] > 5)
        expect = [v.bit_count(), 32 - v.bit_length(), (v & -v).bit_length(), int(f"{v:032b}"[::-1], 2), ballot, 2]
        assert list(y[i]) == [*expect, v if v > 5 else x[0], i]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64, np.float32, np.float64])
def test_atomics(dtype: type) -> None:
    def kernel(x, y):
        i = cuda.grid(1)
        cuda.atomic.add(y, i % 4, x[i])
        cuda.atomic.max(y, 4, x[i])
        cuda.atomic.min(y, 5, x[i])

    x = RANDOM.integers(1, 999, 256).astype(dtype)
    for fabric in (Fabric.immediate(), Fabric.adversarial(4)):
        y = np.zeros(6, dtype)
        y[5] = 5000
        run(kernel, x, y, grid=2, block=128, fabric=fabric)
        assert list(y) == [*(x[k::4].sum() for k in range(4)), x.max(), x.min()]


def test_compare_and_swap_and_exchange() -> None:
    def kernel(x, y):
        i = cuda.grid(1)
        cuda.atomic.cas(y, 0, 0, x[i])
        cuda.atomic.exch(y, 1, x[i])
        cuda.atomic.inc(y, 2, 9)

    x = np.arange(1, 65, dtype=np.uint32)
    y = np.zeros(3, np.uint32)
    run(kernel, x, y, block=64)
    assert y[0] in x
    assert y[1] in x
    assert y[2] == 64 % 10


@MODES
def test_local_arrays(options: dict[str, bool]) -> None:
    def kernel(x, y):
        a = cuda.local.array(16, numba.int64)
        i = cuda.grid(1)
        for j in range(16):
            a[j] = x[i] * j
        total = 0
        for j in range(16):
            total += a[(j + i) % 16] * 2 + a[(j * 7 + i) % 16]
        y[i] = total

    x = RANDOM.integers(-99, 99, 64)
    y = np.zeros(64, np.int64)
    run(kernel, x, y, grid=2, **options)
    for i in range(64):
        a = [int(x[i]) * j for j in range(16)]
        assert y[i] == sum(a[(j + i) % 16] * 2 + a[(j * 7 + i) % 16] for j in range(16))


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64, np.float32, np.float64, np.complex64]
)
def test_every_dtype_and_stride(dtype: type) -> None:
    def kernel(x, y):
        i, j = cuda.grid(2)
        if i < x.shape[0] and j < x.shape[1]:
            y[j, i] = x[i, j] + x[i, j]

    x = RANDOM.integers(0, 50, (9, 40)).astype(dtype)[:, ::-2]
    y = np.zeros((20, 18), dtype)[:, ::2]
    module = compiled(kernel, (x, y))
    table = table_of(x.base, y.base)
    launch(module, flat((x, y)), grid=(1, 1, 1), block=(16, 32, 1), table=table)
    assert (y == (x + x).T).all()


def test_floor_division_and_remainder() -> None:
    def kernel(x, y):
        i = cuda.grid(1)
        y[i, 0] = x[i] // 7
        y[i, 1] = x[i] % 7
        y[i, 2] = x[i] // -3
        y[i, 3] = x[i] % -3

    x = RANDOM.integers(-999, 999, 32)
    y = np.zeros((32, 4), np.int64)
    run(kernel, x, y)
    assert (y == np.stack([x // 7, x % 7, x // -3, x % -3], axis=1)).all()


def test_constant_arrays() -> None:
    table = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int64)

    def kernel(y):
        c = cuda.const.array_like(table)
        i = cuda.grid(1)
        y[i] = c[i % 8]

    y = np.zeros(32, np.int64)
    run(kernel, y)
    assert (y == np.resize(table, 32)).all()


def test_fences_and_barriers_between_ctas() -> None:
    """The last CTA adds up; right under the adversary because of the fences."""

    def kernel(x, partial, counter, out):
        b = cuda.blockIdx.x
        partial[b] = x[b] * 2
        cuda.threadfence()
        if cuda.atomic.add(counter, 0, 1) == cuda.gridDim.x - 1:
            cuda.threadfence()
            total = 0.0
            for k in range(cuda.gridDim.x):
                total += partial[k]
            out[0] = total

    x = RANDOM.integers(0, 99, 16).astype(np.float64)
    for seed in range(10):
        partial, counter, out = np.zeros(16), np.zeros(1, np.int32), np.zeros(1)
        run(kernel, x, partial, counter, out, grid=16, block=1, fabric=Fabric.adversarial(seed))
        assert out[0] == 2 * x.sum()


def test_faults_name_the_line() -> None:
    def kernel(x, y):
        i = cuda.grid(1)
        y[i] = x[i + 1]

    x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
    module = compiled(kernel, (x, y))
    k = next(iter(module.kernels.values()))
    memory = variables_of(module)
    placed = module.place({n: a.ctypes.data for n, a in memory.items()})
    grid = Grid(
        k, table_of(x, y), (1, 1, 1), (32, 1, 1), 0, pack(k, flat((x, y))), Fabric.immediate(), variables=placed
    )
    assert finish(grid) == Status.FAULTED
    assert grid.fault.tid == (31, 0, 0)
    assert grid.fault.address == x.ctypes.data + 128
    assert "ld" in grid.fault.text


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    def kernel(x):
        i = cuda.grid(1)
        if i < 2:
            print("thread", i, "holds", x[i])

    run(kernel, np.array([1.5, -2.0]))
    assert capsys.readouterr().out == "thread 0 holds 1.500000\nthread 1 holds -2.000000\n"
