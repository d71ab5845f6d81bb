"""How a pushed chunk travels: as it is, or in fewer bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy.typing as npt

from kvmpi.errors import UnsupportedError
from kvmpi.kernels import host

Buffer = npt.NDArray[Any]


class Codec(ABC):
    """Encodes chunks on the master, tells the server what arrives. Subclass it, set ``name``, and ``register`` it."""

    name = ""

    @abstractmethod
    def wire_dtype(self, dtype: str) -> str:
        """The dtype in which a chunk of ``dtype`` travels."""

    @abstractmethod
    def encode(self, chunk: Buffer, dtype: str) -> Buffer:
        """The payload for ``chunk``; may be ``chunk`` itself."""


_CODECS: dict[str, Codec] = {}


def register(cls: type[Codec]) -> type[Codec]:
    """Make a codec available by its name."""
    _CODECS[cls.name] = cls()
    return cls


def get(name: str) -> Codec:
    """The codec called ``name``.

    Raises:
        UnsupportedError: no such codec.
    """
    if name not in _CODECS:
        raise UnsupportedError(
            f"gradient compression {name!r} is not available; available: {', '.join(sorted(_CODECS))}"
        )
    return _CODECS[name]


@register
class Plain(Codec):
    """The chunk itself, without a copy."""

    name = "none"

    def wire_dtype(self, dtype: str) -> str:
        return dtype

    def encode(self, chunk: Buffer, dtype: str) -> Buffer:
        return chunk


class _Narrow(Codec):
    """float32 as a half type, rounded to nearest even; servers widen what comes before they add it."""

    dtype = ""

    def wire_dtype(self, dtype: str) -> str:
        return self.dtype if dtype == "float32" else dtype

    def encode(self, chunk: Buffer, dtype: str) -> Buffer:
        if dtype != "float32":
            return chunk
        encoded = host.empty(chunk.size, self.dtype)
        host.narrow(chunk, encoded, self.dtype)
        return encoded


@register
class Half(_Narrow):
    """Half the bytes, 11 bits of precision, overflow to infinity above 65504."""

    name, dtype = "fp16", "float16"


@register
class BFloat16(_Narrow):
    """Half the bytes, 8 bits of precision, float32's range: for what may be small or large, as DiLoCo's differences."""

    name, dtype = "bf16", "bfloat16"
