"""The folder for temporary files: none that can be written, and the one that MPI has its shared memory in."""

from __future__ import annotations

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
