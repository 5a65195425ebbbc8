"""How fast the emulated device runs PTX: native time of a launch, time a GPU thread, translation and the cache.

    python benchmarks/emulator_native.py [--json FILE]

Two ranks of one process take turns on one core, every check on. All times are processor time of the thread.
"""

from __future__ import annotations

import argparse
import json
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from lamport_numba import ptx as files
from lamport_numba.emulator import ptx
from lamport_numba.emulator.grid import AddressTable, Fabric, Grid, Kind, Status
from lamport_numba.emulator.ptx import module as loaded
from lamport_numba.emulator.ptx import native

EMPTY = """.version 8.1
.target sm_90
.address_size 64
.entry empty() { ret; }
"""


# A bare Lamport exchange of one pack a thread: publish, trigger, poll, hand out, reset, move the generation on.
EXCHANGE = """.version 8.1
.target sm_90
.address_size 64
.entry exchange(.param .u64 input, .param .u64 output, .param .u64 mine, .param .u64 peer, .param .u64 generations,
    .param .u32 packs, .param .u32 rank)
{
    .reg .pred %p, %active; .reg .b32 %i, %t, %n, %packs, %rank, %g, %s, %w<4>;
    .reg .b64 %a, %b, %from, %to, %gen, %off;
    mov.u32 %i, %ctaid.x; mov.u32 %n, %ntid.x; mov.u32 %t, %tid.x; mad.lo.u32 %i, %i, %n, %t;
    ld.param.u32 %packs, [packs]; setp.lt.u32 %active, %i, %packs; mul.wide.u32 %off, %i, 16;
    ld.param.u64 %gen, [generations]; shr.u32 %n, %i, 5; mul.wide.u32 %a, %n, 4; add.u64 %gen, %gen, %a;
    mov.b32 %s, 0x80000000;
    griddepcontrol.wait;
    ld.global.u32 %g, [%gen];
    mul.lo.u32 %n, %packs, 32; mul.wide.u32 %a, %n, %g; add.u64 %a, %a, %off; mul.wide.u32 %b, %packs, 16;
    ld.param.u64 %from, [mine]; ld.param.u64 %to, [peer]; add.u64 %from, %from, %a; add.u64 %to, %to, %a;
    ld.param.u32 %rank, [rank]; setp.eq.u32 %p, %rank, 0; @%p add.u64 %from, %from, %b; @!%p add.u64 %to, %to, %b;
    @!%active bra PUBLISHED;
    ld.param.u64 %a, [input]; add.u64 %a, %a, %off; ld.global.v4.b32 {%w0, %w1, %w2, %w3}, [%a];
    setp.eq.b32 %p, %w0, %s; selp.b32 %w0, 0, %w0, %p; setp.eq.b32 %p, %w1, %s; selp.b32 %w1, 0, %w1, %p;
    setp.eq.b32 %p, %w2, %s; selp.b32 %w2, 0, %w2, %p; setp.eq.b32 %p, %w3, %s; selp.b32 %w3, 0, %w3, %p;
    st.relaxed.sys.global.v4.b32 [%to], {%w0, %w1, %w2, %w3};
PUBLISHED:
    griddepcontrol.launch_dependents;
    @!%active bra COLLECTED;
POLL:
    ld.relaxed.sys.global.v4.b32 {%w0, %w1, %w2, %w3}, [%from];
    setp.eq.b32 %p, %w0, %s; setp.eq.or.b32 %p, %w1, %s, %p; setp.eq.or.b32 %p, %w2, %s, %p;
    setp.eq.or.b32 %p, %w3, %s, %p; @%p bra POLL;
    st.global.v4.b32 [%from], {%s, %s, %s, %s};
    ld.param.u64 %a, [output]; add.u64 %a, %a, %off; st.global.v4.b32 [%a], {%w0, %w1, %w2, %w3};
COLLECTED:
    bar.warp.sync 0xffffffff;
    and.b32 %n, %t, 31; setp.eq.u32 %p, %n, 0; add.u32 %g, %g, 1; setp.eq.and.u32 %active, %g, 3, %p;
    @%active mov.b32 %g, 0;
    @%p st.global.u32 [%gen], %g;
    ret;
}
"""


class Rank:
    """One of two ranks: its memory, its table, and its packed parameters."""

    def __init__(self, rank: int, packs: int) -> None:
        self.rank, self.packs = rank, packs
        self.mailbox = np.full(3 * 2 * packs * 4, 0x80000000, np.uint32)
        self.input = np.arange(packs * 4, dtype=np.uint32) + (rank + 1)
        self.output = np.zeros(packs * 4, np.uint32)
        self.generations = np.zeros(packs // 32 + 2, np.uint32)
        self.table = AddressTable(rank)
        for key, array in enumerate((self.mailbox, self.input, self.output, self.generations)):
            self.table.add(array.ctypes.data, array.nbytes, Kind.LOCAL, key=(rank << 48) + (key << 40))

    def connect(self, peer: Rank) -> None:
        self.table.add(peer.mailbox.ctypes.data, peer.mailbox.nbytes, Kind.REMOTE, key=peer.rank << 48)
        arrays = (self.input, self.output, self.mailbox, peer.mailbox, self.generations)
        self.params = struct.pack("<5Q2I", *(a.ctypes.data for a in arrays), self.packs, self.rank)


def exchanges(packs: int, calls: int, fabric: Fabric) -> dict[str, float]:
    """Microseconds of a launch: native alone, and with what Python does for it."""
    kernel = ptx.load(EXCHANGE).kernels["exchange"]
    kernel.native(fabric.is_adversarial)
    ranks = [Rank(r, packs) for r in range(2)]
    for rank, peer in zip(ranks, reversed(ranks), strict=True):
        rank.connect(peer)
    block = min(packs + -packs % 32, 64)
    extent = (-(-packs // block), 1, 1)
    inside = 0.0
    start = time.thread_time()
    for _ in range(calls):
        waiting = [Grid(kernel, r.table, extent, (block, 1, 1), 0, r.params, fabric) for r in ranks]
        while waiting:
            for grid in list(waiting):
                before = time.thread_time()
                status = grid.run(1024, 1_000_000)
                inside += time.thread_time() - before
                if status == Status.FINISHED:
                    waiting.remove(grid)
                assert status != Status.FAULTED, grid.fault
    total = time.thread_time() - start
    fabric.drain()
    assert (ranks[0].output == ranks[1].input).all()
    assert (ranks[1].output == ranks[0].input).all()
    assert all((r.mailbox == 0x80000000).all() for r in ranks)
    launches, threads = calls * 2, extent[0] * block
    return {
        "native_us": round(inside / launches * 1e6, 2),
        "with_python_us": round(total / launches * 1e6, 2),
        "native_ns_a_thread": round(inside / launches / threads * 1e9, 1),
        "threads": threads,
    }


def empty(calls: int, threads: int) -> dict[str, float]:
    kernel = ptx.load(EMPTY).kernels["empty"]
    table = AddressTable()
    fabric = Fabric.immediate()
    inside = 0.0
    start = time.thread_time()
    for _ in range(calls):
        grid = Grid(kernel, table, (1, 1, 1), (threads, 1, 1), 0, b"", fabric)
        before = time.thread_time()
        grid.run(8, 1_000_000)
        inside += time.thread_time() - before
    total = time.thread_time() - start
    return {"native_us": round(inside / calls * 1e6, 2), "with_python_us": round(total / calls * 1e6, 2)}


def translation() -> dict[str, float]:
    """Seconds to translate the shipped kernels, and milliseconds to get them from the cache."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        native._folder.cache_clear()
        real = native._folder
        native._folder = lambda: Path(folder)  # type: ignore[assignment]
        try:
            for name in ("lamport_peer", "lamport_multicast"):
                text = (files.directory() / f"{name}.ptx").read_text() + f"// {time.time_ns()}\n"
                for what in ("translate_s", "cached_ms"):
                    loaded._modules.clear()
                    start = time.thread_time()
                    ptx.load(text).kernels[name].native(False)
                    spent = time.thread_time() - start
                    found[f"{name}_{what}"] = round(spent * (1000 if what == "cached_ms" else 1), 2)
        finally:
            native._folder = real
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "empty kernel, 1 warp": empty(20_000, 32),
        "empty kernel, 1024 threads": empty(2_000, 1024),
    }
    for packs, calls in ((4, 5_000), (64, 3_000), (256, 1_000), (4096, 100)):
        found[f"exchange, {packs * 16} bytes"] = exchanges(packs, calls, Fabric.immediate())
    for packs, calls in ((4, 1_000), (256, 100)):
        found[f"adversarial, {packs * 16} bytes"] = exchanges(packs, calls, Fabric.adversarial(1))
    found["translation"] = translation()
    for name, numbers in found.items():
        print(f"{name:32} " + "  ".join(f"{k} {v}" for k, v in numbers.items()))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
