"""``init`` and what it finds: the ranks of the job, and the process group that the operations run on."""

from __future__ import annotations

from typing import Any

from kvmpi.collectives import Comm, SoloComm
from kvmpi.collectives.exchange import GroupCollectives
from kvmpi.config import Config
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, NotLaunchedError, UnsupportedError
from kvmpi.horovod.group import HorovodGroup
from kvmpi.horovod.unsupported import check_process_set
from kvmpi.store.factory import client_comm, close_at_exit
from kvmpi.torch.forks import warn_of_forks


class _Job:
    """The ranks, and on which hosts they are."""

    def __init__(self, wanted: Any = None) -> None:
        config = Config.from_env()
        if config.num_worlds > 1:
            raise ConfigError(
                f"hvd.init: this job has {config.num_clients} clients, and Horovod's operations are over the ranks of "
                "one; start the job with -c 1, or use a store (kvmpi.create) for what goes between clients"
            )
        comm: Comm = client_comm(config) or SoloComm()
        names = GroupCollectives(comm).all_tell(comm.host.encode(), Deadline(config.timeout_s), "hvd.init")
        _check_whole(wanted, comm.size)
        hosts = list(dict.fromkeys(names))
        local = [rank for rank, name in enumerate(names) if name == names[comm.rank]]
        self.local_rank, self.local_size = local.index(comm.rank), len(local)
        # The ranks of the same place on their hosts, as Horovod counts them.
        places = [names[:rank].count(name) for rank, name in enumerate(names)]
        alike = [names[rank] for rank in range(comm.size) if places[rank] == self.local_rank]
        self.cross_rank, self.cross_size = alike.index(names[comm.rank]), len(alike)
        self.homogeneous = len({names.count(host) for host in hosts}) == 1
        self.group = HorovodGroup(comm, "horovod", range(comm.size), config.timeout_s, config)
        close_at_exit(self.group)
        warn_of_forks(self.group)


def _check_whole(comm: Any, size: int) -> None:
    """Raise unless ``comm``, one of mpi4py or a list of ranks, has all ranks; an empty list stands for all."""
    if comm is None:
        return
    ranks = range(comm.Get_size()) if hasattr(comm, "Get_size") else sorted(comm)
    if list(ranks) not in ([], list(range(size))):
        raise UnsupportedError(
            f"hvd.init with {len(ranks)} ranks in a job of {size}: operations are over all ranks of the job; start it "
            "with as many as it is to have, or use torch.distributed.new_group on the backend kvmpi (kvmpi.torch.c10d)"
        )


_job: _Job | None = None


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Find the ranks of the job. Collective over all of them; a second call does nothing.

    Started by plain ``python``, the job is this one rank. One operation may take ``KVMPI_TIMEOUT_S``.

    Args:
        comm: a list of ranks or a communicator of mpi4py, as Horovod takes it; here it must have all ranks.
        process_sets: none.

    Raises:
        ConfigError: the job has several clients.
        UnsupportedError: process sets, or another communicator than all ranks, are asked for.
        KVTimeoutError: other ranks did not come.
    """
    global _job
    if process_sets:
        check_process_set(process_sets)
    if _job is None:
        _job = _Job(comm)
    else:
        _check_whole(comm, size())


def shutdown() -> None:
    """Wait for what is under way and release everything. ``init`` may be called again."""
    global _job
    if _job is not None:
        _job.group.shutdown()
        _job = None


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` was not since."""
    return _job is not None


def _found() -> _Job:
    if _job is None:
        raise NotLaunchedError("kvmpi.horovod is not initialised; call hvd.init() first")
    return _job


def group() -> HorovodGroup:
    """The process group of all ranks.

    Raises:
        NotLaunchedError: ``init`` was not called.
    """
    return _found().group


def rank() -> int:
    """This process's rank, from 0 on. Raises NotLaunchedError before ``init``, as do the next ones."""
    return group().rank()


def size() -> int:
    """How many ranks there are."""
    return group().size()


def local_rank() -> int:
    """This process's rank among those of its host: which GPU is its own."""
    return _found().local_rank


def local_size() -> int:
    """How many ranks are on this host."""
    return _found().local_size


def cross_rank() -> int:
    """The place of this host among those that have a rank with this ``local_rank``."""
    return _found().cross_rank


def cross_size() -> int:
    """How many hosts have a rank with this ``local_rank``."""
    return _found().cross_size


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    return _found().homogeneous


def mpi_threads_supported() -> bool:
    """True: kvmpi wants an MPI that threads may call."""
    return True


def mpi_enabled() -> bool:
    """True: MPI carries the ranks' messages."""
    return True


def mpi_built() -> bool:
    """True: MPI carries the ranks' messages."""
    return True


def gloo_enabled() -> bool:
    """False: there is no Gloo here."""
    return False


def gloo_built() -> bool:
    """False: there is no Gloo here."""
    return False


def nccl_built() -> int:
    """0: tensors of GPUs are exchanged through host memory."""
    return 0


def cuda_built() -> bool:
    """False: tensors of GPUs are exchanged through host memory."""
    return False


def rocm_built() -> bool:
    """False: tensors of GPUs are exchanged through host memory."""
    return False


def ddl_built() -> bool:
    """False: there is no IBM DDL here."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL here."""
    return False
