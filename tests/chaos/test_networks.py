"""Real jobs on hosts between which the network is as real ones are: it forgets connections, loses packets, is slow."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.bad_network import BadNetwork
from jobs import HANGS_S

from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.errors import UnsupportedError

PAUSING = Path(__file__).with_name("pausing.py")
#: A connection without traffic is probed every second; what is sent and not confirmed for so long ends it.
HEARTBEAT_TIMEOUT_S = 4
SETTINGS = {
    "KVMPI_HEARTBEAT_TIMEOUT_S": str(HEARTBEAT_TIMEOUT_S), "KVMPI_RETRY_S": "2", "KVMPI_TIMEOUT_S": "60",
    "PRTE_MCA_oob_tcp_keepalive_time": "1", "PRTE_MCA_oob_tcp_keepalive_intvl": "1",
}  # fmt: skip
#: After so long a firewall forgets a connection, and so long a job pauses. Rings and MPI are probed every second, too.
IDLE_S, PAUSE_S = 4.0, 6.0


@pytest.fixture
def lab() -> Iterator[NetLab]:
    try:
        with NetLab(2, None) as lab:
            yield lab
    except UnsupportedError as error:
        pytest.skip(str(error))


def run(lab: NetLab, options: str, words: list[str], on_line: Callable[[str], None]) -> tuple[int, str]:
    """A job whose launcher is on the first host; its exit status and what it has said, of which each line is shown."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    where = ["--remote-shell", f"{PRIVATE}/agent", "--interface", lab.subnet]
    command = [sys.executable, "-m", "kvmpi", "run", *where, *options.split(), str(PAUSING), *words]
    job = subprocess.Popen(
        lab.command_on(0, command), env=env | SETTINGS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    limit = threading.Timer(HANGS_S, job.terminate)
    limit.start()
    said = []
    assert job.stdout is not None
    for line in job.stdout:
        said.append(line)
        on_line(line)
    status = job.wait()
    limit.cancel()
    return status, "".join(said)


def test_a_firewall_forgets_the_connections_of_a_job_that_pauses(lab: NetLab) -> None:
    """Once it keeps them for less than the pause, but longer than a probe takes; and once it is started anew."""
    found = []
    with BadNetwork(lab) as network:

        def look(line: str) -> None:
            if "pause 0" in line:
                network.be(idle_s=IDLE_S)
            if "pause 1" in line:
                found.append(network.be(idle_s=1e6, forget=True))

        network.be(idle_s=1e6)
        one, other = lab.hosts
        options = f"--hosts {other}:2 --server-hosts {one} -n 2 -c 2 -s 1"
        status, said = run(lab, options, ["dist_sync", str(PAUSE_S), "3,6"], look)
        found.append(network.be())
    assert status == 0, said
    assert said.count("end: 0 wrong elements") == 2, said
    assert "forgotten" not in found[0], f"nothing kept connections known: {found}"
    assert found[1]["forgotten"] > 0, f"the fault never fired: {found}"


def test_a_firewall_forgets_the_connections_of_mpi(lab: NetLab) -> None:
    """Between ranks, and between mpirun and its helpers, which are silent until the ranks end."""
    pytest.importorskip("mpi4py")
    with BadNetwork(lab) as network:

        def look(line: str) -> None:
            if "pause 0" in line:
                network.be(idle_s=IDLE_S)

        network.be(idle_s=1e6)
        options = f"--hosts {','.join(f'{host}:1' for host in lab.hosts)} -n 2"
        status, said = run(lab, options, ["mpi", str(PAUSE_S), "3"], look)
        found = network.be()
    assert status == 0, said
    assert said.count("end: 0 wrong elements") == 2, said
    assert "forgotten" not in found, f"nothing kept connections known: {found}"
