"""The plan of who holds what: whatever happens to servers, no part is lost while one that has it lives."""

from __future__ import annotations

import itertools
import random

import pytest

from kvmpi.ps.chains import PARTS_PER_SERVER, Chains, part_of


def check(chains: Chains) -> None:
    for chain in chains.chains:
        assert len(set(chain.members)) == len(chain.members)
        assert set(chain.members) <= chains.alive
        assert chain.joiner not in chain.members
        assert chain.joiner < 0 or (chain.joiner in chains.alive and chain.members), "there is nobody to learn from"
        assert not chain.draining or len(chain.members) > 1, "there is nobody to take over"


def settle(chains: Chains, limit: int = 1000) -> None:
    """Everything that is under way comes to its end."""
    for _ in range(limit):
        if chains.settled:
            return
        for part, chain in enumerate(chains.chains):
            if chain.joiner >= 0:
                chains.caught_up(part, chain.version, chain.joiner)
            elif chain.draining:
                chains.drained(part, chain.version, chain.members[0])
            check(chains)
    pytest.fail("it never settles")


def as_planned(chains: Chains, lost: set[int]) -> None:
    """Every part that is not lost is held as often as it can be; heads are where they should be."""
    length = min(chains.replicas + 1, len(chains.alive))
    for part, chain in enumerate(chains.chains):
        assert bool(chain.members) == (part not in lost)
        if chain.members:
            assert len(chain.members) == length
            wanted = chains.wanted_heads[part]
            assert chain.members[0] == wanted or wanted not in chains.alive


@pytest.mark.parametrize("num_servers", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_every_part_has_its_home_and_those_after_it(num_servers: int, replicas: int) -> None:
    chains = Chains(num_servers, replicas)
    check(chains)
    as_planned(chains, set())
    assert chains.settled
    for server in range(num_servers):
        assert sum(chain.members[0] == server for chain in chains.chains) == PARTS_PER_SERVER
        assert {part_of(server, digest) for digest in range(100)} == {
            part for part, chain in enumerate(chains.chains) if chain.members[0] == server
        }


@pytest.mark.parametrize("num_servers", [2, 3, 4])
@pytest.mark.parametrize("replicas", [1, 2])
def test_any_so_many_servers_may_die_and_come_back(num_servers: int, replicas: int) -> None:
    if replicas >= num_servers:
        return
    for victims in itertools.permutations(range(num_servers), replicas):
        chains = Chains(num_servers, replicas)
        for victim in victims:
            chains.lose(victim, "was lost")
            check(chains)
            assert all(chain.members for chain in chains.chains)
        for victim in victims:
            chains.join(victim)
            check(chains)
        settle(chains)
        as_planned(chains, set())


def test_who_dies_with_everything_loses_it() -> None:
    chains = Chains(3, 0)
    chains.lose(1, "server 1 was lost")
    lost = {part for part, chain in enumerate(chains.chains) if not chain.members}
    assert lost == {part_of(1, digest) for digest in range(PARTS_PER_SERVER)}
    assert all(chains.chains[part].why == "server 1 was lost" for part in lost)
    chains.join(1)
    settle(chains)
    as_planned(chains, lost)


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_servers_that_are_added_get_their_share(replicas: int) -> None:
    chains = Chains(3, replicas)
    for added in range(3, 6):
        chains.join(added)
        transfers = [{chain.members[-1], chain.joiner} for chain in chains.chains if chain.joiner >= 0]
        assert transfers
        assert all(not a & b for a, b in itertools.combinations(transfers, 2)), "a server begins two at once"
        settle(chains)
        as_planned(chains, set())
        heads = [chain.members[0] for chain in chains.chains]
        counts = [heads.count(server) for server in range(added + 1)]
        assert max(counts) - min(counts) <= 1, counts


def test_old_news_change_nothing() -> None:
    chains = Chains(3, 1)
    chains.lose(0, "was lost")
    chains.join(0)
    part = next(part for part, chain in enumerate(chains.chains) if chain.joiner >= 0)
    before = str(chains.chains)
    version, joiner = chains.chains[part].version, chains.chains[part].joiner
    chains.caught_up(part, version - 1, joiner)
    chains.caught_up(part, version, joiner + 1)
    chains.drained(part, version, chains.chains[part].members[0])
    assert str(chains.chains) == before


def test_a_server_that_is_added_while_another_takes_over_has_to_catch_up_first() -> None:
    chains = Chains(3, 2)
    chains.lose(0, "was lost")
    chains.join(0)
    while not any(chain.draining for chain in chains.chains):
        for part, chain in enumerate(chains.chains):
            chains.caught_up(part, chain.version, chain.joiner)
    part = next(part for part, chain in reversed([*enumerate(chains.chains)]) if chain.draining)
    chain = chains.chains[part]
    before, version = list(chain.members), chain.version
    chains.wanted_heads[part] = 3  # as it is where that one gets its share
    chains.join(3)
    chains.drained(part, version, before[0])
    assert chains.chains[part].members == before
    settle(chains)
    as_planned(chains, set())
    assert chains.chains[part].members[0] == 3


@pytest.mark.parametrize("block", range(4))
def test_in_any_order_of_events_parts_are_lost_only_with_all_who_have_them(block: int) -> None:
    for seed in range(block * 250, (block + 1) * 250):
        choose = random.Random(seed)
        num_servers = 1 + choose.randrange(5)
        replicas = choose.randrange(num_servers)
        chains = Chains(num_servers, replicas)
        lost: set[int] = set()
        known = num_servers
        holders = [set(chain.members) for chain in chains.chains]  # by part, who has all of it
        for _ in range(60):
            event = choose.random()
            if event < 0.2 and chains.alive:
                victim = choose.choice(sorted(chains.alive))
                lost |= {part for part, chain in enumerate(chains.chains) if chain.members == [victim]}
                chains.lose(victim, "was lost")
                holders = [having - {victim} for having in holders]
            elif event < 0.4 and set(range(known)) - chains.alive:
                chains.join(choose.choice(sorted(set(range(known)) - chains.alive)))
            elif event < 0.45 and known < 8:
                chains.join(known)
                known += 1
            else:
                part = choose.randrange(len(chains.chains))
                chain = chains.chains[part]
                if chain.joiner >= 0:
                    holders[part].add(chain.joiner)
                    chains.caught_up(part, chain.version, chain.joiner)
                elif chain.draining:
                    chains.drained(part, chain.version, chain.members[0])
            check(chains)
            assert {part for part, chain in enumerate(chains.chains) if not chain.members} == lost, f"seed {seed}"
            for part, chain in enumerate(chains.chains):
                assert set(chain.members) <= holders[part], f"seed {seed}: part {part} is with who never had it"
                holders[part] &= set(chain.members)  # who has left falls behind
        settle(chains)
        as_planned(chains, lost)
