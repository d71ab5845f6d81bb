"""Where the workers of all clients meet: barriers, what they say there, and what has failed on one of them."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvmpi.arrays import Vector
from kvmpi.compiling import methods_not_compiled
from kvmpi.errors import ConfigError, OrderMismatchError
from kvmpi.store.call import Invocation
from kvmpi.store.core import StoreCore


@methods_not_compiled
class Meeting(StoreCore):
    """The part of a store in which workers wait for each other."""

    @property
    @abstractmethod
    def broken(self) -> bool:
        """Whether workers of this client were lost, so that the process cannot end MPI in good order."""

    def barrier(self) -> None:
        """Return when every worker is here and everything that this worker started is done.

        If something that was started has failed on one worker, the workers of all clients raise, and all are behind the
        barrier: who goes on after the error is in step with the others.

        Raises:
            KVError: what has failed, here or on the client that it names.
            ClientLostError: a client has ended that the others need; it says with which error, if that is known.
            KVTimeoutError: not all workers came within ``KVMPI_TIMEOUT_S``; it says which clients are missing.
        """
        call = self._call("barrier")
        try:
            with self._meeting("barrier", call):
                self._enter_settled(call, lambda: None)
        finally:
            self._recorder.blocked(time.perf_counter() - call.started_s)

    def any(self, condition: Any) -> bool:
        """Whether ``condition`` is true on any worker of any client; the same answer for all of them.

        Collective over all workers, as ``barrier`` is; what is under way goes on. For what all do or none: to leave a
        step out (``if kv.any(not loss.isfinite()): continue``), or to end early. Who has joined says no.

        What a process that was started again asks before its first push may be answered at once: it is true if it is
        in this client, and else as it was in the call that this one seems to repeat.

        Raises:
            ConfigError: a ``condition`` that is neither true nor false, such as an array of several elements; on all.
        """
        call, found = self._call("any"), False

        def ask(call: Invocation) -> None:
            nonlocal found
            found = self._any_client(found, call)

        try:
            with self._meeting("any", call, ask), self._beginning:
                found = self._any_worker(self._enter(call, lambda: _truth(condition)), call)
            return found
        finally:
            self._recorder.blocked(time.perf_counter() - call.started_s)

    def _any_worker(self, condition: bool, call: Invocation) -> bool:
        """Whether it is true on any worker of this client."""
        if self.mpi_size == 1:
            return condition
        said = np.array([float(condition)])

        def run(cause: BaseException | None) -> None:
            call.check()
            sources = [Vector(said, "float64", "cpu", shared=True)]
            self._reduce.allreduce_many([(sources, said, ())], "float64", call.deadline, call.op)
            if cause is not None:
                raise cause

        self._engine.push(run, reads=call.done, lane="reduce", name=call.op, no_skip=True).wait()
        return bool(said[0])

    def _any_client(self, condition: bool, call: Invocation) -> bool:
        """Whether it is true in any client; it is the same on all workers of this one."""
        return condition

    def _barrier(self, call: Invocation, failure: Exception | None = None) -> None:
        """All workers are here; if a client has come with a ``failure``, which all its workers know, others raise it.

        The agreement has seen to it where there is one client.
        """

    def _together(self, op: str, run: Callable[[], None], call: Invocation | None = None) -> None:
        """Run something on every worker; if it fails on one of this client's, all of them raise.

        ``call``: which this is a part of, if it has no time of its own.
        """
        self._enter_settled(call or self._call(op), run)

    @contextmanager
    def _meeting(
        self, op: str, call: Invocation | None = None, meet: Callable[[Invocation], None] | None = None
    ) -> Iterator[Invocation]:
        """What the workers of every client do, and then meet: if it fails on one of them, all raise.

        It fails on all workers of a client or on none, by their agreement. ``call``: which this is all of; ``meet``:
        how those meet that have not failed, by default at a barrier.
        """
        self._check_open()
        failure: Exception | None = None
        try:
            yield call or self._call(op)
        except OrderMismatchError:
            raise  # somebody makes another call, and does not come
        except Exception as error:  # whatever it is, the other clients must hear of it
            if self.broken:
                raise  # this client has lost workers, and cannot go on: its end will be heard of
            failure = error
        try:
            # Who has failed may have no time left of the call's.
            mine = self._call(op) if call is None or failure is not None else call
            if meet is None or failure is not None:
                self._barrier(mine, failure)
            else:
                meet(mine)
        finally:
            if failure is not None:
                raise failure


def _truth(condition: Any) -> bool:
    try:
        return bool(condition)
    except Exception as error:  # of whatever library it is
        raise ConfigError(
            f"any: the condition is of {type(condition).__name__}, expected one that is true or false, such as "
            f"condition.any(): {error}"
        ) from None
