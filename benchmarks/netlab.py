"""Several hosts on one machine: network namespaces joined by a bridge whose links have a given speed.

For benchmarks and tests of collectives between hosts. Needs Linux, root, iproute2 and util-linux::

    with NetLab(4, link="1gbit") as lab:
        mpirun = ["mpirun", *lab.mpirun_arguments(ranks_per_host=1), "python", "program.py"]
        subprocess.run(lab.command_on(0, mpirun), check=True)

A host has a network, a host name, System V IPC, a ``/dev/shm`` and an ``/etc/hosts`` of its own, and shares all else:
files, users, process numbers. Cores are dealt out among hosts, where that can be done evenly. Its only interface
besides ``lo`` is ``lab0``; nothing leads out of the lab.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from types import TracebackType

if __name__ != "__main__":  # the keeper runs this file by path, so that it starts in milliseconds and without numpy
    from kvmpi.errors import ConfigError, KVError, UnsupportedError

NEEDS = "a NetLab needs Linux, root and the commands ip and tc (iproute2), nsenter and taskset (util-linux)"
SUBNET = "10.18.0.0/24"  # the same in every lab: no two of them see each other
SUBNET_IPV6 = "fd18::/64"
INTERFACE = "lab0"  # not eth0: /sys/class/net is the machine's, and whoever looks there must not find another card
PRIVATE = "/dev/shm"  # of each host: its files vanish with it, however its processes end
CLONE_FLAGS = {"net": 0x40000000, "uts": 0x04000000, "ipc": 0x08000000, "mnt": 0x00020000}
FIRST_FD = 100  # the keeper's descriptors have fixed numbers, so nobody needs to be told them


def parse_rate(link: str | None) -> float | None:
    """``"1gbit"`` in bytes per second; ``None`` is no limit."""
    if link is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", link, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"link={link!r} is no speed; expected 100mbit, 1gbit, 2.5gbit or the like, or None")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2].lower()] / 8


def search_path() -> str:
    """Where commands are: ``PATH``, and the folders that Debian leaves out of it for ordinary users and services."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def address_of(host: int, *, ipv6: bool = False) -> str:
    return f"{SUBNET_IPV6.partition('/')[0]}{host + 1:x}" if ipv6 else f"{SUBNET.rpartition('.')[0]}.{host + 1}"


def namespace_path(keeper: int, place: int, kind: str) -> str:
    """Where the keeper holds a namespace open; place 0 is the bridge's, place ``i + 1`` that of host ``i``."""
    return f"/proc/{keeper}/fd/{FIRST_FD + len(CLONE_FLAGS) * place + list(CLONE_FLAGS).index(kind)}"


def cores_of(host: int, num_hosts: int, cores: Sequence[int]) -> list[int]:
    """Those of ``cores`` that a host has: as many as every other, alone or with as many others; else all of them.

    On hosts that run wherever there is room, equal ranks are through at very different times.
    """
    each, others = len(cores) // num_hosts, num_hosts // len(cores)
    if each:
        return list(cores[host * each : (host + 1) * each])
    return [cores[host // others]] if num_hosts % len(cores) == 0 else list(cores)


def enter(keeper: int, place: int, num_hosts: int) -> list[str]:
    """The words that run the words after them on a host; they become that command, so signals reach it."""
    paths = {kind.replace("mnt", "mount"): namespace_path(keeper, place, kind) for kind in CLONE_FLAGS}
    cores = ",".join(map(str, cores_of(place - 1, num_hosts, sorted(os.sched_getaffinity(0)))))
    return ["taskset", "-c", cores, "nsenter", *(f"--{kind}={path}" for kind, path in paths.items())]


class NetLab:
    """``num_hosts`` hosts, each with a link of speed ``link`` in both directions to one switch; a context manager.

    The hosts exist inside the ``with`` block. Whatever ends it, also SIGKILL, every process on the hosts is killed and
    nothing of them is left. ``hosts`` are their names and ``addresses`` their addresses, which the names resolve to on
    every host. ``rate_bytes_per_s`` is a link's speed with all headers (TCP carries 0.956 of it), or None.

    Args:
        link: ``"100mbit"``, ``"1gbit"``, ``"10gbit"`` or the like; ``None`` for as fast as the machine is.
        ipv6: hosts have IPv6 addresses and, but for 127.0.0.1, no others.
    Raises:
        ConfigError: the number of hosts or the speed makes no sense.
        UnsupportedError: on entering, when the machine or its owner does not allow it.
    """

    def __init__(self, num_hosts: int, link: str | None = "1gbit", *, ipv6: bool = False) -> None:
        if not 1 <= num_hosts <= 200:
            raise ConfigError(f"a NetLab has 1 to 200 hosts, not {num_hosts}")
        self.rate_bytes_per_s = parse_rate(link)
        self.link = link
        self.subnet = SUBNET_IPV6 if ipv6 else SUBNET
        name = f"kvmpi-{uuid.uuid4().hex[:6]}"
        self.hosts = [f"{name}-h{i}" for i in range(num_hosts)]
        self.addresses = [address_of(i, ipv6=ipv6) for i in range(num_hosts)]
        self._owner = 0
        self._keeper: subprocess.Popen[bytes] | None = None  # holds the namespaces; see keep()
        self._namespaces: list[int] = []

    def command_on(self, host: int, command: Sequence[str]) -> list[str]:
        """The words that run ``command`` on a host, in the working directory and environment that they are run with.

        The process that is started becomes ``command``: its number and its signals are the command's own.
        """
        # Entering a mount namespace leaves the working directory, so it is given once more; a shell knows it when the
        # words are run, which may be long after they were made.
        script = f'exec {shlex.join(enter(self._pid, self._place(host), len(self.hosts)))} env --chdir="$PWD" "$@"'
        return ["sh", "-c", script, "sh", *command]

    def mpirun_arguments(self, ranks_per_host: int = 1) -> list[str]:
        """What stands between Open MPI's ``mpirun``, started with ``command_on``, and the program.

        Rank r runs on host ``r // ranks_per_host``. Ranks of one host talk through shared memory, others over TCP.
        All ranks get mpirun's whole environment; behind a real ssh they would get only what ``-x NAME`` names.
        End a job that hangs with SIGTERM: when mpirun is killed with SIGKILL, its ranks may run until the lab ends.
        Now and then mpirun prints ``plm:ssh: Warning: setpgid(...) failed``, which means nothing: an agent was quick.
        """
        num_ranks = ranks_per_host * len(self.hosts)
        words = ["--allow-run-as-root", "--host", ",".join(f"{host}:{ranks_per_host}" for host in self.hosts)]
        words += ["-n", str(num_ranks), "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"]
        words += ["--prtemca", "plm_ssh_agent", f"{PRIVATE}/agent", "--prtemca", "plm_ssh_no_tree_spawn", "1"]
        words += ["--prtemca", "prte_if_include", self.subnet, "--prtemca", "prte_tmpdir_base", PRIVATE]
        words += ["--mca", "btl_tcp_if_include", self.subnet, "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp"]
        words += ["--mca", "osc", "^ucx"]
        if num_ranks > len(os.sched_getaffinity(0)):  # the hosts share the cores, which Open MPI cannot know
            words += ["--mca", "mpi_yield_when_idle", "1"]
        return words

    def __enter__(self) -> NetLab:
        if sys.platform != "linux":
            raise UnsupportedError(f"{NEEDS}; this is {sys.platform}")
        if os.geteuid() != 0:
            raise UnsupportedError(f"{NEEDS}; this is user {os.geteuid()}")
        needed = ("ip", "tc", "nsenter", "taskset")
        if missing := [name for name in needed if shutil.which(name, path=search_path()) is None]:
            raise UnsupportedError(f"{NEEDS}; not found: {', '.join(missing)}")
        self._owner = os.getpid()
        try:
            self._start_keeper()
            self._connect()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def _pid(self) -> int:
        if self._keeper is None:
            raise KVError("this NetLab has no hosts outside its with block")
        return self._keeper.pid

    def configure(self, host: int | None, command: str) -> str:
        """Run a command about the network, such as ``ip`` or ``tc``, on a host or (None) on the switch; what it says.

        The switch has a port for each host, ``port0`` and so on; a host has ``lab0``.
        """
        return self._run(0 if host is None else self._place(host), command)

    def _place(self, host: int) -> int:
        if not 0 <= host < len(self.hosts):
            raise ConfigError(f"host {host} of a NetLab with hosts 0 to {len(self.hosts) - 1}")
        return host + 1

    def _table(self) -> list[str]:
        return [f"{address} {name}" for address, name in zip(self.addresses, self.hosts, strict=True)]

    def _start_keeper(self) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), str(self._owner), *self._table()],
            cwd="/",
            stdin=subprocess.PIPE,  # its end tells the keeper that we are gone; close-on-exec, so no program has it
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._keeper.stdout is not None
        answer = self._keeper.stdout.read().decode(errors="replace").strip()
        if answer != "ready":
            error = UnsupportedError if answer.startswith("namespaces") else KVError
            raise error(f"{answer or 'the keeper of the namespaces was killed'}; {NEEDS}")
        # Held here too, so that the numbers of these namespaces are not given to others should the keeper be killed.
        for place in range(len(self.hosts) + 1):
            self._namespaces.append(os.open(namespace_path(self._pid, place, "net"), os.O_RDONLY))

    def _connect(self) -> None:
        self._run(0, "ip link add name switch type bridge")
        self._run(0, "ip link set switch up")
        for host, address in enumerate(self.addresses):
            port, place = f"port{host}", host + 1
            peer = namespace_path(self._pid, place, "net")
            self._run(0, f"ip link add name {port} mtu 1500 type veth peer name {INTERFACE} mtu 1500 netns {peer}")
            self._run(0, f"ip link set {port} master switch up")
            self._run(place, "ip link set lo up")
            nodad = " nodad" if ":" in address else ""  # an address is there at once, and not after a look for others
            self._run(place, f"ip address add {address}/{self.subnet.partition('/')[2]} dev {INTERFACE}{nodad}")
            self._run(place, f"ip link set {INTERFACE} up")
            self._limit(0, port)
            self._limit(place, INTERFACE)

    def _limit(self, place: int, interface: str) -> None:
        if self.rate_bytes_per_s is not None:
            # tc-tbf(8) asks for at least rate / HZ, which is 250 on many kernels; smaller buckets may halve the rate.
            burst_bytes = max(int(self.rate_bytes_per_s / 190), 10_000)
            limit = f"tbf rate {self.link} burst {burst_bytes} latency 200ms"
            self._run(place, f"tc qdisc add dev {interface} root {limit}")

    def _run(self, place: int, command: str) -> str:
        words = ["nsenter", f"--net={namespace_path(self._pid, place, 'net')}", *command.split()]
        done = subprocess.run(
            words, env={**os.environ, "PATH": search_path()}, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            lacking = re.search("not permitted|not supported|denied|unknown", done.stderr, re.IGNORECASE)
            error = UnsupportedError if lacking else KVError
            raise error(f"`{command}` ended with exit status {done.returncode}: {done.stderr.strip()}; {NEEDS}")
        return done.stdout

    def _close(self) -> None:
        if os.getpid() != self._owner:  # a forked child that leaves the with block must not end its parent's lab
            return
        keeper, self._keeper = self._keeper, None
        namespaces, self._namespaces = self._namespaces, []
        try:
            if keeper is not None:
                try:
                    # A word, as the end of file may not come: a child that was forked has the pipe open too.
                    keeper.communicate(b"end", timeout=60.0)
                except subprocess.TimeoutExpired:
                    keeper.kill()
                    keeper.wait()
                if keeper.returncode != 0:
                    kill_inside(namespaces)
        finally:
            for fd in namespaces:
                os.close(fd)


def kill_inside(namespaces: Iterable[int], deadline_s: float = 30.0) -> int:
    """SIGKILL all processes in these open network namespaces; the number of those that could not be killed in time.

    Two scans in a row must find nothing: a process can fork behind the back of one scan.
    """
    links = {f"net:[{os.fstat(fd).st_ino}]" for fd in namespaces}
    end = time.monotonic() + deadline_s
    empty_scans = 0
    while True:
        pids = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(f"/proc/{name}/ns/net") in links:
                    pids.append(int(name))
                    os.kill(int(name), signal.SIGKILL)
        empty_scans = 0 if pids else empty_scans + 1
        if empty_scans == 2 or time.monotonic() > end:
            return len(pids)
        time.sleep(0.002)


def remove_sessions(hosts: Iterable[str]) -> None:
    """Remove what an Open MPI of these hosts, which share /tmp, has left there because it was killed."""
    base = os.environ.get("TMPDIR", "/tmp")
    beginnings = tuple(f"ompi.{host}." for host in hosts)
    for name in os.listdir(base):
        if name.startswith(beginnings):
            shutil.rmtree(f"{base}/{name}", ignore_errors=True)


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def make_host(libc: ctypes.CDLL, place: int, name: str, files: dict[str, str]) -> None:
    """Make the namespaces of one place and leave them held by this process, which returns to where it was."""
    home = {kind: os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in CLONE_FLAGS}
    check(libc.unshare(sum(CLONE_FLAGS.values())), "unshare")
    socket.sethostname(name)
    ms_bind, ms_rec, ms_slave = 0x1000, 0x4000, 0x80000
    check(libc.mount(None, b"/", None, ms_rec | ms_slave, None), "mount --make-rslave /")  # mounts never get out
    check(libc.mount(b"netlab", PRIVATE.encode(), b"tmpfs", 0, b"mode=1777"), f"mount {PRIVATE}")
    for file_name, text in files.items():
        with open(f"{PRIVATE}/{file_name}", "w") as file:
            file.write(text)
        os.chmod(file.name, 0o755)
    if os.path.exists("/etc/hosts"):
        check(libc.mount(f"{PRIVATE}/hosts".encode(), b"/etc/hosts", None, ms_bind, None), "mount /etc/hosts")
    for index, (kind, fd) in enumerate(home.items()):
        held = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
        os.dup2(held, FIRST_FD + len(CLONE_FLAGS) * place + index, inheritable=False)
        os.close(held)
        check(libc.setns(fd, 0), f"setns {kind}")
        os.close(fd)


def keep(owner: int, table: list[str]) -> int:
    """Make and hold the namespaces of a lab until its owner is gone or writes to our standard input; then end them.

    Args:
        table: an address and a name of each host, as in ``/etc/hosts``.
    """
    # The namespaces have no names: only processes and open descriptors keep them, and when the last of these is gone,
    # for whatever reason, the kernel removes interfaces, queues and mounts. Names in /run/netns would survive a SIGKILL
    # of the owner and of this process. What is left to do here is to kill the processes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    known = ""
    with contextlib.suppress(OSError), open("/etc/hosts") as file:
        known = file.read()
    hosts, lines = [line.split()[1] for line in table], "".join(f"{line}\n" for line in table)
    # Open MPI calls it like ssh: agent HOST COMMAND...
    ways = [shlex.join(enter(os.getpid(), i + 1, len(hosts))) for i in range(len(hosts))]
    cases = "".join(f'{host}) enter="{way}";;\n' for host, way in zip(hosts, ways, strict=True))
    agent = f'#!/bin/sh\ncase "$1" in\n{cases}*) echo "no host $1 in this lab" >&2; exit 255;;\nesac\n'
    agent += 'shift\nexec $enter sh -c "$*"\n'
    try:
        for place, name in enumerate(["switch", *hosts]):
            make_host(libc, place, name, {"hosts": known + lines, "agent": agent})
    except OSError as error:
        print(f"namespaces cannot be made: {error}", flush=True)
        return 1
    namespaces = [FIRST_FD + len(CLONE_FLAGS) * place for place in range(len(hosts) + 1)]
    print("ready", flush=True)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    # A child that the owner has forked may hold the pipe open when the owner is dead.
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(owner), select.POLLIN)
    if os.getppid() == owner:
        poll.poll()
    left = kill_inside(namespaces)
    remove_sessions(hosts)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(keep(int(sys.argv[1]), sys.argv[2:]))
