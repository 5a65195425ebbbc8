"""What is taken in as an array of the device, and what is refused; no device is needed to decide."""

import array

import numpy as np
import pytest
from helpers.dlpack_producer import Producer
from helpers.scripted_driver import SUCCESS, scripted

from lamport_numba import dlpack
from lamport_numba.driver import structs
from lamport_numba.intake import as_buffer, byte_span, checked_dtype, contiguous_strides, sentinel_safe

ADDRESS = 0x7000_0000_0000
DRV, _ = scripted()


class Interface:
    """An object with the interface that it was given."""

    def __init__(self, **described):
        self.__cuda_array_interface__ = described


def interface(**changes):
    described = {"shape": (2, 3), "typestr": "<f4", "data": (ADDRESS, False), "version": 3, **changes}
    return Interface(**{key: value for key, value in described.items() if value is not Ellipsis})


def test_plain():
    obj = interface()
    found = as_buffer(obj, DRV)
    assert found == (ADDRESS, (2, 3), None, np.dtype("f4"), 24, False, None, obj)
    assert found.owner is obj


def test_frozen():
    with pytest.raises(AttributeError):
        as_buffer(interface(), DRV).address = 5


@pytest.mark.parametrize("version", [2, 3])
def test_versions(version):
    assert as_buffer(interface(version=version), DRV).nbytes == 24


@pytest.mark.parametrize("version", [0, 1, 4, None, "3", 3.0, ...])
def test_other_versions_are_refused(version):
    with pytest.raises(TypeError, match="version"):
        as_buffer(interface(version=version), DRV)


CODES = "?bhilqBHILQefdgFDG"


@pytest.mark.parametrize("dtype", [*CODES, "S5", "U3", "M8[ns]", "m8[s]", "V2", "V7", ">f4", ">i2"])
def test_every_dtype(dtype):
    dtype = np.dtype(dtype)
    found = as_buffer(interface(typestr=dtype.str), DRV)
    assert found.dtype == dtype
    assert found.nbytes == 6 * dtype.itemsize


def test_numpy_int_lengths_are_integers():
    found = as_buffer(interface(shape=[np.int64(2), np.int32(3)], data=[np.uint64(ADDRESS), 0]), DRV)
    assert found.shape == (2, 3)
    assert all(type(length) is int for length in found.shape)
    assert type(found.address) is int


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 3), (12, 4)), ((1, 3), (999, 4)), ((2, 1, 3), (12, -8, 4)), ((), ()), ((1,), (0,)), ((2, 3), None)],
)
def test_explicit_c_strides_are_contiguous(shape, strides):
    assert as_buffer(interface(shape=shape, strides=strides), DRV).strides is None


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), (4, 8)), ((3,), (8,)), ((3,), (-4,)), ((3,), (0,)), ((2, 3), (16, 4)), ((3,), (5,))]
)
def test_gaps_are_kept(shape, strides):
    found = as_buffer(interface(shape=shape, strides=strides), DRV)
    assert found.strides == strides
    assert found.nbytes == np.prod(shape) * 4


@pytest.mark.parametrize("offset", [2, 4, 8])
def test_misaligned(offset):
    assert as_buffer(interface(data=(ADDRESS + offset, False)), DRV).address == ADDRESS + offset


class Untouchable:
    """A pointer that must not be looked at."""

    def __index__(self):
        raise AssertionError("looked at the pointer")


@pytest.mark.parametrize("data", [(0, False), (None, False), (Untouchable(), False), None, ..., "x", (1,)])
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5, 2)])
def test_empty_whatever_the_pointer(shape, data):
    found = as_buffer(interface(shape=shape, data=data), DRV, 0)
    assert (found.address, found.nbytes, found.shape) == (0, 0, shape)


@pytest.mark.parametrize(
    "data", [None, ..., (ADDRESS,), ADDRESS, "xy", (ADDRESS, False, 1), ("a", False), (1.5, False)]
)
def test_bad_pointer(data):
    with pytest.raises(TypeError, match="__cuda_array_interface__"):
        as_buffer(interface(data=data), DRV)


@pytest.mark.parametrize("pointer", [0, -1, 2**64])
def test_impossible_pointer(pointer):
    with pytest.raises(ValueError, match="expected an address"):
        as_buffer(interface(data=(pointer, False)), DRV)


@pytest.mark.parametrize("mask", [interface(), 0, True])
def test_mask_is_refused(mask):
    with pytest.raises(TypeError, match="masked"):
        as_buffer(interface(mask=mask), DRV)


def test_absent_mask():
    assert as_buffer(interface(mask=None), DRV).nbytes == 24


@pytest.mark.parametrize(
    "typestr", ["|O8", "O", "<f3", "<f", "f4,f4", "3f4", "", "float32", 5, None, ..., "<t1", "V8(2)"]
)
def test_bad_typestr(typestr):
    with pytest.raises(TypeError, match=r"typestr|objects"):
        as_buffer(interface(typestr=typestr), DRV)


def test_structured_dtype_is_refused():
    fields = [("a", "<i4"), ("b", "<f4")]
    with pytest.raises(TypeError, match="structured"):
        as_buffer(interface(typestr="|V8", descr=fields), DRV)
    with pytest.raises(TypeError, match="structured"):
        checked_dtype(fields)
    with pytest.raises(TypeError, match="structured"):
        checked_dtype(("f4", (2,)))
    assert as_buffer(interface(descr=[("", "<f4")]), DRV).nbytes == 24


def test_object_dtype_is_refused():
    with pytest.raises(TypeError, match="Python objects"):
        checked_dtype(object)


@pytest.mark.parametrize("shape", [(-1,), (2, -3)])
def test_negative_length(shape):
    with pytest.raises(ValueError, match="negative"):
        as_buffer(interface(shape=shape), DRV)


@pytest.mark.parametrize("shape", [None, ..., 5, "23", (2.0,), (None,), {2: 3}])
def test_bad_shape(shape):
    with pytest.raises(TypeError, match="shape"):
        as_buffer(interface(shape=shape), DRV)


def test_strides_of_another_length():
    with pytest.raises(ValueError, match="1 strides for 2 dimensions"):
        as_buffer(interface(strides=(4,)), DRV)


@pytest.mark.parametrize(
    ("shape", "strides"), [((2**62,), None), ((2,), (2**63,)), ((2,), (-(2**50),)), ((2**40, 2**40), (0, 0))]
)
def test_leaving_the_address_space(shape, strides):
    with pytest.raises(ValueError, match="leaves the address space"):
        as_buffer(interface(shape=shape, strides=strides), DRV)


def test_too_many_dimensions():
    with pytest.raises(ValueError, match="at most 64"):
        as_buffer(interface(shape=(1,) * 65), DRV)


@pytest.mark.parametrize(("stream", "expected"), [(None, None), (1, 1), (2, 2), (12345, 12345), (0, 0)])
def test_producer_stream(stream, expected):
    assert as_buffer(interface(stream=stream), DRV).stream == expected


@pytest.mark.parametrize("stream", [True, "1", 1.5])
def test_bad_producer_stream(stream):
    with pytest.raises(TypeError, match="stream"):
        as_buffer(interface(stream=stream), DRV)


def test_read_only():
    assert as_buffer(interface(data=(ADDRESS, True)), DRV).readonly
    with pytest.raises(ValueError, match="out is read-only"):
        as_buffer(interface(data=(ADDRESS, True)), DRV, writable=True, name="out")


@pytest.mark.parametrize("described", [5, "x", [], None.__class__])
def test_interface_that_is_no_dict(described):
    obj = Interface()
    obj.__cuda_array_interface__ = described
    with pytest.raises(TypeError, match="expected a dict"):
        as_buffer(obj, DRV)


def test_class_instead_of_instance():
    class Array:
        @property
        def __cuda_array_interface__(self):
            return {}

    with pytest.raises(TypeError, match="expected a dict"):
        as_buffer(Array, DRV)


def test_refusal_of_the_producer_is_passed_on():
    class NeedsGrad:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("call detach() first")

    with pytest.raises(RuntimeError, match="detach"):
        as_buffer(NeedsGrad(), DRV)


def test_dlpack_where_the_interface_is_refused():
    class Both(Producer):
        @property
        def __cuda_array_interface__(self):
            raise TypeError("no bfloat16 in this interface")

    assert as_buffer(Both(ADDRESS, (4,), code=4, bits=16), DRV).dtype.itemsize == 2


@pytest.mark.parametrize(
    "host",
    [
        np.zeros(4, "f4"),
        np.float32(1),
        b"1234",
        bytearray(8),
        memoryview(b"12"),
        [1.0, 2.0],
        (1, 2),
        array.array("f", [1]),
    ],
)
def test_host_memory_says_how_to_move_it(host):
    with pytest.raises(TypeError, match=r"lamport_numba.to_device\(x\)"):
        as_buffer(host, DRV, name="x")


def test_numpy_array_that_the_device_can_read():
    class Mapped(np.ndarray):  # as numba's mapped and managed arrays are
        @property
        def __cuda_array_interface__(self):
            return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.ctypes.data, False), "version": 3}

    array = np.zeros(4, "f4").view(Mapped)
    assert as_buffer(array, DRV).address == array.ctypes.data


@pytest.mark.parametrize("other", [None, 5, 1.5, object(), "text", {}])
def test_no_array_at_all(other):
    with pytest.raises(TypeError, match="expected a device array"):
        as_buffer(other, DRV)


def test_raw_two_bytes_take_the_dtype_of_the_object():
    obj = interface(typestr="|V2")
    obj.dtype = np.dtype("V2", metadata={"name": "bfloat16"})
    assert sentinel_safe(as_buffer(obj, DRV).dtype)
    del obj.dtype
    assert not sentinel_safe(as_buffer(obj, DRV).dtype)


def test_narrow_floats_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtype = np.dtype(getattr(ml_dtypes, name))
        obj = interface(typestr=dtype.str)
        obj.dtype = dtype
        assert as_buffer(obj, DRV).dtype == dtype
        assert as_buffer(interface(typestr=dtype.str), DRV).dtype.itemsize == dtype.itemsize
        assert sentinel_safe(dtype) == (name == "bfloat16")


@pytest.mark.parametrize("dtype", CODES)
def test_sentinel_safe(dtype):
    assert sentinel_safe(np.dtype(dtype)) == (dtype in "ef")
    assert not sentinel_safe(np.dtype(">f4"))


# Whose memory


def on_device(ordinal):
    return scripted(
        cuDevicePrimaryCtxRetain=lambda device: (SUCCESS, 100 + device),
        cuPointerGetAttribute=(SUCCESS, 100 + ordinal),
        cuCtxGetDevice=(SUCCESS, ordinal),
    )[0]


def test_device_is_checked():
    assert as_buffer(interface(), on_device(1), 1).nbytes == 24
    with pytest.raises(ValueError, match="x is on device 0; expected device 1"):
        as_buffer(interface(), on_device(0), 1, name="x")


def test_memory_of_no_context_is_taken():
    drv, _ = scripted(cuPointerGetAttribute=(SUCCESS, 0))  # a pool's, or a mapping
    assert as_buffer(interface(), drv, 1).nbytes == 24


def test_unknown_memory():
    drv, _ = scripted(cuPointerGetAttribute=(structs.CUresult.CUDA_ERROR_INVALID_VALUE, 0))
    with pytest.raises(ValueError, match="not memory that the driver knows"):
        as_buffer(interface(), drv, 0)


# DLPack


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack(versioned):
    producer = Producer(ADDRESS, (2, 3), versioned=versioned, byte_offset=64)
    found = as_buffer(producer, DRV)
    assert found[:7] == (ADDRESS + 64, (2, 3), None, np.dtype("f4"), 24, False, None)
    assert found.owner[0] is producer


@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_strides_count_elements(versioned):
    found = as_buffer(Producer(ADDRESS, (2, 3), strides=(1, 2), versioned=versioned), DRV)
    assert found.strides == (4, 8)
    assert as_buffer(Producer(ADDRESS, (2, 3), strides=(3, 1), versioned=versioned), DRV).strides is None
    assert as_buffer(Producer(ADDRESS, (3,), strides=(-1,), versioned=versioned), DRV).strides == (-4,)


def test_dlpack_scalar_and_empty():
    assert as_buffer(Producer(ADDRESS, ()), DRV).shape == ()
    assert as_buffer(Producer(0, (0, 3)), DRV).nbytes == 0


def test_dlpack_null():
    with pytest.raises(ValueError, match="expected an address"):
        as_buffer(Producer(0, (2,)), DRV)


@pytest.mark.parametrize(("flags", "readonly"), [(0, False), (1, True), (2, True), (3, True)])
def test_dlpack_flags(flags, readonly):
    assert as_buffer(Producer(ADDRESS, (2,), flags=flags), DRV).readonly == readonly


@pytest.mark.parametrize(
    ("code", "bits", "dtype"),
    [
        *((0, bits, f"i{bits // 8}") for bits in (8, 16, 32, 64)),
        *((1, bits, f"u{bits // 8}") for bits in (8, 16, 32, 64)),
        *((2, bits, f"f{bits // 8}") for bits in (16, 32, 64)),
        *((5, bits, f"c{bits // 8}") for bits in (64, 128)),
        (6, 8, "?"),
    ],
)
def test_dlpack_dtypes(code, bits, dtype):
    assert as_buffer(Producer(ADDRESS, (2,), code=code, bits=bits), DRV).dtype == np.dtype(dtype)


@pytest.mark.parametrize(("code", "bits"), [(4, 16), *((code, 8) for code in range(7, 15))])
def test_dlpack_narrow_floats(code, bits):
    found = as_buffer(Producer(ADDRESS, (2,), code=code, bits=bits), DRV).dtype
    assert found.itemsize == bits // 8
    assert sentinel_safe(found) == (code == 4)


def test_dlpack_float4_pairs_are_bytes():
    assert as_buffer(Producer(ADDRESS, (2,), code=17, bits=4, lanes=2), DRV).dtype.itemsize == 1


@pytest.mark.parametrize(
    ("code", "bits", "lanes"), [(2, 32, 4), (0, 4, 1), (3, 64, 1), (99, 32, 1), (2, 24, 1), (0, 0, 1)]
)
def test_dlpack_odd_dtypes(code, bits, lanes):
    with pytest.raises(TypeError, match="DLPack type"):
        as_buffer(Producer(ADDRESS, (2,), code=code, bits=bits, lanes=lanes), DRV)


@pytest.mark.parametrize("device", [dlpack.CPU, dlpack.CUDA_HOST])
def test_dlpack_on_the_host(device):
    producer = Producer(ADDRESS, (2,), device=(device, 0))
    with pytest.raises(TypeError, match="host memory"):
        as_buffer(producer, DRV)
    assert not producer.asked


def test_dlpack_on_another_kind_of_device():
    with pytest.raises(TypeError, match="DLPack type 10"):
        as_buffer(Producer(ADDRESS, (2,), device=(10, 0)), DRV)


def test_dlpack_on_another_device():
    with pytest.raises(ValueError, match="is on device 1; expected device 0"):
        as_buffer(Producer(ADDRESS, (2,), device=(dlpack.CUDA, 1)), on_device(1), 0)


@pytest.mark.parametrize(("stream", "asked"), [(0, 1), (1, 1), (2, 2), (12345, 12345)])
@pytest.mark.parametrize("versioned", [True, False])
def test_dlpack_producer_is_told_the_stream(stream, asked, versioned):
    producer = Producer(ADDRESS, (2,), versioned=versioned)
    as_buffer(producer, DRV, stream=stream)
    assert producer.asked == [asked]


def test_dlpack_producer_records_nothing_into_a_capture():
    producer = Producer(ADDRESS, (2,))
    as_buffer(producer, DRV, stream=12345, capturing=True)
    assert producer.asked == [-1]


def test_dlpack_of_a_later_major_version():
    with pytest.raises(TypeError, match=r"DLPack 2\.0"):
        as_buffer(Producer(ADDRESS, (2,), version=(2, 0)), DRV)


def test_dlpack_capsule_that_was_used():
    with pytest.raises(TypeError, match="no unused DLPack capsule"):
        as_buffer(Producer(ADDRESS, (2,), name=b"used_dltensor"), DRV)


def test_dlpack_without_a_capsule():
    class Broken(Producer):
        def __dlpack__(self, **options):
            return 5

    with pytest.raises(TypeError, match="no unused DLPack capsule"):
        as_buffer(Broken(ADDRESS, (2,)), DRV)


def test_dlpack_type_error_of_the_producer_itself():
    class Broken(Producer):
        def __dlpack__(self, **options):
            raise TypeError("not today")

    with pytest.raises(TypeError, match="not today"):
        as_buffer(Broken(ADDRESS, (2,)), DRV)


# Arithmetic


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4), (1, 1), (7, 1, 2)])
def test_contiguous_strides(shape):
    assert contiguous_strides(shape, 4) == np.zeros(shape, "f4").strides


def test_byte_span():
    assert byte_span((2, 3), None, 4) == (0, 24)
    assert byte_span((2, 3), (-12, 4), 4) == (-12, 12)
    assert byte_span((3,), (0,), 4) == (0, 4)
