"""What gradients look like on their way: as they are, or as float16."""

from __future__ import annotations

import torch


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor to send, and what ``decompress`` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """The tensor as it was before ``compress``."""
        return tensor


class FP16Compressor(NoneCompressor):
    """Floating-point tensors travel as float16. Sums are formed in float32 and rounded once."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor to send, and its own dtype if that is another one."""
        if not tensor.is_floating_point() or tensor.dtype == torch.float16:
            return tensor, None
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: torch.dtype | None) -> torch.Tensor:
        """The tensor in its own dtype."""
        return tensor if context is None else tensor.to(context)


class Compression:
    """``Compression.none`` or ``Compression.fp16``: how gradients travel."""

    none = NoneCompressor
    fp16 = FP16Compressor
