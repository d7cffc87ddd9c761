"""A training of several ranks whose folder another machine holds; time passes as it is looked at."""

import json
import time
from pathlib import Path
from unittest import mock

import rank_training

HOLDER = {"host": "node1", "pid": 7, "boot": "its own", "namespace": 1, "start": 1, "token": "its", "lease_s": 60}


def train(rank, size, folder, *, is_alive):
    began_s = time.monotonic()
    now, path = [0.0], Path(folder) / ".lease-00000001"
    if rank == 0:
        path.write_text(json.dumps(HOLDER))

    def sleep(seconds):
        now[0] += seconds
        if is_alive:
            path.write_text(json.dumps(HOLDER | {"renewals": now[0]}))

    with mock.patch.multiple(time, sleep=sleep, monotonic=lambda: began_s + now[0]):
        return rank_training.train(rank, size, target_batch=16, micro_batch=4, max_steps=2, checkpoint=folder)
