"""A client that never reads what it is sent: ``pusher.py push|pull ENDPOINT CLIENT NUM_CLIENTS KEY COUNT PART``.

It asks a server for one thing after another, as fast as it goes, until it is killed. Started by ``floods``.
"""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np
import zmq

from kvmpi.config import Config
from kvmpi.wire import encode, new_context
from kvmpi.wire import messages as m

how, endpoint, client, num_clients, key, count, part = sys.argv[1:]
context = new_context(Config.from_env())
with context.socket(zmq.DEALER) as raw:
    # It has no room for more answers, so that they stay where they come from; and none for requests that do not leave.
    raw.sndhwm, raw.rcvhwm, raw.linger = 4, 1, 0
    raw.setsockopt(zmq.ROUTING_ID, b"k" + how.encode() + bytes(12))
    if endpoint.startswith("tcp"):
        context.secure_connection(raw)
    raw.connect(endpoint)
    raw.send(encode(m.Hello(1, 1, "async", int(client), int(num_clients), time.time_ns())))
    value = np.ones(int(count), "f4")
    for step in itertools.count(1):
        if how == "push":
            raw.send(encode(m.Push(1 + step, key, 0, step, "none", True, part=int(part))), zmq.SNDMORE)
            raw.send(value.data, copy=False)
        else:
            raw.send(encode(m.Pull(1 + step, key, 0, 0, part=int(part))))
        if step % 1000 == 0 or how == "push":
            print(step, flush=True)
