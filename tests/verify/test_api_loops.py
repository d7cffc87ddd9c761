"""Loops that accumulate rightly in a way of their own: `autoaccum.verify` makes no false alarm."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody does
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from support.losses.accumulation_faults import CLASSES, WIDTH, loop, micro_batches, network, samples


def divides_after_the_last_backward_pass(micro_batch, accum_steps):
    def divide(model, is_last):
        if is_last:
            for one in model.parameters():
                one.grad /= accum_steps

    loop(micro_batch, accum_steps, 1, after=divide)


def has_time_before_samples(micro_batch, accum_steps):
    torch.manual_seed(0)
    x, model = torch.randn(7, 32, WIDTH), nn.ModuleList([nn.LSTM(WIDTH, 8), nn.Linear(8, CLASSES)])
    model.forward = lambda x: model[1](model[0](x)[0][-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = zip(x.split(micro_batch, dim=1), samples(32)[1].split(micro_batch), strict=True)
    for number, (inputs, y) in enumerate(parts, 1):
        (F.cross_entropy(model(inputs), y) / accum_steps).backward()
        if number % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


def scaled(micro_batch, accum_steps, is_fused, scale=2.0**40):
    """The scale makes gradients infinite at first, so that the scaler skips an optimizer step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=is_fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=2.0**-30)
    for number, (x, y) in enumerate(micro_batches(micro_batch), 1):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), y) / accum_steps
        scaler.scale(loss).backward()
        if number % accum_steps == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def skips_steps_until_its_scale_fits(micro_batch, accum_steps):
    scaled(micro_batch, accum_steps, False)


def skips_fused_steps_until_its_scale_fits(micro_batch, accum_steps):
    scaled(micro_batch, accum_steps, True)


def steps_within_the_backward_pass(micro_batch, accum_steps):
    model = network()
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in model.parameters()}
    numbers = iter(range(64 * len(optimizers)))

    def step(one):
        if next(numbers) // len(optimizers) % accum_steps == accum_steps - 1:
            optimizers[one].step()
            optimizers[one].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(step)
    for x, y in micro_batches(micro_batch):
        (F.cross_entropy(model(x), y) / accum_steps).backward()


def adds_gradients_by_itself(micro_batch, accum_steps):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    total = [torch.zeros_like(one) for one in model.parameters()]
    for number, (x, y) in enumerate(micro_batches(micro_batch), 1):
        found = torch.autograd.grad(F.cross_entropy(model(x), y) / accum_steps, list(model.parameters()))
        total = [one + more for one, more in zip(total, found, strict=True)]
        if number % accum_steps == 0:
            for one, gradient in zip(model.parameters(), total, strict=True):
                one.grad = gradient
            optimizer.step()
            total = [torch.zeros_like(one) for one in model.parameters()]


def test_splits_of_which_the_scaler_skips_other_steps_are_not_compared():
    def train(micro_batch, accum_steps):
        scaled(micro_batch, accum_steps, False, 2.0**40 if micro_batch == 4 else 2.0**10)

    with pytest.raises(
        autoaccum.InvalidInputError, match="the scaler skips other optimizer steps in 4 x 2 than in 8 x 1"
    ):
        autoaccum.verify(train, 8)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_model_is_right(is_reentrant):
    def train(micro_batch, accum_steps):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5)), nn.Linear(8, CLASSES)])
        body = lambda x: checkpoint(model[0], x.clone().requires_grad_(), use_reentrant=is_reentrant)  # noqa: E731
        model.forward = lambda x: model[1](body(x))
        loop(micro_batch, accum_steps, accum_steps, model=model)

    found = autoaccum.verify(train, 8)
    assert found, str(found)


def shuffles_in_workers_without_a_seed(micro_batch, accum_steps):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(*samples()), micro_batch, shuffle=True, num_workers=1)
    for number, (x, y) in enumerate(loader, 1):
        (F.cross_entropy(model(x), y) / accum_steps).backward()
        if number % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


LOOPS = [
    skips_steps_until_its_scale_fits,
    skips_fused_steps_until_its_scale_fits,
    has_time_before_samples,
    steps_within_the_backward_pass,
    adds_gradients_by_itself,
    shuffles_in_workers_without_a_seed,
    divides_after_the_last_backward_pass,
]


@pytest.mark.parametrize("train", LOOPS, ids=lambda train: train.__name__)
def test_loop_is_right(train):
    found = autoaccum.verify(train, 8)

    assert found, str(found)
    assert [(split.micro_batch, split.accum_steps) for split in found.splits] == [(4, 2), (2, 4), (1, 8)]


def test_loop_that_divides_after_the_last_backward_pass_is_right_beside_a_split():
    found = autoaccum.verify(divides_after_the_last_backward_pass, 12, micro_batch=4)

    assert found, str(found)


def test_compiled_model_has_no_warning_of_verify():
    def train(micro_batch, accum_steps):
        loop(micro_batch, accum_steps, accum_steps, model=torch.compile(network(), backend="eager"))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert autoaccum.verify(train, 4)
