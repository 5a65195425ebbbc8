"""Reports of the kernels: the root cause comes first, the same for all who read them."""

import struct

import pytest

from lamport_numba import CallMismatch, LamportError, PeerTimeout
from lamport_numba.collectives.reports import CONTROL_BYTES, MAX_WORLD, control_bytes, error_of, parse

TIMEOUT, MISMATCH = 1, 2


def control(world, reports):
    """A control block as the kernels leave it; ``reports`` maps a reporter to the words of its report."""
    block = bytearray(control_bytes(world))
    for reporter, words in reports.items():
        struct.pack_into(f"<{len(words)}I", block, 64 + 64 * reporter, *words)
    return bytes(block)


def test_the_largest_world_fits_before_the_mailbox():
    assert control_bytes(MAX_WORLD) <= CONTROL_BYTES


def test_no_report_is_none():
    assert parse(control(4, {}), 4) == []


def test_a_timeout_names_the_missing_rank_the_call_and_how_long():
    error = error_of(parse(control(3, {1: (TIMEOUT, 2, 41, 7, 1, 1500, 8, 99)}), 3), rank=0)
    assert isinstance(error, PeerTimeout)
    assert (error.rank, error.call, error.seconds) == (2, 41, 1.5)
    assert "rank 2 was missing in call 41" in str(error)
    assert "rank 1 waited for pack 7 of generation 1" in str(error)


def test_the_earliest_call_is_the_root_cause():
    # Rank 3 died during call 5; rank 0 got its payload and went on to call 6, where rank 1 was missing.
    block = control(4, {0: (TIMEOUT, 1, 6, 0, 0, 900, 1, 1), 1: (TIMEOUT, 3, 5, 0, 2, 1000, 1, 1)})
    errors = [error_of(parse(block, 4), rank) for rank in range(4)]
    assert {(error.rank, error.call) for error in errors} == {(3, 5)}


def test_a_mismatch_gives_both_sides():
    block = control(2, {0: (MISMATCH, 1, 3, 32, 0, 0, 1, 0xABC, 3, 2, 0xABC)})
    error = error_of(parse(block, 2), rank=1)
    assert isinstance(error, CallMismatch)
    assert error.mine == (3, 16, 0xABC)
    assert error.theirs == (3, 32, 0xABC)
    assert "16 bytes" in str(error)
    assert "32 bytes" in str(error)
    assert "compare_calls=True (LAMPORT_NUMBA_COMPARE=1) names every rank's values" in str(error)


def test_an_alarm_without_a_report_is_an_error_too():
    with pytest.raises(LamportError, match=r"reset"):
        raise error_of([], rank=0)
