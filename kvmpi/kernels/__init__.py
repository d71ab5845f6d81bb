"""Arithmetic on vectors: ``host`` for NumPy; ``gpu`` for CuPy, imported by its users when a device array appears."""

from kvmpi.kernels import host

__all__ = ["host"]
