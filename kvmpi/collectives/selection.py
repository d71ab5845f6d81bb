"""Which algorithm does a collective, the one that is named or the cheapest here; each is made when it is needed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvmpi.arrays import Vector
from kvmpi.collectives.algorithm import Algorithm
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.cost import MODEL_RINGS, Choice, Figures, costs
from kvmpi.collectives.guard import Guard
from kvmpi.collectives.hierarchical import Hierarchical
from kvmpi.collectives.host_group import HostGroup
from kvmpi.collectives.library import Library
from kvmpi.collectives.lines import Lines
from kvmpi.collectives.linking import Linked, link
from kvmpi.collectives.links import Links
from kvmpi.collectives.naive import Naive
from kvmpi.collectives.nccl import Nccl, connect
from kvmpi.collectives.rings import Rings
from kvmpi.collectives.shared import Shared
from kvmpi.collectives.shortcut import Route
from kvmpi.collectives.topology import Topology, locate
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, UnsupportedError

ALGORITHMS = ("auto", "shared", "hierarchical", "multi_ring", "ring", "host_ring", "nccl", "mpi", "naive")
#: Those that sum what lies in memory of a host where it lies.
SHARING = ("auto", "shared", "hierarchical")
_log = logging.getLogger(__name__)
#: Memory that ranks share is given out above this size, since of smaller sums every rank writes all, and would write
#: there at the same time as others; and from this size on MPI's own collectives are not chosen: they would leave
#: partial sums there.
COMMON_ABOVE_BYTES = 256 << 10
#: Rings between hosts have connections of their own from this size on: to be woken takes longer than to look.
LINKED_FROM_BYTES = 256 << 10


class Selection:
    """The algorithms of one communicator. Everything here depends on nothing but what is equal on all ranks.

    Args:
        guard: of that communicator.
        calls: what agreements travel over, if it is to have connections between hosts, too.
        others: as of ``Collectives``.
    Attributes:
        settings: for people, those that must be equal on all ranks.
        topology: found out at the first call that depends on it.
        links, calls: connections between hosts, of rings and to agree over; likewise, where there are any.
        shared: if it sums whatever comes.
    """

    def __init__(
        self, comm: Comm, guard: Guard, algorithm: str, chunk_bytes: int, *, num_rings: int, attach: bool,
        figures: Figures, ring_transport: str, interface: str, use_native: bool, calls: Comm | None = None,
    ) -> None:  # fmt: skip
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"allreduce algorithm {algorithm!r}; known: {', '.join(ALGORITHMS)}")
        if not 1 <= num_rings <= 8:
            raise ConfigError(f"{num_rings} rings: expected 1 to 8")
        self._comm, self._guard, self._calls = comm, guard, calls
        self.algorithm, self._chunk_bytes = algorithm, chunk_bytes
        self._num_rings, self._attach, self._figures = num_rings, attach, figures
        self._ring_transport, self._interface, self._use_native = ring_transport, interface, use_native
        self.settings = (
            f"KVMPI_ALLREDUCE={algorithm} KVMPI_NUM_RINGS={num_rings} KVMPI_RING_TRANSPORT={ring_transport} "
            f"KVMPI_RING_CHUNK_BYTES={chunk_bytes}"
        )
        self._choices: dict[tuple[str, int], Choice] = {}
        self._made: dict[tuple[str, Comm], Algorithm] = {}
        self._unlinked = ""  # why there are no links
        self.topology: Topology | None = None
        self.links: Links | None = None
        self.calls: Lines | None = None
        self.shared: Shared | None = None

    @property
    def num_hosts(self) -> int:
        """Hosts on which the ranks are; 0 as long as that is not known."""
        if self._comm.size == 1:
            return 1
        return 0 if self.topology is None else len(self.topology.layout.hosts)

    @property
    def group_of_all(self) -> HostGroup | None:
        """All ranks, if they are known to share memory."""
        topology = self.topology
        if topology is None or isinstance(topology.group, str) or len(topology.layout.hosts) > 1:
            return None
        return topology.group

    @property
    def route(self) -> Route | None:
        """By which ranks can agree, if they are known to share memory on their hosts, or to be woken by others."""
        topology = self.topology
        if topology is None or isinstance(topology.group, str):
            return None
        if len(topology.layout.hosts) == self._comm.size and self.calls is None:
            return None
        return Route(topology.group, topology.layout.hosts, self.calls)

    def close(self) -> None:
        """End the connections, and keep no memory but what others may still read."""
        for connections in (self.links, self.calls):
            if connections is not None:
                connections.close()
        for algorithm in self._made.values():
            if isinstance(algorithm, Nccl):
                algorithm.close()
        if self.topology is not None and not isinstance(self.topology.group, str):
            self.topology.group.close()
            self.topology = replace(self.topology, group="it is closed")
        # What they sum in: whoever has made this may be referred to for long.
        self._made.clear()
        self.shared = self._guard.group = None

    # ---- where the ranks are

    def located(self, deadline: Deadline, label: str) -> Topology:
        """Who is where. Collective at first.

        Raises:
            UnsupportedError: hosts are not connected as the settings want it.
        """
        if self.topology is None:
            self.topology = self._guard.run(lambda: self._locate(deadline, label), deadline)
            if not isinstance(self.topology.group, str):
                self._guard.group = self.topology.group
        if self._unlinked and self._ring_transport == "tcp":  # all ranks know, and nothing is under way
            raise UnsupportedError(f"{label}: KVMPI_RING_TRANSPORT=tcp: {self._unlinked}")
        return self.topology

    def _locate(self, deadline: Deadline, label: str) -> Topology:
        topology = locate(
            self._comm, self._figures, deadline, label, attach=self._attach, wake=self._use_native
        )  # fmt: skip
        if isinstance(topology.group, str):
            _log.info("ranks of a host share no memory: %s", topology.group)
        if len(topology.layout.hosts) > 1 and self._ring_transport != "mpi":
            linked = link(
                self._comm, topology.layout, max(MODEL_RINGS, self._num_rings), deadline, label, calls=self._calls,
                network=self._interface, despite_fabric=self._ring_transport == "tcp",
            )  # fmt: skip
            if isinstance(linked, Linked):
                self.links, self.calls = linked
            else:
                self._unlinked = linked
                _log.info("rings between hosts use MPI: %s", linked)
        return topology

    # ---- what is chosen

    def choose(self, op: str, nbytes: int, deadline: Deadline, label: str) -> Choice:
        """How ``op`` on so many bytes is done on two ranks or more. Collective at first."""
        size = 1 << nbytes.bit_length()  # one choice for all sizes between two powers of two
        found = self._choices.get((op, size))
        if found is None:
            topology = self.located(deadline, label)
            options = costs(
                op, 3 * size // 4, tuple(map(len, topology.layout.hosts)), topology.figures,
                shares=not isinstance(topology.group, str),
                has_library=self._comm.has_collectives and nbytes < COMMON_ABOVE_BYTES,
                linked=self.links is not None and nbytes >= LINKED_FROM_BYTES,
            )  # fmt: skip
            if self.algorithm == "auto":
                found = min(options.values(), key=lambda choice: choice.seconds)
            else:
                like = "hierarchical" if self.algorithm in SHARING and "hierarchical" in options else "ring"
                found = Choice(self.algorithm, self._num_rings if self.algorithm == "multi_ring" else 1,
                               options[like].chunk_bytes)  # fmt: skip
            if self._chunk_bytes:
                found = found._replace(chunk_bytes=self._chunk_bytes)
            self._choices[op, size] = found
        return found

    def expected_seconds(self, done: Sequence[float] | None) -> float:
        """What an allreduce of the mean size should take by the figures of the cost model; 0: nobody knows yet.

        Args:
            done: seconds, bytes and calls of those that there were.
        """
        if done is None or not done[2] or not done[1] or self.topology is None:
            return 0.0
        layout, group, figures = self.topology.layout, self.topology.group, self.topology.figures
        options = costs(
            "allreduce", int(done[1] / done[2]), tuple(map(len, layout.hosts)), figures,
            shares=not isinstance(group, str), has_library=self._comm.has_collectives,
            linked=self.links is not None,
        )  # fmt: skip
        return min(choice.seconds for choice in options.values())

    # ---- what it is done with

    def algorithm_of(
        self, choice: Choice, nbytes: int, deadline: Deadline, label: str, tensors: Sequence[Sequence[Vector]] = ()
    ) -> Algorithm:
        """What does so many bytes as is chosen. Collective at first.

        Args:
            tensors: what is summed, if that may be on devices.
        Raises:
            UnsupportedError: it is not possible here; the message says why.
        """
        linked = self.links is not None and nbytes >= LINKED_FROM_BYTES and choice.algorithm != "nccl"
        comm = self.links if linked and self.links is not None else self._comm
        found = self._made.get((choice.algorithm, comm))
        if found is None:
            devices = [vector.buffer for sources in tensors for vector in sources if not vector.on_host]
            found = self._made[choice.algorithm, comm] = self._make(choice.algorithm, comm, deadline, label, devices)
        return found

    def _make(self, name: str, comm: Comm, deadline: Deadline, label: str, devices: Sequence[Any]) -> Algorithm:
        if name in ("ring", "host_ring", "multi_ring"):
            return Rings(comm, use_native=self._use_native)
        if name == "naive":
            return Naive(self._comm)
        if name == "mpi" and self._comm.has_collectives:
            return Library(self._comm)
        where = f"{label}: algorithm {name!r}"
        if name == "mpi":
            raise UnsupportedError(f"{where} needs an MPI communicator")
        if name == "nccl":
            found: Nccl | str = self._guard.run(lambda: connect(self._comm, devices, deadline, label))
            if isinstance(found, str):
                raise UnsupportedError(f"{where}: {found}")
            return found
        topology = self.located(deadline, label)
        if isinstance(topology.group, str):
            raise UnsupportedError(f"{where}: {topology.group}")
        if len(topology.layout.hosts) == 1:
            shared = Shared(topology.group, use_native=self._use_native)
            always = self.algorithm == name or all(
                self.choose("allreduce", 1 << bits, deadline, label).algorithm == name for bits in range(1, 40)
            )
            if topology.group.attaches and always:
                self.shared = shared
            return shared
        if name == "shared":
            raise UnsupportedError(f"{where}: ranks are on different hosts, {topology.layout.describe()}")
        return Hierarchical(comm, topology.layout, topology.group, use_native=self._use_native)
