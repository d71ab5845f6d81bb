"""Between the snapshots' state machines and their files: what the scheduler's and the servers' loops do for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kvmpi.config import Config
from kvmpi.ps import snapshot_files as files
from kvmpi.ps.chains import PARTS_PER_SERVER
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.snapshot_book import Manifest
from kvmpi.wire import Message
from kvmpi.wire import messages as m

if TYPE_CHECKING:
    from kvmpi.ps.server import ServerState
    from kvmpi.ps.snapshots import PartCopy, Taking

_log = logging.getLogger(__name__)

#: Longest wait at the end of a job for the snapshot that is under way; the launcher kills after 5 s.
_FINISH_S = 3.0


def resumed_manifest(config: Config, complain: Callable[[str], None]) -> Manifest | None:
    """The snapshot that the job goes on from, if it is to; also sees to it that new ones can be written.

    Raises:
        ConfigError: there is none that can be used, or the folder for new ones cannot.
    """
    found = None
    if config.resume:
        found = files.choose(config.resume, config.num_servers * PARTS_PER_SERVER, PARTS_PER_SERVER, complain)
    if config.snapshot_dir:
        files.prepare(config.snapshot_dir, config.resume, 0 if found is None else found.number)
    return found


def load_parts(config: Config, state: ServerState, rank: int, view: m.View, alive: Callable[[], None]) -> None:
    """Read what the first view says that server ``rank`` has; ``alive`` is called now and then.

    Raises:
        KVError: a file is missing or damaged.
    """
    mine = [number for number, chain in enumerate(view.chains) if rank in chain.members]
    if not mine:
        return  # it is given all by others; the snapshot may have been replaced by newer ones, and be gone
    parts = {}
    for number in mine:
        parts[number] = files.read_part(config.resume, view.snapshot, number)
        alive()
    state.resume(parts, files.read_keys(config.resume, view.snapshot, len(view.chains)))


class Disk(Protocol):
    """Where snapshots are kept; ``kvmpi.ps.snapshot_files`` is one, with files."""

    def write_part(self, directory: str, number: int, part: int, copy: PartCopy) -> m.PartFile: ...

    def write_manifest(self, directory: str, manifest: Manifest) -> None: ...

    def numbers(self, directory: str) -> list[int]: ...

    def complete(self, directory: str) -> list[int]: ...

    def remove(self, directory: str, number: int) -> None: ...


class Beside(Protocol):
    """What runs work beside the loop of a daemon, in order; ``snapshot_files.Background`` does, with a thread."""

    @property
    def busy(self) -> bool: ...

    def start(self, run: Callable[[], Any], then: Callable[[Any], None]) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


def _in_a_thread(wake: Callable[[], None]) -> Beside:
    return files.Background("kvmpi-snapshots", wake)


class _Files:
    """What both daemons have: something that writes beside them, made when it is needed, and how they end.

    Args:
        wake: called when something is done, from any thread.
        disk, beside: what writes, and what makes it run beside the daemon.
    """

    def __init__(
        self, config: Config, wake: Callable[[], None], disk: Disk = files,
        beside: Callable[[Callable[[], None]], Beside] = _in_a_thread,
    ) -> None:  # fmt: skip
        self._directory, self._disk = config.snapshot_dir, disk
        self._wake, self._make = wake, beside
        self._background: Beside | None = None
        self._until_s: float | None = None
        self._writing = ""  # by whom which snapshot, the last one

    def _thread(self) -> Beside:
        if self._background is None:
            self._background = self._make(self._wake)
        return self._background

    def busy(self, now_s: float) -> bool:
        """Asked when the daemon is to end: whether a snapshot that is under way still holds it back."""
        if not self._directory:
            return False
        if self._until_s is None:
            self._until_s = now_s + _FINISH_S
            self._end()
        if now_s < self._until_s:
            return self._pending()
        if self._writing and self._background is not None and self._background.busy:
            _log.warning(
                "%s: not written to %s %.0f s after the end of the job, which waits no longer; --resume takes the one "
                "before it, if there is one", self._writing, self._directory, _FINISH_S,
            )  # fmt: skip
        return False

    def _end(self) -> None:
        raise NotImplementedError

    def _pending(self) -> bool:
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the thread."""
        if self._background is not None:
            self._background.close()


class SnapshotWriter(_Files):
    """Writes what a server has copied."""

    def __init__(self, config: Config, state: ServerState, wake: Callable[[], None], **how: Any) -> None:
        super().__init__(config, wake, **how)
        self._snapshots = state.snapshots

    def round(self) -> int:
        """The number that the server's furthest chunk is at."""
        return 0 if self._snapshots is None else self._snapshots.round()

    def step(self) -> list[Message]:
        """Start and finish what there is; returns the news for the scheduler. Called after every batch of messages."""
        snapshots = self._snapshots
        if snapshots is None:
            return []
        if self._background is not None:
            self._background.finish()
        if (taking := snapshots.take_ready()) is not None:
            self._writing = f"server {snapshots.rank}: snapshot {taking.number}"
            self._thread().start(lambda: self._write(taking), lambda result: self._written(taking, result))
        return snapshots.take_messages()

    def _write(self, taking: Taking) -> list[m.PartFile]:
        started_s = time.monotonic()
        assert taking.parts is not None
        if not taking.stores:  # all have ended here: whatever others have, the scheduler gives it up
            return [m.PartFile(part, 0, 0) for part in taking.parts]
        written = [
            self._disk.write_part(self._directory, taking.number, part, copy) for part, copy in taking.parts.items()
        ]
        _log.info("snapshot %d: written in %.2f s", taking.number, time.monotonic() - started_s)
        return written

    def _written(self, taking: Taking, result: list[m.PartFile] | Exception) -> None:
        assert self._snapshots is not None
        if isinstance(result, Exception):
            # Without a folder: the scheduler has given the snapshot up and removed it, which is no fault of the disk.
            level = logging.INFO if isinstance(result, FileNotFoundError) else logging.ERROR
            _log.log(
                level, "server %d: snapshot %d is given up: %s", self._snapshots.rank, taking.number, _said(result)
            )
        self._snapshots.written(taking, None if isinstance(result, Exception) else result)

    def _end(self) -> None:
        assert self._snapshots is not None
        self._snapshots.close()

    def _pending(self) -> bool:
        return self._background is not None and self._background.busy


class SnapshotKeeper(_Files):
    """Completes snapshots of which all parts are written, and deletes old ones."""

    def __init__(self, config: Config, state: SchedulerState, wake: Callable[[], None], **how: Any) -> None:
        super().__init__(config, wake, **how)
        self._state = state

    def begin(self) -> None:
        """A job begins. If it goes on from a snapshot here, those after it are damaged, and must not count as kept."""
        resumed = self._state.book.resumed
        there = self._disk.numbers(self._directory) if self._directory and resumed is not None else []
        if resumed is not None and resumed.number in there:
            self._remove([number for number in there if number > resumed.number])

    def recall(self) -> None:
        """A scheduler before this one has completed snapshots, of which the last must not be deleted too soon."""
        if self._directory:
            self._state.book.recall(self._disk.complete(self._directory))

    def step(self) -> None:
        """Start and finish what there is. Called after every batch of messages."""
        if not self._directory:
            return
        if self._background is not None:
            self._background.finish()
        if stale := self._state.book.take_stale():
            self._thread().start(lambda: self._remove(stale), _nothing)
        while self._state.complete:
            manifest = self._state.complete.pop(0)
            self._writing = f"scheduler: snapshot {manifest.number}"
            self._thread().start(
                lambda manifest=manifest: self._disk.write_manifest(self._directory, manifest),  # type: ignore[misc]
                lambda result, number=manifest.number: self._committed(number, result),  # type: ignore[misc]
            )

    def _committed(self, number: int, result: Exception | None) -> None:
        if isinstance(result, Exception):
            _log.error("scheduler: snapshot %d is given up: %s", number, _said(result))
            self._state.book.given_up(number)
            return
        self._state.book.committed(number)
        self._thread().start(
            lambda: self._remove(self._state.book.obsolete(self._disk.numbers(self._directory))), _nothing
        )

    def _remove(self, numbers: list[int]) -> None:
        for number in numbers:
            self._disk.remove(self._directory, number)

    def _end(self) -> None:
        self._state.book.close()

    def _pending(self) -> bool:
        book = self._state.book
        return (
            bool(self._state.complete) or not book.settled or (self._background is not None and self._background.busy)
        )


def _nothing(_: object) -> None:
    pass


def _said(error: Exception) -> str:
    """What went wrong with which file."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"
