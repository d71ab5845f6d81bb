"""Messages and receives find each other as MPI says: by communicator, sender and tag, each in the order of its kind."""

from __future__ import annotations

import random

import pytest

from kvmpi.collectives.mailbox import Mailbox, Message, Receive, settle

CONTEXTS, SOURCES, TAGS = (7, 8), (0, 1, 2), (0, 1)


def arrived(source: int, data: bytes) -> Message:
    """A message whose bytes came before anybody wanted them."""
    message = Message(source, len(data))
    message.data, message.arrived = memoryview(bytearray(data)), True
    return message


@pytest.mark.parametrize("seed", range(200))
def test_random_messages_go_to_the_receives_that_a_list_finds(seed: int) -> None:
    rng, mailbox = random.Random(seed), Mailbox()
    receives: list[tuple[tuple[int, int], int | None, Receive]] = []  # nobody has those yet, in order
    messages: list[tuple[tuple[int, int], int, bytes]] = []
    expected: list[tuple[Receive, int, bytes]] = []
    for step in range(rng.randrange(1, 60)):
        box, source = (rng.choice(CONTEXTS), rng.choice(TAGS)), rng.choice(SOURCES)
        if rng.random() < 0.5:
            data = bytes([step] * rng.randrange(4))
            found = [one for one in receives if one[0] == box and one[1] in (None, source)]
            message = arrived(source, data)
            assert mailbox.arrive(box, message) == bool(found)
            if found:
                settle(message)
                receives.remove(found[0])
                expected.append((found[0][2], source, data))
            else:
                messages.append((box, source, data))
        else:
            wanted = rng.choice((None, *SOURCES))
            receive = Receive(memoryview(bytearray(3)), wanted)
            there = [one for one in messages if one[0] == box and wanted in (None, one[1])]
            assert (mailbox.post(box, receive) is not None) == bool(there)
            if there:
                messages.remove(there[0])
                expected.append((receive, *there[0][1:]))
            else:
                receives.append((box, wanted, receive))
                if rng.random() < 0.2:
                    mailbox.cancel(*receives.pop()[::2])
    for receive, source, data in expected:
        assert (receive.source, receive.nbytes, receive.done) == (source, len(data), True)
        assert bytes(receive.target[: len(data)]) == data
    assert not any(receive.done for _, _, receive in receives)
    assert mailbox._messages.keys() == {box for box, _, _ in messages}, "nothing is kept of what is over"
    assert mailbox._receives.keys() == {box for box, _, _ in receives}


def test_what_is_too_long_writes_nothing_and_what_is_forgotten_is_gone() -> None:
    mailbox, receive = Mailbox(), Receive(memoryview(bytearray(b"old")), None)
    mailbox.arrive((7, 0), arrived(1, b"long"))
    mailbox.post((7, 0), receive)
    assert (receive.done, receive.too_long, bytes(receive.target)) == (True, True, b"old")
    mailbox.arrive((7, 0), arrived(1, b"a"))
    mailbox.arrive((8, 0), arrived(1, b"b"))
    mailbox.post((7, 1), Receive(memoryview(bytearray(1)), 2))
    mailbox.forget(7)
    assert mailbox.post((7, 0), Receive(memoryview(bytearray(3)), None)) is None
    assert not mailbox.arrive((7, 1), arrived(2, b"c"))
    kept = Receive(memoryview(bytearray(1)), 1)
    assert mailbox.post((8, 0), kept) is not None
    assert bytes(kept.target) == b"b"
