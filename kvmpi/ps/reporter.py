"""Tells the scheduler about once a second what a worker has done: a thread that sleeps, with a connection of its own.

Also workers that have no other connection to the scheduler report, each for itself: to collect the numbers inside a
client would take a part in its collectives, and those are what must not be disturbed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import replace

from kvmpi.config import Config
from kvmpi.errors import KVError
from kvmpi.machine import host_name
from kvmpi.ps.incarnations import new_incarnation
from kvmpi.trace.activity import Activity, activity
from kvmpi.wire import Connection, Readiness, new_context
from kvmpi.wire import messages as m

_log = logging.getLogger(__name__)

#: So many reports may be without an answer: more are not piled up for a scheduler that is not there.
_MOST_UNHEARD = 4
#: After so long without an answer those that wait for one are given up.
_PATIENCE_S = 20.0
#: The last report is to be heard: the scheduler ends soon after the last worker. An unreachable one is not waited for.
_LAST_S = 1.0


class Reporter:
    """Reports of this process, as worker ``config.rank``.

    Args:
        source: what it has done.
    """

    def __init__(self, config: Config, client: int, source: Activity) -> None:
        self._config, self._client, self._source = config, client, source
        self._pid = os.getpid()
        self._incarnation = new_incarnation(config)
        self._number = self._heard = 0
        self._wake, self._is_out = threading.Event(), threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="kvmpi-reports", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Send a report now, and return when it was heard, or soon after if it is not."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return  # a child that was forked has no such thread
        self._is_out.clear()
        self._wake.set()
        self._is_out.wait(_LAST_S)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop = True
        self._wake.set()
        if os.getpid() == self._pid:
            self._thread.join(2 * _LAST_S)

    def _run(self) -> None:
        # Reports are small: nothing is to be had from shared memory.
        context = new_context(replace(self._config, shared_payloads="off", io_threads=1))
        try:
            name, silence_s = f"worker {self._config.rank}", self._config.heartbeat_timeout_s / 4
            limit_bytes = self._config.max_message_bytes
            connection = Connection(context, self._config.scheduler, limit_bytes, name, "the scheduler", silence_s)
            try:
                self._loop(connection)
            finally:
                connection.close()
        except KVError as error:  # whoever needs the scheduler for more than this says so
            _log.info("worker %d reports nothing to the scheduler: %s", self._config.rank, error)
        except Exception:  # a defect here must not end a training run
            _log.exception("worker %d reports nothing further to the scheduler", self._config.rank)
        finally:
            self._is_out.set()
            context.destroy(linger=0)

    def _loop(self, connection: Connection) -> None:
        readiness = Readiness([connection])
        heard_s = time.monotonic()
        while True:
            asked = self._wake.wait(self._config.report_s)
            self._wake.clear()
            if self._read(connection) or self._heard == self._number:
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > _PATIENCE_S:
                self._heard, heard_s = self._number, time.monotonic()
            if self._stop:
                return
            if self._number - self._heard < _MOST_UNHEARD:
                connection.send(self._report())
            if asked:
                until_s = time.monotonic() + _LAST_S
                while self._heard < self._number and time.monotonic() < until_s:
                    readiness.wait(0.1)
                    self._read(connection)
                self._is_out.set()

    def _read(self, connection: Connection) -> bool:
        """Take what the scheduler answers; whether it has."""
        before = self._heard
        while (received := connection.recv()) is not None:
            if isinstance(received[0], m.Heard):
                self._heard = max(self._heard, min(received[0].sent_us, self._number))
        return self._heard > before

    def _report(self) -> m.Report:
        found = self._source.observe()
        self._number += 1
        return m.Report(
            "worker", self._config.rank, self._client, self._incarnation, self._number, host_name(), found.totals,
            found.phases, dict(found.staleness.most_common(_MOST_STALENESS)), found.curves,
            ended=self._source.is_idle, answer=True,
        )  # fmt: skip


#: Of a histogram, the most frequent.
_MOST_STALENESS = 32

_reporter: Reporter | None = None


def begin_reports(config: Config, client: int) -> None:
    """Report on this process from now on, if it is a worker of a job that a launcher has started."""
    global _reporter
    if _reporter is not None or config.role != "worker" or config.rank < 0 or not config.scheduler:
        return
    if config.report_s == 0:
        return
    _reporter = Reporter(config, client, activity)
    activity.on_idle = _reporter.flush


def end_reports() -> None:
    """This process ends: all its stores are closed."""
    if _reporter is not None:
        _reporter.close()
