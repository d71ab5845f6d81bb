"""Bytes that flow from hosts to servers, or back, and share links: rates by max-min fairness, in virtual time.

A flow leaves (or reaches) one host, whose link its flows share evenly; flows of servers share, besides, what the
servers' links carry together. All flows of hosts with as many flows each have one rate, so a change of rates costs as
much as there are different numbers of flows on a host, and not as many flows as there are: 10,000 workers are cheap,
on one host too, whose flows change their rate as a group.

Source: progressive filling, Bertsekas & Gallager, Data Networks, 2nd edition 1992, section 6.5.2.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

#: Bytes that are nothing: what is left of a flow by rounding.
_NOTHING_BYTES = 1e-3

#: Of a host: flows to servers, flows between hosts of a client.
_Load = tuple[int, int]


@dataclass(slots=True)
class _Group:
    """The flows of a host to servers, or its others: all have one rate.

    Attributes:
        heap: of each flow, its end and number; an end is a number of bytes that one of them would have carried.
        served: how many that were when the group got its place.
        joined: the clock of its class at that time.
        place: entries of heaps of classes with another number are stale; 0: in no class.
    """

    host: int
    heap: list[tuple[float, int]] = field(default_factory=list)
    served: float = 0.0
    joined: float = 0.0
    place: int = 0

    def end(self) -> float:
        """When its next flow ends, on the clock of its class."""
        return self.joined + (self.heap[0][0] - self.served)


@dataclass(slots=True)
class _Class:
    """Groups of one rate. ``served``, its clock, is what one of their flows would have carried since the beginning."""

    served: float = 0.0
    rate: float = 0.0
    heap: list[tuple[float, int, _Group]] = field(default_factory=list)

    def next_end(self) -> float:
        """When the next flow ends, on the clock; infinity if there is none."""
        while self.heap and self.heap[0][2].place != self.heap[0][1]:
            heapq.heappop(self.heap)
        return self.heap[0][0] if self.heap else math.inf


class Flows:
    """Flows in one direction.

    Args:
        host_rate: bytes per second of each host's link.
        servers_rate: of all servers' links together.
        flow_rate: that no flow to a server exceeds: what the process at its end can do.
    """

    def __init__(self, host_rate: float, servers_rate: float, flow_rate: float = math.inf) -> None:
        self._host_rate, self._servers_rate, self._flow_rate = host_rate, servers_rate, flow_rate
        self._now = 0.0
        self._next_id = 0
        self._places = itertools.count(1)
        self._groups: dict[int, dict[bool, _Group]] = {}  # by host, and by whether they go to servers
        self._loads: dict[int, _Load] = {}
        self._hosts_with: Counter[_Load] = Counter()
        self._classes: dict[tuple[_Load, bool], _Class] = {}
        self.carried_bytes = 0.0  # to or from servers
        self.server_rate_now = 0.0
        self._stale = True

    def add(self, host: int, nbytes: float, *, serves: bool) -> int:
        """A flow begins now; its number."""
        number = self._next_id = self._next_id + 1
        self._take(host)
        group = self._groups[host][serves]
        heapq.heappush(group.heap, (group.served + max(nbytes, _NOTHING_BYTES), number))
        self._put(host)
        return number

    def next_end_s(self) -> float:
        """When the next flow ends if none begins before; infinity if there is none."""
        if self._stale:
            self._settle()
        soonest = math.inf
        for of in self._classes.values():
            if of.rate > 0:
                soonest = min(soonest, (of.next_end() - of.served) / of.rate)
        return self._now + max(0.0, soonest)

    def advance(self, now_s: float) -> list[int]:
        """Let time pass up to ``now_s``, which is not after ``next_end_s``; the flows that have ended then."""
        if self._stale:
            self._settle()
        elapsed_s = now_s - self._now
        self._now = now_s
        if elapsed_s > 0:
            self.carried_bytes += elapsed_s * self.server_rate_now
        ended, hosts = [], set()
        for of in self._classes.values():
            of.served += elapsed_s * of.rate
            # Also what no clock can tell from now, or time would stand still.
            slack = max(_NOTHING_BYTES, 1e-9 * of.served, of.rate * max(1e-9, 1e-12 * now_s))
            while of.next_end() <= of.served + slack:
                group = heapq.heappop(of.heap)[2]
                while group.heap and group.end() <= of.served + slack:
                    ended.append(heapq.heappop(group.heap)[1])
                hosts.add(group.host)
        for host in sorted(hosts):
            self._take(host)
            self._put(host)
        return sorted(ended)

    # ---- classes

    def _take(self, host: int) -> None:
        """The flows of a host become more or fewer: take its groups out of their classes."""
        groups = self._groups.setdefault(host, {True: _Group(host), False: _Group(host)})
        for serves, group in groups.items():
            if group.place:
                group.served += self._classes[self._loads[host], serves].served - group.joined
                group.place = 0

    def _put(self, host: int) -> None:
        """Put its groups where others are treated alike."""
        groups = self._groups[host]
        load = (len(groups[True].heap), len(groups[False].heap))
        for serves, group in groups.items():
            if not group.heap:
                group.served = 0.0
                continue
            of = self._classes.setdefault((load, serves), _Class())
            group.joined, group.place = of.served, next(self._places)
            heapq.heappush(of.heap, (group.end(), group.place, group))
        before = self._loads.get(host, (0, 0))
        self._hosts_with[before] -= 1
        if not self._hosts_with[before]:
            del self._hosts_with[before]
        self._hosts_with[load] += 1
        self._loads[host] = load
        self._stale = True

    def _settle(self) -> None:
        """Give every class its rate."""
        self._stale = False
        for key in [key for key in self._classes if key[0] not in self._hosts_with]:
            del self._classes[key]
        level = self._level()
        self.server_rate_now = 0.0
        for (load, serves), of in self._classes.items():
            serving, inside = load
            own = min(self._host_rate / (serving + inside), level)
            if serves:
                of.rate = own
                self.server_rate_now += self._hosts_with[load] * serving * own
            else:
                of.rate = (self._host_rate - serving * own) / inside

    def _level(self) -> float:
        """What a flow to a server gets where its host's link would give more."""
        shares = sorted(
            (min(self._host_rate / (load[0] + load[1]), self._flow_rate), count * load[0])
            for load, count in self._hosts_with.items() if load[0]
        )  # fmt: skip
        left, flows = self._servers_rate, sum(count for _, count in shares)
        for share, count in shares:
            if share * flows >= left:
                return left / flows
            left -= share * count
            flows -= count
        return self._flow_rate
