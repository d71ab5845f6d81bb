"""Words of 16 bytes between rank 0 and the first ranks of other hosts, over connections that wake whoever waits.

MPI has to be asked for messages, again and again for as long as another rank computes: a rank that trains a network
with four others spent as much processor time on agreeing about its sums as on the sums.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping, Sequence

from kvmpi.collectives.comm import Comm
from kvmpi.collectives.links import close_in_child, lost
from kvmpi.collectives.waiting import Habit, Patience
from kvmpi.deadline import Deadline

WORD_BYTES = 16
#: To be woken costs less than to look for longer.
_WAITS = Habit(bare_polls=64)


class Lines:
    """One rank's; for one thread at a time. Each word of a peer answers one that it is asked for with ``expect``.

    A connection that breaks is no error by itself: nothing is heard over it any more.

    Args:
        comm: what is under way there gets a turn while this rank waits here: MPI may not have sent it yet.
        outgoing, incoming: sockets to and from the same ranks.
    """

    def __init__(
        self, comm: Comm, outgoing: Mapping[int, socket.socket], incoming: Mapping[int, socket.socket]
    ) -> None:
        self._comm, self._outgoing, self._incoming = comm, outgoing, incoming
        self._peers = {sock.fileno(): peer for peer, sock in incoming.items()}
        for sock in (*outgoing.values(), *incoming.values()):
            sock.setblocking(False)
        # By rank: bytes that are still to come, of words that nobody has waited for as well, and the last ones of all.
        self._due = dict.fromkeys(incoming, 0)
        self._last = dict.fromkeys(incoming, b"")
        self._late: set[int] = set()
        self._lost: set[int] = set()
        self._listening = select.poll()
        close_in_child(self)

    def say(self, word: bytes, *, surely: bool = False) -> bool:
        """To all others, as far as they can be reached.

        Args:
            surely: all of them are to have it or none; whether all do.
        Raises:
            PeerLostError: some have it, and one can surely not be reached.
        """
        said = 0
        for peer, sock in self._outgoing.items():
            try:
                sock.send(word)  # so few bytes always have room, or the other side has long ceased to listen
                said += 1
            except OSError as error:  # it has left, or is about to find out
                if surely and said:
                    raise lost(peer, error) from None
                if surely:
                    return False
        return True

    def expect(self) -> None:
        """One more word of each of the others; before this rank says its own."""
        for peer, sock in self._incoming.items():
            self._due[peer] += WORD_BYTES
            self._late.add(peer)
            self._listening.register(sock, select.POLLIN)

    def is_over(self) -> bool:
        """Whether all that is expected is there, or some of it never will be."""
        if self._late:
            self._hear(0.0)
        return not self._late or bool(self._lost)

    def hear(self, deadline: Deadline, describe: Callable[[Sequence[int]], str]) -> Sequence[bytes] | None:
        """What the others have said last, when all have; None if one is lost.

        Args:
            describe: the text of the error, given the ranks that have said nothing.
        Raises:
            KVTimeoutError: time is up.
        """
        patience: Patience | None = None
        while not self.is_over():
            if patience is None:
                patience = Patience(deadline, lambda: describe(sorted(self._late)), _WAITS, self._wait)
            patience.pause()
        if patience is not None:
            patience.progress()
        return None if self._lost else list(self._last.values())

    def _wait(self, seconds: float) -> None:
        if not self._hear(seconds):
            self._comm.attend()

    def _hear(self, seconds: float) -> bool:
        """Take what has come, for which to wait so long; whether anything has."""
        found = self._listening.poll(seconds * 1e3)
        for fd, _ in found:
            self._take(self._peers[fd])
        return bool(found)

    def _take(self, peer: int) -> None:
        sock = self._incoming[peer]
        try:
            part = sock.recv(self._due[peer])
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._lost.add(peer)
        else:
            self._due[peer] -= len(part)
            self._last[peer] = (self._last[peer] + part)[-WORD_BYTES:]
        if not part or not self._due[peer]:
            self._late.discard(peer)
            self._listening.unregister(sock)

    def close(self) -> None:
        """End the connections."""
        for sock in (*self._outgoing.values(), *self._incoming.values()):
            sock.close()
