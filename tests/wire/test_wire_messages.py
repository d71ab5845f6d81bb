"""Headers: what is encoded comes back equal, and what is not a header is refused with a ProtocolError."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmpi.errors import ProtocolError
from kvmpi.wire import MAX_HEADER_BYTES, PROTOCOL_VERSION, Message, OtherVersionError, decode, encode, entries
from kvmpi.wire import messages as m

KINDS = sorted(Message.__subclasses__(), key=lambda kind: kind.__name__)
ENTRIES = [
    entries.Begin(),
    entries.Opened("sync", 3),
    entries.Joined(1, 5),
    entries.Gone(1, "was lost", 3),
    entries.Created("k", 0, 1, 5, [5], "float32"),
    entries.Returned(2),
    entries.Entered(2, 7),
    entries.Finished(2),
    entries.Round("k", 3),
    entries.Round("k", 3, [0, 2]),
    entries.Skipped("k", 3),
    entries.Partial(4, 0, 2, [1]),
    entries.Single("k", 0, 1, 9, "fp16"),
    entries.Answered("k", 0, 1),
    entries.RuleCall(0, 1, "sgd", {"lr": 0.1}, [("k", 0, 3)]),
    entries.HyperCall(0, 1, {"lr": 0.1}, []),
    entries.Restored("k", 0, 1, 77, 3, ["value"]),
    entries.StoreState(
        entries.RuleInForce(0, 2, "sgd", {"lr": 0.1}),
        [entries.CallsState(1, [(1, entries.RuleInForce(0, 0, "", {"lr": 0.5}))], {0: 1, 1: 0})] * 2,
        True,
    ),
    entries.Saved(["k", 7]),
    entries.SlotState(
        "k",
        0,
        1,
        5,
        [5],
        "float32",
        3,
        3,
        1,
        {0: 3, 7: 2},
        (0, 1, 2),
        [entries.RuleInForce(0, 0, "", {})],
        None,
        ["value"],
    ),
]
EXAMPLES = [
    m.Hello(1, 2, "sync", 3, 4, 1 << 60),
    m.Init(1, "wéight.0", 2, 3, 0, [0, 7], "bfloat16"),
    m.Push((1 << 63) - 1, -5, 0, 1, "none", True),
    m.Found(3, 4, {4: 7, 3: -6}, 5, True),
    m.Pull(0, 17, 1, 0),
    m.Query(5, "k", 1, 9),
    m.SetRule(1, 1, "adam", {"lr": 0.1, "betas": [0.9, 0.999], "multi_precision": True, "n": 3}),
    m.SetHyperparams(1, 2, {"lr": 1e-300}, 7),
    m.GetState(1, "k", 0),
    m.PutState(1, 3, 0, 10, ["value", "momentum"]),
    m.Finish(9, 3),
    m.Return(9, 3),
    m.Enter(9, 7, 3),
    m.Bye(9),
    m.Ack(1, 2),
    m.Value(1, 3),
    m.Waiting(1, [0, 2]),
    m.State(1, 5, ["value"]),
    m.Failure(-1, "KVError", "text\n\0", True),
    m.Register(1, "server", 0, -1, 2, 123, "host/boot", ["tcp://127.0.0.1:1", "ipc:///tmp/x"]),
    m.View(
        3,
        1,
        [m.Chain(1, [0, 1]), m.Chain(2, [1], 0, True, "why")],
        [m.ServerInfo(0, 1, "a", ["tcp://127.0.0.1:1"])],
        [m.Lost(1, 2, 3, "was lost")],
        5,
        40,
        {1: 40, 2: 7},
    ),
    m.TakeSnapshot(45),
    m.SnapshotNews(45, "written", [m.PartFile(0, 1 << 40, (1 << 32) - 1)], {1: 45}, [1, 2]),
    m.CaughtUp(3, 1),
    m.Drained(3, 1),
    m.Accepted(7),
    m.Moved(7),
    m.Extend(1, 2),
    m.Attach(1, 2, -1),
    m.Committed(1, 2, 9),
    m.Install(1, 2, 0, 3, 9, 1, entries.Begin()),
    m.Installed(1, 2, 3),
    *(m.Log(1, 2, 9, 1, entry) for entry in ENTRIES),
    m.Heartbeat(4),
    m.Heard(1 << 50),
    m.Report("worker", 3, 1, 77, 5, "h", {"n": 4.0}, {"push": [0.5, 8.0, 2.0]}, {0: 3}, {"f": [(1, 0.5)]}, [2], True),
    m.Barrier(1, 2, 7),
    m.QueryDead(1, 2.5),
    m.Dead(1, [3]),
    m.Leave(1),
]


def test_every_kind_of_message_has_an_example() -> None:
    assert sorted({type(message).__name__ for message in EXAMPLES}) == [kind.__name__ for kind in KINDS]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_message_round_trips(message: Message) -> None:
    again = decode(encode(message))
    assert type(again) is type(message)
    assert again == message


def test_int_and_str_keys_stay_apart() -> None:
    assert decode(encode(m.Pull(1, 7, 0, 0))) != decode(encode(m.Pull(1, "7", 0, 0)))


def _is_message_or_refused(header: bytes) -> None:
    try:
        message = decode(header)
    except ProtocolError:
        return
    assert isinstance(message, Message)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=200), st.booleans())
@example(b"", True)
@example(b"\x91" * 100_000, True)  # nested deeper than any stack
@example(b"\x92\xa4push\xdd\xff\xff\xff\xff", True)  # claims four billion items
@example(b"\xc7\x08\x05abcdefgh", True)  # an extension type
@example(b"\xd6\xff\x00\x00\x00\x00", True)  # a timestamp
def test_random_bytes_are_refused(body: bytes, with_magic: bool) -> None:
    _is_message_or_refused(b"KVM" + bytes([PROTOCOL_VERSION]) + body if with_magic else body)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(EXAMPLES), st.data())
def test_truncated_and_flipped_headers_are_refused_or_another_message(message: Message, data: st.DataObject) -> None:
    header = bytearray(encode(message))
    cut = data.draw(st.integers(0, len(header)), "cut")
    if cut < len(header):
        with pytest.raises(ProtocolError):
            decode(bytes(header[:cut]))
    for _ in range(data.draw(st.integers(1, 4), "flips")):
        header[data.draw(st.integers(0, len(header) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    _is_message_or_refused(bytes(header))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(),
        lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=20,
    ),
    st.sampled_from([kind.__struct_config__.tag for kind in KINDS]),
)
def test_valid_msgpack_of_wrong_types_is_refused(body: object, tag: str) -> None:
    magic = b"KVM" + bytes([PROTOCOL_VERSION])
    for value in (body, [tag, body], [tag, *body] if isinstance(body, list) else [body]):
        _is_message_or_refused(magic + msgspec.msgpack.encode(value))


def test_wrong_magic_and_version_say_so() -> None:
    header = encode(m.Bye(1))
    with pytest.raises(ProtocolError, match="magic"):
        decode(b"KVX" + header[3:])
    with pytest.raises(OtherVersionError, match=f"version ee, this process speaks {PROTOCOL_VERSION:02x}"):
        decode(header[:3] + b"\xee" + header[4:])
    with pytest.raises(ProtocolError, match="before its protocol version") as raised:
        decode(header[:3])
    assert not isinstance(raised.value, OtherVersionError), "nobody is to be told to install another version"


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(ProtocolError):
        decode(encode(m.Bye(1)) + b"\0")


def test_size_of_a_header_is_limited_both_ways() -> None:
    text = "x" * MAX_HEADER_BYTES
    with pytest.raises(ProtocolError, match="limit"):
        encode(m.Failure(1, "KVError", text))
    with pytest.raises(ProtocolError, match="limit"):
        decode(encode(m.Bye(1)) + text.encode())
    almost = m.Failure(1, "KVError", text[:-100])
    assert decode(encode(almost)) == almost


@pytest.mark.parametrize("key", [1 << 64, -(1 << 63) - 1, "\ud800"], ids=repr)
def test_what_cannot_be_encoded_is_a_protocol_error(key: int | str) -> None:
    with pytest.raises(ProtocolError, match="Pull"):
        encode(m.Pull(1, key, 0, 0))
