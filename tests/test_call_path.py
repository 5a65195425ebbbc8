"""The call's way from Python to the launch: driver calls, Python objects and time that it may take, without a GPU.

What a launch costs on the emulated device says nothing about a GPU; what we do around it is the same code on both. So
the driver's two functions are replaced by ones that do nothing, and the rest is measured against an empty launch.
"""

import gc
import sys
import time
import tracemalloc
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from lamport_numba import emulator, run_ranks
from lamport_numba.bench.floor import empty_launch
from lamport_numba.bench.rig import Rig
from lamport_numba.collectives import LamportAllGather
from lamport_numba.driver import select, structs

CALLS = 200

# host time of a call without its driver calls, in empty emulated launches; it is 0.12 and 0.19
MOST = {"prepared": 0.4, "gather": 0.5}


def with_calls(check):
    """Run ``check(rig, calls)`` with calls of both kinds on one rank; each was made once."""

    def on_rank(comm):
        with LamportAllGather(comm, 4096, transport="peer") as gather:
            drv = select()
            with drv.current(gather.device):
                rig = Rig(drv, gather.device)
                x, y = rig.array(1024), rig.array(1024)
                prepared = gather.prepare(x, y, rig.stream)
                calls = {"prepared": prepared, "gather": partial(gather, x, y, stream=rig.stream)}
                for call in calls.values():
                    call()
                rig.synchronize()
                try:
                    return check(rig, gather, calls)
                finally:
                    rig.synchronize()

    return run_ranks(1, on_rank, timeout=60)[0]


@pytest.mark.parametrize("kind", ["prepared", "gather"])
def test_a_call_makes_two_driver_calls_and_one_more_to_see_a_capture(kind):
    def count(rig, gather, calls):
        gc.collect()
        gc.disable()  # finalisers of other tests' arrays make calls of their own
        try:
            before = emulator.calls()
            for _ in range(CALLS):
                calls[kind]()
            return difference(emulator.calls(), before)
        finally:
            gc.enable()

    def difference(after, before):
        return {name: number - before.get(name, 0) for name, number in after.items()}

    made = {name: number for name, number in with_calls(count).items() if number}
    look = {"cuStreamIsCapturing": CALLS} if kind == "gather" else {}
    assert made == {"cuCtxGetCurrent": CALLS, "cuLaunchKernelEx": CALLS, **look}


@contextmanager
def without_driver(gather, calls):
    """Inside, the driver functions of the calls do nothing."""
    drv = gather._drv
    api, current, launched = drv.api, drv.api.cuCtxGetCurrent(), (0,)
    blocks = {call._block for call in (calls["prepared"], *gather._remembered.values())}
    idle = structs.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    drv.api = SimpleNamespace(cuCtxGetCurrent=lambda: current, cuStreamIsCapturing=lambda stream: (0, idle))
    for block in blocks:
        block._enqueue = lambda *_: launched
    try:
        yield
    finally:
        drv.api = api
        for block in blocks:
            block._enqueue = api.cuLaunchKernelEx


@pytest.mark.parametrize("kind", ["prepared", "gather"])
def test_a_call_keeps_no_python_object_and_allocates_next_to_nothing(kind):
    def measure(rig, gather, calls):
        call = calls[kind]
        with without_driver(gather, calls):
            for _ in range(100):
                call()
            gc.collect()
            kept = min(growth(call) for _ in range(5))  # other threads allocate as they like
            tracemalloc.start()
            try:
                call()
                tracemalloc.reset_peak()
                current, _ = tracemalloc.get_traced_memory()
                call()
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        return kept, peak - current

    kept, transient = with_calls(measure)
    assert kept < CALLS // 20
    assert transient <= 512  # bytes: the key of a lookup, a bound method


@pytest.mark.parametrize("kind", ["prepared", "gather"])
def test_what_we_do_around_the_launch_is_small_beside_it(kind):
    def measure(rig, gather, calls):
        launch = best(empty_launch(rig, pdl=True).launch, rig.synchronize)
        with without_driver(gather, calls):
            return best(calls[kind], lambda: None) / launch

    ratio = with_calls(measure)
    print(f"{kind}: {ratio:.2f} empty launches")
    assert ratio < MOST[kind]


def growth(call):
    """Memory blocks that some calls leave behind."""
    before = sys.getallocatedblocks()
    for _ in range(CALLS):
        call()
    return sys.getallocatedblocks() - before


def best(call, between, repeats=30, calls=50):
    """The least time of a call in a batch of some: whatever else the machine does only adds to it."""
    found = []
    for _ in range(repeats):
        between()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls)
    return min(found)


def test_the_measurement_would_show_a_slow_call():
    def measure(rig, gather, calls):
        launch = best(empty_launch(rig, pdl=True).launch, rig.synchronize)

        def slow():
            sorted(range(400), key=str)
            return calls["prepared"]()

        with without_driver(gather, calls):
            return best(slow, lambda: None) / launch

    assert with_calls(measure) > MOST["gather"]
