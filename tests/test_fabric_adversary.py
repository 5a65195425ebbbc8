"""Every power of the adversarial fabric: a small kernel that goes wrong under it and right with immediate delivery.

Each test looks at the same seeds; a power counts as exercised when at least one of them shows it, and what the
protocol promises
must hold for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.ptx import finish, launch, pack, table_of
from test_ptx_core import MINE, kernel, words

from lamport_numba.emulator import ptx
from lamport_numba.emulator.grid import AddressTable, Fabric, Grid, Kind, Member, Status

SEEDS = range(40)


def remote_table(*arrays: np.ndarray, device: int = 0) -> AddressTable:
    """These arrays as another device's memory."""
    table = AddressTable(device)
    for key, array in enumerate(arrays):
        table.add(array.ctypes.data, array.nbytes, Kind.REMOTE, key=(key + 1) << 40)
    return table


def fabrics() -> Iterator[Fabric]:
    for seed in SEEDS:
        yield Fabric.adversarial(seed)


def grid_of(text: str, table: AddressTable, out: np.ndarray, fabric: Fabric, threads: int = 1, ctas: int = 1) -> Grid:
    k = ptx.load(text).kernels["k"]
    return Grid(k, table, (ctas, 1, 1), (threads, 1, 1), 0, pack(k, (out,)), fabric)


# -- words on their way to another device ----------------------------------------------------------------------------


def test_words_land_after_the_grid_has_ended() -> None:
    text = kernel(MINE + "add.u32 %r2, %r1, 1; st.global.u32 [%rd3], %r2;")
    expect = np.arange(1, 65, dtype=np.uint32)
    late = later = 0
    for fabric in fabrics():
        out = words(64)
        launch(text, (out,), table=remote_table(out), fabric=fabric, grid=(2, 1, 1))
        late += not (out == expect).all()
        for _ in range(3):  # other grids come and go meanwhile
            own = words(64)
            launch(text, (own,), fabric=fabric, grid=(2, 1, 1))
            assert (own == expect).all()
        later += fabric.in_flight > 0
        fabric.drain()
        assert fabric.in_flight == 0
        assert (out == expect).all()
    assert late > len(SEEDS) // 2
    assert later > 0
    out = words(64)
    launch(text, (out,), table=remote_table(out), grid=(2, 1, 1))
    assert (out == expect).all()


SEND_PACK = "mov.u32 %r2, 7; st.global.v4.u32 [%rd1], {%r2, %r2, %r2, %r2};"
SEND_PAIRS = "mov.b64 %rd5, 0x0000000700000007; st.global.v2.b64 [%rd1], {%rd5, %rd5};"
POLL_FIRST = """
L: ld.volatile.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1]; setp.ne.u32 %p1, %r2, 7; @%p1 bra L;
st.global.v4.u32 [%rd1+16], {%r2, %r3, %r4, %r5};
"""


def received(send: str, poll: str, fabric: Fabric) -> np.ndarray:
    """Device 0 sends to device 1, which polls at the same time; what it saw."""
    out = words(8)
    table = AddressTable(1)
    table.add(out.ctypes.data, out.nbytes, Kind.LOCAL, key=1 << 40)
    sender = grid_of(kernel(send), remote_table(out), out, fabric)
    receiver = grid_of(kernel(poll), table, out, fabric)
    assert finish(sender) == Status.FINISHED
    assert finish(receiver) == Status.FINISHED
    return out[4:]


def test_a_pack_is_torn_into_words() -> None:
    torn = sum((received(SEND_PACK, POLL_FIRST, f) != 7).any() for f in fabrics())
    assert torn > 0
    assert (received(SEND_PACK, POLL_FIRST, Fabric.immediate()) == 7).all()


def test_a_pair_of_64_bits_is_whole_but_two_pairs_are_not() -> None:
    seen = [received(SEND_PAIRS, POLL_FIRST, f) for f in fabrics()]
    assert all(s[0] == s[1] == 7 for s in seen)
    assert any((s[2:] != 7).any() for s in seen)
    assert all(s[2] == s[3] for s in seen)


SEND_FLAGGED = "st.global.u32 [%rd1+4], 5; {} st.relaxed.sys.global.u32 [%rd1], 7;"


def test_a_flag_overtakes_its_data_without_a_fence() -> None:
    without = SEND_FLAGGED.format("")
    with_ = SEND_FLAGGED.format("fence.acq_rel.sys;")
    release = without.replace("st.relaxed", "st.release")
    assert any(received(without, POLL_FIRST, f)[1] != 5 for f in fabrics())
    for send in (with_, release):
        assert all(received(send, POLL_FIRST, f)[1] == 5 for f in fabrics())
    assert received(without, POLL_FIRST, Fabric.immediate())[1] == 5


def test_a_cta_fence_reaches_no_other_device() -> None:
    send = SEND_FLAGGED.format("fence.acq_rel.cta;")
    assert any(received(send, POLL_FIRST, f)[1] != 5 for f in fabrics())


def test_words_to_one_address_keep_their_order() -> None:
    send = "mov.u32 %r2, 0; L: add.u32 %r2, %r2, 1; st.global.u32 [%rd1], %r2; setp.lt.u32 %p1, %r2, 20; @%p1 bra L;"
    watch = """
    mov.u32 %r3, 0; mov.u32 %r4, 0;
    W: ld.volatile.global.u32 %r2, [%rd1]; setp.lt.u32 %p1, %r2, %r3; @%p1 mov.u32 %r4, 1; mov.u32 %r3, %r2;
    setp.lt.u32 %p2, %r2, 20; @%p2 bra W; st.global.v4.u32 [%rd1+16], {%r3, %r4, %r4, %r4};
    """
    for fabric in fabrics():
        out = words(8)
        table = table_of(out)
        sender = grid_of(kernel(send), remote_table(out, device=1), out, fabric)
        receiver = grid_of(kernel(watch), table, out, fabric)
        status = {receiver: Status.RUNNING, sender: Status.RUNNING}
        for _ in range(10_000):
            for grid in status:
                if status[grid] != Status.FINISHED:
                    status[grid] = grid.run(1, 5)
        assert set(status.values()) == {Status.FINISHED}
        assert list(out[4:6]) == [20, 0]


def test_a_thread_sees_its_own_words_and_mixed_widths_keep_their_order() -> None:
    body = """
    mov.b64 %rd5, 0x0000000200000001; st.global.b64 [%rd1], %rd5; st.global.u32 [%rd1+4], 3;
    ld.global.u32 %r2, [%rd1+4]; st.global.u32 [%rd1+8], 9; mov.b64 %rd6, 0x0000000500000004;
    st.global.b64 [%rd1+8], %rd6; ld.global.u32 %r3, [%rd1+8];
    atom.global.add.u32 %r4, [%rd1+12], 10; shl.b32 %r3, %r3, 8; or.b32 %r2, %r2, %r3; st.global.u32 [%rd1+16], %r2;
    """
    for fabric in fabrics():
        out = words(8)
        launch(kernel(body), (out,), table=remote_table(out), fabric=fabric, block=(1, 1, 1))
        fabric.drain()
        assert list(out[:5]) == [1, 3, 4, 15, 0x403]


def test_every_copy_of_a_multicast_goes_its_own_way_the_own_one_too() -> None:
    text = kernel(
        "mov.u64 %rd5, 0x400000000000; mov.f32 %f1, 0f3F800000;"
        "multimem.st.relaxed.sys.global.v4.f32 [%rd5], {%f1, %f1, %f1, %f1};"
    )
    own_late = differ = torn = 0
    for fabric in fabrics():
        own, peer = words(4), words(4)
        table = table_of(own)
        table.add(
            1 << 46, 16, Kind.MULTICAST, members=(Member(own.ctypes.data, 1 << 40), Member(peer.ctypes.data, 2 << 40))
        )
        launch(text, (own,), table=table, fabric=fabric, block=(1, 1, 1))
        own_late += (own == 0).any()
        for _ in range(3):
            differ += (own != peer).any()
            torn += len(set(own)) > 1
            fabric.land()
        fabric.drain_range(own.ctypes.data, own.nbytes)
        assert (own == 0x3F800000).all()
        fabric.drain(0)
        assert (peer == 0x3F800000).all()
    assert min(own_late, differ, torn) > 0


# -- a CTA's stores to its own device --------------------------------------------------------------------------------


HANDOVER = """
setp.ne.u32 %p1, %r30, 0; @%p1 bra READ;
st.global.u32 [%rd1+4], 5; {} atom.relaxed.gpu.global.exch.b32 %r2, [%rd1], 1; bra END;
READ: ld.relaxed.gpu.global.u32 %r2, [%rd1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra READ;
ld.global.u32 %r3, [%rd1+4]; st.global.u32 [%rd1+8], %r3;
END:
"""


def handed_over(between: str, fabric: Fabric) -> int:
    out = words(4)
    launch(kernel(MINE + HANDOVER.format(between)), (out,), fabric=fabric, grid=(2, 1, 1), block=(1, 1, 1))
    assert out[1] == 5  # when the grid ends, all is done
    return int(out[2])


def test_local_stores_linger_until_a_fence() -> None:
    assert {handed_over("", f) for f in fabrics()} == {0, 5}
    assert {handed_over("fence.acq_rel.cta;", f) for f in fabrics()} == {0, 5}
    assert {handed_over("fence.acq_rel.gpu;", f) for f in fabrics()} == {5}
    assert {handed_over("membar.gl;", f) for f in fabrics()} == {5}
    assert handed_over("", Fabric.immediate()) == 5


def test_a_fence_after_the_barrier_covers_the_whole_cta() -> None:
    body = """
    setp.ne.u32 %p1, %r30, 0; @%p1 bra READ;
    st.global.u32 [%rd3+4], 5; bar.sync 0; setp.ne.u32 %p2, %r32, 0; @%p2 bra END;
    {} st.relaxed.gpu.global.u32 [%rd1], 1; bra END;
    READ: ld.relaxed.gpu.global.u32 %r2, [%rd1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra READ;
    fence.acq_rel.gpu; mul.wide.u32 %rd5, %r32, 4; add.s64 %rd6, %rd1, %rd5; ld.global.u32 %r3, [%rd6+4];
    st.global.u32 [%rd6+512], %r3;
    END:
    """

    def stale(between: str, fabric: Fabric) -> bool:
        out = words(256)
        launch(kernel(MINE + body.replace("{}", between)), (out,), fabric=fabric, grid=(2, 1, 1), block=(64, 1, 1))
        return bool((out[128:192] != 5).any())

    assert any(stale("", f) for f in fabrics())
    assert not any(stale("fence.acq_rel.gpu;", f) for f in fabrics())


def test_a_cta_sees_its_own_stores() -> None:
    body = """
    st.global.u32 [%rd3], %r1; bar.sync 0; xor.b32 %r2, %r1, 5; mul.wide.u32 %rd5, %r2, 4; add.s64 %rd6, %rd1, %rd5;
    ld.global.u32 %r3, [%rd6]; ld.global.u8 %r4, [%rd6]; add.u32 %r3, %r3, %r4; bar.sync 0; st.global.u32 [%rd3], %r3;
    """
    for fabric in fabrics():
        out = words(64)
        launch(kernel(MINE + body), (out,), fabric=fabric, block=(64, 1, 1))
        assert list(out) == [2 * (n ^ 5) for n in range(64)]


# -- who runs when ---------------------------------------------------------------------------------------------------


def tickets(fabric: Fabric, ctas: int = 1, threads: int = 32, resident: int = 8) -> tuple[int, ...]:
    out = words(ctas * threads + 1)
    body = "atom.global.add.u32 %r2, [%rd1], 1; st.global.u32 [%rd3+4], %r2;"
    launch(kernel(MINE + body), (out,), fabric=fabric, grid=(ctas, 1, 1), block=(threads, 1, 1), ctas=resident)
    assert sorted(out[1:]) == list(range(ctas * threads))
    return tuple(int(x) for x in out[1:])


def test_lanes_warps_and_ctas_run_in_any_order() -> None:
    assert tickets(Fabric.immediate(), 4, 64) == tuple(range(256))
    orders = {tickets(f, 4, 64) for f in fabrics()}
    assert len(orders) == len(SEEDS)
    first = {o.index(0) for o in orders}
    assert len({n // 64 for n in first}) > 1  # CTAs
    assert len({n // 32 % 2 for n in first}) > 1  # warps
    assert len({n % 32 for n in first}) > 3  # lanes


def test_ctas_are_dispatched_in_any_order() -> None:
    one_by_one = {tickets(f, 8, 1, resident=1) for f in fabrics()}
    assert len(one_by_one) > 5
    assert tickets(Fabric.immediate(), 8, 1, resident=1) == tuple(range(8))


def test_a_thread_is_preempted_between_two_accesses() -> None:
    body = """
    mov.u32 %r3, 0;
    L: ld.global.u32 %r2, [%rd1]; add.u32 %r2, %r2, 1; st.global.u32 [%rd1], %r2; add.u32 %r3, %r3, 1;
    setp.lt.u32 %p1, %r3, 4; @%p1 bra L;
    """

    def counted(fabric: Fabric) -> int:
        out = words(4)
        launch(kernel(MINE + body), (out,), fabric=fabric)
        return int(out[0])

    assert counted(Fabric.immediate()) == 128
    assert all(counted(f) < 128 for f in fabrics())


def test_a_missing_warp_barrier_is_found() -> None:
    body = """ld.global.u32 %r2, [%rd1]; {} setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd1], 1;
    st.global.u32 [%rd3+4], %r2;"""

    def wrong(between: str, fabric: Fabric) -> bool:
        out = words(40)
        launch(kernel(MINE + body.replace("{}", between)), (out,), fabric=fabric)
        return bool(out[1:33].any())

    assert any(wrong("", f) for f in fabrics())
    assert not any(wrong("bar.warp.sync -1;", f) for f in fabrics())


# -- from one seed ---------------------------------------------------------------------------------------------------


def story(seed: int) -> tuple[object, ...]:
    """Several grids to and from another device: everything that can be seen of them."""
    fabric = Fabric.adversarial(seed)
    keep = [words(1 + seed % 7 * 1000) for _ in range(seed % 5)]  # other host addresses
    seen: list[object] = [len(keep)]
    out = words(64)
    for _ in range(3):
        launch(
            kernel(MINE + "add.u32 %r2, %r1, 1; st.global.u32 [%rd3], %r2;"),
            (out,),
            table=remote_table(out),
            fabric=fabric,
        )
        seen += [out.tobytes(), fabric.in_flight, fabric.landed, fabric.now(), fabric.draw(1000)]
        seen.append(tickets(fabric, 2))
        fabric.land(3)
    return tuple(seen[1:])


def test_everything_follows_from_the_seed() -> None:
    first = story(5)
    garbage = [np.zeros(n * 977 + 1, np.uint8) for n in range(50)]  # so that addresses differ
    assert story(5) == first
    del garbage
    assert story(5) == first
    assert len({story(s) for s in range(10)}) == 10


def test_the_clock_is_virtual() -> None:
    body = """mov.u64 %rd4, %globaltimer; bar.warp.sync 1; mov.u64 %rd5, %globaltimer;
    st.global.v2.u64 [%rd1], {%rd4, %rd5};"""

    def times(fabric: Fabric) -> tuple[int, int]:
        out = np.zeros(2, np.uint64)
        k = ptx.load(kernel(body)).kernels["k"]
        assert finish(Grid(k, table_of(out), (1, 1, 1), (1, 1, 1), 0, pack(k, (out,)), fabric)) == Status.FINISHED
        return int(out[0]), int(out[1])

    fabric = Fabric.adversarial(3)
    a, b = times(fabric)
    assert 0 < a < b < 100_000
    assert times(Fabric.adversarial(3)) == (a, b)
    fabric.advance(10**12)
    c, _ = times(fabric)
    assert c > 10**12
    assert fabric.now() > c


def test_a_stall_means_that_nothing_is_left_to_happen() -> None:
    body = "L: ld.volatile.global.u32 %r2, [%rd1]; setp.eq.u32 %p1, %r2, 0; @%p1 bra L;"
    for fabric in fabrics():
        out = words(4)
        launch(kernel("st.global.u32 [%rd1+4], 1;"), (out,), table=remote_table(out, device=1), fabric=fabric)
        grid = grid_of(kernel(body), table_of(out), out, fabric, threads=32, ctas=2)
        while (status := grid.run(2, 1000)) == Status.RUNNING:
            pass
        assert status == Status.STALLED
        assert fabric.in_flight == 0
        out[0] = 1
        assert finish(grid) == Status.FINISHED


@pytest.mark.parametrize("seed", [0, 1 << 63, (1 << 64) - 1])
def test_any_seed(seed: int) -> None:
    assert len(tickets(Fabric.adversarial(seed))) == 32


def test_the_immediate_fabric_has_nothing_in_flight() -> None:
    fabric = Fabric.immediate()
    assert (fabric.in_flight, fabric.land(5), fabric.drain(), fabric.drain_range(0, 1), fabric.draw(5)) == (
        0,
        0,
        0,
        0,
        0,
    )
    before = fabric.now()
    fabric.advance(10**15)
    assert before <= fabric.now() < before + 10**15
