"""Trainings with gradients sent during the last backward pass, and what tests want to know of them."""

import contextlib
import os
import signal
import time
from unittest import mock

import torch
from autoaccum._distributed.overlap import Overlap
from torch import nn

import autoaccum
import rank_faults
import rank_training
from autoaccum._distributed import overlap as overlapping
from autoaccum._distributed.data_parallel import DataParallel
from rank_training import CLASSES, WIDTH

# So small that the parameters of these models go in several.
BUCKET_BYTES = 64


class Sends:
    """Buckets sent so far, and windows whose sums came that way."""

    def __init__(self):
        self.in_backward = self.after = self.windows = self.windows_without = 0
        self.is_in_backward = False


@contextlib.contextmanager
def watched(bucket_bytes=BUCKET_BYTES):
    """Count what is sent, in small buckets; the backward pass waits for what the others say of their parts."""
    sends = Sends()
    arrive, send, take, add_up = Overlap._arrive, Overlap._send_next, Overlap.take, DataParallel.add_up

    def arriving(self, parameter):
        ends = time.monotonic() + 5  # these models are done before the others have said a word
        while self._asked is not None and not self._asked.is_answered() and time.monotonic() < ends:
            time.sleep(0.0001)
        sends.is_in_backward = True
        try:
            arrive(self, parameter)
        finally:
            sends.is_in_backward = False

    def sending(self):
        if sends.is_in_backward:
            sends.in_backward += 1
        else:
            sends.after += 1
        send(self)

    def taking(self):
        sends.windows += 1
        return take(self)

    def adding(self, *arguments):
        before = sends.windows
        try:
            return add_up(self, *arguments)
        finally:
            sends.windows_without += sends.windows == before

    with (
        mock.patch.object(Overlap, "_arrive", arriving),
        mock.patch.object(Overlap, "_send_next", sending),
        mock.patch.object(Overlap, "take", taking),
        mock.patch.object(DataParallel, "add_up", adding),
        mock.patch.object(overlapping, "LEAST_BYTES", bucket_bytes),
    ):
        yield sends


def trained(rank, size, how="train", *arguments, **named):
    """Train by one of the functions of `rank_training`, and return what was sent when too."""
    with watched() as sends:
        found = getattr(rank_training, how)(rank, size, *arguments, **named)
    return {**found, **vars(sends)}


def faulted(rank, size, **arguments):
    with watched() as sends:
        found = rank_faults.faulted(rank, size, overlap=True, **arguments)
    return {**found, **vars(sends)}


def at_each(rank, size, who, points, **arguments):
    return [rank_faults.tried(faulted, rank, size, points={who: [point]}, **arguments) for point in points]


def many(rank, size, seeds, operators, **arguments):
    drawn = [rank_faults.schedule(seed, size, operators) for seed in seeds]
    return [rank_faults.tried(faulted, rank, size, points=points, **arguments) for points in drawn]


class Deep(nn.Module):
    """Layers of which it is noted when their backward passes begin."""

    def __init__(self, note):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).double()
        self.last = nn.Linear(WIDTH, CLASSES).double()
        self.note = note

    def forward(self, inputs):
        for number, layer in enumerate(self.layers):
            inputs = Noted.apply(layer(inputs).tanh(), number, self.note)
        return self.last(inputs)


class Noted(torch.autograd.Function):
    """Tells when its backward pass runs, which is before that of the layer whose outputs it takes."""

    @staticmethod
    def forward(ctx, inputs, number, note):
        ctx.number, ctx.note = number, note
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        ctx.note(ctx.number)
        return gradient, None, None


def order(rank, size):
    """Return, of the last backward pass, what came after what: layers, and buckets that were sent."""
    events = []
    last = Overlap.last

    def entering(self):
        events.clear()
        return last(self)

    def note(number):
        events.append(f"layer {number}")

    send = Overlap._send_next

    def sending(self):
        events.append("sent")
        send(self)

    torch.manual_seed(0)
    with (
        watched(),
        mock.patch.object(Overlap, "last", entering),
        mock.patch.object(Overlap, "_send_next", sending),
    ):
        rank_training.train(
            rank, size, model=Deep(note), target_batch=16, micro_batch=3, shard=True, overlap=True, max_steps=2
        )
    return events


class Breaking(torch.autograd.Function):
    """Raises in the backward pass, where it is to."""

    @staticmethod
    def forward(ctx, inputs, error):
        ctx.error = error
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        if (error := ctx.error()) is not None:
            raise error
        return gradient, None


def breaking(rank, size, who, kind, folder=None):
    """Train where the backward pass of one rank raises in the last micro-batch of the third window, half-way."""
    seen = Seen()
    first, second = nn.Linear(WIDTH, 8).double(), nn.Linear(8, CLASSES).double()
    model = rank_training.net()
    first.load_state_dict(model[0].state_dict())
    second.load_state_dict(model[3].state_dict())

    def error():
        seen.backwards += 1
        if rank != who or seen.steps != 2 or seen.backwards != 3 or seen.raised:
            return None
        seen.raised = True
        if kind == "killed":
            os._exit(3)
        if kind == "interrupted":
            signal.raise_signal(signal.SIGINT)
        return ZeroDivisionError("the user's own") if kind == "own" else torch.OutOfMemoryError("CUDA out of memory.")

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, inputs):
            return self.second(Breaking.apply(self.first(inputs).tanh(), error))

    with watched() as sends:
        try:
            found = rank_training.train(
                rank,
                size,
                model=Broken(),
                target_batch=16,
                micro_batch=3,
                shard=True,
                overlap=True,
                callbacks=[seen],
                checkpoint=folder,
            )
        except KeyboardInterrupt:
            hooks = [parameter._post_accumulate_grad_hooks for parameter in (*first.parameters(), *second.parameters())]
            raise RuntimeError(f"interrupted, {sum(map(len, hooks))} hooks left") from None
    return {**found, **vars(sends)}


class Seen(autoaccum.Callback):
    def __init__(self):
        self.steps = self.backwards = 0
        self.raised = False

    def on_step(self, report, *, epoch):
        self.steps, self.backwards = report.step, 0


def with_hooks(rank, size, kind):
    """Train a model whose parameters have hooks of the user's own; return what comes of it without overlap and with."""
    return [_with_hooks(rank, size, kind, overlap=overlap) for overlap in (False, True)]


def _with_hooks(rank, size, kind, *, overlap):
    model = rank_training.net()
    calls = []

    def look(parameter):
        calls.append(parameter)

    def replace(parameter):
        calls.append(parameter)
        parameter.grad = parameter.grad.clone()

    def write(parameter):
        calls.append(parameter)
        parameter.grad.mul_(1.0)

    def hook(what):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(what)

    if kind == "late":  # within the forward pass, and so after all that was registered before
        model.register_forward_pre_hook(lambda *_: hook(write))
    else:
        hook({"looks": look, "replaces": replace}[kind])
    with watched() as sends:
        found, text = rank_training.heard(
            rank, size, model=model, target_batch=8, micro_batch=2, shard=True, overlap=overlap
        )
    return {**found, **vars(sends), "calls": len(calls), "said": text}


class _Compilable(torch.nn.Sequential):
    def forward(self, inputs):  # PyTorch 2.8 does not compile that of Sequential
        return super().forward(inputs)


def compiled(rank, size):
    """Train compiled, and return how many graphs were made too."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = _Compilable(*rank_training.net())
    model.compile(backend=backend)
    with watched() as sends:
        found = rank_training.train(
            rank,
            size,
            target_batch=16,
            micro_batch=4,
            shard=True,
            overlap=True,
            model=model,
            epochs=2,
            drop_last=True,
        )
    return {**found, **vars(sends), "graphs": len(graphs)}


def said(rank, size, *, who=None, **arguments):
    """Return what is said on this rank, where one of them has no room for more gradients."""
    make = overlapping.Buckets

    def refusing(*given, **named):
        if rank == who:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return make(*given, **named)

    with mock.patch.object(overlapping, "Buckets", refusing), watched() as sends:
        text = rank_training.said(rank, size, shard=True, overlap=True, **arguments)
    return text, vars(sends)


def freezing(rank, size, overlap):
    """Train where a layer is frozen after two updates, and thawed after two more."""
    model = rank_training.net()

    class Freezing(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            model[0].requires_grad_(report.step not in (2, 3))

    with watched() as sends:
        found = rank_training.train(
            rank, size, model=model, target_batch=8, micro_batch=2, shard=True, overlap=overlap, callbacks=[Freezing()]
        )
    return {**found, **vars(sends)}


def several_types(rank, size, overlap):
    """Train a model of single and double precision, with a weight that is not contiguous and larger than a bucket."""
    torch.manual_seed(0)
    model = Mixed()
    with watched() as sends:
        found = rank_training.train(
            rank, size, model=model, target_batch=16, micro_batch=3, shard=True, overlap=overlap, data=images()
        )
    return {**found, **vars(sends)}


def scaled(rank, size, overlap):
    """Train in half precision, with a gradient scaler, and clip."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    data = [(inputs.float(), target) for inputs, target in rank_training.vectors(24)]
    with watched() as sends:
        found = rank_training.train(
            rank,
            size,
            model=model,
            data=data,
            target_batch=8,
            micro_batch=2,
            shard=True,
            precision="fp16",
            clip_grad_norm=0.5,
            overlap=overlap,
        )
    return {**found, **vars(sends)}


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.linear = nn.Linear(5, CLASSES).double()

    def forward(self, inputs):
        return self.linear(self.convolution(inputs).mean((2, 3)).double())


def images():
    chance = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(3, 6, 6, generator=chance).to(memory_format=torch.contiguous_format),
            torch.tensor(number % CLASSES),
        )
        for number in range(40)
    ]
