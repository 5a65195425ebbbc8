"""The cache of translated kernels: private, checked, and never in the way."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.ptx import HEADER, launch

from lamport_numba.emulator import ptx
from lamport_numba.emulator.ptx import module, native

_texts = itertools.count()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LAMPORT_NUMBA_CACHE", str(tmp_path / "cache"))
    native._folder.cache_clear()
    yield tmp_path / "cache" / "ptx"
    monkeypatch.undo()
    native._folder.cache_clear()


def text() -> str:
    body = "ld.param.u64 %rd1, [out]; st.global.u32 [%rd1], 41;"
    return f"{HEADER}// {os.getpid()} {next(_texts)}\n.entry k(.param .u64 out) {{ .reg .b64 %rd<2>; {body} ret; }}\n"


def run(source: str) -> ptx.Module:
    """Load as a new process would, and run."""
    module._modules.pop(source, None)
    loaded = ptx.load(source)
    out = np.zeros(4, np.uint32)
    launch(loaded, (out,), block=(1, 1, 1))
    assert out[0] == 41
    return loaded


def test_a_second_load_neither_parses_nor_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text()
    first = run(source)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("done again")

    monkeypatch.setattr(module, "parse", refuse)
    monkeypatch.setattr(native, "compile_text", refuse)
    second = run(source)
    assert second is not first
    assert second.kernels["k"].params == first.kernels["k"].params
    assert second.kernels["k"].sites == first.kernels["k"].sites


def test_the_folder_is_private(folder: Path) -> None:
    run(text())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not [f for f in folder.iterdir() if f.suffix not in (".o", ".json")]  # no half-written file stays


def test_an_open_folder_is_closed(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    run(text())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_damaged_files_are_made_anew(folder: Path, damage: str) -> None:
    source = text()
    run(source)
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes({"cut": data[: len(data) // 2], "flip": bytes(data), "empty": b""}[damage])
    run(source)


def test_a_folder_that_is_a_link_is_not_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    run(text())
    assert not list((tmp_path / "elsewhere").iterdir())


def test_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAMPORT_NUMBA_CACHE", "0")
    native._folder.cache_clear()
    run(text())
    assert not folder.exists()


def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    run(text())


def test_old_files_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(text())
    before = {f.name for f in folder.iterdir()}
    monkeypatch.setattr(native, "_MOST_FILES", 1)
    native._prune(folder)
    assert len(list(folder.iterdir())) == 1
    assert {f.name for f in folder.iterdir()} < before
