"""What Horovod has and kvmpi has not: it says so where it is used, and what to do instead."""

from __future__ import annotations

from typing import Any, NoReturn

from kvmpi.errors import UnsupportedError


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


def check_process_set(process_set: Any) -> None:
    """Raise unless the operation is over all ranks."""
    if process_set is not None and getattr(process_set, "process_set_id", 0) != 0:
        raise UnsupportedError(
            "process sets are not supported; use torch.distributed.new_group with the backend kvmpi (kvmpi.torch.c10d)"
        )
