"""Processes that torchrun starts: killed, ended by a signal, started again, or started wrongly."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest
from torch import distributed, nn

import autoaccum
from support.processes import fork_server
from support.processes.folders import SUPPORT, TESTS


def torchrun(folder, action, *options, size=2, kind="", before=()):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    # An older torch would else let all that it starts on a machine meet at one and the same port.
    command = [
        *fork_server.python(),
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(size),
        *options,
    ]
    return subprocess.Popen(
        [
            *before,
            *command,
            "--no-python",
            *fork_server.python(),
            str(SUPPORT / "ranks" / "torchrun_job.py"),
            str(folder),
            action,
            kind,
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(folder, action, *options, size=2, kind="", before=()):
    folder.mkdir(exist_ok=True)
    with torchrun(folder, action, *options, size=size, kind=kind, before=before) as process:
        said = process.communicate(timeout=200)[1]
    assert process.returncode == 0, said
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def undisturbed(rank_pool, tmp_path_factory):
    return rank_pool.run("torchrun_job:train", tmp_path_factory.mktemp("undisturbed"), size=2)


def test_rank_that_is_killed_is_started_again_and_the_training_ends_where_the_undisturbed_one_ends(
    tmp_path, undisturbed
):
    found = finished(tmp_path, "kill", "--max-restarts", "1")

    assert [one["from"] for one in found] == [2, 2]
    assert found[0]["numbers"] == found[1]["numbers"] == undisturbed[0]["numbers"]


def test_sigterm_leaves_a_checkpoint_of_all_ranks_from_which_they_go_on(rank_pool, tmp_path, undisturbed):
    with torchrun(tmp_path, "wait") as process:
        deadline = time.monotonic() + 150
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=100)[1]
    assert process.returncode != 0, said

    found = rank_pool.run("torchrun_job:train", tmp_path, size=2)

    assert found[0]["from"] in (3, 4, 5), said
    assert found[0]["from"] == found[1]["from"]
    assert found[0]["numbers"] == found[1]["numbers"] == undisturbed[0]["numbers"]


# --- a model that is spread over ranks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed_spread(rank_pool, tmp_path_factory):
    return rank_pool.run("torchrun_job:train", tmp_path_factory.mktemp("undisturbed"), size=2, is_spread=True)


@pytest.mark.slow  # a rank that is killed, and a spread model that goes on, have quick tests of their own
def test_spread_model_goes_on_from_its_checkpoint_where_a_rank_was_killed(tmp_path, undisturbed_spread):
    found = finished(tmp_path, "kill", "--max-restarts", "1", kind="spread")

    assert [one["from"] for one in found] == [2, 2]
    assert found[0]["numbers"] == found[1]["numbers"] == undisturbed_spread[0]["numbers"]


@pytest.mark.slow  # ranks wait, and are started again
def test_lack_of_memory_within_a_pass_becomes_a_smaller_cut_where_the_ranks_start_again(
    rank_pool, tmp_path, undisturbed_spread
):
    ended = rank_pool.answers("torchrun_job:train", tmp_path, "lack", wait_s=3, size=2, is_spread=True)
    assert [type(one) for one in ended] == [autoaccum.StartAgainError] * 2, ended

    assert_is_smaller_cut(
        rank_pool.run("torchrun_job:train", tmp_path, "lack", size=2, is_spread=True), undisturbed_spread
    )


@pytest.mark.slow  # by torchrun itself
def test_lack_of_memory_within_a_pass_becomes_a_smaller_cut_after_a_restart(tmp_path, undisturbed_spread):
    found = finished(tmp_path, "lack", "--max-restarts", "1", kind="spread")

    assert (tmp_path / "exit-code").read_text() == "75"
    assert_is_smaller_cut(found, undisturbed_spread)


def assert_is_smaller_cut(found, undisturbed_spread):
    assert [one["from"] for one in found] == [4, 4]  # the fourth window has one sample for each rank, which fits
    assert all(max(cut) <= 2 for one in found for cut in one["cuts"])
    assert found[0]["numbers"] == found[1]["numbers"]
    assert found[0]["numbers"] == pytest.approx(undisturbed_spread[0]["numbers"], rel=1e-9)


# --- a loop with an accumulator of such a model, and checkpoints of its own -------------------------------------------


@pytest.fixture(scope="module")
def undisturbed_loop(rank_pool, tmp_path_factory):
    return rank_pool.run("torchrun_job:loop", tmp_path_factory.mktemp("undisturbed"), size=2)


@pytest.mark.slow  # ranks are started again
def test_loop_with_a_spread_model_goes_on_from_its_own_checkpoint_where_a_rank_was_killed(tmp_path, undisturbed_loop):
    found = finished(tmp_path, "kill", "--max-restarts", "1", kind="loop")

    assert [one["from"] for one in found] == [2, 2]
    assert found[0]["numbers"] == found[1]["numbers"] == undisturbed_loop[0]["numbers"]


@pytest.mark.slow  # by torchrun and `autoaccum run`
def test_loop_that_lacks_memory_within_a_pass_goes_on_smaller_under_autoaccum_run(tmp_path, undisturbed_loop):
    before = [sys.executable, "-m", "autoaccum", "run", "--"]

    found = finished(tmp_path, "lack", kind="loop", before=before)

    assert (tmp_path / "exit-code").read_text() == "75"
    assert [one["from"] for one in found] == [2, 2]
    assert all(max(cut) <= 3 for one in found for cut in one["cuts"])
    assert found[0]["numbers"] == found[1]["numbers"]
    assert found[0]["numbers"] == pytest.approx(undisturbed_loop[0]["numbers"], rel=1e-9)


# --- the environment --------------------------------------------------------------------------------------------------


OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "RANK is set in the environment and WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is set in the environment and RANK, MASTER_ADDR, MASTER_PORT are not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT are not; start every process by torchrun"),
        (OF_TWO | {"RANK": "3"}, "must be less than WORLD_SIZE"),
        (OF_TWO | {"RANK": "one"}, "is not a whole number"),
        *(
            (OF_TWO | {"AUTOACCUM_RANK_TIMEOUT_S": text}, "must be a positive number of seconds")
            for text in ("soon", "-1", "0", "nan")
        ),
    ],
)
def test_variables_that_are_half_set_or_wrong_are_named(monkeypatch, variables, text):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(autoaccum.InvalidInputError, match=text):
        autoaccum.join_ranks("cpu")


def test_a_task_of_slurm_that_would_train_by_itself_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")

    with pytest.raises(autoaccum.InvalidInputError, match="Slurm started 2 tasks, and each would train by itself"):
        autoaccum.fit(nn.Linear(8, 2), [], 4, shard_data=True)


def meet(rank, size, port, slow_s):
    """Set up a group as `fit` does, rank 0 slowly; the times at which it was there on this rank."""
    distributed.destroy_process_group()
    there = []
    set_up = distributed.init_process_group

    def slow(*args, **kwargs):
        set_up(*args, **kwargs)
        time.sleep(slow_s if rank == 0 else 0.0)
        there.append(time.monotonic())

    variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
        mock.patch.object(distributed, "init_process_group", slow),
    ):
        autoaccum.join_ranks("cpu")
    return there[0], time.monotonic()


def test_rank_goes_on_only_when_all_have_set_up_the_group(rank_pool):
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]

    times = rank_pool.run("across.test_ranks_torchrun:meet", port, 1.0, size=2)

    assert min(after for _, after in times) >= max(there for there, _ in times)


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_process_alone_joins_nobody(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    autoaccum.join_ranks("cpu")

    assert not distributed.is_initialized()
