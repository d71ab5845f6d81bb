"""What is said of jobs with hundreds of clients: who began it, briefly, and how many there are besides."""

from __future__ import annotations

import msgspec
import pytest

from kvmpi.errors import ConfigError
from kvmpi.ps import replay
from kvmpi.ps.barriers import Barriers
from kvmpi.ps.membership import CLOSED, ENDED, Membership, blame, how_it_left
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.shard import Shard
from kvmpi.wire import MAX_HEADER_BYTES, encode
from kvmpi.wire import messages as m


def test_an_error_names_who_began_it_and_not_who_has_lost_others() -> None:
    """All others end with an error that has this one in it, and each of theirs would be in the next."""
    members = Membership(300, in_rounds=True, on_loss="fail")
    members.incarnations = dict.fromkeys(range(300), 1)
    members.gone[237] = how_it_left("SystemExit: no space left")
    for client in (*range(237), *range(238, 290)):
        members.gone[client] = how_it_left(
            f"ClientLostError: round 3 cannot be completed, because {blame(members.gone)}"
        )
    text = blame(members.gone)
    assert text.startswith("client 237 has ended with SystemExit: no space left; 289 more are gone; look at it first")
    assert len(text) < 200


def test_clients_that_have_gone_alike_are_named_together() -> None:
    gone = dict.fromkeys((*range(100, 200), 3, 17), CLOSED)
    assert blame(gone).startswith("client 3, 17, 100 to 199 has closed the store; all clients must make the same calls")
    each = {client: f"has ended with ValueError: shard {client}" for client in range(60)}
    assert blame(each).count("ValueError") == 3
    assert "; 57 more are gone; look at it first" in blame(each)
    assert "1 more is gone" in blame({0: "has ended with ValueError: a", 1: "has ended with ClientLostError: b"})


def test_a_barrier_names_who_was_not_heard_for_longest() -> None:
    barriers = Barriers(300, "fail", lambda: None)

    def silence_of(rank: int) -> float | None:
        return None if rank >= 200 else float(rank % 10)

    barriers.arrive(5, b"r5", m.Barrier(1, 1), 7.0, silence_of)
    wait = barriers.wait(0, silence_of)
    assert wait is not None
    assert wait.whom.startswith(
        "client 200 to 299 (not in the job), client 9 (last heartbeat 9.0 s ago), client 19 (last"
    )
    assert wait.whom.endswith("191 more clients did not reach it")
    assert len(wait.whom) < 400


def test_servers_that_have_not_come_are_named_briefly() -> None:
    state = SchedulerState(64, 20.0)
    state.handle(b"s1", m.Register(1, "server", 1, -1, 64, 1, "h", ["tcp://1"]), 0.0)
    assert [wait.whom for wait in state.waits(3.0)] == ["server 0, 2 to 63 has not come"]


def test_a_view_with_thousands_of_lost_clients_can_be_sent() -> None:
    """Why each is lost is as short as it has to be; what others go by, who is not to be waited for, is told whole."""
    before = SchedulerState(1, 20.0, on_client_loss="wait")
    before.handle(b"s", m.Register(1, "server", 0, -1, 1, 1, "h", ["tcp://1"]), 0.0)
    lost = [m.Lost(rank, 0, 1 << 60, "was lost: \u00e9" + 70 * "x" if rank else ENDED) for rank in range(4000)]
    state = SchedulerState(1, 20.0, on_client_loss="wait")
    state.restore(msgspec.structs.replace(before.save(), lost=lost), 0.0)
    (reply,) = state.handle(b"c", m.Register(2, "client", 4000, 0, 4001, 1, "h", []), 0.0)
    assert isinstance(view := reply.message, m.View)
    assert [(each.rank, each.incarnation) for each in view.lost] == [(rank, 1 << 60) for rank in range(4000)]
    assert view.lost[0].text == ENDED
    assert all(each.text.startswith("was lost: ") for each in view.lost[1:])
    assert len(encode(view)) <= MAX_HEADER_BYTES


def test_a_server_that_is_given_a_resumed_store_knows_the_keys_of_the_snapshot() -> None:
    """Also those of which it has nothing: that another chunking finds no chunk of theirs is an error there, too."""
    given, saved = (Shard(0, 1, "sync", 1, lambda *_: False) for _ in range(2))
    saved.saved = frozenset([7, "7", *(f"{number:0500d}" for number in range(1000))])
    for entry, _ in replay.dump(saved)[1:]:
        assert len(encode(m.Log(0, 1, 1, 1, entry))) <= MAX_HEADER_BYTES
        replay.apply(given, entry, [], keep=False)
    assert given.saved == saved.saved
    given.join(0, 1)
    with pytest.raises(ConfigError, match="chunk 0 of 2 is elsewhere in the snapshot"):
        given.handle(0, b"c", m.Init(1, "7", 0, 2, 3, [6], "float32"), [memoryview(bytes(12))])
