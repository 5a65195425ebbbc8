"""The all-gather's interface: what it takes, what it refuses and how, and what it promises about buffers and errors."""

import gc
import threading
import warnings

import numpy as np
import pytest

from lamport_numba import LamportAllGather, device_array, driver, emulator, run_ranks, to_device
from lamport_numba.errors import ClosedError, PeerTimeout, SentinelWarning, SetupError

PEER = {"transport": "peer", "timeout": 20.0}


def ranks(n, function, **settings):
    return run_ranks(n, function, timeout=60, **settings)


def part(rank, count, dtype=np.float32, call=0):
    return (np.arange(count) + 1000 * rank + 100_000 * call).astype(dtype)


def whole(world, count, dtype=np.float32, call=0):
    return np.concatenate([part(rank, count, dtype, call) for rank in range(world)])


def test_attributes_and_a_new_output():
    def rank(comm):
        with LamportAllGather(comm, 256, **PEER) as gather:
            assert (gather.rank, gather.world_size, gather.rank_capacity_bytes) == (comm.rank, 3, 256)
            assert gather.transport == "peer"
            out = gather(to_device(part(comm.rank, 8)))
            assert out.dtype == np.float32
            np.testing.assert_array_equal(out.copy_to_host(), whole(3, 8))

    ranks(3, rank)


@pytest.mark.parametrize(("world", "transport"), [(1, "peer"), (2, "peer"), (3, "multicast")])
def test_auto_takes_multicast_for_more_than_two_ranks(world, transport):
    def rank(comm):
        with LamportAllGather(comm, 64, timeout=20) as gather:
            return gather.transport

    assert ranks(world, rank) == [transport] * world


def test_accepts_by_size_alone():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            return [
                gather.accepts(device_array((size,), dtype))
                for dtype, sizes in {"u1": (0, 1, 15, 16, 17, 32, 64, 65, 80), "f8": (0, 1, 2, 8, 10)}.items()
                for size in sizes
            ]

    expected = [False, False, False, True, False, True, True, False, False, False, False, True, True, False]
    assert ranks(2, rank) == [expected] * 2


def test_a_refusal_names_the_size_and_the_limit():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            with pytest.raises(ValueError, match=r"80 bytes.*64"):
                gather(device_array((20,), np.float32))
            with pytest.raises(ValueError, match=r"12 bytes.*16.*TaggedAllGather takes any number"):
                gather(device_array((3,), np.float32))

    ranks(2, rank)


@pytest.mark.parametrize("capacity", [0, -16, 8, 17, 2.0, True, "64"])
def test_a_capacity_must_be_a_positive_multiple_of_16(capacity):
    def rank(comm):
        with pytest.raises(ValueError, match="multiple of 16"):
            LamportAllGather(comm, capacity, **PEER)

    ranks(2, rank)


def test_ranks_that_are_built_differently_all_refuse():
    def rank(comm):
        with pytest.raises(SetupError, match=r"rank 0: .*64.*rank 1: .*128"):
            LamportAllGather(comm, 64 * (comm.rank + 1), **PEER)

    ranks(2, rank)


@pytest.mark.parametrize("dtype", ["f8", "i4", "u8", "c8", "?"])
def test_a_dtype_that_the_sentinel_can_damage_warns_once(dtype):
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            x = device_array((64 // np.dtype(dtype).itemsize,), dtype)
            for _ in range(2):
                gather(x).copy_to_host()

    with pytest.warns(SentinelWarning, match="TaggedAllGather") as caught:
        ranks(2, rank)
    said = [str(warning.message) for warning in caught if warning.category is SentinelWarning]
    assert sorted(text.split(":")[0] for text in said) == ["rank 0", "rank 1"]


@pytest.mark.parametrize(("dtype", "options"), [("f4", {}), ("f2", {}), ("f8", {"raw_words": True})])
def test_safe_dtypes_and_raw_words_do_not_warn(dtype, options):
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER, **options) as gather:
            gather(device_array((8,), dtype)).copy_to_host()

    with warnings.catch_warnings():
        warnings.simplefilter("error", SentinelWarning)
        ranks(2, rank)


class Interface:
    """An array of some other library, by its interface alone."""

    def __init__(self, array, **changes):
        self.array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


@pytest.mark.parametrize(
    "changes",
    [{"version": 2, "strides": (4,)}, {"version": 3, "stream": 1}, {"version": 3, "strides": None, "stream": None}],
)
def test_arrays_of_other_libraries(changes):
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            x = to_device(part(comm.rank, 16))
            out = gather(Interface(x, **changes))
            np.testing.assert_array_equal(out.copy_to_host(), whole(2, 16))

    ranks(2, rank)


def test_a_read_only_input_is_taken_and_a_read_only_output_refused():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            x, out = to_device(part(comm.rank, 16)), device_array((32,), np.float32)
            address = out.__cuda_array_interface__["data"][0]
            with pytest.raises(ValueError, match=r"out.*read-only"):
                gather(x, out=Interface(out, data=(address, True)))
            read_only = Interface(x, data=(x.__cuda_array_interface__["data"][0], True))
            np.testing.assert_array_equal(gather(read_only, out=out).copy_to_host(), whole(2, 16))

    ranks(2, rank)


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (np.zeros(16, np.float32), TypeError, "to_device"),
        ([1.0, 2.0], TypeError, "to_device"),
        ("text", TypeError, "expected a device array"),
        (None, TypeError, "expected a device array"),
    ],
)
def test_what_is_no_device_array_is_refused_with_advice(wrong, kind, says):
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, pytest.raises(kind, match=says):
            gather(wrong)

    ranks(2, rank)


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", "f4"), ("b", "f4")])])
def test_objects_and_structures_are_refused(dtype):
    with pytest.raises(TypeError, match="dtype"):
        to_device(np.zeros(4, dtype))


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (lambda: device_array((31,), np.float32), r"shape \(31,\).*\(32,\)"),
        (lambda: device_array((2, 16), np.float32), r"shape"),
        (lambda: device_array((32,), np.float64), "dtype"),
        (lambda: device_array((64,), np.float32)[::2], "contiguous"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(out, says):
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            x = to_device(part(comm.rank, 16))
            with pytest.raises(ValueError, match=says):
                gather(x, out=out())
            np.testing.assert_array_equal(gather(x).copy_to_host(), whole(2, 16))

    ranks(2, rank)


def test_an_array_of_another_device_is_refused():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            x = device_array((16,), np.float32, device=1 - gather.device)
            with pytest.raises(ValueError, match="device"):
                gather(x)

    ranks(2, rank)


@pytest.mark.parametrize("stream", [True, False, np.True_, "0", 1.5])
def test_what_is_no_stream_is_refused(stream):
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather, pytest.raises(TypeError, match="stream"):
            gather(to_device(part(comm.rank, 16)), stream=stream)

    ranks(2, rank)


def test_close_is_idempotent_and_a_closed_one_refuses():
    def rank(comm):
        gather = LamportAllGather(comm, 64, **PEER)
        x = to_device(part(comm.rank, 16))
        gather(x)
        gather.close()
        gather.close()
        for action in (lambda: gather(x), gather.check, gather.reset):
            with pytest.raises(ClosedError, match="closed"):
                action()

    ranks(2, rank)


def test_an_exception_on_all_ranks_passes_through_the_context_manager():
    def rank(comm):
        with pytest.raises(KeyError, match="mine"), LamportAllGather(comm, 64, **PEER) as gather:
            raise KeyError("mine")
        with pytest.raises(ClosedError):
            gather(to_device(part(comm.rank, 16)))
        with LamportAllGather(comm, 64, **PEER) as again:
            np.testing.assert_array_equal(again(to_device(part(comm.rank, 16))).copy_to_host(), whole(2, 16))

    ranks(2, rank)


def test_check_names_the_missing_rank():
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer", timeout=0.5)
        x = to_device(part(comm.rank, 16))
        gather(x).copy_to_host()
        gather.check()
        if comm.rank != 1:
            gather(x).copy_to_host()  # ends by its deadline
            with pytest.raises(PeerTimeout, match="rank 1") as late:
                gather.check()
            assert late.value.rank == 1
            assert late.value.call == 1
            assert late.value.seconds >= 0.5
        comm.Barrier()
        gather.abandon()

    ranks(3, rank)


def test_the_copy_kernel_is_loaded_once_for_all_objects():
    def loads():
        return sum(number for name, number in emulator.calls().items() if name.startswith("cuModuleLoad"))

    def rank(comm):
        found = []
        for _ in range(3):
            with LamportAllGather(comm, 64, **PEER) as gather:
                before = loads()
                gather(device_array((8,), np.float32)[::2])
                found.append(loads() - before)
        return found

    (first, *later), *_ = run_ranks(1, rank)
    assert first <= 1
    assert later == [0, 0]


def test_buffers_live_until_the_call_has_passed():
    """Inputs and outputs that the caller lets go of at once are not reused by what he allocates next."""

    def rank(comm):
        outs = []
        with LamportAllGather(comm, 4096, **PEER) as gather:
            for call in range(40):
                outs.append(gather(to_device(part(comm.rank, 1024, call=call))))
                gc.collect()
                device_array((1024,), np.float32).copy_to_device(np.full(1024, -1, np.float32))
            for call, out in enumerate(outs):
                np.testing.assert_array_equal(out.copy_to_host(), whole(2, 1024, call=call))

    ranks(2, rank)


def test_a_call_from_a_fresh_host_thread():
    def rank(comm):
        with LamportAllGather(comm, 64, **PEER) as gather:
            x, out = to_device(part(comm.rank, 16)), device_array((32,), np.float32)
            caught = []

            def call():
                try:
                    gather(x, out=out)
                except BaseException as error:
                    caught.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join(30)
            assert not caught
            np.testing.assert_array_equal(out.copy_to_host(), whole(2, 16))

    ranks(2, rank)


def test_the_context_that_was_current_is_current_again():
    def rank(comm):
        drv = driver.select()
        with LamportAllGather(comm, 64, **PEER) as gather:
            other = 1 - gather.device
            x = to_device(part(comm.rank, 16), device=gather.device)
            with drv.current(other):
                out = gather(x)
                assert drv.current_device() == other
            np.testing.assert_array_equal(out.copy_to_host(), whole(2, 16))

    ranks(2, rank)


def test_measure_gives_a_table_by_size():
    def rank(comm):
        with LamportAllGather(comm, 1024, transport="measure", timeout=20) as gather:
            for count in (4, 64, 256):
                np.testing.assert_array_equal(gather(to_device(part(comm.rank, count))).copy_to_host(), whole(3, count))
            return gather.transport

    tables = ranks(3, rank)
    assert tables[0] == tables[1] == tables[2]
    assert max(tables[0]) == 1024
    assert set(tables[0].values()) <= {"peer", "multicast"}
