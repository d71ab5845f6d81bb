"""Which rows the table of ``kvmpi bench ps`` can have. To add one, add a line to ``KINDS`` or to ``MODIFIERS``."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from kvmpi.config import Config, env_name
from kvmpi.launchers.job import OWNED

MODES = ("sync", "async")


@dataclass(frozen=True)
class Way:
    """How a job comes about, and what its stores do.

    Attributes:
        system: "kvmpi", "mxnet" or "sockets".
        settings: ``KVMPI_*`` variables of all its processes.
        options: further options of ``kvmpi run``.
        compress: how pushes travel.
        memory: where the arrays of workers are: "private", or "empty" for those of ``kv.empty``.
        worker: what every worker runs, before the folder of the job.
    """

    system: str = "kvmpi"
    settings: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()
    compress: str = "none"
    memory: str = "private"
    worker: tuple[str, ...] = ("-m", "kvmpi.benchmarks.ps_worker")

    def __or__(self, other: Way) -> Way:
        """This way, and what ``other`` adds to it."""
        compress = other.compress if other.compress != "none" else self.compress
        memory = other.memory if other.memory != "private" else self.memory
        settings, options = self.settings + other.settings, self.options + other.options
        return replace(self, settings=settings, options=options, compress=compress, memory=memory)


KINDS = {
    "auto": Way(settings=(("KVMPI_TRANSPORT", "auto"),)),
    # As bare as the peers', for comparison; what jobs have by default is tcp:curve.
    "tcp": Way(settings=(("KVMPI_TRANSPORT", "tcp"), ("KVMPI_SECURITY", "off"))),
    "ipc": Way(settings=(("KVMPI_TRANSPORT", "ipc"),)),
    "mxnet": Way("mxnet"),
    "sockets": Way("sockets"),
}
#: What may follow the name of a row of kvmpi, besides replicas=R, and SETTING=VALUE for the variable KVMPI_SETTING.
MODIFIERS = {
    **{name: Way(compress=name) for name in ("fp16", "bf16")},
    "empty": Way(memory="empty"), "curve": Way(settings=(("KVMPI_SECURITY", "curve"),)),
    "shared": Way(settings=(("KVMPI_SHARED_PAYLOADS", "auto"),)),
    "plain": Way(settings=(("KVMPI_SHARED_PAYLOADS", "off"),)),
}  # fmt: skip

TRANSPORTS = ("auto", "tcp", "ipc")
COMPRESSIONS = ("none", "fp16", "bf16")
KVMPI, MXNET, SOCKETS = "kvmpi", "mxnet", "sockets"


@dataclass(frozen=True)
class PsRow:
    """A row of the table."""

    label: str
    mode: str
    way: Way


def parse(text: str) -> tuple[str, Way]:
    """``tcp:fp16:chunk_bytes=65536`` as a label and what it stands for.

    Raises:
        ValueError: no such row, or it has no such modifier.
        ConfigError: a setting has no such value.
    """
    kind, *modifiers = text.strip().split(":")
    if kind not in KINDS:
        raise ValueError(f"unknown row {kind!r}; known: {', '.join(KINDS)}")
    way = KINDS[kind]
    for word in modifiers:
        if way.system != "kvmpi" or (word not in MODIFIERS and "=" not in word):
            known = f"{', '.join(MODIFIERS)} and SETTING=VALUE" if way.system == "kvmpi" else "none"
            raise ValueError(f"{text.strip()}: {kind} has no {word!r}; known: {known}")
        way |= MODIFIERS[word] if word in MODIFIERS else _setting(word)
    return text.strip(), way


def _setting(word: str) -> Way:
    """``chunk_bytes=65536``, or ``replicas=1``, which is an option of ``kvmpi run``."""
    name, _, value = word.partition("=")
    if name == "replicas" and value.isdecimal():
        return Way(options=("--replicas", value))
    variable = env_name(name)
    known = [field.name for field in fields(Config) if env_name(field.name) not in OWNED]
    if name not in known:
        raise ValueError(f"{word}: unknown setting {name!r}; known: {', '.join(known)}")
    Config.from_env({**os.environ, variable: value})
    return Way(settings=((variable, value),))


def wanted(labels: Sequence[str], modes: Sequence[str]) -> list[PsRow]:
    """The rows of the table, in order, each once. Plain sockets only add up rounds."""
    rows = [PsRow(label, mode, parse(label)[1]) for mode in modes for label in dict.fromkeys(map(str.strip, labels))]
    return [row for row in rows if row.way.system != SOCKETS or row.mode == "sync"]


def by_job(rows: Sequence[PsRow]) -> list[list[PsRow]]:
    """Rows that can share a job's processes stand together: what their stores do is settled in each store.

    Those of others learn once, and for all, in which mode they are.
    """

    def job(row: PsRow) -> tuple[Way, str]:
        return replace(row.way, compress="none"), "" if row.way.system == KVMPI else row.mode

    ways = list(dict.fromkeys(map(job, rows)))
    ordered = sorted(rows, key=lambda row: ways.index(job(row)))
    return [list(members) for _, members in itertools.groupby(ordered, job)]


def default(transports: Sequence[str], compressions: Sequence[str], *, mxnet: bool) -> list[str]:
    """The labels that the options ``--transport`` and ``--compress`` stand for."""
    labels = [
        transport if compress == "none" else f"{transport}:{compress}"
        for transport in transports
        for compress in compressions
    ]
    return [*labels, MXNET] if mxnet else labels


def choices(option: str, text: str, known: Sequence[str]) -> list[str]:
    """``a,b``, each of which is ``known``.

    Raises:
        ValueError: one is not, or there is none.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if bad := [word for word in words if word not in known] or ([] if words else [text]):
        raise ValueError(f"{option} {bad[0]}: expected some of {', '.join(known)}")
    return list(dict.fromkeys(words))
