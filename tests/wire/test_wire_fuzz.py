"""Messages of every kind with arbitrary fields, whole and damaged: a header means what it says, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_strategies import KINDS, damaged, of_kind

from kvmpi.errors import ProtocolError
from kvmpi.wire import MAX_HEADER_BYTES, Message, decode, encode


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_header_says_again_what_it_said_and_damaged_it_is_a_message_or_an_error(
    kind: type[Message], data: st.DataObject
) -> None:
    message = data.draw(of_kind(kind))
    header = encode(message)
    assert len(header) <= MAX_HEADER_BYTES
    again = decode(header)
    assert type(again) is kind
    assert encode(again) == header  # compared as bytes, since NaN differs from itself

    result = data.draw(damaged(st.just(message)))
    if isinstance(result, ProtocolError):
        assert len(str(result)) < 1000, "what a peer sends must not come back as a flood of text"
    else:
        encoded = encode(result)
        assert encode(decode(encoded)) == encoded
