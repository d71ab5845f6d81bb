"""Jobs on several hosts: who runs where, and real jobs on hosts with files, names and process numbers of their own."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import HANGS_S, wait_for

from kvmpi.benchmarks.netlab import PRIVATE, NetLab, cores_of
from kvmpi.config import client_bounds
from kvmpi.errors import ConfigError
from kvmpi.launchers import hosts, reach, remote_exec, where
from kvmpi.launchers.batch import Resources
from kvmpi.launchers.cores import usable
from kvmpi.launchers.hosts import Host
from kvmpi.launchers.remote_exec import own_address

TIMEOUT_S = HANGS_S
PROGRAMS = Path(__file__).with_name("programs")
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)


# ---- who runs where


@pytest.mark.parametrize(("text", "expected"), [
    ("a\nb slots=3 # the big one\n\n# none\nc:2\n", [Host("a", 1), Host("b", 3), Host("c", 2)]),
    ("a\na\nb max_slots=9\n", [Host("a", 2), Host("b", 1)]),
    ("[FD00:0::1]:3\nme@[fd00::2] slots=2\n[fd00::1]", [Host("fd00::1", 4), Host("me@fd00::2", 2)]),
    ("a.b.c:4 slots=2", [Host("a.b.c", 2)]), ("\N{BYTE ORDER MARK}a:2\r\n", [Host("a", 2)]),
])  # fmt: skip
def test_host_files(text: str, expected: list[Host], tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text, encoding="utf-8")
    assert hosts.read_hostfile(str(file)) == expected


@pytest.mark.parametrize(("text", "words"), [
    ("", "names no host"), ("a slots=x", "line 1: 'x' is no number"), ("a\nb cores=3", "line 2: 'cores=3'"),
    ("a:0", "'0' is no number of slots"), ("a:\N{SUPERSCRIPT TWO}", "is no number of slots"),
    ("a\n::1\n", r"line 2: '::1'; an IPv6 address stands in brackets, \[fd00::1\]:2"), ("fd00::2:4", "in brackets"),
    ("[fd00::1]:x", "line 1: 'x' is no number"), ("[fd00::g]", "line 1: .*Only hex"),
    ("a\n[fe80::1] slots=2", "line 2: .*is an address of one link"),
])  # fmt: skip
def test_bad_host_files(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        hosts.read_hostfile(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        hosts.read_hostfile(str(file) + "x")


@pytest.mark.parametrize(("text", "expected"), [
    ("n1", ["n1"]), ("n1,m2", ["n1", "m2"]), ("n[1-3]", ["n1", "n2", "n3"]),
    ("n[08-11,20],gpu", ["n08", "n09", "n10", "n11", "n20", "gpu"]),
    ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
])  # fmt: skip
def test_slurms_short_form(text: str, expected: list[str]) -> None:
    assert hosts.expand_slurm(text) == expected


@pytest.mark.parametrize("text", ["", ",", "n[1-", "n[a-b]", "n[1-2]]", "n[]"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of nodes"):
        hosts.expand_slurm(text)


def test_allocations() -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x3),1"}
    assert hosts.of_slurm(slurm) == [[Host("n1", 2), Host("n2", 2), Host("n3", 2), Host("n4", 1)]]
    assert hosts.of_slurm({"SLURM_JOB_NODELIST": "n1"}) == [], "no allocation without a number"
    with pytest.raises(ConfigError, match="does not fit the 4 nodes"):
        hosts.of_slurm({**slurm, "SLURM_TASKS_PER_NODE": "2(x3)"})
    het = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    het |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2(x2)"}
    het |= {"SLURM_JOB_NODELIST_HET_GROUP_1": "n2,m1", "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "4(x2)"}
    assert hosts.of_slurm(het) == [[Host("n1", 2), Host("n2", 2)], [Host("m1", 4)]]
    lsf = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 2 b 4 "}
    assert hosts.of_lsf(lsf) == [Host("a", 2), Host("b", 4)]
    assert hosts.of_lsf({"LSB_JOBID": "7", "LSB_HOSTS": "a a b"}) == [Host("a", 2), Host("b", 1)]
    assert hosts.of_lsf({"LSB_MCPU_HOSTS": "a 2"}) == []
    with pytest.raises(ConfigError, match="makes no sense"):
        hosts.of_lsf({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a b"})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_a_layout_fills_slots_in_order(slots: list[int], data: st.DataObject) -> None:
    names = [f"h{i}" for i in range(len(slots))]
    workers = data.draw(st.integers(1, sum(slots)))
    clients = data.draw(st.integers(1, workers))
    servers = data.draw(st.integers(0, 6))
    bounds = client_bounds(workers, clients)
    layout = hosts.lay_out([Host(*pair) for pair in zip(names, slots, strict=True)], bounds, servers)
    places = [host.name for client in layout.clients for host in client for _ in range(host.slots)]
    assert places == [name for name, count in zip(names, slots, strict=True) for _ in range(count)][:workers]
    assert [sum(host.slots for host in client) for client in layout.clients] == [end - first for first, end in bounds]
    counts = [layout.servers.count(name) for name in names]
    assert sum(counts) == servers
    assert max(counts) - min(counts) <= 1


def test_servers_on_hosts_of_their_own_and_too_few_slots() -> None:
    two = [Host("a", 2), Host("b", 1)]
    assert hosts.lay_out(two, [(0, 2)], 3, ["s", "t"]).servers == ("s", "t", "s")
    with pytest.raises(ConfigError, match=r"4 workers, and the hosts have 3 slots \(a 2, b 1\)"):
        hosts.lay_out(two, [(0, 4)], 0)


@pytest.mark.parametrize(("text", "expected"), [
    ("a:1, b:02,c ", [Host("a", 1), Host("b", 2), Host("c", 1)]),
    ("[fd00::1]:2,me@[fd00:0::2],n[1-2]", [
        Host("fd00::1", 2), Host("me@fd00::2", 1), Host("n1", 1), Host("n2", 1),
    ]),
    ("n[01-02,7]:2,a,n7", [Host("n01", 2), Host("n02", 2), Host("n7", 3), Host("a", 1)]),
])  # fmt: skip
def test_hosts_in_a_list(text: str, expected: list[Host]) -> None:
    given = {"launcher": "auto", "hostfile": "", "remote_shell": "true", "environ": {}}
    assert where.look(hosts=text, **given)[0] == expected
    places = where.find(hosts="a:2", server_hosts=text, network="lo", bounds=[(0, 1)], num_servers=9, **given)
    assert places is not None
    assert set(places.layout.servers) == {host.name for host in expected}


@pytest.mark.parametrize(("text", "words"), [
    (" ", "expected NAME:WORKERS"), ("a,", "expected NAME:WORKERS"), ("a b:1", "expected NAME:WORKERS"),
    ("a:0", "expected NAME:WORKERS"), ("a:\N{SUPERSCRIPT TWO}", "expected NAME:WORKERS"), ("::1", "in brackets"),
    ("fd00::1:2", "in brackets"), ("[fe80::1]:2", "of one link"), ("[fd00::1%eth0]:2", "of one link"),
    ("[1:2]", "3 parts"), ("[fd00::1]:0", "in brackets"), ("n[1-:2", "no list of nodes"), ("n[1,2", "no list of nodes"),
    ("n[1-20000000]", "more than 1000000 nodes"),
])  # fmt: skip
def test_what_is_no_list_of_hosts(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        where.look("auto", "", text, "true", {})


def test_who_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("srun", "blaunch", "sbatch", "bsub"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def find(launcher: str = "auto", environ: dict[str, str] | None = None, **options: Any) -> Any:
        given = {"hostfile": "", "hosts": "", "server_hosts": "", "remote_shell": "true", "network": "lo", **options}
        return where.find(launcher=launcher, bounds=[(0, 2)], num_servers=1, environ=environ or {}, **given)

    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x1,x2", "SLURM_TASKS_PER_NODE": "1(x2)"}
    assert find(network="") is None
    places = find(hosts="x1:1,x2")
    assert (places.reach.kind, places.here, places.others, places.address) == ("ssh", "", ["x1", "x2"], "127.0.0.1")
    assert find(environ=slurm).reach.kind == "srun"
    assert find(environ={"LSB_JOBID": "7", "LSB_HOSTS": "x1 x2"}).reach.kind == "blaunch"
    one = {**slurm, "SLURM_JOB_NODELIST": "x1", "SLURM_TASKS_PER_NODE": "2"}
    assert find(environ={**one, "SLURMD_NODENAME": "x1"}, network="") is None
    assert find(environ=one).layout.names == ["x1"], "salloc gives a shell here, and a node there"
    three = {**slurm, "SLURM_JOB_NODELIST": "x[1-3]", "SLURM_JOB_CPUS_PER_NODE": "2(x2),1", "SLURM_TASKS_PER_NODE": "1"}
    assert [host.slots for host in hosts.of_slurm({**three, "SLURM_STEP_ID": "0"})[0]] == [2, 2, 1]
    with pytest.raises(ConfigError, match="does not fit the 3 nodes"):
        hosts.of_slurm(three)
    assert find(environ={**one, "SLURMD_NODENAME": "x1"}) is None, "a job script with --interface is also for one node"
    assert find("local", environ=slurm, network="") is None
    assert find(hosts=f"{socket.gethostname()}:2").here == socket.gethostname()
    het = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "x1,x2"}
    het["SLURM_JOB_NODELIST_HET_GROUP_1"] = "y1"
    apart = find(environ=het)
    assert apart.layout.names == ["x1", "x2", "y1"], "servers are where no worker has to be"
    assert "--het-group=1" in apart.reach.command("y1", ["true"])
    assert "--het-group=0" in apart.reach.command("x2", ["true"])
    assert "y1) group=--het-group=1;;" in apart.reach.agent()
    assert find(environ=het, server_hosts="x2").layout.servers == ("x2",)
    for system in ("slurm", "lsf"):
        submitted = find(system)
        assert submitted.reach.is_batch
        assert submitted.layout.names == ["client-0", "server-0"]
        assert submitted.reach.resources["client-0"].tasks == 2
    for error, words, call in (
        (ConfigError, "slurm chooses the hosts", lambda: find("slurm", server_hosts="a")),
        (ConfigError, "--client-hosts 3: expected 1 or more, and a wo", lambda: find("slurm", client_hosts=3)),
        (ConfigError, "--queue is for jobs that are submitted", lambda: find(asked=Resources(queue="q"))),
        (ConfigError, "--requeue is for", lambda: find(hosts="a:2", asked=Resources(requeue=True))),
        (ConfigError, "--client-hosts is for", lambda: find(hosts="a:2", client_hosts=2)),
        (ConfigError, "only one of them", lambda: find(hosts="a", hostfile="b")),
        (ConfigError, "knows its hosts", lambda: find("slurm", hosts="a", environ=slurm)),
        (ConfigError, "expected NAME:WORKERS", lambda: find(hosts="a:b")),
        (ConfigError, "for a job on several hosts", lambda: find(server_hosts="a")),
        (ConfigError, "'no-such-shell' was not found", lambda: find(hosts="a,b", remote_shell="no-such-shell")),
        (ConfigError, "host me@x.invalid: .*; name a network", lambda: find(hosts="me@x.invalid:2", network="")),
        (ConfigError, "--interface no0: .*has no address on 'no0'", lambda: find(hosts="a:2", network="no0")),
    ):
        with pytest.raises(error, match=words):
            call()


def test_addresses() -> None:
    assert own_address("lo", "") == own_address("127.0.0.0/8", "") == own_address("", "127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"^.* has no way to 255\.255\.255\.255: "):  # which needs leave to broadcast
        own_address("", "255.255.255.255")
    spec = {"word": "", "command": [], "env": {}, "kept": [], "cwd": "", "spans": False, "mpirun": False}
    with pytest.raises(OSError, match=r"has no address on 'no0'; it has .*; name a network that .* with --interface$"):
        remote_exec.Remote({**spec, "network": "no0", "towards": ""})


@pytest.mark.parametrize("sign", ["none", "gone"])
def test_orders_end_with_the_launchers_signs_of_life(
    sign: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders come as they are written, for as long as the launcher touches its file; then there is an end of file."""
    clock_s, looks = [0.0], [0]

    def sleep(_: float) -> None:
        looks[0] += 1
        time.sleep(0.002)

    monkeypatch.setattr(remote_exec, "time", SimpleNamespace(monotonic=lambda: clock_s[0], sleep=sleep))
    base = tmp_path / "job"
    orders, alive = Path(f"{base}.orders"), Path(f"{base}.alive")
    orders.write_bytes(b"15\n")
    alive.touch()
    fd = remote_exec.read_orders(str(base))

    def read() -> bytes:
        readable, _, _ = select.select([fd], [], [], TIMEOUT_S)
        assert readable, "neither orders nor an end"
        return os.read(fd, 100)

    def pass_s(seconds: float) -> None:
        clock_s[0] += seconds
        seen = looks[0]
        wait_for(lambda: looks[0] >= seen + 2, "a look at the files")

    assert read() == b"15\n"
    for i in range(5):  # longer than a launcher may be silent
        os.utime(alive, (i, i))
        pass_s(0.0)
        pass_s(remote_exec.LIFE_S - 1.0)
    with orders.open("ab") as file:
        file.write(b"9\n")
    assert read() == b"9\n", "it has taken the launcher for dead"
    os.utime(alive, (9, 9))
    pass_s(0.0)
    if sign == "gone":
        orders.unlink()
    else:
        clock_s[0] += remote_exec.LIFE_S + 0.1
    assert read() == b""
    os.close(fd)


@pytest.mark.parametrize("kind", ["ssh", "srun", "blaunch"])
def test_agents_pass_words_on_to_a_shell_there(kind: str, tmp_path: Path) -> None:
    """As mpirun calls them: options of ssh, the host, and words of which some are for a shell."""
    fake = tmp_path / "way"
    fake.write_text('#!/bin/sh\nhost=${1#--nodelist=}\nshift\n[ $# -gt 1 ] || exec sh -c "$1"\nHOST=$host "$@"\n')
    script = tmp_path / "agent"
    script.write_text(reach.Reach(kind, (str(fake),)).agent())
    for path in (fake, script):
        path.chmod(0o755)
    done = subprocess.run(
        [script, "-x", "node7", "A=1; export A; ", "echo", "$A", '"b  c"'], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 b  c\n"


# ---- hosts that share nothing but the network


class PrivateHosts:
    """Each has process numbers, temporary files, shared memory and a name of its own; ``shell`` reaches them.

    Their network is this machine's, or where ``lab`` has a host of that name.
    """

    def __init__(self, folder: Path, names: list[str], lab: NetLab | None = None) -> None:
        self.names, self._holders = names, {}
        # Not /tmp itself: what is tested may lie there.
        self.temporary = tempfile.mkdtemp(prefix="kv-", dir="/var/tmp")
        for name in names:
            mounts = f"mount -t tmpfs none /dev/shm; mount -t tmpfs none {self.temporary}"
            script = f"{mounts}; hostname {name}; echo up; exec sleep 1000"
            command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "sh", "-c", script]
            if lab is not None:
                command = lab.command_on(lab.hosts.index(name), command)
            holder = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"up\n"
            inner = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]
            self._holders[name] = (holder, int(inner))
        self.shell = folder / "shell"
        cases = "\n".join(f"{name}) pid={inner};;" for name, (_, inner) in self._holders.items())
        self.shell.write_text(
            f'#!/bin/sh\ncase $1 in\n{cases}\n*) echo "no such host" >&2; exit 255;;\nesac\nshift\n'
            f'exec nsenter -t $pid -p -m -u {"" if lab is None else "-n -i"} sh -c "$*"\n'
        )
        self.shell.chmod(0o755)

    def files(self, name: str) -> list[str]:
        """What is in the host's temporary folder and its /dev/shm."""
        root = f"/proc/{self._holders[name][1]}/root"
        return [entry for folder in (self.temporary, "/dev/shm") for entry in os.listdir(root + folder)]

    def processes(self, name: str) -> list[str]:
        """The command lines of its processes, but for the one that holds it open."""
        mine = os.readlink(f"/proc/{self._holders[name][1]}/ns/pid")
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == mine and int(pid) != self._holders[name][1]:
                    found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return [line for line in found if line]  # without those that have ended, whom nobody there asks how

    def pids_of(self, name: str, words: str) -> list[int]:
        """The numbers, seen from here, of the processes there that have these words in their command lines."""
        mine = os.readlink(f"/proc/{self._holders[name][1]}/ns/pid")
        there = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if _link(f"/proc/{pid}/ns/pid") == mine]
        fitting = [pid for pid in there if words in _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode()]
        return sorted(map(int, fitting))

    def close(self) -> None:
        for holder, _ in self._holders.values():
            holder.kill()
            holder.wait()
        os.rmdir(self.temporary)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[PrivateHosts]:
    made = PrivateHosts(tmp_path, ["far1", "far2"])
    try:
        yield made
    finally:
        made.close()


def start(apart: PrivateHosts, *words: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env["TMPDIR"] = apart.temporary
    here = socket.gethostname()
    command = [sys.executable, "-m", "kvmpi", "run", "--remote-shell", str(apart.shell), "--interface", "lo"]
    command += ["--hosts", f"{here}:1,far1:2,far2:1", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_nothing_is_left(apart: PrivateHosts, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    left: dict[str, list[str]] = {}
    while True:
        left = {name: [*apart.processes(name), *apart.files(name)] for name in apart.names}
        if not any(left.values()) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not any(left.values()), left


@needs_root
def test_a_job_on_hosts_that_share_nothing(apart: PrivateHosts, tmp_path: Path) -> None:
    job = start(apart, "-n3", "-c3", "-s2", str(PROGRAMS / "sum_on_hosts.py"), "threads")
    out, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, out + err
    here, cores = socket.gethostname(), usable()
    one, half = f"threads {cores} yield 0", f"threads {max(1, cores // 2)} yield 0"
    assert sorted(out.splitlines()) == [
        f"[worker 0] {here} got 6.0", f"[worker 0] {here} {one}", "[worker 1] far1 got 6.0", f"[worker 1] far1 {half}",
        "[worker 2] far1 got 6.0", f"[worker 2] far1 {half}",
    ]  # fmt: skip
    assert_nothing_is_left(apart)


@needs_root
@pytest.mark.parametrize("end", ["launcher", "interrupt", "server", "worker"])
def test_however_it_ends_nothing_is_left_on_any_host(apart: PrivateHosts, end: str) -> None:
    job = start(apart, "-n2", "-c2", "-s1", str(PROGRAMS / "sum_on_hosts.py"), "wait")
    assert job.stdout is not None
    assert all("got 3.0" in job.stdout.readline() for _ in range(2))
    assert any("kvmpi.ps server" in line for line in apart.processes("far2")), "a server is there"
    assert any(name.startswith("kvmpi-") for name in apart.files("far1"))
    if end in ("launcher", "interrupt"):
        job.send_signal(signal.SIGKILL if end == "launcher" else signal.SIGINT)
        expected, words = (-signal.SIGKILL, "") if end == "launcher" else (130, "stopped by SIGINT")
    else:
        os.kill(apart.pids_of("far2" if end == "server" else "far1", _VICTIMS[end])[0], signal.SIGKILL)
        expected = 137
        words = "server 0 on far2 was killed by SIGKILL" if end == "server" else "on far1 was killed by SIGKILL"
    _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == expected, err
    assert words in err
    assert_nothing_is_left(apart)


_VICTIMS = {"server": "kvmpi.ps server", "worker": "sum_on_hosts.py wait"}


@needs_root
def test_a_host_that_is_not_to_be_reached_is_named(apart: PrivateHosts) -> None:
    job = start(apart, "--server-hosts", "nowhere", "-n1", "-s1", str(PROGRAMS / "sum_on_hosts.py"))
    _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 255
    assert "[server 0] no such host" in err
    assert "server 0 on nowhere ended with exit status 255" in err
    assert_nothing_is_left(apart)


def test_a_remote_shell_that_runs_nothing_is_no_success(tmp_path: Path) -> None:
    """One that takes the host for the command, or its own options for all of it, may well end with 0."""
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\ncat > /dev/null &\nexit 0\n")
    shell.chmod(0o755)
    words = ["--remote-shell", str(shell), "--interface", "lo", "--hosts", "faraway:1", "-n1"]
    done = subprocess.run(
        [sys.executable, "-m", "kvmpi", "run", *words, str(PROGRAMS / "sum_on_hosts.py")],
        env={name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "worker 0 (client 0) on faraway was not heard of" in done.stderr
    assert "see --remote-shell" in done.stderr


def test_secrets_stand_on_no_command_line(tmp_path: Path) -> None:
    """What is to run there is told to a pipe; what the remote shell is given names nothing but our own program."""
    seen = tmp_path / "seen"
    shell = tmp_path / "shell"
    shell.write_text(f'#!/bin/sh\necho "$@" >> {seen}\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("KVMPI_")}, "MY_PASSWORD": "tell-nobody"}
    words = ["--remote-shell", str(shell), "--interface", "lo", "--hosts", "faraway:1", "-n1", "-s1"]
    program = [str(PROGRAMS / "sum_on_hosts.py")]
    done = subprocess.run(
        [sys.executable, "-m", "kvmpi", "run", *words, *program], env=env, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(seen.read_text().splitlines()) == 3, "a watchdog, a server and a worker"
    assert "tell-nobody" not in seen.read_text()
    assert "sum_on_hosts" not in seen.read_text()


# ---- a client on several hosts


@needs_root
def test_one_client_over_two_hosts_of_a_lab(tmp_path: Path) -> None:
    if shutil.which("ip") is None or shutil.which("nsenter") is None:
        pytest.skip("needs iproute2 and nsenter")
    shell = tmp_path / "shell"  # ssh gives nothing on of the environment here
    shell.write_text(f'#!/bin/sh\nexec env -i PATH="$PATH" HOME="$HOME" {PRIVATE}/agent "$@"\n')
    shell.chmod(0o755)
    said = "two\nlines; 'quoted' \"twice\"=, and \u00fc"
    with NetLab(2, link=None) as lab:
        listed = ",".join(f"{name}:2" for name in lab.hosts)
        words = ["--remote-shell", str(shell), "--hosts", listed, "--interface", lab.subnet, "-n4", "-s1"]
        command = [sys.executable, "-m", "kvmpi", "run", *words, str(PROGRAMS / "sum_on_hosts.py")]
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        env["TEST_WORDS"] = said
        done = subprocess.run(
            lab.command_on(0, command), env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        where_from = sorted(line.split()[-3] for line in done.stdout.splitlines() if line.endswith("got 10.0"))
        assert where_from == sorted([*lab.hosts, *lab.hosts]), done.stdout
        heard = sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if "words" in line)
        assert heard == sorted(2 * [f"{name} words {said!a}" for name in lab.hosts]), done.stdout
        assert "Warning" not in done.stdout + done.stderr
        # The cores of a host are for its own workers.
        words[words.index(listed)], words[-2:] = listed.replace(":2", ":1"), ["-n2", "-s0"]
        command = [
            sys.executable,
            "-m",
            "kvmpi",
            "run",
            *words,
            str(PROGRAMS / "sum_on_hosts.py"),
            "mpi",
            "threads",
            "place",
        ]
        done = subprocess.run(
            lab.command_on(0, command), env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        cores = min(usable(), len(cores_of(0, 2, sorted(os.sched_getaffinity(0)))))
        assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if "threads" in line) == [
            f"{name} threads {cores} yield 0" for name in sorted(lab.hosts)
        ], done.stdout
        assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines() if "place" in line) == [
            f"{name} place {number} {number} 0 1" for number, name in enumerate(lab.hosts)
        ], done.stdout
        # A second card on every host, of one network and without a way: Open MPI takes it, unless it is told.
        for host in range(2):
            for step in ("add aa0 type veth peer name aa1", "set aa0 up", "set aa1 up"):
                lab.configure(host, f"ip link {step}")
            lab.configure(host, f"ip address add 10.99.0.{host + 1}/24 dev aa0")
        del words[words.index("--interface") : words.index("--interface") + 2]
        command = [sys.executable, "-m", "kvmpi", "run", *words, str(PROGRAMS / "sum_on_hosts.py"), "mpi"]
        env["KVMPI_TIMEOUT_S"] = "5"
        done = subprocess.run(
            lab.command_on(0, command), env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode != 0, done.stdout + done.stderr
        assert "--interface" in done.stderr, done.stdout + done.stderr
