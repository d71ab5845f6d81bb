"""One call of a program: the keys that it is about, what it does with each, and the wait for all of it."""

from __future__ import annotations

import bisect
import itertools
import math
import numbers
import operator
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi import arrays
from kvmpi.arrays import Vector
from kvmpi.collectives import Entry
from kvmpi.collectives.waiting import wait_devices
from kvmpi.compiling import not_compiled
from kvmpi.deadline import Deadline
from kvmpi.engine import Engine, Variable, Work
from kvmpi.errors import ConfigError, DTypeMismatchError, ShapeMismatchError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.kernels.rows import Rows
from kvmpi.store.grammar import Key
from kvmpi.store.rows import RowOut

Buffer = npt.NDArray[Any]

_making = threading.Lock()
#: Forms of a push: rows, for which rows come back if anything does, and rows, for which the whole value comes back.
ROWS, WHOLE = "rows", "rows, whole value"


@dataclass(slots=True)
class KeyState:
    """What the store knows of one key.

    ``sent`` orders the operations that use the host buffer, ``value`` those that touch the stored value. ``pushes``
    counts this worker's. ``by_rows``: the last push was of rows. ``checked``: see ``checked.py``.
    """

    key: Key
    shape: tuple[int, ...]
    dtype: str
    index: int
    library: str
    pushes: int = 0
    by_rows: bool = False
    buffer: Buffer | None = None
    empty: Callable[[int, str], Buffer] = host.empty
    count: int = field(init=False)
    nbytes: int = field(init=False)
    entry: Entry = field(init=False)
    checked: dict[Any, Any] = field(default_factory=dict)
    sent: Variable = field(init=False)
    value: Variable = field(init=False)

    def __post_init__(self) -> None:
        self.count = math.prod(self.shape)
        self.nbytes = self.count * host.STORAGE[self.dtype].itemsize
        self.entry = Entry(self.key, self.shape, self.dtype)

    def use(self, engine: Engine) -> None:
        """Order operations by this engine from now on."""
        self.sent, self.value = engine.variable(f"buffer of key {self.key!r}"), engine.variable(f"key {self.key!r}")

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    def host_buffer(self) -> Buffer:
        """The key's own host memory, made at first use; shape ``(count,)``, storage dtype. In any thread."""
        buffer = self.buffer
        if buffer is None:
            with _making:  # two that find none at once must not sum into one, and send another
                buffer = self.buffer = self.empty(self.count, self.dtype) if self.buffer is None else self.buffer
        return buffer


class Part(msgspec.Struct):
    """What one call does with one key: ``vectors`` or ``rows`` to push, arrays ``outs`` to pull into.

    ``in_place``: ``outs`` are the arrays that ``vectors`` have been read from.
    ``direct`` is, by identity, the memory of those arrays that a result comes into by itself, as far as it is known.
    ``row_outs`` get rows; ``whole``: ``rows`` are pushed, and the whole value is pulled.
    """

    state: KeyState
    vectors: list[Vector]
    outs: list[Any] = msgspec.field(default_factory=list)
    in_place: bool = False
    direct: dict[int, Buffer] = msgspec.field(default_factory=dict)
    rows: Rows | None = None
    row_outs: list[RowOut] = msgspec.field(default_factory=list)
    whole: bool = False

    @property
    def form(self) -> int | str:
        """How it is pushed, for workers that have joined: so many vectors, or rows."""
        if self.rows is None:
            return len(self.vectors)
        return WHOLE if self.whole else ROWS


class Invocation(msgspec.Struct):
    """One public call under way.

    ``done`` is written when the workers of the client have agreed that they all make it; ``error`` is why they do not.
    ``num_joined`` of them make it because they have joined. Sums are multiplied by ``scale``. ``reduced``: what is
    pushed is a sum already, the same on all of them. ``about``: its keys, for the timeline. ``turns``: of its pushes
    that are not begun, by key. ``fences``: what was queued on devices before the call, and may still use what is pulled
    into. ``signature``: by which it is known again, see ``repeats``. ``source``: where its values come from, if not
    from its arguments, which has to be the same on all workers of the client.
    """

    op: str
    deadline: Deadline
    priority: int = 0
    async_op: bool = False
    done: list[Variable] = msgspec.field(default_factory=list)
    error: BaseException | None = None
    num_joined: int = 0
    scale: float = 1.0
    reduced: bool = False
    clock: int = 0
    about: Key | None = None
    turns: dict[Key, Any] = msgspec.field(default_factory=dict)
    fences: list[Any] = msgspec.field(default_factory=list)
    signature: Any = None
    source: str = ""
    started_s: float = msgspec.field(default_factory=time.perf_counter)

    def check(self) -> None:
        """Raise the error that every rank of the client raises."""
        if self.error is not None:
            raise self.error

    def await_devices(self) -> None:
        """Return when what is pulled into may be written to.

        Raises:
            KVTimeoutError: the device does not get through with what was queued before the call.
        """
        if self.fences:
            wait_devices(
                self.fences, self.deadline,
                lambda: f"{self.op}: the device is not through in time with what uses the arrays that get results",
            )  # fmt: skip

    def await_vector(self, vector: Vector) -> None:
        """Return when what is pushed has been computed.

        Raises:
            KVTimeoutError: the device does not come to it in time.
        """
        if vector.ready is not None:
            wait_devices(
                [vector.ready], self.deadline,
                lambda: f"{self.op}: the device has not computed in time what is to be copied",
            )  # fmt: skip


class JoinedWork(Work):
    """Several operations of one call."""

    __slots__ = ("_num_done", "_works")

    def __init__(self, works: Sequence[Work], name: str) -> None:
        super().__init__(name)
        self._works = works
        self._num_done = 0  # of the first of them, as far as anybody has looked

    @property
    def operations(self) -> Sequence[Work]:
        return self._works

    @not_compiled
    def done(self) -> bool:
        # Whoever reads what comes for very many operations asks after every message.
        works, num_done = self._works, self._num_done
        while num_done < len(works) and works[num_done].done():
            num_done += 1
        self._num_done = num_done
        return num_done == len(works)

    def error(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.error()) is not None), None)

    @not_compiled
    def wait(self, timeout_s: float | None = None) -> None:
        deadline = Deadline(timeout_s)
        start_s = time.perf_counter()
        try:
            # All of it ends before an error of one is raised: until then the arrays of the call are not the caller's.
            in_time = self._wait_done(deadline, timeout_s)
            late = None if in_time else next((work for work in self._works if not work.done()), None)
            for work in self._works if late is None else [late]:
                work.wait(_left(deadline, timeout_s))
        finally:
            if self.on_waited is not None:
                self.on_waited(time.perf_counter() - start_s)

    def wait_done(self, timeout_s: float | None = None) -> bool:
        return self._wait_done(Deadline(timeout_s), timeout_s)

    def _wait_done(self, deadline: Deadline, timeout_s: float | None) -> bool:
        # The last one first: they end about in order, and this thread is woken once.
        return all(work.wait_done(_left(deadline, timeout_s)) for work in reversed(self._works))

    def add_done_callback(self, fn: Callable[[Work], object]) -> None:
        if not self._works:
            fn(self)
        left = itertools.count(len(self._works) - 1, -1)
        for work in self._works:
            work.add_done_callback(lambda _: fn(self) if next(left) == 0 else None)


def _left(deadline: Deadline, timeout_s: float | None) -> float | None:
    return None if timeout_s is None else deadline.remaining_s()


def nothing() -> Work:
    """What is done already."""
    work = Work("nothing to wait for")
    work.finish()
    return work


def label_of(op: str, states: Sequence[KeyState]) -> str:
    """What is done to these keys, for messages."""
    if len(states) == 1:
        return f"{op} of key {states[0].key!r}"
    names = ", ".join(repr(state.key) for state in states[:3])
    return f"{op} of key {names}{', ...' if len(states) > 3 else ''}"


def processing_order(state: KeyState) -> tuple[int, int]:
    """Keys of one call are processed in ascending order of int keys; str keys in the order of their init."""
    return (state.key, 0) if isinstance(state.key, int) else (0, state.index)


def entries_of(parts: Sequence[Part], *, averaged: bool = False) -> list[Entry]:
    """What has to be equal on all workers of a client; for a mean also the number of vectors, which divides it."""
    return [
        part.state.entry
        if part.rows is None and not (averaged and part.vectors)
        else Entry(part.state.key, part.state.shape, f"{part.state.dtype} {_form(part)}")
        for part in parts
    ]


def _form(part: Part) -> str:
    return f"by {part.form}" if part.rows is not None else f"averaged over {part.form} devices"


def overlap(parts: Collection[Part]) -> bool:
    """Whether arrays that are pushed to several keys have memory in common."""
    if len(parts) < 2:
        return False
    found = [(v.address, part.state.nbytes) for part in parts for v in part.vectors]
    found.sort()
    return any(start + nbytes > after for (start, nbytes), (after, _) in itertools.pairwise(found))


def keep_apart(parts: Sequence[Part], call: Invocation) -> None:
    """Copy what is pushed and would be overwritten before it is read: by what another key is pulled into, or by the
    same key's if that does not lie exactly there.

    Raises:
        ConfigError: two keys are pulled into the same memory.
    """
    sources = [
        (number, i, start := vector.address, start + vector.nbytes)
        for number, part in enumerate(parts) for i, vector in enumerate(part.vectors)
    ]  # fmt: skip
    targets = [(number, *arrays.span_of(out)) for number, part in enumerate(parts) for out in part.outs]
    if len(parts) > 1 and not any(part.in_place for part in parts):  # there it may stand for several
        _check_targets(parts, targets, call.op)
    low, high = min((s[2] for s in sources), default=0), max((s[3] for s in sources), default=0)
    targets = [target for target in targets if target[1] < high and target[2] > low]
    if not targets:  # which is where most calls end
        return
    targets.sort(key=operator.itemgetter(1))
    _, _, start, stop = np.array(sources, np.int64).T
    _, first, last = np.array(targets, np.int64).T
    # All that a source meets lie between: the first to reach behind its start, and the first to begin behind its end.
    begin = np.searchsorted(np.maximum.accumulate(last), start, "right").tolist()
    end = np.searchsorted(first, stop).tolist()
    for (number, i, *span), met in zip(sources, map(slice, begin, end), strict=True):
        if all(target == (number, *span) or target[2] <= span[0] for target in targets[met]):
            continue
        vector = parts[number].vectors[i]
        call.await_vector(vector)
        parts[number].vectors[i] = vector.copied()


def _check_targets(parts: Sequence[Part], targets: Sequence[tuple[int, int, int]], op: str) -> None:
    """Raise if dense arrays of two keys share memory: whose numbers would stay there differs from rank to rank."""
    dense = [(start, stop, number) for number, start, stop in targets if stop - start == parts[number].state.nbytes > 0]
    dense.sort()
    reached, owner = 0, -1
    for start, stop, number in dense:
        if start < reached and number != owner:
            keys = " and ".join(repr(parts[i].state.key) for i in sorted((owner, number)))
            raise ConfigError(f"{op} of keys {keys}: their results would go to the same memory; give each key its own")
        if stop > reached:
            reached, owner = stop, number


def meeting(memory: Iterable[Buffer]) -> Callable[[Buffer], bool]:
    """Whether a flat array shares memory with any of these, which share none with each other."""
    spans = sorted(map(arrays.span_of, memory))

    def meets(array: Buffer) -> bool:
        start = arrays.address_of(array)
        if not spans or start >= spans[-1][1]:  # as a rule
            return False
        after = bisect.bisect_left(spans, (start + array.nbytes, 0))  # the first that begins behind it
        return after > 0 and spans[after - 1][1] > start

    return meets


def about(parts: Sequence[Part]) -> Key | None:
    """Keys as one: for the timeline."""
    if len(parts) == 1:
        return parts[0].state.key
    named = ", ".join(str(part.state.key) for part in parts[:3])
    return f"{named}, ... ({len(parts)} keys)" if len(parts) > 3 else named


def on_host(vector: Vector, call: Invocation) -> Buffer:
    """The vector's own memory if that is on the host, else a copy of it there; see ``copy_to_host``."""
    if vector.on_host:
        buffer: Buffer = vector.buffer
        return buffer
    staged = host.empty(vector.count, vector.dtype)
    copy_to_host(vector, staged, call)
    return staged


def copy_to_host(vector: Vector, out: Buffer, call: Invocation) -> None:
    """Copy a vector into host memory, once it has been computed: see ``Invocation.await_vector``."""
    if vector.on_host:
        np.copyto(out, vector.buffer)
        return
    from kvmpi.kernels import gpu

    call.await_vector(vector)
    with gpu.own_stream(vector.buffer.device):
        gpu.sum_vectors_to_host(out, [vector.buffer], vector.dtype)


def deliver(outs: Sequence[Any], flat: Buffer) -> None:
    """Copy ``flat``, a host buffer in storage dtype, into arrays of one key, wherever they are."""
    devices = []
    for out in outs:
        memory = arrays.device_memory_of(out) if arrays.may_be_on_devices() else None
        if memory is None:
            arrays.write(out, flat)
        else:
            devices.append(memory)
    if devices:
        from kvmpi.kernels import gpu

        with gpu.own_stream(devices[0].device):
            gpu.copy_to_devices(devices, flat)


def check_array(array: Any, shape: tuple[int, ...], dtype: str, where: str) -> None:
    """Raise unless ``array`` has this shape and dtype."""
    if arrays.shape_of(array) != shape:
        raise ShapeMismatchError(f"{where}: shape {arrays.shape_of(array)}, the key has {shape}")
    if (found := dtype_in(array, where)) != dtype:
        raise DTypeMismatchError(f"{where}: dtype {found}, the key has {dtype}")


def dtype_in(array: Any, where: str) -> str:
    """``arrays.dtype_of``, whose errors say ``where``."""
    try:
        return arrays.dtype_of(array)
    except (DTypeMismatchError, UnsupportedError) as error:
        raise type(error)(f"{where}: {error}") from None


def check_writable(parts: Iterable[Part], op: str, rank: int) -> None:
    """Raise ``UnsupportedError`` unless results can be written where ``parts`` want them, which will happen now."""
    written = []
    for part in parts:
        for array in (*part.outs, *(out.target for out in part.row_outs if out.ids is not None)):
            try:
                arrays.check_writable(array)
            except UnsupportedError as error:
                raise UnsupportedError(f"{op} of key {part.state.key!r} on worker {rank}: {error}") from None
            written.append(array)
    arrays.note_writes(written)


def take_numbers(call: Invocation, key: Any) -> None:
    """Make ``call.priority`` and ``call.scale`` numbers of Python: NumPy's wrap around, and arrays are no numbers.

    Raises:
        ConfigError: one of them is none. The other workers of the client are then told of the call without it.
    """
    priority, scale = call.priority, call.scale
    if type(priority) is int and type(scale) is float and scale == 1.0:  # as a rule
        return
    call.priority, call.scale = 0, 1.0
    found: Any = int(priority) if isinstance(priority, numbers.Integral) else _real(priority)
    if math.isnan(found):
        raise ConfigError(f"{call.op} of key {key!r}: priority={priority!r}, expected a number")
    factor = math.nan if isinstance(scale, bool) else _real(scale)
    if not math.isfinite(factor):
        raise ConfigError(f"{call.op}: scale={scale!r}; expected a finite number")
    call.priority, call.scale = found, factor


def _real(number: Any) -> float:
    """Not-a-number for what is none, or is a whole number, or a fraction, that no float can hold."""
    try:
        return float(number) if isinstance(number, numbers.Real) else math.nan
    except OverflowError:
        return math.nan


def check_scalable(call: Invocation, parts: Iterable[Part]) -> None:
    """Raise unless sums of all ``parts`` can be multiplied by ``call.scale``."""
    for part in parts:
        host.check_scalable(part.state.dtype, call.scale, f"{call.op} of key {part.state.key!r}: ")
