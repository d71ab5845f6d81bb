"""``kvmpi bench timeline``: what comes back is checked after every round."""

from __future__ import annotations

import argparse

import kvmpi
from kvmpi.benchmarks import timeline


def test_an_exchange_that_does_nothing_is_wrong(monkeypatch, capsys):
    """After the first, in which the benchmark only looks how long one takes."""
    create = kvmpi.create

    def idle_after_the_first(name: str) -> kvmpi.KVStore:
        kv = create(name)
        once = iter([kv.pushpull])
        monkeypatch.setattr(kv, "pushpull", lambda *words: next(once, lambda *_: None)(*words))
        return kv

    monkeypatch.setattr(kvmpi, "create", idle_after_the_first)
    monkeypatch.setattr(timeline, "_ROUND_S", 0.001)
    monkeypatch.setattr(timeline.parts, "read", lambda path: argparse.Namespace(num_spans=0))
    assert timeline.main("timeline", ["--sizes", "4K", "--rounds", "1"]) == 1
    assert "WRONG: 4 KiB: the values of 1 rounds" in capsys.readouterr().err
