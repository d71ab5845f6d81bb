"""Ranks that share a host: a page of counters of each that all of them see, and reads from each other's memory."""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi.collectives import cross_memory
from kvmpi.collectives.arena import TOKEN_BYTES, own
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.cross_memory import CrossMemory, address_of
from kvmpi.collectives.waiting import Patience, wait_all
from kvmpi.deadline import Deadline
from kvmpi.machine import host_name

Buffer = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

#: Buffers that a rank can post for one call.
MAX_BUFFERS = 9
_TAG_INVITE = 7
_TAG_JOINED = 8
_PAGE_WORDS = 64
# Words of a page. Words that different moments of a call write are 128 bytes apart: ranks that wait for one of them
# must not take the cache line of another from its writer.
_POSTED, _NUM_PLACES, _PLACES, _PROGRESS, _FINISHED = 0, 1, 2, 16, 32
_BLOCK_BITS = 32
#: Marks a place in a rank's arena; other places are addresses in its memory, which end below that bit.
_IN_ARENA = 1 << 63

#: A whole vector of another rank: mapped, or the address from which it can be read.
Remote = Buffer | int


class _Peer(NamedTuple):
    words: Words
    arena: Buffer
    memory: CrossMemory


class HostGroup:
    """One rank's view of all ranks of ``comm``. Calls must be the same, in the same order, on every rank.

    A call goes: ``post`` where this rank's vectors are; ``await_posts``; read from the others while ``advance`` and
    ``blocks_of`` tell how far each rank's results are; ``finish``, after which nobody reads here any more.
    """

    def __init__(self, rank: int, peers: list[_Peer]) -> None:
        self.rank, self.size = rank, len(peers)
        self._peers = peers
        self._pages = [peer.words for peer in peers]
        self._mine = self._pages[rank]
        self._call = 0
        self._order = threading.Lock()

    def _fence(self) -> None:
        # Taking and leaving a lock orders what is before and after it also on processors that reorder stores.
        with self._order:
            pass

    def post(self, buffers: Sequence[Buffer]) -> None:
        """Begin a call: others may read from ``buffers`` until ``finish``."""
        assert len(buffers) <= MAX_BUFFERS
        self._call += 1
        self._mine[_NUM_PLACES] = len(buffers)
        for i, buffer in enumerate(buffers):
            offset = own().offset_of(buffer)
            self._mine[_PLACES + i] = address_of(buffer) if offset is None else offset | _IN_ARENA
        self._fence()
        self._mine[_POSTED] = self._call

    def remotes_of(self, rank: int, like: Buffer) -> list[Remote]:
        """What ``rank`` has posted: buffers with as many elements as ``like``, and its dtype."""
        found: list[Remote] = []
        words = self._pages[rank]
        for word in map(int, words[_PLACES : _PLACES + int(words[_NUM_PLACES])]):
            start = word & ~_IN_ARENA
            mapped = self._peers[rank].arena[start : start + like.nbytes] if word & _IN_ARENA else None
            found.append(word if mapped is None else mapped.view(like.dtype))
        return found

    def advance(self, num_blocks: int) -> None:
        """So many blocks of this rank's results can be read."""
        self._fence()
        self._mine[_PROGRESS] = (self._call << _BLOCK_BITS) + num_blocks

    def blocks_of(self, rank: int) -> int:
        """How many blocks of ``rank``'s results can be read."""
        call, blocks = divmod(int(self._pages[rank][_PROGRESS]), 1 << _BLOCK_BITS)
        self._fence()
        return blocks if call == self._call else 0

    def fetch(self, rank: int, remote: Remote, part: slice, into: Buffer) -> Buffer:
        """The elements ``part`` of a vector of ``rank``: where they are, or copied to ``into``."""
        if not isinstance(remote, int):
            return remote[part]
        self.read(rank, remote, part, into)
        return into

    def read(self, rank: int, remote: Remote, part: slice, into: Buffer) -> None:
        """Copy the elements ``part`` of a vector of ``rank``; see ``CrossMemory.read``."""
        if isinstance(remote, int):
            self._peers[rank].memory.read(remote + part.start * into.itemsize, into)
        else:
            np.copyto(into, remote[part])

    def await_posts(self, ranks: Sequence[int], deadline: Deadline, what: str) -> None:
        """Return when ``ranks`` have posted.

        Raises:
            KVTimeoutError: names those that have not.
        """
        self._await(_POSTED, ranks, deadline, what, "did not start")

    def finish(self, wait_for: Sequence[int], deadline: Deadline, what: str) -> None:
        """This rank reads no more; return when ``wait_for`` do not either, so that posted memory is free again."""
        self._fence()
        self._mine[_FINISHED] = self._call
        self._await(_FINISHED, wait_for, deadline, what, "did not finish")

    def patience(self, deadline: Deadline, what: str, problem: str, missing: Callable[[], Sequence[int]]) -> Patience:
        """How a rank waits for the ranks ``missing()``, whose ``problem`` is named if the time runs out."""

        def describe() -> str:
            ranks = ", ".join(map(str, missing()))
            return (
                f"{what} on MPI rank {self.rank} of {self.size}: MPI rank {ranks} {problem} within "
                f"{deadline.timeout_s:.1f} s; look at that worker, or raise KVMPI_TIMEOUT_S"
            )

        return Patience(deadline, describe)

    def _await(self, word: int, ranks: Sequence[int], deadline: Deadline, what: str, problem: str) -> None:
        pending = [rank for rank in ranks if int(self._pages[rank][word]) < self._call]
        if pending:
            patience = self.patience(deadline, what, problem, lambda: pending)
            while pending:
                left = [rank for rank in pending if int(self._pages[rank][word]) < self._call]
                if len(left) == len(pending):
                    patience.pause()
                pending = left
        self._fence()


def form(comm: Comm, deadline: Deadline) -> HostGroup | str:
    """Collective: the group of all ranks, or why there is none, which is then so on every rank.

    Raises:
        KVTimeoutError: a rank did not take part.
    """
    invitation = np.zeros(9, np.uint64)
    group: HostGroup | None = None
    page, why_not = None, ""
    try:
        page = _page()
        mine = own()
        host = np.frombuffer(hashlib.sha256(host_name().encode()).digest()[:16], np.uint64)
        place = [mine.pid, mine.fd, mine.size_bytes, mine.address, mine.offset_of(page)]
        invitation[:] = [*host, *place, *mine.token]
    except OSError as error:
        why_not = str(error)
    invitations = _exchange(comm, invitation, _TAG_INVITE, deadline)
    if page is not None:
        try:
            group = _join(comm.rank, page, invitations)
        except OSError as error:
            why_not = str(error)
    joined = _exchange(comm, np.array([group is not None], np.uint64), _TAG_JOINED, deadline)
    outside = [rank for rank, answer in enumerate(joined) if not answer[0]]
    if group is not None and not outside:
        return group
    return why_not or f"MPI rank {outside[0]} cannot read from all others"


#: Never used again: a rank that is done cannot know whether others have seen its last word yet.
_pages: list[Words] = []


def _page() -> Words:
    """Zeroed counters in this process's arena."""
    if not cross_memory.available():
        raise OSError("this system has no cross-memory attach")
    cross_memory.admit_peers()
    page = own().empty(_PAGE_WORDS, np.dtype(np.uint64))
    if page is None:
        raise OSError("the arena of shared memory is full")
    page[:] = 0
    _pages.append(page)
    return page


def _join(rank: int, page: Words, invitations: list[Words]) -> HostGroup:
    """Raises OSError: not all ranks can be read from."""
    peers = []
    for peer, invitation in enumerate(invitations):
        if (invitation[:2] != invitations[rank][:2]).any():
            raise OSError(f"MPI ranks {rank} and {peer} are on different hosts")
        pid, fd, size_bytes, address, offset = map(int, invitation[2:7])
        memory = CrossMemory(pid)
        seen = np.zeros(2, np.uint64)
        memory.read(address, seen)
        mapped = _mapped(pid, fd, size_bytes, invitation[7:9])
        # The same process number may mean another process, where ranks live in containers of their own.
        if mapped is None or (seen != invitation[7:9]).any():
            raise OSError(f"MPI ranks {rank} and {peer} do not see the same processes")
        words = page if peer == rank else mapped[offset : offset + _PAGE_WORDS * 8].view(np.uint64)
        peers.append(_Peer(words, mapped, memory))
    return HostGroup(rank, peers)


#: Other processes' arenas, by process and token: each is mapped once, however many groups there are.
_arenas: dict[tuple[int, bytes], Buffer] = {}
_arenas_lock = threading.Lock()


def _mapped(pid: int, fd: int, size_bytes: int, token: Words) -> Buffer | None:
    """The arena of process ``pid`` as bytes; None if what is there is something else."""
    mine = own()
    if pid == mine.pid:
        return mine.bytes if (mine.token == token).all() else None
    with _arenas_lock:
        known = _arenas.get((pid, token.tobytes()))
        if known is not None:
            return known
        peer_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        try:
            if os.fstat(peer_fd).st_size != size_bytes:
                return None
            mapped = np.frombuffer(mmap.mmap(peer_fd, size_bytes), np.uint8)
        finally:
            os.close(peer_fd)
        if (mapped[:TOKEN_BYTES].view(np.uint64) != token).any():
            return None
        _arenas[pid, token.tobytes()] = mapped
        return mapped


def _exchange(comm: Comm, mine: Words, tag: int, deadline: Deadline) -> list[Words]:
    """Every rank's words, in rank order."""
    found = [mine if rank == comm.rank else np.empty_like(mine) for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    requests = [comm.irecv(found[rank], rank, tag) for rank in others]
    requests += [comm.isend(mine, rank, tag) for rank in others]
    what = f"ranks of one host on MPI rank {comm.rank} of {comm.size}: not all ranks of this client took part"
    wait_all(requests, deadline, lambda: f"{what} within {deadline.timeout_s:.1f} s")
    return found
