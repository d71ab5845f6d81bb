"""What must hold in a simulated job after every step of it, computed apart from the code that is under test.

A push adds ``BASE ** client`` to every element, so that a value tells how often each client's pushes are in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from simulation.cluster import Cluster, SimulatedServer
from simulation.network import Violation

from kvmpi.ps import replay
from kvmpi.ps.part import Part
from kvmpi.ps.slot import Slot

#: Larger than the steps of a job, so that digits do not run over; with 4 clients float32 is still exact.
BASE = 64


class Oracle:
    """Which pushes were begun, and of which a client was told the end; what the values may be because of them.

    Sets of steps are bits of an int: bit s is step s.

    Args:
        last_steps: how often each client pushes each key.
        resumed: rounds of the snapshot that the job goes on from; all pushes of those are in it.
        additive: values are sums of pushes; else only some of it can be checked.
    Attributes:
        gone: clients that rounds go on without, or may.
        num_done: how many pushes clients were told the end of.
    """

    def __init__(
        self, cluster: Cluster, keys: Iterable[Any], last_steps: dict[int, int], *, sync: bool, additive: bool,
        resumed: int = 0,
    ) -> None:  # fmt: skip
        self._cluster, self._keys, self._last_steps = cluster, list(keys), last_steps
        self._sync, self._additive = sync, additive
        self._num_clients, self._replicas = len(last_steps), cluster.config.replicas
        pairs = [(client, key) for client in last_steps for key in self._keys]
        self._resumed = resumed
        self._begun = {pair: _bits(1, min(resumed, last_steps[pair[0]])) for pair in pairs}
        self._done = dict(self._begun)
        # In synchronous rounds: of which a client is a part for certain, by key.
        self._needed = {pair: _bits(1, last_steps[pair[0]]) for pair in pairs}
        self.gone: set[int] = set()
        self.num_done = 0
        self._seen: dict[tuple[int, Any], np.ndarray] = {}
        # By client, key, chunk: which process of it was sent which version.
        self._versions: dict[tuple[int, Any, int], tuple[int, int]] = {}
        self._counted: weakref.WeakKeyDictionary[Slot, tuple[int, list[int]]] = weakref.WeakKeyDictionary()
        self._looked_at: weakref.WeakKeyDictionary[Part, int] = weakref.WeakKeyDictionary()
        self._num_checked = 0
        cluster.on_version = self.check_version

    # ---- what clients do

    def begin(self, client: int, key: Any, step: int) -> None:
        """A client pushes."""
        self._begun[client, key] |= 1 << step

    def note_done(self, client: int, key: Any, step: int) -> Callable[[Any], None]:
        """To be called with the push's Work when it is over."""

        def note(work: Any) -> None:
            if work.error() is None:
                self._done[client, key] |= 1 << step
                self.num_done += 1

        return note

    def told(self) -> dict[tuple[int, Any], int]:
        """Of which pushes anybody has been told the end by now, for ``check_read``."""
        return dict(self._done)

    def leave_out(self, client: int) -> None:
        """Rounds need not have a client any more."""
        self.gone.add(client)
        for key in self._keys:
            self._needed[client, key] = 0

    def enter(self, client: int, step: int) -> None:
        """A client that was left out is back, in the rounds after ``step`` of all keys."""
        furthest = max(0, *(self.last_begun(other) for other in range(self._num_clients)))
        if step > furthest:
            raise Violation(f"client {client} enters after step {step}, nobody has begun more than {furthest}")
        self.gone.discard(client)
        for key in self._keys:
            self._needed[client, key] = _bits(step + 1, self._last_steps[client])

    def last_begun(self, client: int) -> int:
        """The last step of which a client has pushed anything."""
        return max(self._begun[client, key].bit_length() - 1 for key in self._keys)

    def _bounds(self, client: int, key: Any, rounds: int) -> tuple[int, int]:
        """How many pushes of a client are in a value after so many synchronous rounds, at least and at most."""
        mask = _bits(1, rounds)
        least = (self._done[client, key] | self._needed[client, key]) & mask
        return least.bit_count(), (self._begun[client, key] & mask).bit_count()

    # ---- what clients see

    def check_version(self, client: int, incarnation: int, where: tuple[Any, int], version: int) -> None:
        """A client is sent the value of a chunk: not an older one than before. Another process may be in its place."""
        newest, before = self._versions.get((client, *where), (0, 0))
        if incarnation < newest:
            return
        if version < before:
            raise Violation(f"client {client} gets version {version} of chunk {where} after {before}: time goes back")
        self._versions[(client, *where)] = (incarnation, version)

    def check_read(
        self, client: int, key: Any, value: np.ndarray, step: int, told: dict[tuple[int, Any], int], *,
        at_the_end: bool = False,
    ) -> None:  # fmt: skip
        """What a client reads after its ``step``-th push, and after anybody was ``told`` of the end of some pushes.

        Who has nothing more to push reads on ``at_the_end``.
        """
        where = f"client {client} reads {key!r} after step {step}"
        if not self._additive:
            if np.isnan(value).any():
                raise Violation(f"{where}: not filled")
            return
        counts = _digits(value, self._num_clients)
        if self._sync:
            for other in range(self._num_clients):
                rounds = set(counts[other].tolist())
                least, most = self._bounds(other, key, step)
                most = self._begun[other, key].bit_count() if at_the_end else most
                if rounds and (max(rounds) > most or min(rounds) < least):
                    raise Violation(
                        f"{where}: rounds hold {sorted(rounds)} pushes of client {other}, {least} to {most} expected"
                    )
            return
        for other in range(self._num_clients):
            most = self._begun[other, key].bit_count()
            known = told.get((other, key), 0).bit_count()
            if (counts[other] < known).any():
                raise Violation(f"{where}: {counts[other].tolist()} pushes of client {other}, who knew of {known}")
            least = self._done[other, key].bit_count() if other == client else 0
            if ((counts[other] < least) | (counts[other] > most)).any():
                raise Violation(
                    f"{where}: {counts[other].tolist()} pushes of client {other}, {least} to {most} expected"
                )
        before = self._seen.get((client, key))
        if before is not None and (counts < before).any():
            raise Violation(f"{where}: {counts.tolist()} pushes, it has seen {before.tolist()}: time goes back")
        self._seen[client, key] = counts

    # ---- what servers have

    def check_servers(self, name: str) -> None:
        """After something has happened to the process ``name``."""
        if not self._additive:
            return
        told = self.num_done > self._num_checked
        self._num_checked = self.num_done
        for process in list(self._cluster.processes.values()):
            if told or process.name == name:
                self._check_server(process, told=told)

    def _check_server(self, process: SimulatedServer, *, told: bool) -> None:
        chains = self._cluster.scheduler._chains
        for part in process.state.parts.values():
            if chains is None or (self._looked_at.get(part) == part.seq and not told):
                continue
            self._looked_at[part] = part.seq
            # One that was stopped may believe to be the head still; whom it answers is checked elsewhere.
            if part.answers and part.chain.version == chains.chains[part.number].version:
                self._check_head(process.rank, part)

    def _check_head(self, server: int, part: Part) -> None:
        """The head has everything that was acknowledged, nothing twice, and every client that it needs."""
        for shard in part.shards.values():
            for slot in shard.slots.values():
                for client, count in enumerate(self._counts_of(slot)):
                    if self._sync:
                        # Without replicas a push is acknowledged in its round, which may still be open.
                        least, most = self._bounds(client, slot.key, self._resumed + slot.rounds)
                        if self._replicas:
                            least = max(least, self._done[client, slot.key].bit_count())
                    else:
                        least, most = (steps[client, slot.key].bit_count() for steps in (self._done, self._begun))
                    if not least <= count <= most:
                        raise Violation(
                            f"server {server}, part {part.number}, key {slot.key!r}: {count} pushes of client "
                            f"{client} after {slot.rounds} rounds, {most} were begun and {least} must be there: it "
                            f"was told of {self._done[client, slot.key].bit_count()}"
                        )

    def _counts_of(self, slot: Slot) -> list[int]:
        """How many pushes of each client are in a chunk; looked at once for each round."""
        rounds, counts = self._counted.get(slot, (-1, []))
        if rounds != slot.rounds:
            digits = _digits(slot.value, self._num_clients)
            if (digits != digits[:, :1]).any():
                raise Violation(f"key {slot.key!r}: elements of one chunk differ: {digits.tolist()}")
            counts = digits[:, 0].tolist() if slot.count else []
            self._counted[slot] = slot.rounds, counts
        return counts

    def check_chains(self) -> None:
        """When all is quiet, every server of a chain has the same, bit by bit."""
        chains = self._cluster.scheduler._chains
        assert chains is not None
        for number, chain in enumerate(chains.chains):
            if len(chain.members) != min(self._replicas + 1, len(chains.alive)) or chain.joiner >= 0:
                raise Violation(f"part {number} is held by {chain} when all is well again")
            states = [_state(self._cluster.processes[server].state.parts[number]) for server in chain.members]
            for server, state in zip(chain.members[1:], states[1:], strict=True):
                if state != states[0]:
                    raise Violation(f"part {number}: server {server} holds other bits than server {chain.members[0]}")


def _bits(first: int, last: int) -> int:
    """The set of the steps ``first`` .. ``last``."""
    return (1 << last + 1) - (1 << first) if last >= first else 0


def _digits(value: np.ndarray, num_clients: int) -> np.ndarray:
    """How many pushes of each client are in ``value``; shape ``(num_clients, count)``."""
    whole = value.astype("i8")
    if not np.array_equal(whole, value) or (whole < 0).any():
        raise Violation(f"{value.tolist()} is no sum of pushes")
    return np.array([whole // BASE**client % BASE for client in range(num_clients)]).reshape(num_clients, -1)


def _state(part: Part) -> list[Any]:
    found: list[Any] = [part.seq]
    for store in sorted(part.shards):
        for entry, payloads in replay.dump(part.shards[store]):
            found.append((repr(entry), [payload.tobytes() for payload in payloads]))
    return found
