"""Mistakes of one worker or of all: each is a clear error at the call that made it, and the job goes on.

Prints one line for each mistake and worker: what was raised.
"""

import os
import signal
import sys

import numpy as np

import kvmpi

kv = kvmpi.create(sys.argv[1])
r = kv.rank
odd = r == kv.num_workers - 1  # the worker that errs
grouped = kv.mpi_size > 1
good, out = np.ones((2, 3), "f4"), np.empty((2, 3), "f4")


def expect(label, call):
    try:
        call()
        print(f"mistake {label}: nothing", flush=True)
    except Exception as error:
        print(f"mistake {label}: {type(error).__name__}: {error}", flush=True)
    kv.barrier()
    kv.pushpull(["w", "v"], [np.full_like(good, r + 1)] * 2, [out, np.empty_like(out)])
    n = kv.num_workers
    assert (out == n * (n + 1) / 2).all(), (label, out)  # the store goes on, with every worker


def in_a_fork(call):
    """What ``call`` raises in a forked child, which ends by itself."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        signal.alarm(20)
        try:
            call()
            os.write(writing, b"nothing")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        kv.close()  # the parent's business
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    said = os.read(reading, 10_000).decode() if status == 0 else f"status {status}"
    raise kvmpi.KVError(said)


kv.init(["w", "v"], [good, good])
expect("fork", lambda: in_a_fork(lambda: kv.push("w", good)))
expect("fork all", lambda: in_a_fork(lambda: kv.wait_all()))
expect("uninitialised", lambda: kv.push("nope", good))
expect("twice", lambda: kv.init("w", good))
expect("kind", lambda: kv.push(7, good))
expect("none", lambda: kv.pull("w", None))
expect("compression", lambda: kv.set_gradient_compression({"type": "mystery"}))
if grouped:
    erring = kv.client_rank == kv.num_clients - 1  # the other clients push nothing meanwhile
    both = ["w", "v"]

    def in_the_client(label, call):
        expect(label, call if erring else lambda: None)

    in_the_client("shape", lambda: kv.push("w", np.ones((3, 2), "f4") if odd else good))
    in_the_client("dtype", lambda: kv.pushpull("w", good.astype("f8") if odd else good, out))
    in_the_client("list", lambda: kv.push(both, [good, np.ones(5, "f4") if odd else good]))
    in_the_client("keys", lambda: kv.push("v" if odd else "w", good))
    in_the_client("order", lambda: kv.push(both[:1] if odd else both, [good] * (1 if odd else 2)))
    in_the_client("call", lambda: kv.pull("w", out) if odd else kv.push("w", good))
    expect("init shape", lambda: kv.init("new", np.ones(3 if r % 2 else 2, "f4")))
    expect("init dtype", lambda: kv.init("new", np.ones(2, "f8" if r % 2 else "f4")))
    in_the_client("priority", lambda: kv.push("w", good, priority="high" if odd else 0))
    kv.client.init("g", good)
    scale = np.array([0.5, 0.5]) if odd else 1.0
    in_the_client("scale", lambda: kv.client.allreduce("g", good.copy(), scale=scale))
    expect("path", lambda: kv.save(None if odd else "unused"))
    expect("optimizer", lambda: kv.set_optimizer(kvmpi.optim.SGD(lr=0.1 if r % 2 else 0.2)))
else:
    # Every worker is a client of its own: a mistake of one is an error there alone.
    expect("shape", lambda: kv.push("w", np.ones((3, 2), "f4")) if odd else None)
    expect("init shape", lambda: kv.init("new", np.ones(3 if odd else 2, "f4")))
    expect("init dtype", lambda: kv.init("other", np.ones(2, "f8" if odd else "f4")))
kv.close()
