"""Keys that are exchanged with servers again, from arrays that were right before: no call is looked at twice.

The pushes and answers of a step travel in a few messages, however many keys there are, and then most of the time goes
into looking at each key and each array. So the third call with the same list of keys and the same memory only looks
whether it is that call; on one key the second does, wherever its arrays lie. A client of one worker, which need not
agree on it with anybody, then begins at once. The workers of a larger one take the same steps whether they know a call
or not: it may be new to another of them.
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
from kvmpi.store import checked
from kvmpi.store.answers import together
from kvmpi.store.call import Invocation, KeyState, Part
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
    """The part of a store on servers that makes calls on keys as they were made before."""

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        super().__init__(type_name, config, comm)
        self._known: Repeats[_KnownExchange] = Repeats()

    @abstractmethod
    def _exchange_op(
        self, states: Sequence[KeyState], sources: Sequence[Buffer], outs: Sequence[Buffer], call: Invocation
    ) -> Work:
        """Push to the engine: send ``sources``, and fill ``outs``. All keys of the call have taken their places."""

    @abstractmethod
    def _push_again(self, state: KeyState, source: Buffer, call: Invocation) -> list[Work]:
        """Push a key that has taken its place; what the call waits for."""

    @abstractmethod
    def _pull_again(self, state: KeyState, target: Buffer, call: Invocation) -> Work:
        """Fill ``target``."""

    @abstractmethod
    def _take_places(self, keys: Sequence[Key], call: Invocation) -> None:
        """These keys take their places among all that the client pushes."""

    @property
    @abstractmethod
    def _is_told_too_much(self) -> bool:
        """Whether the program goes on at a step that pushes cannot be made at."""

    def _may_be_known(self, call: Invocation) -> bool:
        """Whether nothing but its keys and arrays makes the call another than before."""
        able = not (self._closed or self._joined or self._is_told_too_much)
        return able and not (call.reduced or timeline.on) and type(call.priority) is int

    def _find_known(self, call: Invocation, key: Any, value: Any, out: Any) -> _KnownExchange | None:
        """What is known of a call on several keys, if it can be made as before."""
        several = isinstance(key, list | tuple) and len(key) > 1
        if not several or call.async_op or self.keeps_errors or not self._may_be_known(call):
            return None
        out = None if out is value else out
        signature = call.signature = self._known.signature(call.op, 1.0, key, value, out)
        known = None if signature is None else self._known.find(signature)
        if known is None or any(map(self._has_pending, known.states)):
            return None
        return known

    def _has_pending(self, state: KeyState) -> bool:
        """Whether an earlier call on the key has left an error that nobody has seen yet."""
        sent, value, has = state.sent, state.value, self._engine.has_pending
        return (sent.poisoned or value.poisoned) and (has(sent) or has(value))

    def _known_parts(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Part] | None:
        at_once = call.op == "pushpull" and self._mpi_size == 1  # and was not known; see below
        if at_once or (known := self._find_known(call, key, value, out)) is None:
            return None
        call.signature = None  # there is nothing to note
        parts = []
        for batch in known.batches:
            for state, place in zip(*batch, strict=True):
                part = Part(state, [], in_place=out is value)
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

    def _again(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Work] | None:
        if self._mpi_size > 1:
            return None
        if type(key) is not str and type(key) is not int:
            return self._again_several(call, key, value, out)
        # What was right before is so wherever plain arrays lie.
        state = self._keys.get(key)
        if state is None or not self._may_be_known(call) or self._has_pending(state):
            return None
        found = checked.find(state, call, value, out, self._rule)
        if found is None:
            return None
        source, target = found
        if source is not None:
            state.pushes += 1
            state.by_rows = False
            self._take_places([key], call)
        if target is None:
            assert source is not None
            return self._push_again(state, source, call)
        if source is None:
            return [self._pull_again(state, target, call)]
        return [self._exchange_op([state], [source], [target], call)]

    def _again_several(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Work] | None:
        if call.op != "pushpull" or (known := self._find_known(call, key, value, out)) is None:
            return None
        sources = [*map(arrays.flat, value)]
        targets = sources if out is value else [*map(arrays.flat, out)]
        arrays.note_writes(out)
        for state in known.states:
            state.pushes += 1
            state.by_rows = False
        self._take_places(known.keys, call)
        works = []
        with self._gathering:
            for states, places in known.batches:
                pick = operator.itemgetter(*places) if len(places) > 1 else lambda found, at=places[0]: (found[at],)
                works.append(self._exchange_op(states, pick(sources), pick(targets), call))
        return works

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
    """Whether what is pushed is one array of the host, read as it lies, and what is filled one that is written so."""
    return (
        part.rows is None and not part.row_outs and len(part.vectors) < 2 and len(part.outs) < 2
        and all(vector.on_host and vector.shared for vector in part.vectors)
        and all(arrays.memory_of(out) is not None for out in part.outs)
    )  # fmt: skip
