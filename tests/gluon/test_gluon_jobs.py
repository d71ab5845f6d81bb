"""kvmpi.mxnet with MXNet itself, in an environment that ``make test-mxnet`` makes: one job with many checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def mxnet_python() -> str:
    """The interpreter that ``MXNET_PYTHON`` names, or that of ``make test-mxnet``."""
    found = os.environ.get("MXNET_PYTHON", str(Path(f"{sys.prefix}-mxnet", "bin", "python")))
    if not Path(found).exists():
        pytest.skip("no environment with MXNet: make test-mxnet makes one where there is Python 3.10")
    return found


def run(command: Sequence[object], timeout_s: float = 400.0) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVMPI_", "DMLC_", "MXNET_"))}
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env={**env, "KVMPI_TIMEOUT_S": "60", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip


def test_two_workers_equal_mxnet_alone(mxnet_python: str, tmp_path: Path) -> None:
    launch = [mxnet_python, "-m", "kvmpi", "run", "-n", "2", "-c", "1", "-s", "1"]
    job = run([*launch, HERE / "gluon_checks.py", tmp_path])
    assert job.returncode == 0, job.stdout + job.stderr
    for rank in range(2):
        assert f"[worker {rank}] all checks passed" in job.stdout.splitlines(), job.stdout + job.stderr


@pytest.mark.parametrize("check", ["batch_sizes", "lists", "many_keys", "loaded"])
def test_what_changes_between_pushes(mxnet_python: str, tmp_path: Path, check: str) -> None:
    launch = [mxnet_python, "-m", "kvmpi", "run", "-n", "2", "-c", "1", "-s", "1"]
    job = run([*launch, HERE / "gluon_changes.py", check, tmp_path])
    assert job.returncode == 0, job.stdout + job.stderr
    for rank in range(2):
        assert f"[worker {rank}] all checks passed" in job.stdout.splitlines(), job.stdout + job.stderr


def test_the_example_of_the_page_runs(mxnet_python: str) -> None:
    page = (ROOT / "docs" / "mxnet.md").read_text()
    program = page.split("```py\n")[1].split("```")[0]
    for launch in ([], ["-m", "kvmpi", "run", "-n", "2", "-c", "2", "-s", "1", "--", mxnet_python]):
        done = run([mxnet_python, *launch, "-c", program])
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("loss") == max(1, 2 * bool(launch)), done.stdout + done.stderr


def test_without_mxnet_the_import_says_what_to_do() -> None:
    done = run([sys.executable, "-c", "import sys; sys.modules['mxnet'] = None; import kvmpi.mxnet"])
    assert done.returncode == 1
    assert "ImportError: kvmpi.mxnet needs MXNet" in done.stderr
    assert "pip install mxnet==1.9.1 numpy==1.23.5" in done.stderr
