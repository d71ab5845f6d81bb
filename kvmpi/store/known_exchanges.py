"""Lists of keys that are exchanged with servers again, from arrays that lie where they lay: none is looked at twice.

The pushes and answers of a step travel in a few messages, however many keys there are, and then most of the time goes
into looking at each key and each array. So the third call with the same keys and the same memory only looks whether it
is that call. A client of one worker, which need not agree on it with anybody, then begins a ``pushpull`` at once. The
workers of a larger one take the same steps whether they know a call or not: it may be new to another of them.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvmpi import arrays
from kvmpi.collectives import Comm
from kvmpi.compiling import methods_not_compiled
from kvmpi.config import Config
from kvmpi.engine import Work
from kvmpi.store.answers import together
from kvmpi.store.call import Invocation, JoinedWork, KeyState, Part
from kvmpi.store.commanding import Commanding
from kvmpi.store.core import Buffer
from kvmpi.store.grammar import Key
from kvmpi.store.repeats import Repeats
from kvmpi.trace import timeline


class _Batch(NamedTuple):
    """Keys that are asked for together, and where among those of the call they are."""

    states: list[KeyState]
    places: list[int]


class _KnownExchange(NamedTuple):
    """A call on a list of keys, without what differs from one time to the next."""

    batches: list[_Batch]
    states: list[KeyState]
    keys: list[Key]


@methods_not_compiled
class KnownExchanges(Commanding):
    """The part of a store on servers that makes calls on lists of keys as they were made before."""

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        super().__init__(type_name, config, comm)
        self._known: Repeats[_KnownExchange] = Repeats()

    @abstractmethod
    def _begin_pushpull(self, keys: Sequence[Key], call: Invocation) -> None:
        """These keys take their places among all that the client pushes."""

    @abstractmethod
    def _pushpull_op(
        self, states: Sequence[KeyState], sources: Sequence[Buffer | None], outs: Sequence[Buffer], call: Invocation
    ) -> Work:
        """Push to the engine: send ``sources`` and fill ``outs``."""

    @property
    @abstractmethod
    def _is_told_too_much(self) -> bool:
        """Whether the program goes on at a step that pushes cannot be made at."""

    def _find_known(self, call: Invocation, key: Any, value: Any, out: Any) -> _KnownExchange | None:
        """What is known of a call on several keys, if it can be made as before."""
        several = isinstance(key, list | tuple) and len(key) > 1
        usual = several and not (call.async_op or call.reduced or timeline.on)
        able = not (self._closed or self._joined or self._is_told_too_much or self.keeps_errors)
        if not (usual and able and type(call.priority) is int):
            return None
        signature = call.signature = self._known.signature(call.op, 1.0, key, value, out)
        known = None if signature is None else self._known.find(signature)
        has = self._engine.has_pending
        if known is None or any(has(state.value) or has(state.sent) for state in known.states):
            return None
        return known

    def _known_parts(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Part] | None:
        in_place = out is value
        at_once = call.op == "pushpull" and self.mpi_size == 1  # and was not known; see below
        if at_once or (known := self._find_known(call, key, value, None if in_place else out)) is None:
            return None
        call.signature = None  # there is nothing to note
        parts = []
        for batch in known.batches:
            for state, place in zip(*batch, strict=True):
                part = Part(state, [], in_place=in_place)
                if value is not None:
                    state.pushes += 1
                    state.by_rows = False
                    part.vectors.append(arrays.Vector(arrays.flat(value[place]), state.dtype, "cpu", shared=True))
                if out is not None:
                    part.outs.append(out[place])
                    part.direct[id(out[place])] = arrays.flat(out[place])
                parts.append(part)
        if out is not None:
            arrays.note_writes(out)
        return parts

    def _again(self, call: Invocation, key: Any, value: Any, out: Any) -> Work | None:
        if self.mpi_size > 1 or call.op != "pushpull" or (known := self._find_known(call, key, value, out)) is None:
            return None
        sources = [*map(arrays.flat, value)]
        outs = sources if out is None else [*map(arrays.flat, out)]
        arrays.note_writes(value if out is None else out)
        for state in known.states:
            state.pushes += 1
        self._begin_pushpull(known.keys, call)
        works = []
        for states, places in known.batches:
            pick = operator.itemgetter(*places) if len(places) > 1 else lambda found, at=places[0]: (found[at],)
            works.append(self._pushpull_op(states, pick(sources), pick(outs), call))
        return works[0] if len(works) == 1 else JoinedWork(works, call.op)

    def _note_made(self, call: Invocation, parts: Sequence[Part]) -> None:
        signature = call.signature
        if signature is None or not self._known.made(signature) or not all(map(_is_plain, parts)):
            return
        keys, place = signature[2], {key: i for i, key in enumerate(signature[2])}
        if len(keys) != len(parts):
            return
        states = [part.state for part in parts]
        batches = [
            _Batch(batch, [place[state.key] for state in batch])
            for batch in together(states, lambda state: state.nbytes)
        ]
        self._known.keep(signature, _KnownExchange(batches, states, [state.key for state in states]))


def _is_plain(part: Part) -> bool:
    """Whether what is pushed is one array of the host that is read as it lies, and what is filled also one."""
    return (
        part.rows is None and not part.row_outs and len(part.vectors) < 2 and len(part.outs) < 2
        and all(vector.on_host and vector.shared for vector in part.vectors)
    )  # fmt: skip
