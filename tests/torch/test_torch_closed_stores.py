"""Models that outlive the stores they were trained with."""

from __future__ import annotations

import gc
import weakref

import torch
from optimizer_loops import flat, loss_of, mlp, plain_steps, sgd, shard

import kvmpi
from kvmpi.torch import DistributedOptimizer


def test_a_model_is_trained_with_one_store_after_the_other() -> None:
    """As where a notebook's cell is run again, in every way, and whoever collects garbage has not come by."""
    gc.disable()
    try:
        model = mlp()
        kept = []
        for name, settings in (
            ("mpi", {}), ("mpi", {"update_on_kvstore": True}), ("mpi", {"update_on_kvstore": True, "push": "step"}),
            ("dist_sync", {}), ("dist_async", {}), ("mpi", {}),
        ):  # fmt: skip
            with kvmpi.create(name) as kv:
                optimizer = DistributedOptimizer(sgd(model), kv, model, **settings)
                before = flat(model.parameters()).clone()
                plain_steps(model, optimizer, lambda step: [shard(step, 0)], 3)
                model.state_dict()
                kept.append(optimizer)
                assert not torch.equal(flat(model.parameters()), before)
    finally:
        gc.enable()


def test_models_whose_stores_are_closed_are_forgotten() -> None:
    models = []
    for _ in range(4):
        with kvmpi.create("mpi") as kv:
            model = mlp()
            optimizer = DistributedOptimizer(sgd(model), kv, model)
            loss_of(model, [shard(0, 0)]).backward()
            optimizer.step()
            models.append(weakref.ref(next(model.parameters())))
    del model, optimizer
    gc.collect()
    assert [found() is None for found in models] == [True, True, True, False]  # the last: when another one is made


def test_what_a_detached_optimizer_was_made_of_goes_with_it() -> None:
    """Not when garbage is collected, which in a search over many models of a program with torch is hardly ever."""
    gc.disable()
    try:
        for name, settings in (
            ("mpi", {}), ("mpi", {"update_on_kvstore": True}), ("mpi", {"update_on_kvstore": True, "push": "step"}),
            ("dist_async", {}),
        ):  # fmt: skip
            with kvmpi.create(name) as kv:
                model = mlp()
                optimizer = DistributedOptimizer(sgd(model), kv, model, **settings)
                loss_of(model, [shard(0, 0)]).backward()
                optimizer.step()
                optimizer.detach()
            found = [weakref.ref(one) for one in (optimizer, model, next(model.parameters()))]
            del model, optimizer
            assert [one() for one in found] == [None] * 3, (name, settings)
    finally:
        gc.enable()
