"""Servers of a chain that have as much of its log have the same, bit by bit, whatever a log or a copy of it says."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

from simulation.cluster import NO_PART, Cluster, SimulatedServer
from simulation.network import Violation

from kvmpi.ps.part import Part
from kvmpi.ps.row_chunks import frames
from kvmpi.ps.shard import Shard
from kvmpi.ps.slot import Slot

#: To compare all that two servers have takes as long as many a step of a job: so large a part of them is looked at.
_SHARE = 0.04


class Copies:
    """Compares what servers have: now and then while a job goes on, since hardly any has a store left at its end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._random = cluster, random.Random(f"{cluster.network.seed} copies")

    def check(self, process: SimulatedServer) -> None:
        """After something has happened to a server."""
        if process.touched in (None, NO_PART) or self._random.random() >= _SHARE:
            return
        part = process.state.parts.get(process.touched)
        if part is not None:
            self._look_at(part)

    def check_all(self) -> None:
        """Compare all that there is."""
        for process in self._cluster.processes.values():
            for part in process.state.parts.values():
                self._look_at(part)

    def _look_at(self, part: Part) -> None:
        if not (part.complete and part.is_shared):
            return
        for other in self._cluster.processes.values():
            copy = other.state.parts.get(part.number)
            if copy is None or copy is part or not copy.complete:
                continue
            if (copy.chain.version, copy.seq) == (part.chain.version, part.seq):
                self._compare(part, copy)

    def _compare(self, part: Part, copy: Part) -> None:
        where = f"part {part.number}: server {copy.server} holds other bits than server {part.server}"
        if part.over != copy.over or part.shards.keys() != copy.shards.keys():
            raise Violation(f"{where}: of other stores")
        for store, shard in part.shards.items():
            one, another = of_shard(shard), of_shard(copy.shards[store])
            for what in {**one, **another}:
                if one.get(what) != another.get(what):
                    raise Violation(f"{where}, {what}: {another.get(what)} instead of {one.get(what)}")


def of_shard(shard: Shard) -> dict[str, Any]:
    """All that lasts, by what it is. Taken from where it is, not from ``replay.dump``, which may have forgotten it."""
    clients = shard.clients
    entered = {client for client, process in clients.entered.items() if process == clients.incarnations[client]}
    found = {
        "clients": (clients.incarnations, [*clients.gone.items()], clients.losses(), clients.finished),
        "clients that are back": (clients.entering, {client: clients.entered_after.get(client) for client in entered}),
        "rule": repr(shard.rulebook.dump()),
    }
    for (key, chunk), slot in shard.slots.items():
        of_slot = _of_slot(slot, clients.entering)
        found |= {f"{what} of key {key!r} ({chunk})": value for what, value in of_slot.items()}
    return found


def _of_slot(slot: Slot, back: Collection[int]) -> dict[str, Any]:
    names, arrays = slot.dump()
    # How often a client that is back has pushed is said when it enters, and in the first push after that.
    counted = slot.steps.keys() - slot.entering.keys() - set(back)
    lasting = ((client, slot.lasting_steps(client)) for client in counted)
    return {
        "arrays": dict(zip(names, map(_bits, arrays), strict=True)),
        "rounds": (slot.rounds, slot.updates, slot.generation, slot.latest, slot.restored),
        "rules": repr([*slot.rules]),
        "last round": (None if slot.failed is None else str(slot.failed), _bits(slot.met), _bits(slot.touched)),
        "steps": {client: count for client, count in lasting if count},
        "marks": {client: (mark.done, mark.steps) for client, mark in slot.marks.items()},
        "entering": slot.entering,
        "bases": slot.bases,
        "gathered": (slot.gathered, slot.pushes, _sum_bits(slot)),
        "old answers": {client: (version, _bits(met)) for client, (version, met) in slot.met_by.items()},
    }


def _sum_bits(slot: Slot) -> Any:
    """What is gathered without rounds: in them it does not last."""
    return [frame.tobytes() for frame in frames(slot.accumulator)] if slot.gathered else None


def _bits(array: Any) -> bytes | None:
    return None if array is None else array.tobytes()
