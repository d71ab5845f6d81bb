"""How much of what was sent to each peer is still here, because that peer does not read it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import zmq

#: A frame that takes part in the count, which wakes a thread when it has left, is worth that once in so many bytes.
MARK_EVERY_BYTES = 512 << 10
#: Up to so much, which nobody has followed, is forgotten: who gets that now and then and never reads is not noticed.
_FORGOTTEN_BYTES = 64 << 10
#: More is, when so many looks have found that nothing was sent since: the peer may have gone.
_IDLE_LOOKS = 600
#: Where all cores are busy, the thread that hears what has left may come to it so late.
_LATE_S = 0.05
#: What a frame takes beside its bytes.
_FRAME_BYTES = 256


class _Mark(NamedTuple):
    """Everything up to ``total_bytes`` has left when this frame has."""

    total_bytes: int
    tracker: zmq.MessageTracker


class _Peer:
    __slots__ = ("left_bytes", "looks", "marks", "total_bytes", "unmarked_bytes", "was_awaited")

    def __init__(self) -> None:
        self.total_bytes = self.left_bytes = self.unmarked_bytes = 0
        self.looks = 0  # of ``forget_idle`` since anything was sent
        self.was_awaited = False  # since anything has left, as far as is known
        self.marks: deque[_Mark] = deque()


class Unread:
    """Counts by route. What is sent to a peer leaves in order, so that not every frame must be followed."""

    def __init__(self) -> None:
        self._peers: dict[bytes, _Peer] = {}
        # Makes pyzmq start what follows frames, with its descriptors, now and not in the middle of a job.
        zmq.Frame(b"", track=True, copy=False, copy_threshold=0)

    def wants_mark(self, route: bytes) -> bool:
        """Whether a frame of the next message is to be followed."""
        peer = self._peers.get(route)
        return peer is not None and peer.unmarked_bytes >= MARK_EVERY_BYTES

    def add(self, route: bytes, nbytes: int, num_frames: int, tracker: zmq.MessageTracker | None) -> None:
        """A message was sent; ``tracker`` is of its last frame that is followed."""
        peer = self._peers.get(route)
        if peer is None:
            peer = self._peers[route] = _Peer()
        nbytes += _FRAME_BYTES * num_frames
        peer.total_bytes += nbytes
        peer.looks = 0
        peer.unmarked_bytes += nbytes
        if tracker is not None:
            peer.marks.append(_Mark(peer.total_bytes, tracker))
            peer.unmarked_bytes = 0

    def of(self, route: bytes) -> int:
        """Bytes that have not left, as far as is known: none if all frames that are followed have."""
        peer = self._peers.get(route)
        if peer is None:
            return 0
        marks = peer.marks
        while marks and marks[0].tracker.done:
            peer.left_bytes = marks.popleft().total_bytes
            peer.was_awaited = False
        return peer.total_bytes - peer.left_bytes if marks else 0

    def await_left(self, route: bytes) -> bool:
        """Whether more has left than was known; waits a moment for that.

        Once until something has left: who does not read holds nobody else up.
        """
        peer = self._peers.get(route)
        if peer is None or not peer.marks or peer.was_awaited:
            return False
        peer.was_awaited = True
        try:
            peer.marks[0].tracker.wait(_LATE_S)
        except zmq.NotDone:
            return False
        return True

    def forget_idle(self) -> None:
        """Forget those of whom little is here: it is not followed, and they may have gone."""
        for route in [route for route in self._peers if not self.of(route)]:
            peer = self._peers[route]
            peer.looks += 1
            if peer.unmarked_bytes <= _FORGOTTEN_BYTES or peer.looks > _IDLE_LOOKS:
                del self._peers[route]
