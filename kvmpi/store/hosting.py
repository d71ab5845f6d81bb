"""Jobs with servers that mpirun or torchrun has started: some of the workers start the scheduler and the servers.

Worker 0 starts the scheduler, and the first worker of each host starts the servers there. They are children of these
workers, which at their ends wait for all others, so that nobody loses what is still needed.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from kvmpi.collectives import Comm, Request, mpi_comm, torchrun
from kvmpi.collectives.forming import exchange
from kvmpi.collectives.linking import in_order, own_addresses
from kvmpi.config import Config, client_bounds
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVError, PeerLostError, ranks_in_words
from kvmpi.machine import addresses_of, host_name
from kvmpi.ps.children import Children
from kvmpi.ps.embedded import private_folder
from kvmpi.ps.incarnations import restarts
from kvmpi.ps.snapshot_files import Claim, complete
from kvmpi.trace import card, stall

_TAG_WORDS, _TAG_DONE = 21, 22
#: Of what a worker says to all others: as JSON, with spaces behind it.
_WORDS_BYTES = 16 << 10
#: Characters of an error, each of which JSON may need six bytes for.
_MOST_SAID = 2000
#: What all workers have to choose alike.
_SHAPE = ("num_servers", "num_clients", "replicas", "security")
#: By which torchrun says how often it has started this job before.
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
#: For what is left of a job that is started again to end, and between two looks for that and for workers that end.
_LEFT_S, _LOOK_S = 10.0, 0.05
#: For the scheduler's host to answer.
_ANSWER_S = 10.0
#: Of a host, with the speeds of their links.
Addresses: TypeAlias = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class Plan:
    """Who starts what, by rank.

    Attributes:
        first: for each worker the first one of its host.
        starters: for each server the worker that starts it.
    """

    first: list[int]
    starters: list[int]

    @classmethod
    def of(cls, hosts: Sequence[str], num_servers: int) -> Plan:
        """Servers go to all hosts in turn; one to each if ``num_servers`` is 0."""
        first = [hosts.index(host) for host in hosts]
        each = sorted(set(first))
        return cls(first, [each[server % len(each)] for server in range(num_servers or len(each))])

    @property
    def firsts(self) -> list[int]:
        """The first workers of all hosts."""
        return sorted(set(self.first))


class HostedJob:
    """This worker's part in such a job. Collective over all workers.

    Args:
        everyone: a communicator that is this job's alone.
    Raises:
        ConfigError: workers ask for different jobs, or a child cannot be started; on all workers.
        KVTimeoutError, PeerLostError: others do not take part.
    """

    def __init__(self, config: Config, everyone: Comm) -> None:
        self._comm, self._deadline, self._policy = everyone, Deadline(config.timeout_s), config.on_client_loss
        self._children: Children | None = None
        self._held = -1  # the folder: others see that it is in use
        self._told: dict[str, Any] = {}
        self._base: Comm | None = None  # of this worker's client
        try:
            self._begin(config)
        except BaseException:
            self._end_children()
            raise

    def _begin(self, config: Config) -> None:
        rank = self._comm.rank
        shape = {name: getattr(config, name) for name in _SHAPE}
        said = self._swap({"host": self._comm.host, "shape": shape, "addresses": own_addresses(config.interface)})
        addresses = [[(address, speed) for address, speed in each["addresses"]] for each in said]
        self._plan = plan = Plan.of([each["host"] for each in said], config.num_servers)
        _check([each["shape"] for each in said], plan)
        self._bounds = client_bounds(self._comm.size, config.num_clients)
        self._client = next(client for client, (_, last) in enumerate(self._bounds) if rank < last)
        self._told = {
            "role": "worker", "rank": rank, "client_rank": self._client, "num_workers": self._comm.size,
            "num_clients": config.num_clients, "num_servers": len(plan.starters),
        }  # fmt: skip
        own, others = addresses[0], [at for other in plan.firsts[1:] for at in addresses[other]]
        first = self._together(lambda: self._start_scheduler(config, own, others) if rank == 0 else {})[0]
        self._told |= {name: first[name] for name in ("job_id", "scheduler", "resume")}
        keys = first["keys"]
        found = self._together(lambda: self._start_servers(config, keys) if plan.first[rank] == rank else {})
        self._told |= _in_folder(found[plan.first[rank]]["folder"], config)

    def _spans_hosts(self, config: Config) -> bool:
        """Whether it has to be found out by which of its addresses others reach this host."""
        return len(self._plan.firsts) > 1 and config.host == Config.host

    def _start_scheduler(self, config: Config, own: Addresses, others: Addresses) -> dict[str, Any]:
        if self._spans_hosts(config):
            self._told["host"] = _facing(own, others)
        if config.snapshot_dir and _started_before():
            _await_end(config.snapshot_dir)
        self._told |= {"job_id": secrets.token_hex(8), "resume": config.resume or _of_before(config)}
        children = self._make_folder(config)
        at = self.config(config)
        endpoint = children.start_scheduler(at)
        keys = Path(at.keys).read_text(encoding="ascii") if at.keys else ""
        shape = (at.num_workers, at.num_clients, at.num_servers)
        card.write(at.job_dir, at.job_id, sys.argv, shape, launcher=False)
        return {"job_id": at.job_id, "scheduler": endpoint, "resume": at.resume, "keys": keys}

    def _start_servers(self, config: Config, keys: str) -> dict[str, Any]:
        if self._comm.rank and self._spans_hosts(config):
            self._told["host"] = _towards(self._told["scheduler"])
        children = self._children or self._make_folder(config, keys)
        mine = [server for server, starter in enumerate(self._plan.starters) if starter == self._comm.rank]
        children.start_servers(self.config(config), mine)
        return {"folder": self._told["job_dir"]}

    def _make_folder(self, config: Config, keys: str = "") -> Children:
        """The job's folder on this host, and who starts processes there."""
        folder = private_folder()
        self._told |= _in_folder(folder, config)
        self._children = Children(folder, config.grace_s, _say)
        self._held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._held, fcntl.LOCK_SH)
        if keys:
            with open(self._told["keys"], "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(keys)
        return self._children

    def _together(self, make: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """What ``make`` has returned, of all workers.

        Raises:
            KVError: it has raised on one of them.
        """
        failed: Exception | None = None
        try:
            mine = make()
        except (KVError, OSError) as error:
            failed, mine = error, {"failed": f"{type(error).__name__}: {error}"[:_MOST_SAID]}
        found = self._swap(mine)
        if isinstance(failed, KVError):
            raise failed
        for rank, each in enumerate(found):
            if text := each.get("failed"):
                raise ConfigError(f"worker {rank} could not start what it is to start for this job: {text}")
        return found

    def _swap(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """What all workers say, by rank."""
        words = json.dumps(mine).encode().ljust(_WORDS_BYTES)
        ranks = range(self._comm.size)
        found = exchange(
            self._comm, ranks, np.frombuffer(words, np.uint8), _TAG_WORDS, self._deadline, "a job with servers",
            "starting them",
        )  # fmt: skip
        return [json.loads(each.tobytes()) for each in found]

    # ---- what stores need

    def config(self, config: Config) -> Config:
        """``config`` with what a launcher would have told this worker.

        Raises:
            ConfigError: it asks for another job.
        """
        for name, what in (("num_clients", "clients"), ("num_servers", "servers")):
            asked, has = getattr(config, name), self._told[name]
            if asked not in (getattr(Config, name), has):
                raise ConfigError(f"{name}={asked}: the job of this process has {has} {what} since its first store")
        return replace(config, **self._told)

    def client_comm(self, timeout_s: float) -> Comm | None:
        """A communicator of this worker's client, collective over its workers; None for one that is alone."""
        first, last = self._bounds[self._client]
        if last - first == 1:
            return None
        if self._base is None:
            if last - first == self._comm.size:
                self._base = self._comm
            elif mpi_comm.started_by_mpi():
                self._base = mpi_comm.members(range(first, last), timeout_s)
            else:
                self._base = torchrun.members(range(first, last), f"client {self._client}")
        return self._base.duplicate()

    # ---- the end

    def close(self, *, failed: bool) -> bool:
        """This process ends. Where others may need its children, return when they have ended as well.

        Args:
            failed: by an error; nobody is waited for then, and children end when this process has: until then others
                may go on without it, or hear of the error first.
        Returns:
            Whether all others are to be ended, as their launcher does not do it by itself.
        """
        with suppress(KVError):
            self._tell_others()
            if self._children is not None and not failed:
                self._await_others(self._children)
        if not failed:
            self._end_children()
        return failed and self._policy == "fail" and mpi_comm.started_by_mpi()

    def _tell_others(self) -> None:
        word = np.zeros(1, np.uint8)
        firsts = [rank for rank in self._plan.firsts if rank != self._comm.rank]
        sends = [self._comm.isend(word, rank, _TAG_DONE) for rank in firsts]
        deadline = Deadline(_LEFT_S)
        while not all(map(_is_over, sends)) and not deadline.expired():
            time.sleep(_LOOK_S)

    def _await_others(self, children: Children) -> None:
        """For as long as they train: a limit would take their servers away."""
        comm = self._comm
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        waits = {rank: comm.irecv(np.zeros(1, np.uint8), rank, _TAG_DONE) for rank in others}
        serves, waiting = bool(children.labels), stall.Waiting(time.monotonic())
        while bool(children.labels) is serves:
            waits = {rank: request for rank, request in waits.items() if not _is_over(request)}
            if not waits:
                return
            waiting.text = f"its end, as others may need its servers: worker {ranks_in_words(waits)} is not at its end"
            time.sleep(_LOOK_S)

    def _end_children(self) -> None:
        children, self._children = self._children, None
        if children is not None:
            children.close()
        if self._held >= 0:
            os.close(self._held)
            self._held = -1


def _is_over(request: Request) -> bool:
    """Whether it is done, or will never be."""
    try:
        return request.test()
    except PeerLostError:
        return True


def _check(shapes: Sequence[dict[str, Any]], plan: Plan) -> None:
    """Raises ConfigError: what workers ask for differs, or cannot be."""
    for rank, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise ConfigError(f"workers ask for different jobs: worker 0 for {shapes[0]}, worker {rank} for {shape}")
    replicas, num_servers = shapes[0]["replicas"], len(plan.starters)
    if replicas >= num_servers:
        raise ConfigError(
            f"KVMPI_REPLICAS={replicas}: {replicas + 1} servers or more are needed, this job has {num_servers}; set "
            "KVMPI_NUM_SERVERS"
        )
    if shapes[0]["security"] == "off" and len(plan.firsts) > 1:
        raise ConfigError("KVMPI_SECURITY=off is for one host: on a network anybody could read and change values")


def _in_folder(folder: str, config: Config) -> dict[str, str]:
    return {"job_dir": folder, "keys": os.path.join(folder, "keys") if config.security == "curve" else ""}


def _facing(own: Addresses, others: Addresses) -> str:
    """The address of this host by which other ones, which have ``others``, probably reach it.

    Where torch's processes meet they do; else it is a guess, and addresses that others have as well are of bridges.

    Raises:
        ConfigError: there is none.
    """
    elsewhere = {address for address, _ in others}
    found = [at for at in own if at[0] not in elsewhere]
    if not found:
        raise ConfigError(
            "this host has no address by which others could reach it; KVMPI_INTERFACE names a network, KVMPI_HOST an "
            "address"
        )
    meeting: list[str] = []
    with suppress(OSError, KeyError):
        meeting = addresses_of(os.environ["MASTER_ADDR"])
    return next((address for address, _ in found if address in meeting), in_order(found, sorted(elsewhere))[0])


def _towards(endpoint: str) -> str:
    """The address of this host by which it reaches ``endpoint``.

    Raises:
        ConfigError: it does not.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"host {host_name()} does not reach the scheduler at {endpoint} ({error}); a firewall may be in the way, "
            "or it is the wrong network: KVMPI_INTERFACE names the one that leads from host to host"
        ) from None


def _started_before() -> bool:
    """Whether torchrun, or a batch system, has started this job before."""
    return os.environ.get(_RESTARTS, "0") not in ("", "0") or restarts(os.environ) > 0


def _of_before(config: Config) -> str:
    """Where this job has left snapshots, if it was started once more; else nothing."""
    folder = config.snapshot_dir
    return folder if folder and _started_before() and os.path.isdir(folder) and complete(folder) else ""


def _await_end(folder: str) -> None:
    """Return when nobody writes snapshots there any more: servers of workers that were killed need a moment."""
    deadline = Deadline(_LEFT_S)
    while True:
        try:
            Claim(folder).release()
            return
        except ConfigError:
            if deadline.expired():
                raise
            time.sleep(_LOOK_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_job: HostedJob | None = None
_lock = threading.Lock()


def job(config: Config, everyone: Callable[[], Comm], close: Callable[[], object]) -> HostedJob:
    """The job of this process, which the first call starts. Collective; raises as ``HostedJob`` does.

    Args:
        everyone: makes a communicator of all workers.
        close: what is called when this process ends.
    """
    global _job
    with _lock:
        if _job is None:
            _job = HostedJob(config, everyone())
            if multiprocessing.parent_process() is not None:  # whose forks end without exit handlers
                Finalize(None, close, exitpriority=0)
    return _job


def end(*, failed: bool) -> bool:
    """This process ends, as all its stores have. As ``HostedJob.close``."""
    global _job
    ended, _job = _job, None
    return ended is not None and ended.close(failed=failed)


def _forget() -> None:
    """In a forked child: the job is its parent's."""
    global _job, _lock
    _job, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
