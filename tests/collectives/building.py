"""Which tests need a C compiler; apart, since programs of jobs need not read pytest."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

CAN_BUILD = shutil.which("gcc") and Path(sysconfig.get_paths()["include"], "Python.h").exists()

built = pytest.mark.skipif(not CAN_BUILD, reason="no C compiler here")
