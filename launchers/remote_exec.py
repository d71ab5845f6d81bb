"""Runs one process of a job on another host for the launcher, and ends it when the launcher is gone.

The launcher starts this file by path through ssh, srun or the like, and writes to its standard input: first one line of
JSON that says what to run, so that nothing of it stands on a command line, then numbers of signals to pass on. End of
file means that the launcher has ended. Output of the process is ours. Two lines of our own go to standard error,
behind a word that only the launcher knows:

    WORD begin               this has been let in, and knows what to run
    WORD end STATUS          how the process has ended, as os.wait has it

With an argument BASE the first line is in BASE.spec, and the rest comes from BASE.orders as that grows; a launcher that
does not touch BASE.alive for a minute has ended, and so has one whose files are gone.

Where the launcher has no watchdog on this host, the folders are this process's alone, and a watchdog of its own kills
what is left of it and removes them should it be killed itself.

Only the standard library is used; ``python -I -S`` starts it in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import ipaddress
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from types import ModuleType

LIFE_S = 60.0
GONE_S = 4.0  # what is not there for so long has been removed; on a shared file system it may only be late
LOOK_S = 0.5
KILL_S = 5.0  # for those that are killed to have ended
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
#: Addresses that are nobody's (RFC 5737, RFC 3849): the way there is that to other hosts.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def own_address(network: str, towards: str) -> str:
    """The address under which other hosts reach this one.

    Args:
        network: an interface such as ``eth0``, or a network such as ``10.0.0.0/16`` that the address is in, or empty.
        towards: without a network, the address by which this host would reach that one; empty for any other.
    Raises:
        OSError: there is no such interface, or no way.
        ValueError: it is no network.
    """
    if not network:
        return _address_towards(towards)
    return _on(network)[1]


def interface_on(network: str) -> str:
    """The interface of this host that has an address on ``network``; errors as of ``own_address``."""
    return _on(network)[0]


def _on(network: str) -> tuple[str, str]:
    """An interface and its address."""
    wanted = ipaddress.ip_network(network, strict=False) if "/" in network else None
    found: list[tuple[str, str]] = sibling("cores").machine()["addresses"]()
    for name, address in found:
        if name == network if wanted is None else ipaddress.ip_address(address) in wanted:
            return name, address
    listed = ", ".join(f"{name} {address}" for name, address in found)
    raise OSError(f"{socket.gethostname()} has no address on {network!r}; it has {listed}")


def _address_towards(host: str) -> str:
    machine = sibling("cores").machine()
    try:
        there = machine["addresses_of"](host) if host else _ANYWHERE
    except OSError as error:
        raise OSError(f"{socket.gethostname()} has no way to {host}: {error.strerror}") from None
    reasons = []
    for address in there:
        with socket.socket(machine["family_of"](address), socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # sends nothing
                return str(probe.getsockname()[0])
            except OSError as error:
                reasons.append(str(error.strerror))
    raise OSError(f"{socket.gethostname()} has no way to {host or 'other hosts'}: {reasons[0]}")


def make_files(folders: list[str], files: dict[str, str]) -> None:
    """The job's private folders on this host, and files in the first; others of the job may be doing the same."""
    for folder in folders:
        os.makedirs(folder, 0o700, exist_ok=True)
        if os.stat(folder).st_uid != os.geteuid():
            raise OSError(f"{folder} belongs to somebody else")
    folder = folders[0]
    for name, text in files.items():
        temporary = os.path.join(folder, f".{name}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        os.chmod(temporary, 0o700 if text.startswith("#!") else 0o600)
        os.replace(temporary, os.path.join(folder, name))


def sibling(name: str) -> ModuleType:
    """A file beside this one, loaded by its path: the package is not there to be imported from."""
    spec = importlib.util.spec_from_file_location(name, f"{os.path.dirname(__file__)}/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_line(fd: int) -> bytes:
    """The first line; byte by byte, since what follows it is read with select."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            raise EOFError("the launcher has ended before it said what to run")
        line += byte
    return line


def say(spec: dict[str, object], text: str) -> None:
    """A line for the launcher."""
    with contextlib.suppress(OSError):  # nobody is there to be told
        os.write(2, f"{spec['word']} {text}\n".encode())


class Remote:
    """One process and the way to it."""

    def __init__(self, spec: dict[str, object]) -> None:
        self.orders = 0
        self._command = [str(word) for word in spec["command"]]  # type: ignore[attr-defined]
        self._env = {str(name): str(value) for name, value in spec["env"].items()}  # type: ignore[attr-defined]
        kept = tuple(spec["kept"])  # type: ignore[arg-type,var-annotated]
        self._env.update({name: value for name, value in os.environ.items() if kept and name.startswith(kept)})
        self._cwd, self._spans, self._is_mpirun = str(spec["cwd"]), bool(spec["spans"]), bool(spec["mpirun"])
        if "network" in spec:
            try:
                self._env["KVMPI_HOST"] = own_address(str(spec["network"]), str(spec["towards"]))
            except OSError as error:
                raise OSError(f"{error}; name a network that all hosts have with --interface") from None
        if self._env.get("KVMPI_ROLE") == "worker":  # a client's ranks do so themselves
            sibling("cores").share_cores(self._env)
        self.pid = 0

    def start(self) -> None:
        """Start the process as leader of a session of its own; from then on signals reach its group."""
        parent = os.getpid()
        begun, begins = os.pipe()
        if sys.platform == "linux":  # who loses its parent is ours, whatever session it is in; see end_orphans
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)  # what started us may have ignored them
                os.close(begins)
                if sys.platform == "linux":
                    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(128 + signal.SIGKILL)
                nothing = os.open(os.devnull, os.O_RDONLY)
                os.dup2(nothing, 0)
                os.chdir(self._cwd)
                os.execvpe(self._command[0], self._command, self._env)
            except OSError as error:
                os.write(2, f"kvmpi: cannot run {self._command[0]} on {socket.gethostname()}: {error}\n".encode())
            os._exit(127)
        os.close(begins)
        os.read(begun, 1)  # an order may be there already, and before that there is no group to get it
        os.close(begun)

    def wait(self) -> int:
        """Until the process ends; its wait status."""
        deadline = None
        wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # srun and blaunch pass such on
            signal.signal(number, lambda number, _: self._pass_on(number))
        watched = [wake, self.orders]
        while True:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                return status
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select(watched, [], [], left_s)
            if wake in readable:
                os.read(wake, 4096)
            if self.orders in readable:
                orders = os.read(self.orders, 4096)
                for word in orders.split():
                    self._pass_on(int(word))
                if not orders:  # the launcher is gone
                    watched.remove(self.orders)
                    self._pass_on(signal.SIGTERM)
                    deadline = time.monotonic() + float(self._env["KVMPI_GRACE_S"])
            if deadline is not None and time.monotonic() >= deadline:
                self._pass_on(signal.SIGKILL)
                deadline = None

    def _pass_on(self, number: int) -> None:
        questions = sibling("questions")
        if number == signal.SIGTERM and self._is_mpirun and questions.end_ranks(self.pid):
            return
        if number == signal.SIGUSR1:  # a question, for those who answer
            if not (self._spans and questions.ask_ranks(self.pid)):
                questions.ask(self._env.get("KVMPI_JOB_DIR", ""), self.pid)
            return
        try:
            os.killpg(self.pid, number)
        except OSError:
            pass


def end_orphans(deadline_s: float = KILL_S) -> None:
    """Kill what is left of our children, and what becomes our child by that; nothing where there is no /proc."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        try:
            with open("/proc/thread-self/children") as file:
                left = [int(word) for word in file.read().split()]
        except OSError:
            return
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except OSError:
                pass
        time.sleep(0.01)


def read_orders(base: str) -> int:
    """A descriptor that gives what BASE.orders gets, and ends when the launcher shows no sign of life."""
    read_end, write_end = os.pipe()

    def feed() -> None:
        place, touched, absent, seen_s = 0, 0.0, 0, time.monotonic()
        while absent * LOOK_S < GONE_S:
            try:
                with open(f"{base}.orders", "rb") as file:
                    file.seek(place)
                    text = file.read()
                alive = os.stat(f"{base}.alive").st_mtime  # of the file server's clock: only its changes mean something
                absent = 0
            except OSError as error:
                text, alive = b"", touched
                absent = absent + 1 if isinstance(error, FileNotFoundError) else 0  # others: it does not answer
            if alive != touched:
                touched, seen_s = alive, time.monotonic()
            elif time.monotonic() - seen_s >= LIFE_S:  # after a look: who was suspended has seen nothing
                break
            if text:
                place += len(text)
                os.write(write_end, text)
            time.sleep(LOOK_S)
        os.close(write_end)

    threading.Thread(target=feed, daemon=True).start()
    return read_end


def main(argv: list[str]) -> int:
    """See the top of this file."""
    base = argv[0] if argv else ""
    if base:
        with open(f"{base}.spec", "rb") as file:
            spec = json.loads(file.readline())
    else:
        spec = json.loads(read_line(0))
    say(spec, "begin")
    try:
        if spec["alone"]:  # before the folders, so that a kill -9 leaves none, whenever it comes
            sibling("watchdog").guard(spec["job"], spec["folders"], [f"KVMPI_JOB_DIR={spec['folders'][0]}"])
        make_files(spec["folders"], spec["files"])
        remote = Remote(spec)
    except (OSError, ValueError) as error:
        print(f"kvmpi on {socket.gethostname()}: {error}", file=sys.stderr)
        return 126
    remote.start()  # forks, and so comes before there are threads
    remote.orders = read_orders(base) if base else 0
    status = remote.wait()
    try:
        os.killpg(remote.pid, signal.SIGKILL)  # what it has left of its group
    except OSError:
        pass
    end_orphans()
    if spec["alone"]:  # nobody else has anything in these folders
        for folder in spec["folders"]:
            shutil.rmtree(folder, ignore_errors=True)
    say(spec, f"end {status}")
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
