"""``import kvmpi.torch.c10d`` registers the backend ``kvmpi`` of torch.distributed.

::

    import kvmpi.torch.c10d
    torch.distributed.init_process_group("kvmpi")

in a program that ``kvmpi run -n 4``, ``mpirun`` or ``srun`` has started. The import tells torch rank, size and where to
meet, in the variables that torchrun would set; where one of them is missing it is collective over all ranks.
"""

from __future__ import annotations

import torch.distributed as dist

from kvmpi.torch.group.process_group import KvmpiProcessGroup
from kvmpi.torch.rendezvous import create_group, make_client_the_world, publish

__all__ = ["KvmpiProcessGroup", "make_client_the_world"]

dist.Backend.register_backend("kvmpi", create_group, extended_api=True, devices=["cpu", "cuda"])
publish()
