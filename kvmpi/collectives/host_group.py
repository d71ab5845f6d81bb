"""Ranks that share a host: a page of counters of each that all of them see, and reads from each other's memory."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi.collectives import cross_memory
from kvmpi.collectives.arena import TOKEN_BYTES, own
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.cross_memory import CrossMemory, address_of
from kvmpi.collectives.waiting import Patience, wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import PeerLostError

Buffer = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

#: Buffers that a rank can post for one call.
MAX_BUFFERS = 64
_TAG_INVITE = 7
_TAG_JOINED = 8
_PAGE_WORDS = 48 + MAX_BUFFERS
# Words of a page. Words that different moments of a call write are 128 bytes apart: ranks that wait for one of them
# must not take the cache line of another from its writer.
_POSTED, _PROGRESS, _FINISHED, _NUM_PLACES, _PLACES = 0, 16, 32, 47, 48
_BLOCK_BITS = 32
#: Marks a place in an arena: whose is said by the bits below. Other places are addresses, which end below that bit.
_IN_ARENA = 1 << 63
_OWNER_SHIFT = 48
_OFFSET_MASK = (1 << _OWNER_SHIFT) - 1

#: A whole vector of another rank: mapped, or the address from which it can be read.
Remote = Buffer | int


class _Peer(NamedTuple):
    words: Words
    arena: Buffer
    memory: CrossMemory | None


class HostGroup:
    """One rank's view of the ranks of a host. Calls must be the same, in the same order, on every one of them.

    A call goes: ``post`` where this rank's vectors are; ``await_posts``; read from the others while ``advance`` and
    ``blocks_of`` tell how far each rank's results are; ``finish``, after which nobody reads here any more. Ranks are
    numbered by their place in ``members``, which holds their ranks in the communicator.
    """

    def __init__(self, members: Sequence[int], index: int, peers: list[_Peer]) -> None:
        self.members, self.index, self.size = tuple(members), index, len(members)
        self.others = tuple((index + i) % self.size for i in range(1, self.size))
        #: Whether arrays of other ranks can be read wherever they are; else only those in an arena.
        self.attaches = all(peer.memory is not None for peer in peers)
        self._peers = peers
        self._arenas = [(int(address_of(peer.arena)), peer.arena.size) for peer in peers]
        self._pages = [peer.words for peer in peers]
        self._mine = self._pages[index]
        self._call = self._blocks = 0
        self._order = threading.Lock()

    def _fence(self) -> None:
        # Taking and leaving a lock orders what is before and after it also on processors that reorder stores.
        with self._order:
            pass

    def place_of(self, buffer: Buffer) -> int | None:
        """Where a contiguous buffer lies, the same number on every rank; None if it lies in no rank's arena."""
        address = address_of(buffer)
        for owner, (start, nbytes) in enumerate(self._arenas):
            if start <= address and address + buffer.nbytes <= start + nbytes:
                return _IN_ARENA | owner << _OWNER_SHIFT | address - start
        return None

    def post(self, buffers: Sequence[Buffer]) -> None:
        """Begin a call: others may read from ``buffers`` until ``finish``."""
        assert len(buffers) <= MAX_BUFFERS
        self._call += 1
        self._blocks = 0
        self._mine[_NUM_PLACES] = len(buffers)
        for i, buffer in enumerate(buffers):
            place = self.place_of(buffer)
            self._mine[_PLACES + i] = address_of(buffer) if place is None else place
        self._fence()
        self._mine[_POSTED] = self._call

    def remotes_of(self, rank: int, count: int, dtype: Any) -> list[Remote]:
        """What ``rank`` has posted: buffers of ``count`` elements of ``dtype``."""
        words = self._pages[rank]
        return [
            self._mapped(word, count, dtype) if word & _IN_ARENA else word
            for word in map(int, words[_PLACES : _PLACES + int(words[_NUM_PLACES])])
        ]

    def _mapped(self, place: int, count: int, dtype: Any) -> Buffer:
        owner, start = (place & ~_IN_ARENA) >> _OWNER_SHIFT, place & _OFFSET_MASK
        return self._peers[owner].arena[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    def same_first(self, rank: int) -> bool:
        """Whether the first buffer that ``rank`` has posted is the memory of this rank's first."""
        word = int(self._pages[rank][_PLACES])
        return bool(word & _IN_ARENA) and word == int(self._mine[_PLACES])

    def advance(self, num_blocks: int = 1) -> None:
        """So many more blocks of this rank's results can be read."""
        self._fence()
        self._blocks += num_blocks
        self._mine[_PROGRESS] = (self._call << _BLOCK_BITS) + self._blocks

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
            memory = self._peers[rank].memory
            assert memory is not None, "a private vector was posted where ranks cannot read from each other's memory"
            memory.read(remote + part.start * into.itemsize, into)
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

    def share(self, made: Buffer | None, count: int, dtype: Any, deadline: Deadline, what: str) -> Buffer | None:
        """Collective: the first member's ``made``, as every rank has it mapped; None if it is too short."""
        self.post([np.empty(0, np.uint8) if made is None else made])
        self.await_posts([0] if self.index else [], deadline, what)
        place = int(self._pages[0][_PLACES])
        found = self._mapped(place, count, dtype) if place & _IN_ARENA else None
        self.finish(self.others, deadline, what)
        return found

    def _await(self, word: int, ranks: Sequence[int], deadline: Deadline, what: str, problem: str) -> None:
        pending = [rank for rank in ranks if int(self._pages[rank][word]) < self._call]
        if pending:

            def describe() -> str:
                names = ", ".join(str(self.members[rank]) for rank in pending)
                return (
                    f"{what}: MPI rank {names} {problem} within {deadline.timeout_s:.1f} s; "
                    "look at that worker, or raise KVMPI_TIMEOUT_S"
                )

            patience = Patience(deadline, describe)
            while pending:
                left = [rank for rank in pending if int(self._pages[rank][word]) < self._call]
                if len(left) == len(pending):
                    patience.pause()
                pending = left
        self._fence()


def form(comm: Comm, ranks: Sequence[int], deadline: Deadline, *, attach: bool = True) -> HostGroup | str:
    """Collective over ``ranks``, of one host: their group, or why there is none, which is then so on each of them.

    Args:
        attach: whether to read from each other's private memory, where that is possible.
    Raises:
        KVTimeoutError: a rank did not take part.
    """
    invitation = np.zeros(7, np.uint64)
    group: HostGroup | None = None
    page, why_not = None, ""
    try:
        page = _page()
        mine = own()
        invitation[:] = [mine.pid, mine.fd, mine.size_bytes, mine.address, mine.offset_of(page), *mine.token]
    except OSError as error:
        why_not = str(error)
    invitations = exchange(comm, ranks, invitation, _TAG_INVITE, deadline)
    if page is not None:
        try:
            group = _join(ranks, ranks.index(comm.rank), page, invitations, attach=attach)
        except OSError as error:
            why_not = str(error)
    answer = np.array([group is not None, group is not None and group.attaches], np.uint64)
    joined = exchange(comm, ranks, answer, _TAG_JOINED, deadline)
    outside = [rank for rank, answer in zip(ranks, joined, strict=True) if not answer[0]]
    if group is None or outside:
        return why_not or f"MPI rank {outside[0]} cannot read from all others"
    group.attaches = all(answer[1] for answer in joined)
    return group


#: Never used again: a rank that is done cannot know whether others have seen its last word yet.
_pages: list[Words] = []


def _page() -> Words:
    """Zeroed counters in this process's arena."""
    cross_memory.admit_peers()
    page = own().empty(_PAGE_WORDS, np.dtype(np.uint64))
    if page is None:
        raise OSError("the arena of shared memory is full")
    page[:] = 0
    _pages.append(page)
    return page


def _join(ranks: Sequence[int], index: int, page: Words, invitations: list[Words], *, attach: bool) -> HostGroup:
    """Raises OSError: not all ranks' arenas can be mapped."""
    peers = []
    for peer, invitation in zip(ranks, invitations, strict=True):
        pid, fd, size_bytes, address, offset = map(int, invitation[:5])
        mapped = _mapped(pid, fd, size_bytes, invitation[5:])
        # The same process number may mean another process, where ranks live in containers of their own.
        if mapped is None:
            raise OSError(f"MPI ranks {ranks[index]} and {peer} do not see the same processes")
        words = page if peer == ranks[index] else mapped[offset : offset + _PAGE_WORDS * 8].view(np.uint64)
        peers.append(_Peer(words, mapped, _attached(pid, address, invitation[5:]) if attach else None))
    return HostGroup(ranks, index, peers)


def _attached(pid: int, address: int, token: Words) -> CrossMemory | None:
    """The memory of process ``pid``, if the system lets this one read there."""
    if not cross_memory.available():
        return None
    memory, seen = CrossMemory(pid), np.zeros(2, np.uint64)
    try:
        memory.read(address, seen)
    except (PermissionError, PeerLostError):
        return None
    return memory if (seen == token).all() else None


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


def exchange(comm: Comm, ranks: Sequence[int], mine: Words, tag: int, deadline: Deadline) -> list[Words]:
    """Collective over ``ranks``: the words of each of them.

    Raises:
        KVTimeoutError: one of them did not take part.
    """
    found = {rank: mine if rank == comm.rank else np.empty_like(mine) for rank in ranks}
    others = [rank for rank in ranks if rank != comm.rank]
    requests = [comm.irecv(found[rank], rank, tag) for rank in others]
    requests += [comm.isend(mine, rank, tag) for rank in others]
    what = f"finding out which ranks share a host, on MPI rank {comm.rank} of {comm.size}"
    wait_all(requests, deadline, lambda: f"{what}: not all took part within {deadline.timeout_s:.1f} s")
    return list(found.values())
