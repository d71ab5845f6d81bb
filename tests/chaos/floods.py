"""Real servers under clients that ask and never read: how much memory they take, and how others get on meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from kvmpi import optim
from kvmpi.config import MIB, Config
from kvmpi.deadline import Deadline
from kvmpi.ps import PsClient
from kvmpi.ps.chains import part_of
from kvmpi.ps.placement import digest
from kvmpi.trace import Recorder
from kvmpi.wire import create_keys

PUSHER = Path(__file__).with_name("pusher.py")
#: The flooders' key: one chunk, of the largest size that clients send.
COUNT = 2 * MIB // 4
KINDS = ("push", "pull")
_TIMEOUT_S = 60.0
#: See ``keep_large_buffers``.
_KEPT_BYTES = 36 * MIB


@dataclass
class FloodReport:
    """What came of it. Memory is the most that any server took above what it had before; bytes."""

    seconds: float
    peak_bytes: int = 0
    after_bytes: int = 0
    bound_bytes: int = 0
    requests: int = 0
    exchanges: int = 0  # of the client that behaves
    wrong: int = 0
    slowest_s: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether servers kept within their bound, and the other client got exact values."""
        bounded = self.peak_bytes <= self.bound_bytes and self.after_bytes <= _KEPT_BYTES
        return bounded and not self.wrong and self.exchanges > self.seconds and self.requests > 100

    def __str__(self) -> str:
        return (
            f"{self.seconds:.0f} s, {self.requests} requests of clients that read nothing: a server took up to "
            f"{self.peak_bytes / MIB:.0f} MiB more (bound {self.bound_bytes / MIB:.0f}), {self.after_bytes / MIB:.0f} "
            f"after they had left; another client: {self.exchanges} exchanges, {self.wrong} wrong elements, "
            f"{self.slowest_s:.2f} s at most"
        )


class Flood:
    """One job: a scheduler, servers, a client that behaves, and one of each of ``KINDS`` that does not.

    Args:
        replicas: and so many servers more than one.
        transport: of the flooders, ``tcp`` or ``ipc``.
    """

    def __init__(self, seconds: float, *, replicas: int = 0, transport: str = "ipc") -> None:
        self._seconds, self._replicas, self._transport = seconds, replicas, transport
        self._running: list[subprocess.Popen[str]] = []

    def run(self) -> FloodReport:
        with tempfile.TemporaryDirectory(prefix="chaos-") as name:
            try:
                return self._run(Path(name))
            finally:
                for process in self._running:
                    process.kill()
                    process.wait()

    def _start(self, env: dict[str, str], *command: str) -> subprocess.Popen[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
        process = subprocess.Popen(
            [sys.executable, *command], env={**clean, **env}, text=True, stdout=subprocess.PIPE
        )  # fmt: skip
        self._running.append(process)
        return process

    def _run(self, folder: Path) -> FloodReport:
        env = {"KVMPI_KEYS": str(folder / "keys"), "KVMPI_NUM_SERVERS": str(1 + self._replicas)}
        env |= {"KVMPI_REPLICAS": str(self._replicas), "KVMPI_JOB_DIR": str(folder)}
        env |= {"KVMPI_TRANSPORT": self._transport, "KVMPI_PLACEMENT": "hash"}  # one chunk has one place
        create_keys(env["KVMPI_KEYS"])
        scheduler = self._start(env, "-m", "kvmpi.ps", "scheduler")
        assert scheduler.stdout is not None
        env["KVMPI_SCHEDULER"] = scheduler.stdout.readline().strip()
        servers = [
            self._start({**env, "KVMPI_RANK": str(rank)}, "-m", "kvmpi.ps", "server")
            for rank in range(1 + self._replicas)
        ]
        config = Config.from_env(env)
        num_clients = 1 + len(KINDS)
        client = PsClient(config, store=1, mode="async", client=0, num_clients=num_clients, recorder=Recorder())
        client.connect(Deadline(_TIMEOUT_S))
        try:
            return self._flood(client, config, [psutil.Process(server.pid) for server in servers], num_clients)
        finally:
            client.abort()

    def _flood(self, client: PsClient, config: Config, servers: list[psutil.Process], num_clients: int) -> FloodReport:
        deadline, report = Deadline(_TIMEOUT_S), FloodReport(self._seconds)
        keys = ["mine", *KINDS]
        client.add_keys([(key, (COUNT,), "float32") for key in keys])
        for key in keys:
            client.init(key, np.zeros(COUNT, "f4"), deadline).wait()
        client.set_rule(optim.Test(lr=-1.0), deadline).wait()
        out, value = np.empty(COUNT, "f4"), np.arange(COUNT, dtype="f4") % 7

        def exchange() -> None:
            report.exchanges += 1
            began = time.monotonic()
            client.pushpull("mine", value, out, Deadline(_TIMEOUT_S)).wait()
            report.slowest_s = max(report.slowest_s, time.monotonic() - began)
            report.wrong += int((out != value * report.exchanges).sum())

        for _ in range(20):
            exchange()
        before = [server.memory_info().rss for server in servers]

        def grown() -> int:
            return max(server.memory_info().rss - then for server, then in zip(servers, before, strict=True))

        env = {**config.to_env(), "PYTHONPATH": os.pathsep.join(sys.path)}
        flooders = []
        for rank, how in enumerate(KINDS, 1):
            home = client._layouts[how].chunks[0].server
            endpoint, part = client._link._connections[home].endpoint, part_of(home, digest(how))
            words = (how, endpoint, str(rank), str(num_clients), how, str(COUNT), str(part))
            flooders.append(self._start(env, str(PUSHER), *words))
        report.exchanges, report.slowest_s = 20, 0.0
        ends = time.monotonic() + self._seconds
        while time.monotonic() < ends:
            exchange()
            report.peak_bytes = max(report.peak_bytes, grown())
        for flooder in flooders:
            flooder.kill()
            report.requests += int((flooder.communicate()[0].split() or ["0"])[-1])
        ends = time.monotonic() + 10.0
        report.after_bytes = grown()
        while time.monotonic() < ends and report.after_bytes > 16 * MIB:
            time.sleep(0.1)
            report.after_bytes = min(report.after_bytes, grown())
        # For each: what may wait for it, one answer more, and the messages that a listener takes before it is asked
        # for them. And free memory that malloc keeps.
        chunk_bytes, values_bytes = 4 * COUNT, 4 * COUNT * len(keys)
        each = 4 * config.window_bytes + 3 * values_bytes + (1 + 32) * chunk_bytes
        report.bound_bytes = len(KINDS) * each + _KEPT_BYTES
        return report
