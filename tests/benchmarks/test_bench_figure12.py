"""``kvmpi bench figure12`` and ``predict``: who is where, what is refused, and one tiny figure with real jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANGS_S

from kvmpi.benchmarks import figure12, lab_jobs, lab_report
from kvmpi.benchmarks.lab_jobs import Measured, Scenario
from kvmpi.benchmarks.netlab import NetLab
from kvmpi.benchmarks.report import JsonLines
from kvmpi.errors import ConfigError

needs_lab = pytest.mark.skipif(
    sys.platform != "linux"
    or os.geteuid() != 0
    or any(shutil.which(name) is None for name in ("ip", "tc", "nsenter", "unshare")),
    reason="needs Linux, root, iproute2 and util-linux",
)


def test_who_is_where() -> None:
    assert lab_jobs.spread(12, 4) == [3, 3, 3, 3]
    assert lab_jobs.spread(5, 3) == [2, 2, 1]
    assert lab_jobs.spread(4, 3) == [2, 2, 0]
    lab = NetLab(4)
    words = lab_jobs.command(lab, Scenario("dist-SGD", 3, 1, 2, 2, (10,)), "F")
    assert words[words.index("--hosts") + 1] == f"{lab.hosts[0]}:2,{lab.hosts[1]}:1"
    assert words[words.index("--server-hosts") + 1] == f"{lab.hosts[2]},{lab.hosts[3]}"
    assert words[words.index("-c") + 1] == "3", "every worker is a client"


def test_the_validation_is_of_other_shapes_than_the_figure() -> None:
    assert len(figure12.VALIDATION) >= 6
    figure = {(s.algorithm, s.workers, s.clients) for s in figure12._figure(figure12.parser("figure12").parse_args([]))}
    assert not figure & {(s.algorithm, s.workers, s.clients) for s in figure12.VALIDATION}
    assert len({s.algorithm for s in figure12.VALIDATION}) == 7


def test_a_row_says_how_far_the_plan_is_off() -> None:
    scenario = Scenario("mpi-ASGD", 4, 2, 1, 2, (1_000_000,) * 4, steps=4, model="16MB")
    planned = lab_report.plan(scenario)
    row = lab_report.row_of(scenario, Measured((planned.step_s * 4, planned.step_s * 12), 0, 1.0), planned)
    assert row["off_%"] == pytest.approx(-50.0)
    assert lab_report.line(row).split()[:3] == ["mpi-ASGD", "4", "2"]
    dist = {**row, "algorithm": "dist-ASGD", "epoch_s": 3 * row["epoch_s"]}
    assert lab_report.speedups([row, dist]) == "mpi-ASGD 3.0 times as fast as dist-ASGD"
    assert lab_report.errors([row, {**row, "off_%": 10.0}]) == (
        "the plan is off by 30 % (median) and 50 % at most; 1 of 2 are within 20 %"
    )


@pytest.mark.parametrize(("name", "options", "words"), [
    ("figure12", "--algorithms sgd", "known are dist-SGD"), ("figure12", "--steps 0", "at least 1"),
    ("figure12", "-n 1", "needs a worker"), ("figure12", "--plot x.svg", "ends in .png"),
    ("figure12", "--algorithms DiLoCo,mpi-ESGD --interval 10", "DiLoCo would exchange nothing in its 9 steps"),
    ("figure12", "-n 5 --hosts 4", "every host needs a worker"), ("figure12", "--link fast", "'fast' is no speed"),
    ("figure12", "--model 5X", "no size"), ("predict", "--only 99", "numbers from 1 to"),
])  # fmt: skip
def test_bad_options(name: str, options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        figure12.main(name, options.split())
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_deadline_of_a_job_follows_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def run(lab: object, scenario: Scenario, timeout_s: float) -> Measured:
        given.append(timeout_s)
        return Measured((1.0,), 0)

    monkeypatch.setattr(lab_jobs, "run", run)
    monkeypatch.setattr(figure12, "NetLab", lambda *_, **__: contextlib.nullcontext())
    for steps in (4, 400):
        scenario = Scenario("mpi-SGD", 2, 1, 1, 2, (1000,), compute_s=2.0, steps=steps, epochs=3)
        figure12._one(scenario, {}, JsonLines(None))
    short_s, long_s = given
    assert short_s < 900
    assert long_s > 3 * 400 * 2.0 + 60, "even if all goes as planned"


def test_what_does_not_fit_into_memory_is_not_started() -> None:
    with pytest.raises(ConfigError, match="of memory"):
        lab_jobs.check_memory([Scenario("dist-SGD", 1000, 1, 1, 2, (1 << 30,))])


@needs_lab
def test_a_tiny_figure(tmp_path: Path) -> None:
    rows_file, picture = tmp_path / "rows.json", tmp_path / "bars.png"
    words = [sys.executable, "-m", "kvmpi", "bench", "figure12", "--algorithms", "mpi-ESGD", "-n", "4"]
    words += ["-s", "1", "--model", "400K", "--compute-seconds", "0.02", "--steps", "2", "--interval", "2"]
    words += ["--epochs", "1", "--json", str(rows_file), "--plot", str(picture)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert (row["algorithm"], row["c"], row["wrong"]) == ("mpi-ESGD", 2, 0)
    assert row["step_s"] > 0.02
    assert len(row["epochs_s"]) == 4, "one epoch of every worker"
    assert row["planned_s"] > 0.02
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "mpi-ESGD" in done.stdout.splitlines()[4]
