"""Calls that are made again with arrays that lie where they lay: what was found out and planned then holds still.

A step of a loop sums the arrays that the step before has summed, and of a sum of many small arrays most of the time is
Python's, which looks at each. So the second call on the same keys with the same memory leaves a ``Repeat`` behind, and
those after it only look whether they are that call. Memory is told by its address: a ``Repeat`` keeps no array. Where
sums are made in place, arrays that lie elsewhere need no more than to be looked at: those of a step's gradients do.
"""

from __future__ import annotations

import itertools
import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy.typing as npt

from kvmpi import arrays
from kvmpi.collectives import Batch, Call, Comm, Tensor
from kvmpi.config import Config
from kvmpi.engine import Work
from kvmpi.store.call import Invocation, KeyState, Part, label_of, meeting
from kvmpi.store.grammar import Key
from kvmpi.store.operations import Operations
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]
T = TypeVar("T")
#: An operation, its scale, the keys, and the layouts of what is pushed and, if it is something else, pulled into.
Signature = tuple[str, float, tuple[Key, ...], "tuple[Any, ...] | None", "tuple[Any, ...] | None"]

#: Of all known calls of one store, a kilobyte each; and how many calls are remembered to have been made.
_MOST_KEYS, _MOST_MADE = 1 << 14, 1 << 14
#: After so many calls in a row that were others than before, only one in so many is looked at.
_PATIENCE, _RARELY = 64, 16
#: Arrays of calls that have failed while others could write to them: these may do so much later.
kept_for_late_ranks: list[Any] = []


def kind_of(signature: Signature) -> Signature | None:
    """The same wherever the arrays lie; None where that counts, because of others that must not lie there."""
    op, scale, keys, pushed, pulled = signature
    if op != "allreduce" or pushed is None or pulled is not None:
        return None
    return op, scale, keys, tuple(layout[1:] for layout in pushed), None


class RepeatedPart(msgspec.Struct):
    """What the call does with one key: ``source`` is summed into ``outs``, which may be ``source`` too."""

    state: KeyState
    source: Buffer
    outs: list[Buffer]


class Repeat(msgspec.Struct):
    """A call on keys, without what differs from one time to the next.

    Attributes:
        buckets: whose sums travel together.
        labels: of the buckets, for messages.
        calls: for the agreement, by ``async_op``.
        once: whether arrays lie there in this call only.
        batches: of the buckets; and the ``values`` of the keys for which they were made, if those get the sums, too.
        copied: bytes of sums that are copied from where they are made.
    """

    buckets: list[list[RepeatedPart]]
    labels: list[str]
    calls: tuple[Call, Call]
    once: bool = False
    batches: list[Batch] = msgspec.field(default_factory=list)
    values: list[Buffer] = msgspec.field(default_factory=list)
    copied: int = 0

    @property
    def states(self) -> list[KeyState]:
        return [part.state for bucket in self.buckets for part in bucket]

    def plan(self, values: Sequence[tuple[Buffer, bool]]) -> None:
        """Make the batches, unless they are for these values: of the keys in the order of the buckets, or none.

        With each value comes whether the ranks of a host share it.
        """
        memory = [value for value, _ in values]
        if self.batches and len(memory) == len(self.values) and all(map(operator.is_, memory, self.values)):
            return
        given, once = iter(values), self.once
        self.batches = [
            Batch([_tensor(part, *next(given, (None, False))) for part in bucket], bucket[0].state.dtype, once=once)
            for bucket in self.buckets
        ]
        self.values = memory
        tensors = itertools.chain.from_iterable(self.batches)
        self.copied = sum(len(tensor.copies) * tensor.out.nbytes for tensor in tensors)

    def elsewhere(self, places: Mapping[Key, int]) -> Repeat | None:
        """The call, in place, on arrays at these addresses; None if they share memory."""
        spans = sorted((places[state.key], state.nbytes) for state in self.states)
        if any(start + nbytes > after for (start, nbytes), (after, _) in itertools.pairwise(spans)):
            return None

        def moved(part: RepeatedPart) -> RepeatedPart:
            memory = arrays.memory_at(places[part.state.key], part.state.count, part.state.dtype)
            return RepeatedPart(part.state, memory, [memory])

        return Repeat([list(map(moved, bucket)) for bucket in self.buckets], self.labels, self.calls, once=True)


class Repeats(Generic[T]):
    """The calls of one store that have been made twice or more, and what is known of each."""

    def __init__(self) -> None:
        self._known: dict[Signature, T] = {}
        self._kinds: dict[Signature, T] = {}
        self._num_keys = 0  # of all of them
        self._made: set[int] = set()  # hashes of signatures
        self._misses = self._skipped = 0

    def signature(self, op: str, scale: float, key: Any, value: Any, out: Any) -> Signature | None:
        """What two calls have in common that do the same; None for one that is not worth, or able, to be repeated."""
        if self._misses >= _PATIENCE:
            self._skipped = (self._skipped + 1) % _RARELY
            if self._skipped:
                return None
        if not isinstance(key, list | tuple):
            key, value = [key], [value]
            out = None if out is None else [out]
        elif any(given is not None and not _fits(given, key) for given in (value, out)):
            return None
        kinds = set(map(type, key))
        if (kinds != {int} and kinds != {str}) or type(scale) not in (float, int):
            return None
        pushed = None if value is None else _layouts(value)
        if value is not None and pushed is None:
            return None
        pulled = None if out is None else _layouts(out)
        if out is not None and pulled is None:
            return None
        return op, scale, tuple(key), pushed, pulled

    def find(self, signature: Signature) -> T | None:
        """What is known of the call."""
        found = self._known.get(signature)
        self._misses = 0 if found is not None else self._misses + 1
        return found

    def like(self, signature: Signature) -> T | None:
        """What is known of a call on arrays of the same kinds that lie elsewhere."""
        kind = kind_of(signature)
        found = None if kind is None else self._kinds.get(kind)
        if found is not None:
            self._misses = 0
        return found

    def made(self, signature: Signature) -> bool:
        """The call is made, and was not known; whether it, or one like it, had been made before, and ``keep`` is worth
        while."""
        found = {hash(signature), hash(kind_of(signature) or signature)}
        if not found.isdisjoint(self._made):
            return True
        if len(self._made) >= _MOST_MADE:
            self._made.clear()
        self._made |= found
        return False

    def keep(self, signature: Signature, repeat: T) -> None:
        """Next time ``find`` returns this, or ``like``."""
        self._num_keys += len(signature[2])
        if self._num_keys > _MOST_KEYS:
            self._known.clear()
            self._kinds.clear()
            self._num_keys = len(signature[2])
        self._known[signature] = repeat
        if (kind := kind_of(signature)) is not None:
            self._kinds[kind] = repeat


def _fits(given: Any, key: Sequence[Any]) -> bool:
    return isinstance(given, list | tuple) and len(given) == len(key)


def _layouts(given: Sequence[Any]) -> tuple[Any, ...] | None:
    found = tuple(map(arrays.layout_of, given))
    return None if None in found else found


def repeated_part(part: Part) -> RepeatedPart | None:
    """The same without the arrays; None if anything but the memory of plain arrays takes part."""
    if part.rows is not None or len(part.vectors) != 1 or not part.outs:
        return None
    [vector], state = part.vectors, part.state
    if not (vector.on_host and vector.shared) or any(id(out) not in part.direct for out in part.outs):
        return None
    outs = [arrays.memory_at(arrays.address_of(buffer), state.count, state.dtype) for buffer in part.direct.values()]
    return RepeatedPart(state, arrays.memory_at(vector.address, state.count, state.dtype), outs)


def _tensor(part: RepeatedPart, value: Buffer | None, common: bool) -> Tensor:
    if value is None:
        return Tensor([part.source], part.outs[0], part.outs[1:])
    made, *others = [value, *part.outs] if common else [part.outs[0], value, *part.outs[1:]]
    place = arrays.address_of(made)  # which is that of an array, too, which shows the value
    return Tensor([part.source], made, [memory for memory in others if arrays.address_of(memory) != place])


class Repeating(Operations):
    """The part of a store that makes calls on keys as they were made before; for values that are in the workers."""

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        super().__init__(type_name, config, comm)
        self._repeats: Repeats[Repeat] = Repeats()

    @property
    @abstractmethod
    def _assigns(self) -> bool:
        """Whether a value becomes the sum that is pushed."""

    @abstractmethod
    def _values_of(self, states: Sequence[KeyState]) -> list[tuple[Buffer, bool]]:
        """The values of these keys, each with whether the ranks of a host share it."""

    @abstractmethod
    def _value_memory(self) -> list[Buffer]:
        """The values of all keys that have one by now."""

    def _again(self, call: Invocation, key: Any, value: Any, out: Any) -> list[Work] | None:
        usual = self.mpi_size > 1 and not call.reduced and not timeline.on and type(call.priority) is int
        able = not (self._closed or self._joined)
        if not (usual and able and (call.op == "allreduce" or (call.op == "pushpull" and self._assigns))):
            return None
        out = None if out is value else out
        signature = call.signature = self._repeats.signature(call.op, call.scale, key, value, out)
        repeat = None if signature is None else self._repeats.find(signature) or self._elsewhere(signature)
        if repeat is None or self._has_pending(repeat.states):
            return None
        call.scale = float(call.scale)
        arrays_of = list if isinstance(key, list | tuple) else lambda array: [array]
        read = arrays_of(value)
        written = read if out is None else arrays_of(out)
        arrays.note_writes(written)
        for state in repeat.states:
            state.pushes += 1
        return [self._repeat_op(repeat, call, [*written, *read])]

    def _elsewhere(self, signature: Signature) -> Repeat | None:
        """The call as one like it was made on other arrays."""
        found, addresses = self._repeats.like(signature), (layout[0] for layout in signature[3] or ())
        return None if found is None else found.elsewhere(dict(zip(signature[2], addresses, strict=True)))

    def _repeat_op(self, repeat: Repeat, call: Invocation, keep: list[Any]) -> Work:
        """Push: agree, and sum all buckets; ``keep`` are the arrays that the call was given."""
        states, assigns = repeat.states, call.op == "pushpull"
        if call.async_op:  # the caller might free what is still to be summed
            keep = list(map(arrays.owner_of, keep))

        def run(cause: BaseException | None, keep: list[Any] = keep) -> None:
            if call.async_op:
                call.check()
            else:
                self._agree(repeat.calls[0], call)
            repeat.plan(self._values_of(states) if assigns else ())
            try:
                for batch, label in zip(repeat.batches, repeat.labels, strict=True):
                    self._reduce.sum_batch(batch, call.deadline, label, call.scale)
            except BaseException:
                kept_for_late_ranks.append(keep)
                raise
            if assigns:
                self._recorder.add("copy", 0.0, repeat.copied, calls=0)
            # An agreement that has failed was about another call.
            if cause is not None and self._has_pending(states):
                raise cause

        writes = [state.sent for state in states]
        if assigns:
            writes += [state.value for state in states]
        if call.async_op:
            self._agree_op(repeat.calls[1], call)
        else:  # one operation does it all
            writes.append(self._agreements)
        name = label_of(call.op, states)
        return self._engine.push(run, reads=call.done, writes=writes, lane="reduce", name=name, no_skip=True)

    def _has_pending(self, states: Sequence[KeyState]) -> bool:
        """Whether an earlier call on the keys has left an error that nobody has seen yet."""
        has = self._engine.has_pending
        return any(has(state.sent) or has(state.value) for state in states)

    def _note_made(self, call: Invocation, parts: Sequence[Part]) -> None:
        signature = call.signature
        if signature is None or not self._repeats.made(signature) or call.fences or len(parts) != len(signature[2]):
            return
        buckets = []
        for bucket in self._buckets(parts):
            found = [part for part in map(repeated_part, bucket) if part is not None]
            if len(found) < len(bucket) or (call.op == "pushpull" and self._reads_values(found)):
                return
            buckets.append(found)
        entries, forms = tuple(self._entries_of(parts, call.op)), [part.form for part in parts]
        waiting, ahead = (
            Call(call.op, entries, None, partial(self._with_clock, [async_op, forms, call.scale, False]))
            for async_op in (False, True)
        )
        labels = [label_of(call.op, [part.state for part in bucket]) for bucket in buckets]
        self._repeats.keep(signature, Repeat(buckets, labels, (waiting, ahead)))

    def _with_clock(self, details: list[Any]) -> list[Any]:
        return [self._clock, details]

    def _reads_values(self, parts: Sequence[RepeatedPart]) -> bool:
        """Whether what is pushed lies in a key's value, or in what changes places with it."""
        turns = [state.buffer for state in list(self._keys.values()) if state.buffer is not None]
        return any(map(meeting([*self._value_memory(), *turns]), (part.source for part in parts)))
