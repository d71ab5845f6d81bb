"""How ranks of different hosts get TCP connections: who needs one to whom, for rings and to agree, and how they meet.

Each rank listens for a moment, and tells the others over their communicator where, with a token that nobody else can
know. Who connects shows the token of the rank it wants, and is shown its own: so neither takes a stranger for a peer,
and bridges of containers, which have one address on all hosts, lead nobody astray. Either all connections come about
or none is used.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvmpi.collectives.comm import Comm
from kvmpi.collectives.forming import exchange
from kvmpi.collectives.lines import Lines
from kvmpi.collectives.links import Links
from kvmpi.collectives.probing import options
from kvmpi.collectives.topology import Layout
from kvmpi.deadline import Deadline
from kvmpi.errors import PeerLostError, ranks_in_words
from kvmpi.machine import addresses, family_of, has_fabric, link_mbit

_TAG_OFFER, _TAG_LINKED = 14, 15
#: An offer in words: whether it is one, a token, a port and addresses: two words as of IPv6, and the link's speed.
_MAX_ADDRESSES, _ADDRESS_WORDS = 8, 3
_TOKEN_BYTES = 16
_DOING = "connecting hosts over TCP"
#: What a connection begins with: the token of the rank that is called, the caller's rank, the number of the connection.
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sII")
#: Whoever tells Open MPI which networks to use means these connections, too.
_MPI_NETWORKS = "OMPI_MCA_btl_tcp_if_include"
#: Seconds at most that an address may take to answer, and all of this.
_ANSWER_S, _ALL_S = 2.0, 5.0
#: And connections of every rank to every other.
_EACH_S = 30.0
#: Hosts whose first ranks agree over connections: rank 0 has two to each, and a process may have some hundreds.
_MOST_CALLERS = 128

Pair = tuple[int, int]


class Linked(NamedTuple):
    """The connections of a rank: ``rings`` between neighbours; ``calls`` between rank 0 and the first ranks of other
    hosts, on these, if that was asked for and there are not too many of them."""

    rings: Links
    calls: Lines | None


def pairs(layout: Layout) -> list[Pair]:
    """(from, to) of ranks on different hosts that are neighbours in a ring of ``Rings`` or ``Hierarchical``."""
    hosts = layout.hosts
    size = sum(map(len, hosts))
    flat = [(rank, (rank + 1) % size) for rank in range(size)]
    found = [pair for pair in flat if layout.host_of(pair[0]) != layout.host_of(pair[1])]
    if len(hosts) > 1:
        for ring in range(min(map(len, hosts))):
            ranks = [ranks[ring] for ranks in hosts]
            found += zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return sorted(set(found))


def call_pairs(layout: Layout) -> list[Pair]:
    """(from, to) of ranks between which ``Shortcut`` sends messages."""
    firsts = [ranks[0] for ranks in layout.hosts[1:]]
    if len(firsts) > _MOST_CALLERS:
        return []
    return sorted([(0, first) for first in firsts] + [(first, 0) for first in firsts])


def own_addresses(network: str = "") -> list[tuple[str, int]]:
    """Addresses by which others may reach this host, and the speeds of their links in Mbit/s, 0 if unknown.

    Args:
        network: interfaces or networks, separated by commas; empty for those that Open MPI is told to use, or all.
    """
    network = network or os.environ.get(_MPI_NETWORKS, "")
    found = [(name, address) for name, address in addresses() if not network or _within(name, address, network)]
    outside = [(name, address) for name, address in found if not ipaddress.ip_address(address).is_loopback]
    return [(address, link_mbit(name)) for name, address in (outside or found)][:_MAX_ADDRESSES]


def _within(name: str, address: str, network: str) -> bool:
    wanted = [word.strip() for word in network.split(",")]
    return any(
        ipaddress.ip_address(address) in ipaddress.ip_network(word, strict=False) if "/" in word else word == name
        for word in wanted
    )


def in_order(candidates: Sequence[tuple[str, int]], own: Sequence[str]) -> list[str]:
    """Addresses of another host, the best first: the fastest, and of equals those most alike one of ``own``.

    Those of IPv6 come after all of IPv4.
    """

    def unlike(address: str) -> int:
        bits, family = int(ipaddress.ip_address(address)), family_of(address)
        others = [int(ipaddress.ip_address(mine)) for mine in own if family_of(mine) == family]
        return min(((bits ^ other).bit_length() for other in others), default=128)

    return [
        address for address, _ in sorted(candidates, key=lambda found: (":" in found[0], -found[1], unlike(found[0])))
    ]


def in_words(found: Sequence[tuple[str, int]]) -> list[int]:
    """Addresses and speeds as words of an offer."""
    words = []
    for address, speed in found:
        number = int(ipaddress.ip_address(address if ":" in address else f"::ffff:{address}"))
        words += [number >> 64, number & (1 << 64) - 1, speed]
    return words


def of_words(words: Sequence[int]) -> list[tuple[str, int]]:
    """What ``in_words`` was given; zeros are none."""
    found = []
    for high, low, speed in zip(*[iter(words)] * _ADDRESS_WORDS, strict=True):
        if high or low:
            address = ipaddress.IPv6Address(high << 64 | low)
            found.append((str(address.ipv4_mapped or address), speed))
    return found


def _listen(own: Sequence[str]) -> socket.socket:
    """A listener that all these addresses lead to; where there is one, nobody gets to hear of others."""
    alone = own[0] if len(own) == 1 else ""
    if all(":" not in address for address in own):
        return socket.create_server((alone, 0), backlog=128)
    both = not all(":" in address for address in own)
    return socket.create_server((alone, 0), family=socket.AF_INET6, backlog=128, dualstack_ipv6=both)


def link(
    comm: Comm, layout: Layout, num_connections: int, deadline: Deadline, label: str, *, calls: Comm | None = None,
    network: str = "", despite_fabric: bool = False,
) -> Linked | str:  # fmt: skip
    """Collective: ``comm`` with connections between hosts, or why there are none, which is then so on every rank.

    Args:
        num_connections: for each pair of neighbours: one for each ring that runs at the same time.
        calls: what agreements travel over, which gets connections too; on all ranks or on none.
        network: see ``own_addresses``.
        despite_fabric: also where a host has a faster way than TCP.
    Raises:
        KVTimeoutError: a rank did not take part.
    """
    token, why_not, listener, own = secrets.token_bytes(_TOKEN_BYTES), "", None, list[tuple[str, int]]()
    try:
        if has_fabric() and not despite_fabric:
            why_not = "a host has a fabric that MPI makes use of"
        else:
            own = own_addresses(network)
            listener = _listen([address for address, _ in own])
            if not own:
                why_not = f"a host has no address on {network or 'any network'}"
    except (OSError, ValueError) as error:
        why_not = str(error)
    offer = _offer(token, listener if not why_not else None, own)
    incoming, outgoing = dict[Pair, socket.socket](), dict[Pair, socket.socket]()
    linked = False
    try:
        offers = exchange(comm, range(comm.size), offer, _TAG_OFFER, deadline, label, _DOING)
        refusing = [rank for rank, words in enumerate(offers) if not words[0]]
        if refusing or listener is None:
            return why_not or f"MPI rank {refusing[0]} offers no connection"
        patience = Deadline(min(_ALL_S, 0.5 * deadline.remaining_s()))
        wanted = [(*pair, number) for pair in pairs(layout) for number in range(num_connections)]
        wanted += [(*pair, num_connections) for pair in (call_pairs(layout) if calls is not None else ())]
        callers = [(rank, number) for rank, to, number in wanted if to == comm.rank]
        called = [(to, number) for rank, to, number in wanted if rank == comm.rank]
        tokens = [words[1:3].tobytes() for words in offers]
        answering = threading.Thread(
            target=_answer, args=(listener, token, tokens, set(callers), incoming, patience), daemon=True
        )
        answering.start()
        for to, number in called:
            hello = _HELLO.pack(tokens[to], comm.rank, number)
            made = _call(offers[to], hello, token, [address for address, _ in own], patience)
            if made is None:
                why_not = f"MPI rank {comm.rank} cannot reach MPI rank {to} over TCP"
                break
            outgoing[to, number] = made
        answering.join()
        complete = np.array([not why_not and len(incoming) == len(callers)], np.uint64)
        answers = exchange(comm, range(comm.size), complete, _TAG_LINKED, deadline, label, _DOING)
        without = [rank for rank, answer in enumerate(answers) if not answer[0]]
        if without:
            return why_not or f"MPI rank {without[0]} lacks connections"
        linked = True
        rings = Links(comm, *(_by_peer(socks, num_connections) for socks in (outgoing, incoming)))
        ends = [
            {rank: sock for (rank, number), sock in socks.items() if number == num_connections}
            for socks in (outgoing, incoming)
        ]
        return Linked(rings, Lines(calls, *ends) if calls is not None and any(ends) else None)
    finally:
        for sock in (listener, *(() if linked else (*incoming.values(), *outgoing.values()))):
            if sock is not None:
                sock.close()


def each_to_each(
    rank: int, size: int, swap: Callable[[bytes], Sequence[bytes]], own: Sequence[tuple[str, int]], deadline: Deadline
) -> dict[int, socket.socket]:
    """Collective over ranks that have nothing but a place to leave words: a connection to each of the others.

    Args:
        swap: collective: the words of all ranks, given the own ones.
        own: see ``own_addresses``.
    Raises:
        PeerLostError: some cannot be reached, or do not come.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    made, incoming, whole = dict[int, socket.socket](), dict[Pair, socket.socket](), False
    listener = _listen([address for address, _ in own])
    try:
        offers = [np.frombuffer(words, np.uint64) for words in swap(_offer(token, listener, own).tobytes())]
        patience = Deadline(max(1e-3, min(_EACH_S, deadline.remaining_s())))  # all are there
        tokens = [words[1:3].tobytes() for words in offers]
        callers = {(other, 0) for other in range(rank + 1, size)}
        answering = threading.Thread(
            target=_answer, args=(listener, token, tokens, callers, incoming, patience), daemon=True
        )
        answering.start()
        addresses = [address for address, _ in own]
        for other in range(rank):
            sock = _call(offers[other], _HELLO.pack(tokens[other], rank, 0), token, addresses, patience)
            if sock is None:
                raise PeerLostError(f"MPI rank {rank} cannot reach MPI rank {other} over TCP")
            made[other] = sock
        answering.join()
        if without := sorted(callers - set(incoming)):
            missing = ranks_in_words([other for other, _ in without])
            raise PeerLostError(f"MPI rank {rank} was not reached by MPI rank {missing} over TCP")
        whole = True
        return made | {other: sock for (other, _), sock in incoming.items()}
    finally:
        for sock in (listener, *(() if whole else (*made.values(), *incoming.values()))):
            sock.close()


def _offer(token: bytes, listener: socket.socket | None, own: Sequence[tuple[str, int]]) -> np.ndarray:
    """Where a rank listens, in words; zeros without a listener."""
    offer = np.zeros(4 + _ADDRESS_WORDS * _MAX_ADDRESSES, np.uint64)
    if listener is not None:
        words = in_words(own)
        offer[: 4 + len(words)] = [1, *np.frombuffer(token, np.uint64), listener.getsockname()[1], *words]
    return offer


def _by_peer(socks: Mapping[Pair, socket.socket], num_connections: int) -> dict[int, list[socket.socket]]:
    """Those of rings: the others have the number after theirs."""
    found: dict[int, list[socket.socket]] = {}
    for peer, number in sorted(socks):
        if number < num_connections:
            found.setdefault(peer, []).append(socks[peer, number])
    return found


def _answer(
    listener: socket.socket, token: bytes, tokens: Sequence[bytes], callers: set[Pair],
    into: dict[Pair, socket.socket], deadline: Deadline,
) -> None:  # fmt: skip
    """Take the connections of all ``callers``, and nobody else's, until the deadline."""
    while len(into) < len(callers) and not deadline.expired():
        listener.settimeout(max(1e-3, deadline.remaining_s()))
        sock = None
        try:
            sock, _ = listener.accept()
            sock.settimeout(max(1e-3, min(_ANSWER_S, deadline.remaining_s())))
            shown, rank, number = _HELLO.unpack(_read(sock, _HELLO.size))
            if hmac.compare_digest(shown, token) and (rank, number) in callers and (rank, number) not in into:
                sock.sendall(tokens[rank])
                into[rank, number], sock = sock, None
        except OSError:
            pass  # a stranger, or one that gave up
        finally:
            if sock is not None:
                sock.close()


def _call(
    offer: np.ndarray, hello: bytes, token: bytes, own: Sequence[str], deadline: Deadline
) -> socket.socket | None:
    """A connection to the rank that made ``offer``; None if none of its addresses leads there."""
    port = int(offer[3])
    for address in in_order(of_words(offer[4:].tolist()), own):
        sock = None
        try:
            sock = socket.create_connection((address, port), max(1e-3, min(_ANSWER_S, deadline.remaining_s())))
            sock.sendall(hello)
            sock.settimeout(max(1e-3, deadline.remaining_s()))  # it may be late, but it is there
            if hmac.compare_digest(_read(sock, _TOKEN_BYTES), token):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for option in options():
                    sock.setsockopt(*option)
                return sock
        except OSError:
            pass
        if sock is not None:
            sock.close()
    return None


def _read(sock: socket.socket, count: int) -> bytes:
    """Raises OSError: that many bytes do not come."""
    found = b""
    while len(found) < count:
        part = sock.recv(count - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found
