"""The ``dist_*`` types: servers hold the values; each client's master talks to them for its workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvmpi import optim
from kvmpi.arrays import Vector
from kvmpi.collectives import Comm
from kvmpi.compiling import methods_not_compiled
from kvmpi.config import Config, client_bounds
from kvmpi.deadline import Deadline
from kvmpi.engine import Work
from kvmpi.errors import KVError, UnsupportedError
from kvmpi.kernels import host
from kvmpi.ps import PsClient, discipline, finds_position
from kvmpi.store.base import KVStore
from kvmpi.store.call import Invocation, KeyState, label_of, on_host
from kvmpi.store.checkpoint import SavedKey
from kvmpi.store.exchanging import Exchanging
from kvmpi.store.grammar import Group

if TYPE_CHECKING:
    from kvmpi.ps import EmbeddedJob

Buffer = npt.NDArray[Any]

#: Stores are numbered in the order of their creation, which is the same in every worker.
_numbers = itertools.count(1)


@methods_not_compiled
class DistStore(Exchanging):
    """A store on servers.

    Args:
        mode: "sync", "async", "ssp:" and the bound of staleness, or "softsync:" and into how many parts of the
            clients' pushes updates are split.
        grouped: workers of one MPI communicator are one client; else every worker is a client of its own.
        embedded: servers in this process, for a program that no launcher started.
    """

    def __init__(
        self, type_name: str, config: Config, comm: Comm | None, *, mode: str, grouped: bool,
        embedded: EmbeddedJob | None = None,
    ) -> None:  # fmt: skip
        super().__init__(type_name, config, comm)
        self._mode, self._embedded = mode, embedded
        self._discipline = discipline(mode)
        self._in_rounds = self._discipline.in_rounds
        first, _ = client_bounds(config.num_workers, config.num_clients)[config.client_rank]
        self._rank = first + self.mpi_rank if grouped else max(0, config.rank)
        self._client = config.client_rank if grouped else self._rank
        self._num_clients = config.num_clients if grouped else config.num_workers
        self._capabilities = {
            **KVStore._capabilities, "async": not self._in_rounds,
            "skip": not (self._in_rounds or self._discipline.holds_reads), "elastic": not self._discipline.gathers,
            "compression": True, "snapshots": True,
            "replication": config.replicas > 0, "encryption": config.security == "curve",
        }  # fmt: skip
        self._alone = self._num_clients == 1
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
    def pushes_per_update(self) -> int:
        return self._discipline.size(self._num_clients)

    @property
    def num_servers(self) -> int:
        return self._config.num_servers

    @property
    def resumed_step(self) -> int:
        self._told_position = self._position
        return self._resumed_step + self._position

    # ---- keys

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

    @property
    def _is_told_too_much(self) -> bool:
        return self._told_position > self._position

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
