"""Places with a batch system: a real Slurm on this machine, and programs that stand in for LSF."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jobs import HANGS_S, command_line, environs_with

from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.errors import UnsupportedError

TIMEOUT_S = HANGS_S
PROGRAMS = Path(__file__).with_name("programs")


class Site:
    """A place with a batch system: ``env`` is that of its users, ``folder`` is shared by its hosts.

    Its hosts are those of ``lab``; without one, they are this machine under several names.
    """

    def __init__(self, name: str, folder: Path, env: dict[str, str], lab: NetLab | None = None) -> None:
        self.name, self.folder, self.lab = name, folder, lab
        self.network = "lo" if lab is None else lab.subnet
        self.mark = f"TEST_MARK={os.urandom(8).hex()}"
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("KVMPI_", "SLURM_", "LSB_"))}
        self.env = {**inherited, **env, "TEST_MARK": self.mark.partition("=")[2]}

    def on(self, command: list[str]) -> list[str]:
        """The words that run a command on the first host."""
        return command if self.lab is None else self.lab.command_on(0, command)

    def start(self, *words: str, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        command = [*prefix, sys.executable, "-m", "kvmpi", "run", "--launcher", self.name, "--interface", self.network]
        command += ["--batch-dir", str(self.folder), *words]
        return subprocess.Popen(
            self.on(command), env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        job = self.start(*words)
        out, err = job.communicate(timeout=TIMEOUT_S)
        return job.returncode, out, err

    def job_id(self) -> str:
        """Of the job that runs."""
        (found,) = {env["KVMPI_JOB_ID"] for env in environs_with(self.mark).values() if "KVMPI_JOB_ID" in env}
        return found

    def files_of(self, job_id: str) -> list[str]:
        """What a job has, or has left, in temporary folders, which all hosts share, and in shared memory."""
        found = [path for folder in ("/tmp", "/var/tmp", "/dev/shm") for path in glob.glob(f"{folder}/*{job_id}*")]
        for host in () if self.lab is None else range(len(self.lab.hosts)):
            command = self.lab.command_on(host, ["ls", "/dev/shm"])
            names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            found += [f"{host}:/dev/shm/{name}" for name in names if job_id in name]
        return found

    def assert_nothing_is_left(self, within_s: float = 10.0, job_id: str = "") -> None:
        deadline = time.monotonic() + within_s
        while environs_with(self.mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [command_line(pid) for pid in environs_with(self.mark)]
        assert not left, left
        assert os.listdir(self.folder) == []
        while job_id and self.files_of(job_id) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not job_id or self.files_of(job_id) == []


@contextlib.contextmanager
def slurm_site() -> Iterator[Site]:
    """slurmctld, three slurmd and munged, of these tests alone."""
    needed = ("slurmctld", "slurmd", "munged", "sbatch")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [name for name in needed if shutil.which(name, path=path) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own needs root")
    with contextlib.ExitStack() as stack:
        try:
            lab = stack.enter_context(NetLab(3, link=None))
        except UnsupportedError:
            lab = None  # then its nodes have one name and one address
        yield from _slurm(lab, path)


def _slurm(lab: NetLab | None, path: str) -> Iterator[Site]:
    # Munge wants a socket in folders that nobody else may write to, and /tmp is one.
    home = Path(tempfile.mkdtemp(prefix="kv-slurm-", dir="/var/lib"))
    home.chmod(0o755)
    for name in ("state", "spool", "shared%j"):  # sbatch understands patterns
        (home / name).mkdir()
    key = home / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = [_free_port() for _ in range(4)]
    (home / "tmp").mkdir()
    host, nodes = socket.gethostname(), [f"w{i}" for i in (1, 2, 3)]
    hosts, addresses = [host] * 3, ["127.0.0.1"] * 3
    if lab is not None:
        host, nodes, hosts, addresses = lab.hosts[0], lab.hosts, lab.hosts, lab.addresses
    for node in nodes:
        (home / "tmp" / node).mkdir()
    (home / "slurm.conf").write_text(
        f"ClusterName=lab\nSlurmctldHost={host}({addresses[0]})\nSlurmUser=root\nSlurmdUser=root\nSlurmctldPort={ports[3]}\n"
        f"AuthType=auth/munge\nAuthInfo=socket={home}/munge.sock\nCredType=cred/munge\nStateSaveLocation={home}/state\n"
        f"SlurmdSpoolDir={home}/spool/%n\nSlurmctldPidFile={home}/slurmctld.pid\nSlurmdPidFile={home}/slurmd-%n.pid\n"
        f"SlurmctldLogFile={home}/slurmctld.log\nSlurmdLogFile={home}/slurmd-%n.log\nProctrackType=proctrack/pgid\n"
        f"TmpFS={home}/tmp/%n\n"  # what PMIx puts there has the same name on each of these nodes
        "TaskPlugin=task/none\nSwitchType=switch/none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n"
        "ReturnToService=2\nMpiDefault=none\nSchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1\n"
        + "".join(
            f"NodeName={name} NodeHostname={hostname} NodeAddr={address} Port={port} CPUs=2\n"
            for name, hostname, address, port in zip(nodes, hosts, addresses, ports, strict=False)
        )
        + f"PartitionName=long Nodes={','.join(nodes)} Default=YES MaxTime=INFINITE State=UP\n"
    )
    env = {"SLURM_CONF": str(home / "slurm.conf"), "PATH": path}
    whole = {**os.environ, **env}
    commands = [
        ["munged", "-F", f"--socket={home}/munge.sock", f"--key-file={key}", f"--pid-file={home}/munged.pid",
         f"--log-file={home}/munged.log", f"--seed-file={home}/munge.seed"],
        ["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in nodes),
    ]  # fmt: skip
    if lab is not None:
        places = [0, 0, 0, 1, 2]
        commands = [lab.command_on(place, command) for place, command in zip(places, commands, strict=True)]
    daemons = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(0.5)
        deadline = time.monotonic() + TIMEOUT_S
        words = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        words = words if lab is None else lab.command_on(0, words)
        while subprocess.run(words, env=whole, capture_output=True, text=True, check=False).stdout.strip() != "3":
            assert time.monotonic() < deadline, (home / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.3)
        yield Site("slurm", home / "shared%j", env, lab)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(home, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lsf_site(folder: Path, lab: NetLab | None = None) -> Site:
    """Programs that stand in for those of LSF, on the hosts of ``lab`` or this one; everything is in ``folder``."""
    for name in ("bin", "jobs", "shared"):
        (folder / name).mkdir()
    for name in ("bsub", "bjobs", "bkill", "blaunch"):
        program = folder / "bin" / name
        program.write_text(f"#!{sys.executable} -IS\n" + (PROGRAMS / "lsf" / "lsf.py").read_text())
        program.chmod(0o755)
    env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "LSF_STANDIN": str(folder / "jobs")}
    if lab is not None:
        env |= {"LSF_HOSTS": " ".join(lab.hosts), "LSF_SHELL": f"{PRIVATE}/agent"}
    return Site("lsf", folder / "shared", env, lab)


def jsm_site(folder: Path, lab: NetLab, mpirun: str) -> Site:
    """Inside a job of LSF with jsrun: the first host starts what runs on the others, which have four cores."""
    site = lsf_site(folder, lab)
    program = folder / "bin" / "jsrun"
    program.write_text(f"#!{sys.executable} -IS\n" + (PROGRAMS / "lsf" / "jsrun.py").read_text())
    program.chmod(0o755)
    first, *others = lab.hosts
    site.env |= {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": " ".join([f"{first} 1", *(f"{name} 4" for name in others)])}
    site.env |= {"LSF_MPIRUN": mpirun, "LSF_NETWORK": lab.subnet, "LSF_GPUS": "2"}
    return site
