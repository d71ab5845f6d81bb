"""Clients of several hosts under MPICH's mpirun, or Intel's: ``make test-mpich`` and ``make test-intel`` run this."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANGS_S

from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.errors import ConfigError
from kvmpi.launchers import mpirun

PROGRAM = Path(__file__).parent / "programs" / "sum_on_hosts.py"
TIMEOUT_S = HANGS_S


def has_mpich() -> bool:
    try:
        return mpirun.find(os.environ, 4).kind == "mpich"
    except ConfigError:
        return False


@pytest.mark.skipif(not has_mpich(), reason="no MPICH here: make test-mpich")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="hosts of a lab need root")
def test_clients_over_two_hosts_under_mpich() -> None:
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("needs iproute2 and nsenter")
    with NetLab(2, link=None) as lab:
        for host in range(2):  # UCX, which MPICH uses, looks there for the interfaces of its host
            if subprocess.run(lab.command_on(host, ["mount", "-t", "sysfs", "none", "/sys"]), check=False).returncode:
                pytest.skip("a host of the lab cannot have a /sys of its own here")
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        env["KVMPI_MPIRUN"] = mpirun.find(os.environ, 4).path
        listed = f"{lab.hosts[0]}:3,{lab.hosts[1]}:1"
        for interface in (lab.subnet, "lab0"):
            words = ["--remote-shell", f"{PRIVATE}/agent", "--hosts", listed, "--interface", interface, "-n4", "-s1"]
            done = subprocess.run(
                lab.command_on(0, [sys.executable, "-m", "kvmpi", "run", *words, str(PROGRAM)]), env=env,
                capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            said = sorted(line for line in done.stdout.splitlines() if line.endswith("got 10.0"))
            where_from = [lab.hosts[0]] * 3 + [lab.hosts[1]]
            assert said == [f"[worker {rank}] {name} got 10.0" for rank, name in enumerate(where_from)], done.stdout
