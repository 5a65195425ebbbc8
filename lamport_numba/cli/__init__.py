"""The commands of ``python -m lamport_numba``: every module of this folder whose name has no underscore is one.

A command's module has ``SUMMARY`` (one line), ``add_arguments(parser)`` and ``run(options) -> int`` (its exit status),
and imports what is slow inside ``run``. Every command takes --device and --transport.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from collections.abc import Sequence
from types import ModuleType

from .. import settings
from .._version import __version__
from ..errors import LamportError, SettingError
from . import _common

_DEPENDENCIES = ("cuda", "llvmlite", "mpi4py", "numba", "numba_cuda", "numpy")
_INSTALL = (
    "use a python that has it, as .venv/bin/python of a checkout after `make demo`, or `pip install .[cu13,mpich]`"
)


def commands() -> dict[str, ModuleType]:
    """The commands by name."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="python -m lamport_numba",
        description="Low-latency collectives for MPI programs: raw PTX, with a GPU or not.",
    )
    top.add_argument("--version", action="version", version=__version__)
    below = top.add_subparsers(dest="command", metavar="command", required=True)
    for name, module in commands().items():
        one = below.add_parser(name, help=module.SUMMARY, description=module.__doc__)
        one.formatter_class = argparse.RawDescriptionHelpFormatter
        _common.add_arguments(one)
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 well, 1 something failed, 2 it could not start, 130 after Ctrl-C.

    An error on one rank of several ends all of them.
    """
    options = parser().parse_args(arguments)
    try:
        settings.check()
        status: int = options.run(options)
    except (_common.CannotStart, SettingError) as error:
        return _say(options.command, str(error), 2)
    except KeyboardInterrupt:
        _rank_0_first()
        status = _say(options.command, "interrupted", 130)
        _common.end_all_ranks(status)
    except LamportError as error:
        _rank_0_first()
        status = _say(options.command, f"{type(error).__name__}: {error}", 1)
        _common.end_all_ranks(status)
    except Exception as error:
        _rank_0_first()
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _DEPENDENCIES:
            status = _say(options.command, f"{error.name} is not installed for {sys.executable}: {_INSTALL}", 2)
            _common.end_all_ranks(status)
            return status
        sys.excepthook(*sys.exc_info())
        status = 1
        _common.end_all_ranks(status)
    return status


def _say(command: str, message: str, status: int) -> int:
    if message:
        print(f"lamport_numba {command}: {message}", file=sys.stderr, flush=True)
    return status


def _rank_0_first() -> None:
    """Let rank 0 speak and end the others: they have the same error, most likely."""
    sys.stdout.flush()
    if _common.rank() > 0:
        time.sleep(1.0)
