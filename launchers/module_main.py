"""Runs a module such that nothing in the current folder takes the place of a module that it needs.

    python module_main.py -m MODULE [ARG...]

Without this file, Python would look in the current folder first: a ``random.py`` there, of which the program need not
know anything, would end the scheduler. It comes last, for the modules of ``--import``.
"""

from __future__ import annotations

import os
import sys


def command(module: str, *args: str) -> tuple[str, ...]:
    """The command line that runs ``module`` so."""
    return (sys.executable, os.path.abspath(__file__), "-m", module, *args)


def main() -> None:
    """See the top of this file."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = []  # the folder of this file
        sys.path.append(os.getcwd())
    import runpy

    module = sys.argv[2]
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
