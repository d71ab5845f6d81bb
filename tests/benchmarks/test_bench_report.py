"""The files that users of ``kvmpi bench`` ask for: what cannot be written is refused at once, or named."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANGS_S

from kvmpi.benchmarks import figure12, plot
from kvmpi.benchmarks.report import JsonLines, Report
from kvmpi.errors import KVError

needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")


@pytest.mark.parametrize("option", ["--json /nonexistent/x", "--plot /nonexistent/x.png", "--plot folder.png"])
def test_a_figure_begins_only_if_its_files_can_be_written(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    monkeypatch.delattr(figure12.NetLab, "__enter__")
    assert figure12.main("figure12", ["--model", "1K", *option.split()]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"{option.split()[1]} cannot be written" in said.err


def test_a_folder_is_no_picture(bench, tmp_path):
    (tmp_path / "folder.png").mkdir()
    done = bench("allreduce", "--plot", "folder.png")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvmpi bench: folder.png cannot be written: it is a folder\n"


def test_lines_replace_those_of_the_last_time(tmp_path):
    path = tmp_path / "rows.json"
    for number in range(2):
        lines = JsonLines(str(path))
        lines.write({"number": number})
        lines.close()
    assert json.loads(path.read_text()) == {"number": 1}


class _Full(Report):
    def place(self, row):
        return 0

    def about(self, row):
        return {}

    def sentences(self, found):
        return []

    def subject(self, row):
        return "a sum"

    def draw(self, path, drawn):
        raise OSError(28, "No space left on device")


def test_what_is_wrong_is_said_before_a_picture_fails(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report = _Full(argparse.Namespace(json=None, plot=str(tmp_path / "x.png"), command=""))
    report.rows = [{"size_B": 4, "wrong": 3}]
    with pytest.raises(KVError, match=r"x\.png cannot be written: No space left"):
        report.end()
    assert "WRONG: a sum: 3 elements" in capsys.readouterr().err


@needs_full
def test_a_full_disk_is_named(bench):
    done = bench("ps", "-n", 1, "-s", 1, "--sizes", "4K", "--seconds", "0.05", "--rows", "tcp", "--json", "/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "kvmpi bench: /dev/full cannot be written: No space left on device"


@needs_full
def test_a_table_that_cannot_be_printed_is_a_failure():
    pytest.importorskip("mpi4py")
    words = [sys.executable, "-m", "kvmpi", "bench", "waiting", "-n", "2", "--seconds", "0.05", "--rounds", "1"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "kvmpi bench: standard output: No space left on device"


def test_bars_of_slow_links_and_of_small_arrays_say_how_long(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # words stay words
    times_us = {"ring": 164382.6, "mpi": 2.35, "auto": 1.5e7}
    rows = [{"size_B": 4096, "algo": name, "bw": 1.57 / us, "us": us, "of": 0} for name, us in times_us.items()]
    plot.draw(str(tmp_path / "x.svg"), rows, plot.Picture(
        title="", label="algo", bandwidth="bw", bandwidth_name="", time="us", panel=lambda row: (0,),
        panel_name=lambda row: "", measured="",
    ))  # fmt: skip
    picture = (tmp_path / "x.svg").read_text()
    for words in ("9.55e-06  (164 ms)", "0.668  (0.00235 ms)", "1.05e-07  (15000 ms)"):
        assert f">{words}<" in picture


def test_nothing_is_drawn_of_one_rank(bench, tmp_path):
    pytest.importorskip("mpi4py")
    done = bench("allreduce", "-n", 1, "--sizes", "4K", "--seconds", "0.02", "--algorithms", "ring", "--plot", "x.png")
    assert done.returncode == 0, done.stderr
    assert "# x.png was not drawn: nothing to show" in done.stdout
    assert not (tmp_path / "x.png").exists()
