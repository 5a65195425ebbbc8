"""Arguments that are not accepted: the error names the rank, the value and what was expected, on every rank."""

import re

import numpy as np
import pytest
from helpers.ranks import OnStream, synchronise

from lamport_numba import LamportAllGather, TaggedAllGather, device_array, emulator, run_ranks, to_device
from lamport_numba.collectives.channel import LamportChannel
from lamport_numba.collectives.tagged import TaggedChannel
from lamport_numba.errors import PeerTimeout, SetupError

FITS = {"rank_capacity_bytes": 64, "transport": "peer"}
BAD = [
    ("rank_capacity_bytes", 1 << 40, ValueError, "at most 2147483136 in a world of 2"),
    ("rank_capacity_bytes", 20, ValueError, "a positive multiple of 16"),
    ("rank_capacity_bytes", "64", ValueError, "a positive multiple of 16"),
    ("device", "cuda", TypeError, "the ordinal of a device"),
    ("device", True, TypeError, "the ordinal of a device"),
    ("device", 0.0, TypeError, "the ordinal of a device"),
    ("device", 99, ValueError, "an ordinal from 0 to"),
    ("device", -1, ValueError, "an ordinal from 0 to"),
    ("transport", None, ValueError, "one of 'auto', 'peer'"),
    ("transport", "nvlink", ValueError, "one of 'auto', 'peer'"),
    ("timeout", "3", TypeError, "a number of seconds"),
    ("timeout", True, TypeError, "a number of seconds"),
    ("timeout", float("nan"), ValueError, "seconds, above 0"),
    ("timeout", 10**400, ValueError, "seconds, above 0"),
    ("share_device", "x", TypeError, "None, True or False"),
    ("compare_calls", "x", TypeError, "None, True or False"),
    ("pdl", "x", TypeError, "expected True or False"),
    ("pdl", None, TypeError, "expected True or False"),
    ("raw_words", 2, TypeError, "expected True or False"),
]


bad = pytest.mark.parametrize(("name", "value", "kind", "expected"), BAD, ids=lambda value: str(value)[:20])


def refusal(comm, name, value):
    """What a constructor with this argument raises; collective."""
    with pytest.raises((TypeError, ValueError, SetupError)) as caught:
        LamportAllGather(comm, **{**FITS, name: value})
    return caught.value


@bad
def test_an_argument_of_one_rank(name, value, kind, expected):
    good = {"pdl": True, "raw_words": False}
    mine, theirs = run_ranks(
        2,
        lambda comm: refusal(comm, name, FITS.get(name, good.get(name)) if comm.rank else value),
        timeout=30,
    )
    assert type(mine) is kind
    assert type(theirs) is SetupError
    assert theirs.rank == 0
    assert str(mine).startswith(f"rank 0: {name} is {value!r}")
    assert expected in str(mine)
    assert str(theirs) == str(mine).replace("rank 0: ", "rank 0 failed at 'check the arguments': ", 1)


@pytest.mark.parametrize("value", [True, False, 1, 0, np.True_])
def test_flags_that_are_accepted(value):
    def rank(comm):
        with LamportAllGather(comm, 64, transport="peer", pdl=value) as gather:
            assert gather._pdl is bool(value)

    run_ranks(1, rank, timeout=30)


@pytest.mark.parametrize("channel", [LamportChannel, TaggedChannel])
@pytest.mark.parametrize("world", [1, 2, 3, 72])
def test_the_largest_capacity_is_counted_in_32_bits(channel, world):
    def generation(packs):
        return world * (-(-packs // 32) * 32 + 1) * channel.slot_bytes

    packs = channel.largest_capacity(world) // 16
    assert generation(packs) < 1 << 32 <= generation(packs + 1)


def test_memory_that_is_not_there_is_named_with_its_size():
    def rank(comm):
        if comm.rank == 0:
            emulator.inject(call="cuMemCreate", rank=1, code=2, times=1)
        comm.Barrier()
        with pytest.raises(SetupError, match=r"rank 1 failed at 'create memory'.*\b\d+ bytes were asked for") as caught:
            LamportAllGather(comm, 1 << 20, transport="peer")
        with LamportAllGather(comm, 1 << 20, transport="peer") as gather:
            assert f" {gather._channels['peer'].memory.nbytes} bytes were asked for" in str(caught.value)

    run_ranks(2, rank, timeout=30)


def test_a_world_that_is_too_large_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setattr("lamport_numba.collectives.arguments.MAX_WORLD", 2)

    def rank(comm):
        with pytest.raises(ValueError, match=f"^rank {comm.rank}: the communicator has 3 ranks; expected at most 2"):
            LamportAllGather(comm, 64, transport="peer")

    run_ranks(3, rank, timeout=30)


def test_a_context_that_cannot_be_had_on_one_rank_is_told_to_all(monkeypatch):
    from lamport_numba.driver import Driver

    primary = Driver.primary

    def without(self, device):
        return primary(self, device) if self.rank != 1 else self.check("cuDevicePrimaryCtxRetain", (46,))

    def rank(comm):
        with pytest.raises(SetupError, match=r"rank 1 failed at .*cuDevicePrimaryCtxRetain.*46"):
            LamportAllGather(comm, 64, transport="peer")

    monkeypatch.setattr(Driver, "primary", without)
    run_ranks(2, rank, timeout=30)


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"stream": 12345}, ValueError, r"stream is 12345 \(0x3039\).*CUDA_ERROR_INVALID_HANDLE.*expected None"),
        ({"stream": "x"}, TypeError, "stream is of type str"),
        ({"array": 12345}, ValueError, r"array's own stream is 12345 .*which is no stream of this device"),
        ({"out": 12345}, ValueError, r"out's own stream is 12345 .*which is no stream of this device"),
        ({"array": object()}, TypeError, "array is of type object; expected a device array"),
        ({"out": np.zeros(4)}, TypeError, "out is a numpy array in host memory"),
    ],
    ids=["invalid handle", "no stream", "array's stream", "out's stream", "no array", "out on the host"],
)
def test_a_call_s_argument_names_its_rank(options, kind, says):
    def rank(comm):
        gather = LamportAllGather(comm, 64, transport="peer")
        arguments = {"array": to_device(np.zeros(4, np.float32)), **options}
        for name, value in arguments.items():
            if name != "stream" and isinstance(value, int):
                arguments[name] = OnStream(device_array(4 if name == "array" else 8, np.float32), value)
        with pytest.raises(kind, match=f"^rank {comm.rank}: {says}"):
            gather(**arguments)
        assert gather._refusals == 1  # as on the other rank, so that close agrees
        gather.close()

    run_ranks(2, rank, timeout=30)


def test_the_device_of_an_array():
    for device, kind in (("x", TypeError), (True, TypeError), (99, ValueError)):
        says = f"^device is {re.escape(repr(device))}.*expected None or"
        with pytest.raises(kind, match=says):
            to_device([1.0], device=device)
        with pytest.raises(kind, match=says):
            device_array(1, "f4", device=device)


# repr


def test_repr_says_what_it_is_and_whether_it_can_be_used():
    def rank(comm):
        gather = TaggedAllGather(comm, 64, transport="peer", timeout=0.3)
        whole = f"<TaggedAllGather rank {comm.rank} of 2, transport 'peer', capacity 64 bytes a rank, "
        assert repr(gather) == whole + "usable>"
        x, y = to_device(np.zeros(4, np.float32)), device_array(8, np.float32)
        call = gather.prepare(x, y)
        assert repr(call) == f"<PreparedCall of 16 bytes, dtype <f4, shape (4,), on stream 0x0, of {gather!r}>"
        if comm.rank == 0:
            call()
        synchronise()
        comm.Barrier()
        with pytest.raises(PeerTimeout) as caught:
            gather.check()
        assert repr(gather) == whole + f"failed: {caught.value}>"
        gather.reset()
        assert repr(gather) == whole + "usable>"
        assert "of before a reset" in repr(call)
        gather.close()
        assert repr(gather) == whole + "not usable: it is closed>"

    run_ranks(2, rank, timeout=60)


def test_repr_of_what_was_never_built():
    assert "not usable: its construction did not complete" in repr(object.__new__(LamportAllGather))
