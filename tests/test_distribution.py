"""The source distribution: whoever builds kvmpi from it can read, try and test it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("kvmpi", "launchers", "benchmarks", "docs", "examples", "tests")
NOT_SOURCES = shutil.ignore_patterns("__pycache__", "*.so", "*.pyc", ".*_cache")


def test_a_source_distribution_has_all_sources(tmp_path: Path) -> None:
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=NOT_SOURCES)
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tmp_path)
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "setup.py", "-q", "sdist"]
    subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=True, timeout=300)
    (made,) = (tmp_path / "dist").iterdir()
    with tarfile.open(made) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert sorted(there - packed) == []
