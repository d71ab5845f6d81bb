"""Packaging: what is compiled, and that launchers and benchmarks, which live beside the library, are parts of it."""

from pathlib import Path

from setuptools import Extension, find_packages, setup

# Without a C compiler the same work is done in Python.
collectives, kernels = Path("kvmpi/collectives/compiled"), Path("kvmpi/kernels/compiled")
native = Extension(
    "kvmpi.collectives._native",
    [
        *(
            str(collectives / f"{name}.c")
            for name in ("native", "copies", "handover", "rings", "segments", "slots", "terms", "words")
        ),
        str(kernels / "elements.c"),
    ],
    include_dirs=[str(kernels)],
    depends=[
        *(str(collectives / f"{name}.h") for name in ("native", "copies", "handover", "terms", "words")),
        str(kernels / "elements.h"),
    ],
    extra_compile_args=["-O3"],
    optional=True,
)
halves = Extension(
    "kvmpi.kernels._halves",
    [str(kernels / "halves.c"), str(kernels / "elements.c")],
    depends=[str(kernels / "elements.h")],
    extra_compile_args=["-O3"],
    optional=True,
)

setup(
    packages=[*find_packages(include=["kvmpi", "kvmpi.*"]), "kvmpi.launchers", "kvmpi.benchmarks"],
    package_dir={"kvmpi": "kvmpi", "kvmpi.launchers": "launchers", "kvmpi.benchmarks": "benchmarks"},
    ext_modules=[native, halves],
    package_data={"kvmpi": ["py.typed"], "kvmpi.kernels": ["*.cu"], "kvmpi.trace": ["web/*"]},
)
