"""Payloads in shared memory, by a client from docs/protocol.md alone."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from page_client import VERSION, PageClient
from ps_helpers import deadline, whole_numbers


def slip(*fields: Any) -> bytes:
    body = msgspec.msgpack.encode(fields)
    return b"KVS\1" + len(body).to_bytes(4, "little") + body


def parted(frame: bytes) -> tuple[list[Any], list[Any]]:
    """The slip in a frame, and the header behind it."""
    assert frame[:4] == b"KVS\1"
    stop = 8 + int.from_bytes(frame[4:8], "little")
    return msgspec.msgpack.decode(frame[8:stop]), msgspec.msgpack.decode(frame[stop + 4 :]) if frame[stop:] else []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd on this system")
def test_payloads_in_shared_memory_as_the_page_says(start_job: Callable[..., Any]) -> None:
    job = start_job(1)
    page, own = PageClient(job.config.keys, job.config.scheduler), job.new_client(1, 2)
    size, count, token = 1 << 20, 10_000, os.urandom(16)
    fd = os.memfd_create("kvmpi-payloads", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        arena = mmap.mmap(fd, size)
        arena[:16] = token
        page.join()
        own.connect(deadline())
        peer = page.connect(next(at for at in page.found[0][1] if at.startswith("ipc://")))

        def ask(slip_: bytes, *body: Any) -> list[bytes]:
            peer.send(slip_ + b"KVM" + bytes([VERSION]) + msgspec.msgpack.encode(body))
            return peer.recv_multipart()

        peer.send(slip("offer", os.getpid(), fd, size, b"", True))
        (tag, pid, number, size_there, returned, answer), _ = parted(peer.recv())
        assert (tag, returned, answer) == ("offer", token, False)
        with open(f"/proc/{pid}/fd/{number}", "rb") as file:
            there = mmap.mmap(file.fileno(), size_there, prot=mmap.PROT_READ)
        peer.send(slip("proof", there[:16]))
        assert msgspec.msgpack.decode(ask(b"", "hello", 1001, 1, "sync", 0, 2, 1)[0][4:])[:2] == ["ack", 1001]
        ((part, _),) = page.places("w", count, 1, 4, 1 << 21)
        arena[64 : 64 + 4 * count] = whole_numbers(count, 0).tobytes()
        layout = ("w", 0, 1, count, [count], "float32", part)
        first = ask(slip("parcel", 0, [], [[0, 64, 4 * count]]), "init", 1002, *layout)
        assert first[0].endswith(msgspec.msgpack.encode(["ack", 1002, 0, "", "", 0, False]))
        own.add_keys([("w", (count,), "float32")])
        own.init("w", None, deadline()).wait()
        (frame,) = ask(b"", "pull", 1003, "w", 0, 0, part)
        (tag, _floor, _done, [(ticket, offset, nbytes)]), (answer, number, *_) = parted(frame)
        assert (tag, ticket, nbytes, answer, number) == ("parcel", 0, 4 * count, "value", 1003)
        assert there[offset : offset + nbytes] == whole_numbers(count, 0).tobytes()
        (frame,) = ask(slip("parcel", 1, [], [[0, 64, 4 * count]]), "pull", 1004, "w", 0, 0, part)
        assert msgspec.msgpack.decode(frame[4:])[:3] == ["failure", -1, "ProtocolError"], "the ticket was announced"
    finally:
        os.close(fd)
        page.close()
