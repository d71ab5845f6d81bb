"""One part of the values on one server: its stores' shards, and this server's place in the chain that holds the part.

The head applies what clients ask for and writes every change to a log; each server replays the log of the one before
it. What the head answers leaves when the last server of the chain has all that came before: a client never learns of a
change that could still be lost. A log is kept as far as that is not known, and sent again after a silence.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.errors import ProtocolError
from kvmpi.ps import replay
from kvmpi.ps.reply import Forward, Outgoing, Reply
from kvmpi.ps.rounds import is_of_this_server, parted
from kvmpi.ps.shard import Shard
from kvmpi.ps.slot import Empty, new_buffer
from kvmpi.ps.snapshots import PartCopy, ServerSnapshots, restore
from kvmpi.wire import MAX_HEADER_BYTES, Message, as_array, encode, entries
from kvmpi.wire import messages as m
from kvmpi.wire.entries import Key

Buffer = npt.NDArray[Any]

_log = logging.getLogger(__name__)
#: Silence of the successor after which it is sent the same again; each time twice as long, up to the other.
_RETRY_S, _MOST_RETRY_S = 1.0, 30.0
#: What keys, shapes, names and hyperparameters of clients are part of, and seldom enough to be looked at.
_OF_ANY_LENGTH = {entries.Created, entries.RuleCall, entries.HyperCall, entries.Restored}
#: Bytes of a state that are on their way to a joiner, and of the log that are sent again at once.
_INSTALL_WINDOW_BYTES = 8 << 20


class _Record(NamedTuple):
    seq: int
    store: int
    entry: entries.Entry
    payloads: tuple[Buffer, ...]


class Part:
    """Part ``number`` on server ``server``.

    Attributes:
        seq: entries of the log that this server has; all up to ``committed`` are on every server of the chain.
        complete: whether it has all of the part.
        sends_on, moves: whether a server comes after this one; whether the part is on its way to or from this one.
        is_shared: whether other servers have the part too, one of which may be made its head without this one's
            knowing.
        shards: what it holds, by store.
        over: stores that it is too late to come back to.
        snapshots: hears, where clients are served, of chunks that change and stores that end.
        empty: makes memory for values.
    """

    def __init__(self, server: int, number: int, on_client_loss: str = "fail") -> None:
        self.empty: Empty = new_buffer
        self.server, self.number, self._on_client_loss = server, number, on_client_loss
        self._take_place(m.Chain(-1, []))
        self.replicas = 0
        self.seq = self.committed = 0
        self.complete = False
        self.shards: dict[int, Shard] = {}
        self.over: set[int] = set()
        self.snapshots: ServerSnapshots | None = None
        self._log: deque[_Record] = deque()
        self._held: deque[tuple[int, list[Reply]]] = deque()
        self.held_bytes: Counter[bytes] = Counter()  # by route
        # Pushes that not every server of the chain has: by store, client and chunk, their entry.
        self._under_way: dict[tuple[int, int, Key, int], int] = {}
        self._before: bytes | None = None  # route of the server before this one
        # The way to the successor: None until it has said what it has.
        self._sent: int | None = None
        self._installs: list[_Record] = []
        self._install_sent = self._install_done = 0
        self._last_news_s, self._pause_s = 0.0, _RETRY_S
        # How many entries of a state have come, and of which: for what version of the chain, after what entry.
        self._installed, self._installed_of = 0, (-1, -1)

    # ---- place in the chain

    def _take_place(self, chain: m.Chain) -> None:
        """Look once where this server is in the chain: it is asked for with every message."""
        self.chain = chain
        is_first = chain.members[:1] == [self.server]
        self._is_head, self._drains = is_first and not chain.draining, is_first and chain.draining
        self._has_drained = False  # as the scheduler has been told, so that another may be the head at any time
        self._line = [*chain.members, *([chain.joiner] if chain.joiner >= 0 else [])]
        after = self._line.index(self.server) + 1 if self.server in self._line else len(self._line)
        self._successor = self._line[after] if after < len(self._line) else None
        self.sends_on, self.moves = self._successor is not None, chain.draining or chain.joiner == self.server
        self.is_shared = len(self._line) > 1

    @property
    def answers(self) -> bool:
        """Whether clients are served here."""
        return self.complete and self._is_head

    @property
    def hands_over(self) -> bool:
        """Whether clients are served no more here, and what is logged still comes to the server that will do so."""
        return self.complete and self._drains and not self._has_drained

    def _is_backed(self) -> bool:
        """Whether a member of the chain after this one has all up to some entry of the log: not if it is being given
        everything still, nor if it has not said so since the chain has changed."""
        is_first = self.chain.members[:1] == [self.server] and len(self.chain.members) > 1
        return is_first and self._sent is not None and not self._installs

    def adopt(self, chain: m.Chain, replicas: int, now_s: float) -> list[Outgoing]:
        """The scheduler says how the chain is now."""
        if chain.version <= self.chain.version:
            return []
        joins = chain.joiner == self.server and self.chain.joiner != self.server
        begins = self.chain.version < 0 and self.server in chain.members
        was_head = self.chain.members[:1] == [self.server]
        self._take_place(chain)
        self.replicas = replicas
        self._before, self._sent, self._installs = None, None, []
        if joins or self.server not in self._line:
            self._forget()
        if begins:  # later it has been given all before it is a member, or is given all again
            self.complete = True
        if self._is_head and not self.complete:
            _log.error("server %d is to answer for part %d, and has lost its copy of it", self.server, self.number)
        if was_head and not self.answers:
            self._step_down()
        for shard in self.shards.values():
            shard.rounds.acknowledges = replicas > 0
        if self._successor is None:
            return self._commit(self.seq)
        return self._greet(now_s)

    def _forget(self) -> None:
        self.complete, self._sent, self._installs = False, None, []
        self.seq = self.committed = 0
        self.shards.clear()
        self.over.clear()
        self._log.clear()
        self._held.clear()
        self.held_bytes.clear()
        self._under_way.clear()

    def _step_down(self) -> None:
        """Another server is to answer: what is in open rounds goes there, who waits will ask there."""
        for shard in self.shards.values():
            if self.chain.draining:
                shard.hand_over()
            shard.forget_waiting()

    def report(self) -> list[Message]:
        """What the scheduler waits for from this server, said until it has changed the chain."""
        if self.complete and self.chain.joiner == self.server:
            return [m.CaughtUp(self.number, self.chain.version)]
        if self._drains and self.committed == self.seq:
            self._has_drained = True
            return [m.Drained(self.number, self.chain.version)]
        return []

    # ---- at the head

    def resume(self, copy: PartCopy, keys: Mapping[int, frozenset[Key]]) -> None:
        """Begin with what was in a snapshot; every server of the first chain does."""
        for store, saved in copy.items():
            self._open(store, saved.mode, saved.num_clients)
            restore(self.shards[store], saved, keys[store])

    def shard(self, store: int, mode: str, num_clients: int) -> Shard:
        """The shard of a store, made if it is new; one from a snapshot may be of another number of clients."""
        known = self.shards.get(store)
        if known is None or (known.untouched and (known.mode, known.num_clients) != (mode, num_clients)):
            self._open(store, mode, num_clients)
            self._record(store, entries.Opened(mode, num_clients))
        return self.shards[store]

    def _open(self, store: int, mode: str, num_clients: int) -> None:
        shard = Shard(self.server, store, mode, num_clients, partial(self._record, store), self._on_client_loss)
        shard.rounds.acknowledges = self.replicas > 0
        shard.rounds.is_backed = self._is_backed
        shard.rounds.is_followed = lambda: self.sends_on
        shard.empty = self.empty
        if store in self.shards:
            shard.inherit(self.shards[store])
        if (snapshots := self.snapshots) is not None:
            # By its number: if it referred to itself, its values would stay for long when it is dropped.
            shard.rounds.before_update = lambda slot: snapshots.before_update(self.number, self.shards[store], slot)
            shard.rounds.on_update = lambda slot: snapshots.on_update(self.number, self.shards[store], slot)
            shard.before_put = lambda slot: snapshots.before_put(self.shards[store], slot)
        self.shards[store] = shard

    def drop_deserted(self, now_s: float) -> Sequence[Outgoing]:
        """Forget stores that all clients have left, and tell the other servers of the chain."""
        deserted = [store for store, shard in self.shards.items() if shard.clients.deserted]
        if deserted and self.snapshots is not None:
            self.snapshots.look()
        for store in deserted:
            if self.snapshots is not None:
                self.snapshots.end(self.number, store)
            over = self.shards[store].clients.is_over
            self._record(store, entries.Closed(over))
            self._close(store, over)
        return self.hold([], now_s) if deserted else []

    def _close(self, store: int, over: bool) -> None:
        self.shards.pop(store, None)
        if over:
            self.over.add(store)

    def _record(self, store: int, entry: entries.Entry | None, payloads: tuple[Buffer, ...] = ()) -> bool:
        """Log a change; whether the payloads are still to be sent, so that their memory must not change.

        Args:
            entry: None: one that no other server is to be told of. It counts, for those that may be told later.

        Raises:
            ProtocolError: a client has made it so long that other servers could not be told; nothing is logged.
        """
        if entry is not None and type(entry) in _OF_ANY_LENGTH and self.answers:
            self._check_length(entry)
        self.seq += 1
        if self._successor is None:
            self.committed = self.seq
            return False
        assert entry is not None
        self._log.append(_Record(self.seq, store, entry, payloads))
        return True

    def _check_length(self, entry: entries.Entry) -> None:
        hint = ""
        if isinstance(entry, entries.RuleCall | entries.HyperCall):
            hint = "; change fewer hyperparameters, or those of fewer keys, in one call"
            if not self.is_shared:
                entry = msgspec.structs.replace(entry, ahead=[])  # which no other server will need
        # Half of a header: a state that is sent as a whole says more about a chunk than what has made it.
        length, limit = len(encode(m.Log(self.number, self.chain.version, self.seq, 0, entry))), MAX_HEADER_BYTES // 2
        if length > limit:
            raise ProtocolError(
                f"a {type(entry).__name__} of {length} bytes is too long for other servers, limit {limit}{hint}"
            )

    def hold(self, replies: Sequence[Reply], now_s: float) -> Sequence[Outgoing]:
        """``replies``, or what may be sent of them now; and what they have brought into the log."""
        if self._successor is None:
            return replies
        out = self._stream(now_s)
        if self.committed == self.seq:
            return [*out, *replies]
        self._held.append((self.seq, list(replies)))
        for reply in replies:
            self.held_bytes[reply.route] += _kept_bytes(reply)
        return out

    def request(
        self, store: int, client: int, route: bytes, message: Message, payloads: list[memoryview]
    ) -> list[Reply]:
        """What a client's request brings about.

        Raises:
            KVError: it is invalid.
            ServerLostError: a change is in the log that this server cannot make, and others can.
        """
        before = self.seq
        try:
            shard = self.shards[store]
            if not isinstance(message, m.Push):
                return shard.handle(client, route, message, payloads)
            if self._successor is None:
                return shard.push(client, route, message, payloads)
            return self._push(store, client, route, message, payloads)
        except Exception as error:
            if self.seq > before and self._is_backed() and is_of_this_server(error):
                raise parted(self.server, error) from error
            raise

    def _push(self, store: int, client: int, route: bytes, message: m.Push, payloads: list[memoryview]) -> list[Reply]:
        """A push that other servers are to be told of."""
        where = (store, client, message.key, message.chunk)
        if self._under_way.get(where, 0) > self.committed:
            slot = self.shards[store].slots.get((message.key, message.chunk))
            if slot is not None and client not in slot.entering and message.step > slot.steps.get(client, 0):
                # The log must not grow with what a client sends without waiting.
                raise ProtocolError(
                    f"push of key {message.key!r} by client {client}: step {message.step} comes before the answer to "
                    f"step {message.step - 1}"
                )
        before = self.seq
        try:
            return self.shards[store].push(client, route, message, payloads)
        finally:
            if self.seq > before:
                self._under_way[where] = self.seq

    def _commit(self, seq: int) -> list[Outgoing]:
        """All servers from here on have the log up to ``seq``."""
        self.committed = max(self.committed, seq)
        while self._log and self._log[0].seq <= self.committed:
            self._log.popleft()
        out: list[Outgoing] = []
        while self._held and self._held[0][0] <= self.committed:
            out += (released := self._held.popleft()[1])
            for reply in released:
                self.held_bytes[reply.route] -= _kept_bytes(reply)
                if self.held_bytes[reply.route] <= 0:
                    del self.held_bytes[reply.route]
        if self.committed == self.seq:
            self._under_way.clear()
        if self._before is not None:
            out.append(Reply(self._before, m.Committed(self.number, self.chain.version, self.committed)))
        return out

    # ---- to the successor

    def _note_news(self, now_s: float) -> None:
        """The successor has more. The pause is not at once the first again: maybe the link is as slow as that."""
        took_s, self._last_news_s = now_s - self._last_news_s, now_s
        self._pause_s = max(_RETRY_S, self._pause_s / 2, min(self._pause_s, 2 * took_s))

    def _greet(self, now_s: float) -> list[Outgoing]:
        self._last_news_s, self._pause_s = now_s, _RETRY_S
        return [self._forward(m.Extend(self.number, self.chain.version))]

    def _forward(self, message: Message, payloads: tuple[Buffer, ...] = ()) -> Forward:
        assert self._successor is not None
        return Forward(self._successor, message, payloads)

    def hear(self, message: Message, now_s: float) -> list[Outgoing]:
        """What the successor says; it may be late, and about a chain that has changed since."""
        if getattr(message, "version", None) != self.chain.version or self._successor is None:
            return []
        match message:
            case m.Attach() if (self._sent is None or message.seq < 0) and not self._installs:
                self._note_news(now_s)
                kept = self._log[0].seq - 1 if self._log else self.seq
                if message.seq < kept or message.seq > self.seq:
                    return self._begin_install()
                self._sent = message.seq
                return self._stream(now_s)
            case m.Installed() if self._installs and message.count > self._install_done:
                self._note_news(now_s)
                self._install_done = message.count
                if message.count < len(self._installs):
                    return self._install()
                self._sent, self._installs = self._installs[0].seq, []
                return self._stream(now_s)
            case m.Committed() if message.seq > self.committed and self._sent is not None:
                self._note_news(now_s)
                return self._commit(min(message.seq, self.seq))
        return []

    def _stream(self, now_s: float) -> list[Outgoing]:
        """Send on what the successor has not been sent."""
        if self._sent is None or self._sent >= self.seq:
            return []
        if self._sent <= self.committed:
            self._last_news_s = now_s  # an answer is due from now on
        first = self._sent - self._log[0].seq + 1 if self._log else 0
        self._sent = self.seq
        return [self._forward_log(record) for record in itertools.islice(self._log, first, None)]

    def _forward_log(self, record: _Record) -> Forward:
        message = m.Log(self.number, self.chain.version, record.seq, record.store, record.entry)
        return self._forward(message, record.payloads)

    def _stream_again(self) -> list[Outgoing]:
        """Send what may be lost once more, as much as a window takes: a slow link may still be carrying all of it."""
        out: list[Outgoing] = []
        on_way = 0
        for record in self._log:
            on_way += _nbytes(record)
            if record.seq > (self._sent or 0) or (out and on_way > _INSTALL_WINDOW_BYTES):
                break
            out.append(self._forward_log(record))
        return out

    def _begin_install(self) -> list[Outgoing]:
        """The successor needs everything: the state as it is now, and then the log from here on."""
        records = [_Record(self.seq, 0, entries.Begin(), ())]
        for store in sorted(self.over):
            records.append(_Record(self.seq, store, entries.Closed(over=True), ()))
        for store, shard in self.shards.items():
            records += [_Record(self.seq, store, *record) for record in replay.dump(shard)]
        self._installs = records
        self._install_sent = self._install_done = 0
        return self._install()

    def _install(self) -> list[Outgoing]:
        out: list[Outgoing] = []
        on_way = sum(_nbytes(record) for record in self._installs[self._install_done : self._install_sent])
        while self._install_sent < len(self._installs):
            record = self._installs[self._install_sent]
            if on_way and on_way + _nbytes(record) > _INSTALL_WINDOW_BYTES:
                break
            on_way += _nbytes(record)
            message = m.Install(
                self.number, self.chain.version, self._install_sent, len(self._installs), record.seq, record.store,
                record.entry,
            )  # fmt: skip
            out.append(self._forward(message, record.payloads))
            self._install_sent += 1
        return out

    def tick(self, now_s: float) -> list[Outgoing]:
        """Say again what the successor may not have heard."""
        if self._successor is None or now_s - self._last_news_s < self._pause_s:
            return []
        if self._installs:
            self._note_silence(now_s)
            self._install_sent = self._install_done
            return self._install()
        if self._sent is None:
            return self._greet(now_s) if self.complete else []
        if self.committed < self.seq:
            self._note_silence(now_s)
            if not self._log or self._log[0].seq > self.committed + 1:
                self._sent = None  # it was given all itself since: the successor has to say what it has
                return self._greet(now_s)
            return [*self._stream_again(), *self._stream(now_s)]
        return []

    def _note_silence(self, now_s: float) -> None:
        self._last_news_s, self._pause_s = now_s, min(2 * self._pause_s, _MOST_RETRY_S)

    # ---- from the server before

    def follow(
        self, route: bytes, message: m.Extend | m.Log | m.Install, payloads: list[memoryview], now_s: float
    ) -> list[Outgoing]:
        """What the server before this one sends. Of an older or a newer chain it is ignored, and said again."""
        if message.version != self.chain.version or self.server not in self._line[1:]:
            return []
        if isinstance(message, m.Extend):
            self._before = route
            attach = m.Attach(self.number, message.version, self.seq if self.complete else -1)
            committed = m.Committed(self.number, message.version, self.committed)
            return [Reply(route, attach), Reply(route, committed)]
        if route != self._before:
            return []
        if isinstance(message, m.Install):
            return self._take_install(route, message, payloads)
        if not self.complete or message.seq > self.seq + 1:
            return []  # something is missing: it comes again
        if message.seq == self.seq + 1:
            try:
                self._replay(message.store, message.entry, payloads)
            except Exception:  # a defect: this server has not what the one before it has, and may not say so
                _log.exception("server %d: an entry of part %d cannot be replayed", self.server, self.number)
                self._forget()
                return [Reply(route, m.Attach(self.number, message.version, -1))]
        out = self._stream(now_s)
        if self._successor is None:
            self.committed = self.seq
        return [*out, Reply(route, m.Committed(self.number, message.version, self.committed))]

    def _take_install(self, route: bytes, message: m.Install, payloads: list[memoryview]) -> list[Outgoing]:
        if self.complete and message.seq <= self.seq:
            return [Reply(route, m.Installed(self.number, message.version, message.total))]
        state = (message.version, message.seq)
        if state < self._installed_of:
            return []  # it comes late, and another is on its way
        if state > self._installed_of:
            self._forget()
            self._installed, self._installed_of = 0, state
        if message.index == self._installed:
            if message.index > 0:
                self._apply(message.store, message.entry, payloads)
            self._installed += 1
            if self._installed == message.total:
                self.seq, self.complete = message.seq, True
                if self._successor is None:
                    self.committed = self.seq
        # What was applied before the state was made may be waited for.
        committed = [Reply(route, m.Committed(self.number, message.version, self.committed))] if self.complete else []
        return [Reply(route, m.Installed(self.number, message.version, self._installed)), *committed]

    def _replay(self, store: int, entry: entries.Entry, payloads: list[memoryview]) -> None:
        self._record(store, entry, tuple(as_array(payload, np.dtype("u1")) for payload in payloads))
        self._apply(store, entry, payloads)

    def _apply(self, store: int, entry: entries.Entry, payloads: list[memoryview]) -> None:
        if isinstance(entry, entries.Opened):
            self._open(store, entry.mode, entry.num_clients)
        elif isinstance(entry, entries.Closed):
            self._close(store, entry.over)
        else:
            replay.apply(self.shards[store], entry, payloads, keep=self._successor is not None)


def _kept_bytes(reply: Reply) -> int:
    return 512 + sum(payload.nbytes for payload in reply.payloads)


def _nbytes(record: _Record) -> int:
    return sum(payload.nbytes for payload in record.payloads)
