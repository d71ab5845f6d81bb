"""``python -m kvmpi.ps scheduler|server``: one scheduler or server process, as the launcher starts them."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys

from kvmpi.config import Config
from kvmpi.errors import KVError, NotLaunchedError, PeerLostError
from kvmpi.ps import descriptors
from kvmpi.ps.daemon import SchedulerDaemon, ServerDaemon
from kvmpi.trace import stall, timeline
from kvmpi.wire import create_keys, new_context


def main(role: str) -> int:
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
            _begin(scheduler, config)
            scheduler.run(context, lambda endpoint: _announce(config, endpoint))
        else:
            if not config.scheduler or config.rank < 0:
                raise NotLaunchedError(
                    "a server needs KVMPI_SCHEDULER and KVMPI_RANK; start the job with 'kvmpi run -s'"
                )
            server = ServerDaemon(config, config.rank, _say)
            _begin(server, config)
            server.run(context)
    finally:
        context.destroy(linger=100)
    return 0


def _begin(daemon: SchedulerDaemon | ServerDaemon, config: Config) -> None:
    gc.freeze()  # what was imported stays: the collector need not look through it again and again
    signal.signal(signal.SIGTERM, lambda *_: daemon.stop())
    # Ctrl-C goes to the whole terminal group; where there is a launcher, that decides when servers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN if config.job_id else lambda *_: daemon.stop())


def _say(text: str) -> None:
    """For whoever has started the job; the launcher shows it."""
    print(text, file=sys.stderr, flush=True)


def _announce(config: Config, endpoint: str) -> None:
    if config.scheduler:
        return  # started again where everybody knows it
    if config.ready_fd < 0:
        print(endpoint, flush=True)
        return
    with os.fdopen(config.ready_fd, "w") as ready:
        ready.write(endpoint + "\n")


if __name__ == "__main__":
    if sys.argv[1:] not in (["scheduler"], ["server"]):
        sys.exit("usage: python -m kvmpi.ps scheduler|server")
    try:
        sys.exit(main(sys.argv[1]))
    except KVError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        # The launcher may start a server again that the job has taken for lost.
        sys.exit(os.EX_TEMPFAIL if isinstance(error, PeerLostError) else 1)
