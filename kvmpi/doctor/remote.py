"""Runs the checks of a machine on other hosts, all at once, and brings back what they have found there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvmpi.doctor.finding import Answer, Finding, Surroundings, ask
from kvmpi.launchers.reach import Reach

COMMAND = (sys.executable, "-m", "kvmpi", "doctor", "--machine", "--json")
_ANSWER_S = 25.0
_AT_ONCE = 64


def check(at: Surroundings, names: Sequence[str], way: Reach) -> list[Finding]:
    """Of each host one line if all is well there, else every finding that is not."""
    if not names:
        return []
    command = (*COMMAND, "-n", str(at.workers))
    with ThreadPoolExecutor(min(_AT_ONCE, len(names))) as pool:
        answers = list(pool.map(lambda name: ask(at, way.command(name, command), timeout_s=_ANSWER_S), names))
    return [found for name, answer in zip(names, answers, strict=True) for found in read(name, answer)]


def read(name: str, answer: Answer) -> list[Finding]:
    """The findings in what a doctor on host ``name`` has answered."""
    start = answer.out.find("{\n")  # a shell there may have said something first
    try:
        found = [Finding(**{**each, "host": name}) for each in json.loads(answer.out[start:])["findings"]]
    except (ValueError, KeyError, TypeError, IndexError):
        return [Finding(
            "machine", "problem", f"the doctor there {answer.end()}: {answer.last_words(1)}",
            "kvmpi cannot be imported there, or is another version.",
            f"try it by hand:\nssh {name} {sys.executable} -m kvmpi doctor --machine", host=name,
        )]  # fmt: skip
    bad = [each for each in found if each.level in ("warning", "problem")]
    if bad:
        return bad
    return [Finding("machine", "ok", f"{len(found)} checks, nothing to complain about", host=name)]
