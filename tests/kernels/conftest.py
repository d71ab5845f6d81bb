"""The fixtures of devices, which the tests of benchmarks share."""

from __future__ import annotations

from device_fixtures import compile_for_host, cuda, import_gpu, stand_in  # noqa: F401 - fixtures
