"""Options that make no sense: refused before anything is started, and the user is told what is expected."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import run_job

from kvmpi.benchmarks import command, ps_mxnet, report, tune
from kvmpi.launchers import processes


@pytest.mark.parametrize(("words", "said"), [
    ("timeline --sizes foo", "--sizes: 'foo' is no size"), ("timeline --rounds 0", "a whole number from 1 on"),
    ("startup --rounds 0", "a whole number from 1 on"), ("startup -n 0", "a whole number from 1 on"),
    ("waiting --rounds 0", "a whole number from 1 on"), ("waiting -n 1", "-n 1: expected numbers from 2 on"),
    ("waiting --seconds 0", "a positive number of seconds"), ("waiting --seconds -1", "a positive number of seconds"),
    ("ps --seconds inf", "a positive number of seconds"), ("allreduce --seconds nan", "a positive number of seconds"),
    ("allreduce --hosts 2 --link 1gbps", "'1gbps' is no speed"), ("train --hosts 2 --link 1gbps", "is no speed"),
    ("allreduce --hosts 201", "1 to 200 hosts"), ("tune -n 1", "a whole number from 2 on"),
    ("train --steps 0", "a whole number from 1 on"),
])  # fmt: skip
def test_mistakes_are_named(
    words: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "start", None)
    with pytest.raises(SystemExit) as ended:
        command.main(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_bad_option_leaves_the_rows_of_the_last_time(bench, tmp_path):
    (tmp_path / "rows.json").write_text("{}\n")
    for name in ("allreduce", "train"):
        done = bench(name, "--hosts", 2, "--link", "1gbps", "--json", "rows.json")
        assert (done.returncode, done.stdout) == (2, "")
    assert (tmp_path / "rows.json").read_text() == "{}\n"


def test_an_empty_size_is_none(bench):
    done = bench("timeline", "--sizes", "4K,,8K", "--rounds", 1)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [["4", "KiB"], ["8", "KiB"]]


@pytest.mark.parametrize("words", [
    "tune --out /nonexistent/x", "train --rows kvmpi --json /nonexistent/x"
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused(bench, words):
    done = bench(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert "/nonexistent/x cannot be written" in done.stderr


@pytest.mark.parametrize("name", ["train", "startup"])
def test_a_benchmark_of_torch_says_that_it_is_not_there(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "start", None)  # nothing is
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert command.main([name]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"kvmpi bench: {name} needs torch; pip install 'kvmpi[torch]'\n")


def test_one_rank_has_nothing_to_tune(tmp_path):
    pytest.importorskip("mpi4py")
    done = run_job("-n 1", Path(tune.__file__), "--out", tmp_path / "x")
    assert done.returncode == 2
    assert "kvmpi bench: it takes two ranks or more to measure between them" in done.stderr


def test_an_mxnet_that_hangs_is_left_out(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    assert ps_mxnet.missing(str(python), timeout_s=0.2) == f"{python}: `import mxnet` takes longer than 0.2 s"


@pytest.mark.parametrize(("words", "said"), [
    ("", "only tune and waiting"), ("train", "20 MB"), ("allreduce", "498 MB"), ("ps", "498 MB"), ("figure12", "498 MB")
])  # fmt: skip
def test_help_says_what_is_true(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([*words.split(), "--help"])
    assert said in " ".join(capsys.readouterr().out.split())
