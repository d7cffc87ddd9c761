"""A training of several ranks whose folder another machine holds; time passes as it is looked at."""

import json
import threading
import time
from pathlib import Path
from unittest import mock

import rank_training

HOLDER = {"host": "node1", "pid": 7, "where": "its own", "start": 1, "token": "its", "lease_s": 60}


def train(rank, size, folder, *, is_alive):
    began_s = time.monotonic()
    now, path = [0.0], Path(folder) / ".lease-00000001"

    def write(lease):
        # At once, as a holder does: other threads sleep too, while this one reads.
        made = Path(f"{folder}-{rank}-{threading.get_ident()}")
        made.write_text(json.dumps(lease))
        made.replace(path)

    if rank == 0:
        write(HOLDER)

    real = time.sleep

    def sleep(seconds):
        if seconds < 0.01:  # for the network
            real(seconds)
            return
        now[0] += seconds
        if is_alive:
            write(HOLDER | {"renewals": now[0]})

    with mock.patch.multiple(time, sleep=sleep, monotonic=lambda: began_s + now[0]):
        return rank_training.train(rank, size, target_batch=16, micro_batch=4, max_steps=2, checkpoint=folder)
