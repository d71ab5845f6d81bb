"""Feeds ``decode`` with bytes that libFuzzer makes from coverage. Not part of the test suite.

Atheris is not among the requirements; ten minutes of it:

    pip install atheris
    python tests/fuzz/atheris_decode.py -max_total_time=600 -max_len=4096

It ends with status 0, or with the input that broke a promise: what is no message is a ``ProtocolError`` and nothing
else, and a message that was understood is encoded and understood again as the same one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvmpi.wire.encoding", "kvmpi.wire.messages"]):
    from kvmpi.errors import ProtocolError
    from kvmpi.wire import PROTOCOL_VERSION, Message, decode, encode
    from kvmpi.wire import messages as m

MAGIC = b"KVM" + bytes([PROTOCOL_VERSION])
SEEDS = [
    m.Hello(1, 2, "sync", 3, 4, 1 << 60),
    m.Init(1, "weight.0", 2, 3, 0, [0, 7], "bfloat16"),
    m.Push((1 << 63) - 1, -5, 0, 1, "none", True),
    m.SetRule(1, 1, "adam", {"lr": 0.1, "betas": [0.9, 0.999], "multi_precision": True}),
    m.PutState(1, 3, 0, 10, ["value", "momentum"]),
    m.Failure(-1, "KVError", "text", True),
    m.Register(1, "server", 0, -1, 2, 123, "host/boot", ["tcp://127.0.0.1:1"]),
    m.Roster(1, ["a"], [["tcp://127.0.0.1:1"]]),
    m.QueryDead(1, 2.5),
]


def check(header: bytes) -> None:
    """``decode`` of ``header`` keeps its promises."""
    try:
        message = decode(header)
    except ProtocolError as error:
        str(error).encode()  # goes into logs and answers
        return
    assert isinstance(message, Message)
    again = encode(message)
    # Compared as bytes, since NaN differs from itself.
    assert encode(decode(again)) == again, message


def one_input(data: bytes) -> None:
    check(data)
    check(MAGIC + data)


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for i, message in enumerate(SEEDS):
            Path(corpus, str(i)).write_bytes(encode(message)[len(MAGIC) :])
        atheris.Setup([*sys.argv, corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
