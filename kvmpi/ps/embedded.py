"""A scheduler and a server as threads of this process, so that a program can be tried without a launcher."""

from __future__ import annotations

import os
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace

from kvmpi.config import Config
from kvmpi.errors import ConfigError, KVTimeoutError
from kvmpi.ps import descriptors
from kvmpi.ps.daemon import SchedulerDaemon, ServerDaemon
from kvmpi.wire import new_context

#: The path of a Unix socket may have about 100 bytes.
_MAX_FOLDER_BYTES = 80
#: Where the folder for temporary files has a name too long for that.
SHORT = "/tmp"


class EmbeddedJob:
    """A job of one worker; ``config`` tells its store where to find the servers.

    Raises:
        ConfigError: a module of ``KVMPI_IMPORTS`` cannot be imported, or a folder, an address or descriptors
            cannot be had.
    """

    def __init__(self, config: Config) -> None:
        descriptors.allow_embedded()
        self._folder = private_folder()
        self.config = replace(
            config, num_servers=1, job_dir=self._folder, scheduler=f"ipc://{os.path.join(self._folder, 'scheduler')}"
        )
        self._context = new_context()
        # Its store has heard all that it asked for when this ends, and there is nobody else.
        self._context.linger_ms = 0
        # What each thread says first: that it listens, or why it cannot.
        self._news: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._daemons: tuple[ServerDaemon | SchedulerDaemon, ...] = ()
        self._threads: list[threading.Thread] = []
        try:
            scheduler = SchedulerDaemon(self.config)
            server = ServerDaemon(self.config, 0)
            self._daemons = (server, scheduler)
            self._start("scheduler", lambda: scheduler.run(self._context, lambda _: self._news.put(None)))
            self._start("server", lambda: server.run(self._context, lambda: self._news.put(None)))
        except BaseException:
            self.close()
            raise
        for _ in self._threads:
            try:
                error = self._news.get(timeout=config.timeout_s)
            except queue.Empty:
                error = KVTimeoutError(f"the embedded servers did not start in {config.timeout_s:.1f} s")
            if error is not None:
                self.close()
                raise error

    def _start(self, name: str, run: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception as error:
                self._news.put(error)

        thread = threading.Thread(target=guarded, name=f"kvmpi-{name}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        """Stop both threads and remove their sockets. Idempotent."""
        for daemon in self._daemons:
            daemon.stop()
        for thread in self._threads:
            thread.join(5.0)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


def private_folder() -> str:
    """A new folder of mode 0700, for servers and their sockets.

    Raises:
        ConfigError: none can be made whose name is short enough for a socket.
    """
    try:
        folder = tempfile.mkdtemp(prefix="kvmpi-")
        name = folder.encode(errors="ignore")
        if len(name) > _MAX_FOLDER_BYTES or name != os.fsencode(folder):  # as addresses are UTF-8
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix="kvmpi-", dir=SHORT)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(
            f"servers have no folder for their sockets ({where}{error.strerror}); set TMPDIR to a folder "
            f"that can be written, with a name of less than {_MAX_FOLDER_BYTES - 15} bytes"
        ) from None
    return folder
