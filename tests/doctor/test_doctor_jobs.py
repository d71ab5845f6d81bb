"""Checks that start something: MPI that hangs, fails or is another one, trial jobs, and the doctor as a whole."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from jobs import HANGS_S, environs_with, wait_for

from kvmpi.doctor import mpi, report, trial
from kvmpi.doctor.finding import Answer, Finding, Surroundings, ask
from kvmpi.launchers import watchdog, where
from kvmpi.launchers.hosts import Host, of_slurm
from kvmpi.launchers.mpirun import MPI

TIMEOUT_S = HANGS_S
VERSION = 'case "$*" in *--version*) echo "mpirun (Open MPI) 5.0.11"; exit 0;; esac\n'


def assert_gone(mark: str) -> None:
    """No process has ``mark`` in its environment; what was killed may take a moment to end."""
    until_s = time.monotonic() + 10.0
    while (left := environs_with(mark)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not left


def mpirun(folder: Path, script: str) -> Path:
    """A stand-in."""
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def around(**environ: str) -> Surroundings:
    base = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    return Surroundings({**base, **environ}, secrets.token_hex(8))


def test_whoever_is_asked_is_ended_at_the_deadline(tmp_path: Path) -> None:
    at = around()
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(99)"
    )
    answer = ask(at, (sys.executable, "-c", stubborn), timeout_s=1.0)
    assert (answer.status, answer.out, answer.end()) == (None, "here\n", "did not end within 1 s")
    assert_gone(f"KVMPI_JOB_ID={at.job_id}")
    answer = ask(at, (sys.executable, "-c", "import sys; sys.exit('a\\nb\\nc\\nd')"))
    assert (answer.status, answer.last_words(2)) == (1, "c\nd")
    assert ask(at, ("/no/such/program",)).status == 127


def test_no_mpi4py_and_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = mpi.library(around(MPI4PY_LIBMPI="/no/such/libmpi.so"), None)
    assert found.level == "problem"
    assert seen.library == ""

    def lacks(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", lacks)
    found, _ = mpi.library(around(), None)
    assert (found.level, "pip install" in found.do) == ("warning", True)


def test_an_mpirun_that_hangs_or_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_VERSION_S", 0.5)
    at = around(KVMPI_MPIRUN=str(mpirun(tmp_path, "sleep 100")))
    try:
        found, seen = mpi.launcher(at)
    finally:
        watchdog.kill_all(at.job_id)  # what the whole doctor does at its end
    assert (found.level, seen, "timed out" in found.seen) == ("problem", None, True)
    monkeypatch.setattr(mpi, "_VERSION_S", 30.0)
    mpirun(tmp_path, 'echo "yet another launcher"')
    assert "neither Open MPI nor MPICH" in mpi.launcher(at)[0].seen
    found, seen = mpi.launcher(around(KVMPI_MPIRUN="/no/such/mpirun"))
    assert (found.level, "is not an executable" in found.seen) == ("problem", True)
    assert mpi.trial(at, mpi.Found(None)).level == "skipped"


def test_an_mpirun_and_a_library_of_different_kinds(tmp_path: Path) -> None:
    at = around(KVMPI_MPIRUN=str(mpirun(tmp_path, 'echo "HYDRA build details:"')))
    found, seen = mpi.launcher(at)
    assert (found.level, seen is not None and seen.kind) == ("ok", "mpich")
    found, both = mpi.library(at, seen)
    assert (found.level, "do not belong together" in found.means) == ("problem", True)
    assert both.mpi is None, "no trial with these two"
    # Where the library lies beside its mpirun, kvmpi run leads mpi4py there, and so does the doctor.
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").symlink_to(Path(sys.prefix) / "lib")
    for kind in ("openmpi4", "openmpi"):
        found, both = mpi.library(around(), MPI(str(tmp_path / "bin" / "mpirun"), kind))
        assert found.level == "ok", found
    assert both.env == {"MPI4PY_LIBMPI": str(tmp_path / "lib" / "libmpi.so.40")}


@pytest.mark.parametrize(("script", "words", "advice"), [
    ("sleep 100", "did not end within 2 s", "interface that leads nowhere"),
    ("echo mpirun has detected an attempt to run as root >&2; exit 1", "exit status 1", "OMPI_ALLOW_RUN_AS_ROOT"),
    ("echo There are not enough slots available; exit 1", "exit status 1", "--oversubscribe"),
    ("exit 0", "did not find the sum", ""),
    ("echo '  Error:     Read-only file system' >&2; exit 213", "exit status 213", "set TMPDIR"),  # of PMIx, and so is
    ("echo The PMIx server\\'s listener thread failed to start. >&2; exit 213", "exit status 213", "set TMPDIR"),
])  # fmt: skip
def test_a_trial_that_fails(script: str, words: str, advice: str, tmp_path: Path) -> None:
    at = Surroundings(around().environ, secrets.token_hex(8), deadline_s=2.0 if "sleep" in script else 30.0)
    found = mpi.trial(at, mpi.Found(MPI(str(mpirun(tmp_path, script)), "openmpi")))
    assert (found.level, words in found.seen, advice in found.do) == ("problem", True, True), found
    assert_gone(f"KVMPI_JOB_ID={at.job_id}")


def test_a_trial_by_somebody_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI wants one, and kvmpi run sets it."""
    at = around()
    environ = {name: value for name, value in at.environ.items() if name != "HOME"}
    script = 'test -n "$HOME" && echo "{\\"library\\": \\"x\\", \\"sum\\": 3, \\"size\\": 2, \\"cores\\": 0,'
    script += ' \\"thread_level\\": \\"MULTIPLE\\"}"'
    both = mpi.Found(MPI(str(mpirun(tmp_path, f"{script}\n{script}")), "openmpi"))

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    found = mpi.trial(Surroundings(environ, at.job_id), both)
    assert (found.level, "HOME is not set" in found.seen) == ("ok", True), found
    assert "HOME" not in mpi.trial(around(HOME="/somewhere"), both).seen


def test_the_mpi_of_a_site(tmp_path: Path) -> None:
    ours = mpi.Found(MPI(str(Path(sys.prefix) / "bin/mpirun"), "openmpi"))
    theirs = mpirun(tmp_path, "true")
    assert mpi.site(around(PATH="/nowhere"), ours).level == "ok"
    assert mpi.site(around(PATH=str(tmp_path)), ours).level == "ok"
    found = mpi.site(around(PATH=str(tmp_path), SLURM_JOB_ID="7"), ours)
    assert (found.level, f"KVMPI_MPIRUN={theirs}" in found.do) == ("warning", True)


def test_a_trial_job_of_which_mpi_takes_the_wrong_network(monkeypatch: pytest.MonkeyPatch) -> None:
    works = "eth0"

    def answer(_: Surroundings, command: Sequence[str], **__: object) -> Answer:
        told = "--interface" in command and command[command.index("--interface") + 1] == works
        fails = command[command.index("-c") + 1] == "1" and not told
        return Answer(int(fails), "", "name the network with --interface\n" if fails else "", 1.0)

    monkeypatch.setattr(trial, "ask", answer)
    two = [Host("a", 8), Host("b", 4)]
    found = trial.run(around(), two, "ssh", interface="eth0")
    assert (found.level, found.do) == ("problem", "name it: kvmpi run --interface eth0 ...")
    works = "eth1"
    assert "look at MPI first" in trial.run(around(), two, "ssh", interface="eth0").do


def test_trial_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Sequence[str], dict[str, str]]] = []

    def answer(at: Surroundings, command: Sequence[str], *, timeout_s: float, env: dict[str, str]) -> Answer:
        asked.append((command, env))
        with_mpi = command[command.index("-c") + 1] == "1"
        return Answer(1 if with_mpi else 0, "", "[client 0] boom\n", 1.0)

    monkeypatch.setattr(trial, "ask", answer)
    found = trial.run(around())
    assert (found.level, "boom" in found.means) == ("problem", True)
    assert "the same without MPI works" in found.do
    assert asked[0][1]["KVMPI_TIMELINE"] == asked[0][1]["KVMPI_SNAPSHOT_DIR"] == "", "nothing of a real job is touched"
    two = [Host("a", 8), Host("b", 4)]
    trial.run(around(), two, "ssh", remote_shell="my ssh", network="10.0.0.0/8")
    command = " ".join(asked[-2][0])
    assert "-n 2 -c 1 -s 1 --interface 10.0.0.0/8 --remote-shell my ssh --hosts a:1,b:1" in command
    assert "the same without MPI works" in trial.run(around(), two, "ssh", interface="eth0").do, "nothing of networks"
    for name in ("srun", "jsrun"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    plain = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "8,4"}
    groups = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a", "SLURM_TASKS_PER_NODE_HET_GROUP_0": "8"}
    groups |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "b", "SLURM_TASKS_PER_NODE_HET_GROUP_1": "4"}
    for allocation in (plain, groups):
        at = around(SLURM_JOB_ID="7", **allocation)
        hosts, kind, way = where.look("auto", "", "", "ssh", at.environ)
        assert (hosts, kind) == (two, "srun")
        assert way is not None
        assert ("--het-group=1" in way.command("b", ["true"])) is (allocation is groups)
        trial.run(at, hosts, kind)
        its_own = of_slurm({**at.environ, **asked[-1][1]})
        assert [host for group in its_own for host in group] == [Host("a", 1), Host("b", 1)]
        assert len(its_own) == (2 if allocation is groups else 1)
    hosts, kind, way = where.look("auto", "", "", "ssh", around(LSB_JOBID="7", LSB_MCPU_HOSTS="a 8 b 4").environ)
    assert (hosts, kind) == (two, "jsrun")
    assert way is not None
    assert way.command("a", ["true"])[0] == "jsrun"
    trial.run(around(), two, kind)
    assert "--jsrun-option=--rs_per_host=1" in asked[-1][0]
    trial.run(around(), two, "blaunch")
    assert asked[-1][1]["LSB_MCPU_HOSTS"] == "a 1 b 1"
    number = len(asked)
    assert trial.run(around(KVMPI_NONSENSE="1")).level == "skipped"
    assert len(asked) == number


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    command = "mount -o remount,size=8G /dev/shm " + "x" * 100
    findings = [
        Finding("first", "problem", "a long line of text " * 10, "what it means " * 10, f"do this:\n{command}"),
        Finding("second", "warning", "something", do="that", host="a"),
        Finding("third", "ok", "fine"),
        Finding("second", "warning", "something else", do="that", host="b"),
    ]
    report.show(findings, None, ["a ceiling"], "kvmpi doctor")
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines if "xxx" not in line)
    assert f"    {command}" in lines, "a command is never cut"
    assert lines.index("warning: second (a, b)") < lines.index("problem: first"), "problems are last"
    assert sum(line == "  To do: that" for line in lines) == 1
    assert lines[-1] == "1 problem, 2 warnings"
    assert report.exit_status(findings) == 1
    assert report.exit_status(findings[1:]) == 0


# ---- the doctor as a whole


def doctor(*words: str, **environ: str) -> tuple[int, dict[str, Any], str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    done = subprocess.run(
        [sys.executable, "-m", "kvmpi", "doctor", *words], env={**base, **environ}, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if "--json" in words and done.stdout else {}, done.stderr


def test_a_sound_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)  # as in containers whose user has only a number
    status, found, err = doctor("--json", "--model", "resnet50", "--step-seconds", "0.5", "-n", "2")
    by_name = {finding["check"]: finding for finding in found["findings"]}
    problems = [finding for finding in found["findings"] if finding["level"] == "problem"]
    assert (status, problems) == (0, []), err
    assert found["status"] == 0
    assert by_name["mpirun -n 2"]["facts"]["thread_level"] == "MULTIPLE"
    assert "HOME is not set" in by_name["mpirun -n 2"]["seen"]
    assert "right" in by_name["kvmpi run -n 2 -s 1"]["seen"]
    assert by_name["packages"]["facts"]["numpy"] == metadata.version("numpy")
    assert {"cores", "shared memory", "cross-memory attach", "ports", "gpu", "settings"} <= by_name.keys()
    assert found["ceiling"]["nbytes"] == 4 * 25_557_032
    assert 0 < found["ceiling"]["least_s"] <= found["ceiling"]["expected_s"]
    assert 0 < found["ceiling"]["worst_efficiency"] <= found["ceiling"]["best_efficiency"] <= 1
    assert "Traceback" not in err


def test_ranks_that_believe_to_be_alone(tmp_path: Path) -> None:
    """What an mpirun of another MPI does: it starts the program twice, and tells it nothing."""
    alone = 'shift 2; case $1 in --*) shift;; esac; "$@" & "$@"; wait; ls /dev/shm > "$0.left"'
    path, start_s = mpirun(tmp_path, VERSION + alone), time.time()
    status, answer, err = doctor("--json", KVMPI_MPIRUN=str(path))
    (found,) = [finding for finding in answer["findings"] if finding["check"] == "mpirun -n 2"]
    assert (status, found["level"], "believe to be alone" in found["seen"]) == (1, "problem", True), (found, err)
    assert "libmpi" in found["means"]
    assert "sm_segment." in Path(f"{path}.left").read_text(), "Open MPI has left nothing: there was nothing to remove"
    wait_for(lambda: not watchdog.find_orphans("/dev/shm/sm_segment.", start_s), "the end of shared memory")


def test_an_mpirun_that_hangs_does_not_hang_the_doctor(tmp_path: Path) -> None:
    mark = f"DOCTOR_TEST={secrets.token_hex(8)}"
    stand_in = mpirun(tmp_path, f"export {mark}\nsleep 1000")
    status, found, err = doctor("--json", KVMPI_MPIRUN=str(stand_in))
    by_name = {finding["check"]: finding for finding in found["findings"]}
    assert status == 1, err
    assert by_name["mpirun"]["level"] == "problem"
    assert str(stand_in) in by_name["mpirun"]["seen"]
    assert by_name["mpirun -n 2"]["level"] == "skipped"
    assert "without MPI: right" in by_name["kvmpi run -n 2 -s 1"]["seen"]
    assert_gone(mark)  # the stand-in and its sleep


@pytest.mark.parametrize(("words", "message"), [
    (["--hosts", "a:b"], "expected NAME:WORKERS"),
    (["--hosts", "a", "--hostfile", "b"], "only one of them"),
    (["--hostfile", "/no/such"], "No such file"),
    (["--interface", "lo"], "for several hosts"),
    (["--hosts", "a:2", "--machine"], "--machine looks at this host only"),
    (["--hostfile", "hosts", "--machine"], "--machine looks at this host only"),
    (["--clean", "--hosts", "a:2"], "--clean is for this host only"),
    (["--clean", "--json"], "--clean is for this host only"),
    (["--model", "resnet50"], "go together"),
    (["--model", "resnet50", "--step-seconds", "nan"], "nan: expected a positive"),
    (["--model", "resnet50", "--step-seconds", "inf"], "inf: expected a positive"),
    (["--model", "resnet50", "--step-seconds", "-1"], "-1: expected a positive"),
    (["--model", "resnet50", "--step-seconds", "0"], "0: expected a positive"),
    (["--model", "resnet9000", "--step-seconds", "1"], "expected one of resnet50"),
    (["-n", "0"], "at least one worker"),
    (["--hosts", "a:2", "--remote-shell", "/no/such/shell"], "was not found"),
    (["--hosts", "a:2,b:2", "-n", "9", "--model", "resnet50", "--step-seconds", "1"], "have 4 slots"),
])  # fmt: skip
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvmpi.doctor.command import main

    with pytest.raises(SystemExit) as ended:
        main(words, {"PATH": os.environ["PATH"]})
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_check_that_fails_is_a_finding() -> None:
    from kvmpi.doctor.command import guarded

    def odd_place(at: Surroundings, more: int) -> Finding:
        raise OSError(more, "never seen before")

    found = guarded(odd_place, around(), 5)
    assert (found.check, found.level) == ("odd place", "warning")
    assert "never seen before" in found.seen
