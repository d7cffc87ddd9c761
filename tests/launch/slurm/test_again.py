"""What a step's end says about another start."""

import signal
import subprocess

import pytest
from autoaccum._launch.slurm.again import MARK, StepEnd, main, next_start
from autoaccum._launch.slurm.folder import IN_VAIN, JobFolder, Progress, Restart, Submitted

import warm

# As Slurm 22.05 wrote it here, where Slurm itself looks at memory.
OVER = "slurmstepd-vm: error: StepId=9.0 exceeded memory limit (1029771264 > 891289600), being killed"
FAILED = {"rank": 1, "error": "ValueError: no", "needs_new_process": False}
LOST = {"rank": 0, "error": "DeviceLostError: gone", "needs_new_process": True}


@pytest.fixture
def folder(tmp_path):
    folder = JobFolder(tmp_path)
    folder.write_submitted(Submitted(name="a", recipe="a.py:job", tasks=1, retries=2, submitted_at=0.0))
    folder.write_progress(Progress(phase="training", step=7, micro_batch=64))
    return folder


@pytest.mark.parametrize(
    "line",
    [
        OVER,
        "slurmstepd: error: Exceeded job memory limit",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 5.0 cgroup.",
        "srun: error: node1: task 0: Out Of Memory",
    ],
)
def test_lack_of_memory_is_known_by_slurms_words(line):
    ended = StepEnd(1, f"{MARK}\nepoch 1\n{line}\n", [FAILED])

    assert ended.lack_of_memory == line


@pytest.mark.parametrize(
    ("code", "log"),
    [
        (3, f"{OVER}\n"),
        (130, f"{OVER}\n"),
        (139, f"{OVER}\n"),
        (1, f"Traceback (most recent call last):\n  File 'a'\nKeyError: 'x'\n{OVER}\n"),
        (1, "epoch 1: Out Of Memory, batch skipped\n"),
    ],
)
def test_a_kill_that_the_step_survived_is_not_what_ended_it(folder, code, log):
    ended = StepEnd(code, f"{MARK}\n{log}")

    assert ended.lack_of_memory is None
    assert isinstance(next_start(folder, ended), str)


def test_words_of_an_earlier_start_say_nothing_of_this_one():
    assert StepEnd(1, f"{MARK}\n{OVER}\n{MARK}\nepoch 1\n").lack_of_memory is None


def test_sigkill_without_a_word_is_taken_for_lack_of_memory():
    assert "SIGKILL" in StepEnd(137, MARK).lack_of_memory


def test_sigkill_that_followed_another_processs_error_is_not():
    assert StepEnd(137, MARK, [FAILED]).lack_of_memory is None


def test_micro_batches_become_half_as_large(folder):
    restart = next_start(folder, StepEnd(137, OVER))

    assert (restart.kind, restart.step, restart.max_micro_batch) == ("memory", 7, 32)


def test_cap_from_before_counts_where_it_is_smaller(folder):
    folder.add_restart(Restart(kind="memory", reason="", step=3, max_micro_batch=10))

    assert next_start(folder, StepEnd(137, OVER)).max_micro_batch == 5


def test_lost_device_is_started_again_as_it_was(folder):
    restart = next_start(folder, StepEnd(5, "", [LOST]))

    assert (restart.kind, restart.max_micro_batch, restart.reason) == ("device", None, "DeviceLostError: gone")


def test_any_other_end_is_the_jobs(folder):
    assert "did not end for lack of memory" in next_start(folder, StepEnd(1, "ValueError", [FAILED]))


def test_retries_are_counted_without_requeues(folder):
    folder.add_restart(Restart(kind="requeue", reason="", step=1))
    folder.add_restart(Restart(kind="memory", reason="", step=1, max_micro_batch=32))
    assert isinstance(next_start(folder, StepEnd(137, OVER)), Restart)

    folder.add_restart(Restart(kind="memory", reason="", step=1, max_micro_batch=16))

    assert "--retries 2 allows no more" in next_start(folder, StepEnd(137, OVER))


def test_one_sample_leaves_nothing_to_make_smaller(folder):
    folder.write_progress(Progress(phase="training", micro_batch=1))

    assert "cannot be reduced" in next_start(folder, StepEnd(137, OVER))


def test_before_the_training_smaller_micro_batches_change_nothing(folder):
    folder.write_progress(Progress(phase="pre-flight", micro_batch=64))

    assert "before training" in next_start(folder, StepEnd(137, OVER))


def test_warned_before_it_could_listen_it_is_requeued_but_not_for_ever(folder):
    unheard = StepEnd(128 + signal.SIGUSR2, MARK)
    for _ in range(IN_VAIN):
        restart = next_start(folder, unheard)
        assert (restart.kind, restart.step) == ("requeue", 7)
        folder.add_restart(restart)

    assert isinstance(next_start(folder, unheard), str)


def test_without_what_was_asked_nothing_is_started(folder):
    (folder.path / "job.json").write_text('{"name": "a", "reci')

    assert "cannot be read" in next_start(folder, StepEnd(137, OVER))


def test_answer_is_the_exit_code_and_is_noted(folder, capsys):
    folder.log("5").write_text(f"{MARK}\n{OVER}\n")

    assert main([str(folder.path), "5", "137"]) == 0

    assert folder.max_micro_batch == 32
    assert "restarted in micro-batches of at most 32" in capsys.readouterr().err


def test_errors_of_processes_are_told_once(folder):
    folder.note_failure(1, "ValueError: no", needs_new_process=False)

    assert main([str(folder.path), "5", "1"]) == 1

    assert folder.take_failures() == []


def test_why_it_is_not_started_again_is_noted_for_those_who_list_jobs(folder):
    main([str(folder.path), "5", "1"])

    assert folder.progress.phase == "failed"
    assert "did not end for lack of memory" in folder.progress.error


def test_end_that_the_process_noted_itself_stays(folder):
    folder.write_progress(Progress(phase="failed", error="ValueError: no"))

    main([str(folder.path), "5", "1"])

    assert folder.progress.error == "ValueError: no"


def test_folder_that_is_gone_ends_the_job_without_a_traceback(tmp_path, capsys):
    assert main([str(tmp_path / "gone"), "5", "137"]) == 1

    assert "cannot be read" in capsys.readouterr().err


def test_batch_script_runs_it_as_a_module(tmp_path):
    folder = JobFolder(tmp_path)
    folder.write_submitted(Submitted(name="a", recipe="a.py:job", tasks=1, retries=2, submitted_at=0.0))
    folder.write_progress(Progress(phase="training", step=7, micro_batch=64))
    folder.log("5").write_text(f"{MARK}\n")
    command = [*warm.python(), "-m", "autoaccum._launch.slurm.again", folder.path, "5", "137"]

    ran = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert folder.max_micro_batch == 32
    assert "restarted in micro-batches of at most 32" in ran.stderr
