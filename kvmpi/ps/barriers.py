"""The barriers of one store as a state machine without I/O: who has come, who is waited for, who will never come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import filterfalse, islice
from typing import NamedTuple

from kvmpi.errors import ClientLostError, ProtocolError, ranks_in_words
from kvmpi.ps.membership import CLOSED, FOR_GOOD, blame
from kvmpi.ps.reply import MAX_ERROR_NAME, MAX_NAMED, MAX_TEXT, Reply
from kvmpi.ps.scheduler_file import SavedStore
from kvmpi.trace import timeline
from kvmpi.trace.stall import Wait
from kvmpi.wire import messages as m

SilenceOf = Callable[[int], float | None]
"""For how many seconds a client has been silent; None if it is not in the job."""

#: The step after which a client that is back enters, as long as it has not said so.
_NEVER = 1 << 62
#: For ``first``: it is done already.
NOBODY = -1
#: The outcome of most barriers.
_OVER = ("", "", 0, False)
#: Of so many barriers the outcome is known to who asks again, or meets them late.
_MAX_OUTCOMES = 16
#: Of clients that are late, so many are told with how long they are silent.
_MOST_LATE = 8
#: So many steps after which there were barriers are remembered, for those that go on before the last.
_KEPT_STEPS = 64


class _Arrival(NamedTuple):
    """A client is at the open barrier."""

    route: bytes
    request: int
    step: int
    error: str
    text: str
    yes: bool


class Barriers:
    """Where the clients of a store are between its barriers, which all of them make in the same order.

    Args:
        on_loss: what barriers do without a client that is lost: "fail", "wait" or "shrink".
        changed: called when there is something new to ``save``.
    Attributes:
        done: barriers that are over.
        waiting: who has come to the open one.
        dead: clients that are gone, and how.
        finished: clients that nobody waits for because they have joined.
        returning: clients that are back, and the step after which they enter, or go on; -1: they have not said so.
            Nobody waits for them at what comes before.
        first: of those, the number of the first barrier that comes after, where it is over.
        passed: by step the first barrier that is over after it, of the last steps that have one.
        left: clients that have left in good order, and the last process of each.
        did_after: the last step after which a client has said yes: it has done what one does for all.
        outcomes: of barriers that say more than that they are over, ``error``, ``text``, ``first`` and ``yes`` of
            their Acks.
    """

    def __init__(self, num_clients: int, on_loss: str, changed: Callable[[], None]) -> None:
        self.num_clients, self._on_loss, self._changed = num_clients, on_loss, changed
        self.done = 0
        self.waiting: dict[int, _Arrival] = {}
        self.dead: dict[int, str] = {}
        self.finished: set[int] = set()
        self.returning: dict[int, int] = {}
        self.first: dict[int, int] = {}
        self.passed: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.did_after = -1
        self.outcomes: dict[int, tuple[str, str, int, bool]] = {}
        # When the first came to the open barrier; also as the timeline has it.
        self._opened_s, self._opened_ns = 0.0, 0

    def save(self, number: int) -> SavedStore:
        """What another process needs to go on. Who waits asks that one again."""
        finished = sorted(self.finished)
        return SavedStore(
            number, self.num_clients, self.done, self.dead, finished, self.returning, self.left, self.first,
            self.outcomes, self.passed, self.did_after,
        )  # fmt: skip

    def restore(self, saved: SavedStore) -> None:
        """Be as ``save`` has described it."""
        self.done, self.dead, self.finished = saved.barriers_done, saved.dead, set(saved.finished)
        self.returning, self.left, self.first, self.passed = saved.returning, saved.left, saved.first, saved.passed
        self.outcomes, self.did_after = saved.outcomes, saved.did_after

    # ---- who is at the open barrier

    @property
    def _step(self) -> int:
        """How far clients are that wait at the open barrier: all make the same calls. Who is back counts for nothing
        as long as anybody else waits, since it may be at a later one; nor does who has joined, and pushes no more."""
        arrivals = {rank: arrival.step for rank, arrival in self.waiting.items() if rank not in self.finished}
        arrivals = arrivals or {rank: arrival.step for rank, arrival in self.waiting.items()}
        others = [step for rank, step in arrivals.items() if rank not in self.returning]
        return max(others) if others else min(arrivals.values(), default=0)

    def _ends(self, rank: int, why: str) -> bool:
        """Whether nobody has to wait for a client that is gone, since it will never come."""
        if self._on_loss == "shrink" or rank in self.finished:
            return False
        return why in FOR_GOOD or self._on_loss == "fail"

    def is_without(self, rank: int) -> bool:
        """Whether rounds go on without a client."""
        if rank in self.finished or (self._on_loss == "shrink" and self.returning.get(rank) == _NEVER):
            return True
        return rank in self.dead and (self._on_loss == "shrink" or self.dead[rank] in FOR_GOOD)

    def _missing(self) -> Iterator[int]:
        """Whom the open barrier waits for: not for clients that are back and enter after it.

        Where only those wait that have joined, nobody can say which those are: as it is not over, whoever has entered
        comes to it yet.
        """
        # Both take a look at all that wait, and count only where somebody is back.
        step = self._step if self.returning and not self.finished.issuperset(self.waiting) else _NEVER
        for rank in filterfalse(self.waiting.__contains__, range(self.num_clients)):
            gone = rank in self.finished or (rank in self.dead and self._on_loss == "shrink")
            if not gone and self.returning.get(rank, -1) < step:
                yield rank

    def _number(self, client: int, message: m.Barrier) -> int:
        """Which barrier a client is at, as far as that is known; else it is the open one, or one after that."""
        before = self.returning.get(client)
        if before is not None and self._on_loss == "shrink":
            # It does not know how many barriers there were; those before it enters are over for it.
            return self.done + (message.step > before)
        if message.ordinal != m.NEXT_BARRIER:
            return message.ordinal
        # That it has entered may be heard only after this.
        over = self._over_after(message.step - 1) if self.returning.get(client) == -1 else None
        return self.first.get(client, over or self.done + 1)

    def _over_after(self, step: int) -> int | None:
        """The first barrier after a step, if one is over."""
        return min((number for passed, number in self.passed.items() if passed > step), default=None)

    def arrive(self, client: int, route: bytes, message: m.Barrier, now_s: float, silence_of: SilenceOf) -> list[Reply]:
        """A client has come to a barrier.

        Raises:
            ProtocolError: not to the next one.
            ClientLostError: somebody will never come.
        """
        if self._on_loss == "shrink" and message.step <= self.returning.get(client, -1) < _NEVER:
            return [self._repeat(client, route, message)]
        number = self._number(client, message)
        if number <= self.done:
            # Who is back may only have been told a number of its own, which says nothing about this one.
            outcome = self.outcomes.get(number, _OVER) if message.ordinal in (number, m.NEXT_BARRIER) else _OVER
            if number < self.done:  # what one has done for all behind it is done
                outcome = (*outcome[:2], NOBODY, outcome[3])
            version = number if message.ordinal == m.NEXT_BARRIER else self.done
            return [Reply(route, m.Ack(message.request, version, *outcome))]
        if number > self.done + 1:
            raise ProtocolError(
                f"scheduler: barrier {message.ordinal} of client {client} comes after barrier {self.done}"
            )
        if message.ordinal == m.NEXT_BARRIER:  # it has met none between its entry and this step, so there are none
            self.returning[client] = max(message.step - 1, self.returning.get(client, -1))
        ended = {rank: why for rank, why in self.dead.items() if self._ends(rank, why)}
        if ended:
            raise ClientLostError(f"barrier {number} cannot be completed, because {blame(ended)}")
        known = client in self.waiting
        if not self.waiting:
            self._opened_s, self._opened_ns = now_s, timeline.now() if timeline.on else 0
        error, text = message.error[:MAX_ERROR_NAME], message.text[:MAX_TEXT]
        self.waiting[client] = _Arrival(route, message.request, message.step, error, text, message.yes)
        if replies := self._complete():
            return replies
        if not known:
            return []
        missing = list(islice(self._missing(), MAX_NAMED))
        silences_s = [int(silence_of(rank) or 0) for rank in missing]
        silent_s = silences_s if any(silences_s) else []
        return [Reply(route, m.Waiting(message.request, missing, silent_s))]

    def _repeat(self, client: int, route: bytes, message: m.Barrier) -> Reply:
        """To a client that makes calls again which others made before it has entered: nobody waits for anybody.

        After the very step that it enters after, all may have been lost before one of them had done what one does for
        all. It does so then: whoever else is about to do it puts back the same, and no round can close until it pushes.
        """
        if message.yes:
            self.did_after = max(self.did_after, message.step)
            self._changed()
        is_done = message.step < self.returning[client] or message.step <= self.did_after
        return Reply(route, m.Ack(message.request, self.done, first=NOBODY if is_done else client, yes=message.yes))

    def _complete(self) -> list[Reply]:
        """Let all go that have come to the open barrier, if nobody is missing."""
        if not self.waiting or next(self._missing(), None) is not None:
            return []
        step, self.done = self._step, self.done + 1
        self.passed.setdefault(step, self.done)
        if len(self.passed) > _KEPT_STEPS:
            del self.passed[min(self.passed)]
        later = {rank for rank, arrival in self.waiting.items() if step <= self.returning.get(rank, -1) < arrival.step}
        come = {rank: arrival for rank, arrival in self.waiting.items() if rank not in later}
        self.waiting = {rank: arrival for rank, arrival in self.waiting.items() if rank in later}
        failed = next(((a.error, f"client {rank}: {a.text}") for rank, a in sorted(come.items()) if a.error), ("", ""))
        first = min(come, default=0)  # client 0, but where it is lost, or has joined, or skips this one
        outcome = (*failed, first, any(arrival.yes for arrival in come.values()))
        if outcome[-1]:
            self.did_after = max(self.did_after, step)
        if any(outcome):
            self.outcomes[self.done] = outcome
            self.outcomes = dict(list(self.outcomes.items())[-_MAX_OUTCOMES:])
        # Others do not wait for who has joined: it may ask when this one is over.
        self.first |= {rank: self.done for rank, before in self.returning.items() if 0 <= before < step} | self.first
        self._changed()
        if timeline.on and self._opened_ns:
            timeline.span("barrier", self._opened_ns, step=self.done)
        for rank in come:
            if self.returning.get(rank, -1) >= 0:  # else its program may yet skip some
                del self.returning[rank]
        passed = [Reply(arrival.route, m.Ack(arrival.request, self.done, *outcome)) for arrival in come.values()]
        return passed + self._complete()

    def wait(self, store: int, silence_of: SilenceOf) -> Wait | None:
        """Whom those wait for that have come to the open barrier of this store."""
        if not self.waiting:
            return None
        silences_s = {rank: silence_of(rank) for rank in self._missing()}
        known = {rank: silence_s for rank, silence_s in silences_s.items() if silence_s is not None}
        absent = ranks_in_words(rank for rank in silences_s if rank not in known)
        late = [f"client {absent} (not in the job)"] if absent else []
        most_silent = sorted(known, key=known.__getitem__, reverse=True)[:_MOST_LATE]
        late += [f"client {rank} (last heartbeat {known[rank]:.1f} s ago)" for rank in sorted(most_silent)]
        late += [f"{len(known) - _MOST_LATE} more clients"] if len(known) > _MOST_LATE else []
        what = f"barrier {self.done + 1} of store {store}"
        return Wait(("barrier", store, self.done), self._opened_s, what, f"{', '.join(late)} did not reach it")

    # ---- clients that come and go

    def bring_back(self, rank: int) -> None:
        """Another process of a client is here. Where others go on without it, they do until it has entered."""
        self.waiting.pop(rank, None)
        self.first.pop(rank, None)
        if self._on_loss == "shrink":
            self.returning[rank] = _NEVER
            self.finished.discard(rank)
        else:
            self.returning[rank] = -1

    def enter(self, rank: int, step: int) -> list[Reply]:
        """A client that is back is at the barriers after ``step``; -1: at all of them. Who passes because of that."""
        if rank in self.returning:
            if step < 0:
                del self.returning[rank]
            else:
                self.returning[rank] = step
                # The process before it may have been further than it goes on, where it could not know that all is done.
                later = self._over_after(step)
                if later is not None and self._on_loss == "wait":
                    self.first.setdefault(rank, later)
            self._changed()
        return self._complete()

    def finish(self, rank: int) -> list[Reply]:
        """A client has joined; who passes because of that."""
        self.finished.add(rank)
        self._changed()
        return self._complete()

    def lose(self, rank: int, why: str, step: int = 0) -> list[Reply]:
        """A client is gone, and went on after ``step`` at last; what those hear that have come to the open barrier."""
        self.dead.pop(rank, None)  # its place among them is that of its last end
        self.dead[rank] = why
        back = self.returning.pop(rank, None)
        if back is not None and max(back, step) > 0 and why in FOR_GOOD and self._on_loss == "wait":
            self.finished.add(rank)  # it may have skipped the barriers that are left
        self._changed()
        if not self._ends(rank, why):
            self.waiting.pop(rank, None)
            return [] if self.deserted else self._complete()
        waiting, self.waiting = self.waiting, {}
        error = f"barrier {self.done + 1} cannot be completed, because {blame({rank: why})}"
        return [
            Reply(arrival.route, m.Failure(arrival.request, "ClientLostError", error))
            for client, arrival in waiting.items() if client != rank
        ]  # fmt: skip

    @property
    def deserted(self) -> bool:
        """Whether every client is gone, and none is waited for; as ``Membership.deserted``."""
        if len(self.dead) < self.num_clients:
            return False
        lost = any(text not in FOR_GOOD for text in self.dead.values())
        last_was_lost = next(reversed(self.dead.values()), "") != CLOSED
        return not {"wait": lost, "shrink": last_was_lost}.get(self._on_loss, False)
