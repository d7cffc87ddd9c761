"""Folders of tensors that several ranks wrote: what they say of themselves is read without running code."""

import os
import pickle

import pytest
import torch
from torch.distributed import checkpoint

from autoaccum._distributed.dcp_metadata import Reader

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path):
    checkpoint.save({"weight": torch.arange(6.0).reshape(2, 3)}, checkpoint_id=tmp_path / "shards", no_dist=True)
    return tmp_path / "shards"


def test_folder_as_it_was_written_is_read(folder):
    found = {"weight": torch.zeros(2, 3)}

    checkpoint.load(found, storage_reader=Reader(folder), no_dist=True)

    assert torch.equal(found["weight"], torch.arange(6.0).reshape(2, 3))


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("hostile",)


@pytest.mark.parametrize("hidden", [False, True], ids=["alone", "within"])
def test_code_in_its_description_is_refused(folder, monkeypatch, hidden):
    monkeypatch.chdir(folder.parent)
    content = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own
    content.planner_data = Hostile()
    (folder / ".metadata").write_bytes(pickle.dumps(content if hidden else Hostile()))

    with pytest.raises(pickle.UnpicklingError, match="mkdir has no place in a folder of tensors"):
        Reader(folder).read_metadata()

    assert not (folder.parent / "hostile").exists()


def test_description_that_names_a_file_elsewhere_is_refused(folder):
    content = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own
    for part in content.storage_data.values():
        part.relative_path = "../other.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(content))

    with pytest.raises(pickle.UnpicklingError, match="names a file that is none of the folder's"):
        Reader(folder).read_metadata()
