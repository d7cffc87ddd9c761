"""`autoaccum run` from end to end, with commands that really run out of memory."""

import os
import signal
import sys
import uuid
from pathlib import Path

import pytest
import torch

import autoaccum
import warm
from autoaccum._launch.run import Options, run_command
from wrapped import python, run, until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs Linux's /proc")

V1 = Path("/sys/fs/cgroup/memory")

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
FATAL = """
import json, os, signal, sys
def leave(**reason):
    path = os.environ["AUTOACCUM_REASON_FILE"]
    with open(path + ".unfinished", "w") as file:
        json.dump(reason, file)
    os.rename(path + ".unfinished", path)
print(os.environ.get("AUTOACCUM_MAX_MICRO_BATCH"), flush=True)
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
import os, sys
size, steps = map(int, sys.argv[1:])
if size > 4:  # without torch it starts in no time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        torch.empty(1 << 50)
    dist.barrier()
print("samples", size * steps)
"""

TRANSFORMERS_STYLE = """
from dataclasses import dataclass
from transformers.hf_argparser import HfArgumentParser

@dataclass
class TrainingArguments:
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
print(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
"""

TRAINING = """
import torch
import autoaccum

def train(folder, *callbacks):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    data = torch.utils.data.TensorDataset(torch.randn(48, 3), torch.randn(48, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    result = autoaccum.fit(model, loader, 8, micro_batch=4, device="cpu", progress=False, callbacks=callbacks,
                           checkpoint=folder + "/checkpoints", checkpoint_steps=1, seed=0)
    torch.save(model.state_dict(), folder + "/end.pt")
    return result
"""
RESUMING = """
import os, signal, sys
import autoaccum
from autoaccum._system import reason_file

class DiesOnce(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        if report.step == 3 and os.environ["AUTOACCUM_ATTEMPT"] == "0":
            reason_file.write(reason_file.Reason("out_of_memory", micro_batch=8, message="told to"))
            os.kill(os.getpid(), signal.SIGKILL)

result = train(sys.argv[1], DiesOnce())
print(result.resumed_from, result.steps)
"""


def lines_of(wrapper):
    return wrapper.out.read_text().splitlines()


def test_a_command_that_runs_out_is_started_again_with_the_same_target(tmp_path):
    command = python(SCRIPT, "{micro_batch}", 30, "{accum_steps}", "--json={'n': {target_batch}}")

    wrapper, code = run(tmp_path, command, target_batch=120)

    assert code == 0
    assert lines_of(wrapper) == [
        "120 30 1 --json={'n': 120} 120 0",
        "60 30 2 --json={'n': 120} 60 1",
        "40 30 3 --json={'n': 120} 40 2",
        "30 30 4 --json={'n': 120} 30 3",
    ]
    assert sum("; restarting, retry" in line for line in wrapper.told) == 3


def test_the_next_job_begins_with_the_cut_that_worked(tmp_path):
    command = python(SCRIPT, "{micro_batch}", 30)
    run(tmp_path, command, target_batch=120)

    again, _ = run(tmp_path, command, target_batch=120)
    another, _ = run(tmp_path, command, target_batch=60)
    without, _ = run(tmp_path, command, target_batch=120, cache=False)

    assert [lines_of(wrapper)[0].split()[0] for wrapper in (again, another, without)] == ["30", "60", "120"]
    assert "autoaccum: micro-batches of 30 worked before" in again.told


def test_what_no_longer_works_is_remembered_smaller(tmp_path):
    path = tmp_path / "most"
    source = SCRIPT.replace("int(sys.argv[2])", "int(open(sys.argv[2]).read())")
    command = python(source, "{micro_batch}", path)
    path.write_text("60")
    run(tmp_path, command, target_batch=120)
    path.write_text("30")
    run(tmp_path, command, target_batch=120)

    wrapper, _ = run(tmp_path, command, target_batch=120)

    assert len(lines_of(wrapper)) == 1
    assert lines_of(wrapper)[0].startswith("30 ")


def test_a_smaller_size_that_was_asked_for_does_not_replace_a_larger_one(tmp_path):
    command = python(SCRIPT, "{micro_batch}", 30)
    run(tmp_path, command, target_batch=120)
    run(tmp_path, command, target_batch=120, micro_batch=4)

    wrapper, _ = run(tmp_path, command, target_batch=120)

    assert lines_of(wrapper)[0].startswith("30 ")


def test_a_larger_size_that_fails_leaves_what_is_remembered(tmp_path):
    command = python(SCRIPT, "{micro_batch}", 30)
    run(tmp_path, command, target_batch=120)
    run(tmp_path, command, target_batch=120, micro_batch=60, retries=0)

    wrapper, _ = run(tmp_path, command, target_batch=120)

    assert lines_of(wrapper)[0].startswith("30 ")


def test_a_target_with_a_poor_choice_of_sizes_is_remarked_upon_once(tmp_path):
    wrapper, code = run(tmp_path, python(SCRIPT, "{micro_batch}", 8), target_batch=97)

    assert code == 0
    assert [line.split()[0] for line in lines_of(wrapper)] == ["97", "1"]
    assert sum("--target-batch 96 has a better cut" in line for line in wrapper.told) == 1


def test_used_up_retries_end_with_4_and_a_line_that_says_so(tmp_path):
    wrapper, code = run(tmp_path, python(SCRIPT, "{micro_batch}", 0), target_batch=64, retries=2)

    assert code == 4
    assert len(lines_of(wrapper)) == 3
    assert "no retry is left (--retries 2)" in wrapper.told[-1]


def test_command_that_names_no_placeholder_is_remarked_upon_once_when_memory_ran_out(tmp_path):
    wrapper, code = run(tmp_path, python(SCRIPT, "64", 0), target_batch=64, retries=2)
    named, _ = run(tmp_path, python(SCRIPT, "{micro_batch}", 0), target_batch=64, retries=2)

    assert code == 4
    assert sum("has no placeholder" in line for line in wrapper.told) == 1
    assert not any("has no placeholder" in line for line in named.told)


def test_one_sample_that_does_not_fit_ends_with_4(tmp_path):
    wrapper, code = run(tmp_path, python(SCRIPT, "{micro_batch}", 0), target_batch=2)

    assert code == 4
    assert "nothing smaller to try" in wrapper.told[-1]


def test_any_other_failure_is_passed_on_at_once_with_its_message(tmp_path):
    source = "import sys; print('no such data', file=sys.stderr); sys.exit(3)"

    wrapper, code = run(tmp_path, python(source), target_batch=8)

    assert code == 3
    assert "no such data" in wrapper.err.read_text()
    assert wrapper.told == ["autoaccum: target batch 8: micro-batches of 8 samples, 1 per update"]


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("sys.exit(3)", 3),
        ("os.abort()", 134),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139),
        ("sys.exit('no such data')", 1),
        ("raise KeyError", 1),
    ],
)
def test_lack_of_memory_that_the_command_logged_and_survived_does_not_start_it_again(tmp_path, last, code):
    source = (
        "import os, signal, sys, traceback\n"
        "def train():\n    try:\n        raise MemoryError('too many samples')\n"
        "    except MemoryError:\n        traceback.print_exc()\n"
        "train()\nfor step in range(2000):\n    print('step', step, file=sys.stderr)\n"
        f"{last}\n"
    )

    wrapper, ended = run(tmp_path, python(source), target_batch=8)

    assert ended == code
    assert not any("; restarting, retry" in line for line in wrapper.told)


def test_the_first_size_can_be_given_and_is_rounded_down_to_a_divisor(tmp_path):
    wrapper, _ = run(tmp_path, python(SCRIPT, "{micro_batch}", 100), target_batch=100, micro_batch=30)

    assert lines_of(wrapper) == ["25 100 25 0"]


def test_without_a_target_the_cap_comes_from_the_reason_file(tmp_path):
    source = FATAL + (
        "if 'AUTOACCUM_MAX_MICRO_BATCH' not in os.environ:\n"
        "    leave(reason='out_of_memory', micro_batch=12)\n"
        "    sys.exit(1)\n"
    )

    wrapper, code = run(tmp_path, python(source))
    again, _ = run(tmp_path, python(source))

    assert code == 0
    assert lines_of(wrapper) == ["None", "6"]
    assert lines_of(again) == ["6"]


def test_without_a_target_and_a_size_it_says_so_and_passes_the_failure_on(tmp_path):
    wrapper, code = run(tmp_path, python(FATAL + "sys.exit(75)"))

    assert code == 75
    assert "the command's micro-batch is unknown" in wrapper.told[-1]


def test_exit_code_75_asks_for_a_smaller_cut(tmp_path):
    wrapper, code = run(
        tmp_path, python(FATAL + "sys.exit(75 if os.environ['AUTOACCUM_ATTEMPT'] == '0' else 0)"), target_batch=8
    )

    assert code == 0
    assert lines_of(wrapper) == ["8", "4"]


def test_a_sigkill_without_evidence_is_not_lack_of_memory(tmp_path):
    wrapper, code = run(tmp_path, python("import os; os.kill(os.getpid(), 9)"), target_batch=8)

    assert code == 128 + signal.SIGKILL
    assert "no count of out-of-memory kills rose (checked: /" in wrapper.told[-1]


def test_a_kill_by_the_kernel_is_recognised_by_its_counter(tmp_path):
    group = V1 / f"autoaccum-test-{uuid.uuid4().hex}"
    if os.geteuid() != 0 or not (V1 / "memory.oom_control").exists():
        pytest.skip("needs root and the memory controller of control groups, version 1")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(600 << 20))
        # The kernel chooses by what a process holds, and the wrapper, forked from pytest, is not small either.
        source = (
            "import sys; open('/proc/self/oom_score_adj', 'w').write('1000');"
            "bytearray(int(sys.argv[1]) * (400 << 20)); print('fits', sys.argv[1])"
        )

        wrapper, code = run(
            tmp_path,
            python(source, "{micro_batch}"),
            prepare=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
            target_batch=2,
        )

        assert code == 0
        assert lines_of(wrapper) == ["fits 1"]
        assert any(f"{group}/memory.oom_control by 1" in line for line in wrapper.told)
    finally:
        until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_a_script_that_exhausts_a_real_limit_is_survived(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(HUNGRY)

    wrapper, code = run(tmp_path, [*warm.python(), path, "{micro_batch}"], target_batch=2)

    assert code == 0
    assert lines_of(wrapper) == ["1 at once"]
    assert any("DefaultCPUAllocator: can't allocate memory" in line for line in wrapper.told)


@pytest.mark.slow  # five processes that import torch; what torchrun writes has quick tests in test_last_words.py
def test_torchrun_inside_is_understood_and_a_rank_that_runs_out_is_recognised(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    wrapper, code = run(tmp_path, [*launcher, path, "{micro_batch}", "{accum_steps}"], target_batch=16)

    assert code == 0
    assert lines_of(wrapper) == ["samples 8", "samples 8"]
    assert "target batch 16: micro-batches of 8 samples, 1 per update on each of 2 ranks" in wrapper.told[0]
    assert "target batch 16: micro-batches of 4 samples, 2 per update on each of 2 ranks" in wrapper.told[-1]


def test_arguments_in_the_style_of_transformers_are_filled(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TRANSFORMERS_STYLE)
    arguments = ["--per_device_train_batch_size", "{micro_batch}", "--gradient_accumulation_steps", "{accum_steps}"]

    wrapper, code = run(tmp_path, [*warm.python(), path, *arguments], target_batch=256, micro_batch=32)

    assert code == 0
    assert lines_of(wrapper) == ["32 8"]


def test_a_script_that_uses_fit_goes_on_from_its_checkpoint_and_ends_where_the_undisturbed_one_ends(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TRAINING + RESUMING)
    for name in ("disturbed", "undisturbed"):
        (tmp_path / name).mkdir()

    wrapper, code = run(tmp_path, [*warm.python(), path, tmp_path / "disturbed"])

    assert code == 0
    assert lines_of(wrapper) == ["2 6"]
    training = {}
    exec(TRAINING, training)  # noqa: S102 - the script's own words, in this process
    training["train"](str(tmp_path / "undisturbed"))
    disturbed, undisturbed = (torch.load(tmp_path / name / "end.pt") for name in ("disturbed", "undisturbed"))
    assert all(torch.equal(disturbed[name], undisturbed[name]) for name in undisturbed)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options", "told"),
    [
        ([], {}, "no command to run"),
        (["python", "{accum_steps}"], {}, "placeholder {accum_steps}, but no target batch is known"),
        (["python", "{micro_batch}"], {}, "placeholder {micro_batch}"),
        (["python"], {"target_batch": 0}, "target_batch must be at least 1"),
        (["python"], {"world_size": 0}, "world_size must be at least 1"),
        (["python"], {"micro_batch": -1}, "micro_batch must be at least 1"),
        (["python"], {"retries": -1}, "retries=-1"),
        (["python"], {"grace_s": float("nan")}, "grace=nan"),
        (["python"], {"target_batch": 10, "world_size": 4}, "choose a multiple of 4, such as 8 or 12"),
        (["torchrun", "--nnodes=1:4", "train.py"], {"target_batch": 8}, "--world-size"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_started(command, options, told):
    with pytest.raises(autoaccum.InvalidInputError) as error:
        run_command(command, Options(**options))

    assert told in str(error.value)


def test_placeholders_that_need_no_target_are_filled_without_one(tmp_path):
    wrapper, code = run(tmp_path, python(SCRIPT, "{micro_batch}", 8, "{world_size}"), micro_batch=8)

    assert code == 0
    assert lines_of(wrapper) == ["8 8 1 8 0"]
