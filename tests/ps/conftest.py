"""Makes ``simulation`` importable, and starts jobs whose scheduler and servers are threads of the test."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ps_helpers import TIMEOUT_S

from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.ps.client import PsClient
from kvmpi.ps.daemon import SchedulerDaemon, ServerDaemon
from kvmpi.trace import Recorder
from kvmpi.wire import create_keys, new_context

sys.path.insert(0, str(Path(__file__).parents[1]))


class ThreadJob:
    """A scheduler and servers as threads, and clients that talk to them over real sockets."""

    def __init__(self, config: Config) -> None:
        self.context = new_context(config)
        self.clients: list[PsClient] = []
        scheduler = SchedulerDaemon(config)
        self.threads: list[threading.Thread] = []
        listening, endpoint = threading.Event(), []
        self._run(lambda: scheduler.run(self.context, lambda at: (endpoint.append(at), listening.set())))  # type: ignore[arg-type,return-value]
        assert listening.wait(TIMEOUT_S)
        self.config = replace(config, scheduler=endpoint[0])
        self.servers = [ServerDaemon(self.config, rank) for rank in range(config.num_servers)]
        for server in self.servers:
            self._run(lambda server=server: server.run(self.context))  # type: ignore[misc]
        self._daemons = [scheduler, *self.servers]

    def _run(self, run: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def new_client(self, rank: int, num_clients: int, mode: str = "sync", store: int = 1, **changes: Any) -> PsClient:
        client = PsClient(
            replace(self.config, **changes), store=store, mode=mode, client=rank, num_clients=num_clients,
            recorder=Recorder(),
        )  # fmt: skip
        self.clients.append(client)
        return client

    def connect(self, num_clients: int, mode: str = "sync", store: int = 1, **changes: Any) -> list[PsClient]:
        """Connected clients 0 .. num_clients-1."""
        clients = [self.new_client(rank, num_clients, mode, store, **changes) for rank in range(num_clients)]
        for client in clients:
            client.connect(Deadline(TIMEOUT_S))
        return clients

    def close(self) -> None:
        for client in self.clients:
            client.abort()
        self.stop_daemons()
        self.context.destroy(linger=0)

    def stop_daemons(self) -> None:
        """Scheduler and servers end without a word to the clients."""
        for daemon in self._daemons:
            daemon.stop()
        for thread in self.threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., ThreadJob]]:
    """``start_job(num_servers=2, ...)`` starts scheduler and servers with these settings."""
    jobs: list[ThreadJob] = []

    def start(num_servers: int = 2, **settings: Any) -> ThreadJob:
        settings = {
            "num_workers": 8,
            "timeout_s": TIMEOUT_S,
            "job_dir": str(tmp_path),
            "keys": str(tmp_path / "keys"),
            **settings,
        }
        create_keys(settings["keys"])
        jobs.append(ThreadJob(Config(num_servers=num_servers, **settings)))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


@pytest.fixture
def in_threads() -> Callable[..., list[Any]]:
    """``in_threads(fn, items)`` runs ``fn(item)`` for all items at once; results in order, or the first error."""

    def run(fn: Callable[[Any], Any], items: Any) -> list[Any]:
        results: list[Any] = [None] * len(items)
        errors: list[BaseException] = []

        def one(i: int) -> None:
            try:
                results[i] = fn(items[i])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(items))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive() or errors, "a thread hangs"
        if errors:
            raise errors[0]
        return results

    return run
