"""train_gpt.py: both algorithms learn, streaming runs in a real job, and it sends as many bytes as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import train_gpt
from jobs import run_job

SMALL = ["--width", "16", "--layers", "2", "--heads", "2", "--context", "16", "--batch-size", "4"]


def lines_of(out: str) -> list[list[str]]:
    """The rows of the table, without what names the worker."""
    rows = [line.removeprefix("[worker 0]").split() for line in out.splitlines()]
    return [row for row in rows if len(row) == 5 and row[0].isdigit()]


@pytest.mark.parametrize("options", ["--interval 10 --fragments 2 --overlap 3", "--algorithm mpi-sgd"])
def test_the_model_learns_alone(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*SMALL, *options.split(), "--steps", "60", "--reports", "3", "--lr", "0.01"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = lines_of(out)
    assert [int(row[0]) for row in rows] == [20, 40, 60]
    assert [int(row[1]) for row in rows] == [20 * 64, 40 * 64, 60 * 64]
    losses = [float(row[3]) for row in rows]
    assert losses[-1] < losses[0] < 5.6  # all bytes alike: log(256) = 5.55
    assert losses[-1] < 4.0


def test_a_byte_depends_on_earlier_ones_only() -> None:
    torch.manual_seed(0)
    model = train_gpt.ByteGPT(width=16, layers=2, heads=2, context=8)
    x = torch.arange(8)[None]
    changed = x.clone()
    changed[0, 5] = 99
    same = (model(x) == model(changed)).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


def test_a_streaming_job_and_its_bytes_and_one_that_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(32, 112)) * 40)
    options = ["--steps", "24", "--interval", "6", "--fragments", "3", "--overlap", "2", "--bfloat16", "--reports", "2"]
    snapshots = f"--snapshot-dir {tmp_path / 'snapshots'} --snapshot-every 4"
    job = run_job(f"-n 2 -c 2 -s 1 {snapshots}", Path(train_gpt.__file__), text, *SMALL, *options)
    assert job.returncode == 0, job.stdout + job.stderr
    assert len(lines_of(job.stdout)) == 2, job.stdout
    count = int(re.search(r"([\d,]+) parameters, 3,200 bytes of text", job.stdout)[1].replace(",", ""))  # type: ignore[index]
    assert count == sum(p.numel() for p in train_gpt.ByteGPT(16, 2, 2, 16).parameters())
    tokens = 24 * 4 * 16
    sent, plain, times = 4 * 2 * count / tokens, 4 * count / 64, 12.0
    assert (
        f"{sent:.3g} bytes a token; gradients after every batch: {plain:.3g}, {times:.3g} times as many" in job.stdout
    )
    options[options.index("24")] = "27"
    job = run_job(f"-n 2 -c 2 -s 1 --resume {tmp_path / 'snapshots'}", Path(train_gpt.__file__), text, *SMALL, *options)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "128 a step; goes on after step 24\n" in job.stdout
    assert [row[0] for row in lines_of(job.stdout)] == ["27"], job.stdout


def test_what_cannot_be_run_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*SMALL, "--interval", "2", "--fragments", "3"]) == 2
    assert "fragments=3 with interval=2" in capsys.readouterr().err
    assert train_gpt.main([str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err
    (tmp_path / "short").write_text("too short")
    with pytest.raises(SystemExit, match="9 bytes of text are too few"):
        train_gpt.main([str(tmp_path / "short")])
