"""``python -m kvmpi.ps scheduler|server [PARENT]``: one scheduler or server process, as the launcher starts them.

``PARENT`` is the process whose end is the end of this one.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time

from kvmpi.config import ENDINGS_FILE, Config
from kvmpi.deadline import Deadline
from kvmpi.errors import KVError, NotLaunchedError, PeerLostError
from kvmpi.machine import host_name
from kvmpi.ps import descriptors
from kvmpi.ps.daemon import SchedulerDaemon, ServerDaemon
from kvmpi.trace import stall, timeline
from kvmpi.wire import create_keys, new_context

#: Between two looks at the process that this one ends with.
_LOOK_S = 0.2


def main(role: str, parent: int = 0) -> int:
    """Run until SIGTERM, or Ctrl-C if no launcher is there; the exit status is 0 then, and 1 after an error."""
    config = Config.from_env()
    logging.basicConfig(level=config.log_level, format="%(levelname)s %(message)s", stream=sys.stderr)
    timeline.begin(config)
    stall.begin(config)
    descriptors.allow_many(config, role)
    context = new_context(config)
    try:
        if role == "scheduler":
            if config.security == "curve" and config.keys:
                create_keys(config.keys)
            scheduler = SchedulerDaemon(config, _say)
            _begin(scheduler, config, parent)
            scheduler.run(context, lambda endpoint: _announce(config, endpoint))
        else:
            if not config.scheduler or config.rank < 0:
                raise NotLaunchedError(
                    "a server needs KVMPI_SCHEDULER and KVMPI_RANK; start the job with 'kvmpi run -s'"
                )
            server = ServerDaemon(config, config.rank, _say)
            _begin(server, config, parent)
            server.run(context, lambda: _say_ready(config, "listening"))
    finally:
        context.destroy(linger=100)
    if parent and (role == "scheduler" or not _has_scheduler(config.job_dir)):
        shutil.rmtree(config.job_dir, ignore_errors=True)  # its parent does so too, if nobody kills it meanwhile
    return 0


def _begin(daemon: SchedulerDaemon | ServerDaemon, config: Config, parent: int) -> None:
    gc.freeze()  # what was imported stays: the collector need not look through it again and again
    signal.signal(signal.SIGTERM, lambda *_: daemon.stop())
    # Ctrl-C goes to the whole terminal group; where there is a launcher, that decides when servers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN if config.job_id else lambda *_: daemon.stop())
    if parent:
        threading.Thread(target=_end_with, args=(parent, daemon, config), name="kvmpi-parent", daemon=True).start()


def _end_with(parent: int, daemon: SchedulerDaemon | ServerDaemon, config: Config) -> None:
    """Not by the system's signal for that: it comes when the thread ends that has started this process."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    if isinstance(daemon, SchedulerDaemon):
        # Servers of the same parent look when they look. Only by the scheduler does anybody hear that they leave.
        deadline = Deadline(2 * _LOOK_S + config.grace_s)
        while daemon.has_servers_on(host_name()) and deadline.remaining_s():
            time.sleep(_LOOK_S / 4)
    daemon.stop()
    time.sleep(config.grace_s)  # in which a snapshot that was begun may become whole
    shutil.rmtree(config.job_dir, ignore_errors=True)
    os._exit(1)


def _has_scheduler(folder: str) -> bool:
    """Whether a scheduler uses this folder, and hears there who has ended."""
    try:
        os.close(os.open(os.path.join(folder, ENDINGS_FILE), os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    """For whoever has started the job; the launcher shows it."""
    print(text, file=sys.stderr, flush=True)


def _announce(config: Config, endpoint: str) -> None:
    if config.scheduler:
        return  # started again where everybody knows it
    if config.ready_fd < 0:
        print(endpoint, flush=True)
    _say_ready(config, endpoint)


def _say_ready(config: Config, text: str) -> None:
    """To whoever has started this process, and waits for that."""
    if config.ready_fd >= 0:
        with os.fdopen(config.ready_fd, "w") as ready:
            ready.write(text + "\n")


if __name__ == "__main__":
    role, *parents = sys.argv[1:] or [""]
    if role not in ("scheduler", "server") or len(parents) > 1 or not all(map(str.isdigit, parents)):
        sys.exit("usage: python -m kvmpi.ps scheduler|server [PARENT]")
    try:
        sys.exit(main(role, *map(int, parents)))
    except KVError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        # The launcher may start a server again that the job has taken for lost.
        sys.exit(os.EX_TEMPFAIL if isinstance(error, PeerLostError) else 1)
