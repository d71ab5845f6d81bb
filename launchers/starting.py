"""Starts the processes of a job where they belong: on this host, or through whatever reaches another."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvmpi.launchers import processes
from kvmpi.launchers.job import AGENT, Job, Process
from kvmpi.launchers.remote import Child, RemoteProcess

#: ssh gives up after 20 s. Of who reaches a host by other means, and drops what is said on standard error, nothing is
#: heard: after so long it counts as having come in.
ENTER_S = 30.0


class Starter:
    """For one job; it counts how often it has started what has folders of its own each time.

    Only so many may be on their way at once (see ``Reach.most_entering``): others wait until some of them have come in.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._starts: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[Process]] = defaultdict(deque)  # by entrance; empty: none is needed
        self._entering: defaultdict[str, list[tuple[float, RemoteProcess]]] = defaultdict(list)  # since when

    def add(self, *processes: Process) -> None:
        """Have these started when their turn has come: at each entrance the first come first."""
        for process in processes:
            self._waiting[self._entrance(process)].append(process)

    @property
    def has_waiting(self) -> bool:
        """Whether some wait for their turn."""
        return bool(self._waiting)

    def left_s(self, now_s: float) -> float | None:
        """Seconds until somebody's turn comes though nothing is heard of those before; None if nobody waits."""
        since_s = [self._entering[entrance][0][0] for entrance in self._waiting if self._entering[entrance]]
        return max(0.0, min(since_s) + ENTER_S - now_s) if since_s else None

    def take_due(self, now_s: float) -> Iterator[Process]:
        """Those whose turn has come; each has to be started before the next is asked for."""
        for entrance, waiting in list(self._waiting.items()):
            while waiting and self._has_room(entrance, now_s):
                yield waiting.popleft()
            if not waiting:
                del self._waiting[entrance]

    def _entrance(self, process: Process) -> str:
        places = self._job.places
        return places.reach.entrance(process.host) if places is not None and process.host else ""

    def _has_room(self, entrance: str, now_s: float) -> bool:
        most = self._job.places.reach.most_entering if self._job.places is not None and entrance else None
        self._entering[entrance] = [
            (since_s, child) for since_s, child in self._entering[entrance]
            if not child.has_begun and child.returncode is None and now_s < since_s + ENTER_S
        ]  # fmt: skip
        return most is None or len(self._entering[entrance]) < most

    def start(
        self, process: Process, env: Mapping[str, str], local_env: Mapping[str, str], pipes: Sequence[tuple[int, int]],
        pass_fds: tuple[int, ...] = (),
    ) -> Child:  # fmt: skip
        """Start ``process`` with ``env``, writing into ``pipes``, of standard output and standard error.

        Args:
            local_env: of what reaches the other host.
            pass_fds: what a process on this host inherits.
        Raises:
            OSError: it, or what reaches its host, cannot be started.
        """
        out = {"stdout": pipes[0][1], "stderr": pipes[1][1]}
        places = self._job.places
        if places is None or not process.host:
            return processes.start(process.command, env, pass_fds=pass_fds, **out)
        files = {AGENT: places.reach.agent(places.layout.names)} if process.role == "client" else {}
        if "KVMPI_KEYS" in env:
            files["keys"] = Path(env["KVMPI_KEYS"]).read_text(encoding="utf-8")
        listens = {"network": places.network, "towards": places.address} if process.role == "server" else {}
        mine = f"kvmpi-{self._job.job_id}"
        if places.reach.is_apart:  # several may come to one host, and each clears up after itself, also late
            self._starts[process.label] += 1
            mine += f"-{process.role}-{process.rank}-{self._starts[process.label]}"

        def own(text: str) -> str:
            return text.replace(f"kvmpi-{self._job.job_id}", mine)

        child = RemoteProcess(
            places.reach, process.host, [own(word) for word in process.command],
            {name: own(value) for name, value in env.items()}, local_env=local_env,
            folders=[own(folder) for folder in self._job.folders], files=files, address=listens, role=process.role,
            is_step=process.is_step, spans=process.spans, **out,
        )  # fmt: skip
        self._entering[self._entrance(process)].append((time.monotonic(), child))
        return child
