"""Ranks agree that they are at the same call before they exchange data, so that a mismatch is an error, not a hang.

Every rank sends a digest of its call to rank 0 and waits for the verdict. Equal digests cost one short message each
way. If they differ, or a rank reports that its own call is invalid, rank 0 asks for the full texts, finds the first
difference, and every rank raises the same error. The communicator stays in order in either case.

A rank that has joined, ``Call(JOIN)``, sends a digest of its own. If all others make the same call, rank 0 says so; one
of them describes the call to those that have joined, and all ranks agree once more, now on that call. So a rank that
joins costs the others nothing before and one more message each way from then on, and it cannot come at a wrong moment:
the next agreement is where its peers hear of it.

As soon as all ranks can they take a ``Shortcut``, on which only ranks of different hosts exchange messages, and few of
them. Whatever is not the same call on all ranks is then settled as above. So are calls that may differ without being
wrong: ranks that have joined, leave, close or fail state what no other call does, and go on by messages at once; the
others do when they see that.

A rank that leaves, ``leave``, does not wait for long until the others do so. It leaves a message behind: for rank 0 a
digest of its own, from rank 0 a verdict to each. Whoever makes a call then, or much later, finds it. Those who make
``CLOSE``, their last call, have left likewise when their time for it is over: another may make it much later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.shortcut import Shortcut
from kvmpi.collectives.waiting import Habit, Patience, wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import (
    BY_NAME,
    ConfigError,
    DTypeMismatchError,
    KVError,
    KVTimeoutError,
    OrderMismatchError,
    PeerLostError,
    ShapeMismatchError,
    ranks_in_words,
    rebuild,
)

Buffer = npt.NDArray[Any]

_TAG = 1
_TAG_ROLL_CALL = 6
_DIGEST_BYTES = 16
#: A digest, and whether its rank could take the shortcut.
_MESSAGE_BYTES = _DIGEST_BYTES + 1
_LENGTH_BYTES = 8
_AGREED, _EXPLAIN, _LATE, _FOLLOW, _LEFT = 0, 1, 2, 3, 4
#: What a rank does that has joined: whatever the others do next.
JOIN = "join"
_JOINED = b"\xff" * _DIGEST_BYTES
_LEAVING = b"\xfe" * _DIGEST_BYTES
#: The last call of a rank: one that makes it while others make another will answer none of theirs any more. Others may
#: make it much later, or never.
CLOSE = "close"
#: Seconds that ranks which did come may take to explain themselves, and rank 0 to tell them who did not.
_GRACE_S = 5.0
#: Waits for ranks that still compute.
_CALLS = Habit()


class Entry(msgspec.Struct, frozen=True):
    """One key of a call, with what must be equal on all ranks."""

    key: int | str
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank is about to do; ``failure`` is why it cannot.

    ``details`` are what else a rank needs to know in order to make the same call, as JSON carries it.
    """

    op: str
    entries: tuple[Entry, ...] = ()
    failure: BaseException | None = None
    details: Callable[[], Any] = lambda: None
    _signed: dict[str, tuple[bytes, bytes]] = field(default_factory=dict, compare=False, repr=False)

    def text(self, settings: str = "") -> str:
        """The call, and the settings that it is made with, as JSON."""
        failure = None if self.failure is None else [type(self.failure).__name__, str(self.failure)]
        return json.dumps([self.op, [[e.key, e.shape, e.dtype] for e in self.entries], failure, settings])

    def signed(self, settings: str = "") -> tuple[bytes, bytes]:
        """``text`` and its digest, worked out once: a call may be made again."""
        found = self._signed.get(settings)
        if found is None:
            text = self.text(settings).encode()
            found = self._signed[settings] = text, hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
        return found

    def description(self) -> bytes:
        """The call for ranks that have joined."""
        return json.dumps([self.op, [e.key for e in self.entries], self.details()]).encode()


class Verdict(NamedTuple):
    """What came of an agreement; the communicator is in order.

    Attributes:
        error: what this rank has to raise, if there is something.
        num_joined: how many ranks make the call, or do not, because they have joined.
        description: on a rank that has joined, the call that its peers make and wait for it to make; empty if all
            ranks have joined.
        last: the calls differ, and a rank makes no further ones, or has left; or all of them are the last, and this
            rank comes with its own when others have waited for that in vain.
    """

    error: BaseException | None = None
    num_joined: int = 0
    description: bytes = b""
    last: bool = False


#: All make the same call. One object for all calls: small sums notice what is made anew for each.
_AGREEMENT = Verdict()


#: One that nobody takes.
_NO_SHORTCUT = Shortcut(lambda: None)


def agree(comm: Comm, call: Call, deadline: Deadline, settings: str = "") -> None:
    """Return when every rank has made the same call; raise the error of ``verdict``."""
    error = verdict(comm, call, deadline, settings).error
    if error is not None:
        raise error


def verdict(
    comm: Comm, call: Call, deadline: Deadline, settings: str = "", shortcut: Shortcut | None = None
) -> Verdict:
    """Of no error when every rank has made the same call, with the same ``settings``, or has joined.

    A rank that has joined waits until its peers make a call, for as long as ``deadline`` gives, and for those that come
    late as long again.

    Args:
        shortcut: of this communicator, on every rank or on none.
    Returns:
        If a rank reported that its call is invalid: its own error there, one of the same class elsewhere. If the calls
        differ: ``OrderMismatchError``, ``ShapeMismatchError`` or ``DTypeMismatchError``, naming the first difference,
        and ``ConfigError`` if only the settings do.
    Raises:
        KVTimeoutError: a rank did not come; names it. The communicator is then unusable.
        PeerLostError: the transport says that a rank is gone. The communicator is then unusable.
    """
    if comm.size == 1:
        return Verdict(call.failure, int(call.op == JOIN))
    text, digest = call.signed(settings)
    if call.op == JOIN:
        digest = _JOINED
    elif call.failure is not None:
        digest = bytes(_DIGEST_BYTES)  # all zero for a call that failed, so that it never agrees
    shortcut = shortcut or _NO_SHORTCUT
    found = _decide(comm, call, text, digest, deadline, shortcut)
    if found is _AGREEMENT:
        return found
    num_joined = found.num_joined
    while found.num_joined and call.op != JOIN:
        # Those who have joined know the call by now, and make it.
        found = _decide(comm, call, text, digest, deadline, shortcut)
    error = found.error if found.error is None or call.failure is None else call.failure
    return Verdict(error, num_joined, found.description, found.last)


def _decide(comm: Comm, call: Call, text: bytes, digest: bytes, deadline: Deadline, shortcut: Shortcut) -> Verdict:
    alone = call.failure is not None or call.op in (JOIN, CLOSE)

    def late(ranks: Sequence[int]) -> str:
        return str(_late(comm, call, ranks, deadline))

    def unheard(ranks: Sequence[int]) -> str:
        return f"{_at(comm, call)}: no answer from MPI rank {ranks_in_words(ranks)} of this client"

    try:
        if shortcut.settle(comm, digest, deadline, late, unheard, alone=alone):
            return _AGREEMENT
    except PeerLostError as error:
        raise PeerLostError(f"{_at(comm, call)}: {error}") from None
    return (_judge if comm.rank == 0 else _ask)(comm, call, text, digest, deadline, shortcut)


def _receive_digests(comm: Comm) -> tuple[dict[int, Request], Buffer, Buffer]:
    """On rank 0: requests by rank, what will be digests by rank, and what of each says whether it can take the
    shortcut."""
    messages = np.empty((comm.size, _MESSAGE_BYTES), dtype=np.uint8)
    requests = {rank: comm.irecv(messages[rank], rank, _TAG) for rank in range(1, comm.size)}
    return requests, messages[:, :_DIGEST_BYTES], messages[:, _DIGEST_BYTES]


def _judge(comm: Comm, call: Call, text: bytes, own: bytes, deadline: Deadline, shortcut: Shortcut) -> Verdict:
    others = range(1, comm.size)
    requests, digests, can_shorten = _receive_digests(comm)
    try:
        if call.op == JOIN:
            deadline = _await_another(requests, digests, _JOINED, deadline)
        awaited = [*requests.values(), *shortcut.owed]
        wait_all(
            awaited, _by_messages(deadline, shortcut), lambda: _missing_text(comm, call, missing_of(requests)), _CALLS
        )
    except KVTimeoutError:
        missing = shortcut.surely(missing_of(requests))
        _report_missing(comm, [rank for rank in others if rank not in missing], missing, deadline)
        if call.op == CLOSE:
            _tell(comm, missing, [np.array([_LEFT, 0, 0], np.int64)], deadline)
        raise _late(comm, call, missing, deadline) from None
    grace = Deadline(max(_GRACE_S, deadline.remaining_s()))
    if any(own) and digests[1:].tobytes() == own * len(others):
        if call.op == CLOSE:
            return _dismiss(comm, call)
        shortens = shortcut.is_possible and bool(can_shorten[1:].all())
        _send_verdict(comm, call, [_AGREED, int(shortens), 0], grace)
        if shortens:
            shortcut.take()
        return _AGREEMENT
    digests[0] = np.frombuffer(own, dtype=np.uint8)
    left = [rank for rank, digest in enumerate(digests) if digest.tobytes() == _LEAVING]
    if left:
        _tell(comm, others, [np.array([_LEFT, left[0], 0], np.int64)], Deadline(_GRACE_S / 5))
        return _left_behind(comm, call, left[0])
    joined = [rank for rank, digest in enumerate(digests) if digest.tobytes() == _JOINED]
    active = [rank for rank in range(comm.size) if rank not in joined]
    usual = digests[active[0]]
    kind = _FOLLOW if joined and usual.any() and (digests[active] == usual).all() else _EXPLAIN
    what = _send_verdict(comm, call, [kind, len(joined), active[0]], grace)
    if kind == _FOLLOW:
        speaks = active[0] == 0
        description = call.description() if speaks else _receive_texts(comm, active[:1], grace, what)[active[0]]
        _send_text(comm, [rank for rank in joined if rank != 0], description, grace, what)
        return Verdict(None, len(joined), b"" if speaks else description)
    received = _receive_texts(comm, others, grace, what)
    texts = [text.decode(), *(received[rank].decode() for rank in others)]
    error, last = first_difference(texts), any(json.loads(text)[0] == CLOSE for text in texts)
    _send_text(comm, others, json.dumps([type(error).__name__, str(error), last]).encode(), grace, what)
    return Verdict(error, last=last)


def _send_verdict(comm: Comm, call: Call, words: list[int], deadline: Deadline) -> str:
    """To all; returns what an error says if they do not listen."""
    answer = np.array(words, dtype=np.int64)
    sends = [comm.isend(answer, rank, _TAG) for rank in range(1, comm.size)]
    how = "were they stopped, or have they closed before?"
    what = f"{_at(comm, call)}: the other ranks came, but do not take the verdict; {how}"
    wait_all(sends, deadline, lambda: what)
    return what


def _dismiss(comm: Comm, call: Call) -> Verdict:
    """All have made their last call; those that came long before rank 0 listen no more."""
    try:
        _send_verdict(comm, call, [_AGREED, 0, 0], Deadline(_GRACE_S / 5))
    except KVTimeoutError:
        return Verdict(last=True)
    return _AGREEMENT


def _await_another(requests: Mapping[int, Request], digests: Buffer, usual: bytes, deadline: Deadline) -> Deadline:
    """Return when a rank makes another call than the ``usual`` one, or all have made that: until when others may come.

    From there on as much time as that rank gives them, which came later than this one.
    """
    patience = Patience(deadline, lambda: "")
    while True:
        came = [rank for rank, request in requests.items() if request.test()]
        if len(came) == len(requests) or any(digests[rank].tobytes() != usual for rank in came):
            return Deadline(deadline.timeout_s)
        patience.pause()


def _report_missing(comm: Comm, ranks: Sequence[int], missing: Sequence[int], deadline: Deadline) -> None:
    """Tell those who came who did not; in vain where they gave up before."""
    _tell(comm, ranks, [np.array([_LATE, len(missing), 0], np.int64), np.array(missing, np.int64)], deadline)


def _tell(comm: Comm, ranks: Iterable[int], parts: Sequence[Buffer], deadline: Deadline) -> None:
    """Messages to ranks that may listen later, or never: these are no reason to wait for long."""
    try:
        sends = [comm.isend(part, rank, _TAG) for rank in ranks for part in parts]
        wait_all(sends, Deadline(min(_GRACE_S, deadline.timeout_s / 2)), lambda: "")
    except (KVTimeoutError, PeerLostError):
        pass


def _ask(comm: Comm, call: Call, text: bytes, digest: bytes, deadline: Deadline, shortcut: Shortcut) -> Verdict:
    answer = np.empty(3, dtype=np.int64)
    receive = comm.irecv(answer, 0, _TAG)
    send = comm.isend(np.frombuffer(digest + bytes([shortcut.is_possible]), dtype=np.uint8), 0, _TAG)
    if call.op == JOIN:  # rank 0 may come just in time, and wait for others then
        deadline = Deadline(2 * deadline.timeout_s)
    # Rank 0 names who is missing when its own deadline passes, which may be a little after ours.
    grace = Deadline(_by_messages(deadline, shortcut).remaining_s() + _grace_s(deadline))
    what = f"{_at(comm, call)}: rank 0 does not explain its verdict; was it stopped?"
    wait_all(
        [receive, *shortcut.owed],
        grace,
        lambda: (
            f"{_at(comm, call)}: no answer from MPI rank 0 of this client within {deadline.timeout_s:.1f} s; "
            "is it in another call, stopped, or dead? Look at rank 0, or raise KVMPI_TIMEOUT_S"
        ),
        _CALLS,
    )
    send.test()  # it has come, or rank 0 had left before
    kind, count, speaker = answer.tolist()
    if kind == _AGREED:
        if count:
            shortcut.take()
        return _AGREEMENT
    grace = Deadline(max(_GRACE_S, deadline.remaining_s()))
    if kind == _FOLLOW:
        if comm.rank == speaker:
            _send_text(comm, [0], call.description(), grace, what)
        joined = call.op == JOIN
        return Verdict(None, count, _receive_texts(comm, [0], grace, what)[0] if joined else b"")
    if kind == _LATE:
        missing = np.empty(count, dtype=np.int64)
        wait_all([comm.irecv(missing, 0, _TAG)], grace, lambda: what)
        raise _late(comm, call, missing.tolist(), deadline)
    if kind == _LEFT:
        return Verdict(last=True) if call.op == CLOSE else _left_behind(comm, call, count)
    _send_text(comm, [0], text, grace, what)
    name, message, last = json.loads(_receive_texts(comm, [0], grace, what)[0])
    return Verdict(rebuild(name, message), last=last)


def _grace_s(deadline: Deadline) -> float:
    """How much later than this rank's another's time may be up."""
    return max(0.1 * deadline.timeout_s, min(0.5, 0.5 * deadline.timeout_s))


def _by_messages(deadline: Deadline, shortcut: Shortcut) -> Deadline:
    """Until when messages may come: if time is up, since a shortcut was taken in vain, they are on their way now."""
    return Deadline(max(deadline.remaining_s(), 0.5 * _grace_s(deadline))) if shortcut.is_taken else deadline


def leave(comm: Comm, deadline: Deadline, shortcut: Shortcut | None = None) -> bool:
    """Make no further calls; whether all ranks have said so by ``deadline``, and nothing is under way on ``comm``.

    Else ranks that make a call, now or later, get an error that names this one, and ``comm`` must live for as long as
    they may: its number must not be given to another, which would find the messages of this one.
    """
    call, shortcut = Call("leave"), shortcut or _NO_SHORTCUT
    shortcut.settle(comm, _LEAVING, deadline, str, str, alone=True)
    try:
        if comm.rank != 0:
            return _ask(comm, call, b"", _LEAVING, deadline, shortcut) is _AGREEMENT
        others = range(1, comm.size)
        requests, digests, _ = _receive_digests(comm)
        try:
            _await_another(requests, digests, _LEAVING, deadline)
            if not missing_of(requests) and digests[1:].tobytes() == _LEAVING * len(others):
                wait_all(shortcut.owed, deadline, lambda: "")
                _send_verdict(comm, call, [_AGREED, 0, 0], Deadline(_GRACE_S))
                return True
        except KVTimeoutError:
            pass
        _tell(comm, others, [np.array([_LEFT, 0, 0], np.int64)], deadline)
        return False
    except (KVTimeoutError, PeerLostError):
        return False


def roll_call(comm: Comm, deadline: Deadline) -> list[int]:
    """The ranks that say nothing until the deadline, when all that are there call this after a failure."""
    word = np.zeros(1, np.uint8)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    try:
        answers = {rank: comm.irecv(np.empty(1, np.uint8), rank, _TAG_ROLL_CALL) for rank in others}
        sends = [comm.isend(word, rank, _TAG_ROLL_CALL) for rank in others]
        wait_all([*answers.values(), *sends], deadline, lambda: "")
        return []
    except KVTimeoutError:
        return [rank for rank, answer in answers.items() if not answer.test()]
    except PeerLostError:
        return []  # the transport has said its word; there is nothing to add


def _send_text(comm: Comm, ranks: Sequence[int], text: bytes, deadline: Deadline, what: str) -> None:
    length = np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little"), dtype=np.uint8)
    body = np.frombuffer(text, dtype=np.uint8)
    wait_all([comm.isend(part, rank, _TAG) for rank in ranks for part in (length, body)], deadline, lambda: what)


def _receive_texts(comm: Comm, ranks: Sequence[int], deadline: Deadline, what: str) -> Mapping[int, bytes]:
    """What each of ``ranks`` sends with ``_send_text``."""
    lengths = {rank: np.empty(_LENGTH_BYTES, dtype=np.uint8) for rank in ranks}
    wait_all([comm.irecv(lengths[rank], rank, _TAG) for rank in ranks], deadline, lambda: what)
    texts = {rank: np.empty(int.from_bytes(lengths[rank].tobytes(), "little"), dtype=np.uint8) for rank in ranks}
    wait_all([comm.irecv(texts[rank], rank, _TAG) for rank in ranks], deadline, lambda: what)
    return {rank: texts[rank].tobytes() for rank in ranks}


def _at(comm: Comm, call: Call) -> str:
    return f"{_called(call.op, [[entry.key] for entry in call.entries])} on MPI rank {comm.rank} of {comm.size}"


def missing_of(requests: Mapping[int, Request]) -> list[int]:
    """The ranks whose requests are not done."""
    return [rank for rank, request in requests.items() if not request.test()]


def _missing_text(comm: Comm, call: Call, missing: Sequence[int]) -> str:
    did_not = "made no call" if call.op == JOIN else "did not make the call"
    return f"{_at(comm, call)}: MPI rank {ranks_in_words(missing)} of this client {did_not}"


def _left_behind(comm: Comm, call: Call, rank: int) -> Verdict:
    """What it means for ``call`` that ``rank`` has left."""
    reason = "has left, and makes no further calls; has it stopped early, or caught an error of its own?"
    return Verdict(OrderMismatchError(f"{_at(comm, call)}: MPI rank {rank} of this client {reason}"), last=True)


def _late(comm: Comm, call: Call, missing: Sequence[int], deadline: Deadline) -> KVTimeoutError:
    return KVTimeoutError(
        f"{_missing_text(comm, call, missing)} within {deadline.timeout_s:.1f} s; look at that worker, or raise "
        "KVMPI_TIMEOUT_S"
    )


def first_difference(calls: Sequence[str]) -> KVError:
    """The error for calls that differ, given each rank's text: an invalid call first, else the first difference.

    Ranks that have joined are no part of that.
    """
    parsed = [json.loads(text) for text in calls]
    for rank, (op, _, failure, _) in enumerate(parsed):
        if failure is not None:
            name, reason = failure
            if name not in BY_NAME:
                name, reason = "KVError", f"{name}: {reason}"
            return rebuild(name, f"MPI rank {rank} of this client cannot {op}: {reason}")
    first, *rest = [rank for rank, (op, *_) in enumerate(parsed) if op != JOIN]
    op, entries, _, settings = parsed[first]
    for rank in rest:
        other_op, other_entries, _, other_settings = parsed[rank]
        if other_op != op:
            return OrderMismatchError(
                f"workers of one client make different calls: MPI rank {first} {_brief(op, entries)}, "
                f"MPI rank {rank} {_brief(other_op, other_entries)}; all must make the same calls in the same order"
            )
        for i in range(max(len(entries), len(other_entries))):
            mine = entries[i] if i < len(entries) else None
            theirs = other_entries[i] if i < len(other_entries) else None
            if mine != theirs:
                return _entry_difference(op, i, (first, rank), mine, theirs)
        if other_settings != settings:
            return ConfigError(
                f"workers of one client have different settings: {settings} on MPI rank {first}, {other_settings} on "
                f"MPI rank {rank}; give all of them the same KVMPI_* environment, arguments and files"
            )
    return OrderMismatchError("the calls of the ranks differed in their digests but not in their texts")


def _called(op: str, entries: Sequence[Sequence[object]]) -> str:
    keys = ", ".join(repr(entry[0]) for entry in entries[:3]) + (", ..." if len(entries) > 3 else "")
    return f"{op}({keys})"


def _brief(op: str, entries: Sequence[Sequence[object]]) -> str:
    """The call of another rank, and what it means if that is its last."""
    ends = ": its program has ended, or has fewer steps (see kv.join)" if op == CLOSE else ""
    return f"{_called(op, entries)}{ends}"


def _entry_difference(
    op: str, index: int, ranks: tuple[int, int], mine: Sequence[Any] | None, theirs: Sequence[Any] | None
) -> KVError:
    where = f"{op}: the first difference between workers of one client is at position {index}: "
    first, rank = ranks
    if mine is None or theirs is None or mine[0] != theirs[0]:
        what = "" if op.startswith("set_") else "key "  # those are about all keys
        names = ["no key" if entry is None else f"{what}{entry[0]!r}" for entry in (mine, theirs)]
        return OrderMismatchError(f"{where}MPI rank {first} has {names[0]}, MPI rank {rank} has {names[1]}")
    if mine[1] != theirs[1]:
        shapes = tuple(mine[1]), tuple(theirs[1])
        return ShapeMismatchError(
            f"{where}key {mine[0]!r} has shape {shapes[0]} on MPI rank {first} and {shapes[1]} on MPI rank {rank}"
        )
    return DTypeMismatchError(
        f"{where}key {mine[0]!r} has dtype {mine[2]} on MPI rank {first} and {theirs[2]} on MPI rank {rank}"
    )
