#!/usr/bin/env python3
"""The stress run with one mistake in the kernel, to see what hardware makes of it. Not for use.

    mpirun -n 2 python3 benchmarks/negative_controls.py one-generation --calls 1M --graph

Each mistake is a small change of ptx/lamport_peer.ptx; `foreign` leaves the kernel alone and puts one that never waits
between the calls. The options are those of `python -m lamport_numba stress`, and the exit status is that of the stress
run: 1 where the mistake shows.
"""

from __future__ import annotations

import sys

from lamport_numba import cli, ptx

FILE = "lamport_peer.ptx"

# name -> changes (text, what stands in its place), each text exactly once in the file
MISTAKES: dict[str, list[tuple[str, str]]] = {
    "one-generation": [("setp.eq.u32 %done, %next, 3;", "setp.eq.u32 %done, %next, 1;")],
    "generation-before-wait": [
        (
            "    griddepcontrol.wait;\n",
            "    @%active ld.global.u32 %generation, [%generation_at];\n    griddepcontrol.wait;\n",
        ),
        ("    ld.global.u32 %generation, [%generation_at];\n    @%header bra", "    @%header bra"),
    ],
    "word-0-only": [
        ("    setp.eq.or.b32 %late, %w1, %sentinel, %late;\n", ""),
        ("    setp.eq.or.b32 %late, %w2, %sentinel, %late;\n", ""),
        ("    setp.eq.or.b32 %late, %w3, %sentinel, %late;\n", ""),
    ],
    "foreign": [],
}


def with_mistake(text: str, name: str) -> str:
    """The kernel's text with the mistake; ValueError if the text is not what the mistake was made for."""
    for old, new in MISTAKES[name]:
        if text.count(old) != 1:
            raise ValueError(f"{name}: {old!r} is {text.count(old)} times in {FILE}; expected once")
        text = text.replace(old, new)
    return text


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in MISTAKES:
        print(f"expected one of {', '.join(MISTAKES)}, then options of the stress command", file=sys.stderr)
        return 2
    name, *rest = arguments
    shipped = ptx.read
    ptx.read = lambda file: with_mistake(shipped(file), name) if file == FILE else shipped(file)
    return cli.main(["stress", "--transport", "peer", *rest, *(["--foreign"] if name == "foreign" else [])])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
