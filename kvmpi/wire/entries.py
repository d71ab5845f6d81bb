"""What is written in the log of a part: every change of its state, for the servers that follow in its chain.

Replaying a part's entries in order gives the same state, bit by bit. Arrays travel as payload frames.
"""

from __future__ import annotations

import msgspec

Key = int | str
Number = bool | int | float | list[float]


class _Entry(msgspec.Struct, array_like=True):
    pass


class Begin(_Entry, tag="begin"):
    """Forget everything: the state of the part follows."""


class Opened(_Entry, tag="opened"):
    """A store exists."""

    mode: str
    num_clients: int


class Closed(_Entry, tag="closed"):
    """All clients have left a store, and none is waited for: it is forgotten. ``over``: nobody is let in any more."""

    over: bool


class Joined(_Entry, tag="joined"):
    """A process takes a client's part in the store. ``entered_after``: where one that was left out is back, the overall
    step after which rounds have it; else -1."""

    client: int
    incarnation: int
    entered_after: int = -1


class Gone(_Entry, tag="gone"):
    """The processes of a client up to ``incarnation`` will push no more."""

    client: int
    text: str
    incarnation: int


class Returned(_Entry, tag="returned"):
    """A client that was gone is back: rounds wait for it, until it has said which is its first."""

    client: int


class Entered(_Entry, tag="entered"):
    """A client that is back takes part in the rounds of overall steps after ``step``."""

    client: int
    step: int


class Created(_Entry, tag="created"):
    """A chunk of a key has its first value: one payload."""

    key: Key
    chunk: int
    num_chunks: int
    count: int
    shape: list[int]
    dtype: str


class Finished(_Entry, tag="finished"):
    """A client has no more to push: rounds do not wait for it."""

    client: int


class Round(_Entry, tag="round"):
    """A synchronous round of a chunk is over: one payload, the sum of the pushes of ``clients``, or of all (none).

    ``rows``: the sum has so many rows only: two payloads, their numbers and themselves; -1: it is of the whole chunk.
    ``at``: the overall steps of the pushes, by client; one, if they are the same; none, if not all have said it.
    ``done``: up to which overall step all that these clients have pushed is done. ``earliest`` and ``latest``: the
    steps of the program that the round may belong to; 0, if not all have said it.
    """

    key: Key
    chunk: int
    clients: list[int] | None = None
    rows: int = -1
    at: list[int] = []
    done: int = 0
    earliest: int = 0
    latest: int = 0


class Skipped(_Entry, tag="skipped"):
    """A synchronous round of a chunk is over without a push: nobody is left who was to be in it. Nothing has changed.

    ``at``, ``done``: as in Round.
    """

    key: Key
    chunk: int
    at: int = 0
    done: int = 0


class Partial(_Entry, tag="partial"):
    """The open round of a chunk has pushes of ``clients``, all before ``cursor``: their sum, as in Round; as are the
    others."""

    key: Key
    chunk: int
    cursor: int
    clients: list[int]
    rows: int = -1
    at: list[int] = []
    done: int = 0
    earliest: int = 0
    latest: int = 0


class Single(_Entry, tag="single"):
    """An asynchronous push has been applied: its payloads, as they came; ``rows`` and what follows as in Push."""

    key: Key
    chunk: int
    client: int
    step: int
    codec: str
    rows: int = -1
    fused: bool = False
    at: int = 0
    done: int = 0
    seen: int = 0


class Answered(_Entry, tag="answered"):
    """A client has the value that its last asynchronous push of a chunk has met: it need not be kept any more."""

    key: Key
    chunk: int
    client: int


class RuleCall(_Entry, tag="rulecall"):
    """The choice number ``ordinal`` of the rule, by a client at ``step`` of its program.

    ``ahead``: chunks of which it has pushed more than is over.
    """

    client: int
    ordinal: int
    rule: str
    hyperparams: dict[str, Number]
    ahead: list[tuple[Key, int, int]]
    step: int = 0


class HyperCall(_Entry, tag="hypercall"):
    """The change number ``ordinal`` of hyperparameters; all else as in RuleCall."""

    client: int
    ordinal: int
    hyperparams: dict[str, Number]
    ahead: list[tuple[Key, int, int]]
    step: int = 0


class Restored(_Entry, tag="restored"):
    """A client has put a chunk's state back: one payload for each name."""

    key: Key
    chunk: int
    client: int
    request: int
    updates: int
    names: list[str]


class RuleInForce(_Entry, tag="inforce"):
    """A rule and the first round that it is for; ``rule`` is empty for none."""

    from_round: int
    generation: int
    rule: str
    hyperparams: dict[str, Number]


class CallsState(_Entry, tag="calls"):
    """How far a store's calls of one kind are: how many were made, the last of them, each with its step in place of a
    round, and how many by whom."""

    made: int
    open: list[tuple[int, RuleInForce]]
    seen: dict[int, int]


class StoreState(_Entry, tag="store"):
    """What a store remembers beside its chunks. ``resumed``: its rule is from a snapshot, and not yet chosen again."""

    current: RuleInForce
    calls: list[CallsState]
    resumed: bool = False


class Saved(_Entry, tag="saved"):
    """These keys were in the snapshot that a store was resumed from, in whatever part: their chunks come from there
    alone."""

    keys: list[Key]


class SlotState(_Entry, tag="slot"):
    """All of a chunk: one payload for each name; "met" is the old value that the last round answered with, "touched"
    the numbers of the rows that it has changed, if these are not all. ``marks``: by client what it knows to be done,
    and the overall steps of its last pushes; client -1: of the last rounds, whoever was in them. ``latest``: of the
    last round. ``entering``: clients that are back and not in a round yet, and the overall step after which they
    are. ``met``: clients whose last push was answered with the value that it met, and the version of each: one more
    payload for each, after those with names. ``bases``: clients that have begun anew, and after how many pushes they
    were taken to be then. ``gathered``: how many pushes wait to be an update together: "gathered" is their sum, and
    "gathered_rows" are the numbers of its rows, if these are not all. ``pushes``: where they do, how many have come
    in this job."""

    key: Key
    chunk: int
    num_chunks: int
    count: int
    shape: list[int]
    dtype: str
    rounds: int
    updates: int
    generation: int
    steps: dict[int, int]
    restored: tuple[int, int, int] | None
    rules: list[RuleInForce]
    failed: str | None
    names: list[str]
    marks: dict[int, tuple[int, list[int]]] = {}
    latest: int = 0
    entering: dict[int, int] = {}
    met: dict[int, int] = {}
    bases: dict[int, int] = {}
    gathered: int = 0
    pushes: int = 0


Entry = (
    Begin | Opened | Closed | Joined | Gone | Returned | Entered | Finished | Created | Round | Skipped | Partial
    | Single | Answered | RuleCall | HyperCall | Restored | StoreState | Saved | SlotState
)  # fmt: skip
