"""Which ranks of a communicator share a host, and whether they can share memory."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np

from kvmpi.collectives.comm import Comm
from kvmpi.collectives.cost import Figures, as_words, from_words
from kvmpi.collectives.forming import exchange, form
from kvmpi.collectives.host_group import HostGroup
from kvmpi.deadline import Deadline
from kvmpi.errors import ranks_in_words

_TAG_HOST = 9
_TAG_FORMED = 10
_TAG_FIGURES = 11


class Layout(msgspec.Struct, frozen=True):
    """``hosts[h]`` are the ranks of a host, ascending; hosts are ordered by their lowest rank. Equal on every rank."""

    hosts: tuple[tuple[int, ...], ...]

    def host_of(self, rank: int) -> int:
        return next(h for h, ranks in enumerate(self.hosts) if rank in ranks)

    def describe(self) -> str:
        """For people: ``0 to 7 | 8, 9``."""
        return " | ".join(map(ranks_in_words, self.hosts))


class Topology(msgspec.Struct, frozen=True):
    """The layout, and this rank's host as a group; or why there is none, which is then so on every rank.

    ``figures`` are those of rank 0: algorithms are chosen by them, and must be chosen alike.
    """

    layout: Layout
    group: HostGroup | str
    figures: Figures


def locate(
    comm: Comm, figures: Figures, deadline: Deadline, label: str = "", *, attach: bool = True, wake: bool = True
) -> Topology:
    """Collective: find out who is where.

    Args:
        attach, wake: as of ``form``.
    Raises:
        KVTimeoutError: a rank did not take part.
    """
    layout = discover(comm, deadline, label)
    group = form(comm, layout.hosts[layout.host_of(comm.rank)], deadline, label, attach=attach, wake=wake)
    formed = exchange(
        comm, range(comm.size), np.array([not isinstance(group, str)], np.uint64), _TAG_FORMED, deadline, label
    )
    outside = [rank for rank, answer in enumerate(formed) if not answer[0]]
    if outside and not isinstance(group, str):
        group = f"the ranks of MPI rank {outside[0]}'s host share no memory"
    words = np.array(as_words(figures))
    agreed = exchange(comm, range(comm.size), words.view(np.uint64), _TAG_FIGURES, deadline, label)[0]
    return Topology(layout, group, from_words(agreed.view(np.float64).tolist()))


def discover(comm: Comm, deadline: Deadline, label: str) -> Layout:
    """Collective: compare host names.

    Raises:
        KVTimeoutError: a rank did not take part.
    """
    digest = np.frombuffer(hashlib.sha256(comm.host.encode()).digest()[:16], np.uint64)
    hosts: dict[bytes, list[int]] = {}
    for rank, found in enumerate(exchange(comm, range(comm.size), digest, _TAG_HOST, deadline, label)):
        hosts.setdefault(found.tobytes(), []).append(rank)
    return Layout(tuple(map(tuple, hosts.values())))
