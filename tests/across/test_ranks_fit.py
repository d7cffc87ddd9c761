"""`fit` on several ranks: the gradient of the global window, and every rank the same after each update."""

import fcntl
import itertools
import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from autoaccum._system import folder_lock  # whose patience is another
from support.ranks import expect, training
from support.ranks.rows import FOUR, SPREAD, SPREAD_3, THREE, TWO, Row, sweep, table
from support.ranks.training import CLASSES, WIDTH, net, own_loader, texts, vectors
from support.training.long_runs import checkpoints

TOKENS = {"loss": "tokens, found out"}


# --- losses -----------------------------------------------------------------------------------------------------------

# Of sums and of tokens: the others are weighted as one of these.
QUICK_WHEN_SPREAD = {("pair", SPREAD), ("tokens, found out", SPREAD_3)}


def places_of(number, loss):
    for place in (TWO, THREE):
        yield place if place.size == 2 + number % 2 else sweep(place)
    for place in (SPREAD, SPREAD_3):
        if loss != "several":  # whose parts have rows of their own
            yield place if (loss, place) in QUICK_WHEN_SPREAD else sweep(place)


OF_LOSSES = [
    Row(
        f"the gradient of a loss ({loss}) is that of the window",
        {"loss": loss, "epochs": 2},
        on=(*places_of(at, loss),),
    )
    for at, loss in enumerate(training.LOSSES)
]
# Of unlike numbers of tokens, which go by turns to ranks; alike on a rank, and late.
ALIKE = [text for text in texts(30) for _ in range(2)]
LATE = texts(1) * 8 + texts(10)
IN_THE_MIDDLE_NOTHING_COUNTS = texts(16) + texts(16, nothing_counts_below=16) + texts(16, seed=1)
OF_ONE_SAMPLE = [
    Row(
        f"{place.size} ranks with one sample each learn from each other what a loss ({loss}) runs over",
        {"loss": loss, "target_batch": place.size, "micro_batch": 1, "max_steps": 6},
        on=(place if place.size == 2 + number % 2 else sweep(place),),
    )
    for number, loss in enumerate(["tokens, found out", "pair", "sum", "vector", "several", "list"])
    for place in (TWO, THREE)
]


def first_loss_is_0(found):
    assert found[0]["losses"][0] == 0.0


OF_SHARES = [
    Row("samples that are alike on each rank are compared with those of others",
        TOKENS | {"data": ALIKE, "target_batch": 4, "micro_batch": 2, "max_steps": 6}, (TWO, SPREAD)),
    Row("samples that show late what a loss runs over are compared with those of others",
        TOKENS | {"data": LATE, "target_batch": 2, "micro_batch": 1, "max_steps": 6}, (TWO, SPREAD)),
    Row("a micro-batch in which nothing counts takes part in its pass",
        TOKENS | {"data": texts(16, nothing_counts_below=5), "micro_batch": 2}, (SPREAD,)),
    Row("a window in which nothing counts on any rank goes by where its loss exists",
        {"loss": "tokens, if any", "data": texts(16, nothing_counts_below=16) + texts(32), "micro_batch": 2},
        (TWO, SPREAD), expect.as_alone(also=first_loss_is_0)),
    Row("one of two losses in which nothing counts on any rank goes by",
        {"loss": "two means", "data": IN_THE_MIDDLE_NOTHING_COUNTS, "micro_batch": 2}, (TWO, SPREAD),
        marks=(pytest.mark.filterwarnings("ignore::autoaccum.errors.LossWarning"),)),  # at most 1 is no count
]  # fmt: skip


# --- which rank has which samples -------------------------------------------------------------------------------------


def own_samples(*lengths, **given):
    """Loaders of the ranks' own, with so many samples; alone one that has all."""

    def arguments(rank, size):
        loader = own_loader(lengths if size > 1 else [sum(lengths)])
        return {"make_loader": loader, "shard_data": False, "target_batch": 8, "micro_batch": 4} | given

    return arguments


UNLIKE = own_samples(23, 9, 2, target_batch=12, micro_batch=3, **TOKENS)


def counts_of_unlike(found):
    assert found[0]["samples"] == [4 + 4 + 2, 4 + 4, 4 + 1, 4, 4, 3]
    assert found[0]["all samples"] == 34
    assert [sum(cut) for cut in found[2]["cuts"]] == [2, 0, 0, 0, 0, 0]


def evaluated(*lengths, loss="tokens, found out"):
    """Train on windows of all samples, and evaluate loaders of the ranks' own."""

    def arguments(rank, size):
        samples = training.LOSSES[loss][0](sum(lengths), seed=5)
        return {
            "loss": loss,
            "make_loader": own_loader([training.SAMPLES // size] * size),
            "val_loader": own_loader(lengths if size > 1 else [sum(lengths)])(rank, size, samples),
            "metrics": {"size": training.mean_size},
            "target_batch": 50,
            "micro_batch": 5,
            "shard_data": False,
        }

    return arguments


OF_SAMPLES = [
    Row("ranks may have other numbers of samples, and none at the end", UNLIKE, (THREE,),
        expect.outcomes(counts_of_unlike)),
    Row("spread over ranks with other numbers of samples", UNLIKE, on=(SPREAD_3,), holds=expect.as_whole()),
    Row("a rank without any sample takes part", own_samples(8, 0, data=vectors(8), micro_batch=2),
        holds=expect.as_alone(target_batch=4)),  # of which the second rank has none
    Row("a last window that is dropped is dropped by all", own_samples(10, 7, drop_last=True),
        holds=expect.outcomes(samples=[8])),
    Row("an epoch that is dropped whole is refused on all", own_samples(10, 7, target_batch=64, drop_last=True),
        holds=expect.refused("less than target_batch=64 samples, which drop_last=True leaves out")),
    Row("an evaluation counts every sample of own loaders once", evaluated(13, 7), on=(TWO, SPREAD)),
    Row("metrics may take a forward pass of their own", evaluated(13, 3, loss="list"), on=(SPREAD,)),
    Row("also on a rank that has nothing to evaluate", evaluated(0, 13, loss="list"), on=(SPREAD,)),
    *(
        Row(f"fewer samples than ranks are refused ({target})", {"target_batch": None, target: 2}, (THREE,),
            expect.refused(f"{target}=2 is less than the number of ranks, 3"))
        for target in ("target_batch", "target_tokens")
    ),
]  # fmt: skip


# --- models -----------------------------------------------------------------------------------------------------------


def permuted(rank, size):
    """A model whose rows of weights each rank has in an order of its own."""
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.roll(rank, 0))
    return {"model": model, "clip_grad_norm": 0.1}


class Picky(nn.Module):
    """Never uses one layer, and another only for samples that are marked."""

    def __init__(self):
        super().__init__()
        self.inner, self.never = net(), nn.Linear(2, 2).double()
        self.sometimes = nn.Linear(WIDTH, CLASSES).double()
        torch.manual_seed(3)
        nn.init.normal_(self.sometimes.weight)

    def forward(self, inputs):
        outputs, marked = self.inner(inputs), inputs[:, :1] > 100
        return outputs + marked * self.sometimes(inputs) if marked.any() else outputs


def picky(rank, size):
    """Samples of which the first in every 16 are marked."""
    samples = vectors()
    for at, (inputs, _) in enumerate(samples):
        if at % 16 < 3:
            inputs[0] = 200.0

    def decaying(parameters):
        return torch.optim.SGD(parameters, lr=1e-5, momentum=0.9, weight_decay=0.1)

    return {"model": Picky(), "data": samples, "optimizer": decaying, "micro_batch": 8}


def unused_is_as_it_was(found):
    names = [name for name, _ in Picky().named_parameters()]
    assert torch.equal(found[0]["parameters"][names.index("never.weight")], Picky().never.weight)


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


def buffers_of_rank_0(found):
    calls, last, constant, width16 = found[0]["buffers"]
    assert calls == 2
    assert width16.tolist() == [5, 5]
    assert torch.equal(last, torch.stack([inputs for inputs, _ in vectors()[15:20]]).mean(0))
    assert torch.equal(constant, torch.full((3,), 0.1, dtype=torch.float64))


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


def marked(rank, size):
    data = [
        (torch.cat([inputs[:1].abs() * (1 if at in (22, 28) else -1), inputs[1:]]), target)
        for at, (inputs, target) in enumerate(vectors())
    ]
    return {"model": Marking(), "data": data, "target_batch": 15, "micro_batch": 5, "max_steps": 2}


def buffer_of_rank_1(found):
    assert torch.equal(found[0]["buffers"][0][1:], vectors()[22][0][1:])


def means_over_ranks(run):
    found = run()
    training.assert_alike(found)
    halves = [run.alone(data=vectors()[at : at + 8], target_batch=8) for at in (0, 8)]
    for both, one, other in zip(*(each["buffers"] for each in (found[0], *halves)), strict=True):
        assert torch.allclose(both.double(), (one.double() + other.double()) / 2, rtol=1e-12)


class Changing(autoaccum.Callback):
    """Freezes a layer after the first update, and adds one after the second."""

    def __init__(self, model):
        self.model = model

    def on_step(self, report, *, epoch):
        if report.step == 1:
            self.model[0].requires_grad_(requires_grad=False)
        if report.step == 2:
            torch.manual_seed(0)
            self.model.append(nn.Linear(CLASSES, CLASSES).double())


def changing(steps):
    def arguments(rank, size):
        model = net()
        given = {"model": model, "callbacks": [Changing(model)], "max_steps": steps}
        return given | {"target_batch": 8, "micro_batch": 2}

    return arguments


CLIPS = {"clip_grad_norm": 0.1}
OF_MODELS = [
    Row("gradients are clipped as in one process", CLIPS),
    Row("also those of a model in DistributedDataParallel", CLIPS | {"wrap": True}, holds=expect.as_alone(wrap=False)),
    Row("also where ranks begin otherwise, by the same numbers in another order", permuted, (THREE,)),
    Row("a parameter that only some ranks use is updated on all, and an unused one on none", picky,
        holds=expect.as_alone(also=unused_is_as_it_was)),
    Row("running statistics are means over the ranks",
        lambda rank, size: {"model": net(seed=rank, norm=True), "micro_batch": 16, "max_steps": 1},
        holds=means_over_ranks),
    Row("other buffers that a model writes are those of the first rank, and constants stay",
        lambda rank, size: {"model": Counting(), "target_batch": 15, "micro_batch": 5, "max_steps": 2}, (THREE,),
        expect.outcomes(buffers_of_rank_0)),
    Row("buffers that only some ranks write are those of the first of them", marked, (THREE,),
        expect.outcomes(buffer_of_rank_1)),
    Row("parameters may be frozen while ranks train", changing(2), holds=expect.alike),
    Row("parameters that come are refused in the next window in which all is checked", changing(4),
        holds=expect.refused("2 parameters are trained now")),
]  # fmt: skip


# --- what is said, and what fails -------------------------------------------------------------------------------------


def said(*, by_rank_0=None, by_nobody=None):
    def claim(found):
        if by_rank_0:
            assert [one["said"].count(by_rank_0) for one in found] == [1, 0]
        assert not by_nobody or all(by_nobody not in one["said"] for one in found)

    return expect.outcomes(claim)


class FailingData(training.Seen):
    """Raises after so many samples."""

    def __init__(self, samples, error, after):
        super().__init__(samples)
        self.error, self.after = error, after

    def __getitem__(self, index):
        if len(self.loaded) == self.after:
            raise self.error
        return super().__getitem__(index)


class Raising(autoaccum.Callback):
    """After two steps raises an error, or lets the loss raise it, or raises at the end."""

    def __init__(self, error, what):
        self.error, self.what, self.has_done_two = error, what, False

    def on_step(self, report, *, epoch):
        self.has_done_two = report.step == 2
        if self.what == "callback" and self.has_done_two:
            raise self.error

    def on_fit_end(self, result):
        if self.what == "on_fit_end":
            raise self.error

    def loss(self, outputs, targets):
        if self.what == "loss" and self.has_done_two:
            raise self.error
        return functional.cross_entropy(outputs, targets)


def failing(who, what):
    """Something of the user's own raises on one rank."""

    def arguments(rank, size):
        error = ZeroDivisionError("the user's own")
        raising = Raising(error, what if rank == who else "nothing")
        data = FailingData(vectors(), error, 18 if rank == who and what == "loader" else -1)
        given = {"callbacks": [raising], "loss": raising.loss, "loss_reduction": "mean"}
        return given | {"make_loader": lambda *_: DataLoader(data, batch_size=4)}

    return arguments


def error_of(who, what, place=TWO, **settings):
    """With what all had done before, and saved together."""
    holds = expect.ends_on(who, ZeroDivisionError, size=place.size, **settings)
    return Row(
        f"an error of a {what} on rank {who} is told to the others", failing(who, what), on=(place,), holds=holds
    )


def with_nan(**given):
    """Samples of which some of the last rank's are NaN."""

    def arguments(rank, size):
        data = [
            (inputs * (float("nan") if rank == size - 1 and 20 <= at < 24 else 1.0), target)
            for at, (inputs, target) in enumerate(vectors())
        ]
        options = {"data": data, "shard_data": False, "target_batch": 8, "micro_batch": 4, "checkpoint_every": 1}
        return options | given

    return arguments


def warns_and_keeps(run):
    run(checkpoint=run.folder)
    assert checkpoints(run.folder) == ["step-00000004", "step-00000005"]


OF_ERRORS = [
    Row("the same samples on every rank are noticed and said once", {"progress": "lines", "shard_data": False},
        holds=said(by_rank_0="every rank's loader gives the same samples")),
    Row("not where they are shared out", {"progress": "lines"}, holds=said(by_nobody="same samples")),
    Row("the first rank says what part of a window its plans are of", {"progress": "lines"}, holds=said(
        by_rank_0="2 ranks: this rank takes 8 samples of each window of 16; plans and cuts count only those")),
    *(error_of(who, what, keeps=[2]) for who in (0, 1) for what in ("loss", "loader", "callback")),
    *(error_of(who, "on_fit_end") for who in (0, 1)),
    *(error_of(2, what, FOUR) for what in ("loss", "callback")),
    Row("NaN on one rank stops all in the same window", with_nan(on_nan="stop"),
        holds=expect.ends((autoaccum.NotFiniteError, "step 6: not finite"), keeps=[4, 5])),
    Row("of which all may warn, and keep what was before", with_nan(on_nan="warn"), holds=warns_and_keeps),
]  # fmt: skip


# --- checkpoints and sizes --------------------------------------------------------------------------------------------


def shuffling(shuffle, workers):
    def arguments(rank, size):
        chance = torch.Generator().manual_seed(7)
        loader = DataLoader(vectors(), batch_size=5, shuffle=shuffle, generator=chance, num_workers=workers)
        model = net(seed=rank, dropout=0.3)
        return {"model": model, "make_loader": lambda *_: loader, "epochs": 2, "optimizer": training.adam}

    return arguments


def unlike_memory(rank, size):
    """Devices of which the second holds more, and batches of a loader that it can hold."""
    return {
        "device": autoaccum.Simulated(["5KiB", "8KiB"][rank]) if size > 1 else "cpu",
        "make_loader": lambda *_: DataLoader(vectors(200), batch_size=50),
        "target_batch": 40,
        "micro_batch": "auto",
    }


def unlike_cuts(found):
    largest = [max(itertools.chain(*one["cuts"])) for one in found]
    assert 0 < largest[0] < largest[1]


def held_by_another(*, ends_after_s, patience_s):
    """A checkpoint folder that another process holds for a while."""
    patience = mock.patch.object(folder_lock, "_PATIENCE_S", patience_s)
    given = {"during": patience, "micro_batch": 4, "max_steps": 2, "shard_data": False}

    def holds(run):
        with open(f"{run.folder}/.lock", "w") as holder:  # noqa: PTH123 - to be closed by another thread
            fcntl.flock(holder, fcntl.LOCK_EX)
            print("process 7 on node1", file=holder, flush=True)
            release = threading.Timer(ends_after_s, holder.close)
            release.start()
            answers = run.answers(checkpoint=run.folder)
            release.cancel()
        if ends_after_s < patience_s:
            assert [answer["steps"] for answer in answers] == [2, 2]
            assert checkpoints(run.folder) == ["step-00000002"]
        else:
            assert all(isinstance(answer, autoaccum.CheckpointInUseError) for answer in answers), answers
            assert all("process 7 on node1" in str(answer) for answer in answers)

    return {"given": lambda *_: given, "holds": holds, "marks": (pytest.mark.slow,)}


OF_FOLDERS_AND_SIZES = [
    *(
        Row(f"a training goes on as if it had not ended, shuffle={shuffle} and {workers} workers",
            shuffling(shuffle, workers), holds=expect.goes_on({"max_steps": 3}, {"max_steps": 8}, kept=3))
        for shuffle, workers in ((False, 0), (True, 0), (True, 2))
    ),
    Row("each rank finds its own cut, and the gradient is that of the window", unlike_memory,
        holds=expect.as_alone(also=unlike_cuts)),
    Row("a folder that another process holds is waited for", **held_by_another(ends_after_s=3.0, patience_s=600)),
    Row("and given up by all", **held_by_another(ends_after_s=3600.0, patience_s=3)),
]  # fmt: skip

ROWS = table(
    __file__, *OF_LOSSES, *OF_ONE_SAMPLE, *OF_SHARES, *OF_SAMPLES, *OF_MODELS, *OF_ERRORS, *OF_FOLDERS_AND_SIZES
)


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
