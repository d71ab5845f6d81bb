"""How a pushed chunk travels: as it is, or in fewer bytes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvmpi.arrays import DTYPES
from kvmpi.errors import ConfigError, UnsupportedError
from kvmpi.kernels import host, quantize
from kvmpi.wire import as_array

Buffer = npt.NDArray[Any]

#: Of what messages call a codec. Other servers are told of it, with more beside it than there was in the push.
_MAX_TEXT = 100


class Codec(ABC):
    """Encodes chunks on the master and decodes them on the server.

    Subclass it, set ``name``, and ``register`` it. A codec with a parameter, a number, takes it as ``threshold`` in its
    constructor.
    """

    name: ClassVar[str] = ""
    #: The parameter's value where none is given; None: there is no parameter.
    default_threshold: ClassVar[float | None] = None

    threshold: float

    @cached_property
    def text(self) -> str:
        """What messages say: the name, and the parameter if there is one."""
        return self.name if self.default_threshold is None else f"{self.name}:{self.threshold!r}"

    def params(self) -> dict[str, Any]:
        """What ``of`` makes this codec of."""
        return {"type": self.name} | ({} if self.default_threshold is None else {"threshold": self.threshold})

    @abstractmethod
    def wire_dtype(self, dtype: str) -> str:
        """The dtype of what ``decode`` makes of a chunk of ``dtype``."""

    def wire_bytes(self, count: int, dtype: str) -> int:
        """Bytes of the payload for ``count`` elements."""
        return count * DTYPES[self.wire_dtype(dtype)].itemsize

    @abstractmethod
    def encode(self, chunk: Buffer, dtype: str) -> Buffer:
        """The payload for ``chunk``; may be ``chunk`` itself."""

    def decode(self, payload: memoryview, count: int, dtype: str) -> Buffer:
        """``count`` elements of ``wire_dtype``, of a payload of as many bytes as it must have."""
        return np.frombuffer(payload, DTYPES[self.wire_dtype(dtype)])


class Quantizer(Codec):
    """A codec of float32 that keeps what it does not send for the next push: error feedback. Others travel as they are.

    It encodes through ``quantize``, for which its user keeps the error of each key; see ``feedback.py``.
    """

    bits: ClassVar[int]

    def wire_dtype(self, dtype: str) -> str:
        return dtype

    def wire_bytes(self, count: int, dtype: str) -> int:
        return quantize.packed_bytes(count, self.bits) if dtype == "float32" else super().wire_bytes(count, dtype)

    def encode(self, chunk: Buffer, dtype: str) -> Buffer:
        assert dtype != "float32", "that would forget the error"
        return chunk

    def decode(self, payload: memoryview, count: int, dtype: str) -> Buffer:
        if dtype != "float32":
            return super().decode(payload, count, dtype)
        return self.values(as_array(payload, DTYPES["uint8"]), count)

    @abstractmethod
    def quantize(self, chunk: Buffer, residual: Buffer, left: Buffer) -> Buffer:
        """The payload for float32 ``chunk + residual``; ``left``, which may be ``residual``, gets what it lacks."""

    @abstractmethod
    def values(self, codes: Buffer, count: int) -> Buffer:
        """The ``count`` float32 values for which a payload stands."""


_CODECS: dict[str, type[Codec]] = {}


def register(cls: type[Codec]) -> type[Codec]:
    """Make a codec available by its name."""
    _CODECS[cls.name] = cls
    get.cache_clear()
    return cls


@lru_cache(maxsize=64)
def get(text: str) -> Codec:
    """The codec that messages call ``text``.

    Raises:
        UnsupportedError: no such codec.
        ConfigError: its parameter makes no sense.
    """
    if len(text) > _MAX_TEXT:
        raise UnsupportedError(
            f"gradient compression {text[:_MAX_TEXT]!r}...: {len(text)} characters, no codec has more than {_MAX_TEXT}"
        )
    name, colon, threshold = text.partition(":")
    if not colon:
        return of({"type": name})
    try:
        number = float(threshold)
    except ValueError:
        raise ConfigError(f"gradient compression {text!r}: its threshold is no number") from None
    return of({"type": name, "threshold": number})


def of(params: Mapping[str, Any]) -> Codec:
    """The codec for what ``set_gradient_compression`` is given: ``{"type": "2bit", "threshold": 0.5}``.

    Raises:
        UnsupportedError: no such type, or a parameter that it does not have.
        ConfigError: a threshold that makes no sense.
    """
    if not isinstance(params, Mapping):
        raise ConfigError(f"gradient compression {params!r}: expected a dict such as {{'type': 'fp16'}}")
    cls = _CODECS.get(str(params.get("type")))
    if cls is None:
        known = ", ".join(f"{{'type': {name!r}}}" for name in sorted(_CODECS))
        raise UnsupportedError(f"gradient compression {dict(params)} is not available; available: {known}")
    takes = {"type"} if cls.default_threshold is None else {"type", "threshold"}
    if unknown := sorted(set(params) - takes, key=str):
        raise UnsupportedError(f"gradient compression {dict(params)}: {cls.name} has no parameter {unknown[0]!r}")
    if cls.default_threshold is None:
        return cls()
    threshold = params.get("threshold", cls.default_threshold)
    try:
        with np.errstate(over="ignore"):
            threshold = float(np.float32(threshold))
    except (TypeError, ValueError, OverflowError):
        threshold = math.nan
    if not math.isfinite(threshold):
        raise ConfigError(f"gradient compression {dict(params)}: threshold must be a finite number of float32")
    return cls(threshold)  # type: ignore[call-arg]


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


@register
class TwoBit(Quantizer):
    """A sixteenth of the bytes: ``threshold``, its negative, or nothing of each element; MXNet's ``2bit``."""

    name, bits, default_threshold = "2bit", 2, 0.5

    def __init__(self, threshold: float) -> None:
        if threshold <= 0:
            raise ConfigError(f"gradient compression 2bit: threshold is {threshold}, must be above 0")
        self.threshold = threshold

    def quantize(self, chunk: Buffer, residual: Buffer, left: Buffer) -> Buffer:
        return quantize.two_bit(chunk, residual, left, self.threshold)

    def values(self, codes: Buffer, count: int) -> Buffer:
        return quantize.two_bit_values(codes, count, self.threshold)


@register
class OneBit(Quantizer):
    """A 32nd of the bytes: 1 of each element above ``threshold``, -1 of others; MXNet's ``1bit``."""

    name, bits, default_threshold = "1bit", 1, 0.5

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def quantize(self, chunk: Buffer, residual: Buffer, left: Buffer) -> Buffer:
        return quantize.one_bit(chunk, residual, left, self.threshold)

    def values(self, codes: Buffer, count: int) -> Buffer:
        return quantize.one_bit_values(codes, count)
