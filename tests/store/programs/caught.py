"""All workers of client 0 leave a store with an error that is caught; the others hear of it at once, and all go on.

caught.py TYPE...
"""

import sys
import time

import numpy as np

import kvmpi
from kvmpi import errors

for name in sys.argv[1:]:
    begun_s, words = time.monotonic(), ["itself"]
    try:
        with kvmpi.create(name, heartbeat_timeout_s=60, heartbeat_s=1) as kv:
            kv.init("w", np.zeros(5000, "f4"))
            if kv.client_rank == 0:
                raise ZeroDivisionError("bad data")
            kv.pushpull("w", np.ones(5000, "f4"), np.empty(5000, "f4"))
    except ZeroDivisionError:
        pass
    except errors.KVError as error:
        words = [type(error).__name__, *(word for word in ("client 0", "ZeroDivisionError") if word in str(error))]
    assert time.monotonic() - begun_s < 30, "it was waited for as if it were silent"
    print("caught", name, *words, flush=True)
