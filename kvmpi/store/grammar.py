"""The grammar of keys and values: what users may pass, flattened to groups of arrays under one key."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvmpi import arrays
from kvmpi.errors import ConfigError, DTypeMismatchError, KeyKindError

Key = int | str

_MAX_KEY_CHARS = 4096


@dataclass(frozen=True, slots=True)
class Group:
    """One key and every array given for it, in the order given."""

    key: Key
    arrays: list[Any]


def normal_key(key: Any) -> Key:
    """``key`` as a plain int or str.

    Raises:
        KeyKindError: it is neither.
    """
    if isinstance(key, str):
        if len(key) > _MAX_KEY_CHARS:
            raise ConfigError(f"a key of {len(key)} characters is longer than {_MAX_KEY_CHARS}")
        return str(key)
    if not isinstance(key, bool) and not arrays.is_array(key):
        try:
            number = operator.index(key)
        except TypeError:
            pass
        else:
            if not -(2**63) <= number < 2**63:
                raise KeyKindError(f"int key {number} does not fit into 64 bits")
            return number
    raise KeyKindError(f"a key must be an int or a str, got {type(key).__name__}")


def groups(keys: Any, values: Any, what: str) -> list[Group]:
    """Flatten one call's keys and values; equal keys are joined, in order of first appearance.

    Accepts key + array; key + list of arrays; list of keys + list of arrays; list of keys + list of lists.

    Raises:
        KeyKindError: something that is no key, or both kinds in one call.
        DTypeMismatchError: something that is no array (``None`` included).
        ConfigError: lists of different lengths, or no array for a key.
    """
    if not isinstance(keys, list | tuple):
        return [_group(normal_key(keys), values, what)]
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{what}: {len(keys)} keys need a list of as many arrays, got {_type_name(values)}")
    if len(keys) != len(values):
        raise ConfigError(f"{what}: {len(keys)} keys, but {len(values)} values; each key needs one")
    joined: dict[Key, list[Any]] = {}
    for key, value in zip(keys, values, strict=True):
        group = _group(normal_key(key), value, what)
        joined.setdefault(group.key, []).extend(group.arrays)
    if len({type(key) for key in joined}) > 1:
        raise KeyKindError(f"{what}: int and str keys in one call; a store uses one kind")
    return [Group(key, found) for key, found in joined.items()]


def _group(key: Key, value: Any, what: str) -> Group:
    found: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if not found:
        raise ConfigError(f"{what} of key {key!r}: no array given")
    for array in found:
        if not arrays.is_array(array):
            raise DTypeMismatchError(
                f"{what} of key {key!r}: expected a NumPy array, a torch tensor, a CuPy array or a list of them, "
                f"got {_type_name(array)}"
            )
    return Group(key, list(found))


def _type_name(value: Any) -> str:
    return "None" if value is None else type(value).__name__
