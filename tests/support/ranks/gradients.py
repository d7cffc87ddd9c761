"""Trainings in which one parameter's gradient, or one buffer, is a tensor of another form than its parameter."""

import torch
from torch import nn

import autoaccum
from support.ranks import training
from support.ranks.training import CLASSES


class OfForm(nn.Module):
    """Has a parameter of CLASSES numbers, or a buffer, of this form."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = training.net(), form
        torch.manual_seed(3)
        is_complex = form.startswith("conjugate") and "buffer" not in form
        own = torch.randn(CLASSES, 1, dtype=torch.complex128 if is_complex else torch.float64)
        if form == "of no dimension":
            own = own[0, 0].clone()
        elif form == "conjugate parameter":
            own = own.conj()
        self.own = nn.Parameter(own)
        self.further = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
        if form == "empty":
            self.further = nn.Parameter(torch.zeros(0, CLASSES, dtype=torch.float64))
        elif form == "of another type":
            self.own.grad_dtype = torch.float32
        elif form == "of fewer dimensions in memory":
            self.own.register_post_accumulate_grad_hook(expand)
        elif form == "negative":
            self.own.register_post_accumulate_grad_hook(negate_twice)
        elif form == "shared":
            self.own.register_post_accumulate_grad_hook(self.share)
            self.further.register_post_accumulate_grad_hook(self.share)
        buffer = {
            "expanded buffer": torch.ones(1, dtype=torch.float64).expand(CLASSES),
            "conjugate buffer": torch.ones(CLASSES, dtype=torch.complex128).conj(),
            "sparse buffer": torch.eye(CLASSES, dtype=torch.float64).to_sparse(),
            "empty buffer": torch.zeros(0, 3),
        }
        self.register_buffer("kept", buffer.get(form))
        if form == "buffer that is a view":
            self.register_buffer("whole", torch.ones(1, dtype=torch.float64))
            self.kept = self.whole.expand(CLASSES)

    def share(self, _):
        if self.own.grad is not None and self.further.grad is not None:
            self.further.grad = self.own.grad.view(-1)

    def forward(self, inputs):
        weights = torch.arange(CLASSES, dtype=torch.float64)
        own = self.own.flatten()
        if self.form == "conjugate":
            own = (torch.conj(own) + 1j * weights).abs()
        elif self.form == "conjugate parameter":
            own = own.imag
        elif self.form == "sparse":
            own = nn.functional.embedding(torch.arange(CLASSES), self.own, sparse=True).flatten()
        elif self.form == "expanded buffer" and self.training:
            self.kept = (self.kept[:1] + len(inputs)).expand(CLASSES)
        elif self.form == "conjugate buffer" and self.training:
            self.kept = (self.kept + 1j).conj()
        return self.inner(inputs) + own * weights + (self.further * weights).reshape(-1, CLASSES).sum(0)


def expand(parameter):
    """Let a gradient be its mean, in one place of memory for all elements."""
    parameter.grad = parameter.grad.mean().expand_as(parameter)


def negate_twice(parameter):
    """Let a gradient be a view with a negative bit, as `imag` of a conjugate tensor is."""
    parameter.grad = torch.complex(torch.zeros_like(parameter.grad), -parameter.grad).conj().imag


def of_form(rank, size, form, *, only=None, **arguments):
    """Train a model with a gradient or a buffer of a form, on this rank only where `only` is given."""
    model = OfForm(form if only in (None, rank) else "usual")
    return training.train(rank, size, model=model, target_batch=16, **arguments)


class Reshaping(autoaccum.Callback):
    """Gives a parameter other data on one rank or on all, before a window in which parameters are not compared."""

    def __init__(self, model, is_there):
        self.model, self.is_there = model, is_there

    def on_step(self, report, *, epoch):
        if report.step == 2 and self.is_there:
            self.model.further.data = torch.zeros(3, CLASSES, dtype=torch.float64)


def reshaped(rank, size, only):
    model = OfForm("usual")
    callbacks = [Reshaping(model, only in (None, rank))]
    return training.train(
        rank,
        size,
        model=model,
        target_batch=16,
        micro_batch=4,
        shard_data=True,
        callbacks=callbacks,
        optimizer=plain_sgd,
    )


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def accumulated(rank, size):
    """Return a conjugate gradient to which three batches have been added; ranks have parts of each."""
    model = OfForm("conjugate")
    accumulator = autoaccum.Accumulator(model, loss=nn.functional.cross_entropy, device="cpu", micro_batch=2)
    for number in range(3):
        inputs, targets = map(torch.stack, zip(*training.vectors(12, seed=number), strict=True))
        accumulator.backward((inputs[rank::size], targets[rank::size]))
    return {"parameters": [parameter.grad for parameter in model.parameters()], "buffers": [], "losses": []}


def quantised(rank, size):
    """Train the last layer of a model whose first one is quantised; ranks begin with other weights."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415 - not there beside the oldest torch

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(training.WIDTH, 32, bias=False), nn.Tanh(), nn.Linear(32, CLASSES))
    quantize_(model[0], Int8WeightOnlyConfig())
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    samples = [(inputs.float(), target) for inputs, target in training.vectors()]
    found = training.train(
        rank, size, data=samples, model=model, target_batch=16, micro_batch=8, shard_data=size > 1, optimizer=plain_sgd
    )
    return found | {"parameters": [model[0].weight.dequantize(), *found["parameters"][1:]]}
