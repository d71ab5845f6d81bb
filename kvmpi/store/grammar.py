"""The grammar of keys and values: what users may pass, flattened to groups of arrays under one key."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import msgspec

from kvmpi import arrays
from kvmpi.errors import ConfigError, DTypeMismatchError, KeyKindError, ShapeMismatchError

Key = int | str

_MAX_KEY_CHARS = 4096


class Pair(msgspec.Struct, frozen=True):
    """Some rows of a key: ``row_ids`` of shape ``(n,)``, ``rows`` of shape ``(n, ...)``."""

    row_ids: Any
    rows: Any


class Group(msgspec.Struct, frozen=True):
    """One key and every array given for it, in the order given; ``by_rows``: pairs and sparse tensors, not arrays."""

    key: Key
    arrays: list[Any]
    by_rows: bool = False


def normal_key(key: Any) -> Key:
    """``key`` as a plain int or str.

    Raises:
        KeyKindError: it is neither.
        ConfigError: a str that is too long, or that has no encoding.
    """
    if type(key) is int and -(2**63) <= key < 2**63:  # which most are
        return key
    if isinstance(key, str):
        if len(key) > _MAX_KEY_CHARS:
            raise ConfigError(f"a key of {len(key)} characters is longer than {_MAX_KEY_CHARS}")
        if not key.isascii():
            try:
                key.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"key {key!r} has no encoding in UTF-8: {error.reason}") from None
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


def groups(keys: Any, values: Any, what: str, *, by_rows: bool = False) -> list[Group]:
    """Flatten one call's keys and values; equal keys are joined, in order of first appearance.

    Accepts key + array; key + list of arrays; list of keys + list of arrays; list of keys + list of lists. With
    ``by_rows`` an array may also be a torch sparse tensor, or a pair: a tuple of two arrays, of which the first has one
    dimension and the second differs from it in the number of dimensions or in dtype (what devices hold never does).

    Raises:
        KeyKindError: something that is no key, or both kinds in one call.
        DTypeMismatchError: something that is no array (``None`` included).
        ConfigError: lists of different lengths, no array for a key, or whole arrays and rows for one key.
        ShapeMismatchError: ids of rows that are no vector.
    """
    if not isinstance(keys, list | tuple):
        return [_group(normal_key(keys), values, what, by_rows)]
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{what}: {len(keys)} keys need a list of as many arrays, got {_type_name(values)}")
    if len(keys) != len(values):
        raise ConfigError(f"{what}: {len(keys)} keys, but {len(values)} values; each key needs one")
    joined: dict[Key, Group] = {}
    for key, value in zip(keys, values, strict=True):
        group = _group(normal_key(key), value, what, by_rows)
        known = joined.setdefault(group.key, group)
        if known is not group:
            if known.by_rows != group.by_rows:
                raise _mixed(group.key, what)
            known.arrays.extend(group.arrays)
    if len({type(key) for key in joined}) > 1:
        raise KeyKindError(f"{what}: int and str keys in one call; a store uses one kind")
    return list(joined.values())


def _mixed(key: Key, what: str) -> ConfigError:
    return ConfigError(f"{what} of key {key!r}: whole arrays and rows in one call; give one kind")


def _is_pair(value: Any) -> bool:
    if not (isinstance(value, tuple) and len(value) == 2 and all(map(arrays.is_array, value))):
        return False
    first, second = value
    return len(first.shape) == 1 and bool(len(second.shape) != 1 or first.dtype != second.dtype)


def _check_ids(key: Key, value: Any, what: str) -> None:
    """Raise where somebody seems to push rows by ids of several dimensions, or by a single id."""
    if isinstance(value, tuple) and len(value) == 2 and all(map(arrays.is_array, value)):
        ids, rows = value
        if "int" in str(ids.dtype) and "float" in str(rows.dtype):
            raise ShapeMismatchError(
                f"{what} of key {key!r}: row ids of shape {tuple(ids.shape)}, expected a vector: "
                "(row_ids.reshape(-1), rows.reshape(-1, *value.shape[1:]))"
            )


def _group(key: Key, value: Any, what: str, by_rows: bool) -> Group:
    if arrays.is_array(value) and not (by_rows and arrays.is_sparse(value)):
        return Group(key, [value])
    if by_rows:
        several = isinstance(value, list | tuple) and not _is_pair(value)
        given = [Pair(*one) if _is_pair(one) else one for one in (value if several else [value])]
        sparse = [isinstance(one, Pair) or arrays.is_sparse(one) for one in given]
        if any(sparse):
            if not all(sparse):
                raise _mixed(key, what)
            return Group(key, given, by_rows=True)
        _check_ids(key, value, what)
    found: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if not found:
        raise ConfigError(f"{what} of key {key!r}: no array given")
    for array in found:
        if not arrays.is_array(array):
            raise DTypeMismatchError(
                f"{what} of key {key!r}: expected a NumPy array, a torch tensor, a CuPy array or a list of them, "
                f"got {_type_name(array)}"
                + ("; some rows of a key are a tuple of two arrays, (row_ids, rows)" if by_rows else "")
            )
    return Group(key, list(found))


def _type_name(value: Any) -> str:
    return "None" if value is None else type(value).__name__
