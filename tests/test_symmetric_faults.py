"""Every driver call of set-up and teardown fails, on every rank in turn: one error everywhere, nothing left, and a
second try works.
"""

import random
from collections import Counter

import pytest
from helpers import leaks
from helpers.symmetric import Fresh, make, world

from lamport_numba import emulator
from lamport_numba.emulator import CONFIG
from lamport_numba.emulator import driver as emulated
from lamport_numba.emulator.memory import MEMORY
from lamport_numba.errors import SetupError

BROKEN = 999  # CUDA_ERROR_UNKNOWN
WAYS = {
    "peer": {"multicast": False},
    "multicast": {"multicast": True},
    "fabric": {"multicast": True, "handle_kind": "fabric"},
}
# Making the context current is voted on; restoring the former one comes after everything.
CALLS = sorted(name for name in emulated.__all__ if name != "cuInit")  # the driver is chosen before
ONCE = ("cuCtxGetCurrent", "cuCtxSetCurrent")


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    monkeypatch.setattr(CONFIG, "fabric_handles", True)
    yield
    emulator.clear()


def count(n, way, phase):
    """How often each rank makes each call in set-up or in close: {(rank, call): times}."""
    watched = []

    def program(c):
        make(c).close()  # the first of a process also retains the contexts
        memory = make(c, **WAYS[way]) if phase == "close" else None
        if c.rank == 0:
            watched.extend(emulator.inject(name, rank=rank, times=None) for name in CALLS for rank in range(n))
        c.barrier("watch")
        memory = memory or make(c, **WAYS[way])
        c.barrier("made")
        if phase == "close":
            memory.close()
        c.barrier("closed")
        if c.rank == 0:
            emulator.clear()
        c.barrier("counted")
        if phase != "close":
            memory.close()

    assert world(n, program) == [None] * n
    return {(w.rank, w.call): 1 if w.call in ONCE else w.hits for w in watched if w.hits}


def fail_in_setup(n, way, rank, call, skip):
    def program(c):
        with pytest.raises(SetupError) as caught:
            make(c, **WAYS[way])
        assert leaks.new() == []  # of all ranks: they have waited for each other
        c.barrier("looked")
        if c.rank == 0:
            emulator.clear()
        c.barrier("again")
        make(c, **WAYS[way]).close()
        return caught.value

    with Fresh() as run, emulator.injected(call, code=BROKEN, rank=rank, skip=skip) as injection:
        errors = world(n, program)
    assert injection.hits
    told(errors, n, rank, call)
    assert run.seconds < 5


def fail_in_close(n, way, rank, call, skip):
    def program(c):
        memory = make(c, **WAYS[way])
        c.barrier("made")
        if c.rank == 0:
            emulator.inject(call, code=BROKEN, rank=rank, skip=skip)
        c.barrier("set")
        with pytest.raises(SetupError) as caught:
            memory.close()
        memory.close()
        make(c, **WAYS[way]).close()
        return caught.value

    with Fresh() as run:
        errors = world(n, program)
    told(errors, n, rank, call)
    assert all(error.step == "close" for error in errors)
    assert run.seconds < 5


def told(errors, n, rank, call):
    assert [type(error) for error in errors] == [type(errors[0])] * n, errors
    assert isinstance(errors[0], SetupError), errors[0]
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert (error.rank, error.call, error.code) == (rank, call, BROKEN)
        assert f"rank {rank} failed at" in str(error)
        assert f"{call} failed: CUDA_ERROR_UNKNOWN (999)" in str(error)


def matrix(n, way, phase):
    counted = count(n, way, phase)
    assert len(counted) >= 4 * n
    fail = fail_in_setup if phase == "set-up" else fail_in_close
    for (rank, call), times in counted.items():
        for skip in range(times):
            try:
                fail(n, way, rank, call, skip)
            except BaseException:
                print(f"n={n} way={way} phase={phase} rank={rank} call={call} skip={skip}")
                raise


@pytest.mark.parametrize("phase", ["set-up", "close"])
@pytest.mark.parametrize(("n", "way"), [(2, "peer"), (2, "multicast"), (2, "fabric"), (4, "multicast")])
def test_every_call_on_every_rank(n, way, phase):
    matrix(n, way, phase)


@pytest.mark.setup_matrix
@pytest.mark.parametrize("phase", ["set-up", "close"])
@pytest.mark.parametrize(("n", "way"), [(3, "multicast"), (4, "peer"), (4, "fabric"), (8, "multicast")])
def test_every_call_on_every_rank_of_more(n, way, phase):
    matrix(n, way, phase)


def test_the_calls_that_matter_are_among_them():  # or the matrix could be empty
    calls = {call for _, call in count(2, "multicast", "set-up")}
    assert {
        "cuMemGetAllocationGranularity",
        "cuMulticastGetGranularity",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMulticastCreate",
        "cuMulticastAddDevice",
        "cuMulticastBindMem",
    } <= calls
    assert {call for _, call in count(2, "multicast", "close")} >= {
        "cuMulticastUnbind",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
    }


def test_two_ranks_fail_at_once():
    def program(c):
        with pytest.raises(SetupError) as caught:
            make(c)
        return str(caught.value)

    with Fresh(), emulator.injected("cuMemCreate", code=2, rank=1), emulator.injected("cuMemCreate", code=999, rank=2):
        texts = world(4, program)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1 failed at 'create memory': cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)")
    assert texts[0].endswith("(and so did rank 2)")


def test_an_undo_that_fails_is_logged_and_changes_no_error(caplog):
    def program(c):
        with pytest.raises(SetupError) as caught:
            make(c)
        return caught.value

    with (
        emulator.injected("cuMemImportFromShareableHandle", code=999, rank=1),
        emulator.injected("cuMemAddressFree", code=1, rank=1) as undo,
    ):
        errors = world(2, program)
    told(errors, 2, 1, "cuMemImportFromShareableHandle")
    assert undo.hits == 1
    assert "not given back: rank 1: cuMemAddressFree failed" in caplog.text
    for base, reservation in list(MEMORY.reservations.items()):
        emulated.cuMemAddressFree(base, reservation.size)
    assert leaks.new() == []


def random_sleeps(n, rounds, longest, seed):
    """Every driver call, on every rank, after a random sleep."""
    draws = random.Random(seed)
    calls = sorted(
        {call for _, call in count(n, "multicast", "set-up")} | {call for _, call in count(n, "peer", "close")}
    )
    done = Counter()

    def program(c):
        for turn in range(rounds):
            if c.rank == 0:
                emulator.clear()
                for call, rank in ((call, rank) for call in calls for rank in range(n)):
                    if draws.random() < 0.25:
                        emulator.inject(call, rank=rank, times=1, delay=draws.uniform(0, longest))
            c.barrier("set")
            memory = make(c, multicast=bool(turn % 2))
            memory.close()
            done[c.rank] += 1

    with Fresh():
        assert world(n, program, timeout=30) == [None] * n
    assert set(done.values()) == {rounds}


def test_random_sleeps_before_every_step():
    random_sleeps(2, 4, 0.02, 1)


@pytest.mark.setup_matrix
@pytest.mark.parametrize("n", [2, 4])
def test_random_sleeps_50_constructions(n):
    random_sleeps(n, 50, 0.3 if n == 2 else 0.1, n)


def test_a_slow_rank_is_waited_for_and_a_stuck_one_is_named():
    def program(c):
        c.timeout = 0.4
        make(c).close()

    with emulator.injected("cuMemCreate", rank=1, delay=0.2):
        assert world(3, program) == [None] * 3
    with Fresh(), emulator.injected("cuMemCreate", rank=1, delay=1.5):
        errors = world(3, program)
    for error in errors:
        assert (error.missing, error.stage) == ((1,), "create memory")
