"""Calls on one key with arrays that lie where they lay: what was found right then need not be looked at again.

A loop passes the same arrays at every step, and to check a small one takes longer than to send it. This is for stores
that need not agree with other workers on a call; what is told to others, ``repeats`` knows again.
"""

from __future__ import annotations

from typing import Any

from kvmpi import arrays, optim
from kvmpi.store.call import Invocation, KeyState, Part

#: Of one key. A program that has more of them has other arrays at every step.
_MOST_FORMS = 8
#: An operation, and the layouts of what is pushed and of what is pulled into, if that is something else.
Form = tuple[str, "tuple[Any, ...] | None", "tuple[Any, ...] | None"]


def find(state: KeyState, call: Invocation, value: Any, out: Any, rule: optim.Rule | None) -> Part | None:
    """What a call does with its only key, if the same was found right before, under this rule; else None.

    ``value`` or ``out`` is None where nothing is pushed or pulled; they are the same where results replace ``value``.
    """
    if not state.checked or call.scale != 1.0 or arrays.may_be_on_devices():
        return None
    form = _form(call.op, value, out)
    if form is None or state.checked.get(form, state) is not rule:
        return None
    if out is not None:
        arrays.note_writes([out])
    return Part(state, [] if value is None else [arrays.read(value)], [] if out is None else [out], out is value)


def note(part: Part, call: Invocation, value: Any, out: Any, rule: optim.Rule | None) -> None:
    """A call on one key is right: ``part`` is what it does."""
    vectors, state = part.vectors, part.state
    if part.rows is not None or len(vectors) > 1 or len(part.outs) > 1 or not all(vector.shared for vector in vectors):
        return  # it was not one array, or that was copied
    form = _form(call.op, value, out)
    if form is not None:
        if len(state.checked) >= _MOST_FORMS:
            state.checked.clear()
        state.checked[form] = rule


def _form(op: str, value: Any, out: Any) -> Form | None:
    """None for arrays that must be looked at."""
    pushed = pulled = None
    if value is not None and (pushed := arrays.layout_of(value)) is None:
        return None
    if out is not None and out is not value and (pulled := arrays.layout_of(out)) is None:
        return None
    return op, pushed, pulled
