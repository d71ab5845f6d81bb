"""Servers and clients as jobs of a batch system: a real Slurm on this machine, and programs that stand in for LSF."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import environs_with

from kvmpi.launchers.batch import ENDED, RUNS, SYSTEMS, WAITS, Lsf, Resources, Slurm

TIMEOUT_S = 120.0
PROGRAMS = Path(__file__).with_name("programs")
ALL = Resources(4, "long", "physics", "1:00", True, ("--mem=4G",))


# ---- what they understand and say


def test_what_slurm_is_told() -> None:
    words = Slurm().submit("name", "/x y/s.sh", "/o", "/e", ALL)
    assert words[0] == "sbatch"
    assert words[-1] == "/x y/s.sh"
    for option in ("--ntasks=4", "--nodes=1", "--partition=long", "--account=physics", "--time=1:00", "--requeue"):
        assert option in words
    assert "--mem=4G" in words
    assert not [w for w in Slurm().submit("n", "s", "o", "e", Resources()) if w.startswith(("--part", "--acc", "--ti"))]
    assert Slurm().number("123;cluster\n") == "123"
    with pytest.raises(ValueError, match="Batch job refused"):
        Slurm().number("Batch job refused")


def test_what_lsf_is_told() -> None:
    words = Lsf().submit("name", "/x y/s.sh", "/o", "/e", ALL)
    text = " ".join(words)
    for option in ("-J name", "-n 4", "-R span[hosts=1]", "-q long", "-P physics", "-W 1:00", " -r ", "--mem=4G"):
        assert option in text
    assert words[-1] == "'/x y/s.sh'", "bsub gives it to a shell"
    assert Lsf().number("Job <77> is submitted to default queue <normal>.") == "77"
    with pytest.raises(ValueError, match="No such queue"):
        Lsf().number("No such queue")


@pytest.mark.parametrize(("system", "answer", "state"), [
    ("slurm", "PENDING\n", WAITS), ("slurm", "RUNNING", RUNS), ("slurm", "COMPLETED", ENDED), ("slurm", "", ENDED),
    ("slurm", "NODE_FAIL", ENDED), ("slurm", "REQUEUED", WAITS), ("slurm", "COMPLETING", RUNS),
    ("lsf", "PEND", WAITS), ("lsf", "RUN", RUNS), ("lsf", "SSUSP", RUNS), ("lsf", "DONE", ENDED),
    ("lsf", "EXIT", ENDED), ("lsf", "", ENDED),
])  # fmt: skip
def test_states(system: str, answer: str, state: str) -> None:
    assert SYSTEMS[system].state(answer)[0] == state


# ---- real jobs


class Site:
    """A place with a batch system: ``env`` is that of its users, ``folder`` is shared by its hosts."""

    def __init__(self, name: str, folder: Path, env: dict[str, str]) -> None:
        self.name, self.folder = name, folder
        self.mark = f"TEST_MARK={os.urandom(8).hex()}"
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("KVMPI_", "SLURM_", "LSB_"))}
        self.env = {**inherited, **env, "TEST_MARK": self.mark.partition("=")[2]}

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvmpi", "run", "--launcher", self.name, "--interface", "lo"]
        command += ["--batch-dir", str(self.folder), *words]
        return subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *words: str) -> tuple[int, str, str]:
        job = self.start(*words)
        out, err = job.communicate(timeout=TIMEOUT_S)
        return job.returncode, out, err

    def assert_nothing_is_left(self, within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while environs_with(self.mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in environs_with(self.mark)]
        assert not left
        assert os.listdir(self.folder) == []


@pytest.fixture(scope="module")
def slurm() -> Iterator[Site]:
    """slurmctld, three slurmd and munged, of this test alone."""
    needed = ("slurmctld", "slurmd", "munged", "sbatch")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [name for name in needed if shutil.which(name, path=path) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: apt-get install slurm-wlm munge)")
    if os.geteuid() != 0:
        pytest.skip("a Slurm of one's own needs root")
    # Munge wants a socket in folders that nobody else may write to, and /tmp is one.
    home = Path(tempfile.mkdtemp(prefix="kv-slurm-", dir="/var/lib"))
    home.chmod(0o755)
    for name in ("state", "spool", "shared"):
        (home / name).mkdir()
    key = home / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = [_free_port() for _ in range(4)]
    host, nodes = socket.gethostname(), [f"w{i}" for i in (1, 2, 3)]
    (home / "slurm.conf").write_text(
        f"ClusterName=lab\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\nSlurmctldPort={ports[3]}\n"
        f"AuthType=auth/munge\nAuthInfo=socket={home}/munge.sock\nCredType=cred/munge\nStateSaveLocation={home}/state\n"
        f"SlurmdSpoolDir={home}/spool/%n\nSlurmctldPidFile={home}/slurmctld.pid\nSlurmdPidFile={home}/slurmd-%n.pid\n"
        f"SlurmctldLogFile={home}/slurmctld.log\nSlurmdLogFile={home}/slurmd-%n.log\nProctrackType=proctrack/pgid\n"
        "TaskPlugin=task/none\nSwitchType=switch/none\nSelectType=select/cons_tres\nSelectTypeParameters=CR_Core\n"
        "ReturnToService=2\nMpiDefault=none\nSchedulerParameters=batch_sched_delay=0,sched_interval=1\n"
        + "".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"
            for name, port in zip(nodes, ports, strict=False)
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
    daemons = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, env=whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(0.5)
        deadline = time.monotonic() + TIMEOUT_S
        words = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        while subprocess.run(words, env=whole, capture_output=True, text=True, check=False).stdout.strip() != "3":
            assert time.monotonic() < deadline, (home / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.3)
        yield Site("slurm", home / "shared", env)
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


@pytest.fixture
def lsf(tmp_path: Path) -> Site:
    for name in ("bin", "jobs", "shared"):
        (tmp_path / name).mkdir()
    for name in ("bsub", "bjobs", "bkill"):
        program = tmp_path / "bin" / name
        program.write_text(f"#!{sys.executable} -IS\n" + (PROGRAMS / "lsf" / "lsf.py").read_text())
        program.chmod(0o755)
    return Site("lsf", tmp_path / "shared", {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LSF_STANDIN": str(tmp_path / "jobs"),
    })  # fmt: skip


@pytest.fixture(params=["slurm", "lsf"])
def site(request: pytest.FixtureRequest) -> Site:
    found: Site = request.getfixturevalue(request.param)
    return found


def test_every_server_and_client_is_a_job(site: Site, tmp_path: Path) -> None:
    status, out, err = site.run("-n3", "-c2", "-s2", "--queue", "long", str(PROGRAMS / "sum_on_hosts.py"))
    assert status == 0, out + err
    assert sorted(line.partition("] ")[2] for line in out.splitlines()) == [f"{socket.gethostname()} got 6.0"] * 3
    site.assert_nothing_is_left()
    if site.name == "lsf":
        asked = [ast.literal_eval(file.read_text())[0] for file in sorted((tmp_path / "jobs").glob("*/words"))]
        assert sorted((a["-J"].split("-", 2)[2], a["-n"], a["-q"]) for a in asked) == [
            ("client-0", "2", "long"), ("client-1", "1", "long"), ("server-0", "1", "long"), ("server-1", "1", "long"),
        ]  # fmt: skip


@pytest.mark.parametrize("end", ["interrupt", "launcher", "cancelled"])
def test_however_it_ends_no_job_is_left(site: Site, end: str, tmp_path: Path) -> None:
    job = site.start("-n2", "-c2", "-s1", str(PROGRAMS / "sum_on_hosts.py"), "wait")
    assert job.stdout is not None
    assert all("got 3.0" in job.stdout.readline() for _ in range(2))
    if end == "cancelled":
        if site.name == "slurm":
            words = ["squeue", "--noheader", "--format=%i %j"]
            listed = subprocess.run(words, env=site.env, capture_output=True, text=True, check=True).stdout
            (number,) = [line.split()[0] for line in listed.splitlines() if line.endswith("client-1")]
            subprocess.run(["scancel", number], env=site.env, check=True)
        else:
            (number,) = [f.parent.name for f in (tmp_path / "jobs").glob("*/words") if "client-1" in f.read_text()]
            subprocess.run(["bkill", number], env=site.env, check=True, stdout=subprocess.DEVNULL)
    else:
        job.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
    _, err = job.communicate(timeout=TIMEOUT_S)
    if end == "interrupt":
        assert job.returncode == 130
    elif end == "cancelled":
        assert job.returncode in (130, 143), err
        assert "worker 1 (client 1)" in err
    site.assert_nothing_is_left()


def test_a_failure_in_a_job_is_the_failure_of_all(site: Site, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import sys\nprint('no good', file=sys.stderr)\nsys.exit(3)\n")
    status, _, err = site.run("-n1", str(program))
    assert status == 3
    assert "[worker 0] no good" in err
    assert "worker 0 (client 0) on client-0 ended with exit status 3" in err
    site.assert_nothing_is_left()


def test_a_job_that_is_refused_says_why(lsf: Site) -> None:
    status, _, err = lsf.run("-n1", "--queue", "nosuch", str(PROGRAMS / "sum_on_hosts.py"))
    assert status == 1
    assert "bsub refuses with status 255: nosuch: No such queue" in err
    lsf.assert_nothing_is_left()


def test_a_job_that_waits_is_told_and_can_be_given_up(lsf: Site) -> None:
    lsf.env["LSF_WAIT_S"] = "for ever"
    job = lsf.start("-n1", str(PROGRAMS / "sum_on_hosts.py"))
    assert job.stderr is not None
    assert "client-0 waits in the queue (PEND)" in job.stderr.readline()
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 130
    lsf.assert_nothing_is_left()


def test_inside_an_allocation_of_slurm(slurm: Site) -> None:
    command = ["salloc", "-Q", "-N3", "--ntasks-per-node=1", sys.executable, "-m", "kvmpi", "run", "--interface", "lo"]
    command += ["-n3", "-c3", "-s2", str(PROGRAMS / "sum_on_hosts.py")]
    done = subprocess.run(command, env=slurm.env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.split("]")[0] for line in done.stdout.splitlines()) == [f"[worker {i}" for i in range(3)]
    assert done.stdout.count("got 6.0") == 3
    assert done.stderr == ""
    slurm.assert_nothing_is_left()
