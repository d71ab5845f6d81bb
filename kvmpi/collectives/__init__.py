"""Tensor collectives: sums and broadcasts of groups of vectors over the workers of one client."""

from kvmpi.collectives.agreement import JOIN, Call, Entry, Verdict
from kvmpi.collectives.algorithm import Batch, Tensor
from kvmpi.collectives.clocks import compare_clocks
from kvmpi.collectives.comm import Comm, Request, SoloComm
from kvmpi.collectives.cost import load as load_figures
from kvmpi.collectives.row_sum import broadcast_rows, sum_rows, union_of_ids
from kvmpi.collectives.selection import ALGORITHMS
from kvmpi.collectives.shares import share_of
from kvmpi.collectives.tensor import Collectives

__all__ = [
    "ALGORITHMS",
    "JOIN",
    "Batch",
    "Call",
    "Collectives",
    "Comm",
    "Entry",
    "Request",
    "SoloComm",
    "Tensor",
    "Verdict",
    "broadcast_rows",
    "compare_clocks",
    "load_figures",
    "share_of",
    "sum_rows",
    "union_of_ids",
]
