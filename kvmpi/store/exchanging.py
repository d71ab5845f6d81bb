"""What a store on servers does with the keys of a call: sums them in its clients, pushes, pulls, and passes on."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES, Vector
from kvmpi.collectives import Comm
from kvmpi.compiling import methods_not_compiled
from kvmpi.config import Config
from kvmpi.engine import Variable, Work
from kvmpi.kernels.rows import Rows
from kvmpi.ps import ArrivingRows, Exchange, Landing, PsClient, Turn
from kvmpi.store.answers import Answer, Coming, Target, together
from kvmpi.store.call import Invocation, KeyState, Part, label_of, nothing
from kvmpi.store.core import INLINE_BYTES
from kvmpi.store.grammar import Key
from kvmpi.store.known_exchanges import KnownExchanges
from kvmpi.trace import timeline

Buffer = npt.NDArray[Any]
T = TypeVar("T")

#: From this size on a blocking push waits for the servers rather than copy first; below, the copy is faster than an
#: answer (benchmarks/ps_worker.py: 256 KB take 1.3 ms for push and pull with the copy, 1.6 ms without).
_LEND_FROM_BYTES = 2 << 20
#: Small values go from the master to other workers of its client together, up to so many bytes.
_TOGETHER_BYTES = 512 << 10


@methods_not_compiled
class Exchanging(KnownExchanges):
    """The part of a store on servers that pushes and pulls."""

    _in_rounds: bool
    _alone: bool  # there is no other client

    def __init__(self, type_name: str, config: Config, comm: Comm | None = None) -> None:
        super().__init__(type_name, config, comm)
        # By key: what the last push fetches, and whether there was a pull since.
        self._answers: dict[Key, Answer | None] = {}
        self._pulled: set[Key] = set()

    def _start_push(self, parts: list[Part], call: Invocation) -> list[Work]:
        sums = self._sum_ops(parts, call)
        self._take_places([part.state.key for part in parts], call)
        works = [work for batch in self._pushed_together(sums, call) for work in self._push_parts(batch, call)]
        return works + [self._push_rows(part, call) for part in parts if part.rows is not None]

    def _push_rows(self, part: Part, call: Invocation) -> Work:
        """Push, and pull what the part asks for: the rows that the push changes, or the whole value."""
        state = part.state
        fused = call.op == "pushpull" and not part.whole
        summed = self._sum_rows_op(part, call)
        arriving: list[ArrivingRows] = []
        turns = self._turns_of([state], call)

        def ask(ps: PsClient) -> Work:
            assert part.rows is not None
            [turn] = turns
            arriving.extend([ArrivingRows(ps.rows_of(state.key))] if fused else [])
            changed, turn.kept = (arriving[0] if fused else None), not (fused or call.async_op)
            return ps.push_rows(state.key, part.rows, call.deadline, call.priority, changed, turn)

        work = self._ask_op([state], ask, call, reads=[state.sent], turns=turns)
        if part.whole:
            [pulled] = self._start_pull([part], call)
            return pulled
        if fused:
            return self._spread_rows_op(part, lambda: arriving[0].rows(), call)
        return work if self._ps is not None and call.async_op else summed  # the rows are copies

    def _start_row_pull(self, part: Part, call: Invocation) -> Work:
        state = part.state
        ids, known = self._union_op(part, call)
        found: list[Rows] = []

        def ask(ps: PsClient) -> Work:
            found.append(Rows(ids[0], np.empty((ids[0].size, state.width), DTYPES[state.dtype])))
            return ps.pull_rows(state.key, ids[0], found[0].values, call.deadline, call.priority)

        self._ask_op([state], ask, call, reads=known)
        return self._spread_rows_op(part, lambda: found[0], call)

    def pushed_by_rows(self, key: Key) -> bool:
        if super().pushed_by_rows(key):
            return True
        return self._ps is not None and not self._keys[key].pushes and self._ps.found_by_rows(key)

    def _check_by_rows(self, op: str, state: KeyState) -> None:
        super()._check_by_rows(op, state)
        if self._ps is not None:
            self._ps.rows_of(state.key)  # raises where it is not cut at rows

    def _push_parts(self, batch: Sequence[tuple[Part, Work | None]], call: Invocation) -> list[Work]:
        """Push some keys; small ones together, of which the call waits for nothing but their sums."""
        if self._copies_at_once(batch, call):
            alike = [batch]
            if len(batch) > 1:
                alike = [list(some) for _, some in itertools.groupby(batch, lambda each: self._brings(each[0], call))]
            return [work for some in alike for work in self._push_copies(some, call)]
        if len(batch) == 1:
            return [self._push_part(*batch[0], call)]
        own = itertools.groupby((part for part, summed in batch if summed is None), _is_summed_with)
        local = [self._sum_op(list(some), call) for _, some in own]
        local += dict.fromkeys(summed for _, summed in batch if summed is not None)
        for is_ahead, group in itertools.groupby(batch, lambda each: self._brings(each[0], call)):
            states = [part.state for part, _ in group]
            landings = [self._landing(state, is_ahead=is_ahead) for state in states]
            work = self._exchange_op(
                states, [None] * len(states), landings, call, kept=True,
                **{"writes" if is_ahead else "reads": [state.sent for state in states]},
            )  # fmt: skip
            self._note_answers(states, landings, work)
        return local

    def _copies_at_once(self, batch: Sequence[tuple[Part, Work | None]], call: Invocation) -> bool:
        """Whether the arrays that a call pushes are copied in the operation that sends them: they are of the host and
        small, and no operation that is under way holds the call's copy up."""
        if call.async_op or timeline.on:
            return False
        nbytes = 0
        for part, summed in batch:
            state, vectors = part.state, part.vectors
            if summed is not None or len(vectors) != 1 or not vectors[0].on_host:
                return False
            if state.sent.in_use or state.value.in_use:
                return False
            nbytes += state.nbytes
        return nbytes < _LEND_FROM_BYTES

    def _push_copies(self, batch: Sequence[tuple[Part, Work | None]], call: Invocation) -> list[Work]:
        """Copy what is pushed, and send the copies, which all bring values or none; what the call has to wait for."""
        states, is_ahead = [part.state for part, _ in batch], self._brings(batch[0][0], call)
        landings = [self._landing(state, is_ahead=is_ahead) for state in states]
        turns, copied = self._turns_of(states, call), False

        def ask(ps: PsClient) -> Work:
            nonlocal copied
            exchanges, nbytes, start_s = [], 0, time.perf_counter()
            for (part, _), landing, turn in zip(batch, landings, turns, strict=True):
                buffer = part.state.host_buffer()
                np.copyto(buffer, part.vectors[0].buffer)
                turn.kept, nbytes = True, nbytes + buffer.nbytes
                exchanges.append(Exchange(part.state.key, buffer, landing, turn))
            copied = True
            self._recorder.add_brief("reduce", start_s, time.perf_counter(), nbytes)
            return ps.exchange_together(exchanges, call.deadline, call.priority)

        work = self._ask_op(states, ask, call, writes=[state.sent for state in states], turns=turns)
        self._note_answers(states, landings, work)
        return [] if copied else [work]

    def _push_part(self, part: Part, summed: Work | None, call: Invocation) -> Work:
        state, vectors = part.state, part.vectors
        # Where no server waits for other clients before it acknowledges, waiting for it is cheaper than a copy.
        waits = call.async_op or (vectors[0].nbytes >= _LEND_FROM_BYTES and (not self._in_rounds or self._alone))
        lent = self._lent(vectors, call, until_done=waits)
        local = nothing() if lent is not None else summed or self._sum_op([part], call)
        landing = self._landing(state, is_ahead=self._brings(part, call))
        if landing is not None:
            accepted = self._push_ahead(state, lent, landing, call, kept=not waits or lent is None)
            return accepted if waits and lent is not None else local

        ends_with_it = self._ps is not None and (call.async_op or (waits and lent is not None))
        turns = self._turns_of([state], call)

        def ask(ps: PsClient) -> Work:
            [turn] = turns
            turn.kept = not ends_with_it
            value = state.host_buffer() if lent is None else lent
            return ps.push(state.key, value, call.deadline, call.priority, turn)

        work = self._ask_op([state], ask, call, reads=[state.sent] if lent is None else [], turns=turns)
        # The caller's arrays are free once the sum is in the key's own buffer.
        return work if ends_with_it else local

    def _push_ahead(
        self, state: KeyState, lent: Buffer | None, landing: Landing, call: Invocation, *, kept: bool
    ) -> Work:
        """Push on the master: send, and let the round's value land; done when the servers have what was lent. Until
        then it is not ``kept`` where the caller waits for that, and may change what it has lent if it fails."""
        accepted = Work(f"{call.op} of key {state.key!r}: acceptance")
        turns = self._turns_of([state], call)

        def ask(ps: PsClient) -> Work:
            [turn] = turns
            turn.kept = kept

            def accept() -> None:
                turn.kept = True
                if not accepted.done():
                    accepted.finish()

            value, on_accepted = (state.host_buffer(), None) if lent is None else (lent, accept)
            return ps.push_ahead(state.key, value, landing, call.deadline, call.priority, on_accepted, turn)

        def end(work: Work) -> None:
            if not accepted.done():  # nothing was lent, or it was never sent
                accepted.finish(None if kept else work.error())

        work = self._ask_op([state], ask, call, writes=[state.sent], turns=turns)
        self._note_answers([state], [landing], work)
        work.add_done_callback(end)
        return accepted

    def _brings(self, part: Part, call: Invocation) -> bool:
        """Whether a push brings its round's value, for the pull that is likely to follow.

        Nothing is guessed but that there will be a pull: a client reads the same value however late it pulls, since the
        next round needs its next push. (A rule that replies with the old value has another answer for a pull.)
        """
        ahead = part.state.key in self._pulled and self._in_rounds and self._ps is not None and not call.async_op
        return ahead and (self._rule is None or not self._rule.replies_old)

    def _landing(self, state: KeyState, *, is_ahead: bool) -> Landing | None:
        """Where a push brings a value, if it does. From here on it has to be pulled again before another does."""
        self._pulled.discard(state.key)
        return Landing(state.host_buffer()) if is_ahead else None

    def _note_answers(self, states: Sequence[KeyState], landings: Sequence[Landing | None], work: Work) -> None:
        """``work`` brings the values of those keys that have a landing."""
        for state, landing in zip(states, landings, strict=True):
            if landing is not None:
                self._answers[state.key] = Answer(landing, work)

    def _start_pull(self, parts: list[Part], call: Invocation) -> list[Work]:
        wanted = [(part, Target(part, call)) for part in parts]
        coming = []
        for batch in _batches(wanted, call):
            self._pulled.update(part.state.key for part, _ in batch)
            for _, group in itertools.groupby(batch, lambda each: self._work_ahead(each[0].state)):
                coming += self._pull_some(list(group), call)
        return self._spread_ops(coming, call)

    def _work_ahead(self, state: KeyState) -> Work | None:
        """The push that brings the value that a pull asks for; None if none does."""
        answer = self._answers.get(state.key)
        if answer is not None and answer.work.error() is not None:
            answer = self._answers[state.key] = None
        return None if answer is None else answer.work

    def _pull_some(self, wanted: Sequence[tuple[Part, Target]], call: Invocation) -> list[Coming]:
        """Keys whose values all come with one push, or all with none."""
        states, targets = [part.state for part, _ in wanted], [target for _, target in wanted]
        work = self._pull_op(states, [target.buffer for target in targets], call)
        return [Coming(state, target, work) for state, target in zip(states, targets, strict=True)]

    def _pull_op(self, states: Sequence[KeyState], buffers: Sequence[Buffer], call: Invocation) -> Work:
        """``_pull_some``, into ``buffers``."""
        if self._answers.get(states[0].key) is not None:
            return self._answer_op(states, buffers, call)

        def ask(ps: PsClient) -> Work:
            wanted = [(state.key, buffer) for state, buffer in zip(states, buffers, strict=True)]
            return ps.pull_together(wanted, call.deadline, call.priority)

        return self._ask_op(states, ask, call)

    def _answer_op(self, states: Sequence[KeyState], buffers: Sequence[Buffer], call: Invocation) -> Work:
        """On the master: take what the last push of these keys brings."""
        answers = [answer for state in states if (answer := self._answers[state.key]) is not None]
        push = answers[0].work
        here = push.done() and push.error() is None
        copied: list[tuple[KeyState, Buffer, Landing, bool]] = []
        for state, buffer, answer in zip(states, buffers, answers, strict=True):
            last = answer.landing.holds
            if last or not (here or call.done):
                self._answers[state.key] = None  # the server has its memory back; who asks once more asks there
            if here or call.done:
                copied.append((state, buffer, answer.landing, last))
            else:  # nothing can refuse this call any more: what is still to come need not make a stop on its way
                answer.landing.move(buffer)

        def run() -> None:
            for state, buffer, landing, last in copied:
                start_ns = timeline.now() if timeline.on else 0
                landing.copy_to(buffer, last=last)
                if start_ns:
                    timeline.span("copy", start_ns, state.key, nbytes=buffer.nbytes, clock=call.clock)

        if not (call.done or call.async_op):  # whose caller may wait for the push itself, which nothing comes between
            if not here:
                return push
            run()
            return nothing()
        inline = here or all(buffer.nbytes <= INLINE_BYTES for _, buffer, _, _ in copied)
        return self._engine.push(
            run, reads=[*call.done, *[state.sent for state in states]], writes=[state.value for state in states],
            lane="inline" if inline else "cpu", name=label_of(call.op, states),
        )  # fmt: skip

    def _start_pushpull(self, parts: list[Part], call: Invocation) -> list[Work]:
        self._take_places([part.state.key for part in parts], call)
        sums = self._sum_ops(parts, call)
        coming = [each for batch in self._pushed_together(sums, call) for each in self._pushpull_parts(batch, call)]
        return self._spread_ops(coming, call) + [self._push_rows(part, call) for part in parts if part.rows is not None]

    def _take_places(self, keys: Sequence[Key], call: Invocation) -> None:
        self._answers |= dict.fromkeys(keys)  # their values are about to change, and their buffers
        call.turns = {} if self._ps is None else self._ps.next_pushes(keys)

    def _push_again(self, state: KeyState, source: Buffer, call: Invocation) -> list[Work]:
        part = Part(state, [Vector(source, state.dtype, "cpu", shared=True)])
        return self._push_parts([(part, None)], call)

    def _pull_again(self, state: KeyState, target: Buffer, call: Invocation) -> Work:
        self._pulled.add(state.key)
        self._work_ahead(state)
        return self._pull_op([state], [target], call)

    def _pushpull_parts(self, batch: Sequence[tuple[Part, Work | None]], call: Invocation) -> list[Coming]:
        states, targets, sources = [], [], []
        for part, summed in batch:
            source = self._lent(part.vectors, call, until_done=True)
            if source is None and summed is None:
                self._sum_op([part], call)
            states.append(part.state)
            targets.append(Target(part, call))
            sources.append(source)
        own = [state.sent for state, source in zip(states, sources, strict=True) if source is None]
        work = self._exchange_op(states, sources, [target.buffer for target in targets], call, reads=own)
        return [Coming(state, target, work) for state, target in zip(states, targets, strict=True)]

    def _exchange_op(
        self, states: Sequence[KeyState], sources: Sequence[Buffer | None], outs: Sequence[Buffer | Landing | None],
        call: Invocation, *, kept: bool = False, **how: Any,
    ) -> Work:  # fmt: skip
        """Push on the master: send ``sources``, or what is in the keys' own buffers; answers go to ``outs``.

        ``kept``: the program does not make the pushes again.
        """
        turns = self._turns_of(states, call)

        def ask(ps: PsClient) -> Work:
            exchanges = []
            for state, source, out, turn in zip(states, sources, outs, turns, strict=True):
                turn.kept = kept
                exchanges.append(Exchange(state.key, state.host_buffer() if source is None else source, out, turn))
            return ps.exchange_together(exchanges, call.deadline, call.priority)

        return self._ask_op(states, ask, call, turns=turns, **how)

    def _lent(self, vectors: list[Vector], call: Invocation, *, until_done: bool) -> Buffer | None:
        """The memory that can be sent as it is: a single host vector that nobody changes while it is sent."""
        if self.mpi_size > 1 or call.reduced:
            return None
        if len(vectors) == 1 and vectors[0].on_host and (until_done or not vectors[0].shared):
            buffer: Buffer = vectors[0].buffer
            return buffer
        return None

    def _pushed_together(
        self, sums: Sequence[tuple[Part, Work | None]], call: Invocation
    ) -> Sequence[Sequence[tuple[Part, Work | None]]]:
        """Where pushes leave something out, a client refuses what it could not keep: that is an error of its key alone,
        and the others have to leave."""
        return [[each] for each in sums] if self.keeps_errors else _batches(sums, call)

    def _sum_ops(self, parts: list[Part], call: Invocation) -> list[tuple[Part, Work | None]]:
        """Parts that push whole arrays, each with the operation that sums it; None where a part may be lent, and is
        summed later if not."""
        parts = [part for part in parts if part.rows is None]
        if self.mpi_size == 1 and not call.reduced:
            return [(part, None) for part in parts]
        buckets = self._buckets(parts)
        works = [self._sum_op(bucket, call) for bucket in buckets]
        return [(part, work) for bucket, work in zip(buckets, works, strict=True) for part in bucket]

    def _sum_op(self, bucket: list[Part], call: Invocation) -> Work:
        return self._reduce_op(bucket, call, keeps=self._ps is not None)

    def _turns_of(self, states: Sequence[KeyState], call: Invocation) -> Sequence[Turn]:
        """The places of the call's pushes of these keys among all that the program pushes, on the master."""
        return [] if self._ps is None else [call.turns.pop(state.key) for state in states]

    def _ask_op(
        self, states: Sequence[KeyState], ask: Callable[[PsClient], Work], call: Invocation, *,
        reads: Sequence[Variable] = (), writes: Sequence[Variable] = (), turns: Sequence[Turn] = (),
    ) -> Work:  # fmt: skip
        """Push on the master: ask the servers about some keys. Other workers have nothing to do.

        Args:
            reads, writes: for what is sent from the keys' own buffers, or lands there.
            turns: of the keys, for which something is pushed. Those that are not begun after all are given up.
        """
        ps = self._ps
        if ps is None:
            return nothing()

        run = partial(ask, ps)
        if reads or writes:
            run = partial(_ask_with_buffers, run, states)
        written = [state.value for state in states]
        work = self._engine.push(
            run, [*call.done, *reads], [*written, *writes], "inline", call.priority, label_of(call.op, states)
        )
        if turns and not turns[-1].begun:  # else all are

            def give_up(_: Work) -> None:
                for state, turn in zip(states, turns, strict=True):
                    ps.give_up(state.key, turn)

            work.add_done_callback(give_up)
        return work

    def _spread_ops(self, coming: Sequence[Coming], call: Invocation) -> list[Work]:
        """Push: what the master gets goes to all workers of the client and into all arrays of ``out``."""
        if self.mpi_size > 1:
            some = together(coming, lambda each: each.state.nbytes, _TOGETHER_BYTES, sys.maxsize)
            return [self._broadcast_op(found, call) for found in some]
        return [
            *dict.fromkeys(work for _, target, work in coming if target.complete),
            *(
                self._engine.push(
                    target.spread, writes=[state.value], lane="cpu", name=f"{call.op} of key {state.key!r}: copy out"
                )
                for state, target, _ in coming if not target.complete
            ),
        ]  # fmt: skip

    def _broadcast_op(self, coming: Sequence[Coming], call: Invocation) -> Work:
        """Push: values go to all workers of the client; several small ones as one, as waiting for each would cost more
        than to copy them twice."""
        states, buffers = [each.state for each in coming], [each.target.buffer for each in coming]
        label = label_of(call.op, states)

        def spread() -> None:
            if timeline.on:
                timeline.about(states[0].key, call.clock)
            whole = buffers[0] if len(buffers) == 1 else np.concatenate([buffer.view(np.uint8) for buffer in buffers])
            self._cast.broadcast(whole, 0, call.deadline, label)
            if len(buffers) > 1 and self.mpi_rank > 0:
                stops = itertools.accumulate(buffer.nbytes for buffer in buffers)
                for buffer, stop in zip(buffers, stops, strict=True):
                    np.copyto(buffer.view(np.uint8), whole[stop - buffer.nbytes : stop])
            for each in coming:
                each.target.spread()

        return self._tell_op(label, [state.value for state in states], call, then=spread)


def _ask_with_buffers(ask: Callable[[], Work], states: Sequence[KeyState]) -> Work:
    """``ask`` for what is sent from the keys' own buffers; one that a server may be reading still is not used again."""

    def abandon(asked: Work) -> None:
        if asked.error() is not None:
            for state in states:
                state.buffer = None

    asked = ask()
    asked.add_done_callback(abandon)
    return asked


def _batches(items: Sequence[tuple[Part, T]], call: Invocation) -> list[list[tuple[Part, T]]]:
    """What is asked for together: small neighbours, if the call waits for all.

    Where it does not wait, what has failed is an error of its key alone.
    """
    if call.async_op or timeline.on or len(items) < 2:
        return [[item] for item in items]
    return together(items, lambda item: item[0].state.nbytes)


def _is_summed_with(part: Part) -> tuple[str, int]:
    """What parts of one operation that sums them have in common."""
    return part.state.dtype, len(part.vectors)
