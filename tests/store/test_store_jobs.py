"""The store in real jobs: exact sums, equal training, averaging, whatever the grouping of the workers."""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import run_in_turn, run_job

PROGRAMS = Path(__file__).parent / "programs"
BOTH = "dist_sync dist_sync_mpi"
#: What gives the same bits in every run: there is a second job for them.
AGAIN = [f"KVMPI_ALLREDUCE={name} bits.py {BOTH}" for name in ("ring", "mpi", "naive")] + [f"sparse.py bits {BOTH}"]

#: What is run in a job of each shape; FOLDER is one of its own. With seven workers in clients of 3, 2 and 2.
SHAPES = {
    "-n 1 -c 1 -s 2": [f"sums.py {BOTH}", "lists.py FOLDER local mpi", "ahead.py FOLDER/saved",
                        "training.py dist_sync_mpi dist_sync mpi", "one_call.py local mpi dist_sync",
                        "sharded.py FOLDER"],
    "-n 2 -c 1 -s 1": [f"sums.py {BOTH}", "lists.py FOLDER mpi dist_sync_mpi", "empty.py mpi dist_sync_mpi",
                        "one_call.py mpi dist_sync_mpi", "repeats.py FOLDER", "sharded.py FOLDER",
                        "stopped.py FOLDER dist_sync_mpi"],
    "-n 2 -c 2 -s 1": [f"sums.py {BOTH}", "empty.py dist_sync_mpi", "lists.py FOLDER dist_sync"],
    "-n 2 -c 2 -s 2": ["averaging.py alone"],
    "-n 3 -c 1 -s 0": ["sums.py mpi dist_sync_mpi", "KVMPI_ALLREDUCE=multi_ring lists.py FOLDER mpi",
                        "one_call.py mpi", "KVMPI_ALLREDUCE=ring repeats.py FOLDER",
                        "KVMPI_NATIVE=off repeats.py FOLDER", "KVMPI_ALLREDUCE=ring sharded.py FOLDER",
                        "stopped.py FOLDER mpi"],
    "-n 3 -c 3 -s 2": ["ahead.py FOLDER/saved", "compressed.py FOLDER dist_sync", "bounded.py dist_ssp",
                        "aged.py dist_async dist_ssp"],
    "-n 4 -c 1 -s 2": ["training.py dist_sync_mpi dist_sync mpi", "reduced.py mpi dist_async_mpi",
                        "lists.py FOLDER mpi"],
    "-n 4 -c 2 -s 2": [
        f"sums.py {BOTH}", f"KVMPI_ENGINE=naive sums.py {BOTH}", "averaging.py grouped", "ahead.py FOLDER/saved",
        "training.py dist_sync_mpi dist_sync", *AGAIN,
        "KVMPI_ALLREDUCE=shared lists.py FOLDER dist_sync_mpi", f"compressed.py FOLDER {BOTH}",
        "reduced.py dist_sync_mpi dist_async_mpi dist_sync dist_async", "one_call.py dist_sync_mpi dist_sync",
        "bounded.py dist_ssp_mpi", "aged.py dist_async_mpi", "gathered.py 2 dist_softsync_mpi dist_softsync",
    ],
    "-n 4 -c 4 -s 2": ["sums.py dist_sync_mpi", "training.py dist_sync_mpi dist_sync", "gathered.py 1 dist_softsync"],
    "-n 5 -c 2 -s 2": ["training.py dist_sync_mpi dist_sync"],
    "-n 7 -c 1 -s 2": ["sums.py mpi dist_sync_mpi", "sharded.py FOLDER"],
    "-n 7 -c 3 -s 7": [f"sums.py {BOTH}"],
}  # fmt: skip


@functools.cache
def output_of(options: str, *programs: str) -> subprocess.CompletedProcess[str]:
    """A job in which each worker runs all of them."""
    with tempfile.TemporaryDirectory() as folder:
        words = " + ".join(programs).replace("FOLDER", folder).split()
        return run_in_turn(options, [str(PROGRAMS / word) if word.endswith(".py") else word for word in words])


def lines(options: str, programs: Sequence[str], program: str) -> list[list[str]]:
    """What each worker has said in one of the programs, in the order of ranks."""
    done = output_of(options, *programs)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    by_rank: dict[str, list[str]] = {}
    running: dict[str, str] = {}
    for line in done.stdout.splitlines():
        who, _, text = line.partition("] ")
        if text.startswith("begins "):
            running[who] = programs[int(text.split()[1])]
        elif running.get(who) == program:
            by_rank.setdefault(who, []).append(text)
    found = [said for _, said in sorted(by_rank.items())]
    assert len(found) == int(options.split()[1]), done.stdout
    return found


CASES = [(options, program) for options, programs in SHAPES.items() for program in programs]


def of(name: str) -> pytest.MarkDecorator:
    """The cases of one program."""
    found = [(options, program) for options, program in CASES if f"{name}.py" in program]
    return pytest.mark.parametrize(("options", "program"), found, ids=[" ".join(case) for case in found])


def said(options: str, program: str) -> list[list[str]]:
    return lines(options, SHAPES[options], program)


def shape(options: str) -> tuple[int, int, int]:
    """Workers, clients, servers."""
    workers, clients, servers = map(int, options.split()[1::2])
    return workers, clients, servers


@of("sums")
def test_sums_are_exact(options, program):
    workers, clients, servers = shape(options)
    expected = [
        f"{name} {workers} {workers if name == 'dist_sync' else clients} {0 if name == 'mpi' else servers} exact"
        for name in program.partition("sums.py ")[2].split()
    ]
    assert said(options, program) == [expected] * workers


@of("bits")
def test_every_worker_gets_the_same_bits(options, program):
    first, *others = said(options, program)
    assert len(first) == 8, first  # one checksum for each type and key
    assert others == [first] * 3
    assert lines(options, AGAIN, program) == [first] * 4


@of("sparse")
def test_sums_of_rows_have_the_same_bits(options, program):
    first, *others = said(options, program)
    assert len(first) == 2, first
    assert others == [first] * 3
    assert lines(options, AGAIN, program) == [first] * 4


@of("one_call")
def test_keys_devices_and_workers_of_one_call(options, program):
    expected = [f"{name} right" for name in program.split()[1:]]
    assert said(options, program) == [expected] * shape(options)[0]


@of("bounded")
def test_nobody_is_further_ahead_than_staleness_is_bounded_to(options, program):
    clients = shape(options)[1]
    assert said(options, program) == [[f"{name} {clients} bounded" for name in program.split()[1:]]] * shape(options)[0]


@of("aged")
def test_gradients_count_the_less_the_older_they_are(options, program):
    clients = shape(options)[1]
    assert said(options, program) == [[f"{name} {clients} aged" for name in program.split()[1:]]] * shape(options)[0]


@of("gathered")
def test_so_many_pushes_are_an_update_whoever_they_are_from(options, program):
    _, splits, *names = program.split()
    num_workers, num_clients, _ = shape(options)
    expected = [f"{name} {splits} {num_clients if 'mpi' in name else num_workers} gathered" for name in names]
    assert said(options, program) == [expected] * num_workers


@of("empty")
def test_arrays_of_the_store(options, program):
    expected = [f"empty {name} right" for name in program.split()[1:]]
    assert said(options, program) == [expected] * shape(options)[0]


@of("lists")
def test_lists_of_keys(options, program):
    expected = [f"lists {name} right" for name in program.partition("FOLDER ")[2].split()]
    assert said(options, program) == [expected] * shape(options)[0]


@of("repeats")
def test_calls_that_are_made_again(options, program):
    assert said(options, program) == [["repeats right"]] * shape(options)[0]


@of("stopped")
def test_workers_that_are_all_stopped_for_longer_than_a_call_may_take_go_on(options, program):
    assert said(options, program) == [[f"{name} went on" for name in program.split()[2:]]] * shape(options)[0]


@of("reduced")
def test_what_a_client_has_summed_is_pushed_once_and_all_hear_what_any_says(options, program):
    assert said(options, program) == [[f"reduced {name} right" for name in program.split()[1:]]] * shape(options)[0]


@of("ahead")
def test_a_push_fetches_the_value_for_the_pull_behind_it(options, program):
    assert said(options, program) == [["ahead dist_sync right", "ahead dist_sync_mpi right"]] * shape(options)[0]


@of("compressed")
def test_pushes_of_few_bits_add_up_to_what_they_stand_for(options, program):
    expected = [f"compressed {name} right" for name in program.partition("FOLDER ")[2].split()]
    assert said(options, program) == [expected] * shape(options)[0]


@of("training")
def test_training_equals_one_process(options, program):
    for of_rank in said(options, program):
        assert [line.split()[0] for line in of_rank] == program.split()[1:]
        assert all(" equal " in line for line in of_rank)


@of("averaging")
def test_averaging_follows_the_oracle(options, program):
    for of_rank in said(options, program):
        assert [line.split()[-1] for line in of_rank] == ["elastic", "elastic", "averages"]


def test_servers_run_a_rule_of_the_users_own(job, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROGRAMS), prepend=os.pathsep)
    done = job("-n 2 -c 2 -s 2 --import custom_rules", PROGRAMS / "custom.py")
    assert done.stdout.count("custom rule") == 2
    without = run_job("-n 2 -c 2 -s 2", PROGRAMS / "custom.py")
    assert without.returncode == 1
    assert "'doubler'" in without.stderr
    assert "--import" in without.stderr
    missing = run_job("-n 2 -c 2 -s 1 --import no_such_module", PROGRAMS / "custom.py")
    assert missing.returncode != 0
    assert "cannot import 'no_such_module'" in missing.stderr


@pytest.mark.parametrize("settings", [
    {"window_bytes": 65_536}, {"window_bytes": 65_536, "transport": "tcp"}, {}
], ids=str)  # fmt: skip
def test_clients_that_keep_to_their_windows_are_answered(job, tmp_path, settings):
    done = job("-n 2 -c 2 -s 1", PROGRAMS / "windows.py", tmp_path / "saved", **settings)
    assert done.stdout.count("windows right") == 2
    assert "too many answers" not in done.stderr


@pytest.mark.parametrize("options", ["-n 2 -c 2 -s 1", "-n 2 -c 2 -s 2 --replicas 1"])
def test_a_pull_that_nobody_answers_in_time_is_made_again(job, options):
    done = job(options, PROGRAMS / "late.py")
    assert done.stdout.count("late right") == 2


def test_a_large_push_that_was_over_before_it_had_left_is_made(job):
    done = job("-n 2 -c 2 -s 1", PROGRAMS / "late_large.py", transport="tcp")
    assert done.stdout.count("late right") == 2
