"""What a server has and does, counted for its reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmpi.ps.reply import MAX_NAMED
from kvmpi.trace.activity import resident_bytes

if TYPE_CHECKING:
    from kvmpi.ps.server import ServerState


def observe(state: ServerState, sent_bytes: int) -> tuple[dict[str, float], list[int]]:
    """Numbers by name, and the clients that open rounds of synchronous stores, and reads of others, wait for."""
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
                    missing.update(shard.rounds.missing(slot))
                elif shard.discipline.holds_reads and slot.is_awaited:
                    missing.update(shard.singles.awaited(slot)[1])
    numbers = {
        "keys": keys, "held_bytes": held_bytes, "queue": queue, "rounds": rounds, "requests": state.requests,
        "received_bytes": state.received_bytes, "sent_bytes": sent_bytes, "refused": state.rejected,
        "resident_bytes": resident_bytes(),
    }  # fmt: skip
    return {name: float(number) for name, number in numbers.items()}, sorted(missing)[:MAX_NAMED]
