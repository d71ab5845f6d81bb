"""Files that are replaced as a whole: their mode, what links lead to, and what processes that were killed have left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors

from kvmpi import files, tensor_files
from kvmpi.files import replacing


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def save(path: Path, text: str = "new", *, over: bool = True) -> None:
    with replacing(str(path), over=over) as temporary:
        Path(temporary).write_text(text)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_what_the_umask_leaves_and_one_that_was_there_its_own_mode(tmp_path: Path, umask: None) -> None:
    save(tmp_path / "new")
    assert mode(tmp_path / "new") == 0o640
    (tmp_path / "old").write_text("old")
    for given in (0o600, 0o664, 0o444):
        (tmp_path / "old").chmod(given)
        save(tmp_path / "old", f"{given}")
        assert (mode(tmp_path / "old"), (tmp_path / "old").read_text()) == (given, f"{given}")
    save(tmp_path / "once", over=False)
    assert mode(tmp_path / "once") == 0o640
    assert sorted(os.listdir(tmp_path)) == ["new", "old", "once"]


def test_who_could_not_read_the_file_cannot_while_it_is_written(tmp_path: Path, umask: None) -> None:
    seen = {}
    for given in (None, 0o600, 0o664, 0o444, 0o200):
        if given is not None:
            (tmp_path / "file").touch()
            (tmp_path / "file").chmod(given)
        with replacing(str(tmp_path / "file")) as temporary:
            seen[given] = mode(Path(temporary))
    assert seen == {None: 0o640, 0o600: 0o600, 0o664: 0o640, 0o444: 0o640, 0o200: 0o600}


def test_files_that_their_owner_may_not_read_or_write_are_replaced() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # where others may look, other than in tmp_path
        folder, user = Path(name), os.geteuid()
        try:
            if user == 0:  # who may do all
                os.chown(folder, 65534, -1)
                os.seteuid(65534)
            for given in (0o000, 0o200, 0o444):
                (folder / "file").touch(mode=0o600)
                (folder / "file").chmod(given)
                save(folder / "file")
                assert mode(folder / "file") == given
                assert os.listdir(folder) == ["file"]
                (folder / "file").unlink()
        finally:
            os.seteuid(user)


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("other-link")
    (tmp_path / "other-link").symlink_to("elsewhere/file")
    for text in ("first", "second"):  # which is not there at first
        save(tmp_path / "link", text)
        assert (tmp_path / "elsewhere" / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "other-link").is_symlink()
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name, said in (("pipe", "no regular file"), ("device", "no regular file"), ("folder", "Is a directory")):
        with pytest.raises(OSError, match=said):
            save(tmp_path / name)
    ends = os.pipe()
    try:
        with pytest.raises(OSError, match=f"no regular file.*give the name of one: '/dev/fd/{ends[1]}'"):
            save(Path(f"/dev/fd/{ends[1]}"))
    finally:
        for end in ends:
            os.close(end)
    for path in (f"{tmp_path}/none/", ""):
        with pytest.raises(IsADirectoryError), replacing(path):
            pass
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(os.listdir(tmp_path)) == ["device", "folder", "pipe"]


def test_a_block_that_raises_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")

    def write() -> None:
        with replacing(str(tmp_path / "file")) as temporary:
            Path(temporary).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


#: Writes to the file that is named, for ever.
ENDLESS = """
import sys
from kvmpi.files import replacing
with replacing(sys.argv[1]) as temporary, open(temporary, "w", buffering=1) as file:
    print(temporary, flush=True)
    while True:
        file.write("half\\n")
"""


def writing(path: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_process_that_was_killed_has_left_is_gone_after_the_next_save(tmp_path: Path) -> None:
    """That of one that lives, of another file, and what is merely called alike, stay."""
    path, long = tmp_path / "saved", tmp_path / ("n" * 250)
    (tmp_path / ".kvmpi-saved-notes").write_text("mine")
    for name in (path, long):
        for _ in range(4):
            process, left = writing(name)
            process.send_signal(signal.SIGKILL)
            process.wait(20)
            assert left.exists()
    alive, its = writing(path)
    other, others = writing(tmp_path / "saved-too")
    try:
        assert [p.poll() for p in (alive, other)] == [None, None]
        hidden = [name for name in os.listdir(tmp_path) if name.startswith(".kvmpi-n")]
        assert len(hidden) == 1, "each has removed what the one before had left"
        save(path)
        save(long)
        found = sorted(os.listdir(tmp_path))
        assert found == sorted([".kvmpi-saved-notes", its.name, others.name, "saved", long.name])
    finally:
        for process in (alive, other):
            process.kill()
            process.wait(20)


def test_a_file_that_was_taken_for_one_that_was_left_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its being held another process may look."""
    hold, seen = files._hold, list[str]()

    def late(handle: int) -> bool | None:
        if not seen:
            seen.append(os.readlink(f"/proc/self/fd/{handle}"))
            os.unlink(seen[0])
        return hold(handle)

    monkeypatch.setattr(files, "_hold", late)
    with replacing(str(tmp_path / "file")) as temporary:
        assert [os.path.exists(name) for name in (*seen, temporary)] == [False, True]
    assert os.listdir(tmp_path) == ["file"]


def test_where_there_are_no_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process, left = writing(tmp_path / "saved")
    process.kill()
    process.wait(20)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    save(tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == [left.name, "saved"]


def test_many_that_save_the_same_file_leave_one_of_theirs(tmp_path: Path) -> None:
    path, wrong = tmp_path / "saved", list[BaseException]()

    def run(number: int) -> None:
        try:
            for _ in range(20):
                save(path, f"{number}" * 10_000)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert os.listdir(tmp_path) == ["saved"]
    assert path.read_text() in [f"{number}" * 10_000 for number in range(4)]


def test_tensors_are_read_by_safetensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors = {
        f"{name}/{count}": (rng.standard_normal(count) * 100).astype(name)
        for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16")
        for count in (0, 1, 3, 700_001 if name == "float32" else 7)
    }
    with open(tmp_path / "file", "wb") as file:
        nbytes, _ = tensor_files.write(file, tensors, {"about": 'ä "quoted" text'})
    assert (tmp_path / "file").stat().st_size == nbytes
    with safetensors.safe_open(tmp_path / "file", framework="numpy") as found:
        assert found.metadata() == {"about": 'ä "quoted" text'}
        assert set(found.keys()) == set(tensors)
        for name, expected in tensors.items():
            array = found.get_tensor(name)
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("more_bytes", [0, 1])
def test_what_safetensors_would_not_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more_bytes: int
) -> None:
    """As of very many keys, or of very small chunks: what there is to say of them may have a certain length."""
    length = tensor_files.MAX_HEADER_BYTES + more_bytes
    with open(tmp_path / "file", "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length)
    with pytest.raises(safetensors.SafetensorError) as refusal:
        safetensors.safe_open(tmp_path / "file", framework="numpy")
    assert ("too large" in str(refusal.value)) == bool(more_bytes)

    tensors, written = {f"{i}/value": np.zeros(1) for i in range(100)}, io.BytesIO()
    tensor_files.write(written, tensors, {})
    header_bytes = int.from_bytes(written.getvalue()[:8], "little")
    monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", header_bytes - more_bytes)
    with pytest.raises(OSError, match="fewer and larger keys") if more_bytes else contextlib.nullcontext():
        tensor_files.write(written, tensors, {})
