"""The emulated GPU thread: control flow, memory checks, barriers, collectives, scheduling."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from helpers.ptx import HEADER, finish, launch, pack, table_of

from lamport_numba.emulator import ptx
from lamport_numba.emulator.grid import Access, AddressTable, Fabric, Grid, Kind, Member, Status
from lamport_numba.errors import PtxError

REGISTERS = """
.reg .b64 %rd<20>; .reg .b32 %r<40>; .reg .f32 %f<10>; .reg .pred %p<10>; .reg .b16 %h<10>; .reg .f64 %d<10>;
"""


def kernel(body: str, params: str = ".param .u64 out", module: str = "") -> str:
    return (
        f"{HEADER}{module}\n.visible .entry k({params})\n{{{REGISTERS}\nld.param.u64 %rd1, [out];\n{body}\nret;\n}}\n"
    )


# thread number in %r1, address of the thread's word of out in %rd3
MINE = """
mov.u32 %r30, %ctaid.x; mov.u32 %r31, %ntid.x; mov.u32 %r32, %tid.x; mad.lo.s32 %r1, %r30, %r31, %r32;
mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
"""


def words(n: int) -> np.ndarray:
    return np.zeros(n, np.uint32)


def run(body: str, threads: int = 32, **kwargs) -> np.ndarray:
    blocks = kwargs.get("grid", (1, 1, 1))[0]
    out = words(threads * blocks)
    launch(kernel(MINE + body), (out,), block=(threads, 1, 1), **kwargs)
    return out


def test_thread_numbers() -> None:
    out = run("st.global.u32 [%rd3], %r1;", 40, grid=(3, 1, 1))
    assert (out == np.arange(120)).all()


def test_three_dimensions() -> None:
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y;
    mad.lo.u32 %r6, %r3, %r5, %r2; mad.lo.u32 %r6, %r6, %r4, %r1;
    mul.wide.u32 %rd2, %r6, 4; add.s64 %rd3, %rd1, %rd2;
    shl.b32 %r7, %r3, 16; shl.b32 %r8, %r2, 8; or.b32 %r7, %r7, %r8; or.b32 %r7, %r7, %r1; st.global.u32 [%rd3], %r7;
    """
    out = words(3 * 5 * 2)
    launch(kernel(body), (out,), block=(3, 5, 2))
    assert list(out) == [z << 16 | y << 8 | x for z in range(2) for y in range(5) for x in range(3)]


def test_loop_and_predicates() -> None:
    body = """
    mov.u32 %r2, 0; mov.u32 %r3, 0;
    LOOP: setp.ge.u32 %p1, %r3, %r1; @%p1 bra END; add.u32 %r2, %r2, %r3; add.u32 %r3, %r3, 1; bra LOOP;
    END: @!%p1 mov.u32 %r2, 99; st.global.u32 [%rd3], %r2;
    """
    assert list(run(body)) == [n * (n - 1) // 2 for n in range(32)]


def test_a_loop_longer_than_the_fuel() -> None:
    body = """
    mov.u32 %r2, 0;
    LOOP: add.u32 %r2, %r2, 1; mul.lo.u32 %r3, %r2, %r2; setp.lt.u32 %p1, %r2, 200001; @%p1 bra LOOP;
    add.u32 %r3, %r3, %r1; st.global.u32 [%rd3], %r3;
    """
    assert list(run(body, 2)) == [(200001**2 + n) % (1 << 32) for n in range(2)]


def test_scopes_of_braces() -> None:
    body = """
    mov.u32 %r2, 1;
    { .reg .b32 %r2; mov.u32 %r2, 5; L: add.u32 %r1, %r1, %r2; setp.lt.u32 %p1, %r1, 40; @%p1 bra L; }
    { .reg .b32 x; mov.u32 x, 100; L: add.u32 %r1, %r1, x; setp.lt.u32 %p1, %r1, 200; @%p1 bra L; }
    add.u32 %r1, %r1, %r2; st.global.u32 [%rd3], %r1;
    """

    def expect(n: int) -> int:
        while True:
            n += 5
            if n >= 40:
                break
        while True:
            n += 100
            if n >= 200:
                return n + 1

    assert list(run(body)) == [expect(n) for n in range(32)]


def test_vectors_and_widths() -> None:
    source = np.arange(64, dtype=np.uint32) * 0x01010101 + 0x80
    out = words(64)
    body = """
    ld.param.u64 %rd4, [src];
    ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%rd4]; st.global.v4.b32 [%rd1], {%r4, %r3, %r2, %r1};
    ld.global.v2.b64 {%rd5, %rd6}, [%rd4+16]; st.global.v2.b64 [%rd1+16], {%rd6, %rd5};
    ld.global.s8 %r5, [%rd4]; st.global.u32 [%rd1+32], %r5; ld.global.u8 %r5, [%rd4]; st.global.u32 [%rd1+36], %r5;
    ld.global.s16 %r5, [%rd4+4]; st.global.s16 [%rd1+40], %r5; st.global.u8 [%rd1+42], %r5;
    mov.b64 {%r6, %r7}, %rd5; mov.b64 %rd7, {%r7, %r6}; st.global.b64 [%rd1+48], %rd7;
    """
    launch(kernel(body, ".param .u64 out, .param .u64 src"), (out, source), block=(1, 1, 1))
    s = source
    expect = [s[3], s[2], s[1], s[0], s[6], s[7], s[4], s[5], 0xFFFFFF80, 0x80]
    assert list(out[:10]) == expect
    assert out[10] == int(s[1]) & 0xFFFF | (int(s[1]) & 0xFF) << 16
    assert list(out[12:14]) == [s[5], s[4]]


# -- faults ----------------------------------------------------------------------------------------------------------


def fault_of(body: str, **kwargs) -> tuple[Grid, np.ndarray]:
    out = words(64)
    table = kwargs.pop("table", None) or table_of(out)
    k = ptx.load(kernel(MINE + body)).kernels["k"]
    grid = Grid(k, table, (1, 1, 1), (32, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    assert finish(grid) == Status.FAULTED
    assert grid.fault is not None
    return grid, out


def test_out_of_bounds_names_thread_line_and_address() -> None:
    grid, out = fault_of("st.global.u32 [%rd3+136], %r1;")
    fault = grid.fault
    assert fault.kind == "illegal address"
    assert fault.tid == (30, 0, 0)
    assert fault.address == out.ctypes.data + 256
    assert fault.size == 4
    assert "st.global.u32 [%rd3+136]" in fault.text
    assert "kernel k" in str(fault)
    assert f"line {fault.line}" in str(fault)


def test_before_the_first_byte_and_null() -> None:
    assert fault_of("st.global.u8 [%rd1+-1], %r1;")[0].fault.kind == "illegal address"
    assert fault_of("mov.u64 %rd1, 0; st.global.u8 [%rd1], %r1;")[0].fault.address == 0


def test_misaligned() -> None:
    fault = fault_of("ld.global.v2.u32 {%r2, %r3}, [%rd1+4];")[0].fault
    assert fault.kind == "misaligned address"
    assert fault.size == 8


def test_rights() -> None:
    out = words(64)
    table = AddressTable()
    table.add(out.ctypes.data, out.nbytes, Kind.REMOTE, Access.READ)
    k = ptx.load(kernel("ld.global.u32 %r2, [%rd1]; st.global.u32 [%rd1], %r2;")).kernels["k"]
    grid = Grid(k, table, (1, 1, 1), (1, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    assert finish(grid) == Status.FAULTED
    assert grid.fault.kind == "access not permitted"
    table.protect(out.ctypes.data, Access.READ_WRITE)
    again = Grid(k, table, (1, 1, 1), (1, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    assert finish(again) == Status.FINISHED
    table.remove(out.ctypes.data)  # what a site remembers must not outlive the entry
    late = Grid(k, table, (1, 1, 1), (1, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    assert finish(late) == Status.FAULTED


def test_multicast_rules() -> None:
    a, b, out = words(64), words(64), words(64)
    table = table_of(out)
    base = 1 << 46
    table.add(base, 256, Kind.MULTICAST, members=(Member(a.ctypes.data), Member(b.ctypes.data)))
    store = """mov.u64 %rd5, 0x400000000000; mov.f32 %f1, 0f3F800000; mov.b32 %f2, %r1;
    multimem.st.relaxed.sys.global.v4.f32 [%rd5+16], {%f1, %f2, %f1, %f2}; mov.b64 %rd6, 0x1122334455667788;
    multimem.st.global.b64 [%rd5+64], %rd6;"""
    launch(kernel(store), (out,), table=table, block=(1, 1, 1))
    for copy in (a, b):
        assert list(copy[4:8]) == [0x3F800000, 0, 0x3F800000, 0]
        assert list(copy[16:18]) == [0x55667788, 0x11223344]
        assert copy[20:].sum() == 0
    for body, kind in (
        ("mov.u64 %rd5, 0x400000000000; st.global.u32 [%rd5], %r1;", "ordinary access to a multicast address"),
        ("mov.u64 %rd5, 0x400000000000; ld.u32 %r1, [%rd5];", "ordinary access to a multicast address"),
        ("multimem.st.global.b32 [%rd1], %r1;", "multimem access to an ordinary address"),
        ("mov.u64 %rd5, 0x400000000000; multimem.st.global.b32 [%rd5+256], %r1;", "illegal address"),
    ):
        k = ptx.load(kernel(body)).kernels["k"]
        grid = Grid(k, table, (1, 1, 1), (1, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
        assert finish(grid) == Status.FAULTED
        assert grid.fault.kind == kind
    with pytest.raises(PtxError, match="takes no vector"):
        ptx.load(kernel("multimem.st.global.v2.b64 [%rd1], {%rd2, %rd3};"))


def test_shared_bounds() -> None:
    assert fault_of("mov.u32 %r2, 4; st.shared.u32 [%r2], %r1;")[0].fault.kind == "shared memory out of bounds"


def test_trap() -> None:
    fault = fault_of("setp.eq.u32 %p1, %r1, 7; @%p1 trap;")[0].fault
    assert fault.kind == "trap"
    assert fault.tid == (7, 0, 0)
    assert fault.address is None


# -- barriers and collectives ----------------------------------------------------------------------------------------


def test_barrier_orders_shared_memory() -> None:
    module = ".shared .align 4 .b8 buffer[512];"
    body = """
    mov.u32 %r2, buffer; shl.b32 %r3, %r1, 2; add.u32 %r4, %r2, %r3; st.shared.u32 [%r4], %r1;
    bar.sync 0;
    mov.u32 %r5, 127; sub.u32 %r5, %r5, %r1; shl.b32 %r5, %r5, 2; add.u32 %r6, %r2, %r5; ld.shared.u32 %r7, [%r6];
    st.global.u32 [%rd3], %r7;
    """
    out = words(128)
    launch(kernel(MINE + body, module=module), (out,), block=(128, 1, 1))
    assert list(out) == list(range(127, -1, -1))


def test_dynamic_shared_memory() -> None:
    module = ".shared .align 8 .b8 fixed[8]; .extern .shared .align 16 .b8 dynamic[];"
    body = """
    mov.u64 %rd4, dynamic; cvta.shared.u64 %rd5, %rd4; mul.wide.u32 %rd6, %r1, 4; add.s64 %rd7, %rd5, %rd6;
    st.u32 [%rd7], %r1; bar.sync 0; xor.b32 %r2, %r1, 1; mul.wide.u32 %rd6, %r2, 4; add.s64 %rd7, %rd5, %rd6;
    ld.u32 %r3, [%rd7]; st.shared.u32 [fixed], %r3; st.global.u32 [%rd3], %r3;
    """
    out = words(32)
    launch(kernel(MINE + body, module=module), (out,), shared=128)
    assert list(out) == [n ^ 1 for n in range(32)]


def test_barrier_with_early_exit() -> None:
    body = "setp.lt.u32 %p1, %r1, 16; @%p1 exit; bar.sync 0; st.global.u32 [%rd3], %r1;"
    assert list(run(body, 64)) == [0] * 16 + list(range(16, 64))


def test_named_barriers_producer_and_consumer() -> None:
    body = """
    setp.lt.u32 %p1, %r1, 32; @%p1 bra FIRST;
    st.global.u32 [%rd1], 77; bar.arrive 3, 64; bra END;
    FIRST: bar.sync 3, 64; ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, %r1; st.global.u32 [%rd3+256], %r2;
    END:
    """
    out = words(128)
    launch(kernel(MINE + body), (out,), block=(64, 1, 1))
    assert list(out[64:96]) == [77 + n for n in range(32)]


def test_barrier_reductions() -> None:
    body = """
    setp.lt.u32 %p1, %r1, 10; bar.red.popc.u32 %r2, 0, %p1; bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, %p1;
    selp.u32 %r3, 100, 0, %p2; selp.u32 %r4, 1000, 0, %p3; add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4;
    st.global.u32 [%rd3], %r2;
    """
    assert set(run(body, 96)) == {1010}


def test_warp_barrier_waits_for_all_lanes() -> None:
    body = """
    shl.b32 %r2, %r1, 3;
    W: setp.eq.u32 %p1, %r2, 0; @%p1 bra GO; sub.u32 %r2, %r2, 1; bra W;
    GO: st.global.u32 [%rd3], %r1; bar.warp.sync -1;
    xor.b32 %r3, %r1, 31; mul.wide.u32 %rd4, %r3, 4; add.s64 %rd5, %rd1, %rd4;
    ld.global.u32 %r4, [%rd5]; st.global.u32 [%rd3+128], %r4;
    """
    out = words(64)
    launch(kernel(MINE + body), (out,))
    assert list(out[32:]) == [n ^ 31 for n in range(32)]


def test_votes() -> None:
    body = """
    setp.gt.u32 %p1, %r1, 4; vote.sync.ballot.b32 %r2, %p1, -1; vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, -1; vote.sync.uni.pred %p4, %p2, -1; setp.lt.u32 %p6, %r1, 8; @!%p6 bra END;
    vote.sync.all.pred %p5, %p1, 0xff;
    selp.u32 %r3, 1, 0, %p2; selp.u32 %r4, 2, 0, %p3; selp.u32 %r5, 4, 0, %p4; or.b32 %r2, %r2, %r3;
    or.b32 %r2, %r2, %r4; or.b32 %r2, %r2, %r5; selp.u32 %r6, 8, 0, %p5; or.b32 %r2, %r2, %r6;
    END: st.global.u32 [%rd3], %r2;
    """
    ballot = sum(1 << n for n in range(5, 32))
    assert list(run(body)) == [ballot | 5] * 8 + [ballot] * 24


@pytest.mark.parametrize("how", ["idx", "up", "down", "bfly"])
def test_shuffles(how: str) -> None:
    width = 8
    control = (32 - width) << 8 | (0 if how == "up" else 31)
    body = f"""
    add.u32 %r2, %r1, 100; shfl.sync.{how}.b32 %r3|%p1, %r2, 3, {control}, -1; selp.u32 %r4, 0x10000, 0, %p1;
    or.b32 %r3, %r3, %r4; st.global.u32 [%rd3], %r3;
    """

    def expect(lane: int) -> int:
        low, high = lane & ~7, lane | 7
        source = {"idx": low + 3, "up": lane - 3, "down": lane + 3, "bfly": lane ^ 3}[how]
        inside = low <= source <= high
        return 100 + (source if inside else lane) | (0x10000 if inside else 0)

    assert list(run(body)) == [expect(n) for n in range(32)]


def test_match_redux_elect_activemask() -> None:
    body = """
    and.b32 %r2, %r1, 3; match.any.sync.b32 %r3, %r2, -1; redux.sync.add.u32 %r4, %r1, -1; sub.u32 %r6, 3, %r1;
    redux.sync.min.s32 %r5, %r6, -1; elect.sync %r7|%p1, 0xfffffff0; activemask.b32 %r8;
    match.all.sync.b32 %r9|%p2, %r4, -1;
    st.global.u32 [%rd3], %r3; st.global.u32 [%rd3+128], %r4; st.global.u32 [%rd3+256], %r5;
    selp.u32 %r10, 1, 0, %p1; st.global.u32 [%rd3+384], %r10; st.global.u32 [%rd3+512], %r8; selp.u32 %r11, %r9, 0, %p2;
    st.global.u32 [%rd3+640], %r11;
    """
    body = body.replace("elect.sync %r7|%p1, 0xfffffff0", "elect.sync %r7|%p1, -1")
    out = words(192)
    launch(kernel(MINE + body), (out,))
    out = out.reshape(6, 32)
    assert list(out[0]) == [0x11111111 << (n & 3) for n in range(32)]
    assert set(out[1]) == {sum(range(32))}
    assert set(out[2].astype(np.int32)) == {3 - 31}
    assert list(out[3]) == [1] + [0] * 31
    assert set(out[4]) == {0xFFFFFFFF}
    assert set(out[5]) == {0xFFFFFFFF}


def test_mask_without_the_caller() -> None:
    assert "mask" in fault_of("bar.warp.sync 0xf;")[0].fault.kind


def test_barriers_that_can_never_complete() -> None:
    half = (
        "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.sync 1, 32; bra B; A: bar.sync 2, 32; B: st.global.u32 [%rd3], %r1;"
    )
    fault = fault_of(half)[0].fault
    assert fault.kind == "barrier or warp collective that can never complete"
    assert "bar.sync" in fault.text
    apart = (
        "setp.lt.u32 %p1, %r1, 16; @%p1 bra A; bar.warp.sync -1; bra B; A: bar.sync 0; B: st.global.u32 [%rd3], %r1;"
    )
    assert "never" in fault_of(apart)[0].fault.kind


# -- scheduling ------------------------------------------------------------------------------------------------------


PING = """
L: ld.relaxed.gpu.global.u32 %r4, [%rd1]; setp.ne.u32 %p1, %r4, %r1; @%p1 bra L;
add.u32 %r5, %r1, 1; st.relaxed.gpu.global.u32 [%rd1], %r5;
"""


def test_a_spinning_thread_blocks_no_other() -> None:
    out = words(4)
    k = ptx.load(kernel(MINE + "sub.u32 %r1, 127, %r1;" + PING)).kernels["k"]
    grid = Grid(k, table_of(out), (4, 1, 1), (32, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    assert finish(grid, ctas=4) == Status.FINISHED
    assert out[0] == 128


def test_residency_one_stalls_where_order_needs_two() -> None:
    out = words(4)
    k = ptx.load(kernel(MINE + "sub.u32 %r1, 127, %r1;" + PING)).kernels["k"]
    grid = Grid(k, table_of(out), (4, 1, 1), (32, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    status = {grid.run(1, 1000) for _ in range(50)}
    assert status == {Status.STALLED}
    assert grid.resident == 1
    assert finish(grid, ctas=4) == Status.FINISHED
    assert grid.resident == 0


def test_a_poll_stalls_until_memory_changes() -> None:
    out = words(4)
    body = "L: ld.volatile.global.u32 %r4, [%rd1]; setp.eq.u32 %p1, %r4, 0; @%p1 bra L; st.global.u32 [%rd1+4], %r4;"
    k = ptx.load(kernel(body)).kernels["k"]
    grid = Grid(k, table_of(out), (1, 1, 1), (1, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    assert [grid.run(1, 1000) for _ in range(5)] == [Status.STALLED] * 5
    out[0] = 9
    assert finish(grid) == Status.FINISHED
    assert out[1] == 9


def test_abort() -> None:
    out = words(4)
    k = ptx.load(kernel("L: ld.volatile.global.u32 %r4, [%rd1]; bra L;")).kernels["k"]
    grid = Grid(k, table_of(out), (1, 1, 1), (1, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    assert grid.run(1, 1000) == Status.STALLED
    grid.abort()
    assert grid.run(1, 1000) == Status.FAULTED
    assert grid.fault.kind == "stopped"


def test_grid_dependency() -> None:
    body = """
    griddepcontrol.launch_dependents; st.global.u32 [%rd1], 1; griddepcontrol.wait; ld.global.u32 %r4, [%rd1+4];
    st.global.u32 [%rd1+8], %r4;
    """
    out = words(4)
    k = ptx.load(kernel(body)).kernels["k"]
    grid = Grid(k, table_of(out), (2, 1, 1), (1, 1, 1), 0, pack(k, (out,)), Fabric.immediate(), released=False)
    assert grid.run(1, 1000) == Status.STALLED
    assert not grid.triggered  # the second CTA has not begun
    grid.run(2, 1000)
    assert grid.run(2, 1000) == Status.STALLED
    assert grid.triggered
    assert list(out[:3]) == [1, 0, 0]
    out[1] = 5
    grid.release()
    assert finish(grid) == Status.FINISHED
    assert out[2] == 5


def test_exit_counts_as_trigger() -> None:
    out = words(4)
    k = ptx.load(kernel("st.global.u32 [%rd1], 1;")).kernels["k"]
    grid = Grid(k, table_of(out), (2, 1, 1), (1, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    assert finish(grid) == Status.FINISHED
    assert grid.triggered


def test_globaltimer_and_nanosleep() -> None:
    out = np.zeros(4, np.uint64)
    body = """mov.u64 %rd4, %globaltimer; nanosleep.u32 10; mov.u64 %rd5, %globaltimer;
    st.global.v2.u64 [%rd1], {%rd4, %rd5};"""
    launch(kernel(body), (out,), block=(1, 1, 1))
    assert 0 < out[0] <= out[1]


def test_atomics_count_every_thread() -> None:
    body = """
    atom.global.add.u32 %r2, [%rd1], 1; red.global.max.u32 [%rd1+4], %r1;
    atom.global.cas.b32 %r3, [%rd1+8], 0, %r1;
    red.relaxed.sys.global.or.b32 [%rd1+12], 5; atom.global.exch.b32 %r4, [%rd1+16], %r1;
    red.global.inc.u32 [%rd1+20], 9;
    mov.f32 %f1, 0f3F000000; red.global.add.f32 [%rd1+24], %f1;
    """
    out = words(8)
    launch(kernel(MINE + body), (out,), block=(64, 1, 1), grid=(2, 1, 1))
    assert out[0] == 128
    assert out[1] == 127
    assert 0 < out[2] < 128
    assert out[3] == 5
    assert out[5] == 128 % 10
    assert out[6:7].view(np.float32)[0] == 64.0


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("wibble.u32 %r1, %r2;", "wibble"),
        ("add.q32 %r1, %r2, %r3;", "type"),
        ("add.u32.bogus %r1, %r2, %r3;", "bogus"),
        ("add.u32 %r1, %r2;", "operands"),
        ("add.u32 %r1, %r2, %r99;", "%r99"),
        ("bra NOWHERE;", "NOWHERE"),
        ("ld.global.u64 %r1, [%rd1];", "do not fit"),
        ("call foo, ();", "foo"),
        ("mov.u32 %r1, ?;", "unexpected character"),
        ("shfl.down.b32 %r1, %r2, 1, 31;", "operands"),
    ],
)
def test_errors_name_the_line(body: str, message: str) -> None:
    text = kernel(body)
    with pytest.raises(PtxError, match=message) as caught:
        ptx.load(text)
    assert caught.value.line is not None
    assert body.split()[0] in text.split("\n")[caught.value.line - 1]


def test_any_version_is_accepted() -> None:
    ptx.load(kernel("").replace("8.1", "9.5"))


def test_wrong_launches() -> None:
    out = words(4)
    k = ptx.load(kernel("")).kernels["k"]
    for extent, block, params in (
        ((0, 1, 1), (1, 1, 1), pack(k, (out,))),
        ((1, 1, 1), (1025, 1, 1), pack(k, (out,))),
        ((1, 1, 1), (1, 1, 1), b""),
    ):
        with pytest.raises(ValueError, match=r"expected|takes"):
            Grid(k, table_of(out), extent, block, 0, params, Fabric.immediate())


def test_table_refuses_overlaps() -> None:
    table = AddressTable()
    table.add(0x10000, 0x1000, Kind.LOCAL)
    for base, size in ((0x10FFF, 1), (0xF000, 0x1001), (0x10000, 1), (0xF000, 0x10000)):
        with pytest.raises(ValueError, match="overlaps"):
            table.add(base, size, Kind.LOCAL)
    table.add(0x11000, 0x1000, Kind.HOST, Access.READ)
    assert table.check(0x10FF0, 0x20, Access.READ) is None
    assert "not permitted" in table.check(0x10FF0, 0x20, Access.WRITE)
    assert "illegal" in table.check(0x11FF0, 0x20, Access.READ)
    assert table.find(0x11234).kind == Kind.HOST
    assert table.find(0x12000) is None


def test_struct_parameters() -> None:
    out = words(4)
    body = """ld.param.u32 %r2, [s+4]; ld.param.u8 %r3, [s+8]; st.global.v2.u32 [%rd1], {%r2, %r3};
    mov.b64 %rd4, s; ld.param.u32 %r5, [%rd4]; st.global.u32 [%rd1+8], %r5;"""
    launch(
        kernel(body, ".param .u64 out, .param .align 4 .b8 s[12]"),
        (out, struct.pack("<III", 7, 8, 9)),
        block=(1, 1, 1),
    )
    assert list(out[:3]) == [8, 9, 7]


def test_a_register_used_for_several_things_keeps_each_while_it_is_wanted() -> None:
    # %r5 is first a constant of the thread, then counted on, in a loop that polls; %r6 is read before it is written
    body = """
    mov.u32 %r5, %tid.x; add.u32 %r7, %r5, 100; add.u32 %r8, %r6, 7; mov.u32 %r6, 1000;
    bar.warp.sync 0xffffffff;
    setp.lt.u32 %p1, %r1, 8; @%p1 mov.u32 %r5, 50;
    @%p1 bra LOW; mov.u32 %r11, 5000; bra BOTH; LOW: mov.u32 %r11, 6000; BOTH:
    mov.u32 %r9, 0;
    AGAIN: ld.volatile.global.u32 %r10, [%rd3]; add.u32 %r5, %r5, 1; add.u32 %r9, %r9, 1;
    setp.lt.u32 %p2, %r9, 5; @%p2 bra AGAIN;
    add.u32 %r5, %r5, %r7; add.u32 %r5, %r5, %r8; mov.u32 %r7, 3; bar.warp.sync 0xffffffff;
    add.u32 %r5, %r5, %r7; add.u32 %r5, %r5, %r6;
    add.u32 %r5, %r5, %r11; st.global.u32 [%rd3], %r5;
    """
    expected = [(6050 if n < 8 else 5000 + n) + 5 + n + 100 + 7 + 3 + 1000 for n in range(32)]
    assert list(run(body)) == expected


def test_a_slot_begins_anew_with_every_cta() -> None:
    body = """
    mov.u32 %r5, 1; setp.ge.u32 %p1, %r1, 0; @%p1 add.u32 %r5, %r5, %r1; bar.sync 0; bar.warp.sync 0xffffffff;
    st.global.u32 [%rd3], %r5;
    """
    assert list(run(body, 64, grid=(50, 1, 1), ctas=2)) == [n + 1 for n in range(3200)]


@pytest.mark.parametrize("first", ["lowest", "highest"])
def test_lanes_of_a_warp_that_poll_for_each_other_get_on(first: str) -> None:
    """A chain through memory inside a warp: each lane polls for the word of its neighbour. Passes that leave out lanes
    beside one that polls in vain must not do so for ever."""
    start, next_ = ("0", "sub.u32 %r4, %r1, 1") if first == "lowest" else ("31", "add.u32 %r4, %r1, 1")
    body = f"""
    setp.eq.u32 %p1, %r1, {start}; @%p1 bra GO;
    {next_}; mul.wide.u32 %rd4, %r4, 4; add.s64 %rd4, %rd1, %rd4;
    POLL: ld.volatile.global.u32 %r5, [%rd4]; setp.eq.u32 %p2, %r5, 0; @%p2 bra POLL;
    GO: add.u32 %r5, %r5, 1; st.volatile.global.u32 [%rd3], %r5;
    """
    out = words(32)
    k = ptx.load(kernel(MINE + body)).kernels["k"]
    grid = Grid(k, table_of(out), (1, 1, 1), (32, 1, 1), 0, pack(k, (out,)), Fabric.immediate())
    runs = 0
    while grid.run(1, 1 << 20) != Status.FINISHED:
        runs += 1
        assert runs < 200  # one lane in each pass that leaves nobody out
    assert sorted(out) == list(range(1, 33))
