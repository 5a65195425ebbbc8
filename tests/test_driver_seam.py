import contextlib
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest
from helpers.scripted_driver import SUCCESS, ScriptedApi, scripted

import lamport_numba
from lamport_numba import driver
from lamport_numba.driver import structs
from lamport_numba.errors import DeviceFallbackWarning, DeviceUnavailable, DriverError, LamportWarning, SettingError

INVALID = structs.CUresult.CUDA_ERROR_INVALID_VALUE


@pytest.fixture
def fresh(monkeypatch):
    """``select`` looks again, finds no emulator but a name, and what it finds is forgotten after the test."""
    monkeypatch.delenv("LAMPORT_NUMBA_DEVICE", raising=False)
    monkeypatch.setitem(sys.modules, "lamport_numba.emulator.driver", ScriptedApi())
    driver.forget()
    yield monkeypatch
    driver.forget()


# Calls


@pytest.mark.parametrize(
    ("answer", "expected"),
    [((SUCCESS,), None), ((SUCCESS, 5), 5), ((SUCCESS, 5, 6), (5, 6)), ((SUCCESS, 0), 0), ((SUCCESS, None), None)],
)
def test_call_unwraps(answer, expected):
    drv, _ = scripted(cuAnything=answer)
    assert drv.call("cuAnything") == expected


def test_call_passes_arguments_on():
    drv, api = scripted()
    drv.call("cuAnything", 1, "two")
    assert api.calls == [("cuAnything", 1, "two")]


def test_call_raises():
    drv, _ = scripted(cuAnything=(INVALID, 5))
    with pytest.raises(DriverError, match=r"cuAnything failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        drv.call("cuAnything")


def test_check():
    drv, _ = scripted()
    drv.check("cuAnything", (SUCCESS, 3))
    with pytest.raises(DriverError):
        drv.check("cuAnything", (INVALID,))


def test_rank_of_driver_and_of_thread():
    drv, _ = scripted(cuAnything=(INVALID,))
    with pytest.raises(DriverError) as caught, driver.thread_defaults(rank=2):
        drv.call("cuAnything")
    assert caught.value.rank == 2
    with pytest.raises(DriverError) as caught, driver.thread_defaults(rank=2):
        drv.for_rank(7).call("cuAnything")
    assert caught.value.rank == 7
    with pytest.raises(DriverError) as caught:
        drv.call("cuAnything")
    assert caught.value.rank is None


def test_thread_defaults_stay_in_their_thread():
    seen = []
    with driver.thread_defaults(kind="emulated", device=3, rank=3):
        other = threading.Thread(target=lambda: seen.append((driver._thread.kind, driver._thread.rank)))
        other.start()
        other.join()
        assert driver._thread.device == 3
    assert seen == [(None, None)]
    assert driver._thread.device is None


def test_module_error_carries_the_jit_log():
    def refuse(image, count, options, values):
        assert image.endswith(b"\0")
        assert count == len(options) == len(values)
        values[0][:13] = b"line 4: no; x"
        return structs.CUresult.CUDA_ERROR_INVALID_PTX, None

    drv, _ = scripted(cuModuleLoadDataEx=refuse)
    with pytest.raises(DriverError, match="line 4: no; x") as caught:
        drv.load_module(".version 8.1")
    assert caught.value.code == 218
    assert caught.value.detail == "line 4: no; x"


# Contexts


def test_current_restores_the_former_context():
    drv, api = scripted()
    api.context = 77
    with drv.current(0):
        inside = api.context
        assert inside == int(drv.primary(0)) != 77
        with drv.current(1):
            assert api.context not in (inside, 77)
        assert api.context == inside
    assert api.context == 77


def test_current_restores_none():
    drv, api = scripted()
    with contextlib.suppress(ZeroDivisionError), drv.current(0):
        assert api.context
        raise ZeroDivisionError
    assert api.context == 0


def test_current_context_costs_one_call():
    drv, api = scripted()
    with drv.current(0):
        api.calls.clear()
        for _ in range(5):
            with drv.current(0):
                pass
    assert api.count()["cuCtxGetCurrent"] == 5
    assert api.count()["cuCtxSetCurrent"] == 1  # the outer one's exit


def test_primary_is_retained_once():
    drv, api = scripted()
    for _ in range(3):
        drv.for_rank(1).primary(0)
    assert api.count()["cuDevicePrimaryCtxRetain"] == 1


def test_relaxed_restores_the_mode():
    drv, api = scripted()
    with drv.relaxed():
        pass
    modes = [args[0] for name, *args in api.calls]
    assert [mode.name for mode in modes] == ["CU_STREAM_CAPTURE_MODE_RELAXED", "CU_STREAM_CAPTURE_MODE_GLOBAL"]


@pytest.mark.parametrize(("local_rank", "expected"), [("0", 0), ("1", 1), ("2", 0), ("5", 1)])
def test_default_device_by_local_rank(monkeypatch, local_rank, expected):
    monkeypatch.setenv("PMI_RANK", "9")
    monkeypatch.setenv("MPI_LOCALRANKID", local_rank)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    drv, api = scripted(cuDeviceGetCount=(SUCCESS, 2), cuCtxGetDevice=(SUCCESS, 1))
    assert drv.default_device() == expected
    with driver.thread_defaults(device=1):
        assert drv.default_device() == 1
    api.context = 5
    assert drv.default_device() == 1


# Selection


def test_select_refuses_an_unknown_name(fresh):
    with pytest.raises(ValueError, match="'auto', 'cuda' or 'emulated'"):
        driver.select("gpu")
    fresh.setenv("LAMPORT_NUMBA_DEVICE", "gpu")
    with pytest.raises(SettingError):
        driver.select()


def test_cuda_is_taken_where_it_can_be(fresh):
    fresh.setattr(driver, "why_not_cuda", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = driver.select()
    assert chosen.kind == "cuda"
    assert chosen.api is structs
    assert driver.select("cuda") is chosen


def test_cuda_raises_the_reason(fresh):
    fresh.setattr(driver, "why_not_cuda", lambda: "the moon is full")
    with pytest.raises(DeviceUnavailable, match="because the moon is full"):
        driver.select("cuda")


def test_auto_falls_back_with_one_warning(fresh):
    fresh.setattr(driver, "why_not_cuda", lambda: "the moon is full")
    with pytest.warns(DeviceFallbackWarning, match="because the moon is full") as caught:
        chosen = driver.select()
    assert caught[0].filename == __file__
    assert chosen.kind == "emulated"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert driver.select() is chosen
        assert driver.select("emulated") is chosen
    assert chosen.api.calls == [("cuInit", 0)]


@pytest.mark.parametrize(("local", "warned"), [("0", 1), ("1", 0), ("", 1)])
def test_only_the_first_rank_on_a_host_warns(fresh, local, warned):
    fresh.setattr(driver, "why_not_cuda", lambda: "the moon is full")
    fresh.setenv("PMI_RANK", "5")
    fresh.setenv("MPI_LOCALRANKID", local)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert driver.select().kind == "emulated"
    assert [warning.category for warning in caught].count(DeviceFallbackWarning) == warned


def test_the_warning_blames_the_caller_outside_of_the_package(fresh):
    fresh.setattr(driver, "why_not_cuda", lambda: "the moon is full")
    with pytest.warns(DeviceFallbackWarning) as caught, contextlib.suppress(Exception):
        lamport_numba.to_device([1.0])
    assert caught[0].filename == __file__


def test_emulated_never_looks_for_a_gpu(fresh):
    fresh.setattr(driver, "why_not_cuda", lambda: pytest.fail("looked"))
    fresh.setenv("LAMPORT_NUMBA_DEVICE", "emulated")
    assert driver.select().kind == "emulated"


def test_thread_of_a_rank_gets_its_own_kind(fresh):
    fresh.setattr(driver, "why_not_cuda", lambda: None)
    with driver.thread_defaults(kind="emulated"):
        assert driver.select().kind == "emulated"
        assert driver.select("cuda").kind == "cuda"
    assert driver.select().kind == "cuda"


def test_mistyped_setting_warns(fresh):
    fresh.setenv("LAMPORT_NUMBA_DEVISE", "cuda")
    with pytest.warns(LamportWarning, match="LAMPORT_NUMBA_DEVISE"):
        driver.select("emulated")


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"cuInit": (structs.CUresult.CUDA_ERROR_NO_DEVICE,)}, "no GPU is visible"),
        ({"cuDriverGetVersion": (SUCCESS, 12000)}, "CUDA 12.0 and PTX 8.1 needs 12.1"),
        ({"cuDeviceGetCount": (SUCCESS, 0)}, "no GPU is visible"),
        ({"cuDeviceGetAttribute": (SUCCESS, 8)}, "compute capability 9.0 or newer (found 8.8)"),
        ({"cuDeviceGetAttribute": (INVALID, 0)}, "cuDeviceGetAttribute failed"),
        ({}, None),
    ],
)
def test_why_not_cuda(monkeypatch, answers, words):
    usual = {
        "cuDriverGetVersion": (SUCCESS, 12010),
        "cuDeviceGetCount": (SUCCESS, 1),
        "cuDeviceGetAttribute": (SUCCESS, 9),
    }
    _, api = scripted(**{**usual, **answers})
    for name in ("CUdevice_attribute", "CUresult"):
        setattr(api, name, getattr(structs, name))
    monkeypatch.setattr(driver, "structs", api)
    reason = driver.why_not_cuda()
    assert (reason is None) if words is None else words in reason


def test_why_not_cuda_without_libcuda(monkeypatch):
    def missing(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1\nmore")

    _, api = scripted(cuInit=missing)
    monkeypatch.setattr(driver, "structs", api)
    assert driver.why_not_cuda() == "libcuda, the driver's library, was not found"


def test_why_not_cuda_with_a_broken_binding(monkeypatch):
    def broken(flags):
        raise RuntimeError("no symbol cuInit")

    _, api = scripted(cuInit=broken)
    monkeypatch.setattr(driver, "structs", api)
    assert driver.why_not_cuda().endswith("(no symbol cuInit)")


def test_importing_the_seam_loads_neither_numba_nor_the_emulator():
    code = (
        "import sys, lamport_numba.driver, lamport_numba.arrays;"
        "print([m for m in ('numba', 'llvmlite', 'lamport_numba.emulator.driver') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_thread_without_a_context_keeps_the_device_of_its_arrays():
    drv, api = scripted("cuda", cuDevicePrimaryCtxRetain=lambda device: (SUCCESS, 100 + device))
    drv.settle(1)
    assert api.context == 101


def test_a_thread_with_a_context_keeps_its_own():
    drv, api = scripted("cuda", cuDevicePrimaryCtxRetain=lambda device: (SUCCESS, 100 + device))
    api.context = 100
    drv.settle(1)
    assert api.context == 100


def test_the_emulated_device_needs_no_context_left_behind():
    drv, api = scripted("emulated")
    drv.settle(1)
    assert api.context == 0


@pytest.mark.parametrize(("answer", "status", "captures"), [(0, 0, False), (0, 1, True), (0, 2, True), (400, 0, True)])
def test_libcuda_itself_is_asked_for_a_capture(monkeypatch, answer, status, captures):
    def ask(stream, into):
        assert stream == 0x1234
        into._obj.value = status
        return answer

    monkeypatch.setattr(driver.ctypes, "PyDLL", lambda name: SimpleNamespace(cuStreamIsCapturing=ask))
    driver._libcuda_captures.cache_clear()
    try:
        assert driver.Driver("cuda", structs).capture_query()(0x1234) == captures
    finally:
        driver._libcuda_captures.cache_clear()
