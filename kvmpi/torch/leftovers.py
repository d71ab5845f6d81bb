"""What compressed pushes have left out of gradients goes with them, when others travel together than before."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from kvmpi.store import KVStore

#: A key, and which of its elements: ``start:stop``.
Place = tuple[int | str, int, int]


class Leftovers:
    """Where gradients were pushed last, by their parameters: there the store keeps what it has left out of them."""

    def __init__(self, kv: KVStore) -> None:
        self._kv = kv
        self._places: dict[Hashable, Place] = {}

    def lay_out(self, places: Mapping[Hashable, Place]) -> None:
        """These gradients are pushed there from now on. Collective over the workers of a client, for all clients alike.

        To be called when no push is under way.
        """
        moves: dict[tuple[int | str, int | str], list[tuple[int, int, int]]] = {}
        for name, (key, start, stop) in places.items():
            source, *where = self._places.get(name, (key, start, stop))
            if (source, *where) != (key, start, stop):
                moves.setdefault((source, key), []).append((where[0], where[1], start))
        self._places.update(places)
        if moves and self._kv.keeps_errors:
            self._kv.move_errors(moves)
