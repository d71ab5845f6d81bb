"""A folder for snapshots under virtual time: it may be slow, full, or lose what it said was written."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulation.network import Network

from kvmpi.ps import snapshot_files as files
from kvmpi.ps.snapshot_book import Manifest
from kvmpi.ps.snapshots import PartCopy
from kvmpi.wire import messages as m

#: Where disks are made: real files, where they cost least. Who plays many jobs puts a folder of its own there, which it
#: removes, whatever becomes of the processes that play them.
folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
#: What their names begin with.
PREFIX = "kvmpi-simulated-"


class SimulatedDisk:
    """What ``durability.Disk`` is, on real files, with faults that are decided by a seed.

    Attributes:
        committed: numbers of the snapshots whose manifest was written, in ascending order.
        torn: those of them that lack something nevertheless.
        on_complete: called with number and parts of each snapshot when its manifest was written.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder)
        self.directory = self._folder.name
        self.full = self._random.choice([0.0, 0.0, 0.02, 0.1])
        self.slow_s = self._random.choice([0.0, 0.05, 1.0])
        self.committed: list[int] = []
        self.torn: set[int] = set()
        self.on_complete: Callable[[int, list[PartCopy]], None] = lambda number, parts: None
        self.fired: dict[str, int] = {}

    def _maybe_full(self) -> None:
        if self._random.random() < self.full:
            self.fired["disk full"] = self.fired.get("disk full", 0) + 1
            raise OSError(errno.ENOSPC, "no space left on the simulated device")

    def write_part(self, directory: str, number: int, part: int, copy: PartCopy) -> m.PartFile:
        self._maybe_full()
        return files.write_part(directory, number, part, copy)

    def write_manifest(self, directory: str, manifest: Manifest) -> None:
        self._maybe_full()
        files.write_manifest(directory, manifest)
        self.committed = sorted({*self.committed, manifest.number})
        self.on_complete(manifest.number, [self.read(directory, manifest, part) for part in range(len(manifest.files))])

    def read(self, directory: str, manifest: Manifest, part: int) -> PartCopy:
        return files.read_part(directory, manifest.number, part)

    def numbers(self, directory: str) -> list[int]:
        return files.numbers(directory)

    def complete(self, directory: str) -> list[int]:
        return files.complete(directory)

    def remove(self, directory: str, number: int) -> None:
        files.remove(directory, number)

    def tear(self) -> None:
        """The newest snapshot loses a piece of a file, as after a power failure on a disk that lies."""
        if not self.committed:
            return
        newest = self.committed[-1]
        found = sorted(path for path in Path(self.directory, str(newest)).iterdir() if path.stat().st_size)
        path = self._random.choice(found)
        content = bytearray(path.read_bytes())
        if self._random.random() < 0.5:
            del content[self._random.randrange(len(content)) :]
        else:
            content[self._random.randrange(len(content))] ^= 0xFF
        path.write_bytes(content)
        self.torn.add(newest)
        self.fired["disk torn"] = self.fired.get("disk torn", 0) + 1

    def close(self) -> None:
        self._folder.cleanup()


class VirtualBackground:
    """What ``snapshot_files.Background`` is: one piece of work after the other, at times of the simulated clock.

    What has not begun when its process is killed is never done.
    """

    def __init__(self, network: Network, process: str, slow_s: float, lives: Callable[[], bool]) -> None:
        self._network, self._process, self._slow_s, self._lives = network, process, slow_s, lives
        self._free_at_s = 0.0
        self._done: list[tuple[Callable[[Any], None], Any]] = []
        self._under_way = 0

    @property
    def busy(self) -> bool:
        return self._under_way > 0

    def start(self, run: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._under_way += 1
        self._free_at_s = max(self._free_at_s, self._network.now_s) + self._network.random.uniform(0.0, self._slow_s)
        self._network.at(self._free_at_s, lambda: self._run(run, then), self._process)

    def _run(self, run: Callable[[], Any], then: Callable[[Any], None]) -> None:
        if not (self._lives() and self._network.is_there(self._process)):
            return
        try:
            result: Any = run()
        except OSError as error:
            result = error
        self._done.append((then, result))

    def finish(self) -> None:
        while self._done:
            then, result = self._done.pop(0)
            self._under_way -= 1
            then(result)

    def close(self) -> None:
        pass
