"""A resumed run reads what the uninterrupted one would have read, or says that it does not."""

# ruff: noqa: S311 - samples are drawn

import collections
import functools
import itertools
import math
import random
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import autoaccum
from support.models.small import a_few_of, one_in

# torchdata 0.11 calls a function that torch 2.15 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SAMPLES, BATCH, TARGET, EPOCHS = 22, 4, 6, 3
STEPS_PER_EPOCH = 4


class Reading(autoaccum.Callback):
    """Notes the samples of each window, and ends the call after one."""

    def __init__(self, stop):
        self.stop, self.windows, self.now = stop, {}, []

    def on_step(self, report, *, epoch):
        self.windows[report.step], self.now = self.now, []
        if report.step == self.stop:
            raise KeyboardInterrupt

    def on_resume(self, path, *, step, epoch):
        self.now = []

    def forward(self, model, batch):
        self.now += batch[0].flatten().tolist()
        return model(batch[0])


def train(loader, folder, stop=None, **changes):
    """Train as a process would; return the samples of each window, and the result."""
    reading = Reading(stop)
    arguments = {"epochs": EPOCHS, "micro_batch": TARGET, "device": "cpu", "progress": False}
    try:
        result = autoaccum.fit(
            nn.Sequential(nn.Dropout(0.2), nn.Linear(1, 1)),
            loader,
            TARGET,
            loss=nn.MSELoss(),
            loss_reduction="mean",
            forward=reading.forward,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-5),
            checkpoint=folder,
            callbacks=[reading],
            **arguments | changes,
        )
    except KeyboardInterrupt as interrupt:
        result = interrupt.result
    return reading.windows, result


HIDDEN = random.Random(0)


def anew(make):
    for generator in (torch.manual_seed, random.seed, np.random.seed, HIDDEN.seed):
        generator(3)
    return make()


def resumed(make, folder, stops, *, ends=True):
    """Train with a stop after each of these steps, an epoch's end being the end of a call; return windows and words."""
    windows, words = {}, []
    for stop in (*stops, None) if ends else stops:
        is_end = stop is not None and stop % STEPS_PER_EPOCH == 0
        changes = {"epochs": stop // STEPS_PER_EPOCH} if is_end else {}
        read, result = train(anew(make), folder, None if is_end else stop, **changes)
        windows |= read
        words += result.warnings
    return windows, words


@functools.cache
def uninterrupted(make):
    windows, _ = train(anew(make), None)
    return windows


class Numbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.ones(1)


class Drawing(Numbers):
    def __init__(self):
        self.transforms = [np.random.RandomState(4)]

    def __getitem__(self, index):
        return torch.tensor([index + 0.5 * self.transforms[0].rand()]), torch.ones(1)


class DrawingGlobally(Numbers):
    def __getitem__(self, index):
        return torch.tensor([index + 0.5 * random.random()]), torch.ones(1)


class RarelyDrawing(Numbers):
    """Draws for each sample, and hardly ever to any effect."""

    def __getitem__(self, index):
        return torch.tensor([index + 0.5 * (random.random() < 0.01)]), torch.ones(1)


class Sampler:
    def __len__(self):
        return SAMPLES


class OfNumPy(Sampler):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(SAMPLES).tolist())


class OfPython(Sampler):
    def __init__(self):
        self.held = {"a": random.Random(1)}

    def __iter__(self):
        for _ in range(SAMPLES):
            yield self.held["a"].randrange(SAMPLES)


class OfTorch(Sampler):
    __slots__ = ("rng",)

    def __init__(self):
        self.rng = torch.Generator().manual_seed(2)

    def __iter__(self):
        return iter(torch.randperm(SAMPLES, generator=self.rng).tolist())


class Within(Sampler):
    """Asks a sampler within a sampler."""

    def __init__(self, *samplers):
        self.samplers = samplers

    def __iter__(self):
        yield from itertools.islice(itertools.chain(*self.samplers), SAMPLES)


class Counting(Sampler):
    epoch = 0

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        order = list(range(SAMPLES))
        random.Random(self.epoch).shuffle(order)
        self.epoch += 1
        return iter(order)


class Reordering(Sampler):
    """Shuffles the order of the epoch before."""

    def __init__(self, order):
        self.order, self.rng = order, np.random.default_rng(5)

    def __iter__(self):
        self.rng.shuffle(self.order)
        return iter([int(item) for item in self.order])


class OfPairs(Reordering):
    def __iter__(self):
        self.rng.shuffle(self.order)
        return iter([number for number, _ in self.order])


class Kept(Sampler):
    """Shuffles by a number that comes of what it has kept, which `change` changes in each epoch."""

    def __init__(self, change, **first):
        self.change = staticmethod(change)
        vars(self).update(first)

    def __iter__(self):
        return iter(random.Random(str(self.change(self))).sample(range(SAMPLES), SAMPLES))


class FromClass(Kept):
    epoch = 0


def added(sampler):
    sampler.epoch = (getattr(sampler, "epoch", None) or 0) + 1
    return int(sampler.epoch)


def ended(sampler):
    """Draw in the first two epochs, and then do without the generator."""
    drawn = sampler.rng and sampler.rng.random()
    if (number := added(sampler)) == 2:
        sampler.rng = None
    return drawn or number


def put(key, value):
    """Return a change that sets an attribute to what a function makes of the one before."""

    def change(sampler):
        setattr(sampler, key, value(getattr(sampler, key)))
        return str(getattr(sampler, key))

    return change


class CountingRandom(random.Random):
    drawn = 0


def count_draws(sampler):
    sampler.rng.drawn += 1
    return sampler.rng.drawn


class Transform(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(1)

    def forward(self, inputs):
        return inputs + 0.4 * self.rng.random()


class Transformed(Numbers):
    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return self.transform(inputs), target


class OnesOwn(Numbers):
    """Has a generator for each sample."""

    def __init__(self):
        self.of = [random.Random(number) for number in range(100)]

    def __getitem__(self, index):
        return torch.tensor([index + 0.4 * self.of[index].random()]), torch.ones(1)


class ResumableNumbers(Numbers):
    drawn = 0

    def __getitem__(self, index):
        self.drawn += 1
        return torch.tensor([index + 0.001 * self.drawn]), torch.ones(1)

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


class Ahead(Sampler):
    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


class AheadOfPython(Sampler):
    def __iter__(self):
        for _ in range(SAMPLES):
            yield random.randrange(SAMPLES)


class Bound(Sampler):
    """Draws from a generator that only a function knows."""

    def __init__(self):
        rng = random.Random(7)
        self.draw = lambda: rng.sample(range(SAMPLES), SAMPLES)

    def __iter__(self):
        return iter(self.draw())


class Remembering(Numbers):
    """Gives samples that depend on what it has given."""

    def __init__(self):
        self.given = {}

    def __getitem__(self, index):
        self.given[len(self.given)] = index
        return torch.tensor([index + 0.001 * len(self.given)]), torch.ones(1)


class OfClass(Sampler):
    """Draws from a generator that its class holds."""

    def __iter__(self):
        return iter(type(self).rng.sample(range(SAMPLES), SAMPLES))


def of_class():
    OfClass.rng = random.Random(5)  # as another process makes it
    return DataLoader(Numbers(), BATCH, sampler=OfClass())


class Hidden(Sampler):
    """Draws from a generator that none of its parts holds."""

    def __iter__(self):
        return iter(HIDDEN.sample(range(SAMPLES), SAMPLES))


class Late(Sampler):
    """Makes its generator when it is first asked."""

    rng = None

    def __iter__(self):
        self.rng = self.rng or random.Random(3)
        return iter(self.rng.sample(range(SAMPLES), SAMPLES))


class Batches:
    """A batch sampler, or a loader of batches where it is given data."""

    def __init__(self, sampler, data=None):
        self.sampler_of_batches, self.data = sampler, data

    def __len__(self):
        return math.ceil(SAMPLES / BATCH)

    def __iter__(self):
        indices = iter(self.sampler_of_batches)
        while batch := list(itertools.islice(indices, BATCH)):
            yield batch if self.data is None else default_collate([self.data[index] for index in batch])


class Augmenting:
    def __init__(self):
        self.rng = random.Random(2)

    def __call__(self, samples):
        inputs, targets = default_collate(samples)
        return inputs + 0.4 * self.rng.random(), targets


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(SAMPLES):
            yield torch.tensor([float(number)]), torch.ones(1)


class CountingStream(IterableDataset):
    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        for number in range(SAMPLES):
            yield torch.tensor([number + 0.1 * self.epoch]), torch.ones(1)


class ResumableStream(CountingStream):
    at = 0

    def __iter__(self):
        while self.at < SAMPLES:
            self.at += 1
            yield torch.tensor([self.at + 0.1 * self.epoch]), torch.ones(1)
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


class Wrapping:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        yield from self.loader


TENSORS = TensorDataset(torch.arange(float(SAMPLES)).view(-1, 1), torch.ones(SAMPLES, 1))


def of(sampler, kind=DataLoader, **options):
    return lambda: kind(Numbers(), BATCH, sampler=sampler(), **options)


def kept(change, **first):
    return of(lambda: Kept(change, **{name: make() for name, make in first.items()}))


# All of these start over, silently, where only generators named `generator` are kept, or where a state is loaded that
# does not bring the loader back.
EXACT = {
    "a generator of a class": of_class,
    "NumPy's generator in a sampler": of(OfNumPy),
    "NumPy's generator in a batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Batches(OfNumPy())),
    "Python's generator in a dict": of(OfPython),
    "torch's generator in a slot": of(OfTorch),
    "samplers within a sampler": of(lambda: Within(OfTorch(), OfNumPy())),
    "a count of epochs": of(Counting),
    "a number that its class has": of(lambda: FromClass(added)),
    "a number that comes": kept(added),
    "None that becomes a number": kept(added, epoch=lambda: None),
    "a number of NumPy's": kept(put("epoch", lambda epoch: epoch + 1), epoch=lambda: np.int64(0)),
    "a tensor of one number": kept(put("epoch", lambda epoch: epoch + 1), epoch=lambda: torch.tensor(0)),
    "a generator that becomes None": kept(ended, rng=lambda: random.Random(0)),
    "a generator that counts": kept(count_draws, rng=lambda: CountingRandom(0)),
    "a generator's own method": kept(lambda sampler: sampler.draw(), draw=lambda: random.Random(1).random),
    "a generator in a set": kept(lambda sampler: next(iter(sampler.held)).random(), held=lambda: {random.Random(1)}),
    "a generator in a deque": kept(
        lambda sampler: sampler.held[0].random(), held=lambda: collections.deque([random.Random(1)])
    ),
    "a transform's generator": lambda: DataLoader(Transformed(nn.Sequential(Transform())), BATCH, shuffle=True),
    "many generators": lambda: DataLoader(OnesOwn(), BATCH, shuffle=True),
    "a list that is shuffled": of(lambda: Reordering([str(number) for number in range(SAMPLES)])),
    "a list of pairs that is shuffled": of(lambda: OfPairs([(number, str(number)) for number in range(SAMPLES)])),
    "an array that is shuffled": of(lambda: Reordering(np.arange(SAMPLES))),
    "a generator in a closure": of(Bound),
    "a dataset's generator": lambda: DataLoader(Drawing(), BATCH, shuffle=True),
    "a collator's generator": lambda: DataLoader(Numbers(), BATCH, shuffle=True, collate_fn=Augmenting()),
    "an iterable dataset that counts": lambda: DataLoader(CountingStream(), BATCH),
    "a loader of one's own": lambda: Batches(OfNumPy(), Numbers()),
    "a state and NumPy's generator": of(OfNumPy, StatefulDataLoader),
    "a state and a dataset's generator": lambda: StatefulDataLoader(Drawing(), BATCH, shuffle=True),
    "a state and torch's sampler": of(
        lambda: RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(3)), StatefulDataLoader
    ),
    "a state and a generator that it shares with its sampler": lambda: StatefulDataLoader(
        Numbers(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "a state and an iterable dataset": lambda: StatefulDataLoader(Stream(), BATCH),
    "a state and an iterable dataset with a state": lambda: StatefulDataLoader(ResumableStream(), BATCH),
    "a state and a distributed sampler": of(
        lambda: StatefulDistributedSampler(range(SAMPLES), 1, 0), StatefulDataLoader
    ),
}


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        *a_few_of(EXACT, [(1, 6), (STEPS_PER_EPOCH, 5), (7, 10)]),
        ("a state and an iterable dataset", (2, 3)),
        ("a state and a distributed sampler", (STEPS_PER_EPOCH,)),
        ("a generator that becomes None", (3, 8)),
        ("a state and a generator that it shares with its sampler", (6,)),
    ],
)
def test_resumed_run_reads_what_the_uninterrupted_one_would_have_read(tmp_path, name, stops):
    windows, words = resumed(EXACT[name], tmp_path, stops)

    assert windows == uninterrupted(EXACT[name])
    assert words == []


# The last item says whether workers begin anew, which is told: what a dataset draws in them nobody can see or restore.
WITH_WORKERS = {
    "workers that stay": (
        lambda: DataLoader(Numbers(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
        (6,),
        True,
    ),
    "workers that stay in a wrapped loader": (
        lambda: Wrapping(DataLoader(Numbers(), BATCH, shuffle=True, num_workers=1, persistent_workers=True)),
        (4,),
        True,
    ),
    "a state and workers that stay": (
        lambda: StatefulDataLoader(Numbers(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
        (6, 10),
        True,
    ),
    "a state and workers": (lambda: StatefulDataLoader(Numbers(), BATCH, shuffle=True, num_workers=1), (4, 7), True),
    "a dataset's generator in workers": (
        lambda: DataLoader(Drawing(), BATCH, shuffle=True, num_workers=2),
        (7,),
        False,
    ),
    "a state, and a dataset's in workers": (
        lambda: StatefulDataLoader(ResumableNumbers(), BATCH, shuffle=True, num_workers=1),
        (3, 7),
        False,
    ),
    "a sampler that draws from Python's generator, as nothing else does": (
        of(AheadOfPython, num_workers=1),
        (3, 7),
        False,
    ),
    "a state and a distributed sampler, in the first window of an epoch": (
        lambda: StatefulDataLoader(
            Numbers(), BATCH, sampler=StatefulDistributedSampler(range(SAMPLES), 1, 0), num_workers=1
        ),
        (2, 5),
        True,
    ),
}


@pytest.mark.parametrize(  # the others start as many processes
    "name",
    [pytest.param(name, marks=pytest.mark.slow if number > 1 else ()) for number, name in enumerate(WITH_WORKERS)],
)
def test_resumed_run_reads_what_its_workers_would_have_given(tmp_path, name):
    make, stops, is_told = WITH_WORKERS[name]

    windows, words = resumed(make, tmp_path, stops)

    assert windows == uninterrupted(make)
    assert bool(words) == is_told
    assert all("what the dataset draws or counts in its workers, if anything" in word for word in words)


def lost(name):
    return STEPS_PER_EPOCH, rf"^sampler\.{name} of the loader, which changed during the training, cannot be restored"


TOLD = {
    "a dict of a dataset": (
        lambda: DataLoader(Remembering(), BATCH),
        STEPS_PER_EPOCH,
        r"^dataset\.given of the loader, which changed during the training, cannot be restored",
    ),
    "a list that grows": (kept(put("seen", lambda seen: [*seen, 1]), seen=list), *lost("seen")),
    "a dict that grows": (kept(put("seen", lambda seen: seen | {len(seen): 1}), seen=dict), *lost("seen")),
    "a long list": (kept(put("held", lambda held: [one + 1 for one in held]), held=lambda: [0] * 99), *lost("held")),
    "an array": (kept(put("held", lambda held: held * 2), held=lambda: np.ones(SAMPLES)), *lost("held")),
    "a tensor": (kept(put("held", lambda held: held * 2), held=lambda: torch.ones(SAMPLES)), *lost("held")),
    "a text": (kept(put("held", lambda held: held + "b"), held=lambda: "a"), *lost("held")),
    "a count": (kept(lambda sampler: next(sampler.held), held=itertools.count), *lost("held")),
    "an iterator": (kept(lambda sampler: next(sampler.held), held=lambda: (n for n in range(9))), *lost("held")),
    "seeds": (
        kept(lambda sampler: sampler.held.spawn(1)[0].generate_state(1), held=lambda: np.random.SeedSequence(5)),
        *lost("held"),
    ),
    "a generator that has children": (
        kept(lambda sampler: sampler.held.spawn(1)[0].random(), held=lambda: np.random.default_rng(5)),
        *lost("held"),
    ),
    "workers ahead of a sampler that draws globally": (
        of(Ahead, num_workers=1, prefetch_factor=3),
        3,
        "batches that workers had loaded ahead may differ",
    ),
    "a generator that nothing holds": (of(Hidden), 7, "batch 5 of epoch 2 is not the one before the interruption"),
    "a generator that comes later": (of(Late), 4, "sampler.rng of the loader, which changed during the training"),
    "iterators": (lambda: iter(list(DataLoader(Numbers(), BATCH))), 4, "the loader can be read only once"),
    "random numbers of workers that stay": (
        lambda: DataLoader(DrawingGlobally(), BATCH, num_workers=1, persistent_workers=True),
        6,
        r"batch 3 of epoch 2 is not .* its workers begin anew \(persistent_workers=True\)",
    ),
    "random numbers of workers that stay, between epochs": (
        lambda: DataLoader(DrawingGlobally(), BATCH, num_workers=1, persistent_workers=True),
        4,
        r"in its workers, if anything, differs .* begin anew \(persistent_workers=True\)",
    ),
    "random numbers of workers with a state": (
        lambda: StatefulDataLoader(DrawingGlobally(), BATCH, num_workers=1),
        2,
        r"batch 3 of epoch 1 is not .* its workers begin anew \(StatefulDataLoader\)",
    ),
}


@pytest.mark.parametrize("name", one_in(2, TOLD))
def test_resume_that_is_not_exact_says_so_once(tmp_path, capfd, name):
    make, stop, words = TOLD[name]
    resumed(make, tmp_path, (stop,), ends=False)
    capfd.readouterr()

    windows, result = train(anew(make), tmp_path, progress=True)

    assert any(windows[step] != uninterrupted(make).get(step) for step in windows)
    (warning,) = result.warnings
    assert re.search(words, warning)
    assert capfd.readouterr().err.count(f"the resume is not exact: {warning}") == 1


def test_random_numbers_that_hardly_show_are_told_of(tmp_path):
    def make():
        return StatefulDataLoader(RarelyDrawing(), BATCH, num_workers=1)

    train(anew(make), tmp_path, 2)

    _, result = train(anew(make), tmp_path)

    assert "in its workers, if anything, differs from an uninterrupted run" in "".join(result.warnings)


def test_call_after_another_with_the_same_loader_goes_on_in_the_order_that_it_has(tmp_path):
    make = EXACT["a list that is shuffled"]
    loader = anew(make)
    windows, _ = train(loader, tmp_path, epochs=1)

    later, result = train(loader, tmp_path)

    assert windows | later == uninterrupted(make)
    assert result.warnings == ()


def test_settings_of_another_loader_are_left_as_they_are_between_epochs(tmp_path):
    train(anew(EXACT["a count of epochs"]), tmp_path, epochs=1)
    loader = DataLoader(Numbers(), 2, sampler=Counting())

    train(loader, tmp_path, epochs=2)

    assert loader.batch_size == loader.batch_sampler.batch_size == 2
    assert loader.sampler.epoch == 2


def test_evaluation_after_a_resume_draws_what_it_would_have_drawn(tmp_path):
    def evaluations(folder, **changes):
        sampler = RandomSampler(range(SAMPLES), num_samples=5, generator=torch.Generator().manual_seed(3))
        held_out = DataLoader(TENSORS, BATCH, sampler=sampler)
        _, result = train(anew(EXACT["a count of epochs"]), folder, val_loader=held_out, **changes)
        return [evaluation.loss for evaluation in result.evaluations]

    first = evaluations(tmp_path, epochs=1)

    assert first + evaluations(tmp_path) == evaluations(None)


def test_checkpoint_of_a_loader_without_a_state_is_resumed_with_one(tmp_path):
    make = functools.partial(DataLoader, TENSORS, BATCH)
    train(anew(make), tmp_path, 2)

    windows, _ = train(anew(lambda: StatefulDataLoader(TENSORS, BATCH)), tmp_path)

    expected, _ = train(anew(make), None)
    assert windows == {step: expected[step] for step in windows}


def prepared_by_accelerate(data):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.Accelerator(cpu=True).prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))


def test_loader_made_of_nodes_trains_with_a_checkpoint(tmp_path):
    nodes = pytest.importorskip("torchdata.nodes")
    rows = [(torch.randn(3), torch.randn(1)) for _ in range(16)]
    node = nodes.Mapper(nodes.Batcher(nodes.IterableWrapper(rows), 4), default_collate)
    options = {"micro_batch": 4, "progress": False, "device": "cpu", "loss": nn.MSELoss()}

    result = autoaccum.fit(nn.Linear(3, 1), nodes.Loader(node), 4, checkpoint=tmp_path, **options)

    assert result.steps == 4


@pytest.mark.parametrize("epochs", [1, 2])
def test_loader_of_accelerate_whose_state_is_none_resumes_exactly(tmp_path, epochs):
    seen = {}
    for stops in (None, 3 * epochs):
        torch.manual_seed(0)
        loader = prepared_by_accelerate(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)))
        options = {"micro_batch": 4, "epochs": 2, "progress": False, "device": "cpu", "loss": nn.MSELoss()}
        options |= {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
        model, folder = nn.Linear(3, 1), tmp_path / str(stops)
        if stops:
            autoaccum.fit(model, loader, 4, max_steps=stops, checkpoint=folder, **options)
        autoaccum.fit(model, loader, 4, checkpoint=folder, **options)
        seen[stops] = model.weight.detach().clone()

    assert torch.equal(seen[None], seen[3 * epochs])
