"""Checkpoints of another run, and forged ones, are refused in words before anything is changed."""

import copy
import os
import shutil
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from autoaccum.errors import CheckpointError
from support.models.small import one_in
from support.training.checkpoint_edits import content_of, edit_manifest, edited, newest, put
from support.training.long_runs import Model, Noisy, Run, bits, checkpoints, loader_of, stopped_at
from support.training.resumes import lists


class Wider(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.more = nn.Linear(2, 2)


class Larger(Model):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 9)


class Drawing(Model):
    """Draws from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.own = torch.Generator().manual_seed(5)

    def forward(self, inputs):
        return super().forward(inputs) + torch.rand((), generator=self.own)


def no_harm(folder):
    pass


@dataclass(frozen=True)
class Refused:
    """A run that is stopped after a window, and gone on with otherwise.

    Attributes:
        said: What the refusal says.
        now: Changes of the call that is refused.
        always: Changes of both calls.
        harm: What is done to the folder in between.
        stop: After which window.
    """

    said: str
    now: dict = field(default_factory=dict)
    always: dict = field(default_factory=dict)
    harm: object = no_harm
    stop: int = 3


def lacks(key):
    return Refused(f"'{key}'", harm=lambda folder: edited(folder, lambda content: content.pop(key)))


def holds(said, where, **values):
    """A checkpoint that holds other values in a part, which is named by a function of the content."""
    return Refused(said, harm=lambda folder: edited(folder, lambda content: where(content).update(values)))


def empty_manifests(folder):
    for path in folder.glob("step-*"):
        (path / "manifest.json").write_text('{"format": 1, "sha256": {}}')


def newer_format(folder):
    edit_manifest(newest(folder), lambda manifest: manifest.update(format=99, autoaccum="7.0"))


def code(folder):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(folder / "ran"),)

    put(newest(folder), {"weights": Runs()})


def batches_of(data, **options):
    return iter(list(loader_of(data, **options)))


REFUSED = {
    "model with other parts": Refused(
        "another model: it lacks more.bias, more.weight, which is here", {"model": Wider}
    ),
    "model of another size": Refused(
        r"another model: it was made with first\.\w+ \(8,.*\) of torch.float32, and this call has \(9,",
        {"model": Larger},
    ),
    "model of another type": Refused(
        r"float32, and this call has .* of torch.float64", {"model": lambda: Model().double()}
    ),
    "model that draws": Refused(
        "another model: it was made with a number of random generators of 0, and this call has 1", {"model": Drawing}
    ),
    "optimizer": Refused(
        "another optimizer: it was made with Adam, and this call has AdamW", {"optimizer": torch.optim.AdamW}
    ),
    "groups": Refused(
        r"another optimizer: it was made with groups of parameters of lengths \[6\], and this call has \[1, 5\]",
        {"optimizer": lambda p: torch.optim.Adam([{"params": p[:1]}, {"params": p[1:]}])},
    ),
    "order of parameters": Refused(
        r"another optimizer: .* parameter 0 of group 0, 0\.first\.weight, and this call has 0\.norm\.weight",
        {"optimizer": lambda p: torch.optim.Adam([*p[2:4], *p[:2], *p[4:]])},
    ),
    "scheduler": Refused(
        "another scheduler: it was made with StepLR, and this call has ConstantLR",
        {"scheduler": torch.optim.lr_scheduler.ConstantLR},
    ),
    "precision": Refused("another precision: it was made with fp32, and this call has fp16", {"precision": "fp16"}),
    "precision without a scaler": Refused(
        "another precision: it was made with fp32, and this call has bf16", {"precision": "bf16"}
    ),
    "target": Refused("another target_batch: it was made with 12, and this call has 12 tokens", {"target_tokens": 12}),
    # loaders in the middle of an epoch
    "fewer batches": Refused(
        "after 7 batches of epoch 1, but the loader now yields only 3",
        {"loader": lambda: batches_of(Noisy(20))},
        stop=4,
    ),
    "smaller batches": Refused(
        "3 samples of batch 4 of epoch 1, but now that batch holds 2",
        {"loader": lambda: batches_of(Noisy(), batch_size=2)},
        stop=2,
    ),
    "batches per epoch": Refused(
        "a loader of 8 batches per epoch, and this one has 9", {"loader": lambda: loader_of(Noisy(), batch_size=6)}
    ),
    "samples in the dataset": Refused(
        "a loader of 50 samples in its dataset, and this one has 48", {"loader": lambda: loader_of(Noisy(48))}
    ),
    "samples per batch": Refused(
        "a loader of 7 samples per batch, and this one has 6",
        {"loader": lambda: loader_of(Noisy(), batch_size=6, drop_last=True)},
    ),
    "list": Refused("a loader of 8 batches per epoch, and this one has 7", {"loader": lambda: lists()[1:]}),
    # contents with right checksums
    **{f"without {key}": lacks(key) for key in ("windows", "cutting", "random", "modules")},
    "device": holds("another device: it was made with cuda, and this call has cpu", lambda it: it, device="cuda"),
    "plan": holds("cutting.plan is 0, of type int", lambda it: it["cutting"], plan=[0]),
    "largest": holds("cutting.largest is '4', of type str", lambda it: it["cutting"], largest=["4"]),
    # NumPy itself would read there.
    "place in NumPy's numbers": holds("position 1000000", lambda it: it["random"][3]["state"], pos=10**6),
    # files
    "none whole": Refused(
        "none of the 2 .*step-00000003: .*step-00000002: .*resume=False",
        always={"checkpoint_every": 2},
        harm=empty_manifests,
    ),
    "newer format": Refused("by autoaccum 7.0 in format 99, and this one, .*use that version", harm=newer_format),
    # What it would run makes a folder.
    "code": Refused("^(?!.*weights_only).*cannot be loaded by torch .*mkdir.*can run code", harm=code),
}


@pytest.mark.parametrize("name", one_in(3, REFUSED))
def test_checkpoint_that_cannot_be_gone_on_from_is_refused_and_nothing_is_changed(tmp_path, name):
    case = REFUSED[name]
    stopped_at(case.stop, tmp_path, **case.always)
    case.harm(tmp_path)
    files = checkpoints(tmp_path)
    run = Run(checkpoint=tmp_path, **case.always | case.now)
    before = run.state()

    with pytest.raises(CheckpointError, match=case.said):
        run.fit()

    assert run.state() == before
    assert checkpoints(tmp_path) == files


def test_module_that_refuses_its_state_is_told_before_the_optimizer_is_given_any(tmp_path):
    def numbered(number):
        class Numbered(Model):
            def get_extra_state(self):
                return number

            def set_extra_state(self, state):
                if state != number:
                    raise ValueError(f"made for {number}")

        return Numbered

    stopped_at(3, tmp_path, model=numbered(1))
    run = Run(checkpoint=tmp_path, model=numbered(2))
    before = run.state()["optimizer"]

    with pytest.raises(CheckpointError, match=r"Numbered refuses its state .*\(ValueError: made for 2\)") as caught:
        run.fit()

    assert isinstance(caught.value.__cause__, ValueError)
    assert run.state()["optimizer"] == before
    assert checkpoints(tmp_path) == ["step-00000003"]


class Drawn(nn.Sequential):
    """Has running statistics and a generator of its own."""

    def __init__(self):
        super().__init__(nn.Linear(6, 3), nn.BatchNorm1d(3))
        self.own = torch.Generator().manual_seed(5)

    def forward(self, inputs):
        return super().forward(inputs) + 0 * torch.rand((), generator=self.own)


def drawn_run(folder):
    generator = torch.Generator().manual_seed(3)
    changes = {"micro_batch": 4, "val_every": 2, "epochs": None, "noise_scale": 2, "checkpoint": folder}
    run = Run(model=Drawn, loader=lambda: loader_of(Noisy(), generator=generator), **changes)
    return run, lambda: (run.state(), bits(generator.get_state()))


def leaves(value, path=()):
    """Where what a checkpoint holds is, and what is in that; of many numbers the first and the last."""
    yield path
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if type(value) in (list, tuple) else ())
    for key, inner in items[:3] + items[3:][-1:] if isinstance(value, tuple) else items:
        yield from leaves(inner, (*path, key))


def with_a_leaf(value, path, leaf):
    if not path:
        return leaf
    changed = list(value) if isinstance(value, tuple) else copy.copy(value)
    changed[path[0]] = with_a_leaf(value[path[0]], path[1:], leaf)
    return type(value)(changed) if isinstance(value, tuple) else changed


FORGED = [None, "x", -1, float("nan"), [], {"a": 1}, 10**30, torch.ones(2, 5)]
# Each takes one in so many of the leaves, and another value for each.
PARTS = 5


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in range(1, PARTS * len(FORGED)))]
)
def test_forged_value_anywhere_in_a_checkpoint_is_refused_before_anything_is_changed(tmp_path, part):
    run, _ = drawn_run(tmp_path)
    run.fit(max_steps=5)
    path = newest(tmp_path)
    content, refused = content_of(path), 0
    for number, place in enumerate(list(leaves(content))[part % PARTS :: PARTS]):
        forged = FORGED[(number + part // PARTS) % len(FORGED)]
        if not place or place[0] == "scheduler" or place[:2] == ("optimizer", "state"):
            continue  # which their own `load_state_dict` judges
        put(path, with_a_leaf(content, place, forged))
        run, state = drawn_run(tmp_path)
        before = state()

        try:
            run.fit(max_steps=6)
        except CheckpointError:
            assert state() == before, place
            refused += 1
        else:  # a value that may be there; nothing else may be raised
            shutil.rmtree(newest(tmp_path))

    assert refused > 10
