"""The host side of the mailbox, as far as it needs no device: layouts, and how arguments become kernel parameters."""

import struct
from itertools import pairwise

import numpy as np
import pytest
from helpers.ranks import Words
from numba import cuda
from numba.cuda import types

from lamport_numba.mailbox import Kernel, MailboxLayout, kernel
from lamport_numba.mailbox.kernels import _extent, _linked, _parameters, _type_of


def test_regions_lie_side_by_side_in_their_spaces():
    layout = MailboxLayout(scratch={"a": 1, "b": 100}, peer={"c": 17, "d": 2, "e": 1})
    regions = [(region.name, region.space, region.pairs, region.offset) for region in layout]
    assert regions == [
        ("a", "scratch", 1, 0),
        ("b", "scratch", 100, 128),
        ("c", "peer", 17, 0),
        ("d", "peer", 2, 256),
        ("e", "peer", 1, 384),
    ]
    assert (layout.scratch_bytes, layout.stride, layout.peer_bytes) == (128 + 896, 512, 1024)
    assert layout.offset("d") == layout["d"].offset == 256
    assert "e: 1 peer pairs" in repr(layout)


@pytest.mark.parametrize("pairs", [1, 2, 15, 16, 17, 1000])
def test_no_two_regions_overlap_and_each_takes_two_pairs_in_one_access(pairs):
    layout = MailboxLayout(peer={f"region {n}": pairs + n for n in range(9)})
    regions = sorted(layout, key=lambda region: region.offset)
    assert all(region.offset % 16 == 0 for region in regions)
    assert all(a.offset + a.nbytes <= b.offset for a, b in pairwise(regions))
    assert regions[-1].offset + regions[-1].nbytes <= layout.stride


@pytest.mark.parametrize(
    ("scratch", "peer", "says"),
    [
        ({}, {}, "at least one region"),
        ({"a": 1}, {"a": 1}, "'a' is given twice"),
        ({"a": 0}, {}, "'a' has 0 pairs"),
        ({"plumless": 1}, {"buckeroo": 1}, "same number in reports"),  # a known collision of crc32
    ],
)
def test_layouts_that_are_refused(scratch, peer, says):
    with pytest.raises(ValueError, match=says):
        MailboxLayout(scratch=scratch, peer=peer)


def test_a_region_that_is_not_there():
    with pytest.raises(KeyError, match="no region is named 'inbx'; expected one of 'a', 'inbox'"):
        MailboxLayout(scratch={"a": 1}, peer={"inbox": 1}).offset("inbx")


def test_a_kernel_that_is_called_without_a_grid():
    @kernel
    def nothing(x):
        pass

    with pytest.raises(TypeError, match=r"<Kernel nothing> was called .* nothing\[grid, block\]"):
        nothing(1)


def test_a_one_dimensional_array_is_seven_parameters():
    array = Words(0x1000, 12)
    kind = _type_of(array)
    assert kind == types.uint32[::1]
    values = [struct.unpack("<q", bytes(value))[0] for value in _parameters(kind, array)]
    assert values == [0, 0, 12, 4, 0x1000, 12, 4]


@pytest.mark.parametrize(
    ("value", "kind", "raw"),
    [
        (np.uint32(7), types.uint32, struct.pack("<I", 7)),
        (np.int32(-1), types.int32, struct.pack("<i", -1)),
        (np.uint64(2**63), types.uint64, struct.pack("<Q", 2**63)),
        (np.float32(0.5), types.float32, struct.pack("<f", 0.5)),
        (-5, types.int64, struct.pack("<q", -5)),
        (0.25, types.float64, struct.pack("<d", 0.25)),
        (True, types.boolean, b"\1"),
        (np.int8(-3), types.int8, struct.pack("<b", -3)),
    ],
)
def test_scalars_keep_their_type(value, kind, raw):
    assert _type_of(value) == kind
    assert [bytes(each) for each in _parameters(kind, value)] == [raw]


def test_strides_tell_contiguous_arrays_from_others():
    array = Words(0x1000, 12)
    array.__cuda_array_interface__ |= {"shape": (3, 4), "strides": (16, 4)}
    assert _type_of(array).layout == "C"
    array.__cuda_array_interface__ |= {"strides": (4, 12)}
    assert _type_of(array).layout == "A"
    values = [struct.unpack("<q", bytes(value))[0] for value in _parameters(_type_of(array), array)]
    assert values == [0, 0, 12, 4, 0x1000, 3, 4, 4, 12]


def test_what_is_no_argument():
    with pytest.raises(TypeError, match=r"lamport_numba\.to_device"):
        _type_of(np.zeros(3))
    with pytest.raises(TypeError, match="type str"):
        _type_of("text")


def test_grids_and_blocks():
    assert _extent(3) == (3, 1, 1)
    assert _extent((2, 5)) == (2, 5, 1)
    assert _extent(np.int64(4)) == (4, 1, 1)
    for wrong in (0, (1, 0), (1, 2, 3, 4), ()):
        with pytest.raises(ValueError, match="one to three numbers"):
            _extent(wrong)


def test_a_kernel_compiles_for_values_or_types():
    @kernel(launch_bounds=128)
    def scale(x, factor):
        i = cuda.grid(1)
        if i < x.size:
            x[i] *= factor

    text = scale.ptx(types.float32[::1], types.float32)
    assert text == scale.ptx(types.float32[::1], np.float32(3))
    assert ".maxntid 128" in text
    assert ".visible .entry numba_scale(" in text
    assert "_ZN" not in text
    assert Kernel(scale.function, launch_bounds=128).ptx(types.float32[::1], types.float32) == text, "for caches"
    assert repr(scale) == "<Kernel scale>"
    with pytest.raises(ValueError, match=r"kernel\[grid, block"):
        scale[3]


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100", "sm_120"])
def test_the_linker_makes_machine_code_for_a_gpu(architecture):
    """Which the emulated device does not need, and a GPU whose driver is older than numba's PTX does."""

    @kernel
    def fill(x):
        x[cuda.grid(1)] = 1.0

    assert _linked(fill.ptx(types.float32[::1]), architecture).startswith(b"\x7fELF")
