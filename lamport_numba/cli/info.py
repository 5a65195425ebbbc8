"""Say which devices and transports there are here, and for each that is not, why.

    python -m lamport_numba info [--json]

Nothing is allocated, and no multicast call is made. With --device or --transport only that is looked at, and the exit
status is 1 if it cannot be used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from typing import Any

from .._version import __version__
from ..launcher import launched
from . import _common

SUMMARY = "say which devices and transports there are, and why others are not"

_PACKAGES = ("numpy", "mpi4py", "cuda-bindings", "cuda-core", "numba", "numba-cuda", "llvmlite")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's own options."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print what there is; 1 if what was asked for by name cannot be used."""
    if (launched().size or 1) > 1 and _common.world().Get_rank() > 0:
        return 0  # rank 0 speaks for all
    found = survey(options.device, options.transport)
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return int(not _asked_is_usable(found, options.device, options.transport))


def survey(device: str | None = None, transport: str | None = None) -> dict[str, Any]:
    """Look at both devices, or at the one named, and at the transports of each."""
    kinds = ("cuda", "emulated") if device in (None, "auto") else (device,)
    transports = ("peer", "multicast") if transport in (None, "auto", "measure") else (transport,)
    return {
        **versions(),
        "settings": _settings(),
        "devices": {str(kind): _device(str(kind), tuple(map(str, transports))) for kind in kinds},
    }


def versions() -> dict[str, Any]:
    """Versions of everything that matters when something goes wrong."""
    import mpi4py

    mpi4py.rc.initialize = False  # if MPI is not running, do not start it for this
    from mpi4py import MPI

    return {
        "version": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "mpi": _common.library_name(MPI.Get_library_version()),
        "packages": {name: _version_of(name) for name in _PACKAGES},
    }


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _settings() -> dict[str, str]:
    """The variables that matter and are set."""
    import os

    from .. import settings

    known = [setting.name for setting in settings.TABLE.values()]
    others = ["NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "CUDA_VISIBLE_DEVICES"]
    return {name: os.environ[name] for name in (*known, *others) if name in os.environ}


def _device(kind: str, transports: tuple[str, ...]) -> dict[str, Any]:
    from .. import driver

    why_not = driver.why_not_cuda() if kind == "cuda" else None
    if why_not is not None:
        return {"usable": False, "why_not": why_not, "transports": {name: _no(why_not) for name in transports}}
    drv = driver.select(kind)
    version = int(drv.call("cuDriverGetVersion"))
    return {
        "usable": True,
        "why_not": None,
        "driver": f"{version // 1000}.{version % 1000 // 10}",
        "devices": [_describe(drv, index) for index in range(drv.device_count())],
        "transports": {name: _no(_why_not_transport(drv, name)) for name in transports},
    }


def _describe(drv: Any, index: int) -> dict[str, Any]:
    major, minor = drv.compute_capability(index)
    return {
        "index": index,
        "name": drv.device_name(index),
        "uuid": drv.device_uuid(index).hex(),
        "compute_capability": f"{major}.{minor}",
        "multiprocessors": drv.attribute(index, "MULTIPROCESSOR_COUNT"),
    }


def _no(why_not: str | None) -> dict[str, Any]:
    return {"usable": why_not is None, "why_not": why_not}


def _why_not_transport(drv: Any, transport: str) -> str | None:
    """What the devices' attributes and our switches say; only a construction proves that a transport works."""
    from .. import settings

    if transport == "multicast":
        switch = settings.multicast_switched_off()
        if switch is not None:
            return f"switched off by {switch}"
        needed = {"MULTICAST_SUPPORTED": "no NVSwitch, MIG, confidential computing, or a virtual machine"}
    else:
        needed = {
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "the driver cannot map memory of other devices",
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "the driver cannot share memory between processes",
        }
    for attribute, meaning in needed.items():
        lacking = [str(index) for index in range(drv.device_count()) if not drv.attribute(index, attribute)]
        if lacking:
            return f"{attribute} is 0 on device {', '.join(lacking)}: {meaning}"
    return None


def _asked_is_usable(found: dict[str, Any], device: str | None, transport: str | None) -> bool:
    """Whether some device that was asked for is usable, with the transport that was asked for."""
    candidates = [one for one in found["devices"].values() if one["usable"]]
    if transport in ("peer", "multicast"):
        candidates = [one for one in candidates if one["transports"][transport]["usable"]]
    return bool(candidates)


def as_text(found: dict[str, Any]) -> str:
    """The survey for people."""
    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in found["packages"].items())
    lines = [
        f"lamport-numba {found['version']}, Python {found['python']}, {found['platform']}",
        f"{packages}",
        f"MPI: {found['mpi']}",
    ]
    lines += [f"{name}={value}" for name, value in found["settings"].items()]
    for kind, device in found["devices"].items():
        lines.append("")
        if not device["usable"]:
            lines.append(f"{kind}: no, because {device['why_not']}")
            continue
        lines.append(f"{kind}: yes (driver for CUDA {device['driver']})")
        lines += [
            f"  device {one['index']}: {one['name']}, compute capability {one['compute_capability']}, "
            f"{one['multiprocessors']} multiprocessors, {one['uuid']}"
            for one in device["devices"]
        ]
        for name, transport in device["transports"].items():
            lines.append(f"  {name}: " + ("yes" if transport["usable"] else f"no, {transport['why_not']}"))
    return "\n".join(lines)
