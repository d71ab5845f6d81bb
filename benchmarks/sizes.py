"""Sizes: how users write them, how they are shown, and which are measured by default."""

from __future__ import annotations

import re

#: Measured by default, as counts that no number of ranks, chunk or block divides.
ODD_SIDE = 1211
ODD_MULTIPLE = 16384

_SCALES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LARGEST_BYTES = 256 << 20


def parse_bytes(text: str) -> int:
    """``64K`` -> 65536. K, M and G (also KB, KiB, ...) are powers of 1024.

    Raises:
        ValueError: ``text`` is no such size.
    """
    match = re.fullmatch(r"(\d+)(?:([KMG])(?:i?B)?|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is no size; expected bytes such as 4099, 64K, 1M or 2G (powers of 1024)")
    return int(match[1]) * _SCALES[(match[2] or "").upper()]


def format_bytes(nbytes: int) -> str:
    """``65536`` -> ``64 KiB``; one decimal at most."""
    for name, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f}".removesuffix(".0") + f" {name}"
    return f"{nbytes} B"


def parse_sizes(text: str, itemsize: int) -> list[int]:
    """Counts of elements for ``0,4K,1M``: bytes are rounded down to whole elements, but to one at least.

    Raises:
        ValueError: see ``parse_bytes``.
    """
    sizes = [parse_bytes(word) for word in text.split(",") if word.strip()]
    if not sizes:
        raise ValueError("no sizes given; for example: --sizes 4K,1M,64M")
    return [max(1, size // itemsize) if size else 0 for size in sizes]


def default_counts(num_ranks: int, itemsize: int, *, dense: bool = False, large: bool = False) -> list[int]:
    """0, 1, powers of 4 (``dense``: 2) up to 256 MiB, two odd counts; ``large``: 1 GiB and a bit over 2 GiB."""
    sizes = [4]
    while sizes[-1] < _LARGEST_BYTES:
        sizes.append(sizes[-1] * (2 if dense else 4))
    counts = {0, 1, *(size // itemsize for size in sizes if size >= itemsize)}
    counts |= {ODD_SIDE * ODD_SIDE, num_ranks * ODD_MULTIPLE + 1}
    if large:
        counts |= {(1 << 30) // itemsize, (2 << 30) // itemsize + 1}
    return sorted(counts)
