"""``kvmpi.create``: from the name of a store type and the job that this process is part of to a store."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from kvmpi import ps
from kvmpi.collectives import Comm
from kvmpi.config import Config, client_bounds, close_to
from kvmpi.errors import ConfigError, NotLaunchedError, UnsupportedError
from kvmpi.ps.reporter import begin_reports, end_reports
from kvmpi.store.base import KVStore, dropped
from kvmpi.store.dist import DistStore
from kvmpi.store.replicated import ReplicatedStore
from kvmpi.trace import timeline
from kvmpi.trace.activity import activity
from kvmpi.warning import warn

_log = logging.getLogger(__name__)

Factory = Callable[[Config], KVStore]

_ALIASES = {
    "device": "local",
    "allreduce": "mpi",
    "synchronous-mpi": "dist_sync_mpi",
    "asynchronous-mpi": "dist_async_mpi",
}


class Closing(Protocol):
    """What has threads and peers, and is to be closed before the process ends."""

    @property
    def closed(self) -> bool: ...

    @property
    def broken(self) -> bool:
        """Whether peers were lost, so that the process cannot end MPI in good order."""
        ...

    @property
    def mpi_size(self) -> int: ...

    def close(self) -> None: ...

    def abort(self, failure: BaseException | None = None) -> None: ...


#: Kept alive until they are closed: a store that was merely dropped still has threads, peers and files.
_open: list[Closing] = []
#: Stores of a process that is a job by itself. Nobody else waits for these: one to which nothing refers any more can be
#: closed, as when a cell of a notebook is run again and has made another.
_alone: weakref.WeakSet[KVStore] = weakref.WeakSet()


def create(name: str = "local", **settings: Any) -> KVStore:
    """A store of the type called ``name``.

    Types: ``local`` (``device``), ``mpi`` (``allreduce``), ``dist_sync``, ``dist_async``, ``dist_ssp``,
    ``dist_softsync``, ``dist_sync_mpi`` (``synchronous-mpi``), ``dist_async_mpi`` (``asynchronous-mpi``),
    ``dist_ssp_mpi``, ``dist_softsync_mpi``, and what ``register_store`` added. Collective over all workers, which must
    create the same stores in the same order: those of ``kvmpi run``, the ranks of an mpirun, the processes of a
    torchrun; where a type needs servers and no ``kvmpi run`` has started them, some of the workers do. In a process
    that was started by none of these, a type that needs a job runs as a job of one worker.

    Args:
        settings: fields of ``kvmpi.config.Config``; they beat the environment.
    Raises:
        ConfigError: unknown type (the message lists the known ones), or a job of a shape that the type cannot use.
    """
    _close_dropped()
    factory = (_FACTORIES.get(name) or _FACTORIES.get(_ALIASES.get(name, ""))) if isinstance(name, str) else None
    if factory is None:
        known = [*_FACTORIES, *_ALIASES]
        raise ConfigError(f"unknown store type {name!r}{close_to([str(name)], known)}; known: {', '.join(known)}")
    config = Config.from_env(**settings)
    store = factory(config)
    if config.resume and name in ("mpi", "allreduce") and store.rank == 0:
        warn(
            f"the job goes on from {config.resume}, with what servers held: a store of type 'mpi' has nothing there, "
            "and its kv.resumed_step is 0. Use a type with servers (dist_sync_mpi), or load a checkpoint of your own"
        )
    if not isinstance(store, KVStore):
        raise ConfigError(f"create({name!r}): its factory returned {store!r}, expected a KVStore")
    if config.role or store.num_workers > 1:
        close_at_exit(store)
    else:
        _alone.add(store)
    activity.begin(store._observe)
    begin_reports(getattr(store, "_config", config), store.client_rank)
    return store


def close_at_exit(thing: Closing) -> None:
    """Close ``thing`` when the process ends, if nobody has."""
    _open[:] = [known for known in _open if not known.closed or known.broken]
    _open.append(thing)


def _close_dropped() -> None:
    """Close stores of this process alone to which nothing refers any more."""
    if any(not store.closed for store in _alone):
        gc.collect()  # the keys of a store refer to it
    while dropped:
        store = dropped.popleft()
        activity.begin(store._observe)  # what it has done goes on to count
        try:
            store.close()
        except Exception as error:
            _log.warning("kvmpi: a store that nothing referred to any more was closed, and had failed: %s", error)


def register_store(name: str, factory: Factory) -> None:
    """Make ``create(name)`` call ``factory(config)``, which returns a ``KVStore``; also for a name that is there.

    Raises:
        ConfigError: a name that is no text, or a factory that cannot be called.
    """
    if not isinstance(name, str) or not name or not callable(factory):
        raise ConfigError(f"register_store({name!r}, {factory!r}): expected a name and a function")
    _FACTORIES[name] = factory


def _local(config: Config) -> KVStore:
    return ReplicatedStore("local", config)


def _mpi(config: Config) -> KVStore:
    if config.num_worlds > 1:
        raise ConfigError(
            f"store type 'mpi' needs all workers in one client, this job has {config.num_clients}; "
            "start it with -c 1, or use dist_sync_mpi with servers"
        )
    return ReplicatedStore("mpi", config, client_comm(config))


def _dist(mode: str, *, grouped: bool) -> Factory:
    name = f"dist_{mode}_mpi" if grouped else f"dist_{mode}"

    def factory(config: Config) -> KVStore:
        _require_threads()
        if grouped and mode == "sync" and _without_servers(config) and config.num_clients == 1:
            return ReplicatedStore(name, config, client_comm(config))
        if not config.role and not _is_one_of_several():
            _require_no_lone_tasks()
            job = ps.EmbeddedJob(replace(config, num_workers=1, num_clients=1))
            try:
                return DistStore(name, job.config, None, mode=_full(mode, config), grouped=grouped, embedded=job)
            except BaseException:
                job.close()
                raise
        if not config.role:
            from kvmpi.store import hosting

            hosted = hosting.job(config, lambda: _everyone(config), _close_at_exit)
            told = hosted.config(config)
            comm = hosted.client_comm(config.timeout_s) if grouped else None
            return DistStore(name, told, comm, mode=_full(mode, told), grouped=grouped)
        if config.num_servers == 0:
            raise ConfigError(f"store type {name!r} needs servers, this job has none; start it with -s 1 or more")
        if not config.scheduler:
            raise NotLaunchedError("KVMPI_SCHEDULER is not set; start the job with 'kvmpi run'")
        comm = client_comm(config) if grouped else None
        return DistStore(name, config, comm, mode=_full(mode, config), grouped=grouped)

    return factory


def _full(mode: str, config: Config) -> str:
    """The mode with its parameter, which all clients have to choose alike."""
    parameters = {"ssp": config.staleness, "softsync": config.softsync}
    return f"{mode}:{parameters[mode]}" if mode in parameters else mode


def _without_servers(config: Config) -> bool:
    return config.num_servers == 0 and (bool(config.role) or _is_one_of_several())


def _is_one_of_several() -> bool:
    """Whether there are others, which can be reached, and no launcher of ours."""
    from kvmpi.collectives import mpi_comm, torchrun

    return mpi_comm.started_by_mpi() or torchrun.started()


def _require_no_lone_tasks() -> None:
    """Raises:
    ConfigError: this is one of several processes, and each would train by itself without anybody noticing.
    """
    from kvmpi.collectives import mpi_comm

    if (found := mpi_comm.lone_tasks()) is None:
        return
    who, tasks = found
    if who == "srun":
        raise ConfigError(
            f"srun has started {tasks} tasks without MPI between them (--mpi=none, or a Slurm that has no other), and "
            f"each would train by itself; start them with 'kvmpi run -n {tasks} PROGRAM' in salloc or sbatch, or by "
            "srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH, if srun --mpi=list has it; a task that is to be alone "
            "starts 'kvmpi run PROGRAM', or makes a store of type 'local'"
        )
    raise ConfigError(
        f"{who} to {tasks} has not set RANK and MASTER_PORT, as torchrun does: the others cannot be reached, and each "
        f"would train by itself; start them with torchrun, or with 'kvmpi run -n {tasks} PROGRAM'; a process that is "
        "to be alone makes a store of type 'local'"
    )


def _require_threads() -> None:
    """Raises:
    UnsupportedError: a library has put greenlets in the place of threads. They take turns where Python waits, and
        whoever waits in libzmq or MPI would stop all of them for ever.
    """
    if (gevent := sys.modules.get("gevent.monkey")) is not None:
        names = [name for name in ("threading", "select", "queue") if gevent.is_module_patched(name)]
        leave = ("gevent", "gevent.monkey.patch_all(thread=False, select=False, queue=False)")
    elif (eventlet := sys.modules.get("eventlet.patcher")) is not None:
        names = [name for name in ("thread", "select") if eventlet.is_monkey_patched(name)]
        leave = ("eventlet", "eventlet.monkey_patch(thread=False, select=False)")
    else:
        return
    if names:
        raise UnsupportedError(
            f"{leave[0]} has replaced Python's {' and '.join(names)} in this process, and kvmpi needs those of the "
            f"system: whoever waits for a peer would stop all greenlets for ever; call {leave[1]} in place of what was "
            "called, or have the store in a process of its own"
        )


def client_comm(config: Config) -> Comm | None:
    """The communicator of this worker's client, collective over its workers; None for a worker that is alone."""
    from kvmpi.collectives import mpi_comm

    _require_threads()
    if not config.role:
        if _is_one_of_several():
            return _everyone(config)
        _require_no_lone_tasks()
        return None
    first, last = client_bounds(config.num_workers, config.num_clients)[config.client_rank]
    if last - first == 1:
        return None
    comm = mpi_comm.world(config.timeout_s)
    if comm.size == 1 and mpi_comm.started_by_mpi():
        raise ConfigError(
            f"client {config.client_rank} has {last - first} workers, and MPI sees one: the library that mpi4py has "
            "loaded is of another MPI than the mpirun that has started them; 'kvmpi doctor' shows both. KVMPI_MPIRUN "
            "names an mpirun, MPI4PY_LIBMPI the library for a wheel of mpi4py; one that was built finds its own"
        )
    if comm.size != last - first:
        raise ConfigError(
            f"client {config.client_rank} should have {last - first} workers, its MPI_COMM_WORLD has {comm.size}; "
            "start the job with 'kvmpi run', which starts one mpirun for each client"
        )
    return comm


def _everyone(config: Config) -> Comm:
    """A communicator of all workers, where no launcher of ours has started them. Collective."""
    from kvmpi.collectives import mpi_comm, torchrun

    if not mpi_comm.started_by_mpi():
        return torchrun.world(config.timeout_s, config.interface)
    everyone = mpi_comm.world(config.timeout_s)
    if everyone.size == 1:  # each would train by itself, and think that it is all there is
        raise ConfigError(
            "several ranks were started, and MPI sees one: its library and who started them do not understand "
            "each other; take mpirun of the same MPI, or srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH"
        )
    return everyone


_FACTORIES: dict[str, Factory] = {
    "local": _local,
    "mpi": _mpi,
    "dist_sync": _dist("sync", grouped=False),
    "dist_async": _dist("async", grouped=False),
    "dist_ssp": _dist("ssp", grouped=False),
    "dist_softsync": _dist("softsync", grouped=False),
    "dist_sync_mpi": _dist("sync", grouped=True),
    "dist_async_mpi": _dist("async", grouped=True),
    "dist_ssp_mpi": _dist("ssp", grouped=True),
    "dist_softsync_mpi": _dist("softsync", grouped=True),
}


def _forget() -> None:
    """In a forked child: what is open is its parent's to close."""
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def _close_at_exit() -> None:
    """Close what is open; if this process ends with an error, do not wait for peers that wait for it."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for thing in (*_open, *_alone, *dropped):
        if error is not None:
            thing.abort(error)
            continue
        try:
            thing.close()
        except Exception:  # the others are to be closed all the same
            traceback.print_exc()
    end_reports()
    has_failed = any(thing.mpi_size > 1 and (error is not None or thing.broken) for thing in _open)
    if (hosting := sys.modules.get("kvmpi.store.hosting")) is not None:
        has_failed |= hosting.end(failed=error is not None)
    if "mpi4py.MPI" in sys.modules:
        from kvmpi.collectives import mpi_comm

        mpi_comm.remove_segment()
    if has_failed and "mpi4py.MPI" in sys.modules:
        # MPI_Finalize would wait for ranks that wait for this one: end the client's job instead.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # it may be closed, or its disk full
                stream.flush()
        timeline.flush()
        from kvmpi.collectives import mpi_comm

        code = error.code if isinstance(error, SystemExit) else 130 if isinstance(error, KeyboardInterrupt) else 1
        mpi_comm.end_job(code if isinstance(code, int) else 1)
