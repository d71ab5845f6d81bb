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


def address_of(endpoint: str) -> str:
    """Where ``tcp://HOST:PORT`` leads: over IPv4 if a name has addresses of both. Nothing if nobody knows it, or not
    yet."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if ":" in host:
        return host
    try:
        return addresses_of(host)[0]
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Whether a host has it for itself, so that nobody else can be at the other end."""
    return address.startswith("127.") or address == "::1"
