"""``kvmpi plan``: what it prints, and what it says about bad options."""

from __future__ import annotations

import json
import os
import sys

import pytest

from kvmpi import cli
from kvmpi.planner import command, memory

JOB = ["--model", "resnet50", "--compute-seconds", "0.5", "-n", "12", "--hosts", "4", "--link", "1gbit"]


@pytest.mark.parametrize("columns", ["80", "40"])
def test_a_table_of_eighty_columns(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["plan", *JOB, "-c", "2", "-s", "2", "--algorithm", "all", "--interval", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    head = next(i for i, line in enumerate(lines) if line.startswith("algorithm"))
    rows = lines[head + 2 : head + 9]
    assert [row.split()[0] for row in rows] == [
        "dist-SGD", "dist-ASGD", "dist-ESGD", "mpi-SGD", "mpi-ASGD", "mpi-ESGD", "DiLoCo"
    ]  # fmt: skip
    assert lines[head].split()[-1] == "bottleneck"
    end = lines[head].index("epoch s") + len("epoch s")
    assert all(row[end - 1].isdigit() and row[end] == " " for row in rows), "figures line up below their name"
    assert "servers' links are the bottleneck: 12 clients x 102 MB" in " ".join(" ".join(lines).split())


def test_numbers_are_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--model 100G --compute-seconds 12345 -n 10000 -c 1250 -s 64 --interval 100000 --hosts 2500 --link 10mbit"
    assert cli.main(["plan", *job.split(), "--algorithm", "dist-ESGD,mpi-SGD"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "dist-ESGD /100000 10000 64" in out


def test_json_and_recommendations(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_TOLD_EVERY_S", 0.0)
    assert cli.main(["plan", *JOB, "--recommend", "--json", "--algorithm", "mpi-SGD,mpi-esgd", "-s", "1"]) == 0
    shown = capsys.readouterr()
    rows = [json.loads(line) for line in shown.out.splitlines()]
    told = shown.err.splitlines()
    assert len(told) == len(rows) - 1
    assert told[0].startswith(f"kvmpi plan: 1 of {len(rows)} jobs tried, about ")
    assert sum(row["recommended"] for row in rows) == 1
    assert [row["epoch_s"] for row in rows] == sorted(row["epoch_s"] for row in rows)
    assert {row["servers"] for row in rows} == {1}
    assert cli.main(["plan", *JOB, "--recommend", "-c", "2", "-s", "2", "--algorithm", "mpi-SGD"]) == 0
    assert "1 job tried. Recommended: mpi-SGD -n 12 -c 2 -s 2" in capsys.readouterr().out


#: By how many workers there were on one host: how much more memory (PSS) one's process had after five steps of
#: ``DistributedOptimizer`` with 80 MB of weights, and those, divided by these; the mean of two workers.
MEASURED = {
    (4, "momentum", "gradients"): 3.85, (4, "momentum", "weights"): 6.08, (4, "momentum", "shares"): 4.30,
    (4, "adam", "gradients"): 5.01, (4, "adam", "weights"): 7.18, (4, "adam", "shares"): 4.21,
    (2, "adam", "gradients"): 4.73, (2, "adam", "weights"): 7.21, (2, "adam", "shares"): 4.74,
    (4, "sgd", "shares"): 3.98,
}  # fmt: skip


def test_memory_is_about_what_was_measured() -> None:
    for (workers, optimizer, way), times in MEASURED.items():
        found = getattr(memory.of(80_000_000, optimizer, workers), way) / 80e6
        assert found == pytest.approx(times, rel=0.1), (workers, optimizer, way)
    few, many = (memory.of(80_000_000, "adam", workers) for workers in (2, 1000))
    assert (few.gradients, few.weights) == (many.gradients, many.weights)
    assert few.shares - many.shares == pytest.approx(80e6 * 2 * (1 / 2 - 1 / 1000)), "what is remembered is divided"


def test_it_says_when_shares_are_worth_it(capsys: pytest.CaptureFixture[str]) -> None:
    def told(options: str) -> str:
        assert cli.main(["plan", *JOB, "--algorithm", "mpi-SGD", *options.split()]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "worth it only where the store updates anyway" in told("-s 0")
    assert "worth it where memory is short" in told("-s 0 --optimizer adam")
    assert "worth it where memory is short" in told("--recommend --optimizer adam --overlap -c 1 -s 0")
    assert "SHARDED" not in told("-c 2 -s 1")
    row = json.loads(told("-s 0 --json"))
    assert row["sharded_step_s"] >= row["step_s"], "two exchanges are no quicker than one"
    assert row["memory_bytes"]["shares"] < row["memory_bytes"]["weights"]
    row = json.loads(told("-c 2 -s 1 --json"))
    assert row["sharded_step_s"] is row["memory_bytes"] is None


@pytest.mark.parametrize(("options", "words"), [
    ("--model resnet50", "--compute-seconds"), ("--compute-seconds 1 --link slow", "link 'slow'"),
    ("--model resnet51", "known are resnet50"),  # before what such a model would need
    ("--compute-seconds 1 --steps 0", "an epoch of 0 steps: expected 1"),
    ("--compute-seconds 1 --algorithm sgd", "--algorithm sgd: known are all"),
    ("--compute-seconds 1 --algorithm mpi-ssp", "its limits are mpi-SGD"),
    ("--compute-seconds 1 --algorithm dist-SGD,dist-softsync", "its limits are dist-SGD"),
    ("--compute-seconds 1 -s 0 --algorithm dist-SGD", "needs servers (-s N)"),
    ("--compute-seconds 1 --ps none.json", "No such file"), ("--compute-seconds 1 -n 0", "--workers 0: expected 1 to"),
    ("--compute-seconds 1 -c 0", "--clients 0"), ("--compute-seconds 1 --recommend -c 0", "--clients 0"),
    ("--compute-seconds 1 --recommend --interval 0 --algorithm mpi-SGD", "--interval 0"),
    ("--compute-seconds 1 --model resnet20 --keys 7", "model resnet20 has layers"),
    ("--compute-seconds 1 --model 1M --keys 0", "--keys 0"),
    ("--compute-seconds 1 --model 10 --keys 200", "10 bytes in 200 keys: expected a key or more, of a byte or more"),
    (f"--compute-seconds 1 -n {10**30}", "expected 1 to 1000000"),
    (f"--compute-seconds 1 -s {10**400}", "servers is 1000"),
    (f"--compute-seconds 1 --hosts {10**30}", "hosts is 1000"),
    (f"--compute-seconds 1 --lab-cores {10**400}", "lab_cores is 1000"),
    (f"--compute-seconds 1 --steps {10**400}", "fewer than 1e18"),
    ("--compute-seconds 1e308", "1e+18 at most"),
    ("--compute-seconds 1 --jitter 50", "jitter is 50.0: expected zero or more, 3 at most"),
    ("--compute-seconds 1 -n 4 --slow-workers 5", "5 slow workers: there are 4"),
    ("--compute-seconds 1 --tuning=~/nothing", f"--tuning {os.path.expanduser('~')}/nothing: "),
    ("--compute-seconds 1 --algorithm ,", "names none"), ("--compute-seconds 1 --jitter 0.1 --seed -1", "seed -1"),
    (f"--compute-seconds 1 --ps {sys.executable}", f"--ps {sys.executable}: 'utf-8' codec"),
])  # fmt: skip
def test_bad_options(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *options.split()]) == 2
    assert words in capsys.readouterr().err
