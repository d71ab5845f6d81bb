"""``kvmpi plan``: what a job will do, from the command line."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmpi.collectives.cost import load
from kvmpi.errors import ConfigError, KVError
from kvmpi.launchers.summary import counted
from kvmpi.planner import memory, models
from kvmpi.planner.calibrate import from_lines
from kvmpi.planner.predict import Prediction, predict
from kvmpi.planner.presets import PRESETS
from kvmpi.planner.recommend import Recommendation, candidates, describe, recommend
from kvmpi.planner.spec import ALGORITHMS, MOST, Cluster, Disturbance, Job, ServerFigures, parse_link

if TYPE_CHECKING:
    from rich.console import Console

_EXAMPLES = """\
examples:
  kvmpi plan --model resnet50 -n 12 -c 2 -s 2 --hosts 4 --link 1gbit --compute-seconds 0.5 --algorithm all
  kvmpi plan --model 100M --keys 50 --compute-seconds 0.2 -n 64 --hosts 16 --link 10gbit --recommend
  kvmpi plan --model model.json -n 8 -c 4 -s 2 --hosts 8 --slow-workers 1 --slow-factor 2 --algorithm mpi-SGD,mpi-ASGD

Equations and sources: docs/plan.md
"""
_LEAST_WIDTH = 80
_TOLD_EVERY_S = 10.0
_SHOWN = 12  # rows of a recommendation
_EVENTS_EACH = 6_000  # of one of its many predictions
#: Names that fit into a column.
_SHORT = {
    "servers' links": "server links", "servers' processors": "server CPUs", "links of workers' hosts": "host links",
    "sums inside clients": "sums", "the lab's cores": "lab cores",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The options of ``kvmpi plan``."""
    result = argparse.ArgumentParser(
        prog="kvmpi plan", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_EXAMPLES,
        description="Predict what a data-parallel job will do on a cluster: time of a step and of an epoch,\n"
        "communication that computation does not hide, staleness, load of the servers. Starts nothing.",
    )  # fmt: skip
    add = result.add_argument_group("the model").add_argument
    add("--model", default="resnet50", metavar="M",
        help=f"{', '.join(PRESETS)}, a file of layers (*.json), or bytes such as 100M (default resnet50)")  # fmt: skip
    add("--compute-seconds", type=float, metavar="S", help="of a step of one worker, without communication")
    add("--keys", type=int, metavar="K", help="arrays that share the bytes of --model 100M (default 1)")
    add = result.add_argument_group("the job").add_argument
    add("-n", "--workers", type=int, default=4, metavar="N", help="default 4")
    add("-c", "--clients", type=int, metavar="C", help="of the mpi algorithms (default 1)")
    add("-s", "--servers", type=int, metavar="S", help="default 1")
    add("--algorithm", default="all", metavar="A,...", help=f"all (default), or some of {', '.join(ALGORITHMS)}")
    add("--interval", type=int, metavar="T", help="steps between exchanges of weights (default 64)")
    add("--optimizer", default="momentum", choices=[*memory.OPTIMIZERS], help="for memory (default momentum, of SGD)")
    add("--overlap", action="store_true", help="gradients leave during the backward pass (DistributedOptimizer)")
    add("--steps", type=int, default=100, metavar="B", help="of a worker in an epoch (default 100)")
    add = result.add_argument_group("the cluster").add_argument
    add("--hosts", type=int, default=1, metavar="H", help="that workers are on, which fill them in order (default 1)")
    add("--server-hosts", type=int, default=0, metavar="H", help="for servers alone (default 0: with the workers)")
    add("--cores", type=int, default=0, metavar="N", help="of a host, if workers compute on them (default 0: enough)")
    add("--link", default="10gbit", metavar="RATE", help="of each host: 100mbit, 1gbit, ... (default 10gbit)")
    add("--latency-us", type=float, default=20.0, metavar="US", help="between hosts, one way (default 20)")
    add("--memory-gb-per-s", type=float, metavar="R", help="memory bandwidth of a host, instead of --tuning")
    add("--tuning", type=expanduser, default="", metavar="FILE", help="of kvmpi bench tune (default: built-in figures)")
    add(
        "--ps",
        type=expanduser,
        default="",
        metavar="FILE",
        help="JSON lines of kvmpi bench ps (default: built-in figures)",
    )
    add("--lab-cores", type=int, default=0, metavar="N", help="all hosts are simulated on one machine of N cores")
    add = result.add_argument_group("what goes wrong").add_argument
    add("--jitter", type=float, default=0.0, metavar="X", help="steps' times vary: standard deviation of their log")
    add("--slow-workers", type=int, default=0, metavar="N", help="so many workers are slow")
    add("--slow-factor", type=float, default=2.0, metavar="X", help="they take so many times as long (default 2)")
    add("--mtbf-hours", type=float, default=math.inf, metavar="H", help="of one worker (default: none fails)")
    add("--restart-seconds", type=float, default=60.0, metavar="S", help="until a client is back (default 60)")
    add = result.add_argument_group("the answer").add_argument
    add("--recommend", action="store_true", help="try clients, servers, algorithms and intervals that are not given")
    add("--json", action="store_true", help="one JSON object a line instead of a table")
    add("--seed", type=int, default=0, metavar="N", help="of what varies (default 0)")
    return result


def main(argv: Sequence[str]) -> int:
    """Run ``kvmpi plan ARGV``; the exit status."""
    args = parser().parse_args(argv)
    try:
        return _plan(args)
    except KVError as error:
        print(f"kvmpi plan: {error}", file=sys.stderr)
        return 2


def _plan(args: argparse.Namespace) -> int:
    for name in ("workers", "clients", "interval", "keys"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= MOST:
            raise ConfigError(f"--{name} {value}: expected 1 to {MOST}")
    model = models.read(args.model, args.compute_seconds, args.keys)
    cluster = _cluster(args)
    disturbance = Disturbance(
        args.jitter, args.slow_workers, args.slow_factor, 3600 * args.mtbf_hours, args.restart_seconds
    )

    def one(job: Job) -> Prediction:
        events = {"events": _EVENTS_EACH} if args.recommend else {}
        return predict(model, cluster, job, disturbance, steps=args.steps, seed=args.seed, **events)

    names = _algorithms(args.algorithm)
    title = (
        f"{args.model}: {model.nbytes / 1e6:.4g} MB in {counted(len(model.layers), 'key')}, {model.compute_s:.4g} s of "
        f"computation a step; {counted(args.workers, 'worker')} on {counted(args.hosts, 'host')}, {args.link}"
    )
    if args.recommend:
        jobs = candidates(
            args.workers, args.hosts, clients=args.clients, servers=args.servers, algorithms=names,
            interval=args.interval, overlap=args.overlap,
        )  # fmt: skip
        if not jobs:
            raise ConfigError("no algorithm can run like that; leave out -c or -s, or name others with --algorithm")
        from rich.console import Console
        from rich.progress import track

        # For hundreds of workers this takes minutes.
        console = Console(stderr=True)
        is_seen = console.is_terminal
        shown = track(jobs, "predicting", console=console, transient=True) if is_seen else _told(jobs)
        found = recommend(shown, one)
        _show(args, title, model.nbytes, found.sorted, found)
        return 0
    clients, servers = 1 if args.clients is None else args.clients, 1 if args.servers is None else args.servers
    jobs, refused = [], []
    for name in names:
        try:
            jobs.append(
                Job(name, args.workers, clients, servers, 64 if args.interval is None else args.interval, args.overlap)
            )
        except ConfigError as error:
            refused.append(error)
    if not jobs or (refused and args.algorithm != "all"):
        raise refused[0]
    _show(args, title, model.nbytes, [one(job) for job in jobs], None)
    return 0


def _told(jobs: Sequence[Job]) -> Iterator[Job]:
    """``jobs``, and now and then a line on standard error on how far one is."""
    began_s = told_s = time.monotonic()
    for done, job in enumerate(jobs):
        now_s = time.monotonic()
        if done and now_s - told_s >= _TOLD_EVERY_S:
            told_s = now_s
            left_s = (now_s - began_s) * (len(jobs) - done) / done
            print(
                f"kvmpi plan: {done} of {len(jobs)} jobs tried, about {left_s:.0f} s left", file=sys.stderr, flush=True
            )
        yield job


def _cluster(args: argparse.Namespace) -> Cluster:
    figures = load(args.tuning, "--tuning ")
    per_host = -(-args.workers // max(1, args.hosts))
    if args.memory_gb_per_s is not None:
        if not 0 < args.memory_gb_per_s < math.inf:
            raise ConfigError(f"--memory-gb-per-s {args.memory_gb_per_s}: expected a positive number")
        # Per byte of the result an addition moves three, a copy two; all workers of a host do it at once.
        rate = 1e9 * args.memory_gb_per_s / per_host
        figures = replace(figures, add_bytes_per_s=rate / 3, copy_bytes_per_s=rate / 2)
    servers = ServerFigures()
    if args.ps:
        try:
            servers = from_lines(Path(args.ps).read_text().splitlines(), args.ps)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--ps {args.ps}: {error}") from None
    return Cluster(
        args.hosts, args.server_hosts, args.cores, parse_link(args.link), 1e-6 * args.latency_us, args.lab_cores,
        figures, servers,
    )  # fmt: skip


def _algorithms(text: str) -> list[str]:
    if text == "all":
        return list(ALGORITHMS)
    by_lower = {name.lower(): name for name in ALGORITHMS}
    found = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word.lower().partition("-")[2] in ("ssp", "softsync"):
            kind = word.partition("-")[0].lower()
            raise ConfigError(
                f"--algorithm {word}: whom its clients wait for depends on how even they are, which is not predicted; "
                f"its limits are {kind}-SGD, whose clients wait for all, and {kind}-ASGD, whose clients wait for nobody"
            )
        if word.lower() not in by_lower:
            raise ConfigError(f"--algorithm {word}: known are all, {', '.join(ALGORITHMS)}")
        found.append(by_lower[word.lower()])
    if not found:
        raise ConfigError(f"--algorithm names none; known are all, {', '.join(ALGORITHMS)}")
    return found


# ---- what is shown


def as_row(of: Prediction) -> dict[str, Any]:
    """A prediction as plain values, for JSON."""
    row = {name: value for name, value in asdict(of).items() if name != "job"}
    return {
        "algorithm": of.job.algorithm, "workers": of.job.workers, "clients": of.job.num_clients,
        "servers": of.job.servers, "interval": of.job.interval if of.job.of.averages else 1, **row,
        "mean_staleness": of.mean_staleness,
    }  # fmt: skip


def _show(
    args: argparse.Namespace, title: str, nbytes: int, found: Sequence[Prediction], recommended: Recommendation | None
) -> None:
    needs = memory.of(nbytes, args.optimizer, args.workers)
    if args.json:
        for of in found:
            chosen = {} if recommended is None else {"recommended": of is recommended.best}
            sizes = None if of.sharded_step_s is None else asdict(needs)
            print(json.dumps({**as_row(of), "memory_bytes": sizes, **chosen}))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("algorithm", no_wrap=True)
    for name in ("c", "s", "step s", "exposed", "epoch s", "stale", "NIC", "CPU", "MB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bottleneck", no_wrap=True)
    shown = list(found[: _SHOWN if recommended else len(found)])
    if recommended is not None and recommended.best not in shown:
        shown.append(recommended.best)
    for of in shown:
        best = recommended is not None and of is recommended.best
        table.add_row(*_cells(of), style="bold" if best else None)
    # As wide as its numbers are: one that is cut is another one.
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    console.width = max(_LEAST_WIDTH, console.width, needed)
    console.print(title, soft_wrap=False)
    console.print(table)
    console.print(
        "exposed: of a step, beyond computation. stale: pushes of others between two of one's own. NIC, CPU: how busy "
        "the servers' are. MB: pushed by a client in a step.", style="dim",
    )  # fmt: skip
    if recommended is None:
        for of in found:
            console.print(f"{of.job.algorithm}: {of.reason}{_spread(of)}")
            _tell_of_shares(console, of, needs, args.optimizer)
    else:
        console.print(
            f"{counted(len(found), 'job')} tried. Recommended: {describe(recommended.best.job)}", style="bold"
        )
        console.print(recommended.reason)
        _tell_of_shares(console, recommended.best, needs, args.optimizer)


def _tell_of_shares(console: Console, of: Prediction, needs: memory.Memory, optimizer: str) -> None:
    if of.sharded_step_s is not None:
        console.print(
            f"{of.job.algorithm} with KVMPI_SHARDED_UPDATE=on: a step of {_seconds(of.sharded_step_s)} s; "
            f"{needs.verdict(optimizer)}"
        )


def _cells(of: Prediction) -> list[str]:
    job, stale = of.job, of.mean_staleness
    name = f"{job.algorithm} /{job.interval}" if job.of.averages else job.algorithm
    return [
        name, str(job.num_clients), str(job.servers), _seconds(of.step_s), _seconds(of.exposed_s),
        _seconds(of.epoch_s), "-" if stale is None else f"{stale:.1f}", *(
            [f"{100 * of.nic_busy:.0f}%", f"{100 * of.processor_busy:.0f}%"] if job.servers else ["-", "-"]
        ), f"{of.pushed_bytes / 1e6:.3g}", _SHORT.get(of.bottleneck, of.bottleneck),
    ]  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _spread(of: Prediction) -> str:
    """Where half and nearly all of the staleness lies."""
    pushes = sum(of.staleness.values())
    if not pushes:
        return ""
    ends, below = [], 0
    for value, count in sorted(of.staleness.items()):
        below += count
        ends.append((value, below / pushes))
    median, late = (next(value for value, share in ends if share >= q) for q in (0.5, 0.99))
    return f"; staleness {median} (p50), {late} (p99)"
