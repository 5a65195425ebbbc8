"""Nonsense from array producers ends in a clear error or in a right answer, never in anything else."""

import numpy as np
from helpers.dlpack_producer import Producer
from helpers.scripted_driver import scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from lamport_numba.intake import Buffer, as_buffer, byte_span

DRV, _ = scripted()
QUICK = settings(max_examples=300, deadline=None, derandomize=True, database=None)

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=6),
    st.binary(max_size=4),
    st.lists(st.integers(-5, 5), max_size=3),
    st.builds(object),
)
lengths = st.lists(st.one_of(st.integers(0, 9), st.integers(-3, 2**66)), max_size=5).map(tuple)
steps = st.lists(st.one_of(st.integers(-64, 64), st.integers(-(2**66), 2**66)), max_size=5).map(tuple)
typestrs = st.one_of(
    st.sampled_from(["<f4", "<f2", ">f8", "|u1", "|V3", "<M8[ns]", "|O", "|b1", "<c16", "|S0", "<U7"]),
    st.text(max_size=6),
)
described = st.fixed_dictionaries(
    {},
    optional={
        "shape": st.one_of(lengths, anything),
        "strides": st.one_of(st.none(), steps, anything),
        "typestr": st.one_of(typestrs, anything),
        "data": st.one_of(st.tuples(st.one_of(st.integers(0, 2**64), anything), st.booleans()), anything),
        "version": st.one_of(st.sampled_from([2, 3]), anything),
        "stream": st.one_of(st.none(), st.integers(-1, 2**65), anything),
        "mask": st.one_of(st.none(), anything),
        "descr": st.one_of(st.none(), st.just([("", "<f4")]), anything),
    },
)
plausible = st.fixed_dictionaries(
    {
        "shape": st.lists(st.integers(0, 6), max_size=4).map(tuple),
        "typestr": st.sampled_from(["<f4", "<f2", ">f8", "|u1", "|V3", "|b1", "<c16"]),
        "data": st.tuples(st.integers(2**20, 2**47), st.booleans()),
        "version": st.sampled_from([2, 3]),
    },
    optional={"strides": st.lists(st.integers(-64, 64), max_size=4).map(tuple)},
)


class Array:
    def __init__(self, described):
        self.__cuda_array_interface__ = described


def taken(obj):
    try:
        return as_buffer(obj, DRV)
    except (TypeError, ValueError):
        return None


def check(found: Buffer):
    elements = int(np.prod(found.shape, dtype=object)) if found.shape else 1
    assert found.nbytes == elements * found.dtype.itemsize
    assert not found.dtype.hasobject
    if found.nbytes:
        low, high = byte_span(found.shape, found.strides, found.dtype.itemsize)
        assert 0 <= found.address + low < found.address + high <= 2**64
    else:
        assert found.address == 0
        assert found.strides is None


@given(st.one_of(described, anything))
@QUICK
def test_interface(interface):
    found = taken(Array(interface))
    if found is not None:
        check(found)


@given(plausible)
@QUICK
def test_plausible_interface_agrees_with_numpy(interface):
    found = taken(Array(interface))
    strides = interface.get("strides")
    if strides is not None and len(strides) != len(interface["shape"]):
        assert found is None
        return
    check(found)
    dtype = np.dtype(interface["typestr"])
    model = np.lib.stride_tricks.as_strided(
        np.empty(1, dtype), interface["shape"], strides
    )  # its elements are not read
    assert found.nbytes == model.nbytes
    if model.size:
        assert (found.strides is None) == model.flags.c_contiguous


@given(
    address=st.integers(0, 2**63),
    shape=st.lists(st.integers(-2, 2**40), max_size=5).map(tuple),
    code=st.integers(0, 255),
    bits=st.sampled_from([0, 1, 4, 8, 16, 24, 32, 64, 128, 255]),
    lanes=st.sampled_from([0, 1, 2, 65535]),
    device=st.tuples(st.integers(-1, 20), st.integers(-1, 3)),
    byte_offset=st.integers(0, 2**63),
    versioned=st.booleans(),
    version=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    flags=st.integers(0, 2**32),
    strided=st.booleans(),
    data=st.data(),
)
@QUICK
def test_dlpack(data, strided, shape, **options):
    strides = tuple(data.draw(st.integers(-(2**40), 2**40)) for _ in shape) if strided else None
    found = taken(Producer(options.pop("address"), shape, strides=strides, **options))
    if found is not None:
        check(found)


@given(anything)
@QUICK
def test_anything(obj):
    assert taken(obj) is None
