"""The backend of torch.distributed: jobs of ``programs/c10d_checks.py`` and of loops of others; and what it refuses."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import weakref
from collections import deque
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import IN_TURN, LONG_JOB_HANGS_S, run_in_turn, run_job

from kvmpi.collectives import mpi_comm
from kvmpi.engine import Work
from kvmpi.errors import ConfigError, KVTimeoutError
from kvmpi.launchers import mpirun

pytest.importorskip("mpi4py")

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CHECKS = Path(__file__).parent / "programs" / "c10d_checks.py"
SUITE = (
    "test_all_reduce_sum test_all_reduce_coalesced_product test_all_to_all_single_unequal_split test_scatter_checks "
    "test_DistributedDataParallelCPU test_accumulate_gradients_no_sync test_send_recv_any_source test_get_future"
)
HAS_EXPECTTEST, HAS_LIGHTNING, HAS_ACCELERATE = (
    importlib.util.find_spec(name) is not None for name in ("expecttest", "lightning", "accelerate")
)


def output_of(command: list[str], env: dict[str, str], timeout_s: float = LONG_JOB_HANGS_S) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("KVMPI_") and k not in RENDEZVOUS}


def test_works_that_an_older_torch_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ holds none of Python's works there: whoever asked for one and waits for it must find it."""
    from kvmpi.torch.group import work as group_work

    monkeypatch.setattr(group_work, "_held", deque(maxlen=2))
    ended = Work("done")
    ended.finish()
    works = [weakref.ref(group_work.GroupWork(ended)) for _ in range(3)]
    assert [work() is None for work in works] == [True, False, False], "the last two are there"
    works[2]().get_future().wait()
    works[1]().wait()
    assert [work() for work in works] == [None] * 3


@pytest.mark.parametrize(("version", "older"), [("2.3.1", {}), ("2.6.0+cpu", {"use_libuv": False}), ("2.13.0", {})])
def test_an_older_torch_gets_a_server_that_takes_a_socket(
    version: str, older: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default one of torch 2.4 to 2.6 is a NotImplementedError there."""
    import torch

    from kvmpi.torch import rendezvous

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(rendezvous, "_store", None)
    monkeypatch.setattr(rendezvous.dist, "TCPStore", lambda *_, **options: asked.append(options))
    assert rendezvous._serve("127.0.0.1", True, 1.0) > 0
    (options,) = asked
    os.close(options["master_listen_fd"])
    assert {name: value for name, value in options.items() if name == "use_libuv"} == older


def test_alone_without_a_launcher() -> None:
    assert "all checks passed" in output_of([sys.executable, str(CHECKS), "1"], plain_environment())


@functools.cache
def two_workers() -> subprocess.CompletedProcess[str]:
    """One job, since reading torch and its compiler takes longer than most of what it does."""
    programs = list[list[object]]()  # the first finds the meeting place as it is, the last breaks MPI
    if HAS_EXPECTTEST:
        programs.append([CHECKS.parents[1] / "pytorch_suite.py", *SUITE.split()])
    if HAS_LIGHTNING and HAS_ACCELERATE:
        programs.append([CHECKS.with_name("frameworks.py"), 2])
    programs.append([CHECKS, 2])
    words = [word for program in programs for word in ("+", *program)]
    return run_in_turn("-n 2", words[1:], timeout_s=LONG_JOB_HANGS_S)


def test_two_workers_of_which_one_does_not_come() -> None:
    """After what else the job has to do."""
    job = two_workers()
    for worker in (0, 1):
        for line in ("all checks passed", "in time"):
            assert f"[worker {worker}] {line}" in job.stdout, job.stdout + job.stderr
    # A process that gave up on a peer does not wait for it in MPI_Finalize.
    assert job.returncode == 1, job.stdout + job.stderr


@pytest.mark.skipif(not HAS_EXPECTTEST, reason="PyTorch's tests need expecttest")
def test_a_part_of_pytorchs_own_tests() -> None:
    """All of it, and what does not pass: docs/torch-distributed.md."""
    job = two_workers()
    for name in SUITE.split():
        assert f"] {name}: passed\n" in job.stdout, job.stdout + job.stderr


@pytest.mark.skipif(not (HAS_LIGHTNING and HAS_ACCELERATE), reason="needs Lightning and Accelerate")
def test_loops_of_lightning_and_accelerate_train_as_one_process_does() -> None:
    job = two_workers()
    assert job.stdout.count("all train alike") == 2, job.stdout + job.stderr


def test_ranks_in_a_call_hear_of_one_that_leaves() -> None:
    job = run_job("-n 3", CHECKS.with_name("c10d_leaving.py"), "early")
    said = sorted(line for line in job.stdout.splitlines() if line.startswith("[worker"))
    assert said == ["[worker 0] has heard", "[worker 1] leaves", "[worker 2] has heard"], job.stdout + job.stderr
    assert job.returncode == 1, job.stderr  # theirs: they cannot end MPI in good order


def test_three_ranks_under_mpirun_that_may_leave_one_after_the_other(tmp_path: Path) -> None:
    found = mpirun.find(os.environ, 2)
    env = {
        **mpirun.clean(plain_environment()),
        **found.env(str(tmp_path), "", crowded=True, one_host=True),
        "OMP_NUM_THREADS": "1",
    }
    programs = [str(CHECKS), "3", "+", str(CHECKS.with_name("c10d_leaving.py")), "late"]
    output = output_of([*found.command(3, local=True), sys.executable, str(IN_TURN), *programs], env)
    for line in ("all checks passed", "in good order"):
        assert output.count(line) == 3, output


# ---- what is refused, in this process


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``create_group`` in a process that no MPI has started."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "PALS_NRANKS", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in RENDEZVOUS:  # or the import would say where to meet, to this process and to those that it starts
        monkeypatch.setenv(name, "0")
    import kvmpi.torch.c10d  # noqa: F401 - registers the backend
    from kvmpi.torch import rendezvous

    def call(rank: int, size: int, store: Any = None) -> Any:
        options = SimpleNamespace(
            group_rank=rank, group_size=size, timeout=timedelta(seconds=0.3), group_id="7", store=store,
            global_ranks_in_group=[],
        )  # fmt: skip
        return rendezvous.create_group(options, None)

    return call


def test_whoever_is_alone_may_still_start_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning does not, where LOCAL_RANK tells that somebody else has."""
    local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    for name in (*mpi_comm._SIZE_VARIABLES, "PMIX_RANK", *RENDEZVOUS, *local):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    from kvmpi.torch import rendezvous

    monkeypatch.setattr(rendezvous, "_store", None)
    rendezvous.publish()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
    assert not set(local) & set(os.environ)


def test_several_clients_are_no_world(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMPI_ROLE", "worker")
    monkeypatch.setenv("KVMPI_NUM_CLIENTS", "2")
    monkeypatch.setenv("KVMPI_NUM_WORKERS", "4")
    with pytest.raises(ConfigError, match=r"2 clients.*-c 1, or call kvmpi.torch.c10d.make_client_the_world"):
        create(0, 2)


class Meeting:
    """A store of torch's in memory, in which rank 0's entries are already."""

    def __init__(self, **entries: bytes) -> None:
        self.entries = {f"kvmpi/ranks/{name.removeprefix('rank')}": mpi_rank for name, mpi_rank in entries.items()}

    def set(self, key: str, value: bytes) -> None:
        self.entries[key] = value

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError("wait timeout")

    def check(self, keys: list[str]) -> bool:
        return all(key in self.entries for key in keys)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.entries[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        return amount


def test_a_member_that_does_not_come_is_named(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setattr("kvmpi.collectives.mpi_comm.own_rank", lambda: 0)
    with pytest.raises(KVTimeoutError, match=r"its rank 2 did not come within 0.3 s"):
        create(0, 3, Meeting(rank1=b"1"))


def test_members_of_different_mpi_jobs_are_refused(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("kvmpi.collectives.mpi_comm.own_rank", lambda: 0)
    with pytest.raises(ConfigError, match=r"MPI ranks \[0, 0\]"):
        create(0, 2, Meeting(rank1=b"0"))


def test_the_hook_wants_a_store_that_gives_sums_back() -> None:
    import kvmpi
    from kvmpi.torch import ddp_comm_hook

    with pytest.raises(ConfigError, match="expected a store"):
        ddp_comm_hook("dist_sync_mpi")  # type: ignore[arg-type]
    with kvmpi.create("dist_async") as kv, pytest.raises(ConfigError, match="asynchronous"):
        ddp_comm_hook(kv)
