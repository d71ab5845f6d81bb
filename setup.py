"""Packaging: what is compiled, and that launchers and benchmarks, which live beside the library, are parts of it."""

from pathlib import Path

from setuptools import Extension, find_packages, setup

# Without a C compiler the same work is done in Python.
compiled = Path("kvmpi/collectives/compiled")
native = Extension(
    "kvmpi.collectives._native",
    [
        str(compiled / name)
        for name in ("native.c", "copies.c", "rings.c", "segments.c", "slots.c", "terms.c", "elements.c")
    ],
    depends=[str(compiled / name) for name in ("native.h", "copies.h", "terms.h", "elements.h")],
    extra_compile_args=["-O3"],
    optional=True,
)

setup(
    packages=[*find_packages(include=["kvmpi", "kvmpi.*"]), "kvmpi.launchers", "kvmpi.benchmarks"],
    package_dir={"kvmpi": "kvmpi", "kvmpi.launchers": "launchers", "kvmpi.benchmarks": "benchmarks"},
    ext_modules=[native],
    package_data={"kvmpi": ["py.typed"], "kvmpi.kernels": ["*.cu"], "kvmpi.trace": ["web/*"]},
)
