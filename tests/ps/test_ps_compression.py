"""Pushes of one and two bits: what servers take for them, and the error that masters keep for the next push."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ps_helpers import Machine, deadline, initialise, random_floats, whole_numbers

from kvmpi import optim
from kvmpi.deadline import Deadline
from kvmpi.errors import ConfigError, KVError, KVTimeoutError, ProtocolError, UnsupportedError
from kvmpi.ps import codec, replay
from kvmpi.ps.feedback import Feedback
from kvmpi.ps.shard import Shard
from kvmpi.wire import messages as m

COUNT = 10


class Sender:
    """An independent client's side: what it means with each push, and the codes for it, for thresholds of 1."""

    def __init__(self, count: int, bits: int, threshold: float = 1.0) -> None:
        self.left, self.bits, self.threshold = np.zeros(count), bits, threshold

    def means(self, values: np.ndarray) -> np.ndarray:
        total, t = self.left + values, self.threshold
        if self.bits == 2:
            meant = np.where(total >= t, t, np.where(total <= -t, -t, 0))
        else:
            meant = np.where(total > t, 1.0, -1.0)
        self.left = total - meant
        return meant

    def codes(self, meant: np.ndarray) -> bytes:
        words = {2: {1.0: "11", -1.0: "10", 0.0: "00"}, 1: {1.0: "1", -1.0: "0"}}[self.bits]
        text = "".join(words[value / (self.threshold if self.bits == 2 else 1)] for value in meant.tolist())
        text += "0" * (-len(text) % 8)
        return bytes(int(text[at : at + 8], 2) for at in range(0, len(text), 8))


def quarters(count: int, *seeds: int) -> np.ndarray:
    """Sums of these are exact."""
    return np.random.default_rng([count, *seeds]).integers(-12, 13, count).astype("f4") / 4


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("num_clients", [1, 2, 3, 7])
def test_rounds_add_what_codes_stand_for(num_clients: int, bits: int) -> None:
    machine = Machine("sync", num_clients)
    machine.init_all("k", whole_numbers(COUNT))
    senders = [Sender(COUNT, bits) for _ in range(num_clients)]
    for step in range(1, 5):
        total = np.zeros(COUNT)
        for client, sender in enumerate(senders):
            meant = sender.means(quarters(COUNT, client, step))
            total += meant
            machine.push(client, "k", step, sender.codes(meant), codec=f"{bits}bit:1.0")
        np.testing.assert_array_equal(machine.read("k", step), total, err_msg=f"round {step}")


@pytest.mark.parametrize("bits", [1, 2])
def test_asynchronous_pushes_are_logged_as_they_came(bits: int) -> None:
    machine = Machine("async", 2)
    machine.init_all("k", whole_numbers(COUNT))
    machine.rule(optim.SGD(lr=0.5, momentum=0.5))
    shard = machine.state.parts[0].shards[1]
    follower = Shard(1, shard.store, shard.mode, shard.num_clients, lambda *_: False)
    for entry, payloads in replay.dump(shard)[1:]:
        replay.apply(follower, entry, [memoryview(payload.tobytes()) for payload in payloads], keep=False)
    logged: list[Any] = []
    shard._log = shard.rounds._log = shard.singles._log = lambda entry, payloads: (
        bool(logged.append((entry, payloads))) or True
    )
    shard.rounds.is_followed = lambda: True
    value, momentum, sender = whole_numbers(COUNT).astype("f8"), np.zeros(COUNT), Sender(COUNT, bits)
    for step in range(1, 4):
        meant = sender.means(quarters(COUNT, step))
        machine.push(0, "k", step, sender.codes(meant), codec=f"{bits}bit:1.0")
        momentum = meant if step == 1 else 0.5 * momentum + meant
        value -= 0.5 * momentum
    np.testing.assert_array_equal(machine.read("k"), value)
    assert [payload.nbytes for _, (payload,) in logged] == 3 * [-(-COUNT * bits // 8)]
    for entry, payloads in logged:
        replay.apply(follower, entry, [memoryview(payload.tobytes()) for payload in payloads], keep=False)
    assert follower.slots["k", 0].value.tobytes() == machine.slot("k").value.tobytes()


@pytest.mark.parametrize("text", ["2bit:0.5", "1bit:0.5"])
def test_other_dtypes_and_wrong_lengths(text: str) -> None:
    machine = Machine("sync", 1)
    machine.init_all("k", whole_numbers(COUNT))
    machine.init_all("wide", np.arange(COUNT, dtype="f8"), "float64")
    for payload in (b"", bytes(COUNT), whole_numbers(COUNT)):
        error = machine.error(machine.push(0, "k", 1, payload, codec=text))
        assert isinstance(error, ProtocolError)
        assert text in str(error)
    assert machine.ok(machine.push(0, "wide", 1, np.arange(COUNT) / 3, codec=text))
    np.testing.assert_array_equal(machine.read("wide", 1, dtype="float64"), np.arange(COUNT) / 3)


@pytest.mark.parametrize(
    ("params", "error", "words"),
    [
        ({"type": "zip"}, UnsupportedError, "'2bit'"),
        ({}, UnsupportedError, "'none'"),
        ("2bit", ConfigError, "dict"),
        ({"type": "2bit", "threshold": 0}, ConfigError, "above 0"),
        ({"type": "2bit", "threshold": 1e-60}, ConfigError, "above 0"),
        ({"type": "2bit", "threshold": -0.5}, ConfigError, "above 0"),
        ({"type": "2bit", "threshold": "much"}, ConfigError, "finite"),
        ({"type": "2bit", "threshold": float("nan")}, ConfigError, "finite"),
        ({"type": "1bit", "threshold": 1e300}, ConfigError, "finite"),
        ({"type": "2bit", "treshold": 0.5}, UnsupportedError, "'treshold'"),
        ({"type": "fp16", "threshold": 0.5}, UnsupportedError, "'threshold'"),
    ],
)
def test_parameters_that_make_no_sense(params: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        codec.of(params)


def test_a_codec_is_what_its_text_says() -> None:
    for params in (
        {"type": "2bit"},
        {"type": "1bit", "threshold": -0.1},
        {"type": "2bit", "threshold": 0.1},
        {"type": "bf16"},
    ):
        chosen = codec.of(params)
        again = codec.get(chosen.text)
        assert (type(again), again.params()) == (type(chosen), chosen.params())
        assert codec.of(chosen.params()).text == chosen.text
    assert codec.of({"type": "2bit"}).text == "2bit:0.5"
    with pytest.raises(ConfigError, match="must be above 0"):
        codec.get("2bit:-1")
    for text in ("2bit:", "2bit:x", "2bit:nan", "2bit:-1", "zip:1", "fp16:1", ":", ""):
        with pytest.raises((UnsupportedError, ConfigError)):
            codec.get(text)


def test_an_error_changes_with_a_push_that_counts_and_with_no_other() -> None:
    rounding, values = codec.of({"type": "2bit", "threshold": 1.0}), quarters(COUNT, 1)
    assert isinstance(rounding, codec.Quantizer)
    chunks = [slice(0, 4), slice(4, COUNT)]
    feedback, sender = Feedback(rounding, COUNT), Sender(COUNT, 2)

    def codes_of(values: np.ndarray) -> list[bytes]:
        return [feedback.payloads(where, values[where])()[0].tobytes() for where in chunks]

    def expected(meant: np.ndarray) -> list[bytes]:
        return [sender.codes(meant[where]) for where in chunks]

    meant = sender.means(values)
    give = feedback.payloads(chunks[0], values[chunks[0]])
    assert give()[0] is give()[0], "what is sent again is the same"
    assert codes_of(values) == expected(meant)
    feedback.settle(chunks, counts=False)
    assert codes_of(values) == expected(meant), "a push that did not count is made again"
    feedback.settle(chunks, counts=True)
    meant = sender.means(values)
    assert codes_of(values) == expected(meant)
    feedback.settle(chunks, counts=True)
    # Of a push that counts though part of it was never sent, that part's error stays as it was.
    sent = sender.left.copy()
    meant = sender.means(values)
    assert feedback.payloads(chunks[0], values[chunks[0]])()[0].tobytes() == expected(meant)[0]
    feedback.settle(chunks, counts=True)
    sender.left[chunks[1]] = sent[chunks[1]]
    assert codes_of(values) == expected(sender.means(values))
    feedback.settle(chunks, counts=True)
    # What a server has answered of a push that is made again is what it was: an answer may be in the values' place.
    meant = sender.means(values)
    assert codes_of(values) == expected(meant)
    feedback.note_answer(chunks[0])
    feedback.settle(chunks, counts=False)
    overwritten = values.copy()
    overwritten[chunks[0]] = 50.0
    assert codes_of(overwritten) == expected(meant)
    feedback.settle(chunks, counts=True)
    assert codes_of(values) == expected(sender.means(values))


def test_a_client_that_tries_again_says_the_same(start_job: Callable[..., Any]) -> None:
    """With chunks on two servers: what timed out is made again, and later pushes have its error."""
    count = 200_001
    clients = start_job(2, chunk_bytes=50_000).connect(2)
    initialise(clients, {"k": count})
    senders = [Sender(count, 2, 0.5) for _ in clients]
    for client in clients:
        client.set_codec(codec.of({"type": "2bit"}))
    out = np.empty(count, "f4")
    for step in range(4):
        values = [quarters(count, step, rank) for rank in range(2)]
        total = np.sum([sender.means(value) for sender, value in zip(senders, values, strict=True)], axis=0)
        if step % 2:
            with pytest.raises(KVTimeoutError):
                clients[1].pushpull("k", values[1], out, Deadline(0.3)).wait()
        again = clients[1].pushpull("k", values[1], out, deadline())
        clients[0].push("k", values[0], deadline()).wait()
        again.wait()
        np.testing.assert_array_equal(out, total, err_msg=f"step {step}")
    # Not-a-number would be left for ever: it is refused, nothing is pushed, and what was left is as it was.
    odd = values[1].copy()
    odd[count // 2] = np.nan
    with pytest.raises(KVError, match=r"'k'.*not-a-numbers.*nothing was pushed"):
        clients[1].pushpull("k", odd, out, deadline())
    works = [client.push("k", values[rank], deadline()) for rank, client in enumerate(clients)]
    total = np.sum([sender.means(value) for sender, value in zip(senders, values, strict=True)], axis=0)
    for work in works:
        work.wait()
    clients[0].pull("k", out, deadline()).wait()
    np.testing.assert_array_equal(out, total)
    # Another codec begins without an error, and so does one for which it is forgotten.
    clients[0].forget_errors(["k"])
    clients[1].set_codec(codec.of({"type": "2bit", "threshold": 0.25}))
    senders = [Sender(count, 2, 0.5), Sender(count, 2, 0.25)]
    values = [random_floats(count, rank) for rank in range(2)]
    works = [client.push("k", values[rank], deadline()) for rank, client in enumerate(clients)]
    for work in works:
        work.wait()
    clients[1].pull("k", out, deadline()).wait()
    np.testing.assert_array_equal(out, sum(s.means(v) for s, v in zip(senders, values, strict=True)))


@pytest.mark.parametrize("bits", [1, 2])
def test_a_push_that_failed_in_part_is_made_again_in_place(
    start_job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """One server has answered, and what it has answered is in the place of what was pushed."""
    count = 600_001
    [client] = start_job(2).connect(1)
    initialise([client], {"k": count})
    client.set_codec(codec.of({"type": f"{bits}bit"}))
    sender, connection, dropped = Sender(count, bits, 0.5), client._link._connections[1], 0
    real = connection.send_all

    def lose(outgoing: Any, reject: Any) -> None:
        nonlocal dropped
        outgoing = list(outgoing)
        kept = [each for each in outgoing if not isinstance(each[0], m.Push)]
        dropped += len(outgoing) - len(kept)
        real(kept, reject)

    for step in range(4):
        values = quarters(count, step)
        total, out = sender.means(values), values.copy()
        if step == 1:
            monkeypatch.setattr(connection, "send_all", lose)
            with pytest.raises(KVTimeoutError):
                client.pushpull("k", out, out, Deadline(1.0)).wait()
            monkeypatch.undo()
            assert dropped, "nothing was lost"
            assert 0 < np.count_nonzero(out != values) < count, "no answer has come, or all have"
        client.pushpull("k", out, out, deadline()).wait()
        np.testing.assert_array_equal(out, total, err_msg=f"step {step}")


def test_a_codec_of_ones_own() -> None:
    class Sign(codec.Codec):
        name = "sign"

        def wire_dtype(self, dtype: str) -> str:
            return "int8"

        def encode(self, chunk: np.ndarray, dtype: str) -> np.ndarray:
            return np.sign(chunk).astype("i1")

        def decode(self, payload: memoryview, count: int, dtype: str) -> np.ndarray:
            return np.frombuffer(payload, "i1").astype(dtype)

    with pytest.raises(UnsupportedError):
        codec.of({"type": "sign"})
    codec.register(Sign)
    try:
        assert codec.of({"type": "sign"}).wire_bytes(7, "float32") == 7
        assert isinstance(codec.get("sign"), Sign)
    finally:
        del codec._CODECS["sign"]
        codec.get.cache_clear()
