"""What each process of a client does in a simulated job, and what it compares."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from simulation.cluster import Cluster
from simulation.meetings import Meeting, Meetings
from simulation.network import Program
from simulation.oracle import BASE, Oracle
from simulation.plan import KEYS, MOST_CLIENTS, NUMBERS, Plan

from kvmpi.engine import Work
from kvmpi.errors import KVError, KVTimeoutError
from kvmpi.kernels.rows import Rows
from kvmpi.ps import ArrivingRows, codec
from kvmpi.ps.client import PsClient, SavedChunk
from kvmpi.ps.exchanges import Exchange
from kvmpi.ps.landing import Landing
from kvmpi.ps.participant import GOODBYE_S
from kvmpi.ps.steps import Turn
from kvmpi.store.call import nothing
from kvmpi.store.checkpoint import SavedKey

#: How long operations may take in jobs that hurry.
_HURRY_S = (0.3, 1.0, 3.0, 1e6)
#: Of a threshold, by the number of the push: half of it is left by the first, and makes the second whole.
_TWO_BIT = (1.0, 1.5, 0.5)
#: What is read into, and what each client pushes.
_UNFILLED = {key: np.full(count, np.nan, "f4") for key, count in KEYS.items()}
_PUSHED = {(rank, key): np.full(KEYS[key], float(BASE**rank), "f4") for rank in range(MOST_CLIENTS) for key in KEYS}


class Programs:
    """The programs of a job's clients.

    Args:
        is_newest: whether no other process of a client is to take the place of that one.
        dies_early: client 0 is killed when it is about to give the first values, or has given some of them.
    Attributes:
        leaving: clients that have done their steps: others may leave without one of them, and with them what another
            process would ask for.
        closing: those that say good-bye.
    """

    def __init__(
        self, plan: Plan, cluster: Cluster, oracle: Oracle, policy: str, is_newest: Callable[[int, int], bool],
        dies_early: Callable[[], Program] | None,
    ) -> None:  # fmt: skip
        self._plan, self._cluster, self._network, self._oracle = plan, cluster, cluster.network, oracle
        self._sync, self._policy = cluster.mode == "sync", policy
        self._is_newest, self._dies_early = is_newest, dies_early
        self._meetings = Meetings(oracle)
        cluster.on_let_go = self._meetings.let_go
        self._first: dict[PsClient, int] = {}  # the first step of a process
        self.leaving: set[int] = set()
        self.closing: set[int] = set()

    def run(self, ps: PsClient, rank: int, incarnation: int) -> Program:
        """All that one process does."""
        plan, deadline = self._plan, self._cluster.deadline
        yield [ps.register(incarnation, deadline())]
        yield [ps.open_sessions(incarnation, deadline())]
        known = 1 + ps.resumed_step
        for i, keys in enumerate(plan.batches(-1, known)):
            self._add_keys(ps, keys)
            if rank == incarnation - 1 == i == 0 and self._dies_early is not None:
                yield from self._dies_early()
            yield from self._init(ps, keys, known)
        yield from self._insist([lambda deadline: ps.set_rule(plan.rule_at(0), deadline)])
        begins = 0 in plan.saves and not ps.resumed_step  # who loads something does not, where it goes on
        yield from self._save(ps, rank, 0) if begins else self._meet(ps, rank, (0, 0))
        entered = ps.resumed_step + ps.entered_after
        self._oracle.check_resumed(rank, ps.resumed_step)
        first = 1 + ps.resumed_step + ps.position
        yield from self._look_around(ps, rank, incarnation, entered, first)
        if not self._sync and incarnation > 1 and self._policy == "wait":
            self._network.faults.count("return to where it was")
        elif not self._sync and incarnation > 1:
            self._network.faults.count("return without rounds")
            if plan.anew and incarnation == 2:
                self._oracle.begin_anew(rank)
            first = max(first, 1 + self._oracle.last_begun(rank))
        for step in range(1, first):
            if step in plan.saves and step == first - 1 and self._sync:  # nobody knows here whether that one is done
                yield from self._save(ps, rank, step)
            elif plan.meets_again:
                yield from self._meet(ps, rank, (step, 0))
        on_way: dict[Any, Work] = {}
        self._first[ps] = first
        ps.set_codec(codec.get(plan.codec if plan.codec != "2bit" else f"2bit:{float(BASE**rank)}"))
        for step in range(first, plan.last_step[rank] + 1):
            self._meetings.skip(rank, first - 1)
            for keys in plan.batches(max(known, step - 1), step):
                self._network.faults.count("late key")
                self._add_keys(ps, keys)
                yield from self._init(ps, keys, step)
            if plan.doubles_from is not None:
                yield from self._end_of(on_way.values())
                on_way.clear()
                changed = {"lr": plan.rule_at(step).hyperparams()["lr"]}
                yield from self._insist([partial(ps.set_hyperparams, changed)])
            yield from self._exchange(ps, rank, step, on_way, entered if ps._has_entered else 0)
            ps.clock += plan.counts
            longest_s = 2.0 if rank in plan.slow else plan.pause_s
            if longest_s:
                yield [self._network.pause(self._network.random.uniform(0.0, longest_s))]
            if step in plan.saves:
                yield from self._end_of(on_way.values())
                on_way.clear()
                yield from self._save(ps, rank, step)
            else:
                yield from self._meet(ps, rank, (step, 0))
        yield from self._end_of(on_way.values())
        if not self._is_newest(rank, incarnation):
            self._network.detach(f"client {rank}.{incarnation}")
            return  # another is about to take its place: if it left in good order now, that one would be alone
        yield from self._end(ps, rank)

    def _add_keys(self, ps: PsClient, keys: list[Any]) -> None:
        ps.add_keys([(key, (KEYS[key],), "float32") for key in keys])
        for key in keys:
            self._oracle.note_chunks(key, [chunk.start for chunk in ps._layouts[key].chunks])

    def _init(self, ps: PsClient, keys: list[Any], step: int) -> Program:
        """Make keys that have been added, before a step: as if they had been there when anything was put back."""
        values = [self._oracle.marked(np.zeros(KEYS[key], "f4"), step - 1) for key in keys]
        yield [ps.init(key, value, self._cluster.deadline()) for key, value in zip(keys, values, strict=True)]
        yield [ps.enter(self._cluster.deadline())]

    def _look_around(self, ps: PsClient, rank: int, incarnation: int, entered: int, first: int) -> Program:
        """What a process finds that is not the first of its client, or goes on from a snapshot."""
        plan, count = self._plan, self._network.faults.count
        follows = incarnation > 1 and self._is_newest(rank, incarnation)
        if rank in self._oracle.gone and follows:
            count("return" if not ps.resumed_step else "return after resume")
            if plan.seldom:
                count("seldom return to others")
            self._oracle.enter(rank, entered, first - 1)
            if self._sync:
                self._meetings.skip(rank, entered)
            yield from self._read_all(ps, rank, first - 1, later=True)
        elif self._policy == "wait" and follows:
            self._oracle.check_position(rank, first - 1, waits=not (plan.loose and plan.seldom))
            if plan.seldom:
                count("seldom return")
        if self._cluster.config.resume and incarnation == 1 and first <= plan.last_step[rank]:
            yield from self._read_all(ps, rank, first - 1)

    def _end(self, ps: PsClient, rank: int) -> Program:
        """When it has done its steps."""
        plan = self._plan
        last, steps = plan.last_step[rank], plan.steps
        self.leaving.add(rank)
        self._oracle.end(rank)
        if last < steps and plan.leaves_early:
            self._network.faults.count("leave early")
            self._meetings.finished.add(rank)
            yield from self._leave(ps)
            return
        # Of the steps that it has left out a push may have been lost, which others make as well, and read after it.
        leaves_out = self._policy == "shrink" and self._first[ps] > 1 + ps.resumed_step
        short = self._cluster.mode.startswith("ssp") and leaves_out and self._oracle.may_have_lost(rank)
        if last < steps or short:
            self._network.faults.count("finish" if last < steps else "finish after return")
            self._meetings.finished.add(rank)
            yield from self._insist([ps.finish])
        # Who meets others lets them go by coming to the next barrier.
        while not self._sync and not plan.meets and len(self.leaving | self._oracle.gone) < len(plan.last_step):
            # What a slow one pushes meanwhile must be there, whichever server answers.
            yield [self._network.pause(self._network.random.uniform(0.0, 0.3))]
            yield from self._read_all(ps, rank, last)
        yield from self._meet(ps, rank, (steps, 1))
        yield from self._read_all(ps, rank, last, later=True)
        yield from self._meet(ps, rank, (steps, 2))
        self.closing.add(rank)
        yield from self._leave(ps)

    def _leave(self, ps: PsClient) -> Program:
        """As PsClient.close, which gives up soon: nobody tells a client without heartbeats that a server is gone."""
        ps._link.stop_heartbeats()
        try:
            yield [ps.leave(self._cluster.deadline(GOODBYE_S))]
        except KVError:
            pass

    def _meet(self, ps: PsClient, rank: int, where: Meeting, first: list[str] | None = None) -> Program:
        """A barrier, if there is one there."""
        step, number = where
        if step and not number and not (self._plan.meets and step % 2):
            return
        self._meetings.come(rank, where)
        yield from self._insist([partial(ps.barrier, first=first)])
        # Who was away may have missed some before this, as long as it has not pushed.
        if ps._furthest_step() > max(ps.position, ps.entered_after) or (
            not ps._has_entered and (self._plan.meets_again or ps.position == 0)
        ):
            self._meetings.check_passed(rank, where)

    def _save(self, ps: PsClient, rank: int, step: int) -> Program:
        """Meet; one client saves and restores; and again with the next, if that one is lost before it can say so.

        As ``Saving._by_one`` does.
        """
        first = ["0"]
        yield from self._meet(ps, rank, (step, 0), first)
        is_done = False
        while not is_done:
            said = [str(int(first == [str(rank)]))]
            if said == ["1"]:
                if step and ps not in self._first:
                    self._network.faults.count("save after return")
                yield from self._save_and_restore(ps, rank, step)
            yield from self._insist([partial(ps.barrier, first=first, said=said)])
            is_done = said == ["1"] or first == ["-1"]
        if said == ["1"]:
            self._oracle.note_saved(step)

    def _save_and_restore(self, ps: PsClient, rank: int, step: int) -> Program:
        """Between barriers: what is put back is what is there, but for the mark."""
        self._network.faults.count("save")
        self._oracle.begin_save(step)
        for key in ps._layouts:
            chunks: list[SavedChunk] = []
            yield from self._insist([partial(self._read_state, ps, key, chunks)])
            saved = SavedKey.of_chunks(key, (KEYS[key],), "float32", chunks, self._plan.rule_at(step))
            self._oracle.check_read(rank, key, saved.arrays["value"], step, {}, later=True)
            saved.arrays["value"] = self._oracle.marked(saved.arrays["value"], step)
            yield from self._insist([partial(ps.put_state, key, saved.updates, saved.arrays)])
            if self._plan.pause_s:
                yield [self._network.pause(self._network.random.uniform(0.0, self._plan.pause_s))]

    def _read_state(self, ps: PsClient, key: Any, into: list[SavedChunk], deadline: Any) -> Work:
        work, into[:] = ps.get_state(key, deadline)
        return work

    def _deadline(self) -> Any:
        """That of one call of the program: one that has no hurry has all the time there is."""
        return self._cluster.deadline(*([self._network.random.choice(_HURRY_S)] if self._plan.hurries else []))

    def _insist(self, starts: Sequence[Callable[[Any], Work]]) -> Program:
        """Start operations with a deadline, again and again those whose time was not enough, and wait for all."""
        while starts:
            deadline = self._deadline()
            works = [start(deadline) for start in starts]
            yield from self._end_of(works)
            starts = [start for start, work in zip(starts, works, strict=True) if work.error() is not None]

    def _end_of(self, works: Iterable[Work]) -> Program:
        """Wait until operations are over, maybe because their time was not enough."""
        works = [*works]
        try:
            yield works
        except KVTimeoutError:
            self._network.faults.count("too little time")
        for work in works:
            if not isinstance(error := work.error(), KVTimeoutError | None):
                raise error

    def _pushed(self, ps: PsClient, key: Any, step: int) -> int:
        """How often a process has pushed a key with a step; where it goes on from those before it, with them."""
        goes_on = self._policy == "wait" or ps._link._who[1] == 1
        before = ps.resumed_step if goes_on else self._first.get(ps, step + 1) - 1
        return self._plan.pushes(key, step) - self._plan.pushes(key, before)

    def _read_all(self, ps: PsClient, rank: int, step: int, **how: bool) -> Program:
        outs = {key: _UNFILLED[key].copy() for key in ps._layouts}
        told, by_rows = self._oracle.told(), {}
        for key in outs:
            if (NUMBERS[key] + step) % 2 == 0:
                share = self._network.random.choice([0.0, 0.3, 1.0]) if self._plan.is_sparse else 1.0
                by_rows[key] = np.flatnonzero([self._network.random.random() < share for _ in range(KEYS[key])])
        yield from self._pull(ps, outs, by_rows)
        for key, out in outs.items():
            rows, pushed = by_rows.get(key), self._pushed(ps, key, step)
            self._oracle.check_read(
                rank, key, out, step, told, rows=rows, stale=self._is_stale(ps), pushed=pushed, **how
            )  # fmt: skip

    def _pull(self, ps: PsClient, outs: dict[Any, np.ndarray], by_rows: Mapping[Any, np.ndarray]) -> Program:
        """Pull all of each key, or some rows of it."""

        def start(key: Any, deadline: Any) -> Work:
            if key not in by_rows:
                return ps.pull(key, outs[key], deadline)
            rows = np.empty((by_rows[key].size, 1), "f4")
            came.append((key, rows))
            return ps.pull_rows(key, by_rows[key], rows, deadline)

        came: list[tuple[Any, np.ndarray]] = []
        whole = [(key, out) for key, out in outs.items() if key not in by_rows] if self._plan.together else []
        if len(whole) > 1:
            self._network.faults.count("pulled together")
            starts = [partial(start, key) for key in outs if key in by_rows]
            yield from self._insist([partial(ps.pull_together, whole), *starts])
        else:
            yield from self._insist([partial(start, key) for key in outs])
        for key, rows in came:  # that of one which had too little time is not the last
            outs[key][by_rows[key]] = rows[:, 0]

    def _exchange(self, ps: PsClient, rank: int, step: int, on_way: dict[Any, Work], entered: int) -> Program:
        """A step with every key that is pushed in it; up to step ``entered`` nothing of that counts."""
        plan = self._plan
        repeats = step <= max(entered, self._oracle.last_begun(rank))
        for phase in plan.phases:
            keys = [key for key in phase if plan.pushes(key, step) > plan.pushes(key, step - 1)]
            if plan.waits_for_none(phase):
                yield from self._end_of([on_way.pop(key) for key in keys if key in on_way])
                for key in keys:
                    value = self._value(ps, rank, key, step)
                    work = ps.push(key, value, self._deadline(), turn=self._kept(ps, key))
                    on_way[key] = self._noted(work, rank, step, key, entered)
            elif keys:
                yield from self._exchange_keys(ps, rank, step, keys, entered, repeats=repeats)

    def _value(self, ps: PsClient, rank: int, key: Any, step: int) -> np.ndarray:
        """What is pushed: always the same, when what was left of it with the push before is added."""
        value = _PUSHED[rank, key].copy()
        if self._plan.codec == "2bit":
            value *= _TWO_BIT[(self._plan.pushes(key, step) - self._plan.pushes(key, self._first[ps] - 1)) % 3]
        return value

    def _noted(self, work: Work, rank: int, step: int, key: Any, entered: int) -> Work:
        """A push has begun: the oracle knows, and will be told when it is done."""
        if self._plan.overall(key, step) > entered:
            self._oracle.begin(rank, key, step)
            work.add_done_callback(self._oracle.note_done(rank, key, step))
        return work

    def _kept(self, ps: PsClient, key: Any) -> Turn | None:
        """The turn of a push that is not made again if its time is not enough."""
        if not self._plan.hurries:
            return None
        turn = ps.next_pushes([key])[key]
        turn.kept = True
        return turn

    def _push_ahead(
        self, ps: PsClient, key: Any, value: np.ndarray, landing: Landing, deadline: Any, kept: set[Any]
    ) -> Work:
        """Push; when servers have taken it, its memory is free, and it is not made again."""
        turn, works = ps.next_pushes([key])[key], list[Work]()

        def take() -> None:
            if not works or works[0].error() is None:
                self._network.faults.count("taken")
                turn.kept, value[:] = True, np.nan
                kept.add(key)

        works.append(ps.push_ahead(key, value, landing, deadline, -NUMBERS[key], take, turn))
        return works[0]

    def _exchange_keys(
        self, ps: PsClient, rank: int, step: int, keys: list[Any], entered: int, *, repeats: bool
    ) -> Program:
        """Pushpull, or push and then pull; of the whole value, or of all its rows."""
        plan = self._plan
        turn_of = {key: 0 if plan.together else NUMBERS[key] for key in keys}
        fused = {key for key in keys if (turn_of[key] + step + rank * (not self._sync)) % 2 == 1}
        by_rows = {key: np.array(rows, np.int64) for key in keys if (rows := plan.rows(rank, key, step)) is not None}
        values = {key: self._value(ps, rank, key, step) for key in keys}
        outs = {
            key: values[key] if plan.in_place and key in fused - by_rows.keys() else _UNFILLED[key].copy()
            for key in keys
        }
        landing = {key: Landing(_UNFILLED[key].copy()) for key in fused - by_rows.keys() if plan.lands}
        kept = {key for key in keys if key not in fused and plan.hurries and (NUMBERS[key] + step) % 4 < 2}
        arriving: dict[Any, ArrivingRows] = {}
        works: dict[Any, Work] = {}

        def start(key: Any, deadline: Any) -> Work:
            priority, value = -NUMBERS[key], values[key]
            turn = self._kept(ps, key) if key in kept else None
            if key in by_rows:
                changed = arriving[key] = ArrivingRows(ps.rows_of(key)) if key in fused else None
                rows = Rows(by_rows[key], value[by_rows[key]].reshape(-1, 1))
                work = ps.push_rows(key, rows, deadline, priority, changed, turn)
            elif key in landing:
                work = self._push_ahead(ps, key, value, landing[key], deadline, kept)
            elif key in fused:
                work = ps.pushpull(key, value, outs[key], deadline, priority, turn)
            else:
                work = ps.push(key, value, deadline, priority, turn)
            works[key] = self._noted(work, rank, step, key, entered)
            return works[key]

        def start_together(some: list[Any], deadline: Any) -> Work:
            turns = ps.next_pushes(some)
            exchanges = [Exchange(key, values[key], outs[key] if key in fused else None, turns[key]) for key in some]
            work = ps.exchange_together(exchanges, deadline)
            self._network.faults.count("together")
            works.update({key: self._noted(work, rank, step, key, entered) for key in some})
            return work

        alike = {key: key in fused for key in keys if plan.together and key not in {*by_rows, *landing, *kept}}
        left = keys
        while left:
            deadline, begun = self._deadline(), []
            for kind, group in itertools.groupby(left, alike.get):
                some = [*group]
                if kind is not None and len(some) > 1:
                    begun.append(start_together(some, deadline))
                else:
                    begun += [start(key, deadline) for key in some]
            yield from self._end_of(begun)
            failed = [key for key in left if works[key].error() is not None and key not in kept]
            left = [key for key in failed if ps._layouts[key].track.failed is not None]
            for key in failed:
                if key not in left:  # it has come to a good end beside others that have not
                    self._network.faults.count("good end beside others")
                    self._noted(nothing(), rank, step, key, entered)
        for key, value in values.items():
            if outs[key] is value and key in landing:
                outs[key] = _UNFILLED[key].copy()
            if outs[key] is not value and (works[key].error() is None or key not in kept):
                value[:] = np.nan  # what was pushed is ours again
        changed_rows = {key: changed.rows() for key, changed in arriving.items() if changed is not None}
        for key, changed in changed_rows.items():
            outs[key][changed.ids] = changed.values[:, 0]
            self._oracle.check_changed(rank, key, changed.ids.tolist(), step, repeats=repeats)
        for key, landed in landing.items():
            if works[key].error() is None:
                landed.copy_to(outs[key], last=True)
            else:
                fused.remove(key)
        told = self._oracle.told()
        yield from self._pull(ps, {key: outs[key] for key in keys if key not in fused}, by_rows)
        for key in keys:
            known, stale = {} if key in fused else told, self._is_stale(ps)
            met = plan.answers_met and key in fused
            rows = changed_rows[key].ids if key in changed_rows else by_rows.get(key)
            self._oracle.check_read(
                rank, key, outs[key], step, known, rows=rows, later=repeats, stale=stale, met=met,
                pushed=self._pushed(ps, key, step),
            )  # fmt: skip

    def _is_stale(self, ps: PsClient) -> bool:
        """Whether another process has taken, or is to take, the place of this one, which does not know that yet."""
        return not self._is_newest(*ps._link._who)
