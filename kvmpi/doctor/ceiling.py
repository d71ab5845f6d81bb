"""How fast a training step can be at best with many workers: arithmetic on what was measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

from kvmpi.benchmarks.limits import memory_limit
from kvmpi.benchmarks.ranks import BUSBW
from kvmpi.benchmarks.sizes import parse_bytes
from kvmpi.collectives.cost import Figures, costs
from kvmpi.errors import ConfigError
from kvmpi.planner.presets import PRESETS

#: Of a step: gradients are complete one after the other from the beginning of the backward pass to its end.
BACKWARD = 2 / 3


@dataclass(frozen=True)
class Ceiling:
    """Seconds of one step and of one exchange of gradients.

    Attributes:
        least_s: no program can exchange them faster: memory of the fullest host, or the slowest link.
        expected_s: the cheapest algorithm by the model that ``auto`` chooses by.
        algorithm: that one.
        worst_efficiency: if nothing is exchanged before the backward pass has ended.
        best_efficiency: if all that can be is hidden behind it.
        bound: "memory" or "link".
    """

    nbytes: int
    num_workers: int
    num_hosts: int
    step_s: float
    least_s: float
    expected_s: float
    algorithm: str
    worst_efficiency: float
    best_efficiency: float
    bound: str


def gradient_bytes(model: str) -> int:
    """Bytes of the float32 gradients of a model that is known by name, or a number of bytes such as ``100M``.

    Raises:
        ConfigError: it is neither.
    """
    if model in PRESETS:
        return 4 * sum(prod(shape) for shape in PRESETS[model]())
    try:
        nbytes = parse_bytes(model)
    except ValueError:
        nbytes = 0
    if nbytes < 1:
        raise ConfigError(f"--model {model}: expected one of {', '.join(PRESETS)}, or bytes of gradients such as 100M")
    return nbytes


def figures(
    copy_bytes_per_s: float, add_bytes_per_s: float, link_bytes_per_s: float | None, round_trip_s: float | None
) -> Figures:
    """What was measured, in place of the built-in figures."""
    found = replace(Figures(), copy_bytes_per_s=copy_bytes_per_s, add_bytes_per_s=add_bytes_per_s)
    if link_bytes_per_s:
        found = replace(found, link_bytes_per_s=link_bytes_per_s)
    return replace(found, message_s=found.message_s + round_trip_s / 2) if round_trip_s else found


def estimate(nbytes: int, step_s: float, hosts: Sequence[int], measured: Figures) -> Ceiling:
    """Of an allreduce of ``nbytes`` in every step, by workers that each take ``step_s`` for a step alone.

    Args:
        hosts: workers on each host.
    """
    size = sum(hosts)
    if size == 1:
        return Ceiling(nbytes, 1, 1, step_s, 0.0, 0.0, "none", 1.0, 1.0, "memory")
    most = max(hosts)
    memory_s = 0.0
    if most > 1:
        # The limit is that of the whole host, as are the rates that it takes; its unit does not matter.
        whole = {"copy": most * measured.copy_bytes_per_s, "add": most * measured.add_bytes_per_s}
        memory_s = nbytes * BUSBW["allreduce"](most) / memory_limit("allreduce", most, whole)
    link_s = 2 * (len(hosts) - 1) / len(hosts) * nbytes / measured.link_bytes_per_s if len(hosts) > 1 else 0.0
    found = costs("allreduce", nbytes, tuple(hosts), measured, shares=True, has_library=True)
    best = min(found.values(), key=lambda choice: choice.seconds)
    least_s = max(memory_s, link_s)
    expected_s = max(best.seconds, least_s)
    hidden_s = max(0.0, expected_s - BACKWARD * step_s)
    return Ceiling(
        nbytes, size, len(hosts), step_s, least_s, expected_s, str(best), step_s / (step_s + expected_s),
        step_s / (step_s + hidden_s), "link" if link_s >= memory_s else "memory",
    )  # fmt: skip


def describe(found: Ceiling, model: str, measured: Figures, cores: int) -> list[str]:
    """For people, a line for each thing."""
    workers = f"{found.num_workers} workers on {found.num_hosts} host{'s' * (found.num_hosts > 1)}"
    lines = [f"{model}: {found.nbytes / 1e6:,.1f} MB of gradients in a step of {_ms(found.step_s)}, {workers}"]
    if found.num_workers == 1:
        return [*lines, "one worker exchanges nothing"]
    rate = measured.link_bytes_per_s if found.bound == "link" else measured.copy_bytes_per_s
    what = "the slowest link" if found.bound == "link" else "a copy in memory, all workers at once"
    lines += [
        f"an exchange takes at least {_ms(found.least_s)} ({what}: {rate / 1e6:,.0f} MB/s)",
        f"expected {_ms(found.expected_s)} with {found.algorithm}",
        f"efficiency {found.worst_efficiency:.0%} if it waits for the backward pass to end, "
        f"up to {found.best_efficiency:.0%} if it is hidden behind it",
        f"that is {found.worst_efficiency * found.num_workers:.2g} to {found.best_efficiency * found.num_workers:.2g} "
        "times the speed of one worker",
    ]
    if found.num_workers > cores * found.num_hosts:
        lines.append(f"but {found.num_workers} workers share {cores} cores a host, so a step takes longer than alone")
    return lines


def as_facts(found: Ceiling, measured: Figures) -> dict[str, object]:
    """For programs."""
    return {**asdict(found), "figures": asdict(measured)}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
