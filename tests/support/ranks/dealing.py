"""Trainings of ranks that share lists of samples of unlike width, for tests of several ranks."""

import contextlib
import functools
import io
import os
import resource
import signal
import weakref
from pathlib import Path
from unittest import mock

import torch
from torch.utils.data import DataLoader

import autoaccum
from autoaccum._data.batches import Window  # which is dealt out by hand
from autoaccum._distributed.dealing import Dealer  # by hand
from autoaccum._distributed.process_group import Ranks, all_ranks  # whose exchanges are counted
from autoaccum._memory.host import Host  # of the ranks that deal by hand
from autoaccum._sizing.costs import Costs  # that are given
from autoaccum._system.notices import Notices  # of the ranks that deal by hand
from support.data.ragged import Causal, lengths_of, padded, texts
from support.ranks import tokens


class Collator:
    """Pads, and notes the lengths of each micro-batch."""

    def __init__(self):
        self.seen, self.alive = [], []

    def __call__(self, samples):
        self.alive.append(len(Counted.alive))
        self.seen.append([len(sample["input_ids"]) for sample in samples])
        return padded([sample["input_ids"] for sample in samples])


class Counted(dict):
    """A sample that counts those that live, and how often samples were pickled."""

    alive, pickled = weakref.WeakSet(), []

    def __init__(self, **fields):
        super().__init__(fields)
        self.alive.add(self)

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other

    def __copy__(self):
        return dict(self)

    def __reduce__(self):
        self.pickled.append(self["number"])
        return functools.partial(type(self), **self), ()


class Unsendable(Counted):
    """Cannot be pickled."""

    def __reduce__(self):
        super().__reduce__()
        raise TypeError("it holds an open file")


class Unreadable(Counted):
    """Can be pickled, and read by nobody."""

    def __reduce__(self):
        super().__reduce__()
        return _read, ()


def _read():
    raise TypeError("it was in an open file")


class Made(torch.utils.data.Dataset):
    """Makes each sample when it is asked for, and keeps none."""

    def __init__(self, samples, kind):
        self.samples, self.kind = samples, kind

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, place):
        return self.kind(**self.samples[place])


class Costed(autoaccum.ListOfSamples):
    """Says a cost of its own."""

    def __init__(self, collate, cost):
        super().__init__(collate)
        self.said = cost

    def cost(self, batch):
        return self.said


def samples_of(lengths, kind=dict):
    return Made([{"input_ids": text, "number": number} for number, text in enumerate(texts(*lengths))], kind)


def loader_of(samples, shuffle):
    return DataLoader(samples, 6, shuffle=shuffle, collate_fn=list)


def train(rank, size, lengths=None, *, shuffle=False, kind=dict, cost=None, evaluates=False, **options):
    """Train on texts; return the parameters, and what this rank has computed."""
    collator = Collator()
    samples = samples_of(lengths_of(96) if lengths is None else lengths, kind)
    Counted.pickled.clear()
    split = autoaccum.ListOfSamples(collator) if cost is None else Costed(collator, cost)
    if evaluates:
        options["val_loader"] = loader_of(samples_of(lengths_of(30, seed=4)), shuffle=False)
    result, model = tokens.run(loader_of(samples, shuffle), split=split, **options)
    return {
        "parameters": torch.cat([parameter.detach().flatten() for parameter in model.parameters()]),
        "losses": [report.loss for report in result.history],
        "samples": [report.samples for report in result.history],
        "cuts": [report.micro_batches for report in result.history],
        "seen": collator.seen,
        "alive": collator.alive,
        "pickled": len(Counted.pickled),
        "evaluations": [(one.loss, one.samples) for one in result.evaluations],
        "resumed": result.resumed_from,
        "oom": result.oom_events,
    }


def heard(rank, size, **options):
    """Train, and return what was printed too."""
    with contextlib.redirect_stderr(io.StringIO()) as spoken:
        found = train(rank, size, progress="lines", **options)
    return found, spoken.getvalue()


def sizes_swapped(rank, size, lengths, **options):
    """Return the bytes that each exchange held, and those of a window's samples."""
    swaps, real = [], Ranks.swap

    def swap(self, stream, sent, received, expected):
        swaps.append(sum(sent) + sum(expected))
        return real(self, stream, sent, received, expected)

    with mock.patch.object(Ranks, "swap", swap):
        train(rank, size, lengths, **options)
    return swaps


def killed(rank, size, who, **options):
    """Train where a rank is killed as samples are sent, in the third window."""
    calls, real = [], Ranks.swap

    def swap(self, *given):
        calls.append(given)
        if rank == who and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *given)

    with mock.patch.object(Ranks, "swap", swap):
        return train(rank, size, **options)


def in_memory_of(rank, size, capacity, lengths, **options):
    return train(rank, size, lengths, device=autoaccum.Simulated(capacity), **options)


class Normed(Causal):
    """Refuses a micro-batch of one sample, as BatchNorm does."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8).double()

    def forward(self, input_ids, attention_mask, labels):
        self.norm(self.tokens(input_ids).mean(1))
        return super().forward(input_ids, attention_mask, labels)


def train_normed(rank, size, lengths, **options):
    """Train a model with BatchNorm; return the cuts."""
    with mock.patch.object(tokens, "Causal", return_value=Normed()):
        return train(rank, size, lengths, **options)["cuts"]


# --- windows that are dealt out by hand -------------------------------------------------------------------------------


def dealer_of(rank):
    """Return a dealer, and a function that returns a rank's window of tensors of some lengths."""
    split = autoaccum.ListOfSamples(list)

    def window(*lengths):
        return Window([[torch.full((length,), rank, dtype=torch.float32) for length in lengths[rank]]], split)

    return Dealer(all_ranks(Host()), split, lambda: False, lambda _: False, Notices()), window


def lengths_in(window):
    return [len(sample) for sample in window.each_sample()]


def dealt_in_turn(rank, size, windows, seconds):
    """Deal out equal windows where a token takes so many seconds; return the lengths held after each."""
    dealer, window = dealer_of(rank)
    costs, found = Costs.of_state([[1, 1, seconds], [1, 1000, 1000 * seconds]]), []
    for _ in range(windows):
        part = window([8, 6, 4], [1, 1, 1])
        dealer.deal(part, costs)
        found.append(lengths_in(part))
    return found


def without_room(rank, size, lacking):
    """Deal out samples of 80 MB where a rank has memory for none; return what is held, and what was printed."""
    dealer, window = dealer_of(rank)
    part, before = window([20_000_000] * 3, [1] * 3), resource.getrlimit(resource.RLIMIT_DATA)
    held = int(_status("VmData")) * 1024
    with contextlib.redirect_stderr(io.StringIO()) as spoken:
        if rank == lacking:
            resource.setrlimit(resource.RLIMIT_DATA, (held + (20 << 20), before[1]))
        try:
            dealer.deal(part, Costs())
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, before)
    return lengths_in(part), spoken.getvalue()


def peak_of_exchange(rank, size):
    """Return the bytes that dealing out took at most beside the samples of a rank, and those of a window's samples."""
    dealer, window = dealer_of(rank)
    part = window([8_000_000, 6_000_000, 4_000_000, 2_000_000], [500_000] * 4)
    Path("/proc/self/clear_refs").write_text("5")  # of the peak
    before = int(_status("VmRSS"))
    dealer.deal(part, Costs())
    return 1024 * (int(_status("VmHWM")) - before), 4 * 22_000_000, lengths_in(part)


def _status(name):
    """Return a number of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(f"{name}:"))
