"""Loops that accumulate wrongly, and the same mended: pairs of functions for `verify`, which also run as commands.

Each fault is a function `train(micro_batch, accum_steps, mended)`. What it shall be told as stands beside it.
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody does

FAULTS = {}
WIDTH, CLASSES = 6, 5


def fault(told):
    """Register a loop, with the words of its diagnosis."""

    def add(train):
        FAULTS[train.__name__] = (train, told)
        return train

    return add


def samples(count=64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (count,), generator=generator)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def micro_batches(micro_batch, data=None):
    data = samples() if data is None else data
    yield from zip(*(one.split(micro_batch) for one in data), strict=True)


def loop(micro_batch, accum_steps, divide, model=None, after=None, optimizer=None, data=None, loss_of=F.cross_entropy):
    """The loop of which most faults are variants: `after(model, is_last)` runs after each backward pass."""
    model = model or network()
    optimizer = optimizer(model) if optimizer else torch.optim.AdamW(model.parameters())
    for number, (x, y) in enumerate(micro_batches(micro_batch, data), 1):
        (loss_of(model(x), y) / divide).backward()
        is_last = number % accum_steps == 0
        if after:
            after(model, is_last)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()


@fault("the loss is not divided by the accumulation steps")
def not_divided(micro_batch, accum_steps, mended):
    loop(micro_batch, accum_steps, accum_steps if mended else 1)


@fault("the loss is divided by the accumulation steps twice")
def divided_twice(micro_batch, accum_steps, mended):
    loop(micro_batch, accum_steps, accum_steps if mended else accum_steps**2)


@fault("times as large")
def divided_by_something_else(micro_batch, accum_steps, mended):
    loop(micro_batch, accum_steps, accum_steps if mended else accum_steps + 1 if accum_steps > 1 else 1)


@fault("the loss is not divided by the accumulation steps")
def hidden_by_a_clip(micro_batch, accum_steps, mended):
    def clip(model, is_last):
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    loop(micro_batch, accum_steps, accum_steps if mended else 1, after=clip)


@fault("the loss is not divided by the accumulation steps")
def hidden_by_a_clip_of_values(micro_batch, accum_steps, mended):
    def clip(model, is_last):
        if is_last:
            nn.utils.clip_grad_value_(model.parameters(), 1e-4)

    loop(micro_batch, accum_steps, accum_steps if mended else 1, after=clip)


@fault("perhaps clipped")
def hidden_by_a_clip_by_hand(micro_batch, accum_steps, mended):
    def clip(model, is_last):
        if is_last:
            norm = math.sqrt(sum(float(one.grad.square().sum()) for one in model.parameters()))
            for one in model.parameters():
                one.grad.mul_(0.01 / norm)

    loop(micro_batch, accum_steps, accum_steps if mended else 1, after=clip)


def tokens(micro_batch, mended, divide):
    """Sentences of different lengths, whose labels enter the model."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 20, (16, 9), generator=generator)
    lengths = torch.randint(2, 9, (16, 1), generator=generator)
    labels = torch.where(torch.arange(9) < lengths, words, -100)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
    body = model.forward
    model.forward = lambda words, labels: body(words)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_window = int((labels != -100).sum())
    for x, y in zip(words.split(micro_batch), labels.split(micro_batch), strict=True):
        logits = model(x, labels=y).transpose(1, 2)
        total = F.cross_entropy(logits, y, reduction="sum") / of_window
        (total if mended else F.cross_entropy(logits, y) / divide).backward()
    optimizer.step()


@fault("times as much, by their labels")
def tokens_averaged_by_micro_batch(micro_batch, accum_steps, mended):
    tokens(micro_batch, mended, accum_steps)


@fault("times as much, by their labels")
def tokens_averaged_and_not_divided(micro_batch, accum_steps, mended):
    tokens(micro_batch, mended, 1)


@fault("a mean of means")
def weights_averaged_by_micro_batch(micro_batch, accum_steps, mended):
    weight = torch.tensor([0.1, 1.0, 2.0, 4.0, 8.0])
    of_window = float(weight[samples()[1][:16]].sum())

    def loss_of(outputs, y):
        total = (F.cross_entropy(outputs, y, reduction="none") * weight[y]).sum()
        return total / of_window if mended else total / weight[y].sum() / accum_steps

    loop(micro_batch, accum_steps, 1, loss_of=loss_of, data=[one[:16] for one in samples()])


@fault("gradients are clipped between micro-batches")
def clipped_each_time(micro_batch, accum_steps, mended):
    def clip(model, is_last):
        if is_last or not mended:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    loop(micro_batch, accum_steps, accum_steps, after=clip)


@fault("gradients are scaled, unscaled or changed between micro-batches")
def scaled_each_time(micro_batch, accum_steps, mended):
    def scale(model, is_last):
        for one in model.parameters():
            one.grad /= 1 if mended and not is_last else accum_steps

    loop(micro_batch, accum_steps, 1, after=scale)


@fault("gradients are cleared inside the window")
def cleared_each_time(micro_batch, accum_steps, mended):
    def clear(model, is_last):
        if not (is_last or mended):
            model.zero_grad()

    loop(micro_batch, accum_steps, accum_steps, after=clear)


@fault("the optimizer steps inside the window")
def steps_each_time(micro_batch, accum_steps, mended):
    loop(micro_batch, accum_steps if mended else 1, accum_steps)


@fault("only some modules are off: head (2 times as large)")
def one_module_not_divided(micro_batch, accum_steps, mended):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(WIDTH, 8), "head": nn.Linear(WIDTH, 3)})
    model.forward = lambda x: (model["body"](x), model["head"](x))

    def loss_of(outputs, y):
        divide = accum_steps if mended else 1
        return F.cross_entropy(outputs[0], y) / accum_steps + 1e-3 * outputs[1].square().mean() / divide

    loop(micro_batch, accum_steps, 1, model=model, loss_of=loss_of)


@fault("only some modules are off: head (no gradient)")
def one_module_without_gradient(micro_batch, accum_steps, mended):
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(WIDTH, 8), "head": nn.Linear(WIDTH, 3)})
    model.forward = lambda x: (model["body"](x), model["head"](x))

    def after(model, is_last):
        if is_last and accum_steps > 1 and not mended:
            model["head"].zero_grad()

    def loss_of(outputs, y):
        return F.cross_entropy(outputs[0], y) + outputs[1].square().mean()

    loop(micro_batch, accum_steps, accum_steps, model=model, loss_of=loss_of, after=after)


@fault("only some modules are off: head (2 times as large)")
def one_loss_of_two_not_divided(micro_batch, accum_steps, mended):
    torch.manual_seed(0)
    model, head = network(), nn.ModuleDict({"head": nn.Linear(WIDTH, 3)})
    head.forward = head["head"].forward
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    for number, (x, y) in enumerate(micro_batches(micro_batch), 1):
        (F.cross_entropy(model(x), y) / accum_steps).backward()
        (head(x).square().mean() / (accum_steps if mended else 1)).backward()
        if number % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()


@fault("perhaps the loss compares samples with each other")
def compares_samples(micro_batch, accum_steps, mended):
    def loss_of(outputs, y):
        return outputs.square().mean() if mended else F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))

    loop(micro_batch, accum_steps, accum_steps, loss_of=loss_of)


@fault("the splits saw other samples")
def draws_by_batch_size(micro_batch, accum_steps, mended):
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5 if mended else micro_batch))
    loop(micro_batch, accum_steps, accum_steps, data=[one[order] for one in samples()])


@fault("SGD: every gradient is 2 times as large")
def one_of_two_optimizers(micro_batch, accum_steps, mended):
    generator, critic = network(0), network(1)
    optimizers = [torch.optim.AdamW(generator.parameters()), torch.optim.SGD(critic.parameters(), lr=0.1)]
    for number, (x, y) in enumerate(micro_batches(micro_batch), 1):
        (F.cross_entropy(generator(x), y) / accum_steps).backward()
        (F.cross_entropy(critic(x), y) / (accum_steps if mended else 1)).backward()
        if number % accum_steps == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@fault("step 2: every gradient is 2 times as large")
def wrong_from_the_second_step_on(micro_batch, accum_steps, mended):
    steps = 0

    def divide(model, is_last):
        nonlocal steps
        if is_last:
            for one in model.parameters():
                one.grad /= accum_steps if mended or not steps else 1
            steps += 1

    loop(micro_batch, accum_steps, 1, after=divide)


@fault("the loss is not divided by the accumulation steps")
def scaled_for_half_precision(micro_batch, accum_steps, mended):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, (x, y) in enumerate(micro_batches(micro_batch), 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / (accum_steps if mended else 1)
        scaler.scale(loss).backward()
        if number % accum_steps == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@fault("the loss is not divided by the accumulation steps")
def closure_makes_the_gradient(micro_batch, accum_steps, mended):
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    batches = list(micro_batches(micro_batch))[:accum_steps]

    def closure():
        optimizer.zero_grad()
        for x, y in batches:
            (F.cross_entropy(model(x), y) / (accum_steps if mended else 1)).backward()
        return torch.zeros(())

    optimizer.step(closure)


@fault("gradients are scaled, unscaled or changed between micro-batches")
def unscaled_each_time(micro_batch, accum_steps, mended):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, (x, y) in enumerate(micro_batches(micro_batch), 1):
        is_last = number % accum_steps == 0
        scaler.scale(F.cross_entropy(model(x), y) / accum_steps).backward()
        if is_last or not mended:
            scaler.unscale_(optimizer)
            scaler.step(optimizer) if is_last else None
            scaler.update()
        if is_last:
            optimizer.zero_grad()


def short_windows(micro_batch, accum_steps, divide, is_complete):
    """Two epochs of two and a half windows; `divide` is by the samples of a short one, or by all."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        batches = list(micro_batches(micro_batch, samples(40)))
        for number, (x, y) in enumerate(batches, 1):
            whole = len(batches) - len(batches) % accum_steps
            parts = accum_steps if number <= whole or not divide else len(batches) - whole
            (F.cross_entropy(model(x), y) / parts).backward()
            if number % accum_steps == 0 or (is_complete and number == len(batches)):
                optimizer.step()
                optimizer.zero_grad()


@fault("the window has 1 of 2 micro-batches and is divided by 2")
def short_window_divided_by_all(micro_batch, accum_steps, mended):
    short_windows(micro_batch, accum_steps, mended, True)


@fault("the optimizer steps late, after 24 samples, not 8")
def short_window_left_to_the_next(micro_batch, accum_steps, mended):
    short_windows(micro_batch, accum_steps, True, mended)


@fault("the optimizer steps late, after 24 samples, not 16")
def steps_one_micro_batch_late(micro_batch, accum_steps, mended):
    loop(micro_batch, accum_steps if mended or accum_steps == 1 else accum_steps + 1, accum_steps)


@fault("the optimizer steps inside the window, after 32 of 64 samples")
def accum_steps_ignored(micro_batch, accum_steps, mended):
    loop(micro_batch, accum_steps if mended else 4, accum_steps if mended else 4)


@fault("divided by the accumulation steps twice, or once where it is a sum")
def sum_divided(micro_batch, accum_steps, mended):
    def loss_of(outputs, y):
        return F.cross_entropy(outputs, y, reduction="sum")

    loop(micro_batch, accum_steps, 1 if mended else accum_steps, loss_of=loss_of)


@fault("or a term is added in each micro-batch")
def penalty_added_each_time(micro_batch, accum_steps, mended):
    model = network()

    def loss_of(outputs, y):
        penalty = 0.05 * sum(one.square().sum() for one in model.parameters())
        return F.cross_entropy(outputs, y) / accum_steps + penalty / (accum_steps if mended else 1)

    loop(micro_batch, accum_steps, 1, model=model, loss_of=loss_of)


if __name__ == "__main__":
    name, mended, micro_batch, accum_steps = sys.argv[1:]
    FAULTS[name][0](int(micro_batch), int(accum_steps), mended == "mended")
