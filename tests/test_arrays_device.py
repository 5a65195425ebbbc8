"""Arrays of the emulated device: what numba's device arrays offer, with the same names."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

import lamport_numba
from lamport_numba import driver
from lamport_numba.arrays import DeviceArray
from lamport_numba.driver import structs
from lamport_numba.errors import DriverError
from lamport_numba.intake import as_buffer


@pytest.fixture(scope="module")
def drv():
    return driver.select("emulated")


@pytest.fixture
def to_device(drv):
    return lambda x, **options: lamport_numba.to_device(x, drv=drv, **options)


def numbers(*shape, dtype="f4"):
    """Elements that differ by position."""
    return (np.arange(np.prod(shape, dtype=int)) + 1).astype(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [*"?bhilqBHILQefdgFDG", "S5", "U3", "M8[ns]", "m8[s]", "V7", ">f4"])
def test_round_trip_of_every_dtype(to_device, dtype):
    dtype = np.dtype(dtype)
    host = np.frombuffer(np.random.default_rng(1).bytes(12 * dtype.itemsize), dtype).reshape(3, 4)
    array = to_device(host)
    assert isinstance(array, DeviceArray)
    assert (array.shape, array.dtype, array.strides, array.size, array.ndim) == (
        host.shape,
        host.dtype,
        host.strides,
        host.size,
        2,
    )
    back = array.copy_to_host()
    assert back.dtype == dtype
    assert back.tobytes() == host.tobytes()


def test_narrow_floats(to_device):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        host = numbers(7).astype(getattr(ml_dtypes, name))
        array = to_device(host)
        assert array.dtype == host.dtype
        assert array.copy_to_host().tobytes() == host.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4, 5)])
def test_shapes(to_device, shape):
    host = numbers(*shape)
    array = to_device(host)
    assert array.shape == shape
    assert np.array_equal(array.copy_to_host(), host)


def test_from_lists_and_scalars(to_device):
    assert np.array_equal(to_device([[1, 2], [3, 4]]).copy_to_host(), [[1, 2], [3, 4]])
    assert to_device(np.float32(2.5)).copy_to_host() == 2.5


def test_orders(to_device):
    fortran = np.asfortranarray(numbers(3, 4))
    assert to_device(fortran).strides == fortran.strides
    assert np.array_equal(to_device(fortran).copy_to_host(), fortran)
    gaps = numbers(6, 4)[::2, ::-1]
    assert to_device(gaps).strides == (16, 4)
    assert np.array_equal(to_device(gaps).copy_to_host(), gaps)


def test_objects_and_structures_are_refused(to_device, drv):
    for bad in (np.array([object()]), np.zeros(2, [("a", "i4")])):
        with pytest.raises(TypeError, match="x has"):
            to_device(bad)
        with pytest.raises(TypeError, match="dtype has"):
            lamport_numba.device_array(2, bad.dtype, drv=drv)


def test_device_array(drv):
    array = lamport_numba.device_array((2, 3), np.float16, drv=drv)
    assert (array.shape, array.dtype, array.nbytes) == ((2, 3), np.float16, 12)
    assert lamport_numba.device_array(5, "f4", drv=drv).shape == (5,)
    assert array.address % 256 == 0
    with pytest.raises(ValueError, match="negative"):
        lamport_numba.device_array(-1, "f4", drv=drv)
    with pytest.raises(TypeError):
        lamport_numba.device_array(2.5, "f4", drv=drv)


def test_copy_into(to_device):
    array = to_device(numbers(3, 4))
    into = np.zeros((3, 4), "f4")
    assert array.copy_to_host(into) is into
    assert np.array_equal(into, numbers(3, 4))
    array.copy_to_device(into * 2)
    assert np.array_equal(array.copy_to_host(), numbers(3, 4) * 2)
    other = to_device(np.zeros((3, 4), "f4"))
    other.copy_to_device(array)
    assert np.array_equal(other.copy_to_host(), numbers(3, 4) * 2)
    for bad in (np.zeros((4, 3), "f4"), np.zeros((3, 4), "f8")):
        with pytest.raises(ValueError, match="expected"):
            array.copy_to_device(bad)
        with pytest.raises(ValueError, match="expected"):
            array.copy_to_host(bad)


VIEWS = [
    np.s_[1],
    np.s_[-1],
    np.s_[1:],
    np.s_[::2],
    np.s_[::-1],
    np.s_[:, 1],
    np.s_[..., 1],
    np.s_[1, ...],
    np.s_[None, :, 2:4],
    np.s_[2:0:-1, ::-2],
    np.s_[1:1],
    np.s_[...],
    np.s_[1, 2, ...],
    (),
]


@pytest.mark.parametrize("key", VIEWS, ids=str)
def test_views(to_device, key):
    host = numbers(4, 5)
    array = to_device(host)
    view = array[key]
    assert view.shape == host[key].shape
    if view.size:
        assert view.strides == host[key].strides
        assert view.address - array.address == host[key].__array_interface__["data"][0] - host.ctypes.data
    assert np.array_equal(view.copy_to_host(), host[key])


@pytest.mark.parametrize("key", VIEWS, ids=str)
def test_assignment_to_views(to_device, key):
    host = numbers(4, 5)
    array = to_device(host)
    array[key] = -7
    host[key] = -7
    assert np.array_equal(array.copy_to_host(), host)
    values = -numbers(*host[key].shape)
    array[key] = values
    host[key] = values
    assert np.array_equal(array.copy_to_host(), host)


def test_element(to_device):
    value = to_device(numbers(4, 5))[2, 3]
    assert value == numbers(4, 5)[2, 3]
    assert isinstance(value, np.float32)


@pytest.mark.parametrize("key", [[0, 1], np.array([0]), True, (np.True_, 1), "a", 1.5])
def test_indices_that_would_copy_are_refused(to_device, key):
    with pytest.raises(TypeError, match="indexed by integers"):
        to_device(numbers(4, 5))[key]


def test_index_out_of_bounds(to_device):
    with pytest.raises(IndexError):
        to_device(numbers(4, 5))[4]


def test_other_views(to_device):
    host = numbers(2, 1, 6)
    array = to_device(host)
    pairs = {
        "T": (array.T, host.T),
        "transpose": (array.transpose((2, 0, 1)), host.transpose((2, 0, 1))),
        "reshape": (array.reshape(3, 4), host.reshape(3, 4)),
        "reshape tuple": (array.reshape((4, -1)), host.reshape((4, -1))),
        "ravel": (array.ravel(), host.ravel()),
        "view": (array.view("i4"), host.view("i4")),
        "halves": (array.view("u2"), host.view("u2")),
        "squeeze": (array.squeeze(), host.squeeze()),
    }
    for name, (view, expected) in pairs.items():
        assert np.array_equal(view.copy_to_host(), expected), name
        assert view.dtype == expected.dtype
    with pytest.raises(ValueError, match="without a copy"):
        array.T.reshape(12)
    with pytest.raises(TypeError, match="objects"):
        array.view(object)


def test_length(to_device):
    assert len(to_device(numbers(4, 5))) == 4
    with pytest.raises(TypeError, match="0-d"):
        len(to_device(1.0))


def test_interface(to_device, drv):
    array = to_device(numbers(4, 6))
    found = as_buffer(array, drv, array.device)
    assert found == (array.address, (4, 6), None, np.dtype("f4"), 96, False, None, array)
    assert as_buffer(array.T, drv, array.device).strides == (4, 24)
    assert as_buffer(array.reshape(24)[1:], drv, array.device).address == array.address + 4
    assert as_buffer(array[:, 0:0], drv, array.device).nbytes == 0


def test_memory_lives_as_long_as_a_view(to_device, drv):
    array = to_device(numbers(1000))
    view, address = array[10:20], array.address
    del array
    gc.collect()
    assert np.array_equal(view.copy_to_host(), numbers(1000)[10:20])
    assert as_buffer(view, drv, view.device).address == address + 40
    del view
    gc.collect()
    with drv.current(0), pytest.raises(DriverError):
        drv.call("cuMemFree", address)  # it was freed


def test_other_devices_memory_is_refused(drv):
    if drv.device_count() < 2:
        from lamport_numba.emulator import configure

        configure(devices=2)
    array = lamport_numba.to_device(numbers(4), drv=drv, device=1)
    assert array.device == 1
    assert np.array_equal(array.copy_to_host(), numbers(4))
    assert as_buffer(array, drv, 1).nbytes == 16
    with pytest.raises(ValueError, match="x is on device 1; expected device 0"):
        as_buffer(array, drv, 0, name="x")


def test_memory_that_the_driver_does_not_know_is_refused(drv):
    host = np.zeros(4, "f4")
    forged = SimpleNamespace(__cuda_array_interface__={**host.__array_interface__, "version": 3})
    with drv.current(0), pytest.raises(ValueError, match="not memory that the driver knows"):
        as_buffer(forged, drv, 0)


def test_the_former_context_is_restored(to_device, drv):
    before = int(drv.call("cuCtxGetCurrent"))
    to_device(numbers(4)).copy_to_host()
    assert int(drv.call("cuCtxGetCurrent")) == before


def test_copies_on_a_stream(to_device, drv):
    array = to_device(numbers(64))
    with drv.current(array.device):
        stream = drv.call("cuStreamCreate", structs.CUstream_flags.CU_STREAM_NON_BLOCKING)
        array.copy_to_device(-numbers(64), stream=stream)
        assert np.array_equal(array.copy_to_host(stream=stream), -numbers(64))
        drv.call("cuStreamDestroy", stream)
    assert np.array_equal(to_device(numbers(3), stream=2).copy_to_host(), numbers(3))
