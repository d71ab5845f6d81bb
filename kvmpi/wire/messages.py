"""The messages of the protocol: what stands in their headers; payloads are raw little-endian frames behind them.

``request`` numbers a question within one connection; the answer carries the same number.
"""

from __future__ import annotations

import msgspec

from kvmpi.wire.entries import Entry, Key, Number, RuleInForce


class Message(msgspec.Struct, array_like=True):
    """Base of all messages. ``part``: which part of the values it is about; its chain of servers is in the View."""


class Hello(Message, tag="hello"):
    """A master opens its session at a server: which store, how it is synchronised, who it is."""

    request: int
    store: int
    mode: str
    client: int
    num_clients: int
    incarnation: int


class Init(Message, tag="init"):
    """Create one chunk of a key. Client 0 sends the value; the others wait until it is readable.

    A client that is told, by a ``Waiting``, that it waits for itself sends the request again with its own value.
    """

    request: int
    key: Key
    chunk: int
    num_chunks: int
    count: int
    shape: list[int]
    dtype: str
    part: int = 0


class Push(Message, tag="push"):
    """One client's contribution to one chunk at its ``step`` (1 for the first).

    ``fused`` also asks for the value, which is then the answer; with ``acknowledge`` the server also says when the
    contribution is in its round, even if the answer follows at once. ``rows``: the payloads are the numbers of so many
    rows of the chunk, and these rows; -1: all of it. ``quiet``: nothing is to be said before the answer. ``at``: the
    overall step, which is the most pushes of any key, this one included, and negative if this one has made it so many;
    ``done``: that up to which all of the client's pushes are answered. ``earliest`` and ``latest``: the steps of the
    program that the push may belong to, for snapshots. 0, where no client comes back and nobody takes any. ``seen``:
    the version of the chunk that the client has read last, since when as many updates have come as the push is old; 0
    in a synchronous store, and where it has read none.
    """

    request: int
    key: Key
    chunk: int
    step: int
    codec: str
    fused: bool
    acknowledge: bool = False
    part: int = 0
    rows: int = -1
    quiet: bool = False
    at: int = 0
    done: int = 0
    earliest: int = 0
    latest: int = 0
    seen: int = 0


class Pull(Message, tag="pull"):
    """Ask for one chunk, not before the round ``min_round`` is in it; or, where staleness is bounded, after as many
    pushes of the key, which decide how far others must have come.

    ``rows``: for so many rows of it, whose numbers are the payload; -1: for all.
    """

    request: int
    key: Key
    chunk: int
    min_round: int
    part: int = 0
    rows: int = -1


class Query(Message, tag="query"):
    """Ask again for the answer to a push that is in its round: the end of it, or whom the round waits for.

    Also what is said when a ``Value`` with ``old`` has come: then not ``fused``, and its answer means nothing.
    """

    request: int
    key: Key
    chunk: int
    step: int
    fused: bool = True
    part: int = 0


class SetRule(Message, tag="rule"):
    """The client's ``ordinal``-th choice of the update rule: a registered name and plain numbers.

    What is different for one key is called ``NAME@KEY``, with an int key in decimal. ``step``: that of the program.
    ``pushed``: this process goes on where another was, and has pushed since, so that calls of the steps before are none
    of its own. The ``Ack`` says in its ``version`` which of the calls of all clients it is.
    """

    request: int
    ordinal: int
    rule: str
    hyperparams: dict[str, Number]
    part: int = 0
    step: int = 0
    pushed: bool = False


class SetHyperparams(Message, tag="hyper"):
    """The client's ``ordinal``-th change of hyperparameters, in force for the rounds after its own last pushes.

    ``clock``: its training clock, which a message about clients that disagree names. All else as in ``SetRule``.
    """

    request: int
    ordinal: int
    hyperparams: dict[str, Number]
    clock: int
    part: int = 0
    step: int = 0
    pushed: bool = False


class GetState(Message, tag="getstate"):
    """Ask for one chunk with everything its rule remembers."""

    request: int
    key: Key
    chunk: int
    part: int = 0


class PutState(Message, tag="putstate"):
    """Replace one chunk's rule state, and its value if "value" is one of ``names``."""

    request: int
    key: Key
    chunk: int
    updates: int
    names: list[str]
    part: int = 0


class Finish(Message, tag="finish"):
    """The client will push nothing further, for good: rounds, and at the scheduler barriers, go on without it."""

    request: int
    part: int = 0


class Return(Message, tag="return"):
    """A client whose last process rounds go on without is back: from now on they wait for it.

    The `Ack` says in its `version` the largest overall step of a round of that part that does not.
    """

    request: int
    part: int = 0


class Enter(Message, tag="enter"):
    """A client that is back takes part in the rounds of overall steps after `step`; the others go on without it.

    At the scheduler: in the barriers after that step; also where others have waited for it, and it pushes after that
    step now. -1: in all, since there are no rounds.
    """

    request: int
    step: int
    part: int = 0


class Bye(Message, tag="bye"):
    """The client leaves the store, after the overall step ``done``. ``text``: with this error; it counts as lost."""

    request: int
    done: int = 0
    text: str = ""


class Ack(Message, tag="ack"):
    """The request is done, on every server of the chain; ``version`` counts the updates of the chunk so far.

    A push without replicas is done when it is in its round, with replicas when its round is over. Where pushes are
    gathered, ``version`` is that of the update in which it is, or will be. ``error`` and
    ``text``: a barrier is over, but what the clients have met for has failed on one of them, as in a ``Failure``.
    ``first``: of a barrier, the client that does what one has to do for all: 0, or if that is not there the lowest at
    it, or -1: the clients have met again since, and it is done. To a client that others have gone on without, and that
    makes their calls again, it is -1 or the client itself. ``yes``: any of the clients has said so.
    """

    request: int
    version: int
    error: str = ""
    text: str = ""
    first: int = 0
    yes: bool = False


class Found(Message, tag="found"):
    """The answer to the ``Init`` of a chunk that has pushes of a process of the client before this one, or, where it is
    back and others have gone on without it, of those.

    ``version`` counts the closed rounds that have one, ``at`` are the overall steps of the last pushes by their number
    in the chunk, ``done`` is the largest that has come with them. ``by_rows``: the last of these rounds was of rows.
    """

    request: int
    version: int
    at: dict[int, int]
    done: int
    by_rows: bool = False


class Accepted(Message, tag="accepted"):
    """The push is in its round; the end of the round is still to come. It must be sent again to another server."""

    request: int


class Moved(Message, tag="moved"):
    """This server does not answer for that part, or not to this client (any more, or yet).

    The next View tells whom to ask; to a server that is new there, say Hello first.
    """

    request: int


class Value(Message, tag="value"):
    """One chunk's value (a payload frame) after ``version`` updates.

    ``rows``: so many rows of it: those that a ``Pull`` has named, or, as the answer to a push of rows, the rows that
    its round has changed, with their numbers in a frame before them. -1: all of it, which is also an answer to such a
    push. ``old``: it is what an asynchronous push has met, and kept for its sender until that says a ``Query``.
    ``later``: so many of the updates have come after the push that it answers, where that had to wait; -1: that is in
    the next one.
    """

    request: int
    version: int
    rows: int = -1
    old: bool = False
    later: int = 0


class Waiting(Message, tag="waiting"):
    """The request is held back until these clients have contributed.

    ``silent_s``: for how many seconds each of them has been silent; nothing is said if none has been for one.
    """

    request: int
    clients: list[int]
    silent_s: list[int] = []


class State(Message, tag="state"):
    """The answer to ``GetState``: one payload frame for each name, the value first.

    ``rule``: with a key's chunk 0, the newest that clients have chosen for the store.
    """

    request: int
    updates: int
    names: list[str]
    rule: RuleInForce | None = None


class Failure(Message, tag="failure"):
    """The request could not be served: the name of an exception of ``kvmpi.errors`` and its message.

    ``used``: the push was part of a round that is over, so that its step is used up; it must not be repeated.
    """

    request: int
    error: str
    text: str
    used: bool = False


class Register(Message, tag="register"):
    """A server (with its endpoints) or a master joins the job at the scheduler."""

    request: int
    role: str
    rank: int
    store: int
    num_members: int
    incarnation: int
    host: str
    endpoints: list[str]


class Lost(msgspec.Struct, array_like=True):
    """A client that has left its store, or is dead."""

    rank: int
    store: int
    incarnation: int
    text: str


class ServerInfo(msgspec.Struct, array_like=True):
    """Where a live server is to be found."""

    rank: int
    incarnation: int
    host: str
    endpoints: list[str]


class Chain(msgspec.Struct, array_like=True):
    """Who holds one part of the values: ``members`` have all of it, the first answers for it; ``joiner`` (or -1) is
    being given it. A ``draining`` head accepts nothing more, because another is to take its place.

    ``version`` grows with every change of this chain. Without members the part is lost, and ``why`` says how.
    """

    version: int
    members: list[int]
    joiner: int = -1
    draining: bool = False
    why: str = ""


class View(Message, tag="view"):
    """Who is in the job, from the scheduler to everyone: once every server is there, and after every change.

    ``chains``: one for each part; ``replicas``: how many servers more than one have each part if all is well.
    ``snapshot``: the number of the one that the job was resumed from, or 0; ``steps``: how far each store was in it.
    """

    epoch: int
    replicas: int
    chains: list[Chain]
    servers: list[ServerInfo]
    lost: list[Lost]
    request: int = -1
    snapshot: int = 0
    steps: dict[int, int] = {}


class Heartbeat(Message, tag="heartbeat"):
    """The sender is alive; ``clock`` is its training clock, ``epoch`` that of the last View it has.

    ``sent_us``: when it was sent, on the sender's clock, if that wants to know that it was heard; or 0. ``done``: the
    overall step up to which all pushes of a client are answered, as in a `Push`.
    """

    clock: int
    epoch: int = -1
    sent_us: int = 0
    done: int = 0


class Heard(Message, tag="heard"):
    """The heartbeat that a member sent at ``sent_us`` has come: a server is not taken for lost for some time yet.

    ``at_us``: when, on the scheduler's clock, and ``clock``: the name of that clock, if members compare theirs with it.
    Also the answer to a `Report` that wants one; ``sent_us`` is the report's number. ``done``, for servers: by store
    the least that its clients have said, of those that still push.
    """

    sent_us: int
    at_us: int = 0
    clock: str = ""
    done: dict[int, int] = {}


class Report(Message, tag="report"):
    """What a process has done since its start, about once a second; nothing depends on it, and any may be lost.

    ``role``: "worker" or "server"; ``client``: that of a worker, or -1; ``incarnation``: grows with every process in
    its place; ``number``: of this report of this process. ``totals``: numbers by name. ``phases``: seconds, bytes and
    calls of each. ``staleness``: pushes by how old their values were. ``curves``: what the program has reported since
    the report before, as step and value. ``missing``: clients that an open round of a server waits for. ``ended``: the
    process will do nothing further. ``answer``: it wants a `Heard`.
    """

    role: str
    rank: int
    client: int
    incarnation: int
    number: int
    host: str
    totals: dict[str, float]
    phases: dict[str, list[float]] = {}
    staleness: dict[int, int] = {}
    curves: dict[str, list[tuple[int, float]]] = {}
    missing: list[int] = []
    ended: bool = False
    answer: bool = False


#: The number of a barrier for a client that is back and does not know how many there were.
NEXT_BARRIER = 0


class Barrier(Message, tag="barrier"):
    """A master has reached its ``ordinal``-th barrier of its store, after its step ``step`` with the furthest key.

    ``ordinal`` 0: the first one since a client that is back pushes, whatever its number. The `Ack` says the number.
    ``error`` and ``text``: what the clients meet for has failed on this one, as in a ``Failure``; all of them hear it.
    ``yes``: the answer of this one, where they meet with a question.
    """

    request: int
    ordinal: int
    step: int = 0
    error: str = ""
    text: str = ""
    yes: bool = False


class QueryDead(Message, tag="querydead"):
    """Ask the scheduler which clients of the store have been silent for ``timeout_s``."""

    request: int
    timeout_s: float


class Dead(Message, tag="dead"):
    """The ranks of the clients that are dead."""

    request: int
    clients: list[int]


class Leave(Message, tag="leave"):
    """A member ends in good order; its silence from now on is no loss.

    ``step``: where a client has gone on from, if others have waited for a process before it; it may have skipped the
    barriers that are left. ``text``: of a client that ends with this error, which counts as lost.
    """

    request: int
    step: int = 0
    text: str = ""


class CaughtUp(Message, tag="caughtup"):
    """A joiner to the scheduler: it has all of the part."""

    part: int
    version: int


class Drained(Message, tag="drained"):
    """A draining head to the scheduler: every server of the chain has all that it has accepted."""

    part: int
    version: int


class TakeSnapshot(Message, tag="takesnapshot"):
    """The scheduler to a server: snapshot ``number`` is to be taken, of a synchronous chunk when it is that far.

    ``missed``: another one that is given up, so that what was copied for it is of no use. If that is the larger number,
    all that are larger than ``number`` are given up. ``ahead``: the scheduler has chosen the number, no server has come
    to it.
    """

    number: int
    missed: int = 0
    ahead: bool = False


class PartFile(msgspec.Struct, array_like=True):
    """The file of one part in a snapshot, and how to know that it is whole: its size, and its CRC-32."""

    part: int
    nbytes: int
    checksum: int


class SnapshotNews(Message, tag="snapshotnews"):
    """A server to the scheduler: its share of snapshot ``number`` is "begun", "written" (these files), "dropped" or
    "missed": some other number would do.

    ``steps``: how far each store is of which it has chunks. ``stores``: all that it knows, also without a chunk of
    them; where one server knows a store and another does not, the snapshot is given up.
    """

    number: int
    stage: str
    files: list[PartFile] = []
    steps: dict[int, int] = {}
    stores: list[int] = []


class Extend(Message, tag="extend"):
    """A server to its successor in the chain of a part: from now on I am the one before you."""

    part: int
    version: int


class Attach(Message, tag="attach"):
    """The answer: the last entry of the part's log that this server has; -1 if it needs everything."""

    part: int
    version: int
    seq: int


class Log(Message, tag="log"):
    """Entry ``seq`` of a part's log, in one of its stores; its arrays are payload frames."""

    part: int
    version: int
    seq: int
    store: int
    entry: Entry


class Committed(Message, tag="committed"):
    """All servers from here to the end of the chain have the part's log up to ``seq``."""

    part: int
    version: int
    seq: int


class Install(Message, tag="install"):
    """Number ``index`` of ``total`` entries that make a part as it was after entry ``seq`` of its log."""

    part: int
    version: int
    index: int
    total: int
    seq: int
    store: int
    entry: Entry


class Installed(Message, tag="installed"):
    """The successor has so many of the Installs."""

    part: int
    version: int
    count: int


#: All of them.
AnyMessage = (
    Hello | Init | Push | Pull | Query | SetRule | SetHyperparams | GetState | PutState | Finish | Return | Enter | Bye
    | Ack | Found | Accepted | Moved | Value | Waiting | State | Failure
    | Register | View | Heartbeat | Heard | Report | Barrier | QueryDead | Dead | Leave | CaughtUp | Drained
    | TakeSnapshot | SnapshotNews
    | Extend | Attach | Log | Committed | Install | Installed
)  # fmt: skip
