"""Calls on one key that were right before: their arrays need no more than a look.

A loop makes the same calls at every step, and to check a small array takes longer than to send it. So a key remembers
the operations that were right, each with the rule that it was right under; what may differ from call to call is where
plain arrays lie. This is for stores that need not agree with other workers on a call; what is told to others,
``repeats`` knows again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import arrays, optim
from kvmpi.arrays import Vector
from kvmpi.store.call import Invocation, KeyState, Part

Buffer = npt.NDArray[Any]


def find(
    state: KeyState, call: Invocation, value: Any, out: Any, rule: optim.Rule | None
) -> tuple[Buffer | None, Buffer | None] | None:
    """The memory of ``value`` and that of ``out``, if the same was right before, under this rule; else None.

    None stands for what is not pushed or pulled. ``out`` is ``value`` where results replace it.
    """
    op, shape, dtype, source = call.op, state.shape, state.dtype, None
    if state.checked.get(op, state) is not rule or call.scale != 1.0:
        return None
    if op != "pull":
        if (source := arrays.plain(value, shape, dtype)) is None:
            return None
        if op == "push":
            return source, None
    target = source
    if op == "pull" or out is not value:
        target = arrays.plain(out, shape, dtype)
        if target is None or (source is not None and np.may_share_memory(source, target) and not _same(source, target)):
            return None
    arrays.note_writes([out])
    return source, target


def part_of(state: KeyState, memory: tuple[Buffer | None, Buffer | None], value: Any, out: Any) -> Part:
    """What a call does of which ``find`` has found the memory."""
    source, _ = memory
    vectors = [] if source is None else [Vector(source, state.dtype, "cpu", True)]
    return Part(state, vectors, [] if out is None else [out], out is value)


def note(part: Part, call: Invocation, value: Any, out: Any, rule: optim.Rule | None) -> None:
    """A call on one key is right: ``part`` is what it does."""
    state = part.state
    given = [array for array in (value, out) if array is not None]
    if part.rows is None and all(arrays.plain(array, state.shape, state.dtype) is not None for array in given):
        state.checked[call.op] = rule


def _same(source: Buffer, target: Buffer) -> bool:
    """Whether what is pulled goes exactly to where what is pushed lies, where it may be written before all is read."""
    return arrays.address_of(source) == arrays.address_of(target)
