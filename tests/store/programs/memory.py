"""192 MiB of keys: prints how far the peak memory of workers and servers grew beyond the arrays of the program."""

import os
import sys

import numpy as np

import kvmpi

KEYS, COUNT = 12, 4 << 20  # 12 keys of 16 MiB


def peak_bytes(pid="self"):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def share_bytes(pid="self"):
    """What the process holds, pages that several processes map split between them: the sum over a job is its memory."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def servers():
    mine = f"KVMPI_JOB_ID={os.environ['KVMPI_JOB_ID']}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                env = file.read().split(b"\0")
        except OSError:
            continue
        if mine in env and b"KVMPI_ROLE=server" in env:
            yield pid


name, rule = sys.argv[1:]
values = [np.full(COUNT, k + 1, "f4") for k in range(KEYS)]
outs = [np.full(COUNT, -1, "f4") for _ in range(KEYS)]
kv = kvmpi.create(name)
before, share_before = peak_bytes(), share_bytes()
keys = list(range(KEYS))
kv.init(keys, values)
if rule == "momentum":
    kv.set_optimizer(kvmpi.optim.SGD(lr=0.1, momentum=0.9))
for _ in range(2):  # what the second push leaves behind, all others would
    kv.push(keys, values)
    kv.pull(keys, outs)
    kv.pushpull(keys, values, outs)
kv.barrier()
total = KEYS * COUNT * 4
print(f"peak worker {(peak_bytes() - before) >> 20} MiB", flush=True)
print(f"share worker {(share_bytes() - share_before) >> 20} MiB", flush=True)
if kv.rank == 0:
    for pid in servers():
        print(f"peak server {peak_bytes(pid) >> 20} MiB", flush=True)
        print(f"share server {share_bytes(pid) >> 20} MiB", flush=True)
kv.barrier()
kv.close()
