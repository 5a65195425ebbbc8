"""The order of a kernel's text around programmatic dependent launch (protocol, I6)."""

from __future__ import annotations

import re

import pytest

from lamport_numba import ptx

FILES = ["lamport_peer.ptx", "lamport_multicast.ptx", "tagged_peer.ptx", "tagged_multicast.ptx"]
TABLE = re.compile(r"ld\.global\.u64 %(?:mine|peer)_base,")  # the addresses of the ranks' memory: no kernel writes them
ACCESS = re.compile(r"^\s*(?:@!?%\w+\s+)?((?:ld|st|atom|red|multimem\.st)\.\S+)\s+(.*);")


def early(text: str) -> list[str]:
    """What touches memory that an earlier kernel may write, or lets dependents go, before the first wait."""
    found = []
    for line in code(text).split("griddepcontrol.wait;")[0].splitlines():
        access = ACCESS.match(line)
        if access and not access[1].startswith("ld.param") and not TABLE.search(line):
            found.append(line.strip())
        if "griddepcontrol.launch_dependents" in line:
            found.append(line.strip())
    return found


def code(text: str) -> str:
    """The text without comments."""
    return re.sub(r"//.*", "", text)


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_read_and_nobody_let_go_before_the_wait(name: str) -> None:
    text = code(ptx.read(name))
    assert text.count("griddepcontrol.wait;") == 1
    assert text.count("griddepcontrol.launch_dependents;") == 1
    assert early(text) == []


def test_what_comes_too_early_is_seen() -> None:
    text = ptx.read("lamport_peer.ptx")
    wait = "    griddepcontrol.wait;\n"
    load = "    @%active ld.global.u32 %generation, [%generation_at];\n"
    go = "    griddepcontrol.launch_dependents;\n"
    assert early(text.replace(wait, load + wait)) == [load.strip()]
    assert early(text.replace(go, "").replace(wait, go + wait)) == [go.strip()]
