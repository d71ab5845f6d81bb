"""How much each push of a simulated job changes, where old ones count less: by what its client had been sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from simulation.network import Violation

from kvmpi.ps.slot import Slot
from kvmpi.wire import messages as m

Process = tuple[int, int]
"""A client and its incarnation."""


class Ages:
    """What clients have read, and what servers make of pushes that say it; pushes travel as they are.

    A gradient that is n updates old is applied with lr / max(1, n); lr is 1, and what is pushed is added.
    """

    def __init__(self) -> None:
        # By chunk: the versions that were sent, each with the number of pushes that had begun before it was asked for.
        self._read: defaultdict[tuple[Process, Any, int], list[tuple[int, int]]] = defaultdict(list)
        self._pushed: set[tuple[Process, Any, int, int]] = set()

    def note_read(self, process: Process, where: tuple[Any, int], step: int, version: int) -> None:
        """A process is sent a version of a chunk, for which it has asked when it had begun push number ``step``."""
        self._read[(process, *where)].append((step, version))

    def check_push(self, process: Process, push: m.Push) -> None:
        """A process sends a push, maybe not for the first time, and maybe after it has read what it asked for next."""
        which = process, push.key, push.chunk, push.step
        if which in self._pushed:
            return
        self._pushed.add(which)
        reads = self._read[process, push.key, push.chunk]
        read = next((version for step, version in reversed(reads) if step < push.step), 0)
        if push.seen != read:
            raise Violation(
                f"client {process[0]} says with push {push.step} of key {push.key!r}, chunk {push.chunk}, that it has "
                f"read version {push.seen}; it was sent {read} last"
            )

    def check_update(
        self, client: int, push: m.Push, payloads: Sequence[memoryview], before: tuple[int, np.ndarray], slot: Slot
    ) -> int:
        """A server has got a push of a chunk that had so many updates ``before``, and that value. How old it was, if it
        is an update now."""
        updates, expected = before
        if slot.rounds == updates:
            return 0
        age = updates - push.seen
        added = np.frombuffer(payloads[-1], "f4").astype("f8") / max(1, age)
        if push.rows >= 0:
            expected[np.frombuffer(payloads[0], "<u4")] += added
        else:
            expected += added
        if slot.rounds != updates + 1 or not np.allclose(slot.value, expected, rtol=1e-6, atol=1e-6):
            raise Violation(
                f"push {push.step} of client {client} to key {push.key!r}, chunk {push.chunk}, is {age} updates old, "
                f"and is to change it to {expected}; it is {slot.value} after {slot.rounds} updates"
            )
        return age
