"""Random programs of KVStores: from a seed, what all workers of a job do. random_programs.py --seed S --count N

A program is data; ``programs/random_worker.py`` carries it out and compares with ``random_model``. Programs of one
job share its shape and settings. A failing one is run again by ``--seed S``, and made smaller by ``--reduce``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Programs of one job, since processes are slow to start.
PER_JOB = 20
SHAPES = ["-n 4 -c 2 -s 2", "-n 3 -c 1 -s 1", "-n 2 -c 1 -s 1", "-n 3", "-n 4", "-n 2 -c 2 -s 2 --replicas 1",
          "-n 3 -c 2 -s 2", "-n 4 -c 1 -s 2", "-n 1 -c 1 -s 2", "-n 3 -c 3 -s 1"]  # fmt: skip
#: In a shape: its processes are started by torchrun, which knows no MPI, and start the servers themselves.
TORCHRUN = "torchrun"
#: Shapes and dtypes, so that all ways are taken: with nothing, staged, shared, in several chunks, lent.
SHAPES_OF_KEYS: list[tuple[int, ...]] = [
    (), (0,), (0, 4), (3, 0), (1,), (7, 3), (2, 3, 4), (33,), (257, 5), (1000,), (4097,), (5000, 3), (70_001,),
    (300, 301), (300_001,),
]  # fmt: skip
LARGE: list[tuple[int, ...]] = [(600_001,), (1001, 1100), (1_500_000,)]
DTYPES = ["float32", "float32", "float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"]
ALGORITHMS = ["auto", "auto", "shared", "ring", "multi_ring", "hierarchical", "host_ring", "mpi", "naive"]
#: Modes of stores without rounds, and what of each differs between programs.
LOOSE: dict[str, dict[str, list[int]]] = {
    "async": {}, "ssp": {"staleness": [0, 1, 1, 3]}, "softsync": {"softsync": [1, 1, 2]},
}  # fmt: skip
#: Rules whose results are whole numbers, or means. "" is none, at the beginning only.
RULES = [("test", -1.0, 0.0, 0.0), ("test", 2.0, 0.0, 0.0), ("sgd", 1.0, 0.0, 0.0), ("sgd", 1.0, 1.0, 0.0),
         ("sgd", 2.0, 0.0, 1.0), ("elastic", 0.5, 0.0, 0.0), ("outer", 1.0, 0.0, 0.0),
         ("outer", 1.0, 1.0, 0.0)]  # fmt: skip

#: Steps of a program, by how often.
KINDS = {"round": 10, "behind": 1.5, "burst": 3, "pull": 3, "rows": 3, "row_pull": 2, "allreduce": 3, "view": 1,
         "assign": 1, "barrier": 1, "wait_all": 0.5, "rule": 0.7, "hyper": 0.5, "updater": 0.3, "compression": 0.3,
         "save": 0.5, "load": 0.7, "save_states": 0.3, "load_states": 0.3, "mistake": 2, "init": 0.7, "client": 1.5,
         "clock": 0.3, "again": 0.15}  # fmt: skip


@dataclass
class Program:
    """``steps``: of each, its kind and what it is about; the rest is drawn where it is carried out."""

    seed: int
    store: str
    settings: dict[str, Any]
    strings: bool
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def loose(self) -> bool:
        """Whether its store has no rounds."""
        return any(mode in self.store for mode in LOOSE)


def job_of(seed: int) -> tuple[str, dict[str, Any]]:
    """Shape and settings of the job that runs a program."""
    rng = random.Random(f"job {seed // PER_JOB}")
    settings: dict[str, Any] = {}
    if rng.random() < 0.4:
        settings["transport"] = rng.choice(["tcp", "ipc"])
    if rng.random() < 0.3:
        settings["shared_payloads"] = "off"
    if rng.random() < 0.3:
        settings["chunk_bytes"] = rng.choice([4096, 100_000])
    if rng.random() < 0.2:
        settings["window_bytes"] = rng.choice([20_000, 300_000])
    if rng.random() < 0.1:
        settings["shared_bytes"] = 100_000
    settings["io_threads"] = random.Random(f"threads {seed // PER_JOB}").choice([1, 1, 2, 4])
    return SHAPES[seed // PER_JOB % len(SHAPES)], settings


def store_types(shape: str) -> list[str]:
    words = shape.split()
    clients = int(words[words.index("-c") + 1]) if "-c" in words else 1
    found = ["local"] + (["mpi", "mpi"] if clients == 1 else [])
    if "-s" in words:
        found += ["dist_sync", "dist_sync_mpi", "dist_sync_mpi", "dist_async", "dist_async_mpi"]
    elif clients == 1:
        found.append("dist_sync_mpi")
    return found


def program(seed: int, shape: str) -> Program:
    rng = random.Random(f"program {seed}")
    settings: dict[str, Any] = {"allreduce": rng.choice(ALGORITHMS)}
    if settings["allreduce"] == "mpi" and TORCHRUN in shape:
        settings["allreduce"] = "auto"
    if rng.random() < 0.3:
        settings["bucket_bytes"] = rng.choice([1, 1000, 100_000])
    if rng.random() < 0.3:
        settings["ring_chunk_bytes"] = rng.choice([1000, 65_536])
    if rng.random() < 0.3:
        settings["num_rings"] = rng.choice([1, 3, 8])
    if rng.random() < 0.3:
        settings["shared_input"] = "stage"
    if rng.random() < 0.15:
        settings["engine"] = "naive"
    elif rng.random() < 0.3:
        settings["engine_threads"] = rng.choice([1, 4])
    if random.Random(f"shares {seed}").random() < 0.4:
        settings["sharded_update"] = "on"
    found = Program(seed, rng.choice(store_types(shape)), settings, rng.random() < 0.5)
    if "async" in found.store:
        loose = random.Random(f"loose {seed}")
        mode = loose.choice(["async", "ssp", "softsync"])
        found.store = found.store.replace("async", mode)
        settings |= {name: loose.choice(values) for name, values in LOOSE[mode].items()}
    names = [f"key {i} ä" if found.strings else 7 * (i * 5 % 11) - 9 for i in range(11)]
    new = names[: rng.choice([1, 2, 4, 8])]
    used: list[Any] = []

    def make(keys: Sequence[Any]) -> dict[str, Any]:
        some = rng.choice(SHAPES_OF_KEYS)
        described = []
        for name in keys:
            shape = rng.choice(LARGE) if rng.random() < 0.03 else rng.choice([some, rng.choice(SHAPES_OF_KEYS)])
            described.append([name, list(shape), rng.choice([rng.choice(DTYPES), "float32"])])
        used.extend(keys)
        return {"kind": rng.choice(["init", "init", "broadcast"]), "keys": described}

    steps = found.steps
    if found.loose or rng.random() < 0.2:
        steps.append({"kind": "rule", "rule": rng.choice(RULES)})
    steps.append(make(new))
    for _ in range(rng.choice([5, 10, 20])):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "init":
            if len(used) < len(names):
                steps.append(make(names[len(used) : len(used) + rng.choice([1, 2])]))
            continue
        step: dict[str, Any] = {"kind": kind, "keys": rng.sample(used, rng.randint(1, len(used)))}
        if kind == "rule":
            step["rule"] = rng.choice(RULES)
        elif kind == "hyper":
            step["lr"] = rng.choice([1.0, 2.0])
        elif kind == "compression":
            step["type"] = rng.choice(["fp16", "bf16", "none"])
        steps.append(step)
    if rng.random() < 0.25:
        steps.append({"kind": "join", "keys": rng.sample(used, rng.randint(1, len(used)))})
    steps.append({"kind": "end", "how": rng.choice(["close", "close", "with"])})
    return found


def run(seeds: Sequence[int], shape: str, settings: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """A job of these programs, one after the other; each worker says of each that it was right."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVMPI_")}
    env.update({f"KVMPI_{name.upper()}": str(value) for name, value in {"timeout_s": 60, **settings}.items()})
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["kvmpi", "run", *shape.split(), "--"]
        if TORCHRUN in shape:
            words = shape.split()
            launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={words[1]}"]
            named = {"-c": "NUM_CLIENTS", "-s": "NUM_SERVERS", "--replicas": "REPLICAS"}
            env |= {
                f"KVMPI_{name}": words[words.index(option) + 1] for option, name in named.items() if option in words
            }
        command = [
            sys.executable,
            "-m",
            *launcher,
            str(HERE / "programs" / "random_worker.py"),
            shape,
            folder,
            ",".join(map(str, seeds)),
            *options,
        ]
        return subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=240 + 20 * len(seeds), check=False
        )


def why(done: subprocess.CompletedProcess[str]) -> str:
    """What workers have printed on their way to the failure."""
    lines = [line for line in done.stderr.splitlines() if "Warning" not in line and not line.startswith("    ")]
    return "\n".join(lines[-60:])


def failing(done: subprocess.CompletedProcess[str], seeds: Sequence[int]) -> int | None:
    """The last program that was begun."""
    return next((seed for seed in reversed(seeds) if f"program {seed} begins" in done.stdout), None)


def failed(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode != 0


def reduce(seed: int, shape: str, settings: dict[str, Any]) -> None:
    """Leave out steps as long as the program fails without them; print what is left."""
    steps = list(range(len(program(seed, shape).steps)))
    size = len(steps) // 2
    done = None
    while size:
        start = 0
        while start < len(steps):
            fewer = steps[:start] + steps[start + size :]
            again = run([seed], shape, {**settings, "timeout_s": 6}, "--keep", ",".join(map(str, fewer)))
            if failed(again):
                steps, done = fewer, again
                print("fails with", steps, flush=True)
            else:
                start += size
        size //= 2
    if done is not None:
        print(why(done))
    made = program(seed, shape)
    print(made.store, made.settings)
    for number in steps:
        print(number, json.dumps(made.steps[number]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--shape", help="of the job, instead of the seed's own: '-n 4 -c 2 -s 2', or '-n 3 torchrun'")
    parser.add_argument("--reduce", action="store_true", help="make the program of --seed smaller")
    parser.add_argument("--keep", help="steps of the program to run")
    asked = parser.parse_args()
    seeds = list(range(asked.seed, asked.seed + asked.count))
    if asked.reduce:
        shape, settings = job_of(asked.seed)
        reduce(asked.seed, asked.shape or shape, settings)
        return 0
    bad = 0
    while seeds:
        of_job = [seed for seed in seeds if seed // PER_JOB == seeds[0] // PER_JOB]
        shape, settings = job_of(of_job[0])
        options = [] if asked.keep is None else ["--keep", asked.keep]
        try:
            done = run(of_job, asked.shape or shape, settings, *options)
        except subprocess.TimeoutExpired as error:
            done = subprocess.CompletedProcess(error.cmd, 124, str(error.stdout), str(error.stderr) + "\nhangs")
        right = min((done.stdout.count(f"program {seed} right") for seed in of_job), default=0)
        print(
            f"{of_job[0]}-{of_job[-1]} {asked.shape or shape} {settings}: {'failed' if failed(done) else 'right'}",
            flush=True,
        )
        if failed(done) or not right:
            bad += 1
            print(why(done), flush=True)
        seeds = seeds[len(of_job) :]
        begun = failing(done, of_job)
        if failed(done) and begun is not None:
            print(f"again: {sys.argv[0]} --seed {begun}", flush=True)
            seeds = [seed for seed in of_job if seed > begun] + seeds  # the programs behind the failing one
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
