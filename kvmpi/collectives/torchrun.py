"""Where processes meet that torchrun has started, or somebody who says the same: in torch's own store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from kvmpi.collectives import mpi_comm
from kvmpi.collectives.linking import each_to_each, own_addresses
from kvmpi.collectives.mesh import Mesh, MeshComm
from kvmpi.collectives.probing import watch
from kvmpi.collectives.waiting import expect_cores
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVTimeoutError, ranks_in_words
from kvmpi.machine import host_name

#: What torchrun tells each of its processes.
_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Of this process, with all others.
_world: MeshComm | None = None


def started() -> bool:
    """Whether this process is one of several of torch's; to be asked where no MPI has started it."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return all(name in os.environ for name in _NAMES) and rank.isdigit() and size.isdigit() and int(size) > 1


def world(timeout_s: float, network: str = "") -> MeshComm:
    """A communicator of all processes. Collective.

    Args:
        network: as of ``linking.own_addresses``.
    Raises:
        ConfigError: torch is not here.
        KVTimeoutError, PeerLostError: others do not come, or cannot be reached.
    """
    global _world
    if _world is None:
        mpi_comm.take_place(_NAMES, of="job of torch's")
        try:
            from torch.distributed import rendezvous
        except ImportError as error:
            raise ConfigError(
                f"torchrun has started this process, and torch, in whose store they meet, is not here ({error})"
            ) from None
        try:
            found: Any = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
        except RuntimeError as error:
            at = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise KVTimeoutError(
                f"rank {os.environ['RANK']} of torchrun: the store at {at}, where all {os.environ['WORLD_SIZE']} meet: "
                f"they were not there within {timeout_s:.1f} s ({str(error).splitlines()[0]})"
            ) from None
        store, rank, size = found
        _world = connect(store, rank, size, Deadline(timeout_s), f"the job of {size} ranks of torchrun", network)
    return _world.duplicate()


def members(ranks: Sequence[int], name: str) -> MeshComm:
    """A communicator of some of the processes, in this order, once ``world`` has connected them; to be called by these.

    Args:
        name: of which there is no other with these ranks.
    """
    assert _world is not None
    return _world.of(ranks, name)


def connect(store: Any, rank: int, size: int, deadline: Deadline, where: str, network: str = "") -> MeshComm:
    """Connections between all of some ranks, as a communicator. Collective over them.

    Args:
        store: of torch, with nobody else's words in it.
        where: for error messages.
    Raises:
        KVTimeoutError, PeerLostError: as of ``world``.
    """

    def swap(what: str, words: bytes) -> list[bytes]:
        return leave(store, rank, size, words, deadline, where, what)

    here = swap("hosts", host_name().encode()).count(host_name().encode())
    # Whoever is alone on a host listens to nobody else.
    own = [("127.0.0.1", 0)] if here == size else own_addresses(network)
    peers = each_to_each(rank, size, partial(swap, "offers"), own, deadline)
    expect_cores(here)
    if here < size:
        watch()
    names = {other: f"rank {other} of {size}" for other in range(size)}
    return MeshComm(Mesh(rank, peers, names), range(size), "world")


def leave(
    store: Any, rank: int, size: int, words: bytes, deadline: Deadline, where: str, what: str = "ranks"
) -> list[bytes]:  # fmt: skip
    """What every rank has left in the store, once all are here.

    Args:
        what: it is; of one kind no two at a time.
    Raises:
        KVTimeoutError: some do not come; names them.
    """
    keys, read = [f"kvmpi/{what}/{each}" for each in range(size)], f"kvmpi/{what}/read"
    store.set(keys[rank], words)
    try:
        store.wait(keys, timedelta(seconds=max(0.001, deadline.remaining_s())))
    except RuntimeError as error:
        missing = [each for each in range(size) if not store.check([keys[each]])]
        raise KVTimeoutError(
            f"{where}, on rank {rank} of it: its rank {ranks_in_words(missing) or '?'} did not come within "
            f"{deadline.timeout_s:.1f} s; every member must create its groups in the same order ({error})"
        ) from None
    # All at once, where the store can: else there would be as many requests of each as there are members.
    found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    # A group of the same name may be made again, and must not find these.
    if store.add(read, 1) == size:
        for key in (*keys, read):
            store.delete_key(key)
    return list(map(bytes, found))
