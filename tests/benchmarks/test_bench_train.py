"""``kvmpi bench train``: every way of training ends with the same weights, and the table says what it cost."""

from __future__ import annotations

import pytest


def test_all_ways_train_alike(bench):
    done = bench("train", "--models", "gpt", "--rounds", 1, "--steps", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    header, *lines = [line.split() for line in done.stdout.splitlines()]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["way"] for row in rows] == ["alone", "kvmpi", "kvmpi:late", "trainer", "ddp:gloo"]
    assert {(row["model"], row["ranks"], row["wrong"]) for row in rows} == {("gpt", "2", "0")}
    assert all(float(row["step_ms"]) > 0 for row in rows)
    assert rows[0]["exposed_ms"] == "-"


@pytest.mark.parametrize(("words", "said"), [
    (["--models", "vgg"], "known are resnet20, gpt"), (["-n", "1"], "from 2 on"), (["--rounds", "0"], "at least 1"),
])  # fmt: skip
def test_mistakes_are_named(bench, words, said):
    done = bench("train", *words)
    assert done.returncode == 2
    assert said in done.stderr
