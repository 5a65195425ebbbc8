"""Find the folders that lie beside the package in a checkout and travel inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """Return the folder ``name`` ("ptx", "examples"): the package's own copy in a wheel, else the checkout's.

    Raises:
        FileNotFoundError: neither is there.
    """
    places = (_PACKAGE / f"_{name}", _PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"no folder of {name}: looked in {places[0]} and {places[1]}; install the package, or run from a whole checkout"
    )
