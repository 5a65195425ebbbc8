"""Descriptors on their way between ranks: strangers are dropped, nothing is inherited, nobody waits for ever."""

import logging
import os
import re
import socket
import subprocess
import sys
import threading

import pytest
from helpers.symmetric import Fresh, make, world

from lamport_numba.errors import RendezvousTimeout, SetupError
from lamport_numba.symmetric import handles

RANKS = 3


def with_strangers(monkeypatch, visit):
    """Let ``visit(door)`` happen at every door of rank 1, before any rank comes."""
    real = handles.Door.__init__

    def opened(self):
        real(self)
        if threading.current_thread().name == "rank-1":
            visit(self)

    monkeypatch.setattr(handles.Door, "__init__", opened)


def connect(door):
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.connect(f"\0{door.address['name']}")
    return guest


def message(secret, rank, magic=handles._MAGIC):
    return handles._MESSAGE.pack(magic, secret, rank)


def succeed(caplog, drops, guests=()):
    """A construction works, and so many connections were dropped and logged."""
    caplog.set_level(logging.WARNING, "lamport_numba")
    with Fresh():
        assert world(RANKS, lambda c: make(c).close()) == [None] * RANKS
        for guest in guests:
            guest.close()
    lines = [record.getMessage() for record in caplog.records if "stranger" in record.getMessage()]
    assert len(lines) == drops
    return lines


@pytest.mark.parametrize(
    "say",
    [
        lambda door: b"",
        lambda door: b"hello",
        lambda door: b"x" * 5000,
        lambda door: message(bytes(16), 0),
        lambda door: message(door.secret, 0, b"LNother!"),
        lambda door: message(door.secret, 1),  # the receiver itself
        lambda door: message(door.secret, 99),
    ],
    ids=["nothing", "short", "long", "secret", "magic", "self", "rank"],
)
def test_who_says_the_wrong_thing_is_dropped(say, monkeypatch, caplog):
    guests = []

    def visit(door):
        guest = connect(door)
        text = say(door)
        with open(os.devnull) as file:
            if text:
                socket.send_fds(guest, [text], [file.fileno(), file.fileno()])
        guests.append(guest)
        if not text:
            guest.close()

    with_strangers(monkeypatch, visit)
    (line,) = succeed(caplog, 1, guests)
    assert f"rank 1: dropped a connection of a stranger: process {os.getpid()} of user {os.geteuid()}" in line


def test_who_says_nothing_is_not_waited_for(monkeypatch, caplog):
    guests = []
    with_strangers(monkeypatch, lambda door: guests.append(connect(door)))
    succeed(caplog, 0, guests)
    assert len(guests) == 1


OTHER_PROCESS = """
import socket, sys, os
guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
guest.connect("\\0" + sys.argv[1])
with open(os.devnull) as file:
    socket.send_fds(guest, [bytes.fromhex(sys.argv[2])], [file.fileno()])
print(os.getpid())
"""


def test_another_process_is_dropped_even_with_the_secret(monkeypatch, caplog):
    pids = []

    def visit(door):
        text = message(door.secret, 0).hex()
        argv = [sys.executable, "-c", OTHER_PROCESS, door.address["name"], text]
        pids.append(int(subprocess.run(argv, capture_output=True, check=True, timeout=30).stdout))

    with_strangers(monkeypatch, visit)
    (line,) = succeed(caplog, 1)
    assert f"process {pids[0]} of user" in line


def test_a_crowd_of_strangers_changes_nothing(monkeypatch, caplog):
    guests = []
    with_strangers(monkeypatch, lambda door: guests.extend(connect(door) for _ in range(handles._BACKLOG)))
    succeed(caplog, 0, guests)


def test_names_are_unguessable_and_leave_no_file():
    names = {handles.Door().address["name"] for _ in range(50)}
    assert len(names) == 50
    assert all(re.fullmatch(r"lamport-numba-[0-9a-f]{32}", name) for name in names)
    assert not [entry for entry in os.listdir() if entry.startswith("lamport-numba-")]


def test_the_listener_is_checked_before_a_descriptor_is_sent(monkeypatch):
    """Who sends makes sure that it speaks to the right process."""
    monkeypatch.setattr(handles._Post, "_stranger", lambda self, peer, rank: "somebody" if rank == 2 else None)
    with Fresh():
        errors = world(3, make)
    assert all(isinstance(error, SetupError) for error in errors)
    assert any("the socket of rank 2 belongs to process" in str(error) for error in errors)


def test_received_descriptors_are_not_inherited(monkeypatch):
    seen = []
    real = handles.Parcel._import

    def checked(self, exported):
        seen.append(os.get_inheritable(exported))
        return real(self, exported)

    monkeypatch.setattr(handles.Parcel, "_import", checked)
    assert world(RANKS, lambda c: make(c).close()) == [None] * RANKS
    assert seen == [False] * (RANKS * (RANKS - 1))


def test_a_descriptor_that_does_not_come_is_missed_by_name(monkeypatch):
    def advance(self):
        return real(self) if self._rank != 1 else False

    real = handles._Post.advance
    monkeypatch.setattr(handles._Post, "advance", advance)

    def program(c):
        c.timeout = 0.4
        make(c)

    with Fresh():
        errors = world(3, program)
    assert isinstance(errors[0], RendezvousTimeout)
    assert {errors[0].missing, errors[2].missing} == {(1,)}
    assert errors[0].stage == "exchange handles"


def test_no_room_for_a_descriptor_says_so(monkeypatch):
    """The system drops descriptors that exceed the receiver's limit; the message comes all the same."""
    monkeypatch.setattr(socket, "send_fds", lambda peer, messages, fds: peer.send(messages[0]))
    with Fresh():
        errors = world(2, make)
    assert len({str(error) for error in errors}) == 1
    assert "no room for rank 1's descriptor; raise the limit with 'ulimit -n'" in str(errors[0])


def test_in_another_network_namespace_it_is_an_error_at_once(monkeypatch):
    from lamport_numba.symmetric import survey as module

    monkeypatch.setattr(module, "namespace", lambda kind: threading.get_ident() if kind == "net" else 0)
    with Fresh() as run:
        errors = world(2, make)
    assert run.seconds < 5
    assert len({str(error) for error in errors}) == 1
    assert "several network namespaces (containers) of one host" in str(errors[0])


def lost(monkeypatch, how):
    """Lose each rank's first message, before or after it was taken; returns who lost one."""
    losers = set()
    sender_of = handles._Post._sender

    def forgetful(post, guest, message, fds):
        sender = sender_of(post, guest, message, fds)
        if id(post) not in losers:
            losers.add(id(post))
            how(post, guest, sender)
            return None
        return sender

    monkeypatch.setattr(handles._Post, "_sender", forgetful)
    return losers


def test_a_message_that_got_lost_is_sent_again(monkeypatch):
    losers = lost(monkeypatch, lambda post, guest, sender: guest.close())
    assert world(3, lambda communicator: make(communicator).close()) == [None] * 3
    assert len(losers) == 3


def test_without_an_answer_a_lost_message_is_missed(monkeypatch):
    lost(monkeypatch, lambda post, guest, sender: guest.close())
    monkeypatch.setattr(handles._Post, "_taken", lambda post, sent, target: sent.close() or True)
    found = world(2, make, timeout=1)
    assert [type(error) for error in found] == [RendezvousTimeout] * 2
