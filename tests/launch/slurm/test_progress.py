"""How far a job is, as its folder says it."""

import shutil

import pytest
import torch
from autoaccum._launch.slurm.folder import JobFolder, Progress
from autoaccum._launch.slurm.progress import ProgressFile

import autoaccum
from autoaccum._launch.slurm import progress
from autoaccum._system.notices import Notices

DATA = [(torch.zeros(4, 2), torch.zeros(4, 1))] * 3


@pytest.fixture
def train(tmp_path):
    def train(*callbacks, loader=DATA, **arguments):
        folder = JobFolder(tmp_path)
        progress = ProgressFile(folder, Notices(silent=True))
        autoaccum.fit(
            torch.nn.Linear(2, 1),
            loader,
            4,
            micro_batch=2,
            device="cpu",
            progress=False,
            callbacks=[progress, *callbacks],
            **arguments,
        )
        progress.end("done")
        return folder, progress

    return train


def test_end_is_written_however_short_the_training(train):
    folder, progress = train(epochs=2)

    written = folder.progress
    assert (written.phase, written.step, written.epoch, written.epochs) == ("done", 6, 2, 2)
    assert (written.micro_batches, written.micro_batch) == ([2, 2], 2)
    assert progress.step == 6


def test_updates_within_a_second_are_written_once(train, monkeypatch):
    written = []
    monkeypatch.setattr(progress, "_EVERY_S", 3600.0)
    monkeypatch.setattr(JobFolder, "write_progress", lambda _, progress: written.append(progress.step))

    train(epochs=20)

    assert len(written) <= 5


def test_loss_that_is_no_number_is_left_out(train):
    spoilt = (torch.zeros(4, 2), torch.full((4, 1), float("nan")))

    folder, _ = train(loader=[*DATA, spoilt])

    assert (folder.progress.step, folder.progress.loss) == (4, None)


def test_folder_that_is_gone_ends_no_training(tmp_path):
    folder = JobFolder(tmp_path / "job")
    folder.path.mkdir()
    notices = Notices(silent=True)
    progress = ProgressFile(folder, notices)
    shutil.rmtree(folder.path)

    autoaccum.fit(torch.nn.Linear(2, 1), DATA, 4, device="cpu", progress=False, callbacks=[progress])

    assert progress.step == 3
    assert "cannot be written" in notices.texts[0]


def test_second_start_keeps_what_is_known_until_it_trains(tmp_path):
    folder = JobFolder(tmp_path)
    folder.write_progress(Progress(phase="stopped", step=9, error="requeued"))

    ProgressFile(folder, Notices(silent=True))

    assert (folder.progress.phase, folder.progress.step) == ("pre-flight", 9)
