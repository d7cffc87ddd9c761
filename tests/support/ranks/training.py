"""Trainings that tests run on several ranks, and alone to compare."""

import contextlib
import io
import os
import random
import time
from pathlib import Path
from unittest import mock

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from autoaccum._system import folder_lock  # whose lock is looked at

SAMPLES, WIDTH, CLASSES, LENGTH = 50, 6, 4, 5
# How far the parameters of several ranks may be from those of one process.
FAR = 1e-12


def far(one, other):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def assert_alike(outcomes):
    for other in outcomes[1:]:
        assert all(map(torch.equal, outcomes[0]["parameters"], other["parameters"]))
        assert all(map(torch.equal, outcomes[0]["buffers"], other["buffers"]))
        assert other["losses"] == outcomes[0]["losses"]


def assert_trained_as(found, expected):
    """All ranks alike, and as one process has trained."""
    assert_alike(found)
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR


def vectors(samples=SAMPLES, seed=0):
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=chance, dtype=torch.float64)
    return list(zip(inputs, torch.randint(CLASSES, (samples,), generator=chance), strict=True))


def texts(samples=SAMPLES, seed=0, nothing_counts_below=0):
    """Inputs (T, WIDTH) and targets (T,) of which -100 does not count, in other numbers for each sample."""
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, LENGTH, WIDTH, generator=chance, dtype=torch.float64)
    targets = torch.randint(CLASSES, (samples, LENGTH), generator=chance)
    lengths = torch.randint(1, LENGTH + 1, (samples,), generator=chance)
    targets[torch.arange(LENGTH) >= lengths[:, None]] = -100
    targets[:nothing_counts_below] = -100
    return list(zip(inputs, targets, strict=True))


def texts_of_one_length(samples, but):
    """`texts` in which everything counts but in one sample, of which one target does."""
    found = texts(samples)
    for number, (_, targets) in enumerate(found):
        targets.clamp_(min=0)
        targets[1:] = targets[1:] if number != but else -100
    return found


def net(seed=0, *, norm=False, dropout=0.0):
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def of_tokens(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def of_tokens_if_any(outputs, targets):
    return of_tokens(outputs, targets) if (targets != -100).any() else 0.0 * outputs.sum()


def two_means(outputs, targets):
    count = (targets != -100).sum().clamp(min=1)
    tokens = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / count
    return {"size": outputs.pow(2).mean(), "tokens": tokens}


def tokens_if_all_count(outputs, targets):
    return of_tokens(outputs, targets) if (targets != -100).all() else outputs.pow(2).sum()


def pair(outputs, targets):
    counts = targets != -100
    each = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return each, counts.sum()


def several(outputs, targets):
    return {
        "tokens": of_tokens(outputs, targets),
        "size": outputs.pow(2).mean(),
        "pair": (outputs.sum(), (targets != -100).sum()),
    }


def one_of_list(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def other_of_list(model, batch):
    return model(batch[0]).pow(2).sum(1)


LOSSES = {
    "mean": (vectors, None),
    "sum": (vectors, nn.CrossEntropyLoss(reduction="sum")),
    "vector": (vectors, nn.CrossEntropyLoss(reduction="none")),
    "class weights": (vectors, nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0, 0.1], dtype=torch.float64))),
    "tokens, found out": (texts, of_tokens),
    "tokens, if any": (texts, of_tokens_if_any),
    "two means": (texts, two_means),
    "pair": (texts, pair),
    "several": (texts, several),
    "list": (vectors, [one_of_list, other_of_list]),
}


def train(rank, size, *, data=None, loss="mean", wrap=False, model=None, make_loader=None, **arguments):
    made, function = LOSSES[loss] if isinstance(loss, str) else (texts, loss)
    model = model or net(seed=rank)  # ranks begin with other weights, and are to take those of rank 0
    samples = made() if data is None else data
    if wrap:
        model = nn.parallel.DistributedDataParallel(model)
    given = {"optimizer": sgd, "device": "cpu", "progress": False}
    loader = DataLoader(samples, batch_size=7) if make_loader is None else make_loader(rank, size, samples)
    result = autoaccum.fit(model, loader, loss=function, **{**given, **arguments})
    return outcome(model.module if wrap else model, result)


def in_folder(rank, size, folder, *, patience_s):
    """Train in a folder that another process holds."""
    with mock.patch.object(folder_lock, "_PATIENCE_S", patience_s):
        return train(rank, size, target_batch=16, micro_batch=4, max_steps=2, checkpoint=folder)


def outcome(model, result):
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "buffers": [
            buffer.to(torch.int32 if buffer.dtype is torch.uint16 else buffer.dtype, copy=True)
            for buffer in model.buffers()
        ],
        "losses": [report.loss for report in result.history],
        "norms": [report.grad_norm for report in result.history],
        "samples": [report.samples for report in result.history],
        "cuts": [report.micro_batches for report in result.history],
        "oom": result.oom_events,
        "recomputed": [report.recomputed_samples for report in result.history],
        "evaluations": [(one.loss, dict(one.metrics), one.samples) for one in result.evaluations],
        "steps": result.steps,
        "all samples": result.samples,
        "resumed from": result.resumed_from,
    }


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def seeded(seed):
    torch.manual_seed(seed)
    random.seed(seed)


def own_loader(lengths):
    """Return what gives each rank the next so many samples."""

    def make(rank, size, samples):
        start = sum(lengths[:rank])
        return DataLoader(samples[start : start + lengths[rank]], batch_size=4)

    return make


def with_own_samples(rank, size, lengths, **arguments):
    return train(rank, size, make_loader=own_loader(lengths), **arguments)


def with_norm(rank, size, **arguments):
    return train(rank, size, model=net(norm=True), **arguments)


def evaluated(rank, size, lengths, **arguments):
    loader = own_loader(lengths)(rank, size, texts(sum(lengths), seed=5))
    arguments |= {"make_loader": own_loader([SAMPLES // size] * size), "metrics": {"size": mean_size}}
    return train(rank, size, loss="tokens, found out", val_loader=loader, **arguments)


def mean_size(outputs, targets):
    return outputs.abs().mean()


class FailingData(torch.utils.data.Dataset):
    """Raises after so many samples on one rank."""

    def __init__(self, samples, error, after):
        self.samples, self.error, self.left = samples, error, after

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if self.left == 0:
            raise self.error
        self.left -= 1
        return self.samples[index]


def failing(rank, size, who, what, folder=None):
    """Train where something of the user's own raises on one rank."""
    error = ZeroDivisionError("the user's own")
    mine = rank == who

    class Raising(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            self.has_done_two = report.step == 2
            if mine and what == "callback" and self.has_done_two:
                raise error

    raising = Raising()
    raising.has_done_two = False

    def loss(outputs, targets):
        if mine and what == "loss" and raising.has_done_two:
            raise error
        return functional.cross_entropy(outputs, targets)

    loader = DataLoader(FailingData(vectors(), error, 18 if mine and what == "loader" else -1), batch_size=4)
    model = net()
    result = autoaccum.fit(
        model,
        loader,
        16,
        loss=loss,
        loss_reduction="mean",
        micro_batch=3,
        optimizer=sgd,
        device="cpu",
        progress=False,
        checkpoint=folder,
        callbacks=[raising],
        shard_data=True,
    )
    return outcome(model, result)


class Changing(autoaccum.Callback):
    """Freezes a layer after the first update, and adds one after the second."""

    def __init__(self, model):
        self.model = model

    def on_step(self, report, *, epoch):
        if report.step == 1:
            self.model[0].requires_grad_(requires_grad=False)
        if report.step == 2:
            self.model.append(nn.Linear(CLASSES, CLASSES).double())


def changing(rank, size, **arguments):
    model = net()
    return train(
        rank,
        size,
        model=model,
        callbacks=[Changing(model)],
        target_batch=8,
        micro_batch=2,
        shard_data=True,
        **arguments,
    )


def different(rank, size, what):
    mine = rank == 1
    model = net() if not (mine and what == "model") else nn.Sequential(net(), nn.Linear(CLASSES, CLASSES)).double()
    optimizer = adam if mine and what == "optimizer" else sgd
    target = 20 if mine and what == "target_batch" else 16
    return train(rank, size, model=model, optimizer=optimizer, target_batch=target, shard_data=True, micro_batch=4)


class Counting(nn.Module):
    """Counts its own steps in a buffer, and remembers the last input's mean in another."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("constant", torch.full((3,), 0.1, dtype=torch.float64))
        self.register_buffer("width16", torch.zeros(2, dtype=torch.uint16))  # which gloo cannot send as what it is

    def forward(self, inputs):
        if self.training:
            self.calls += 1
            self.width16.fill_(len(inputs))
            self.last.copy_(inputs.mean(0))
        return self.inner(inputs)


def with_buffers(rank, size, **arguments):
    return train(rank, size, model=Counting(), **arguments)


class Marking(nn.Module):
    """Remembers the last inputs that begin with a positive number, of which few may be."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("marked", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, inputs):
        for one in inputs[inputs[:, 0] > 0] if self.training else ():
            self.marked.copy_(one)
        return self.inner(inputs)


def with_marks(rank, size, *, marked, **arguments):
    data = [
        (torch.cat([inputs[:1].abs() * (1 if at in marked else -1), inputs[1:]]), y)
        for at, (inputs, y) in enumerate(vectors())
    ]
    return train(rank, size, model=Marking(), data=data, **arguments)


def permuted(rank, size, **arguments):
    """Train where each rank has the same rows of weights in an order of its own."""
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(rank, 0))
    return train(rank, size, model=model, **arguments)


def unused(rank, size, **arguments):
    """Train a model of which one layer is never used, and another only for samples of the first rank."""
    model = Picky()
    before = model.never.weight.detach().clone()
    found = train(rank, size, model=model, optimizer=decaying, **arguments)
    return {**found, "never is as it was": torch.equal(model.never.weight, before)}


def decaying(parameters):
    return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9, weight_decay=0.1)


def said(rank, size, **arguments):
    return heard(rank, size, target_batch=16, micro_batch=4, **arguments)[1]


def heard(rank, size, **arguments):
    with contextlib.redirect_stderr(io.StringIO()) as spoken:
        found = train(rank, size, progress="lines", **arguments)
    return found, spoken.getvalue()


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.never = net(), nn.Linear(2, 2).double()
        self.sometimes = nn.Linear(WIDTH, CLASSES).double()
        torch.manual_seed(3)
        nn.init.normal_(self.sometimes.weight)

    def forward(self, inputs):
        outputs, marked = self.inner(inputs), inputs[:, :1] > 100
        return outputs + marked * self.sometimes(inputs) if marked.any() else outputs


def wide(samples=SAMPLES):
    """Samples of which the first in every 16 are marked."""
    made = vectors(samples)
    for at, (inputs, _) in enumerate(made):
        if at % 16 < 3:
            inputs[0] = 200.0
    return made


def resumed(rank, size, folder, *, steps, shuffle=False, workers=0, shard_data=True, **arguments):
    """Train some steps with checkpoints, as a process does that is started again until all are done."""
    chance = torch.Generator().manual_seed(7)
    loader = DataLoader(vectors(), batch_size=5, shuffle=shuffle, generator=chance, num_workers=workers)
    seeded(100 + rank)
    return train(
        rank,
        size,
        model=net(seed=rank, dropout=0.3),
        make_loader=lambda *_: loader,
        target_batch=16,
        micro_batch=3,
        shard_data=shard_data,
        checkpoint=folder,
        max_steps=steps,
        optimizer=adam,
        **arguments,
    )


def on_simulated(rank, size, sizes, **arguments):
    memory = autoaccum.Simulated(sizes[rank])
    found = train(
        rank,
        size,
        data=vectors(200),
        device=memory,
        make_loader=lambda *_: DataLoader(vectors(200), batch_size=50),
        **arguments,
    )
    return {**found, "largest": max(max(cut, default=0) for cut in found["cuts"])}


def not_finite(rank, size, folder, on_nan):
    """Train with NaN among the samples of the last rank alone; return what each rank ended with, and what is kept."""
    samples = [
        (inputs * (float("nan") if rank == size - 1 and 20 <= at < 24 else 1.0), target)
        for at, (inputs, target) in enumerate(vectors())
    ]
    arguments = {"target_batch": 8, "micro_batch": 4, "on_nan": on_nan, "checkpoint": folder, "checkpoint_every": 1}
    error = "none"
    try:
        train(rank, size, data=samples, **arguments)
    except autoaccum.AutoaccumError as raised:
        error = f"{type(raised).__name__}: {raised}"
    kept = [torch.load(path / "state.pt", weights_only=True)["windows"] for path in sorted(Path(folder).glob("step-*"))]
    return {"error": error, "kept": kept}


def meet(rank, size, port, slow_s):
    """Set up a group as `fit` does, rank 0 slowly; the times at which it was there on this rank."""
    distributed.destroy_process_group()
    there = []
    set_up = distributed.init_process_group

    def slow(*args, **kwargs):
        set_up(*args, **kwargs)
        time.sleep(slow_s if rank == 0 else 0.0)
        there.append(time.monotonic())

    variables = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
        mock.patch.object(distributed, "init_process_group", slow),
    ):
        autoaccum.join_ranks("cpu")
    return there[0], time.monotonic()


def stopping(rank, size, *, who, event, at):
    class Asks(autoaccum.Callback):
        times = 0

    def ask(self, *_, **__):
        self.times += 1
        if rank == who and self.times == at:
            raise autoaccum.StopTraining("good enough")

    setattr(Asks, event, ask)
    model = net()
    result = autoaccum.fit(
        model,
        DataLoader(vectors(), batch_size=7),
        16,
        epochs=2,
        micro_batch=4,
        shard_data=True,
        val_loader=DataLoader(vectors(10, seed=1), batch_size=5),
        val_every=3,
        device="cpu",
        progress=False,
        callbacks=[Asks()],
    )
    return {"steps": result.steps, "stopped": result.stopped, "parameters": [p.detach() for p in model.parameters()]}


def evaluated_every(rank, size, *, every):
    loader = DataLoader(texts(20, seed=5), batch_size=6)
    return train(
        rank, size, loss="tokens, found out", target_batch=16, micro_batch=4, shard_data=True, epochs=2,
        val_loader=loader, val_every=every,
    )  # fmt: skip
