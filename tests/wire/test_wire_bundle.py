"""Messages that travel together: whatever is gathered comes out as it went in, and what was made up is refused."""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmpi.config import Config
from kvmpi.errors import ProtocolError
from kvmpi.wire import Connection, Listener, bundle, decode, encode, encoding, new_context
from kvmpi.wire import messages as m

LIMIT = 1 << 20


def refuse(message: Any, error: Any) -> None:
    raise AssertionError(f"{message}: {error}")


def payload(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng([nbytes, seed]).integers(0, 256, nbytes, dtype=np.uint8)


def frames_of(payloads: Any) -> list[memoryview]:
    return [memoryview(bytearray(each.tobytes())) for each in payloads]


SIZES = st.sampled_from([0, 1, 7, 4096, (32 << 10) - 1, 32 << 10, 300_000])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(SIZES, max_size=3), max_size=40),
    st.sampled_from([0, 4096, 40_000, LIMIT]),
)
def test_all_comes_out_as_it_went_in(sizes: list[list[int]], most_bytes: int) -> None:
    sent = [
        (m.State(number, 0, ["x" * (number % 5)]), [payload(size, number) for size in each])
        for number, each in enumerate(sizes)
    ]
    came, num_frames = [], 0
    for header, payloads in bundle.gathered(sent, refuse, most_bytes):
        found = bundle.parted(header, frames_of(payloads))
        came += found
        num_frames += 1
        if len(found) > 1:
            assert len(header) <= most_bytes
            assert sum(each.nbytes for each in payloads) <= min(most_bytes, 256 << 10)
            assert all(part.nbytes < 32 << 10 for _, parts in found for part in parts)
    assert [message for message, _ in came] == [message for message, _ in sent]
    assert [[bytes(part) for part in parts] for _, parts in came] == [
        [each.tobytes() for each in payloads] for _, payloads in sent
    ]
    if most_bytes == LIMIT and sizes and max(map(sum, sizes)) <= 4096:
        assert num_frames == 1 + (len(sizes) - 1) // bundle.MOST_MESSAGES


def test_many_are_cut_into_several() -> None:
    sent = [(m.Ack(number, 1), ()) for number in range(600)]
    counts = [len(bundle.parted(header, [])) for header, _ in bundle.gathered(sent, refuse, LIMIT)]
    assert counts == [256, 256, 88]


def test_no_header_has_more_than_a_quarter_of_what_a_frame_may() -> None:
    sent = [(m.State(number, 0, ["x" * (number % 400)]), [payload(number % 7, number)]) for number in range(200)]
    found = list(bundle.gathered(sent, refuse, 4096))
    headers = [len(header) for header, _ in found]
    assert max(headers) <= 1024
    assert len(found) < 100, "they travel together all the same"
    came = [one for header, payloads in found for one in bundle.parted(header, frames_of(payloads))]
    assert [(message, bytes(parts[0])) for message, parts in came] == [
        (message, payloads[0].tobytes()) for message, payloads in sent
    ]


@pytest.mark.parametrize(("most_bytes", "counts"), [(LIMIT, [8, 8, 4]), (70_000, [2] * 10), (32_768, [1] * 20)])
def test_no_frame_has_more_payloads_than_it_may(most_bytes: int, counts: list[int]) -> None:
    sent = [(m.Ack(number, 1), [payload((32 << 10) - 1, number)]) for number in range(20)]
    found = [
        bundle.parted(header, frames_of(payloads)) for header, payloads in bundle.gathered(sent, refuse, most_bytes)
    ]
    assert list(map(len, found)) == counts
    assert [bytes(parts[0]) for each in found for _, parts in each] == [payloads[0].tobytes() for _, payloads in sent]


@pytest.mark.parametrize("count", [1, 2])
def test_of_what_cannot_be_encoded_the_sender_hears(count: int) -> None:
    refused: list[tuple[Any, ProtocolError]] = []
    sent = [(m.Ack((1 << 70) + number, 1), ()) for number in range(count)]
    assert not list(bundle.gathered(sent, lambda *what: refused.append(what), LIMIT))
    assert [message for message, _ in refused] == [message for message, _ in sent]
    assert all(isinstance(error, ProtocolError) for _, error in refused)


def test_one_that_cannot_be_encoded_hurts_no_other() -> None:
    refused: list[Any] = []
    sent = [(m.Ack(1, 1), ()), (m.Ack(1 << 70, 2), ()), (m.Ack(3, 3), ())]
    [(header, payloads)] = bundle.gathered(sent, lambda message, error: refused.append(message), LIMIT)
    assert [message for message, _ in bundle.parted(header, frames_of(payloads))] == [m.Ack(1, 1), m.Ack(3, 3)]
    assert [message.request for message in refused] == [1 << 70]


def made_up(*fields: Any) -> bytes:
    return encoding.BEGINNING + msgspec.msgpack.encode(["bundle", *fields])


ACK = ["ack", 1, 0]


@pytest.mark.parametrize(("header", "nbytes", "what"), [
    (made_up([], []), [], "0 messages"),
    (made_up([ACK], []), [], "sizes of 0"),
    (made_up([ACK], [[-1]]), [1], "1 payload frames"),
    (made_up([ACK], [[3, -1]]), [2], "1 payload frames"),
    (made_up([ACK], [[3]]), [], "0 payload frames"),
    (made_up([ACK], [[3]]), [1, 2], "2 payload frames"),
    (made_up([ACK], [[0]]), [], "0 payload frames"),
    (made_up([ACK], [[3]]), [4], "4 bytes of payloads, which says 3"),
    (made_up([ACK] * 257, [[]] * 257), [], "257 messages"),
    (made_up([["bundle", [ACK], [[]]]], [[]]), [], "malformed"),
    (made_up([["nonsense"]], [[]]), [], "malformed"),
    (made_up([ACK], [["1"]]), [1], "malformed"),
    (made_up([ACK]), [], "malformed"),
])  # fmt: skip
def test_what_is_made_up_is_refused(header: bytes, nbytes: list[int], what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        bundle.parted(header, frames_of([payload(size, 0) for size in nbytes]))


@pytest.fixture(scope="module")
def fuzz() -> dict[str, Any]:
    """The program for libFuzzer, with something in the place of Atheris, which is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "atheris", SimpleNamespace(instrument_imports=lambda include: nullcontext()))
        return runpy.run_path(str(Path(__file__).parents[1] / "fuzz" / "atheris_decode.py"))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_ones_are_refused_or_others(fuzz: dict[str, Any], data: st.DataObject) -> None:
    body = bytearray(data.draw(st.sampled_from(fuzz["beginnings"]())))
    fuzz["one_input"](bytes(body))
    for _ in range(data.draw(st.integers(1, 4), "flips")):
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    fuzz["one_input"](bytes(body))


def test_only_who_takes_bundles_gets_any(tmp_path: Any) -> None:
    """Peers that connect as others do: one by ``Connection``, one by a socket with a routing id that begins with k."""
    import zmq

    context = new_context(Config(scheduler=f"ipc://{tmp_path}/s"))
    listener = Listener(context, LIMIT)
    endpoint = listener.bind_ipc(str(tmp_path / "l"))
    takes = Connection(context, endpoint, LIMIT)
    other = context.socket(zmq.DEALER)
    other.linger = 0
    other.setsockopt(zmq.ROUTING_ID, b"k" + b"0123456789abcdef")
    other.connect(endpoint)
    messages = [(m.Pull(number, "k", 0, 1), [payload(number, number)]) for number in range(5)]
    try:
        takes.send_all(messages, refuse)
        other.send(encode(m.Bye(9)))
        routes: dict[bytes, list[Any]] = {}
        for _ in range(2):
            while (received := listener.recv()) is None:
                pass
            together = [received, *listener.take_rest()]
            assert len(together) == (5 if received[0][1:2] == b"b" else 1)
            for route, message, parts in together:
                routes.setdefault(route, []).append((message, [bytes(each) for each in parts]))
        (mine, came), (theirs, bye) = sorted(routes.items())
        assert came == [(message, [each.tobytes() for each in payloads]) for message, payloads in messages]
        assert bye == [(m.Bye(9), [])]
        answers = [(m.Ack(number, 1), ()) for number in range(3)]
        for route in (mine, theirs):
            listener.send_all(route, answers, refuse)
        heard = []
        while len(heard) < 3:
            if (received := takes.recv()) is not None:
                heard.append(received[0])
        assert heard == [message for message, _ in answers]
        assert [decode(other.recv()) for _ in range(3)] == heard, "a message each"
    finally:
        other.close()
        takes.close()
        listener.close()
        context.destroy(linger=0)
