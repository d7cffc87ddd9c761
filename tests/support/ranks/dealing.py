"""Trainings of ranks that share lists of samples of unlike width, for tests of several ranks."""

import contextlib
import io
import os
import pickle
import signal
from unittest import mock

import torch
from torch.utils.data import DataLoader

import autoaccum
from autoaccum._distributed.process_group import Ranks  # whose exchanges are counted
from support.data.ragged import lengths_of, padded, texts
from support.ranks import tokens


class Collator:
    """Pads, and notes the lengths of each micro-batch."""

    def __init__(self):
        self.seen = []

    def __call__(self, samples):
        self.seen.append([len(sample["input_ids"]) for sample in samples])
        return padded([sample["input_ids"] for sample in samples])


def unsendable(**fields):
    """Return a sample that cannot be pickled."""
    return {**fields, "key": lambda: None}


class Costed(autoaccum.ListOfSamples):
    """Says a cost of its own."""

    def __init__(self, collate, cost):
        super().__init__(collate)
        self.said = cost

    def cost(self, batch):
        return self.said


def samples_of(lengths, kind=dict):
    return [kind(input_ids=text, number=number) for number, text in enumerate(texts(*lengths))]


def loader_of(samples, shuffle):
    return DataLoader(samples, 6, shuffle=shuffle, collate_fn=list)


def train(rank, size, lengths=None, *, shuffle=False, kind=dict, cost=None, evaluates=False, **options):
    """Train on texts; return the parameters, and what this rank has computed."""
    collator = Collator()
    samples = samples_of(lengths_of(96) if lengths is None else lengths, kind)
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

    def swap(self, stream, sent, expected):
        swaps.append(sum(sent) + sum(expected))
        return real(self, stream, sent, expected)

    with mock.patch.object(Ranks, "swap", swap):
        train(rank, size, lengths, **options)
    window = samples_of(lengths)[: options["target_batch"]]
    return swaps, sum(len(pickle.dumps((0, sample), pickle.HIGHEST_PROTOCOL)) for sample in window)


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
