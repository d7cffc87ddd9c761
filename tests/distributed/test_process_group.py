"""Each rank is a process of its own that ends as a user's script does, forked from one that has imported torch."""

import subprocess

import warm

# The last handler to be registered runs first, so the one below sees what `join_ranks` leaves.
SCRIPT = """
import atexit
import os
import socket
import sys

from torch import distributed

import autoaccum

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # Gloo may print to stdout
ENDINGS = {
    "end": lambda: None,
    "exit code": lambda: sys.exit(75),
    "error": lambda: 1 / 0,
    "destroyed": distributed.destroy_process_group,
}

for name, end in ENDINGS.items():
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", **address})
            line = f"{name} {rank}"
            atexit.register(lambda: os.write(log, f"{line}: {distributed.is_initialized()}\\n".encode()))
            autoaccum.join_ranks("cpu")
            assert distributed.is_initialized()
            end()
            sys.exit()
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
"""


def test_message_of_any_length_arrives_and_lack_of_memory_stands_in_place_of_any(crew):
    for found in crew.run("rank_messages:exchanged", size=3):
        assert found == ([0, 5000, 2], [[0, 0], [1, 1], [2, 2]], 3000, 2)


def test_group_of_join_ranks_is_destroyed_at_exit_unless_an_error_ends_the_process(tmp_path):
    log = tmp_path / "log"
    subprocess.run([*warm.python(), "-c", SCRIPT, str(log)], capture_output=True, text=True, timeout=300, check=True)

    left = {"end": False, "exit code": False, "error": True, "destroyed": False}
    assert sorted(log.read_text().splitlines()) == sorted(
        f"{name} {rank}: {is_left}" for name, is_left in left.items() for rank in range(2)
    )
