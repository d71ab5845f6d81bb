"""Jobs on hosts that have only IPv6 addresses, in network namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import HANGS_S

from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.machine import read_text

PROGRAM = str(Path(__file__).with_name("programs") / "sum_on_hosts.py")

needs_lab = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("nsenter") is None or shutil.which("ip") is None
    or not read_text("/proc/net/if_inet6"), reason="needs root, iproute2, nsenter and IPv6",
)  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    with NetLab(2, link=None, ipv6=True) as made:
        yield made


@pytest.fixture(scope="module")
def shell(lab: NetLab, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Like ssh: it takes names and addresses, with a user or without, and gives nothing on of the environment."""
    path = tmp_path_factory.mktemp("shell") / "shell"
    cases = "\n".join(f"{at}|*@{at}) host={name};;" for name, at in zip(lab.hosts, lab.addresses, strict=True))
    path.write_text(
        f'#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n{cases}\nesac\n'
        f'exec env -i PATH="$PATH" HOME="$HOME" PYTHONPATH="$PYTHONPATH" {PRIVATE}/agent "$host" "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


def kvmpi(lab: NetLab, *words: str, **settings: str) -> list[str]:
    """What a command on the first host prints, without who says so."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")} | settings
    command = lab.command_on(0, [sys.executable, "-m", "kvmpi", *words])
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line.partition("] ")[2] or line for line in done.stdout.splitlines())


@needs_lab
def test_a_client_on_each_host_with_servers(lab: NetLab, shell: str) -> None:
    (one, two), (at, there) = lab.hosts, lab.addresses
    listed = ("--remote-shell", shell, "--hosts", f"[{at}]:2,me@[{there}]:2")
    said = kvmpi(lab, "run", *listed, "-n4", "-c2", "-s2", PROGRAM)
    assert said == sorted([f"{one} got 10.0"] * 2 + [f"{two} got 10.0"] * 2)
    # And what is there to look at hosts.
    found = [line for line in kvmpi(lab, "doctor", *listed) if line.startswith(("ok", "problem"))]
    assert not [line for line in found if line.startswith("problem")], found
    assert any(f"reached me@{there} {there}" in line for line in found), found
    assert any(line.split()[1:4] == ["interface", "lab0", at] for line in found), "that to the hosts, not the internet"


@needs_lab
def test_one_client_over_both_hosts(lab: NetLab, shell: str) -> None:
    """MPI between them, rings over connections of their own, and what torch.distributed meets by."""
    (one, two), (at, there) = lab.hosts, lab.addresses
    listed = ("--remote-shell", shell, "--hosts", f"[{at}],me@[{there}]", "--interface", lab.subnet)
    said = kvmpi(lab, "run", *listed, "-n2", PROGRAM, "mpi", "place", KVMPI_RING_TRANSPORT="tcp")
    expected = [f"{one} got 3.0", f"{two} got 3.0", f"{one} place 0 0 0 1", f"{two} place 1 1 0 1"]
    assert said == sorted(expected)
