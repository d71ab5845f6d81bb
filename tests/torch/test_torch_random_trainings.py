"""Random trainings in real jobs: every weight after every step is what the published formulas say."""

from __future__ import annotations

import numpy as np
import pytest
import random_trainings
import torch
import training_model
from training_loops import OPTIONS

#: Several clients and servers; one client, whose sums come back. A longer run: ``python random_trainings.py``.
JOBS = [("-n 3 -c 2 -s 2", range(14)), ("-n 2 -c 1", range(100, 108))]


@pytest.mark.parametrize(("shape", "seeds"), JOBS)
def test_random_trainings_have_the_right_weights(shape, seeds):
    done = random_trainings.run(seeds, shape)
    assert done.returncode == 0, f"--seed {random_trainings.failing(done, seeds)} --shape '{shape}'\n{done.stderr}"
    for seed in seeds:
        assert done.stdout.count(f"program {seed} right") == int(shape.split()[1])


def test_programs_are_what_the_seed_says_and_all_kinds_are_in_them():
    made = [random_trainings.program(seed, shape) for shape, seeds in JOBS for seed in seeds]
    assert made == [random_trainings.program(seed, shape) for shape, seeds in JOBS for seed in seeds]
    assert {one.kind for one in made} == set(random_trainings.KINDS)
    assert {one.options["api"] for one in made if one.kind == "loops"} == {"trainer", "rule", "distributed"}
    assert {one.options["algorithm"] for one in made if one.kind == "averages"} == {"elastic", "diloco"}
    assert {one.store for one in made} >= {"mpi", "dist_sync", "dist_async", "dist_sync_mpi", "dist_async_mpi"}
    happens = {name for one in made for step in one.steps for name in step}
    assert happens >= {"hyper", "save", "load", "again", "frozen", "clip", "exchange", "compression"}


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_the_formulas_are_torchs(name):
    """What servers are compared with does what torch does, however its options change."""
    rng = random_trainings.random.Random(name)
    for program in range(12):
        options = random_trainings._torch_hyper(rng, name)
        param = torch.nn.Parameter(torch.from_numpy(training_model.noise(9, program)))
        optimizer = getattr(torch.optim, name)([param], **options)
        key = training_model.Key((9,), "float64", param.detach().numpy().copy())
        for step in range(50):
            if step % 9 == 8:
                optimizer.param_groups[0].update(random_trainings._torch_hyper(rng, name))
            gradient = training_model.noise(9, program, step)
            param.grad = torch.from_numpy(gradient.copy())
            optimizer.step()
            h = {option: optimizer.param_groups[0][option] for option in OPTIONS[name]} | {"rescale_grad": 1.0}
            key.update(training_model.Rule(name.lower(), h), 0, [gradient])
            found = param.detach().numpy()
            with np.errstate(all="ignore"):
                most = np.abs(found[np.isfinite(found)]).max(initial=1.0)
            assert not training_model.difference(found, key.value, 1e-11 * most).size, (program, step, h)
