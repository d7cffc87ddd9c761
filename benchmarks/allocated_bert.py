"""Traces the trainings of published/bert.csv on fake tensors of the card they ran on.

They are those of BERT-large in Transformers' documentation on training with one card: sequences of 512 tokens, on a
V100 of 16 GB, in January 2022. The number is the memory in use on the card after training, as NVML tells it, less what
it was after a tensor of one element had been made (CUDA's context): so the segments of the allocator, and the kernels
that CUDA has loaded since.

Others than today: softmax kept its input beside its result (PyTorch before 1.11), attention was made of matrix products
and a softmax, gradients were set to zero and kept, and the optimizers went through parameters one by one.
"""

from __future__ import annotations

import csv
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from fake_card import CARD, on_fake_card, served, update

from autoaccum._estimate.cuda_dispatch import autocast, cublas_bytes
from autoaccum._estimate.fake_backward import loosened

RUNS = Path(__file__).parent / "published" / "bert.csv"
NUMBER = "segments"
CARD_NAME = "v100-16gb"
TOKENS = 512
ITERATIONS = 2
# After a tensor of one element, whose segment is among the allocator's.
_CONTEXT_MIB = 1343 - 2
# bitsandbytes keeps states of fewer elements in float32, and one scale for each block of the others.
_LEAST_IN_8_BITS, _BLOCK = 4096, 2048


def runs():
    """Return the runs; transformers' BERT keeps the same tensors in every version, with eager attention."""
    with RUNS.open() as lines:
        return [
            {
                **line,
                "source": "transformers",
                "run": f"bert-large {line['run']}",
                "of": line["optimizer"],
                "card": CARD_NAME,
                "real_bytes": (int(line["mib"]) - _CONTEXT_MIB) * 2**20,
            }
            for line in csv.DictReader(lines)
        ]


def predicted_bytes(run):
    batch, in_half = int(run["batch"]), run["fp16"] == "true"
    with _former_softmax(), on_fake_card(_model(run), batch, tensor_float=False) as (model, timeline):
        parameters = list(model.parameters())
        optimizer = _OPTIMIZERS[run["optimizer"]](parameters)
        for _ in range(ITERATIONS):
            ids, labels = (torch.zeros(*shape, dtype=torch.long, device=CARD) for shape in ((batch, TOKENS), (batch,)))
            with autocast(torch.float16) if in_half else nullcontext():
                loss = loosened(model(input_ids=ids, labels=labels)["loss"])
            loss.backward()
            update(optimizer)
            optimizer.zero_grad(set_to_none=False)
            del loss
    return served(timeline, cublas=2 * [cublas_bytes(CARD_NAME)]).reserved_bytes


def _model(run):
    import transformers  # noqa: PLC0415 - large

    with torch.device("meta"):
        config = transformers.BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            attn_implementation="eager",
        )
        model = transformers.BertForSequenceClassification(config)
    if run["checkpointing"] == "true":
        model.gradient_checkpointing_enable({"use_reentrant": True})
    return model


class _FormerSoftmax(torch.autograd.Function):
    """A softmax that keeps its input, of which its gradient took the type alone."""

    @staticmethod
    def forward(ctx, inputs, dim):
        result = torch.ops.aten._softmax(inputs, dim, False)
        ctx.save_for_backward(inputs, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx, gradient):
        inputs, result = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradient, result, ctx.dim, inputs.dtype), None


@contextmanager
def _former_softmax():
    present = torch.nn.functional.softmax

    def softmax(inputs, dim=None, dtype=None, **_):
        wanted = dtype or (torch.float32 if torch.is_autocast_enabled("cuda") else inputs.dtype)
        return _FormerSoftmax.apply(inputs.to(wanted), dim)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = present


class _FormerAdamW(torch.optim.Optimizer):
    """transformers' AdamW, one parameter after the other."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["first"], state["second"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            first, second, gradient = state["first"], state["second"], parameter.grad
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            parameter.addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-3)


class _Adam8bit(torch.optim.Optimizer):
    """The states of bitsandbytes' Adam8bit; its kernels take no memory."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if state:
                continue
            dtype = torch.uint8 if parameter.numel() >= _LEAST_IN_8_BITS else torch.float32
            for name in ("first", "second"):
                state[name] = torch.zeros_like(parameter, dtype=dtype)
                if dtype is torch.uint8:
                    state[f"scales of {name}"] = torch.zeros(-(-parameter.numel() // _BLOCK), device=parameter.device)


def _adafactor(parameters):
    from transformers.optimization import Adafactor  # noqa: PLC0415 - large

    return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


_OPTIMIZERS = {"adamw": _FormerAdamW, "adam8bit": _Adam8bit, "adafactor": _adafactor}
