"""Find and read the PTX files: the package's own copy in a wheel, the top-level ``ptx/`` in a checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "_ptx"
_IN_CHECKOUT = _PACKAGE.parent / "ptx"


def directory() -> Path:
    """Return the folder that holds the PTX files.

    Raises:
        FileNotFoundError: neither a wheel's folder nor a checkout's is there.
    """
    for folder in (_IN_WHEEL, _IN_CHECKOUT):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"no PTX files: looked in {_IN_WHEEL} and {_IN_CHECKOUT}; install the package, or run from a whole checkout"
    )


def names() -> list[str]:
    """List the PTX files by name, sorted."""
    return sorted(file.name for file in directory().glob("*.ptx"))


def read(name: str) -> str:
    """Return the text of the file ``name``, for example ``"lamport_peer.ptx"``.

    Raises:
        FileNotFoundError: there is no such file; the message lists those there are.
    """
    file = directory() / name
    if not file.is_file():
        raise FileNotFoundError(f"no PTX file {name!r} in {directory()}; there are {', '.join(names()) or 'none'}")
    return file.read_text(encoding="ascii")
