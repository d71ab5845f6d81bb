"""The cost model: choices that make sense, that all ranks share, and that a file of measured figures changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvmpi.collectives import Collectives
from kvmpi.collectives.cost import Figures, as_words, chunk_for, costs, from_words, linked_chunk_for, load, save
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.errors import ConfigError

RunRanks = Callable[..., list[Any]]

OPS = ("allreduce", "reduce_scatter", "allgather", "broadcast")
GBIT = Figures(link_bytes_per_s=1.2e8, message_s=1e-4)


def best(nbytes: int, hosts: tuple[int, ...], figures: Figures = GBIT, *, shares: bool = True) -> str:
    found = costs("allreduce", nbytes, hosts, figures, shares=shares, has_library=True)
    return min(found.values(), key=lambda choice: choice.seconds).algorithm


@given(
    op=st.sampled_from(OPS), nbytes=st.integers(1, 1 << 34),
    hosts=st.lists(st.integers(1, 64), min_size=1, max_size=20),
    shares=st.booleans(), has_library=st.booleans(),
)  # fmt: skip
def test_costs_are_finite_and_only_of_what_is_possible(
    op: str, nbytes: int, hosts: list[int], shares: bool, has_library: bool
) -> None:
    if sum(hosts) < 2:
        hosts = [2]
    found = costs(op, nbytes, tuple(hosts), Figures(), shares=shares, has_library=has_library)
    assert "ring" in found, "rings are always possible"
    assert ("mpi" in found) == has_library
    assert ("shared" in found) == (shares and len(hosts) == 1)
    assert ("hierarchical" in found) == (shares and len(hosts) > 1)
    assert ("multi_ring" in found) == (op in ("allreduce", "reduce_scatter") and set(hosts) == {1})
    for name, choice in found.items():
        assert choice.algorithm == name
        assert (choice.num_rings > 1) == (name == "multi_ring")
        assert 0 < choice.seconds < float("inf")
        assert choice.num_rings >= 1
        twice = costs(op, 2 * nbytes, tuple(hosts), Figures(), shares=shares, has_library=has_library)[name]
        assert twice.seconds >= choice.seconds * 0.99, f"{name}: more bytes cost less"


def test_what_is_chosen() -> None:
    for exponent in range(2, 31):
        assert best(1 << exponent, (4,)) == "shared", "on one host nothing beats its memory"
        assert best(1 << exponent, (2, 2), shares=False) in ("ring", "mpi")
    assert best(1 << 10, (1, 1, 1, 1)) == "mpi", "a few bytes between hosts are a matter of latency"
    assert best(64 << 20, (1, 1, 1, 1)) == "multi_ring", "one ring sums while the other one's chunks travel"
    assert best(64 << 20, (2, 2)) == "hierarchical", "every byte crosses a link once, not once for each rank"


@pytest.mark.parametrize("figures", [GBIT, Figures()])
def test_what_is_chosen_between_hosts_is_what_was_seen_to_be_quickest(figures: Figures) -> None:
    """On simulated hosts of 1 Gbit/s, two with two ranks each and four with one: docs/benchmarks.md."""
    for nbytes in (6 << 10, 24 << 10):
        for hosts in ((2, 2), (1, 1, 1, 1), (1, 1)):
            assert best(nbytes, hosts, figures) == "mpi"
    for nbytes in (192 << 10, 384 << 10):
        assert best(nbytes, (2, 2), figures) == "hierarchical"
        assert best(nbytes, (1, 1, 1, 1), figures) == "ring"


@given(part=st.one_of(st.floats(128 << 10, 1 << 20), st.floats(1, 1e12)))
@example(part=1.0)
@example(part=1e12)
def test_over_connections_of_their_own_segments_travel_in_two_chunks(part: float) -> None:
    chunk = linked_chunk_for(part)
    assert 64 << 10 <= chunk <= 512 << 10
    assert chunk & (chunk - 1) == 0
    if 128 << 10 <= part <= 1 << 20:
        assert 1.4 < part / chunk < 2.9


@given(part=st.floats(1, 1e12), message_s=st.floats(1e-7, 1e-2), link=st.floats(1e6, 1e12))
def test_chunks_are_powers_of_two_between_64_and_128_kib(part: float, message_s: float, link: float) -> None:
    chunk = chunk_for(part, message_s, link)
    assert 64 << 10 <= chunk <= 128 << 10
    assert chunk & (chunk - 1) == 0


def test_all_ranks_choose_by_the_figures_of_rank_0(run_ranks: RunRanks) -> None:
    slow_memory = Figures(meeting_s=10.0)

    def choices(comm: MemoryComm) -> list[str]:
        collectives = Collectives(comm, figures=slow_memory if comm.rank == 0 else Figures())
        return [str(collectives.choice(op, 1 << 20, "float32")) for op in OPS]

    found = run_ranks(3, choices)
    assert found[0] == found[1] == found[2]
    assert {text.split()[0] for text in found[0]} == {"ring"}, "rank 0 says that meetings take ten seconds"


def test_figures_survive_a_file_and_a_message(tmp_path: Path) -> None:
    path = str(tmp_path / "tuning.json")
    save(path, GBIT)
    assert load(path) == GBIT
    assert from_words(as_words(GBIT)) == GBIT
    assert load("") == Figures()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "KVMPI_TUNING=.*kvmpi bench tune"), ("[1]", "no table"), ('{"speed": 1}', "speed"),
        ('{"link_bytes_per_s": 0}', "link_bytes_per_s is 0"), ('{"meeting_s": "1"}', "meeting_s is '1'"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        load(str(path))
    with pytest.raises(ConfigError, match=r"missing\.json"):
        load(str(tmp_path / "missing.json"))
