"""Carries random programs out on one worker, and compares every array with the model.

random_worker.py SHAPE FOLDER SEED,SEED,... [--keep STEP,STEP,... | --without-torch]
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import random_arrays
import random_programs
from random_runner import Runner


def clients_of(shape: str) -> list[list[int]]:
    words = shape.split()
    workers = int(words[words.index("-n") + 1])
    clients = int(words[words.index("-c") + 1]) if "-c" in words else 1
    base, extra = divmod(workers, clients)
    starts = [i * base + min(i, extra) for i in range(clients + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(starts)]


def main() -> None:
    shape, folder, seeds = sys.argv[1:4]
    keep = [int(word) for word in sys.argv[5].split(",") if word] if "--keep" in sys.argv else None
    if random_arrays.torch is not None:
        random_arrays.torch.set_num_threads(1)
        random_arrays.torch.sparse.check_sparse_tensor_invariants.disable()
    me = int(os.environ.get("KVMPI_RANK") or os.environ["RANK"])
    for seed in map(int, seeds.split(",")):
        made = random_programs.program(seed, shape)
        print(f"program {seed} begins", flush=True)
        runner = Runner(made, clients_of(shape), me, folder)
        steps = range(len(made.steps)) if keep is None else keep
        number = -1
        try:
            for number in steps:
                if os.environ.get("TRACE_PROGRAMS"):
                    print(f"program {seed} step {number}: {made.steps[number]}", file=sys.stderr, flush=True)
                runner.step(number)
            runner.end()
        except BaseException:
            traceback.print_exc()
            print(f"program {seed} on worker {me}: {made.store} {made.settings}, step {number} of {len(made.steps)}: "
                  f"{made.steps[number]}", file=sys.stderr, flush=True)  # fmt: skip
            os._exit(1)
        print(f"program {seed} right", flush=True)


main()
