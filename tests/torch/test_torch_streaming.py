"""Streaming exchanges: the timetable, what happens to frozen, shared and failed ones, and jobs of real processes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import HANGS_S, run_job
from torch import nn

import kvmpi
from kvmpi import optim
from kvmpi.errors import ConfigError, KVTimeoutError
from kvmpi.torch import DiLoCo, ElasticAveraging
from kvmpi.torch.fragments import Timetable, runs


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(float(size)) + 10 * i for i, size in enumerate(sizes)]


def local_step(weights: list[torch.Tensor], step: int) -> None:
    for i, w in enumerate(weights):
        w.data += (step + i) * torch.linspace(-1, 1, w.numel()).view(w.shape)


# ---- arithmetic


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [[1] * 7, [5, 0, 0, 1, 1], [1, 2, 3, 4, 50], [50, 4, 3, 2, 1], [3, 3, 3, 1, 3, 3]])
def test_runs_are_the_best_of_all_cuts(sizes: list[int], count: int) -> None:
    found = runs(sizes, count)
    assert list(itertools.chain(*found)) == list(range(len(sizes)))
    assert len(found) == count
    assert all(found)
    cuts = ([0, *cut, len(sizes)] for cut in itertools.combinations(range(1, len(sizes)), count - 1))
    best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
    assert max(sum(sizes[i] for i in run) for run in found) == best


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 12])
def test_every_fragment_begins_once_in_an_interval_and_evenly_apart(interval: int) -> None:
    for count in range(1, interval + 1):
        timetable = Timetable(interval, count)
        found = [timetable.beginning(step) for step in range(1, 3 * interval + 1)]
        assert [f for f in found if f is not None] == [*range(count)] * 3
        first = [step for step, f in enumerate(found, 1) if f is not None][:count]
        assert first[-1] == interval
        gaps = np.diff([0, *first])
        assert gaps.max() - gaps.min() <= 1


# ---- what was there before


def test_without_streaming_the_bits_are_those_of_a_blocking_exchange() -> None:
    mine, plain = tensors(5, 3), tensors(5, 3)
    with kvmpi.create("dist_sync") as kv, kvmpi.create("dist_sync") as other:
        diloco = DiLoCo(mine, kv, interval=3, lr=0.7, momentum=0.9)
        center = [w.clone() for w in plain]
        other.init([0, 1], plain)
        other.set_optimizer(optim.Outer(0.7, 0.9, True))
        for step in range(1, 10):
            for weights in (mine, plain):
                local_step(weights, step)
            assert diloco.step() == (step % 3 == 0)
            if step % 3 == 0:
                other.pushpull([0, 1], [c - w for c, w in zip(center, plain, strict=True)], center)
                for c, w in zip(center, plain, strict=True):
                    w.copy_(c)
            assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True)), step


# ---- parameters of all kinds


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("make", [DiLoCo, lambda p, kv, interval, **how: ElasticAveraging(p, kv, 0.5, interval, **how)])
def test_frozen_parameters_are_not_exchanged(make: Any, overlap: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    model[0].requires_grad_(False)
    with kvmpi.create("dist_sync") as kv:
        averaging = make(model.named_parameters(), kv, 2, overlap=overlap)
        kept = [p.detach().clone() for p in model[0].parameters()]
        for step in range(1, 5):
            local_step([*model[1].parameters()], step)
            averaging.step()
        averaging.finish()
        kv.barrier()
        assert kv.stats()["phases"]["push"]["bytes"] == 2 * model[1].weight.nbytes
        assert all(torch.equal(a, b) for a, b in zip(kept, model[0].parameters(), strict=True))
        model[0].requires_grad_(True)  # from now on it is
        averaging.exchange()
        pushed = sum(p.nbytes for p in model.parameters()) + 2 * model[1].weight.nbytes
        assert kv.stats()["phases"]["push"]["bytes"] == pushed


def test_all_frozen_is_nothing_to_exchange() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with kvmpi.create("dist_sync") as kv:
        diloco = DiLoCo(model.parameters(), kv, 1)
        assert not diloco.step()
        assert "push" not in kv.stats()["phases"]


def test_what_cannot_be_averaged_is_named() -> None:
    layer = nn.Linear(2, 2)
    twin = nn.Linear(2, 2)
    twin.weight.data = layer.weight.data
    norm = nn.BatchNorm1d(3)
    with kvmpi.create("dist_sync") as kv:
        with pytest.raises(ConfigError, match=r"1\.weight and 0\.weight are two parameters that share memory"):
            DiLoCo(nn.Sequential(layer, twin).named_parameters(), kv)
        with pytest.raises(ConfigError, match=r"num_batches_tracked is of torch\.int64"):
            DiLoCo(norm.state_dict(), kv)
        buffers = {name: b for name, b in norm.named_buffers() if b.is_floating_point()}
        diloco = DiLoCo({**dict(norm.named_parameters()), **buffers}, kv, 1)
        norm.running_mean += 1
        diloco.step()
        torch.testing.assert_close(norm.running_mean, torch.full((3,), 0.7 * 1.9))


def test_arguments_are_checked() -> None:
    w = tensors(4, 2, 3)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"fragments": 0}, "fragments=0: expected their number"),
        ({"fragments": 2.0}, r"fragments=2\.0: expected their number"),
        ({"fragments": "12"}, "fragments='12': expected their number"),
        ({"fragments": 4}, "fragments=4: there are 3 parameters"),
        ({"fragments": 3, "interval": 2}, "fragments=3 with interval=2"),
        ({"fragments": [w[:2]]}, "parameter 2 is in none of the fragments"),
        ({"fragments": []}, "parameter 0 is in none of the fragments"),
        ({"fragments": [w, []]}, r"fragments\[1\]: expected a list of parameters"),
        ({"fragments": w}, r"fragments\[0\]: expected a list of parameters"),
        ({"fragments": [w[:2], [w[2], w[0]]]}, r"fragments\[1\]\[1\] is no parameter of params, or there twice"),
        ({"overlap": -1}, "overlap=-1: expected"),
        ({"overlap": True}, "overlap=True: expected"),
        ({"overlap": 5, "interval": 5}, "overlap=5 with interval=5"),
        ({"mixing": 1.0}, r"mixing=1\.0: expected"),
        ({"mixing": "0.5"}, "mixing='0.5': expected"),
        ({"mixing": -0.1}, r"mixing=-0\.1: expected"),
        ({"pseudo_gradient_dtype": torch.int8}, r"pseudo_gradient_dtype=torch\.int8: expected one of torch\.bfloat16"),
        ({"pseudo_gradient_dtype": "bf16"}, "pseudo_gradient_dtype='bf16': expected one of"),
    ]
    with kvmpi.create("dist_sync") as kv:
        for arguments, said in wrong:
            with pytest.raises(ConfigError, match=said):
                DiLoCo(w, kv, **arguments)
        with pytest.raises(ConfigError, match="overlap=64 with interval=64"):
            ElasticAveraging(w, kv, 0.5, overlap=64)
        DiLoCo(w, kv)  # nothing of that has left keys behind
    with kvmpi.create("mpi") as kv, pytest.raises(ConfigError, match="'mpi' store: it sends nothing to servers"):
        DiLoCo(w, kv, pseudo_gradient_dtype=torch.bfloat16)


# ---- failures and ends


@pytest.mark.parametrize("overlap", [0, 2])
def test_after_an_exchange_that_was_broken_off_the_center_is_asked_for(
    overlap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The push has come through, the answer is torn: nobody may take that for the center."""
    (w,) = tensors(4)
    with kvmpi.create("dist_sync") as kv:
        diloco = DiLoCo([w], kv, interval=3, lr=1.0, momentum=0.0, nesterov=False, overlap=overlap, mixing=0.0)
        real, failure = kv.pushpull, kvmpi.Work("the exchange")
        failure.finish(KeyboardInterrupt())

        def torn(keys: Any, value: Any, out: Any, async_op: bool) -> kvmpi.Work:
            assert async_op
            real(keys, value, out)
            out[0][2:] = 99.0
            return failure

        monkeypatch.setattr(kv, "pushpull", torn)
        for step in range(1, 4 + overlap):
            local_step([w], step)
            before = w.clone()
            if step < 3 + overlap:
                diloco.step()
        with pytest.raises(KeyboardInterrupt):
            diloco.step()
        assert torch.equal(w, before)
        monkeypatch.undo()
        while not diloco.step():
            local_step([w], 1)
            last = w.clone() if overlap == 0 else None
        if last is not None:  # lr=1 and one client: the center is what was pushed
            torch.testing.assert_close(w, last)
        torch.testing.assert_close(diloco.pull_center()[0], w)
        assert w.max() < 50


def test_a_fragment_that_fails_keeps_no_other_from_its_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other clients begin the next one's at the same step, and would wait for this one."""
    a, b = tensors(4, 3)
    with kvmpi.create("dist_sync") as kv:
        diloco = DiLoCo([a, b], kv, 2, lr=1.0, momentum=0.0, nesterov=False, fragments=2, overlap=1, mixing=0.0)
        real, begun = kv.pushpull, list[list[int]]()

        def pushpull(keys: Any, value: Any, out: Any, async_op: bool) -> kvmpi.Work | None:
            begun.append(keys)
            if len(begun) != 3:
                return real(keys, value, out, async_op=async_op)
            failure = kvmpi.Work("the exchange")
            failure.finish(KVTimeoutError("nobody has come"))
            return failure

        monkeypatch.setattr(kv, "pushpull", pushpull)
        for step in range(1, 7):
            local_step([a, b], step)
            if step == 4:
                with pytest.raises(KVTimeoutError, match="nobody has come"):
                    diloco.step()
            else:
                assert diloco.step() == (step > 1)
        # What had failed is made again before the next exchange of its fragment, at step 5.
        assert begun == [[0], [1], [0], [1], [0], [0], [1]]


@pytest.mark.parametrize("elastic", [False, True])
def test_exchanges_that_were_due_while_one_could_not_be_made_follow_it(
    elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other clients have made theirs, and wait for as many of this one."""
    (w,) = tensors(4)
    expected, center = w.clone(), w.clone()
    with kvmpi.create("dist_sync") as kv:
        averaging: Any
        if elastic:
            averaging = ElasticAveraging([w], kv, 0.25, interval=2)
        else:
            averaging = DiLoCo([w], kv, 2, lr=0.5, momentum=0.0, nesterov=False)
        real, calls = kv.pushpull, list[torch.Tensor]()

        def pushpull(keys: Any, value: Any, out: Any, async_op: bool) -> kvmpi.Work | None:
            calls.append(value[0].clone())
            if len(calls) not in (2, 3, 4):
                return real(keys, value, out, async_op=async_op)
            failure = kvmpi.Work("the exchange")
            failure.finish(KVTimeoutError("nobody has come"))
            return failure

        def meet(weights: torch.Tensor) -> None:
            nonlocal center
            met, center = center, center + (0.25 if elastic else 0.5) * (weights - center)
            weights.copy_(weights - 0.25 * (weights - met) if elastic else center)

        monkeypatch.setattr(kv, "pushpull", pushpull)
        failed = torch.empty(4)
        for step in range(1, 11):
            local_step([w], step)
            local_step([expected], step)
            if step in (4, 6, 8):  # the exchange, and twice its repetition
                failed = expected.clone() if step == 4 else failed
                with pytest.raises(KVTimeoutError, match="nobody has come"):
                    averaging.step()
                assert torch.equal(calls[-1], calls[1]), "what is made again is what it was"
            else:
                assert averaging.step() == (step in (2, 10))
            if step == 2:
                meet(expected)
            elif step == 10:
                late = failed.clone()
                meet(late)
                expected += late - failed
                for _ in (6, 8, 10):
                    meet(expected)
            torch.testing.assert_close(w, expected)
        torch.testing.assert_close(averaging.pull_center()[0], center)
        assert len(calls) == 8


def test_an_exchange_whose_center_could_not_be_asked_for_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    (w,) = tensors(4)
    with kvmpi.create("dist_sync") as kv:
        diloco = DiLoCo([w], kv, 2, lr=1.0, momentum=0.0, nesterov=False)
        diloco._unknown.add(0)  # as after one that was broken off
        pushpull, calls = kv.pushpull, list[Any]()
        monkeypatch.setattr(kv, "pushpull", lambda *a, **options: calls.append(a) or pushpull(*a, **options))

        def nobody_answers(*_: Any) -> None:
            raise KVTimeoutError("nobody has come")

        with monkeypatch.context() as patched:
            patched.setattr(kv, "pull", nobody_answers)
            local_step([w], 1)
            diloco.step()
            with pytest.raises(KVTimeoutError, match="nobody has come"):
                diloco.step()
        assert not calls
        diloco.finish()
        assert len(calls) == 1
        assert torch.equal(w, diloco.pull_center()[0])
        assert [diloco.step() for _ in range(2)] == [False, True]
        assert len(calls) == 2


def test_reset_forgets_what_is_under_way() -> None:
    (w,) = tensors(4)
    with kvmpi.create("dist_sync") as kv:
        diloco = DiLoCo([w], kv, interval=3, overlap=2)
        for step in range(1, 5):
            local_step([w], step)
            diloco.step()
        diloco.reset()
        center = w.clone()
        assert torch.equal(center, diloco.pull_center()[0])
        assert [diloco.step() for _ in range(5)] == [False] * 4 + [True]


def test_exchange_merges_what_is_under_way_and_leaves_all_at_the_center() -> None:
    (w,) = tensors(4)
    with kvmpi.create("dist_sync") as kv:
        diloco = DiLoCo([w], kv, interval=3, lr=1.0, momentum=0.0, nesterov=False, overlap=2, mixing=0.25)
        for step in range(1, 5):
            local_step([w], step)
            diloco.step()
        start = torch.arange(4.0)
        pushed = start + 6 * torch.linspace(-1, 1, 4)  # steps 1 to 3; then step 4, and the merge
        merged = 0.25 * (pushed + 4 * torch.linspace(-1, 1, 4)) + 0.75 * pushed
        diloco.exchange()
        torch.testing.assert_close(w, merged)
        torch.testing.assert_close(diloco.pull_center()[0], merged)
        assert not diloco.step()  # step 5: merged already


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_model_that_is_converted_later_goes_on_from_the_center(overlap: int) -> None:
    """``model.to(torch.bfloat16)`` gives the same parameters other memory."""
    (w,) = tensors(4)
    with kvmpi.create("dist_sync") as kv:
        diloco = DiLoCo([w], kv, interval=2, lr=1.0, momentum=0.0, nesterov=False, overlap=overlap, mixing=overlap / 4)
        w.data = w.data.to(torch.bfloat16)
        for step in (1, 2):
            local_step([w], step)
            pushed = w.float()
            diloco.step()
        local_step([w], 3)
        late = w.float()
        assert diloco.step() == bool(overlap)
        expected = 0.25 * late + 0.75 * pushed if overlap else late
        torch.testing.assert_close(w, expected.to(torch.bfloat16))
        torch.testing.assert_close(diloco.pull_center()[0], pushed)
        diloco.reset()
        torch.testing.assert_close(w, pushed.to(torch.bfloat16))


def test_a_state_of_something_else_is_refused() -> None:
    with kvmpi.create("dist_sync") as kv:
        diloco = DiLoCo(tensors(4, 2), kv, interval=4, overlap=1)
        state = diloco.state_dict()
        wrong = [
            ({"algorithm": "ElasticAveraging"}, "the state has algorithm 'ElasticAveraging', this one 'DiLoCo'"),
            (
                {"timetable": [4, 1, [[0], [1]]]},
                r"timetable \[4, 1, \[\[0\], \[1\]\]\], this one \[4, 1, \[\[0, 1\]\]\]",
            ),
            ({"memory": tensors(2, 4)}, r"shapes \[\(2,\), \(4,\)\], this model \[\(4,\), \(2,\)\]"),
        ]
        for part, said in wrong:
            with pytest.raises(ConfigError, match=said):
                diloco.load_state_dict({**state, **part})
        for _ in range(4):
            diloco.step()
        with pytest.raises(ConfigError, match="exchanges are under way"):
            diloco.load_state_dict(state)


def test_a_process_may_end_with_an_exchange_under_way() -> None:
    program = """
import torch, kvmpi
from kvmpi.torch import DiLoCo
diloco = DiLoCo([torch.ones(300000)], kvmpi.create("dist_async"), interval=3, overlap=2)
print([diloco.step() for _ in range(4)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[False, False, False, False]\n", "")


def test_streaming_equals_a_simulation_of_three_workers_in_two_clients(tmp_path: Path) -> None:
    program = Path(__file__).with_name("streaming_checks.py")
    job = run_job("-n 3 -c 2 -s 2", program, tmp_path, settings={"timeout_s": 60})
    assert job.returncode == 0, job.stdout + job.stderr
    assert sorted(job.stdout.splitlines()) == [f"[worker {rank}] all checks passed" for rank in range(3)]


def test_what_was_sent_when_an_exchange_failed_is_sent_again() -> None:
    """A push that takes the place of one that failed is passed over if that had come: what it said was lost."""
    program = Path(__file__).with_name("programs") / "failed_exchanges.py"
    job = run_job("-n 1 -c 1 -s 2", program)
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("right: ") == 10
