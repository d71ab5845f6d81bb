"""``kvmpi run`` with stand-ins for the scheduler and the servers, so that these tests need no kvmpi.ps."""

import os
import sys
from pathlib import Path

from kvmpi.launchers import run
from kvmpi.launchers.command import main
from kvmpi.launchers.job import RoleCommands

STAND_IN = str(Path(__file__).with_name("stand_in.py"))

if __name__ == "__main__":
    run.HANDSHAKE_S = float(os.environ.get("TEST_HANDSHAKE_S", run.HANDSHAKE_S))
    roles = {role: (sys.executable, STAND_IN, role) for role in ("scheduler", "server")}
    sys.exit(main(sys.argv[1:], commands=RoleCommands(**roles)))
