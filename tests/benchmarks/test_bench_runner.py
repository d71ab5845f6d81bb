"""Benchmarks that only wait for jobs of their own: what ends them ends the jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import HANGS_S, wait_for
from processes import processes_with

from kvmpi.benchmarks import jobs as bench_jobs
from kvmpi.launchers import mpirun
from kvmpi.launchers.signals import SignalCatcher

pytest.importorskip("mpi4py")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("words", "word", "number"), [
    ("waiting -n 2 --seconds 60", "waiting.py", signal.SIGINT),
    ("waiting -n 2 --seconds 60", "waiting.py", signal.SIGKILL),
    ("train --model gpt-small --rows kvmpi --rounds 9999", "train.py", signal.SIGTERM),
    ("startup -n 2 -c 1 -s 1 --rounds 99", "mpi4py", signal.SIGTERM),
    ("tune", "tune.py", signal.SIGTERM),
])  # fmt: skip
def test_no_job_outlives_its_benchmark(tmp_path: Path, words: str, word: str, number: signal.Signals) -> None:
    mark = f"TEST_MARK={uuid.uuid4().hex}"
    name, value = mark.split("=")
    (tmp_path / "tmp").mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-m", "kvmpi", "bench", *words.split()], cwd=tmp_path, stdout=subprocess.PIPE,
        env={**os.environ, name: value, "TMPDIR": str(tmp_path / "tmp")}, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: sum(word in line for line in processes_with(mark).values()) >= 3, "ranks")
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=HANGS_S)
    if number == signal.SIGKILL:
        wait_for(lambda: not processes_with(mark), "end of the job", 30)
        wait_for(lambda: not os.listdir(tmp_path / "tmp"), "end of its files", 30)
        return
    assert not processes_with(mark)
    assert errors.splitlines()[-1] == f"kvmpi bench: stopped by {number.name}"
    assert "Traceback" not in errors
    assert parent.returncode == 128 + number
    assert not os.listdir(tmp_path / "tmp")


@pytest.mark.parametrize("words", ["train --rows kvmpi", "waiting", "startup -n 2", "figure12", "predict", "ps"])
def test_ranks_of_another_job_start_none(words: str, tmp_path: Path) -> None:
    mpi = mpirun.find(os.environ, 2)
    command = [*mpi.command(2, local=True), sys.executable, "-m", "kvmpi", "bench", *words.split()]
    env = {**mpirun.clean(os.environ), **mpi.env(str(tmp_path), "", crowded=True, one_host=True)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    name = words.split()[0]
    assert f"kvmpi bench {name} starts its jobs itself; run it outside of mpirun and kvmpi run" in done.stderr


def test_a_job_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_jobs, "_SILENCE_S", 0.3)
    spec: Any = SimpleNamespace(name="slow")
    (asked, ask), (answers_from, answer) = os.pipe(), os.pipe()
    os.set_blocking(answers_from, False)
    os.write(answer, b'{"kind": "row"}\n')
    signals, process = SignalCatcher(), subprocess.Popen(["sleep", "1000"])
    try:
        job = bench_jobs.RankJob(spec, process, [ask], [answers_from])
        stage = bench_jobs.Stage([], signals, print)
        answers = stage.ask(job, "go")
        assert next(answers) == {"kind": "row"}
        with pytest.raises(bench_jobs.JobFailedError, match="the job under slow has said nothing for"):
            next(answers)
    finally:
        process.kill()
        process.wait()
        signals.close()
        for fd in (asked, ask, answers_from, answer):
            os.close(fd)
