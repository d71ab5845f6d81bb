"""Whoever is killed, nothing of the job is left: no process, no grandchild, no folder, no watchdog."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from jobs import HANGS_S, is_mpirun

from kvmpi.errors import ConfigError
from kvmpi.launchers import mpirun, watchdog

try:
    mpirun.find(os.environ, 2)
    HAVE_MPI = True
except ConfigError:
    HAVE_MPI = False
needs_mpi = pytest.mark.skipif(not HAVE_MPI, reason="no MPI here")

#: Every worker has a grandchild that does not care about process groups, sessions or closed pipes.
STUCK = """
import os, subprocess, sys, time
if "mpi" in sys.argv and os.environ["KVMPI_CLIENT_RANK"] == "0":
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(f"ready-{os.environ['KVMPI_RANK']}", "w").close()
time.sleep(1000)
"""


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shared_memory(job):
    """Files in /dev/shm that the job's processes have mapped."""
    found = set()
    for pid in job.environs():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}
    return {path for path in found if os.path.exists(path)}


@pytest.fixture
def stuck_job(launch, write):
    """Three workers in two clients (an mpirun of two, and one without) and a server, all up; what to check at last."""

    def start(**env):
        job = launch("-n", "3", "-c", "2", "-s", "1", write("stuck.py", STUCK), "mpi", env=env)
        wait_until(lambda: all((job.folder / f"ready-{rank}").exists() for rank in range(3)))
        environs = job.environs()
        job_dir = next(env["KVMPI_JOB_DIR"] for env in environs.values() if "KVMPI_JOB_DIR" in env)
        assert os.stat(job_dir).st_mode & 0o777 == 0o700
        for rank in "012":  # a worker and its grandchild, which shows no environment before it is all there
            wait_until(lambda rank=rank: len(job.pids(ROLE="worker", RANK=rank)) == 2)
        shared = shared_memory(job)
        assert shared, "MPI has mapped none: this test does not see what it should"

        def assert_nothing_left(timeout_s=30.0):
            job.assert_nothing_left(job_dir, timeout_s)
            assert not [path for path in shared if os.path.exists(path)]

        return job, assert_nothing_left

    return start


def first_of(job, **wanted):
    """The oldest such process: the worker, not its grandchild."""
    return min(job.pids(**wanted), key=lambda pid: psutil.Process(pid).create_time())


@needs_mpi
@pytest.mark.parametrize(
    ("victim", "name"),
    [
        ("worker", "worker 2 (client 1) was killed by SIGKILL"),
        ("rank", "worker 1 (client 0) was killed by SIGKILL"),
        ("mpirun", "client 0 (mpirun of workers 0 to 1) was killed by SIGKILL"),
        ("server", "server 0 was killed by SIGKILL"),
        ("scheduler", "scheduler was killed by SIGKILL"),
    ],
)
def test_kill_9_of_a_process_ends_the_job(stuck_job, victim, name):
    job, assert_nothing_left = stuck_job()
    pid = {
        "worker": lambda: first_of(job, ROLE="worker", RANK="2"),
        "rank": lambda: first_of(job, ROLE="worker", RANK="1"),
        "mpirun": lambda: next(filter(is_mpirun, job.pids(CLIENT_RANK="0"))),
        "server": lambda: first_of(job, ROLE="server"),
        "scheduler": lambda: first_of(job, ROLE="scheduler"),
    }[victim]()
    os.kill(pid, signal.SIGKILL)
    assert job.finish(timeout_s=30) == 137, job.stderr
    assert f"kvmpi run: {name}" in job.stderr
    assert_nothing_left(timeout_s=0)


@needs_mpi
def test_kill_9_of_the_launcher_leaves_nothing(stuck_job):
    job, assert_nothing_left = stuck_job()
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    assert_nothing_left()


@needs_mpi
@pytest.mark.parametrize("delay_s", [0.1, 0.2, 0.4])
def test_kill_9_of_the_launcher_while_it_starts(launch, write, delay_s):
    job = launch("-n", "3", "-c", "2", "-s", "1", write("stuck.py", STUCK))
    time.sleep(delay_s)  # no condition to wait for: the point is to hit it anywhere
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    wait_until(lambda: not job.environs(), timeout_s=30)


@needs_mpi
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_to_the_launcher_stop_everything(stuck_job, number, status):
    job, assert_nothing_left = stuck_job()
    job.process.send_signal(number)
    assert job.finish(timeout_s=30) == status, job.stderr
    assert job.stderr.splitlines()[-1] == f"kvmpi run: stopped by {signal.Signals(number).name}"
    assert_nothing_left(timeout_s=0)


def test_a_process_that_is_just_starting_a_program_is_found(tmp_path):
    """For a moment of execve a process has neither environment nor command line: a sweep must not pass it over."""
    starting, kernel_thread = tmp_path / "2000000001", tmp_path / "2000000002"
    for process in (starting, kernel_thread):
        process.mkdir()
        for name in ("environ", "cmdline"):
            (process / name).touch()
    (starting / "exe").symlink_to("/usr/bin/sleep")
    asked = []

    def execve():
        wait_until(lambda: asked)
        (starting / "environ").write_bytes(b"HOME=/\0KVMPI_JOB_ID=abc\0")
        (starting / "cmdline").write_bytes(b"sleep\0001000\0")

    def readlink(path):
        asked.append(path)
        return os.readlink(path)

    kernel = threading.Thread(target=execve)
    kernel.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watchdog, "os", SimpleNamespace(**{**vars(os), "readlink": readlink}))
        found = watchdog.find_processes("abc", proc=str(tmp_path))
    kernel.join()
    assert found == [int(starting.name)]


def test_a_process_without_environment_is_not_waited_for(tmp_path):
    process = tmp_path / "2000000001"
    process.mkdir()
    (process / "environ").touch()
    (process / "cmdline").write_bytes(b"sleep\0001000\0")
    (process / "exe").symlink_to("/usr/bin/sleep")
    start = time.monotonic()
    assert watchdog.find_processes("abc", proc=str(tmp_path)) == []
    assert time.monotonic() - start < watchdog.EXEC_S / 2


@needs_mpi
def test_a_lone_worker_that_loads_mpi_leaves_no_shared_memory(launch, write):
    seen = "(line.split()[5] for line in open('/proc/self/maps') if '/dev/shm/' in line)"
    job = launch("-n", "1", write("alone.py", f"from mpi4py import MPI\nprint(*{seen})"))
    assert job.finish(timeout_s=30) == 0, job.stderr
    mapped = [word for word in job.stdout.split() if word.startswith("/dev/shm/")]
    assert mapped, "MPI has mapped none: this test does not see what it should"
    assert not [path for path in mapped if os.path.exists(path)]


SAVING = """
import signal, sys, time
import numpy as np
import kvmpi

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(time.monotonic()))
with kvmpi.create(sys.argv[1]) as kv:
    kv.init(["w", "stop"], [np.zeros(5, "f4"), np.zeros(1, "f4")])
    stop, step = np.zeros(1, "f4"), 0
    while not stop[0]:
        step += 1
        kv.pushpull("w", np.full(5, step, "f4"))
        stop[0] = len(asked)
        kv.pushpull("stop", stop)
        if step == 5:
            open(f"ready-{kv.rank}", "w").close()
    time.sleep(2)  # longer than an mpirun would leave its ranks
    kv.save("saved")
    if kv.rank == 0:
        print("saved after step", step)
"""


@needs_mpi
@pytest.mark.parametrize(
    ("options", "store"), [("-n 2", "mpi"), ("-n 3 -c 2 -s 1", "dist_sync_mpi"), ("-n 2 -c 2 -s 1", "dist_sync")]
)
def test_workers_have_the_grace_to_save_something_and_servers_help_them(launch, write, options, store):
    job = launch(*options.split(), write("saving.py", SAVING), store, whole=True)
    num_workers = int(options.split()[1])
    wait_until(lambda: all((job.folder / f"ready-{rank}").exists() for rank in range(num_workers)))
    start = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish(timeout_s=60) == 143, job.stderr
    assert time.monotonic() - start > 2
    assert re.search(r"saved after step \d+", job.stdout), job.stdout + job.stderr
    assert (job.folder / "saved").exists()
    assert job.stderr == "kvmpi run: stopped by SIGTERM\n"
    assert not job.environs()


STUBBORN = """
import signal, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
open("ready", "w").close()
while True: time.sleep(1000)
"""


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(launch, write):
    job = launch(write("stubborn.py", STUBBORN), env={"KVMPI_GRACE_S": "1"})
    wait_until((job.folder / "ready").exists)
    start = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    assert job.finish() == 143
    assert 1 <= time.monotonic() - start < 4
    assert not job.environs()


def test_a_second_ctrl_c_does_not_wait_for_the_grace(launch, write):
    job = launch(write("stubborn.py", STUBBORN), env={"KVMPI_GRACE_S": "1000"})
    wait_until((job.folder / "ready").exists)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.3)  # two signals at once would be one
    job.process.send_signal(signal.SIGINT)
    assert job.finish(timeout_s=30) == 130
    assert not job.environs()


def test_a_watchdog_that_was_killed_is_replaced_by_the_launcher(launch, write):
    text = STUCK.replace("time.sleep(1000)", "time.sleep(1)")
    job = launch(write("stuck.py", text))
    wait_until((job.folder / "ready-0").exists)
    watchdogs = [pid for pid, env in job.environs().items() if "KVMPI_JOB_ID" not in env and pid != job.process.pid]
    job_dir = next(env["KVMPI_JOB_DIR"] for env in job.environs().values() if "KVMPI_JOB_DIR" in env)
    assert len(watchdogs) == 1
    os.kill(watchdogs[0], signal.SIGKILL)
    assert job.finish() == 0
    job.assert_nothing_left(job_dir, timeout_s=0)


def test_what_a_program_has_in_shared_memory_goes_with_it(launch, write, tmp_path):
    """Python has a process that removes it when the program is dead, and which is one of the job."""
    text = """
        import os, sys
        from multiprocessing import shared_memory
        memory = shared_memory.SharedMemory(create=True, size=1000)
        open("name", "w").write(memory.name)
        os._exit(3)
    """
    job = launch(write("fails.py", textwrap.dedent(text)))
    assert job.finish() == 3
    assert not Path("/dev/shm", (tmp_path / "name").read_text()).exists()
    assert not job.environs()


def test_a_job_within_a_job_ends_with_it(launch, write):
    write("stuck.py", STUCK)
    outer = "import os, sys; os.execv(sys.executable, [sys.executable, sys.argv[1], '-n', '2', '-c', '2', 'stuck.py'])"
    job = launch(write("outer.py", outer), str(Path(__file__).with_name("launcher_under_test.py")))
    wait_until(lambda: all((job.folder / f"ready-{rank}").exists() for rank in range(2)))
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait()
    wait_until(lambda: not job.environs(), timeout_s=30)


def test_as_the_first_process_of_a_container_it_buries_orphans(tmp_path):
    """Until then they count for its limit of processes."""
    text = """
        import os, time
        from pathlib import Path
        read_end, write_end = os.pipe()
        for _ in range(20):
            if os.fork() == 0:
                if os.fork() == 0:
                    while os.getppid() != 1:
                        time.sleep(0.001)
                    os.write(write_end, b"1")
                os._exit(0)
            os.wait()
        orphans = sum(len(os.read(read_end, 1)) for _ in range(20))
        until_s = time.monotonic() + 20
        def state(path):
            try:
                return path.read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has ended since it was listed
                return []
        while True:
            zombies = [state(path) for path in Path("/proc").glob("[0-9]*/stat")].count(["Z", "1"])
            if not zombies or time.monotonic() > until_s:
                break
            time.sleep(0.05)
        print(orphans, "orphans", zombies, "left", os.environ["KVMPI_ROLE"], flush=True)
    """
    (tmp_path / "orphans.py").write_text(textwrap.dedent(text))
    apart = ["unshare", "--fork", "--pid", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace for processes can be made here")
    job = [sys.executable, "-m", "kvmpi", "run", "-n", "2", "-c", "2", "orphans.py"]
    done = subprocess.run([*apart, *job], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert said == [f"[worker {rank}] 20 orphans 0 left worker" for rank in range(2)], done.stderr
