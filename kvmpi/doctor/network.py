"""Checks of this host's network: its name, the interface that a job would take, and ports that it can listen on."""

from __future__ import annotations

import errno
import socket

from kvmpi.doctor.finding import Finding, Surroundings
from kvmpi.launchers.remote_exec import own_address
from kvmpi.machine import addresses, addresses_of, family_of, interfaces

#: Bridges of containers and virtual machines have the same address on every host.
_BRIDGES = ("docker", "virbr", "br-", "cni", "podman", "lxcbr")
_PATIENCE_S = 2.0


def name(at: Surroundings) -> Finding:
    """Whether this host's own name leads to it, which MPI, gloo and others rely on."""
    own = socket.gethostname()
    try:
        address = addresses_of(own)[0]
    except OSError as error:
        return Finding(
            "host name", "warning", f"{own} does not resolve: {error.strerror or error}",
            "kvmpi does not need it, but MPI and torch.distributed may wait long, or not start.",
            f"add it to /etc/hosts, as root:\necho '127.0.1.1 {own}' >> /etc/hosts",
        )  # fmt: skip
    return Finding("host name", "ok", f"{own} is {address}")


def interface(at: Surroundings, network: str = "", towards: str = "") -> Finding:
    """The address that other hosts would reach, and bridges that could be taken for it.

    Args:
        towards: one of these, where they are known.
    """
    try:
        address = own_address(network, towards)
    except (OSError, ValueError) as error:
        if network:
            return Finding("interface", "problem", f"--interface {network}: {error}", do="name one that is there")
        return Finding("interface", "ok", "no way to other hosts; a job on this host needs none")
    found = addresses()
    ours = next((label for label, its in found if its == address), "")
    speed = at.read(f"/sys/class/net/{ours}/speed")
    seen = f"{ours or 'unknown'} {address}" + (f", {speed} Mbit/s" if speed.isdigit() else "")
    facts = {"interface": ours, "address": address, "all": interfaces()}
    bridges = list(dict.fromkeys(label for label, _ in found if label.startswith(_BRIDGES)))
    if bridges:
        return Finding(
            "interface", "ok", f"{seen}; {', '.join(bridges)} lead to no other host: name the network with --interface "
            "if ranks hang", facts=facts,
        )  # fmt: skip
    return Finding("interface", "ok", seen, facts=facts)


def ports(at: Surroundings, network: str = "", towards: str = "") -> Finding:
    """Whether a process can listen on a port that the system chooses, and be reached there."""
    try:
        address = own_address(network, towards)
    except (OSError, ValueError):
        address = "127.0.0.1"
    for where in dict.fromkeys((address, "127.0.0.1")):
        try:
            with socket.create_server((where, 0), family=family_of(where)) as listener:
                listener.settimeout(_PATIENCE_S)
                with socket.create_connection(listener.getsockname()[:2], _PATIENCE_S) as sender:
                    accepted, _ = listener.accept()
                    with accepted:
                        accepted.settimeout(_PATIENCE_S)
                        sender.sendall(b"here")
                        accepted.recv(4)
        except OSError as error:
            is_down = where == "127.0.0.1" and error.errno == errno.ENETUNREACH
            return Finding(
                "ports", "problem", f"cannot listen on {where} and connect to it: {error.strerror or error}",
                "The scheduler and the servers of a job do just that.",
                "bring the loopback interface up, as root:\nip link set lo up" if is_down else
                "allow it in this host's firewall (iptables -L, nft list ruleset), or run on another interface",
            )  # fmt: skip
    span = at.read("/proc/sys/net/ipv4/ip_local_port_range").split()
    if len(span) == 2 and int(span[1]) - int(span[0]) < 1000:
        return Finding("ports", "warning", f"the system gives out ports {span[0]} to {span[1]} only",
                       "Connections of a large job may find none that is free.",
                       "as root:\nsysctl net.ipv4.ip_local_port_range='32768 60999'")  # fmt: skip
    chosen = f"; the system chooses ports {span[0]} to {span[1]}" if len(span) == 2 else ""
    return Finding("ports", "ok", f"{address} and 127.0.0.1 can be listened on and reached{chosen}")
