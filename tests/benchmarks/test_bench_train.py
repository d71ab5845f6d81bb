"""``kvmpi bench train``: every way of training ends with the same weights, and the table says what it cost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jobs import run_job

from kvmpi.benchmarks.train_models import MODELS


def test_all_ways_train_alike(bench, tmp_path):
    done = bench(
        "train",
        "--synthetic",
        "--model",
        "resnet20",
        "--rounds",
        1,
        "--steps",
        1,
        "--batch-size",
        1,
        "--rows",
        "alone,kvmpi,kvmpi:timeline,kvmpi:bf16,kvmpi:on,kvmpi:off,weights,weights:off,trainer,ddp:gloo",
        "--json",
        "rows.json",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (traced,) = [line for line in done.stdout.splitlines() if line.startswith("# resnet20: ")]
    spans = re.fullmatch(r"# resnet20: (\d+) spans a step of rank 0, [+-]\d+\.\d\d % \(median .*", traced)[1]
    assert int(spans) > 0, "it was on"
    header, *lines = [line.split() for line in done.stdout.splitlines() if line != traced]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    ours = ["kvmpi", "kvmpi:timeline", "kvmpi:bf16", "kvmpi:on", "kvmpi:off", "weights", "weights:off"]
    names = ["alone", *ours, "trainer", "ddp:gloo"]
    assert [row["row"] for row in rows] == names
    assert {(row["model"], row["ranks"], row["wrong"]) for row in rows} == {("resnet20", "2", "0")}
    assert all(float(row["step_ms"]) > 0 for row in rows)
    assert all(float(row["total"]) == pytest.approx(2 * float(row["samples/s"]), abs=0.11) for row in rows)
    assert rows[0]["exposed_ms"] == rows[0]["comm_ms"] == rows[-1]["comm_ms"] == "-"
    assert {row["MB"] for row in rows[1:]} == {"1.1"}
    written = [json.loads(line) for line in (tmp_path / "rows.json").read_text().splitlines()]
    assert [row["row"] for row in written] == names
    assert all(row["comm_ms"] > 0 for row in written[1:-1])


def test_one_way_by_itself_can_be_wrong():
    """It is not compared with itself, and rank 0 counts what is wrong on others."""
    options = ("--model", "resnet20", "--rows", "kvmpi", "--rounds", 1, "--steps", 1, "--batch-size", 1)
    done = run_job("-n 2", Path(__file__).parent / "programs" / "train_liar.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.removeprefix("[worker 0] ") for line in done.stdout.splitlines() if line.startswith("[worker 0] ")]
    for lie, said in (("nothing", lines[:3]), ("last", lines[3:])):
        wrong = {row["row"]: row["wrong"] for row in map(json.loads, said[:2])}
        assert wrong["alone"] == 0, f"{lie}: {done.stdout}"
        assert wrong["kvmpi"] > 100, f"{lie}: {done.stdout}"
        assert said[2:] == ["status 1"], lie
    assert done.stdout.count("[worker 1] status 1\n") == 2


def test_models_have_the_sizes_of_their_papers():
    sizes = {name: sum(p.numel() for p in make().parameters()) for name, (make, _, _) in MODELS.items()}
    assert sizes == {"resnet50": 25_557_032, "resnet20": 269_722, "textcnn": 5_990_402, "gpt-small": 5_018_112}


@pytest.mark.parametrize(("words", "said"), [
    (["--model", "vgg"], "known are resnet50, resnet20, textcnn, gpt-small"), (["-n", "1"], "from 2 on"),
    (["--rounds", "0"], "from 1 on"), (["--rows", "ddp"], "known are alone, kvmpi"), (["--link", "1gbit"], "--hosts"),
])  # fmt: skip
def test_mistakes_are_named(bench, words, said):
    done = bench("train", *words)
    assert done.returncode == 2
    assert said in done.stderr
