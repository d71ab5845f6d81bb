"""The parameter server: scheduler, servers, and the master's side of the conversation with them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmpi.ps.client import PsClient
    from kvmpi.ps.consistency import discipline
    from kvmpi.ps.embedded import EmbeddedJob
    from kvmpi.ps.exchanges import Exchange
    from kvmpi.ps.landing import Landing
    from kvmpi.ps.placement import Placement
    from kvmpi.ps.row_chunks import ArrivingRows
    from kvmpi.ps.steps import Turn, finds_position

__all__ = [
    "ArrivingRows", "EmbeddedJob", "Exchange", "Landing", "Placement", "PsClient", "Turn", "discipline",
    "finds_position",
]  # fmt: skip

# Loaded at first use: a scheduler, which has no values, starts without NumPy.
_LAZY = {
    "ArrivingRows": "row_chunks",
    "EmbeddedJob": "embedded",
    "Exchange": "exchanges",
    "Landing": "landing",
    "Placement": "placement",
    "PsClient": "client",
    "Turn": "steps",
    "finds_position": "steps",
    "discipline": "consistency",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvmpi.ps' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvmpi.ps.{_LAZY[name]}"), name)
