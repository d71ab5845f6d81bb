"""A server that cannot make a change of the one before it: it forgets its copy, and is given all of the part again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from ps_helpers import STORE, route, whole_numbers

from kvmpi import optim
from kvmpi.errors import ServerLostError
from kvmpi.ps import part, replay
from kvmpi.ps.part import Part
from kvmpi.ps.reply import Forward, Reply
from kvmpi.ps.server import ServerState
from kvmpi.ps.slot import Slot
from kvmpi.wire import Message, entries
from kvmpi.wire import messages as m

COUNT = 5
HEAD, FOLLOWER = 0, 1


def at(server: int) -> bytes:
    return f"server {server}".encode()


class Chain:
    """Servers that have one part, with clients that each knows; what passes between them is delivered in order."""

    def __init__(
        self, length: int = 2, mode: str = "async", num_clients: int = 1, on_client_loss: str = "fail"
    ) -> None:
        self.now_s, self.version = 0.0, 0
        self.servers = [ServerState(rank, on_client_loss) for rank in range(length)]
        self.routes = {at(rank): rank for rank in range(length)}
        self.way: deque[tuple[int, Forward | Reply, list[memoryview]]] = deque()
        self.cut = False
        self.answers: dict[int, Message] = {}
        self.passed: list[str] = []
        self.is_so(list(range(length)))
        for client in range(num_clients):
            for rank in range(length):
                self.ask(m.Hello(1, STORE, mode, client, num_clients, 1), server=rank, client=client)
        self.ask(m.Init(2, "k", 0, 1, COUNT, [COUNT], "float32"), whole_numbers(COUNT))
        self.ask(m.SetRule(3, 1, "sgd", optim.SGD(lr=0.5, momentum=0.5).hyperparams()))
        self.pushed = 0

    def is_so(self, members: list[int], *, joiner: int = -1, draining: bool = False) -> None:
        """The scheduler says who has the part."""
        self.version += 1
        chain = m.Chain(self.version, members, joiner=joiner, draining=draining)
        here = [*members, *([joiner] if joiner >= 0 else [])]
        view = m.View(self.version, 1, [chain], [m.ServerInfo(rank, 1, "h", []) for rank in here], [])
        for rank in here:
            self._take(rank, self.servers[rank].adopt(view, self.now_s))
        self._deliver()

    def ask(self, message: Any, *payloads: np.ndarray, server: int = HEAD, client: int = 0) -> Message | None:
        """The answer of a server, if there is one by now."""
        frames = [memoryview(bytearray(payload.tobytes())) for payload in payloads]
        self._take(server, self.servers[server].handle(route(client), message, frames, self.now_s))
        self._deliver()
        return self.answers.get(message.request)

    def push(self, server: int = HEAD) -> Message | None:
        self.pushed += 1
        request = m.Push(10 + self.pushed, "k", 0, self.pushed, "none", False, at=-self.pushed, done=self.pushed - 1)
        return self.ask(request, whole_numbers(COUNT, self.pushed), server=server)

    def after(self, seconds: float) -> None:
        self.now_s += seconds
        for rank, server in enumerate(self.servers):
            self._take(rank, server.tick(self.now_s))
        self._deliver()

    def _take(self, sender: int, outgoing: Sequence[Any]) -> None:
        for one in outgoing:
            if isinstance(one, Reply) and one.route not in self.routes:
                self.answers[one.message.request] = one.message  # type: ignore[attr-defined]
                continue
            frames = [memoryview(bytearray(payload.tobytes())) for payload in one.payloads]
            self.way.append((sender, one, frames))

    def _deliver(self) -> None:
        while self.way:
            sender, one, payloads = self.way.popleft()
            if self.cut:
                continue
            self.passed.append(type(one.message).__name__)
            if isinstance(one, Forward):
                to = one.server
                self._take(to, self.servers[to].handle(at(sender), one.message, payloads, self.now_s))
            else:
                to = self.routes[one.route]
                self._take(to, self.servers[to].hear(sender, one.message, self.now_s))

    def part(self, rank: int) -> Part:
        return self.servers[rank].parts[0]

    def have_the_same(self) -> None:
        head = self.part(HEAD)
        assert head.committed == head.seq
        for rank in range(1, len(self.servers)):
            assert self.part(rank).seq == head.seq
            assert self._state_of(rank) == self._state_of(HEAD)

    def _state_of(self, rank: int) -> list[Any]:
        records = replay.dump(self.part(rank).shards[STORE])
        return [(entry, [frame.tobytes() for frame in frames]) for entry, frames in records]


def fail_at(monkeypatch: pytest.MonkeyPatch, *steps: int, server: int = FOLLOWER) -> None:
    """A server cannot apply these pushes of the client, as they come in its log."""
    real, left = replay.apply, set(steps)

    def apply(shard: Any, entry: Any, payloads: Any, *, keep: bool) -> None:
        if isinstance(entry, entries.Single) and shard.server == server and entry.step in left:
            left.discard(entry.step)
            raise ZeroDivisionError("a defect")
        real(shard, entry, payloads, keep=keep)

    monkeypatch.setattr(replay, "apply", apply)


def check_that_it_is_given_all_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain()
    fail_at(monkeypatch, 2)
    assert isinstance(chain.push(), m.Ack)
    chain.passed.clear()
    assert isinstance(chain.push(), m.Ack), "when the other server has all, at the latest"
    assert chain.passed[:3] == ["Log", "Attach", "Install"]
    chain.have_the_same()
    assert isinstance(chain.push(), m.Ack)
    assert chain.passed[-2:] == ["Log", "Committed"], "from there on it follows again"
    chain.have_the_same()
    expected = chain.part(HEAD).shards[STORE].slots["k", 0].value.copy()
    chain.is_so([FOLLOWER])
    chain.ask(m.Hello(50, STORE, "async", 0, 1, 1), server=FOLLOWER)
    assert isinstance(chain.ask(m.Pull(51, "k", 0, 0), server=FOLLOWER), m.Value)
    np.testing.assert_array_equal(chain.part(FOLLOWER).shards[STORE].slots["k", 0].value, expected)


def test_who_cannot_make_a_change_is_given_all_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    check_that_it_is_given_all_again(monkeypatch)
    assert "server 1: an entry of part 0 cannot be replayed" in caplog.text


def _keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Part, "_forget", lambda self: None)


def _says_that_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Part._replay

    def replayed(self: Part, *arguments: Any) -> None:
        try:
            real(self, *arguments)
        except ZeroDivisionError:
            pass

    monkeypatch.setattr(Part, "_replay", replayed)


def _does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Part.hear

    def hear(self: Part, message: Any, now_s: float) -> Any:
        return [] if isinstance(message, m.Attach) and self._sent is not None else real(self, message, now_s)

    monkeypatch.setattr(Part, "hear", hear)


@pytest.mark.parametrize("plant", [_keeps_what_it_has, _says_that_it_has_it, _does_not_ask])
def test_these_mistakes_would_be_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    logging.getLogger(part.__name__).disabled = True
    try:
        plant(monkeypatch)
        with pytest.raises(AssertionError):
            check_that_it_is_given_all_again(monkeypatch)
    finally:
        logging.getLogger(part.__name__).disabled = False


@pytest.mark.parametrize(("length", "server"), [(2, 1), (3, 1), (3, 2), (4, 2)])
def test_it_is_given_all_again_as_often_as_it_needs_it(
    monkeypatch: pytest.MonkeyPatch, length: int, server: int
) -> None:
    """Those after it, too: what they lack it cannot tell them any more."""
    chain = Chain(length)
    fail_at(monkeypatch, 2, 4, 5, server=server)
    for step in range(1, 7):
        chain.push()
        for _ in range(5):
            chain.after(1.1)
        assert isinstance(chain.answers.get(10 + step), m.Ack)
        chain.have_the_same()


@pytest.mark.parametrize("mode", ["async", "sync", "softsync:1"])
def test_who_lacks_memory_for_an_update_is_given_all_again(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The rule fails on this server alone: to go on without that update would be to lose it."""
    chain, failed = Chain(mode=mode), list[int]()
    real = Slot._apply

    def update(self: Slot, *arguments: Any, **options: Any) -> Any:
        if self is chain.part(FOLLOWER).shards[STORE].slots["k", 0] and chain.pushed == 2 and not failed:
            failed.append(1)
            raise MemoryError("no memory for a state of this length")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Slot, "_apply", update)
    for _ in range(4):
        assert isinstance(chain.push(), m.Ack)
        chain.have_the_same()
    assert failed
    assert "Install" in chain.passed


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("mode", ["async", "sync", "softsync:1"])
def test_a_head_that_lacks_memory_for_an_update_ends_if_another_can_go_on(
    monkeypatch: pytest.MonkeyPatch, mode: str, length: int
) -> None:
    """The update is in its log, and so others make it."""
    chain, other = Chain(length, mode), Chain(length, mode)
    real = Slot._apply

    def update(self: Slot, *arguments: Any, **options: Any) -> Any:
        if self is chain.part(HEAD).shards[STORE].slots["k", 0] and chain.pushed == 2:
            raise MemoryError("no memory for a state of this length")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Slot, "_apply", update)
    assert isinstance(chain.push(), m.Ack)
    if length == 1:
        assert chain.push() is not None, "nobody else is there"
        return
    with pytest.raises(ServerLostError, match=r"server 0 ends.*no memory for a state of this length"):
        chain.push()
    chain.is_so([FOLLOWER])
    chain.pushed -= 1  # which its client has no answer to
    for _ in range(2):
        assert isinstance(chain.push(server=FOLLOWER), m.Ack)
    for _ in range(3):
        other.push()
    assert chain._state_of(FOLLOWER) == other._state_of(HEAD)


def test_only_a_member_that_has_said_what_it_has_goes_on_in_the_heads_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the head would end, and with it what nobody else has."""

    def is_backed(chain: Chain, server: int = HEAD) -> bool:
        return chain.part(server).shards[STORE].rounds.is_backed()

    chain = Chain(length=3)
    assert is_backed(chain)
    assert not is_backed(chain, FOLLOWER), "it is for the head to end"
    chain.cut = True
    chain.is_so([HEAD, FOLLOWER])
    assert not is_backed(chain), "since the chain has changed it has said nothing"
    chain.cut = False
    chain.after(1.1)
    assert is_backed(chain)
    chain.is_so([HEAD])
    assert not is_backed(chain)
    chain.is_so([HEAD], joiner=FOLLOWER)
    assert chain.servers[FOLLOWER].reports(), "it has all"
    assert not is_backed(chain), "but is no member yet"
    half = with_half_a_copy(monkeypatch)
    assert half.part(HEAD).chain.members == [HEAD, FOLLOWER]
    assert not is_backed(half)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_an_update_that_fails_everywhere_changes_nothing_anywhere(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    chain, failed = Chain(mode=mode), list[int]()
    real = Slot._apply

    def update(self: Slot, *arguments: Any, **options: Any) -> Any:
        if chain.pushed == 2:
            failed.append(1)
            raise ValueError("a rule of the user's")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Slot, "_apply", update)
    chain.passed.clear()
    for _ in range(4):
        chain.push()
        chain.have_the_same()
    assert len(failed) == 2
    assert "Install" not in chain.passed


def with_half_a_copy(monkeypatch: pytest.MonkeyPatch) -> Chain:
    """The follower has lost its copy, and nothing passes any more when the head begins to give it all again."""
    chain, real = Chain(), Part._begin_install
    assert isinstance(chain.push(), m.Ack)
    fail_at(monkeypatch, 2)

    def begin(self: Part) -> Any:
        chain.cut = True
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Part, "_begin_install", begin)
        assert chain.push() is None
    assert chain.cut
    chain.cut = False
    return chain


def test_a_copy_that_is_not_whole_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head ends before the other server has all again: that must not answer with what it lacks."""
    chain = with_half_a_copy(monkeypatch)
    chain.is_so([FOLLOWER])
    assert not chain.part(FOLLOWER).answers
    assert chain.ask(m.Hello(50, STORE, "async", 0, 1, 1), server=FOLLOWER) is not None
    answer = chain.ask(m.Init(51, "k", 0, 1, COUNT, [COUNT], "float32"), whole_numbers(COUNT), server=FOLLOWER)
    assert isinstance(answer, m.Moved)


def test_it_is_given_all_again_though_the_chain_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = with_half_a_copy(monkeypatch)
    chain.is_so([HEAD, FOLLOWER])
    for _ in range(3):
        chain.after(1.1)
    assert isinstance(chain.answers.get(12), m.Ack)
    chain.have_the_same()


def test_what_waits_to_be_sent_on_stays_as_it_is() -> None:
    """A server that has become the head adds to the open round that it was handed, which the next has yet to get."""
    count = 20_000  # large enough for a frame with memory of its own
    middle = Part(FOLLOWER, 0)
    middle.adopt(m.Chain(1, [0, 1, 2], draining=True), 1, 0.0)
    middle.follow(at(HEAD), m.Extend(0, 1), [], 0.0)
    handed: list[tuple[entries.Entry, list[np.ndarray]]] = [
        (entries.Opened("sync", 2), []),
        (entries.Joined(0, 1), []),
        (entries.Joined(1, 1), []),
        (entries.Created("k", 0, 1, count, [count], "float32"), [np.zeros(count, "f4")]),
        (entries.Partial("k", 0, 1, [0]), [np.ones(count, "f4")]),
    ]
    for seq, (entry, arrays) in enumerate(handed, start=1):
        frames = [memoryview(bytearray(array.tobytes())) for array in arrays]
        middle.follow(at(HEAD), m.Log(0, 1, seq, STORE, entry), frames, 0.0)
    middle.adopt(m.Chain(2, [1, 2]), 1, 0.0)
    push = m.Push(1, "k", 0, 1, "none", False)
    middle.request(STORE, 1, route(1), push, [memoryview(bytearray(np.full(count, 10.0, "f4").tobytes()))])
    sent = {one.message.entry.__class__: one.payloads for one in middle.hear(m.Attach(0, 2, len(handed) - 1), 0.0)}
    np.testing.assert_array_equal(sent[entries.Partial][0].view("f4"), np.ones(count, "f4"))
    np.testing.assert_array_equal(sent[entries.Round][0].view("f4"), np.full(count, 11.0, "f4"))


@pytest.mark.parametrize("policy", ["fail", "wait", "shrink"])
@pytest.mark.parametrize("told", ["both", "the old head", "the new one, when the old one has drained"])
def test_a_good_bye_while_a_part_moves_is_known_to_its_new_head(policy: str, told: str) -> None:
    chain = Chain(mode="sync", num_clients=2, on_client_loss=policy)
    chain.ask(m.SetRule(1, 1, "sgd", optim.SGD(lr=0.5, momentum=0.5).hyperparams()), client=1)
    for client in range(2):
        chain.ask(m.Push(11, "k", 0, 1, "none", False), whole_numbers(COUNT, client), client=client)
    chain.is_so([HEAD, FOLLOWER], draining=True)
    if told.startswith("the new one"):
        assert chain.servers[HEAD].reports()
    for server in [HEAD, FOLLOWER] if told != "the old head" else [HEAD]:
        assert isinstance(chain.ask(m.Bye(12), server=server, client=1), m.Ack)
    chain.is_so([FOLLOWER, HEAD])
    push = m.Push(13, "k", 0, 2, "none", False)
    answer = chain.ask(push, whole_numbers(COUNT), server=FOLLOWER)
    if policy == "shrink":
        assert isinstance(answer, m.Ack)
    else:
        assert isinstance(answer, m.Failure)
        assert "client 1 has closed the store" in answer.text
    former, head = chain.part(HEAD), chain.part(FOLLOWER)
    assert former.seq == head.committed == head.seq
    assert "Install" not in chain.passed


def test_a_round_that_nobody_is_in_is_over_on_all_servers() -> None:
    """Who is back pushes once more in a step before its entry, and everybody else has joined."""
    chain = Chain(mode="sync", num_clients=2, on_client_loss="shrink")

    def push(request: int, number: int, client: int) -> Message | None:
        message = m.Push(request, "k", 0, number, "none", False, at=number, done=number - 1)
        return chain.ask(message, whole_numbers(COUNT, number), client=client)

    chain.ask(m.Bye(10, text="an error"), client=1)
    assert isinstance(push(11, 1, client=0), m.Ack)
    chain.ask(m.Finish(12))
    for rank in (HEAD, FOLLOWER):
        chain.ask(m.Hello(13, STORE, "sync", 1, 2, 2), server=rank, client=1)
    assert chain.ask(m.Return(14), client=1) == m.Ack(14, 1)
    chain.ask(m.Enter(15, 2), client=1)
    assert push(16, 2, client=1) == m.Ack(16, 2), "without effect"
    chain.have_the_same()
    chain.is_so([FOLLOWER, HEAD])
    for rank in (HEAD, FOLLOWER):
        slot = chain.part(rank).shards[STORE].slots["k", 0]
        assert (slot.rounds, slot.updates, slot.last_step) == (2, 1, 2)


def test_those_that_follow_know_to_which_steps_the_pushes_of_a_round_belong() -> None:
    """Which are not the same where a client leaves some out."""
    chain = Chain(mode="sync", num_clients=2, on_client_loss="wait")
    for number, steps in enumerate([(-1, -1), (-2, 3), (5, -4), (-6, -6)], start=1):
        for client, at in enumerate(steps):
            push = m.Push(10 * number + client, "k", 0, number, "none", False, at=at, done=abs(at) - 1)
            chain.ask(push, whole_numbers(COUNT, number, client), client=client)
        chain.have_the_same()


def test_a_rule_that_who_is_back_has_changed_is_the_same_on_a_server_that_was_given_all_before() -> None:
    chain = Chain(mode="sync", num_clients=2, on_client_loss="shrink")
    chain.ask(m.Bye(10, text="an error"), client=1)
    chain.push()
    chain.ask(m.Hello(13, STORE, "sync", 1, 2, 2), client=1)
    chain.ask(m.Return(14), client=1)
    chain.ask(m.Enter(15, 1), client=1)
    chain.is_so([HEAD])
    chain.is_so([HEAD], joiner=FOLLOWER)
    assert isinstance(chain.ask(m.SetHyperparams(16, 1, {"lr": 0.1}, 0), client=1), m.Ack)
    chain.have_the_same()
    assert chain.part(FOLLOWER).shards[STORE].slots["k", 0].rule_in_force.rule == optim.SGD(lr=0.5, momentum=0.5)


def test_a_silent_follower_is_sent_the_same_again_ever_more_seldom_and_no_more_than_a_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first copies may still be on their way over a slow link."""
    monkeypatch.setattr(part, "_INSTALL_WINDOW_BYTES", 2 * 4 * COUNT)
    chain = Chain()
    chain.cut = True
    for number in range(7):
        request = m.Init(100 + number, f"key {number}", 0, 1, COUNT, [COUNT], "float32")
        assert chain.ask(request, whole_numbers(COUNT, number)) is None
    ticks = [(0.1 * tick, chain.part(HEAD).tick(0.1 * tick)) for tick in range(1000)]
    first = chain.part(HEAD).committed + 1
    for _, sent in (repeated := [(at_s, sent) for at_s, sent in ticks if sent]):
        assert [one.message.seq for one in sent] == [first, first + 1]  # type: ignore[attr-defined]
    np.testing.assert_allclose([at_s for at_s, _ in repeated], [1, 3, 7, 15, 31, 61, 91], atol=0.5)

    chain.now_s, chain.cut = 100.0, False
    for _ in range(40):
        chain.after(1.0)
    chain.have_the_same()
    assert len(chain.answers) == 3 + 7
    assert chain.part(HEAD).tick(200.0) == []
    chain.cut, chain.now_s = True, 300.0
    assert chain.push() is None
    assert chain.part(HEAD).tick(305.0), "it has been quick since, and is sent the same again soon"
