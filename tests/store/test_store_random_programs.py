"""Random programs in real jobs: every value is right, whatever the calls, arrays, store types and settings."""

from __future__ import annotations

import pytest
import random_programs

#: Of two jobs, in which all store types are: several clients and servers, and one client, whose workers have tensors.
JOBS = [
    ("-n 4 -c 2 -s 2", [3001, 3010, 3249, 3166, 3170, 3171, 3172, 3173], ["--without-torch"]),
    ("-n 3 -c 1 -s 1", [4001, 4004, 4005, 4006, 4009, 4010, 4011], []),
]


@pytest.mark.parametrize(("shape", "seeds", "options"), JOBS)
def test_random_programs_have_the_right_values(shape, seeds, options):
    done = random_programs.run(seeds, shape, {"timeout_s": 60}, *options)
    assert done.returncode == 0, f"--seed {random_programs.failing(done, seeds)}\n{random_programs.why(done)}"
    for seed in seeds:
        assert done.stdout.count(f"program {seed} right") == int(shape.split()[1])


def test_programs_are_what_the_seed_says_and_all_kinds_of_steps_are_in_them():
    made = [random_programs.program(seed, shape) for shape, seeds, _ in JOBS for seed in seeds]
    assert made == [random_programs.program(seed, shape) for shape, seeds, _ in JOBS for seed in seeds]
    kinds = {step["kind"] for one in made for step in one.steps}
    assert kinds >= set(random_programs.KINDS) | {"join", "end"}
    dist = {f"dist_{mode}{of_clients}" for mode in ("sync", *random_programs.LOOSE) for of_clients in ("", "_mpi")}
    assert {one.store for one in made} == {"local", "mpi"} | dist
