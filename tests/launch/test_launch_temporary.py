"""The folder for temporary files: none that can be written, and the one that MPI has its shared memory in."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LaunchedJob
from jobs import HANGS_S
from test_launch_kill import needs_mpi

from kvmpi.launchers import watchdog

WITHOUT = str(Path(__file__).parent / "programs" / "without.py")
NO_FILTERS = 77  # its exit status where it cannot refuse anything


def write_nothing() -> None:
    """No file of this process can have a byte, so that Python finds no folder for temporary ones."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("words", ["run program.py", "top --once", "add-server", "doctor --machine"])
def test_a_command_without_a_temporary_folder_says_what_it_wants(tmp_path: Path, words: str) -> None:
    (tmp_path / "program.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "kvmpi", *words.split()], cwd=tmp_path, preexec_fn=write_nothing,
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No usable temporary directory found in" in done.stderr
    assert "set TMPDIR" in done.stderr


@needs_mpi
@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_temporary_files_may_be_in_shared_memory(launch: Callable[..., LaunchedJob], write: Callable[..., str]) -> None:
    text = "from mpi4py import MPI\nimport os\nprint(MPI.COMM_WORLD.allreduce(1), os.environ['KVMPI_JOB_DIR'])"
    program = write("sum.py", text)
    with tempfile.TemporaryDirectory() as short:  # the sockets of a job want a short path
        os.symlink("/dev/shm", f"{short}/shm")
        for folder in ("/dev/shm", f"{short}/shm"):
            job = launch("-n", "2", program, env={"TMPDIR": folder})
            assert job.finish(HANGS_S) == 0, job.stderr
            said = [line.split() for line in job.stdout.splitlines() if line.startswith("[worker")]
            assert [words[2] for words in said] == ["2", "2"]
            assert os.path.dirname(said[0][3]) == folder
            job.assert_nothing_left(said[0][3])


@pytest.mark.parametrize("command", ["-m kvmpi run -c 1 -s 1", ""])
def test_the_temporary_folder_may_have_a_name_in_any_bytes(command: str, tmp_path: Path) -> None:
    """Which addresses of sockets cannot have: these are elsewhere."""
    program = tmp_path / "program.py"
    program.write_text(
        "import kvmpi, numpy as np\nwith kvmpi.create('dist_sync') as kv:\n    kv.init('w', np.arange(3.0))\n"
        "    out = np.zeros(3)\n    kv.pull('w', out)\n    print(out.sum())\n"
    )
    with tempfile.TemporaryDirectory() as short:  # as another one is taken if it is too long
        folder = os.fsencode(short) + b"/\xff\xfe"
        os.mkdir(folder)
        done = subprocess.run(
            [sys.executable, *command.split(), str(program)], env={**os.environb, b"TMPDIR": folder},
            cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-1] == "3.0"
        assert os.listdir(folder) == []


def run_without(calls: str, error: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A job of one worker where the file system of its folder refuses these calls."""
    program = folder / "program.py"
    program.write_text(
        "import fcntl, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDONLY)\n"
        "for call in (lambda: fcntl.flock(fd, fcntl.LOCK_SH), lambda: os.mkfifo(sys.argv[1] + '/fifo')):\n"
        "    try:\n"
        "        call()\n"
        "        print('granted')\n"
        "    except OSError as error:\n"
        "        print('refused', error.errno)\n"
    )
    with tempfile.TemporaryDirectory() as short:
        done = subprocess.run(
            [sys.executable, WITHOUT, error, calls, sys.executable, "-m", "kvmpi", "run", str(program), str(folder)],
            cwd=folder, env={**os.environ, "TMPDIR": short}, capture_output=True, text=True, timeout=HANGS_S,
            check=False,
        )  # fmt: skip
        if done.returncode == NO_FILTERS:
            pytest.skip("no filters of seccomp")
        assert not os.listdir(short), "the job's folder is left"
    return done


def test_a_file_system_without_locks_will_do(tmp_path: Path) -> None:
    done = run_without("flock", "ENOSYS", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"[worker 0] refused {errno.ENOSYS}", "[worker 0] granted"]


def test_a_file_system_without_fifos_is_named(tmp_path: Path) -> None:
    done = run_without("mknod", "EPERM", tmp_path)
    assert done.returncode == 2, done.stderr
    assert "its file system has no FIFOs (Operation not permitted)" in done.stderr
    assert "set TMPDIR to a folder on a local disk" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_has_a_folder_without_locks_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = str(tmp_path / "kvmpi-job")
    fd = watchdog.hold(folder)
    watchdog.let_go(folder, fd)
    os.close(fd)
    assert os.path.isdir(folder), "others may use it"
