"""Jobs with many hosts, or many processes on one: what all of them ask of something that they share."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import LaunchedJob
from jobs import HANGS_S, wait_for
from rich.console import Console

from kvmpi.errors import names_in_words, ranks_in_words
from kvmpi.launchers import batch_states, starting, top, where
from kvmpi.launchers.batch import SYSTEMS, Lsf
from kvmpi.launchers.batch_states import States
from kvmpi.launchers.job import Process
from kvmpi.launchers.reach import Reach
from kvmpi.ps.statistics import Statistics
from kvmpi.wire.messages import Report

#: Stands in for ssh and an sshd: of those who have not proved yet who they are it lets in ten, and refuses others.
#: (It begins to refuse some of them at ten; one of the ten is no process of the job, but a watchdog.)
DOOR = """#!{python} -IS
import fcntl, os, sys, time
entering = os.open({folder!r}, os.O_RDONLY)
mine = f"{folder}/{{os.getpid()}}"
fcntl.flock(entering, fcntl.LOCK_EX)
refused = len(os.listdir({folder!r})) >= 10
open(mine, "w").close()
fcntl.flock(entering, fcntl.LOCK_UN)
time.sleep(0.3)
os.unlink(mine)
if refused:
    sys.exit("Connection closed by 10.9.0.1 port 22")
os.execvp("sh", ["sh", "-c", *sys.argv[2:]])
"""


#: Runs ``kvmpi run`` where the signal that says of the end of a child is blocked.
BLOCKED = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
os.execv(sys.executable, [sys.executable, "-m", "kvmpi", "run", *sys.argv[1:]])
"""


def test_ends_are_heard_of_whoever_has_started_the_launcher() -> None:
    """Signals that are blocked stay so in what a process starts."""
    words = ("-n2", "-c2", "/bin/sh", "-c", "exec >&- 2>&-; sleep 0.3")
    subprocess.run([sys.executable, "-c", BLOCKED, *words], check=True, timeout=60)


def test_a_host_lets_in_a_few_at_once(
    launch: Callable[..., LaunchedJob], write: Callable[..., str], tmp_path: Path
) -> None:
    """So those of one host wait for each other on their way there; and what runs is not held up by who does not."""
    (tmp_path / "entering").mkdir()
    shell = tmp_path / write("door", DOOR.format(python=sys.executable, folder=str(tmp_path / "entering")))
    shell.chmod(0o755)
    program = write("says.sh", "#!/bin/sh\necho here\n")
    (tmp_path / program).chmod(0o755)
    words = ["--hosts", "10.9.0.1:20", "--interface", "lo", "--remote-shell", str(shell), "-n20", "-c20"]
    job = launch(*words, f"./{program}", whole=True)
    assert job.finish(60) == 0, job.stderr
    assert sorted(line for line in job.stdout.splitlines() if "here" in line) == sorted(
        f"[worker {rank}] here" for rank in range(20)
    )


def test_who_is_not_heard_of_does_not_hold_others_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its remote shell may drop what it says."""
    silent = SimpleNamespace(has_begun=False, returncode=None)
    monkeypatch.setattr(starting, "RemoteProcess", lambda *_, **__: silent)
    places = SimpleNamespace(reach=Reach("ssh", ("ssh",)), network="", address="")
    starter = starting.Starter(SimpleNamespace(job_id="j", folders=[], places=places))  # type: ignore[arg-type]
    starter.add(*(Process("worker", rank, ("true",), {}, host="a") for rank in range(20)))
    assert starter.left_s(0.0) is None, "nobody is on the way"

    def started(now_s: float) -> list[int]:
        found = []
        for process in starter.take_due(now_s):
            starter.start(process, {}, {}, [(0, 0), (0, 0)])
            found.append(process.rank)
        return found

    begin_s = time.monotonic()
    assert started(begin_s) == [*range(8)]
    assert started(begin_s + 0.9 * starting.ENTER_S) == []
    left_s = starter.left_s(begin_s)
    assert left_s is not None
    assert left_s == pytest.approx(starting.ENTER_S, abs=5.0)
    assert started(time.monotonic() + starting.ENTER_S) == [*range(8, 16)]
    silent.has_begun = True
    assert started(begin_s) == [*range(16, 20)]
    assert (starter.has_waiting, starter.left_s(begin_s)) == (False, None)


def test_names_of_hosts_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name service that takes its time does so for each of thousands."""
    together = threading.Barrier(4, timeout=10)
    addresses = {f"n{i}": f"203.0.113.{i}" for i in range(8)} | {"n6": "127.0.0.1"}

    def look_up(name: str) -> list[str]:
        together.wait()
        return [addresses[name]]

    monkeypatch.setattr(where, "addresses_of", look_up)
    assert where.find_here([*addresses], {}) == "n6"
    assert where.find_here([f"n{i}" for i in range(4)], {}) == ""
    assert where.find_here(["localhost", *addresses], {}) == "localhost", "this needs no look"
    assert where.find_here([*[*addresses][:4], "w1", "n6"], {"SLURMD_NODENAME": "w1"}) == "w1"


# ---- one question to a batch system for all jobs


class Counted(Lsf):
    """A batch system that counts how often it is asked, and knows two jobs of three."""

    def __init__(self, status: int = 0, complaint: str = "") -> None:
        self.asked, self._status, self._complaint = 0, status, complaint

    def look(self, numbers: Sequence[str]) -> list[str]:
        self.asked += 1
        lines = "".join(f"{number:<9} RUN\n" for number in numbers if int(number) % 3)
        return ["sh", "-c", 'printf "%s" "$1"; printf "%s" "$2" >&2; exit "$3"', "-", lines, self._complaint,
                str(self._status)]  # fmt: skip


def test_one_asks_a_batch_system_for_all_jobs(tmp_path: Path) -> None:
    system = Counted(255, "Job <9> is not found")
    states = {number: States(system, str(tmp_path / "states"), str(number)) for number in range(200)}
    words = {number: state.word(60) for number, state in states.items()}
    assert words == {number: "RUN" if number % 3 else "UNKNOWN" for number in states}
    assert system.asked == 1
    late = States(system, str(tmp_path / "states"), "200")
    with pytest.raises(OSError, match="nobody has asked about job 200"):
        late.word(60)
    os.utime(tmp_path / "states" / "answer", (0, 0))  # it is old
    states[7].close()
    assert (late.word(60), states[8].word(60), system.asked) == ("RUN", "RUN", 2)
    assert b"\n7 " not in (tmp_path / "states" / "answer").read_bytes(), "nobody wants to know any more"


def test_whoever_finds_another_one_asking_goes_on(tmp_path: Path) -> None:
    system = Counted()
    state = States(system, str(tmp_path / "states"), "1")
    with open(tmp_path / "states" / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            state.word(60)
    assert (state.word(60), system.asked) == ("RUN", 1)


def test_a_batch_system_that_fails_says_nothing_of_any_job(tmp_path: Path) -> None:
    """Else all that it does not name would have ended."""
    system = Counted(1, "LSF is down. Please wait ...")
    states = [States(system, str(tmp_path / "states"), str(number)) for number in range(3)]
    with pytest.raises(OSError, match="LSF is down"):
        states[0].word(60)


class Ended(Counted):
    """Writes down which jobs it was told to end: a line for each command."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def cancel(self, numbers: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo "$@" >> "$0"', str(self._folder / "ended"), *numbers]


def test_jobs_that_are_to_end_do_so_by_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_states, "MOST_ENDED", 40)
    states = [States(Ended(tmp_path), str(tmp_path / "states"), str(number)) for number in range(100)]
    enders = [threading.Thread(target=state.cancel, daemon=True) for state in states[:99]]
    with open(tmp_path / "states" / "ending", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for ender in enders:
            ender.start()
        wait_for(lambda: len(list((tmp_path / "states").glob("*.end"))) == 99, "all that are to end")
    for ender in enders:
        ender.join(HANGS_S)
    lines = (tmp_path / "ended").read_text().splitlines()
    assert [len(line.split()) for line in lines] == [40, 40, 19]
    assert sorted(int(number) for line in lines for number in line.split()) == [*range(99)]
    shutil.rmtree(tmp_path / "states")  # by a watchdog, when the launcher was killed
    states[99].cancel()
    assert (tmp_path / "ended").read_text().splitlines()[-1] == "99"


def test_words_of_a_batch_system_about_several_jobs() -> None:
    assert SYSTEMS["slurm"].words("12 PENDING\n13 RUNNING\n") == {"12": "PENDING", "13": "RUNNING"}
    assert SYSTEMS["lsf"].words("12        PEND\n13  RUN \n\n") == {"12": "PEND", "13": "RUN"}
    assert [w for w in SYSTEMS["slurm"].look(["12", "13"]) if w.startswith("--jobs")] == ["--jobs=12,13"]


# ---- names of many


@pytest.mark.parametrize(("ranks", "text"), [
    ([], ""), ([3], "3"), ([4, 3], "3, 4"), ([1, 2, 3], "1 to 3"), ([3, 17, *range(201, 297)], "3, 17, 201 to 296"),
    (range(1000), "0 to 999"), (range(0, 300, 2), "0, 2, 4, 6, 8, 10, 12, 14 and 142 more"),
    ([*range(0, 20, 2), 31, 32, 33], "0, 2, 4, 6, 8, 10, 12, 14 and 5 more"),
])  # fmt: skip
def test_many_ranks_are_named_briefly(ranks: Sequence[int], text: str) -> None:
    assert ranks_in_words(ranks) == text


def test_of_many_names_the_first_are_named() -> None:
    assert names_in_words(["b", "a"]) == "b, a"
    assert names_in_words([f"n{i}" for i in range(2000)], 3) == "n0, n1, n2 and 1997 more"


# ---- what people look at


def test_top_shows_who_is_in_trouble_on_one_screen() -> None:
    statistics = Statistics(300, 20, 300, job="many")
    for now_s in range(1, 30):
        for role, count, silent in (("worker", 300, 211), ("server", 20, 18)):
            for rank in range(count):
                if rank != silent or now_s < 10:
                    totals = {"steps": 10.0 * now_s, "elapsed_s": now_s, "queue": 90.0 if rank == 17 else 1.0}
                    awaited = [3, 4, 5, 211] if role == "server" else []
                    report = Report(role, rank, rank, 1, now_s, f"n{rank}/1", totals, missing=awaited)
                    statistics.hear(report, float(now_s))
    picture = statistics.snapshot(29.0, [f"client {rank} has not been heard for 15.0 s" for rank in range(40)])
    for height in (24, 50):
        console = Console(width=120, height=height)
        with console.capture() as shown:
            console.print(top.show(picture, {"program": ["train.py"]}, top.rows_of(console)))
        text = shown.get()
        assert len(text.splitlines()) <= height
        told = [" ".join(line.split()) for line in text.splitlines()]
        assert "lost: client 2 has not been heard for 15.0 s" in told
        assert "and 37 more are lost" in told
        first = {title: told[told.index(title) + 2] for title in ("workers", "servers")}
        assert first["workers"].startswith("211 211 silent 20 s")
        assert first["servers"].startswith("18 silent 20 s")
        assert told[told.index("servers") + 3].startswith("17 running"), "it has the longest queue"
        assert first["servers"].endswith("client 3 to 5, 211")
