"""Runs programs one after the other, since starting processes takes longer than what most of them do.

    in_turn.py [NAME=VALUE]... PROGRAM [ARG]... [+ [NAME=VALUE]... PROGRAM [ARG]...]...

Each has settings and arguments of its own; a line with its number is said before it.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

words, number = sys.argv[1:], 0
while words:
    end = words.index("+") if "+" in words else len(words)
    part, words = words[:end], words[end + 1 :]
    settings = {}
    while "=" in part[0]:
        name, _, settings[name] = part.pop(0).partition("=")
    os.environ.update(settings)
    print("begins", number, flush=True)
    number += 1
    sys.argv = part
    sys.path[0] = str(Path(part[0]).parent)
    runpy.run_path(part[0], run_name="__main__")
    for name in settings:
        del os.environ[name]
