"""The master's link to scheduler and servers: one I/O thread that drives the session's state machine over sockets."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi import optim
from kvmpi.arrays import DTYPES
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import KVError, ProtocolError, ServerLostError
from kvmpi.kernels import host
from kvmpi.ps import codec, placement
from kvmpi.ps.session import SCHEDULER, Ask, ClientSession, Operation
from kvmpi.trace import Recorder
from kvmpi.wire import Connection, Message, Readiness, Waker, as_array, host_name, new_context
from kvmpi.wire import messages as m

Buffer = npt.NDArray[Any]
Key = int | str

_BATCH = 8
_TICK_S = 0.05


@dataclass(slots=True)
class KeyLayout:
    """How a key is spread over servers, and how far this client is with it."""

    shape: tuple[int, ...]
    dtype: str
    chunks: list[placement.Part]
    steps: int = 0
    seen_version: int = 0


@dataclass(slots=True)
class SavedChunk:
    """What a server remembers of elements ``start:stop`` of a key."""

    start: int
    stop: int
    updates: int
    arrays: dict[str, Buffer] = field(default_factory=dict)


class PsClient:
    """Client ``client``'s conversation with all servers about one store. Operations return a ``Work`` at once.

    Buffers that are passed to an operation must stay unchanged until its Work is done. Operations on one key must be
    started one after the other; what is started for different keys runs side by side.
    """

    def __init__(
        self, config: Config, *, store: int, mode: str, client: int, num_clients: int, recorder: Recorder
    ) -> None:
        self._config, self._store, self._mode = config, store, mode
        self._client, self._num_clients, self._recorder = client, num_clients, recorder
        self._session = ClientSession(config.window_bytes, config.retry_s)
        self._layouts: dict[Key, KeyLayout] = {}
        self._placement = placement.create(config.placement, max(1, config.num_servers))
        self._codec = codec.get("none")
        self._ordinals = {"rule": 0, "hyper": 0, "barrier": 0}
        self._inbox: deque[Callable[[], None]] = deque()
        self._waker = Waker()
        self._connections: dict[int, Connection] = {}
        self._readiness: Readiness | None = None
        self._stop = False
        self._heartbeats = False
        self._failed: KVError | None = None
        self._thread = threading.Thread(target=self._run, name=f"kvmpi-io-{store}", daemon=True)
        self.clock = 0

    # ---- life

    def connect(self, deadline: Deadline) -> None:
        """Join the job: register at the scheduler, then open a session at every server.

        Raises:
            KVTimeoutError: the scheduler or a server does not answer.
        """
        self._thread.start()
        incarnation = os.getpid()
        roster: list[m.Roster] = []

        def on_roster(message: Message, payloads: list[memoryview]) -> None:
            assert isinstance(message, m.Roster)
            roster.append(message)

        fields: tuple[Any, ...] = ("client", self._client, self._store, self._num_clients, incarnation, host_name(), [])
        register = Ask(SCHEDULER, m.Register, fields, on_reply=on_roster)
        joining = self._start(f"client {self._client} joins the job at {self._config.scheduler}", [register], deadline)
        self._heartbeats = True
        joining.wait()
        endpoints = [
            self._choose(server_host, names)
            for server_host, names in zip(roster[0].hosts, roster[0].endpoints, strict=True)
        ]
        connected = threading.Event()
        self._do(lambda: self._connect_servers(endpoints, connected))
        connected.wait(deadline.remaining_s())
        hello = (self._store, self._mode, self._client, self._num_clients, incarnation)
        asks = [Ask(server, m.Hello, hello) for server in range(len(endpoints))]
        self._start(f"client {self._client} opens its sessions", asks, deadline).wait()

    def _choose(self, server_host: str, endpoints: Sequence[str]) -> str:
        ipc = [endpoint for endpoint in endpoints if endpoint.startswith("ipc://")]
        tcp = [endpoint for endpoint in endpoints if endpoint.startswith("tcp://")]
        wanted = self._config.transport
        if ipc and wanted != "tcp" and server_host == host_name():
            return ipc[0]
        return (tcp or ipc)[0]

    def _connect_servers(self, endpoints: Sequence[str], connected: threading.Event) -> None:
        for server, endpoint in enumerate(endpoints):
            self._connections[server] = Connection(self._context, endpoint, self._config.max_message_bytes)
        self._readiness = None
        connected.set()

    def close(self, deadline: Deadline) -> None:
        """Leave in good order as far as the peers still answer, and end the I/O thread. Idempotent."""
        if self._thread.is_alive() and not self._stop:
            try:
                asks = [Ask(server, m.Bye, ()) for server in self._connections if server != SCHEDULER]
                self._start(f"client {self._client} leaves", asks, deadline).wait()
                self._start(f"client {self._client} leaves", [Ask(SCHEDULER, m.Leave, ())], deadline).wait()
            except KVError:
                pass  # a peer is gone already; there is nobody left to tell
        self.abort()

    def abort(self) -> None:
        """End the I/O thread without a word to the peers."""
        self._stop = True
        self._waker.wake()
        if self._thread.is_alive():
            self._thread.join(5.0)

    # ---- keys

    def add_keys(self, described: Sequence[tuple[Key, tuple[int, ...], str]]) -> None:
        """Decide where new keys live; must be called with the same keys in the same order on every client."""
        sizes = [
            placement.KeySize(key, int(np.prod(shape, dtype=np.int64)), DTYPES[dtype].itemsize)
            for key, shape, dtype in described
        ]
        for (key, shape, dtype), size, parts in zip(described, sizes, self._placement.place(sizes), strict=True):
            chunks = placement.cut(parts, size.itemsize, self._config.chunk_bytes)
            self._layouts[key] = KeyLayout(shape, dtype, chunks)

    def forget_keys(self, keys: Sequence[Key]) -> None:
        """Undo ``add_keys`` of keys whose ``init`` failed."""
        for key in keys:
            self._layouts.pop(key, None)

    def init(self, key: Key, value: Buffer | None, deadline: Deadline) -> Work:
        """Create the key on the servers; client 0 gives the value, for others the Work ends when it is readable."""
        layout = self._layouts[key]
        asks = []
        for i, chunk in enumerate(layout.chunks):
            fields = (key, i, len(layout.chunks), chunk.stop - chunk.start, list(layout.shape), layout.dtype)
            if value is None:
                asks.append(Ask(chunk.server, m.Init, fields))
            else:
                part = value[chunk.start : chunk.stop]
                asks.append(Ask(chunk.server, m.Init, fields, payloads=_one(part), cost_bytes=part.nbytes))
        return self._start(self._label("init", key), asks, deadline)

    def set_codec(self, name: str) -> None:
        """How pushes travel from now on."""
        self._codec = codec.get(name)

    def push(self, key: Key, value: Buffer, deadline: Deadline, priority: int = 0) -> Work:
        """Contribute ``value`` (shape ``(count,)``, storage dtype) to the key; done when every server has it."""
        return self._exchange(key, value, None, deadline, priority)

    def pushpull(self, key: Key, value: Buffer, out: Buffer, deadline: Deadline, priority: int = 0) -> Work:
        """``push``, and fill ``out`` with the answer; ``out`` may be ``value``."""
        return self._exchange(key, value, out, deadline, priority)

    def _exchange(self, key: Key, value: Buffer, out: Buffer | None, deadline: Deadline, priority: int) -> Work:
        layout = self._layouts[key]
        encode, name, dtype = self._codec.encode, self._codec.name, layout.dtype
        step = layout.steps + 1
        asks = []
        for i, chunk in enumerate(layout.chunks):
            part = value[chunk.start : chunk.stop]
            fields = (key, i, step, name, out is not None)
            asks.append(
                Ask(
                    chunk.server,
                    m.Push,
                    fields,
                    cost_bytes=part.nbytes,
                    payloads=lambda part=part: (encode(part, dtype),),  # type: ignore[misc]
                    on_reply=self._on_value(
                        layout, i, None if out is None else out[chunk.start : chunk.stop], pushed=True
                    ),
                )  # fmt: skip
            )
        op = "push" if out is None else "pushpull"
        work = self._start(self._label(op, key, step), asks, deadline, priority, phase="push", nbytes=value.nbytes)

        def count(done: Work) -> None:
            # A step that a server refused is not used up: the next push takes it again.
            if done.error() is None:
                layout.steps = step

        work.add_done_callback(count)
        return work

    def pull(self, key: Key, out: Buffer, deadline: Deadline, priority: int = 0) -> Work:
        """Fill ``out`` (shape ``(count,)``, storage dtype) with the value, not older than this client's last push."""
        layout = self._layouts[key]
        asks = [
            Ask(
                chunk.server, m.Pull, (key, i, layout.steps), reads=True,
                cost_bytes=(chunk.stop - chunk.start) * out.itemsize,
                on_reply=self._on_value(layout, i, out[chunk.start : chunk.stop], pushed=False),
            )
            for i, chunk in enumerate(layout.chunks)
        ]  # fmt: skip
        label = self._label("pull", key, layout.steps)
        return self._start(label, asks, deadline, priority, phase="pull", nbytes=out.nbytes)

    def _on_value(
        self, layout: KeyLayout, chunk: int, out: Buffer | None, *, pushed: bool
    ) -> Callable[[Message, list[memoryview]], None]:
        def on_reply(message: Message, payloads: list[memoryview]) -> None:
            version = message.version if isinstance(message, m.Value | m.Ack) else 0
            if chunk == 0:
                if pushed and self._mode == "async":
                    self._recorder.staleness(max(0, version - 1 - layout.seen_version))
                if out is not None:
                    layout.seen_version = version
            if out is None:
                return
            if not isinstance(message, m.Value) or len(payloads) != 1:
                raise ProtocolError(f"expected one value, got a {type(message).__name__} with {len(payloads)} payloads")
            value = as_array(payloads[0], out.dtype)
            if value.size != out.size:
                raise ProtocolError(f"a chunk of {value.size} elements came, expected {out.size}")
            np.copyto(out, value)

        return on_reply

    # ---- commands to all servers

    def set_rule(self, rule: optim.Rule, deadline: Deadline) -> Work:
        """Make ``rule`` the update rule; done when every server has it."""
        self._ordinals["rule"] += 1
        fields = (self._ordinals["rule"], rule.name, rule.hyperparams())
        return self._command("set_optimizer", m.SetRule, fields, deadline, counts="rule")

    def set_hyperparams(self, hyperparams: dict[str, Any], deadline: Deadline) -> Work:
        """Change hyperparameters from this client's next push on; done when every server has them."""
        self._ordinals["hyper"] += 1
        fields = (self._ordinals["hyper"], hyperparams, self.clock)
        return self._command("set_hyperparams", m.SetHyperparams, fields, deadline, counts="hyper")

    def _command(
        self, name: str, kind: type[Message], fields: tuple[Any, ...], deadline: Deadline, counts: str
    ) -> Work:
        asks = [Ask(server, kind, fields) for server in sorted(self._connections) if server != SCHEDULER]
        work = self._start(f"{name} on client {self._client}", asks, deadline)

        def take_back(done: Work) -> None:
            if done.error() is not None:  # refused: the number was not used
                self._ordinals[counts] -= 1

        work.add_done_callback(take_back)
        return work

    def imbalance(self) -> float:
        """The most loaded server's bytes over the mean."""
        return self._placement.imbalance()

    def get_state(self, key: Key, deadline: Deadline) -> tuple[Work, list[SavedChunk]]:
        """Everything the servers hold of a key, in a list that is complete when the Work is done."""
        layout = self._layouts[key]
        saved = [SavedChunk(chunk.start, chunk.stop, 0) for chunk in layout.chunks]

        def keep(into: SavedChunk) -> Callable[[Message, list[memoryview]], None]:
            def on_reply(message: Message, payloads: list[memoryview]) -> None:
                if not isinstance(message, m.State) or len(message.names) != len(payloads):
                    raise ProtocolError(f"state of key {key!r}: names and payloads do not match")
                into.updates = message.updates
                for name, payload in zip(message.names, payloads, strict=True):
                    dtype = layout.dtype if name == "value" else host.ACCUMULATE[layout.dtype]
                    into.arrays[name] = as_array(payload, DTYPES[dtype])

            return on_reply

        itemsize = DTYPES[layout.dtype].itemsize
        asks = [
            Ask(chunk.server, m.GetState, (key, i), reads=True, cost_bytes=(chunk.stop - chunk.start) * itemsize,
                on_reply=keep(saved[i]))
            for i, chunk in enumerate(layout.chunks)
        ]  # fmt: skip
        return self._start(self._label("save", key), asks, deadline), saved

    def put_state(self, key: Key, updates: int, arrays: dict[str, Buffer], deadline: Deadline) -> Work:
        """The inverse: ``arrays`` hold the whole key, each of shape ``(count,)``."""
        layout = self._layouts[key]
        asks = []
        for i, chunk in enumerate(layout.chunks):
            parts = [array[chunk.start : chunk.stop] for array in arrays.values()]
            fields = (key, i, updates, list(arrays))
            size = sum(part.nbytes for part in parts)
            asks.append(Ask(chunk.server, m.PutState, fields, payloads=_all(parts), cost_bytes=size))
        return self._start(self._label("load", key), asks, deadline)

    # ---- commands to the scheduler

    def barrier(self, deadline: Deadline) -> Work:
        """Done when every client of the store has reached it."""
        self._ordinals["barrier"] += 1
        ask = Ask(SCHEDULER, m.Barrier, (self._ordinals["barrier"],))
        return self._start(f"barrier {self._ordinals['barrier']} on client {self._client}", [ask], deadline)

    def dead_clients(self, timeout_s: float, deadline: Deadline) -> tuple[Work, list[int]]:
        """Ranks of clients that have been silent for ``timeout_s``, in a list that is complete when the Work is done."""
        dead: list[int] = []

        def keep(message: Message, payloads: list[memoryview]) -> None:
            assert isinstance(message, m.Dead)
            dead.extend(message.clients)

        ask = Ask(SCHEDULER, m.QueryDead, (timeout_s,), on_reply=keep)
        return self._start(f"num_dead on client {self._client}", [ask], deadline), dead

    # ---- the I/O thread

    def _label(self, op: str, key: Key, step: int | None = None) -> str:
        at = "" if step is None else f" at step {step}"
        return f"{op} of key {key!r} on client {self._client} of {self._num_clients}{at}, clock {self.clock}"

    def _start(
        self, label: str, asks: Sequence[Ask], deadline: Deadline, priority: int = 0, phase: str = "", nbytes: int = 0
    ) -> Work:
        work = Work(label)
        started_s = time.perf_counter()

        def on_done(error: KVError | None) -> None:
            if phase:
                self._recorder.add(phase, time.perf_counter() - started_s, nbytes)
            work.finish(error)

        timeout_s = min(deadline.remaining_s(), 10 * 365 * 86400.0)
        operation = Operation(label, timeout_s, time.monotonic(), on_done)
        self._do(lambda: self._submit(operation, asks, priority))
        return work

    def _submit(self, operation: Operation, asks: Sequence[Ask], priority: int) -> None:
        if self._failed is not None:
            operation.error = self._failed
            operation.on_done(self._failed)
        else:
            self._session.submit(operation, asks, priority)

    def _do(self, run: Callable[[], None]) -> None:
        self._inbox.append(run)
        if self._thread.is_alive() and not self._stop:
            self._waker.wake()
        else:
            self._failed = self._failed or ServerLostError("the link to the servers is closed")
            self._drain_inbox()

    def _drain_inbox(self) -> None:
        while self._inbox:
            try:
                run = self._inbox.popleft()
            except IndexError:
                return
            run()

    def _run(self) -> None:
        self._context = new_context()
        try:
            scheduler = Connection(self._context, self._config.scheduler, self._config.max_message_bytes)
            self._connections[SCHEDULER] = scheduler
            self._loop(scheduler)
        except Exception as error:  # a defect of ours must not leave callers waiting
            self._failed = KVError(f"the I/O thread of client {self._client} failed: {type(error).__name__}: {error}")
            self._failed.__cause__ = error
        finally:
            self._stop = True
            self._failed = self._failed or ServerLostError("the link to the servers is closed")
            self._session.fail_all(self._failed)
            self._drain_inbox()
            for connection in self._connections.values():
                connection.close()
            self._context.term()
            self._waker.close()

    def _loop(self, scheduler: Connection) -> None:
        next_tick_s = time.monotonic()
        next_heartbeat_s = next_tick_s + self._config.heartbeat_s
        while not self._stop:
            self._drain_inbox()
            self._pump()
            if self._readiness is None:
                self._readiness = Readiness([self._waker, *self._connections.values()])
            busy = not self._session.idle
            self._readiness.wait(_TICK_S if busy else max(0.0, next_heartbeat_s - time.monotonic()))
            self._waker.clear()
            for connection in list(self._connections.values()):
                self._receive(connection)
            now_s = time.monotonic()
            if now_s >= next_tick_s:
                self._session.tick(now_s)
                next_tick_s = now_s + _TICK_S
            if now_s >= next_heartbeat_s and self._heartbeats:
                scheduler.send(m.Heartbeat(self.clock))
                next_heartbeat_s = now_s + self._config.heartbeat_s

    def _receive(self, connection: Connection) -> None:
        for _ in range(_BATCH):
            try:
                received = connection.recv()
            except ProtocolError:
                continue  # not ours to answer; the request that it belonged to will time out
            if received is None:
                return
            self._session.receive(*received)
            self._pump()

    def _pump(self) -> None:
        for peer, message, payloads in self._session.sendable(time.monotonic()):
            self._connections[peer].send(message, payloads)


def _one(part: Buffer) -> Callable[[], Sequence[Buffer]]:
    return lambda: (part,)


def _all(parts: Sequence[Buffer]) -> Callable[[], Sequence[Buffer]]:
    return lambda: parts
