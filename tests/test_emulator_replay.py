"""Runs whose ranks are threads: they meet, and with a seed the whole run replays exactly."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.emulated import Kernel, download, upload
from helpers.scripted_grid import GO, SPIN, TRIGGER, WAIT, install

from lamport_numba import driver
from lamport_numba.emulator.ranks import run_ranks
from lamport_numba.errors import DriverError


def ring(monkeypatch, lines, calls):
    """Kernels of four ranks; each waits for the kernel of the same call on the rank before it."""
    done: dict[int, int] = {}

    def kernel(rank):
        def body(cta):
            lines.append(f"{rank}.{cta}+")
            yield GO
            yield WAIT
            if cta == 0:
                done[rank] = done.get(rank, 0) + 1
            yield TRIGGER
            mine = done[rank]
            while done.get((rank - 1) % 4, 0) < mine:
                yield SPIN
            lines.append(f"{rank}.{cta}-")

        return body

    install(monkeypatch, **{f"k{rank}": kernel(rank) for rank in range(4)})

    def program(comm):
        drv = driver.select("emulated")
        with drv.current(comm.rank):
            one = Kernel(drv, "", f"k{comm.rank}")
            for _ in range(calls):
                one(grid=2, pdl=True)
                comm.Barrier() if calls < 3 else None
            drv.call("cuCtxSynchronize")
        return comm.rank

    return program


@pytest.mark.parametrize("fabric", ["immediate", "adversarial"])
def test_ranks_that_are_threads_meet(monkeypatch, fabric):
    lines: list[str] = []
    program = ring(monkeypatch, lines, 5)
    assert run_ranks(4, program, fabric=fabric, seed=3, timeout=60) == [0, 1, 2, 3]
    assert len(lines) == 4 * 5 * 2 * 2


def test_a_seed_replays_the_whole_run(monkeypatch):
    runs = []
    for seed in (1, 1, 2, 3):
        lines: list[str] = []
        run_ranks(4, ring(monkeypatch, lines, 5), fabric="adversarial", seed=seed, timeout=60)
        runs.append(tuple(lines))
    assert runs[0] == runs[1]
    assert len(set(runs)) == 3  # other seeds, other orders


def test_ranks_run_skewed(monkeypatch):
    """Some rank starts its second call before another has started its first: that is what finds faults."""
    skewed = False
    for seed in range(10):
        lines: list[str] = []
        run_ranks(4, ring(monkeypatch, lines, 5), fabric="adversarial", seed=seed, timeout=60)
        begun = [0, 0, 0, 0]
        for line in lines:
            if line.endswith(".0+"):
                begun[int(line[0])] += 1
                skewed |= max(begun) - min(begun) >= 2
    assert skewed


def test_a_deadlock_that_only_residency_shows_is_seen(monkeypatch, capfd):
    """Each CTA waits for the other; with one resident at a time neither ends. The virtual clock runs out at once."""

    def program_of(residency):
        arrived: set[int] = set()

        def body(cta):
            arrived.add(cta)
            while len(arrived) < 2:
                yield SPIN
            yield GO

        install(monkeypatch, k=body)

        def program(comm):
            drv = driver.select("emulated")
            with drv.current(comm.rank):
                Kernel(drv, "", "k")(grid=2)
                drv.call("cuCtxSynchronize")

        return run_ranks(1, program, fabric="adversarial", seed=0, residency=residency, timeout=60)

    program_of(2)
    with pytest.raises(DriverError) as caught:
        program_of(1)
    assert caught.value.code == 702
    assert "deadlock" in capfd.readouterr().err
    driver.select("emulated").api.cuDevicePrimaryCtxReset(0)


DEADLINE = """.version 8.1
.target sm_90
.address_size 64
.visible .entry patient(.param .u64 at, .param .u64 nanoseconds)
{
    .reg .pred %p, %q; .reg .b32 %x, %n; .reg .b64 %a, %start, %now, %limit;
    ld.param.u64 %a, [at];
    ld.param.u64 %limit, [nanoseconds];
    mov.u64 %start, %globaltimer;
    mov.u32 %n, 0;
AGAIN:
    ld.relaxed.sys.global.u32 %x, [%a];
    setp.ne.u32 %p, %x, 0;
    @%p bra DONE;
    add.u32 %n, %n, 1;
    and.b32 %x, %n, 1023;
    setp.ne.u32 %p, %x, 0;
    @%p bra AGAIN;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %q, %now, %limit;
    @%q bra AGAIN;
    st.global.u64 [%a+8], %now;
DONE:
    ret;
}
"""


def test_the_virtual_clock_brings_a_deadline_of_ten_minutes_at_once():
    def program(comm):
        drv = driver.select("emulated")
        with drv.current(comm.rank):
            at = upload(drv, np.zeros(2, np.uint64))
            Kernel(drv, DEADLINE, "patient")(at, 600 * 10**9, block=1)
            drv.call("cuCtxSynchronize")
            waited = int(download(drv, at, 2, np.uint64)[1])
            drv.call("cuMemFree", at)
            return waited

    waited = run_ranks(2, program, fabric="adversarial", seed=0, timeout=60)
    assert all(600e9 <= one < 1200e9 for one in waited)
    assert waited == run_ranks(2, program, fabric="adversarial", seed=0, timeout=60)
