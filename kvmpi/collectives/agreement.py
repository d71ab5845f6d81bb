"""Ranks agree that they are at the same call before they exchange data, so that a mismatch is an error, not a hang.

Every rank sends a digest of its call to rank 0 and waits for the verdict. Equal digests cost one short message each
way. If they differ, or a rank reports that its own call is invalid, rank 0 asks for the full texts, finds the first
difference, and every rank raises the same error. The communicator stays in order in either case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm
from kvmpi.collectives.waiting import wait_all
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
    rebuild,
)

Buffer = npt.NDArray[Any]

_TAG = 1
_TAG_ROLL_CALL = 6
_DIGEST_BYTES = 16
_LENGTH_BYTES = 8
_AGREED, _EXPLAIN, _LATE = 0, 1, 2
#: Seconds that ranks which did come may take to explain themselves, and rank 0 to tell them who did not.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a call, with what must be equal on all ranks."""

    key: int | str
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank is about to do; ``failure`` is why it cannot."""

    op: str
    entries: tuple[Entry, ...] = ()
    failure: BaseException | None = None

    def text(self, settings: str = "") -> str:
        """The call, and the settings that it is made with, as JSON."""
        failure = None if self.failure is None else [type(self.failure).__name__, str(self.failure)]
        return json.dumps([self.op, [[e.key, e.shape, e.dtype] for e in self.entries], failure, settings])


def agree(comm: Comm, call: Call, deadline: Deadline, settings: str = "") -> None:
    """Return when every rank has made the same call; raise what ``verdict`` returns."""
    error = verdict(comm, call, deadline, settings)
    if error is not None:
        raise error


def verdict(comm: Comm, call: Call, deadline: Deadline, settings: str = "") -> BaseException | None:
    """None when every rank has made the same call, with the same ``settings``.

    Returns:
        What this rank has to raise otherwise; the communicator is in order. If a rank reported that its call is
        invalid: its own error there, one of the same class elsewhere. If the calls differ: ``OrderMismatchError``,
        ``ShapeMismatchError`` or ``DTypeMismatchError``, naming the first difference, and ``ConfigError`` if only the
        settings do.
    Raises:
        KVTimeoutError: a rank did not come; names it. The communicator is then unusable.
        PeerLostError: the transport says that a rank is gone. The communicator is then unusable.
    """
    if comm.size == 1:
        return call.failure
    text = call.text(settings).encode()
    # All zero for a call that failed, so that it never agrees.
    digest = bytes(_DIGEST_BYTES)
    if call.failure is None:
        digest = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()
    error = (_judge if comm.rank == 0 else _ask)(comm, call, text, digest, deadline)
    return error if error is None or call.failure is None else call.failure


def _judge(comm: Comm, call: Call, text: bytes, own: bytes, deadline: Deadline) -> KVError | None:
    others = range(1, comm.size)
    digests = np.empty((comm.size, _DIGEST_BYTES), dtype=np.uint8)
    requests = {rank: comm.irecv(digests[rank], rank, _TAG) for rank in others}
    try:
        wait_all(requests.values(), deadline, lambda: "")
    except KVTimeoutError:
        missing = [rank for rank in others if not requests[rank].test()]
        _report_missing(comm, [rank for rank in others if rank not in missing], missing, deadline)
        raise _late(comm, call, missing, deadline) from None
    digests[0] = np.frombuffer(own, dtype=np.uint8)
    agreed = any(own) and bool((digests == digests[0]).all())
    answer = np.array([_AGREED if agreed else _EXPLAIN, 0], dtype=np.int64)
    grace = Deadline(max(_GRACE_S, deadline.remaining_s()))
    what = f"{_at(comm, call)}: the other ranks came, but do not take the verdict; were they stopped?"
    wait_all([comm.isend(answer, rank, _TAG) for rank in others], grace, lambda: what)
    if agreed:
        return None
    texts = _receive_texts(comm, others, grace, what)
    error = first_difference([text.decode(), *(texts[rank].decode() for rank in others)])
    _send_text(comm, others, json.dumps([type(error).__name__, str(error)]).encode(), grace, what)
    return error


def _report_missing(comm: Comm, ranks: Sequence[int], missing: Sequence[int], deadline: Deadline) -> None:
    """Tell those who came who did not; in vain where they gave up before."""
    answer = np.array([_LATE, len(missing)], dtype=np.int64)
    names = np.array(missing, dtype=np.int64)
    sends = [comm.isend(part, rank, _TAG) for rank in ranks for part in (answer, names)]
    try:
        wait_all(sends, Deadline(min(_GRACE_S, deadline.timeout_s / 2)), lambda: "")
    except (KVTimeoutError, PeerLostError):
        pass


def _ask(comm: Comm, call: Call, text: bytes, digest: bytes, deadline: Deadline) -> KVError | None:
    answer = np.empty(2, dtype=np.int64)
    receive = comm.irecv(answer, 0, _TAG)
    send = comm.isend(np.frombuffer(digest, dtype=np.uint8), 0, _TAG)
    # Rank 0 names who is missing when its own deadline passes, which may be a little after ours.
    grace = Deadline(deadline.remaining_s() + max(0.1 * deadline.timeout_s, min(0.5, 0.5 * deadline.timeout_s)))
    what = f"{_at(comm, call)}: rank 0 does not explain its verdict; was it stopped?"
    wait_all(
        [receive, send],
        grace,
        lambda: (
            f"{_at(comm, call)}: no answer from MPI rank 0 of this client within {grace.timeout_s:.1f} s; "
            "is it in another call, stopped, or dead? Look at rank 0, or raise KVMPI_TIMEOUT_S"
        ),
    )
    kind, count = answer.tolist()
    if kind == _AGREED:
        return None
    grace = Deadline(max(_GRACE_S, deadline.remaining_s()))
    if kind == _LATE:
        missing = np.empty(count, dtype=np.int64)
        wait_all([comm.irecv(missing, 0, _TAG)], grace, lambda: what)
        raise _late(comm, call, missing.tolist(), deadline)
    _send_text(comm, [0], text, grace, what)
    name, message = json.loads(_receive_texts(comm, [0], grace, what)[0])
    return rebuild(name, message)


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
    return f"{_brief(call.op, [[entry.key] for entry in call.entries])} on MPI rank {comm.rank} of {comm.size}"


def _late(comm: Comm, call: Call, missing: Sequence[int], deadline: Deadline) -> KVTimeoutError:
    names = ", ".join(map(str, missing))
    return KVTimeoutError(
        f"{_at(comm, call)}: MPI rank {names} of this client did not make the call within "
        f"{deadline.timeout_s:.1f} s; look at that worker, or raise KVMPI_TIMEOUT_S"
    )


def first_difference(calls: Sequence[str]) -> KVError:
    """The error for calls that differ, given each rank's text: an invalid call first, else the first difference."""
    parsed = [json.loads(text) for text in calls]
    for rank, (op, _, failure, _) in enumerate(parsed):
        if failure is not None:
            name, reason = failure
            if name not in BY_NAME:
                name, reason = "KVError", f"{name}: {reason}"
            return rebuild(name, f"MPI rank {rank} of this client cannot {op}: {reason}")
    op, entries, _, settings = parsed[0]
    for rank in range(1, len(parsed)):
        other_op, other_entries, _, other_settings = parsed[rank]
        if other_op != op:
            return OrderMismatchError(
                f"workers of one client make different calls: MPI rank 0 {_brief(op, entries)}, "
                f"MPI rank {rank} {_brief(other_op, other_entries)}; all must make the same calls in the same order"
            )
        for i in range(max(len(entries), len(other_entries))):
            mine = entries[i] if i < len(entries) else None
            theirs = other_entries[i] if i < len(other_entries) else None
            if mine != theirs:
                return _entry_difference(op, i, rank, mine, theirs)
        if other_settings != settings:
            return ConfigError(
                f"workers of one client have different settings: {settings} on MPI rank 0, {other_settings} on "
                f"MPI rank {rank}; give all of them the same KVMPI_* environment and arguments"
            )
    return OrderMismatchError("the calls of the ranks differed in their digests but not in their texts")


def _brief(op: str, entries: Sequence[Sequence[object]]) -> str:
    keys = ", ".join(repr(entry[0]) for entry in entries[:3]) + (", ..." if len(entries) > 3 else "")
    return f"{op}({keys})"


def _entry_difference(
    op: str, index: int, rank: int, mine: Sequence[Any] | None, theirs: Sequence[Any] | None
) -> KVError:
    where = f"{op}: the first difference between workers of one client is at position {index}: "
    if mine is None or theirs is None or mine[0] != theirs[0]:
        names = [("no key" if entry is None else f"key {entry[0]!r}") for entry in (mine, theirs)]
        return OrderMismatchError(f"{where}MPI rank 0 has {names[0]}, MPI rank {rank} has {names[1]}")
    if mine[1] != theirs[1]:
        shapes = tuple(mine[1]), tuple(theirs[1])
        return ShapeMismatchError(
            f"{where}key {mine[0]!r} has shape {shapes[0]} on MPI rank 0 and {shapes[1]} on MPI rank {rank}"
        )
    return DTypeMismatchError(
        f"{where}key {mine[0]!r} has dtype {mine[2]} on MPI rank 0 and {theirs[2]} on MPI rank {rank}"
    )
