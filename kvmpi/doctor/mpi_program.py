"""What the doctor has MPI run: ``version`` asks the library without starting it, ``rank`` is a rank of a trial job."""

from __future__ import annotations

import json
import os
import sys

import mpi4py

from kvmpi.machine import bound_cores

mpi4py.rc.initialize = False


def _library_path() -> str:
    """The libmpi that was loaded."""
    try:
        with open("/proc/self/maps") as file:
            paths = {line.split(maxsplit=5)[-1].strip() for line in file if "libmpi" in line}
    except OSError:
        return ""
    named = sorted(path for path in paths if os.path.basename(path).startswith(("libmpi.", "libmpich.")))
    return named[0] if named else ""


def main(kind: str) -> int:
    """See the top of this file. Prints one line of JSON, in one write, so that ranks can share a pipe."""
    from mpi4py import MPI

    found: dict[str, object] = {"library": MPI.Get_library_version().strip("\0 \n").splitlines()[0]}
    if kind == "rank":
        asked = MPI.Init_thread(MPI.THREAD_MULTIPLE)
        levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
        world = MPI.COMM_WORLD
        found |= {
            "rank": world.Get_rank(), "size": world.Get_size(), "thread_level": levels[asked],
            "sum": world.allreduce(world.Get_rank() + 1),
            "cores": bound_cores(),
        }  # fmt: skip
        MPI.Finalize()
    os.write(1, (json.dumps({**found, "path": _library_path()}) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
