"""A real job whose scheduler, servers and clients each have a host of their own, and what can happen to its links."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import BinaryIO

from kvmpi.benchmarks.netlab import INTERFACE, PRIVATE, NetLab
from kvmpi.launchers import mpirun
from kvmpi.launchers.job import Process, plan
from kvmpi.launchers.program import Program
from kvmpi.launchers.restarts import Restarts
from kvmpi.wire import create_keys

#: Host of the scheduler; those of the servers and of the clients follow.
SCHEDULER_HOST = 0
SERVERS, CLIENTS, WORKERS = 3, 3, 4
_PORT = 7000
_FILES_OF_THE_LAB = {"hosts", "agent"}


class Cut:
    """What keeps a host from others; ``end`` mends it.

    Kinds: ``down``, the host's link is down; ``out`` and ``in``, what it sends, or is sent, is lost; ``apart``, it and
    the scheduler's host do not reach each other, but all the others.
    """

    KINDS = ("down", "out", "in", "apart")

    def __init__(self, lab: NetLab, host: int, kind: str) -> None:
        self._lab, self.host, self.kind = lab, host, kind
        self._ports = {"out": (host, INTERFACE), "in": (None, f"port{host}")}
        if kind == "down":
            lab.configure(host, f"ip link set {INTERFACE} down")
        elif kind == "apart":
            for one, other in ((host, SCHEDULER_HOST), (SCHEDULER_HOST, host)):
                lab.configure(one, f"ip route add blackhole {lab.addresses[other]}/32")
        else:
            at, device = self._ports[kind]
            # Not netem, which is a module that many kernels lack.
            lab.configure(at, f"tc qdisc add dev {device} root blackhole")
        self._before = self._received()

    def _received(self) -> tuple[int, int]:
        """Packets that the switch has had from the host, and sent to it."""
        text = self._lab.configure(None, f"ip -j -s link show port{self.host}")
        counts = json.loads(text)[0]["stats64"]
        return counts["rx"]["packets"], counts["tx"]["packets"]

    def has_fired(self) -> bool:
        """Whether it has kept anything from getting through; to be asked before ``end``, after a while."""
        if self.kind == "down":
            state = json.loads(self._lab.configure(self.host, f"ip -j link show {INTERFACE}"))[0]["operstate"]
            return state == "DOWN" and self._received() == self._before
        if self.kind == "apart":
            return not self._reaches(self.host, SCHEDULER_HOST) and not self._reaches(SCHEDULER_HOST, self.host)
        at, device = self._ports[self.kind]
        dropped = re.search(r"dropped (\d+)", self._lab.configure(at, f"tc -s qdisc show dev {device}"))
        return dropped is not None and int(dropped[1]) > 0

    def _reaches(self, host: int, other: int) -> bool:
        routes = self._lab.configure(host, f"ip route show {self._lab.addresses[other]}")
        return "blackhole" not in routes

    def end(self) -> None:
        """The link is as it was."""
        lab, host = self._lab, self.host
        if self.kind == "down":
            lab.configure(host, f"ip link set {INTERFACE} up")
        elif self.kind == "apart":
            for one, other in ((host, SCHEDULER_HOST), (SCHEDULER_HOST, host)):
                lab.configure(one, f"ip route del blackhole {lab.addresses[other]}/32")
        else:
            at, device = self._ports[self.kind]
            lab.configure(at, f"tc qdisc del dev {device} root")


class HostsJob:
    """Four workers in three clients, three servers with one replica, a scheduler: seven hosts, started as a user would.

    What dies is started again as ``kvmpi run --restart`` does it. A context manager; leaving it ends everything.

    Args:
        program: a Python program and its arguments.
        folder: for the job's files; ``output`` in it is what all processes print.
        heartbeats: seconds between two, and of silence after which a member is lost.
    """

    def __init__(self, program: tuple[str, ...], folder: Path, heartbeats: tuple[float, float]) -> None:
        self.mark = f"CHAOS_MARK={uuid.uuid4().hex}"
        self.folder, self.restarted = folder, 0
        self.job_dir = folder / "job"
        self.lab = NetLab(1 + SERVERS + CLIENTS, None)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        name, value = self.mark.split("=")
        environ |= {name: value, "KVMPI_HEARTBEAT_S": str(heartbeats[0])}
        environ |= {"KVMPI_HEARTBEAT_TIMEOUT_S": str(heartbeats[1]), "KVMPI_TIMEOUT_S": "120"}
        self._plan = plan(
            Program((sys.executable,), program[:1], program[1:]), num_workers=WORKERS, num_clients=CLIENTS,
            num_servers=SERVERS, replicas=1, restarts=1000, environ=environ, job_id=f"chaos-{uuid.uuid4().hex[:8]}",
            job_dir=str(self.job_dir), mpi=mpirun.find(environ, WORKERS), cores=os.cpu_count() or 1,
        )  # fmt: skip
        self._restarts = Restarts(1000, 1, "wait")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: set[str] = set()
        self.broken = ""

    def __enter__(self) -> HostsJob:
        self.job_dir.mkdir(mode=0o700)
        create_keys(str(self.job_dir / "keys"))
        self._out: BinaryIO = (self.folder / "output").open("wb")
        self.lab.__enter__()
        try:
            for process in self._plan.processes:
                self._start(process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.lab.__exit__(None, None, None)  # which kills what there is
        for process in self._running.values():
            process.wait()
        self._out.close()

    def host_of(self, process: Process) -> int:
        if process.role == "scheduler":
            return SCHEDULER_HOST
        return 1 + process.rank if process.role == "server" else 1 + SERVERS + process.client_rank

    def _start(self, process: Process) -> None:
        host = self.host_of(process)
        env = {**self._plan.env, **process.env, "KVMPI_HOST": self.lab.addresses[host]}
        env |= {"KVMPI_SCHEDULER": f"tcp://{self.lab.addresses[SCHEDULER_HOST]}:{_PORT}"}
        env |= {"KVMPI_SCHEDULER_PORT": str(_PORT)}
        self._running[process.label] = subprocess.Popen(
            self.lab.command_on(host, process.command), env=env, stdin=subprocess.DEVNULL, stdout=self._out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def look(self) -> bool:
        """Start again what has to be; whether the training is over, in whatever way."""
        now_s = time.monotonic()
        for label, process in self._running.items():
            status = process.poll()
            if status is None or label in self._ended or label in self._restarts.planned:
                continue
            if status == 0 and label.split()[0] in ("worker", "client"):
                self._ended.add(label)
            elif status != 0 and self._restarts.bears(label, status):
                self._restarts.plan(label, now_s)
            else:
                self.broken = f"{label} has ended with status {status}"
        for label in self._restarts.take_due(now_s):
            self.restarted += 1
            self._start(next(process for process in self._plan.processes if process.label == label))
        return bool(self.broken) or len(self._ended) == CLIENTS

    def stop(self, timeout_s: float = 20.0) -> int:
        """The training is over: end servers and scheduler as a launcher does. The worst exit status of all."""
        for role in ("server", "scheduler"):
            processes = [process for label, process in self._running.items() if label.startswith(role)]
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(timeout_s)
        return max(abs(process.wait(timeout_s)) for process in self._running.values())

    def left_files(self) -> list[str]:
        """What the processes have left on their hosts and in the folder of the job."""
        # What is whoever's who has made the folder: keys, Unix sockets, who answers to SIGUSR1, the last picture, and
        # which process is which worker.
        known = ("keys", "status.json", "answers-")
        left = [
            str(path)
            for path in self.job_dir.iterdir()
            if not path.name.startswith(known) and path.suffix != ".place" and not path.is_socket()
        ]
        for host in range(len(self.lab.hosts)):
            listed = subprocess.run(
                self.lab.command_on(host, ["ls", "-A", PRIVATE]), capture_output=True, text=True, check=True
            ).stdout.split()
            left += [f"{PRIVATE}/{name} on host {host}" for name in listed if name not in _FILES_OF_THE_LAB]
        return left
