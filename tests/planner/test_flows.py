"""Flows that share links: rates against what max-min fairness says, computed by hand."""

from __future__ import annotations

import heapq
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.planner.flows import Flows


def drain(flows: Flows) -> dict[int, float]:
    """When each flow ends, if no more begin."""
    ends = {}
    while not math.isinf(now := flows.next_end_s()):
        ends |= dict.fromkeys(flows.advance(now), now)
    return ends


def test_flows_of_a_host_share_its_link() -> None:
    flows = Flows(100.0, 1000.0)
    first = flows.add(0, 100.0, serves=True)
    second = flows.add(0, 300.0, serves=False)
    third = flows.add(1, 50.0, serves=True)
    # 50 a second each on host 0 until the first is through at 2 s; then the second has all: 200 left at 100.
    assert drain(flows) == pytest.approx({first: 2.0, second: 4.0, third: 0.5})
    assert flows.carried_bytes == pytest.approx(150.0), "what went to the servers"


def test_servers_are_shared_and_what_hosts_cannot_use_goes_to_others() -> None:
    flows = Flows(60.0, 90.0)
    slow = [flows.add(0, 100.0, serves=True) for _ in range(3)]  # 20 each: their host's link
    quick = flows.add(1, 100.0, serves=True)  # the rest: 90 - 60 = 30
    # At 10/3 s the quick one is through; the others are at 20 all the time.
    assert drain(flows) == pytest.approx({**dict.fromkeys(slow, 5.0), quick: 100 / 30})


def test_what_servers_do_not_take_is_there_for_sums() -> None:
    flows = Flows(100.0, 20.0)
    pushed, summed = flows.add(0, 40.0, serves=True), flows.add(0, 160.0, serves=False)
    assert drain(flows) == pytest.approx({pushed: 2.0, summed: 2.0})


def test_a_process_limits_a_flow() -> None:
    flows = Flows(100.0, 100.0, flow_rate=10.0)
    number = flows.add(0, 100.0, serves=True)
    assert drain(flows) == pytest.approx({number: 10.0})


def test_a_flow_more_costs_the_same_whatever_its_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """``kvmpi plan -n 1000`` on one host took minutes: with each flow that began or ended all of them were moved."""
    moved, heappush = [], heapq.heappush
    monkeypatch.setattr(heapq, "heappush", lambda heap, entry: (moved.append(entry), heappush(heap, entry)))
    flows = Flows(100.0, 1000.0)
    for i in range(1000):
        flows.add(0, 1.0 + i, serves=i % 2 == 0)
    drain(flows)
    assert len(moved) <= 6 * 1000


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 1000), st.booleans(), st.integers(0, 9)), min_size=1, max_size=14
    ),
    st.integers(1, 100), st.integers(1, 200),
)  # fmt: skip
def test_against_a_slow_oracle(begun: list[tuple[int, int, bool, int]], host_rate: int, servers_rate: int) -> None:
    """Progressive filling over single flows, recomputed at every event."""
    begun = sorted(begun, key=lambda flow: flow[3])
    flows, ends, numbers = Flows(host_rate, servers_rate), {}, []
    for host, nbytes, serves, at in begun:
        while flows.next_end_s() <= at:
            now = flows.next_end_s()
            ends |= dict.fromkeys(flows.advance(now), now)
        flows.advance(float(at))
        numbers.append(flows.add(host, nbytes, serves=serves))
    ends |= drain(flows)
    expected = oracle(begun, host_rate, servers_rate)
    assert [ends[number] for number in numbers] == pytest.approx(expected, rel=1e-4, abs=1e-3)


def oracle(begun: list[tuple[int, int, bool, int]], host_rate: float, servers_rate: float) -> list[float]:
    left = [float(nbytes) for _, nbytes, _, _ in begun]
    ends = [math.nan] * len(begun)
    now = 0.0
    while any(math.isnan(end) for end in ends):
        live = [i for i, end in enumerate(ends) if math.isnan(end) and begun[i][3] <= now + 1e-12]
        rates = fill(live, begun, host_rate, servers_rate)
        later = [at for _, _, _, at in begun if at > now + 1e-12]
        step = min([left[i] / rates[i] for i in live] + [at - now for at in later])
        now += step
        for i in live:
            left[i] -= step * rates[i]
            if left[i] <= 1e-6:
                ends[i] = now
    return ends


def fill(live: list[int], begun: list[tuple[int, int, bool, int]], host_rate: float, servers_rate: float) -> dict:
    """Raise all rates together; who meets a full link stays."""
    rates = dict.fromkeys(live, 0.0)
    open_ = set(live)
    while open_:
        links = [({i for i in live if begun[i][0] == host}, host_rate) for host in {begun[i][0] for i in live}]
        links.append(({i for i in live if begun[i][2]}, servers_rate))
        rooms = [
            ((rate - sum(rates[i] for i in members)) / len(members & open_), members)
            for members, rate in links if members & open_
        ]  # fmt: skip
        rise = min(room for room, _ in rooms)
        for i in open_:
            rates[i] += rise
        for room, members in rooms:
            if room <= rise + 1e-12:
                open_ -= members
    return rates
