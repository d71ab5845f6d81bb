"""Files of snapshots: what is damaged is noticed, what cannot be written is said, and the job goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from jobs import wait_for
from msgspec import structs
from ps_helpers import TIMEOUT_S, Machine, deadline, initialise, whole_numbers

from kvmpi import optim
from kvmpi.config import Config
from kvmpi.errors import ConfigError, KVError
from kvmpi.ps import PsClient
from kvmpi.ps import snapshot_files as files
from kvmpi.ps.daemon import SchedulerDaemon
from kvmpi.ps.durability import SnapshotKeeper, SnapshotWriter, load_parts
from kvmpi.ps.scheduler import SchedulerState
from kvmpi.ps.server import ServerState
from kvmpi.ps.snapshot_book import Manifest, SnapshotBook
from kvmpi.ps.snapshots import ChunkCopy, PartCopy, StoreCopy
from kvmpi.wire import entries
from kvmpi.wire import messages as m

RULE = entries.RuleInForce(0, 3, "sgd", {"lr": 0.1, "momentum": float("inf")})
PARTS = 4
StartJob = Callable[..., Any]  # see conftest.ThreadJob


def copy_of(number: int, part: int, key: Any = "k") -> PartCopy:
    arrays = {"value": np.full(100 + part, number, "f2"), "momentum": np.arange(100 + part, dtype="f4")}
    chunk = ChunkCopy(key, part, PARTS, 100 + part, [4, 100], "float16", number, 3, RULE, arrays)
    empty = ChunkCopy(17, 0, 1, 0, [0], "bfloat16", 0, 0, RULE, {"value": np.empty(0, "u2")})
    return {1: StoreCopy("sync", 2, number, RULE, [chunk, empty]), 2: StoreCopy("async", 1, 0, RULE)}


def write(directory: Path, number: int) -> None:
    made = [files.write_part(str(directory), number, part, copy_of(number, part)) for part in range(PARTS)]
    manifest = Manifest(number, tuple((one.nbytes, one.checksum) for one in made), {1: number})
    files.write_manifest(str(directory), manifest)


def choose(directory: Path, parts: int = PARTS) -> tuple[int, list[str]]:
    """The number that is chosen, and the complaints."""
    said: list[str] = []
    return files.choose(str(directory), parts, PARTS, said.append).number, said


def test_a_part_comes_back_as_it_was(tmp_path: Path) -> None:
    write(tmp_path, 20)
    for part in range(PARTS):
        found, expected = files.read_part(str(tmp_path), 20, part), copy_of(20, part)
        assert found.keys() == expected.keys()
        for store, saved in expected.items():
            for mine, its in zip(found[store].chunks, saved.chunks, strict=True):
                for name, array in its.arrays.items():
                    assert mine.arrays[name].dtype == array.dtype
                    assert mine.arrays[name].tobytes() == array.tobytes()
                assert structs.replace(mine, arrays={}) == structs.replace(its, arrays={})
            assert structs.replace(found[store], chunks=[]) == structs.replace(saved, chunks=[])
    assert files.read_keys(str(tmp_path), 20, PARTS) == {1: frozenset({"k", 17}), 2: frozenset()}
    part_of_k = {1: frozenset({17}), 2: frozenset()}
    assert files.read_keys(str(tmp_path), 20, PARTS - 1) == part_of_k, "a key of which a chunk is missing is none"
    with safetensors.safe_open(tmp_path / "20" / "part-0.safetensors", "numpy") as file:  # anyone can read it
        assert file.get_tensor("1/0/value").tolist() == [20.0] * 100
    assert [path.name for path in tmp_path.rglob(".*")] == []  # nothing temporary is left


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def flip_number(path: Path) -> None:
    path.write_text(path.read_text().replace('\\"number\\": 30', '\\"number\\": 31'))


@pytest.mark.parametrize(("name", "damage", "said"), [
    ("part-2.safetensors", truncate, "bytes of"), ("part-2.safetensors", flip, "checksum"),
    ("part-2.safetensors", Path.unlink, "No such file"), ("snapshot.json", Path.unlink, "not completed"),
    ("snapshot.json", truncate, "damaged"), ("snapshot.json", flip_number, "checksum"),
    ("snapshot.json", lambda path: path.write_text("[]"), "damaged"),
    ("snapshot.json", lambda path: path.write_bytes(b"\xff"), "damaged"),
])  # fmt: skip
def test_the_one_before_a_damaged_one_is_taken(
    tmp_path: Path, name: str, damage: Callable[[Path], None], said: str
) -> None:
    for number in (9, 10, 30):
        write(tmp_path, number)
    assert choose(tmp_path) == (30, [])
    damage(tmp_path / "30" / name)
    number, complaints = choose(tmp_path)
    assert number == 10
    (complaint,) = complaints
    assert "snapshot 30" in complaint
    assert str(tmp_path / "30" / name) in complaint
    assert said in complaint


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        choose(tmp_path / "no")
    with pytest.raises(ConfigError, match="the folder has none"):
        choose(tmp_path)
    write(tmp_path, 5)
    (tmp_path / "5" / "snapshot.json").unlink()
    with pytest.raises(ConfigError, match=r"no usable snapshot; snapshot 5: .*not completed"):
        choose(tmp_path)
    write(tmp_path, 6)
    with pytest.raises(ConfigError, match=rf"it is one itself; name the folder of all of them, {tmp_path}, .* is 6"):
        choose(tmp_path / "6")
    with pytest.raises(ConfigError, match=r"snapshot 6 is of a job with 1 servers, this one has 2; .* -s 1"):
        choose(tmp_path, 2 * PARTS)


def test_a_folder_that_cannot_be_written_or_is_anothers(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        files.prepare(str(tmp_path / "file" / "below"), "", 0)
    write(tmp_path / "mine", 5)
    with pytest.raises(ConfigError, match="snapshots of another job"):
        files.prepare(str(tmp_path / "mine"), "", 0)
    with pytest.raises(ConfigError, match="snapshots of another job"):
        files.prepare(str(tmp_path / "mine"), str(tmp_path), 5)
    files.prepare(str(tmp_path / "mine"), str(tmp_path / "mine" / ".." / "mine"), 5)
    (tmp_path / "mine" / "5" / "snapshot.json").unlink()  # a job that came to nothing
    files.prepare(str(tmp_path / "mine"), "", 0)
    assert list((tmp_path / "mine").iterdir()) == []
    files.prepare(str(tmp_path / "new" / "deep"), "", 0)
    assert list((tmp_path / "new" / "deep").iterdir()) == []


def test_two_jobs_at_once_do_not_write_to_one_folder(tmp_path: Path) -> None:
    """Neither has snapshots when the other begins, and each would delete those of the other."""
    config = Config(num_servers=1, snapshot_dir=str(tmp_path / "new" / "deep"), snapshot_every=3)
    first = SchedulerDaemon(config)
    with pytest.raises(ConfigError, match=r"another job, which still runs, writes its snapshots to .*deep; wait"):
        SchedulerDaemon(config)
    with pytest.raises(ConfigError, match="another job"):
        files.Claim(config.snapshot_dir)
    del first
    files.Claim(config.snapshot_dir).release()
    assert list((tmp_path / "new" / "deep").iterdir()) == []
    write(tmp_path / "new" / "deep", 5)
    for _ in range(2):  # who is refused keeps nothing
        with pytest.raises(ConfigError, match="snapshots of another job"):
            SchedulerDaemon(config)


def test_numbers_that_come_again_are_free(tmp_path: Path) -> None:
    """A job of an asynchronous store goes on from the last usable snapshot, and gets to other values."""
    for number in (5, 10, 15, 20):
        write(tmp_path, number)
    truncate(tmp_path / "15" / "part-1.safetensors")
    (tmp_path / "20" / "snapshot.json").unlink()
    number, _ = choose(tmp_path)
    assert number == 10
    files.prepare(str(tmp_path), str(tmp_path), number)
    assert files.numbers(str(tmp_path)) == [5, 10]
    assert (tmp_path / "15.unusable" / "snapshot.json").exists(), "somebody may want to look at it"
    for number in (15, 20):
        files.write_part(str(tmp_path), number, 0, copy_of(number + 1, 0))
    files.prepare(str(tmp_path), str(tmp_path), 10)
    assert files.numbers(str(tmp_path)) == [5, 10]


# ---- in a job


def train(client: PsClient, first: int, last: int) -> np.ndarray:
    """Rounds ``first`` to ``last``, one after the other; the value then."""
    out = np.empty(1000, "f4")
    for step in range(first, last):
        client.push("k", whole_numbers(1000, step), deadline()).wait(TIMEOUT_S)
        client.pull("k", out, deadline()).wait(TIMEOUT_S)
    client.pull("k", out, deadline()).wait(TIMEOUT_S)
    return out


def complete(folder: Path) -> list[int]:
    return [number for number in files.numbers(str(folder)) if (folder / str(number) / "snapshot.json").exists()]


def test_a_full_disk_costs_a_snapshot_and_nothing_else(
    start_job: StartJob,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "snapshots"
    job = start_job(2, snapshot_dir=str(folder), snapshot_every=2)
    (client,) = job.connect(1)
    initialise([client], {"k": 1000}, optim.SGD(lr=1.0))
    train(client, 0, 2)
    wait_for(lambda: complete(folder) == [2], "the first snapshot")

    full = threading.Event()
    real = files.write_part

    def write_part(directory: str, number: int, part: int, copy: PartCopy) -> Any:
        if number == 4 and part == 5:
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device", f"{directory}/4/part-5.safetensors")
        return real(directory, number, part, copy)

    monkeypatch.setattr(files, "write_part", write_part)
    caplog.set_level(logging.ERROR)
    train(client, 2, 4)
    assert full.wait(TIMEOUT_S)
    wait_for(lambda: caplog.records, "the log line")
    assert "server 1: snapshot 4" in caplog.text
    assert "part-5.safetensors: No space left on device" in caplog.text
    steps = 4

    def train_on() -> bool:
        """One round more, which is left out if servers are still busy; whether a snapshot has been completed."""
        nonlocal steps
        train(client, steps, steps + 1)
        steps += 1
        return complete(folder) != [2]

    wait_for(train_on, "another snapshot")
    wait_for(lambda: 4 not in files.numbers(str(folder)), "the end of what was left of the second")
    last = train(client, steps, steps + 1)
    job.stop_daemons()
    number, complaints = choose(folder, 8)
    assert number > 4
    assert all("not completed" in complaint for complaint in complaints)  # the job may have ended in one

    again = start_job(2, snapshot_dir=str(folder), resume=str(folder), snapshot_every=2)
    (client,) = again.connect(1)
    assert client.resumed_step == number
    initialise([client], {"k": 1000}, optim.SGD(lr=1.0))
    np.testing.assert_array_equal(train(client, number, steps + 1), last)


def test_a_slow_disk_holds_nobody_up(start_job: StartJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "snapshots"
    job = start_job(1, snapshot_dir=str(folder), snapshot_every=2)
    (client,) = job.connect(1)
    initialise([client], {"k": 1000}, optim.SGD(lr=1.0))
    begun, may_go_on = threading.Event(), threading.Event()
    real = files.write_part

    def write_part(*args: Any) -> Any:
        begun.set()
        assert may_go_on.wait(TIMEOUT_S)
        return real(*args)

    monkeypatch.setattr(files, "write_part", write_part)
    train(client, 0, 9)
    assert begun.wait(TIMEOUT_S)
    assert complete(folder) == []
    may_go_on.set()
    wait_for(lambda: complete(folder) == [2], "the snapshot that was being written")


@pytest.mark.parametrize("links", [True, False])
def test_of_two_servers_that_write_one_part_the_first_has_written_it(tmp_path, monkeypatch, links: bool) -> None:
    """The manifest is about what that one has said."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    first = files.write_part(str(tmp_path), 5, 0, copy_of(5, 0))
    assert files.write_part(str(tmp_path), 5, 0, copy_of(5, 0)) == first, "the same bits are no harm"
    with pytest.raises(FileExistsError, match="part-0"):
        files.write_part(str(tmp_path), 5, 0, copy_of(6, 0))
    files.check(str(tmp_path), Manifest(5, ((first.nbytes, first.checksum),), {}))
    assert os.listdir(tmp_path / "5") == ["part-0.safetensors"]


def test_what_is_left_of_a_snapshot_that_was_given_up_goes_before_the_next(tmp_path: Path) -> None:
    state = SchedulerState(1, 20.0, book=SnapshotBook(PARTS))
    keeper = SnapshotKeeper(Config(num_servers=1, snapshot_dir=str(tmp_path), snapshot_every=5), state, lambda: None)
    files.write_part(str(tmp_path), 5, 0, copy_of(5, 0))
    for number, stage in ((5, "begun"), (5, "dropped")):
        state.book.hear(m.SnapshotNews(number, stage))
    keeper.step()
    assert files.numbers(str(tmp_path)) == [5]
    state.book.hear(m.SnapshotNews(10, "begun"))
    keeper.step()
    wait_for(lambda: files.numbers(str(tmp_path)) == [], "the end of the first")
    keeper.close()


@pytest.mark.parametrize(("resumed", "left"), [(2, [2]), (4, [2, 4]), (None, [2, 4, 6]), (3, [2, 4, 6])])
def test_a_job_removes_what_it_could_not_go_on_from(tmp_path: Path, resumed: int | None, left: list[int]) -> None:
    """It is damaged; kept as one of the last two, it would make the good one be deleted."""
    for number in (2, 4, 6):
        files.write_part(str(tmp_path), number, 0, copy_of(number, 0))
    book = SnapshotBook(PARTS, resumed=None if resumed is None else Manifest(resumed, (), {}))
    config = Config(num_servers=1, snapshot_dir=str(tmp_path), snapshot_every=2)
    keeper = SnapshotKeeper(config, SchedulerState(1, 20.0, book=book), lambda: None)
    keeper.begin()
    assert files.numbers(str(tmp_path)) == left
    keeper.close()


def test_a_scheduler_that_is_started_again_keeps_the_last_two(tmp_path: Path) -> None:
    """Of which the first was completed by the one before it: the second may turn out to be damaged."""
    for number in (2, 4, 6):
        files.write_part(str(tmp_path), number, 0, copy_of(number, 0))
    for number in (2, 4):
        files.write_manifest(str(tmp_path), Manifest(number, ((1, 1),) * PARTS, {}))
    state = SchedulerState(1, 20.0, book=SnapshotBook(PARTS))
    keeper = SnapshotKeeper(Config(num_servers=1, snapshot_dir=str(tmp_path), snapshot_every=2), state, lambda: None)
    keeper.recall()
    state.complete.append(Manifest(6, ((1, 1),) * PARTS, {}))
    keeper.step()
    wait_for(lambda: keeper.step() or files.numbers(str(tmp_path)) == [4, 6], "the end of the oldest")
    assert files.complete(str(tmp_path)) == [4, 6]
    keeper.close()


def test_a_server_that_is_started_again_reads_nothing(tmp_path: Path) -> None:
    """Others give it all it needs, and the snapshot that the job began with may have been deleted by now."""
    config = Config(num_servers=2, resume=str(tmp_path / "nothing"))
    chains = [m.Chain(3, [0], joiner=1), m.Chain(2, [0])]
    view = m.View(5, 1, chains, [m.ServerInfo(0, 1, "host", []), m.ServerInfo(1, 9, "host", [])], [], snapshot=7)
    state = ServerState(1)
    load_parts(config, state, 1, view, lambda: None)
    state.adopt(view)
    assert list(state.parts) == [0]


def test_what_another_job_has_deleted_meanwhile_is_told_from_what_is_damaged(tmp_path: Path) -> None:
    """One that goes on from the folder in which another still writes, which keeps its last two."""
    write(tmp_path, 4)
    (tmp_path / "4" / "part-1.safetensors").unlink()
    words = r"snapshot 4: .*/4/part-1.safetensors is no longer there: another job .* start again"
    with pytest.raises(KVError, match=words):
        files.read_part(str(tmp_path), 4, 1)
    with pytest.raises(KVError, match=words):
        files.read_keys(str(tmp_path), 4, 2)


def test_what_is_written_is_let_go() -> None:
    done = threading.Event()
    background = files.Background("test", done.set)
    copy = np.ones(5)
    gone = weakref.ref(copy)
    seen: list[Any] = []
    background.start(lambda copy=copy: copy.sum(), lambda result, copy=copy: seen.append((result, copy.size)))  # type: ignore[misc]
    del copy
    assert background.busy
    assert done.wait(TIMEOUT_S)
    background.finish()
    assert seen == [(5.0, 5)]
    assert not background.busy
    wait_for(lambda: gone() is None, "the end of the copy")  # the thread waits for the next
    background.close()


def test_a_scheduler_says_which_file_is_damaged(
    start_job: StartJob, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (3, 4):
        write(tmp_path / "snapshots", number)
    flip(tmp_path / "snapshots" / "4" / "part-1.safetensors")
    config = replace(start_job(1).config, job_dir="")  # not the next scheduler of that job
    SchedulerDaemon(replace(config, resume=str(tmp_path / "snapshots")))
    assert "4/part-1.safetensors is damaged" in caplog.text
    flip(tmp_path / "snapshots" / "3" / "part-1.safetensors")
    with pytest.raises(ConfigError, match="no usable snapshot"):
        SchedulerDaemon(replace(config, resume=str(tmp_path / "snapshots")))


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    write(tmp_path, 7)
    content = json.loads(json.loads((tmp_path / "7" / "snapshot.json").read_text())["content"])
    assert content["number"] == 7
    assert content["steps"] == {"1": 7}


class AtOnce:
    """What writes beside a server, without a thread."""

    def __init__(self) -> None:
        self.results: list[tuple[Callable[[Any], None], Any]] = []

    @property
    def busy(self) -> bool:
        return bool(self.results)

    def start(self, run: Callable[[], Any], then: Callable[[Any], None]) -> None:
        try:
            self.results.append((then, run()))
        except OSError as error:
            self.results.append((then, error))

    def finish(self) -> None:
        while self.results:
            then, result = self.results.pop(0)
            then(result)

    def close(self) -> None:
        pass


def written_by(machine: Machine, directory: Path) -> list[m.SnapshotNews]:
    """What a server says when it writes what it has copied."""
    how: Any = {"beside": lambda _: AtOnce()}
    config = Config(num_servers=1, snapshot_dir=str(directory), snapshot_seconds=1.0)
    writer = SnapshotWriter(config, machine.state, lambda: None, **how)
    return [news for news in [*writer.step(), *writer.step()] if isinstance(news, m.SnapshotNews)]


def test_a_server_that_all_stores_have_left_writes_no_files(tmp_path: Path) -> None:
    """They would be in nobody's snapshot, and the next job would tell of one that cannot be used."""
    machine = Machine("sync", 1, every=0)
    machine.init_all("k", np.zeros(3, "f4"))
    machine.send(0, m.Bye, 1)
    assert machine.state.snapshots is not None
    machine.state.snapshots.begin(5, ahead=True)
    assert [(one.stage, one.stores) for one in written_by(machine, tmp_path)] == [("begun", []), ("written", [])]
    assert list(tmp_path.iterdir()) == []


def test_what_the_scheduler_has_removed_while_it_was_written_is_no_error_of_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine("async", 1, every=0)
    machine.init_all("k", np.zeros(3, "f4"))
    assert machine.state.snapshots is not None
    removed: list[str] = []
    monkeypatch.setattr(files.os, "makedirs", lambda folder, exist_ok: removed.append(folder))
    machine.state.snapshots.begin(5)
    assert [one.stage for one in written_by(machine, tmp_path)] == ["begun", "dropped"]
    assert removed == [str(tmp_path / "5")]
    assert caplog.records == []


def test_a_job_that_ends_waits_for_what_is_written_and_no_longer_than_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how: Any = {"beside": lambda _: AtOnce()}
    config = Config(num_servers=1, snapshot_dir=str(tmp_path), snapshot_every=2)
    machine = Machine("sync", 1, every=2)
    for key in ("k", "late"):
        machine.init_all(key, np.zeros(3, "f4"))
    state = SchedulerState(1, 20.0, book=SnapshotBook(1))
    writer = SnapshotWriter(config, machine.state, lambda: None, **how)
    keeper = SnapshotKeeper(config, state, lambda: None, **how)

    def tell() -> None:
        for news in writer.step():
            _, manifest = state.book.hear(news)  # type: ignore[arg-type]
            state.complete += [] if manifest is None else [manifest]

    def push_all(step: int, *keys: str) -> None:
        for key in keys:
            machine.push(0, key, step, np.ones(3, "f4"))
        tell()

    for step in (1, 2):
        push_all(step, "k", "late")
    assert writer.busy(100.0)
    assert keeper.busy(100.0)
    assert writer.busy(102.9)
    assert not caplog.messages
    assert not writer.busy(103.1), "the launcher would end it"
    assert not keeper.busy(103.1)
    (said,) = caplog.messages
    assert said.startswith(f"server 0: snapshot 2: not written to {tmp_path} 3 s after the end of the job")
    caplog.clear()
    tell()
    assert not writer.busy(100.0)
    assert keeper.busy(100.0), "its manifest is still to be written"
    keeper.step()
    assert keeper.busy(100.0), "and still to be known"
    for _ in range(2):
        keeper.step()
    assert files.complete(str(tmp_path)) == [2]
    assert not keeper.busy(100.0)
    assert not keeper.busy(103.1)
    assert not caplog.messages, "all has been written"


def test_what_is_half_copied_when_a_server_ends_holds_nobody_back(tmp_path: Path) -> None:
    machine = Machine("sync", 1, every=2)
    for key in ("k", "late"):
        machine.init_all(key, np.zeros(3, "f4"))
    writer = SnapshotWriter(Config(num_servers=1, snapshot_dir=str(tmp_path), snapshot_every=2), machine.state, id)
    for step in (1, 2):
        machine.push(0, "k", step, np.ones(3, "f4"))
    assert [news.stage for news in writer.step()] == ["begun"]  # type: ignore[attr-defined]
    assert not writer.busy(100.0)
    assert [news.stage for news in writer.step()] == ["dropped"]  # type: ignore[attr-defined]


def test_a_snapshot_whose_manifest_cannot_be_written_takes_no_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 4, 6):
        files.write_part(str(tmp_path), number, 0, copy_of(number, 0))
        if number < 6:
            files.write_manifest(str(tmp_path), Manifest(number, ((1, 1),) * PARTS, {}))

    def fill(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "manifest.json")

    monkeypatch.setattr(files, "write_manifest", fill)
    state, how = SchedulerState(1, 20.0, book=SnapshotBook(PARTS)), {"beside": lambda _: AtOnce()}
    config = Config(num_servers=1, snapshot_dir=str(tmp_path), snapshot_every=2)
    keeper = SnapshotKeeper(config, state, lambda: None, **how)  # type: ignore[arg-type]
    keeper.recall()
    state.complete.append(Manifest(6, ((1, 1),) * PARTS, {}))
    for _ in range(3):
        keeper.step()
    assert state.book.complete == [2, 4]
    state.book.hear(m.SnapshotNews(8, "begun"))
    keeper.step()
    assert files.numbers(str(tmp_path)) == [2, 4], "what is left of it makes room for the next"
