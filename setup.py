"""Packaging: launchers and benchmarks live beside the library; they are installed as parts of it."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["kvmpi", "kvmpi.*"]), "kvmpi.launchers", "kvmpi.benchmarks"],
    package_dir={"kvmpi": "kvmpi", "kvmpi.launchers": "launchers", "kvmpi.benchmarks": "benchmarks"},
    package_data={"kvmpi": ["py.typed"], "kvmpi.kernels": ["*.cu"], "kvmpi.trace": ["web/*"]},
)
