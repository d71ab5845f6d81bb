"""How the ranks of a host become a group: each maps the others' arenas, and tries whether it can read their memory."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmpi.collectives import cross_memory, words
from kvmpi.collectives.arena import TOKEN_BYTES, own
from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.cross_memory import CrossMemory
from kvmpi.collectives.host_group import PAGE_WORDS, SLOT_BYTES, HostGroup, Peer, clear_page, free_retired
from kvmpi.collectives.waiting import in_vain, wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import PeerLostError

Buffer = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

_TAG_INVITE = 7
_TAG_JOINED = 8


def form(
    comm: Comm, ranks: Sequence[int], deadline: Deadline, label: str = "", *, attach: bool = True, wake: bool = True
) -> HostGroup | str:
    """Collective over ``ranks``, of one host: their group, or why there is none, which is then so on each of them.

    Args:
        label: what it is for, in error messages.
        attach: whether to read from each other's private memory, where that is possible.
        wake: whether to wake each other, likewise; else ranks that wait look from time to time.
    Raises:
        KVTimeoutError: a rank did not take part.
    """
    invitation = np.zeros(8, np.uint64)
    group: HostGroup | None = None
    page, why_not = None, ""
    try:
        page, slots = _page()
        mine = own()
        places = [mine.address, mine.offset_of(page), mine.offset_of(slots)]
        invitation[:] = [mine.pid, mine.fd, mine.size_bytes, *places, *mine.token]
    except OSError as error:
        why_not = str(error)
    invitations = exchange(comm, ranks, invitation, _TAG_INVITE, deadline, label)
    if page is not None:
        try:
            group = _join(ranks, ranks.index(comm.rank), page, slots, invitations, attach=attach)
        except OSError as error:
            why_not = str(error)
    answer = np.array([group is not None, group is not None and group.attaches, wake and words.wakes()], np.uint64)
    joined = exchange(comm, ranks, answer, _TAG_JOINED, deadline, label)
    outside = [rank for rank, answer in zip(ranks, joined, strict=True) if not answer[0]]
    if group is None or outside:
        return why_not or f"MPI rank {outside[0]} cannot read from all others"
    group.attaches = all(answer[1] for answer in joined)
    group.wakes = all(answer[2] for answer in joined)
    return group


#: Never used again: a rank that is done cannot know whether others have seen its last word yet.
_pages: list[Words] = []


def _page() -> tuple[Words, Buffer]:
    """Zeroed counters, and slots, in this process's arena."""
    cross_memory.admit_peers()
    free_retired()
    page = own().empty(PAGE_WORDS, np.dtype(np.uint64))
    slots = own().empty(2 * SLOT_BYTES, np.dtype(np.uint8))
    if page is None or slots is None:
        raise OSError("the arena of shared memory is full")
    clear_page(page)
    _pages.append(page)
    return page, slots


def _join(
    ranks: Sequence[int], index: int, page: Words, slots: Buffer, invitations: list[Words], *, attach: bool
) -> HostGroup:
    """Raises OSError: not all ranks' arenas can be mapped."""
    peers = []
    for peer, invitation in zip(ranks, invitations, strict=True):
        pid, fd, size_bytes, address, first_word, first_slot = map(int, invitation[:6])
        mapped = _mapped(pid, fd, size_bytes, invitation[6:])
        # The same process number may mean another process, where ranks live in containers of their own.
        if mapped is None:
            raise OSError(f"MPI ranks {ranks[index]} and {peer} do not see the same processes")
        memory = _attached(pid, address, invitation[6:]) if attach else None
        if peer == ranks[index]:
            peers.append(Peer(page, slots, mapped, memory))
            continue
        counters = mapped[first_word : first_word + PAGE_WORDS * 8].view(np.uint64)
        peers.append(Peer(counters, mapped[first_slot : first_slot + 2 * SLOT_BYTES], mapped, memory))
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


def exchange(
    comm: Comm, ranks: Sequence[int], mine: Words, tag: int, deadline: Deadline, label: str,
    doing: str = "finding out which ranks share a host",
) -> list[Words]:  # fmt: skip
    """Collective over ``ranks``: the words of each of them. ``doing`` is what for, in error messages.

    Cost for P ranks: log2(P) messages each way, rounded up, since what a rank has learned it passes on. So nobody has
    to do with all others, to each of which MPI would make a connection.

    Raises:
        KVTimeoutError: one of them did not take part, who need not be the one that it names: ``Guard`` finds out.
    Source: Bruck et al., IEEE TPDS 8(11):1143-1156, 1997, doi:10.1109/71.642949.
    """
    size, place = len(ranks), ranks.index(comm.rank)
    found = np.empty((size, mine.size), mine.dtype)  # by rank, from this one on
    found[0] = mine
    known = 1
    while known < size:
        more = min(known, size - known)
        source, dest = ranks[(place + known) % size], ranks[place - known]
        receive = comm.irecv(found[known : known + more], source, tag)
        send = comm.isend(found[:more], dest, tag)

        def describe(receive: Request = receive, source: int = source, dest: int = dest) -> str:
            return (
                f"{label}: {doing}, on MPI rank {comm.rank} of {comm.size}: MPI rank "
                f"{dest if receive.test() else source} did not take part, or waits for others{in_vain(deadline)}"
            )

        wait_all([receive, send], deadline, describe)
        known += more
    return list(np.roll(found, place, axis=0))
