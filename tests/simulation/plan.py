"""What the clients of a simulated job do, as its seed decides, whatever happens to them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from kvmpi import optim
from kvmpi.ps import finds_position

MOST_CLIENTS = 4
KEYS = {"weight": 11, "bias": 1, "empty": 0, 4: 7}
NUMBERS = {key: i for i, key in enumerate(KEYS)}


@optim.register
@dataclass(frozen=True)
class AnswersMet(optim.Test):
    """Adds up what is pushed, and answers with what was there before."""

    name: ClassVar[str] = "answers met"
    replies_old: ClassVar[bool] = True


class Plan:
    """The program of all clients.

    Args:
        choose: goes on with the job's choices.
        policy: what rounds do without a client that is lost.
        resumed: the step that the job goes on from.
        writes: whether its servers write snapshots.
        gathers: whether pushes wait for others, to be an update together.
    Attributes:
        steps, last_step: how many there are; some clients have fewer.
        leaves_early: whether those with fewer steps leave then, where others go on without them.
        slow: clients that pause in each step.
        pause_s: the longest pause of the others: else rounds are over before a snapshot of them can be written.
        rule: "test" adds up what is pushed; "aware" too, but of what is old less.
        answers_met: whether a fused push brings back what was there before.
        codec: how pushes travel: "none", "bf16", or "2bit", which leaves half of every third push for the next.
        is_sparse: whether pushes by rows are of some rows only, or of none.
        together: whether pushes of whole values that are fused, and neighbours, are one operation.
        in_place: whether fused pushes put their answer in the place of what was pushed.
        lands: whether programs go on when servers have taken a push, whose value comes in its own time.
        seldom: keys that are pushed in every n-th step only, from which on, or never.
        phases: the order of keys in a step, where one group is over before the next begins.
        one_by_one: whether each key has an init of its own.
        late: keys that are made just before the step in which they are pushed first.
        loose: whether nobody waits for pushes of seldom keys before the next.
        counts: whether programs count their iterations, which tells what belongs to one step.
        doubles_from: the step from which on the learning rate is twice as high. Every client says what it is, in each
            step; None: nobody ever says anything of it.
        saves: steps after which one of the clients reads everything that servers have and puts it back, with a mark of
            its own as long as there is room for one.
        hurries: whether operations have too little time, now and then.
        meets: whether clients meet after some steps, which is where one that was away has missed barriers.
        meets_again: whether its program meets all of them again, or skips those of steps that are done.
        anew: whether a client that is back where there are no rounds does all its steps again, the
            first time.
    """

    def __init__(
        self, seed: int, choose: random.Random, *, mode: str, policy: str, num_clients: int, steps: int, resumed: int,
        writes: bool, gathers: bool = False,
    ) -> None:  # fmt: skip
        self._seed, self._resumed, self.steps = seed, resumed, steps
        self.last_step = dict.fromkeys(range(num_clients), steps)
        for client in range(1, num_clients):
            if choose.random() < 0.2:
                self.last_step[client] = choose.randrange(1, steps + 1)
        self.leaves_early = policy == "shrink" and random.Random(f"{seed} leave").random() < 0.5
        # With rounds all would be slow.
        self.slow = {client for client in range(num_clients) if mode == "async" and choose.random() < 0.5}
        self.pause_s = random.Random(f"{seed} pause").choice([0.0, 0.3, 1.0]) if writes and mode == "sync" else 0.0
        self.rule = choose.choice(["test", "test", "adam"]) if mode == "sync" else "test"
        if mode == "async" and not gathers and random.Random(f"{seed} aware").random() < 0.2:
            self.rule = "aware"
        self.answers_met = self.rule == "test" and not gathers and random.Random(f"{seed} met").random() < 0.3
        self.codec = random.Random(f"{seed} codec").choice(["none"] * 7 + ["bf16", "2bit", "2bit"])
        if self.rule == "aware":  # what a server makes of them is compared with what travels
            self.codec = "none"
        # Of jobs that have no rounds the oracle knows of a snapshot only how many pushes may be in it, not which.
        sparse = random.Random(f"{seed} sparse")
        self.is_sparse = (mode == "sync" or not writes) and sparse.random() < 0.4
        self._rows: dict[tuple[int, Any, int], tuple[int, ...] | None] = {}
        self._apart = sparse.random() < 0.5  # clients push rows in steps of their own, others all of it meanwhile
        self.together = random.Random(f"{seed} together").random() < 0.4
        self.in_place = random.Random(f"{seed} in place").random() < 0.3
        self.lands = mode == "sync" and not self.answers_met and random.Random(f"{seed} lands").random() < 0.4
        self.seldom, self.phases = self._choose_seldom(writes) if mode == "sync" else ({}, [[*KEYS]])
        self.one_by_one = random.Random(f"{seed} one by one").random() < 0.5
        late = random.Random(f"{seed} late")
        # Another process would have to know what keys there are.
        after = {key: first + 1 for key, (_, first) in self.seldom.items() if first and policy == "fail"}
        self.late = {key: step for key, step in after.items() if late.random() < 0.7}
        self.loose = random.Random(f"{seed} loose").random() < 0.5
        self._whole = {key for phase in self.phases if self.waits_for_none(phase) for key in phase}
        self.counts = random.Random(f"{seed} clock").random() < (0.7 if writes else 0.3)
        schedule = random.Random(f"{seed} schedule")
        has_schedule = mode == "sync" and schedule.random() < 0.3
        self.doubles_from = schedule.randrange(1, steps + 1) if has_schedule else None
        self.hurries = random.Random(f"{seed} hurry").random() < 0.25
        meets = random.Random(f"{seed} barriers")
        finds = finds_position(mode, policy)
        self.meets, self.meets_again = (mode == "sync" or finds) and meets.random() < 0.6, meets.random() < 0.4
        self.anew = mode == "async" and not finds and random.Random(f"{seed} anew").random() < 0.5
        saves = random.Random(f"{seed} saves")
        # What waits to be an update is over when a value is put back, so that would not be what was there.
        may_save = self.meets and policy != "wait" and not gathers and saves.random() < 0.8
        self.saves = {step for step in (0, *range(1, steps, 2)) if may_save and saves.random() < 0.5}

    def _choose_seldom(self, writes: bool) -> tuple[dict[Any, tuple[int, int]], list[list[Any]]]:
        choose = random.Random(f"{self._seed} seldom")
        keys = list(KEYS)
        if choose.random() < (0.6 if writes else 0.25):  # of seldom keys few snapshots can be made
            return {}, [keys]
        choose.shuffle(keys)
        found = {}
        for key in choose.sample(keys, choose.randrange(1, len(keys))):
            every = choose.choice([2, 2, 3, 4, 100])
            found[key] = (every, choose.randrange(every))
        often = [key for key in keys if key not in found]
        return found, choose.choice([[keys], [[*found], often], [often, [*found]], [[key] for key in keys]])

    def waits_for_none(self, phase: list[Any]) -> bool:
        """Whether nobody waits for the pushes of these keys."""
        return self.loose and all(key in self.seldom for key in phase)

    def rows(self, client: int, key: Any, step: int) -> tuple[int, ...] | None:
        """The rows of one element that a client pushes of a key in a step; None if it pushes the whole value."""
        where = client, key, step
        if where not in self._rows:
            self._rows[where] = self._choose_rows(*where)
        return self._rows[where]

    def _choose_rows(self, client: int, key: Any, step: int) -> tuple[int, ...] | None:
        by_rows = (NUMBERS[key] + step // 2 + client * self._apart) % 3 == 0
        # What meets an old value has all of it, and errors are kept of whole keys.
        if not by_rows or key in self._whole or self.answers_met or self.codec == "2bit":
            return None
        everything = tuple(range(KEYS[key]))
        if not self.is_sparse:
            return everything
        choose = random.Random(f"{self._seed} rows {client} {key} {step}")
        share = choose.choice([0.0, 0.2, 0.5, 1.0])
        return tuple(row for row in everything if choose.random() < share)

    def touches(self, client: int, key: Any) -> tuple[int, ...]:
        """For each element of a key the pushes of a client that have it; bit n is the n-th."""
        if not self.is_sparse:
            return (-1,) * KEYS[key]
        found = [0] * KEYS[key]
        for step in range(1, self.steps + 1):
            if (push := self.pushes(key, step)) == self.pushes(key, step - 1):
                continue
            rows = self.rows(client, key, step)
            for element in range(KEYS[key]) if rows is None else rows:
                found[element] |= 1 << push
        return tuple(pushes | pushes << self.steps for pushes in found)  # those of one that does all of them anew, too

    def batches(self, after: int, up_to: int) -> list[list[Any]]:
        """The keys that are made before the steps from ``after`` + 1 to ``up_to``, as they are made together."""
        found: list[list[Any]] = []
        if after < 0:
            early = [key for key in KEYS if key not in self.late]
            found = [early[:1], *([key] for key in early[1:])] if self.one_by_one else [early]
        by_step = (key for step in range(after + 1, up_to + 1) for key in KEYS if self.late.get(key) == step)
        return [*found, *([key] for key in by_step)]

    def rule_at(self, step: int) -> optim.Rule:
        """The rule of the pushes of a step; of step 0, the one that programs begin with."""
        factor = 2.0 if self.doubles_from is not None and step >= self.doubles_from else 1.0
        if self.rule == "adam":
            return optim.Adam(lr=0.1 * factor)
        if self.rule == "aware":
            return optim.SGD(lr=1.0, rescale_grad=-1.0, staleness_aware=True)
        return AnswersMet(lr=-factor) if self.answers_met else optim.Test(lr=-factor)

    def saves_before(self, step: int) -> int:
        """How many steps before this one are followed by such an exchange."""
        return sum(after < step for after in self.saves)

    def weigh(self, key: Any, pushes: int) -> int:
        """How often a set of pushes of a key is in its value; bit n is the n-th."""
        found = pushes.bit_count()
        if self.doubles_from is not None:
            found += (pushes >> self.pushes(key, self.doubles_from - 1) + 1).bit_count()
        return found

    def pushes(self, key: Any, step: int) -> int:
        """How often a key is pushed in so many steps."""
        every, first = self.seldom.get(key, (1, 0))
        return max(0, (step - 1 - first) // every + 1)

    def overall(self, key: Any, step: int) -> int:
        """The most pushes of any key by the time when the program has pushed this one in a step; of those before the
        job went on from a snapshot, its number."""
        order = [key for phase in self.phases for key in phase]
        pushed = order.index(key) + 1
        return self._resumed + max(
            self.pushes(other, step - (i >= pushed)) - self.pushes(other, self._resumed)
            for i, other in enumerate(order)
        )
