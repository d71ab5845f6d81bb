"""The store in real jobs: exact sums, equal training, averaging, whatever the grouping of the workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

PROGRAMS = Path(__file__).parent / "programs"


def lines(done, start):
    return sorted({line.split("] ", 1)[1] for line in done.stdout.splitlines() if f"] {start}" in line})


@pytest.mark.parametrize("servers", [1, 2, 7])
@pytest.mark.parametrize("workers", [1, 2, 4, 7])
def test_sums_are_exact(job, workers, servers):
    """Each type in one job; with seven workers in clients of 3, 2 and 2."""
    clients = {1: 1, 2: 1, 4: 2, 7: 3}[workers]
    done = job(f"-n {workers} -c {clients} -s {servers}", PROGRAMS / "sums.py", "dist_sync", "dist_sync_mpi")
    assert lines(done, "dist_sync") == [
        f"dist_sync {workers} {workers} {servers} exact",
        f"dist_sync_mpi {workers} {clients} {servers} exact",
    ]


@pytest.mark.parametrize(("workers", "clients", "servers"), [(4, 1, 0), (7, 1, 2), (7, 7, 2)])
def test_sums_are_exact_at_both_ends(job, workers, clients, servers):
    """Pure MPI, one client on servers, and the plain parameter server."""
    names = ["mpi", "dist_sync_mpi"] if clients == 1 else ["dist_sync_mpi"]
    done = job(f"-n {workers} -c {clients} -s {servers}", PROGRAMS / "sums.py", *names)
    assert f"dist_sync_mpi {workers} {clients} {servers} exact" in lines(done, "dist_sync_mpi")


@pytest.mark.parametrize("algorithm", ["ring", "mpi", "naive"])
def test_every_worker_gets_the_same_bits(job, algorithm):
    done = job("-n 4 -c 2 -s 2", PROGRAMS / "bits.py", "dist_sync", "dist_sync_mpi", allreduce=algorithm)
    found = lines(done, "bits")
    assert len(found) == 8, found  # one checksum for each type and key, from all four workers
    again = job("-n 4 -c 2 -s 2", PROGRAMS / "bits.py", "dist_sync", "dist_sync_mpi", allreduce=algorithm)
    assert lines(again, "bits") == found


@pytest.mark.parametrize(("options", "names"), [
    ("-n 3 -c 1 -s 1", ["mpi", "dist_sync_mpi"]), ("-n 2 -c 2 -s 1", ["dist_sync_mpi"]),
])  # fmt: skip
def test_arrays_of_the_store(job, options, names):
    done = job(options, PROGRAMS / "empty.py", *names)
    for name in names:
        assert done.stdout.count(f"empty {name} right") == int(options.split()[1])


@pytest.mark.parametrize(("options", "names", "algorithm"), [
    ("-n 1 -c 1 -s 1", ["local", "mpi"], "auto"), ("-n 2 -c 1 -s 1", ["mpi", "dist_sync_mpi"], "auto"),
    ("-n 4 -c 1 -s 0", ["mpi"], "auto"), ("-n 3 -c 1 -s 0", ["mpi"], "multi_ring"),
    ("-n 4 -c 2 -s 2", ["dist_sync_mpi"], "shared"), ("-n 2 -c 2 -s 1", ["dist_sync"], "auto"),
])  # fmt: skip
def test_lists_of_keys(job, tmp_path, options, names, algorithm):
    done = job(options, PROGRAMS / "lists.py", tmp_path, *names, allreduce=algorithm)
    for name in names:
        assert done.stdout.count(f"lists {name} right") == int(options.split()[1])


@pytest.mark.parametrize("options", ["-n 1 -c 1 -s 2", "-n 3 -c 3 -s 2", "-n 4 -c 2 -s 2"])
def test_a_push_fetches_the_value_for_the_pull_behind_it(job, tmp_path, options):
    done = job(options, PROGRAMS / "ahead.py", tmp_path / "saved")
    assert done.stdout.count("ahead dist_sync right") == int(options.split()[1])
    assert done.stdout.count("ahead dist_sync_mpi right") == int(options.split()[1])


@pytest.mark.parametrize(("workers", "clients"), [(1, 1), (4, 4), (4, 2), (4, 1), (5, 2)])
def test_training_equals_one_process(job, workers, clients):
    names = ["dist_sync_mpi", "dist_sync"] + (["mpi"] if clients == 1 else [])
    done = job(f"-n {workers} -c {clients} -s 2", PROGRAMS / "training.py", *names)
    assert len([line for line in done.stdout.splitlines() if " equal " in line]) == workers * len(names)


@pytest.mark.parametrize("options", ["-n 2 -c 2 -s 2", "-n 4 -c 2 -s 1"])
def test_averaging_follows_the_oracle(job, options):
    grouped = "grouped" if "-n 4" in options else "alone"
    done = job(options, PROGRAMS / "averaging.py", grouped)
    assert len(lines(done, "dist_")) == 3


def test_the_naive_engine_gives_the_same(job):
    done = job("-n 4 -c 2 -s 2", PROGRAMS / "sums.py", "dist_sync_mpi", "dist_sync", engine="naive")
    assert len(lines(done, "dist_sync")) == 2


def test_servers_run_a_rule_of_the_users_own(job, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS))
    done = job("-n 2 -c 2 -s 2 --import custom_rules", PROGRAMS / "custom.py")
    assert done.stdout.count("custom rule") == 2
    without = run_job("-n 2 -c 2 -s 2", PROGRAMS / "custom.py", timeout_s=60)
    assert without.returncode == 1
    assert "'doubler'" in without.stderr
    assert "--import" in without.stderr
    missing = run_job("-n 2 -c 2 -s 1 --import no_such_module", PROGRAMS / "custom.py", timeout_s=60)
    assert missing.returncode != 0
    assert "cannot import 'no_such_module'" in missing.stderr
