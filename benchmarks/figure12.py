"""``kvmpi bench figure12`` and ``predict``: real jobs on hosts of a lab, beside what ``kvmpi plan`` says of them.

Figure 12 of MXNET-MPI (arXiv:1801.03855) shows the mean epoch of five algorithms with 12 workers, 2 servers and 2
clients. Here hosts are network namespaces with links of 1 Gbit/s, gradients are those of ResNet-50, and the
computation is a sleep, so that two cores are enough. A client's workers share a host, and servers have hosts of their
own.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from math import prod
from os.path import expanduser

from kvmpi.benchmarks import environment, lab_jobs, lab_report
from kvmpi.benchmarks.jobs import refuse_ranks
from kvmpi.benchmarks.lab_jobs import Scenario
from kvmpi.benchmarks.netlab import NetLab
from kvmpi.benchmarks.report import JsonLines, check_plot, complain, exit_status, writing
from kvmpi.benchmarks.sizes import parse_bytes
from kvmpi.benchmarks.table import Row
from kvmpi.errors import ConfigError
from kvmpi.planner.presets import PRESETS
from kvmpi.planner.spec import ALGORITHMS

#: A job may take so many times what is planned, and a time to start and to end.
_SLOWER, _PATIENCE_S = 5.0, 420.0
_FIGURE = "dist-SGD,dist-ASGD,mpi-SGD,mpi-ASGD,mpi-ESGD"


def _keys(nbytes: int, num_keys: int) -> tuple[int, ...]:
    return (nbytes // 4 // num_keys,) * num_keys


_RESNET50 = tuple(prod(shape) for shape in PRESETS["resnet50"]())
#: Other shapes of jobs than figure 12's; no figure of the planner was chosen by them.
VALIDATION = (
    Scenario("dist-SGD", 1, 1, 1, 1, _keys(40_000_000, 20), 0.2, model="40MB", steps=6),
    Scenario("dist-SGD", 4, 4, 1, 4, _keys(26_000_000, 25), 0.3, model="26MB", link="500mbit"),
    Scenario("dist-ASGD", 6, 6, 2, 3, _keys(40_000_000, 10), 0.3, model="40MB", steps=6),
    Scenario("dist-ESGD", 4, 4, 1, 2, _keys(60_000_000, 60), 0.3, interval=2, model="60MB", link="500mbit"),
    Scenario("mpi-SGD", 4, 1, 0, 4, _keys(64_000_000, 40), 0.2, model="64MB", link="250mbit"),
    Scenario("mpi-SGD", 6, 3, 1, 3, _RESNET50, 0.4, model="resnet50", link="500mbit"),
    Scenario("mpi-ASGD", 4, 2, 2, 2, _RESNET50, 0.3, model="resnet50", link="500mbit", steps=6),
    Scenario("mpi-ESGD", 4, 2, 1, 4, _keys(40_000_000, 30), 0.3, interval=3, model="40MB", link="250mbit", steps=3),
    Scenario("DiLoCo", 6, 2, 2, 2, _keys(80_000_000, 50), 0.3, interval=4, model="80MB", link="250mbit"),
)


def parser(name: str) -> argparse.ArgumentParser:
    """The options of either."""
    result = argparse.ArgumentParser(
        prog=f"kvmpi bench {name}", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(__doc__ or "").partition("\n\n")[2]
        if name == "figure12"
        else "Jobs of nine shapes on hosts of a lab, and how far kvmpi plan is off.",
    )  # fmt: skip
    add = result.add_argument
    add("--epochs", type=int, default=2, metavar="E", help="that are measured (default 2)")
    add("--json", type=expanduser, metavar="FILE", help="write a JSON line for each job")
    if name == "predict":
        add("--only", metavar="I,...", help="some of them, counted from 1 (default all)")
        return result
    add("--algorithms", default=_FIGURE, metavar="A,...", help=f"default {_FIGURE}")
    add("-n", "--workers", type=int, default=12, metavar="N", help="default 12")
    add("-c", "--clients", type=int, default=2, metavar="C", help="of the mpi algorithms (default 2)")
    add("-s", "--servers", type=int, default=2, metavar="S", help="each on a host of its own (default 2)")
    add("--hosts", type=int, default=2, metavar="H", help="that workers are on (default 2)")
    add("--link", default="1gbit", metavar="RATE", help="of each host (default 1gbit)")
    add("--model", default="resnet50", metavar="M",
        help=f"{', '.join(PRESETS)}, or bytes such as 40M in 40 keys; gpt-small: as GPT-2 small, 498 MB")  # fmt: skip
    add("--compute-seconds", type=float, default=0.5, metavar="S", help="of a step (default 0.5)")
    add("--steps", type=int, default=4, metavar="B", help="of an epoch (default 4)")
    add("--interval", type=int, default=4, metavar="T", help="of ESGD and DiLoCo (default 4: once an epoch)")
    add("--plot", type=expanduser, metavar="FILE.png", help="draw the bars")
    return result


def main(name: str, argv: Sequence[str]) -> int:
    """Run ``kvmpi bench NAME ARGV``; the exit status: 1 if a value was wrong or a job failed."""
    options = parser(name)
    args = options.parse_args(argv)
    try:
        scenarios = _chosen(args) if name == "predict" else _figure(args)
    except (ValueError, ConfigError) as error:
        options.error(str(error))
    return exit_status(lambda: _bench(args, name, scenarios))


def _chosen(args: argparse.Namespace) -> list[Scenario]:
    if args.epochs < 1:
        raise ValueError("--epochs must be at least 1")
    found = [Scenario(**{**vars(scenario), "epochs": args.epochs}) for scenario in VALIDATION]
    if not args.only:
        return found
    numbers = [int(word) if word.isdecimal() else 0 for word in args.only.split(",")]
    if not all(1 <= number <= len(found) for number in numbers):
        raise ValueError(f"--only {args.only}: expected numbers from 1 to {len(found)}")
    return [found[number - 1] for number in numbers]


def _figure(args: argparse.Namespace) -> list[Scenario]:
    if min(args.epochs, args.steps, args.interval, args.hosts, args.servers, args.clients) < 1:
        raise ValueError("--epochs, --steps, --interval, --hosts, -s and -c must be at least 1")
    if args.workers < max(args.clients, args.hosts):
        raise ValueError(f"-n {args.workers}: every client and every host needs a worker")
    if not args.compute_seconds >= 0:
        raise ValueError(f"--compute-seconds {args.compute_seconds}: expected zero or more")
    if args.plot and not args.plot.endswith(".png"):
        raise ValueError(f"--plot {args.plot}: expected a name that ends in .png")
    NetLab(args.hosts + args.servers, args.link)  # refuses what cannot be
    if args.model in PRESETS:
        counts = tuple(prod(shape) for shape in PRESETS[args.model]())
    else:
        counts = _keys(max(160, parse_bytes(args.model)), 40)
    found = []
    for word in filter(None, args.algorithms.split(",")):
        if word not in ALGORITHMS:
            raise ValueError(f"--algorithms {word}: known are {', '.join(ALGORITHMS)}")
        found.append(
            Scenario(
                word, args.workers, args.clients, args.servers, args.hosts, counts, args.compute_seconds,
                args.interval, args.steps, args.epochs, link=args.link, model=args.model,
            )
        )  # fmt: skip
    if not found:
        raise ValueError("--algorithms names none")
    few = [one for one in found if ALGORITHMS[one.algorithm].averages and one.total_steps < args.interval]
    if few:
        steps = few[0].total_steps
        raise ValueError(f"--interval {args.interval}: {few[0].algorithm} would exchange nothing in its {steps} steps")
    if 0 in lab_jobs.spread(args.workers, args.hosts):
        each = -(-args.workers // args.hosts)
        raise ValueError(f"-n {args.workers}: every host needs a worker, and with {each} on each one is left without")
    return found


def _bench(args: argparse.Namespace, name: str, scenarios: Sequence[Scenario]) -> int:
    refuse_ranks(name)
    lab_jobs.check_memory(scenarios)
    plot = getattr(args, "plot", None)
    check_plot(plot)
    lines = JsonLines(args.json)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # hosts and folders are removed on the way
    here = environment.here()
    commit = f" ({here['commit']})" if here["commit"] else ""
    print(f"# {here['host']}, {here['cores']} cores, kvmpi {here['kvmpi']}{commit}, Python {here['python']}; a lab")
    for text in lab_report.LEGEND:
        print(f"# {text}")
    print(lab_report.table().header(), flush=True)
    rows: list[Row] = []
    for scenario in scenarios:
        rows.append(_one(scenario, here, lines))
    lines.close()
    if name == "figure12" and (faster := lab_report.speedups(rows)):
        print(f"# {faster}")
    print(f"# {lab_report.errors(rows)}")
    if plot:
        what = f"{args.workers} workers, {args.servers} servers, {args.clients} clients, {args.link}, {args.model}"
        with writing(plot):
            lab_report.draw(plot, rows, f"Mean epoch of {args.steps} steps: {what}")
    return int(any(row["wrong"] for row in rows))


def _one(scenario: Scenario, here: dict[str, object], lines: JsonLines) -> Row:
    planned = lab_report.plan(scenario)
    timeout_s = _PATIENCE_S + _SLOWER * scenario.total_steps * planned.step_s
    with NetLab(scenario.num_lab_hosts, link=scenario.link) as lab:
        row = lab_report.row_of(scenario, lab_jobs.run(lab, scenario, timeout_s), planned)
    print(lab_report.line(row), flush=True)
    if row["wrong"]:
        complain(f"WRONG: {lab_jobs.describe(scenario)}: {row['wrong']} keys")
    lines.write({**row, **here})
    return row


if __name__ == "__main__":
    sys.exit(main("figure12", sys.argv[1:]))
