"""Bad input and absent workers in real jobs: a clear error at the call, on the right workers, and nothing hangs."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from jobs import run_job

from kvmpi import errors
from kvmpi.config import Config

PROGRAMS = Path(__file__).parent / "programs"


def mistakes(done):
    """{mistake: {worker: what it printed}}"""
    found: dict[str, dict[int, str]] = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"\[worker (\d+)\] mistake ([a-z ]+): (.*)", line):
            found.setdefault(match[2], {})[int(match[1])] = match[3]
    return found


def test_mistakes_in_clients_of_two(job):
    found = mistakes(job("-n 4 -c 2 -s 2", PROGRAMS / "mistakes.py", "dist_sync_mpi"))
    everywhere = {
        "uninitialised": r"KeyNotInitializedError: .*'nope' on worker",
        "twice": r"DuplicateKeyError: .*'w' on worker",
        "kind": r"KeyKindError: .*7",
        "none": r"DTypeMismatchError: .*'w'.* None",
        "compression": r"UnsupportedError: .*fp16",
        "init shape": r"ShapeMismatchError: .*'new'",
        "init dtype": r"DTypeMismatchError: .*'new'",
        "optimizer": r"OrderMismatchError: .*has 'SGD\(lr=0\.1\)'",
    }
    in_the_client = {  # worker 3 errs; worker 2 is its partner
        "shape": (r"ShapeMismatchError: .*'w'.*\(3, 2\)", r"ShapeMismatchError: MPI rank 1 .*'w'.*\(3, 2\)"),
        "dtype": (r"DTypeMismatchError: .*float64", r"DTypeMismatchError: MPI rank 1 .*float64"),
        "list": (r"ShapeMismatchError: .*'v'", r"ShapeMismatchError: .*'v'"),
        "keys": (r"OrderMismatchError: .*'w'.*'v'",) * 2,
        "order": (r"OrderMismatchError: .*position 1.*'v'.*no key",) * 2,
        "priority": (r"ConfigError: .*'high'", r"ConfigError: MPI rank 1 .*'high'"),
        "scale": (r"ConfigError: .*scale=array", r"ConfigError: MPI rank 1 .*scale=array"),
        "path": (r"ConfigError: path is None", r"ConfigError: MPI rank 1 .*path is None"),
        "call": (r"OrderMismatchError: .*push\('w'\).*pull\('w'\)",) * 2,
    }
    everywhere |= dict.fromkeys(("fork", "fork all"), "KVError: KVError: this dist_sync_mpi store belongs to process")
    for name, pattern in everywhere.items():
        for worker in range(4):
            assert re.match(pattern, found[name][worker]), (name, worker, found[name])
    for name, (errs, partner) in in_the_client.items():
        assert re.match(errs, found[name][3]), (name, found[name])
        assert re.match(partner, found[name][2]), (name, found[name])


def test_mistakes_of_clients_of_one(job):
    found = mistakes(job("-n 3 -c 3 -s 2", PROGRAMS / "mistakes.py", "dist_sync"))
    assert re.match(r"ShapeMismatchError: .*'w' on worker 2", found["shape"][2])
    assert re.match(r"ShapeMismatchError: .*client 2 .*client 0", found["init shape"][2])
    assert re.match(r"DTypeMismatchError: .*float64.*float32", found["init dtype"][2])
    for name in ("shape", "init shape", "init dtype"):
        assert found[name][0] == found[name][1] == "nothing", found[name]


def test_a_forked_child_leaves_the_store_to_its_parent(job):
    found = mistakes(job("-n 2", PROGRAMS / "mistakes.py", "local"))
    for name in ("fork", "fork all"):
        for worker in range(2):
            assert re.match(r"KVError: KVError: this local store belongs to process \d+", found[name][worker]), found


@pytest.mark.parametrize(
    ("options", "store", "others", "named", "call"),
    [
        ("-n 3", "mpi", {0, 1}, "MPI rank 2 of this client", "pushpull"),
        ("-n 3", "mpi", {0, 1}, "MPI rank 2 of this client", "again"),
        ("-n 3", "mpi", {0, 1}, "MPI rank 2 of this client", "wait_all"),
        ("-n 3", "mpi", {0, 1}, "MPI rank 2 of this client", "barrier"),
        ("-n 3", "mpi", {0, 1}, "MPI rank 2 of this client", "save"),
        ("-n 4 -c 2 -s 1", "dist_sync_mpi", {2}, "MPI rank 1 of this client", "pushpull"),
        ("-n 3 -c 3 -s 2", "dist_sync", {0, 1}, "waits for client 2", "pushpull"),
    ],
)
def test_a_worker_that_never_comes_is_named(tmp_path, options, store, others, named, call):
    arguments = (store, tmp_path, ",".join(map(str, others)), call)
    done = run_job(options, PROGRAMS / "absent.py", *arguments, settings={"timeout_s": 3})
    assert done.returncode == 1
    late = dict(re.findall(r"^\[worker (\d+)\] late after [0-9.]+ s: (.*)$", done.stdout, re.MULTILINE))
    assert {int(worker) for worker in late} >= others, done.stdout + done.stderr
    about = f"{call}()" if call in ("barrier", "save") else "'w'"
    assert all(named in late[str(worker)] and about in late[str(worker)] for worker in others), late
    seconds = [float(text) for text in re.findall(r"late after ([0-9.]+) s", done.stdout)]
    assert max(seconds) < 2 * 3


def test_ctrl_c_in_a_sum_is_heard_at_once_and_ends_the_store(tmp_path):
    done = run_job("-n 2", PROGRAMS / "interrupted.py", tmp_path)
    assert done.stdout.count("interrupted right") == 2, done.stdout + done.stderr
    assert done.returncode == 1  # as of every store that has lost a worker


@pytest.mark.parametrize("before", ["sys.stdout.close()", "sys.stdout = open('/dev/full', 'w'); print('lost')"])
def test_an_error_where_nothing_can_be_printed_ends_the_client(before):
    """Others do not wait for it. It is the store that sees to that where the launcher does not run the program."""
    text = f"import sys, kvmpi\nkv = kvmpi.create('mpi')\nif kv.rank == 1:\n    {before}\n    raise ValueError('boo')\n"
    done = run_job("-n 2", Path("python"), "-c", text + "kv.barrier()", settings={"timeout_s": 20})
    assert done.returncode == 1
    assert "ValueError: boo" in done.stderr
    assert "KVTimeoutError" not in done.stderr


@pytest.mark.parametrize(
    ("options", "program", "status", "text"),
    [
        ("-n 2 -c 3", "sums.py", 2, "-c"),
        ("-n 1", "no_such_program.py", 127, "no_such_program.py"),
        ("-n 2 -s 0 -c 2", "sums.py", 1, "-s"),
    ],
)
def test_jobs_that_cannot_be(options, program, status, text):
    done = run_job(options, PROGRAMS / program, "dist_sync")
    assert done.returncode == status, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr or status == 1


def test_no_mpi_is_a_clear_error():
    done = run_job("-n 2", PROGRAMS / "sums.py", "mpi", settings={"mpirun": "/nowhere/mpirun"})
    assert done.returncode == 2
    assert "kvmpi[mpi]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_scheduler_port_in_use_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_job("-n 1 -s 1", PROGRAMS / "sums.py", "dist_sync", settings={"scheduler_port": port})
    assert done.returncode != 0
    assert str(port) in done.stderr
    assert "in use" in done.stderr


def test_an_unknown_setting_is_a_clear_error():
    done = run_job("-n 1", PROGRAMS / "sums.py", "mpi", settings={"time_out": 3})
    assert done.returncode != 0
    assert "KVMPI_TIME_OUT" in done.stderr


@pytest.mark.parametrize("text", ["nan", "inf", "1e20"])
@pytest.mark.parametrize("name", ["KVMPI_TIMEOUT_S", "KVMPI_REPORT_S", "KVMPI_STALL_S", "KVMPI_SNAPSHOT_SECONDS"])
def test_seconds_that_no_clock_has_are_clear_errors(name, text):
    with pytest.raises(errors.ConfigError, match=f"{name}=.*expected seconds"):
        Config.from_env({name: text, "KVMPI_SNAPSHOT_DIR": "somewhere"})


@pytest.mark.parametrize(("name", "text"), [
    ("KVMPI_MAX_MESSAGE_BYTES", str(10**20)), ("KVMPI_SCHEDULER_PORT", "-7"), ("KVMPI_SCHEDULER_PORT", "65536"),
])  # fmt: skip
def test_numbers_that_no_system_has_are_clear_errors(name, text):
    with pytest.raises(errors.ConfigError, match=f"{name}={text}"):
        Config.from_env({name: text})
