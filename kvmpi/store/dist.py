"""The ``dist_*`` types: servers hold the values; each client's master talks to them for its workers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvmpi import optim
from kvmpi.arrays import DTYPES, Vector
from kvmpi.collectives import Comm
from kvmpi.compiling import methods_not_compiled
from kvmpi.config import Config, client_bounds
from kvmpi.deadline import Deadline
from kvmpi.engine import Variable, Work
from kvmpi.errors import KVError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.kernels.rows import Rows
from kvmpi.ps import ArrivingRows, Exchange, Landing, PsClient, Turn, discipline, finds_position
from kvmpi.store.answers import Answer, Coming, Target, together
from kvmpi.store.base import KVStore
from kvmpi.store.call import Invocation, KeyState, Part, label_of, nothing, on_host
from kvmpi.store.checkpoint import SavedKey
from kvmpi.store.core import INLINE_BYTES
from kvmpi.store.grammar import Group, Key
from kvmpi.store.known_exchanges import KnownExchanges
from kvmpi.trace import timeline

if TYPE_CHECKING:
    from kvmpi.ps import EmbeddedJob

Buffer = npt.NDArray[Any]

#: From this size on a blocking push waits for the servers rather than copy first; below, the copy is faster than an
#: answer (benchmarks/ps_worker.py: 256 KB take 1.3 ms for push and pull with the copy, 1.6 ms without).
_LEND_FROM_BYTES = 2 << 20
#: Small values go from the master to other workers of its client together, up to so many bytes.
_TOGETHER_BYTES = 512 << 10
#: Stores are numbered in the order of their creation, which is the same in every worker.
_numbers = itertools.count(1)


@methods_not_compiled
class DistStore(KnownExchanges):
    """A store on servers.

    Args:
        mode: "sync", "async", or "ssp:" and the bound of staleness.
        grouped: workers of one MPI communicator are one client; else every worker is a client of its own.
        embedded: servers in this process, for a program that no launcher started.
    """

    def __init__(
        self, type_name: str, config: Config, comm: Comm | None, *, mode: str, grouped: bool,
        embedded: EmbeddedJob | None = None,
    ) -> None:  # fmt: skip
        super().__init__(type_name, config, comm)
        self._mode, self._embedded = mode, embedded
        self._in_rounds = discipline(mode).in_rounds
        first, _ = client_bounds(config.num_workers, config.num_clients)[config.client_rank]
        self._rank = first + self.mpi_rank if grouped else max(0, config.rank)
        self._client = config.client_rank if grouped else self._rank
        self._num_clients = config.num_clients if grouped else config.num_workers
        self._capabilities = {
            **KVStore._capabilities, "async": not self._in_rounds,
            "skip": not (self._in_rounds or discipline(mode).holds_reads), "compression": True, "snapshots": True,
            "replication": config.replicas > 0, "encryption": config.security == "curve",
        }  # fmt: skip
        self._alone = self._num_clients == 1
        # By key: what the last push fetches, and whether there was a pull since.
        self._answers: dict[Key, Answer | None] = {}
        self._pulled: set[Key] = set()
        self._ps: PsClient | None = None
        number = next(_numbers)
        if self.mpi_rank == 0:
            self._ps = PsClient(
                config, store=number, mode=mode, client=self._client, num_clients=self._num_clients,
                recorder=self._recorder,
            )  # fmt: skip
            if config.engine != "naive":  # which waits for each request where it is begun
                self._gathering = self._engine.together = self._ps.gathering()
        call = self._call("create")
        resumed = ["0"]

        def connect(ps: PsClient) -> None:
            ps.connect(call.deadline)
            resumed[0] = str(ps.resumed_step)

        self._command(connect, call, result=resumed).wait()
        self._resumed_step = int(resumed[0])
        # Rounds that processes before this one have pushed, where clients are waited for; and as the program was told.
        self._position = self._told_position = 0

    # ---- who and where

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_workers(self) -> int:
        return self._config.num_workers

    @property
    def client_rank(self) -> int:
        return self._client

    @property
    def num_clients(self) -> int:
        return self._num_clients

    @property
    def num_servers(self) -> int:
        return self._config.num_servers

    @property
    def resumed_step(self) -> int:
        self._told_position = self._position
        return self._resumed_step + self._position

    # ---- operations

    def _empty(self, count: int, dtype: str) -> Buffer:
        return host.empty(count, dtype) if self._ps is None else self._ps.empty(count, dtype)

    def _create(self, found: Sequence[tuple[Group, Vector]], call: Invocation) -> None:
        super()._create(found, call)
        if finds_position(self._mode, self._config.on_client_loss):
            self._position = self._learn_position()

    def _learn_position(self) -> int:
        """How far the client was before its processes were started again, or rounds are that went on without it."""
        call = self._call("init")
        found = ["0"]

        def ask(ps: PsClient) -> Work:
            work = ps.enter(call.deadline)
            work.add_done_callback(lambda _: found.__setitem__(0, str(ps.position)))
            return work

        self._command(ask, call, result=found).wait()
        return int(found[0])

    def _start_init(self, states: list[KeyState], values: list[Vector], call: Invocation) -> list[Work]:
        if self._ps is not None:
            self._ps.add_keys([(state.key, state.shape, state.dtype) for state in states])
        works = []
        gives = self.rank == 0 or not self._in_rounds or self._config.on_client_loss == "shrink"
        for state, vector in zip(states, values, strict=True):

            def ask(ps: PsClient, state: KeyState = state, vector: Vector = vector) -> Work:
                return ps.init(state.key, on_host(vector, call) if gives else None, call.deadline)

            works.append(self._ask_op([state], ask, call))
        if self.mpi_size > 1:
            works = [self._tell_op(label_of("init", states), [state.value for state in states], call)]
        return works

    def _forget(self, states: list[KeyState]) -> None:
        if self._ps is not None:
            self._ps.forget_keys([state.key for state in states])

    def _announce_join(self, call: Invocation) -> None:
        self._answers.clear()  # rounds go on without this client: what its last push has brought is soon old
        self._command(lambda ps: ps.finish(call.deadline), call).wait()

    def _check_pushable(self, op: str, state: KeyState) -> None:
        super()._check_pushable(op, state)
        if self._is_told_too_much:
            raise KVError(
                f"{op} of key {state.key!r} on worker {self.rank}: the program was told that it goes on at step "
                f"{self._resumed_step + self._told_position}, but with keys that were made since it is "
                f"{self._resumed_step + self._position}; read kv.resumed_step when all keys have had their kv.init"
            )
        if op == "allreduce":
            raise UnsupportedError(
                f"allreduce of key {state.key!r}: the servers of a {self._type} store keep what they sum; call "
                "pushpull, or kv.client.allreduce for a sum among the workers of this client"
            )
        if not self._in_rounds and self._rule is None:
            raise UnsupportedError(
                f"{op} of key {state.key!r} on worker {self.rank}: an asynchronous store needs an update rule; "
                "call kv.set_optimizer(...) on all workers first"
            )

    def _start_push(self, parts: list[Part], call: Invocation) -> list[Work]:
        sums = self._sum_ops(parts, call)
        call.turns = {} if self._ps is None else self._ps.next_pushes([part.state.key for part in parts])
        works = [self._push_part(part, summed, call) for part, summed in sums]
        return works + [self._push_rows(part, call) for part in parts if part.rows is not None]

    def _push_rows(self, part: Part, call: Invocation) -> Work:
        """Push, and pull what the part asks for: the rows that the push changes, or the whole value."""
        state = part.state
        self._answers[state.key] = None
        fused = call.op == "pushpull" and not part.whole
        summed = self._sum_rows_op(part, call)
        arriving: list[ArrivingRows] = []

        def ask(ps: PsClient, turns: Sequence[Turn]) -> Work:
            assert part.rows is not None
            [turn] = turns
            arriving.extend([ArrivingRows(ps.rows_of(state.key))] if fused else [])
            changed, turn.kept = (arriving[0] if fused else None), not (fused or call.async_op)
            return ps.push_rows(state.key, part.rows, call.deadline, call.priority, changed, turn)

        work = self._push_op([state], ask, call, reads=[state.sent])
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

    def _check_by_rows(self, op: str, state: KeyState) -> None:
        super()._check_by_rows(op, state)
        if self._ps is not None:
            self._ps.rows_of(state.key)  # raises where it is not cut at rows

    def _push_part(self, part: Part, summed: Work | None, call: Invocation) -> Work:
        state, vectors = part.state, part.vectors
        # Where no server waits for other clients before it acknowledges, waiting for it is cheaper than a copy.
        waits = call.async_op or (vectors[0].nbytes >= _LEND_FROM_BYTES and (not self._in_rounds or self._alone))
        lent = self._lent(vectors, call, until_done=waits)
        local = nothing() if lent is not None else summed or self._sum_op([part], call)
        answer = self._read_ahead(state, call)
        if answer is not None:
            accepted = self._push_ahead(state, lent, answer, call, kept=not waits or lent is None)
            return accepted if waits and lent is not None else local

        ends_with_it = self._ps is not None and (call.async_op or (waits and lent is not None))

        def ask(ps: PsClient, turns: Sequence[Turn]) -> Work:
            [turn] = turns
            turn.kept = not ends_with_it
            value = state.host_buffer() if lent is None else lent
            return ps.push(state.key, value, call.deadline, call.priority, turn)

        work = self._push_op([state], ask, call, reads=[state.sent] if lent is None else [])
        # The caller's arrays are free once the sum is in the key's own buffer.
        return work if ends_with_it else local

    def _push_ahead(
        self, state: KeyState, lent: Buffer | None, answer: Answer, call: Invocation, *, kept: bool
    ) -> Work:
        """Push on the master: send, and let the round's value land; done when the servers have what was lent. Until
        then it is not ``kept`` where the caller waits for that, and may change what it has lent if it fails."""
        accepted = Work(f"{call.op} of key {state.key!r}: acceptance")

        def ask(ps: PsClient, turns: Sequence[Turn]) -> Work:
            [turn] = turns
            turn.kept = kept

            def accept() -> None:
                turn.kept = True
                if not accepted.done():
                    accepted.finish()

            value, on_accepted = (state.host_buffer(), None) if lent is None else (lent, accept)
            return ps.push_ahead(state.key, value, answer.landing, call.deadline, call.priority, on_accepted, turn)

        def end(work: Work) -> None:
            if not accepted.done():  # nothing was lent, or it was never sent
                accepted.finish(None if kept else work.error())

        answer.work = self._push_op([state], ask, call, writes=[state.sent])
        answer.work.add_done_callback(end)
        return accepted

    def _read_ahead(self, state: KeyState, call: Invocation) -> Answer | None:
        """Where a push brings its round's value, for the pull that is likely to follow; None if it does not.

        Nothing is guessed but that there will be a pull: a client reads the same value however late it pulls, since the
        next round needs its next push. (A rule that replies with the old value has another answer for a pull.)
        """
        answer, pulled = None, state.key in self._pulled
        self._pulled.discard(state.key)
        replies_old = self._rule is not None and self._rule.replies_old
        if self._ps is not None and self._in_rounds and pulled and not replies_old and not call.async_op:
            answer = Answer(Landing(state.host_buffer()))
        self._answers[state.key] = answer
        return answer

    def _start_pull(self, parts: list[Part], call: Invocation) -> list[Work]:
        return self._spread_ops([self._pull_part(part, call) for part in parts], call)

    def _pull_part(self, part: Part, call: Invocation) -> Coming:
        state = part.state
        target = Target(state, part.outs, call)
        self._pulled.add(state.key)
        answer = self._answers.get(state.key)
        work = None if answer is None else self._answer_op(state, answer, target, call)
        if work is None:
            work = self._ask_op(
                [state], lambda ps: ps.pull(state.key, target.buffer, call.deadline, call.priority), call
            )
        return Coming(state, target, work)

    def _answer_op(self, state: KeyState, answer: Answer, target: Target, call: Invocation) -> Work | None:
        """Push on the master: take what the last push brings; None if that has failed."""
        if answer.work.error() is not None:
            self._answers[state.key] = None
            return None
        here, copy = answer.work.done() or target.buffer.nbytes <= INLINE_BYTES, True
        if not answer.work.done() and not call.done:
            # Nothing can refuse this call any more: what is still to come need not make a stop on its way.
            answer.landing.move(target.buffer)
            self._answers[state.key], copy = None, False
        if last := copy and answer.landing.holds:
            self._answers[state.key] = None  # the server has its memory back; who asks once more asks there

        def run() -> None:
            if copy:
                start_ns = timeline.now() if timeline.on else 0
                answer.landing.copy_to(target.buffer, last=last)
                if start_ns:
                    timeline.span("copy", start_ns, state.key, nbytes=target.buffer.nbytes, clock=call.clock)

        return self._engine.push(
            run, reads=[*call.done, state.sent], writes=[state.value], lane="inline" if here or not copy else "cpu",
            name=f"{call.op} of key {state.key!r}",
        )  # fmt: skip

    def _start_pushpull(self, parts: list[Part], call: Invocation) -> list[Work]:
        self._begin_pushpull([part.state.key for part in parts], call)
        sums = self._sum_ops(parts, call)
        # Where the call does not wait for all, what has failed is an error of its key alone.
        alone = call.async_op or timeline.on
        batches = [[each] for each in sums] if alone else together(sums, lambda each: each[0].state.nbytes)
        coming = [each for batch in batches for each in self._pushpull_parts(batch, call)]
        return self._spread_ops(coming, call) + [self._push_rows(part, call) for part in parts if part.rows is not None]

    def _begin_pushpull(self, keys: Sequence[Key], call: Invocation) -> None:
        self._answers |= dict.fromkeys(keys)  # their buffers are about to be overwritten
        call.turns = {} if self._ps is None else self._ps.next_pushes(keys)

    @property
    def _is_told_too_much(self) -> bool:
        return self._told_position > self._position

    def _pushpull_parts(self, batch: Sequence[tuple[Part, Work | None]], call: Invocation) -> list[Coming]:
        states, targets, sources = [], [], []
        for part, summed in batch:
            source = self._lent(part.vectors, call, until_done=True)
            if source is None and summed is None:
                self._sum_op([part], call)
            states.append(part.state)
            targets.append(Target(part.state, part.outs, call))
            sources.append(source)
        work = self._pushpull_op(states, sources, [target.buffer for target in targets], call)
        return [Coming(state, target, work) for state, target in zip(states, targets, strict=True)]

    def _pushpull_op(
        self, states: Sequence[KeyState], sources: Sequence[Buffer | None], outs: Sequence[Buffer], call: Invocation
    ) -> Work:
        """Push on the master: send ``sources``, or what is in the keys' own buffers, and fill ``outs``."""

        def ask(ps: PsClient, turns: Sequence[Turn]) -> Work:
            if len(states) == 1:
                [state], [source], [out], [turn] = states, sources, outs, turns
                value = state.host_buffer() if source is None else source
                return ps.pushpull(state.key, value, out, call.deadline, call.priority, turn)
            return ps.pushpull_together(
                [
                    Exchange(state.key, state.host_buffer() if source is None else source, out, turn)
                    for state, source, out, turn in zip(states, sources, outs, turns, strict=True)
                ],
                call.deadline, call.priority,
            )  # fmt: skip

        reads = [state.sent for state, source in zip(states, sources, strict=True) if source is None]
        return self._push_op(states, ask, call, reads=reads)

    def _lent(self, vectors: list[Vector], call: Invocation, *, until_done: bool) -> Buffer | None:
        """The memory that can be sent as it is: a single host vector that nobody changes while it is sent."""
        if self.mpi_size > 1 or call.reduced:
            return None
        if len(vectors) == 1 and vectors[0].on_host and (until_done or not vectors[0].shared):
            buffer: Buffer = vectors[0].buffer
            return buffer
        return None

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

    def _ask_op(
        self, states: Sequence[KeyState], ask: Callable[[PsClient], Work], call: Invocation, *,
        reads: Sequence[Variable] = (), writes: Sequence[Variable] = (),
    ) -> Work:  # fmt: skip
        """Push on the master: ask the servers about some keys. Other workers have nothing to do."""
        ps = self._ps
        if ps is None:
            return nothing()

        def abandon(asked: Work) -> None:
            if asked.error() is not None:
                for state in states:
                    state.buffer = None  # a server may be reading it still

        def run() -> Work:
            asked = ask(ps)
            asked.add_done_callback(abandon)
            return asked

        return self._engine.push(
            run, reads=[*call.done, *reads], writes=[*(state.value for state in states), *writes], lane="inline",
            priority=call.priority, name=label_of(call.op, states),
        )  # fmt: skip

    def _push_op(
        self, states: Sequence[KeyState], ask: Callable[[PsClient, Sequence[Turn]], Work], call: Invocation, **how: Any
    ) -> Work:
        """Push on the master: push some keys to the servers, in their places among all that the program pushes."""
        ps = self._ps
        if ps is None:
            return nothing()
        turns = [call.turns.pop(state.key) for state in states]

        def give_up(_: Work) -> None:
            for state, turn in zip(states, turns, strict=True):
                ps.give_up(state.key, turn)

        work = self._ask_op(states, lambda ps: ask(ps, turns), call, **how)
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

    # ---- values from elsewhere

    def _assign(self, state: KeyState, vector: Vector, call: Invocation) -> None:
        saved = SavedKey(state.key, state.shape, state.dtype, 0)
        if self._is_first:
            saved = self._dump(state, call.deadline)
            saved.arrays["value"] = on_host(vector, call)
            saved.arrays.pop("master", None)
        self._restore([saved], True, call.deadline)

    def _dump(self, state: KeyState, deadline: Deadline) -> SavedKey:
        assert self._ps is not None
        work, chunks = self._ps.get_state(state.key, deadline)
        work.wait()
        return SavedKey.of_chunks(state.key, state.shape, state.dtype, chunks, self._rule, state.library)

    def _restore(self, saved: list[SavedKey], with_values: bool, deadline: Deadline) -> None:
        self._answers |= dict.fromkeys(key.key for key in saved)
        if self._ps is not None:
            self._ps.forget_errors([key.key for key in saved])
        if self._is_first:
            assert self._ps is not None
            for key in saved:
                if not with_values and (master := key.arrays.get("master")) is not None:
                    value = self._dump(self._keys[key.key], deadline).arrays["value"]
                    key.arrays["master"] = optim.fitting_master(master, value, key.dtype)
                self._ps.put_state(key.key, key.updates, key.arrays, deadline).wait()

    # ---- the end

    def _help(self, work: Work) -> None:
        if self.mpi_size == 1:  # which has borrowed nothing
            if self._ps is not None:
                self._ps.help(work)
            return
        self._engine.run_borrowed()
        while self._ps is not None and not work.done():
            self._ps.help(work, lambda: self._engine.borrows)
            if not self._engine.run_borrowed():  # what this thread has read goes to other workers
                return

    def _disconnect(self) -> None:
        if self._ps is not None:
            self._ps.abort() if self.broken else self._ps.close(Deadline(10.0), self._failure)
        if self._embedded is not None:
            self._embedded.close()
            self._embedded = None

    def abort(self, failure: BaseException | None = None) -> None:
        if self._ps is not None:
            # Others that go on without this client, or wait for the next, need not wait until it counts as lost. Where
            # all are to end it is the launcher who ends them: that one has failed, and not they, is what it says.
            if failure is not None and self._config.on_client_loss != "fail":
                self._ps.close(Deadline(10.0), failure)
            self._ps.abort()
        super().abort(failure)
