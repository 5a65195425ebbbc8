"""What the kernels report when a call fails: read from symmetric memory, sorted out, and raised.

Every rank's symmetric memory begins with a control block: the alarm word, then one report of sixteen words for each
rank that may report (``RAISE`` in ptx/lamport_peer.ptx writes them). A report's first word, its kind, lands after the
rest. All ranks read the same reports, so all raise the same error: that of the earliest call, since a rank that waits
in a later one waits for somebody who is stuck in the earlier.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ..errors import CallMismatch, LamportError, PeerLeft, PeerTimeout

__all__ = [
    "COMPARE",
    "CONTROL_BYTES",
    "LEFT",
    "MAX_WORLD",
    "Report",
    "control_bytes",
    "error_of",
    "left",
    "parse",
    "report_offset",
]

MAX_WORLD = 72  # a rack of NVL72: so many reports lie before the mailbox
CONTROL_BYTES = 8192  # where the mailbox begins
COMPARE = "compare_calls=True (LAMPORT_NUMBA_COMPARE=1) names every rank's values at the call where it goes wrong"
_FIRST_REPORT = 64
_REPORT = struct.Struct("<16I")
_TIMEOUT, _MISMATCH, LEFT = 1, 2, 3  # 0, or what else is there: not yet a report


@dataclass(frozen=True, order=True)
class Report:
    """One rank's account of a failed call. The order of the fields is the order of blame."""

    call: int
    source: int
    reporter: int
    kind: int
    pack: int
    generation: int
    milliseconds: int
    mine: tuple[int, int, int]  # call, bytes, code as the reporter has them
    theirs: tuple[int, int, int]  # as the source's header said


def control_bytes(world_size: int) -> int:
    """How much of the control block a world of this size uses, in bytes."""
    return _FIRST_REPORT + _REPORT.size * world_size


def report_offset(reporter: int) -> int:
    """Where the report of a rank lies in every control block."""
    return _FIRST_REPORT + _REPORT.size * reporter


def left(rank: int, call: int) -> bytes:
    """The report of a rank that leaves before ``call``, but for its kind, LEFT, which is written after the rest."""
    return _REPORT.pack(0, rank, call & 0x7FFFFFFF, *[0] * 13)


def parse(control: bytes, world_size: int, unit: int = 16) -> list[Report]:
    """The reports in a control block, the root cause first. ``unit`` is what the kernel counts sizes in, in bytes."""
    found = []
    for reporter in range(world_size):
        words = _REPORT.unpack_from(control, report_offset(reporter))
        kind, source, call, pack, generation, milliseconds, size, code = words[:8]
        if kind in (_TIMEOUT, _MISMATCH, LEFT):
            mine, theirs = (call & 0x7FFFFFFF, size * unit, code), (words[8], words[9] * unit, words[10])
            found.append(Report(call, source, reporter, kind, pack, generation, milliseconds, mine, theirs))
    return sorted(found)


def error_of(reports: list[Report], rank: int) -> LamportError:
    """The exception for the root cause among ``reports``, the same on every rank; ``rank`` is the one that raises."""
    if not reports:
        return LamportError(
            f"rank {rank}: the alarm of this all-gather is set and no rank has left a report; reset() it"
        )
    first = reports[0]
    if first.kind == LEFT:
        return PeerLeft(first.source, first.call)
    if first.kind == _TIMEOUT:
        return PeerTimeout(
            first.source,
            first.call,
            first.milliseconds / 1e3,
            detail=f"rank {first.reporter} waited for pack {first.pack} of generation {first.generation} "
            "and told the others; gather.reset() on all ranks makes a new start",
        )
    return CallMismatch(
        f"ranks {first.reporter} and {first.source} disagree about call {first.call}: "
        f"rank {first.reporter} has {_described(first.mine)}, rank {first.source} has {_described(first.theirs)}; "
        f"every rank must make the same calls in the same order. {COMPARE}. gather.reset() on all ranks makes a new "
        "start",
        rank=first.source,
        call=first.call,
        mine=first.mine,
        theirs=first.theirs,
    )


def _described(header: tuple[int, int, int]) -> str:
    call, nbytes, code = header
    return f"call {call} of {nbytes} bytes, dtype and shape {code:#010x}"
