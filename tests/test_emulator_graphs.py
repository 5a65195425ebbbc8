"""Stream capture, graphs and their replay on the emulated device."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from helpers.emulated import Kernel, download, machine, refused, upload
from helpers.scripted_grid import GO, SPIN, WAIT, install

MODES = cuda.CUstreamCaptureMode
GLOBAL, LOCAL, RELAXED = (
    MODES.CU_STREAM_CAPTURE_MODE_GLOBAL,
    MODES.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    MODES.CU_STREAM_CAPTURE_MODE_RELAXED,
)
STATUS = cuda.CUstreamCaptureStatus
NON_BLOCKING = 1


@pytest.fixture
def drv():
    with machine() as made:
        yield made


@pytest.fixture
def stream(drv):
    return drv.call("cuStreamCreate", NON_BLOCKING)


@pytest.fixture
def lines(monkeypatch):
    seen: list[str] = []

    def plain(name):
        def body(cta):
            seen.append(f"{name}+")
            yield GO
            seen.append(f"{name}-")

        return body

    def dependent(cta):
        seen.append("d+")
        yield WAIT
        yield GO
        seen.append("d-")

    def early(cta):
        seen.append("e+")
        yield "trigger"
        for _ in range(5):
            yield GO
        seen.append("e-")

    install(monkeypatch, a=plain("a"), b=plain("b"), c=plain("c"), d=dependent, e=early)
    return seen


def capture(drv, stream, work, mode=LOCAL):
    drv.call("cuStreamBeginCapture", stream, mode)
    work()
    graph = drv.call("cuStreamEndCapture", stream)
    ready = drv.call("cuGraphInstantiate", graph, 0)
    drv.call("cuGraphDestroy", graph)  # the instance lives on
    return ready


def test_captured_kernels_run_at_each_replay_and_not_before(drv, stream, lines):
    a, b = Kernel(drv, "", "a"), Kernel(drv, "", "b")

    def work():
        a(stream=stream)
        b(stream=stream)

    ready = capture(drv, stream, work)
    drv.call("cuStreamSynchronize", stream)
    assert lines == []
    for _ in range(3):
        drv.call("cuGraphLaunch", ready, stream)
    b(stream=stream)
    drv.call("cuGraphExecDestroy", ready)  # what is queued still runs
    drv.call("cuStreamSynchronize", stream)
    assert lines == ["a+", "a-", "b+", "b-"] * 3 + ["b+", "b-"]
    refused(drv, "cuGraphLaunch", ready, stream)


def test_copies_and_fills_are_captured_by_address(drv, stream, lines):
    address = upload(drv, np.zeros(4, np.uint32))
    source = np.array([1, 2, 3, 4], np.uint32)
    pinned = drv.call("cuMemHostAlloc", 16, 0)
    view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint32 * 4).from_address(pinned))

    def work():
        drv.call("cuMemcpyHtoDAsync", address, source.ctypes.data, 16, stream)
        drv.call("cuMemsetD32Async", address, 9, 1, stream)
        drv.call("cuMemcpyDtoHAsync", pinned, address, 16, stream)

    ready = capture(drv, stream, work)
    source[:] = [5, 6, 7, 8]  # a replay reads what is there then
    drv.call("cuGraphLaunch", ready, stream)
    drv.call("cuStreamSynchronize", stream)
    assert view.tolist() == [9, 6, 7, 8]
    assert download(drv, address, 4).tolist() == [9, 6, 7, 8]
    drv.call("cuMemFree", address)
    drv.call("cuMemFreeHost", pinned)


def test_programmatic_edges_are_kept_inside_a_graph(drv, stream, lines):
    e, d = Kernel(drv, "", "e"), Kernel(drv, "", "d")

    def work():
        e(stream=stream)
        d(stream=stream, pdl=True)

    ready = capture(drv, stream, work)
    drv.call("cuGraphLaunch", ready, stream)
    drv.call("cuStreamSynchronize", stream)
    assert lines == ["e+", "d+", "e-", "d-"]


def test_a_graph_begins_after_all_earlier_work(drv, stream, lines):
    e, d = Kernel(drv, "", "e"), Kernel(drv, "", "d")
    ready = capture(drv, stream, lambda: d(stream=stream, pdl=True))
    e(stream=stream)
    drv.call("cuGraphLaunch", ready, stream)
    drv.call("cuStreamSynchronize", stream)
    assert lines == ["e+", "e-", "d+", "d-"]


def test_a_kernel_after_a_graph_waits_for_all_of_it(drv, stream, lines):
    e, d = Kernel(drv, "", "e"), Kernel(drv, "", "d")
    ready = capture(drv, stream, lambda: e(stream=stream))
    drv.call("cuGraphLaunch", ready, stream)
    d(stream=stream, pdl=True)
    drv.call("cuStreamSynchronize", stream)
    assert lines == ["e+", "e-", "d+", "d-"]


def test_fork_and_join_by_events(drv, stream, monkeypatch):
    seen: list[str] = []

    def meet(mine, other):  # each needs the other: branches run side by side
        def body(cta):
            seen.append(mine)
            while other not in seen:
                yield SPIN
            yield GO

        return body

    def last(cta):
        seen.append("last")
        yield GO

    install(monkeypatch, x=meet("x", "y"), y=meet("y", "x"), z=last)
    side = drv.call("cuStreamCreate", NON_BLOCKING)
    fork, join = (drv.call("cuEventCreate", 2) for _ in range(2))

    def work():
        drv.call("cuEventRecord", fork, stream)
        drv.call("cuStreamWaitEvent", side, fork, 0)
        assert drv.call("cuStreamIsCapturing", side) == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
        Kernel(drv, "", "x")(stream=stream)
        Kernel(drv, "", "y")(stream=side)
        drv.call("cuEventRecord", join, side)
        drv.call("cuStreamWaitEvent", stream, join, 0)
        Kernel(drv, "", "z")(stream=stream)

    ready = capture(drv, stream, work)
    for _ in range(2):
        drv.call("cuGraphLaunch", ready, stream)
        drv.call("cuStreamSynchronize", stream)
    assert sorted(seen[:2]) == ["x", "y"]
    assert seen[2] == seen[-1] == "last"


def test_a_fork_that_is_not_joined_is_an_error(drv, stream, lines):
    side = drv.call("cuStreamCreate", NON_BLOCKING)
    fork = drv.call("cuEventCreate", 2)
    drv.call("cuStreamBeginCapture", stream, LOCAL)
    drv.call("cuEventRecord", fork, stream)
    drv.call("cuStreamWaitEvent", side, fork, 0)
    Kernel(drv, "", "a")(stream=side)
    refused(drv, "cuStreamEndCapture", side, code=903)
    refused(drv, "cuStreamEndCapture", stream, code=901)  # invalidated by the attempt before
    assert drv.call("cuStreamIsCapturing", side) == STATUS.CU_STREAM_CAPTURE_STATUS_NONE

    drv.call("cuStreamBeginCapture", stream, LOCAL)
    drv.call("cuEventRecord", fork, stream)
    drv.call("cuStreamWaitEvent", side, fork, 0)
    Kernel(drv, "", "a")(stream=side)
    refused(drv, "cuStreamEndCapture", stream, code=904)


def test_what_a_capture_tells(drv, stream, lines):
    status, *_ = drv.call("cuStreamGetCaptureInfo", stream)
    assert status == STATUS.CU_STREAM_CAPTURE_STATUS_NONE
    drv.call("cuStreamBeginCapture", stream, RELAXED)
    Kernel(drv, "", "a")(stream=stream)
    status, number, graph, nodes, *rest = drv.call("cuStreamGetCaptureInfo", stream)
    assert status == STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert int(number) > 0
    assert len(nodes) == rest[-1] == 1
    ended = drv.call("cuStreamEndCapture", stream)
    assert int(ended) == int(graph)
    assert drv.call("cuGraphGetNodes", ended) == ([], 1)
    nodes, _ = drv.call("cuGraphGetNodes", ended, 1)
    assert drv.call("cuGraphNodeGetType", nodes[0]) == cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL


@pytest.mark.parametrize("call", ["cuStreamSynchronize", "cuStreamQuery"])
def test_waiting_for_a_captured_stream_is_refused_and_invalidates(drv, stream, lines, call):
    drv.call("cuStreamBeginCapture", stream, LOCAL)
    refused(drv, call, stream, code=900)
    assert drv.call("cuStreamIsCapturing", stream) == STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    refused(
        drv,
        "cuLaunchKernelEx",
        Kernel(drv, "", "a").config(1, 1, stream),
        Kernel(drv, "", "a").function,
        0,
        0,
        code=901,
    )
    refused(drv, "cuStreamEndCapture", stream, code=901)
    drv.call("cuStreamSynchronize", stream)


def test_a_captured_event_cannot_be_waited_for_by_the_host(drv, stream, lines):
    event = drv.call("cuEventCreate", 0)
    drv.call("cuStreamBeginCapture", stream, LOCAL)
    drv.call("cuEventRecord", event, stream)
    refused(drv, "cuEventQuery", event, code=907)
    refused(drv, "cuStreamEndCapture", stream, code=901)
    drv.call("cuEventRecord", event, stream)
    drv.call("cuEventSynchronize", event)


def test_a_captured_stream_cannot_wait_for_work_outside(drv, stream, lines):
    other = drv.call("cuStreamCreate", NON_BLOCKING)
    event = drv.call("cuEventCreate", 0)
    drv.call("cuEventRecord", event, other)
    drv.call("cuStreamBeginCapture", stream, LOCAL)
    refused(drv, "cuStreamWaitEvent", stream, event, 0, code=905)
    refused(drv, "cuStreamEndCapture", stream, code=901)


def test_the_legacy_stream_is_refused_while_a_blocking_stream_is_captured(drv, lines):
    blocking = drv.call("cuStreamCreate", 0)
    drv.call("cuStreamBeginCapture", blocking, RELAXED)
    kernel = Kernel(drv, "", "a")
    refused(drv, "cuLaunchKernelEx", kernel.config(1, 1, 0), kernel.function, 0, 0, code=906)
    refused(drv, "cuStreamEndCapture", blocking, code=901)
    refused(drv, "cuStreamBeginCapture", 0, LOCAL, code=900)


@pytest.mark.parametrize(("mode", "own", "foreign"), [(GLOBAL, 900, 900), (LOCAL, 900, 0), (RELAXED, 0, 0)])
def test_unsafe_calls_are_refused_as_the_mode_says(drv, stream, lines, mode, own, foreign):
    codes: list[int] = []

    def allocate():
        with drv.current(0):
            codes.append(int(drv.api.cuMemAlloc(64)[0]))

    for run in (allocate, lambda: run_in_thread(allocate)):
        drv.call("cuStreamBeginCapture", stream, mode)
        run()
        ended = int(drv.api.cuStreamEndCapture(stream)[0])
        assert ended == (901 if codes[-1] else 0)
    assert codes == [own, foreign]


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_thread_may_change_its_capture_mode(drv, stream, lines):
    assert drv.call("cuThreadExchangeStreamCaptureMode", RELAXED) == GLOBAL
    drv.call("cuStreamBeginCapture", stream, GLOBAL)
    drv.call("cuMemFree", drv.call("cuMemAlloc", 64))
    drv.call("cuStreamEndCapture", stream)
    assert drv.call("cuThreadExchangeStreamCaptureMode", GLOBAL) == RELAXED


def test_a_capture_ends_on_the_thread_that_began_it(drv, stream, lines):
    drv.call("cuStreamBeginCapture", stream, LOCAL)
    codes = []

    def end():
        with drv.current(0):
            codes.append(int(drv.api.cuStreamEndCapture(stream)[0]))

    run_in_thread(end)
    assert codes == [908]
    drv.call("cuStreamEndCapture", stream)


def test_captures_do_not_nest(drv, stream, lines):
    drv.call("cuStreamBeginCapture", stream, LOCAL)
    refused(drv, "cuStreamBeginCapture", stream, LOCAL, code=401)
    drv.call("cuStreamEndCapture", stream)
    refused(drv, "cuStreamEndCapture", stream, code=401)
