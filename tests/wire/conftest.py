"""Two jobs whose keys differ, and the contexts of their processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmpi.config import Config
from kvmpi.wire import Context, create_keys, new_context

NewContext = Callable[..., Context[Any]]


@pytest.fixture
def member(tmp_path: Path) -> Iterator[NewContext]:
    """``member("A")`` is a context for a process of job A; keywords are settings."""
    contexts: list[Context[Any]] = []

    def start(job: str, **settings: Any) -> Context[Any]:
        keys = str(tmp_path / f"keys-{job}")
        create_keys(keys)
        contexts.append(new_context(Config(**{"keys": keys, **settings})))
        return contexts[-1]

    yield start
    for context in contexts:
        context.destroy(linger=0)
