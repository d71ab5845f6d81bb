"""What the ranks of a benchmark have to know, as plain values that travel as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

#: In each the rows of a case take turns, so that a disturbance of the machine hits all of them.
ROUNDS = 5

OPS = ("allreduce", "reduce_scatter", "allgather", "broadcast")


@dataclass(frozen=True)
class Case:
    """What a block of rows measures: one array, or the gradients of a preset."""

    counts: tuple[int, ...]
    preset: str = ""


@dataclass(frozen=True)
class RowName:
    """A row as users name it: ``shared:in:empty`` is the kind ``shared`` with two modifiers."""

    label: str  # as printed
    kind: str  # see ``rows.KINDS``
    how: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> RowName:
        kind, *how = text.strip().split(":")
        return cls(text.strip(), kind, tuple(how))


@dataclass(frozen=True)
class Plan:
    """The measurements of one MPI job. ``chunk_bytes`` and ``num_rings`` of 0 are kvmpi's own settings."""

    op: str
    cases: tuple[Case, ...]
    rows: tuple[RowName, ...]
    dtype: str = "float32"
    num_vectors: int = 1
    num_rings: int = 0
    chunk_bytes: int = 0
    seconds: float = 0.5
    num_ranks: int = 0  # 0: as many as there are
    measure_memory: bool = True

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        fields: dict[str, Any] = json.loads(text)
        fields["cases"] = tuple(Case(tuple(case["counts"]), case["preset"]) for case in fields["cases"])
        fields["rows"] = tuple(RowName(row["label"], row["kind"], tuple(row["how"])) for row in fields["rows"])
        return cls(**fields)
