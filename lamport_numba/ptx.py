"""Find and read the PTX files, wherever the package is: in a wheel, an editable install or a bare checkout."""

from __future__ import annotations

from pathlib import Path

from . import shipped


def directory() -> Path:
    """Return the folder that holds the PTX files. Raises FileNotFoundError if there is none."""
    return shipped.folder("ptx")


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
