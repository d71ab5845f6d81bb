"""A folder for temporary files without room: the job goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from jobs import HANGS_S

PROGRAM = Path(__file__).parent / "programs" / "full.py"


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system wants root")
def test_a_job_goes_on_when_its_temporary_folder_is_full() -> None:
    with tempfile.TemporaryDirectory() as small:  # the sockets of a job want a short path
        run_in(small)


def run_in(small: str) -> None:
    made = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", small], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no small file system: {made.stderr.decode()}")
    options = ["-n", "2", "-c", "2", "-s", "2", "--replicas", "1"]
    job = [sys.executable, "-m", "kvmpi", "run", *options, str(PROGRAM), small]
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    paths = os.pathsep.join([str(PROGRAM.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env.update(TMPDIR=small, PYTHONPATH=paths, KVMPI_TIMEOUT_S="20", KVMPI_HEARTBEAT_TIMEOUT_S="2")
    mounted = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=512k none {small} && exec "$@"', "sh", *job]
    done = subprocess.run(mounted, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all right") == 2, done.stdout + done.stderr
    assert done.stderr.count("its state cannot be written") == 1, "said once, not at every barrier"
