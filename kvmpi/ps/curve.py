"""A curve that may grow for ever and keeps its shape in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator


class Curve:
    """At most ``capacity`` points; when they are full, each two neighbours become one, and so do the points to come.

    A point that stands for several has the x of the last and the mean of the y. The newest point is always there, as
    it was told.
    """

    __slots__ = ("_capacity", "_count", "_stride", "_sum", "_x", "_xs", "_y", "_ys")

    def __init__(self, capacity: int = 256) -> None:
        if capacity < 2:
            raise ValueError(f"capacity {capacity}: expected 2 or more")
        self._capacity, self._stride = capacity, 1
        self._xs, self._ys = array("d"), array("d")
        # Of the point that is being made: how many it stands for, the sum of their y, and the last of them.
        self._count, self._sum, self._x, self._y = 0, 0.0, 0.0, 0.0

    def add(self, x: float, y: float) -> None:
        """One more point, which belongs behind all others."""
        self._x, self._y = x, y
        self._count += 1
        self._sum += y
        if self._count < self._stride:
            return
        self._xs.append(x)
        self._ys.append(self._sum / self._count)
        self._count, self._sum = 0, 0.0
        if len(self._xs) >= self._capacity:
            self._xs = self._xs[1::2]
            self._ys = array("d", [(a + b) / 2 for a, b in _pairs(self._ys)])
            self._stride *= 2

    def __len__(self) -> int:
        return len(self._xs) + (self._count > 0)

    def points(self) -> list[tuple[float, float]]:
        """(x, y) in the order in which they came."""
        newest = [(self._x, self._y)] if self._count else []
        return [*zip(self._xs, self._ys, strict=True), *newest]

    @property
    def newest(self) -> tuple[float, float] | None:
        """The point that came last, as it was told while it is not merged with others."""
        if self._count:
            return self._x, self._y
        return (self._xs[-1], self._ys[-1]) if self._xs else None


def _pairs(values: array[float]) -> Iterator[tuple[float, float]]:
    return zip(values[0::2], values[1::2], strict=False)


def mean(curves: Iterable[list[tuple[float, float]]], most: int = 256) -> list[tuple[float, float]]:
    """The mean of curves at no more than ``most`` of their x, of those that are there, on lines between their points.

    Points whose y is not a number count for nothing. It ends where the first of those ends that have come about as far
    as any: the next point of a curve comes sooner or later than those of others.
    """
    numbers = (sorted((x, y) for x, y in curve if not math.isnan(y)) for curve in curves)
    there_are = [points for points in numbers if points]
    if not there_are:
        return []
    import numpy as np  # few programs report curves, and a scheduler starts without

    found = [(points[:, 0], points[:, 1]) for points in map(np.array, there_are)]
    xs = np.unique(np.concatenate([x for x, _ in found]))
    near = xs[-1] - _NEAR * (xs[-1] - xs[0])
    xs = xs[xs <= min(x[-1] for x, _ in found if x[-1] >= near)]
    xs = xs[:: -math.ceil(xs.size / most)][::-1]
    sums, counts = np.zeros(xs.size), np.zeros(xs.size)
    for x, y in found:
        here = (xs >= x[0]) & (xs <= x[-1])
        with np.errstate(invalid="ignore"):
            sums[here] += np.interp(xs[here], x, y)
        counts += here
    there = counts > 0
    return list(zip(xs[there].tolist(), (sums[there] / counts[there]).tolist(), strict=True))


#: The part of the way that a curve may be behind the furthest, and its end still be that of the mean.
_NEAR = 0.1
