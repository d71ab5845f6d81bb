"""What a scheduler or a server lets people see: a file for kvmpi top, the web page, the Prometheus endpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from kvmpi.config import STATUS_FILE, WATCHED_FILE, Config
from kvmpi.errors import ConfigError
from kvmpi.trace.board import Board, Picture

#: A picture is written as long as that was touched within this time.
_INTEREST_S = 5.0


@contextmanager
def _port(what: str, host: str, port: int, setting: str) -> Iterator[None]:
    """An OSError in here is that the port cannot be had.

    Raises:
        ConfigError: in its place.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{what} cannot listen on {host}:{port}: {error.strerror}; set {setting} to another port, or to 0, which "
            "lets the system choose, or KVMPI_METRICS_HOST to an address of this host"
        ) from None


class Showing:
    """Shows the pictures that ``make`` makes, from within the loop that calls ``step``.

    Args:
        index: 0 for the scheduler, server R has R + 1.
        say: how people are told where to look. None: nobody looks, as at servers inside of a program.
    Raises:
        ConfigError: a port is in use, or a library is missing.
    """

    def __init__(
        self, config: Config, make: Callable[[float], Picture], index: int, say: Callable[[str], None] | None = None
    ) -> None:
        self._board = Board(make)
        self._folder = config.job_dir if index == 0 and say is not None else ""
        self._next_look_s = 0.0
        self._closers: list[Callable[[], None]] = []
        who = "the scheduler" if index == 0 else f"server {index - 1}"
        try:
            if config.metrics_port >= 0 and say is not None:
                self._serve_metrics(config, index, who, say)
            if config.dashboard_port >= 0 and index == 0 and say is not None:
                self._serve_dashboard(config, say)
        except BaseException:
            self.close()
            raise

    def _serve_metrics(self, config: Config, index: int, who: str, say: Callable[[str], None]) -> None:
        from kvmpi.trace.prometheus import serve

        port = config.metrics_port + index if config.metrics_port else 0
        with _port(f"{who} for Prometheus", config.metrics_host, port, "KVMPI_METRICS_PORT"):
            url, close = serve(self._board, config.metrics_host, port)
        self._closers.append(close)
        say(f"metrics of {who} for Prometheus: {url}")

    def _serve_dashboard(self, config: Config, say: Callable[[str], None]) -> None:
        from kvmpi.trace.dashboard import serve

        with _port("the web page", config.metrics_host, config.dashboard_port, "KVMPI_DASHBOARD_PORT (--dashboard)"):
            url, close = serve(self._board, config.metrics_host, config.dashboard_port)
        self._closers.append(close)
        say(f"dashboard: {url}")

    def step(self, now_s: float) -> None:
        """Make and show a new picture, if somebody looks and it is time to."""
        self._board.step(now_s)
        if self._folder and now_s >= self._next_look_s:
            self._next_look_s = now_s + 1.0
            with suppress(OSError):
                if time.time() - os.stat(os.path.join(self._folder, WATCHED_FILE)).st_mtime < _INTEREST_S:
                    self._write(now_s)

    def _write(self, now_s: float) -> None:
        path = os.path.join(self._folder, STATUS_FILE)
        with open(path + ".new", "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(msgspec.json.encode(self._board.renew(now_s)))
        os.replace(path + ".new", path)

    def close(self, now_s: float | None = None) -> None:
        """End what listens. With ``now_s``, leave the last picture for the launcher's summary."""
        for close in self._closers:
            close()
        self._closers = []
        if self._folder and now_s is not None:
            with suppress(OSError):
                self._write(now_s)
