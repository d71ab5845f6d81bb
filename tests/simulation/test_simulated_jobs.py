"""Simulated jobs with faults: nothing is lost, counted twice or waits for ever; and mistakes of the code are found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.network import Violation
from simulation.scenario import Job

from kvmpi.ps import consistency
from kvmpi.ps.part import Part
from kvmpi.ps.session import ClientSession
from kvmpi.ps.shard import Shard

#: ``make simulate`` tries far more.
NUM_SEEDS = 120


def test_jobs_survive_their_faults() -> None:
    fired: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        fired.update(Job(seed).run().fired)
    faults = ("drop", "duplicate", "overtake", "kill", "add", "stopped", "stop", "partition", "unnoticed", "cut")
    assert min(fired[fault] for fault in faults) > NUM_SEEDS / 20, f"too few faults to prove anything: {fired}"


def test_a_seed_is_the_same_job_in_every_process() -> None:
    """So that what has failed once can be looked at."""

    def run(hash_seed: str) -> str:
        code = "from simulation.scenario import Job; print([Job(seed).run() for seed in range(12)])"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return done.stdout

    assert run("1") == run("2")


# ---- planted mistakes: each invariant can fail


def _applies_what_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Shard._push

    def push(self: Shard, client: int, route: bytes, message: Any, payloads: Any) -> Any:
        slot = self._slot(message.key, message.chunk, client)
        slot.steps[client] = min(slot.steps.get(client, 0), message.step - 1)
        return real(self, client, route, message, payloads)

    monkeypatch.setattr(Shard, "_push", push)


def _acknowledges_before_others_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "hold", lambda self, replies, now_s: [*self._stream(now_s), *replies])


def _reads_what_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency.Synchronous, "readable", lambda self, rounds, min_round: True)


def _closes_rounds_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_round(slot: Any, *, keep: bool) -> None:
        count, slot.cursor = slot.cursor, 0
        pushed = slot.accumulator
        slot.close_round(count, keep=True)
        slot.accumulator = pushed
        slot.close_round(count, keep=True)
        slot.rounds -= 1

    monkeypatch.setattr(Shard, "end_round", staticmethod(end_round))


def _replays_what_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Part.follow

    def follow(self: Part, route: bytes, message: Any, payloads: Any, now_s: float) -> Any:
        if hasattr(message, "seq") and not hasattr(message, "index") and message.seq <= self.seq:
            message.seq = self.seq + 1
        return real(self, route, message, payloads, now_s)

    monkeypatch.setattr(Part, "follow", follow)


def _takes_a_part_over_without_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Part.report

    def report(self: Part) -> Any:
        self.complete = self.complete or self.chain.joiner == self.server
        return real(self)

    monkeypatch.setattr(Part, "report", report)


def _forgets_open_rounds_when_it_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "hand_over", lambda self: None)


def _asks_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientSession, "_send_again", lambda self, ask: None)


def _answers_when_another_may_be_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "is_shared", False)


PLANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "double apply": (_applies_what_is_repeated, "pushes"),
    "lost acknowledgement": (_acknowledges_before_others_have_it, "was told of"),
    "stale read": (_reads_what_is_not_there_yet, "rounds hold"),
    "round closed twice": (_closes_rounds_twice, "pushes"),
    "log replayed twice": (_replays_what_is_sent_again, "other bits"),
    "successor without values": (_takes_a_part_over_without_its_values, "not on server"),
    "open rounds forgotten": (_forgets_open_rounds_when_it_hands_over, "still waiting"),
    "value of a head that was replaced": (_answers_when_another_may_be_the_head, "who knew of"),
    "requests that are not sent again": (_asks_only_once, "still waiting"),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1,000 seeds, and by the check that is meant for it."""
    plant, words = PLANTS[name]
    plant(monkeypatch)
    assert any(words in (_violation_of(seed) or "nothing") for seed in range(1000))


def _violation_of(seed: int) -> str | None:
    try:
        Job(seed).run()
    except Violation as violation:
        return str(violation)
    return None
