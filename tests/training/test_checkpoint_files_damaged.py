"""Damaged and hostile checkpoints: refused with an error of autoaccum's own, and everything is as it was."""

import random

import numpy as np
import pytest
import torch

import damaged_checkpoints as damaged
from autoaccum._system.notices import Notices
from autoaccum._training.checkpoint_files import Storage
from autoaccum._training.packing import packed
from autoaccum.errors import AutoaccumError, CheckpointError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp("run") for name in damaged.CONFIGURATIONS}


@pytest.fixture(scope="module")
def contents(folders):
    return {name: damaged.written(name, folder) for name, folder in folders.items()}


FIRST, WITH_STATE, OWN, PLATEAU = damaged.CONFIGURATIONS


def read(path):
    return Storage(path.parent).read_newest(Notices(silent=True))[1]


@pytest.mark.parametrize("name", damaged.CONFIGURATIONS)
def test_whole_checkpoint_is_gone_on_from(contents, tmp_path, name):
    assert damaged.outcome(name, contents[name], tmp_path / "run") == ("gone on", None)


def test_no_flipped_bit_loads_other_values(contents, folders, tmp_path):
    path = next(folders[FIRST].glob("step-*.pt"))
    whole = path.read_bytes()
    drawn = random.Random(1)  # noqa: S311
    headers = [place for place in range(len(whole)) if whole[place : place + 4] in (b"PK\1\2", b"PK\3\4", b"PK\5\6")]
    chosen = [
        *(8 * (drawn.choice(headers) + drawn.randrange(46)) + drawn.randrange(8) for _ in range(150)),
        *(8 * (place + 38) + 4 for place in headers),  # says that a member is a folder
        *drawn.sample(range(8 * len(whole)), 100),
        *range(8 * len(whole) - 8 * 90, 8 * len(whole), 7),  # the digest
    ]

    chosen = [one for one in chosen if one < 8 * len(whole)]

    losses = damaged.flips(tmp_path / path.name, whole, contents[FIRST], chosen)

    assert list(losses) == []


def test_new_file_without_its_digest_is_not_taken(contents, tmp_path):
    path = tmp_path / "step-00000001.pt"
    torch.save(packed(contents[FIRST]), path)

    with pytest.raises(CheckpointError, match="its checksum is missing"):
        read(path)


def test_damaged_fields_are_refused_and_leave_everything_as_it_was(contents, tmp_path):
    found = {
        f"{name}: {'/'.join(map(str, path))}: {damage}": damaged.outcome(name, content, tmp_path / "run")[1]
        for name, path, damage, content in damaged.draw(contents, 7, 40)
    }

    assert {case: loss for case, loss in found.items() if loss is not None} == {}


# Each was a raw error, or a refusal that left the model changed.
FIELDS = {
    "moment of an optimizer deleted": (FIRST, ("optimizer", "state", "state", 0, "exp_avg"), damaged.DELETED),
    "moment of another shape": (FIRST, ("optimizer", "state", "state", 1, "exp_avg"), torch.zeros(2)),
    "count of steps negative": (FIRST, ("optimizer", "state", "state", 0, "step"), torch.tensor(-5.0)),
    "rate that is text": (FIRST, ("optimizer", "state", "param_groups", 0, "lr"), "text"),
    "betas deleted": (FIRST, ("optimizer", "state", "param_groups", 0, "betas"), damaged.DELETED),
    "names of parameters": (FIRST, ("optimizer", "parameters"), None),
    "scheduler's step": (FIRST, ("scheduler", "state", "step_size"), 0),
    "scheduler's epoch": (FIRST, ("scheduler", "state", "last_epoch"), None),
    "part of a scheduler": (WITH_STATE, ("scheduler", "state", "_schedulers", 0, "start_factor"), damaged.DELETED),
    "scheduler's mode": (PLATEAU, ("scheduler", "state", "mode"), "text"),
    "scheduler of one's own": (OWN, ("scheduler", "state", "rates"), np.zeros(3)),
    "module's own state": (FIRST, ("modules", 0, "state", "_extra_state"), {}),
    "loader's own state": (WITH_STATE, ("position", "loader_state", "at"), "text"),
    "loader's own generator": (OWN, ("position", "generators", 0), torch.zeros(4, dtype=torch.uint8)),
    "place in NumPy's buffer": (FIRST, ("random", 3, "state", "pos"), 2**31 - 1),
    "Python's state": (FIRST, ("random", 2), (3, (1, 2), None)),
    "torch's state": (FIRST, ("position", "start", 0), torch.zeros(5056, dtype=torch.uint8)),
    "sizes": (FIRST, ("cutting", "plan"), [1, -1, 6]),
    "windows": (FIRST, ("windows",), -1),
    "name of a generator": (FIRST, ("random", 3, "bit_generator"), np.arange(3)),
    "version of torch": (FIRST, ("torch",), np.arange(3)),
    "state of no parameter": (FIRST, ("optimizer", "state", "state"), {"other": 1}),
    "moment of whole numbers": (PLATEAU, ("optimizer", "state", "state", 1, "square_avg"), torch.zeros(5).short()),
    "position": (FIRST, ("position", "epoch"), damaged.DELETED),
}


@pytest.mark.parametrize("case", FIELDS)
def test_damaged_field_is_refused_and_leaves_everything_as_it_was(contents, tmp_path, case):
    name, path, damage = FIELDS[case]

    word, loss = damaged.outcome(name, damaged.with_damage(contents[name], path, damage), tmp_path / "run")

    assert (word, loss) == ("refused", None)


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
def test_pickles_that_run_code_are_refused_as_plain_torch_refuses_them(contents, tmp_path, sealed):
    path, mark = tmp_path / "step-00000001.pt", tmp_path / "mark"

    for name, payload in damaged.hostile(mark).items():
        damaged.write_hostile(path, packed(contents[FIRST]), payload, sealed=sealed)
        assert damaged.plain_refuses(path), name
        with pytest.raises(AutoaccumError) as caught:
            read(path)
        assert not mark.exists(), name
        assert "weights_only" not in str(caught.value), name
        assert "Weights only" not in str(caught.value), name


def test_containers_that_name_each_other_often_are_read_at_once(tmp_path):
    value = ["end"]
    for _ in range(60):
        value = [value, value]

    Storage(tmp_path).write({"value": value}, 1)

    assert read(tmp_path / "step-00000001.pt").keys() == {"value"}


def test_value_that_holds_itself_cannot_be_kept(tmp_path):
    value = []
    value.append(value)

    with pytest.raises(CheckpointError, match="cannot be kept in a checkpoint: a list holds itself"):
        Storage(tmp_path).write({"value": value}, 1)
