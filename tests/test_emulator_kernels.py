"""PTX text through the emulated driver: loading, parameters, variables, memory of all kinds, and what goes wrong."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import environment
from helpers.emulated import (
    POSIX,
    READ,
    Kernel,
    Mapped,
    access,
    download,
    machine,
    multicast_prop,
    refused,
    upload,
)

from lamport_numba import emulator
from lamport_numba.errors import DriverError

HEAD = ".version 8.1\n.target sm_90\n.address_size 64\n"

ADD = (
    HEAD
    + """
.visible .entry add(.param .u64 out, .param .u64 in, .param .u32 value, .param .u32 count)
{
    .reg .pred %p; .reg .b32 %i, %n, %v, %x, %t; .reg .b64 %o, %a, %d;
    ld.param.u64 %o, [out];
    ld.param.u64 %a, [in];
    ld.param.u32 %v, [value];
    ld.param.u32 %n, [count];
    mov.u32 %i, %ctaid.x;
    mov.u32 %t, %ntid.x;
    mov.u32 %x, %tid.x;
    mad.lo.u32 %i, %i, %t, %x;
    setp.ge.u32 %p, %i, %n;
    @%p bra DONE;
    mul.wide.u32 %d, %i, 4;
    add.u64 %a, %a, %d;
    add.u64 %o, %o, %d;
    ld.global.u32 %x, [%a];
    add.u32 %x, %x, %v;
    st.global.u32 [%o], %x;
DONE:
    ret;
}
"""
)

STORE = (
    HEAD
    + """
.visible .entry store(.param .u64 at, .param .u32 value)
{
    .reg .b32 %v; .reg .b64 %a;
    ld.param.u64 %a, [at];
    ld.param.u32 %v, [value];
    st.global.u32 [%a], %v;
    ret;
}
"""
)

# Publishes a word, then spins until the other word has come.
MEET = (
    HEAD
    + """
.visible .entry meet(.param .u64 to, .param .u64 from, .param .u32 value)
{
    .reg .pred %p; .reg .b32 %v, %x; .reg .b64 %a, %b;
    ld.param.u64 %a, [to];
    ld.param.u64 %b, [from];
    ld.param.u32 %v, [value];
    st.relaxed.sys.global.u32 [%a], %v;
SPIN:
    ld.relaxed.sys.global.u32 %x, [%b];
    setp.lt.u32 %p, %x, %v;
    @%p bra SPIN;
    ret;
}
"""
)

BROADCAST = (
    HEAD
    + """
.visible .entry broadcast(.param .u64 at, .param .u32 value)
{
    .reg .b32 %v; .reg .f32 %f; .reg .b64 %a;
    ld.param.u64 %a, [at];
    ld.param.u32 %v, [value];
    mov.b32 %f, %v;
    multimem.st.relaxed.sys.global.v4.f32 [%a], {%f, %f, %f, %f};
    ret;
}
"""
)


@pytest.fixture
def drv():
    with machine(devices=2) as made:
        yield made


# Loading


def test_a_kernel_runs(drv):
    data = np.arange(1000, dtype=np.uint32)
    source, target = upload(drv, data), upload(drv, np.zeros_like(data))
    Kernel(drv, ADD, "add")(target, source, 7, 1000, grid=8, block=128)
    assert (download(drv, target, 1000) == data + 7).all()
    for address in (source, target):
        drv.call("cuMemFree", address)


def test_parameters_as_cuda_python_takes_them(drv):
    data = np.arange(10, dtype=np.uint32)
    source, target = upload(drv, data), upload(drv, np.zeros_like(data))
    function = drv.call("cuModuleGetFunction", drv.load_module(ADD), b"add")
    c32 = ctypes.c_uint32
    params = ((target, source, 5, 10), (ctypes.c_void_p, ctypes.c_void_p, c32, c32))
    drv.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, 0, params, 0)
    assert (download(drv, target, 10) == data + 5).all()
    from cuda.bindings import driver as cuda

    params = ((cuda.CUdeviceptr(target), cuda.CUdeviceptr(source), c32(6), c32(10)), (None, None, None, None))
    drv.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, 0, params, 0)
    assert (download(drv, target, 10) == data + 6).all()
    wrong = ((target, source, 5), (ctypes.c_void_p, ctypes.c_void_p, c32))
    refused(drv, "cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, 0, wrong, 0, text="which takes 4")
    refused(drv, "cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)
    for address in (source, target):
        drv.call("cuMemFree", address)


MIXED = (
    HEAD
    + """
.visible .entry mixed(.param .u64 at, .param .u8 a, .param .u16 b, .param .align 16 .b8 c[16], .param .u32 d)
{
    .reg .b16 %h; .reg .b32 %w; .reg .b64 %at;
    ld.param.u64 %at, [at];
    ld.param.u8 %h, [a];
    cvt.u32.u16 %w, %h;
    st.global.u32 [%at], %w;
    ld.param.u16 %h, [b];
    cvt.u32.u16 %w, %h;
    st.global.u32 [%at+4], %w;
    ld.param.u32 %w, [c+12];
    st.global.u32 [%at+8], %w;
    ld.param.u32 %w, [d];
    st.global.u32 [%at+12], %w;
    ret;
}
"""
)


@pytest.mark.parametrize("step", [16, 24, 40_000])
def test_parameters_of_all_sizes_from_wherever_they_lie(drv, step):
    target = upload(drv, np.zeros(4, np.uint32))
    function = drv.call("cuModuleGetFunction", drv.load_module(MIXED), b"mixed")
    block = np.full(5 * step + 16, 0xEE, np.uint8)
    values = [np.array([target], np.uint64), np.array([201], np.uint8), np.array([60_000], np.uint16)]
    values += [np.array([0, 0, 0, 77], np.uint32), np.array([0xFEDCBA98], np.uint32)]
    pointers = np.empty(5, np.uint64)
    for i in reversed(range(5)):  # in another order than the parameters'
        at = (4 - i) * step
        block[at : at + values[i].nbytes] = values[i].view(np.uint8)
        pointers[i] = block.ctypes.data + at
    drv.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, int(pointers.ctypes.data), 0)
    assert download(drv, target, 4).tolist() == [201, 60_000, 77, 0xFEDCBA98]
    drv.call("cuMemFree", target)


def test_parameters_are_copied_at_the_launch(drv):
    target = upload(drv, np.zeros(2, np.uint32))
    function = drv.call("cuModuleGetFunction", drv.load_module(STORE), b"store")
    block = np.zeros(2, np.uint64)
    pointers = np.array([block.ctypes.data, block.ctypes.data + 8], np.uint64)
    for i in range(2):
        block[:] = (target + 4 * i, 100 + i)
        drv.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, int(pointers.ctypes.data), 0)
    block[:] = 0
    assert download(drv, target, 2).tolist() == [100, 101]
    drv.call("cuMemFree", target)


def test_variables_have_addresses(drv):
    text = (
        HEAD
        + """
.visible .global .align 4 .u32 counter = 41;
.visible .entry bump()
{
    .reg .b32 %x;
    ld.global.u32 %x, [counter];
    add.u32 %x, %x, 1;
    st.global.u32 [counter], %x;
    ret;
}
"""
    )
    module = drv.load_module(text)
    address, size = drv.call("cuModuleGetGlobal", module, b"counter")
    assert size == 4
    assert download(drv, int(address), 1).tolist() == [41]
    function = drv.call("cuModuleGetFunction", module, b"bump")
    drv.call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    assert download(drv, int(address), 1).tolist() == [42]
    refused(drv, "cuModuleGetGlobal", module, b"other", code=500)
    refused(drv, "cuModuleGetFunction", module, b"other", code=500, text="it has bump")
    drv.call("cuModuleUnload", module)
    refused(drv, "cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, code=400)


def test_bad_text_is_refused_with_the_line_in_the_log(drv):
    with pytest.raises(DriverError) as caught:
        drv.load_module(STORE.replace("st.global.u32", "st.globule.u32"))
    assert caught.value.code == 218
    assert "line 10" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [(".version 8.1", ".version 99.0", 222), ("sm_90", "sm_100", 209), ("sm_90", "sm_80", 0), ("sm_90", "sm_90a", 0)],
)
def test_versions_and_targets(drv, old, new, code):
    answer = drv.api.cuModuleLoadData(STORE.replace(old, new).encode())
    assert int(answer[0]) == code
    refused(drv, "cuModuleLoadData", b"\x7fELF....", code=209)


def test_a_function_says_what_it_needs(drv):
    from cuda.bindings import driver as cuda

    kernel = Kernel(drv, ADD, "add")
    names = cuda.CUfunction_attribute
    assert drv.call("cuFuncGetAttribute", names.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, kernel.function) == 1024
    assert drv.call("cuFuncGetAttribute", names.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel.function) == 0
    assert drv.call("cuFuncGetParamInfo", kernel.function, 3) == (20, 4)
    refused(drv, "cuFuncGetParamInfo", kernel.function, 4)


# What a kernel may not touch


def test_an_illegal_address_is_reported_with_kernel_line_and_thread(drv, capfd):
    target = upload(drv, np.zeros(4, np.uint32))
    Kernel(drv, STORE, "store")(target + 16, 1, block=1)
    refused(drv, "cuCtxSynchronize", code=700)
    said = capfd.readouterr().err
    line = next(i for i, text in enumerate(STORE.splitlines(), 1) if "st.global" in text)
    for word in ("illegal address", "store", f"line {line}", "thread (0, 0, 0)", f"{target + 16:#x}"):
        assert word in said
    assert emulator.last_fault().line == line


def test_a_misaligned_address_is_a_fault_of_its_own(drv, capfd):
    target = upload(drv, np.zeros(4, np.uint32))
    Kernel(drv, STORE, "store")(target + 2, 1, block=1)
    refused(drv, "cuCtxSynchronize", code=716)
    assert "misaligned" in capfd.readouterr().err


def test_access_before_set_access_and_through_read_only_rights_are_faults(drv, capfd):
    size = emulator.CONFIG.granularity
    mine = Mapped(drv, size, devices=())
    Kernel(drv, STORE, "store")(mine.address, 1, block=1)
    refused(drv, "cuCtxSynchronize", code=700)
    assert "no access was set" in capfd.readouterr().err
    drv.call("cuDevicePrimaryCtxReset", 0)

    drv.call("cuMemSetAccess", mine.address, size, access(flags=READ), 1)
    Kernel(drv, STORE, "store")(mine.address, 1, block=1)
    refused(drv, "cuCtxSynchronize", code=700)
    assert "not permitted" in capfd.readouterr().err
    drv.call("cuDevicePrimaryCtxReset", 0)
    mine.close()


# Multicast


def _multicast(drv, size, bound=(0, 1)):
    team = drv.call("cuMulticastCreate", multicast_prop(2, size))
    memory = [Mapped(drv, size, device=d, devices=(d,)) for d in range(2)]
    for device in range(2):
        drv.call("cuMulticastAddDevice", team, device)
    for device in bound:
        drv.call("cuMulticastBindMem", team, 0, memory[device].handle, 0, size, 0)
    address = int(drv.call("cuMemAddressReserve", size, 0, 0, 0))
    drv.call("cuMemMap", address, size, 0, team, 0)
    drv.call("cuMemSetAccess", address, size, access(0), 1)
    return team, memory, address


def _close(drv, size, team, memory, address, bound=(0, 1)):
    for device in bound:
        drv.call("cuMulticastUnbind", team, device, 0, size)
    drv.call("cuMemUnmap", address, size)
    drv.call("cuMemAddressFree", address, size)
    drv.call("cuMemRelease", team)
    for one in memory:
        one.close()


def test_a_multicast_store_lands_in_every_memory(drv):
    drv.primary(1)
    size = 2 * emulator.CONFIG.multicast_granularity
    made = _multicast(drv, size)
    Kernel(drv, BROADCAST, "broadcast")(made[2] + 4096, 0x7FA00001, block=1)
    drv.call("cuCtxSynchronize")
    for device, memory in enumerate(made[1]):
        with drv.current(device):
            assert (download(drv, memory.address + 4096, 4) == 0x7FA00001).all()
            assert (download(drv, memory.address, 1024) == 0).all()
    _close(drv, size, *made)


def test_an_ordinary_store_to_a_multicast_address_is_a_fault(drv, capfd):
    drv.primary(1)
    size = emulator.CONFIG.multicast_granularity
    made = _multicast(drv, size)
    Kernel(drv, STORE, "store")(made[2], 1, block=1)
    refused(drv, "cuCtxSynchronize", code=700)
    assert "ordinary access to a multicast address" in capfd.readouterr().err
    drv.call("cuDevicePrimaryCtxReset", 0)
    _close(drv, size, *made)


def test_a_multicast_store_to_ordinary_memory_is_a_fault(drv, capfd):
    target = upload(drv, np.zeros(4, np.uint32))
    Kernel(drv, BROADCAST, "broadcast")(target, 1, block=1)
    refused(drv, "cuCtxSynchronize", code=700)
    assert "multimem access to an ordinary address" in capfd.readouterr().err


def test_a_multicast_store_that_would_miss_a_member_is_a_fault(drv, capfd):
    drv.primary(1)
    size = emulator.CONFIG.multicast_granularity
    made = _multicast(drv, size, bound=(0,))
    Kernel(drv, BROADCAST, "broadcast")(made[2], 1, block=1)
    refused(drv, "cuCtxSynchronize", code=700)
    assert "nothing is bound by device 1" in capfd.readouterr().err
    drv.call("cuDevicePrimaryCtxReset", 0)
    _close(drv, size, *made, bound=(0,))


# Two processes


PEER = """
import sys
from helpers.emulated import Kernel, Mapped, POSIX
from lamport_numba import driver, emulator
from test_emulator_kernels import MEET
emulator.configure(devices=2)
drv = driver.select("emulated")
with drv.current(1):
    memory = Mapped(drv, emulator.CONFIG.granularity, devices=(1,),
                    handle=drv.call("cuMemImportFromShareableHandle", int(sys.argv[1]), POSIX))
    meet = Kernel(drv, MEET, "meet")
    print("ready", flush=True)
    for i in range(1, 201):
        meet(memory.address + 4, memory.address, i, block=1)
        drv.call("cuCtxSynchronize")
    memory.close()
    print("done", emulator.leaks(), flush=True)
"""


def test_kernels_of_two_processes_wait_for_each_other(drv):
    mine = Mapped(drv, emulator.CONFIG.granularity)
    fd = drv.call("cuMemExportToShareableHandle", mine.handle, POSIX, 0)
    env = environment.of_ranks({"LAMPORT_NUMBA_DEVICE": "emulated"}, multicast=True)
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, str(fd)], env=env, pass_fds=(fd,), stdout=subprocess.PIPE, text=True
    )
    os.close(fd)
    try:
        meet = Kernel(drv, MEET, "meet")
        assert peer.stdout is not None
        assert peer.stdout.readline().strip() == "ready"
        for i in range(1, 201):
            meet(mine.address, mine.address + 4, i, block=1)
            drv.call("cuCtxSynchronize")
        assert peer.stdout.readline().strip() == "done []"
        assert peer.wait(20) == 0
    finally:
        peer.kill()
        peer.wait()
        mine.close()
