"""Why a job has failed, for people: who was the first, what it has said last, and what helps."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Iterable, Mapping, Sequence

from kvmpi.config import Config
from kvmpi.errors import ranks_in_words
from kvmpi.launchers import limits
from kvmpi.launchers.batch import QUEUED
from kvmpi.launchers.failure import Failure
from kvmpi.launchers.job import SHM, Job, Process
from kvmpi.launchers.output import last_words
from kvmpi.launchers.remote import Child, RemoteProcess
from kvmpi.launchers.restarts import Restarts

_OWN_FOLDERS = tuple(os.path.join(os.path.dirname(path), "") for path in (inspect.getfile(Config), __file__))


def in_words(labels: Iterable[str]) -> str:
    """``worker 3, 201 to 296, server 1``."""
    ranks: dict[str, list[int]] = {}
    for role, _, rank in (label.partition(" ") for label in labels):
        ranks.setdefault(role, []).extend([int(rank)] if rank else [])
    return ", ".join(f"{role} {ranks_in_words(its)}".strip() for role, its in ranks.items())


class Explanation:
    """What is known of a job's processes, by label; made when the job begins, and asked when it has failed.

    Args:
        plans, children: those that there are.
        tails: the last lines of each on standard error.
        codes: how they have ended.
    """

    def __init__(
        self, job: Job, plans: Mapping[str, Process], children: Mapping[str, Child],
        tails: Mapping[str, Sequence[bytes]], codes: Mapping[str, int], restarts: Restarts,
    ) -> None:  # fmt: skip
        self._job, self._plans, self._children = job, plans, children
        self._tails, self._codes, self._restarts = tails, codes, restarts
        self._killed_before = limits.num_killed_for_memory()

    def lines(self, failure: Failure, newest: Iterable[tuple[str, int]]) -> list[str]:
        """What to say of the first failure.

        Args:
            newest: who has written the lines that stand right above, and to which descriptor.
        """
        words = tail = last_words(self._tails.get(failure.label, ()), _OWN_FOLDERS)
        if tail and [*newest][-len(tail) :] == [(failure.label, 2)] * len(tail):
            tail = []
        heading = f"{failure.label}{self._where(failure.label)} {failure.text}"
        found = [f"kvmpi run: {heading}{'; its last lines on standard error:' if tail else ''}"]
        found += ["    " + line.decode(errors="surrogateescape") for line in tail]
        notes = (self._ended_before(failure.label), self._advice(failure, words), self._queued())
        return found + [f"kvmpi run: {note}" for note in notes if note]

    def _client_of(self, label: str) -> Process | None:
        """The client of a worker; None for others."""
        if not label.startswith("worker"):
            return None
        rank = int(label.split()[1])
        return next(process for process in self._job.of_role("worker", "client") if rank in process.workers)

    def _where(self, label: str) -> str:
        process, client, child = self._plans.get(label), self._client_of(label), self._children.get(label)
        where = ""
        if client is not None:
            where = f" (client {client.client_rank})"
        elif process is not None and process.role == "client":
            where = f" (mpirun of workers {process.workers[0]} to {process.workers[-1]})"
        return f"{where} on {child.host}" if isinstance(child, RemoteProcess) else where

    def _ended_before(self, label: str) -> str:
        """Of ranks below an mpirun, or beside the rank ``label``: MPI begins and ends with all of them, or waits."""
        clients = [(client.label, client.workers) for client in self._job.of_role("client")]
        mates = next((ranks for own, ranks in clients if label in [own, *(f"worker {rank}" for rank in ranks)]), ())
        gone = ranks_in_words(rank for rank in mates if self._codes.get(f"worker {rank}") == 0)
        if not gone:
            return ""
        if label not in (own for own, _ in clients):
            return f"worker {gone} had ended in good order before that"
        return (
            f"worker {gone} had ended with exit status 0 before that; for MPI a rank has failed that ends without "
            "MPI_Finalize, by os._exit for example"
        )

    def _advice(self, failure: Failure, words: Sequence[bytes]) -> str:
        if failure.status == 128 + signal.SIGBUS:
            where = " ".join(dict.fromkeys((SHM, os.path.dirname(self._job.job_dir))))
            return f"mostly that is memory in a file system that has no room for it: df -h {where}"
        if self._was_short_of_memory(failure):
            return limits.OUT_OF_MEMORY
        is_here = not isinstance(self._children.get(failure.label), RemoteProcess)
        if is_here and (advice := limits.of_signal(failure.status - 128)):
            return advice
        client = self._client_of(failure.label)
        above = self._tails.get(client.label, ()) if client is not None else ()  # an mpirun speaks for its ranks, too
        advice = limits.advice([*words, *above, failure.text.encode()])
        if not advice and len(self._job.of_role("worker", "client")) > 1 and self._job.num_servers:
            advice = self._restarts.advice(failure.label, failure.status)
        return advice

    def _was_short_of_memory(self, failure: Failure) -> bool:
        """Whether the kernel has killed processes of this host meanwhile, and probably this one."""
        is_here = not isinstance(self._children.get(failure.label), RemoteProcess)
        killed = failure.status == 128 + signal.SIGKILL and is_here
        return killed and limits.num_killed_for_memory() > self._killed_before

    def _queued(self) -> str:
        """Of jobs of a batch system of which the last that was heard is that they have not begun."""
        last = {label: [*self._tails.get(label, ())][-1:] for label in self._children}
        queued = [label for label, lines in last.items() if any(QUEUED.encode() in line for line in lines)]
        if not queued:
            return ""
        return (
            f"{in_words(queued)} still waited in the queue; others wait KVMPI_TIMEOUT_S for them: set it to what that "
            "may take, or call kvmpi run in one job that has all hosts (sbatch, salloc, bsub)"
        )
