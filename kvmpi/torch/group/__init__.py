"""A process group as torch.distributed knows it, over the tensor collectives."""

from __future__ import annotations

from kvmpi.torch.group.process_group import KvmpiProcessGroup
from kvmpi.torch.group.work import GroupWork

__all__ = ["GroupWork", "KvmpiProcessGroup"]
