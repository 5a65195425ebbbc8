"""Functions that a device library offers and a module only declares: vprintf, and the end of a failed assertion."""

from __future__ import annotations

import ctypes
import re
import struct
import sys

from . import layout
from .memory import Access, window_pointer
from .syntax import Instruction, Symbol
from .translate import Mods, Translator, instruction

__all__ = ["HOOK", "format_text"]

_SPEC = re.compile(rb"%([-+ #0]*)(\d*)(?:\.(\d*))?(hh|h|ll|l|z|j|t)?([diouxXcsfFeEgGp%])")


@instruction("external")
def _external(t: Translator, item: Instruction, mods: Mods) -> None:
    if mods.take("__assertfail", "__assert_fail"):
        t.fault(layout.F_ASSERT)
        return
    if not mods.take("vprintf"):
        raise t.fail(f"calls of {item.mods[0]} are not emulated")
    t.count(3)
    addresses = []
    for operand in item.operands[:2]:
        assert isinstance(operand, Symbol)
        assert operand.target is not None
        addresses.append((t.local_base() + t.offsets[operand.target]).load("i64"))
    text, values = addresses
    place = t.c.variable("ptr")
    place.set(t.c.const("ptr", 0))
    with t.c.when(values.ne(0)):
        place.set(window_pointer(t, values, Access("", "", "", "b64", 1), t.site(8)))
    answer = t.c.call("i32", "print_hook", text, place.get())
    result = item.operands[2]
    assert isinstance(result, Symbol)
    assert result.target is not None
    (t.local_base() + t.offsets[result.target]).store(answer)


def format_text(text: bytes, values: int) -> bytes:
    """Fill in a C format from the packed values at this address; each is aligned to its own size."""
    at = values
    found = []
    end = 0
    for match in _SPEC.finditer(text):
        found.append(text[end : match.start()])
        end = match.end()
        flags, width, digits, length, kind = match.groups()
        if kind == b"%":
            found.append(b"%")
            continue
        size = 4 if kind in b"diouxXc" and length not in (b"ll", b"l", b"z", b"j", b"t") else 8
        at += -at % size
        raw = ctypes.string_at(at, size)
        at += size
        value: object
        if kind in b"fFeEgG":
            value = struct.unpack("<d", raw)[0]
        elif kind == b"s":
            address = int.from_bytes(raw, "little")
            value = ctypes.string_at(address) if address else b"(null)"
        else:
            value = int.from_bytes(raw, "little", signed=kind in b"di")
        if kind == b"p":
            flags, kind = flags + b"#", b"x"
        if kind == b"c":
            value = bytes([int(str(value)) & 255])
        precision = b"." + digits if digits is not None else b""
        found.append((b"%" + flags + width + precision + kind) % (value,))
    found.append(text[end:])
    return b"".join(found)


def _print(text: int, values: int | None) -> int:
    """What native code calls: print to this process's standard output."""
    try:
        line = format_text(ctypes.string_at(text), values or 0)
        sys.stdout.write(line.decode("utf-8", "replace"))
        return len(line)
    except Exception:  # an exception cannot pass through native code
        return -1


HOOK = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.c_void_p)(_print)
