"""`autoaccum slurm` on a real Slurm of one node or two: jobs that are warned, preempted, cancelled or killed."""

import contextlib
import os
import re
import subprocess
import sys

import pytest
import torch

from support.processes.folders import ROOT
from support.processes.slurm_jobs import Job, command, needs_slurm, needs_two_nodes, number_of_nodes

pytestmark = needs_slurm

# Without torch, so that it starts at once; it is done when it runs for the second time.
WAITING = """
import os, signal, sys, time
def stop(*_):
    print("checkpoint written", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
count = os.environ.get("SLURM_RESTART_COUNT", "0")
print("start", count, sys.argv[1:], os.environ.get("SLURM_ARRAY_TASK_ID"), flush=True)
if count != "0" and sys.argv[1] != "for ever":
    sys.exit(0)
time.sleep(600)
"""
# A training with a random mask and shuffling, at a pace that lets something happen to it.
TRAINING = """
import os, sys, time
import torch
import autoaccum

class Waits(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        if "SLURM_RESTART_COUNT" not in os.environ:  # otherwise it has been warned
            time.sleep(float(os.environ.get("WAITS_S", "0")))
        if os.environ.get("RANK") == "0":
            print("step", report.step, flush=True)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
autoaccum.fit(model, loader, 16, micro_batch=16 // int(os.environ.get("WORLD_SIZE", "1")) // 2, device="cpu",
              epochs=20, checkpoint="checkpoints", shard_data="RANK" in os.environ, callbacks=[Waits()])
if os.environ.get("RANK", "0") == "0":
    torch.save(model.state_dict(), "end.pt")
"""
# 64 MiB a sample beside a process of some 730 MiB (VmHWM): 16 at once are over 1,500 MiB, and wait to be killed.
HUNGRY = """
import time
import torch
import autoaccum

def forward(model, batch):
    held = torch.ones(len(batch[0]), 64, 2**18)
    if len(held) > 8:
        time.sleep(60)
    return model(batch[0])

data = [(torch.randn(32, 8), torch.randint(0, 2, (32,))) for _ in range(2)]
result = autoaccum.fit(torch.nn.Linear(8, 2), data, 32, loss=torch.nn.CrossEntropyLoss(), micro_batch=16, device="cpu",
                       forward=forward, checkpoint="checkpoints")
print("trained by", result.plan.micro_batches, flush=True)
"""
# 128 MiB a sample on the second of two nodes, where two processes and torchrun take some 2,200 MiB: 8 at once of each
# are 4,200 MiB, and 4 are 3,200.
HUNGRY_ON_ONE_NODE = """
import os, time
import torch
import autoaccum

def forward(model, batch):
    if os.environ["SLURM_NODEID"] == "1":
        held = torch.ones(len(batch[0]), 128, 2**18)
        if len(held) > 4:
            time.sleep(60)
    return model(batch[0])

data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=32)
result = autoaccum.fit(torch.nn.Linear(8, 2), loader, 32, micro_batch=8, device="cpu", forward=forward,
                       checkpoint="checkpoints", shard_data=True)
print("trained by", result.plan.micro_batches, flush=True)
"""
# 32 MiB a sample; where memory is short it is that of one node's processes, whose allocations really fail.
SHORT_ON_ONE_NODE = """
import os, resource
import torch
import autoaccum

autoaccum.join_ranks()
if os.environ.get("SLURM_NODEID") == "1":
    used = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + 200 * 2**20,) * 2)

def forward(model, batch):
    return model(batch[0] * torch.ones(len(batch[0]), 2**23)[:, :8])

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(128, 8), torch.randint(0, 2, (128,)))
loader = torch.utils.data.DataLoader(data, batch_size=32)
model = torch.nn.Linear(8, 2)
result = autoaccum.fit(model, loader, 32, micro_batch=16, device="cpu", forward=forward, shard_data=True)
if os.environ.get("RANK", "0") == "0":
    torch.save(model.state_dict(), "end.pt")
sizes = [report.micro_batches for report in result.history]
os.write(1, f"node {os.environ.get('SLURM_NODEID')}: {sizes[0]}\\n".encode())
"""
# What the page of Slurm takes from its reader.
TASK = """
import torch
def samples(number=8192, seed=1):
    inputs = torch.randn(number, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
def held_out():
    return samples(500, seed=2)
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
def accuracy(outputs, labels):
    return (outputs.argmax(1) == labels).float().mean()
"""
RANKS = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo")
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n")  # whole in one write: both ranks write here
"""
TOO_LARGE = """
import torch
import autoaccum
data = [(torch.randn(4, 8), torch.randint(0, 2, (4,)))]
autoaccum.fit(torch.nn.Linear(8, 2), data, 4, device=autoaccum.Simulated("1KiB"))
"""


@pytest.fixture(scope="module")
def submit(tmp_path_factory):
    """A function that submits a job in a folder of its own; all are cancelled at the end."""
    jobs = []

    def submitted(text, *options, arguments=(), launcher=("python",), **variables):
        folder = tmp_path_factory.mktemp("job")
        (folder / "train.py").write_text(text)
        program = [sys.executable if word == "python" else word for word in launcher]
        jobs.append(Job(folder, *options, "--", *program, "train.py", *arguments, **variables))
        return jobs[-1]

    yield submitted
    for job in jobs:
        job.cancel()
    for job in jobs:
        job.ended()


@pytest.fixture(scope="module")
def limited(submit):
    """A training whose time limit comes in its middle: undisturbed it would take longer."""
    # Slurm may warn a minute early: 30 to 90 s after the start, by which the training has begun, and has not ended.
    return submit(TRAINING, "--time", 2, "--warn-before", 30, WAITS_S="2")


@pytest.fixture(scope="module")
def hungry(submit):
    return submit(HUNGRY, "--mem", "1500M")


def started(job, times=1):
    job.until(lambda: job.log.count("start ") >= times)


def test_a_warned_job_writes_a_checkpoint_and_returns_to_the_queue(submit):
    job = submit(WAITING, arguments=["two words", "$HOME"])
    started(job)

    job.warn()

    assert job.ended() == "COMPLETED"
    lines = [line for line in job.log.splitlines() if line.startswith(("start", "checkpoint", "autoaccum: req"))]
    arguments = ["two words", "$HOME"]
    assert lines == [
        f"start 0 {arguments} None",
        "checkpoint written",
        "autoaccum: requeued",
        f"start 1 {arguments} None",
    ]


def test_a_cancelled_job_writes_a_checkpoint_and_does_not_return(submit):
    job = submit(WAITING, arguments=["x"])
    started(job)

    job.cancel()

    assert job.ended() == "CANCELLED"
    assert "checkpoint written" in job.log
    assert "requeue" not in job.log


@pytest.mark.slow  # it waits for Slurm
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.sweep), pytest.param(2, marks=needs_two_nodes)])
def test_a_preempted_job_returns_though_its_script_hears_nothing(submit, nodes):
    job = submit(WAITING, "--partition", "low", "--nodes", nodes, "--cpus", 20, arguments=["x"])
    started(job, times=nodes)

    # On every node, so that none has room for both.
    options = ["--partition=urgent", f"--nodes={number_of_nodes()}", "--cpus-per-task=20", "--output=/dev/null"]
    urgent = subprocess.run(
        ["sbatch", "--parsable", *options, "--wrap=sleep 3"], capture_output=True, text=True, check=True
    ).stdout.strip()

    try:
        assert job.ended() == "COMPLETED"
    finally:
        subprocess.run(["scancel", urgent], check=False)
    assert job.log.index("checkpoint written") < job.log.index("autoaccum: requeued") < job.log.index("start 1")


@pytest.mark.slow  # it waits for Slurm
def test_only_the_task_of_an_array_that_was_warned_returns(submit):
    job = submit(WAITING, "--array", "0-1", arguments=["for ever"])
    started(job, times=2)

    job.warn(task="_0")
    started(job, times=3)

    assert job.log.count("start 1 ['for ever'] 0") == 1
    assert job.log.count("start 1") == 1
    job.cancel()
    job.ended()


@pytest.mark.slow  # it waits for Slurm
def test_restarts_have_a_ceiling(submit):
    job = submit(WAITING, "--max-restarts", 1, arguments=["for ever"])
    started(job)
    job.warn()
    started(job, times=2)

    job.warn()

    assert job.ended() == "FAILED"
    assert "autoaccum: the job was restarted 1 times, so it is not requeued again" in job.log


def test_a_requeue_that_fails_is_told(submit, tmp_path):
    fake = tmp_path / "scontrol"
    fake.write_text('#!/bin/sh\n[ "$1" != requeue ] && exec /usr/bin/scontrol "$@"\necho refused >&2\nexit 1\n')
    fake.chmod(0o755)
    job = submit(WAITING, arguments=["x"], PATH=f"{tmp_path}:{os.environ['PATH']}")
    started(job)

    job.warn()

    assert job.ended() == "FAILED"
    assert job.log.endswith(
        "refused\nautoaccum: Slurm did not requeue the job; submit it again, and it resumes from its checkpoint\n"
    )


def test_each_rank_of_torchrun_has_a_core(submit, tmp_path):
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\necho $SLURM_CPUS_ON_NODE cores\n")
    torchrun.chmod(0o755)

    job = submit("", launcher=(torchrun, "--nproc-per-node=3"))

    assert job.ended() == "COMPLETED", job.log
    assert "3 cores" in job.log


@pytest.mark.slow  # torch is imported by two processes
def test_torchrun_starts_a_rank_for_each_process(limited, hungry, submit):  # those of below run meanwhile
    torchrun = os.path.join(os.path.dirname(sys.executable), "torchrun")  # noqa: PTH118, PTH120 - not resolved
    job = submit(RANKS, launcher=(torchrun, "--nproc-per-node=2"))

    assert job.ended() == "COMPLETED", job.log
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(job.log.splitlines())


@pytest.mark.slow  # it waits for a time limit, in minutes
def test_at_its_time_limit_a_training_is_requeued_and_ends_bit_for_bit_as_if_undisturbed(limited, tmp_path):
    state = limited.ended()

    assert state == "COMPLETED", limited.log
    assert "is saved in" in limited.log
    assert "resuming after step" in limited.log
    (tmp_path / "train.py").write_text(TRAINING)
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True)
    disturbed, undisturbed = (torch.load(folder / "end.pt") for folder in (limited.folder, tmp_path))
    assert all(torch.equal(disturbed[name], undisturbed[name]) for name in undisturbed)


@pytest.mark.slow  # it waits until Slurm has looked at its memory
def test_killed_for_its_memory_a_training_comes_back_smaller_and_finishes(hungry):
    state = hungry.ended()

    assert state == "COMPLETED", hungry.log
    assert "exceeded memory limit" in hungry.log
    assert "with micro-batches of 16; restarting, retry 1 of 5" in hungry.log
    assert "trained by (8, 8, 8, 8)" in hungry.log


# --- two nodes, with two processes each -------------------------------------------------------------------------------


def torchrun(*options):
    return os.path.join(os.path.dirname(sys.executable), "torchrun"), *options  # noqa: PTH118, PTH120 - not resolved


TWO_EACH = {"launcher": torchrun("--nproc-per-node=2")}


def end_of(text, folder, *launcher):
    """The parameters at the end of a training here, without Slurm."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, "train.py"], cwd=folder, env=environment, check=True, capture_output=True)
    return torch.load(folder / "end.pt")


@needs_two_nodes
@pytest.mark.slow  # torch is imported by six processes
def test_the_script_of_the_page_trains_on_two_nodes_as_one_process_does(submit, tmp_path):
    (script,) = re.findall(
        r'```python title="train.py"\n(.*?)```', (ROOT / "docs" / "slurm.md").read_text(), flags=re.DOTALL
    )
    text = f"{TASK}\nimport sys\nsys.modules['task'] = sys.modules['__main__']\n{script}"
    (tmp_path / "train.py").write_text(text)
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True, capture_output=True, text=True)

    job = submit(text, "--nodes", 2, "--mem", "8G", **TWO_EACH)

    assert job.ended() == "COMPLETED", job.log
    assert "4 ranks: this rank takes 1024 samples of each window of 4096" in job.log
    evaluations = [re.findall(r"evaluation after epoch.*(?= \(500 samples)", log) for log in (alone.stderr, job.log)]
    assert len(evaluations[0]) == 3
    assert evaluations[0] == evaluations[1]


@needs_two_nodes
@pytest.mark.sweep  # torch is imported by six processes, twice; one node is asked above, and several ranks elsewhere
def test_warned_on_two_nodes_a_training_is_requeued_and_ends_bit_for_bit_as_if_undisturbed(submit, tmp_path):
    job = submit(TRAINING, "--nodes", 2, "--mem", "8G", **TWO_EACH, WAITS_S="0.5")
    job.until(lambda: "step 5\n" in job.log)

    job.warn()

    assert job.ended() == "COMPLETED", job.log
    assert "autoaccum: requeued" in job.log
    assert "resuming after step" in job.log
    undisturbed = end_of(TRAINING, tmp_path, *torchrun("--standalone", "--nproc-per-node=4"))
    disturbed = torch.load(job.folder / "end.pt")
    assert all(torch.equal(disturbed[name], undisturbed[name]) for name in undisturbed)


@needs_two_nodes
@pytest.mark.slow  # torch is imported by six processes
def test_memory_that_runs_out_on_one_node_costs_that_node_smaller_micro_batches_alone(submit, tmp_path):
    job = submit(SHORT_ON_ONE_NODE, "--nodes", 2, "--mem", "8G", **TWO_EACH)

    assert job.ended() == "COMPLETED", job.log
    first = sorted(re.findall(r"^node .*", job.log, flags=re.MULTILINE))
    assert first[:2] == ["node 0: (8,)"] * 2
    assert len(first) == 4
    assert all(re.match(r"node 1: \(\d, \d", line) for line in first[2:])
    assert "restart" not in job.log
    alone = end_of(SHORT_ON_ONE_NODE, tmp_path, sys.executable)
    for name, value in torch.load(job.folder / "end.pt").items():
        torch.testing.assert_close(value, alone[name], rtol=1e-5, atol=1e-7)


@needs_two_nodes
@pytest.mark.slow  # torch is imported by six processes, twice
def test_killed_for_memory_on_one_node_a_training_comes_back_smaller_on_both(submit):
    job = submit(HUNGRY_ON_ONE_NODE, "--nodes", 2, "--mem", "3700M", **TWO_EACH)

    assert job.ended() == "COMPLETED", job.log
    assert "exceeded memory limit" in job.log
    assert "with micro-batches of 8; restarting, retry 1 of 5" in job.log
    assert job.log.count("trained by (4, 4)") == 4


@needs_two_nodes
@pytest.mark.slow  # torch is imported
def test_without_torchrun_two_nodes_that_would_train_by_themselves_are_refused(submit):
    job = submit(TRAINING.replace('"RANK" in os.environ', "True"), "--nodes", 2, "--mem", "4G")

    assert job.ended() == "FAILED"
    assert "Slurm started 2 tasks, and each would train by itself; start them by torchrun" in job.log


@pytest.mark.slow  # torch is imported
def test_a_preflight_that_fails_ends_the_job_with_its_exit_code(submit):
    job = submit(TOO_LARGE, "--preflight", "train.py")

    assert job.ended() == "FAILED"
    shown = subprocess.run(["scontrol", "show", "job", job.id], capture_output=True, text=True, check=True).stdout
    assert "ExitCode=4:0" in shown
    assert "Pre-flight report" in job.log


def test_a_job_that_slurm_refuses_is_told_in_slurms_words(tmp_path):
    ran = command("--partition", "nowhere", "--", "python", "train.py", folder=tmp_path)

    assert ran.returncode == 3
    assert "Slurm refused the job: " in ran.stderr
    assert "invalid partition specified: nowhere" in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_batch_script_is_kept_beside_the_log_and_can_be_submitted_again(submit):
    job = submit(WAITING, arguments=["x"])
    started(job)
    job.cancel()
    job.ended()
    script = job.folder / f"job-{job.id}.sbatch"

    again = subprocess.run(
        ["sbatch", "--parsable", script.name], cwd=job.folder, capture_output=True, text=True, check=True
    )

    with contextlib.suppress(subprocess.CalledProcessError):
        subprocess.run(["scancel", again.stdout.strip()], check=True)
    assert again.stdout.strip().isdigit()


# The last one: what else is on that node would be requeued as well.
@needs_two_nodes
@pytest.mark.slow  # it waits for Slurm
def test_when_one_of_its_nodes_goes_down_a_job_returns_to_the_queue(submit):
    job = submit(WAITING, "--nodes", 2, arguments=["x"])
    started(job, times=2)
    shown = subprocess.run(["scontrol", "show", "job", job.id], capture_output=True, text=True, check=True).stdout
    names = ["scontrol", "show", "hostnames", re.search(r" NodeList=(\S+)", shown)[1]]
    node = subprocess.run(names, capture_output=True, text=True, check=True).stdout.split()[-1]

    # It comes back by itself, as its slurmd is alive.
    subprocess.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test"], check=True)

    assert job.ended() == "COMPLETED"
    assert f"Node failure on {node}" in job.log
    assert job.log.count("start 1") == 2
