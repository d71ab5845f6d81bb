"""Settings: what ``KVMPI_*`` may be, what is said of what it may not be, and how workers are divided among clients."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvmpi import cli
from kvmpi.config import Config, client_bounds, empty_option, env_name, settings_table
from kvmpi.errors import ConfigError

#: What is set, and what has to be said of it beside the name of the first.
MISTAKES = [
    ("TIMEOUT_S=soon", "expected float, for example 300.0"),
    ("TIMEOUT_S=0", "must be positive"),
    ("TIMEOUT_S=nan", "expected seconds"),
    ("HEARTBEAT_S=inf", "expected seconds"),
    ("HEARTBEAT_S=2 HEARTBEAT_TIMEOUT_S=3", "at most half of KVMPI_HEARTBEAT_TIMEOUT_S=3.0"),
    ("RETRY_S=-1", "must be positive"),
    ("HEARTBEAT_S=1e-9", "expected at least 0.01 seconds"),
    ("HEARTBEAT_TIMEOUT_S=0.001 HEARTBEAT_S=0.01", "at least 0.01 seconds"),
    ("RETRY_S=0.001", "at least 0.01 seconds"),
    ("REPORT_S=1e-6", "at least 0.01 seconds"),
    ("STALL_S=-1", "must not be negative"),
    ("REPORT_S=-0.5", "0 turns reports off"),
    ("BUCKET_BYTES=8M", "expected int"),
    ("CHUNK_BYTES=-1", "must not be negative"),
    ("STALENESS=-1", "must not be negative"),
    ("SOFTSYNC=0", "must be at least 1"),
    ("WINDOW_BYTES=4611686018427387904", "less than 2.62"),
    ("CHUNK_BYTES=20000 MAX_MESSAGE_BYTES=16384", "MAX_MESSAGE_BYTES=16384"),
    ("MAX_MESSAGE_BYTES=100", "must be at least 16384"),
    ("RING_CHUNK_BYTES=-1", "must not be negative"),
    ("SHARED_BYTES=-1", "must not be negative"),
    ("NUM_RINGS=9", "1 to 8"),
    ("ALLREDUCE=fast", "'hierarchical', 'multi_ring'"),
    ("METRICS_PORT=65536", "expected a port, 0 or -1"),
    ("METRICS_PORT=65534 NUM_SERVERS=2", "no 2 ports after it"),
    ("DASHBOARD_PORT=-2", "expected a port, 0 or -1"),
    ("SCHEDULER_PORT=70000", "expected a port"),
    ("NUM_SERVERS=-1", "must not be negative"),
    ("REPLICAS=-1", "must not be negative"),
    ("NUM_WORKERS=0", "must be at least 1"),
    ("SNAPSHOT_EVERY=10", "needs KVMPI_SNAPSHOT_DIR"),
    ("SNAPSHOT_SECONDS=-1", "must not be negative"),
    ("SNAPSHOT_DIR=/tmp", "how often"),
    ("SNAPSHOT_EVERY=10 SNAPSHOT_SECONDS=5 SNAPSHOT_DIR=/tmp", "only one of them"),
    ("TIMEOUTS=3", r"did you mean KVMPI_TIMEOUT_S\?\)$"),
    ("WALDO=3", "; known settings: KVMPI_ALLREDUCE"),
]


def settings(text: str) -> dict[str, str]:
    return {f"KVMPI_{name}": value for name, value in (word.split("=") for word in text.split())}


@pytest.mark.parametrize(("text", "said"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_what_cannot_be_is_named(text: str, said: str) -> None:
    name = next(iter(settings(text)))
    with pytest.raises(ConfigError, match=rf"{name}\b.*{said}"):
        Config.from_env(settings(text))


@pytest.mark.parametrize(("given", "said"), [
    ({"timeout": 3}, r"unknown setting timeout \(did you mean timeout_s\?\)$"), ({"waldo": 3}, "settings.md"),
    ({"timeout_s": "3"}, "timeout_s='3': expected float, for example 300.0"), ({"num_rings": 2.5}, "expected int"),
    ({"allreduce": 1}, "expected str"),
])  # fmt: skip
def test_an_argument_that_cannot_be_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.from_env({}, **given)


def test_an_argument_beats_the_environment_and_that_the_default() -> None:
    env = {"KVMPI_TIMEOUT_S": "7", "KVMPI_NUM_RINGS": "", "PATH": "/bin"}
    found = Config.from_env(env, retry_s=2.0)
    assert (found.timeout_s, found.retry_s, found.num_rings) == (7.0, 2.0, Config().num_rings)
    assert Config.from_env(env, timeout_s=9.0).timeout_s == 9.0


def test_a_process_is_told_what_differs_from_the_defaults() -> None:
    assert Config().to_env() == {}
    found = Config(timeout_s=7.5, metrics_port=65533, num_servers=2, interface="eth0,10.0.0.0/16", allreduce="ring")
    assert Config.from_env(found.to_env()) == found
    assert set(found.to_env()) == set(settings("TIMEOUT_S= METRICS_PORT= NUM_SERVERS= INTERFACE= ALLREDUCE="))


def test_the_table_has_every_setting() -> None:
    table = settings_table()
    for field in fields(Config):
        assert f"| `{env_name(field.name)}` | {type(field.default).__name__} |" in table


@pytest.mark.parametrize(("words", "option"), [
    (["--json", ""], "--json"), (["-n", "2", "--json=", "x"], "--json"), (["-n", ""], "-n"),
    (["--json", "x", ""], ""), (["--submit-option=--mem=", "--json=x"], ""), ([], ""),
])  # fmt: skip
def test_options_without_a_value_are_found(words: list[str], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert empty_option(words).partition(":")[0] == option
    if option:
        assert cli.main(["bench", "none", *words]) == 2
        assert f"kvmpi bench: {option}: the value is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("workers", "sizes"), [(1, [1]), (7, [7]), (7, [3, 2, 2]), (4, [1, 1, 1, 1]), (8, [3, 3, 2])], ids=str
)
def test_clients_differ_by_one_worker_at_most_the_larger_first(workers: int, sizes: list[int]) -> None:
    bounds = client_bounds(workers, len(sizes))
    assert [stop - start for start, stop in bounds] == sizes
    assert [rank for start, stop in bounds for rank in range(start, stop)] == list(range(workers))


@pytest.mark.parametrize(("workers", "clients", "said"), [
    (2, 3, "use -c 2 or fewer"), (0, 1, "at least 1"), (1, 0, "at least 1"),
])  # fmt: skip
def test_every_client_needs_a_worker(workers: int, clients: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        client_bounds(workers, clients)
