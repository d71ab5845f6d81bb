"""Hypothesis strategies for messages: every kind, with fields that nearly make sense, and copies with flipped bits."""

from __future__ import annotations

import typing
from typing import Any

from hypothesis import strategies as st

from kvmpi.errors import ProtocolError
from kvmpi.wire import Message, decode, encode, entries
from kvmpi.wire import messages as m

KINDS = sorted(Message.__subclasses__(), key=lambda kind: kind.__name__)
KEYS = st.sampled_from(["k", "j", 0, -1]) | st.text(max_size=5)
INTS = st.integers(-1, 4) | st.sampled_from([1 << 16, (1 << 31) - 1, 1 << 40, (1 << 63) - 1, -(1 << 63)])
#: Words that mean something in one field or another, and some that do not.
WORDS = st.sampled_from([
    *("none", "fp16", "bf16", "2bit:0.5", "1bit:0"),
    *("sync", "async", "ssp:1", "softsync:2", "float32", "bfloat16", "int8", "client", "server", "value", "momentum",
      "worker"),
    *("lr", "sgd", "adam", "elastic", "outer", "test", "alpha", "ClientLostError", "\0", "x" * 300, "tcp://127.0.0.1:1"),
]) | st.text(max_size=8)  # fmt: skip
FLOATS = st.sampled_from([0.0, 0.5, -1.0, 1e300, 1e-300]) | st.floats()
#: Not ``st.from_type``: most values that it finds would be refused for the first field, and nothing behind it be seen.
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    bool: st.booleans(),
    float: FLOATS,
    str: WORDS,
    m.Key: KEYS,
    list[int]: st.lists(INTS, max_size=4),
    list[str]: st.lists(WORDS, max_size=4),
    list[list[str]]: st.lists(st.lists(WORDS, max_size=3), max_size=3),
    dict[str, m.Number]: st.dictionaries(
        WORDS, st.booleans() | INTS | FLOATS | st.lists(FLOATS, max_size=3), max_size=4
    ),
    dict[int, int]: st.dictionaries(INTS, INTS, max_size=3),
    dict[int, tuple[int, list[int]]]: st.dictionaries(INTS, st.tuples(INTS, st.lists(INTS, max_size=3)), max_size=3),
    dict[str, float]: st.dictionaries(WORDS, FLOATS, max_size=3),
    dict[str, list[float]]: st.dictionaries(WORDS, st.lists(FLOATS, max_size=4), max_size=3),
    dict[str, list[tuple[int, float]]]: st.dictionaries(
        WORDS, st.lists(st.tuples(INTS, FLOATS), max_size=3), max_size=3
    ),
    str | None: st.none() | WORDS,
    list[int] | None: st.none() | st.lists(INTS, max_size=4),
    tuple[int, int, int] | None: st.none() | st.tuples(INTS, INTS, INTS),
    list[m.Key]: st.lists(KEYS, max_size=4),
    list[tuple[m.Key, int]]: st.lists(st.tuples(KEYS, INTS), max_size=3),
    list[tuple[m.Key, int, int]]: st.lists(st.tuples(KEYS, INTS, INTS), max_size=3),
}


def of_kind(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Messages, entries, or parts of them, of one kind."""
    hints = typing.get_type_hints(kind)
    return st.builds(kind, *(BY_TYPE[hints[name]] for name in kind.__struct_fields__))


# From the inside out: each is made of those before it.
for inner in (m.Lost, m.ServerInfo, m.Chain, m.PartFile, entries.RuleInForce):
    BY_TYPE[inner] = of_kind(inner)
    BY_TYPE[list[inner]] = st.lists(BY_TYPE[inner], max_size=3)  # type: ignore[valid-type]
BY_TYPE[entries.RuleInForce | None] = st.none() | BY_TYPE[entries.RuleInForce]
BY_TYPE[list[tuple[int, entries.RuleInForce]]] = st.lists(st.tuples(INTS, BY_TYPE[entries.RuleInForce]), max_size=2)
BY_TYPE[list[entries.CallsState]] = st.lists(of_kind(entries.CallsState), max_size=2)
BY_TYPE[entries.Entry] = st.one_of([of_kind(kind) for kind in typing.get_args(entries.Entry)])


any_message: st.SearchStrategy[Message] = st.sampled_from(KINDS).flatmap(of_kind)


@st.composite
def damaged(draw: st.DrawFn, messages: st.SearchStrategy[Message] = any_message) -> Message | ProtocolError:
    """What a listener hears when bits of a header have flipped, or some of it is missing, or stands there twice."""
    header = bytearray(encode(draw(messages)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(4, max(4, len(header) - 1)))
        match draw(st.sampled_from(["flip", "cut", "repeat"])):
            case "flip" if at < len(header):
                header[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del header[at : at + draw(st.integers(1, 4))]
            case "repeat":
                header[at:at] = header[at : at + draw(st.integers(1, 8))]
    try:
        return decode(bytes(header))
    except ProtocolError as error:
        return error


heard: st.SearchStrategy[Message | ProtocolError] = any_message | damaged()
