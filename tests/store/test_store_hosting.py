"""Servers that workers start by themselves, as nobody else has: who starts what, and whole jobs below a bare mpirun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANGS_S, wait_for

from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.launchers import mpirun
from kvmpi.store import hosting
from kvmpi.store.hosting import Plan

PROGRAM = Path(__file__).parent / "programs" / "hosted.py"


@pytest.mark.parametrize(
    ("hosts", "num_servers", "first", "starters"),
    [
        (["a"], 0, [0], [0]),
        (["a", "a", "a"], 3, [0, 0, 0], [0, 0, 0]),
        (["a", "a", "b", "b"], 0, [0, 0, 2, 2], [0, 2]),
        (["a", "b", "a", "c", "b"], 5, [0, 1, 0, 3, 1], [0, 1, 3, 0, 1]),
        (["a", "b", "c"], 1, [0, 1, 2], [0]),
    ],
)
def test_servers_go_to_all_hosts_in_turn(hosts, num_servers, first, starters):
    plan = Plan.of(hosts, num_servers)
    assert (plan.first, plan.starters) == (first, starters)
    assert plan.firsts == sorted(set(first))


def test_the_address_that_others_reach(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    bridge = ("172.17.0.1", 0)
    own = [bridge, ("10.1.0.5", 0), ("192.168.7.2", 0)]
    assert hosting._facing(own, [bridge, ("192.168.7.9", 0)]) == "192.168.7.2", "a bridge has one address everywhere"
    assert hosting._facing([("fd00::1", 0)], [("fd00::2", 0)]) == "fd00::1"
    monkeypatch.setenv("MASTER_ADDR", "10.1.0.5")
    assert hosting._facing(own, [bridge, ("192.168.7.9", 0)]) == "10.1.0.5", "where all others were already"
    with pytest.raises(ConfigError, match="KVMPI_INTERFACE names a network"):
        hosting._facing([bridge], [bridge])


def test_a_scheduler_that_is_not_reached():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert hosting._towards(endpoint) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"does not reach the scheduler at tcp://127.0.0.1:.*KVMPI_INTERFACE"):
        hosting._towards(endpoint)


AGAIN = {"TORCHELASTIC_RESTART_COUNT": ("0", "1"), "SLURM_RESTART_COUNT": ("0", "2"), "LSB_RESTART": ("N", "Y")}


@pytest.mark.parametrize("name", list(AGAIN))
def test_a_job_that_is_started_once_more_goes_on(monkeypatch, tmp_path, name):
    first, again = AGAIN[name]
    config = Config(snapshot_dir=str(tmp_path), snapshot_every=10)
    monkeypatch.setenv(name, again)
    assert hosting._of_before(config) == "", "there is nothing to go on from"
    (tmp_path / "00000010").mkdir()
    monkeypatch.setattr(hosting, "complete", lambda folder: [10])
    assert hosting._of_before(config) == str(tmp_path)
    assert hosting._of_before(Config()) == ""
    monkeypatch.setenv(name, first)
    assert hosting._of_before(config) == ""


def test_a_shape_in_the_environment_of_a_program_that_is_alone(monkeypatch):
    """It is for jobs: how many workers there are, nobody has said."""
    monkeypatch.setenv("KVMPI_NUM_CLIENTS", "3")
    assert Config.from_env().num_clients == 3
    with pytest.raises(ConfigError, match="3 clients for 2 workers"):
        Config.from_env(role="worker", num_workers=2)


def below_mpirun(num_ranks: int, folder: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """As a user would start it, whose MPI it is."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    mpi = mpirun.find(env, num_ranks)
    env |= {**mpi.env(str(folder), "", crowded=True, one_host=True), "OMP_NUM_THREADS": "1", **settings}
    command = [*mpi.command(num_ranks, local=True), sys.executable, str(PROGRAM), *words]
    return subprocess.run(
        command, env=mpirun.clean(env) | settings, capture_output=True, text=True, timeout=HANGS_S, check=False
    )


def test_ranks_of_mpi_start_servers_themselves(tmp_path, short_folder):
    checks = "rounds,beside,refused,early"
    settings = {"KVMPI_NUM_SERVERS": "2", "KVMPI_NUM_CLIENTS": "2", "KVMPI_REPLICAS": "1"}
    done = below_mpirun(3, tmp_path, checks, TMPDIR=str(short_folder), **settings)
    assert done.stdout.count(f"checks are right: {checks}") == 3, done.stdout + done.stderr
    assert done.returncode == 0
    assert "kvmpi: server 1, which process" in done.stderr, "it did not die"
    for line in (
        "worker 0 of 3, client 0 of 3, 2 servers; children: scheduler and server 0 and server 1",
        "worker 1 of 3, client 0 of 2, 2 servers; children: none",
        "worker 2 of 3, client 1 of 2, 2 servers; children: none",
    ):
        assert line in done.stdout, done.stdout
    wait_for(lambda: not list(short_folder.glob("kvmpi-*")), "folders of the job are gone")


def test_what_cannot_be_started_is_an_error_of_all(tmp_path, short_folder):
    done = below_mpirun(2, tmp_path, "different,cannot_start", TMPDIR=str(short_folder))
    assert done.stdout.count("checks are right") == 2, done.stdout + done.stderr
    assert "said: server 0 has ended with status 1" in done.stdout
    assert "said: worker 0 could not start what it is to start for this job: ConfigError: server 0" in done.stdout
    assert "server 0 cannot import 'no_such_module_of_rules'" in done.stderr
    assert not list(short_folder.glob("kvmpi-*"))
