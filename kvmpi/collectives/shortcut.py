"""How ranks find out that they make the same call without a message of each: on a host they look at each other's words.

On each host the first rank looks at what the others state. Where there are several hosts, those first ranks send rank 0
a digest each, for their hosts, and rank 0 answers whether all are the same; so rank 0 has to do with as many ranks as
there are hosts. Where these messages have connections of their own, who waits for them is woken: MPI would have to be
asked again and again for as long as another rank computes, which costs as much as the sum that follows. Whenever that
is not so - a rank makes another call or none, or goes on by messages whatever the others do - all ranks go on by
messages to rank 0 (``agreement``), which finds out what is the matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi.collectives.comm import Comm, Request
from kvmpi.collectives.host_group import HostGroup
from kvmpi.collectives.lines import Lines
from kvmpi.collectives.waiting import Habit, wait_all
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError

Buffer = npt.NDArray[Any]
#: Gives a text about ranks: for the error when time is up, or for whoever asks what is waited for.
About = Callable[[Sequence[int]], str]
#: Whether messages, by rank, have come in time.
Came = Callable[[Mapping[int, Request]], bool]
#: Whether all ranks of this host have stated the same; its argument says when that does not matter any more.
SameHere = Callable[..., bool]

_TAG = 2
#: What the first rank of a host sends whose ranks do not all make the same call. No call has that digest.
_DIFFERS = bytes(16)
_WAITS = Habit()


class Route(NamedTuple):
    """The ranks of this rank's host, and of each host; ``lines`` between the first ranks of these, if there are any."""

    group: HostGroup
    hosts: tuple[tuple[int, ...], ...]
    lines: Lines | None = None


class Shortcut:
    """Of one rank of a communicator, from the first call on before which all ranks have said that they can take it.

    Args:
        find: the route, when this rank knows one.
    Attributes:
        owed: messages of first ranks to this one that it may not have waited for: to be waited for with those by which
            all go on then, so that none is left when the communicator is freed.
    """

    def __init__(self, find: Callable[[], Route | None]) -> None:
        self._find = find
        self._route: Route | None = None  # from then on
        self.owed: list[Request] = []
        self._sent: list[Request] = []  # whose ranks may have left

    @property
    def is_possible(self) -> bool:
        """Whether this rank can."""
        return self._find() is not None

    @property
    def is_taken(self) -> bool:
        """Whether all ranks can, and know that."""
        return self._route is not None

    def take(self) -> None:
        """All ranks can, and know that."""
        self._route = self._find()

    def close(self) -> None:
        """No call follows."""
        self._route = None

    def surely(self, missing: Sequence[int]) -> list[int]:
        """Of ranks that were not heard of by messages, those of which that means that they are missing.

        Where the first rank of a host is, the others there have nobody to tell them that messages are asked for.
        """
        hosts = self._route.hosts if self._route is not None else ()
        hidden = {rank for ranks in hosts if ranks[0] in missing for rank in ranks[1:]}
        return [rank for rank in missing if rank not in hidden]

    def settle(
        self, comm: Comm, digest: bytes, deadline: Deadline, late: About, unheard: About, *, alone: bool = False
    ) -> bool:
        """Whether all ranks state the same; else all go on by messages.

        Args:
            late: of ranks that have made no call.
            unheard: of ranks that have not told what they know of others.
            alone: this rank goes on by messages whatever the others do.
        Raises:
            KVTimeoutError: a rank of this host, without which the others cannot go on, has stated nothing.
            PeerLostError: one has failed in a call.
        """
        if self._route is None:
            return False
        group, hosts, lines = self._route
        self.owed = [request for request in self.owed if not request.test()]
        self._sent = [request for request in self._sent if not request.test()]
        group.state(digest)
        if len(hosts) == 1:
            return not alone and group.all_state(digest, deadline, late)
        if group.index:
            first = group.members[:1]
            return not alone and group.await_answer(deadline, lambda stated: (unheard if stated else late)(first))

        def same_here(over: Callable[[], bool] = lambda: False) -> bool:
            return not alone and _in_time(lambda: group.all_state(digest, deadline, late, over))

        if lines is not None:
            agreed = _over_lines(lines, comm.rank == 0, digest, deadline, unheard, same_here)
        else:

            def came(receives: Mapping[int, Request]) -> bool:
                def describe() -> str:
                    return unheard([rank for rank, receive in receives.items() if not receive.test()])

                def wait() -> bool:
                    wait_all(receives.values(), deadline, describe, _WAITS)
                    return True

                return _in_time(wait)

            if comm.rank:
                agreed = self._ask_rank_0(comm, digest, same_here, came)
            else:
                agreed = self._ask_first_ranks(comm, [ranks[0] for ranks in hosts[1:]], digest, same_here, came)
        group.answer(agreed)
        return agreed

    def _ask_first_ranks(
        self, comm: Comm, others: Sequence[int], digest: bytes, same_here: SameHere, came: Came
    ) -> bool:
        digests = np.empty((len(others), len(digest)), np.uint8)
        receives = {rank: comm.irecv(digests[number], rank, _TAG) for number, rank in enumerate(others)}
        agreed = same_here() and came(receives) and digests.tobytes() == digest * len(others)
        answer = np.array([agreed], np.uint8)
        self.owed += receives.values()
        self._sent += [comm.isend(answer, rank, _TAG) for rank in others]
        return agreed

    def _ask_rank_0(self, comm: Comm, digest: bytes, same_here: SameHere, came: Came) -> bool:
        answer = np.zeros(1, np.uint8)
        receive = comm.irecv(answer, 0, _TAG)
        # An answer that comes before this rank has said anything is no.
        same = same_here(receive.test)
        self.owed.append(receive)
        self._sent.append(comm.isend(np.frombuffer(digest if same else _DIFFERS, np.uint8), 0, _TAG))
        return same and came({0: receive}) and bool(answer[0])


def _over_lines(
    lines: Lines, is_first: bool, digest: bytes, deadline: Deadline, unheard: About, same_here: SameHere
) -> bool:
    """The same with words, of which each is a digest: rank 0 answers with one that is its own, or with none."""

    def all_say() -> bool:
        said = lines.hear(deadline, unheard)
        return said is not None and all(word == digest for word in said)

    lines.expect()
    if is_first:
        # What others have said may be here though they cannot be reached any more: they must not wait for an answer.
        agreed = same_here() and _in_time(all_say) and lines.say(digest, surely=True)
        if not agreed:
            lines.say(_DIFFERS)
        return agreed
    same = same_here(lines.is_over)
    lines.say(digest if same else _DIFFERS)
    return same and _in_time(all_say)


def _in_time(wait: Callable[[], bool]) -> bool:
    """What it comes to; no, if it did not in time: then messages tell who is late."""
    try:
        return wait()
    except KVTimeoutError:
        return False
