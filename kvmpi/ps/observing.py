"""What a server has and does, counted for its reports."""

from __future__ import annotations

from itertools import islice

from kvmpi.ps.reply import MAX_NAMED
from kvmpi.ps.server import ServerState
from kvmpi.ps.shard import Shard
from kvmpi.ps.slot import Slot
from kvmpi.trace.activity import resident_bytes


def observe(state: ServerState, sent_bytes: int) -> tuple[dict[str, float], list[int]]:
    """Numbers by name, and the clients that open rounds of synchronous stores wait for."""
    keys = held_bytes = queue = rounds = 0
    missing: set[int] = set()
    for part in state.parts.values():
        for shard in part.shards.values():
            keys += len(shard.layouts)
            for slot in shard.slots.values():
                held_bytes += slot.value.nbytes + sum(array.nbytes for array in slot.state.values())
                held_bytes += 0 if slot.master is None else slot.master.nbytes
                queue += len(slot.held) + len(slot.waiting) + len(slot.readers)
                rounds = max(rounds, slot.rounds)
                if shard.discipline.in_rounds and (slot.cursor or slot.held):
                    missing.update(_missing(shard, slot))
    numbers = {
        "keys": keys, "held_bytes": held_bytes, "queue": queue, "rounds": rounds, "requests": state.requests,
        "received_bytes": state.received_bytes, "sent_bytes": sent_bytes, "refused": state.rejected,
        "resident_bytes": resident_bytes(),
    }  # fmt: skip
    return {name: float(number) for name, number in numbers.items()}, sorted(missing)[:MAX_NAMED]


def _missing(shard: Shard, slot: Slot) -> list[int]:
    """Whom the open round of a chunk, which has begun, still lacks."""
    awaited = (client for client in range(slot.cursor, shard.num_clients) if shard.clients.is_needed(client))
    here = (client for client in awaited if slot.steps.get(client, 0) <= slot.rounds)
    return list(islice((client for client in here if client not in slot.held), MAX_NAMED))
