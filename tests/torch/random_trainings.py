"""Random trainings: from a seed, what all workers of a job train, and how. random_trainings.py --seed S --count N

A program is data; ``programs/random_training_worker.py`` carries it out, and compares every weight after every step
with ``training_model``. Programs of one job share its shape. A failing one is run again by ``--seed S``.
"""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from jobs import run_job  # noqa: E402

#: Programs of one job, since processes are slow to start.
PER_JOB = 20
SHAPES = ["-n 4 -c 2 -s 2", "-n 3 -c 1 -s 1", "-n 3 -c 2 -s 2", "-n 2 -c 1", "-n 3 -c 3 -s 1", "-n 1 -c 1 -s 2"]
SHAPES_OF_KEYS: list[tuple[int, ...]] = [(), (0,), (3, 0), (1,), (5, 7), (33,), (40, 3), (3, 2, 4)]
DTYPES = ["float64", "float64", "float32", "float16", "bfloat16"]
KINDS = ["rules", "loops", "loops", "averages"]


@dataclass
class Program:
    """``options``: what is so throughout; ``steps``: what happens at each."""

    seed: int
    kind: str
    store: str
    settings: dict[str, Any]
    keys: list[tuple[tuple[int, ...], str]]
    options: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)


def stores(shape: str) -> list[str]:
    words = shape.split()
    one_client = words[words.index("-c") + 1] == "1"
    found = ["local", "mpi", "mpi"] if one_client else []
    return found + (["dist_sync", "dist_async", "dist_sync_mpi", "dist_async_mpi"] if "-s" in words else [])


def clients_of(shape: str) -> list[list[int]]:
    words = shape.split()
    workers, clients = int(words[words.index("-n") + 1]), int(words[words.index("-c") + 1])
    base, extra = divmod(workers, clients)
    starts = [i * base + min(i, extra) for i in range(clients + 1)]
    return [list(range(a, b)) for a, b in itertools.pairwise(starts)]


def hyper(rng: random.Random, kind: str) -> dict[str, Any]:
    """Of a rule of this kind, all but ``rescale_grad`` and ``multi_precision``."""
    lr, decay = rng.choice([0.0, 0.01, 0.1, 0.5]), rng.choice([0.0, 0.0, 0.01, 0.3])
    if kind == "test":
        return {"lr": rng.choice([-1.0, 0.1])}
    if kind == "sgd":
        momentum = rng.choice([0.0, 0.5, 0.9, 1.0])
        nesterov = momentum > 0 and rng.random() < 0.5
        return {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": decay}
    if kind == "adagrad":
        lr_decay, eps, first = rng.choice([0.0, 0.1]), rng.choice([0.0, 1e-10, 0.1]), rng.choice([0.0, 0.25])
        return {"lr": lr, "lr_decay": lr_decay, "weight_decay": decay, "eps": eps, "initial_accumulator_value": first}
    # Where a mean is divided by what came last alone, rounding errors grow without bound.
    betas = rng.choice([(0.0, 0.0), (0.0, 0.9), (0.5, 0.9), (0.9, 0.9), (0.9, 0.999), (0.0, 0.999)])
    eps = rng.choice([0.0, 1e-8, 1e-3])
    return {"lr": lr, "betas": betas, "eps": eps if betas[1] else 1e-3, "weight_decay": decay}


def program(seed: int, shape: str, kind: str = "") -> Program:
    rng = random.Random(f"training {seed}")
    settings: dict[str, Any] = {}
    if rng.random() < 0.3:
        settings["bucket_bytes"] = rng.choice([1, 1000])
    if random.Random(f"shares {seed}").random() < 0.4:
        settings["sharded_update"] = "on"
    drawn = rng.choice(KINDS)
    kind = kind or drawn
    found = Program(seed, kind, rng.choice(stores(shape)), settings, [])
    found.options["shape"] = shape
    MAKERS[kind](rng, found)
    return found


def _rules(rng: random.Random, found: Program) -> None:
    found.keys = [(rng.choice(SHAPES_OF_KEYS), rng.choice(DTYPES)) for _ in range(rng.choice([1, 2, 4]))]
    numbers = range(len(found.keys))

    def rule() -> tuple[str, dict[str, Any], dict[int, dict[str, Any]]]:
        kind = rng.choice(["sgd", "sgd", "adam", "adamw", "adagrad", "test"])
        h = hyper(rng, kind) | {"rescale_grad": rng.choice([1.0, 0.25, 0.0, -1.0])}
        if kind != "test":
            h["multi_precision"] = rng.random() < 0.5
        of_keys = {}
        for number in numbers:
            if rng.random() < 0.3:
                own = hyper(rng, kind)
                names = list(own) if kind == "sgd" else rng.sample(list(own), rng.randint(1, len(own)))
                of_keys[number] = {name: own[name] for name in names}
        return kind, h, of_keys

    found.options = {"rule": rule(), "scale": rng.choice([1.0, 1.0, 2.0**-30, 2.0**20])}
    kind, _, of_keys = found.options["rule"]
    for _ in range(rng.choice([5, 10, 20])):
        step: dict[str, Any] = {
            "keys": rng.sample(numbers, rng.randint(1, len(found.keys))),
            "way": rng.choice(["pushpull", "push", "one by one"]),
            "rows": [n for n in numbers if found.keys[n][0] and rng.random() < 0.3],
        }
        chance = rng.random()
        if chance < 0.1:
            step["rule"] = rule()
            kind, _, of_keys = step["rule"]
        elif chance < 0.3:
            own = hyper(rng, kind)
            # The first value of what Adagrad adds up is that of the first update.
            names = list(own) if kind == "sgd" else [n for n in own if n != "initial_accumulator_value"]
            if kind != "sgd":
                names = rng.sample(names, rng.randint(1, len(names)))
            of = rng.choice(["", "", f"@{rng.choice(numbers)}"])
            if kind != "sgd" or of or not of_keys:
                step["hyper"] = {name + of: own[name] for name in names}
        elif chance < 0.4 and found.store.startswith("dist"):
            step["compression"] = rng.choice([{"type": "fp16"}, {"type": "bf16"}, {"type": "2bit", "threshold": 0.5},
                                              {"type": "2bit", "threshold": 2.0}, {"type": "1bit", "threshold": 0.0},
                                              {"type": "1bit", "threshold": 0.25}])  # fmt: skip
        elif chance < 0.5:
            step["save"] = rng.choice(["save", "save_optimizer_states"])
        elif chance < 0.6:
            step["load"] = rng.choice(["save", "save_optimizer_states"])
        elif chance < 0.65:
            step["again"] = True
        found.steps.append(step)


#: Of torch's optimizers: those of which there is a rule, and others, which only a worker can step.
OF_RULES = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adagrad": "adagrad"}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}), ("SGD", {"lr": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.05, "amsgrad": True}), ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("Adadelta", {"lr": 1.0}), ("NAdam", {"lr": 0.01}), ("RAdam", {"lr": 0.05}), ("Adamax", {"lr": 0.05}),
    ("ASGD", {"lr": 0.1}), ("Rprop", {"lr": 0.01}),
]  # fmt: skip


def _loops(rng: random.Random, found: Program) -> None:
    shape = found.options.pop("shape")
    clients = clients_of(shape)
    workers = sum(map(len, clients))
    asynchronous = "async" in found.store
    turns = asynchronous and (len(clients) > 1 or (workers > 1 and found.store == "dist_async"))
    api = rng.choice(["trainer", "rule", "distributed"])
    in_store = asynchronous or api == "rule" or rng.random() < 0.5
    sparse_table = api != "distributed" and rng.random() < 0.4
    compressed = found.store.startswith("dist") and not sparse_table and rng.random() < 0.25
    exact = compressed or (in_store and not turns and rng.random() < 0.3)  # gradients do not depend on weights
    dtypes = ["float32"] if compressed else DTYPES if exact else DTYPES[:3]
    found.keys = [(rng.choice(SHAPES_OF_KEYS), rng.choice(dtypes)) for _ in range(rng.choice([1, 2, 4]))]
    optimizer = rng.choice(list(OF_RULES))
    own = _torch_hyper(rng, optimizer)
    if not in_store and rng.random() < 0.5 and not sparse_table:
        optimizer, own = rng.choice(OTHERS)
    sparse = []
    if sparse_table:
        sparse, found.keys = [0], [((40, 3), rng.choice(["float32", "float64"])), *found.keys]
        if not in_store:
            optimizer = rng.choice(["SGD", "Adagrad"])
            own = {"lr": 0.1}
    numbers = list(range(len(found.keys)))
    rng.shuffle(numbers)
    groups = [(sorted(numbers), own)]
    if len(numbers) > 1 and rng.random() < 0.5:
        other = (
            _torch_hyper(rng, optimizer) if optimizer in OF_RULES and not (sparse and not in_store) else {"lr": 0.02}
        )
        groups = [(sorted(numbers[1:]), own), (numbers[:1], other)]
    push = rng.choice(["backward", "step"])
    average = rng.choice([None, True, False])
    if compressed and workers == 3:
        average = False
    scheduler = None if api == "rule" else rng.choice([None, None, "exponential", "one cycle"])
    cycled = [own.get("momentum") if optimizer == "SGD" else own.get("betas", (0, 1))[1] for _, own in groups]
    if scheduler == "one cycle" and (optimizer not in ("SGD", "Adam", "AdamW") or not all(cycled)):
        scheduler = "exponential"
    by_default = api == "trainer" and (
        in_store == (optimizer in OF_RULES and not own.keys() & {"dampening", "maximize", "amsgrad"})
    )
    by_default = by_default or api == "rule" or (api == "distributed" and in_store == asynchronous)
    found.options = {
        "api": api, "in_store": in_store, "says_where": not by_default or rng.random() < 0.5, "optimizer": optimizer,
        "groups": groups, "sparse": sparse, "feedback": 0.0 if exact else 0.125, "push": push, "average": average,
        "never": rng.sample(numbers, 1) if len(numbers) > 1 and rng.random() < 0.2 else [],
        "scheduler": scheduler, "named": rng.choice(["model", "model", "names", ""]),
        "buckets": rng.choice([{}, {}, {"bucket_bytes": 64}, {"overlap": True}, {"overlap": False}]),
        "batch": rng.choice([1.0, 2.0, 4.0, 8.0]), "wide": rng.random() < 0.5,
    }  # fmt: skip
    if sparse:
        found.options["never"] = []
    if compressed:
        found.options["compression"] = rng.choice(
            [
                {"type": "fp16"},
                {"type": "bf16"},
                {"type": "2bit", "threshold": 0.5},
                {"type": "1bit", "threshold": 0.25},
            ]
        )
        if api == "distributed" and not in_store:  # what is left of what is laid out anew is another story
            found.options["compression"] = {"type": "bf16"}
    can_change = api != "distributed" or not in_store or push == "step"
    for _ in range(rng.choice([4, 8, 12])):
        step: dict[str, Any] = {"batch": found.options["batch"]}
        if api != "distributed" and rng.random() < 0.15:
            step["batch"] = rng.choice([1.0, 2.0, 4.0])
        chance = rng.random()
        if (
            chance < 0.1
            and api != "rule"
            and optimizer in OF_RULES
            and not (sparse and not in_store)
            and not own.keys() & {"dampening", "maximize", "amsgrad"}
        ):
            changes = _torch_hyper(rng, optimizer)
            changes.pop("initial_accumulator_value", None)
            step["options"] = {rng.randrange(len(groups)): changes}
        elif chance < 0.15:
            step["rate"] = rng.choice([0.0, 0.01, 0.3])
        elif chance < 0.23:
            step["save"] = True
        elif chance < 0.31:
            step["load"] = True
        elif chance < 0.35:
            step["again"] = True
        elif chance < 0.4 and len(numbers) > 1:
            step["frozen"] = rng.sample(numbers, 1)
        elif chance < 0.5 and can_change and not exact and not sparse:
            step["clip"] = rng.choice([0.5, 5.0, 1e6])
        elif chance < 0.56 and api == "distributed" and can_change:
            step["skip"] = True
        elif chance < 0.65 and api == "distributed" and not exact:
            step["accumulate"] = True
        found.steps.append(step)
    if found.store != "local" and not turns and rng.random() < 0.3:
        found.options["join"] = [rng.choice([0, 1, 2, 4]) for _ in range(workers)]


def _torch_hyper(rng: random.Random, optimizer: str) -> dict[str, Any]:
    found = hyper(rng, OF_RULES[optimizer])
    if optimizer == "Adagrad":
        found.pop("initial_accumulator_value")
    return found


def _averages(rng: random.Random, found: Program) -> None:
    clients = clients_of(found.options.pop("shape"))
    workers = sum(map(len, clients))
    turns = "async" in found.store and (len(clients) > 1 or (workers > 1 and found.store == "dist_async"))
    found.keys = [
        (rng.choice(SHAPES_OF_KEYS), rng.choice(["float32", "float64"])) for _ in range(rng.choice([1, 3, 5]))
    ]
    numbers = list(range(len(found.keys)))
    algorithm = rng.choice(["elastic", "diloco", "diloco"])
    interval = rng.choice([1, 2, 3, 5])
    overlap = rng.choice([0, rng.randrange(interval)])
    fragments = [numbers]
    if algorithm == "diloco" and min(interval, len(numbers)) > 1 and rng.random() < 0.7:
        count = rng.randint(2, min(interval, len(numbers)))
        rng.shuffle(numbers)
        fragments = [numbers[p::count] for p in range(count)]
    momentum = rng.choice([0.0, 0.5, 0.9])
    outer = {"lr": rng.choice([0.7, 1.0, 0.3]), "momentum": momentum, "nesterov": momentum > 0 and rng.random() < 0.6}
    alphas = [0.0, 0.1, 0.3]
    found.options = {
        "algorithm": algorithm, "interval": interval, "overlap": overlap, "fragments": fragments,
        "mixing": rng.choice([None, 0.0, 0.25]), "bfloat16": found.store.startswith("dist") and algorithm == "diloco"
        and rng.random() < 0.3, "rule": {"alpha": rng.choice(alphas)} if algorithm == "elastic" else outer,
        "together": algorithm == "elastic" or rng.random() < 0.5, "inner": "",
    }  # fmt: skip
    if found.options["together"] and rng.random() < 0.6:
        found.options["inner"] = rng.choice(["trainer", "distributed"])
    for _ in range(rng.choice([6, 12, 20])):
        step: dict[str, Any] = {"center": rng.random() < 0.3}
        chance = rng.random()
        if chance < 0.2:
            changes = {"lr": rng.choice([0.2, 0.9]), "momentum": rng.choice([0.0, 0.1, 0.8])}
            step["hyper"] = {"alpha": rng.choice(alphas)} if algorithm == "elastic" else changes
        elif chance < 0.28:
            step["exchange"] = True
        elif chance < 0.34:
            step["finish"] = True
        elif chance < 0.42:
            step["again"] = True
        elif chance < 0.46:
            step["reset"] = True
        elif chance < 0.55 and len(numbers) > 1:
            step["frozen"] = [rng.choice(numbers)]
        found.steps.append(step)
    if found.store != "local" and not turns and rng.random() < 0.4:
        found.options["join"] = [rng.choice([0, 1, 3, 6]) for _ in range(workers)]


MAKERS = {"rules": _rules, "loops": _loops, "averages": _averages}


def run(seeds: Sequence[int], shape: str, kind: str = "") -> subprocess.CompletedProcess[str]:
    """A job of these programs, one after the other; each worker says of each that it was right."""
    with tempfile.TemporaryDirectory() as folder:
        return run_job(
            shape, HERE / "programs" / "random_training_worker.py", shape, folder, ",".join(map(str, seeds)), kind,
            timeout_s=240 + 10 * len(seeds), settings={"timeout_s": 60},
        )  # fmt: skip


def failing(done: subprocess.CompletedProcess[str], seeds: Sequence[int]) -> int | None:
    """The last program that was begun."""
    return next((seed for seed in reversed(seeds) if f"program {seed} begins" in done.stdout), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--kind", choices=sorted(MAKERS), help="only programs of this kind")
    parser.add_argument("--shape", help="of the job, instead of the seed's own: '-n 4 -c 2 -s 2'")
    asked = parser.parse_args()
    seeds, bad = list(range(asked.seed, asked.seed + asked.count)), 0
    while seeds:
        of_job = [seed for seed in seeds if seed // PER_JOB == seeds[0] // PER_JOB]
        shape = asked.shape or SHAPES[of_job[0] // PER_JOB % len(SHAPES)]
        try:
            done = run(of_job, shape, asked.kind or "")
        except subprocess.TimeoutExpired as error:
            done = subprocess.CompletedProcess(error.cmd, 124, str(error.stdout), "hangs")
        seeds = seeds[len(of_job) :]
        print(f"{of_job[0]}-{of_job[-1]} {shape}: {'failed' if done.returncode else 'right'}", flush=True)
        if done.returncode:
            bad += 1
            print("\n".join(done.stderr.splitlines()[-40:]), flush=True)
            if (begun := failing(done, of_job)) is not None:
                made = program(begun, shape, asked.kind or "")
                print(f"again: {sys.argv[0]} --seed {begun} --shape '{shape}' --kind {made.kind}", flush=True)
                seeds = [seed for seed in of_job if seed > begun] + seeds  # the programs behind the failing one
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
