"""The options of ``kvmpi bench ps``: what the user may say, and what is measured then."""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from os.path import expanduser

from kvmpi.benchmarks import ps_rows, sizes
from kvmpi.benchmarks.options import add_common, check_common, numbers
from kvmpi.benchmarks.plan import Case
from kvmpi.collectives.schedule import segment_bounds
from kvmpi.errors import ConfigError
from kvmpi.planner.presets import PRESETS

ITEM_BYTES = 4  # values are float32
_SIZES = "4K,16K,64K,256K,1M,4M,16M,64M"
_EXAMPLES = """\
examples:
  kvmpi bench ps                                        two workers, each its own client, two servers
  kvmpi bench ps -n 1,4 --sizes 4K,256K,4M,64M --mxnet ~/mxnet/bin/python --plot ps.png
  kvmpi bench ps -n 4 -c 2                              two MPI clients of two workers
  kvmpi bench ps --preset resnet50 --mode sync,async --compress none,fp16
  kvmpi bench ps --rows tcp,tcp:fp16,tcp:chunk_bytes=1048576:window_bytes=8388608

rows: {kinds}
A row of kvmpi is NAME or NAME:MODIFIER...: {modifiers}; SETTING=VALUE sets KVMPI_SETTING in the
processes of its job.
sockets is a server of plain TCP sockets that does nothing but add up: what is left to gain by any other way over TCP.
mxnet is MXNet 1.9.1 in an environment of its own (Python 3.10: pip install mxnet==1.9.1 numpy==1.23.5).

exit status: 0; 1 if a value was wrong or a job failed; 2 for a bad option.
"""


@dataclass(frozen=True)
class Layout:
    """The shape of a job."""

    workers: int
    clients: int
    servers: int

    @property
    def grouped(self) -> bool:
        """Whether some client has several workers, which MPI joins."""
        return self.clients < self.workers


def parser() -> argparse.ArgumentParser:
    """The options of ``kvmpi bench ps``."""
    result = argparse.ArgumentParser(
        prog="kvmpi bench ps",
        usage="kvmpi bench ps [options]",
        description="How fast values go through parameter servers: push, pull and the fused pushpull, over TCP and\n"
        "ipc, beside MXNet. Every row is verified before and after it is timed; rows of a size take turns.",
        epilog=_EXAMPLES.format(kinds=", ".join(ps_rows.KINDS), modifiers=", ".join(ps_rows.MODIFIERS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("-n", "--workers", metavar="N,...", default="2", help="numbers of workers, one after the other (default 2)")
    add("-c", "--clients", metavar="N,...", help="numbers of clients (default: every worker is one)")
    add("-s", "--servers", metavar="N,...", default="2", help="numbers of servers (default 2)")
    group = result.add_mutually_exclusive_group()
    group.add_argument(
        "--sizes", metavar="S,...", default=_SIZES,
        help=f"bytes of a call: 0,4,4K,1M,... in powers of 1024 (default {_SIZES})",
    )  # fmt: skip
    group.add_argument("--preset", choices=list(PRESETS),
        help="the gradients of a model, in one call; gpt-small: as GPT-2 small, 498 MB")  # fmt: skip
    add("--keys", type=int, metavar="K", help="keys of a call, which share its bytes evenly (default 1)")
    add("--mode", metavar="M,...", default="sync", help="sync, async: dist_sync, dist_async (default sync)")
    group = result.add_mutually_exclusive_group()
    group.add_argument("--rows", metavar="ROW,...", help="rows of the table, see below")
    group.add_argument("--transport", metavar="T,...", help="rows auto, tcp or ipc (default tcp,ipc)")
    add("--compress", metavar="C,...", help="these rows with none, fp16, bf16 (default none)")
    add("--mxnet", type=expanduser, metavar="PYTHON", help="an interpreter that has MXNet, for the row mxnet")
    add_common(result, seconds=1.0, drawn="client_bw")
    return result


def parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """The user's options, complete: ``layouts``, ``rows`` and ``cases``. Ends the program if they are bad."""
    options = parser()
    args = options.parse_args(argv)
    args.command = shlex.join(["kvmpi", "bench", name, *argv])
    try:
        check_common(args)
        args.layouts = _layouts(args)
        args.rows_given = args.rows is not None
        args.rows = _rows(args)
        args.cases = _cases(args)
    except (ValueError, ConfigError) as error:
        options.error(str(error))
    return args


def _layouts(args: argparse.Namespace) -> list[Layout]:
    workers, servers = numbers("-n", args.workers), numbers("-s", args.servers)
    clients = numbers("-c", args.clients) if args.clients else [0]
    found = [Layout(n, c or n, s) for n, c, s in itertools.product(workers, clients, servers)]
    if bad := next((layout for layout in found if layout.clients > layout.workers), None):
        raise ValueError(f"-n {bad.workers} -c {bad.clients}: every client needs a worker")
    return found


def _rows(args: argparse.Namespace) -> list[ps_rows.PsRow]:
    modes = ps_rows.choices("--mode", args.mode, ps_rows.MODES)
    if args.rows is None:
        transports = ps_rows.choices("--transport", args.transport or "tcp,ipc", ps_rows.TRANSPORTS)
        compressions = ps_rows.choices("--compress", args.compress or "none", ps_rows.COMPRESSIONS)
        return ps_rows.wanted(ps_rows.default(transports, compressions, mxnet=bool(args.mxnet)), modes)
    if args.compress:
        raise ValueError("--compress is about the rows of --transport; with --rows name a row such as tcp:fp16")
    found = ps_rows.wanted([word for word in args.rows.split(",") if word.strip()], modes)
    if not found:
        raise ValueError(f"no rows given; known: {', '.join(ps_rows.KINDS)}")
    if not args.mxnet and any(row.way.system == ps_rows.MXNET for row in found):
        raise ValueError("the row mxnet needs an interpreter that has MXNet: --mxnet PYTHON")
    return found


def _cases(args: argparse.Namespace) -> tuple[Case, ...]:
    if args.preset:
        if args.keys is not None:
            raise ValueError("--keys: a preset has its own")
        return (Case(tuple(prod(shape) for shape in PRESETS[args.preset]()), args.preset),)
    num_keys = 1 if args.keys is None else args.keys
    if num_keys < 1:
        raise ValueError(f"--keys {num_keys}: must be positive")
    counts = sizes.parse_sizes(args.sizes, ITEM_BYTES)
    return tuple(Case(tuple(stop - start for start, stop in segment_bounds(count, num_keys))) for count in counts)
