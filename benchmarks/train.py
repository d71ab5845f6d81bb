"""``kvmpi bench train``: what the exchange of gradients adds to a step, beside DistributedDataParallel over gloo."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os.path import expanduser
from pathlib import Path
from typing import Any

from kvmpi.benchmarks.jobs import refuse_ranks
from kvmpi.benchmarks.netlab import PRIVATE, NetLab
from kvmpi.benchmarks.options import at_least, numbers
from kvmpi.benchmarks.report import JsonLines, check_torch, complain, exit_status
from kvmpi.benchmarks.runner import Runner
from kvmpi.benchmarks.table import Table
from kvmpi.config import Config
from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.machine import num_cores
from kvmpi.trace import COMMUNICATION, parts, timeline

#: What a step costs without any exchange; the others are compared with it.
ALONE = "alone"
_DDP = "ddp:gloo"
_TRACED, _NARROW = "kvmpi:timeline", "kvmpi:bf16"
_SHARDED = "weights:sharded"
WAYS = (
    ALONE, "kvmpi", _TRACED, _NARROW, "kvmpi:on", "kvmpi:off", "weights", _SHARDED, "weights:off", "trainer", _DDP,
)  # fmt: skip
_DEFAULT_MODELS = ("resnet20", "gpt-small")
MODELS = ("resnet50", "resnet20", "textcnn", "gpt-small")
_CHECKED_STEPS, _WARM_UP_STEPS = 3, 4
_COLUMNS = {
    "model": 9, "ranks": 5, "row": 15, "samples/s": 9, "+-": 5, "total": 7, "step_ms": 8, "comm_ms": 8,
    "exposed_ms": 10, "of_ddp": 6, "MB": 6, "wrong": 5,
}  # fmt: skip
#: Phases of ``kv.stats()`` in which a worker exchanges something, and does not just wait for others to come.
_COMMUNICATION = COMMUNICATION - {"wait"}
_ABOUT = """\
Ranks train models on random data, with SGD and momentum. Rows:
  alone         no exchange: the time of computing
  kvmpi         DistributedOptimizer: gradients leave and come back, when it thinks best
  kvmpi:on, kvmpi:off      during the backward pass, and after it
  weights       during it, and the store updates: weights come back, each layer's next forward waits for its own
  weights:sharded  as weights, and each worker updates its share of them (KVMPI_SHARDED_UPDATE)
  weights:off   all of it after the backward pass
  kvmpi:timeline   as kvmpi, while a timeline of every rank is written; if it is asked for
  kvmpi:bf16    as kvmpi, with KVMPI_RING_COMPRESSION=bf16; if it is asked for
  trainer       kvmpi.torch.Trainer, after the backward pass
  ddp:gloo      torch's DistributedDataParallel
All take turns. samples/s: of one rank, mean over rounds and 1.96 sigma; total: of all. step_ms: median over rounds.
comm_ms: seconds in the store's collectives, overlapped or not. exposed_ms: what a step takes longer than alone; of_ddp:
that, divided by DistributedDataParallel's. MB: gradients of a step, 10^6 bytes.
wrong: weights of the worst rank that differ, after three steps, from those of plain SGD with gradients that MPI itself
has averaged; in float64: in float32 some models blow up errors.
"""


def main(name: str, argv: Sequence[str]) -> int:
    """Run ``kvmpi bench train ARGV``; the exit status."""
    parser = _parser(name)
    args = parser.parse_args(argv)
    for option, text, known in (("--model", args.model, MODELS), ("--rows", args.rows, WAYS)):
        if unknown := sorted(set(text.split(",")) - set(known)):
            parser.error(f"{option} {','.join(unknown)}: known are {', '.join(known)}")
    try:
        args.ranks = numbers("-n", args.ranks, least=2)
    except ValueError as error:
        parser.error(str(error))
    if args.link and not args.hosts:
        parser.error("--link is about simulated hosts; say how many with --hosts")
    try:
        lab = NetLab(args.hosts, args.link or "1gbit") if args.hosts else None
    except ConfigError as error:
        parser.error(str(error))
    if "KVMPI_ROLE" in os.environ:
        return _rank(args)
    return exit_status(lambda: _bench(args, lab))


def _bench(args: argparse.Namespace, lab: NetLab | None) -> int:
    refuse_ranks("train")
    check_torch("train")
    options = ["--rounds", str(args.rounds), "--steps", str(args.steps), "--rows", args.rows]
    options += ["--batch-size", str(args.batch_size)] if args.batch_size else []
    with ExitStack() as stack:
        lines = JsonLines(args.json)
        print(_table().header(), flush=True)
        runner = stack.enter_context(Runner())
        if lab is not None:
            stack.enter_context(lab)
        for ranks in args.ranks:
            for model in args.model.split(","):
                words = ["--", __file__, "-n", str(ranks), "--model", model, *options]
                status = _job(runner, _command(ranks, lab) + words, lab, lines)
                if status:
                    return status
    return 0


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"kvmpi bench {name}", allow_abbrev=False, description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("-n", "--ranks", metavar="N,...", default="2", help="numbers of ranks (default 2)")
    add("--model", default=",".join(_DEFAULT_MODELS), metavar="NAME,...",
        help=f"of {', '.join(MODELS)} (default {','.join(_DEFAULT_MODELS)}); gpt-small: of 20 MB, "
        "not the preset's 498 MB")  # fmt: skip
    add("--synthetic", action="store_true", help="random data, as always")
    usual = ",".join(way for way in WAYS if way not in (_TRACED, _NARROW))
    add("--rows", default=usual, metavar="ROW,...", help=f"some of those above (default all but {_TRACED}, {_NARROW})")
    add("--batch-size", type=at_least(1), metavar="B", help="samples of one rank in a step")
    add("--rounds", type=at_least(1), default=10, metavar="R", help="rounds (default 10)")
    add("--steps", type=at_least(1), default=10, metavar="S", help="steps of each row in a round (default 10)")
    add("--hosts", type=at_least(1), metavar="N", help="spread the ranks over N simulated hosts (root, Linux)")
    add("--link", metavar="SPEED", help="of the simulated hosts' links (default 1gbit)")
    add("--json", type=expanduser, metavar="FILE", help="write each row as a line of JSON too")
    return parser


def _command(ranks: int, lab: NetLab | None) -> list[str]:
    run = [sys.executable, "-m", "kvmpi", "run", "-n", str(ranks)]
    if lab is None:
        return run
    slots = -(-ranks // len(lab.hosts))
    listed = ",".join(f"{host}:{slots}" for host in lab.hosts)
    return lab.command_on(0, [*run, "--remote-shell", f"{PRIVATE}/agent", "--hosts", listed, "--interface", lab.subnet])


def _job(runner: Runner, command: Sequence[str], lab: NetLab | None, lines: JsonLines) -> int:
    """Run the ranks, and show their rows; the exit status."""
    env = {name: value for name, value in os.environ.items() if lab is None or not name.startswith("KVMPI_")}
    status, said = runner.run(command, env)
    for line in said.replace("[worker 0] ", "").splitlines():
        if not line.startswith("{"):
            print(line, flush=True)
            continue
        row = json.loads(line)
        print(_table().line(row), flush=True)
        lines.write(row)
        if row["wrong"]:
            complain(f"WRONG: {row['model']}, {row['row']}: {row['wrong']} weights after {_CHECKED_STEPS} steps")
    return status


def _table() -> Table:
    return Table(_COLUMNS, {"model": MODELS, "row": WAYS})


# ---- a rank


def _rank(args: argparse.Namespace) -> int:
    import torch

    import kvmpi
    from kvmpi.benchmarks import peers

    cores = num_cores()
    ways = [way for way in WAYS if way in args.rows.split(",") or way == ALONE]
    with ExitStack() as stack:
        kv = stack.enter_context(kvmpi.create("mpi"))
        torch.set_num_threads(max(1, cores // kv.num_workers))
        if _DDP in ways:
            try:
                peers.start_gloo()
            except UnsupportedError as error:
                ways.remove(_DDP)
                if kv.rank == 0:
                    print(f"# {_DDP} left out: {error}")
        wrong = _verify(args, ways)
        with tempfile.TemporaryDirectory() as folder:
            of_their_own = [way for way in ways if way.startswith("weights") or way == _NARROW]
            stores = {way: stack.enter_context(_store(way)) for way in of_their_own}
            rows = _measure(args, kv, stores, ways, folder)
        if kv.rank == 0:
            for row in rows:
                print(json.dumps({**row, "wrong": wrong[row["row"]]}), flush=True)
        peers.stop_gloo()
    return int(any(wrong.values()))


def _store(way: str) -> Any:
    import kvmpi

    settings = {_NARROW: {"ring_compression": "bf16"}, _SHARDED: {"sharded_update": "on"}}
    return kvmpi.create("mpi", **settings.get(way, {}))


class _Contestant:
    """A model that is trained in one way, with gradients or weights in ``kv``.

    Attributes:
        step: does one step.
        end: returns when all of the steps before it is done.
    """

    def __init__(self, kv: Any, name: str, way: str, batch: int | None, dtype: Any = None) -> None:
        import torch

        from kvmpi.benchmarks.train_models import MODELS
        from kvmpi.torch import DistributedOptimizer, Trainer

        make, data, usual_batch = MODELS[name]
        torch.manual_seed(0)
        model: Any = make().to(dtype)
        self.batch, self.kv = batch or usual_batch, kv
        self.weights = list(model.parameters())
        self._inputs, self._targets = data(kv.rank, self.batch)
        if self._inputs.is_floating_point():
            self._inputs = self._inputs.to(dtype)
        optimizer: Any = torch.optim.SGD(self.weights, lr=0.01, momentum=0.9)
        self.end: Callable[[], None] = lambda: None
        self._update: Callable[[], Any] = optimizer.step
        if way.startswith(("kvmpi", "weights")):
            weights_back = way.startswith("weights")
            overlap = {"on": True, "off": False}.get(way.partition(":")[2], True if weights_back else None)
            # Statistics of batch normalisation stay with each worker, in all ways alike.
            optimizer = DistributedOptimizer(
                optimizer, kv, model, norm_buffers="own", update_on_kvstore=weights_back, overlap=overlap
            )
            self._update, self.end = optimizer.step, optimizer.synchronize
            if way.endswith(":off"):

                def update() -> None:
                    optimizer.step()
                    optimizer.synchronize()

                self._update = update
        elif way == "trainer":
            trainer = Trainer(self.weights, optimizer, kv, update_on_kvstore=False)
            self._update = lambda: trainer.step(kv.num_workers)
        elif way == _DDP:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer versions of torch rename the first option
                model = torch.nn.parallel.DistributedDataParallel(
                    model, broadcast_buffers=False, gradient_as_bucket_view=True
                )
        self._model, self._optimizer, self._loss = model, optimizer, torch.nn.functional.cross_entropy

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._loss(self._model(self._inputs), self._targets).backward()
        self._update()

    def average_by_mpi(self) -> None:
        """Let MPI itself average all ranks' gradients before each update; for a model that is alone."""
        import torch
        from mpi4py import MPI

        world = MPI.COMM_WORLD

        def update() -> None:
            for weight in self.weights:
                total = weight.grad.numpy(force=True).copy()
                world.Allreduce(MPI.IN_PLACE, total)
                weight.grad = torch.from_numpy(total / world.size)
            self._optimizer.step()

        self._update = update

    def communicating_s(self) -> float:
        """Seconds in the store's collectives until now."""
        phases = self.kv.stats()["phases"]
        return float(sum(phases[name]["seconds"] for name in _COMMUNICATION if name in phases))


def _measure(
    args: argparse.Namespace, kv: Any, stores: Mapping[str, Any], ways: Sequence[str], folder: str
) -> list[dict[str, Any]]:
    """A row for each way; a timeline's files go into ``folder``. ``stores`` are those of ways that need one."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    # The trainer's keys begin at 0; the others take what is free.
    made = {
        way: _Contestant(stores.get(way, kv), args.model, way, args.batch_size)
        for way in sorted(ways, key=lambda way: way != "trainer")
    }
    for contestant in made.values():  # what is planned in the first steps is over then
        for _ in range(_WARM_UP_STEPS):
            contestant.step()
        contestant.end()
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    comm_s: dict[str, list[float]] = {way: [] for way in ways}
    config = Config(timeline=os.path.join(folder, "t.json"), role="worker", rank=kv.rank)
    for number in range(args.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):  # what drifts hits neighbours alike
            contestant = made[way]
            if way == _TRACED:
                timeline.begin(config)
            before_s = contestant.communicating_s()
            world.Barrier()
            start_s = time.perf_counter()
            for _ in range(args.steps):
                contestant.step()
            contestant.end()
            times_s[way].append(world.allreduce(time.perf_counter() - start_s, MPI.MAX) / args.steps)
            comm_s[way].append((contestant.communicating_s() - before_s) / args.steps)
            if way == _TRACED:
                timeline.end()
    if _TRACED in ways and "kvmpi" in ways and kv.rank == 0:
        pairs = zip(times_s["kvmpi"], times_s[_TRACED], strict=True)
        longer = statistics.median(100 * (on / off - 1) for off, on in pairs)
        spans = sum(parts.read(path).num_spans for path in Path(folder).glob("*/*.part")) / (args.rounds * args.steps)
        print(f"# {args.model}: {spans:.0f} spans a step of rank 0, {longer:+.2f} % (median over pairs of rounds)")
    alone_s = statistics.median(times_s[ALONE])
    exposed_s = {way: statistics.median(found) - alone_s for way, found in times_s.items()}
    rows = []
    for way in ways:
        speeds = [made[way].batch / found for found in times_s[way]]
        mean, deviation = statistics.fmean(speeds), statistics.stdev(speeds) if len(speeds) > 1 else 0.0
        of_ddp = exposed_s[way] / exposed_s[_DDP] if _DDP in ways and way != ALONE and exposed_s[_DDP] > 0 else None
        gradients = sum(weight.numel() * weight.element_size() for weight in made[way].weights)
        rows.append({
            "model": args.model, "ranks": kv.num_workers, "row": way, "samples/s": mean, "+-": 1.96 * deviation,
            "total": mean * kv.num_workers, "step_ms": 1e3 * statistics.median(times_s[way]),
            "comm_ms": 1e3 * statistics.median(comm_s[way]) if way not in (ALONE, _DDP) else None,
            "exposed_ms": 1e3 * exposed_s[way] if way != ALONE else None,
            "of_ddp": None if of_ddp is None else round(of_ddp, 2),
            "MB": gradients / 1e6 if way != ALONE else None,
        })  # fmt: skip
    return rows


def _verify(args: argparse.Namespace, ways: Sequence[str]) -> dict[str, int]:
    """How many weights of each are wrong after a few steps, on the rank that has most."""
    import torch
    from mpi4py import MPI

    import kvmpi

    wrong = dict.fromkeys(ways, 0)
    expected: torch.Tensor | None = None
    for way in ways:  # one at a time: large models several times over take much memory
        with kvmpi.create("mpi") as kv:
            contestant = _Contestant(kv, args.model, way, args.batch_size, torch.float64)
            if way == ALONE:  # the first, trained with gradients that no way has summed
                contestant.average_by_mpi()
            for _ in range(_CHECKED_STEPS):
                contestant.step()
            contestant.end()
            found = torch.cat([w.detach().flatten() for w in contestant.weights])
        expected = found if expected is None else expected
        here = int((~torch.isclose(found, expected, rtol=1e-6, atol=1e-9)).sum())
        wrong[way] = MPI.COMM_WORLD.allreduce(here, MPI.MAX)
    return wrong


if __name__ == "__main__":
    sys.exit(main("train", sys.argv[1:]))
