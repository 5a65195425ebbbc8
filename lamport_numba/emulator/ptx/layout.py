"""Where things lie in the blocks that Python, the scheduler and the step functions share.

A grid in flight is one header (``GRID``), and one slot for every CTA that may be resident. A slot holds the CTA's
header, its 16
barriers, one small header a warp, one frame a lane, and the CTA's shared memory:

    slot:  CTA | barriers[16] | warps[n] | lanes[n * 32] | shared memory
    lane:  LANE | saved registers | call parameters | local memory

A *lane* is one GPU thread, kept as a state machine: ``state`` says where to go on, the saved registers with what.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SIZES = {"i32": 4, "i64": 8, "ptr": 8}
_CODES = {"i32": "I", "i64": "Q", "ptr": "Q"}


class Record:
    """A C-like struct: names, LLVM types and offsets of its fields."""

    def __init__(self, fields: str, *, size: int = 0) -> None:
        self.types: dict[str, str] = {}
        self.offsets: dict[str, int] = {}
        at = 0
        codes = "="
        for kind, name in self._parse(fields):
            pad = -at % _SIZES[kind]
            codes += f"{pad}x" if pad else ""
            at += pad
            self.types[name], self.offsets[name] = kind, at
            at += _SIZES[kind]
            codes += _CODES[kind]
        self.packer = struct.Struct(codes)
        self.size = max(size, at + -at % 16)

    @staticmethod
    def _parse(fields: str) -> Iterator[tuple[str, str]]:
        for line in fields.split(";"):
            kind, *names = line.replace(",", " ").split()
            for name in names:
                yield kind, name


WARP_SIZE = 32
BARRIERS = 16

# Generic addresses of the windows that are no memory of the device: far above what a host address can be.
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56

GRID = Record(
    """ptr params, slots, caches, variables, table, fabric;
    i32 total, next, resident, finished, triggered, released, stop, high;
    i32 ntid_x, ntid_y, ntid_z, nctaid_x, nctaid_y, nctaid_z;
    i32 threads, warps, lanes_at, stride, shared_at, shared_bytes, param_bytes, device;
    i64 steps, sequence;
    i32 fault_kind, fault_site, fault_lane, fault_x, fault_y, fault_z;
    i64 fault_address;
    i32 fault_size, orphans;
    ptr orphan_list;
    i32 order_step, order_start, calm, buffers_at, brief"""
)
CTA = Record("i32 live, x, y, z, rank, triggered, barred, buffered, held, laid_out; i64 marks")
BARRIER = Record("i32 arrived, expected, waiting, ones", size=16)
WARP = Record("i32 ready, live, collective, barred, depending, sampling, spinning, asked", size=32)
LANE = Record("i32 state, mask, op, b, c, ones; i64 a, result; i32 tid_x, tid_y, tid_z, lane, warp, site", size=64)
TABLE = Record("i64 count, version; ptr entries")
ENTRY = Record("i64 base, end; i32 kind, access; i64 key; ptr members; i32 member_count, spare", size=48)
MEMBER = Record("ptr address; i64 key", size=16)
CACHE = Record("i64 base, span; ptr entry", size=32)

# The adversarial fabric: its state, its queues of words in flight, and a CTA's stores that are not done yet.
# ``filled``, ``held`` and ``long`` have a bit for each queue: it has words, it waits for a while, for long.
# ``steady``: before one of so many accesses and one a lane loses its turn. ``hasty``: whoever waits for the words is in
# another process, and a kernel that waits gains nothing by looking often.
FABRIC = Record(
    "i64 random, clock, salt, flying, wide, landed, filled, held, long; i32 weather, weather_left, steady, hasty"
)
QUEUE = Record("i32 head, count", size=16)
WORD = Record("ptr address; i64 value; i32 size, sender", size=24)
QUEUES, QUEUE_LENGTH = 64, 128
WORDS_AT = FABRIC.size + QUEUES * QUEUE.size
FABRIC_BYTES = WORDS_AT + QUEUES * QUEUE_LENGTH * WORD.size
BUFFER_LENGTH, ORPHANS = 12, 256

BARRIERS_AT = CTA.size
WARPS_AT = BARRIERS_AT + BARRIERS * BARRIER.size


def lanes_at(warps: int) -> int:
    """Offset of the first lane's frame in a slot."""
    at = WARPS_AT + warps * WARP.size
    return at + -at % 64


# What a step function answers: why the lane came back. SPIN and LOOKED come from the way back of a loop that polls:
# without having changed memory since the lane was called, or having.
EXIT, SPIN, LOOKED, YIELD, COLLECTIVE, BARRIER_WAIT, GRID_WAIT, SAMPLE, FAULT = range(9)

# What a run answers.
RUNNING, STALLED, FINISHED, FAULTED = range(4)

# Kinds of table entries, and the rights of an access. A cache line of an access site is only filled when the site's
# rights are there.
LOCAL, REMOTE, HOST, MULTICAST = range(4)
READ, WRITE = 1, 2

# Kinds of faults (0 is none).
FAULTS = (
    "",
    "illegal address",
    "misaligned address",
    "access not permitted",
    "ordinary access to a multicast address",
    "multimem access to an ordinary address",
    "shared memory out of bounds",
    "local memory out of bounds",
    "parameter out of bounds",
    "trap",
    "warp collective with a mask that leaves out the calling lane",
    "barrier or warp collective that can never complete",
    "barrier number out of range",
    "assertion failed",
    "stopped",
)
(
    _,
    F_ADDRESS,
    F_ALIGN,
    F_ACCESS,
    F_MULTICAST,
    F_NOT_MULTICAST,
    F_SHARED,
    F_LOCAL,
    F_PARAM,
    F_TRAP,
    F_MASK,
    F_BARRIER,
    F_BARRIER_ID,
    F_ASSERT,
    F_STOPPED,
) = range(len(FAULTS))
