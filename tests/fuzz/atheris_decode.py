"""Feeds what takes messages apart with bytes that libFuzzer makes from coverage. Of the test suite only the beginnings.

Atheris is not among the requirements; ten minutes of it:

    pip install atheris
    python tests/fuzz/atheris_decode.py -max_total_time=600 -max_len=4096

It ends with status 0, or with the input that broke a promise: what is no message is a ``ProtocolError`` and nothing
else, a message that was understood is encoded and understood again as the same one, and those of a bundle have the
bytes that came.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["kvmpi.wire.bundle", "kvmpi.wire.encoding", "kvmpi.wire.messages"]):
    from kvmpi.errors import ProtocolError
    from kvmpi.wire import PROTOCOL_VERSION, Message, bundle, decode, encode
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
    m.View(1, 0, [m.Chain(1, [0])], [m.ServerInfo(0, 1, "host/boot", ["tcp://127.0.0.1:1"])], []),
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


def check_bundle(header: bytes, frames: list[memoryview]) -> None:
    """``parted`` keeps its promises."""
    try:
        found = bundle.parted(header, frames)
    except ProtocolError as error:
        str(error).encode()
        return
    assert all(isinstance(message, Message) for message, _ in found)
    came = [payload for _, payloads in found for payload in payloads]
    assert b"".join(came) == b"".join(frames)


def one_input(data: bytes) -> None:
    check(data)
    check(MAGIC + data)
    for frames in ([], [memoryview(data[: len(data) % 7])]):
        check_bundle(MAGIC + data, frames)


def beginnings() -> list[bytes]:
    """What libFuzzer makes its inputs from: every message, and bundles of all."""
    alone = [encode(message) for message in SEEDS]
    together = [(message, [np.arange(i % 3, dtype=np.uint8)]) for i, message in enumerate(SEEDS)]
    bundled = [header for header, _ in bundle.gathered(together, _refuse, 1 << 20)]
    return [header[len(MAGIC) :] for header in [*alone, *bundled]]


def _refuse(message: Message, error: ProtocolError) -> None:
    raise AssertionError(f"{message}: {error}")


def main() -> None:
    with tempfile.TemporaryDirectory() as corpus:
        for i, data in enumerate(beginnings()):
            Path(corpus, str(i)).write_bytes(data)
        atheris.Setup([*sys.argv, corpus], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
