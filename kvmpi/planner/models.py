"""Models as layers: bytes of each gradient, and the times of its forward and backward computation."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmpi.errors import ConfigError
from kvmpi.planner.presets import USES

#: Of a step's computation: the backward pass computes two products for each one of the forward pass.
_FORWARD_SHARE = 1 / 3
_ITEM_BYTES = 4
_MOST = 1e18  # of any number: sums of them must be numbers


@dataclass(frozen=True)
class Layer:
    """One array of a model, in the order of the forward pass."""

    nbytes: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Model:
    """What a worker computes in a step, and what it has to exchange."""

    name: str
    layers: tuple[Layer, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Of one step of one worker."""
        return math.fsum(layer.forward_s + layer.backward_s for layer in self.layers)

    def gradients(self) -> list[tuple[int, float]]:
        """Bytes of each gradient in the order in which they are computed, and when: seconds after the step began."""
        now_s = math.fsum(layer.forward_s for layer in self.layers)
        found = []
        for layer in reversed(self.layers):
            now_s += layer.backward_s
            found.append((layer.nbytes, now_s))
        return found


def preset(name: str, compute_s: float) -> Model:
    """A known model whose step takes ``compute_s``, which its layers share by their multiplications.

    Raises:
        ConfigError: no such model, or a time that makes no sense.
    """
    _known(name)
    uses = USES[name]()
    sizes = [math.prod(shape) for shape, _ in uses]
    works = [float(size * places) for size, (_, places) in zip(sizes, uses, strict=True)]
    return _shared(name, [_ITEM_BYTES * size for size in sizes], works, compute_s)


def _known(name: str) -> None:
    if name not in USES:
        raise ConfigError(f"model {name!r}: known are {', '.join(USES)}, a file NAME.json, and a number of bytes")


def plain(nbytes: int, compute_s: float, num_keys: int = 1) -> Model:
    """``num_keys`` arrays of the same size and the same work, ``nbytes`` together.

    Raises:
        ConfigError: numbers that make no sense.
    """
    if nbytes < 1 or not 1 <= num_keys <= nbytes:
        raise ConfigError(f"a model of {nbytes} bytes in {num_keys} keys: expected a key or more, of a byte or more")
    base, extra = divmod(nbytes, num_keys)
    sizes = [base + (key < extra) for key in range(num_keys)]
    return _shared(f"{nbytes / 1e6:.4g} MB", sizes, [1.0] * num_keys, compute_s)


def _shared(name: str, sizes: Sequence[int], works: Sequence[float], compute_s: float) -> Model:
    if not 0 <= compute_s <= _MOST:
        raise ConfigError(f"a step of {compute_s} s: expected seconds, zero or more, {_MOST:g} at most")
    total = math.fsum(works) or 1.0
    shares = [compute_s * work / total for work in works]
    layers = [
        Layer(size, _FORWARD_SHARE * share, (1 - _FORWARD_SHARE) * share)
        for size, share in zip(sizes, shares, strict=True)
    ]
    return Model(name, tuple(layers))


def from_json(text: str, name: str) -> Model:
    """``{"layers": [{"bytes": ..., "forward_s": ..., "backward_s": ...}, ...]}``.

    Raises:
        ConfigError: it is something else.
    """
    expected = 'expected {"layers": [{"bytes": 4000, "forward_s": 0.001, "backward_s": 0.002}, ...]}'
    try:
        found: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"model {name}: {error}; {expected}") from None
    layers = found.get("layers") if isinstance(found, dict) else None
    if not isinstance(layers, list) or not layers:
        raise ConfigError(f"model {name}: it has no layers; {expected}")
    made = []
    for number, layer in enumerate(layers):
        if not isinstance(layer, dict) or set(layer) != {"bytes", "forward_s", "backward_s"}:
            raise ConfigError(f"model {name}, layer {number}: {layer!r}; {expected}")
        values = [layer["bytes"], layer["forward_s"], layer["backward_s"]]
        if not all(isinstance(value, (int, float)) and 0 <= value <= _MOST for value in values):
            raise ConfigError(f"model {name}, layer {number}: {layer!r}; expected zero or more, {_MOST:g} at most")
        made.append(Layer(int(values[0]), float(values[1]), float(values[2])))
    if not any(layer.nbytes for layer in made):
        raise ConfigError(f"model {name}: its layers have no bytes")
    return Model(name, tuple(made))


def read(word: str, compute_s: float | None, num_keys: int | None = None) -> Model:
    """What a user calls a model: a preset, a file that ends in ``.json``, or bytes such as ``100M`` (powers of 1024).

    Raises:
        ConfigError: it is none of these; or a step's time is missing, or is given where the file has it; or keys are
            given for what has layers.
    """
    size = re.fullmatch(r"(\d{1,18})(?:([KMG])(?:i?B)?|B)?", word, re.IGNORECASE)  # as kvmpi bench has it
    if num_keys is not None and size is None:
        raise ConfigError(f"--keys {num_keys}: it is for bytes (--model 100M), and model {word} has layers")
    if word.endswith(".json"):
        if compute_s is not None:
            raise ConfigError(f"--compute-seconds: {word} says what its layers take")
        try:
            return from_json(Path(word).read_text(), Path(word).stem)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"model {word}: {error}") from None
    if size is None:
        _known(word)
    if compute_s is None:
        raise ConfigError(f"model {word}: how long does a step compute? --compute-seconds S")
    if size:
        scale = {"": 0, "K": 10, "M": 20, "G": 30}[(size[2] or "").upper()]
        return plain(int(size[1]) << scale, compute_s, 1 if num_keys is None else num_keys)
    return preset(word, compute_s)
