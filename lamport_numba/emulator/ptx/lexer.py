"""PTX text to tokens: one regular expression. An opcode with its modifiers (``ld.shared::cta.u32``) is one word."""

from __future__ import annotations

import re
from typing import NamedTuple

from ...errors import PtxError

__all__ = ["Token", "tokens"]

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|//[^\n]*)|(?P<newline>\n)|(?P<comment>/\*.*?\*/)|(?P<string>"[^"\n]*")
    |(?P<number>0[fF][0-9a-fA-F]{8}\b|0[dD][0-9a-fA-F]{16}\b|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
        |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
    |(?P<word>[%$_A-Za-z][\w$]*(?:(?:\.|::)[A-Za-z0-9_]+)*)
    |(?P<directive>\.[A-Za-z_]\w*(?:::\w+)?)
    |(?P<punct>[{}()\[\],;:=+\-!@|<>])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)


class Token(NamedTuple):
    kind: str
    text: str
    line: int


def tokens(text: str, lines: list[str]) -> list[Token]:
    """All tokens of a text, and one that marks its end."""
    found: list[Token] = []
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise PtxError(f"unexpected character {text[at]!r}", line=line, text=lines[line - 1])
        kind = match.lastgroup or ""
        if kind not in ("space", "newline", "comment"):
            found.append(Token(kind, match.group(), line))
        elif kind != "space":
            line += match.group().count("\n")
        at = match.end()
    found.append(Token("end", "end of file", min(line, len(lines))))
    return found
