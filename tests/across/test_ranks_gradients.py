"""Gradients and buffers of unusual forms: on several ranks as on one process, or refused in words on every rank."""

import importlib.util

import pytest
import torch
from torch import nn

import autoaccum
from support.ranks import expect
from support.ranks.rows import Row, table
from support.ranks.training import CLASSES, WIDTH, far, net, plain_sgd, vectors


class OfForm(nn.Module):
    """Has a parameter of CLASSES numbers, or a buffer, of this form."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = net(), form
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


def of_form(form, *, only=None, **given):
    """A model with a gradient or a buffer of a form, on this rank only where `only` is given."""
    return lambda rank, _: {"model": OfForm(form if only in (None, rank) else "usual"), "micro_batch": 8} | given


class Reshaping(autoaccum.Callback):
    """Gives a parameter other data on one rank or on all, before a window in which parameters are not compared."""

    def __init__(self, model, is_there):
        self.model, self.is_there = model, is_there

    def on_step(self, report, *, epoch):
        if report.step == 2 and self.is_there:
            self.model.further.data = torch.zeros(3, CLASSES, dtype=torch.float64)


def reshaped(only):
    def arguments(rank, size):
        model = OfForm("usual")
        callbacks = [Reshaping(model, only in (None, rank))]
        return {"model": model, "micro_batch": 4, "callbacks": callbacks, "optimizer": plain_sgd}

    return arguments


def quantised(rank, size):
    """The last layer of a model whose first one is quantised; ranks begin with other weights."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415 - not there beside the oldest torch

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(WIDTH, 32, bias=False), nn.Tanh(), nn.Linear(32, CLASSES))
    quantize_(model[0], Int8WeightOnlyConfig())
    model.requires_grad_(False)
    model[2].requires_grad_(True)
    samples = [(inputs.float(), target) for inputs, target in vectors()]

    def weights():
        return model[0].weight.dequantize()

    return {"model": model, "data": samples, "micro_batch": 8, "optimizer": plain_sgd, "told": weights}


def weights_are_those_of_rank_0(run):
    alone = run.alone()
    for one in run():
        assert torch.equal(one["told"], alone["told"])
        assert far(one["parameters"][1:], alone["parameters"][1:]) <= 1e-6


def refused(only):
    """The rank that has such a gradient says so, and others hear of it."""
    texts = ("the gradient of", "several ranks add up dense gradients")
    own, other = autoaccum.InvalidInputError, autoaccum.RankFailedError
    return expect.ends(*((own if only in (None, rank) else other, *texts) for rank in range(2)))


FORMS = ["conjugate", "conjugate parameter", "negative", "of fewer dimensions in memory", "shared", "of no dimension"]
FORMS += ["empty", "expanded buffer", "conjugate buffer", "empty buffer"]
# In single precision.
NEAR = expect.as_alone(rounding=1e-6)


def skipped_unless(condition, reason):
    return (pytest.mark.skipif(not condition, reason=reason),)


ROWS = table(
    __file__,
    *(Row(f"{form}: added up as on one process", of_form(form)) for form in FORMS),
    Row("of another type: added up as on one process", of_form("of another type"), holds=NEAR,
        marks=skipped_unless(torch.__version__ >= "2.9", "no grad_dtype")),
    Row("an accumulator adds to conjugate gradients on ranks and alone",
        of_form("conjugate", by="loops", micro_batch=2, optimizer=None)),
    Row("quantised weights are those of rank 0", quantised, holds=weights_are_those_of_rank_0,
        marks=skipped_unless(importlib.util.find_spec("torchao"), "torchao is not installed")),
    *(
        Row(f"{form} on {'all' if only is None else 'one'}: refused in words, and no rank hangs", given,
            holds=refused(only))
        for only in (None, 1)
        for form, given in [("sparse", of_form("sparse", only=only)), ("reshaped", reshaped(only))]
    ),
    Row("a sparse buffer is refused on every rank", of_form("sparse buffer"),
        holds=expect.refused("'kept' is a tensor of layout torch.sparse_coo")),
    Row("a buffer that is a view is refused on every rank", of_form("buffer that is a view"),
        holds=expect.refused("view of another of its tensors")),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
