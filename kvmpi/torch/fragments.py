"""The timetable of exchanges of weights: which parameters go together, and after which steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvmpi.errors import ConfigError
from kvmpi.torch.parameters import KeyedParameters

#: Either a number, or the parameters of each fragment.
Fragments = int | Sequence[Iterable[torch.Tensor]]


class Timetable:
    """Fragment p of P is exchanged after step ``(p + 1) * interval // P``, and every ``interval`` steps from there.

    So the last fragment, which may be the only one, has the steps that ``interval`` divides, and no two fragments begin
    at the same step. Source: Douillard et al. 2025, arXiv:2501.18512, where each fragment has an offset of its own.
    """

    def __init__(self, interval: int, num_fragments: int = 1, overlap: int = 0) -> None:
        """Check the numbers.

        Args:
            interval: steps from one exchange of a fragment to the next.
            overlap: steps that an exchange may take; the next one of the fragment begins later.
        Raises:
            ConfigError: (a ``ValueError``) they are no such numbers.
        """
        _check_whole("interval", interval, 1, "the number of steps between exchanges, at least 1")
        _check_whole("overlap", overlap, 0, "the number of steps that an exchange may take, 0 to wait for it")
        if overlap >= interval:
            raise ConfigError(
                f"overlap={overlap} with interval={interval}: an exchange must be over before the next one of the same "
                "parameters begins; expected less than the interval"
            )
        if num_fragments > interval:
            raise ConfigError(
                f"fragments={num_fragments} with interval={interval}: each has a step of its own in an interval; "
                "expected at most as many as steps"
            )
        self.interval, self.num_fragments, self.overlap = interval, num_fragments, overlap
        self._fragment_at = {(p + 1) * interval // num_fragments % interval: p for p in range(num_fragments)}

    def beginning(self, step: int) -> int | None:
        """The fragment whose exchange begins after ``step`` (1 is the first), if there is one."""
        return self._fragment_at.get(step % self.interval)


def groups(fragments: Fragments, params: KeyedParameters) -> list[list[int]]:
    """The keys of each fragment: what the user lists, or so many runs of about equal bytes.

    Raises:
        ConfigError: (a ``ValueError``) a number that makes no sense, or lists that do not hold every parameter once.
    """
    if not isinstance(fragments, Sequence) or isinstance(fragments, str | bytes):
        _check_whole("fragments", fragments, 1, "their number, at least 1, or a list of lists of parameters")
        if fragments > len(params):
            raise ConfigError(f"fragments={fragments}: there are {len(params)} parameters, and none is divided")
        return runs([tensor.numel() * tensor.element_size() for tensor in params.tensors], fragments)
    left = {id(tensor): key for key, tensor in zip(params.keys, params.tensors, strict=True)}
    found: list[list[int]] = []
    for number, group in enumerate(fragments):
        tensors = [] if isinstance(group, torch.Tensor) else list(group)
        keys = [left.pop(id(tensor), None) for tensor in tensors]
        if not keys:
            raise ConfigError(f"fragments[{number}]: expected a list of parameters, and at least one")
        if None in keys:
            raise ConfigError(f"fragments[{number}][{keys.index(None)}] is no parameter of params, or there twice")
        found.append([key for key in keys if key is not None])
    if left or not found:
        raise ConfigError(f"{params.names[min(left.values())]} is in none of the fragments")
    return found


def runs(sizes: Sequence[int], count: int) -> list[list[int]]:
    """``range(len(sizes))`` in ``count`` runs, none empty, so that the largest sum of sizes is as small as it can be.

    Args:
        count: from 1 to ``len(sizes)``.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle, 1)) <= count:
            high = middle
        else:
            low = middle + 1
    return _filled(sizes, low, count)


def _filled(sizes: Sequence[int], capacity: int, at_least: int) -> list[list[int]]:
    """Runs from left to right, each as long as ``capacity`` allows; shorter ones where there would be too few."""
    found: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if not found or size > room or len(sizes) - i <= at_least - len(found):
            found.append([])
            room = capacity
        found[-1].append(i)
        room -= size
    return found


def _check_whole(name: str, value: object, least: int, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r}: expected {expected}")
