"""Sums in segments in compiled code: what is delivered, to whom, and that plans are of what lies there now."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from building import built
from collective_helpers import Contribution, all_vectors, assert_is_sum, on_host, vectors

from kvmpi.arrays import DTYPES, address_of
from kvmpi.collectives import Collectives, native, segments
from kvmpi.collectives.cross_memory import Source
from kvmpi.collectives.host_group import Target
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.collectives.native import CopyList, NativeTerms
from kvmpi.collectives.terms import HostTerms
from kvmpi.deadline import Deadline
from kvmpi.errors import PeerLostError

RunRanks = Callable[..., list[Any]]

TIMEOUT_S = 20.0


def block(count: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    return np.empty(count, dtype), np.empty(0, "f4")


def deliver(vector: np.ndarray, targets: list[Target]) -> np.ndarray:
    """What compiled code makes of one vector of bytes, after it has copied it to ``targets``."""
    out = np.empty_like(vector)
    scratch = block(1000, "u1")
    terms = NativeTerms([out], [HostTerms([vector], "uint8")], scratch, targets=[targets])
    assert terms.sum_segment(0, out.size)
    return out


@built
def test_memory_that_is_not_of_terms_is_refused() -> None:
    assert native._native is not None
    with pytest.raises(ValueError, match=r"not the memory of native\.TERMS"):
        native._native.sum_segment(np.zeros(5, "u1"), 0, 1)


@built
def test_memory_of_a_process_that_has_ended_is_an_error() -> None:
    own, ended = np.ones(9, "f4"), subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(PeerLostError, match=f"cannot write to process {ended.pid}: No such process; it has probably"):
        deliver(own.view("u1"), [Target(address_of(own), ended.pid)])
    out, scratch = np.empty_like(own), block(4, "f4")
    there = Contribution([Source(address_of(own)), Source(address_of(own), ended.pid)])
    with pytest.raises(PeerLostError, match=f"cannot read from process {ended.pid}: No such process; it has probably"):
        NativeTerms([out], [there], scratch).sum_segment(0, own.size)


@built
def test_nothing_is_delivered_to_who_has_given_up() -> None:
    word, taken, kept = np.ones(1, "u8"), np.zeros(9, "u1"), np.zeros(9, "u1")
    own = np.arange(9, dtype="u1")
    targets = [Target(address_of(taken)), Target(address_of(kept), given_up=address_of(word))]
    out, scratch = np.empty(9, "u1"), block(9, "u1")
    terms = NativeTerms([out], [HostTerms([own], "uint8")], scratch, targets=[targets])
    assert not terms.sum_segment(0, 9)
    assert not kept.any()
    np.testing.assert_array_equal(taken, own)
    word[0] = 0
    assert terms.sum_segment(0, 9)
    np.testing.assert_array_equal(kept, own)


@built
def test_copies_past_the_caches_are_those_bytes_and_no_others() -> None:
    """Of any length, from any address to any other."""
    source = np.random.default_rng(1).integers(0, 256, 70_000, "u1")
    for length in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 4097, 65_536):
        for first in range(18):
            for start in (0, 1, 8, 33):
                out = np.full(length + 64, 7, "u1")
                expected = out.copy()
                expected[first : first + length] = source[start : start + length]
                deliver(source[start : start + length], [Target(address_of(out) + first, past_caches=True)])
                np.testing.assert_array_equal(out, expected)


@built
def test_copies_are_made_in_their_order() -> None:
    source, kept = np.arange(1000.0), np.zeros(1500)
    CopyList([]).run()
    for for_others in (False, True):
        kept[:] = 0
        copies = [(kept[:1000], source), (kept[:0], source[:0]), (kept[1000:], kept[500:1000])]
        CopyList(copies, for_others=for_others).run()
        np.testing.assert_array_equal(kept[:500], source[:500])
        np.testing.assert_array_equal(kept[1000:], source[500:])
    assert native._native is not None
    with pytest.raises(ValueError, match="not rows of three numbers"):
        native._native.copy_ranges(np.zeros(4, "i8"), False)


@built
@pytest.mark.parametrize("attach", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ranks_of_both_kinds_copy_large_results_to_the_bit(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, size: int, attach: bool
) -> None:
    """Sums in common memory, as a store keeps them; copies where the vectors were, mapped or private, or elsewhere."""
    monkeypatch.setattr(segments, "PAST_CACHES_BYTES", 1)
    copied, original = list[int](), NativeTerms.__init__

    def noting(self: NativeTerms, *args: Any, targets: Sequence[Sequence[Target]], **options: Any) -> None:
        copied.append(sum(target.past_caches for of_tensor in targets for target in of_tensor))
        original(self, *args, targets=targets, **options)

    monkeypatch.setattr(NativeTerms, "__init__", noting)
    counts, timeout_s = (70_001, 3, 130_000, 0, 65_537), TIMEOUT_S

    def rank_main(compiled: Sequence[int], dtype: str, comm: MemoryComm) -> list[bytes]:
        collectives = Collectives(comm, "shared", attach=attach, use_native=comm.rank in compiled)
        deadline, tensors, results = Deadline(timeout_s), list[Any](), list[np.ndarray]()
        for i, count in enumerate(counts):
            own = vectors(comm.rank, 2, count, dtype)
            if i % 2:
                mapped = collectives.empty(count, dtype)
                np.copyto(mapped, own[0])
                own[0] = mapped
            common = collectives.shared_empty(max(count, 1), dtype, deadline)[:count]
            copies = [[own[1], own[0]], [own[0]], [np.empty_like(own[0])]][i % 3]
            tensors.append((on_host(own, dtype), common, copies))
            results += [common, *copies]
        collectives.allreduce_many(tensors, dtype, deadline, "sum")
        found = [result.tobytes() for result in results]
        collectives.allreduce(on_host([np.ones(1, "f4")], "float32"), np.empty(1, "f4"), "float32", deadline, "")
        return found

    for dtype in {2: ["float32"], 3: ["float32", "int64", "bfloat16"], 4: ["int64"], 7: ["bfloat16"]}[size]:
        kinds = [
            run_ranks(size, partial(rank_main, compiled, dtype)) for compiled in (range(size), range(0, size, 2), ())
        ]
        assert all(found == kinds[0][0] for ranks in kinds for found in ranks)
        results = iter(kinds[0][0])
        for i, count in enumerate(counts):
            for _ in range((3, 2, 2)[i % 3]):
                result = np.frombuffer(next(results), DTYPES[dtype])
                assert_is_sum(result, all_vectors(size, 2, count, dtype), dtype)
    assert sum(copied) > 0, "nothing was copied that way"


@built
@pytest.mark.parametrize("attach", [True, False])
def test_tensors_that_lie_where_they_lay_are_planned_once_and_others_anew(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, attach: bool
) -> None:
    """Steps of a training loop; now and then one rank's arrays lie elsewhere, or what stands in for them does."""
    monkeypatch.setattr(segments, "_MOST_PLANS", 3)
    size, counts, turns = 3, (70_001, 5, 0, 90_000), 40
    made: list[list[int]] = [[] for _ in range(size)]  # by rank: the turns in which something was made anew
    here, original = threading.local(), NativeTerms.__init__

    def noting(self: NativeTerms, *args: Any, **options: Any) -> None:
        made[here.rank].append(here.turn)
        original(self, *args, **options)

    monkeypatch.setattr(NativeTerms, "__init__", noting)

    def rank_main(comm: MemoryComm) -> None:
        here.rank = comm.rank
        collectives, deadline = Collectives(comm, "shared", attach=attach), Deadline(TIMEOUT_S)

        def arrays(mapped: bool) -> list[tuple[np.ndarray, np.ndarray]]:
            make = (
                (lambda count: collectives.empty(count, "int64")) if mapped else (lambda count: np.empty(count, "i8"))
            )
            return [(make(count), make(count)) for count in counts]

        lists = [arrays(mapped) for mapped in (False, True, False)]
        for turn in range(turns):
            here.turn = turn
            if turn == 20 and comm.rank == 1:
                lists[0] = arrays(mapped=True)
            if turn == 25:  # more scratch than there has been
                big = np.full(2_000_000, comm.rank, "i8")
                collectives.allreduce_many([(on_host([big], "int64"), big, ())], "int64", deadline, "big")
                assert (big == 3).all()
            chosen = lists[turn % 2]
            tensors = []
            for i, (own, copy) in enumerate(chosen):
                own[:] = np.arange(own.size) * (comm.rank + 1) + turn + i
                copy[:] = -1
                tensors.append((on_host([own], "int64"), own, [copy]))
            collectives.allreduce_many(tensors, "int64", deadline, "sum")
            for i, (own, copy) in enumerate(chosen):
                expected = 6 * np.arange(own.size) + size * (turn + i)
                np.testing.assert_array_equal(own, expected, err_msg=f"turn {turn}, rank {comm.rank}, tensor {i}")
                np.testing.assert_array_equal(copy, expected, err_msg=f"turn {turn}, rank {comm.rank}, tensor {i}")
        for turn in range(8):  # more lists than there are plans
            here.turn = turns + turn
            (own, copy), *_ = lists[2] = arrays(mapped=False)
            own[:], copy[:] = comm.rank + turn, -1
            collectives.allreduce_many([(on_host([own], "int64"), copy, ())], "int64", deadline, "sum")
            assert (copy == 3 + size * turn).all()
            assert (own == comm.rank + turn).all()

    run_ranks(size, rank_main)
    for of_rank in made:
        steps = [turn for turn in of_rank if turn < turns]
        assert {0, 1, 20} <= set(steps), "something is used that lies elsewhere by now"
        assert len(steps) <= 12, f"planned anew: {steps}"
