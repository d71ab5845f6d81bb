"""A scheduler or a server that does nothing until SIGTERM; TEST_SCHEDULER and TEST_SERVER make it misbehave."""

import os
import signal
import sys
import time

role = sys.argv[1]
mode = os.environ.get(f"TEST_{role.upper()}", "")
if mode == "port in use":
    sys.exit("ConfigError: port 5000 is in use")
if mode == "silent":
    time.sleep(1000)
if mode == "closes":
    os.close(int(os.environ["KVMPI_READY_FD"]))
    time.sleep(1000)
if mode == "bad exit":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if role == "scheduler":
    with os.fdopen(int(os.environ["KVMPI_READY_FD"]), "w") as ready:
        ready.write("nonsense\n" if mode == "nonsense" else "tcp://127.0.0.1:12345\n")
print("up", os.environ["KVMPI_ROLE"], os.environ["KVMPI_RANK"], os.environ.get("KVMPI_SCHEDULER", "-"), flush=True)
if mode == "exits 0":
    time.sleep(0.3)
    sys.exit(0)
signal.pause()
