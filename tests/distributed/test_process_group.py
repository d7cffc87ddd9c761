"""Each rank is a process of its own that ends as a user's script does, forked from one that has imported torch."""

import subprocess
import sys

import pytest

import autoaccum
from support.processes import fork_server

RANKS = """
import atexit
import ctypes
import os
import sys

import torch
from torch import distributed, nn

import autoaccum

log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # Gloo may print to stdout

def run(work):
    # A store that outlives groups, as torchrun's does.
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # or a child would end its thread, which it does not have
    port = store.port
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    children = []
    for rank in range(2):
        child = os.fork()
        if not child:
            address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", **address})
            work(rank)
            sys.exit()
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
"""

# The last handler to be registered runs first, so the one below sees what `join_ranks` leaves.
ENDINGS = """
ENDINGS = {
    "end": lambda: None,
    "exit code": lambda: sys.exit(75),
    "error": lambda: 1 / 0,
    "destroyed": distributed.destroy_process_group,
}

for name, end in ENDINGS.items():
    def work(rank):
        line = f"{name} {rank}"
        atexit.register(lambda: os.write(log, f"{line}: {distributed.is_initialized()}\\n".encode()))
        autoaccum.join_ranks("cpu")
        assert distributed.is_initialized()
        end()

    run(work)
"""

# With a long switch interval, threads of the network rarely get the interpreter before it ends. At first each rank
# imports torch._dynamo, which an optimizer takes, by itself beside its group; then it is there, which saves seconds.
FITS = """
def work(rank):
    torch.set_num_threads(1)
    if maker == "script":
        distributed.init_process_group("gloo")
    for _ in range(4 if maker == "several fits" else 1):
        trains()

def trains():
    data = [(torch.randn(4), torch.randn(1)) for _ in range(32)]
    sys.setswitchinterval(10)
    autoaccum.fit(
        nn.Linear(4, 1), torch.utils.data.DataLoader(data, batch_size=8), 16, max_steps=1, micro_batch=4,
        loss=nn.MSELoss(), shard_data=True, device="cpu", progress=False,
    )

def ends(times):
    for _ in range(times):
        os.write(log, f"{maker}: {run(work)}\\n".encode())

maker = "several fits"
ends(1)
import torch._dynamo  # imported beside the group of a script, it holds the group
for maker, times in ("script", 2), ("fit", 1):
    ends(times)
"""


def test_message_of_any_length_arrives_and_lack_of_memory_stands_in_place_of_any(rank_pool):
    for found in rank_pool.run("messages:exchanged", size=3):
        assert found == ([0, 5000, 2], [[0, 0], [1, 1], [2, 2]], 3000, 2)


def test_wait_for_a_message_sees_signals_where_tensors_go_by_nccl(rank_pool):
    took = rank_pool.run("messages:waiting_beside_nccl", size=2)

    assert took[1] < 2.5


def test_word_that_a_rank_left_is_read_in_the_same_training_alone(rank_pool):
    for of_same, of_later, after_restart in rank_pool.run("messages:word_of_another_attempt", size=2):
        assert isinstance(of_same, autoaccum.StartAgainError)
        assert [type(one) for one in (of_later, after_restart)] == [autoaccum.RankFailedError] * 2


def test_group_of_join_ranks_is_destroyed_at_exit_unless_an_error_ends_the_process(tmp_path):
    left = {"end": False, "exit code": False, "error": True, "destroyed": False}
    assert sorted(_logged(tmp_path, fork_server.python(), RANKS + ENDINGS)) == sorted(
        f"{name} {rank}: {is_left}" for name, is_left in left.items() for rank in range(2)
    )


@pytest.mark.slow  # each of 8 processes ends as Python ends
def test_processes_end_well_right_after_fit(tmp_path):
    ends = [f"{maker}: [0, 0]" for maker in ["several fits", "script", "script", "fit"]]
    assert _logged(tmp_path, [sys.executable], RANKS + FITS) == ends


def _logged(folder, python, script):
    log = folder / "log"
    command = [*python, "-c", script, str(log)]
    subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return log.read_text().splitlines()
