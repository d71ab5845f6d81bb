"""What a store's values must be, in NumPy alone: the oracle of random programs. Values are small whole numbers."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Flat = npt.NDArray[Any]

#: Up to here all whole numbers, and their halves where there is one more bit, are exact.
LIMITS = {"bfloat16": 256, "float16": 2048, "float32": 2**24, "float64": 2**45}
#: What everything that is pushed is cut from: neither a shift nor another piece has the same numbers.
TABLE = np.random.default_rng(2024).integers(-7, 8, 3_000_017, np.int8)


def data(count: int, *where: object) -> npt.NDArray[np.int8]:
    """Numbers from -7 to 7 that depend on the place in the program and on the index."""
    start = zlib.crc32(repr(where).encode()) % (TABLE.size - count)
    return TABLE[start : start + count]


def is_float(dtype: str) -> bool:
    return "float" in dtype


@dataclass(frozen=True)
class Rule:
    """``kind``: test, sgd, elastic, outer, or updater, which adds ``lr`` times what was pushed."""

    kind: str
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    multi_precision: bool = False

    @property
    def averages(self) -> bool:
        return self.kind in ("elastic", "outer")


@dataclass
class Rows:
    """Rows ``ids`` of a key, which may repeat."""

    ids: npt.NDArray[np.int64]
    values: Flat  # (len(ids), width)


Given = Flat | Rows


@dataclass
class Key:
    shape: tuple[int, ...]
    dtype: str
    value: Flat
    momentum: Flat | None = None
    tolerance: float = 0.0  # of what has been averaged over three
    least: Flat | None = None  # what was there before the pushes of this store, where the value may have had more

    def copy(self) -> Key:
        momentum = None if self.momentum is None else self.momentum.copy()
        return Key(self.shape, self.dtype, self.value.copy(), momentum, self.tolerance, self.least)

    @property
    def count(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def width(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64))


@dataclass
class Saved:
    """What a file holds."""

    keys: dict[Any, Key]
    rule: Rule | None
    with_values: bool


class Floor:
    """What one client finds in a key at least, where pushes are added without rounds and nothing that is pushed is
    negative: all that it has pushed, and what it knows of others, but for those pushes that may not be an update yet.

    Args:
        value: of the key, when nobody has pushed it yet.
        me: the client.
        ahead: by how many pushes it may be ahead of others where it reads; None: by any number.
        size: pushes that are an update together, whoever they are from.
    """

    def __init__(self, value: Flat, num_clients: int, me: int, *, ahead: int | None, size: int) -> None:
        self._value, self._me, self._ahead, self._size = value.astype(np.float64), me, ahead, size
        self._pushes = [0] * num_clients
        # By client, oldest first: the last ones that it knows of, and others that it need not know of.
        self._known: list[deque[Flat]] = [deque() for _ in range(num_clients)]
        self._unknown: list[deque[Flat]] = [deque() for _ in range(num_clients)]
        self._waiting = 0

    def push(self, client: int, numbers: Flat) -> None:
        self._pushes[client] += 1
        self._unknown[client].append(numbers)
        self._waiting = self._size - 1
        near = 0 if self._ahead is None else self._pushes[self._me] - self._ahead
        for other, pushes in enumerate(self._pushes):
            self._know(other, pushes if other == self._me else near)

    def meet(self) -> None:
        """All clients have: each knows what the others have pushed, and how many of all pushes wait."""
        for client, pushes in enumerate(self._pushes):
            self._know(client, pushes)
        self._waiting = sum(self._pushes) % self._size

    def _know(self, client: int, pushes: int) -> None:
        """So many of a client's pushes are there, of which only the last ones can wait."""
        known, unknown = self._known[client], self._unknown[client]
        while unknown and self._pushes[client] - len(unknown) < pushes:
            known.append(unknown.popleft())
        while len(known) >= self._size:
            self._value += known.popleft()

    def least(self) -> Flat:
        known = [numbers for of_client in self._known for numbers in of_client]
        if len(known) <= self._waiting:
            return self._value.copy()
        return self._value + np.sort(np.stack(known), axis=0)[: len(known) - self._waiting].sum(axis=0)


@dataclass
class Model:
    """Args:
    clients: the ranks of each client's workers; the first one's values count.
    exact: every pull has one right answer; else (asynchronous, several clients) it lies between two.
    """

    clients: Sequence[Sequence[int]]
    exact: bool = True
    keys: dict[Any, Key] = field(default_factory=dict)
    rule: Rule | None = None
    narrow: str = "float32"  # what float32 is pushed in

    @property
    def ranks(self) -> list[int]:
        return [rank for client in self.clients for rank in client]

    def init(self, name: Any, shape: tuple[int, ...], dtype: str, numbers: Flat) -> None:
        self.keys[name] = Key(shape, dtype, self.stored(numbers, dtype))

    @staticmethod
    def stored(numbers: Flat, dtype: str) -> Flat:
        """The numbers as the dtype holds them."""
        if is_float(dtype):
            return np.array(numbers, np.float64)
        return np.asarray(numbers).astype(np.int64).astype(dtype).astype(np.int64)

    def takes(self, name: Any) -> bool:
        """Whether the push rule can be applied to this key, with an exact result."""
        key, rule = self.keys[name], self.rule
        if rule is None:
            return self.exact
        if rule.averages:
            return key.dtype in ("float32", "float64") and self.narrow == "float32"
        if not self.exact:
            return key.dtype in ("float32", "float64", "int32", "int64")
        return is_float(key.dtype) or rule.kind in ("test", "updater")

    def contribution(self, name: Any, given: Mapping[int, Sequence[Given]], client: Sequence[int]) -> Flat | None:
        """The sum of what a client's workers push to a key; None if none of them does."""
        key, found = self.keys[name], np.zeros(self.keys[name].count, np.int32)
        for vector in (vector for rank in client for vector in given.get(rank, ())):
            if not isinstance(vector, Rows):
                found += vector
            elif key.width:
                np.add.at(found.reshape(-1, key.width), vector.ids, vector.values)
        return found if any(rank in given for rank in client) else None

    def pushed(self, name: Any, given: Mapping[int, Sequence[Given]]) -> Key | None:
        """The key after a push of these vectors by these ranks; None if it would not be exact. Changes nothing."""
        key = self.keys[name]
        sums, clients, whole, touched = np.zeros(key.count), 0, False, []
        most = float(np.abs(key.value).max(initial=0))
        for client in self.clients:
            of_client = [vector for rank in client for vector in given.get(rank, ())]
            if not any(rank in given for rank in client):
                continue
            clients += 1
            total = np.zeros(key.count)
            magnitude = 0.0
            for vector in of_client:
                if isinstance(vector, Rows):
                    if key.width:
                        np.add.at(total.reshape(-1, key.width), vector.ids, vector.values)
                    touched.append(vector.ids)
                    magnitude += 7.0 * len(vector.ids)
                else:
                    total += vector
                    magnitude += float(np.abs(vector).max(initial=0))
                    whole = True
            if key.dtype == "float32" and magnitude > LIMITS[self.narrow]:
                return None
            most += magnitude
            if self.rule is not None and self.rule.averages:
                total /= len(of_client)
            sums += total
        mine = slice(None)
        if touched and not whole:
            mine = np.zeros(key.shape[0], bool)
            mine[np.concatenate(touched)] = True
            mine = np.repeat(mine, key.width)
        found = key.copy()
        if self.rule is not None and self.rule.averages:
            found.tolerance = 1e-3
        elif self.rule is None and (whole or not touched):
            found.tolerance = 0.0
        self._update(found, sums, clients, mine)
        most = max(most, float(np.abs(found.value).max(initial=0)))
        if found.momentum is not None:
            most = max(most, float(np.abs(found.momentum).max(initial=0)))
        if most > LIMITS.get(key.dtype, 2**52):
            return None
        found.value = self.stored(found.value, key.dtype)
        return found

    def _update(self, key: Key, sums: Flat, clients: int, mine: Any) -> None:
        rule, old = self.rule, key.value[mine].astype(np.float64)
        new = sums[mine]
        if rule is None:
            pass
        elif rule.kind == "updater":
            new = old + rule.lr * new
        elif rule.kind == "elastic":
            new = old + rule.lr * (new - clients * old)
        else:
            gradient = new / clients if rule.kind == "outer" else new + rule.weight_decay * old
            if rule.momentum:
                if key.momentum is None:
                    key.momentum = np.zeros(key.count)
                key.momentum[mine] = rule.momentum * key.momentum[mine] + gradient
                gradient = key.momentum[mine]
            new = old - rule.lr * gradient
        key.value[mine] = new

    def set_rule(self, rule: Rule | None) -> None:
        self.rule = rule
        for key in self.keys.values():
            key.momentum = None

    def save(self, with_values: bool) -> Saved:
        rule = None if self.rule is None or self.rule.kind == "updater" else self.rule
        return Saved({name: key.copy() for name, key in self.keys.items()}, rule, with_values)

    def load(self, saved: Saved, with_values: bool) -> None:
        if saved.rule is not None and saved.rule != self.rule:
            self.set_rule(saved.rule)
        for name, key in saved.keys.items():
            mine = self.keys.setdefault(name, Key(key.shape, key.dtype, key.value.copy()))
            if with_values:
                mine.value, mine.tolerance, mine.least = key.value.copy(), key.tolerance, key.least
            mine.momentum = None if key.momentum is None else key.momentum.copy()
