"""Packaging: the launchers live beside the library and are installed as ``kvmpi.launchers``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["kvmpi", "kvmpi.*"]), "kvmpi.launchers"],
    package_dir={"kvmpi": "kvmpi", "kvmpi.launchers": "launchers"},
    package_data={"kvmpi": ["py.typed"]},
)
