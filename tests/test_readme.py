"""The README and the documents: their links lead somewhere, and what they show is what there is."""

import re
from pathlib import Path

import pytest
from helpers import mpirun

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "ptx").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_program_in_the_readme_runs(tmp_path):
    program = tmp_path / "this.py"
    program.write_text(re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1))
    done = mpirun.command([str(program)], 4, env={"LAMPORT_NUMBA_DEVICE": "emulated"})
    assert done.stdout.count("[0. 0. 1. 1. 2. 2. 3. 3.]") == 4  # ranks may write into each other's lines


@pytest.mark.parametrize("world", [2, 4])
def test_the_programs_about_the_tagged_mailbox_run(tmp_path, world):
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tagged.md").read_text(), re.DOTALL)
    assert len(programs) == 2
    said = []
    for number, text in enumerate(programs):
        program = tmp_path / f"program{number}.py"
        program.write_text(text)
        said.append(mpirun.command([str(program)], world, env={"LAMPORT_NUMBA_DEVICE": "emulated"}).stdout)
    assert said[0].count("-9223372036854775808") == world * world
    assert said[1].count(f"[{sum(range(world))}.]") == 3 * world


def test_the_program_of_the_page_on_arrays_captures_a_graph(tmp_path):
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "arrays.md").read_text(), re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(text)
    said = mpirun.command([str(program)], 2, env={"LAMPORT_NUMBA_DEVICE": "emulated"}).stdout
    assert said.count("[0. 0. 0. 0. 0. 0. 0. 0. 1. 1. 1. 1. 1. 1. 1. 1.]") == 2
