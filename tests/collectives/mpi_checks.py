"""Run under mpirun by ``test_mpi.py``: checks of the collectives over a real MPI. Any failure ends the whole job."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np
from collective_helpers import FLOATS, all_vectors, allreduce, assert_is_sum, on_host, vectors
from raising import raises

from kvmpi.arrays import DTYPES
from kvmpi.collectives import Call, Collectives, Entry, library, mpi_comm
from kvmpi.collectives.naive import naive_allreduce, naive_broadcast
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, OrderMismatchError, PeerLostError

mpi4py.rc.thread_level = sys.argv[2]
from mpi4py import MPI  # noqa: E402 - after the thread level

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
TIMEOUT_S = 60.0

digest = hashlib.sha256()  # of all results: must be equal on all ranks


def sums() -> None:
    comm = mpi_comm.world()
    # Many ranks on few cores are slow, and the sizes of the world that matter here are small and odd ones. MPI takes a
    # dtype as it does whatever the size.
    dtypes = DTYPES if SIZE == 2 else ("float32", "bfloat16", "int8")
    shapes = [(0, 1, False), (1, 1, True), (5, 2, False), (4097, 1, False), (999, 3, True)]  # count, vectors, in place
    for algorithm in ("ring", "multi_ring", "shared", "hierarchical", "mpi", "naive", "auto"):
        for dtype in dtypes:
            for count, num_vectors, in_place in shapes if SIZE <= 3 else shapes[2:]:
                own = vectors(RANK, num_vectors, count, dtype)
                out = allreduce(comm, algorithm, own, dtype, in_place=in_place, chunk_bytes=512, timeout_s=TIMEOUT_S)
                assert_is_sum(out, all_vectors(SIZE, num_vectors, count, dtype), dtype)
                digest.update(out.tobytes())
    comm.free()


def scatters_and_gathers() -> None:
    comm = mpi_comm.world()
    algorithms = ("ring", "multi_ring", "shared", "mpi", "naive", "auto")
    for dtype in ("float32", "bfloat16", "int8"):
        # Many chunks are those of few elements; many elements lie where ranks read them from each other.
        shapes = [(1, 1, False, 512), (4097, 2, True, 512), (999, 1, False, 512), (300_001, 1, True, 64 << 10)]
        for count, num_vectors, in_place, chunk_bytes in shapes if dtype == "float32" else shapes[1:3]:
            start, stop = segment_bounds(count, SIZE)[RANK]
            every = all_vectors(SIZE, num_vectors, count, dtype)
            for algorithm in algorithms:
                collectives = Collectives(comm, algorithm, chunk_bytes)
                own = [vector.copy() for vector in every[RANK * num_vectors : (RANK + 1) * num_vectors]]
                part = own[0][start:stop] if in_place else np.empty(stop - start, DTYPES[dtype])
                collectives.reduce_scatter(on_host(own, dtype), part, dtype, Deadline(TIMEOUT_S), "scatter")
                whole = np.zeros(count, DTYPES[dtype])
                collectives.allgather(part, whole, Deadline(TIMEOUT_S), "gather")
                assert_is_sum(whole, every, dtype)
                digest.update(whole.tobytes())
    comm.free()


def large_sums() -> None:
    """16 MB (4 MB on many ranks): real chunks, a full window, messages that MPI sends when they are received."""
    comm = mpi_comm.world()
    count = 4_000_003 if SIZE == 2 else 2_000_003 if SIZE == 3 else 1_000_003
    index = np.arange(count, dtype="f4") % 1000
    expected = SIZE * index + sum(range(SIZE))  # exact
    for algorithm in ("ring", "multi_ring", "shared", "mpi", "naive"):
        out = np.empty(count, "f4")
        own = on_host([index + RANK], "float32")
        Collectives(comm, algorithm).allreduce(own, out, "float32", Deadline(TIMEOUT_S), "large")
        np.testing.assert_array_equal(out, expected, err_msg=algorithm)
    out = index + RANK
    Collectives(comm).broadcast(out, SIZE - 1, Deadline(TIMEOUT_S), "large")
    np.testing.assert_array_equal(out, index + SIZE - 1)
    comm.free()


def mapped_sums() -> None:
    """Arrays that other processes have mapped, made anew between the sums, beside arrays that they have not."""
    comm = mpi_comm.world()
    collectives = Collectives(comm, "shared")
    for turn in range(12):
        count = [300_000, 17, 1_000_003][turn % 3]
        made = [collectives.empty(count, "float32"), np.empty(count, "f4"), collectives.empty(count, "float32")]
        mine = made if (RANK + turn) % 2 else made[::-1]
        index = np.arange(count) % 1000
        for i, vector in enumerate(mine):
            vector[:] = index + RANK + i + turn
        out = mine[0] if turn % 2 else collectives.empty(count, "float32")
        collectives.allreduce(on_host(mine, "float32"), out, "float32", Deadline(TIMEOUT_S), "mapped")
        exact = 3 * SIZE * (index + turn) + 3 * sum(range(SIZE)) + 3 * SIZE
        np.testing.assert_array_equal(out, exact)
        out[:] = RANK
        collectives.broadcast(out, turn % SIZE, Deadline(TIMEOUT_S), "mapped")
        assert (out == turn % SIZE).all()
    comm.free()


def pieces() -> None:
    comm = mpi_comm.world()
    buffer = np.arange(1000, dtype="i8") + RANK
    naive_allreduce(comm, buffer, Deadline(TIMEOUT_S), "pieces", max_piece_count=300)
    np.testing.assert_array_equal(buffer, SIZE * np.arange(1000) + sum(range(SIZE)))
    buffer += RANK
    naive_broadcast(comm, buffer, 1, Deadline(TIMEOUT_S), "pieces", max_piece_count=300)
    np.testing.assert_array_equal(buffer, SIZE * np.arange(1000) + sum(range(SIZE)) + 1)
    comm.free()


def more_than_mpi_can_count() -> None:
    """As if its integers ended at 2000: whatever it is asked for must be less."""
    comm, most, piece = mpi_comm.world(), library.MAX_COUNT, library.MAX_PIECE_COUNT
    real = {name: getattr(comm, name) for name in ("iallgather", "ireduce_scatter", "iallreduce", "ibroadcast")}

    def within(name: str) -> Callable[..., Any]:
        def call(buffer: Any, *arguments: Any) -> Any:
            assert (buffer.nbytes if name in ("iallgather", "ibroadcast") else buffer.size) <= 2000, name
            return real[name](buffer, *arguments)

        return call

    for name in real:
        setattr(comm, name, within(name))
    library.MAX_COUNT, library.MAX_PIECE_COUNT = 2000, 300
    try:
        collectives = Collectives(comm, "mpi", 512)
        for dtype in ("float32", "bfloat16", "int8"):
            for count in (3, 500, 4097):
                own = vectors(RANK, 2, count, dtype)
                start, stop = segment_bounds(count, SIZE)[RANK]
                part, whole = np.empty(stop - start, DTYPES[dtype]), np.zeros(count, DTYPES[dtype])
                collectives.reduce_scatter(on_host(own, dtype), part, dtype, Deadline(TIMEOUT_S), "scatter")
                collectives.allgather(part, whole, Deadline(TIMEOUT_S), "gather")
                assert_is_sum(whole, all_vectors(SIZE, 2, count, dtype), dtype)
    finally:
        library.MAX_COUNT, library.MAX_PIECE_COUNT = most, piece
    comm.free()


def broadcasts() -> None:
    comm = mpi_comm.world()
    collectives = Collectives(comm, "ring", 512)
    shared, library = Collectives(comm, "shared"), Collectives(comm, "mpi")
    for root in range(SIZE):
        for count in (0, 1, 4097):
            for how in (collectives, shared, library):
                buffer = vectors(RANK, 1, count, "float32")[0]
                how.broadcast(buffer, root, Deadline(TIMEOUT_S), "cast")
                np.testing.assert_array_equal(buffer, vectors(root, 1, count, "float32")[0])
        text = bytes([root]) * 100_000
        assert collectives.tell(text if root == RANK else b"", root, Deadline(TIMEOUT_S), "tell") == text
        assert collectives.tell(b"", root, Deadline(TIMEOUT_S), "tell") == b""
    comm.free()


def disagreements() -> None:
    comm = mpi_comm.world()
    collectives = Collectives(comm, "ring", 512)
    entries = tuple(Entry(f"layer{i}", (i,), "float32") for i in range(3000))
    for _ in range(3):
        collectives.agree(Call("push", entries), Deadline(TIMEOUT_S))
    mine = entries if RANK else (*entries[:2000], Entry("other", (), "float32"), *entries[2001:])
    with raises(OrderMismatchError, match="position 2000") as caught:
        collectives.agree(Call("push", mine), Deadline(TIMEOUT_S))
    digest.update(str(caught.value).encode())
    failure = PeerLostError("on purpose") if RANK == 1 else None
    with raises(PeerLostError, match="on purpose"):
        collectives.agree(Call("push", entries, failure), Deadline(TIMEOUT_S))
    collectives.agree(Call("pull", entries), Deadline(TIMEOUT_S))
    out = vectors(RANK, 1, 999, "float32")[0]
    collectives.allreduce(on_host([out], "float32"), out, "float32", Deadline(TIMEOUT_S), "after")
    assert_is_sum(out, all_vectors(SIZE, 1, 999, "float32"), "float32")
    comm.free()


def two_threads() -> None:
    """As the reduce and broadcast lanes do: two communicators, two threads, no order between them."""
    comms = [mpi_comm.world(), mpi_comm.world()]
    errors: list[BaseException] = []

    def reduce_lane() -> None:
        collectives = Collectives(comms[0], "ring", 4096)
        for i in range(20):
            count = [10, 30_000, 3000][i % 3]
            out = np.empty(count, "i8")
            own = on_host([np.arange(count) + 100 * RANK + i], "int64")
            collectives.allreduce(own, out, "int64", Deadline(TIMEOUT_S), "reduce")
            np.testing.assert_array_equal(out, SIZE * (np.arange(count) + i) + 100 * sum(range(SIZE)))

    def broadcast_lane() -> None:
        collectives = Collectives(comms[1], "ring", 4096)
        for i in range(20):
            buffer = np.arange(20_000) + 7 * RANK + i
            collectives.tell(b"", 0, Deadline(TIMEOUT_S), "tell")
            collectives.broadcast(buffer, i % SIZE, Deadline(TIMEOUT_S), "cast")
            np.testing.assert_array_equal(buffer, np.arange(20_000) + 7 * (i % SIZE) + i)

    def guarded(lane: Callable[[], None]) -> None:
        try:
            lane()
        except BaseException as error:
            errors.append(error)

    lanes = [reduce_lane, broadcast_lane] if RANK % 2 else [broadcast_lane, reduce_lane]
    threads = [threading.Thread(target=guarded, args=(lane,)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for comm in comms:
        comm.free()


def silence(folder: Path) -> None:
    """The last rank is stopped by SIGSTOP: all others say so in time. It is woken when they have."""
    agreeing, ring, shared = mpi_comm.world(), mpi_comm.world(), mpi_comm.world()
    timeout_s, silent = 1.0, SIZE - 1
    large = np.ones(3_000_000, "f4")
    of_one_host = Collectives(shared, "shared")
    of_one_host.allreduce(on_host([large], "float32"), large, "float32", Deadline(TIMEOUT_S), "first")
    (folder / f"pid{RANK}").write_text(str(os.getpid()))
    WORLD.Barrier()
    if silent == RANK:
        os.kill(os.getpid(), signal.SIGSTOP)
        return

    def agree(collectives: Collectives) -> None:
        collectives.agree(Call("barrier"), Deadline(timeout_s))

    def allreduce_large(collectives: Collectives) -> None:
        collectives.allreduce(on_host([large], "float32"), large, "float32", Deadline(timeout_s), "push of key 1")

    for collectives, act in (
        (Collectives(agreeing, "ring"), agree), (Collectives(ring, "ring"), allreduce_large),
        (of_one_host, allreduce_large),
    ):  # fmt: skip
        for expected, at_most_s in ((KVTimeoutError, 2 * timeout_s), (PeerLostError, timeout_s / 2)):
            # In the ring a neighbour is named, which may be waiting itself.
            named = "" if collectives._comm is ring and SIZE > 2 else silent
            start_s = time.monotonic()
            with raises(expected, match=f"MPI rank {named}"):
                act(collectives)
            assert time.monotonic() - start_s < at_most_s, f"{act.__name__}: {expected.__name__} came too late"
    # What comes when the last rank wakes up goes into memory that is still there.
    assert mpi_comm._under_way
    (folder / f"done{RANK}").touch()
    if RANK == 0:
        all_there(folder, "done", silent)
        os.kill(int((folder / f"pid{silent}").read_text()), signal.SIGCONT)


def absent_duplicate(folder: Path) -> None:
    """A rank that does not create its store is a timeout on the others, not a hang."""
    comm = mpi_comm.world(TIMEOUT_S)
    if RANK < SIZE - 1:
        comm._timeout_s = 0.5
    WORLD.Barrier()
    if RANK == SIZE - 1:
        all_there(folder, "alone", SIZE - 1)
        comm.duplicate()
    else:
        with raises(KVTimeoutError, match=f"communicator on MPI rank {RANK} of {SIZE}.*network between"):
            comm.duplicate()
        (folder / f"alone{RANK}").touch()


def all_there(folder: Path, name: str, num_ranks: int) -> None:
    """Return when the first ``num_ranks`` ranks have left a file of this name: MPI, which is tested, cannot tell."""
    deadline = Deadline(TIMEOUT_S)
    while not all((folder / f"{name}{rank}").exists() for rank in range(num_ranks)):
        assert not deadline.expired(), f"other ranks did not get their errors: {name}"
        time.sleep(0.02)


def main(folder: Path) -> None:
    checks = [
        sums,
        scatters_and_gathers,
        mapped_sums,
        pieces,
        more_than_mpi_can_count,
        broadcasts,
        disagreements,
        two_threads,
        large_sums,
    ]
    for check in checks:
        check()
        assert not mpi_comm._under_way, f"{check.__name__} left requests behind"
    if SIZE <= 3:  # between more ranks, test_failures.py has it
        silence(folder)
    absent_duplicate(folder)
    found = WORLD.gather(digest.hexdigest())
    if RANK == 0:
        assert len(set(found)) == 1, "ranks got different bits"
        assert set(FLOATS) < set(DTYPES)
        library = MPI.Get_library_version().split()[0]
        level = {MPI.THREAD_SERIALIZED: "serialized", MPI.THREAD_MULTIPLE: "multiple"}[MPI.Query_thread()]
        print(f"all checks passed on {SIZE} ranks of {library}, threads {level}: {found[0]}", flush=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        # One write, so that the ranks' texts do not mix.
        sys.stderr.write(f"rank {RANK} of {SIZE}:\n{traceback.format_exc()}")
        sys.stderr.flush()
        WORLD.Abort(1)
