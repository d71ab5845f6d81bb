"""``kvmpi bench devices``: sums of a worker's device vectors into host memory, and copies back, beside plain copies.

One process uses one device: several vectors on it stand for those of several devices.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from kvmpi.arrays import DTYPES
from kvmpi.benchmarks import device_rows
from kvmpi.benchmarks.device_report import DeviceReport
from kvmpi.benchmarks.options import add_common, check_common, numbers
from kvmpi.benchmarks.plan import Case
from kvmpi.benchmarks.report import exit_status
from kvmpi.benchmarks.sizes import format_bytes, parse_sizes
from kvmpi.errors import KVError, UnsupportedError

_SIZES = "4K,64K,1M,16M,64M,256M"
_VECTORS = "1,2,4,8"
_ABOUT = """\
How fast device vectors are summed into host memory and results are copied back, beside plain copies of this card.
Every row is verified before it is timed.

rows:
  copy:d2h, copy:h2d, copy:d2d   cudaMemcpyAsync between the device and pinned memory, and on the device
  reduce          vectors are summed into pinned memory
  broadcast       pinned memory is copied to every vector
  device_sum      vectors are summed on the device
  reduce:pageable, broadcast:pageable   with memory of the host as NumPy has it: what pinning saves
"""


def main(name: str, argv: Sequence[str]) -> int:
    """Run ``kvmpi bench devices ARGV``; the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"kvmpi bench {name}", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0; 1 if a result was wrong or the device failed; 2 for a bad option, or without a device.",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--sizes", default=_SIZES, metavar="S,...", help=f"bytes of a vector (default {_SIZES})")
    parser.add_argument(
        "--vectors", default=_VECTORS, metavar="N,...",
        help=f"numbers of vectors, 1 to {device_rows.MAX_VECTORS} (default {_VECTORS})",
    )  # fmt: skip
    parser.add_argument("--dtypes", default="float32", metavar="T,...", help=f"{', '.join(DTYPES)} (default float32)")
    add_common(parser, seconds=0.05, drawn="of_copy")
    args = parser.parse_args(argv)
    args.command = shlex.join(["kvmpi", "bench", name, *argv])
    try:
        _complete(args)
    except ValueError as error:
        parser.error(str(error))
    return exit_status(lambda: _bench(args))


def _complete(args: argparse.Namespace) -> None:
    check_common(args)
    args.dtypes = list(dict.fromkeys(args.dtypes.split(",")))
    if unknown := [dtype for dtype in args.dtypes if dtype not in DTYPES]:
        raise ValueError(f"--dtypes {','.join(unknown)}: known are {', '.join(DTYPES)}")
    if not all(parse_sizes(args.sizes, 1)):
        raise ValueError(f"--sizes {args.sizes}: a vector of 0 bytes is not copied")
    args.vectors = numbers("--vectors", args.vectors)
    if max(args.vectors) > device_rows.MAX_VECTORS:
        raise ValueError(f"--vectors {max(args.vectors)}: expected 1 to {device_rows.MAX_VECTORS}")


def _bench(args: argparse.Namespace) -> int:
    cupy = import_cupy()
    report = DeviceReport(args, about_card(cupy))
    try:
        report.begin()
        for dtype in args.dtypes:
            _measure(args, dtype, report)
    except MemoryError as error:  # CuPy's too is one
        raise UnsupportedError(f"the vectors do not fit ({error}); give smaller --sizes or fewer --vectors") from None
    except KVError:
        raise
    except RuntimeError as error:  # CUDARuntimeError is one, and what CuPy says where it finds no compiler
        raise KVError(f"the device failed: {error}; see nvidia-smi and kvmpi doctor") from None
    finally:
        report.progress.hide()
    return report.end()


def _measure(args: argparse.Namespace, dtype: str, report: DeviceReport) -> None:
    counts = sorted(set(parse_sizes(args.sizes, DTYPES[dtype].itemsize)))
    report.progress.show(f"{dtype}: memory")
    memory = device_rows.Memory(dtype, counts[-1], max(args.vectors))
    largest = device_rows.measure(device_rows.copies(memory, counts[-1]), args.seconds)
    report.bandwidths(dtype, memory.pinned.nbytes, largest)
    for count in counts:
        size_bytes = count * DTYPES[dtype].itemsize
        contestants = [
            *device_rows.copies(memory, count), *device_rows.sums_and_broadcasts(memory, count, args.vectors)
        ]  # fmt: skip
        size = f"{format_bytes(size_bytes)} of {dtype}"
        found = device_rows.measure(contestants, args.seconds, functools.partial(report.doing, size))
        device_rows.add_shares(found, largest)
        report.block(Case((count,)), [{"size_B": size_bytes, "dtype": dtype, **row} for row in found])


def import_cupy() -> Any:
    """CuPy, with a device.

    Raises:
        UnsupportedError: one of them is not there.
    """
    doctor = "kvmpi doctor looks at both"
    try:
        cupy = importlib.import_module("cupy")
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            raise UnsupportedError(f"CuPy does not work ({error}); {doctor}") from None
        raise UnsupportedError(
            "there is no CuPy; pip install 'kvmpi[gpu]', or the CuPy for this driver's CUDA, such as cupy-cuda13x"
        ) from None
    except ImportError as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip(" =")), "no reason is given")
        raise UnsupportedError(f"CuPy does not work ({words}); {doctor}") from None
    hint = "nvidia-smi lists the devices, and CUDA_VISIBLE_DEVICES says which are seen"
    try:
        number = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise UnsupportedError(f"CuPy sees no device ({error}); {hint}") from None
    if number == 0:
        raise UnsupportedError(f"CuPy sees no device; {hint}")
    return cupy


def about_card(cupy: Any) -> dict[str, Any]:
    """What figures of a device mean nothing without."""
    runtime = cupy.cuda.runtime
    return {
        "card": runtime.getDeviceProperties(0)["name"].decode(), "cupy": cupy.__version__,
        "driver_cuda": cuda_version(runtime.driverGetVersion()), "cuda": cuda_version(runtime.runtimeGetVersion()),
    }  # fmt: skip


def cuda_version(number: int) -> str:
    """``12040`` -> ``12.4``."""
    return f"{number // 1000}.{number % 1000 // 10}"


if __name__ == "__main__":
    sys.exit(main("devices", sys.argv[1:]))
