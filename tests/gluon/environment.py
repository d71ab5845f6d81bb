"""Makes an environment with MXNet, which needs an older Python and NumPy: ``python tests/gluon/environment.py FOLDER``.

Says so, and ends with status 0, where that cannot be had: the tests of MXNet are then skipped.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("mxnet==1.9.1", "numpy==1.23.5")


def python_3_10() -> str | None:
    """An interpreter of Python 3.10, the newest that has wheels of NumPy 1.23 and runs MXNet 1.9.1."""
    candidates = [os.environ.get("PYTHON310"), sys.executable, shutil.which("python3.10")]
    candidates += sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.10.*/bin/python")))
    ask = ["-c", "import sys; print(sys.version_info[:2] == (3, 10))"]
    for found in candidates:
        # What is on the path may be a stand-in for an interpreter that is not there.
        if found and run([found, *ask]).stdout == "True\n":
            return found
    return None


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The command's end; one that cannot be run, or hangs, has failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def main(folder: str) -> int:
    """The exit status."""
    python, done = Path(folder, "bin", "python"), Path(folder, "made")
    if done.exists():
        return 0
    base = python_3_10()
    if base is None:
        print("no Python 3.10 here, so the tests of MXNet are skipped; name one with PYTHON310=/path/to/python3.10")
        return 0
    print(f"setting up {folder} with {' and '.join(PACKAGES)} (once)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    for command in ([base, "-m", "venv", folder], [*install, *PACKAGES, "--editable", f"{ROOT}[mpi]"]):
        made = run(command)
        if made.returncode:
            last = (made.stderr.strip().splitlines() or ["no reason given"])[-1]
            print(f"{' '.join(command[1:4])} ... failed, so the tests of MXNet are skipped: {last}")
            shutil.rmtree(folder, ignore_errors=True)
            return 0
    done.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
