#!/usr/bin/env python3
"""The stress run with one mistake in the kernel, to see what hardware makes of it. Not for use.

    mpirun -n 2 python3 benchmarks/negative_controls.py one-generation --calls 1M --graph

Each mistake is a small change of ptx/lamport_peer.ptx; `foreign` leaves the kernel alone and puts one that never waits
between the calls. The options are those of `python -m lamport_numba stress`, and the exit status is that of the stress
run: 1 where the mistake shows.
"""

from __future__ import annotations

import re
import sys

from lamport_numba import cli, ptx

FILE = "lamport_peer.ptx"

# name -> changes (pattern, what stands in its place, how often it must be there)
MISTAKES: dict[str, list[tuple[str, str, int]]] = {
    "one-generation": [(r"(setp\.eq\.u32 %done, %next, )3;", r"\g<1>1;", 1)],
    "generation-before-wait": [
        (
            r"    griddepcontrol\.wait;\n(    @!%active bra PUBLISHED;\s*)ld\.global\.u32 (%generation, \[\S+\];)",
            r"    @%active ld.global.u32 \g<2>\n    griddepcontrol.wait;\n\g<1>",
            1,
        )
    ],
    "word-0-only": [(r"    setp\.eq\.or\.b32 %late, %w[123], \S+ %late;\n", "", 3)],
    "foreign": [],
}


def with_mistake(text: str, name: str) -> str:
    """The kernel's text with the mistake; ValueError if the text is not what the mistake was made for."""
    for pattern, new, often in MISTAKES[name]:
        text, found = re.subn(pattern, new, text)
        if found != often:
            raise ValueError(f"{name}: {pattern!r} is {found} times in {FILE}; expected {often}")
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
