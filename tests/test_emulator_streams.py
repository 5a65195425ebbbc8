"""Streams, events, programmatic dependents, residency, faults: what the engine starts, runs and waits for."""

from __future__ import annotations

import _thread
import ctypes
import threading
import time

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from helpers.emulated import Kernel, download, machine, refused, upload
from helpers.scripted_grid import GO, SPIN, TRAP, TRIGGER, WAIT, install

from lamport_numba import emulator
from lamport_numba.errors import DriverError

NON_BLOCKING = 1


@pytest.fixture
def drv():
    with machine(devices=2) as made:
        yield made


class Log:
    """What scripted kernels have done, in order, and gates that they wait at."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.open: set[str] = set()

    def plain(self, name, steps=2):
        """A kernel that takes a few steps."""

        def body(cta):
            self.lines.append(f"{name}{cta}+")
            for _ in range(steps):
                yield GO
            self.lines.append(f"{name}{cta}-")

        return body

    def gated(self, name, gate, trigger=False):
        """A kernel that spins until its gate is open."""

        def body(cta):
            self.lines.append(f"{name}{cta}+")
            if trigger:
                yield TRIGGER
            while gate not in self.open:
                yield SPIN
            self.lines.append(f"{name}{cta}-")

        return body

    def dependent(self, name, waits=True):
        """A kernel that waits for its predecessor, or does not."""

        def body(cta):
            self.lines.append(f"{name}{cta}+")
            if waits:
                yield WAIT
            yield GO
            self.lines.append(f"{name}{cta}-")

        return body


@pytest.fixture
def log():
    return Log()


def until(condition, seconds=10.0):
    """Wait for what the background thread does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    assert condition()


# Order


def test_one_stream_runs_in_order(drv, log, monkeypatch):
    install(monkeypatch, a=log.plain("a"), b=log.plain("b"))
    stream = drv.call("cuStreamCreate", 0)
    for name in "abab":
        Kernel(drv, "", name)(stream=stream)
    drv.call("cuStreamSynchronize", stream)
    assert log.lines == ["a0+", "a0-", "b0+", "b0-"] * 2


def test_streams_run_side_by_side(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "gate"), b=log.plain("b"))
    one, two = (drv.call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    Kernel(drv, "", "a")(stream=one)
    Kernel(drv, "", "b")(stream=two)
    drv.call("cuStreamSynchronize", two)
    assert log.lines == ["a0+", "b0+", "b0-"]
    refused(drv, "cuStreamQuery", one, code=600)
    log.open.add("gate")
    drv.call("cuStreamSynchronize", one)
    drv.call("cuStreamQuery", one)


def test_the_legacy_stream_waits_for_blocking_streams_and_they_for_it(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a"), b=log.plain("b"), c=log.plain("c"))
    blocking = drv.call("cuStreamCreate", 0)
    Kernel(drv, "", "a")(stream=blocking)
    Kernel(drv, "", "b")(stream=0)
    Kernel(drv, "", "c")(stream=blocking)
    until(lambda: log.lines)
    assert log.lines == ["a0+"]
    log.open.add("a")
    drv.call("cuCtxSynchronize")
    assert log.lines == ["a0+", "a0-", "b0+", "b0-", "c0+", "c0-"]


def test_a_non_blocking_stream_does_not_wait_for_the_legacy_one(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a"), b=log.plain("b"))
    free = drv.call("cuStreamCreate", NON_BLOCKING)
    Kernel(drv, "", "a")(stream=0)
    Kernel(drv, "", "b")(stream=free)
    drv.call("cuStreamSynchronize", free)
    assert "a0-" not in log.lines
    log.open.add("a")
    drv.call("cuCtxSynchronize")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_default_streams_by_their_numbers(drv, log, monkeypatch, number):
    install(monkeypatch, a=log.plain("a"))
    Kernel(drv, "", "a")(stream=number)
    drv.call("cuStreamSynchronize", number)
    assert log.lines == ["a0+", "a0-"]


def test_the_background_runs_what_nobody_waits_for(drv, log, monkeypatch):
    install(monkeypatch, a=log.plain("a"))
    Kernel(drv, "", "a")()
    until(lambda: log.lines == ["a0+", "a0-"])


def test_two_threads_wait_for_kernels_that_wait_for_each_other(drv, monkeypatch):
    seen = set()

    def meet(mine, other):
        def body(cta):
            seen.add(mine)
            while other not in seen:
                yield SPIN
            yield GO

        return body

    install(monkeypatch, a=meet("a", "b"), b=meet("b", "a"))

    def rank(device, name):
        with drv.current(device):
            Kernel(drv, "", name)()
            drv.call("cuCtxSynchronize")
            done.append(device)

    done: list[int] = []
    threads = [threading.Thread(target=rank, args=(i, name)) for i, name in enumerate("ab")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(done) == [0, 1]


# Copies in streams


def test_asynchronous_copies_take_their_place_in_the_stream(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a"))
    stream = drv.call("cuStreamCreate", NON_BLOCKING)
    address = upload(drv, np.zeros(4, np.uint32))
    Kernel(drv, "", "a")(stream=stream)
    source = np.arange(4, dtype=np.uint32)
    drv.call("cuMemcpyHtoDAsync", address, source.ctypes.data, 16, stream)
    source[:] = 99  # pageable memory was read before the call came back
    drv.call("cuMemsetD32Async", address, 7, 1, stream)
    assert (np.ctypeslib.as_array((ctypes.c_uint32 * 4).from_address(address)) == 0).all()
    log.open.add("a")
    drv.call("cuStreamSynchronize", stream)
    assert download(drv, address, 4).tolist() == [7, 1, 2, 3]
    drv.call("cuMemFree", address)


def test_an_asynchronous_copy_to_pageable_memory_waits(drv):
    stream = drv.call("cuStreamCreate", NON_BLOCKING)
    address = upload(drv, np.arange(4, dtype=np.uint32))
    target = np.zeros(4, np.uint32)
    drv.call("cuMemcpyDtoHAsync", target.ctypes.data, address, 16, stream)
    assert target.tolist() == [0, 1, 2, 3]
    drv.call("cuMemFree", address)


def test_memory_freed_while_a_kernel_runs_stays_until_it_ends(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a"))
    address = upload(drv, np.arange(4, dtype=np.uint32))
    Kernel(drv, "", "a")()
    drv.call("cuMemFree", address)
    refused(drv, "cuMemFree", address)
    from lamport_numba.emulator.machine import MACHINE

    assert MACHINE.devices[0].table.find(address) is not None
    log.open.add("a")
    drv.call("cuCtxSynchronize")
    assert MACHINE.devices[0].table.find(address) is None


def test_host_functions_run_in_order(drv, log, monkeypatch):
    install(monkeypatch, a=log.plain("a"))
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda value: log.lines.append(f"host {value}"))
    stream = drv.call("cuStreamCreate", 0)
    Kernel(drv, "", "a")(stream=stream)
    drv.call("cuLaunchHostFunc", stream, function, 42)
    Kernel(drv, "", "a")(stream=stream)
    drv.call("cuStreamSynchronize", stream)
    assert log.lines == ["a0+", "a0-", "host 42", "a0+", "a0-"]


# Events


def test_an_event_orders_two_streams(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a"), b=log.plain("b"))
    one, two = (drv.call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    event = drv.call("cuEventCreate", 0)
    drv.call("cuEventQuery", event)  # never recorded: passed
    Kernel(drv, "", "a")(stream=one)
    drv.call("cuEventRecord", event, one)
    drv.call("cuStreamWaitEvent", two, event, 0)
    Kernel(drv, "", "b")(stream=two)
    refused(drv, "cuEventQuery", event, code=600)
    assert "b0+" not in log.lines
    log.open.add("a")
    drv.call("cuStreamSynchronize", two)
    assert log.lines == ["a0+", "a0-", "b0+", "b0-"]
    drv.call("cuEventQuery", event)
    drv.call("cuEventSynchronize", event)


def test_a_wait_is_for_the_record_at_the_time_of_the_call(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a"), b=log.plain("b"))
    one, two = (drv.call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
    event = drv.call("cuEventCreate", 0)
    drv.call("cuEventRecord", event, one)
    drv.call("cuStreamWaitEvent", two, event, 0)
    Kernel(drv, "", "a")(stream=one)
    drv.call("cuEventRecord", event, one)  # a later record, which the wait before does not mean
    Kernel(drv, "", "b")(stream=two)
    drv.call("cuStreamSynchronize", two)
    assert "b0-" in log.lines
    assert "a0-" not in log.lines
    log.open.add("a")
    drv.call("cuEventSynchronize", event)


def test_elapsed_time(drv):
    first, last = (drv.call("cuEventCreate", 0) for _ in range(2))
    refused(drv, "cuEventElapsedTime", first, last, code=400)
    drv.call("cuEventRecord", first, 0)
    drv.call("cuEventRecord", last, 0)
    drv.call("cuEventSynchronize", last)
    assert 0 <= drv.call("cuEventElapsedTime", first, last) < 1000
    untimed = drv.call("cuEventCreate", 2)
    drv.call("cuEventRecord", untimed, 0)
    drv.call("cuCtxSynchronize")
    refused(drv, "cuEventElapsedTime", first, untimed, code=400)


def test_dead_handles_are_refused(drv):
    stream, event = drv.call("cuStreamCreate", 0), drv.call("cuEventCreate", 0)
    drv.call("cuStreamDestroy", stream)
    drv.call("cuEventDestroy", event)
    refused(drv, "cuStreamSynchronize", stream, code=400)
    refused(drv, "cuEventRecord", event, 0, code=400)
    refused(drv, "cuEventRecord", stream, 0, code=400)
    refused(drv, "cuStreamDestroy", 0, code=400)


# Programmatic dependents


def test_a_dependent_starts_after_the_trigger_and_blocks_in_its_wait(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a", trigger=True), b=log.dependent("b"))
    Kernel(drv, "", "a")(grid=2)
    Kernel(drv, "", "b")(pdl=True)
    until(lambda: "b0+" in log.lines)
    time.sleep(0.01)
    assert log.lines == ["a0+", "a1+", "b0+"]
    log.open.add("a")
    drv.call("cuCtxSynchronize")
    assert log.lines[3:5] == ["a0-", "a1-"]
    assert log.lines[5] == "b0-"


def test_a_dependent_does_not_start_before_every_cta_has_triggered(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a"), b=log.dependent("b"))
    Kernel(drv, "", "a")()
    Kernel(drv, "", "b")(pdl=True)
    until(lambda: "a0+" in log.lines)
    time.sleep(0.01)
    assert log.lines == ["a0+"]
    log.open.add("a")
    drv.call("cuCtxSynchronize")


def test_a_kernel_without_the_attribute_waits_for_the_end(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a", trigger=True), b=log.dependent("b"))
    Kernel(drv, "", "a")()
    Kernel(drv, "", "b")(pdl=False)
    until(lambda: "a0+" in log.lines)
    time.sleep(0.01)
    assert log.lines == ["a0+"]
    log.open.add("a")
    drv.call("cuCtxSynchronize")
    assert log.lines == ["a0+", "a0-", "b0+", "b0-"]


def test_a_dependent_that_never_waits_may_end_first(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a", trigger=True), f=log.dependent("f", waits=False), b=log.dependent("b"))
    Kernel(drv, "", "a")()
    Kernel(drv, "", "f")(pdl=True)
    Kernel(drv, "", "b")(pdl=True)  # its wait covers f alone
    until(lambda: "b0-" in log.lines)
    assert "a0-" not in log.lines
    log.open.add("a")
    drv.call("cuCtxSynchronize")


def test_what_is_no_kernel_waits_for_all_kernels(drv, log, monkeypatch):
    install(monkeypatch, a=log.gated("a", "a", trigger=True), f=log.dependent("f", waits=False))
    event = drv.call("cuEventCreate", 0)
    Kernel(drv, "", "a")()
    Kernel(drv, "", "f")(pdl=True)
    drv.call("cuEventRecord", event, 0)
    until(lambda: "f0-" in log.lines)
    refused(drv, "cuEventQuery", event, code=600)
    log.open.add("a")
    drv.call("cuEventSynchronize", event)
    assert "a0-" in log.lines


# Residency


def test_a_grid_larger_than_the_residency_runs_in_turns(log, monkeypatch):
    with machine(residency=2) as drv:
        install(monkeypatch, a=log.plain("a"))
        Kernel(drv, "", "a")(grid=5)
        drv.call("cuCtxSynchronize")
    running = most = 0
    for line in log.lines:
        running += 1 if line.endswith("+") else -1
        most = max(most, running)
    assert len(log.lines) == 10
    assert most == 2


def test_residency_is_shared_by_all_grids_of_a_device(log, monkeypatch):
    with machine(residency=2) as drv:
        install(monkeypatch, a=log.gated("a", "a"), b=log.plain("b"))
        one, two = (drv.call("cuStreamCreate", NON_BLOCKING) for _ in range(2))
        Kernel(drv, "", "a")(grid=2, stream=one)
        until(lambda: len(log.lines) == 2)
        Kernel(drv, "", "b")(stream=two)
        time.sleep(0.01)
        assert log.lines == ["a0+", "a1+"]
        log.open.add("a")
        drv.call("cuCtxSynchronize")
        assert log.lines[-2:] == ["b0+", "b0-"]


def test_occupancy_agrees_with_the_residency(log, monkeypatch):
    install(monkeypatch, a=log.plain("a"))
    for residency in (1, 3):
        with machine(residency=residency) as drv:
            kernel = Kernel(drv, "", "a")
            a_block = drv.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel.function, 128, 0)
            assert a_block * drv.attribute(0, "MULTIPROCESSOR_COUNT") == residency
    with machine() as drv:
        kernel = Kernel(drv, "", "a")
        assert drv.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel.function, 1024, 0) == 2
        assert drv.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", kernel.function, 128, 0) == 16


# Launches that are refused


def test_launch_refuses_bad_configurations(drv, log, monkeypatch):
    install(monkeypatch, a=log.plain("a"))
    kernel = Kernel(drv, "", "a")
    for grid, block, code in ((0, 32, 1), (1, 0, 1), (1, 1025, 1)):
        refused(drv, "cuLaunchKernelEx", kernel.config(grid, block), kernel.function, 0, 0, code=code)
    config = kernel.config(1, 32)
    config.sharedMemBytes = 49 << 10
    refused(drv, "cuLaunchKernelEx", config, kernel.function, 0, 0, text="dynamic shared memory")
    refused(drv, "cuLaunchKernel", 0xDEAD, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0, code=400)
    assert log.lines == []


def test_launch_refuses_attributes_that_it_does_not_emulate(drv, log, monkeypatch):
    install(monkeypatch, a=log.plain("a"))
    kernel = Kernel(drv, "", "a")
    config = kernel.config(1, 32)
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    config.attrs, config.numAttrs = [attribute], 1
    refused(drv, "cuLaunchKernelEx", config, kernel.function, 0, 0, code=801, text="COOPERATIVE")


def test_a_function_belongs_to_the_context_it_was_loaded_into(drv, log, monkeypatch):
    install(monkeypatch, a=log.plain("a"))
    kernel = Kernel(drv, "", "a")
    with drv.current(1):
        refused(drv, "cuLaunchKernelEx", kernel.config(1, 32), kernel.function, 0, 0, code=400)


# Faults


def test_a_fault_ruins_the_context_and_is_told_once(drv, log, monkeypatch, capfd):
    install(monkeypatch, t=lambda cta: iter([GO, TRAP]), a=log.plain("a"))
    stream = drv.call("cuStreamCreate", 0)
    Kernel(drv, "", "t")(stream=stream)
    Kernel(drv, "", "a")(stream=stream)
    with pytest.raises(DriverError) as caught:
        drv.call("cuStreamSynchronize", stream)
    assert caught.value.code == 719
    refused(drv, "cuMemAlloc", 64, code=719)
    refused(drv, "cuStreamSynchronize", stream, code=719)
    assert log.lines == []  # what was queued behind it does not run
    assert emulator.last_fault().kind == "trap"
    assert capfd.readouterr().err.count("trap") == 2  # one report: its kind and its line
    with drv.current(1):
        drv.call("cuMemFree", drv.call("cuMemAlloc", 64))  # another device goes on
    drv.call("cuDevicePrimaryCtxReset", 0)
    drv.call("cuMemFree", drv.call("cuMemAlloc", 64))


def test_ctrl_c_ends_a_spinning_kernel(drv, log, monkeypatch, capfd):
    install(monkeypatch, a=log.gated("a", "never"))
    Kernel(drv, "", "a")()
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        drv.call("cuCtxSynchronize")
    refused(drv, "cuCtxSynchronize", code=702)
    assert "Ctrl-C" in capfd.readouterr().err
    from lamport_numba.emulator.machine import MACHINE

    assert not MACHINE.devices[0].busy


# Injection


def test_injected_errors_strike_as_often_as_asked(drv):
    emulator.inject("cuMemAlloc", code=2, times=2, skip=1)
    codes = [int(drv.api.cuMemAlloc(64)[0]) for _ in range(4)]
    assert codes == [0, 2, 2, 0]


def test_injection_on_another_device_or_rank_does_not_strike(drv):
    with emulator.injected("cuMemAlloc", code=2, device=1, times=None) as injection:
        drv.call("cuMemAlloc", 64)
        with drv.current(1):
            refused(drv, "cuMemAlloc", 64, code=2, text="injected")
        assert injection.hits == 1
    with emulator.injected("cuMemAlloc", code=2, rank=5):
        drv.call("cuMemAlloc", 64)


def test_an_injected_delay_lets_the_call_run(drv):
    emulator.inject("cuMemGetInfo", delay=0.05)
    start = time.monotonic()
    drv.call("cuMemGetInfo")
    assert time.monotonic() - start >= 0.05


def test_calls_are_counted(drv):
    before = emulator.calls().get("cuMemGetInfo", 0)
    drv.call("cuMemGetInfo")
    assert emulator.calls()["cuMemGetInfo"] == before + 1
    with pytest.raises(ValueError, match="cuNothing"):
        emulator.inject("cuNothing")


def test_a_call_that_is_not_emulated_says_so(drv):
    with pytest.raises(AttributeError, match="cuTexRefCreate is not emulated"):
        drv.call("cuTexRefCreate")
