"""PyTorch on a KVStore: exchange of gradients, averaging of weights for islands, a hook for DDP.

``kvmpi.torch.c10d``, which must be imported by name, is a backend of torch.distributed.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(f"kvmpi.torch needs PyTorch ({error}): pip install 'kvmpi[torch]'") from error

from kvmpi.torch.ddp_hook import ddp_comm_hook
from kvmpi.torch.diloco import DiLoCo
from kvmpi.torch.distributed import DistributedOptimizer
from kvmpi.torch.elastic import ElasticAveraging
from kvmpi.torch.trainer import Trainer

__all__ = ["DiLoCo", "DistributedOptimizer", "ElasticAveraging", "Trainer", "ddp_comm_hook"]
