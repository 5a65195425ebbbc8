"""The copy kernel: any view becomes the bytes of numpy's tobytes(). Runs on the device that the environment names."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamport_numba import driver, strided
from lamport_numba.arrays import to_device
from lamport_numba.collectives.launch import load
from lamport_numba.driver import structs
from lamport_numba.intake import as_buffer
from lamport_numba.strided import StridedCopy, needs_copy

STREAM = 2


@pytest.fixture(scope="module")
def drv():
    found = driver.select()
    with found.current(0):
        yield found


@pytest.fixture(scope="module")
def copy(drv):
    return StridedCopy(drv, load(drv, 0, "copy_strided.ptx").function)


def random_bytes(nbytes):
    return np.frombuffer(np.random.default_rng(nbytes).bytes(nbytes), np.uint8)


class View:
    """The view of device memory that ``model`` is of ``host``, whatever the strides; both hold the same bytes."""

    def __init__(self, drv, host, model):
        self.base = to_device(host.view(np.uint8).ravel(), drv=drv, device=0)
        self.nbytes = model.nbytes
        offset = model.__array_interface__["data"][0] - host.__array_interface__["data"][0]
        self.__cuda_array_interface__ = {
            "shape": model.shape,
            "strides": model.strides,
            "data": (as_buffer(self.base, drv).address + offset, True),
            "typestr": model.dtype.str,
            "version": 3,
        }


def gathered(drv, copy, host, model):
    """The bytes that the kernel makes of a view, between two guards that it must not touch."""
    view = View(drv, host, model)
    room = to_device(np.full(view.nbytes + 32, 0xA5, np.uint8), drv=drv, device=0)
    copy(as_buffer(view, drv, 0), as_buffer(room, drv).address + 16, STREAM)
    drv.call("cuStreamSynchronize", STREAM)
    found = room.copy_to_host().tobytes()
    assert found[:16] == found[-16:] == b"\xa5" * 16
    return found[16:-16]


VIEWS = {
    "transposed": lambda a: a.reshape(4, 6).T,
    "every second": lambda a: a[::2],
    "backwards": lambda a: a[::-1],
    "backwards by three": lambda a: a[20:3:-3],
    "column": lambda a: a.reshape(4, 6)[:, 2],
    "window": lambda a: a.reshape(4, 6)[1:3, 1:5],
    "whole": lambda a: a,
    "one": lambda a: a[5:6],
    "permuted": lambda a: a.reshape(2, 3, 4).transpose((1, 2, 0)),
    "turned": lambda a: a.reshape(2, 3, 4)[::-1, ::-1, ::-1].transpose((2, 1, 0)),
}


@pytest.mark.parametrize("offset", [0, 2, 4, 8, 1])
@pytest.mark.parametrize("itemsize", [1, 2, 3, 4, 8, 12, 16])
@pytest.mark.parametrize("name", VIEWS)
def test_copy(drv, copy, name, itemsize, offset):
    host = random_bytes(24 * itemsize + offset)
    model = VIEWS[name](host[offset:].view(f"V{itemsize}"))
    assert gathered(drv, copy, host, model) == model.tobytes()


@pytest.mark.parametrize("dtype", [*"?bhilqBHILQefdgFDG", "S5", "U3", "M8[ns]", "m8[s]", ">f4"])
def test_every_dtype(drv, copy, dtype):
    host = random_bytes(24 * np.dtype(dtype).itemsize).view(dtype).reshape(4, 6)
    assert gathered(drv, copy, host, host.T) == host.T.tobytes()


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((5, 3), (0, 4)),
        ((5, 3), (4, 0)),
        ((4, 4), (0, 0)),
        ((6, 5), (4, 4)),
        ((3, 2, 2), (8, 0, -4)),
        ((1, 7), (9999, 8)),
    ],
)
def test_broadcast_and_overlapping_views(drv, copy, shape, strides):
    host = random_bytes(256).view("f4")
    model = np.lib.stride_tricks.as_strided(host[4:], shape, strides)
    assert gathered(drv, copy, host, model) == model.tobytes()


@pytest.mark.parametrize("axes", [8, 9, 11])
def test_many_axes(drv, copy, axes):
    host = random_bytes(2**axes).reshape((2,) * axes)
    assert gathered(drv, copy, host, host.T) == host.T.tobytes()


def test_more_units_than_threads(drv, copy, monkeypatch):
    monkeypatch.setattr(strided, "_GRID", 3)  # a small grid does what 2 MiB of two-byte units would do
    host = random_bytes(20_000).view("u2").reshape(-1, 2)
    assert gathered(drv, copy, host, host.T) == host.T.tobytes()


def test_empty(drv, copy):
    host = np.zeros((4, 0), "f4")
    assert gathered(drv, copy, host, host.T) == b""


def test_target_must_be_aligned(drv, copy):
    buffer = as_buffer(to_device(np.zeros(8, "f4"), drv=drv, device=0), drv)
    with pytest.raises(ValueError, match="multiple of 16"):
        copy(buffer, buffer.address + 8, STREAM)


@pytest.mark.parametrize(("offset", "needed"), [(0, False), (2, True), (4, True), (8, True), (16, False)])
def test_needs_copy(drv, offset, needed):
    host = np.zeros(64, np.uint8)
    assert needs_copy(as_buffer(View(drv, host, host[offset:]), drv)) == needed
    assert needs_copy(as_buffer(View(drv, host, host[::2]), drv))


@given(
    itemsize=st.integers(1, 16),
    offset=st.integers(0, 15),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    data=st.data(),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_any_view(drv, copy, itemsize, offset, lengths, data):
    host = random_bytes(int(np.prod(lengths)) * itemsize + offset)
    order = data.draw(st.permutations(range(len(lengths))))
    key = tuple(slice(None, None, data.draw(st.sampled_from([1, 2, -1, -2]))) for _ in lengths)
    model = host[offset:].view(f"V{itemsize}").reshape(lengths).transpose(order)[key]
    assert gathered(drv, copy, host, model) == model.tobytes()


def test_in_a_graph(drv, copy):
    host = random_bytes(24 * 4).view("u4").reshape(4, 6)
    view = View(drv, host, host.T)
    room = to_device(np.zeros(24, "u4"), drv=drv, device=0)
    stream = drv.call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING)
    drv.call("cuStreamBeginCapture", stream, structs.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    copy(as_buffer(view, drv), as_buffer(room, drv).address, int(stream))
    graph = drv.call("cuStreamEndCapture", stream)
    runnable = drv.call("cuGraphInstantiate", graph, 0)
    for turn in range(3):
        view.base.copy_to_device((host + turn).view(np.uint8).ravel())
        drv.call("cuGraphLaunch", runnable, stream)
        drv.call("cuStreamSynchronize", stream)
        assert room.copy_to_host().tobytes() == (host + turn).T.tobytes()
    drv.call("cuGraphExecDestroy", runnable)
    drv.call("cuGraphDestroy", graph)
    drv.call("cuStreamDestroy", stream)


def test_a_wrong_stride_is_seen(drv, copy, monkeypatch):
    host = random_bytes(24 * 4).view("f4").reshape(4, 6)
    launch = copy._launch

    def wrong(source, target, units, unit, axes, stream):
        (length, stride), *rest = axes
        launch(source, target, units, unit, [(length, stride - unit), *rest], stream)

    monkeypatch.setattr(copy, "_launch", wrong)
    assert gathered(drv, copy, host, host.T) != host.T.tobytes()


def test_a_copy_runs_in_stream_order(drv, copy):
    """Each copy reads what the fill before it on the stream wrote, though the host waits for nothing between them."""
    host = np.zeros((16, 4), "u4")
    view = View(drv, host, host.T)
    rooms = to_device(np.zeros((20, 64), "u4"), drv=drv, device=0)
    source, target = as_buffer(view.base, drv).address, as_buffer(rooms, drv).address
    for turn in range(20):
        drv.call("cuMemsetD32Async", source, turn, 64, STREAM)
        copy(as_buffer(view, drv), target + turn * 256, STREAM)
    drv.call("cuStreamSynchronize", STREAM)
    assert np.array_equal(rooms.copy_to_host(), np.repeat(np.arange(20, dtype="u4")[:, None], 64, 1))
