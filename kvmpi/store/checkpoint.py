"""The file of ``kv.save``: safetensors with a manifest, written atomically."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors

from kvmpi import optim, tensor_files
from kvmpi.arrays import DTYPES
from kvmpi.errors import ConfigError, KeyNotInitializedError, KVError, ShapeMismatchError
from kvmpi.files import replacing

Buffer = npt.NDArray[Any]
Key = int | str

_FORMAT = "kvmpi-1"


class SavedKey(msgspec.Struct):
    """One key: ``arrays`` holds "value" and what the rule remembers, each of shape ``(count,)``.

    ``rule``: the store's, where servers have said it. ``by_rows``: its last push was of rows.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    updates: int
    arrays: dict[str, Buffer] = msgspec.field(default_factory=dict)
    library: str = "numpy"  #: whose arrays the key was made of
    rule: optim.Rule | None = None
    by_rows: bool = False

    @classmethod
    def of_chunks(
        cls, key: Key, shape: tuple[int, ...], dtype: str, chunks: Sequence[Any], rule: optim.Rule | None,
        library: str = "numpy",
    ) -> SavedKey:  # fmt: skip
        """One key of ``ps.client.SavedChunk``, which cover it.

        Some have not been updated yet, where a client was lost in the middle of the first push: they are as the rule
        begins, which is ``rule`` if servers have not said it.
        """
        rule = chunks[0].rule or rule
        found = cls(key, shape, dtype, max(chunk.updates for chunk in chunks), library=library, rule=rule)
        dtypes = {name: array.dtype for chunk in chunks for name, array in chunk.arrays.items()}
        initial = {} if rule is None else rule.slots()
        for name, of_array in dtypes.items():
            whole = found.arrays[name] = np.full(math.prod(shape), initial.get(name, 0.0), of_array)
            for chunk in chunks:
                if (array := chunk.arrays.get(name)) is not None:
                    whole[chunk.start : chunk.stop] = array
                elif name == "master":
                    whole[chunk.start : chunk.stop] = optim.make_master(chunk.arrays["value"], dtype)
        return found


class Checkpoint(msgspec.Struct):
    """A whole store. ``checksum``: of all that the file says."""

    clock: int
    rule: optim.Rule | None
    keys: list[SavedKey]
    checksum: int


def write(
    path: str, store_type: str, clock: int, rule: optim.Rule | None, keys: list[SavedKey], *, with_values: bool
) -> None:
    """Replace ``path`` by the new checkpoint, or leave it as it was.

    Raises:
        KVError: the file cannot be written; the message says why.
    """
    tensors: dict[str, Buffer] = {}
    entries, checksums = [], []
    for i, saved in enumerate(keys):
        names = [name for name in saved.arrays if with_values or name != "value"]
        tensors.update({f"{i}/{name}": saved.arrays[name] for name in names})
        entries.append([saved.key, list(saved.shape), saved.dtype, saved.updates, names])
        checksums.append([_checksum(saved.arrays[name]) for name in names])
    manifest = {
        "format": _FORMAT,
        "store_type": store_type,
        "clock": clock,
        "rule": None if rule is None else [rule.name, rule.hyperparams()],
        "keys": entries,
        "crc32": checksums,
        "libraries": [saved.library for saved in keys],
        "by_rows": [saved.by_rows for saved in keys],
    }
    text = json.dumps(manifest)
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            tensor_files.write(file, tensors, {"manifest": text, "manifest_crc32": str(zlib.crc32(text.encode()))})
    except OSError as error:
        raise KVError(f"save to {path}: {error}; what was there before is unchanged") from error


def read(path: str, existing: Collection[Key], *, with_values: bool) -> Checkpoint:
    """Load and check a checkpoint. Files from before there were checksums are taken as they are.

    Args:
        existing: keys that the store has; without values, all keys of the file must be among them.
    Raises:
        KVError: the file is missing or damaged.
        ConfigError: it is no checkpoint of kvmpi, or holds no values though they are wanted.
        KeyNotInitializedError: a key of the file is not in the store, and the file has no value for it.
    """
    if os.path.isdir(path):
        raise KVError(f"load of {path}: it is a folder; kv.save writes one file (snapshots: kvmpi run --resume)")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            text = metadata.get("manifest", "{}")
            checksum = zlib.crc32(text.encode())
            if metadata.get("manifest_crc32", str(checksum)) != str(checksum):
                raise KVError(f"load of {path}: the file is damaged: what it says of its keys is not what was saved")
            manifest = json.loads(text)
            if manifest.get("format") != _FORMAT:
                raise ConfigError(f"load of {path}: not a checkpoint of kvmpi ({_FORMAT})")
            keys, checksums = [], manifest.get("crc32")
            for i, (key, shape, dtype, updates, names) in enumerate(manifest["keys"]):
                found = {name: file.get_tensor(f"{i}/{name}") for name in names}
                library = manifest["libraries"][i] if "libraries" in manifest else "numpy"
                by_rows = bool(manifest["by_rows"][i]) if "by_rows" in manifest else False
                keys.append(SavedKey(key, tuple(shape), dtype, updates, found, library, by_rows=by_rows))
                if checksums is not None and [_checksum(found[name]) for name in names] != checksums[i]:
                    raise KVError(f"load of {path}: the file is damaged: key {key!r} is not what was saved")
            clock = int(manifest["clock"])
            rule = None if manifest["rule"] is None else _rule(path, *manifest["rule"])
        for saved in keys:
            _check(path, saved, existing, with_values=with_values)
    except KVError:
        raise
    except (OSError, safetensors.SafetensorError, ValueError, LookupError, TypeError, AttributeError, OverflowError,
            RecursionError) as error:  # fmt: skip
        what = "" if isinstance(error, OSError) else "the file is damaged, or no checkpoint: "
        raise KVError(f"load of {path}: {what}{type(error).__name__}: {error}") from error
    return Checkpoint(clock, rule, keys, checksum)


def _checksum(array: Buffer) -> int:
    return zlib.crc32(array.view(np.uint8).data)


def _rule(path: str, name: str, hyperparams: dict[str, Any]) -> optim.Rule:
    try:
        return optim.create(name, hyperparams)
    except ConfigError as error:
        raise ConfigError(f"load of {path}: {error}") from error


def _check(path: str, saved: SavedKey, existing: Collection[Key], *, with_values: bool) -> None:
    if with_values and "value" not in saved.arrays:
        raise ConfigError(f"load of {path}: it holds optimizer states only; use load_optimizer_states")
    if not with_values:
        saved.arrays.pop("value", None)  # a master, which weights had, is for the store to compare
        if saved.key not in existing:
            raise KeyNotInitializedError(f"load_optimizer_states of {path}: key {saved.key!r} is not in the store")
    count = math.prod(saved.shape)
    for name, array in saved.arrays.items():
        if array.shape != (count,) or (name == "value" and array.dtype != DTYPES.get(saved.dtype)):
            raise ShapeMismatchError(f"load of {path}: {name} of key {saved.key!r} does not fit {saved.shape}")
