"""PyTorch on a KVStore: a trainer for gradients, and averaging of weights for islands that meet now and then."""

from kvmpi.torch.averaging import DiLoCo, ElasticAveraging
from kvmpi.torch.trainer import Trainer

__all__ = ["DiLoCo", "ElasticAveraging", "Trainer"]
