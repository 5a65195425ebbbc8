"""What vprintf makes of a C format and packed values."""

from __future__ import annotations

import ctypes
import struct

import pytest

from lamport_numba.emulator.ptx.printing import format_text


@pytest.mark.parametrize(
    ("text", "packed", "expect"),
    [
        (b"plain %% text\n", b"", b"plain % text\n"),
        (b"%d %u %x", struct.pack("<iII", -5, 7, 255), b"-5 7 ff"),
        (b"%lld|%5d|%-5d|", struct.pack("<qii", -(1 << 40), 42, 43), b"-1099511627776|   42|43   |"),
        (b"%d %f %d", struct.pack("<i4xdi", 1, 2.5, 3), b"1 2.500000 3"),
        (b"%.3e %g", struct.pack("<dd", 12345.678, 0.5), b"1.235e+04 0.5"),
        (b"%c%c", struct.pack("<ii", 104, 105), b"hi"),
        (b"%p", struct.pack("<Q", 0xABC), b"0xabc"),
        (b"%+d %05d %#x", struct.pack("<iii", 1, 42, 16), b"+1 00042 0x10"),
    ],
)
def test_formats(text: bytes, packed: bytes, expect: bytes) -> None:
    memory = ctypes.create_string_buffer(packed + bytes(16))
    aligned = ctypes.addressof(memory)
    assert aligned % 8 == 0
    assert format_text(text, aligned) == expect


def test_strings() -> None:
    word = ctypes.create_string_buffer(b"word")
    memory = ctypes.create_string_buffer(struct.pack("<QQ", ctypes.addressof(word), 0))
    assert format_text(b"<%s> <%s>", ctypes.addressof(memory)) == b"<word> <(null)>"
