"""A scheduler and a server inside the process of a program that no launcher started."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from ps_helpers import TIMEOUT_S, deadline, initialise, whole_numbers

from kvmpi.config import Config
from kvmpi.errors import ConfigError
from kvmpi.ps import EmbeddedJob, PsClient, descriptors, embedded
from kvmpi.trace import Recorder

COUNTS = {"empty": 0, "one": 1, "odd": 4097, "large": 5 * (1 << 20) // 4 + 3}


def test_an_embedded_job_serves_one_worker_and_leaves_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    job = EmbeddedJob(Config(timeout_s=TIMEOUT_S))
    folder = Path(job.config.job_dir)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    ps = PsClient(job.config, store=1, mode="sync", client=0, num_clients=1, recorder=Recorder())
    ps.connect(deadline())
    for key, count in COUNTS.items():
        initialise([ps], {key: count})
        out = np.empty(count, "f4")
        ps.pushpull(key, whole_numbers(count, 1), out, deadline()).wait()
        np.testing.assert_array_equal(out, whole_numbers(count, 1))
    ps.close(deadline())
    for _ in range(2):
        job.close()
    assert not folder.exists()
    # pyzmq keeps one thread of its own for as long as the process lives.
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("kvmpi")] == []
    assert capfd.readouterr().err == ""


def test_an_embedded_job_that_cannot_start_says_why() -> None:
    with pytest.raises(ConfigError, match="'no_such_module_at_all'"):
        EmbeddedJob(Config(imports="no_such_module_at_all"))


def test_an_embedded_job_that_would_have_too_few_descriptors_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """libzmq would end the whole program. Where the hard limit allows it, there are more than the program had."""
    few, given = len(os.listdir("/proc/self/fd")) + 20, []
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, limits: given.append(limits))
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (few, few))
    with pytest.raises(ConfigError, match=r"descriptors, and \d+ are left; raise the limit of open files, ulimit -n"):
        EmbeddedJob(Config())
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (few, 4096))
    EmbeddedJob(Config(timeout_s=TIMEOUT_S)).close()
    assert given == [(few + 64, 4096)]


def test_an_embedded_job_whose_settings_cannot_be_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError):
        EmbeddedJob(Config(replicas=1))
    assert not list(tmp_path.iterdir())


def test_an_embedded_job_works_where_the_temporary_folder_has_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    job = EmbeddedJob(Config(timeout_s=TIMEOUT_S))
    job.close()
    assert not os.path.exists(job.config.job_dir)


@pytest.mark.parametrize("refused", ["kvmpi-scheduler", "kvmpi-server"])
def test_a_job_whose_threads_cannot_be_started_leaves_nothing(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below ``ulimit -u``."""
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(embedded, "SHORT", str(tmp_path))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        EmbeddedJob(Config())
    assert not list(tmp_path.iterdir())
    assert not {"kvmpi-scheduler", "kvmpi-server"} & {thread.name for thread in threading.enumerate()}


def test_where_nobody_says_how_many_descriptors_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a chroot without /proc."""

    def no_such_folder(path: str) -> list[str]:
        raise FileNotFoundError(path)

    monkeypatch.setattr(descriptors.os, "listdir", no_such_folder)
    descriptors.allow_embedded()


def test_an_embedded_job_without_a_folder_for_sockets_says_what_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(embedded, "SHORT", str(tmp_path / "read-only"))  # where nothing can be made
    with pytest.raises(ConfigError, match="set TMPDIR to a folder that can be written, with a name of less than 65"):
        EmbeddedJob(Config())
    assert not list(long.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", None)  # Python looks for one, and finds none
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "read-only")])
    with pytest.raises(ConfigError, match=r"sockets \(No usable temporary directory found.*set TMPDIR"):
        EmbeddedJob(Config())


def test_the_end_does_not_wait_for_what_was_for_a_thread_that_has_ended() -> None:
    """Once a second was lost so now and then: the server's last word found the scheduler gone."""
    job = EmbeddedJob(Config(heartbeat_s=0.02))
    scheduler = job._daemons[1]
    scheduler.stop()
    job._threads[0].join(TIMEOUT_S)
    time.sleep(0.3)  # in which the server says several times that it is there
    began_s = time.monotonic()
    job.close()
    assert time.monotonic() - began_s < 0.9
