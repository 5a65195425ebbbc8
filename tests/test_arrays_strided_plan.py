"""The plan of a strided copy, followed by hand as the kernel follows it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamport_numba.strided import plan


def follow(view: np.ndarray) -> tuple[bytes, int]:
    """What the kernel would write for ``view``, and the bytes of its unit."""
    address = view.__array_interface__["data"][0]
    unit, axes = plan(address, view.shape, view.strides, view.itemsize)
    base = view
    while base.base is not None:
        base = base.base
    memory = np.frombuffer(base.data, np.uint8) if base.flags.c_contiguous else None
    assert memory is not None
    origin = address - memory.__array_interface__["data"][0]
    count = math.prod(length for length, _ in axes)
    out = bytearray()
    for number in range(count):
        rest, place = number, origin
        for length, stride in axes:
            rest, index = divmod(rest, length)
            place += index * stride
        assert (address - origin + place) % unit == 0
        out += memory[place : place + unit].tobytes()
    return bytes(out), unit


def bytes_from(nbytes: int, offset: int = 0) -> np.ndarray:
    """Bytes that differ by position, at ``offset`` from a 16-byte boundary."""
    room = np.random.default_rng(nbytes).integers(0, 256, nbytes + 48, dtype=np.uint8)
    start = -room.ctypes.data % 16 + offset
    return room[start : start + nbytes]


VIEWS = {
    "transposed": lambda a: a.reshape(4, 6).T,
    "every second": lambda a: a[::2],
    "backwards": lambda a: a[::-1],
    "backwards by three": lambda a: a[20:3:-3],
    "column": lambda a: a.reshape(4, 6)[:, 2],
    "window": lambda a: a.reshape(4, 6)[1:3, 1:5],
    "broadcast": lambda a: np.broadcast_to(a[:3, None], (3, 5)),
    "broadcast rows": lambda a: np.broadcast_to(a[:3], (4, 3)),
    "whole": lambda a: a,
    "one": lambda a: a[5:6],
    "scalar": lambda a: a[5:6].reshape(()),
    "permuted": lambda a: a.reshape(2, 3, 4).transpose(1, 2, 0),
    "middle": lambda a: a.reshape(2, 3, 4)[:, 1],
}


@pytest.mark.parametrize("offset", [0, 2, 4, 8, 1])
@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("name", VIEWS)
def test_plan(name, itemsize, offset):
    view = VIEWS[name](bytes_from(24 * itemsize, offset).view(f"V{itemsize}"))
    written, _ = follow(view)
    assert written == view.tobytes()


@pytest.mark.parametrize(("offset", "unit"), [(0, 16), (8, 8), (4, 4), (2, 2), (1, 1)])
def test_unit_follows_the_alignment(offset, unit):
    assert follow(bytes_from(64, offset).view("f4"))[1] == unit


@pytest.mark.parametrize(
    ("dtype", "unit"), [("u1", 1), ("f2", 2), ("f4", 4), ("f8", 8), ("c16", 16), ("V3", 1), ("V6", 2)]
)
def test_unit_follows_the_items(dtype, unit):
    array = bytes_from(32 * np.dtype(dtype).itemsize).view(dtype)
    assert follow(array[::3])[1] == unit


def test_rows_are_whole_runs():
    rows = bytes_from(64 * 4).view("f4").reshape(8, 8)[:, :4]
    unit, axes = plan(rows.ctypes.data, rows.shape, rows.strides, 4)
    assert (unit, axes) == (16, [(8, 32)])


def test_neighbouring_axes_merge():
    shape = (3, 4, 5, 6)
    array = np.zeros(shape, "f4")
    assert len(plan(0x100, shape, array.strides, 4)[1]) == 1
    view = array.transpose(2, 3, 0, 1)
    assert plan(0x100, view.shape, view.strides, 4) == (4, [(12, 120), (30, 4)])


@given(
    itemsize=st.integers(1, 16),
    offset=st.integers(0, 15),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    data=st.data(),
)
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_plan_of_any_view(itemsize, offset, lengths, data):
    array = bytes_from(int(np.prod(lengths)) * itemsize, offset).view(f"V{itemsize}").reshape(lengths)
    view = array.transpose(data.draw(st.permutations(range(len(lengths)))))
    for axis, length in enumerate(view.shape):
        step = data.draw(st.sampled_from([1, 2, -1, -2]))
        start = data.draw(st.integers(0, length - 1))
        view = view[(slice(None),) * axis + (slice(None) if start == 0 else slice(start, None),)]
        view = view[(slice(None),) * axis + (slice(None, None, step),)]
    assert follow(view)[0] == view.tobytes()
