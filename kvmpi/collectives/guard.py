"""Runs what ranks do together; once that has failed on a rank, it can do nothing more with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmpi.collectives.agreement import roll_call
from kvmpi.collectives.algorithm import Act
from kvmpi.collectives.comm import Comm
from kvmpi.collectives.host_group import HostGroup
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, PeerLostError, ranks_in_words

#: Seconds at most to find out who answers when a call has failed.
_ROLL_CALL_S = 5.0


class Guard:
    """Of one communicator.

    Attributes:
        broken: the error of the first failure, as a text; None: there was none.
        group: whose ranks must not wait in shared memory for one that has failed.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.broken: str | None = None
        self.group: HostGroup | None = None

    def run(
        self, do: Callable[[], Any], deadline: Deadline | None = None, *, all_fail: bool = True, act: Act | None = None
    ) -> Any:
        """``do()``; with a ``deadline``, those who do not answer are named when that has passed.

        Args:
            all_fail: no rank can be through with it when one of them fails.
            act: what is to be named where a peer is lost.
        """
        if self.broken is not None:
            raise self.unusable()
        try:
            return do()
        except BaseException as error:
            if act is not None and type(error) is PeerLostError:
                error = PeerLostError(f"{act.describe()}: {error}")
            raise self.failed(error, deadline, all_fail=all_fail) from None

    def unusable(self) -> PeerLostError:
        return PeerLostError(f"this client's communicator is unusable since an earlier failure: {self.broken}")

    def failed(self, error: BaseException, deadline: Deadline | None, *, all_fail: bool = True) -> BaseException:
        """What to raise for ``error``; from here on nothing can be exchanged."""
        # Whatever it was, messages may be on their way that a later call would take for its own.
        self.note(error)
        if self.group is not None:
            self.group.give_up()
        if type(error) is not KVTimeoutError or deadline is None:
            return error
        # Who waits names whom it waits for, which may itself wait for another. All others give up at about this time.
        silent = roll_call(self._comm, Deadline(min(_ROLL_CALL_S, 0.5 * deadline.timeout_s)))
        if not silent:
            return error
        names, what = ranks_in_words(silent), "" if all_fail else ", or through with it"
        return KVTimeoutError(f"{error}. No answer from MPI rank {names}: stopped, dead, cut off{what}")

    def note(self, error: BaseException) -> None:
        """This was the last that ranks have done together."""
        self.broken = f"{type(error).__name__}: {error}"
