"""Engines that are closed at the end, and a helper thread that finishes promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from engine_helpers import TIMEOUT_S, Finisher

from kvmpi.engine import Engine, create_engine


@pytest.fixture
def finisher() -> Iterator[Finisher]:
    finisher = Finisher()
    yield finisher
    finisher.stop()


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def new(kind: str = "threaded", num_threads: int = 2) -> Engine:
        engine = create_engine(kind, num_threads)
        engine.add_lane("reduce", ordered=True)
        engine.add_lane("broadcast", ordered=True)
        engine.add_lane("io", num_threads=1)
        engines.append(engine)
        return engine

    yield new
    for engine in engines:
        engine.close(TIMEOUT_S)


@pytest.fixture(params=["threaded", "naive"])
def engine(request: pytest.FixtureRequest, new_engine: Callable[..., Engine]) -> Engine:
    """Either engine: what a test says with it must hold for both."""
    return new_engine(request.param)


@pytest.fixture
def threaded(new_engine: Callable[..., Engine]) -> Engine:
    return new_engine("threaded")
