"""Addresses of TCP as ZeroMQ wants them: brackets, names, and where IPv6 is to be taken, which it has to be told."""

from __future__ import annotations

from kvmpi.machine import addresses_of, interfaces


def listening(host: str, port: int) -> str:
    """The endpoint of a listener on ``host``: an address, a name of this host, or one of its interfaces.

    Args:
        port: 0 lets the system choose.
    """
    host = host.strip("[]")
    try:
        address = interfaces().get(host) or addresses_of(host)[0]
    except OSError:
        address = host  # ZeroMQ says what is wrong with it
    return f"tcp://{f'[{address}]' if ':' in address else address}:{port or '*'}"


def is_of_ipv6(endpoint: str) -> bool:
    """Whether ``tcp://HOST:PORT`` leads over IPv6: not where a name has an address of IPv4 as well."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    try:
        return ":" in (host if ":" in host else addresses_of(host)[0])
    except OSError:
        return False  # nobody knows it, or not yet
