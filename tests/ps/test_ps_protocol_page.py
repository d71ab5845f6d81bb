"""docs/protocol.md is enough: a client written from the page alone works beside kvmpi's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from page_client import PAGE, PageClient, text_of
from ps_helpers import deadline, whole_numbers

from kvmpi.kernels.rows import Rows
from kvmpi.ps import PsClient, placement

CHUNK_BYTES = 100_000


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_client_written_from_the_page(start_job: Callable[..., Any], replicas: int) -> None:
    job = start_job(2, chunk_bytes=CHUNK_BYTES, replicas=replicas)
    page = PageClient(job.config.keys, job.config.scheduler)
    own = job.new_client(1, 2)
    try:
        page.join()
        own.connect(deadline())
        shapes = {"w": [5], 7: [1], "layer.0": [200_001], "empty": [0], "wide": [15, 10_000], "rows": [2000, 3, 35]}
        for key, shape in shapes.items():  # the rows last
            count, width = int(np.prod(shape)), int(np.prod(shape[1:]))
            first, mine, theirs = (whole_numbers(count, i) for i in range(3))
            places = page.places(key, shape[0], width, 4, CHUNK_BYTES)
            assert (len({part // 4 for part, _ in places}) == 2) == (count * 4 >= 2 * 262144), "it is on both servers"
            for i, (part, where) in enumerate(places):
                layout = (key, i, len(places), where.stop - where.start, shape, "float32")
                assert page.about(part, "init", *layout, payloads=(first[where].tobytes(),))[:2] == ("ack", [0])
                assert page.about(part, "pull", key, i, 0) == ("value", [0, -1], [first[where].tobytes()])
            # It would wait for a value that client 0 had put somewhere else.
            own.add_keys([(key, tuple(shape), "float32")])
            own.init(key, None, deadline()).wait()
            push = own.push(key, theirs, deadline())
            for i, (part, where) in enumerate(places):
                pushed = page.about(part, "push", key, i, 1, "none", False, False, payloads=(mine[where].tobytes(),))
                assert pushed[0] == "ack"
            push.wait()
            for i, (part, where) in enumerate(places):
                assert page.about(part, "pull", key, i, 1) == ("value", [1, -1], [(mine + theirs)[where].tobytes()])
            out = np.empty(count, "f4")
            own.pull(key, out, deadline()).wait()
            np.testing.assert_array_equal(out, mine + theirs)
        rows_from_the_page(page, own, first.reshape(2000, 105), places)
        page.leave()
    finally:
        page.close()


@pytest.mark.parametrize("shape", [(700_000, 64), (9_000_001,), (3_000_000, 30), (80_000_000, 1)])
def test_the_page_says_how_large_keys_are_cut(shape: tuple[int, ...]) -> None:
    page, (rows, width) = object.__new__(PageClient), (*shape, 1)[:2]
    page.chains = [None] * 12
    parts = placement.create("uniform", 3).place([placement.KeySize("k", rows * width, 4, width)])[0]
    found = [(chunk.server, slice(chunk.start, chunk.stop)) for chunk in placement.cut(parts, 4, 0, width)]
    assert [(part // 4, where) for part, where in page.places("k", rows, width, 4, 0)] == found
    assert len({home for home, _ in found}) == 3


def rows_from_the_page(page: PageClient, own: PsClient, values: np.ndarray, places: list[tuple[int, slice]]) -> None:
    """The second step of the key "rows": the page's client pushes three rows, the other two of them and one more."""
    push = own.push_rows("rows", Rows(np.array([5, 700, 1999]), values[[0, 2, 1]]), deadline())
    mine = {5: values[3], 700: values[4], 701: values[5]}
    for i, (part, where) in enumerate(places):
        start, stop = where.start // 105, where.stop // 105
        ids = [r for r in mine if start <= r < stop]
        numbers, rows = np.array([r - start for r in ids], "<u4"), [mine[r] for r in ids]
        payloads = (numbers.tobytes(), np.array(rows, "<f4").tobytes())
        pushed = page.about(part, "push", "rows", i, 2, "none", False, False, rows=(len(ids),), payloads=payloads)
        assert pushed[0] == "ack"
    push.wait()
    expected = {5: values[0] + values[3], 700: values[2] + values[4], 701: values[5], 1999: values[1]}
    for i, (part, where) in enumerate(places):
        start, stop = where.start // 105, where.stop // 105
        ids = [r for r in expected if start <= r < stop]
        numbers = np.array([r - start for r in ids], "<u4").tobytes()
        rows = page.about(part, "pull", "rows", i, 2, rows=(len(ids),), payloads=(numbers,))
        assert rows == ("value", [2, len(ids)], [b"".join(expected[r].tobytes() for r in ids)])


def test_the_example_bytes_are_what_is_sent() -> None:
    """Decoded by hand: what the page says about msgpack arrays."""
    line = re.search(r"^    (4b 56 4d  [0-9a-f ]+)$", PAGE, re.MULTILINE)
    assert line
    header = bytes.fromhex(line[1])
    assert header[:3] == b"KVM"
    assert msgspec.msgpack.decode(header[4:]) == ["pull", 7, "w", 0, 1, 2, -1]
    assert header[4] == 0x97, "an array of seven"
    assert header[5:10] == b"\xa4pull"


def test_the_text_of_a_key_is_what_the_page_says() -> None:
    keys = [chr(code) for code in (*range(0x3100), *range(0xE000, 0x10000), *range(0x1F000, 0x1FFFF))]
    assert [key for key in keys if text_of(key) != repr(key)] == []
    for key in ("w", "it's", 'say "x"', "both ' and \"", 7, -7, ""):
        assert text_of(key) == repr(key)
