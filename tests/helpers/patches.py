"""Mistakes: small patches of the shipped PTX, and of what the host does around it.

A text patch must change the text as often as it says, or the control that uses it would test nothing.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from lamport_numba import ptx
from lamport_numba.collectives import channel as channels
from lamport_numba.collectives import launch
from lamport_numba.symmetric import Communicator

Edit = tuple[str, str, int]  # what stands there, what shall stand there, how often


@contextmanager
def edited(files: dict[str, list[Edit]]) -> Iterator[None]:
    """Kernels are loaded with these changes of their text."""
    shipped = ptx.read
    texts = {}
    for file, edits in files.items():
        text = shipped(file)
        for old, new, times in edits:
            found = text.count(old)
            assert found == times, f"{file}: expected {times} times, found {found}: {old!r}"
            text = text.replace(old, new)
        assert text != shipped(file)
        texts[file] = text
    with mock.patch.object(ptx, "read", lambda file: texts.get(file) or shipped(file)):
        yield


def both(*edits: Edit) -> Callable[[], Any]:
    """A mistake that both transports' kernels make."""
    return lambda: edited({"lamport_peer.ptx": list(edits), "lamport_multicast.ptx": list(edits)})


LOAD = "    ld.global.u32 %generation, [%generation_at];\n"
RELOAD = "    @%active ld.global.u32 %generation, [%generation_at];\n"
WAIT = "    griddepcontrol.wait;\n"
TRIGGER = "    griddepcontrol.launch_dependents;\n"
RESET = "    st.global.v4.b32 [%from + 8192], {%sentinel, %sentinel, %sentinel, %sentinel};\n"
ADVANCE = """    add.u32 %next, %generation, 1;
    setp.eq.u32 %done, %next, 3;
    selp.b32 %next, 0, %next, %done;
"""
SLOT = "    mad.lo.u32 %slot, %source, %row, %pack;\n"
HANDED_OUT = RESET + "    bra COLLECTED;\n"
COLLECTED = "COLLECTED:\n"
CALL_AS_NAMED: list[Edit] = [("@!%header ld.relaxed.gpu.global.u32 %call", "ld.relaxed.gpu.global.u32 %call", 1)]
KIND_WITH_THE_REST: list[Edit] = [("{%t, %source, %call, %pack}", "{%kind, %source, %call, %pack}", 1)]

# In the other design nobody resets the slot that he read; every lane cleans its share of the previous stage instead.
# The sizes are recorded in three words of the control block that nothing else uses.
CLEAN = """COLLECTED:
    setp.lt.u32 %late, %item, %padded;
    @!%late bra CLEANED;
    ld.global.u32 %next, [%generation_at];
    add.u32 %next, %next, 2;
    rem.u32 %next, %next, 3;
    {size}
    setp.lt.u32 %late, %item, %t;
    @!%late bra CLEANED;
    mad.lo.u32 %slot, %source, {row}, %item;
    mul.wide.u32 %address, %slot, 16;
    add.u64 %to, %mine_base, %address;
    mul.wide.u32 %address, %next, %stage;
    add.u64 %to, %to, %address;
    st.global.v4.b32 [%to + 8192], {{%sentinel, %sentinel, %sentinel, %sentinel}};
CLEANED:
    setp.eq.u32 %late, %item, 0;
    setp.eq.and.u32 %late, %column, 0, %late;
    @!%late bra RECORDED;
    mul.wide.u32 %address, %generation, 4;
    add.u64 %to, %mine_base, %address;
    st.global.u32 [%to + 7936], %packs;
RECORDED:
"""
RECORDED_SIZE = """mul.wide.u32 %address, %next, 4;
    add.u64 %to, %mine_base, %address;
    ld.global.u32 %t, [%to + 7936];"""


def known_fault() -> Any:
    """Own part from registers, previous stage cleaned by its recorded size, slots packed by the size of the call."""
    store = "    mad.lo.u32 %slot, %source, %packs, %pack;\n"
    return edited({"lamport_multicast.ptx": [
        (SLOT, "    selp.b32 %t, %row, %packs, %header;\n    mad.lo.u32 %slot, %source, %t, %pack;\n", 2),
        (HANDED_OUT, "    bra COLLECTED;\n", 1),
        ("    @!%active bra COLLECTED;\n", """    @!%active bra COLLECTED;
    setp.eq.u32 %own, %column, 0;
    and.pred %own, %own, %payload;
    @%own bra FROM_REGISTERS;
""", 1),
        (f"    @%header bra COMPARE;\n{store}", f"    @%header bra COMPARE;\nFROM_REGISTERS:\n{store}", 1),
        (COLLECTED, CLEAN.format(size=RECORDED_SIZE, row="%t"), 1),
    ]})  # fmt: skip


def cleaned_by(size: str) -> Callable[[], Any]:
    """The previous stage is cleaned by the current call's size, or (which is right) by its recorded one."""
    return both(
        (HANDED_OUT, "    bra COLLECTED;\n", 1),
        (COLLECTED, CLEAN.format(size=size, row="%row"), 1),
    )


wrong_stage = both(
    (
        RESET,
        ADVANCE
        + "    mul.wide.u32 %address, %next, %stage;\n    add.u64 %to, %mailbox_from, %address;\n"
        + RESET.replace("%from", "%to"),
        2,
    )
)
one_generation = both((ADVANCE, ADVANCE.replace(", 3;", ", 1;"), 1))
word_0_only = both(
    ("    setp.eq.or.b32 %late, %w1, %sentinel, %late;\n", "", 1),
    ("    setp.eq.or.b32 %late, %w2, %sentinel, %late;\n", "", 1),
    ("    setp.eq.or.b32 %late, %w3, %sentinel, %late;\n", "", 1),
)
headers_not_compared = both(("    @%differs bra RAISE;\n", "", 1))
no_warp_barrier = both(("    bar.warp.sync 0xffffffff;\n", "", 1))
trigger_before_wait = both((TRIGGER, "", 1), (WAIT, TRIGGER + WAIT, 1))
read_before_wait = both((LOAD, "", 1), (WAIT, RELOAD + WAIT, 1))


def unbounded(start: int) -> Callable[[], Any]:
    """A 32-bit counter that starts at ``start`` and wraps; its remainder by 3 is the generation."""
    add = f"add.u32 %generation, %generation, {start:#x};\n    rem.u32 %generation, %generation, 3;\n"
    return both(
        (RELOAD, RELOAD + "    " + add, 1),
        (LOAD, LOAD + "    " + add, 1),
        (ADVANCE, "    ld.global.u32 %next, [%generation_at];\n    add.u32 %next, %next, 1;\n", 1),
    )


@contextmanager
def host_generation() -> Iterator[None]:
    """The host counts the calls and passes the generation, which a graph then bakes in."""
    passed = "    ld.param.u32 %generation, [generation];\n"
    first = "    .param .u64 input, "
    edits = [(first, "    .param .u32 generation,\n" + first, 1), (LOAD, passed, 1), (RELOAD, passed, 1)]
    block = launch.Block

    def counted(kernel: Any, parameters: list[Any], **options: Any) -> Any:
        if kernel.name in ("lamport_peer", "lamport_multicast"):
            kernel.launches = getattr(kernel, "launches", -1) + 1
            parameters = [ctypes.c_uint32(kernel.launches % 3), *parameters]
        return block(kernel, parameters, **options)

    with ExitStack() as stack:
        stack.enter_context(edited({"lamport_peer.ptx": edits, "lamport_multicast.ptx": edits}))
        stack.enter_context(mock.patch.object(channels, "Block", counted))
        yield


@contextmanager
def no_barrier_after_fill() -> Iterator[None]:
    """A rank goes on as soon as its own mailbox is filled."""
    vote = Communicator.vote

    def hasty(self: Any, stage: str, error: BaseException | None) -> None:
        if stage not in ("fill the mailbox", "warm up"):
            vote(self, stage, error)

    with mock.patch.object(Communicator, "vote", hasty):
        yield


@contextmanager
def any_grid() -> Iterator[None]:
    """Grids as large as the call, whether they fit or not."""
    with mock.patch.object(channels.Channel, "limit", return_value=1 << 16):
        yield


def share_mailbox(gather: Any) -> None:
    """Let the peer kernel serve calls of up to half the capacity on the mailbox of the multicast kernel."""
    first = gather._channels["multicast"]
    twin = copy.copy(first)
    twin.transport, twin.kernel = "peer", launch.load(first.drv, first.device, "lamport_peer.ptx")
    gather._channels["peer"] = twin
    gather._table = {gather.rank_capacity_bytes // 2: "peer", gather.rank_capacity_bytes: "multicast"}
