"""Bytes that flow from hosts to servers, or back, and share links: rates by max-min fairness, in virtual time.

A flow leaves (or reaches) one host, whose link its flows share evenly; flows of servers share, besides, what the
servers' links carry together. All flows of hosts with as many flows each have one rate, so a change of rates costs as
much as there are different numbers of flows on a host, and not as many flows as there are: 10,000 workers are cheap.

Source: progressive filling, Bertsekas & Gallager, Data Networks, 2nd edition 1992, section 6.5.2.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field

#: Bytes that are nothing: what is left of a flow by rounding.
_NOTHING_BYTES = 1e-3

#: Of a host: flows to servers, flows between hosts of a client.
_Load = tuple[int, int]


@dataclass(slots=True)
class _Flow:
    host: int
    serves: bool
    left_bytes: float  # at the time when it got its place
    end: float = 0.0  # on the clock of its class
    place: int = 0  # counts how often it was moved; entries of heaps with another number are stale


@dataclass(slots=True)
class _Class:
    """Flows of one rate. ``served`` is the number of bytes that one of them would have carried since the beginning."""

    served: float = 0.0
    rate: float = 0.0
    heap: list[tuple[float, int, int]] = field(default_factory=list)


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
        self._flows: dict[int, _Flow] = {}
        self._on_host: dict[int, set[int]] = {}
        self._loads: dict[int, _Load] = {}
        self._hosts_with: Counter[_Load] = Counter()
        self._classes: dict[tuple[_Load, bool], _Class] = {}
        self.carried_bytes = 0.0  # to or from servers
        self.server_rate_now = 0.0
        self._stale = True

    def add(self, host: int, nbytes: float, *, serves: bool) -> int:
        """A flow begins now; its number."""
        number = self._next_id = self._next_id + 1
        self._flows[number] = _Flow(host, serves, max(nbytes, _NOTHING_BYTES))
        self._on_host.setdefault(host, set()).add(number)
        self._move(host)
        return number

    def next_end_s(self) -> float:
        """When the next flow ends if none begins before; infinity if there is none."""
        if self._stale:
            self._settle()
        soonest = math.inf
        for of in self._classes.values():
            while of.heap and not self._holds(of.heap[0]):
                heapq.heappop(of.heap)
            if of.heap and of.rate > 0:
                soonest = min(soonest, (of.heap[0][0] - of.served) / of.rate)
        return self._now + max(0.0, soonest)

    def advance(self, now_s: float) -> list[int]:
        """Let time pass up to ``now_s``, which is not after ``next_end_s``; the flows that have ended then."""
        if self._stale:
            self._settle()
        elapsed_s = now_s - self._now
        self._now = now_s
        if elapsed_s > 0:
            self.carried_bytes += elapsed_s * self.server_rate_now
        ended = []
        for of in self._classes.values():
            of.served += elapsed_s * of.rate
            # Also what no clock can tell from now, or time would stand still.
            slack = max(_NOTHING_BYTES, 1e-9 * of.served, of.rate * max(1e-9, 1e-12 * now_s))
            while of.heap and (of.heap[0][0] <= of.served + slack or not self._holds(of.heap[0])):
                entry = heapq.heappop(of.heap)
                if self._holds(entry):
                    ended.append(entry[1])
        hosts = set()
        for number in ended:
            flow = self._flows.pop(number)
            self._on_host[flow.host].discard(number)
            hosts.add(flow.host)
        for host in sorted(hosts):
            self._move(host)
        return sorted(ended)

    # ---- classes

    def _holds(self, entry: tuple[float, int, int]) -> bool:
        flow = self._flows.get(entry[1])
        return flow is not None and flow.place == entry[2]

    def _move(self, host: int) -> None:
        """The flows of a host have become more or fewer: put them where others are treated alike."""
        numbers = self._on_host.get(host, set())
        serving = sum(self._flows[number].serves for number in numbers)
        before, load = self._loads.get(host, (0, 0)), (serving, len(numbers) - serving)
        for number in sorted(numbers):
            flow = self._flows[number]
            if flow.place:
                flow.left_bytes = max(flow.end - self._classes[before, flow.serves].served, 0.0)
            flow.place += 1
            of = self._classes.setdefault((load, flow.serves), _Class())
            flow.end = of.served + flow.left_bytes
            heapq.heappush(of.heap, (flow.end, number, flow.place))
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
