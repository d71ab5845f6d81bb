"""Where the processes of a job meet: what torch.distributed reads from the environment, and the ranks of a group."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvmpi.collectives import SoloComm, mpi_comm, torchrun
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.exchange import GroupCollectives
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError
from kvmpi.store.factory import client_comm, close_at_exit
from kvmpi.torch.forks import warn_of_forks
from kvmpi.torch.group.process_group import KvmpiProcessGroup

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Pending connections to the store: all ranks come at once.
_BACKLOG = 2048
#: The store of rank 0, which lives as long as the process: torch finds it by its port.
_store: Any = None
_client_is_world = False


def make_client_the_world() -> None:
    """In a job of several clients, let process groups span the workers of one client.

    For programs in which something else carries data between clients: ``kvmpi.torch.ddp_comm_hook``, ``DiLoCo``,
    ``ElasticAveraging``. To be called before ``init_process_group``.
    """
    global _client_is_world
    _client_is_world = True


def publish() -> None:
    """Set what torch's ``env://`` reads, and torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    With others also LOCAL_* and GROUP_RANK, the number of the host, by which frameworks tell hosts apart.

    What is set already stays. Collective over the ranks that an MPI launcher started, unless all four are set.

    Raises:
        KVTimeoutError: other ranks did not come within ``KVMPI_TIMEOUT_S``.
    """
    if all(os.environ.get(name) for name in _NAMES):
        return
    config = Config.from_env()
    comm: Comm = client_comm(config) or SoloComm()
    deadline, label = Deadline(config.timeout_s), "import kvmpi.torch.c10d"
    collectives = GroupCollectives(comm)
    hosts = [host.decode() for host in collectives.all_tell(comm.host.encode(), deadline, label)]
    local = [rank for rank, host in enumerate(hosts) if host == comm.host]
    address = port = ""
    if comm.rank == 0:
        everybody_here = len(local) == comm.size
        address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if everybody_here else socket.gethostname())
        port = os.environ.get("MASTER_PORT") or str(_serve(address, everybody_here, config.timeout_s))
    address, port = collectives.tell(f"{address} {port}".encode(), 0, deadline, label).decode().split(" ")
    comm.free()
    found = {"RANK": comm.rank, "WORLD_SIZE": comm.size, "MASTER_ADDR": address, "MASTER_PORT": port}
    if comm.size > 1:  # else a framework that is about to start others would think that somebody has done so
        found |= {
            "LOCAL_RANK": local.index(comm.rank),
            "LOCAL_WORLD_SIZE": len(local),
            "GROUP_RANK": list(dict.fromkeys(hosts)).index(comm.host),
        }
    for name, value in found.items():
        os.environ.setdefault(name, str(value))


def _serve(address: str, everybody_here: bool, timeout_s: float) -> int:
    """Start torch's store on a port that the system chooses; only this host reaches it if all ranks are here."""
    global _store
    if everybody_here:
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    elif socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0), backlog=_BACKLOG)
    port: int = listener.getsockname()[1]
    # It is torch that closes the socket. Of several stores of a process on one port, torch makes one server.
    # The server that is the default from torch 2.4 on took no socket at first.
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    older = {"use_libuv": False} if (2, 4) <= version < (2, 8) else {}
    _store = dist.TCPStore(
        address, port, None, True, timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True,
        master_listen_fd=listener.detach(), **older,
    )  # fmt: skip
    return port


def create_group(options: Any, _: Any) -> KvmpiProcessGroup:
    """What torch calls for ``init_process_group("kvmpi")`` and ``new_group``, on every rank of the new group.

    Raises:
        ConfigError: the processes of the group are not the ranks of one MPI job.
        KVTimeoutError: a rank did not come within the group's timeout; names it.
    """
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    name, config = str(options.group_id), Config.from_env()
    ranks = list(options.global_ranks_in_group) or list(range(size))
    where = f"process group {name!r} of {size} ranks"
    if config.num_worlds > 1 and not _client_is_world:
        raise ConfigError(
            f"{where}: this job has {config.num_clients} clients, and torch.distributed would span only the workers of "
            f"client {config.client_rank}; start the job with -c 1, or call "
            "kvmpi.torch.c10d.make_client_the_world() before, if something else carries data between clients"
        )
    comm: Comm = SoloComm()
    if size > 1 and mpi_comm.started_by_mpi():
        comm = mpi_comm.members(_meet(options.store, rank, size, timeout, where), timeout.total_seconds())
    elif size > 1:
        deadline = Deadline(timeout.total_seconds())
        comm = torchrun.connect(options.store, rank, size, deadline, where, config.interface)
    group = KvmpiProcessGroup(comm, name, ranks, timeout.total_seconds(), config)
    close_at_exit(group)
    warn_of_forks(group)
    return group


def _meet(store: Any, rank: int, size: int, timeout: timedelta, where: str) -> list[int]:
    """The ranks in ``MPI_COMM_WORLD`` of all members, once all of them are here."""
    own = str(mpi_comm.own_rank()).encode()
    found = list(map(int, torchrun.leave(store, rank, size, own, Deadline(timeout.total_seconds()), where)))
    if len(set(found)) < size:
        raise ConfigError(
            f"{where}: its members are MPI ranks {found}, but must all be different ranks of one MPI_COMM_WORLD: are "
            "they of several clients, or of several mpirun?"
        )
    return found
