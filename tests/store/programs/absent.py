"""The last worker never makes the call: all others end in KVTimeoutError that names it.

``absent.py STORE FOLDER WORKERS CALL``: the launcher ends the job with the first of us, so all wait in FOLDER for
WORKERS.
"""

import sys
import time
from pathlib import Path

import numpy as np

import kvmpi

kv = kvmpi.create(sys.argv[1])
kv.init("w", np.ones(4, "f4"))
value = np.ones(4, "f4")
if sys.argv[4] == "again":  # a call that is known by then
    for _ in range(4):
        kv.pushpull("w", value)
if kv.rank == kv.num_workers - 1:
    time.sleep(600)
start = time.monotonic()
try:
    if sys.argv[4] == "wait_all":
        kv.pushpull("w", np.ones(4, "f4"), async_op=True)
    call = {"again": "pushpull"}.get(sys.argv[4], sys.argv[4])
    getattr(kv, call)(*{"pushpull": ("w", value), "save": (f"{sys.argv[2]}/saved",)}.get(call, ()))
except kvmpi.KVTimeoutError as error:
    print(f"late after {time.monotonic() - start:.1f} s: {error}", flush=True)
    folder = Path(sys.argv[2])
    (folder / str(kv.rank)).touch()
    while time.monotonic() - start < 40 and not all((folder / worker).exists() for worker in sys.argv[3].split(",")):
        time.sleep(0.02)
    raise
