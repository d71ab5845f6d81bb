"""Placement and chunks: every element has one place, the same on every client, and loads are even where promised."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.errors import ConfigError
from kvmpi.ps import placement
from kvmpi.ps.placement import KeySize, Part

NAMES = ["hash", "round_robin", "lpt", "uniform"]
SERVERS = [1, 2, 3, 7]
COUNTS = [0, 1, 2, 3, 1001, 4096, 16 << 10, (1 << 20) + 1, 10**9 + 7]


def covers(parts: list[Part], count: int, num_servers: int) -> None:
    """Parts follow one another from 0 to ``count``, none empty unless the key is."""
    assert parts
    stop = 0
    for part in parts:
        assert part.start == stop
        assert part.stop > part.start or count == 0
        assert 0 <= part.server < num_servers
        stop = part.stop
    assert stop == count


@pytest.mark.parametrize("num_servers", SERVERS)
@pytest.mark.parametrize("name", NAMES)
def test_parts_cover_every_key_once(name: str, num_servers: int) -> None:
    places = placement.create(name, num_servers)
    sizes = [KeySize(f"key {i}", count, 4) for i, count in enumerate(COUNTS)]
    for call in (sizes[:4], sizes[4:], []):
        for size, parts in zip(call, places.place(call), strict=True):
            covers(parts, size.count, num_servers)
    assert sum(places.load_bytes) == 4 * sum(COUNTS)
    assert 1.0 <= places.imbalance() <= num_servers


KEYS = st.one_of(st.integers(-5, 2**63 - 1), st.text(max_size=8))
SIZES = st.lists(
    st.builds(KeySize, KEYS, st.integers(0, 400_000), st.sampled_from([1, 2, 4, 8])), max_size=8,
    unique_by=lambda size: (type(size.key), size.key),
)  # fmt: skip


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.sampled_from(NAMES), st.integers(1, 9), SIZES, st.integers(100, 9000), st.data())
def test_placement_and_chunks(
    name: str, num_servers: int, sizes: list[KeySize], chunk_bytes: int, data: st.DataObject
) -> None:
    split = data.draw(st.integers(0, len(sizes)), "split")
    mine, yours = placement.create(name, num_servers), placement.create(name, num_servers)
    placed = mine.place(sizes[:split]) + mine.place(sizes[split:])
    assert placed == yours.place(sizes[:split]) + yours.place(sizes[split:]), "clients disagree"
    for size, parts in zip(sizes, placed, strict=True):
        covers(parts, size.count, num_servers)
        chunks = placement.cut(parts, size.itemsize, chunk_bytes)
        covers(chunks, size.count, num_servers)
        owners = np.zeros(size.count, dtype=int)
        for chunk in chunks:
            assert (chunk.stop - chunk.start) * size.itemsize <= max(chunk_bytes, size.itemsize)
            owners[chunk.start : chunk.stop] = chunk.server
        # Blocks of shared memory begin at cache lines, and limits are above 64 bytes here.
        assert not any(chunk.start * size.itemsize % 64 for chunk in chunks)
        for part in parts:
            assert (owners[part.start : part.stop] == part.server).all()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 900), st.integers(0, 300), st.sampled_from([1, 2, 4, 8]),
    st.integers(100, 40_000), st.integers(1, 500),
)  # fmt: skip
def test_keys_are_cut_at_rows(
    name: str, num_servers: int, rows: int, width: int, itemsize: int, chunk_bytes: int, most_rows: int
) -> None:
    """Wherever a row fits into a chunk and servers get enough of them; at cache lines too, where that is possible."""
    places = placement.create(name, num_servers)
    size = KeySize("key", rows * width, itemsize, width)
    (parts,) = places.place([size])
    covers(parts, size.count, num_servers)
    chunks = placement.cut(parts, itemsize, chunk_bytes, width, most_rows)
    covers(chunks, size.count, num_servers)
    enough = len(parts) == 1 or rows >= 8 * 64 * len(parts)
    for chunk in chunks:
        length = chunk.stop - chunk.start
        assert length * itemsize <= max(chunk_bytes, itemsize)
        if 0 < width * itemsize <= chunk_bytes and enough:
            assert chunk.start % width == chunk.stop % width == 0, "cut within a row"
            if most_rows >= 64:
                assert length <= most_rows * width
            if width * 64 <= chunk_bytes and most_rows >= 64:
                assert chunk.start * itemsize % 64 == 0


def test_rows_are_spread_evenly() -> None:
    parts = placement.create("uniform", 4).place([KeySize("table", 50_001 * 100, 4, 100)])[0]
    rows = [(part.stop - part.start) / 100 for part in parts]
    assert len({part.server for part in parts}) == 4
    assert all(n.is_integer() for n in rows)
    assert max(rows) - min(rows) <= 8
    few = placement.create("uniform", 4).place([KeySize("wide", 3 * 10**6, 4, 10**6)])[0]
    assert max(part.stop - part.start for part in few) - min(part.stop - part.start for part in few) < 32


@pytest.mark.parametrize(("count", "itemsize", "chunk_bytes", "lengths"), [
    (0, 4, 8, [0]), (1, 4, 8, [1]), (2, 4, 8, [2]), (3, 4, 8, [2, 1]), (5, 4, 10, [2, 2, 1]), (3, 8, 1, [1, 1, 1]),
    (9, 4, 16, [3, 3, 3]), (33, 4, 128, [32, 1]), (5000, 4, 8192, [1680, 1664, 1656]),
    (260, 1, 100, [64, 64, 64, 64, 4]), (260, 1, 50, [44, 44, 43, 43, 43, 43]),
])  # fmt: skip
def test_cut_makes_near_equal_chunks_within_the_limit(
    count: int, itemsize: int, chunk_bytes: int, lengths: list[int]
) -> None:
    chunks = placement.cut([Part(3, 10, 10 + count)], itemsize, chunk_bytes)
    assert [chunk.stop - chunk.start for chunk in chunks] == lengths
    assert chunks[0].start == 10


@pytest.mark.parametrize(("part_mib", "chunks", "most_mib"), [
    (1, 1, 2), (20, 10, 2), (32, 16, 2), (33, 16, 2.0625), (80, 16, 5), (128, 16, 8), (1024, 128, 8),
])  # fmt: skip
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_large_parts_are_cut_into_larger_chunks(part_mib: int, chunks: int, most_mib: float, itemsize: int) -> None:
    """Where no setting says how large: sixteen to a part, but of no less than 2 MiB and no more than 8."""
    count = part_mib * 2**20 // itemsize
    for most_bytes in (2**40, 2**20):
        found = placement.cut([Part(0, 0, 4), Part(1, 4, 4 + count)], itemsize, 0, most_bytes=most_bytes)
        assert found[0] == Part(0, 0, 4)
        lengths = [(chunk.stop - chunk.start) * itemsize for chunk in found[1:]]
        assert len(lengths) == (chunks if most_bytes == 2**40 else part_mib)
        assert max(lengths) <= min(most_mib * 2**20, most_bytes)


@pytest.mark.parametrize("num_servers", [2, 3])
def test_lpt_keeps_grahams_bound(num_servers: int) -> None:
    """Within 4/3 - 1/(3m) of the best possible, which is found by trying everything."""
    rng = np.random.default_rng(num_servers)
    worst = 0.0
    for _ in range(40):
        counts = [int(count) for count in rng.integers(1, 60, 7)]
        places = placement.create("lpt", num_servers)
        places.place([KeySize(i, count, 4) for i, count in enumerate(counts)])
        best = min(
            max(sum(c for c, s in zip(counts, where, strict=True) if s == server) for server in range(num_servers))
            for where in itertools.product(range(num_servers), repeat=len(counts))
        )
        worst = max(worst, max(places.load_bytes) / 4 / best)
    assert worst <= 4 / 3 - 1 / (3 * num_servers)


def test_lpt_takes_the_largest_first_and_goes_on_from_earlier_calls() -> None:
    places = placement.create("lpt", 2)
    first = places.place([KeySize("a", 1, 4), KeySize("b", 1, 4), KeySize("c", 2, 4)])
    assert [parts[0].server for parts in first] == [1, 1, 0]
    places.place([KeySize("d", 10, 4)])
    (parts,) = places.place([KeySize("e", 1, 4)])
    assert places.load_bytes[parts[0].server] < 40


@pytest.mark.parametrize("num_servers", SERVERS)
def test_uniform_spreads_large_keys_evenly_and_keeps_small_ones_whole(num_servers: int) -> None:
    places = placement.create("uniform", num_servers)
    (large,) = places.place([KeySize("large", 10**6 + 1, 4)])
    lengths = [part.stop - part.start for part in large]
    assert len({part.server for part in large}) == len(large) == min(num_servers, 4 * (10**6 + 1) // 2**18)
    assert max(lengths) - min(lengths) < 32, "two cache lines of float32"
    small = places.place([KeySize(i, 100, 4) for i in range(10 * num_servers)])
    assert all(len(parts) == 1 for parts in small)
    assert places.imbalance() < 1.01


def test_round_robin_goes_on_where_it_stopped() -> None:
    places = placement.create("round_robin", 3)
    servers = [parts[0].server for _ in range(2) for parts in places.place([KeySize(i, 1, 4) for i in range(4)])]
    assert servers == [0, 1, 2, 0, 1, 2, 0, 1]


def test_hash_is_the_same_in_every_process() -> None:
    """Python's own hash of a str differs from process to process."""
    program = (
        "from kvmpi.ps import placement as p;"
        "print([x[0].server for x in p.create('hash', 7).place([p.KeySize(k, 1, 4) for k in ['a', 'b', 1, 2, 'é']])])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    places = placement.create("hash", 7)
    servers = [parts[0].server for parts in places.place([KeySize(f"layer.{i}", 1, 4) for i in range(500)])]
    assert min(np.bincount(servers, minlength=7)) > 30, "a server is left out"


def test_an_unknown_placement_lists_the_known_ones() -> None:
    expected = "KVMPI_PLACEMENT='random': expected one of 'hash', 'lpt', 'round_robin', 'uniform'"
    with pytest.raises(ConfigError, match=expected):
        placement.create("random", 2)
