"""The file of keys, and the private files and folders that the trust of a job rests on."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.wire import Connection, Listener, create_keys, new_context
from kvmpi.wire.keys import new_keys, read_keys
from kvmpi.wire.private import check_folder, create_file

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    create_keys(str(path))
    return path


def test_keys_come_back_as_they_were_made_and_nobody_else_can_read_them(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    umask = os.umask(0)
    try:
        create_keys(str(path))
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = read_keys(str(path))
    secrets = [pair.secret.decode() for pair in (keys.listener, keys.member)]
    content = json.loads(path.read_text())
    assert [content[name]["secret"] for name in ("listener", "member")] == secrets
    assert not [secret for secret in secrets if secret in f"{keys!r} {keys}"]


def test_every_job_has_keys_of_its_own() -> None:
    made = [new_keys() for _ in range(3)]
    assert len({pair.secret for keys in made for pair in (keys.listener, keys.member)}) == 6


def test_a_file_that_is_there_is_kept(keys: Path) -> None:
    before = keys.read_bytes()
    create_keys(str(keys))
    assert keys.read_bytes() == before


def _damage(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _flip(path: Path) -> None:
    content = json.loads(path.read_text())
    content["member"]["public"] = content["listener"]["public"]
    path.write_text(json.dumps(content))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "readable by the group": (lambda path: path.chmod(0o640), "mode 0640, others may use it; chmod 600"),
    "writable by all": (lambda path: path.chmod(0o602), "mode 0602, others may use it"),
    "empty": (lambda path: path.write_bytes(b""), "is not a file of keys"),
    "half": (lambda path: path.write_bytes(path.read_bytes()[:100]), "is not a file of keys"),
    "noise": (lambda path: path.write_bytes(bytes(range(256))), "is not a file of keys"),
    "large": (lambda path: path.write_bytes(path.read_bytes() + b" " * 5000), "more than 4096 bytes"),
    "newer": (lambda path: _damage(path, kvmpi_keys=2), "keys of version 2"),
    "more": (lambda path: _damage(path, extra=1), "is not a file of keys"),
    "no pair": (_flip, "its member keys are not a pair"),
    "short": (lambda path: _damage(path, member={"public": "x", "secret": "y"}), "its member keys are not a pair"),
    "strange": (lambda path: _damage(path, member={"public": "\u20ac" * 40, "secret": "~" * 40}), "not a pair"),
    "missing": (lambda path: path.unlink(), "No such file"),
    "link": (lambda path: path.rename(path.with_name("x")) and path.symlink_to("x"), "cannot read"),
    "folder": (lambda path: (path.unlink(), path.mkdir(0o700)), "not a regular file"),
    "fifo": (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "not a regular file"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_trusted_is_refused(keys: Path, name: str) -> None:
    damage, text = BROKEN[name]
    damage(keys)
    with pytest.raises(ConfigError, match=text) as caught:
        read_keys(str(keys))
    assert str(keys) in str(caught.value)
    if keys.exists():  # also not taken for one that another scheduler has left
        with pytest.raises(ConfigError, match=text):
            create_keys(str(keys))


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file or directory"):
        create_keys(str(tmp_path / "nowhere" / "keys"))
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    assert not create_file(str(tmp_path / "dangling"), b"x")
    assert not (tmp_path / "elsewhere").exists()


@needs_root
def test_a_file_or_folder_of_somebody_else_is_refused(keys: Path, tmp_path: Path) -> None:
    os.chown(keys, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}, not to user 0"):
        read_keys(str(keys))
    folder = tmp_path / "folder"
    folder.mkdir(0o700)
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        check_folder(str(folder))


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o770, 0o777, 0o704])
def test_sockets_lie_only_in_a_folder_that_nobody_else_can_use(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    context = new_context()
    try:
        listener = Listener(context, 1000)
        folder.chmod(mode)
        with pytest.raises(ConfigError, match=f"mode 0{mode:o}, others may use it; chmod 700"):
            listener.bind_ipc(str(folder / "s"))
        with pytest.raises(ConfigError, match=f"mode 0{mode:o}"):
            Connection(context, f"ipc://{folder}/s", 1000)
        assert not list(folder.iterdir())
        folder.chmod(0o700)
        listener.bind_ipc(str(folder / "s"))
        Connection(context, f"ipc://{folder}/s", 1000)
    finally:
        context.destroy(linger=0)


def test_a_folder_that_could_be_exchanged_is_refused(tmp_path: Path) -> None:
    real, link, open_to_all = tmp_path / "real", tmp_path / "link", tmp_path / "open"
    real.mkdir(0o700)
    link.symlink_to(real)
    with pytest.raises(ConfigError, match="symbolic links are not followed"):
        check_folder(str(link))
    open_to_all.mkdir()
    inner = open_to_all / "inner"
    inner.mkdir(0o700)
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match=r"could be replaced by others: .*/open has mode 0777"):
        check_folder(str(inner))
    open_to_all.chmod(0o1777)
    check_folder(str(inner))
    with pytest.raises(ConfigError, match="No such file"):
        check_folder(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("endpoint", ["nonsense", "ipc://@abstract", "ipc://relative/s", "inproc://x", "ipc://", ""])
def test_only_tcp_and_sockets_in_folders_are_connected_to(endpoint: str) -> None:
    context = new_context(Config(security="off"))
    try:
        with pytest.raises(ConfigError, match="expected tcp://HOST:PORT or ipc:///PATH"):
            Connection(context, endpoint, 1000)
    finally:
        context.destroy(linger=0)
