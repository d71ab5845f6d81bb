"""Ranks agree that they are at the same call before they exchange data, so that a mismatch is an error, not a hang.

Every rank sends a digest of its call to rank 0 and waits for the verdict. Equal digests cost one short message each
way. If they differ, or a rank reports that its own call is invalid, rank 0 asks for the full texts, finds the first
difference, and every rank raises the same error. The communicator stays in order in either case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvmpi.collectives.comm import Comm
from kvmpi.collectives.waiting import wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import DTypeMismatchError, KVError, KVTimeoutError, OrderMismatchError, ShapeMismatchError, rebuild

_TAG = 1
_DIGEST_BYTES = 16
_TEXT_BYTES = 64 << 10
_AGREED, _EXPLAIN, _LATE = b"\0", b"\1", b"\2"


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

    def text(self) -> str:
        failure = None if self.failure is None else [type(self.failure).__name__, str(self.failure)]
        return json.dumps([self.op, [[e.key, list(e.shape), e.dtype] for e in self.entries], failure])

    def digest(self) -> bytes:
        """16 bytes that differ when the calls do; all zero for a call that failed, so that it never agrees."""
        if self.failure is not None:
            return bytes(_DIGEST_BYTES)
        return hashlib.blake2b(self.text().encode(), digest_size=_DIGEST_BYTES).digest()


def agree(comm: Comm, call: Call, deadline: Deadline) -> None:
    """Return when every rank has made the same call.

    Raises:
        OrderMismatchError, ShapeMismatchError, DTypeMismatchError: the calls differ; on every rank, naming the first
            difference.
        KVError: a rank reported that its call is invalid; that rank raises its own error, the others one of its class.
        KVTimeoutError: a rank did not come; names it. The communicator is then unusable.
    """
    if comm.size == 1:
        if call.failure is not None:
            raise call.failure
        return
    verdict = _judge(comm, call, deadline) if comm.rank == 0 else _ask(comm, call, deadline)
    if verdict is not None:
        raise verdict if call.failure is None else call.failure


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def _pack(text: bytes) -> np.ndarray:
    """A text of at most 64 KiB with its length in front, in a buffer of fixed size."""
    text = text[: _TEXT_BYTES - 4]
    buffer = np.zeros(_TEXT_BYTES, dtype=np.uint8)
    buffer[:4] = _bytes(len(text).to_bytes(4, "little"))
    buffer[4 : 4 + len(text)] = _bytes(text)
    return buffer


def _unpack(buffer: np.ndarray) -> bytes:
    length = int.from_bytes(buffer[:4].tobytes(), "little")
    return buffer[4 : 4 + length].tobytes()


def _judge(comm: Comm, call: Call, deadline: Deadline) -> KVError | None:
    others = range(1, comm.size)
    digests = {rank: np.empty(_DIGEST_BYTES, dtype=np.uint8) for rank in others}
    requests = {rank: comm.irecv(digests[rank], rank, _TAG) for rank in others}
    try:
        wait_all(requests.values(), deadline, lambda: "")
    except KVTimeoutError:
        missing = [rank for rank in others if not requests[rank].test()]
        verdict = _LATE + ",".join(map(str, missing)).encode()
        _send_verdict(comm, [rank for rank in others if rank not in missing], verdict)
        raise _late(comm, call, missing, deadline) from None
    own = call.digest()
    if any(own) and all(digests[rank].tobytes() == own for rank in others):
        _send_verdict(comm, others, _AGREED)
        return None
    _send_verdict(comm, others, _EXPLAIN)
    texts = {rank: np.empty(_TEXT_BYTES, dtype=np.uint8) for rank in others}
    explained = [comm.irecv(texts[rank], rank, _TAG) for rank in others]
    grace = Deadline(max(1.0, deadline.remaining_s()))
    wait_all(explained, grace, lambda: f"{call.op}: rank 0 waits for other ranks to explain a mismatch")
    calls = [call.text(), *(_unpack(texts[rank]).decode(errors="replace") for rank in others)]
    error = first_difference(calls)
    reply = _pack(json.dumps([type(error).__name__, str(error)]).encode())
    wait_all([comm.isend(reply, rank, _TAG) for rank in others], grace, lambda: f"{call.op}: rank 0 reports a mismatch")
    return error


def _send_verdict(comm: Comm, ranks: Sequence[int], verdict: bytes) -> None:
    buffer = np.zeros(256, dtype=np.uint8)
    verdict = verdict[:255]
    buffer[: len(verdict)] = _bytes(verdict)
    sends = [comm.isend(buffer, rank, _TAG) for rank in ranks]
    wait_all(sends, Deadline(5.0), lambda: "rank 0 could not send its verdict")


def _ask(comm: Comm, call: Call, deadline: Deadline) -> KVError | None:
    send = comm.isend(_bytes(call.digest()), 0, _TAG)
    verdict = np.empty(256, dtype=np.uint8)
    receive = comm.irecv(verdict, 0, _TAG)
    # Rank 0 names who is missing when its own deadline passes, which may be a little after ours.
    grace = Deadline(deadline.remaining_s() * 1.1 + 0.5)
    wait_all(
        [receive, send],
        grace,
        lambda: (
            f"{_at(comm, call)}: no answer from rank 0 in {grace.timeout_s:.1f} s; "
            "is it in a call of its own, stopped, or dead? Look at rank 0, or raise KVMPI_TIMEOUT_S"
        ),
    )
    kind = verdict[:1].tobytes()
    if kind == _AGREED:
        return None
    if kind == _LATE:
        missing = verdict[1:].tobytes().rstrip(b"\0").decode()
        raise _late(comm, call, [int(rank) for rank in missing.split(",")], deadline)
    text = _pack(call.text().encode())
    reply = np.empty(_TEXT_BYTES, dtype=np.uint8)
    requests = [comm.isend(text, 0, _TAG), comm.irecv(reply, 0, _TAG)]
    wait_all(
        requests, Deadline(max(1.0, deadline.remaining_s())), lambda: f"{_at(comm, call)}: rank 0 does not explain"
    )
    name, message = json.loads(_unpack(reply))
    return rebuild(name, message)


def _at(comm: Comm, call: Call) -> str:
    keys = ", ".join(repr(entry.key) for entry in call.entries[:3]) + (", ..." if len(call.entries) > 3 else "")
    return f"{call.op}({keys}) on MPI rank {comm.rank} of {comm.size}"


def _late(comm: Comm, call: Call, missing: Sequence[int], deadline: Deadline) -> KVTimeoutError:
    names = ", ".join(map(str, missing))
    return KVTimeoutError(
        f"{_at(comm, call)}: MPI rank {names} of this client did not make the call within "
        f"{deadline.timeout_s:.1f} s; look at that worker, or raise KVMPI_TIMEOUT_S"
    )


def first_difference(calls: Sequence[str]) -> KVError:
    """The error for calls that differ, given each rank's text: an invalid call first, else the first difference."""
    parsed = []
    for rank, text in enumerate(calls):
        try:
            parsed.append(json.loads(text))
        except ValueError:  # a text that was cut at 64 KiB
            return OrderMismatchError(f"the calls of the ranks differ, and rank {rank}'s is too long to compare")
    for rank, (op, _, failure) in enumerate(parsed):
        if failure is not None:
            return rebuild(failure[0], f"MPI rank {rank} of this client cannot {op}: {failure[1]}")
    op, entries, _ = parsed[0]
    for rank in range(1, len(parsed)):
        other_op, other_entries, _ = parsed[rank]
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
    return OrderMismatchError("the calls of the ranks differed in their digests but not in their texts")


def _brief(op: str, entries: Sequence[Sequence[object]]) -> str:
    keys = ", ".join(repr(entry[0]) for entry in entries[:3]) + (", ..." if len(entries) > 3 else "")
    return f"{op}({keys})"


def _entry_difference(
    op: str, index: int, rank: int, mine: Sequence[object] | None, theirs: Sequence[object] | None
) -> KVError:
    where = f"{op}: the first difference between workers of one client is at position {index}: "
    if mine is None or theirs is None or mine[0] != theirs[0]:
        names = [("no key" if entry is None else f"key {entry[0]!r}") for entry in (mine, theirs)]
        return OrderMismatchError(f"{where}MPI rank 0 has {names[0]}, MPI rank {rank} has {names[1]}")
    what, cls = ("shape", ShapeMismatchError) if mine[1] != theirs[1] else ("dtype", DTypeMismatchError)
    i = 1 if what == "shape" else 2
    return cls(f"{where}key {mine[0]!r} has {what} {mine[i]} on MPI rank 0 and {theirs[i]} on MPI rank {rank}")
