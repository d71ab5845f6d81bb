"""Hosts made of namespaces: their links have the speed that was asked for, and nothing of them is ever left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvmpi.benchmarks import netlab
from kvmpi.benchmarks.netlab import NetLab, cores_of
from kvmpi.errors import ConfigError, KVError, UnsupportedError
from kvmpi.launchers import mpirun

#: What a lab needs, asked for without the code under test: a mistake in it must not look like a machine that cannot.
PROBE = """
unshare --net --uts --ipc --mount sh -e -c '
    hostname kvmpi-probe
    mount -t tmpfs probe /dev/shm
    ip link add name bridge type bridge
    ip link add name a type veth peer name b
    tc qdisc add dev a root tbf rate 1gbit burst 640kb latency 200ms
'"""
TIMEOUT_S = 30.0


def why_not() -> str:
    """Why this machine cannot have a lab, or an empty string."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a lab needs Linux and root"
    if missing := [name for name in ("ip", "tc", "nsenter") if shutil.which(name, path=netlab.search_path()) is None]:
        return f"not found: {', '.join(missing)} (packages iproute2, util-linux)"
    env = {**os.environ, "PATH": netlab.search_path()}
    done = subprocess.run(["sh", "-c", PROBE], env=env, capture_output=True, text=True, check=False)
    return f"this machine allows no network namespaces: {done.stderr.strip()}" if done.returncode else ""


WHY_NOT = why_not()
needs_lab = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "a lab works here")

RECEIVER = """
import socket, sys, time
listener = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("up", flush=True)
connection, _ = listener.accept()
start, nbytes, buffer = time.monotonic(), 0, bytearray(1 << 20)
while got := connection.recv_into(buffer):
    nbytes += got
print(nbytes, start, time.monotonic())
"""
SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
connection.sendall(bytes(int(sys.argv[3])))
"""


def start(lab: NetLab, host: int, *command: object) -> subprocess.Popen[str]:
    """Start a command and wait for its first line, ``up``."""
    process = subprocess.Popen(lab.command_on(host, [*map(str, command)]), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    return process


def run(lab: NetLab, host: int, *command: object) -> subprocess.CompletedProcess[str]:
    words = lab.command_on(host, [*map(str, command)])
    return subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def python(script: str, *arguments: object) -> list[object]:
    return [sys.executable, "-S", "-c", script, *arguments]


def measure_bytes_per_s(lab: NetLab, flows: list[tuple[int, int]], nbytes: int) -> float:
    """Send ``nbytes`` by TCP for every (source, target), all at once; what they got through together."""
    receivers = [start(lab, target, *python(RECEIVER, 5000 + i)) for i, (_, target) in enumerate(flows)]
    senders = [
        subprocess.Popen(lab.command_on(source, [*map(str, python(SENDER, lab.addresses[target], 5000 + i, nbytes))]))
        for i, (source, target) in enumerate(flows)
    ]
    lines = [receiver.communicate(timeout=TIMEOUT_S)[0].split() for receiver in receivers]
    assert [sender.wait(TIMEOUT_S) for sender in senders] == [0] * len(flows)
    assert [int(received) for received, _, _ in lines] == [nbytes] * len(flows)
    return nbytes * len(flows) / (max(float(end) for *_, end in lines) - min(float(begin) for _, begin, _ in lines))


def wait_until(condition, what, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


class Traces:
    """Whatever a lab may leave behind: processes, namespaces, interfaces, mounts, files."""

    def __init__(self):
        self._held = []
        self._links = set()
        self._names = set()
        self._before = self._visible()

    def note(self, pid, host_name):
        """``pid`` runs on a host of the lab. Its namespace is held, so that no other one gets the same number."""
        self._held.append(os.open(f"/proc/{pid}/ns/net", os.O_RDONLY))
        self._links.add(f"net:[{os.fstat(self._held[-1]).st_ino}]")
        self._names.add(host_name.rpartition("-")[0])
        assert os.readlink("/proc/self/ns/net") not in self._links

    def processes(self):
        """Those that run in a namespace of the lab or hold one open."""
        found = {}
        for pid in set(map(int, filter(str.isdigit, os.listdir("/proc")))) - {os.getpid()}:
            with contextlib.suppress(OSError):
                paths = [f"/proc/{pid}/ns/net", *(f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd"))]
                if any(self._read(path) in self._links for path in paths):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        return found

    def assert_none(self):
        try:
            assert self._links
            wait_until(lambda: not self.processes(), lambda: f"still there: {self.processes()}")
            assert self._visible() <= self._before
            for folder in ("/tmp", "/dev/shm"):
                assert not [path for path in os.listdir(folder) if any(name in path for name in self._names)]
        finally:
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            for fd in self._held:
                os.close(fd)

    @staticmethod
    def _read(path):
        with contextlib.suppress(OSError):
            return os.readlink(path)

    @staticmethod
    def _visible():
        interfaces = {f"interface {name}" for _, name in socket.if_nameindex()}
        mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        return interfaces | mounts | {str(path) for path in Path("/run").glob("netns/*")}


@pytest.fixture(scope="module")
def lab():
    with NetLab(4, "1gbit") as lab:
        yield lab


@needs_lab
@pytest.mark.parametrize(
    "flows",
    [[(0, 1)], [(1, 0)], [(0, 3), (1, 3)], [(3, 0), (3, 1)]],
    ids=["there", "back", "towards one host", "away from one host"],
)
def test_tcp_reaches_the_rate_of_the_link_and_no_more(lab, flows):
    shares = []
    while len(shares) < 5 and max(shares, default=0.0) < 0.85:  # a busy machine may be too slow once
        shares.append(measure_bytes_per_s(lab, flows, 50_000_000 // len(flows)) / lab.rate_bytes_per_s)
        assert shares[-1] < 1.0
    assert max(shares) > 0.85, shares


@needs_lab
def test_without_a_limit_it_is_faster():
    with NetLab(2, None) as lab:
        assert lab.rate_bytes_per_s is None
        assert max(measure_bytes_per_s(lab, [(0, 1)], 300_000_000) for _ in range(2)) > 2 * 125e6


@needs_lab
def test_each_host_is_a_host_of_its_own(lab, tmp_path):
    assert len(set(lab.hosts)) == len(set(lab.addresses)) == 4
    for host, name in enumerate(lab.hosts):
        script = "import os, socket; print(socket.gethostname(), os.getcwd(), os.environ['COLOUR'], os.getpid())"
        command = lab.command_on(host, [*map(str, python(script))])
        env = {**os.environ, "COLOUR": "dark green"}
        with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as process:
            words = [name, str(tmp_path), "dark", "green", str(process.pid)]
            assert process.communicate(timeout=TIMEOUT_S)[0].split() == words
        assert run(lab, (host + 1) % 4, "getent", "hosts", name).stdout.split() == [lab.addresses[host], name]
    assert run(lab, 0, "touch", "/dev/shm/mine").returncode == 0
    assert "mine" in run(lab, 0, "ls", "/dev/shm").stdout.split()
    assert "mine" not in run(lab, 1, "ls", "/dev/shm").stdout.split()
    assert not Path("/dev/shm/mine").exists()
    assert socket.gethostname() not in lab.hosts


@needs_lab
def test_two_labs_do_not_see_each_other(lab):
    with NetLab(4, "100mbit") as other:
        assert not set(lab.hosts) & set(other.hosts)
        assert lab.addresses == other.addresses
        for here, there in ((lab, other), (other, lab)):
            with start(here, 1, *python(RECEIVER, 5000)):
                words = python(SENDER, here.addresses[1], 5000, 1)
                assert "ConnectionRefusedError" in run(there, 0, *words).stderr
                assert run(here, 0, *words).returncode == 0


@needs_lab
@pytest.mark.parametrize("keeper_is_killed", [False, True])
def test_an_exception_in_the_block_leaves_nothing(keeper_is_killed):
    traces = Traces()
    processes = []
    # Its grandchild has left its session, and both ignore all that can be ignored.
    stubborn = "trap '' TERM INT HUP; setsid sleep 1000 & echo up; exec sleep 1000"

    def work() -> None:
        with NetLab(2, "1gbit") as lab:
            for host in range(2):
                processes.append(start(lab, host, "sh", "-c", stubborn))
                traces.note(processes[-1].pid, lab.hosts[host])
            assert len(traces.processes()) == 5  # and the keeper
            if keeper_is_killed:
                lab._keeper.kill()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        work()
    for process in processes:
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    traces.assert_none()


@needs_lab
@needs_lab
def test_what_a_killed_mpirun_has_left_in_tmp_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with NetLab(2, link=None) as lab:
        for host in (*lab.hosts, "kvmpi-another"):
            (tmp_path / f"ompi.{host}.0" / "jf.0").mkdir(parents=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ompi.kvmpi-another.0"]


def test_a_forked_child_does_not_end_the_lab_of_its_parent(lab):
    child = os.fork()
    if child == 0:
        lab.__exit__(None, None, None)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert run(lab, 0, "hostname").stdout.strip() == lab.hosts[0]


@needs_lab
def test_outside_its_block_it_has_no_hosts():
    with NetLab(1) as lab:
        pass
    with pytest.raises(KVError, match="outside"):
        lab.command_on(0, ["true"])


#: It has a child that it has forked, which has all of its descriptors and outlives it.
OWNER = """
import os, subprocess, sys, time
from kvmpi.benchmarks.netlab import NetLab
with NetLab(2, "1gbit") as lab:
    words = ["sh", "-c", "setsid sleep 1000 & echo up; exec sleep 1000"]
    processes = [subprocess.Popen(lab.command_on(host, words), stdout=subprocess.PIPE) for host in range(2)]
    for process in processes:
        process.stdout.readline()
    child = os.fork()
    if child == 0:
        os.closerange(0, 3)
        time.sleep(1000)
    print(child, *lab.hosts, *(process.pid for process in processes), flush=True)
    time.sleep(1000)
"""


@needs_lab
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_owner_leaves_nothing(number):
    traces = Traces()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as owner:
        child, *words = owner.stdout.readline().split()
        child = int(child)
        try:
            for name, pid in zip(words[:2], words[2:], strict=True):
                traces.note(int(pid), name)
            assert len(traces.processes().keys() - {owner.pid, child}) == 5  # and the keeper
            owner.send_signal(number)
            owner.communicate(timeout=TIMEOUT_S)
            assert owner.returncode == -number
            wait_until(lambda: traces.processes().keys() <= {child}, lambda: str(traces.processes()))
        finally:
            os.kill(child, signal.SIGKILL)
            owner.kill()
    traces.assert_none()


RANK = """
import json, socket, time
import numpy as np
from mpi4py import MPI
world = MPI.COMM_WORLD
local = world.Split_type(MPI.COMM_TYPE_SHARED)
values = np.arange(2_000_000, dtype="f4") * (world.rank + 1)
world.Barrier()
start = time.perf_counter()
world.Allreduce(MPI.IN_PLACE, values)
elapsed_s = time.perf_counter() - start
right = bool((values == np.arange(2_000_000, dtype="f4") * sum(range(1, world.size + 1))).all())
seen = world.gather([socket.gethostname(), local.size, right, elapsed_s], root=0)
if world.rank == 0:
    print(json.dumps(seen))
"""


def open_mpi() -> mpirun.MPI | None:
    try:
        found = mpirun.find(os.environ, 4)
    except ConfigError:
        return None
    return found if found.kind == "openmpi" else None


@needs_lab
@pytest.mark.parametrize(("num_hosts", "ranks_per_host"), [(4, 1), (2, 2)])
def test_mpirun_spans_the_hosts(tmp_path, num_hosts, ranks_per_host):
    mpi = open_mpi()
    if mpi is None:
        pytest.skip("no Open MPI here")
    program = tmp_path / "a program.py"
    program.write_text(RANK)
    traces = Traces()
    with NetLab(num_hosts, "1gbit") as lab:
        sleeper = start(lab, 0, "sh", "-c", "echo up; exec sleep 1000")
        traces.note(sleeper.pid, lab.hosts[0])
        command = [mpi.path, *lab.mpirun_arguments(ranks_per_host), sys.executable, str(program)]
        done = subprocess.run(
            lab.command_on(0, command), cwd=tmp_path, env={**mpirun.clean(os.environ), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        # mpirun sets the process group of each agent, and says so when the agent has run by then and done it itself.
        assert [line for line in done.stderr.splitlines() if "plm:ssh: Warning: setpgid" not in line] == []
    sleeper.communicate(timeout=TIMEOUT_S)
    traces.assert_none()
    ranks = json.loads(done.stdout)
    assert [rank[:3] for rank in ranks] == [
        [host, ranks_per_host, True] for host in lab.hosts for _ in range(ranks_per_host)
    ]
    # Every host sends at least the whole vector, less what a bucket lets through at once; shared memory would need a
    # few milliseconds.
    assert min(elapsed_s for *_, elapsed_s in ranks) > 8e6 / lab.rate_bytes_per_s - 2 / 190


@pytest.mark.parametrize(
    ("link", "rate"), [
        ("100mbit", 12.5e6), ("1gbit", 125e6), ("10gbit", 1.25e9), ("800kbit", 1e5), (None, None),
        ("2.5gbit", 312.5e6), ("1Gbit", 125e6),
    ],
)  # fmt: skip
def test_rates_are_in_bytes(link, rate):
    assert NetLab(1, link).rate_bytes_per_s == rate


@pytest.mark.parametrize(
    ("num_hosts", "cores", "expected"),
    [
        (2, [0, 1], [[0], [1]]),
        (4, [0, 1], [[0], [0], [1], [1]]),
        (3, [0, 1], [[0, 1]] * 3),
        (3, [2, 3, 5, 7], [[2], [3], [5]]),
        (2, [2, 3, 5, 7], [[2, 3], [5, 7]]),
        (1, [4], [[4]]),
    ],
)
def test_hosts_have_equally_many_cores(num_hosts, cores, expected):
    assert [cores_of(host, num_hosts, cores) for host in range(num_hosts)] == expected


@needs_lab
def test_programs_keep_to_the_cores_of_their_host(lab):
    script = "import os; print(*sorted(os.sched_getaffinity(0)))"
    for host in range(4):
        words = run(lab, host, *python(script)).stdout.split()
        assert list(map(int, words)) == cores_of(host, 4, sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("num_hosts", "link"),
    [(0, None), (201, None), (2, "fast"), (2, "0mbit"), (2, "0.0mbit"), (2, "2.gbit"), (2, "1gbps")],
)
def test_nonsense_is_refused(num_hosts, link):
    with pytest.raises(ConfigError, match=r"NetLab has|is no speed"):
        NetLab(num_hosts, link)


def test_what_is_missing_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(UnsupportedError, match=r"needs Linux, root .*iproute2.*; this is user 1000"), NetLab(1):
            pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name, path: None if name == "tc" else f"/sbin/{name}")
    with pytest.raises(UnsupportedError, match=r"iproute2.*; not found: tc"), NetLab(1):
        pass


@needs_lab
def test_errors_show_the_command_and_what_it_printed(lab):
    with pytest.raises(KVError, match=r"`ip link set nothing up` .*exit status 1: Cannot find device"):
        lab._run(1, "ip link set nothing up")
    with pytest.raises(UnsupportedError, match=r"`ip link add name x type marble` .*Unknown device type"):
        lab._run(1, "ip link add name x type marble")
