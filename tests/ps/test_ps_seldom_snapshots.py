"""Snapshots of keys that are pushed in some steps only: one version, whatever comes when; and going on from it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ps_helpers import STORE, Machine, random_floats

from kvmpi import optim
from kvmpi.ps import snapshot_files as files
from kvmpi.ps.snapshot_book import SnapshotBook
from kvmpi.ps.snapshots import PartCopy, ServerSnapshots, Taking
from kvmpi.ps.steps import Steps, Track
from kvmpi.wire import messages as m

COUNT, CLIENTS = 9, 2
#: In the order of a step: after which steps each is pushed. Steps are counted from 1.
KEYS: dict[Any, Any] = {
    "first": lambda step: step % 3 == 1,
    "often": lambda step: True,
    "second": lambda step: step % 2 == 0,
    7: lambda step: step % 7 == 0,
    "once": lambda step: step == 13,
    "never": lambda step: False,
    "last": lambda step: True,
}


class Job:
    """Clients that push ``KEYS`` to one server, each in a call of its own.

    Args:
        every: the server begins a snapshot after so many steps.
        resumed: the number and the parts of the snapshot that it goes on from.
    """

    def __init__(self, rule: optim.Rule | None, every: int = 0, resumed: tuple[int, PartCopy] | None = None) -> None:
        before = None if resumed is None else (*resumed, {STORE: resumed[0]})
        self.machine = Machine("sync", CLIENTS, every=every, resumed=before)
        self.step = self.base = 0 if resumed is None else resumed[0]
        self.steps = [Steps(counts=True) for _ in range(CLIENTS)]
        self.tracks = [{key: Track() for key in KEYS} for _ in range(CLIENTS)]
        for key in KEYS:
            self.machine.init_all(key, random_floats(COUNT, len(str(key)), self.base))
        if rule is not None:
            self.machine.rule(rule)

    @property
    def snapshots(self) -> ServerSnapshots:
        assert self.machine.state.snapshots is not None
        return self.machine.state.snapshots

    def push(self, client: int, key: Any) -> None:
        track, steps = self.tracks[client][key], self.steps[client]
        (turn,) = steps.take({key: track}, self.step)
        fields = (track.number, "none", False, False, 0, -1, False, turn.at, steps.done(), *turn.span)
        value = random_floats(COUNT, self.step, client, len(str(key)))
        assert self.machine.ok(self.machine.send(client, m.Push, key, 0, *fields, payloads=[value]))
        steps.end(track, turn, used=True)

    def go_on(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            for key, pushes in KEYS.items():
                for client in range(CLIENTS) if pushes(self.step) else ():
                    self.push(client, key)

    def hear(self) -> None:
        """The scheduler says how far all clients are."""
        self.machine.state.hear_done({STORE: min(steps.done() for steps in self.steps)})

    def state(self) -> dict[Any, Any]:
        """Everything of all keys."""
        found = {}
        for key in KEYS:
            reply = self.machine.replies[self.machine.send(0, m.GetState, key, 0)][-1]
            assert isinstance(reply.message, m.State)
            arrays = {name: a.tobytes() for name, a in zip(reply.message.names, reply.payloads, strict=True)}
            found[key] = (reply.message.updates, arrays)
        return found

    def news(self) -> list[tuple[int, str]]:
        return [(one.number, one.stage) for one in self.snapshots.take_messages() if isinstance(one, m.SnapshotNews)]


def part_of(taking: Taking | None) -> PartCopy:
    assert taking is not None
    assert taking.parts is not None
    return taking.parts[0]


def copied(part: PartCopy) -> dict[Any, Any]:
    """What ``Job.state`` says, of a copy."""
    return {
        chunk.key: (chunk.updates, {name: array.tobytes() for name, array in chunk.arrays.items()})
        for chunk in part[STORE].chunks
    }


ADAM, MOMENTUM = optim.Adam(lr=0.01), optim.SGD(lr=0.1, momentum=0.9, multi_precision=True)


@pytest.mark.parametrize("rule", [ADAM, MOMENTUM, None], ids=repr)
@pytest.mark.parametrize("stops", [[20], [5, 10, 35], [14, 18]], ids=str)
def test_forty_steps_are_the_same_with_resumes_in_between(
    rule: optim.Rule | None, stops: list[int], tmp_path: Path
) -> None:
    whole = Job(rule)
    whole.go_on(40)
    job = Job(rule)
    for stop in stops:
        job.snapshots.begin(stop)
        job.go_on(stop + 2 - job.step)  # what comes after it is lost
        job.hear()
        taking = job.snapshots.take_ready()
        assert taking is not None
        assert (taking.number, taking.steps) == (stop, {STORE: stop})
        files.write_part(str(tmp_path), stop, 0, part_of(taking))
        job = Job(rule, resumed=(stop, files.read_part(str(tmp_path), stop, 0)))
        assert job.snapshots.steps == {STORE: stop}
    job.go_on(40 - job.step)
    assert job.state() == whole.state()


def test_every_snapshot_is_what_the_values_were_after_its_step() -> None:
    plain, job = Job(MOMENTUM), Job(MOMENTUM, every=4)
    states = {}
    for step in range(1, 60):
        plain.go_on()
        job.go_on()
        states[step] = plain.state()
        if (taking := job.snapshots.take_ready()) is not None:
            assert taking.number % 4 == 0
            assert copied(part_of(taking)) == states[taking.number]
            job.snapshots.written(taking, [])
            states[f"taken {taking.number}"] = True
    assert sum(isinstance(name, str) for name in states) == 14


def test_each_chunk_is_copied_when_it_is_known_to_be_complete() -> None:
    """With its last round, before the first one of a later step, or when all clients are done with the step."""
    job = Job(MOMENTUM, every=6)
    job.go_on(6)
    assert job.news() == [(6, "begun")]
    assert job.snapshots.take_ready() is None, "a key that is pushed in some steps may yet be"
    job.hear()
    assert job.snapshots.take_ready() is None, "step 6 may go on"
    job.machine.state.hear_done({STORE: 6})
    assert copied(part_of(job.snapshots.take_ready())) == job.state()


def test_a_copy_stays_as_it_is() -> None:
    """Also when a later round has the snapshot's number, by chance."""
    machine = Machine("sync", 1, every=0)
    for key in "kl":
        machine.init_all(key, np.zeros(COUNT, "f4"))
    snapshots = machine.state.snapshots
    assert snapshots is not None
    snapshots.begin(2)
    for number, step in ((1, 1), (2, 3)):
        fields = (number, "none", False, False, 0, -1, False, step, 0, step, step)
        assert machine.ok(machine.send(0, m.Push, "k", 0, *fields, payloads=[np.full(COUNT, 7.0 * step, "f4")]))
    machine.state.hear_done({STORE: 2})
    found = {chunk.key: chunk.arrays["value"][0] for chunk in part_of(snapshots.take_ready())[STORE].chunks}
    assert found == {"k": 7.0, "l": 0.0}


def test_a_job_that_ends_completes_its_last_snapshot() -> None:
    """All its clients have said good-bye after that step; not if they have after an earlier one."""
    for number in (6, 7):
        job = Job(MOMENTUM)
        job.snapshots.begin(number)
        job.go_on(6)
        before = job.state()
        for client in range(CLIENTS):
            assert job.snapshots.take_ready() is None
            job.machine.send(client, m.Bye, job.steps[client].done(ends=True))
        taking = job.snapshots.take_ready()
        assert (taking is not None) == (number == 6)
        if taking is not None:
            assert copied(part_of(taking)) == before


def test_a_server_without_a_key_of_every_step_begins_by_itself() -> None:
    """The word of the others may come after a push of the next step."""
    job = Job(MOMENTUM, every=6)
    for step in range(1, 8):
        job.step = step
        for client in range(CLIENTS):
            if step in (1, 7):
                job.push(client, "first")
            job.steps[client].take({"often": job.tracks[client]["often"]}, step)  # to another server
    assert job.news() == [(6, "begun")]
    job.machine.state.hear_done({STORE: 6})
    taking = job.snapshots.take_ready()
    assert {key: updates for key, (updates, _) in copied(part_of(taking)).items()} == {
        key: int(key == "first") for key in KEYS
    }


def test_what_may_be_of_the_step_or_of_the_next_is_not_copied(caplog: pytest.LogCaptureFixture) -> None:
    def begin(number: int, *, before: bool) -> Machine:
        machine = Machine("sync", 1, every=0)
        machine.init_all("k", np.zeros(COUNT, "f4"))
        assert machine.state.snapshots is not None
        if before:
            machine.state.snapshots.begin(number)
        span = (("none", False, False, 0, -1, False, 3, 2), (3, 4))
        assert machine.ok(machine.send(0, m.Push, "k", 0, 1, *span[0], *span[1], payloads=[np.ones(COUNT, "f4")]))
        if not before:
            machine.state.snapshots.begin(number)
        return machine

    for before in (True, False):
        for number, expected in ((2, "begun" if before else "missed"), (3, "missed"), (4, "begun")):
            machine = begin(number, before=before)
            assert machine.state.snapshots is not None
            stages = [one.stage for one in machine.state.snapshots.take_messages()]  # type: ignore[attr-defined]
            assert stages[-1] == expected, (number, before)
    machine = begin(3, before=True)
    assert machine.state.snapshots is not None
    assert not caplog.records
    for number in (13, 23):
        machine.state.snapshots.begin(number)
        fields = ("none", False, False, 0, -1, False, number, number - 1, number, number + 1)
        machine.send(0, m.Push, "k", 0, number // 10 + 1, *fields, payloads=[np.ones(COUNT, "f4")])
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "snapshot 23 is left out: a push of key 'k' of store 1 belongs to step 23 or to step 24" in warning
    assert "kv.clock()" in warning


@pytest.mark.parametrize("other", ["pushes later", "does not push"])
def test_clients_that_push_in_different_steps_have_no_common_version(other: str) -> None:
    job = Job(MOMENTUM)
    job.snapshots.begin(4)
    job.go_on(4)
    job.push(0, "once")
    job.push(0, "last")
    job.push(1, "last")
    job.step += 1
    for client in range(CLIENTS):
        job.push(client, "often")
    if other == "pushes later":
        job.push(1, "once")
    job.machine.state.hear_done({STORE: 4})
    assert job.news() == [(4, "begun"), (4, "missed")]


def test_a_rule_of_which_there_was_no_round_yet_is_kept() -> None:
    """Without a choice after the resume, a key that was not pushed since the choice goes by it all the same."""
    job = Job(None)
    job.machine.rule(optim.SGD(lr=2.0))
    job.snapshots.begin(5)
    job.go_on(6)
    job.hear()
    again = Job(None, resumed=(5, part_of(job.snapshots.take_ready())))
    value = again.machine.read("never")
    for client in range(CLIENTS):
        fields = ("none", False, False, 0, -1, False, -1, 0, 1, 1)
        again.machine.send(client, m.Push, "never", 0, 1, *fields, payloads=[np.ones(COUNT, "f4")])
    np.testing.assert_allclose(again.machine.read("never", 1), value - 2.0 * CLIENTS)


def test_what_is_given_up_makes_way() -> None:
    job = Job(MOMENTUM)
    job.snapshots.begin(9)
    job.snapshots.begin(11, 9)
    assert job.news() == [(9, "begun"), (11, "begun")]
    job.snapshots.begin(13, 12)
    assert job.news() == [(13, "dropped")]


def test_another_number_is_tried_where_one_was_missed() -> None:
    book = SnapshotBook(1)
    book.heartbeat(0, 4)
    book.heartbeat(0, 7)  # three steps between two heartbeats
    assert book.hear(m.SnapshotNews(10, "begun")) == (10, None)
    again, _ = book.hear(m.SnapshotNews(10, "missed"))
    assert again is not None
    assert again > 10
    assert book.missed == 10
    assert book.hear(m.SnapshotNews(10, "missed")) == (None, None), "once"
    assert book.hear(m.SnapshotNews(again, "begun")) == (None, None)
    assert book.hear(m.SnapshotNews(again, "dropped")) == (None, None), "it was left out for another reason"
    assert book.hear(m.SnapshotNews(40, "missed"))[0] is not None, "before any server has begun it"
    book.close()
    assert book.hear(m.SnapshotNews(90, "missed")) == (None, None)
