"""Checkpoints and plan caches of the version before the modules moved (tests/old_files.py) are read, or do no harm."""

import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from old_files import KINDS, STEPS, STEPS_BEFORE, train


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(Path(__file__).parents[1] / "old_files.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_from_an_old_checkpoint_as_if_nothing_had_interrupted_it(old, tmp_path, kind):
    shutil.copy(old / f"{kind}.pt", tmp_path / f"step-{STEPS_BEFORE:08d}.pt")

    resumed = train(kind, STEPS, micro_batch=4, checkpoint=tmp_path, resume=True).state_dict()

    # Another machine may add in another order than the one that wrote the file.
    for name, value in train(kind, STEPS, micro_batch=4).state_dict().items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-9, atol=1e-12)


def test_old_plan_under_its_own_name_is_never_looked_at(old, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    [before] = old.glob("plan-*.json")
    shutil.copy(before, tmp_path)

    train("adamw", STEPS_BEFORE, progress="lines")

    assert "plan cache" not in capsys.readouterr().err
    assert (tmp_path / before.name).read_bytes() == before.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2
