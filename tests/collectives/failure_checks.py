"""Run under mpirun by ``test_failures.py``: one rank is stopped or killed in the middle of a collective.

    failure_checks.py FOLDER SIGNAL CASE...

The last rank sends itself SIGNAL at the moment that a case names; all others must raise in time, name the key, what
they waited for and the rank. After SIGSTOP the rank is woken again for the next case.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from collective_helpers import on_host
from mpi4py import MPI
from raising import raises

from kvmpi.collectives import Collectives, mpi_comm, native
from kvmpi.collectives.host_group import HostGroup
from kvmpi.collectives.links import Links
from kvmpi.collectives.mpi_comm import MpiComm
from kvmpi.collectives.native import NativeRings
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.collectives.shared import Shared
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, PeerLostError

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
SILENT = SIZE - 1
TIMEOUT_S = 1.0
#: Elements of float32 that ranks read where they lie, and chunks of which a ring of 4 has six to a segment.
LARGE, CHUNK_BYTES = 1_200_000, 204_800
native._MOST_MS = 0  # each advance is one look

#: In which collective, by the first word of a case's name; else in an allreduce.
OPS = {"scatter": "reduce_scatter", "gather": "allgather", "cast": "broadcast"}

#: Name -> (algorithm, elements, object and method whose n-th call in the failing collective the signal precedes, n).
CASES: dict[str, tuple[str, int, Any, str, int]] = {
    "slots-begin": ("shared", 1000, HostGroup, "begin", 1),
    "slots-post": ("shared", 1000, HostGroup, "post", 1),
    "staged-post": ("shared", 100_000, HostGroup, "post", 1),
    "staged-sum": ("shared", 100_000, HostGroup, "fetch", 1),
    "staged-deliver": ("shared", 100_000, HostGroup, "deliver", 1),
    "attached-post": ("shared", LARGE, HostGroup, "post", 1),
    "attached-sum": ("shared", LARGE, HostGroup, "fetch", 2),
    "attached-deliver": ("shared", LARGE, HostGroup, "deliver", 2),
    "attached-finish": ("shared", LARGE, HostGroup, "finish", 1),
    "ring-start": ("ring", LARGE, MpiComm, "isend", 1),
    "ring-reduce": ("ring", LARGE, MpiComm, "isend", 3),
    "ring-gather": ("ring", LARGE, MpiComm, "isend", 14),
    "multi_ring": ("multi_ring", LARGE, MpiComm, "isend", 9),
    "hierarchical-post": ("hierarchical", LARGE, HostGroup, "post", 1),
    "hierarchical-ring": ("hierarchical", LARGE, MpiComm, "isend", 3),
    "hierarchical-finish": ("hierarchical", LARGE, HostGroup, "finish", 1),
    "linked-start": ("ring", LARGE, Links, "isend", 1),
    "linked-reduce": ("ring", LARGE, Links, "isend", 3),
    "linked-multi_ring": ("multi_ring", LARGE, Links, "irecv", 9),
    "native-slots": ("shared", 1000, Shared, "sum_one", 1),
    "native-start": ("ring", LARGE, NativeRings, "advance", 1),
    "native-reduce": ("ring", LARGE, NativeRings, "advance", 4),
    "native-multi_ring": ("multi_ring", LARGE, NativeRings, "advance", 3),
    "native-hierarchical": ("hierarchical", LARGE, NativeRings, "advance", 2),
    "linked-hierarchical": ("hierarchical", LARGE, Links, "isend", 3),
    "naive": ("naive", 100_000, MpiComm, "isend", 1),
    "mpi": ("mpi", 100_000, MpiComm, "iallreduce", 1),
    "scatter-slots": ("shared", 1000, HostGroup, "post", 1),
    "scatter-attached": ("shared", LARGE, HostGroup, "fetch", 2),
    "scatter-ring": ("ring", LARGE, MpiComm, "irecv", 2),
    "scatter-hierarchical": ("hierarchical", LARGE, MpiComm, "irecv", 2),
    "scatter-native": ("hierarchical", LARGE, NativeRings, "advance", 1),
    "scatter-mpi": ("mpi", 100_000, MpiComm, "ireduce_scatter", 1),
    "gather-slots": ("shared", 1000, HostGroup, "post", 1),
    "gather-attached": ("shared", LARGE, HostGroup, "deliver", 2),
    "gather-multi_ring": ("multi_ring", LARGE, MpiComm, "irecv", 4),
    "gather-naive": ("naive", 100_000, MpiComm, "irecv", 1),
    "gather-native": ("ring", LARGE, NativeRings, "advance", 1),
    "gather-native-hierarchical": ("hierarchical", LARGE, NativeRings, "advance", 1),
    "gather-mpi": ("mpi", 100_000, MpiComm, "iallgather", 1),
    "cast-post": ("shared", LARGE, HostGroup, "post", 1),
    "cast-read": ("shared", LARGE, HostGroup, "read", 1),
    "cast-naive": ("naive", 100_000, MpiComm, "irecv", 1),
    "cast-hierarchical": ("hierarchical", LARGE, HostGroup, "post", 1),
    "cast-mpi": ("mpi", 100_000, MpiComm, "ibroadcast", 1),
}


def strike_before(owner: Any, method: str, number: int, number_of_signal: int, struck: Callable[[], None]) -> None:
    """Send this process a signal before the ``number``-th call of ``owner.method`` from now on."""
    original, calls = getattr(owner, method), 0

    def counting(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            struck()
            os.kill(os.getpid(), number_of_signal)
        return original(*arguments, **options)

    setattr(owner, method, counting)


def run(collectives: Collectives, op: str, buffer: np.ndarray, out: np.ndarray, seconds: float, label: str) -> None:
    """The collective, of which ``out`` gets the result; a broadcast is rank 0's."""
    deadline, own = Deadline(seconds), slice(*segment_bounds(out.size, SIZE)[RANK])
    if op == "allreduce":
        collectives.allreduce(on_host([buffer], "float32"), out, "float32", deadline, label)
    elif op == "reduce_scatter":
        collectives.reduce_scatter(on_host([buffer], "float32"), out[own], "float32", deadline, label)
    elif op == "allgather":
        collectives.allgather(buffer[own], out, deadline, label)
    else:
        out[:] = buffer
        collectives.broadcast(out, 0, deadline, label)


def main(folder: Path, number_of_signal: int, names: list[str]) -> None:
    (folder / f"pid{RANK}").write_text(str(os.getpid()))
    for name in names:
        algorithm, count, owner, method, number = CASES[name]
        op = OPS.get(name.partition("-")[0], "allreduce")
        comm = mpi_comm.world()
        if algorithm == "hierarchical":
            comm.host = f"host {RANK // 2}"
        elif owner in (Links, NativeRings):
            comm.host = f"host {RANK}"
        collectives = Collectives(
            comm, algorithm, CHUNK_BYTES, ring_transport="tcp" if owner in (Links, NativeRings) else "mpi",
            use_native="native" in name,
        )  # fmt: skip
        buffer, out = np.ones(count, "f4"), np.empty(count, "f4")
        run(collectives, op, buffer, out, 60.0, "first")
        assert op != "allreduce" or (out == SIZE).all()
        buffer[:] = RANK + 1
        (folder / f"mapped{RANK}").write_text("\n".join(shared_files()))
        WORLD.Barrier()
        if RANK == SILENT:
            original = getattr(owner, method)
            strike_before(
                owner, method, number, number_of_signal, lambda name=name: (folder / f"struck-{name}").touch()
            )
            try:  # asleep in the middle; when it wakes up, the others are gone
                # Longer than the root waits; else enough to get there on a busy machine.
                seconds = 20.0 if op == "broadcast" and owner is HostGroup else TIMEOUT_S
                (folder / f"began-{name}").write_text(str(time.monotonic()))
                run(collectives, op, buffer, out, seconds, f"push of key '{name}'")
                assert op != "broadcast" or (out == 1).all(), f"{name}: what the root's memory held afterwards"
            except (KVTimeoutError, PeerLostError):
                pass
            setattr(owner, method, original)
        elif algorithm == "hierarchical" and method == "finish" and RANK // 2 != SILENT // 2:
            # Another host's ranks have all that they need by then.
            run(collectives, op, buffer, out, TIMEOUT_S, f"push of key '{name}'")
            assert (out == sum(range(1, SIZE + 1))).all()
            (folder / f"done-{name}-{RANK}").touch()
        elif op == "broadcast" and waits_for_nobody(algorithm):
            run(collectives, op, buffer, out, TIMEOUT_S, f"push of key '{name}'")
            assert (out == 1).all()
            out[:] = -1
            (folder / f"done-{name}-{RANK}").touch()
        else:
            start_s = time.monotonic()
            with raises(KVTimeoutError, match=f"push of key '{name}': {algorithm} {op}") as caught:
                run(collectives, op, buffer, out, TIMEOUT_S, f"push of key '{name}'")
            elapsed_s, text = time.monotonic() - start_s, str(caught.value)
            assert elapsed_s < 2 * TIMEOUT_S, f"{name}: {elapsed_s:.1f} s"
            assert re.search(rf"MPI rank [0-9, to]*{SILENT}\b", text), f"{name}: {text}"
            assert op != "broadcast" or algorithm == "mpi" or "rank 1" not in text, f"{name} blames others: {text}"
            with raises(PeerLostError, match="earlier failure"):
                run(collectives, op, buffer, out, TIMEOUT_S, "after")
            out[:] = -1  # whoever handles the error may use the memory again
            (folder / f"done-{name}-{RANK}").touch()
        if RANK == 0:
            wait_for([folder / f"done-{name}-{rank}" for rank in range(SIZE - 1)])
            if owner is not HostGroup:  # it may have begun later than others: it is to wake up when its time is over
                began_s = float((folder / f"began-{name}").read_text())
                time.sleep(max(0.0, began_s + TIMEOUT_S + 0.05 - time.monotonic()))
            os.kill(int((folder / f"pid{SILENT}").read_text()), signal.SIGCONT)
        wait_for([folder / f"struck-{name}"])
        WORLD.Barrier()
        assert RANK == SILENT or algorithm != "shared" or (out == -1).all(), f"{name}: a rank wrote when it woke up"
    (folder / f"reported{RANK}").write_text(
        "\n".join(names)
    )  # what is printed may be lost when another rank ends the job
    WORLD.Barrier()
    mpi_comm.end_job(0)  # messages of the failed calls are still on their way


def waits_for_nobody(algorithm: str) -> bool:
    """Whether this rank gets what it is sent, whatever the silent one does."""
    root_or_leader = SILENT - 1 if algorithm == "hierarchical" else 0
    return root_or_leader != RANK


def shared_files() -> set[str]:
    """Files in /dev/shm that this process has mapped or open."""
    found = {
        line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line
    }
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            pass
    return {path for path in found if path.startswith("/dev/shm/")}


def wait_for(files: list[Path]) -> None:
    deadline = Deadline(30.0)
    while not all(file.exists() for file in files):
        assert not deadline.expired(), f"missing: {[file.name for file in files if not file.exists()]}"
        time.sleep(0.01)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
    except BaseException:
        struck = sorted(path.name for path in Path(sys.argv[1]).glob("struck-*"))
        sys.stderr.write(f"rank {RANK} of {SIZE}, after {struck}:\n{traceback.format_exc()}")
        sys.stderr.flush()
        WORLD.Abort(1)
