"""The commands: their help, how they start, and what they answer where they cannot."""

import json
from types import SimpleNamespace

import pytest
from helpers import environment, mpirun

from lamport_numba import __version__, cli
from lamport_numba.cli import _common
from lamport_numba.launcher import Launched

COMMANDS = sorted(cli.commands())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_the_common_options(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert "--device {auto,cuda,emulated}" in text
    assert "--transport {auto,peer,multicast,measure}" in text


def test_the_commands_are_listed_with_their_summaries(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name, module in cli.commands().items():
        assert f"{name} {module.SUMMARY}" in text


def test_version():
    assert mpirun.command(["-m", "lamport_numba", "--version"], None).stdout.strip() == __version__


def test_help_starts_no_mpi_and_loads_no_cuda():
    code = (
        "import sys; from lamport_numba import cli\n"
        "try: cli.main(['demo', '--help'])\n"
        "except SystemExit: print([m for m in ('mpi4py.MPI', 'cuda.bindings.driver', 'numba') if m in sys.modules])"
    )
    assert mpirun.command(["-c", code], None).stdout.splitlines()[-1] == "[]"


def test_a_launcher_of_another_mpi_library_is_an_error():
    four = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    if mpirun.launcher().family == "openmpi":
        four = {"PMI_RANK": "0", "PMI_SIZE": "4"}
    for command in ("demo", "info"):
        done = mpirun.command(["-m", "lamport_numba", command], None, env=four, check=False)
        assert done.returncode == 2
        assert "started 4 ranks" in done.stderr
        assert "a world of 1" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("said", "size", "wrong"),
    [
        (Launched(), 1, False),
        (Launched("MPICH", 0, 1), 1, False),
        (Launched("MPICH", 1, 4), 4, False),
        (Launched("Open MPI", 1, 4), 1, True),
        (Launched("Slurm", 0, 2), 1, True),
        (Launched("Slurm", 0, 8), 4, False),  # a launcher within a step
    ],
)
def test_when_launcher_and_library_do_not_fit(said, size, wrong):
    complaint = _common.mismatch(said, size, "MPICH Version:      5.0.2\nMPICH Release date: ...")
    assert (complaint is not None) == wrong
    if complaint:
        assert f"started {said.size} ranks" in complaint
        assert "MPICH 5.0.2" in complaint


def test_the_launcher_has_time_to_read_what_a_rank_says_before_the_rank_ends_all(monkeypatch):
    done = []

    class Comm:
        def Get_size(self):
            return 2

        def Abort(self, status):
            done.append(f"abort {status}")

    monkeypatch.setattr(_common, "_started", lambda: SimpleNamespace(COMM_WORLD=Comm()))
    monkeypatch.setattr(_common.time, "sleep", lambda seconds: done.append(f"wait {seconds}"))
    monkeypatch.setattr(_common.sys, "stderr", SimpleNamespace(flush=lambda: done.append("flush")))
    _common.end_all_ranks(3)
    assert done == ["flush", "wait 0.3", "abort 3"]


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def run(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.commands()["demo"], "run", run)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "lamport_numba demo: interrupted\n"


BAD = [
    ["bench", "--samples", "0"],
    ["bench", "--calls", "0"],
    ["bench", "--eager-calls", "-3"],
    ["bench", "--link-rate", "0"],
    ["bench", "--link-rate", "-5"],
    ["bench", "--timeout", "0"],
    ["stress", "--timeout", "nan"],
    ["stress", "--burst", "0"],
    ["selftest", "--timeout", "-1"],
]


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_an_option_that_means_nothing_is_refused(words, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    assert f"argument {words[1]}: '{words[2]}' is not a" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--device", "emulated", "--plot", "p.png"]) == 2
    assert "pip install matplotlib, or the extra `plot`" in capsys.readouterr().err


def test_more_ranks_than_there_can_be_are_refused(monkeypatch):
    monkeypatch.setattr("lamport_numba.collectives.reports.MAX_WORLD", 0)
    with pytest.raises(_common.CannotStart, match="1 ranks were started; expected at most 0"):
        _common.world()


def test_a_bad_setting_is_one_line():
    done = mpirun.command(
        ["-m", "lamport_numba", "info"],
        None,
        env={"LAMPORT_NUMBA_TRANSPORT": "pigeon", "LAMPORT_NUMBA_DEVICE": "gpu"},
        check=False,
    )
    assert done.returncode == 2
    assert "LAMPORT_NUMBA_DEVICE='gpu'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["selftest", "stress", "bench"])
def test_a_report_that_cannot_be_written_is_refused_before_the_work(command, tmp_path):
    file = tmp_path / "nowhere" / "report.json"
    arguments = ["-m", "lamport_numba", command, "--device", "emulated", "--json", str(file)]
    done = mpirun.command(arguments, 2, check=False)
    assert done.returncode != 0
    assert f"--json {file}: cannot be written: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout.strip()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "nope"], "--dtype nope: data type 'nope' not understood"),
        (["--plot", "figure.txt"], "--plot figure.txt: expected a file that ends with .pdf, .svg or .png"),
    ],
)
def test_the_bench_refuses_what_it_cannot_do_before_the_work(arguments, said):
    done = mpirun.command(["-m", "lamport_numba", "bench", "--device", "emulated", *arguments], None, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_that_is_not_installed_is_named_with_what_to_do():
    code = "import sys; sys.modules['mpi4py'] = None\nfrom lamport_numba import cli\nsys.exit(cli.main(['info']))"
    done = mpirun.command(["-c", code], None, check=False)
    assert done.returncode == 2
    assert "mpi4py is not installed for" in done.stderr
    assert ".venv/bin/python" in done.stderr
    assert "Traceback" not in done.stderr


def test_info_of_a_device_that_is_not_there_says_why_and_fails():
    done = mpirun.command(["-m", "lamport_numba", "info", "--json", "--device", "cuda"], None, check=False)
    found = json.loads(done.stdout)
    assert found["version"] == __version__
    cuda = found["devices"]["cuda"]
    assert done.returncode == (0 if cuda["usable"] else 1)
    if not cuda["usable"]:
        assert cuda["why_not"]
        assert cuda["transports"]["multicast"]["why_not"] == cuda["why_not"]


def test_info_lists_the_emulated_devices_of_all_ranks():
    done = mpirun.command(["-m", "lamport_numba", "info", "--json", "--device", "emulated"], 3)
    found = json.loads(done.stdout)  # one document: rank 0 alone speaks
    emulated = found["devices"]["emulated"]
    assert emulated["usable"]
    assert [one["index"] for one in emulated["devices"]] == [0, 1, 2]
    assert len({one["uuid"] for one in emulated["devices"]}) == 3
    assert emulated["transports"]["peer"] == {"usable": True, "why_not": None}


@pytest.mark.parametrize("name", [*environment.OFF, environment.OURS])
def test_info_names_the_variable_that_forbids_multicast(name):
    value = environment.OFF.get(name, "1")
    others = {other: None for other in environment.OFF if other != name}
    arguments = ["-m", "lamport_numba", "info", "--json", "--device", "emulated", "--transport", "multicast"]
    done = mpirun.command(arguments, None, env={**others, name: value}, check=False)
    multicast = json.loads(done.stdout)["devices"]["emulated"]["transports"]["multicast"]
    assert multicast == {"usable": False, "why_not": f"switched off by {name}={value}"}
    assert done.returncode == 1
    assert mpirun.command(arguments, None, multicast=True).returncode == 0


def test_info_reads_well():
    said = mpirun.command(["-m", "lamport_numba", "info"], None).stdout
    assert "emulated: yes" in said
    assert "  peer: yes" in said
