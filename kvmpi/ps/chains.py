"""Which servers hold which part of the values: the scheduler's plan, as arithmetic without I/O.

Chain replication (van Renesse & Schneider, OSDI 2004): a part's head applies what comes, each server hands it on to the
next, and what the last one has is safe. A server that is new to a chain is first its ``joiner``, until it has all.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmpi.wire.messages import Chain

#: Parts of one server: so many pieces of its load can move to a server that is added.
PARTS_PER_SERVER = 4


def part_of(home: int, digest: int) -> int:
    """The part of a chunk that the placement gave to server ``home``; ``digest`` is any number that names the chunk."""
    return home * PARTS_PER_SERVER + digest % PARTS_PER_SERVER


class Chains:
    """The chains of all parts, changed by what happens to servers. Each change raises its chain's version.

    Args:
        num_servers: servers 0 .. num_servers-1 hold everything at first, the parts of each backed by those after it.
        replicas: how many servers more than one a part should have.
    """

    def __init__(self, num_servers: int, replicas: int) -> None:
        self.num_servers, self.replicas = num_servers, replicas
        self.alive = set(range(num_servers))
        homes = [part // PARTS_PER_SERVER for part in range(num_servers * PARTS_PER_SERVER)]
        length = min(replicas + 1, num_servers)
        self.chains = [Chain(1, [(home + i) % num_servers for i in range(length)]) for home in homes]
        # The server that should answer for a part, whenever it is there.
        self.wanted_heads = homes

    def lose(self, server: int, why: str) -> None:
        """``server`` is dead, with all that it held."""
        self.alive.discard(server)
        for part, chain in enumerate(self.chains):
            if server in chain.members or server == chain.joiner:
                chain.version += 1
                chain.members = [member for member in chain.members if member != server]
                chain.why = chain.why if chain.members else chain.why or why
                chain.joiner = -1 if not chain.members or chain.joiner == server else chain.joiner
                # With the server that was to take over gone, the head goes on.
                chain.draining = chain.draining and self.wanted_heads[part] in chain.members[1:]
        self._repair()

    def join(self, server: int) -> None:
        """``server`` is there and holds nothing: one that was lost and is back, or one more."""
        self.alive.add(server)
        if server >= self.num_servers and server not in self.wanted_heads:
            self._give_parts_to(server)
        self._repair()

    def caught_up(self, part: int, version: int, server: int) -> None:
        """The joiner of a part has all of it. News of another version of the chain are old."""
        chain = self.chains[part]
        if (chain.version, chain.joiner) == (version, server):
            chain.version += 1
            chain.members, chain.joiner = [*chain.members, server], -1
            self._repair()

    def drained(self, part: int, version: int, server: int) -> None:
        """All servers of a chain have what its draining head has accepted: the one that is wanted takes over.

        If that is another by now, which holds nothing yet, the head goes on until it has caught up.
        """
        chain, head = self.chains[part], self.wanted_heads[part]
        if chain.draining and chain.version == version and chain.members[0] == server:
            chain.version, chain.draining = chain.version + 1, False
            if head in chain.members:
                chain.members = [head, *(member for member in chain.members if member != head)]
            self._repair()

    @classmethod
    def restored(
        cls, num_servers: int, replicas: int, chains: list[Chain], alive: Iterable[int], wanted_heads: list[int]
    ) -> Chains:
        """The chains as they were: what ``chains``, ``alive`` and ``wanted_heads`` said."""
        result = cls(num_servers, replicas)
        result.chains, result.alive, result.wanted_heads = chains, set(alive), wanted_heads
        return result

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way to another server."""
        return not any(chain.joiner >= 0 or chain.draining for chain in self.chains)

    def _give_parts_to(self, server: int) -> None:
        """Part by part from whoever is to answer for most, until the new one has its share."""
        owners = self.wanted_heads
        while True:
            most = max(set(owners), key=lambda s: (owners.count(s), -s))
            if owners.count(most) <= owners.count(server) + 1:
                return
            owners[max(part for part, owner in enumerate(owners) if owner == most)] = server

    def _repair(self) -> None:
        """Start what brings chains closer to what they should be; no transfer where a server is in one already."""
        busy = {s for chain in self.chains if chain.joiner >= 0 for s in (chain.members[-1], chain.joiner)}
        for part, chain in enumerate(self.chains):
            if chain.members and chain.joiner < 0 and not chain.draining:
                self._improve(part, chain, busy)

    def _improve(self, part: int, chain: Chain, busy: set[int]) -> None:
        head, length = self.wanted_heads[part], min(self.replicas + 1, len(self.alive))
        if head in chain.members[1:]:
            chain.version, chain.draining = chain.version + 1, True
        elif len(chain.members) < length or (head in self.alive and head not in chain.members):
            joiner = head if head in self.alive and head not in chain.members else self._least_loaded(chain.members)
            if not busy & {chain.members[-1], joiner}:
                chain.version, chain.joiner = chain.version + 1, joiner
                busy |= {chain.members[-1], joiner}
        elif len(chain.members) > length:
            chain.version, chain.members = chain.version + 1, chain.members[:length]

    def _least_loaded(self, but: Iterable[int]) -> int:
        load = dict.fromkeys(self.alive - set(but), 0)
        for chain in self.chains:
            for server in (*chain.members, chain.joiner):
                if server in load:
                    load[server] += 1
        return min(load, key=lambda server: (load[server], server))
