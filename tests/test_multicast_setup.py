"""Multicast set-up and teardown: the documented order, retries in lockstep, and errors that say what is missing."""

import contextlib
import logging
import os

import pytest
from helpers import leaks, mpirun
from helpers.symmetric import Fresh, make, world

from lamport_numba import driver, emulator
from lamport_numba.emulator import CONFIG, faults
from lamport_numba.errors import DriverError, MulticastUnavailable, SetupError
from lamport_numba.symmetric import Communicator, choose_transport, multicast
from lamport_numba.symmetric.communicator import Communicator as Rendezvous
from lamport_numba.symmetric.ledger import Ledger, Turn

SWITCHES = [
    ("LAMPORT_NUMBA_DISABLE_MULTICAST", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NVSHMEM_DISABLE_NVLS", "1"),
]


@pytest.fixture(autouse=True)
def _clear(monkeypatch):
    monkeypatch.setattr(multicast, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(multicast, "_LONGEST_PAUSE", 0.01)
    yield
    emulator.clear()


def construct(c):
    memory = make(c, multicast=True)
    address = memory.multicast
    memory.close()
    return address is not None


def fails(c):
    with pytest.raises(SetupError) as caught:
        make(c, multicast=True)
    return caught.value


def the_one(errors):
    assert len({(type(error), str(error)) for error in errors}) == 1
    return errors[0]


# The order


def trace(n, program):
    """Every driver call and every vote of all ranks, in the order in which they happened: (rank, name)."""
    seen = []
    patch = pytest.MonkeyPatch()
    real_strike, real_gather = faults.strike, Rendezvous.all_gather

    def strike(name):
        seen.append((faults.current_rank(), name))
        return real_strike(name)

    def gather(self, data, stage, timeout=None):
        seen.append((self.rank, f"-> {stage}"))
        result = real_gather(self, data, stage, timeout)
        seen.append((self.rank, f"<- {stage}"))
        return result

    with patch.context() as p:
        p.setattr(faults, "strike", strike)
        p.setattr(faults, "armed", True)
        p.setattr(Rendezvous, "all_gather", gather)
        results = world(n, program)
    assert not [result for result in results if isinstance(result, Exception)], results
    return seen


def test_nobody_binds_before_all_have_added_and_nobody_adds_before_all_have_imported():
    seen = trace(3, construct)

    def first(name):
        return min(at for at, (_, what) in enumerate(seen) if what == name)

    def last(name):
        return max(at for at, (_, what) in enumerate(seen) if what == name)

    assert sum(what == "cuMulticastCreate" for _, what in seen) == 1
    assert last("cuMemImportFromShareableHandle") < first("cuMulticastAddDevice")
    assert last("cuMulticastAddDevice") < first("<- add device") < first("cuMulticastBindMem")
    assert last("cuMulticastBindMem") < first("<- bind memory")
    assert last("<- map multicast") < first("cuMulticastUnbind")
    assert last("-> before close") < first("cuMulticastUnbind")


def test_teardown_goes_in_the_documented_order():
    seen = trace(2, construct)
    for rank in range(2):
        mine = [what for who, what in seen if who == rank]
        ending = [what for what in mine[mine.index("<- before close") :] if what.startswith(("cuMem", "cuMulticast"))]
        assert ending == [
            "cuMulticastUnbind",
            "cuMemUnmap",  # the multicast mapping
            "cuMemAddressFree",
            "cuMemRelease",
            "cuMemUnmap",  # two ranks' memory
            "cuMemUnmap",
            "cuMemAddressFree",
            "cuMemRelease",
        ]
        assert mine[-1] == "<- close"  # the vote: nobody has left before all are done


# What these rules are for: without them, the emulated driver answers as hardware would, but for the endless wait


def test_without_the_vote_before_the_bind_a_peer_is_stranded(monkeypatch, capfd):
    monkeypatch.setattr(CONFIG, "multicast_wait", 0.3)
    real = multicast._lockstep

    def hasty(communicator, stage, action):
        if stage != "add device":
            real(communicator, stage, action)
            return
        with contextlib.suppress(DriverError):
            action()  # and on, whatever the others say

    monkeypatch.setattr(multicast, "_lockstep", hasty)
    with Fresh(), emulator.injected("cuMulticastAddDevice", code=1, rank=1):
        error = the_one(world(3, fails))
    assert (error.call, error.code) == ("cuMulticastBindMem", 909)
    assert "deadlock: 2 of 3 devices added" in capfd.readouterr().err


def test_without_the_order_of_teardown_the_unbind_fails(monkeypatch):
    real = Ledger.owe

    def owe(self, turn, call, *args):
        return real(self, Turn.RELEASE + 1 if call == "cuMulticastUnbind" else turn, call, *args)

    monkeypatch.setattr(Ledger, "owe", owe)

    def program(c):
        memory = make(c, multicast=True)
        with pytest.raises(SetupError, match="cuMulticastUnbind failed"):
            memory.close()
        c.barrier("closed")
        emulator.clear()  # a later call would answer for it
        memory.abandon()

    assert world(2, program) == [None, None]
    assert leaks.new() == []


# Retries


@pytest.mark.parametrize("call", ["cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"])
def test_802_three_times_on_one_rank(call, caplog):
    rank = 0 if call == "cuMulticastCreate" else 1
    caplog.set_level(logging.INFO, "lamport_numba")
    with Fresh(), emulator.injected(call, code=802, rank=rank, times=3) as injection:
        assert world(3, construct) == [True] * 3
    assert injection.hits == 3
    assert caplog.text.count(f"the fabric is not ready on rank(s) {rank}; trying again") == 3


def test_only_those_that_failed_try_again():
    before = emulator.calls().get("cuMulticastBindMem", 0)
    with emulator.injected("cuMulticastBindMem", code=802, rank=2, times=2):
        assert world(4, construct) == [True] * 4
    assert emulator.calls()["cuMulticastBindMem"] - before == 4 + 2


def test_802_for_ever_ends():
    with Fresh(), emulator.injected("cuMulticastBindMem", code=802, rank=1, times=None) as injection:
        error = the_one(world(2, fails))
    assert injection.hits == multicast._TRIES
    assert (error.code, error.rank, error.reason) == (802, 1, "fabric-manager")


def test_another_error_is_not_retried():
    with Fresh(), emulator.injected("cuMulticastBindMem", code=401, rank=1, times=None) as injection:
        the_one(world(2, fails))
    assert injection.hits == 1


def test_an_error_beside_an_802_ends_the_retries():
    with (
        Fresh(),
        emulator.injected("cuMulticastBindMem", code=802, rank=0, times=None) as waits,
        emulator.injected("cuMulticastBindMem", code=401, rank=1),
    ):
        error = the_one(world(3, fails))
    assert (error.code, error.rank) == (401, 1)
    assert waits.hits == 1


# Errors that say what is missing


@pytest.mark.parametrize(
    ("call", "code", "reason", "words"),
    [
        ("cuMulticastBindMem", 401, "fabric-manager", "fabric manager"),
        ("cuMulticastAddDevice", 401, "fabric-manager", "fabric manager"),
        ("cuMulticastAddDevice", 1, "fabric-manager", "fabric manager"),
        ("cuMulticastBindMem", 2, "slots", "no multicast slots are left"),
        ("cuMulticastBindMem", 801, "nvswitch", "no NVSwitch"),
        ("cuMulticastBindMem", 800, "permission", "not permitted"),
        ("cuMulticastGetGranularity", 801, "nvswitch", "no NVSwitch"),
        ("cuMulticastBindMem", 999, "driver", "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_typed_reasons(call, code, reason, words):
    with Fresh(), emulator.injected(call, code=code, rank=1, times=None):
        error = the_one(world(2, fails))
    assert type(error) is MulticastUnavailable
    assert (error.reason, error.rank, error.call, error.code) == (reason, 1, call, code)
    assert words in str(error)


def test_an_attribute_of_zero(monkeypatch):
    monkeypatch.setattr(CONFIG, "multicast_supported", False)
    before = {name: count for name, count in emulator.calls().items() if name.startswith("cuMulticast")}
    error = the_one(world(3, fails))
    assert error.reason == "attribute"
    assert "CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED=0" in str(error)
    assert {name: count for name, count in emulator.calls().items() if name.startswith("cuMulticast")} == before


def test_slots_run_out_and_come_back(monkeypatch):
    monkeypatch.setattr(CONFIG, "multicast_slots", 2)

    def program(c):
        first, second = make(c, multicast=True), make(c, multicast=True)
        error = fails(c)
        second.close()
        make(c, multicast=True).close()
        first.close()
        return error

    with Fresh():
        error = the_one(world(2, program))
    assert (error.reason, error.call, error.code) == ("slots", "cuMulticastBindMem", 2)


def test_peer_goes_on_where_multicast_cannot():
    def program(c):
        fails(c)
        make(c).close()

    with Fresh(), emulator.injected("cuMulticastBindMem", code=401, times=None):
        assert world(3, program) == [None] * 3


def test_an_unbind_that_fails_is_told_and_can_be_tried_again():
    def program(c):
        memory = make(c, multicast=True)
        with pytest.raises(SetupError, match="rank 1 failed at 'close': cuMulticastUnbind failed") as caught:
            memory.close()
        memory.close()
        make(c, multicast=True).close()  # no later call is poisoned
        return str(caught.value)

    with Fresh(), emulator.injected("cuMulticastUnbind", code=1, rank=1):
        assert len(set(world(3, program))) == 1


# The switches, in processes


def switched(comm):
    """With each variable set on each rank in turn, ask for multicast in every way; the calls that were made."""
    drv = driver.select()
    assert drv.kind == "emulated"
    made = {}
    for name, value in SWITCHES:
        for rank in range(comm.Get_size()):
            if comm.Get_rank() == rank:
                os.environ[name] = value
            communicator = Communicator(comm, timeout=20)
            said = f"switched off on rank {rank} by {name}={value}"
            assert choose_transport(communicator, drv, communicator.rank, "auto") == "peer"
            with pytest.raises(MulticastUnavailable, match=said):
                choose_transport(communicator, drv, communicator.rank, "multicast")
            with pytest.raises(MulticastUnavailable, match=said) as caught:
                make(communicator, multicast=True)
            assert caught.value.reason == "disabled"
            make(communicator).close()
            made[f"{rank} {name}"] = multicast_calls()
            communicator.free()
            os.environ.pop(name, None)
    # the control: without a switch the same requests make calls, and they are counted
    communicator = Communicator(comm, timeout=20)
    make(communicator, multicast=True).close()
    communicator.free()
    return made, multicast_calls()


def multicast_calls():
    return sorted(name for name, count in emulator.calls().items() if name.startswith("cuMulticast") and count)


def test_not_one_multicast_call_while_a_switch_is_set_on_any_rank():
    for rank, (made, control) in enumerate(mpirun.run(switched, 3, multicast=True)):
        assert len(made) == 12
        assert set(map(tuple, made.values())) == {()}
        assert "cuMulticastBindMem" in control
        assert ("cuMulticastCreate" in control) == (rank == 0)
