"""The all-gather's cases on every world size, by both transports: in threads, and in processes under mpirun."""

import functools

import numpy as np
import pytest
from helpers import mpirun
from helpers.cases import TRANSPORTS, assert_passed, in_threads

from lamport_numba.selftest import CASES
from lamport_numba.selftest.world import PACK

THREADS = (1, 2, 3, 5, 8)
PROCESSES = (1, 2, 4)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", THREADS)
@pytest.mark.parametrize("name", CASES)
def test_in_threads(name, ranks, transport):
    assert_passed(in_threads(name, ranks, transport=transport), transport)


@functools.cache
def under_mpirun(ranks, transport):
    """What each rank reports of all cases, in one run, since starting processes is what costs; or the failure."""
    try:
        return mpirun.run(
            "helpers.cases:run_cases",
            ranks,
            names=list(CASES),
            transport=transport,
            multicast=transport == "multicast",
            timeout=240,
        )
    except mpirun.RanksFailed as failed:  # kept, so that no other test runs into it again
        return failed


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", PROCESSES)
@pytest.mark.parametrize("name", CASES)
def test_in_processes(name, ranks, transport):
    results = under_mpirun(ranks, transport)
    if isinstance(results, mpirun.RanksFailed):
        raise results
    for result in (next(one for one in rank if one["name"] == name) for rank in results):
        assert_passed(result, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_with_one_resident_cta(name, ranks, transport):
    """A device that holds a single CTA at a time: no thread may wait for one that is not resident."""
    assert_passed(in_threads(name, ranks, transport=transport, residency=1, largest=1 << 13), transport)


def few_packs(world):
    """A few calls of a few packs, alternating; for worlds that are large for a small machine."""
    with world.gather(3 * PACK) as gather:
        for packs in (1, 3, 1, 2, 2, 1):
            world.queue(gather, packs * PACK)
        world.settle()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("ranks", [4, 6, 7, 12, 36, 72])
def test_large_worlds(ranks, transport):
    assert_passed(in_threads(few_packs, ranks, transport=transport), transport)


def wrong_word(world):
    """What a case does when a word is wrong: one rank sees another value."""
    with world.gather(2 * PACK) as gather:
        parts = [world.payload(0, 2 * PACK, rank) for rank in range(world.size)]
        out = world.empty(2 * PACK * world.size)
        gather(world.floats(parts[world.rank]), out=out)
        if world.rank == 1:
            parts[0][5] ^= np.uint32(1)
        world.expect(out, parts, "the one call")


def a_word_left_behind(world):
    """What a case does when a mailbox holds a word at the end."""
    with world.gather(PACK) as gather:
        if world.rank == 0:
            (channel,) = gather._channels.values()
            world.drv.call("cuMemsetD32", channel.memory.local + 8192 + 16, 7, 1)


def one_rank_raises(world):
    """What a case does when a rank raises by itself."""
    if world.rank == 1:
        raise ValueError("only here")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (wrong_word, "rank 1: the one call: 1 of 16 words differ; the first is word 5 of rank 0's part"),
        (a_word_left_behind, "rank 0: 1 words are left in the mailbox of peer"),
        (one_rank_raises, "rank 1: ValueError: only here"),
    ],
)
def test_a_case_that_goes_wrong_says_what(function, says):
    result = in_threads(function, 2, transport="peer")
    assert not result.passed
    assert any(problem.startswith(says) for problem in result.problems), result.problems
