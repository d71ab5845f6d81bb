"""Starts the mpirun of a client on the hosts that a batch system has given it: which ones, only its job there knows.

    client_exec.py KIND MPIRUN SIZE NETWORK EXPORTED AGENT -- PROGRAM [ARG...]

``EXPORTED`` are names of environment variables with commas between; ``AGENT`` is where the script is to be by which
mpirun reaches the other hosts.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import replace

from kvmpi.errors import ConfigError
from kvmpi.launchers import remote_exec, where
from kvmpi.launchers.hosts import lay_out
from kvmpi.launchers.mpirun import MPI


def main(argv: list[str]) -> int:
    """See the top of this file; returns only if it cannot be done."""
    kind, path, size, network, exported, agent = argv[:6]
    program = argv[argv.index("--") + 1 :]
    try:
        found, way = where.allocation(os.environ)
        if way is None:
            raise ConfigError("neither Slurm nor LSF says which hosts are this job's")
        (hosts,) = lay_out(found, [(0, int(size))], 0).clients
    except ConfigError as error:
        print(f"kvmpi on {socket.gethostname()}: {error}", file=sys.stderr)
        return 2
    # An mpirun has to see which of them it is on, and nodes may have names that their hosts do not know.
    here = [where.is_here(host.name) or host.name == os.environ.get("SLURMD_NODENAME") for host in hosts]
    named = [replace(host, name=socket.gethostname()) if own else host for host, own in zip(hosts, here, strict=True)]
    remote_exec.make_files([os.path.dirname(agent)], {os.path.basename(agent): way.agent()})
    if len(named) == 1:
        command = MPI(path, kind).command(int(size), local=True)
    else:
        network = remote_exec.interface_on(network) if ":" in network else network
        command = MPI(path, kind).command_on(named, agent, network, exported.split(","))
    os.execvp(command[0], [*command, *program])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
