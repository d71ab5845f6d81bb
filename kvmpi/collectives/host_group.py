"""Ranks that share a host: a page of counters of each that all of them see, and each other's memory."""

from __future__ import annotations

import itertools
import platform
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import address_of
from kvmpi.collectives import words as shared_words
from kvmpi.collectives.comm import Waiter
from kvmpi.collectives.cross_memory import CrossMemory, Source
from kvmpi.collectives.handover import hand_over
from kvmpi.collectives.waiting import Habit, Patience, in_vain
from kvmpi.deadline import Deadline
from kvmpi.errors import KVTimeoutError, PeerLostError, ranks_in_words

Buffer = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]

#: What a rank can post for one call.
MAX_PLACES = 4096
#: Bytes of each of the two slots in which a rank offers small data.
SLOT_BYTES = 256 << 10
# Words of a page. Words that different moments of a call write are 128 bytes apart: ranks that wait for one of them
# must not take the cache line of another from its writer. The word behind one of which somebody waits says so.
_POSTED, _PROGRESS, _FINISHED, _GIVEN_UP, _SUMMED, _STATED, _ANSWERED, _PLACES = 0, 16, 32, 35, 48, 64, 80, 96
#: What a rank states for a call that is to be agreed on, two times so many words: for every second one.
_STATEMENTS, _STATEMENT_WORDS = 66, 2
#: What the first rank answers to statements, likewise.
_ANSWERS = 82
PAGE_WORDS = _PLACES + MAX_PLACES
_BLOCK_BITS = 32
#: So many calls can be told apart by what is left of a word.
_CALLS = 1 << 31
#: Marks a place in an arena: whose is said by the bits below. Other places are addresses, which end below that bit.
IN_ARENA = 1 << 63
_OWNER_SHIFT = 48
_OFFSET_MASK = (1 << _OWNER_SHIFT) - 1


#: These processors keep the order of stores, and of loads, which is all that is needed here.
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")

#: Polls before a wait is taken for one that needs patience.
_FIRST_POLLS = 32

#: To be woken costs less than to poll for longer, if the other wants this core.
_BARE_POLLS = 64
#: Waits for other ranks' pages.
_PAGES = Habit()
_PAGES_THAT_WAKE = Habit(bare_polls=_BARE_POLLS)
#: Waits for ranks that still compute.
_OTHERS = Habit()
_OTHERS_THAT_WAKE = Habit(bare_polls=_BARE_POLLS)

#: Gives the beginning of an error message.
What = Callable[[], str]


class Peer(NamedTuple):
    """One rank of a host: its page and slots, its whole arena, and its private memory, if that can be read."""

    words: Words
    slots: Buffer
    arena: Buffer
    memory: CrossMemory | None


class SlotMemory(NamedTuple):
    """Pages and slots by rank, this rank's number, and which words of a page are for what."""

    pages: list[Words]
    slots: list[Buffer]
    number: int
    posted: int
    summed: int
    finished: int


class Target(NamedTuple):
    """Where compiled code delivers to: as ``Source``; unless a word at ``given_up`` is set."""

    address: int
    pid: int = 0
    given_up: int = 0
    past_caches: bool = False


class Word(NamedTuple):
    """Where compiled code counts, and from what."""

    address: int
    start: int


class HostGroup:
    """One rank's view of the ranks of a host. Calls must be the same, in the same order, on every one of them.

    A call goes: ``begin``; ``post`` where this rank's vectors and results are, or what is in its ``slot``;
    ``await_posts``; read from the others, and ``deliver`` to them, or read their results while ``advance`` and
    ``blocks_of`` tell how far these are; ``finish``, after which this rank touches nothing of others any more. Ranks
    are numbered by their place in ``members``, which holds their ranks in the communicator.
    """

    def __init__(self, members: Sequence[int], index: int, peers: list[Peer]) -> None:
        self.members, self.index, self.size = tuple(members), index, len(members)
        self.others = tuple((index + i) % self.size for i in range(1, self.size))
        #: Whether arrays of other ranks can be read wherever they are; else only those in an arena.
        self.attaches = all(peer.memory is not None for peer in peers)
        #: Whether ranks that wait sleep until they are woken, all of them.
        self.wakes = False
        self._peers = peers
        # Beginning and end of each arena in this process's memory, and the mark of places there.
        self._arenas = [
            (address_of(peer.arena), address_of(peer.arena) + peer.arena.size, IN_ARENA | owner << _OWNER_SHIFT)
            for owner, peer in enumerate(peers)
        ]
        self._pages = [peer.words for peer in peers]
        self._addresses = [address_of(page) for page in self._pages]
        self._given_up = [address + 8 * _GIVEN_UP for address in self._addresses]
        # Single words are read and written three times as fast through a memoryview.
        self._words = [memoryview(peer.words.data).cast("B").cast("Q") for peer in peers]
        self._mine = self._words[index]
        #: The number of the last call.
        self.call = 0
        self._blocks = 0
        self._stated = 0  # statements so far
        self._offers: list[tuple[list[Buffer], list[Words]]] = []
        self._order = threading.Lock()
        self._kept: list[Buffer] = [peers[index].slots]
        self._retire = weakref.finalize(self, _retire, self._pages, index, self._kept)
        self._retire.atexit = False

    def _fence(self) -> None:
        """What was read or written before is so before what follows, as other processors see it."""
        # Taking a lock holds back what follows, and leaving one what came before: so it is left before it is taken.
        for _ in range(2):
            with self._order:
                pass

    # ---- where things lie

    def place_of(self, buffer: Buffer) -> int | None:
        """Where a contiguous buffer lies, the same number on every rank; None if it lies in no rank's arena."""
        return self.place_at(address_of(buffer))

    def place_at(self, address: int) -> int | None:
        """As ``place_of``, for what begins there."""
        for start, stop, mark in self._arenas:
            if start <= address < stop:
                return mark | address - start
        return None

    @staticmethod
    def are_one(place: int, other: int) -> bool:
        """Whether two ranks' places are the same memory: private memory never is."""
        return place == other and bool(place & IN_ARENA)

    def fetch(self, rank: int, place: int, part: slice, into: Buffer) -> Buffer:
        """The elements ``part`` of what ``rank`` has posted at ``place``: where they are, or copied to ``into``."""
        itemsize = into.itemsize
        if place & IN_ARENA:
            arena = self._peers[(place & ~IN_ARENA) >> _OWNER_SHIFT].arena
            first = place & _OFFSET_MASK
            return arena[first + part.start * itemsize : first + part.stop * itemsize].view(into.dtype)
        memory = self._peers[rank].memory
        assert memory is not None, "a private vector was posted where ranks cannot read from each other's memory"
        memory.read(place + part.start * itemsize, into)
        return into

    def source(self, rank: int, place: int) -> Source:
        """Where compiled code finds what ``rank`` has posted at ``place``."""
        if place & IN_ARENA:
            return Source(self._arenas[(place & ~IN_ARENA) >> _OWNER_SHIFT][0] + (place & _OFFSET_MASK))
        memory = self._peers[rank].memory
        assert memory is not None, "a private vector was posted where ranks cannot read from each other's memory"
        return Source(place, memory.pid)

    def target(self, rank: int, place: int) -> Target:
        """Where compiled code delivers what ``rank`` has posted at ``place`` for its result."""
        return Target(*self.source(rank, place), self._given_up[rank])

    def read(self, rank: int, place: int, part: slice, into: Buffer) -> None:
        """Copy the elements ``part`` of what ``rank`` has posted at ``place``."""
        found = self.fetch(rank, place, part, into)
        if found is not into:
            np.copyto(into, found)

    def deliver(self, rank: int, place: int, part: slice, block: Buffer) -> None:
        """Copy ``block`` to the elements ``part`` of what ``rank`` has posted at ``place`` for its result.

        Raises:
            PeerLostError: see ``check``.
        """
        self.check(rank)
        if place & IN_ARENA:
            hand_over(self.fetch(rank, place, part, block), block)
            return
        memory = self._peers[rank].memory
        assert memory is not None, "a private result was posted where ranks cannot write to each other's memory"
        memory.write(place + part.start * block.itemsize, block)

    def check(self, rank: int) -> None:
        """After reading from ``rank``, or before writing there.

        Raises:
            PeerLostError: that rank waits no more, so its memory is its own again.
        """
        if not _ORDERED:
            self._fence()
        if self._words[rank][_GIVEN_UP]:
            raise PeerLostError(f"MPI rank {self.members[rank]} has given up on this call, or on one before")

    def slot(self, rank: int, count: int, dtype: Any, call: int) -> Buffer:
        """Where ``rank`` offers small data in ``call``: ``count`` elements of ``dtype``."""
        first = call % 2 * SLOT_BYTES
        return self._peers[rank].slots[first : first + count * np.dtype(dtype).itemsize].view(dtype)

    def offers(self, call: int) -> tuple[list[Buffer], list[Words]]:
        """Of every rank, the whole slot as bytes, and as words."""
        if not self._offers:
            slots = [[self.slot(rank, SLOT_BYTES, np.uint8, i) for rank in range(self.size)] for i in (0, 1)]
            self._offers = [(of_call, [slot.view(np.uint64) for slot in of_call]) for of_call in slots]
        return self._offers[call % 2]

    def slot_memory(self, count: int, dtype: Any, call: int) -> SlotMemory:
        """Where compiled code finds all that a call of that number needs which sums in slots."""
        slots = [self.slot(rank, count, dtype, call) for rank in range(self.size)]
        return SlotMemory(self._pages, slots, self.index, _POSTED, _SUMMED, _FINISHED)

    # ---- statements, which may be made by another thread than calls

    def state(self, statement: bytes) -> None:
        """Say 16 bytes that others compare with theirs. The next ones not before all ranks have stated these: then
        ``all_state`` is true, or messages have told.
        """
        self._stated += 1
        first = _STATEMENTS + self._stated % 2 * _STATEMENT_WORDS
        self._mine[first : first + _STATEMENT_WORDS] = memoryview(statement).cast("Q")
        self._say(_STATED, self._stated)

    def all_state(
        self, statement: bytes, deadline: Deadline, describe: Callable[[list[int]], str],
        over: Callable[[], bool] = lambda: False,
    ) -> bool:  # fmt: skip
        """After ``state``: whether all others state the same, as soon as one does not.

        Args:
            describe: the text of the error when time is up, given the ranks that have stated nothing.
            over: whether it does not matter any more; then it is false.
        Raises:
            KVTimeoutError: at least one has not.
            PeerLostError: one has failed in a call, and will state nothing.
        """
        number, (one, two) = self._stated, memoryview(statement).cast("Q")
        first = _STATEMENTS + number % 2 * _STATEMENT_WORDS
        late = list(self.others)
        patience: Patience | None = None
        polls = 0
        while True:
            for rank in late[:]:
                words = self._words[rank]
                if words[_STATED] >= number:
                    if not _ORDERED:
                        self._fence()
                    if words[first] != one or words[first + 1] != two:
                        return False
                    late.remove(rank)
            if not late:
                break
            polls += 1
            if polls < _FIRST_POLLS:
                continue
            if over():
                return False
            if patience is None:
                habit = _OTHERS_THAT_WAKE if self.wakes else _OTHERS
                patience = Patience(
                    deadline, lambda: describe(sorted(self.members[rank] for rank in late)), habit,
                    self._waiter(late, _STATED, number),
                )  # fmt: skip
            for rank in late:
                self.check(rank)
            patience.pause()
        if patience is not None:
            patience.progress()
        for rank in self.others:
            self.check(rank)
        return True

    def answer(self, agreed: bool) -> None:
        """On the first rank, after ``state``: tell the others of the host what has come of it."""
        self._mine[_ANSWERS + self._stated % 2] = agreed
        self._say(_ANSWERED, self._stated)

    def await_answer(self, deadline: Deadline, describe: Callable[[bool], str]) -> bool:
        """After ``state``: the first rank's answer; no, if that takes for too long.

        Args:
            describe: what is waited for, given whether the first rank has stated something.
        Raises:
            KVTimeoutError: it has not; the text is that of ``describe``.
            PeerLostError: it has failed in a call, and will answer nothing.
        """
        number, words = self._stated, self._words[0]
        habit = _OTHERS_THAT_WAKE if self.wakes else _OTHERS
        waiter = self._waiter([0], _ANSWERED, number)
        patience = Patience(deadline, lambda: describe(words[_STATED] >= number), habit, waiter)
        try:
            while words[_ANSWERED] < number:
                self.check(0)
                patience.pause()
        except KVTimeoutError:
            if words[_STATED] < number:
                raise
            return False
        patience.progress()
        if not _ORDERED:
            self._fence()
        return bool(words[_ANSWERS + number % 2])

    # ---- calls

    def begun(self) -> None:
        """Compiled code has begun the next call, and posted for it."""
        self.call, self._blocks = self.call + 1, 0

    def begin(self, deadline: Deadline, what: What) -> int:
        """A new call, in which this rank may write to its ``slot``; returns its number."""
        last, self.call, self._blocks = self.call, self.call + 1, 0
        # The slot is that of the call before last. A rank that has begun the last one is through with it.
        for words in self._words:
            if words[_POSTED] < last:
                self._await(_POSTED, self.others, last, deadline, what, "did not start the call before")
                break
        return self.call

    def post(self, places: Sequence[int] = ()) -> None:
        """Others may read at ``places`` (``place_of``, or addresses of private memory), and this rank's slot."""
        if places:
            assert len(places) <= MAX_PLACES
            self._mine[_PLACES : _PLACES + len(places)] = memoryview(array("Q", places))
        self._say(_POSTED, self.call)

    def places_of(self, rank: int, first: int, count: int) -> list[int]:
        """``count`` of the places that ``rank`` has posted."""
        found: list[int] = self._words[rank][_PLACES + first : _PLACES + first + count].tolist()
        return found

    def posted(self, rank: int, nbytes: int) -> bytes:
        """The beginning of what ``rank`` has posted, to be compared."""
        return self._words[rank][_PLACES : _PLACES + nbytes // 8].tobytes()

    def await_posts(self, ranks: Sequence[int], deadline: Deadline, what: What) -> None:
        """Return when ``ranks`` have posted.

        Raises:
            KVTimeoutError: names those that have not.
        """
        self._await_soon(_POSTED, ranks, deadline, what, "did not start")

    def say_summed(self) -> None:
        """This rank's part of the sum is in its ``slot``."""
        self._say(_SUMMED, self.call)

    def await_sums(self, deadline: Deadline, what: What) -> None:
        """Return when all others have said that theirs are.

        Raises:
            KVTimeoutError: names those that have not.
        """
        self._await_soon(_SUMMED, self.others, deadline, what, "did not add up its part")

    def advance(self, num_blocks: int = 1) -> None:
        """So many more blocks of this rank's results can be read."""
        if not _ORDERED:
            self._fence()
        self._blocks += num_blocks
        self._mine[_PROGRESS] = self._progress_begin + self._blocks

    def progress(self) -> Word:
        """For compiled code that does what ``advance`` does, in a call in which nothing else does that."""
        return Word(address_of(self._pages[self.index]) + 8 * _PROGRESS, self._progress_begin)

    @property
    def _progress_begin(self) -> int:
        """What says that no block of this call can be read yet. Calls are told apart by 31 bits."""
        return self.call % _CALLS << _BLOCK_BITS

    def blocks_of(self, rank: int) -> int:
        """How many blocks of ``rank``'s results can be read."""
        call, blocks = divmod(self._words[rank][_PROGRESS], 1 << _BLOCK_BITS)
        if not _ORDERED:
            self._fence()
        return blocks if call == self.call % _CALLS else 0

    def finish(self, wait_for: Sequence[int] = (), deadline: Deadline | None = None, what: What = str) -> None:
        """This rank is through; return when ``wait_for`` are, too, so that what was posted is free again."""
        self._say(_FINISHED, self.call)
        if wait_for:
            assert deadline is not None
            self._await(_FINISHED, wait_for, self.call, deadline, what, "did not finish")

    def give_up(self, *exposed: Any) -> None:
        """This rank has failed. Nothing more is to be delivered to what it has ``exposed``, which is kept.

        A rank that was stopped in the middle of a copy goes on with it when it is continued: then it must not find
        there what the system has given to somebody else.
        """
        _kept_for_late_ranks.extend(exposed)
        self._mine[_GIVEN_UP] = 1
        if not _ORDERED:
            self._fence()

    def share(self, made: Buffer | None, nbytes: int, deadline: Deadline, what: What) -> Buffer | None:
        """Collective: bytes in the first member's arena, as every rank has them mapped.

        Args:
            made: on the first member, the memory; None if there is no room, and then that is the result everywhere.
        """
        self.begin(deadline, what)
        if made is not None:
            self._kept.append(made)
        self.post([0 if made is None else (self.place_of(made) or 0)])
        self.await_posts(self.others, deadline, what)
        place = self.places_of(0, 0, 1)[0]
        self.finish(self.others, deadline, what)
        if not place:
            return None
        return self.fetch(0, place, slice(0, nbytes), np.empty(0, np.uint8))

    def unshare(self, buffers: Sequence[Buffer], deadline: Deadline, what: What) -> None:
        """Collective: nobody looks any more at these, which ``share`` has returned."""
        self.begin(deadline, what)
        self.post()
        self.await_posts(self.others, deadline, what)
        self.finish()
        places = {self.place_of(buffer) for buffer in buffers}
        self._kept[:] = [kept for kept in self._kept if self.place_of(kept) not in places]

    def close(self) -> None:
        """No call follows: what was shared is given back as soon as no other rank reads it any more."""
        self._retire()
        self._kept = []
        free_retired()

    def _say(self, word: int, number: int) -> None:
        """This rank has come so far, with all that it has written."""
        if self.wakes:
            shared_words.write(self._addresses[self.index] + 8 * word, number)
            return
        if not _ORDERED:
            self._fence()
        self._mine[word] = number

    def _waiter(self, late: Sequence[int], word: int, number: int) -> Waiter | None:
        """What sleeps until the last one of ``late`` has come so far; None where nobody is woken."""
        if not self.wakes:
            return None
        return lambda seconds: shared_words.sleep_until(self._addresses[late[-1]] + 8 * word, number, seconds)

    def _await_soon(self, word: int, ranks: Sequence[int], deadline: Deadline, what: What, problem: str) -> None:
        """``_await`` for what mostly is there at once."""
        call = self.call
        for rank in ranks:
            words = self._words[rank]
            for _ in range(_FIRST_POLLS):
                if words[word] >= call:
                    break
            else:
                self._await(word, ranks, call, deadline, what, problem)
                return
        if not _ORDERED:
            self._fence()

    def _await(self, word: int, ranks: Sequence[int], call: int, deadline: Deadline, what: What, problem: str) -> None:
        words = self._words
        late = [rank for rank in ranks if words[rank][word] < call]
        if late:

            def describe() -> str:
                names = ranks_in_words(self.members[rank] for rank in late if words[rank][word] < call)
                return f"{what()}: MPI rank {names} {problem}{in_vain(deadline)}"

            habit = _PAGES_THAT_WAKE if self.wakes else _PAGES
            patience = Patience(deadline, describe, habit, self._waiter(late, word, call))
            while late:
                if words[late[-1]][word] >= call:
                    late.pop()
                else:
                    patience.pause()
            patience.progress()
        if not _ORDERED:
            self._fence()


#: Of calls that have failed: where ranks that were stopped may still write.
_kept_for_late_ranks: list[Any] = []

#: Of groups that are no more: what others may still read, until their pages say that they are through.
_retired: dict[int, tuple[list[Words], int, list[Buffer]]] = {}
_numbers = itertools.count()


def _retire(pages: list[Words], index: int, kept: list[Buffer]) -> None:
    _retired[next(_numbers)] = (pages, index, kept)


def free_retired() -> None:
    """Give back what nobody reads any more."""
    for number in list(_retired):  # not its items: to make their tuples may begin a collection, which retires others
        pages, index, _ = _retired.get(number, ([], 0, []))
        if all(int(page[_FINISHED]) >= int(pages[index][_POSTED]) for page in pages):
            _retired.pop(number, None)  # another thread may have been faster


def clear_page(page: Words) -> None:
    """Before the first call."""
    page[:_PLACES] = 0
