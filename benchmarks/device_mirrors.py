"""Arrays of a GPU in the place of arrays of the host that a benchmark fills and looks at."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from kvmpi.errors import UnsupportedError

Array = npt.NDArray[Any]


class Mirrors:
    """Device arrays that take the contents of host arrays, and give them back.

    Args:
        place: this rank's number on its host: ranks take GPUs in turn.
    Raises:
        UnsupportedError: there is no CuPy, or no GPU.
    """

    def __init__(self, place: int) -> None:
        try:
            import cupy

            count = cupy.cuda.runtime.getDeviceCount()
        except Exception as error:  # CuPy without a driver raises errors of its own
            raise UnsupportedError(f"arrays of a GPU need CuPy and a GPU: {error}".splitlines()[0]) from None
        self._cupy, self._device = cupy, cupy.cuda.Device(place % count)
        self._device.use()
        self._pairs: dict[int, tuple[Array, Any]] = {}

    def of(self, array: Array) -> Any:
        """The device array for a host array: the same one each time."""
        _, there = self._pairs.setdefault(id(array), (array, self._cupy.empty(array.shape, array.dtype)))
        return there

    def send(self) -> None:
        """All device arrays become what the host arrays are."""
        for array, there in self._pairs.values():
            there.set(array)
        self._device.synchronize()

    def fetch(self) -> None:
        """All host arrays become what the device arrays are."""
        for array, there in self._pairs.values():
            array[:] = there.get()

    def forget(self) -> None:
        self._pairs.clear()
