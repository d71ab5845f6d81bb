"""Warnings that are about a line of the program, whatever libraries lie between."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = frozenset({"kvmpi", "torch", "mxnet", "multiprocessing", "concurrent"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line that has led here, the last one outside of libraries."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)
