"""A rank that is stopped or killed in any phase of any algorithm: the others say so in time, and nothing is left."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mpi_jobs
import psutil
import pytest
from jobs import HANGS_S

pytest.importorskip("mpi4py")

CASES = [
    "slots-begin", "slots-post", "staged-post", "staged-sum", "staged-deliver", "attached-post", "attached-sum",
    "attached-deliver", "attached-finish", "ring-start", "ring-reduce", "ring-gather", "multi_ring",
    "hierarchical-post", "hierarchical-ring", "hierarchical-finish", "naive", "mpi",
    "linked-start", "linked-reduce", "linked-multi_ring", "linked-hierarchical",
    "native-slots", "native-start", "native-reduce", "native-multi_ring", "native-hierarchical",
    "scatter-slots", "scatter-attached", "scatter-ring", "scatter-hierarchical", "scatter-native", "scatter-mpi",
    "gather-slots", "gather-attached", "gather-multi_ring", "gather-naive", "gather-native",
    "gather-native-hierarchical", "gather-mpi",
    "cast-post", "cast-read", "cast-naive", "cast-hierarchical", "cast-mpi",
]  # fmt: skip


@pytest.fixture
def kind() -> str:
    if "openmpi" not in mpi_jobs.installed():
        pytest.skip("no OpenMPI here")
    return "openmpi"


def assert_no_shared_file_is_left(folder: Path) -> None:
    """None of those in /dev/shm that the ranks had; others belong to somebody else."""
    had = {path for note in folder.glob("mapped*") for path in note.read_text().splitlines()}
    assert had, "Open MPI's ranks share memory"
    left = [path for path in had if os.path.exists(path)]
    assert not left, f"left behind: {left}"


@pytest.mark.parametrize("size", [2, 4])
def test_a_stopped_rank_is_named_by_all_others_in_time(kind: str, size: int, tmp_path: Path) -> None:
    few = ["slots-post", "staged-sum", "attached-deliver", "ring-reduce", "ring-gather", "mpi", "linked-reduce"]
    cases = CASES if size > 2 else [*few, "native-reduce"]

    def run(number: int) -> None:
        mine, folder = cases[number::2], tmp_path / str(number)
        folder.mkdir()
        arguments = (folder, int(signal.SIGSTOP), *mine)
        mpi_jobs.run(kind, size, "failure_checks.py", *arguments, folder=folder, timeout_s=HANGS_S)
        for rank in range(size):
            assert (folder / f"reported{rank}").read_text().splitlines() == mine
        assert {path.name for path in folder.glob("struck-*")} == {f"struck-{case}" for case in mine}
        assert_no_shared_file_is_left(folder)

    with ThreadPoolExecutor() as both:  # most of the time they wait
        list(both.map(run, range(2)))


@pytest.mark.parametrize("case", ["attached-sum", "hierarchical-ring", "linked-reduce", "native-reduce"])
def test_a_killed_rank_ends_the_job_and_leaves_nothing(kind: str, case: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit status"):
        mpi_jobs.run(
            kind, 4, "failure_checks.py", tmp_path, int(signal.SIGKILL), case, folder=tmp_path, timeout_s=HANGS_S
        )
    assert (tmp_path / f"struck-{case}").exists()
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert len(pids) == 4
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    psutil.wait_procs(left, timeout=5.0)
    left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left, "a rank outlived the job"
    assert_no_shared_file_is_left(tmp_path)
