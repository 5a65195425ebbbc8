"""On a GPU the arrays are numba's: what is asked of numba, and in which context. No GPU is needed to see that."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.scripted_driver import SUCCESS, scripted

from lamport_numba import arrays


@pytest.fixture
def gpu(monkeypatch):
    drv, api = scripted("cuda", cuDeviceGetCount=(SUCCESS, 2))
    asked = []

    def ask(name):
        return lambda *args, **options: asked.append((name, api.context, args, options)) or name

    names = ("to_device", "device_array", "external_stream")
    monkeypatch.setattr(arrays, "_numba_cuda", lambda: SimpleNamespace(**{name: ask(name) for name in names}))
    return SimpleNamespace(drv=drv, api=api, asked=asked)


def test_to_device(gpu):
    assert arrays.to_device([[1.0, 2.0]], drv=gpu.drv, device=1) == "to_device"
    [(name, context, (host,), options)] = gpu.asked
    assert name == "to_device"
    assert context == int(gpu.drv.primary(1))
    assert np.array_equal(host, [[1.0, 2.0]])
    assert options == {"stream": 0}


def test_the_device_stays_current_for_the_methods_of_the_array(gpu):
    arrays.to_device([1.0], drv=gpu.drv, device=1)
    assert gpu.api.context == int(gpu.drv.primary(1))
    arrays.device_array(1, "f4", drv=gpu.drv, device=0)  # a context that is there is only lent
    assert gpu.api.context == int(gpu.drv.primary(1))


def test_to_device_on_a_stream(gpu):
    arrays.to_device([1.0], drv=gpu.drv, device=0, stream=77)
    assert gpu.asked[0][2] == (77,)
    assert gpu.asked[1][3] == {"stream": "external_stream"}


def test_gaps_are_closed_on_the_host(gpu):
    arrays.to_device(np.arange(10)[::3], drv=gpu.drv, device=0)
    assert gpu.asked[0][2][0].flags.c_contiguous


def test_device_array(gpu):
    arrays.device_array([2, 3], "f2", drv=gpu.drv, device=0)
    [(name, context, args, _)] = gpu.asked
    assert (name, args) == ("device_array", ((2, 3), np.dtype("f2")))
    assert context == int(gpu.drv.primary(0))
    assert gpu.api.count()["cuThreadExchangeStreamCaptureMode"] == 2


def test_refusals_ask_numba_nothing(gpu):
    with pytest.raises(TypeError):
        arrays.to_device([object()], drv=gpu.drv)
    with pytest.raises(TypeError):
        arrays.device_array(2, object, drv=gpu.drv)
    assert not gpu.asked


def test_numba_takes_our_dtypes_and_shapes():
    """numba's own description of such arrays, made without a device, is one that the intake takes."""
    from numba.cuda.cudadrv import devicearray

    from lamport_numba.intake import as_buffer

    pointer = SimpleNamespace(device_ctypes_pointer=SimpleNamespace(value=0x7000_0000))
    array = devicearray.DeviceNDArray((3, 4), (16, 4), np.dtype("f4"), gpu_data=pointer)
    drv, _ = scripted()
    assert as_buffer(array, drv)[:5] == (0x7000_0000, (3, 4), None, np.dtype("f4"), 48)
    gaps = devicearray.DeviceNDArray((3, 2), (16, 8), np.dtype("f4"), gpu_data=pointer)
    assert as_buffer(gaps, drv).strides == (16, 8)
