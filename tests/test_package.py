"""The package as a whole: its version, and its PTX files found from a wheel, an editable install and a checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import lamport_numba
from lamport_numba import ptx

ROOT = Path(__file__).resolve().parent.parent


def test_version_is_public_and_well_formed():
    assert re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", lamport_numba.__version__)
    assert f"## {lamport_numba.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_public_names_exist():
    for name in lamport_numba.__all__:
        assert getattr(lamport_numba, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        lamport_numba.no_such_name  # noqa: B018


def test_import_loads_neither_cuda_nor_numba():
    code = "import sys, lamport_numba; print([m for m in ('cuda', 'numba', 'mpi4py', 'numpy') if m in sys.modules])"
    assert _python(code, cwd=ROOT, path=ROOT) == "[]"


# What an installation finds: itself, its folder, whether the page of that folder is there, and every file.
_LOOK = """
from lamport_numba import ptx
print(ptx.__file__)
print(ptx.directory())
print((ptx.directory() / "README.md").is_file())
print(ptx.names(), sum(len(ptx.read(n)) for n in ptx.names()))
"""


def _python(code, *, cwd, path=None):
    """Run ``code`` in a fresh interpreter that sees ``path`` but not this checkout by itself."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _expect_all_files(report, package):
    file, folder, page, found = report.splitlines()
    assert Path(file).is_relative_to(package)
    assert page == "True", folder
    assert found == f"{ptx.names()} {sum(len(ptx.read(n)) for n in ptx.names())}"


def _build(kind, where):
    """Build the project's wheel (``standard`` or ``editable``) without a network and unpack it."""
    code = f"from hatchling import build; print(build.build_{kind}({str(where)!r}))"
    wheel = where / _python(code, cwd=ROOT).splitlines()[-1]
    site = where / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def test_ptx_is_found_in_a_wheel(tmp_path):
    site = _build("wheel", tmp_path)
    _expect_all_files(_python(_LOOK, cwd=tmp_path, path=site), site)
    examples = sorted(file.name for file in (ROOT / "examples").glob("*.py"))
    assert examples == sorted(file.name for file in (site / "lamport_numba" / "_examples").glob("*.py"))


def test_ptx_is_found_in_an_editable_install(tmp_path):
    site = _build("editable", tmp_path)
    assert not (site / "lamport_numba").exists(), "an editable install points at the checkout and copies nothing"
    code = f"import site, sys; n = len(sys.path); site.addsitedir({str(site)!r}); sys.path[:0] = sys.path[n:]\n{_LOOK}"
    _expect_all_files(_python(code, cwd=tmp_path), ROOT)


def test_ptx_is_found_in_a_bare_checkout(tmp_path):
    for folder in ("lamport_numba", "ptx"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    _expect_all_files(_python(_LOOK, cwd=tmp_path, path=tmp_path), tmp_path)


def test_a_missing_ptx_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"nothing\.ptx"):
        ptx.read("nothing.ptx")


def test_a_package_without_its_ptx_says_where_it_looked(tmp_path):
    shutil.copytree(ROOT / "lamport_numba", tmp_path / "lamport_numba", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from lamport_numba import ptx\ntry: ptx.directory()\nexcept FileNotFoundError as e: print(e)"
    assert "looked in" in _python(code, cwd=tmp_path, path=tmp_path)


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64"), ("win32", "AMD64")])
def test_another_platform_is_refused_in_one_sentence(system, machine):
    code = (
        f"import platform, sys; sys.platform = {system!r}; platform.machine = lambda: {machine!r}\n"
        "try: import lamport_numba\nexcept RuntimeError as error: print(error)"
    )
    said = _python(code, cwd=ROOT, path=ROOT)
    assert "Linux" in said
    assert machine in said
    assert "\n" not in said
