"""The system calls under emulated memory: memfds and mappings at chosen addresses."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap as _mmap
import os
from typing import Final

__all__ = ["ANONYMOUS", "PAGE", "close", "make_memfd", "map_at", "map_shared", "protect", "reserve", "unmap"]

PAGE: Final = _mmap.PAGESIZE
_NONE, _READ, _WRITE = 0, _mmap.PROT_READ, _mmap.PROT_WRITE
_FIXED: Final = 0x10
_NORESERVE: Final = 0x4000
ANONYMOUS: Final = -1
_SEAL: Final = 1033  # F_ADD_SEALS
_SEAL_SIZE: Final = 1 | 2 | 4  # no more seals, no shrinking, no growing: a mapping can never end in SIGBUS
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _mapped(address: int, size: int, rights: int, flags: int, fd: int, offset: int) -> int:
    got = _libc.mmap(address, size, rights, flags, fd, offset)
    if got is None or got == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return int(got)


def reserve(size: int, alignment: int, wish: int = 0) -> int:
    """Take an address range that nothing may touch yet."""
    flags = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | _NORESERVE
    if alignment <= PAGE:
        return _mapped(wish, size, _NONE, flags, -1, 0)
    start = _mapped(wish, size + alignment, _NONE, flags, -1, 0)
    base = -(-start // alignment) * alignment
    if base > start:
        unmap(start, base - start)
    tail = start + size + alignment - (base + size)
    if tail:
        unmap(base + size, tail)
    return base


def map_at(base: int, size: int, fd: int = ANONYMOUS, offset: int = 0, *, access: bool = False) -> None:
    """Replace what is at ``base`` by ``fd`` (or by nothing but the reservation), at first without any access."""
    rights = _READ | _WRITE if access else _NONE
    if fd == ANONYMOUS:
        flags = _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
    else:
        flags = _mmap.MAP_SHARED | _FIXED
    _mapped(base, size, rights, flags, fd, offset)


def map_shared(fd: int, size: int, offset: int = 0) -> int:
    """Map ``fd`` anywhere, to read and write."""
    return _mapped(0, size, _READ | _WRITE, _mmap.MAP_SHARED, fd, offset)


def map_anonymous(size: int) -> int:
    """Fresh memory of this process alone."""
    return _mapped(0, size, _READ | _WRITE, _mmap.MAP_PRIVATE | _mmap.MAP_ANONYMOUS | _NORESERVE, -1, 0)


def protect(base: int, size: int, accessible: bool) -> None:
    """Let host code touch a mapping, or not."""
    if _libc.mprotect(base, size, _READ | _WRITE if accessible else _NONE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mprotect at {base:#x}: {os.strerror(code)}")


def unmap(base: int, size: int) -> None:
    """Give an address range back to the system."""
    _libc.munmap(base, size)


def make_memfd(name: str, size: int) -> int:
    """A file of ``size`` bytes in memory whose size is fixed; no child inherits its descriptor."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, _SEAL, _SEAL_SIZE)
    except OSError:
        os.close(fd)
        raise
    return fd


def close(fd: int) -> None:
    """Close a descriptor; one that somebody has closed already is nobody's loss."""
    with contextlib.suppress(OSError):
        os.close(fd)
