"""Ranks that share a host: a page of counters of each that all of them see, and reads from each other's memory."""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives import cross_memory
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.cross_memory import CrossMemory, address_of
from kvmpi.collectives.waiting import Patience, wait_all
from kvmpi.deadline import Deadline
from kvmpi.machine import host_name

Buffer = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

#: Addresses that a rank can post for one call.
MAX_ADDRESSES = 9
_TAG_INVITE = 7
_TAG_JOINED = 8
_PAGE_BYTES = 4096
# Words of a page. Words that different moments of a call write are 128 bytes apart: ranks that wait for one of them
# must not take the cache line of another from its writer.
_POSTED, _ADDRESSES, _PROGRESS, _FINISHED, _TOKEN = 0, 1, 16, 32, 48
_BLOCK_BITS = 32


class HostGroup:
    """One rank's view of all ranks of ``comm``. Calls must be the same, in the same order, on every rank.

    A call goes: ``post`` where this rank's memory is; ``await_posts``; read from the others while ``advance`` and
    ``blocks_of`` tell how far each rank's results are; ``finish``, after which nobody reads here any more.
    """

    def __init__(self, rank: int, pages: list[Words], memories: list[CrossMemory]) -> None:
        self.rank, self.size = rank, len(pages)
        self._pages, self._memories = pages, memories
        self._mine = pages[rank]
        self._call = 0
        self._order = threading.Lock()

    def _fence(self) -> None:
        # Taking and leaving a lock orders what is before and after it also on processors that reorder stores.
        with self._order:
            pass

    def post(self, addresses: Sequence[int]) -> None:
        """Begin a call: others may read from ``addresses`` until ``finish``."""
        assert len(addresses) <= MAX_ADDRESSES
        self._call += 1
        self._mine[_ADDRESSES : _ADDRESSES + len(addresses)] = addresses
        self._fence()
        self._mine[_POSTED] = self._call

    def addresses_of(self, rank: int, count: int) -> list[int]:
        """What ``rank`` has posted."""
        return [int(word) for word in self._pages[rank][_ADDRESSES : _ADDRESSES + count]]

    def advance(self, num_blocks: int) -> None:
        """So many blocks of this rank's results can be read."""
        self._fence()
        self._mine[_PROGRESS] = (self._call << _BLOCK_BITS) + num_blocks

    def blocks_of(self, rank: int) -> int:
        """How many blocks of ``rank``'s results can be read."""
        call, blocks = divmod(int(self._pages[rank][_PROGRESS]), 1 << _BLOCK_BITS)
        self._fence()
        return blocks if call == self._call else 0

    def read(self, rank: int, address: int, into: Buffer) -> None:
        """Copy from memory of ``rank``; see ``CrossMemory.read``."""
        self._memories[rank].read(address, into)

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
    page, why_not = _page()
    token = np.frombuffer(secrets.token_bytes(16), np.uint64).copy()
    invitation = np.zeros(7, np.uint64)
    if page is not None:
        words, fd = page
        words[_TOKEN : _TOKEN + 2] = token
        digest = hashlib.sha256(host_name().encode()).digest()
        invitation[:] = [*np.frombuffer(digest[:16], np.uint64), os.getpid(), fd, *token, address_of(token)]
    invitations = _exchange(comm, invitation, _TAG_INVITE, deadline)
    group: HostGroup | None = None
    if page is not None:
        try:
            group = _join(comm.rank, page[0], invitations)
        except OSError as error:
            why_not = str(error)
        except _Elsewhere as error:
            why_not = str(error)
    joined = _exchange(comm, np.array([group is not None], np.uint64), _TAG_JOINED, deadline)
    if page is not None:
        os.close(page[1])  # everybody has mapped it, or never will
    outside = [rank for rank, answer in enumerate(joined) if not answer[0]]
    if group is not None and not outside:
        return group
    return why_not or f"MPI rank {outside[0]} cannot read from all others"


class _Elsewhere(Exception):
    pass


def _page() -> tuple[tuple[Words, int] | None, str]:
    """A page of shared memory that no name refers to, so that nothing is left behind whatever ends this process."""
    if not cross_memory.available() or not hasattr(os, "memfd_create"):
        return None, "this system has no cross-memory attach"
    try:
        fd = os.memfd_create("kvmpi", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE_BYTES)
        cross_memory.admit_peers()
        return (_map(fd), fd), ""
    except OSError as error:
        return None, f"no shared memory: {error}"


def _map(fd: int) -> Words:
    return np.frombuffer(mmap.mmap(fd, _PAGE_BYTES), np.uint64)


def _join(rank: int, own: Words, invitations: list[Words]) -> HostGroup:
    mine = invitations[rank]
    pages, memories = [], []
    for peer, invitation in enumerate(invitations):
        if (invitation[:2] != mine[:2]).any():
            raise _Elsewhere(f"MPI ranks {rank} and {peer} are on different hosts")
        pid, fd, address = int(invitation[2]), int(invitation[3]), int(invitation[6])
        memory = CrossMemory(pid)
        if peer == rank:
            page = own
        else:
            peer_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            try:
                page = _map(peer_fd)
            finally:
                os.close(peer_fd)
        seen = np.zeros(2, np.uint64)
        memory.read(address, seen)
        # The same process number may mean another process, where ranks live in containers of their own.
        if (seen != invitation[4:6]).any() or (page[_TOKEN : _TOKEN + 2] != invitation[4:6]).any():
            raise _Elsewhere(f"MPI ranks {rank} and {peer} do not see the same processes")
        pages.append(page)
        memories.append(memory)
    return HostGroup(rank, pages, memories)


def _exchange(comm: Comm, mine: Words, tag: int, deadline: Deadline) -> list[Words]:
    """Every rank's words, in rank order."""
    found = [mine if rank == comm.rank else np.empty_like(mine) for rank in range(comm.size)]
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    requests = [comm.irecv(found[rank], rank, tag) for rank in others]
    requests += [comm.isend(mine, rank, tag) for rank in others]
    what = f"ranks of one host on MPI rank {comm.rank} of {comm.size}: not all ranks of this client took part"
    wait_all(requests, deadline, lambda: f"{what} within {deadline.timeout_s:.1f} s")
    return found
