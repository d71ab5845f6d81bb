"""One chunk of one key on a server: its value, its update rule with what the rule remembers, and its open round."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi import optim
from kvmpi.arrays import DTYPES
from kvmpi.errors import UnsupportedError, rebuild
from kvmpi.kernels import host
from kvmpi.kernels import rows as by_rows
from kvmpi.kernels.rows import Rows
from kvmpi.ps.order import UNSAID, Span, common
from kvmpi.ps.reply import name_and_text
from kvmpi.ps.row_chunks import frames
from kvmpi.ps.standing import Standing
from kvmpi.ps.steps import Mark
from kvmpi.wire import LEND_FROM_BYTES, entries
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

Buffer = npt.NDArray[Any]
Empty = Callable[[int, np.dtype[Any]], Buffer]

#: From this size on a received frame has memory of its own, which may become the accumulator as it is.
ADOPT_FROM_BYTES = 64 << 10


class Contribution(NamedTuple):
    """One client's push, of a whole chunk or of some rows, held until its turn in its round."""

    route: bytes
    request: int
    fused: bool
    acknowledge: bool
    quiet: bool
    wire: Buffer | Rows
    wire_dtype: str
    at: int = 0
    done: int = 0
    span: Span = UNSAID
    arrived_ns: int = 0  # for the timeline


class Waiter(NamedTuple):
    """A push whose sender waits for the end of its round ``step``: with ``fused``, for the value.

    ``ids``, ``whole``: the rows of one that is made again, or that it has all. Another process of the client may make
    it, of other rows than those that are in the round, or while the round does without it. Without rounds, ``step`` is
    that of the push, ``ids`` are its rows, and ``version`` is the number of its update, if that is known.
    """

    route: bytes
    request: int
    fused: bool
    step: int
    ids: Buffer | None = None
    whole: bool = False
    version: int = 0

    @classmethod
    def again(cls, route: bytes, request: int, fused: bool, step: int, wire: Buffer | Rows) -> Waiter:
        """That of a push which is made again."""
        if isinstance(wire, Rows):
            return cls(route, request, fused, step, ids=wire.ids.copy())  # the message's memory goes back
        return cls(route, request, fused, step, whole=True)


@dataclass(slots=True)
class Reader:
    """One client's pull, of all rows or of ``ids``, held until the round ``min_round`` is in the value; or, where
    staleness is bounded, until others have come close enough to as many pushes.
    """

    route: bytes
    request: int
    min_round: int
    ids: Buffer | None = field(default=None, compare=False)
    arrived_ns: int = field(default=0, compare=False)  # for the timeline


class RuleChange(msgspec.Struct):
    """An update rule and the first round it is in force. A new ``generation`` starts with empty state."""

    from_round: int
    generation: int
    rule: optim.Rule | None


def new_buffer(count: int, dtype: np.dtype[Any]) -> Buffer:
    """Uninitialised memory for a value."""
    return np.empty(count, dtype)


def _can_adopt(wire: Buffer) -> bool:
    return bool(wire.nbytes >= ADOPT_FROM_BYTES and wire.flags.writeable and wire.flags.aligned)


class Slot:
    """The arithmetic of one chunk. Holds at most the value, one accumulator of its size, and the rule's state.

    ``value`` is taken over if possible, else copied. A synchronous slot whose rule answers with the old value
    also keeps that one, for a client that asks again.

    Pushes of rows are added up as rows, and the rule is applied to these alone, unless one of the round's pushes is of
    the whole chunk.

    Args:
        width: elements of a row of the key.
        is_whole: whether the key has no other chunks.
        empty: makes memory for values, such that they can be sent without a copy.
    """

    #: Among the names of a chunk's arrays in a log, those of ``met`` and ``touched``; no rule's state is called so.
    OLD_VALUE, TOUCHED = "met", "touched"
    #: And those of pushes that are gathered: their sum, and the rows that it has if these are not all.
    GATHERED, GATHERED_ROWS = "gathered", "gathered_rows"
    #: In place of a client: whoever was in a round.
    ANYBODY = -1

    def __init__(
        self, key: Key, chunk: int, count: int, dtype: str, value: Buffer, rule: optim.Rule | None, generation: int,
        width: int = 0, empty: Empty | None = None, *, is_whole: bool = True,
    ) -> None:  # fmt: skip
        self.is_whole = is_whole
        self.key, self.chunk, self.count, self.dtype, self._empty = key, chunk, count, dtype, empty or new_buffer
        self.width = width
        # All values come from where messages do: malloc finds their memory again only for its own kind.
        self._value_came = _can_adopt(value)  # its memory came with a message
        self.value = value if self._value_came else self._copy(value)
        self.master: Buffer | None = None
        self.state: dict[str, Buffer] = {}
        self.updates = 0
        self.generation = generation
        #: For this key: what is different for others is none of its business, and would be logged for every chunk.
        self.rules: deque[RuleChange] = deque([RuleChange(0, generation, None if rule is None else rule.of_key(key))])
        # The open round: which round, how far through the clients, and their sum so far.
        self.rounds = 0
        self.cursor = 0
        self.contributors: list[int] = []
        # Their overall steps, and the least that they know to be done; what lasts of that, by client, or one for all:
        # clients that are in the same round are at the same step, and where others go on without those that are gone
        # that is all that anybody asks for.
        self.open_steps: dict[int, int] = {}
        self.open_done = 0
        self.marks: dict[int, Mark] = {}
        # The steps of the program that they may belong to; the last one that closed rounds may.
        self.open_spans: list[Span] = []
        self.latest = 0
        self.one_mark = False
        self.accumulator: Buffer | Rows | None = None
        self._spare: Buffer | None = None
        # Where pushes are gathered without rounds: how many the accumulator has, and how many have come in this job.
        self.gathered = self.pushes = 0
        self._adopted = False  # the accumulator came with a message, and so will the next: none need be kept for it
        # What became of the last round: the error if it had no effect, the old value if that is the answer, the rows
        # that it has changed if these are not all.
        self.failed: Exception | None = None
        self.met: Buffer | None = None
        self.touched: Buffer | None = None
        # By client, where pushes are updates of their own: the version and the old value that its last one was answered
        # with, until it is known to have that. A repetition must get the same, or client and server part.
        self.met_by: dict[int, tuple[int, Buffer]] = {}
        # What each client has contributed up to, and what waits: at most one push and one pull of each client.
        self.steps: dict[int, int] = {}
        # Where there are no rounds, how far clients that have begun anew were taken to be then.
        self.bases: dict[int, int] = {}
        self.standing: Standing | None = None
        self.held: dict[int, Contribution] = {}
        self.waiting: dict[int, Waiter] = {}
        self.readers: dict[int, Reader] = {}
        # Clients that are back and have not pushed here since: they are in the rounds of overall steps after these.
        self.entering: dict[int, int] = {}
        self.restored: tuple[int, int, int] | None = None  # client, incarnation, request that last put state back
        self._loan: Callable[[], Buffer | None] | None = None  # what was lent of the value, if somebody still has it

    # ---- values

    def lend(self) -> Buffer:
        """The value for sending, the same to all: until the last of them drops it, the slot does not write there.

        Memory that came with a message leaves with another, without a copy, if it is not that large that it is followed
        on its way: nobody says when it has left. So it is read-only, and nothing is written there any more.
        """
        view = None if self._loan is None else self._loan()
        if view is None:
            view = self.value[:]
            self._loan = weakref.ref(view)
            if self._value_came and view.nbytes < LEND_FROM_BYTES:
                view.flags.writeable = False
                self._loan = lambda: view
        return view

    def _lent(self) -> bool:
        return self._loan is not None and self._loan() is not None

    def _replace_value(self, value: Buffer, *, came: bool = False) -> None:
        """Make ``value`` the value; the old memory becomes the next accumulator unless it is lent."""
        old, lent = self.value, self._lent()
        self._set_value(value, came=came)
        if not lent and old.dtype == self._accumulator_dtype() and old.flags.writeable:
            self._keep_spare(old)

    def _set_value(self, value: Buffer, *, came: bool) -> None:
        self.value, self._loan, self._value_came = value, None, came

    def own_value(self) -> Buffer:
        """The value in memory that may be written."""
        if self._lent():
            self._replace_value(self._copy(self.value))
        return self.value

    # ---- one round

    def add(self, wire: Buffer | Rows, wire_dtype: str) -> None:
        """Add one push to the open round. The first one's memory is taken over where that is possible."""
        if isinstance(wire, Rows):
            self._add_rows(wire, wire_dtype)
            return
        if isinstance(self.accumulator, Rows):
            self._spread(self.accumulator)
        if self.accumulator is None:
            same_dtype = wire_dtype == host.ACCUMULATE[self.dtype]
            self._adopted = same_dtype and _can_adopt(wire)
            if self._adopted:
                self.accumulator, self._spare = wire, None
                return
            accumulator = self._take_spare()
            self._widen(wire, wire_dtype, accumulator)
            self.accumulator = accumulator
        else:
            assert not isinstance(self.accumulator, Rows)
            host.add_widened(self.accumulator, host.ACCUMULATE[self.dtype], wire, wire_dtype)

    def _add_rows(self, wire: Rows, wire_dtype: str) -> None:
        if isinstance(self.accumulator, np.ndarray):
            by_rows.add_into(self.accumulator, self._widen_rows(wire, wire_dtype))
        elif self.accumulator is None:
            rows = self._widen_rows(wire, wire_dtype)
            values = rows.values.copy() if rows.values is wire.values else rows.values
            self.accumulator = Rows(rows.ids.copy(), values)  # the message's memory goes back to where it came from
        else:
            self.accumulator = by_rows.added(self.accumulator, self._widen_rows(wire, wire_dtype))

    def _widen_rows(self, wire: Rows, wire_dtype: str) -> Rows:
        """Rows in the dtype in which this chunk's pushes are added up."""
        if wire_dtype == host.ACCUMULATE[self.dtype]:
            return wire
        return Rows(wire.ids, by_rows.widened(wire.values, wire_dtype))

    def _spread(self, rows: Rows) -> None:
        """The open round is of the whole chunk: make its sum of rows a sum with zeros elsewhere."""
        accumulator, self._adopted = self._take_spare(), False
        accumulator.fill(0)
        by_rows.add_into(accumulator, rows)
        self.accumulator = accumulator

    def apply_alone(self, wire: Buffer | Rows, wire_dtype: str, seen: int = 0) -> Buffer:
        """Apply one push as an update of its own; returns the value that a fused reader of all rows gets.

        A rule that raises leaves no trace: the push does not count.

        Args:
            seen: the version that the push comes from.
        """
        rule = self.rules[-1].rule
        if rule is not None and rule.staleness_aware and self.rounds - seen > 1:
            self.accumulator = self._aged(wire, wire_dtype, self.rounds - seen)
            self._adopted = False
            answer = self.close_round(1)
        elif isinstance(wire, Rows):
            answer = self._update(self._widen_rows(wire, wire_dtype), 1, recycle=None)
        elif wire_dtype == host.ACCUMULATE[self.dtype]:
            answer = self._update(wire, 1, recycle=None)
        else:
            self.add(wire, wire_dtype)
            answer = self.close_round(1)
        # Clients do not step together here: what one push has met or changed would not be right for all.
        self.met = self.touched = None
        return answer

    def gather(self, wire: Buffer | Rows, wire_dtype: str, seen: int, *, keep: bool) -> None:
        """Add one push, which comes from the version ``seen``, to those that are to be an update together.

        Args:
            keep: its memory must stay as it is.
        """
        rule = self.rules[-1].rule
        if rule is not None and rule.staleness_aware and self.rounds - seen > 1:
            wire, wire_dtype = self._aged(wire, wire_dtype, self.rounds - seen), host.ACCUMULATE[self.dtype]
        elif keep and not isinstance(wire, Rows) and _can_adopt(wire):
            wire = self._copy(wire)  # which may be taken over
        self.add(wire, wire_dtype)
        self.gathered, self.pushes = self.gathered + 1, self.pushes + 1

    def apply_gathered(self) -> None:
        """Make an update of what is gathered. If the rule raises, it is dropped, and nothing has changed."""
        count, self.gathered = self.gathered, 0
        self.close_round(count)
        self.met = self.touched = None  # as in apply_alone

    def _aged(self, wire: Buffer | Rows, wire_dtype: str, age: int) -> Buffer | Rows:
        """One push that is so many updates old, divided by that, in the dtype in which pushes are added up."""
        dtype = host.ACCUMULATE[self.dtype]
        if DTYPES[dtype].kind != "f":
            raise UnsupportedError(
                f"key {self.key!r}: a push that is {age} updates old cannot be divided by that in {self.dtype}; use a "
                "key of a float type, or a rule without staleness_aware"
            )
        if isinstance(wire, Rows):
            return Rows(wire.ids, np.divide(self._widen_rows(wire, wire_dtype).values, age))
        aged = self._take_spare()
        self._widen(wire, wire_dtype, aged)
        return np.divide(aged, age, out=aged)

    def note_single(self, client: int, push: m.Push | entries.Single, answer: Buffer) -> bool:
        """A client's push was applied alone; whether its ``answer`` is kept in case it asks again."""
        self.steps[client] = push.step
        if push.at:
            self.marks.setdefault(client, Mark()).note(push.at, push.done)
        if self.met_by:
            self.met_by.pop(client, None)
        keeps = push.fused and answer is not self.value
        if keeps:
            self.met_by[client] = self.rounds, answer
        return keeps

    def close_round(self, count: int, *, keep: bool = False) -> Buffer:
        """Apply the sum of ``count`` pushes; returns the value that a fused reader gets.

        If the rule raises, the sum is dropped, and it is for the caller to ``skip_round``.

        Args:
            keep: the accumulator's memory is still wanted as it is.
        """
        pushed = self.accumulator
        assert pushed is not None
        self.accumulator = None
        return self._update(pushed, count, recycle=None if keep or isinstance(pushed, Rows) else pushed)

    def skip_round(self, error: Exception | None) -> None:
        """The open round is over without effect: because of ``error``, and its clients have gone on and cannot push it
        again; or because it has none."""
        self.rounds += 1
        self.failed, self.met, self.touched = error, None, None

    def begin_round(self) -> None:
        """The next round is the open one, and nobody is in it."""
        latest = self.rounds + 1 if UNSAID in self.open_spans else self.span.latest
        if latest > self.latest:
            self.latest = latest
        self.open_spans.clear()
        if self.entering:
            for client in [client for client, step in self.entering.items() if self.open_step > step]:
                if client in self.contributors:  # else it is one that is gone again
                    del self.entering[client]
        if self.open_steps:
            for client, step in self.open_steps.items():
                self.marks.setdefault(self.ANYBODY if self.one_mark else client, Mark()).note(step, self.open_done)
                if self.one_mark:
                    break
            self.open_steps.clear()
        else:
            self.marks.clear()  # there would be a gap
        self.cursor = 0
        self.contributors.clear()

    @property
    def span(self) -> Span:
        """The steps of the program that the open round may belong to. If not all say it, the key is taken for one that
        is pushed in every step."""
        return common(self.open_spans, self.rounds + 1)

    def note_step(self, client: int, step: int, done: int) -> None:
        """A push that is in the open round is of the overall step ``step``; 0: its sender does not say."""
        if step:
            self.open_done = min(done, self.open_done) if self.open_steps else done
            self.open_steps[client] = step

    def _update(self, pushed: Buffer | Rows, count: int, recycle: Buffer | None) -> Buffer:
        """Apply ``pushed``; ``recycle`` is the same memory if it may be overwritten."""
        rule = self._rule_of_round(self.rounds + 1)
        try:
            if isinstance(pushed, Rows):
                self._apply_rows(rule, pushed, count)
                answer, self.touched = self.value, pushed.ids
            else:
                answer, self.touched = self._apply(rule, pushed, count, recycle), None
        except Exception as error:  # a rule that does not fit this key, or a user's own
            name, text = name_and_text(error)
            raise rebuild(name, f"update {self.updates + 1} of key {self.key!r}, chunk {self.chunk}: {text}") from error
        self.rounds += 1
        self.failed = None
        self.met = answer if answer is not self.value else None
        return answer

    def _apply_rows(self, rule: optim.Rule | None, pushed: Rows, count: int) -> None:
        if rule is None:
            by_rows.put(self.own_value(), pushed.ids, by_rows.narrowed(pushed.values, self.dtype))
            return
        optim.check_by_rows(rule)
        self._prepare_master(rule)
        step = self.updates + 1
        optim.update_rows(rule, self.own_value(), self.dtype, pushed, self.state, step, count, self.master)
        self.updates = step

    def _prepare_master(self, rule: optim.Rule) -> None:
        if not rule.multi_precision:
            self.master = None
        elif self.dtype in host.HALF and self.master is None:
            self.master = optim.make_master(self.value, self.dtype)

    def take(self, ids: Buffer) -> Buffer:
        """Copies of rows of the value, flat, for sending."""
        return by_rows.take(self.value, self.width, ids).reshape(-1)

    def _apply(self, rule: optim.Rule | None, pushed: Buffer, count: int, recycle: Buffer | None) -> Buffer:
        if rule is None:
            self._assign(pushed, recycle)
            return self.value
        if not (self.is_whole or rule.in_blocks):
            raise UnsupportedError(
                f"the rule {rule.name!r} must see a whole vector (it overrides apply), and this one is cut into "
                "chunks: start the job with KVMPI_PLACEMENT=hash, and KVMPI_CHUNK_BYTES as large as the key"
            )
        step = self.updates + 1
        self._prepare_master(rule)
        if not rule.replies_old:
            value = self.own_value()
            optim.update(rule, value, self.dtype, pushed, self.state, step, count, master=self.master)
            if recycle is not None:
                self._keep_spare(recycle)
        else:
            value = self.value
            out = self._out_buffer(recycle)
            optim.update(rule, value, self.dtype, pushed, self.state, step, count, master=self.master, out=out)
            # The fused readers are still to be sent the old value, so its memory is not used again.
            self._set_value(out, came=out is recycle and self._adopted)
        self.updates = step
        return value

    def _out_buffer(self, recycle: Buffer | None) -> Buffer:
        if recycle is not None and recycle.dtype == DTYPES[self.dtype]:
            return recycle
        return self._empty(self.count, DTYPES[self.dtype])

    def _assign(self, pushed: Buffer, recycle: Buffer | None) -> None:
        if recycle is not None and recycle.dtype == DTYPES[self.dtype]:
            self._replace_value(recycle, came=self._adopted)
            return
        if self.dtype in host.HALF:
            host.narrow(pushed, self.own_value(), self.dtype)
            if recycle is not None:
                self._keep_spare(recycle)
        elif self._lent():
            self._replace_value(self._copy(pushed))
        else:
            np.copyto(self.value, pushed)

    def change_rule(self, change: RuleChange) -> None:
        """Put a rule in force from a round on."""
        while self.rules and self.rules[-1].from_round >= change.from_round:
            self.rules.pop()  # never in force: otherwise a chunk that nobody pushes would collect them
        rule = None if change.rule is None else change.rule.of_key(self.key)
        self.rules.append(RuleChange(change.from_round, change.generation, rule))

    @property
    def rule_in_force(self) -> RuleChange:
        """The rule of the last round: what clients have said for later rounds they say again after a resume."""
        return self.rules[0]

    @property
    def next_rule(self) -> RuleChange:
        """The rule of the next round, which may come long after the last."""
        return self.rule_for(self.rounds + 1)

    def rule_for(self, round_: int) -> RuleChange:
        """The rule of a round that is to come."""
        return next(change for change in reversed(self.rules) if change.from_round <= round_)

    def _rule_of_round(self, round_: int) -> optim.Rule | None:
        while len(self.rules) > 1 and self.rules[1].from_round <= round_:
            self.rules.popleft()
        current = self.rules[0]
        if current.generation != self.generation:
            self.generation, self.state, self.updates = current.generation, {}, 0
        return current.rule

    def _accumulator_dtype(self) -> np.dtype[Any]:
        return DTYPES[host.ACCUMULATE[self.dtype]]

    def _keep_spare(self, buffer: Buffer) -> None:
        self._spare = None if self._adopted else buffer

    def _take_spare(self) -> Buffer:
        spare, self._spare = self._spare, None
        return spare if spare is not None else self._empty(self.count, self._accumulator_dtype())

    def _copy(self, value: Buffer) -> Buffer:
        copy = self._empty(value.size, value.dtype)
        np.copyto(copy, value)
        return copy

    def _widen(self, wire: Buffer, wire_dtype: str, out: Buffer) -> None:
        if wire_dtype == host.ACCUMULATE[self.dtype]:
            np.copyto(out, wire)
        else:
            host.widen(wire, wire_dtype, out)

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits for the end of a round."""
        return bool(self.held or self.waiting or self.readers)

    def forget_waiting(self) -> None:
        """Whoever waits for this server will ask another."""
        self.held, self.waiting, self.readers = {}, {}, {}

    def lasting_steps(self, client: int) -> int:
        """The client's steps without its push in the open round, which may be lost with this server."""
        steps = self.steps.get(client, 0)
        return min(steps, self.rounds) if client in self.contributors else steps

    def clock(self, client: int) -> int:
        """How often the client has pushed; one that has begun anew, since then and before it was taken to be there."""
        return self.bases.get(client, 0) + self.steps.get(client, 0)

    def forget_steps(self, client: int) -> None:
        """Another process of the client counts its pushes from the beginning."""
        self.steps.pop(client, None)
        self.marks.pop(client, None)

    def last_steps(self, client: int, with_open: bool) -> tuple[dict[int, int], int]:
        """The overall steps of the client's last pushes, by their numbers, and what it knows to be done."""
        mark, number = self.marks.get(client, Mark()), self.lasting_steps(client)
        found = mark.numbered(number)
        if with_open and client in self.open_steps:
            found[number + 1] = self.open_steps[client]
        return found, mark.done

    # ---- clients that are back where others went on without them

    @property
    def last_step(self) -> int:
        """The overall step of the last round that is over. Where nobody says any, there is a push in each."""
        mark = self.marks.get(self.ANYBODY)
        return abs(mark.steps[-1]) if mark is not None else self.rounds

    @property
    def open_step(self) -> int:
        """The overall step of the open round, from any push to it; 0: there is none."""
        if self.contributors:
            return abs(next(iter(self.open_steps.values()), self.rounds + 1))
        here = [client for client in self.held if self.steps.get(client, 0) == self.rounds]
        at = next((self.held[client].at for client in sorted(here, key=lambda client: client in self.entering)), 0)
        return abs(at) or (self.rounds + 1 if here else 0)

    def round_steps(self, with_open: bool) -> tuple[dict[int, int], int]:
        """The overall steps of the last rounds, by their numbers, and what is known to be done."""
        mark = self.marks.get(self.ANYBODY, Mark())
        found = mark.numbered(self.rounds)
        if with_open and self.open_steps:
            found[self.rounds + 1] = next(iter(self.open_steps.values()))
        return found, mark.done

    def enter(self, client: int, step: int) -> None:
        """From now on the client, which is back, is in the rounds of overall steps after ``step``."""
        self.entering[client], self.steps[client] = step, self.rounds

    def pushes_before(self, client: int, step: int) -> int:
        """After how many the client's push number ``step`` comes. The first one since it is back says so itself."""
        before = self.steps.get(client, 0)
        if client in self.entering:
            before = max(before, self.rounds)
            if step > before:
                before = self.steps[client] = step - 1
        return before

    # ---- what a checkpoint holds

    def dump(self) -> tuple[list[str], list[Buffer]]:
        """Names and arrays of everything that a checkpoint needs, the value first."""
        arrays = {"value": self.value}
        if self.master is not None:
            arrays["master"] = self.master
        arrays.update(self.state)
        return list(arrays), [array.copy() for array in arrays.values()]

    def remembered(self) -> tuple[int, list[str], list[Buffer]]:
        """Updates, and names and arrays of ``dump``, as the rule of the next push finds them: one that was put in force
        since the last begins without a memory."""
        names, arrays = self.dump()
        if self.next_rule.generation == self.generation:
            return self.updates, names, arrays
        kept = {name: array for name, array in zip(names, arrays, strict=True) if name not in self.state}
        return 0, list(kept), list(kept.values())

    def dump_gathered(self) -> tuple[list[str], list[Buffer]]:
        """Names and arrays of what is gathered."""
        if not self.gathered or self.accumulator is None:
            return [], []
        names = [self.GATHERED_ROWS, self.GATHERED] if isinstance(self.accumulator, Rows) else [self.GATHERED]
        return names, [frame.copy() for frame in frames(self.accumulator)]

    def restore_gathered(self, count: int, arrays: dict[str, Buffer]) -> None:
        """The inverse of ``dump_gathered``, which takes its arrays out of others."""
        ids, values = arrays.pop(self.GATHERED_ROWS, None), arrays.pop(self.GATHERED, None)
        self.gathered = count
        if values is not None:
            values = values.copy()
            total = values if ids is None else Rows(ids, values.reshape(ids.size, self.width))
            self.add(total, host.ACCUMULATE[self.dtype])

    def drop_gathered(self) -> None:
        """What is gathered will be in no update."""
        if self.gathered:
            self.gathered, self.accumulator = 0, None

    def restore(self, updates: int, arrays: dict[str, Buffer]) -> None:
        """The inverse of ``dump``; a value is only replaced if it is there, and with it what pushes have made of it:
        those that are gathered, too."""
        if "value" in arrays:
            np.copyto(self.own_value(), arrays["value"])
            self.master = None
            self.drop_gathered()
        if "master" in arrays:
            self.master = arrays["master"].copy()
        self.state = {name: array.copy() for name, array in arrays.items() if name not in ("value", "master")}
        self.updates = updates
        self.generation = self.rules[-1].generation
