"""``kvmpi top``: what a running job of this user on this host does, as a table in the terminal that renews itself."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvmpi.config import STATUS_FILE, WATCHED_FILE
from kvmpi.errors import ConfigError, KVError, KVTimeoutError, names_in_words, ranks_in_words
from kvmpi.launchers import questions
from kvmpi.launchers.summary import Picture, counted, volume
from kvmpi.trace.card import NAME as CARD

#: In which a scheduler that is there has written what it was asked for; it looks once a second.
PATIENCE_S = 10.0
_ROWS = 60
#: Processes that are lost, a line for each.
_MOST_LOST = 3
#: Lines of a screen that are no rows of tables: what the job is, who is lost and slowest, and titles and notes of both.
_LINES_BESIDE = 14
#: Characters of a line in which every table has room.
_WIDEST = 10_000


def main(argv: Sequence[str]) -> int:
    """Run ``kvmpi top ARGV``; the exit status."""
    parser = argparse.ArgumentParser(
        prog="kvmpi top", allow_abbrev=False,
        description="What a running job of this user on this host does, as a table in the terminal that renews itself.",
    )  # fmt: skip
    parser.add_argument("job", nargs="?", default="", metavar="JOB", help="the job's id, or the beginning of it")
    parser.add_argument("--once", action="store_true", help="print one table and end, as into a pipe")
    parser.add_argument(
        "--json", action="store_true", help="print everything that is known, or with --list the jobs, as JSON and end"
    )
    parser.add_argument("--list", action="store_true", help="print the jobs there are and end")
    parser.add_argument(
        "--stacks", action="store_true", help="have every process write what it waits for, and its stacks, and end"
    )
    args = parser.parse_args(argv)
    try:
        cards = find_jobs(folders())
        if args.stacks and args.json:
            raise ConfigError("--stacks has the job's processes write what they wait for, as text: leave --json out")
        if args.list and args.json:
            print(json.dumps([{**card, "folder": _as_text(str(card["folder"]))} for card in cards]))
            return 0
        if args.list:
            print("\n".join(map(_line, cards)) if cards else _none())
            return 0
        card = choose(cards, args.job)
        if args.stacks:
            ask_for_stacks(card)
        elif args.json:
            print(json.dumps(look(card["folder"])))
        elif args.once or not sys.stdout.isatty():  # where nothing can be renewed
            console = Console(width=None if sys.stdout.isatty() else 160)
            console.print(show(look(card["folder"]), card, _ROWS))
        else:
            _follow(card)
        return 0
    except KeyboardInterrupt:
        return 0
    except KVError as error:
        print(f"kvmpi top: {error}", file=sys.stderr)
        return 1


def folders() -> list[Path]:
    """Where the folders of jobs are."""
    return [Path(name) for name in dict.fromkeys((tempfile.gettempdir(), "/tmp"))]


def find_jobs(folders: Sequence[Path]) -> list[Picture]:
    """What the jobs of this user say of themselves, the newest first, each with its ``folder``."""
    found: list[Picture] = []
    for path in (path for folder in folders for path in folder.glob(f"kvmpi-*/{CARD}")):
        try:
            if path.parent.stat().st_uid != os.getuid() or path.parent.stat().st_mode & 0o077:
                continue  # somebody else's, whatever it says
            card = json.loads(path.read_bytes())
            card["program"] = list(map(_as_text, card["program"]))
            os.kill(int(card["pid"]), 0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # gone, or about to go
        found.append({**card, "folder": path.parent})
    return sorted(found, key=lambda card: -float(card["started_s"]))


def _as_text(word: str) -> str:
    """Names of files need not be text, and what is printed has to be."""
    return word.encode(errors="surrogateescape").decode(errors="replace")


def choose(cards: Sequence[Picture], wanted: str, command: str = "top") -> Picture:
    """The job whose id begins with ``wanted``, or the only one; ``command`` is the one that it was said to.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if not cards:
        raise ConfigError(_none())
    matching = [card for card in cards if card["job"].startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    listed = "\n".join("  " + _line(card) for card in cards)
    if not matching:
        raise ConfigError(f"no job {wanted!r} here; there are\n{listed}")
    raise ConfigError(f"several jobs run here; name one, as in kvmpi {command} {cards[0]['job'][:6]}\n{listed}")


def _none() -> str:
    where = " or ".join(map(str, folders()))
    return f"no running job of yours has a folder in {where}; call this on the host of 'kvmpi run', with its TMPDIR"


def ask_for_stacks(card: Picture) -> None:
    """Have the launcher of a job ask all its processes what they wait for; they answer where the job writes. Without a
    launcher those of this host are asked.

    Raises:
        ConfigError: the job has ended.
    """
    pid = int(card["pid"])
    try:
        if not card.get("launcher", True):
            if asked := questions.ask(str(card["folder"])):
                print(f"asked {names_in_words(asked)}; the answers are in what they write to standard error")
                return
        elif questions.handles(pid):  # it has one as long as it runs a job
            os.kill(pid, signal.SIGUSR1)
            print(f"the answers are in what kvmpi run (process {pid}) writes to standard error, and in its --log-dir")
            return
    except OSError:
        pass
    raise ConfigError(f"job {card['job']} is ending, or has only begun")


def _line(card: Picture) -> str:
    minutes = (time.time() - card["started_s"]) / 60
    shape = f"-n {card['workers']} -c {card['clients']} -s {card['servers']}"
    return f"{card['job']}  {minutes:5.1f} min  {shape}  {shlex.join(card['program'])[:80]}"


def look(folder: Path) -> Picture:
    """Ask the scheduler for a picture, and read it.

    Raises:
        ConfigError: the job has ended.
        KVTimeoutError: the scheduler has written none in time.
    """
    status = folder / STATUS_FILE
    deadline = time.monotonic() + PATIENCE_S
    began_s = time.time()
    while time.monotonic() < deadline:
        try:
            (folder / WATCHED_FILE).touch(mode=0o600)
            if status.exists() and status.stat().st_mtime > began_s - 2.0:
                picture: Picture = json.loads(status.read_bytes())
                return picture
        except OSError:
            if not folder.exists():
                raise ConfigError("the job has ended") from None
        time.sleep(0.1)
    raise KVTimeoutError(f"the job's scheduler has said nothing for {PATIENCE_S:.0f} s; is it stopped?")


def _follow(card: Picture) -> None:
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                picture = look(card["folder"])
            except ConfigError:
                break
            live.update(show(picture, card, rows_of(console)), refresh=True)
            time.sleep(1.0)
    console.print(f"job {card['job'][:8]} has ended")


def rows_of(console: Console) -> int:
    """How many rows of tables the screen has room for."""
    return max(6, console.height - _LINES_BESIDE)


def show(picture: Picture, card: Picture, most_rows: int) -> Group:
    """The tables of a picture, with so many rows together; where there are more, those in trouble come first."""
    totals = picture["totals"]
    head = Text.assemble(
        ("kvmpi ", "bold"), f"{picture['job'][:8]}  {shlex.join(card['program'])[:60]}\n",
        ", ".join(counted(picture["shape"][f"{what}s"], what) for what in ("worker", "client", "server")),
        f"; {counted(totals['keys'], 'key')}; up {picture['elapsed_s']:.0f} s\n",
        ("step ", "dim"), f"{totals['steps']}", ("   steps/s ", "dim"), f"{totals['steps_per_s']:.4g}",
        ("   moved ", "dim"), f"{totals['bytes_per_s'] / 1e9:.3f} GB/s", ("   imbalance ", "dim"),
        f"{totals['imbalance']:.2f}",
    )  # fmt: skip
    parts: list[Any] = [head]
    parts += [Text(f"lost: {text}", "bold red") for text in picture["lost"][:_MOST_LOST]]
    if more := picture["lost"][_MOST_LOST:]:
        parts.append(Text(f"and {len(more)} more are lost", "bold red"))
    if picture["slowest"] is not None:
        slow = next(worker for worker in picture["workers"] if worker["rank"] == picture["slowest"])
        own = f"worker {slow['rank']}, {1000 * slow['own_s_per_step']:.1f} ms of its own work in a step"
        parts.append(Text.assemble(("slowest: ", "dim"), (own, "yellow" if slow["straggler"] else "")))
    # Servers are few, and have a third of the rows, or what workers leave.
    for_servers = min(len(picture["servers"]), max(most_rows // 3, most_rows - len(picture["workers"])))
    parts.append(_workers(picture, most_rows - for_servers))
    if picture["servers"]:
        parts.append(_servers(picture, for_servers))
    return Group(*parts)


class Columns:
    """A table that leaves out columns where the terminal is too narrow for all, those of ``spare`` in their order.

    Args:
        names: of the columns; the first is aligned to the left.
    """

    def __init__(
        self,
        title: str,
        names: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        spare: Sequence[str],
        more: int = 0,
    ) -> None:
        self._title, self._names, self._rows, self._spare, self._more = title, names, rows, spare, more

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._spare) + 1):
            table = self._table(self._spare[:count])
            if Measurement.get(console, options.update(max_width=_WIDEST), table).maximum <= options.max_width:
                break
        yield table

    def _table(self, left_out: Sequence[str]) -> Table:
        table = Table(title=self._title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        shown = [i for i, name in enumerate(self._names) if name not in left_out]
        for i in shown:
            # Names are the program's, and no markup.
            table.add_column(Text(self._names[i]), justify="right" if i else "left", no_wrap=True)
        for row in self._rows:
            table.add_row(*(row[i] for i in shown))
        notes = [f"{self._more} more"] if self._more else []
        if left_out:
            notes.append(f"too narrow for {', '.join(left_out)}")
        table.caption, table.caption_justify = Text("; ".join(notes), "dim"), "left"
        return table


def _state(row: Picture) -> Text:
    if row["state"] == "silent":
        return Text(f"silent {row['silent_s']:.0f} s", "bold red")
    if row.get("straggler"):
        return Text("slow", "yellow")
    return Text(row["state"], "green" if row["state"] == "running" else "dim")


def _told(newest: dict[str, float | None], name: str) -> str:
    """What ``kv.report`` was told last; None stands for what is no number, or infinite."""
    value = newest.get(name, math.nan)
    return "not finite" if value is None else "-" if math.isnan(value) else f"{value:.4g}"


def _workers(picture: Picture, most_rows: int) -> Columns:
    curves = sorted(picture["curves"])[:4]
    names = ["worker", "client", "state", "steps", "steps/s", "own ms", "in calls", "GB/s", "staleness", "memory"]
    workers = picture["workers"]
    if len(workers) > most_rows:  # who is in trouble, and who is slow
        workers = sorted(workers, key=lambda w: (w["state"] != "silent", -w["own_s_per_step"]))[:most_rows]
    rows: list[list[str | Text]] = []
    for w in workers:
        rows.append([
            str(w["rank"]), str(w["client"]), _state(w), str(w["steps"]), f"{w['steps_per_s']:.4g}",
            f"{1000 * w['own_s_per_step']:.1f}", f"{100 * w['blocked_share']:.0f} %", f"{w['bytes_per_s'] / 1e9:.3f}",
            "-" if w["staleness"] is None else f"{w['staleness']:.2f}", volume(w["resident_bytes"]),
            *(_told(w["newest"], name) for name in curves),
        ])  # fmt: skip
    spare = ["memory", "GB/s", "client", "staleness", *curves[:0:-1], "in calls", "steps", *curves[:1], "steps/s"]
    return Columns("workers", [*names, *curves], rows, spare, len(picture["workers"]) - len(workers))


def _servers(picture: Picture, most_rows: int) -> Columns:
    names = ["server", "state", "keys", "held", "requests/s", "GB/s", "updates", "queue", "memory", "waits for"]
    servers = picture["servers"]
    if len(servers) > most_rows:  # who is in trouble, and who is behind
        servers = sorted(servers, key=lambda s: (s["state"] != "silent", -s["queue"], -len(s["missing"])))[:most_rows]
    rows: list[list[str | Text]] = [
        [
            str(s["rank"]), _state(s), str(s["keys"]), volume(s["held_bytes"]), f"{s['requests_per_s']:.4g}",
            f"{s['bytes_per_s'] / 1e9:.3f}", str(s["rounds"]), str(s["queue"]), volume(s["resident_bytes"]),
            f"client {ranks_in_words(s['missing'], 4)}" if s["missing"] else "-",
        ]
        for s in servers
    ]  # fmt: skip
    spare = ["memory", "keys", "updates", "GB/s", "held", "queue"]
    return Columns("servers", names, rows, spare, len(picture["servers"]) - len(rows))
