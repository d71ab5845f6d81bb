"""A scheduler and a server as threads of this process, so that a program can be tried without a launcher."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace

from kvmpi.config import Config
from kvmpi.errors import KVTimeoutError
from kvmpi.ps.daemon import SchedulerDaemon, ServerDaemon
from kvmpi.wire import new_context


class EmbeddedJob:
    """A job of one worker; ``config`` tells its store where to find the servers."""

    def __init__(self, config: Config) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvmpi-")  # mode 0700
        self.config = replace(
            config, num_servers=1, job_dir=self._folder, scheduler=f"ipc://{os.path.join(self._folder, 'scheduler')}"
        )
        self._context = new_context()
        scheduler = SchedulerDaemon(self.config)
        server = ServerDaemon(self.config, 0)
        self._daemons = (server, scheduler)
        listening = threading.Event()
        self._threads = [
            self._start("scheduler", lambda: scheduler.run(self._context, lambda _: listening.set())),
            self._start("server", lambda: server.run(self._context)),
        ]
        if not listening.wait(config.timeout_s):
            raise KVTimeoutError(f"the embedded scheduler did not start in {config.timeout_s:.1f} s")

    def _start(self, name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name=f"kvmpi-{name}", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Stop both threads and remove their sockets."""
        for daemon in self._daemons:
            daemon.stop()
        for thread in self._threads:
            thread.join(5.0)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
