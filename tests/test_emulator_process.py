"""The emulated device and processes: leaks told at exit, deaths on demand, nothing inherited, nothing growing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import environment, leaks
from helpers.emulated import FABRIC, POSIX, Mapped, access, download, machine, memory_prop, multicast_prop, upload

from lamport_numba import emulator

SIZE = 2 * emulator.CONFIG.multicast_granularity


@pytest.fixture
def drv():
    with machine(devices=2) as made:
        made.primary(1)
        yield made


def script(body: str) -> str:
    """A program that has ``drv`` with device 0 current."""
    head = "import os, sys\nfrom helpers.emulated import *\ndrv = driver.select('emulated')\nwith drv.current(0):\n"
    return head + "".join(f"    {line}\n" for line in body.strip().splitlines())


def python(body: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run such a program."""
    env = environment.of_ranks({"LAMPORT_NUMBA_DEVICE": "emulated"}, multicast=True)
    return subprocess.run(
        [sys.executable, "-c", script(body), *args], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_leaks_are_told_at_exit_and_the_exit_is_clean():
    done = python(f"made = Mapped(drv, {SIZE})\nupload(drv, np.zeros(4))")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    for word in ("not given back at exit", "handle", "mapping", "reservation"):
        assert word in done.stderr


def test_a_program_that_gives_everything_back_is_silent():
    done = python(f"Mapped(drv, {SIZE}).close()\nupload(drv, np.zeros(4))")  # plain allocations go with the context
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_ruined_context_had_is_not_told_at_exit():
    body = f"""
made = Mapped(drv, {SIZE})
Kernel(drv, SPIN, "spin")(0, grid=1)  # a null pointer
try:
    drv.call("cuCtxSynchronize")
except Exception as error:
    print(error.code_name)
"""
    done = python(body)
    assert (done.returncode, done.stdout) == (0, "CUDA_ERROR_ILLEGAL_ADDRESS\n")
    assert "not given back" not in done.stderr


def test_a_program_may_end_while_a_kernel_spins():
    body = """
at = upload(drv, np.zeros(4))
Kernel(drv, SPIN, "spin")(at, grid=4)
class Late:
    def __del__(self, write=os.write, allocate=drv.api.cuMemAlloc):
        write(1, b"late %d" % int(allocate(64)[0]))
late = Late()
"""
    for _ in range(3):
        done = python(body)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "late 4"  # deinitialised, as a real driver says by then


def test_a_process_can_be_made_to_die_in_a_call():
    done = python("emulator.inject('cuMemCreate', die=True, skip=1)\nfor _ in range(2):\n    Mapped(drv, 65536 * 4)\n")
    assert done.returncode == -signal.SIGKILL


def test_the_number_of_devices_is_that_of_the_ranks_on_the_host():
    env = environment.of_ranks(
        {"LAMPORT_NUMBA_DEVICE": "emulated", "MPI_LOCALNRANKS": "3", "PMI_RANK": "0", "PMI_SIZE": "3"}
    )
    code = "from lamport_numba import driver; print(driver.select('emulated').device_count())"
    for changes, expected in (({}, "3"), ({"LAMPORT_NUMBA_EMULATED_DEVICES": "7"}, "7")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**env, **changes}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_uuids_are_the_same_in_every_process(drv):
    done = python("emulator.configure(devices=2)\nprint(drv.device_uuid(1).hex())")
    assert done.stdout.strip() == drv.device_uuid(1).hex()


def test_children_inherit_no_descriptor(drv):
    mine = Mapped(drv, SIZE)
    team = drv.call("cuMulticastCreate", multicast_prop(1, SIZE))
    fds = [drv.call("cuMemExportToShareableHandle", handle, POSIX, 0) for handle in (mine.handle, team)]
    listing = "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if n != '3'])"
    found = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, close_fds=False, check=False
    )
    assert "lamport" not in found.stdout
    for fd in fds:
        os.close(fd)
    drv.call("cuMemRelease", team)
    mine.close()


def test_fabric_handles_resolve_in_another_process():
    with machine(fabric_handles=True) as drv:
        mine = Mapped(drv, SIZE, handle=drv.call("cuMemCreate", SIZE, memory_prop(types=FABRIC), 0))
        drv.call("cuMemsetD32", mine.address, 0xCAFE, 4)
        data = bytes(drv.call("cuMemExportToShareableHandle", mine.handle, FABRIC, 0).data)
        body = f"""
from cuda.bindings import driver as cuda
emulator.configure(fabric_handles=True)
fabric = cuda.CUmemFabricHandle()
fabric.data = bytes.fromhex(sys.argv[1])
theirs = Mapped(drv, {SIZE}, handle=drv.call("cuMemImportFromShareableHandle", fabric, FABRIC))
print([hex(x) for x in download(drv, theirs.address, 4)])
theirs.close()
"""
        done = python(body, data.hex())
        assert done.stdout.strip() == str([hex(0xCAFE)] * 4), done.stderr
        mine.close()


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())


def test_two_hundred_rounds_leave_nothing_behind(drv):
    def one() -> None:
        memory = [Mapped(drv, SIZE, device=d, devices=(0, 1)) for d in range(2)]
        team = drv.call("cuMulticastCreate", multicast_prop(2, SIZE))
        fd = drv.call("cuMemExportToShareableHandle", team, POSIX, 0)
        imported = drv.call("cuMemImportFromShareableHandle", fd, POSIX)
        os.close(fd)
        for device in range(2):
            drv.call("cuMulticastAddDevice", imported, device)
            drv.call("cuMulticastBindMem", imported, 0, memory[device].handle, 0, SIZE, 0) if device else None
        drv.call("cuMulticastBindMem", team, 0, memory[0].handle, 0, SIZE, 0)
        address = drv.call("cuMemAddressReserve", SIZE, 0, 0, 0)
        drv.call("cuMemMap", address, SIZE, 0, team, 0)
        drv.call("cuMemSetAccess", address, SIZE, access(0), 1)
        drv.call("cuMemUnmap", address, SIZE)
        drv.call("cuMemAddressFree", address, SIZE)
        for device in range(2):
            drv.call("cuMulticastUnbind", team, device, 0, SIZE)
        for handle in (team, imported):
            drv.call("cuMemRelease", handle)
        for part in memory:
            part.close()
        drv.call("cuMemFree", drv.call("cuMemAlloc", 3 << 20))
        stream, event = drv.call("cuStreamCreate", 1), drv.call("cuEventCreate", 0)
        drv.call("cuEventRecord", event, stream)
        drv.call("cuStreamSynchronize", stream)
        drv.call("cuEventDestroy", event)
        drv.call("cuStreamDestroy", stream)

    for _ in range(5):
        one()
    before = _resources()
    free = drv.call("cuMemGetInfo")
    for _ in range(200):
        one()
    after = _resources()
    assert after[0] == before[0]
    assert after[1] <= before[1] + 5
    assert drv.call("cuMemGetInfo") == free
    assert leaks.new() == []


def test_many_threads_at_once(drv):
    """Each allocates, copies and waits on its own stream: no call is lost or mixed up."""
    wrong: list[str] = []

    def work(number: int) -> None:
        with drv.current(number % 2):
            stream = drv.call("cuStreamCreate", 1)
            data = np.arange(100, dtype=np.uint32) + 1000 * number
            for _ in range(50):
                address = upload(drv, data)
                drv.call("cuMemsetD32Async", address, number, 1, stream)
                drv.call("cuStreamSynchronize", stream)
                got = download(drv, address, 100)
                if got[0] != number or (got[1:] != data[1:]).any():
                    wrong.append(f"thread {number}: {got[:4]}")
                drv.call("cuMemFree", address)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_ctrl_c_ends_a_program_whose_kernel_spins():
    body = """
at = upload(drv, np.zeros(4))
Kernel(drv, SPIN, "spin")(at, grid=4)
print("spinning", flush=True)
drv.call("cuCtxSynchronize")
"""
    env = environment.of_ranks({"LAMPORT_NUMBA_DEVICE": "emulated"}, multicast=True)
    process = subprocess.Popen(
        [sys.executable, "-c", script(body)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "spinning"
        time.sleep(0.5)  # into the wait
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in said
    finally:
        process.kill()
        process.wait()
