"""What a job has done with its time, from the last picture that its scheduler has made: lines for people, and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Picture = dict[str, Any]

#: Workers that are shown each; of more, the slowest.
MOST_ROWS = 16


def lines(picture: Picture, seconds: float) -> list[str]:
    """A short table that lines up.

    Args:
        seconds: from the start of the job to its end.
    """
    workers = picture["workers"]
    shown = workers if len(workers) <= MOST_ROWS else _slowest_first(workers)[:MOST_ROWS]
    head = ["", "steps", "compute", "communication", "exposed", "moved", "GB/s", "possible", "memory"]
    rows = [head]
    for worker in shown:
        rows.append([
            f"worker {worker['rank']} (client {worker['client']})",
            str(worker["steps"]),
            f"{worker['compute_s']:.1f} s",
            f"{worker['communication_s']:.1f} s",
            f"{worker['blocked_s']:.1f} s",
            volume(worker["bytes"]),
            _gigabytes(_achieved(worker)),
            _gigabytes(worker["possible_bytes_per_s"]),
            volume(worker["resident_bytes"]),
        ])  # fmt: skip
    shape = picture["shape"]
    title = (
        f"kvmpi run: {seconds:.1f} s, {counted(shape['workers'], 'worker')} in {counted(shape['clients'], 'client')}, "
        f"{counted(shape['servers'], 'server')}; {counted(picture['totals']['steps'], 'step')}, "
        f"{volume(picture['totals']['bytes'])} moved"
    )
    return [title, *aligned(rows), *_remarks(picture, len(shown))]


def _remarks(picture: Picture, num_shown: int) -> list[str]:
    workers = picture["workers"]
    found = []
    if len(workers) > num_shown:
        found.append(f"{counted(len(workers) - num_shown, 'worker')} more, which had less to do")
    silent = picture["shape"]["workers"] - len(workers)
    if silent > 0:
        found.append(f"of {counted(silent, 'worker')} nothing is known: no store, or a sudden end")
    if len(workers) > 1 and any(worker["steps"] for worker in workers):
        slow = slowest(workers)
        others = sorted(_own_s(worker) for worker in workers if worker is not slow)
        usual = others[len(others) // 2]
        text = f"slowest: worker {slow['rank']}, {1000 * _own_s(slow):.1f} ms of its own in each step"
        found.append(text + (f", {_own_s(slow) / usual:.1f} times the usual" if usual > 0 else ""))
    for name, curve in picture["curves"].items():
        diverged = [worker["rank"] for worker in workers if worker["newest"].get(name, 0.0) is None]
        if diverged:
            found.append(f"{name}: not finite at the end, on {counted(len(diverged), 'worker')}")
        elif curve["mean"] and curve["mean"][-1][1] is not None:
            found.append(f"{name}: {curve['mean'][-1][1]:.4g} at step {curve['mean'][-1][0]:.0f}, mean over workers")
    return ["  " + text for text in found]


def slowest(workers: Sequence[Picture]) -> Picture:
    """Whom the others have waited for: who has had most to do by itself in one step."""
    return _slowest_first(workers)[0]


def _slowest_first(workers: Sequence[Picture]) -> list[Picture]:
    return sorted(workers, key=_own_s, reverse=True)


def _own_s(worker: Picture) -> float:
    """Seconds of one step in which a worker was not in a call of the store."""
    own_s: float = worker["compute_s"] / worker["steps"] if worker["steps"] else 0.0
    return own_s


def _achieved(worker: Picture) -> float | None:
    """Bytes per second while communication was under way; the sum over the client where it is only that."""
    if worker["possible_bytes_per_s"] is not None and worker["reduce_bytes_per_s"] is not None:
        return float(worker["reduce_bytes_per_s"])  # what the other number is about
    return worker["bytes"] / worker["communication_s"] if worker["communication_s"] > 0 else None


def as_json(picture: Picture, seconds: float) -> Picture:
    """The whole picture, with what ``lines`` says besides."""
    workers = picture["workers"]
    slow = slowest(workers)["rank"] if len(workers) > 1 else None
    achieved = {str(worker["rank"]): _achieved(worker) for worker in workers}
    return {**picture, "seconds": seconds, "slowest": slow, "achieved_bytes_per_s": achieved}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, all others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    found = []
    for first, *others in rows:
        words = [word.rjust(width) for word, width in zip(others, widths[1:], strict=True)]
        found.append("  ".join(["", first.ljust(widths[0]), *words]))
    return found


def counted(number: int, what: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def volume(nbytes: float) -> str:
    """``1.5 GB``, in powers of 1000."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} PB"


def _gigabytes(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f}"
