"""Memory handles on their way from rank to rank.

Within a host a handle is a file descriptor, and travels by SCM_RIGHTS over an abstract Unix socket: nothing is left in
a file system, the name cannot be guessed, both ends check the other's credentials, and a message must carry a secret
that came over MPI. Between hosts of one NVLink domain it is 64 bytes (FABRIC) and travels by MPI.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Final

from .. import driver as seam
from ..driver import structs
from ..errors import DriverError, SetupError
from .communicator import Communicator

if TYPE_CHECKING:
    from .survey import Survey

__all__ = ["FABRIC", "POSIX", "Parcel", "allocation", "fabric_works", "handle_kind", "handle_type"]

log = logging.getLogger("lamport_numba")

POSIX: Final = "posix"
FABRIC: Final = "fabric"

_MESSAGE: Final = struct.Struct("<8s16sI")  # magic, the receiver's secret, the sender's rank
_MAGIC: Final = b"LNhandle"
_TAKEN: Final = b"T"  # the receiver's answer
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_AHEAD: Final = 2  # how many handles a rank may send more than it has received: bounds the descriptors in flight
_BACKLOG: Final = 128
_RETRY: Final = 1e-3  # seconds after which a receiver that was too busy is tried again


def handle_type(kind: str) -> Any:
    """The driver's enum for "posix" or "fabric"."""
    types = structs.CUmemAllocationHandleType
    return {
        POSIX: types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        FABRIC: types.CU_MEM_HANDLE_TYPE_FABRIC,
    }[kind]


def handle_kind(found: Survey, probe: Callable[[], list[bool]]) -> str:
    """Which kind of handle serves all ranks. Raises SetupError, the same on all, if none does.

    File descriptors where they can be passed; else FABRIC, if ``probe()`` (collective: each rank really makes and
    exports one) worked on all ranks.
    """
    one_host = not (found.several("boot") or found.several("network"))
    if one_host and all(facts.fds for facts in found.ranks):
        return POSIX
    works = probe()
    if all(works):
        return FABRIC
    without = [rank for rank, ok in enumerate(works) if not ok]
    if found.several("boot"):
        where = f"the ranks are on several hosts: {found.by('host')}"
    elif found.several("network"):
        where = f"the ranks are in several network namespaces (containers) of one host: {found.by('network')}"
    else:
        where = "a device cannot share memory by file descriptors"
    raise SetupError(
        f"{where}; memory can then only be shared by FABRIC handles, which do not work on rank"
        f"{'s' if len(without) > 1 else ''} {', '.join(map(str, without))} (they need one NVLink domain, the IMEX "
        "daemon and an IMEX channel in /dev/nvidia-caps-imex-channels)",
        rank=without[0],
        step="handles",
    )


def allocation(device: int, kind: str) -> Any:
    """The properties of memory of ``device`` that other processes can map."""
    prop = structs.CUmemAllocationProp()
    prop.type = structs.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = structs.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = device
    prop.requestedHandleTypes = handle_type(kind)
    return prop


def read_write(device: int) -> Any:
    """An access descriptor for ``device``."""
    access = structs.CUmemAccessDesc()
    access.location.type = structs.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = structs.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def fabric_works(drv: seam.Driver, device: int, claimed: bool) -> bool:
    """Make and export a small FABRIC allocation: only that proves that it can be done."""
    if not claimed:
        return False
    prop = allocation(device, FABRIC)
    minimum = structs.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    made = None
    try:
        made = drv.call("cuMemCreate", drv.call("cuMemGetAllocationGranularity", prop, minimum), prop, 0)
        drv.call("cuMemExportToShareableHandle", made, handle_type(FABRIC), 0)
        return True
    except DriverError as error:
        log.debug("fabric handles do not work here: %s", error)
        return False
    finally:
        if made is not None:
            drv.call("cuMemRelease", made)


class Door:
    """Where this rank receives file descriptors: a listening socket with an unguessable name, and a secret."""

    def __init__(self) -> None:
        name = f"lamport-numba-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(16)
        self.address = {"name": name, "secret": self.secret.hex()}  # travels over MPI
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.socket.bind(f"\0{name}")
        self.socket.listen(_BACKLOG)


class Parcel:
    """A handle to be passed to the other ranks; with None, what receives theirs. To be closed.

    ``address`` is what all ranks must know of each other's (through a step) before ``exchange``.
    """

    def __init__(self, drv: seam.Driver, kind: str, handle: int | None) -> None:
        self._drv = drv
        self._kind = kind
        self._door: Door | None = None
        self._fd: int | None = None
        self.address: dict[str, Any] = {}
        if kind == POSIX:
            self._door = Door()
            self.address = dict(self._door.address)
        try:
            if handle is not None:
                exported = drv.call("cuMemExportToShareableHandle", handle, handle_type(kind), 0)
                if kind == POSIX:
                    self._fd = int(exported)
                else:
                    self.address = {"fabric": bytes(exported.data).hex()}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close what only the exchange needed. Idempotent."""
        if self._door is not None:
            self._door.socket.close()
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def exchange(
        self,
        communicator: Communicator,
        found: Survey,
        addresses: Sequence[dict[str, Any]],
        senders: Collection[int],
        take: Callable[[int, int], None],
        stage: str,
    ) -> Exception | None:
        """Send this rank's handle to all others if it is one of ``senders``; ``take(rank, handle)`` what comes.

        Collective. A handle that was taken is the taker's to release. Returns the first exception on this rank, for
        the vote that must follow, so that the others are served all the same; raises RendezvousTimeout naming the
        ranks whose descriptor did not come.
        """
        if self._door is None:
            return self._import_all(communicator.rank, addresses, senders, take)

        def take_fd(rank: int, fd: int) -> None:
            take(rank, self._import(fd))

        post = _Post(communicator, found, self._door, addresses, senders, self._fd, take_fd)
        try:
            communicator.wait(post.advance, post.missing, stage, post.idle)
        finally:
            post.close()
        return post.error

    def _import_all(
        self, me: int, addresses: Sequence[dict[str, Any]], senders: Collection[int], take: Callable[[int, int], None]
    ) -> Exception | None:
        try:
            for rank in senders:
                if rank != me:
                    take(rank, self._import(bytes.fromhex(addresses[rank]["fabric"])))
        except Exception as error:
            return error
        return None

    def _import(self, exported: int | bytes) -> int:
        return int(self._drv.call("cuMemImportFromShareableHandle", exported, handle_type(self._kind)))


class _Post:
    """One exchange of descriptors, without ever blocking."""

    def __init__(
        self,
        communicator: Communicator,
        found: Survey,
        door: Door,
        addresses: Sequence[dict[str, Any]],
        senders: Collection[int],
        fd: int | None,
        take: Callable[[int, int], None],
    ) -> None:
        rank, size = communicator.rank, communicator.size
        self.error: Exception | None = None
        self._rank = rank
        self._found = found
        self._door = door
        self._addresses = addresses
        self._take = take
        self._fd = fd
        self._expected = {sender for sender in senders if sender != rank}
        self._heard: set[int] = set()
        # each rank starts with another receiver
        self._targets = [(rank + step) % size for step in range(1, size)] if rank in senders else []
        self._ahead = _AHEAD if len(senders) > 1 else size
        self._outgoing: socket.socket | None = None
        self._sent: list[tuple[socket.socket, int]] = []  # to a target that has not said that it took the handle
        self._guests: list[socket.socket] = []  # accepted, and have not spoken yet

    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self._expected.union(self._targets, (target for _, target in self._sent))))

    def advance(self) -> bool:
        """Send and receive what can be at once; True when all is done."""
        while self._targets and self._ahead > 0 and self._send(self._targets[0]):
            self._targets.pop(0)
            self._ahead -= 1
        self._accept()
        for guest in list(self._guests):
            self._hear(guest)
        self._sent = [sent for sent in self._sent if not self._taken(*sent)]
        return not self._targets and not self._sent and not self._expected

    def idle(self, seconds: float) -> None:
        """Sleep until something comes, at most ``seconds``."""
        poll = select.poll()
        for listened in (self._door.socket, *self._guests, *(sent for sent, _ in self._sent)):
            poll.register(listened, select.POLLIN)
        if self._outgoing is not None:
            seconds = min(seconds, _RETRY)
        poll.poll(seconds * 1000)

    def close(self) -> None:
        for guest in (*self._guests, *(sent for sent, _ in self._sent)):
            guest.close()
        if self._outgoing is not None:
            self._outgoing.close()

    # Sending

    def _send(self, target: int) -> bool:
        if self._outgoing is None:
            self._outgoing = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._outgoing.setblocking(False)
        address = self._addresses[target]
        try:
            if not _connected(self._outgoing):
                self._outgoing.connect(f"\0{address['name']}")
            if self._stranger(self._outgoing, target) is not None:
                raise SetupError(
                    f"the socket of rank {target} belongs to {_who(self._outgoing)}",
                    rank=target,
                    step="exchange handles",
                )
            message = _MESSAGE.pack(_MAGIC, bytes.fromhex(address["secret"]), self._rank)
            assert self._fd is not None
            socket.send_fds(self._outgoing, [message], [self._fd])
        except BlockingIOError:  # its backlog is full
            return False
        except ConnectionError:  # it has left: the roll call or the deadline tells
            self._outgoing.close()
            self._outgoing = None
            return False
        self._sent.append((self._outgoing, target))
        self._outgoing = None
        return True

    def _taken(self, sent: socket.socket, target: int) -> bool:
        """Whether no answer is to be waited for: the target took the handle, or it did not and gets it again."""
        try:
            answer = sent.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            answer = b""
        sent.close()
        if answer != _TAKEN:
            self._targets.append(target)
            self._ahead += 1
        return True

    # Receiving

    def _accept(self) -> None:
        while True:
            try:
                guest, _ = self._door.socket.accept()
            except BlockingIOError:
                return
            guest.setblocking(False)
            reason = self._stranger(guest, None)
            if reason is None:
                self._guests.append(guest)
            else:
                self._drop(guest, reason)

    def _hear(self, guest: socket.socket) -> None:
        room = socket.CMSG_SPACE(4 * array.array("i").itemsize)
        try:
            message, controls, _, _ = guest.recvmsg(_MESSAGE.size + 1, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError as error:
            message, controls = b"", []
            log.debug("a connection broke: %s", error)
        fds = array.array("i")
        for level, kind, data in controls:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        self._guests.remove(guest)
        try:
            sender = self._sender(guest, message, len(fds))
            if sender is not None:
                with contextlib.suppress(OSError):  # then it sends again
                    guest.send(_TAKEN)
                guest.close()
                if sender not in self._heard:
                    self._heard.add(sender)
                    self._expected.discard(sender)
                    self._ahead += 1
                    self._receive(sender, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _receive(self, sender: int, fds: array.array[int]) -> None:
        if self.error is not None:
            return
        try:
            if not fds:
                raise OSError(errno.EMFILE, f"no room for rank {sender}'s descriptor; raise the limit with 'ulimit -n'")
            os.set_inheritable(fds[0], False)
            self._take(sender, fds[0])
        except Exception as error:
            self.error = error

    def _sender(self, guest: socket.socket, message: bytes, fds: int) -> int | None:
        """The rank that a message is from; None, and the guest dropped, if it is not what a rank sends."""
        reason = "that sent something else than a handle"
        if len(message) == _MESSAGE.size and fds <= 1:
            magic, secret, sender = _MESSAGE.unpack(message)
            known = sender in self._expected or sender in self._heard
            if magic == _MAGIC and secrets.compare_digest(secret, self._door.secret) and known:
                if self._stranger(guest, sender) is None:
                    return int(sender)
                reason = f"that is not rank {sender}"
        self._drop(guest, f"{_who(guest)} {reason}")
        return None

    def _stranger(self, peer: socket.socket, rank: int | None) -> str | None:
        """Who is at the other end, if it is not ``rank`` (None: if it is no rank of ours at all)."""
        pid, uid, _ = _credentials(peer)
        ranks = self._found.ranks if rank is None else [self._found.ranks[rank]]
        for facts in ranks:
            # pids are only comparable within one process namespace
            if facts.uid == uid and (facts.pid == pid or facts.processes != self._found.mine.processes):
                return None
        return f"process {pid} of user {uid}"

    def _drop(self, guest: socket.socket, reason: str) -> None:
        log.warning("rank %d: dropped a connection of a stranger: %s", self._rank, reason)
        guest.close()


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def _who(peer: socket.socket) -> str:
    pid, uid, _ = _credentials(peer)
    return f"process {pid} of user {uid}"


def _connected(peer: socket.socket) -> bool:
    try:
        peer.getpeername()
    except OSError:
        return False
    return True
