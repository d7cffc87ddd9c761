"""`autoaccum run` from end to end, with commands that really run out of memory."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from autoaccum._launch.run import world_size_of
from support.processes import fork_server
from support.processes.wrapped import python, run, told, until

CGROUPS = Path("/sys/fs/cgroup")
# Fails by torch's words where it is told to take more than so many samples at once, and tells what it was told.
SCRIPT = """
import os, sys
size, most = int(sys.argv[1]), int(sys.argv[2])
print(*sys.argv[1:], *(os.environ.get("AUTOACCUM_" + name) for name in ("MAX_MICRO_BATCH", "ATTEMPT")))
if size > most:
    class OutOfMemoryError(RuntimeError):
        __module__ = "torch"
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""
# Says by the reason file what it ran out of memory with.
REASON = """
import json, os, sys
print(os.environ.get("AUTOACCUM_MAX_MICRO_BATCH"), flush=True)
if 'AUTOACCUM_MAX_MICRO_BATCH' not in os.environ:
    with open(os.environ["AUTOACCUM_REASON_FILE"], "w") as file:
        json.dump({"reason": sys.argv[1], "micro_batch": 12}, file)
    sys.exit(1)
"""
HUNGRY = """
import resource, sys
import torch
held = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (held + (300 << 20),) * 2)
samples = torch.ones(int(sys.argv[1]), 50 << 20)
print(int(samples[:, 0].sum()), "at once")
"""
RANK = """
import sys
size, steps = map(int, sys.argv[1:])
if size > 4:  # without torch it starts in no time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        torch.empty(1 << 50)
    dist.barrier()
sys.stdout.write(f"samples {size * steps}\\n")  # whole in one write: both ranks write to one pipe
"""
# Killed in its third update, it resumes and finishes. Half of the 8 that it names is the size it has anyway.
TRAINING = """
import json, os, signal, sys
import torch
import autoaccum

class DiesOnce(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        if report.step == 3 and os.environ.get("AUTOACCUM_ATTEMPT") == "0":
            with open(os.environ["AUTOACCUM_REASON_FILE"], "w") as file:
                json.dump({"reason": "out_of_memory", "micro_batch": 8}, file)
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.randn(48, 3), torch.randn(48, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
result = autoaccum.fit(model, loader, 8, micro_batch=4, device="cpu", progress=False, callbacks=[DiesOnce()],
                       checkpoint=sys.argv[1], checkpoint_every=1)
torch.save(model.state_dict(), sys.argv[1] + "/end.pt")
print(result.resumed_from, result.steps)
"""
TOO_LARGE = """
import torch
import autoaccum
model, tiny = torch.nn.Linear(64, 64), autoaccum.Simulated("10KiB")  # less than the gradients
batch = (torch.zeros(4, 64), torch.zeros(4, 64))
loss = torch.nn.functional.mse_loss
"""
# Not even one sample fits until blocks are checkpointed and offloaded; what the script ends with is something else.
CLIMBING = """
import torch
import autoaccum
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))
data = [(torch.randn(2, 512, 64), torch.randn(2, 512, 64))]
result = autoaccum.fit(model, data, 2, save_memory="auto", loss=torch.nn.functional.mse_loss, progress=False,
                       device=autoaccum.Simulated("1300KiB"), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
print(result.savings)
raise SystemExit(1)
"""
# A large model first, a small one where that does not fit; what the script ends with is something else.
FALLING_BACK = """
import sys
import torch
import autoaccum
data = [(torch.randn(8, 512), torch.zeros(8, dtype=torch.long))]
try:
    autoaccum.fit(torch.nn.Linear(512, 200), data, 8, max_steps=1, device=autoaccum.Simulated("10KiB"), progress=False)
except autoaccum.DoesNotFitError:
    if sys.argv[1] == "the library":
        autoaccum.fit(torch.nn.Linear(512, 2), data, 8, max_steps=1, device="cpu", progress=False)
raise SystemExit(int(sys.argv[2]))
"""
ENTRIES = {
    "fit": "autoaccum.fit(model, [batch], 4, loss=loss, device=tiny, progress=False)",
    "Runner": "autoaccum.Runner(model, torch.optim.SGD(model.parameters(), 1.0), autoaccum.plan(4, 4), loss=loss, "
    "device=tiny).step(batch)",
    "Accumulator": "autoaccum.Accumulator(model, loss=loss, device=tiny).backward(batch)",
}


def test_restarts_take_half_or_less_and_keep_the_target():
    command = python(SCRIPT, "{micro_batch}", 10, "{accum_steps}", "--json={'n': {target_batch}}")

    ended = run(command, "--target-batch", 120)

    assert ended.returncode == 0
    assert ended.stdout.splitlines() == [
        "120 10 1 --json={'n': 120} 120 0",
        "60 10 2 --json={'n': 120} 60 1",
        "30 10 4 --json={'n': 120} 30 2",
        "15 10 8 --json={'n': 120} 15 3",
        "6 10 20 --json={'n': 120} 6 4",
    ]
    assert sum("; restarting, retry" in line for line in told(ended)) == 4


def test_the_next_job_begins_with_the_size_that_worked():
    command = python(SCRIPT, "{micro_batch}", 30)
    run(command, "--target-batch", 120)
    run(command, "--target-batch", 120, "--micro-batch", 4)  # says nothing about larger ones

    again = run(command, "--target-batch", 120)
    another = run(command, "--target-batch", 60)
    without = run(command, "--target-batch", 120, "--no-cache")

    assert [ended.stdout.split()[0] for ended in (again, another, without)] == ["30", "60", "120"]
    assert "autoaccum: micro-batches of 30 worked before" in told(again)


def test_what_is_remembered_holds_no_argument_of_the_command(tmp_path):
    run(
        python(SCRIPT, "{micro_batch}", 30, "--token=secret"),
        "--target-batch",
        120,
        variables={"AUTOACCUM_CACHE_DIR": str(tmp_path)},
    )

    (file,) = tmp_path.iterdir()
    assert '"micro_batch": 30' in file.read_text()
    assert "secret" not in file.read_text()


def test_a_target_with_few_divisors_is_remarked_upon_once():
    ended = run(python(SCRIPT, "{micro_batch}", 8), "--target-batch", 97)

    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["97", "1"]
    assert sum("--target-batch 96 leaves more choice" in line for line in told(ended)) == 1


@pytest.mark.parametrize(
    ("options", "most", "said"),
    [(["--retries", 2], 0, "no retry is left (--retries=2)"), (["--micro-batch", 1], 0, "nothing smaller to try")],
)
def test_what_fits_at_no_size_ends_with_4_and_a_line_that_says_so(options, most, said):
    ended = run(python(SCRIPT, "{micro_batch}", most), "--target-batch", 64, *options)

    assert ended.returncode == 4
    assert said in told(ended)[-1]


def test_a_command_that_reads_the_variables_needs_no_placeholder():
    source = "import os; print(os.environ['AUTOACCUM_MICRO_BATCH'], os.environ['AUTOACCUM_ACCUM_STEPS'])"

    ended = run(python(source), "--target-batch", 8, "--micro-batch", 4, "--no-placeholder")

    assert ended.stdout == "4 2\n"


# --- why it ended -----------------------------------------------------------------------------------------------------


def test_without_a_target_the_size_comes_from_the_reason_file():
    ended = run(python(REASON, "out_of_memory"))

    assert (ended.returncode, ended.stdout.split()) == (0, ["None", "6"])


def test_without_a_target_and_a_size_it_says_so_and_passes_the_failure_on():
    ended = run(python("import sys; sys.exit(75)"))

    assert ended.returncode == 75
    assert "the command's micro-batch is unknown" in told(ended)[-1]


def test_a_kill_by_the_kernel_is_recognised_by_its_counter():
    version = 1 if (CGROUPS / "memory").is_dir() else 2
    group = (CGROUPS / "memory" if version == 1 else CGROUPS) / f"autoaccum-test-{uuid.uuid4().hex}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        source = (
            "import sys; open('/proc/self/oom_score_adj', 'w').write('1000');"
            "bytearray(int(sys.argv[1]) * (200 << 20)); print('fits', sys.argv[1])"
        )

        ended = run(
            python(source, "{micro_batch}"),
            *("--target-batch", 2),
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
        )

        assert (ended.returncode, ended.stdout) == (0, "fits 1\n")
        assert any(f"out-of-memory kills rose: {group}" in line for line in told(ended))
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


@pytest.mark.slow  # it takes real memory, twice
def test_a_script_that_exhausts_a_real_limit_is_survived(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(HUNGRY)

    ended = run([*fork_server.python(), path, "{micro_batch}"], "--target-batch", 2)

    assert (ended.returncode, ended.stdout) == (0, "1 at once\n")
    assert any("DefaultCPUAllocator: can't allocate memory" in line for line in told(ended))


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_every_final_error_of_the_library_writes_the_reason_and_one_sample_ends_with_4(entry, tmp_path):
    path = tmp_path / "script.py"
    # A script that logs the error and exits leaves no traceback: only the file tells.
    path.write_text(f"{TOO_LARGE}\ntry:\n    {entry}\nexcept Exception:\n    raise SystemExit(1)\n")

    ended = run([*fork_server.python(), path])

    assert ended.returncode == 4, ended.stderr
    assert "its reason file: " in told(ended)[-1]
    assert "nothing smaller to try" in told(ended)[-1]


def test_running_out_that_the_library_survives_is_no_reason(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(CLIMBING)

    ended = run([*fork_server.python(), path])

    assert (ended.returncode, ended.stdout) == (1, "('checkpoint', 'offload')\n")
    assert told(ended) == []


@pytest.mark.parametrize(("way", "code"), [("the library", 1), ("the library", 3), ("another way", 3)])
def test_a_script_that_finds_a_way_round_a_model_that_does_not_fit_keeps_its_exit_code(way, code, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(FALLING_BACK)

    ended = run([*fork_server.python(), path, way, code])

    assert ended.returncode == code, ended.stderr
    assert not any("restarting" in line for line in told(ended))


@pytest.mark.slow  # five processes that import torch; what torchrun writes has quick tests in test_diagnosis.py
def test_torchrun_inside_is_understood_and_a_rank_that_runs_out_is_recognised(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    ended = run([*launcher, path, "{micro_batch}", "{accum_steps}"], "--target-batch", 16)

    assert ended.returncode == 0
    assert ended.stdout.splitlines() == ["samples 8", "samples 8"]
    lines = told(ended)
    assert "target batch 16: micro-batches of 8 samples, 1 per optimizer step on each of 2 ranks" in lines[0]
    assert "target batch 16: micro-batches of 4 samples, 2 per optimizer step on each of 2 ranks" in lines[-1]


def test_a_killed_script_that_uses_fit_resumes_and_ends_where_the_undisturbed_one_ends(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TRAINING)

    ended = run([*fork_server.python(), path, tmp_path / "disturbed"])
    words = [*fork_server.python(), path, tmp_path / "undisturbed"]
    undisturbed = subprocess.run(words, capture_output=True, text=True, check=True)

    assert (ended.returncode, ended.stdout) == (0, "2 6\n")
    assert undisturbed.stdout == "None 6\n"
    found, expected = (torch.load(tmp_path / name / "end.pt") for name in ("disturbed", "undisturbed"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ([], [], "there is no command"),
        (["python", "{accum_steps}"], [], "placeholder {accum_steps}, but no target batch is known"),
        (["python", "{micro_bach}"], ["--target-batch", 8], "no placeholder {micro_bach}; write {micro_batch}"),
        (["python", "train.py"], ["--target-batch", 8], "the command has no placeholder"),
        (["python", "{target_batch}"], ["--target-batch", 8], "the command has no placeholder"),
        (["{micro_batch}"], ["--target-batch", 10, "--world-size", 4], "a multiple of 4, such as 8 or 12"),
        (["{micro_batch}"], ["--target-batch", 3, "--world-size", 4], "a multiple of 4, such as 4"),
        (["accelerate", "launch", "{micro_batch}"], ["--target-batch", 8], "ranks accelerate starts is unknown; pass"),
        (["torchrun", "--nnodes=1:4", "{micro_batch}"], ["--target-batch", 8], "--world-size"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line_before_anything_is_started(command, options, said):
    ended = run(command, *options)

    assert ended.returncode == 3
    (line,) = ended.stderr.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("command", "environment", "ranks"),
    [
        ("python train.py", {}, 1),
        ("python train.py", {"WORLD_SIZE": "8", "SLURM_NTASKS": "6"}, 8),
        ("torchrun --nproc-per-node=4 train.py", {"WORLD_SIZE": "8"}, 4),
        ("srun torchrun --nnodes=2:2 --nproc_per_node 3 train.py", {}, 6),
        ("python -m torch.distributed.run --standalone --nproc-per-node 2 train.py", {}, 2),
        ("python train.py --with accelerate torchrun --nproc-per-node 4", {}, 1),
    ],
)
def test_ranks_are_understood_from_the_launcher_or_the_environment(command, environment, ranks):
    assert world_size_of(command.split(), environment) == ranks
