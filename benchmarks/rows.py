"""Which rows a table can have: their names, what they can do, and which are there unless the user chooses."""

from __future__ import annotations

from collections.abc import Sequence

from kvmpi.benchmarks.contestants import Agreement, Contestant, OurAlgorithm, Store
from kvmpi.benchmarks.peers import Baidu, Gloo, LibraryMpi
from kvmpi.benchmarks.plan import RowName
from kvmpi.collectives import ALGORITHMS

#: The MPI library's own call for an operation.
MPI_CALLS = {
    "allreduce": "MPI_Allreduce", "reduce_scatter": "MPI_Reduce_scatter",
    "allgather": "MPI_Allgatherv", "broadcast": "MPI_Bcast",
}  # fmt: skip
#: The same call of another library, in a job of its own.
MPICH = "MPICH"
#: A modifier for rows of the MPI library: in a job whose ranks do not yield when they wait.
SPIN = "spin"

KINDS: dict[str, type[Contestant]] = {
    **dict.fromkeys(ALGORITHMS, OurAlgorithm), "store": Store, "agree": Agreement,
    **dict.fromkeys(MPI_CALLS.values(), LibraryMpi), MPICH: LibraryMpi, "gloo": Gloo, "baidu": Baidu,
}  # fmt: skip

#: The oracle: it sums in float64 on one rank, and is never chosen.
_SLOW = ("naive",)


def known(op: str) -> list[str]:
    """The kinds of rows that ``op`` can have."""
    calls = set(MPI_CALLS.values()) - {MPI_CALLS[op]}
    return [kind for kind, contestant in KINDS.items() if op in contestant.ops and kind not in calls]


def candidates(how: Sequence[str] = ()) -> list[RowName]:
    """The algorithms that ``auto`` can choose from."""
    names = [name for name in ALGORITHMS if name not in ("auto", *_SLOW)]
    return [RowName.parse(":".join([name, *how])) for name in names]


def default(op: str, *, preset: bool, mpich: bool) -> list[RowName]:
    """Everything that is there to compare; with a preset also what helps with many arrays."""
    names = ["auto", *(row.label for row in candidates())]
    if op == "allreduce":
        names += ["store", "store:empty"] if preset else ["store"]
    names += [MPI_CALLS[op], "gloo"]
    if op == "allreduce":
        names += ["gloo:bucket", "baidu"] if preset else ["baidu"]
    return [RowName.parse(name) for name in [*names, *([MPICH] if mpich else [])]]


def parse(text: str, op: str) -> list[RowName]:
    """Rows that the user asked for, ``auto`` with what it can choose from if it stands alone.

    Raises:
        ValueError: no such row, or it has no such modifier.
    """
    rows = [RowName.parse(word) for word in text.split(",") if word.strip()]
    if not rows:
        raise ValueError(f"no rows given; known: {', '.join(known(op))}")
    for row in rows:
        if row.kind not in known(op):
            raise ValueError(f"unknown row {row.kind!r}; known for {op}: {', '.join(known(op))}")
        allowed = modifiers(row.kind, op)
        if bad := [word for word in row.how if word not in allowed]:
            raise ValueError(f"{row.label}: {row.kind} has no {bad[0]!r}; known: {', '.join(allowed) or 'none'}")
    if all(row.kind == "auto" for row in rows):
        rows = [each for row in rows for each in (row, *candidates(row.how))]
    return list(dict.fromkeys(rows))


def modifiers(kind: str, op: str) -> list[str]:
    """What may follow the name of a row."""
    makes_sense = {
        "in": op != "broadcast", "view": op in ("allreduce", "allgather"), "bucket": op == "allreduce",
        "gpu": op == "allreduce",
    }  # fmt: skip
    found = [word for word in KINDS[kind].modifiers if makes_sense.get(word, True)]
    return [*found, SPIN] if kind == MPI_CALLS[op] else found
