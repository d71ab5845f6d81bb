"""Sleeping until something has come on a set of connections: in the thread they belong to, or in one that stands in."""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

import zmq

from kvmpi.wire.readiness import Source, Waker

S = TypeVar("S", bound=Source)

#: Where the system has no epoll, nobody can stand in.
_IN = getattr(select, "EPOLLIN", 0)
#: Systems count a wait in milliseconds of 32 bits.
_LONGEST_S = 1e6


class Watch(Generic[S]):
    """A fixed set of sources that one thread waits for, and that another one may wait for in its place.

    A thread that has asked for something and has nothing else to do reads the answer itself: between threads it would
    be handed over twice. The one whose place it takes is not woken by news meanwhile.

    Sockets are left alone while somebody waits, so that other threads may use them. So whoever waits learns of news
    only once: whatever is sent to a source or read from it, it has to be read until nothing is there before the next
    wait.

    Args:
        waker: ends ``wait``, but no ``stand_in``.
    """

    def __init__(self, waker: Waker, sources: Sequence[S]) -> None:
        self._sources: dict[int, S] = {}
        for source in sources:
            for handle in source.handles:
                self._sources[int(handle.getsockopt(zmq.FD)) if isinstance(handle, zmq.Socket) else handle] = source
        self._stands_in = False
        if not _IN:
            self._poller = zmq.Poller()
            for descriptor in [*waker.handles, *self._sources]:
                self._poller.register(descriptor, zmq.POLLIN)
            return
        # What is waited for, with or without news. Who stands in turns the news off for the other, without waking it,
        # and waits for news and nudges: the other, which may have heard of news just before, must not take those.
        self._news, self._all, self._standing = select.epoll(), select.epoll(), select.epoll()
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._nudge)  # another thread may still be standing in for a watch of old
        for descriptor in self._sources:
            self._news.register(descriptor, _IN)
        for descriptor in [*waker.handles, self._news.fileno()]:
            self._all.register(descriptor, _IN)
        for descriptor in [self._nudge, *self._sources]:
            self._standing.register(descriptor, _IN)

    def wait(self, timeout_s: float) -> list[S]:
        """Sleep until something has come or the waker says so, at most ``timeout_s``; where, maybe twice."""
        timeout_s = min(timeout_s, _LONGEST_S)
        if not _IN:
            found = self._poller.poll(max(0, int(timeout_s * 1000 + 0.999)))
            return [self._sources[descriptor] for descriptor, _ in found if descriptor in self._sources]
        ready = dict(self._all.poll(timeout_s))
        if self._news.fileno() not in ready:
            return []
        return [self._sources[descriptor] for descriptor, _ in self._news.poll(0)]

    def begin_to_stand_in(self) -> bool:
        """From now on ``wait`` hears of no news, and ``stand_in`` does, in one other thread; False: it cannot."""
        if _IN:
            self._all.modify(self._news.fileno(), 0)
            self._stands_in = True
        return bool(_IN)

    def stand_in(self, timeout_s: float) -> list[S]:
        """``wait`` in its place; ends with ``nudge`` too, also with one that came too late for the time before."""
        ready = []
        for descriptor, _ in self._standing.poll(timeout_s):
            if descriptor == self._nudge:
                os.eventfd_read(descriptor)
            else:
                ready.append(self._sources[descriptor])
        return ready

    def nudge(self) -> None:
        """End ``stand_in``, from any thread."""
        if self._stands_in:
            os.eventfd_write(self._nudge, 1)

    def end_to_stand_in(self) -> None:
        """From now on ``wait`` hears of news again, also of what is there already."""
        self._stands_in = False
        self._all.modify(self._news.fileno(), _IN)
