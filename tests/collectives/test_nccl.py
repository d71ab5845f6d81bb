"""``nccl`` on stand-ins for CuPy and NCCL: what goes where, and what is said where it cannot be used."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collective_helpers import all_vectors, assert_is_sum, on_host, vectors

from kvmpi.arrays import DTYPES, Vector
from kvmpi.collectives import Collectives, nccl
from kvmpi.collectives.memory_comm import MemoryComm
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.deadline import Deadline
from kvmpi.errors import PeerLostError, UnsupportedError

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from device_fixtures import compile_for_host  # noqa: F401 - a fixture
from device_stand_in import StandInArray
from nccl_stand_in import StandInModules, StandInNcclError, Wire

RunRanks = Callable[..., list[Any]]
Rank = Callable[[MemoryComm, StandInModules], Any]


@pytest.fixture
def run_with_nccl(run_ranks: RunRanks, compile_for_host: Any, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """``run(size, rank_main, buses)``: ranks whose GPUs have these addresses; None: it has none."""

    def run(size: int, rank_main: Rank, buses: list[str | None] | None = None) -> tuple[list[Any], Wire]:
        wire, own = Wire(size), threading.local()

        def modules() -> StandInModules:
            if own.modules is None:
                raise ImportError("No module named 'cupy'")
            return own.modules

        def run_rank(comm: MemoryComm) -> Any:
            bus = f"bus {comm.rank}" if buses is None else buses[comm.rank]
            own.modules = None if bus is None else StandInModules(wire, compile_for_host, bus)
            return rank_main(comm, own.modules)

        monkeypatch.setattr(nccl, "_Modules", modules)
        return run_ranks(size, run_rank), wire

    return run


def there(modules: StandInModules, buffer: np.ndarray, dtype: str) -> Vector:
    return Vector(modules.cupy.asarray(buffer), dtype, "cuda:0", True)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("size", [2, 3])
def test_sums_from_device_to_device(run_with_nccl: Any, size: int, dtype: str) -> None:
    """In place and not, on devices and the host, of one vector and several, multiplied or not."""
    floats = dtype in ("float32", "float64", "float16", "bfloat16")
    cases = [
        (count, num, scale)
        for count in (1, 5, 1013)
        for num in (1, 2)
        for scale in ((1.0, 1 / 3) if floats else (1.0,))
    ]

    def rank_main(comm: MemoryComm, modules: StandInModules) -> list[np.ndarray]:
        collectives, found = Collectives(comm, "nccl"), []
        assert collectives.fills_devices
        for count, num_vectors, scale in cases:
            own = vectors(comm.rank, num_vectors, count, dtype)
            for in_place in (False, True):
                devices = [there(modules, vector, dtype) for vector in own]
                out = devices[0].buffer if in_place else modules.cupy.empty(count, DTYPES[dtype])
                copy, text = modules.cupy.empty(count, DTYPES[dtype]), np.empty(count, DTYPES[dtype])
                collectives.allreduce_many([(devices, out, [copy, text])], dtype, Deadline(20.0), "sum", scale)
                for vector, device in list(zip(own, devices, strict=True))[in_place:]:
                    np.testing.assert_array_equal(device.buffer.memory, vector, err_msg="a source was changed")
                assert out.memory.tobytes() == copy.memory.tobytes() == text.tobytes()
                found.append(text)
            mixed, out = [there(modules, own[0], dtype), *on_host(own[1:], dtype)], np.empty(count, DTYPES[dtype])
            collectives.allreduce_many([(mixed, out, ())], dtype, Deadline(20.0), "mixed", scale)
            found.append(out)
        collectives.close()
        return found

    results, _ = run_with_nccl(size, rank_main)
    for number, (count, num_vectors, scale) in enumerate(cases):
        for i in range(3 * number, 3 * number + 3):
            assert len({result[i].tobytes() for result in results}) == 1
            assert_is_sum(results[0][i], all_vectors(size, num_vectors, count, dtype), dtype, scale)


@pytest.mark.parametrize("count", [1, 5, 1013])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16"])
def test_the_other_collectives(run_with_nccl: Any, dtype: str, count: int) -> None:
    """Host memory goes there and back; segments differ in length, and may be empty."""
    size = 3

    def rank_main(comm: MemoryComm, _: StandInModules) -> tuple[np.ndarray, ...]:
        collectives, deadline = Collectives(comm, "nccl"), Deadline(20.0)
        own = vectors(comm.rank, 2, count, dtype)
        start, stop = segment_bounds(count, size)[comm.rank]
        part, whole = np.empty(stop - start, DTYPES[dtype]), np.empty(count, DTYPES[dtype])
        collectives.reduce_scatter(on_host(own, dtype), part, dtype, deadline, "scatter")
        collectives.allgather(part, whole, deadline, "gather")
        text = own[0].copy()
        collectives.broadcast(text, size - 1, deadline, "cast")
        return whole, text

    results, _ = run_with_nccl(size, rank_main)
    for whole, text in results:
        assert_is_sum(whole, all_vectors(size, 2, count, dtype), dtype)
        np.testing.assert_array_equal(text, vectors(size - 1, 2, count, dtype)[0])


def test_sums_of_a_list_are_one_group(run_with_nccl: Any) -> None:
    counts = [3, 0, 1013, 1]

    def rank_main(comm: MemoryComm, modules: StandInModules) -> list[StandInArray]:
        collectives = Collectives(comm, "nccl")
        ends: list[int] = []
        end = modules.nccl.groupEnd
        modules.nccl.groupEnd = lambda: (ends.append(1), end())
        devices = [there(modules, vectors(comm.rank, 1, count, "float32")[0], "float32") for count in counts]
        tensors = [([vector], vector.buffer, ()) for vector in devices]
        collectives.allreduce_many(tensors, "float32", Deadline(20.0), "sum")
        assert len(ends) == 1
        return [vector.buffer for vector in devices]

    results, _ = run_with_nccl(2, rank_main)
    for i, count in enumerate(counts):
        assert_is_sum(results[0][i].memory, all_vectors(2, 1, count, "float32"), "float32")


@pytest.mark.parametrize(
    ("buses", "text"),
    [
        (["a", "b", "a"], r"push of key 1: algorithm 'nccl': MPI ranks 0 and 2 share a GPU"),
        (["a", None, "c"], r"push of key 1: algorithm 'nccl': no GPU, or no NCCL, on MPI rank 1"),
        ([None, None, None], r"no GPU, or no NCCL, on MPI rank 0, 1, 2 \(ImportError: No module named 'cupy'\)"),
    ],
)
def test_where_it_cannot_be_used_every_rank_hears_why(run_with_nccl: Any, buses: list[str | None], text: str) -> None:
    def rank_main(comm: MemoryComm, _: Any) -> None:
        collectives, own = Collectives(comm, "nccl"), vectors(comm.rank, 1, 100, "float32")
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=text):
                collectives.allreduce(
                    on_host(own, "float32"), np.empty(100, "f4"), "float32", Deadline(20.0), "push of key 1"
                )
        assert not collectives.broken

    run_with_nccl(3, rank_main, buses)


def test_every_communicator_has_a_stream_of_its_own(run_with_nccl: Any) -> None:
    """Else what waits for other ranks on one would hold up what they wait for on another."""

    def rank_main(comm: MemoryComm, modules: StandInModules) -> int:
        before = modules.machine.counts["streams"]
        for each in (comm.duplicate(), comm.duplicate()):
            made = Collectives(each, "nccl")
            made.broadcast(np.zeros(5, "f4"), 0, Deadline(20.0), "cast")
            made.close()
        return modules.machine.counts["streams"] - before

    # Both have the thread's stand-in for NCCL, whose communicators end what they have queued together.
    assert run_with_nccl(2, rank_main)[0] == [2, 2]


def test_an_error_of_nccl_ends_what_waits_on_devices(run_with_nccl: Any) -> None:
    def rank_main(comm: MemoryComm, modules: StandInModules) -> None:
        collectives, own = Collectives(comm, "nccl"), vectors(comm.rank, 1, 100, "float32")
        out = np.empty(100, "f4")
        collectives.allreduce(on_host(own, "float32"), out, "float32", Deadline(20.0), "first")

        def fail() -> None:
            raise StandInNcclError("NCCL_ERROR_REMOTE_ERROR")

        modules.nccl.groupEnd = fail
        with pytest.raises(
            PeerLostError, match=f"second: nccl allreduce on MPI rank {comm.rank} of 2: NCCL_ERROR_REMOTE"
        ):
            collectives.allreduce(on_host(own, "float32"), out, "float32", Deadline(20.0), "second")
        assert collectives.broken
        collectives.close()

    _, wire = run_with_nccl(2, rank_main)
    assert wire.aborted == 2
