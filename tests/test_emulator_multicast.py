"""Multicast objects of the emulated device: every rule, in one process and across processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import environment
from helpers.emulated import (
    FABRIC,
    NONE,
    POSIX,
    Mapped,
    access,
    download,
    machine,
    memory_prop,
    multicast_prop,
    refused,
)

from lamport_numba import emulator

TEAM = 2
GRAIN = emulator.CONFIG.multicast_granularity
SIZE = 2 * GRAIN


@pytest.fixture
def drv():
    with machine(devices=3, multicast_wait=0.05) as made:
        for device in range(3):
            made.primary(device)
        yield made


class Team:
    """A multicast object of two devices and memory on each."""

    def __init__(self, drv, add: int = TEAM, size: int = SIZE):
        self.drv = drv
        self.object = drv.call("cuMulticastCreate", multicast_prop(TEAM, size))
        for device in range(add):
            drv.call("cuMulticastAddDevice", self.object, device)
        self.memory = [Mapped(drv, size, device=d, devices=(d,)) for d in range(TEAM)]

    def bind(self, device: int, offset: int = 0, size: int = SIZE) -> None:
        self.drv.call("cuMulticastBindMem", self.object, offset, self.memory[device].handle, offset, size, 0)

    def unbind(self, device: int, offset: int = 0, size: int = SIZE) -> None:
        self.drv.call("cuMulticastUnbind", self.object, device, offset, size)

    def close(self) -> None:
        self.drv.call("cuMemRelease", self.object)
        for memory in self.memory:
            memory.close()


@pytest.fixture
def team(drv):
    made = Team(drv)
    yield made
    made.close()


def test_granularity_wants_the_properties_filled_in(drv):
    call = "cuMulticastGetGranularity"
    for team, size in ((0, SIZE), (TEAM, 0)):
        refused(drv, call, multicast_prop(team, size), 0, text="filled in first")
    minimum = drv.call(call, multicast_prop(TEAM, SIZE), 0)
    recommended = drv.call(call, multicast_prop(TEAM, SIZE), 1)
    assert minimum == GRAIN
    assert recommended > 100 * minimum
    assert minimum != drv.call("cuMemGetAllocationGranularity", memory_prop(), 0)


def test_create_refuses(drv):
    refused(drv, "cuMulticastCreate", multicast_prop(TEAM, GRAIN // 2), text="multiple of the granularity")
    refused(drv, "cuMulticastCreate", multicast_prop(TEAM, SIZE, int(FABRIC)), code=800)
    prop = multicast_prop(TEAM, SIZE)
    prop.flags = 1
    refused(drv, "cuMulticastCreate", prop)


def test_a_machine_without_multicast_answers_not_supported():
    with machine(multicast_supported=False) as drv:
        assert drv.attribute(0, "MULTICAST_SUPPORTED") == 0
        refused(drv, "cuMulticastCreate", multicast_prop(TEAM, SIZE), code=801)
        refused(drv, "cuMulticastGetGranularity", multicast_prop(TEAM, SIZE), 0, code=801)


def test_a_device_is_added_once_and_no_more_than_the_team(drv, team):
    refused(drv, "cuMulticastAddDevice", team.object, 1, text="already")
    refused(drv, "cuMulticastAddDevice", team.object, 2, text="all 2 devices")
    refused(drv, "cuMulticastAddDevice", team.object, 99, code=101)
    refused(drv, "cuMulticastAddDevice", team.memory[0].handle, 0, text="not a multicast object")


def test_bind_refuses_offsets_sizes_and_flags(drv, team):
    memory = team.memory[0].handle
    bind = "cuMulticastBindMem"
    refused(drv, bind, team.object, GRAIN // 2, memory, 0, GRAIN, 0, text="mcOffset")
    refused(drv, bind, team.object, 0, memory, GRAIN // 2, GRAIN, 0, text="memOffset")
    refused(drv, bind, team.object, 0, memory, 0, GRAIN // 2, 0, text="size")
    refused(drv, bind, team.object, GRAIN, memory, 0, SIZE, 0, text="outside an object")
    refused(drv, bind, team.object, 0, memory, GRAIN, SIZE, 0, text="outside an object")
    refused(drv, bind, team.object, 0, memory, 0, SIZE, 1)
    refused(drv, bind, memory, 0, memory, 0, SIZE, 0)
    refused(drv, bind, team.object, 0, team.object, 0, SIZE, 0)


def test_bind_refuses_memory_of_a_device_outside_the_team(drv, team):
    other = Mapped(drv, SIZE, device=2, devices=(2,))
    refused(drv, "cuMulticastBindMem", team.object, 0, other.handle, 0, SIZE, 0, text="not of the multicast team")
    other.close()


def test_bind_refuses_memory_that_is_not_shareable(drv, team):
    handle = drv.call("cuMemCreate", SIZE, memory_prop(types=NONE), 0)
    refused(drv, "cuMulticastBindMem", team.object, 0, handle, 0, SIZE, 0, text="shareable")
    drv.call("cuMemRelease", handle)


def test_an_overlapping_bind_fails_and_works_after_the_unbind(drv, team):
    team.bind(0)
    refused(drv, "cuMulticastBindMem", team.object, GRAIN, team.memory[0].handle, 0, GRAIN, 0, text="already")
    team.bind(1)  # another device may have the same offsets
    team.unbind(0)
    team.bind(0, 0, GRAIN)
    team.bind(0, GRAIN, GRAIN)
    team.unbind(0, 0, GRAIN)
    team.unbind(0, GRAIN, GRAIN)
    team.unbind(1)


def test_unbind_wants_exactly_what_the_bind_had(drv, team):
    team.bind(0)
    refused(drv, "cuMulticastUnbind", team.object, 0, 0, GRAIN)
    refused(drv, "cuMulticastUnbind", team.object, 0, GRAIN, GRAIN)
    refused(drv, "cuMulticastUnbind", team.object, 1, 0, SIZE)
    team.unbind(0)
    refused(drv, "cuMulticastUnbind", team.object, 0, 0, SIZE)


def test_unbind_after_the_memory_was_freed_fails_and_poisons_a_later_call(drv):
    team = Team(drv)
    team.bind(0)
    team.memory[0].close()
    refused(drv, "cuMulticastUnbind", team.object, 0, 0, SIZE, text="freed before")
    refused(drv, "cuMemCreate", SIZE, memory_prop(), 0, text="earlier cuMulticastUnbind")
    drv.call("cuMemRelease", drv.call("cuMemCreate", SIZE, memory_prop(), 0))
    drv.call("cuMemRelease", team.object)
    team.memory[1].close()


def test_bind_and_map_block_until_all_devices_are_added(drv, capsys):
    team = Team(drv, add=1)
    address = drv.call("cuMemAddressReserve", SIZE, 0, 0, 0)
    refused(
        drv, "cuMulticastBindMem", team.object, 0, team.memory[0].handle, 0, SIZE, 0, code=909, text="deadlock: 1 of 2"
    )
    refused(drv, "cuMemMap", address, SIZE, 0, team.object, 0, code=909, text="deadlock: 1 of 2 devices added")
    assert "deadlock: 1 of 2 devices added" in capsys.readouterr().err
    emulator.configure(multicast_wait=20.0)
    bound = []

    def bind() -> None:
        bound.append(drv.api.cuMulticastBindMem(team.object, 0, team.memory[0].handle, 0, SIZE, 0))

    thread = threading.Thread(target=bind)
    thread.start()
    time.sleep(0.05)
    assert not bound  # blocked
    drv.call("cuMulticastAddDevice", team.object, 1)
    thread.join(10)
    assert [int(answer[0]) for answer in bound] == [0]
    drv.call("cuMemMap", address, SIZE, 0, team.object, 0)
    drv.call("cuMemUnmap", address, SIZE)
    drv.call("cuMemAddressFree", address, SIZE)
    team.unbind(0)
    team.close()


def test_map_of_a_multicast_object(drv, team):
    address = int(drv.call("cuMemAddressReserve", SIZE, 0, 0, 0))
    refused(drv, "cuMemMap", address, GRAIN, GRAIN, team.object, 0, text="offset")
    refused(drv, "cuMemMap", address, GRAIN // 2, 0, team.object, 0, text="multiple")
    drv.call("cuMemMap", address, SIZE, 0, team.object, 0)
    refused(drv, "cuMemSetAccess", address, SIZE, access(2), 1, code=101, text="not of the multicast team")
    for device in range(TEAM):
        team.bind(device)
        drv.call("cuMemSetAccess", address, SIZE, access(device), 1)
    refused(drv, "cuMemsetD8", address, 0, SIZE, text="multicast")  # neither copies nor fills
    data = np.zeros(4, np.uint8)
    refused(drv, "cuMemcpyDtoH", data.ctypes.data, address, 4, text="multicast")
    drv.call("cuMemUnmap", address, SIZE)
    drv.call("cuMemAddressFree", address, SIZE)
    for device in range(TEAM):
        team.unbind(device)


def test_slots_run_out_and_come_back(drv):
    emulator.configure(multicast_slots=2)
    teams = [Team(drv) for _ in range(3)]
    teams[0].bind(0, 0, GRAIN)
    teams[0].bind(0, GRAIN, GRAIN)  # the same object takes no second slot
    teams[1].bind(0)
    refused(drv, "cuMulticastBindMem", teams[2].object, 0, teams[2].memory[0].handle, 0, SIZE, 0, code=2, text="slots")
    teams[1].unbind(0)
    teams[2].bind(0)
    teams[2].unbind(0)
    teams[0].unbind(0, 0, GRAIN)
    teams[0].unbind(0, GRAIN, GRAIN)
    for team in teams:
        team.close()
    emulator.configure(multicast_slots=emulator.Config().multicast_slots)


def test_leaks_name_bindings(drv, team):
    team.bind(1)
    assert any(line.startswith("binding of") and "device 1" in line for line in emulator.leaks())
    team.unbind(1)


# Across processes


PEER = """
import os, sys
from cuda.bindings import driver as cuda
from helpers.emulated import Mapped, POSIX, download
from lamport_numba import driver, emulator
emulator.configure(devices=2, multicast_wait=20.0)
drv = driver.select("emulated")
SIZE = {size}

def say(word):
    print(word, flush=True)

def hear():
    return sys.stdin.readline().strip()

with drv.current(1):
    object = drv.call("cuMemImportFromShareableHandle", int(sys.argv[1]), POSIX)
    memory = Mapped(drv, SIZE, device=1, devices=(1,))
{body}
"""


class Peer:
    """Another process that has device 1 and the multicast object."""

    def __init__(self, fd: int, body: str) -> None:
        indented = "".join(f"    {line}\n" for line in body.strip().splitlines())
        text = PEER.format(size=SIZE, body=indented)
        env = environment.of_ranks({"LAMPORT_NUMBA_DEVICE": "emulated"}, multicast=True)
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, str(fd)],
            env=env, pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def mine(drv):
    """A multicast object, its exported descriptor, and memory of device 0."""
    emulator.configure(multicast_wait=20.0)
    handle = drv.call("cuMulticastCreate", multicast_prop(TEAM, SIZE))
    fd = drv.call("cuMemExportToShareableHandle", handle, POSIX, 0)
    memory = Mapped(drv, SIZE)
    yield handle, fd, memory
    os.close(fd)
    memory.close()
    drv.call("cuMemRelease", handle)


def test_the_team_meets_across_processes(drv, mine):
    handle, fd, memory = mine
    body = """
say("imported")
hear()
drv.call("cuMulticastAddDevice", object, 1)
drv.call("cuMulticastBindMem", object, 0, memory.handle, 0, SIZE, 0)
say("bound")
hear()
drv.call("cuMulticastUnbind", object, 1, 0, SIZE)
say("unbound")
hear()
"""
    peer = Peer(fd, body)
    try:
        assert peer.hear() == "imported"
        peer.say("bind")
        drv.call("cuMulticastAddDevice", handle, 0)
        drv.call(
            "cuMulticastBindMem", handle, 0, memory.handle, 0, SIZE, 0
        )  # blocks until the peer has added its device
        assert peer.hear() == "bound"
        refused(drv, "cuMulticastAddDevice", handle, 1, text="already")
        address = int(drv.call("cuMemAddressReserve", SIZE, 0, 0, 0))
        drv.call("cuMemMap", address, SIZE, 0, handle, 0)
        drv.call("cuMemSetAccess", address, SIZE, access(), 1)
        entry = entry_of(address)
        assert len(entry.members) == TEAM  # the peer's memory is reached as well
        peer.say("unbind")
        assert peer.hear() == "unbound"
        follow()
        assert entry_of(address) is None  # a store would miss the peer
        drv.call("cuMemUnmap", address, SIZE)
        drv.call("cuMemAddressFree", address, SIZE)
        drv.call("cuMulticastUnbind", handle, 0, 0, SIZE)
    finally:
        peer.end()


def entry_of(address):
    from lamport_numba.emulator.machine import MACHINE

    return MACHINE.devices[0].table.find(address)


def follow():
    """What a launch does first."""
    from lamport_numba.emulator.machine import MACHINE

    for mapping in MACHINE.devices[0].multicasts:
        mapping.follow()


def test_a_peer_that_dies_in_the_lock_leaves_a_table_that_works(drv, mine):
    handle, fd, _ = mine
    peer = Peer(fd, """
from lamport_numba.emulator.memory import MEMORY
thing = MEMORY.handle_of(object).object
with thing.locked() as table:
    table.added[0].device = 77     # written, but not committed
    say("locked")
    hear()
""")  # fmt: skip
    try:
        assert peer.hear() == "locked"
        emulator.configure(multicast_wait=0.05)
        refused(drv, "cuMulticastAddDevice", handle, 0, code=909, text="holds the multicast object")
        peer.process.send_signal(signal.SIGKILL)
        peer.process.wait()
        drv.call("cuMulticastAddDevice", handle, 0)
        refused(drv, "cuMulticastAddDevice", handle, 0, text="already")
    finally:
        peer.end()


def test_a_bound_peer_that_dies_does_not_stop_the_others(drv, mine):
    handle, fd, memory = mine
    peer = Peer(fd, """
drv.call("cuMulticastAddDevice", object, 1)
drv.call("cuMulticastBindMem", object, 0, memory.handle, 0, SIZE, 0)
say("bound")
hear()
""")  # fmt: skip
    try:
        drv.call("cuMulticastAddDevice", handle, 0)
        drv.call("cuMulticastBindMem", handle, 0, memory.handle, 0, SIZE, 0)
        assert peer.hear() == "bound"
        peer.process.send_signal(signal.SIGKILL)
        peer.process.wait()
        address = int(drv.call("cuMemAddressReserve", SIZE, 0, 0, 0))
        drv.call("cuMemMap", address, SIZE, 0, handle, 0)
        drv.call("cuMemSetAccess", address, SIZE, access(), 1)
        assert len(entry_of(address).members) == TEAM  # the dead member's words go nowhere
        drv.call("cuMemUnmap", address, SIZE)
        drv.call("cuMemAddressFree", address, SIZE)
        drv.call("cuMulticastUnbind", handle, 0, 0, SIZE)
    finally:
        peer.end()


def test_memory_crosses_processes_by_descriptor(drv):
    mine = Mapped(drv, SIZE)
    fd = drv.call("cuMemExportToShareableHandle", mine.handle, POSIX, 0)
    body = """
theirs = Mapped(drv, SIZE, devices=(1,), handle=object)
say("mapped")
hear()
assert (download(drv, theirs.address, 16) == 0x11111111).all()
drv.call("cuMemsetD32", theirs.address, 0x22222222, 16)
say("filled")
hear()
"""
    peer = Peer(fd, body)
    os.close(fd)
    try:
        assert peer.hear() == "mapped"
        drv.call("cuMemsetD32", mine.address, 0x11111111, 16)
        peer.say("fill")
        assert peer.hear() == "filled"
        assert (download(drv, mine.address, 16) == 0x22222222).all()
    finally:
        peer.end()
        mine.close()


def test_an_import_does_not_survive_a_fork(drv):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = drv.api.cuMemCreate(SIZE, memory_prop(), 0)
        os.write(writer, bytes([int(answer[0])]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == bytes([3])  # not initialised, as a real driver says
    os.close(reader)
    os.close(writer)
