"""Reports are read whole, whenever a host looks: the kind, which makes one valid, lands after the rest.

A host looks when any rank's alarm wakes it, so other ranks' reports may be on their way. Here every memory is looked at
after every few steps of every kernel.
"""

import ctypes
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
from helpers import patches
from helpers.ranks import synchronise

from lamport_numba import CallMismatch, LamportAllGather, TaggedAllGather, run_ranks, to_device
from lamport_numba.collectives.reports import control_bytes, parse
from lamport_numba.emulator.engine import Engine

CALLS = 3  # that succeed before one fails, so that no number in the report is 0
RANKS = 3
SEEDS = range(24)
KINDS = [
    (LamportAllGather, "peer"),
    (LamportAllGather, "multicast"),
    (TaggedAllGather, "peer"),
    (TaggedAllGather, "multicast"),
]
kinds = pytest.mark.parametrize(("kind", "transport"), KINDS, ids=lambda value: getattr(value, "__name__", value))


def seen(kind, transport, seed, mistake=nullcontext):
    """Every report that could be read in any rank's memory during a call whose size differs on the last rank."""
    watched, reports = [], {}

    def look():
        for channel in watched:
            block = ctypes.string_at(channel.memory.local, control_bytes(RANKS))
            for report in parse(block, RANKS, channel.unit):
                reports.setdefault((channel.rank, report.reporter), set()).add(report)

    step = Engine._run

    def look_after(self, launch, ctas, quantum):
        moved = step(self, launch, ctas, min(quantum, 4))
        look()
        return moved

    def rank(comm):
        gather = kind(comm, 64, transport=transport)
        watched.append(*gather._channels.values())
        for call in range(CALLS + 1):
            packs = 2 if call == CALLS and comm.rank == RANKS - 1 else 1
            gather(to_device(np.full(4 * packs, call, np.float32)))
        synchronise()
        comm.Barrier()
        with pytest.raises(CallMismatch):
            gather.check()
        comm.Barrier()
        watched.clear()
        gather.close()

    with mistake(), mock.patch.object(Engine, "_run", look_after):
        run_ranks(RANKS, rank, fabric="adversarial", seed=seed, timeout=60)
    return reports


def torn(reports):
    """Those that could be read in two versions."""
    return [versions for versions in reports.values() if len(versions) > 1]


def other_calls(reports):
    """Numbers of calls in them that are not the failed one's."""
    return {report.call for versions in reports.values() for report in versions} - {CALLS}


def mistaken(kind, transport, edits):
    """The kernel with a mistake."""
    return lambda: patches.edited({f"{kind._channel.protocol}_{transport}.ptx": edits})


@kinds
def test_a_report_is_read_whole_and_names_its_call(kind, transport):
    for seed in SEEDS:
        reports = seen(kind, transport, seed)
        assert reports
        assert not torn(reports), seed
        assert not other_calls(reports), seed


@kinds
def test_control_a_kind_that_is_stored_with_the_rest_is_read_too_early(kind, transport):
    mistake = mistaken(kind, transport, patches.KIND_WITH_THE_REST)
    assert any(torn(seen(kind, transport, seed, mistake)) for seed in SEEDS)


@kinds
def test_control_the_number_of_the_current_call_may_be_late(kind, transport):
    mistake = mistaken(kind, transport, patches.CALL_AS_NAMED)
    assert any(other_calls(seen(kind, transport, seed, mistake)) for seed in SEEDS)
