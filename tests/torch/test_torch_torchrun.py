"""Programs that torchrun has started, or whoever tells processes what torchrun does: stores and groups without MPI."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANGS_S, LONG_JOB_HANGS_S, wait_for

from kvmpi.benchmarks.netlab import NetLab, address_of
from kvmpi.errors import UnsupportedError

PROGRAMS = Path(__file__).parent / "programs"
CHECKS = PROGRAMS / "torchrun_checks.py"
#: With servers.
HOSTED = Path(__file__).parents[1] / "store" / "programs" / "hosted.py"
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**others: str) -> dict[str, str]:
    """That of a shell, in which no launcher has left anything."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("KVMPI_") and k not in NAMES}
    return {**plain, "OMP_NUM_THREADS": "1", **others}


def started(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def torchrun(num_ranks: int, program: Path, *arguments: str, restarts: int = 0, **settings: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
    command += [f"--max-restarts={restarts}"] if restarts else []
    done = subprocess.run(
        [*command, str(program), *arguments], env=environment(**settings), capture_output=True, text=True,
        timeout=LONG_JOB_HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun_on_two_hosts(lab: NetLab, per_host: int, program: Path, *arguments: str, **settings: str) -> str:
    """Output of all ranks."""
    meet = ["--nnodes=2", f"--nproc-per-node={per_host}", f"--master-addr={address_of(0)}", "--master-port=29500"]
    hosts = []
    for host in (0, 1):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--node-rank={host}",
            *meet,
            str(program),
            *arguments,
        ]
        hosts.append(started(lab.command_on(host, command), environment(**settings)))
    try:
        outputs = [host.communicate(timeout=LONG_JOB_HANGS_S)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], outputs
    return "".join(outputs)


def by_hand(num_ranks: int, size: int, *words: str, program: Path = CHECKS, **others: str) -> list[tuple[int, str]]:
    """Exit status and output of the first ranks of ``size``, which nobody ends when one of them does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    told = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **others}
    command = [sys.executable, str(program), *words]
    environments = [environment(RANK=str(rank), **told) for rank in range(num_ranks)]
    ranks = [started(command, each) for each in environments]
    try:
        outputs = [rank.communicate(timeout=HANGS_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def test_stores_of_three_ranks() -> None:
    checks = ("sums", "gloo_beside", "training", "what_is_refused", "forks", "horovod", "hybrid")
    assert torchrun(3, CHECKS, *checks, KVMPI_NUM_CLIENTS="2").count("all checks passed") == 3


def test_two_ranks_on_each_of_two_hosts(short_folder: Path) -> None:
    try:
        with NetLab(2, link=None) as lab:
            output = torchrun_on_two_hosts(lab, 2, CHECKS, "sums", "training", "meeting_elsewhere")
            settings = {"TMPDIR": str(short_folder), "KVMPI_NUM_CLIENTS": "2", "KVMPI_NUM_SERVERS": "3"}
            with_servers = torchrun_on_two_hosts(lab, 2, HOSTED, "rounds,beside,early", **settings)
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert output.count("all checks passed") == 4, output
    assert with_servers.count("checks are right") == 4, with_servers
    for worker, client, children in (
        *((0, 0, "scheduler and server 0 and server 2"), (1, 0, "none"), (2, 1, "server 1"), (3, 1, "none")),
    ):
        line = f"worker {worker} of 4, client {client} of 2, 3 servers; children: {children}"
        assert line in with_servers, with_servers
    wait_for(lambda: not list(short_folder.glob("kvmpi-*")), "folders of the job are gone")


def test_every_operation_of_torch_distributed() -> None:
    pytest.importorskip("mpi4py")  # kvmpi.torch.c10d works without; that program makes errors of MPI's
    assert torchrun(4, PROGRAMS / "c10d_checks.py", "4").count("all checks passed") == 4


def test_a_rank_that_is_killed_is_named_by_the_others() -> None:
    *others, last = by_hand(3, 3, "killed", KVMPI_TIMEOUT_S="4")
    assert last[0] == -9, last
    for status, output in others:
        assert "MPI rank 2 of this client did not make the call within 4.0 s" in output, output
        assert status == 0, output


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    (first, with_store), (second, without) = by_hand(2, 3, "absent")
    assert "rank 0 of torchrun: the store at 127.0.0.1:" in with_store, with_store
    assert "where all 3 meet: they were not there within 2.0 s" in with_store
    assert "the job of 3 ranks of torchrun, on rank 1 of it: its rank 0, 2 did not come within 2.0 s" in without, (
        without
    )
    assert (first, second) == (0, 0)


def test_a_job_that_says_too_little_does_not_train_alone() -> None:
    [(status, output)] = by_hand(1, 2, "no_port")
    assert status == 0, output


@pytest.mark.parametrize("when", ["soon", "late"])
def test_a_worker_that_is_killed_takes_its_servers_with_it(short_folder: Path, when: str) -> None:
    """And no process is left, and no file, whoever of them sees it first; whoever has not started any takes none."""
    of_starter = by_hand(3, 3, "lost", "0", when, program=HOSTED, TMPDIR=str(short_folder), KVMPI_NUM_SERVERS="2")
    (found,) = re.findall(r"children: ([\d ]+)", of_starter[0][1])
    children = [int(word) for word in found.split()]
    assert len(children) == 3, of_starter
    assert of_starter[0][0] == -9
    for status, output in of_starter[1:]:
        assert "has left; its part of the values is lost" in output, output
        assert status == 0, output
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "servers end with their parent")
    assert not list(short_folder.glob("kvmpi-*"))


FORKED = """
import os, runpy, sys
import torch.multiprocessing as mp

def work(rank):
    os.environ["RANK"] = str(rank)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")

mp.start_processes(work, nprocs=2, start_method="fork")
"""


def test_processes_that_end_without_exit_handlers(short_folder: Path) -> None:
    """As in a notebook: what one has started serves the other to its end all the same."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    command = [sys.executable, "-c", FORKED, str(HOSTED), "early"]
    done = subprocess.run(
        command, env=environment(**told, TMPDIR=str(short_folder)), capture_output=True, text=True, timeout=HANGS_S,
        check=False,
    )  # fmt: skip
    assert done.stdout.count("checks are right: early") == 2, done.stdout + done.stderr
    wait_for(lambda: not list(short_folder.glob("kvmpi-*")), "the folder of the job is gone")


def test_a_job_that_torchrun_starts_again_goes_on_from_its_snapshots(tmp_path: Path, short_folder: Path) -> None:
    settings = {"KVMPI_NUM_SERVERS": "2", "KVMPI_NUM_CLIENTS": "2", "TMPDIR": str(short_folder)}
    often = {"KVMPI_SNAPSHOT_DIR": str(tmp_path / "snapshots"), "KVMPI_SNAPSHOT_EVERY": "10"}
    through = torchrun(3, HOSTED, "goes_on", "-1", **settings)
    again = torchrun(3, HOSTED, "goes_on", "0", restarts=1, **settings, **often)
    begins = re.findall(r"worker \d begins at (\d+)", again)  # two lines may be one, as two processes write them
    assert sorted(begins) in (["0"] * 3 + ["10"] * 3, ["0"] * 3 + ["20"] * 3), again
    bits = re.findall(r"bits ([0-9a-f]{4000})", through + again)
    assert len(bits) == 6
    assert len(set(bits)) == 1
    assert not list(short_folder.glob("kvmpi-*"))
