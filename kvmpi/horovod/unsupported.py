"""What Horovod has and kvmpi has not: it says so where it is used, and what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from kvmpi.errors import UnsupportedError
from kvmpi.horovod import basics


class _Elastic:
    """Stands where ``horovod.torch.elastic`` does."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(
            f"hvd.elastic.{name}: jobs do not change their size while they run. A client that dies is started again "
            "with 'kvmpi run --restart N' and servers (docs/running.md), and goes on from what the servers hold"
        )


elastic = _Elastic()


def start_timeline(file_path: str, mark_cycles: bool = False) -> NoReturn:
    """Raises UnsupportedError: timelines are of whole jobs, ``kvmpi run --timeline FILE`` (docs/timeline.md)."""
    raise UnsupportedError(
        "hvd.start_timeline: a timeline is of a whole job, from its beginning on; start it with "
        "'kvmpi run --timeline FILE' (docs/timeline.md)"
    )


def stop_timeline() -> None:
    """Does nothing: there is no timeline that ``start_timeline`` has started."""


class ProcessSet:
    """Some of the ranks, as Horovod has them; here there is only the set of all, ``global_process_set``."""

    process_set_id = 0

    def __init__(self, ranks: Any = None) -> None:
        self._refuse()

    @staticmethod
    def _refuse() -> NoReturn:
        raise UnsupportedError(
            "process sets are not supported; use torch.distributed.new_group with the backend kvmpi (kvmpi.torch.c10d)"
        )

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(basics.size()))

    def size(self) -> int:
        """How many ranks there are."""
        return basics.size()

    def rank(self) -> int:
        """This rank."""
        return basics.rank()

    def included(self) -> bool:
        """Whether this rank is one of them."""
        return True


global_process_set: ProcessSet = object.__new__(ProcessSet)


def add_process_set(process_set: Any) -> NoReturn:
    """Raises UnsupportedError: there is no process set but ``global_process_set``."""
    ProcessSet._refuse()


def remove_process_set(process_set: Any) -> NoReturn:
    """Raises UnsupportedError: there is no process set but ``global_process_set``."""
    ProcessSet._refuse()


class SyncBatchNorm:
    """Raises UnsupportedError: torch has one, which works with process groups of the backend kvmpi, on GPUs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise UnsupportedError(
            "hvd.SyncBatchNorm: use torch.nn.SyncBatchNorm with torch.distributed and the backend kvmpi "
            "(kvmpi.torch.c10d), on GPUs, or torch.nn.BatchNorm, whose statistics are each rank's own"
        )


def run(func: Any, *arguments: Any, **options: Any) -> NoReturn:
    """Raises UnsupportedError: jobs are started from the command line, ``kvmpi run -n 4 PROGRAM``."""
    raise UnsupportedError(
        "hvd.run: functions are not sent to other processes; put it into a program and start that with "
        "'kvmpi run -n NP PROGRAM' (docs/running.md)"
    )


def check_process_set(process_set: Any) -> None:
    """Raise unless the operation is over all ranks."""
    if process_set is not None and process_set is not global_process_set:
        ProcessSet._refuse()
