"""The options of ``kvmpi bench`` for collectives: what the user may say, and the plan that follows from it."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Callable, Sequence
from os.path import expanduser

from kvmpi.arrays import DTYPES
from kvmpi.benchmarks import rows, sizes
from kvmpi.benchmarks.netlab import NetLab
from kvmpi.benchmarks.plan import Case, RowName
from kvmpi.errors import ConfigError
from kvmpi.planner.presets import PRESETS

_EXAMPLES = """\
examples:
  kvmpi bench {op}                                      everything, on 2 ranks of this host
  kvmpi bench {op} -n 2,4 --sizes 4K,1M,64M --plot bw.png
  kvmpi bench {op} --preset resnet50                    the gradients of a step
  kvmpi bench {op} --algorithm auto                     what auto takes, and how far it is from the best
  kvmpi bench {op} --hosts 4 --link 1gbit               between hosts that are simulated (root, Linux)
  mpirun -n 8 kvmpi bench {op}                          on ranks that somebody else starts

rows: {rows}
A row is NAME or NAME:MODIFIER...: `in` works in place; `empty` takes its input from kv.empty (store: the result too);
`view` reads the result in memory that the ranks of the host share (store: its value, kv.view); `gpu` has input and
result on the rank's GPU; `bucket` (gloo) copies arrays into buckets of 25 MiB and back; `sum` (store) calls
kv.allreduce instead of kv.pushpull; `spin` ({mpi}) runs in a second job, whose ranks do not yield while they wait.
naive is slow and there only by name.{gloo}

exit status: 0; 1 if a result was wrong or a job failed; 2 for a bad option.
"""
_GLOO = " gloo always sums in place."


def parser(op: str) -> argparse.ArgumentParser:
    """The options of ``kvmpi bench OP``."""
    result = argparse.ArgumentParser(
        prog=f"kvmpi bench {op}",
        usage=f"kvmpi bench {op} [options]",
        description=f"How fast {op} is: kvmpi's algorithms beside MPI's own and others, in one table. Every row is\n"
        "verified before it is timed; rows of a size take turns; the time of an iteration is that of the slowest rank.",
        epilog=_EXAMPLES.format(
            op=op, rows=", ".join(rows.known(op)), mpi=rows.MPI_CALLS[op], gloo=_GLOO if op == "allreduce" else ""
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("-n", "--ranks", metavar="N,...", help="numbers of ranks, one after the other (default 2)")
    group = result.add_mutually_exclusive_group()
    group.add_argument(
        "--sizes", metavar="S,...", help="bytes of an array: 0,4,4K,1M,... in powers of 1024 (default: 0, 4, 16, ... "
        "256M and two odd counts)",
    )  # fmt: skip
    group.add_argument("--preset", choices=list(PRESETS),
        help="all gradients of a model instead of one array; gpt-small: as GPT-2 small, 498 MB")  # fmt: skip
    add("--dense", action="store_true", help="by default every power of 2, not of 4")
    add("--large", action="store_true", help="by default also 1 GiB and a bit over 2 GiB")
    add("--algorithms", "--algorithm", metavar="ROW,...", help="rows of the table, see below (default: all of use)")
    add("--dtype", choices=list(DTYPES), default="float32", metavar="T", help=f"{', '.join(DTYPES)} (default float32)")
    if op in ("allreduce", "reduce_scatter"):
        add("--vectors", type=int, default=1, metavar="N", help="vectors to sum on each rank, 1 to 8 (default 1)")
    add("--rings", type=int, metavar="N", help="rings of multi_ring (default: kvmpi's)")
    add("--chunk", metavar="BYTES", help="chunk of rings, for example 256K (default: kvmpi's)")
    add(
        "--yield", dest="idle", choices=("on", "off", "both"),
        help=f"whether idle ranks of Open MPI yield; off names {rows.MPI_CALLS[op]} with :spin, both runs two jobs "
        "(default: they yield if there are more ranks than cores)",
    )  # fmt: skip
    add(
        "--mpich",
        type=expanduser,
        metavar="PATH",
        help=f"MPICH's mpiexec, or a Python beside one, for the row {rows.MPICH}",
    )
    add("--hosts", type=int, metavar="N", help="simulate N hosts on this machine")
    add("--link", metavar="SPEED", help="speed of the simulated hosts' links (default 1gbit)")
    add("--ranks-per-host", type=int, metavar="R", help="ranks on each simulated host (default 1)")
    add_common(result, seconds=0.5, drawn="busbw")
    return result


def add_common(parser: argparse.ArgumentParser, *, seconds: float, drawn: str) -> None:
    """What every benchmark with a table has; see ``check_common``."""
    add = parser.add_argument
    text = f"time for a row of a size (default {seconds:g})"
    add("--seconds", type=duration, default=seconds, metavar="S", help=text)
    add("--json", type=expanduser, metavar="FILE", help="write a JSON line for each row, with all that belongs to it")
    add("--plot", type=expanduser, metavar="FILE.png", help=f"draw {drawn} against size")


def check_common(args: argparse.Namespace) -> None:
    """Refuse values of ``add_common``'s options that make no sense.

    Raises:
        ValueError: one of them.
    """
    if args.plot and not args.plot.lower().endswith((".png", ".svg", ".pdf")):
        raise ValueError(f"--plot {args.plot}: expected a name that ends in .png, .svg or .pdf")


def at_least(least: int) -> Callable[[str], int]:
    """What ``argparse`` makes a number with; smaller ones are refused."""

    def number(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number from {least} on")
        return int(text)

    return number


def duration(text: str) -> float:
    """As ``at_least``: a positive time that ends."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number of seconds")
    return found


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """``2,4`` -> 2 and 4, each once.

    Raises:
        ValueError: these are no such numbers.
    """
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) >= least for word in words):
        kind = "positive numbers" if least == 1 else f"numbers from {least} on"
        raise ValueError(f"{option} {text}: expected {kind} such as 2 or 2,4")
    return list(dict.fromkeys(map(int, words)))


def parse(op: str, argv: Sequence[str]) -> argparse.Namespace:
    """The user's options, complete: ``ranks`` is a list, ``rows`` are names, ... Ends the program if they are bad."""
    options = parser(op)
    args = options.parse_args(argv)
    args.command = shlex.join(["kvmpi", "bench", op, *argv])
    args.op, args.vectors = op, getattr(args, "vectors", 1)
    try:
        _complete(args)
    except (ValueError, ConfigError) as error:
        options.error(str(error))
    return args


def _complete(args: argparse.Namespace) -> None:
    if not 1 <= args.vectors <= 8:
        raise ValueError(f"--vectors {args.vectors}: expected 1 to 8")
    if args.rings is not None and not 1 <= args.rings <= 8:
        raise ValueError(f"--rings {args.rings}: expected 1 to 8")
    args.rings = args.rings or 0
    check_common(args)
    args.chunk_bytes = sizes.parse_bytes(args.chunk) if args.chunk else 0
    if args.chunk_bytes >= 1 << 62:
        raise ValueError(f"--chunk {args.chunk}: expected less than 2^62 bytes")
    if args.preset and (args.dense or args.large):
        raise ValueError("--dense and --large are about sizes; a preset has its own")
    if args.sizes is not None:
        sizes.parse_sizes(args.sizes, 1)
    if args.ranks and args.hosts:
        raise ValueError("-n and --hosts: give --hosts and --ranks-per-host instead of -n")
    if not args.hosts and (args.link or args.ranks_per_host):
        raise ValueError("--link and --ranks-per-host are about simulated hosts; say how many with --hosts")
    if args.hosts and args.mpich:
        raise ValueError("--mpich: on simulated hosts only Open MPI is measured")
    args.ranks_given = args.ranks is not None
    args.ranks = numbers("-n", args.ranks) if args.ranks else [2]
    if args.hosts is not None:
        args.ranks_per_host = args.ranks_per_host or 1
        args.link = args.link or "1gbit"
        if args.hosts < 1 or args.ranks_per_host < 1:
            raise ValueError("--hosts and --ranks-per-host must be positive")
        NetLab(args.hosts, args.link)  # refuses what cannot be
        args.ranks = [args.hosts * args.ranks_per_host]
    args.rows = rows.parse(args.algorithms, args.op) if args.algorithms is not None else None


def cases(args: argparse.Namespace, num_ranks: int) -> tuple[Case, ...]:
    """What to measure on so many ranks."""
    if args.preset:
        return (Case(tuple(math.prod(shape) for shape in PRESETS[args.preset]()), args.preset),)
    itemsize = DTYPES[args.dtype].itemsize
    if args.sizes is not None:
        counts = sizes.parse_sizes(args.sizes, itemsize)
    else:
        counts = sizes.default_counts(num_ranks, itemsize, dense=args.dense, large=args.large)
    return tuple(Case((count,)) for count in counts)


def wanted_rows(args: argparse.Namespace, *, mpich: bool) -> list[RowName]:
    """The rows of the table, in order; those of the MPI library named after how its ranks wait."""
    names = args.rows or rows.default(args.op, preset=bool(args.preset), mpich=mpich)
    call, found = rows.MPI_CALLS[args.op], []
    for name in names:
        spins = rows.SPIN in name.how
        spinning = name if spins else RowName.parse(f"{name.label}:{rows.SPIN}")
        if name.kind != call or spins or args.idle in (None, "on"):
            found.append(name)
        else:
            found += [name, spinning] if args.idle == "both" else [spinning]
    return list(dict.fromkeys(found))
