"""A process dies, or is stopped, at every step of set-up and close: the others raise in time and name it."""

import os
import signal
import time

import pytest
from helpers import survivors
from helpers.symmetric import make

from lamport_numba import driver, emulator
from lamport_numba.errors import SetupError
from lamport_numba.symmetric import Communicator
from lamport_numba.symmetric import communicator as rendezvous

DEADLINE = 1.0
LIMIT = 10.0  # seconds; about three on a quiet machine

# (call, how many of it pass first, on which rank) of a construction by multicast and its close
SETUP = [
    ("cuDeviceGetUuid", 0, 1),
    ("cuMemGetAllocationGranularity", 0, 1),
    ("cuMemCreate", 0, 0),
    ("cuMemAddressReserve", 0, 1),
    ("cuMemExportToShareableHandle", 0, 1),
    ("cuMemImportFromShareableHandle", 0, 1),
    ("cuMemMap", 1, 0),
    ("cuMemSetAccess", 1, 1),
    ("cuMulticastGetGranularity", 0, 1),
    ("cuMulticastCreate", 0, 0),
    ("cuMemExportToShareableHandle", 1, 0),
    ("cuMulticastAddDevice", 0, 1),
    ("cuMulticastBindMem", 0, 0),
    ("cuMulticastBindMem", 0, 1),
    ("cuMemAddressReserve", 1, 1),
    ("cuMulticastUnbind", 0, 1),
    ("cuMemUnmap", 1, 0),
]
FEW = [SETUP[5], SETUP[13]]


def dies(comm, call, skip, victim, stop):
    communicator = Communicator(comm, timeout=20)
    driver.select("emulated")
    if communicator.rank == victim:
        if stop:
            signal.SIGKILL = signal.SIGSTOP  # what the injection sends
        emulator.inject(call, skip=skip, die=True)
    communicator.timeout = DEADLINE
    rendezvous._GRACE = 2.0  # with few cores, who is alive may take a while to answer
    start = time.monotonic()
    try:
        make(communicator, multicast=True).close()
    except SetupError as error:
        return {
            "type": type(error).__name__,
            "missing": list(getattr(error, "missing", [])),
            "text": str(error),
            "seconds": time.monotonic() - start,
            "leaks": emulator.leaks() if call not in ("cuMulticastUnbind", "cuMemUnmap") else [],
        }
    return "nothing happened"


def check(n, call, skip, victim, stop=False):
    how = {"call": call, "skip": skip, "victim": victim, "stop": stop}
    for _ in range(3):
        reports = survivors.run(dies, n, lost={victim}, multicast=True, **how)
        if reports[victim] is None:
            break  # else a loaded machine kept it from dying in time, and it heard that it was late
    assert reports[victim] is None
    for rank, report in enumerate(reports):
        if rank != victim:
            told = report["value"]
            assert told["type"] == "RendezvousTimeout", told
            assert told["missing"] == [victim], told
            assert told["leaks"] == []
            assert told["seconds"] < LIMIT, told


@pytest.mark.parametrize(("call", "skip", "victim"), FEW)
def test_a_death_is_named(call, skip, victim):
    check(2, call, skip, victim)


def test_a_stopped_process_is_named():
    check(3, "cuMulticastAddDevice", 0, 1, stop=True)


@pytest.mark.setup_matrix
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("call", "skip", "victim"), SETUP)
def test_a_death_at_every_step_is_named(n, call, skip, victim):
    check(n, call, skip, victim)


@pytest.mark.setup_matrix
@pytest.mark.parametrize(("call", "skip", "victim"), SETUP)
def test_a_stop_at_every_step_is_named(call, skip, victim):
    check(3, call, skip, victim, stop=True)


def late_duplicate(comm):
    if comm.Get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rendezvous._GRACE = 2.0
    try:
        Communicator(comm, timeout=DEADLINE)
    except SetupError as error:
        return list(error.missing)
    return None


def test_a_death_before_the_duplication_is_named():
    reports = survivors.run(late_duplicate, 3, lost={1})
    assert [report and report["value"] for report in reports] == [[1], None, [1]]
