"""A job's folder: what is written is whole, and what cannot be read does no harm."""

import pytest
from autoaccum._launch.slurm.folder import JobFolder, Progress, Restart, Submitted

from autoaccum.errors import InvalidInputError

SUBMITTED = Submitted(name="a", recipe="a.py:job", tasks=2, retries=5, submitted_at=1.5, job_id="7")


def test_two_jobs_of_one_moment_have_two_folders(tmp_path):
    made = {JobFolder.made(tmp_path / "jobs", "a b/c").path for _ in range(3)}

    assert len(made) == 3
    assert all(path.name.startswith("a-b-c-") for path in made)


@pytest.mark.parametrize("is_file", [True, False])
def test_place_where_no_folder_can_be_is_refused(tmp_path, is_file):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" if is_file else tmp_path / "file" / "jobs"

    with pytest.raises(InvalidInputError, match="pass --folder"):
        JobFolder.made(place, "a")


def test_what_is_written_is_read(tmp_path):
    folder = JobFolder(tmp_path)
    progress = Progress(phase="training", step=3, micro_batches=(2, 2), loss=0.5)
    restart = Restart(kind="memory", reason="full", step=3, max_micro_batch=1)

    folder.write_submitted(SUBMITTED)
    folder.write_progress(progress)
    folder.add_restart(restart)

    assert (folder.submitted, folder.restarts) == (SUBMITTED, [restart])
    assert (folder.progress.step, folder.progress.micro_batches, folder.progress.loss) == (3, [2, 2], 0.5)
    assert folder.unreadable() == []


@pytest.mark.parametrize("text", ["", '{"phase": "trai', "[]", "\x00\xff"])
def test_file_that_was_cut_short_is_no_file_and_is_named(tmp_path, text):
    (tmp_path / "progress.json").write_text(text)
    (tmp_path / "restarts.json").write_text(text)
    folder = JobFolder(tmp_path)

    assert (folder.progress, folder.restarts, folder.max_micro_batch) == (None, [], None)
    assert folder.unreadable() == ["progress.json", "restarts.json"]


def test_file_of_a_later_version_is_read_as_far_as_it_is_known(tmp_path):
    (tmp_path / "progress.json").write_text('{"phase": "training", "step": 4, "mood": "good"}')

    assert JobFolder(tmp_path).progress.step == 4


def test_file_that_lacks_something_is_no_file(tmp_path):
    (tmp_path / "job.json").write_text('{"name": "a"}')

    assert JobFolder(tmp_path).submitted is None


def test_smallest_cap_holds(tmp_path):
    folder = JobFolder(tmp_path)
    for cap in (8, None, 4):
        folder.add_restart(Restart(kind="memory", reason="", step=0, max_micro_batch=cap))

    assert folder.max_micro_batch == 4


def test_error_of_a_process_is_told_once(tmp_path):
    folder = JobFolder(tmp_path)
    folder.note_failure(3, "ValueError: no", needs_new_process=False)

    assert [failure["rank"] for failure in folder.take_failures()] == [3]
    assert folder.take_failures() == []
