"""The files of snapshots: ``DIR/NUMBER/part-P.safetensors``, and ``DIR/NUMBER/snapshot.json`` when all are there.

A part's file is made of the copies' own memory, a block at a time. Whether it is whole is told by its size and CRC-32,
which stand in the manifest: 2.7 GB/s on the machine of the project's benchmarks, where BLAKE2b has 0.9.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import shutil
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import safetensors

from kvmpi import tensor_files
from kvmpi.errors import ConfigError, KVError
from kvmpi.files import replacing, sync
from kvmpi.ps.snapshot_book import Manifest
from kvmpi.tensor_files import BLOCK_BYTES
from kvmpi.wire import entries
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvmpi.ps.snapshots import PartCopy

Buffer: TypeAlias = "npt.NDArray[Any]"

_FORMAT = "kvmpi-snapshot-1"
_MANIFEST = "snapshot.json"


# ---- parts


def write_part(directory: str, number: int, part: int, copy: PartCopy) -> m.PartFile:
    """Write one part; the file is there as a whole or not at all.

    A file that is there stays: where parts change hands two servers may write the same one, and of a store without
    rounds not the same values. The manifest is about the first.

    Raises:
        OSError: it cannot be written, or there is another one; the error names the file.
    """
    folder = _folder(directory, number)
    path = _part_path(folder, part)
    tensors: dict[str, Buffer] = {}
    stores = []
    for store, saved in copy.items():
        chunks = []
        for i, chunk in enumerate(saved.chunks):
            tensors.update({f"{store}/{i}/{name}": array for name, array in chunk.arrays.items()})
            chunks.append([
                chunk.key, chunk.chunk, chunk.num_chunks, chunk.count, chunk.shape, chunk.dtype, chunk.updates,
                chunk.generation, _packed(chunk.rule), list(chunk.arrays), chunk.by_rows, chunk.gathered,
            ])  # fmt: skip
        stores.append([store, saved.mode, saved.num_clients, saved.step, _packed(saved.rule), chunks])
    manifest = {"format": _FORMAT, "number": number, "part": part, "stores": stores}
    try:
        os.makedirs(folder, exist_ok=True)
        nbytes, checksum = 0, 0
        with replacing(path, over=False) as temporary, open(temporary, "wb") as file:
            nbytes, checksum = tensor_files.write(file, tensors, {"manifest": json.dumps(manifest)})
    except OSError as error:
        error.filename = path
        if not isinstance(error, FileExistsError) or _measure(path) != (nbytes, checksum):
            raise
    return m.PartFile(part, nbytes, checksum)


def read_part(directory: str, number: int, part: int) -> PartCopy:
    """What ``write_part`` has written.

    Raises:
        KVError: the file is missing or damaged; the message names it.
    """
    from kvmpi.ps.snapshots import ChunkCopy, StoreCopy  # the scheduler reads no values, and starts without NumPy

    path = _part_path(_folder(directory, number), part)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            stores: PartCopy = {}
            for store, mode, num_clients, step, rule, chunks in _manifest_of(file)["stores"]:
                saved = stores[store] = StoreCopy(mode, num_clients, step, entries.RuleInForce(*rule))
                for i, (*layout, updates, generation, rule, names, by_rows, gathered) in enumerate(
                    map(_complete, chunks)
                ):
                    key, chunk, num, count, shape, dtype = layout
                    arrays = {name: file.get_tensor(f"{store}/{i}/{name}") for name in names}
                    in_force = entries.RuleInForce(*rule)
                    how = updates, generation, in_force, arrays, by_rows, gathered
                    saved.chunks.append(ChunkCopy(key, chunk, num, count, shape, dtype, *how))
            return stores
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(number, path, error) from error


def _complete(chunk: list[Any]) -> list[Any]:
    """With what files of before have not: that the last round of a chunk was of rows, and how many pushes wait."""
    return [*chunk, *[False, 0][len(chunk) - 10 :]]


def read_keys(directory: str, number: int, num_parts: int) -> dict[int, frozenset[Key]]:
    """The keys of each store of which all chunks are there, in whatever part.

    Raises:
        KVError: a file is missing or damaged; the message names it.
    """
    there: dict[int, Counter[tuple[Key, int]]] = {}
    for part in range(num_parts):
        path = _part_path(_folder(directory, number), part)
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                for store, *_, chunks in _manifest_of(file)["stores"]:
                    there.setdefault(store, Counter()).update((chunk[0], chunk[2]) for chunk in chunks)
        except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(number, path, error) from error
    return {
        store: frozenset(key for (key, num_chunks), count in found.items() if count >= num_chunks)
        for store, found in there.items()
    }


def _unreadable(number: int, path: str, error: Exception) -> KVError:
    if isinstance(error, FileNotFoundError):  # it was there when the scheduler chose the snapshot
        return KVError(
            f"snapshot {number}: {path} is no longer there: another job that writes to this folder has deleted it; it "
            "keeps its last two; start again, and the newest is taken, or go on from a copy of the folder"
        )
    return KVError(f"snapshot {number}: {path}: {type(error).__name__}: {error}")


def _manifest_of(file: Any) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((file.metadata() or {}).get("manifest", "{}"))
    if manifest.get("format") != _FORMAT:
        raise ValueError(f"no part of a snapshot of kvmpi ({_FORMAT})")
    return manifest


def _packed(rule: entries.RuleInForce) -> list[Any]:
    return [rule.from_round, rule.generation, rule.rule, rule.hyperparams]


# ---- whole snapshots


def write_manifest(directory: str, manifest: Manifest) -> None:
    """Make a snapshot complete.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    content = json.dumps({"format": _FORMAT, "number": manifest.number, "files": manifest.files,
                          "steps": {str(store): step for store, step in manifest.steps.items()}})  # fmt: skip
    path = _manifest_path(directory, manifest.number)
    try:
        with replacing(path) as temporary, open(temporary, "w") as file:
            json.dump({"content": content, "crc32": zlib.crc32(content.encode())}, file)
        sync(directory)  # the folder's own name must be on the disk too
    except OSError as error:
        error.filename = path
        raise


def read_manifest(directory: str, number: int) -> Manifest:
    """The manifest of a snapshot.

    Raises:
        KVError: it is missing or damaged; the message names it.
    """
    path = _manifest_path(directory, number)
    try:
        with open(path) as file:
            outer = json.load(file)
        content = outer["content"]
        if zlib.crc32(content.encode()) != outer["crc32"]:
            raise ValueError("its checksum is wrong")
        found = json.loads(content)
        if found["format"] != _FORMAT or found["number"] != number:
            raise ValueError(f"it is the manifest of {found['format']} {found['number']}")
        files = tuple((int(nbytes), int(checksum)) for nbytes, checksum in found["files"])
        return Manifest(number, files, {int(store): int(step) for store, step in found["steps"].items()})
    except FileNotFoundError:
        raise KVError(f"{path} is missing: the snapshot was not completed") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KVError(f"{path} is damaged: {error}") from error


def check(directory: str, manifest: Manifest) -> None:
    """Read all files of a snapshot.

    Raises:
        KVError: one is missing or not what was written; the message names it.
    """
    for part, (nbytes, expected) in enumerate(manifest.files):
        path = _part_path(_folder(directory, manifest.number), part)
        try:
            size, checksum = _measure(path)
        except OSError as error:
            raise KVError(f"{path}: {error.strerror}") from error
        if size != nbytes:
            raise KVError(f"{path} is damaged: {size} bytes of {nbytes}")
        if checksum != expected:
            raise KVError(f"{path} is damaged: its checksum is {checksum:08x}, expected {expected:08x}")


def _measure(path: str) -> tuple[int, int]:
    """How many bytes a file has, and their checksum."""
    nbytes = checksum = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            nbytes, checksum = nbytes + len(block), zlib.crc32(block, checksum)
    return nbytes, checksum


def numbers(directory: str) -> list[int]:
    """The snapshots of which there is anything, in ascending order."""
    try:
        return sorted(int(name) for name in os.listdir(directory) if name.isdecimal() and str(int(name)) == name)
    except OSError:
        return []


def complete(directory: str) -> list[int]:
    """The snapshots that have a manifest, in ascending order."""
    return [number for number in numbers(directory) if os.path.exists(_manifest_path(directory, number))]


def choose(directory: str, num_parts: int, parts_per_server: int, complain: Callable[[str], None]) -> Manifest:
    """The newest snapshot that is whole; ``complain`` hears about newer ones.

    Raises:
        ConfigError: there is none, or it is of another number of servers.
    """
    found = []
    for number in reversed(numbers(directory)):
        try:
            manifest = read_manifest(directory, number)
            if len(manifest.files) != num_parts:
                there, here = (count // parts_per_server for count in (len(manifest.files), num_parts))
                raise ConfigError(
                    f"resume from {directory}: snapshot {number} is of a job with {there} servers, this one has "
                    f"{here}; start it with -s {there}"
                )
            check(directory, manifest)
        except ConfigError:
            raise
        except KVError as error:
            found.append(f"snapshot {number}: {error}")
            complain(f"snapshot {number} cannot be used: {error}")
            continue
        return manifest
    folder, name = os.path.split(os.path.abspath(directory))
    if not os.path.isdir(directory):
        found = ["there is no such folder"]
    elif not found and name.isdecimal() and os.path.exists(os.path.join(directory, _MANIFEST)):
        found = [
            f"it is one itself; name the folder of all of them, {folder}, and the job goes on from the newest, "
            f"which is {max(complete(folder), default=name)}"
        ]
    raise ConfigError(f"resume from {directory}: no usable snapshot; " + ("; ".join(found) or "the folder has none"))


class Claim:
    """While it is held, no other job writes snapshots to ``directory``, which is made if need be. It ends with its
    process, and leaves no file; where the file system cannot lock folders nobody is kept out.

    Raises:
        ConfigError: another job writes there, or nobody can.
    """

    def __init__(self, directory: str) -> None:
        self._fd = -1
        try:
            os.makedirs(directory, exist_ok=True)
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"snapshots cannot be written to {directory}: {error.strerror}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise ConfigError(
                f"another job, which still runs, writes its snapshots to {directory}; wait for its end, or name "
                "another folder"
            ) from None
        except OSError:
            pass

    def release(self) -> None:
        """Let others write there. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = release


def prepare(directory: str, resumed_from: str, resumed: int) -> None:
    """See to it that snapshots can be written into ``directory``, by a job that goes on from snapshot ``resumed``.

    What was not completed is deleted, and newer ones, which cannot be used, are set aside: their numbers come again.

    Raises:
        ConfigError: they cannot, or those of another job are there.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f"snapshots cannot be written to {directory}: {error.strerror}") from None
    mine = resumed_from and os.path.isdir(resumed_from) and os.path.samefile(directory, resumed_from)
    found = complete(directory)
    if found and not mine:
        raise ConfigError(
            f"{directory} has snapshots of another job (the newest is {found[-1]}), which those of this one would "
            "replace; go on from them with --resume, or name another folder"
        )
    for number in numbers(directory):
        if number not in found:
            remove(directory, number)
        elif number > resumed:
            _set_aside(_folder(directory, number))


def _set_aside(folder: str) -> None:
    aside = folder + ".unusable"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        os.rename(folder, aside)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used, and not be renamed to {aside}: {error.strerror}") from None


def remove(directory: str, number: int) -> None:
    """Delete a snapshot, its manifest first: what is left of it if that is interrupted is no snapshot."""
    try:
        os.unlink(_manifest_path(directory, number))
    except OSError:
        pass
    shutil.rmtree(_folder(directory, number), ignore_errors=True)


def _folder(directory: str, number: int) -> str:
    return os.path.join(directory, str(number))


def _manifest_path(directory: str, number: int) -> str:
    return os.path.join(_folder(directory, number), _MANIFEST)


def _part_path(folder: str, part: int) -> str:
    return os.path.join(folder, f"part-{part}.safetensors")


# ---- beside the loop of a daemon


class Background:
    """Runs functions one after the other in a thread of its own, so that a slow disk holds nobody up.

    Args:
        wake: called, in that thread, when something is done.
    """

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._todo: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._under_way = 0

    def start(self, run: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Run ``run`` in the thread, and then ``then`` with its result, or with its exception, in ``finish``."""
        self._under_way += 1
        self._todo.put((run, then))

    @property
    def busy(self) -> bool:
        """Whether something is still to be finished."""
        return self._under_way > 0

    def finish(self) -> None:
        """Call what follows on what has been done; to be called by the thread that ``start`` is called by."""
        while not self._done.empty():
            then, result = self._done.get()
            self._under_way -= 1
            then(result)

    def close(self) -> None:
        """End the thread when it has nothing more to do. It is not waited for."""
        self._todo.put(None)

    def _run(self) -> None:
        while self._run_one():
            pass

    def _run_one(self) -> bool:
        """Do the next piece of work; a function of its own, so that nothing is held while the thread waits."""
        if (work := self._todo.get()) is None:
            return False
        run, then = work
        try:
            result: Any = run()
        except Exception as error:
            result = error
        self._done.put((then, result))
        self._wake()
        return True
