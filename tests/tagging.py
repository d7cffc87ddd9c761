"""A window of unequal texts, with a loss of which nothing says what it runs over, and its gradient under faults."""

import torch
from torch import nn
from torch.nn import functional

import autoaccum
from helpers import CPU

V, D = 40, 8


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        self.double()

    def forward(self, tokens, **_):
        return self.head(self.embed(tokens).tanh())


def smoothed(outputs, batch, **options):
    """Predicts the next token."""
    outputs, labels = outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return functional.cross_entropy(outputs, labels, label_smoothing=0.1, **options)


def batch(lengths, seed):
    is_text = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(3, V, is_text.shape, generator=torch.Generator().manual_seed(seed)).where(is_text, 0)
    labels = tokens.where(is_text, -100)
    labels[0] = -100
    return {"tokens": tokens, "attention_mask": is_text.long(), "labels": labels}


def window():
    return [batch([3, 9, 5, 7], 1), batch([14, 4, 6, 8], 2)]


def gradients(faults):
    """Return one window's gradients while faults happen, and the operators that were counted."""
    model = Tagger()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with faults:
        autoaccum.fit(
            model,
            window(),
            8,
            micro_batch=3,
            loss=smoothed,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
            device=CPU,
            progress=False,
            cache=False,
        )
    assert faults.hits == len(faults.points)
    return [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)], faults.count


def gradient_of_the_window():
    model = Tagger()
    total = sum(smoothed(model(**part), part, reduction="sum") for part in window())
    targets = sum(int((part["labels"][:, 1:] != -100).sum()) for part in window())
    return torch.autograd.grad(total / targets, list(model.parameters()))


def far(found, expected):
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def losses_with(fails, share, shares):
    """Let each of some operators fail in turn; return the points, and how far the gradient is off at which of them."""
    whole = gradient_of_the_window()
    _, count = gradients(fails())
    every = max(count // (8 * shares), 1)
    points = range((1 + share) * every, count, every * shares)  # the very first prepare the training
    found = {point: far(gradients(fails(point))[0], whole) for point in points}
    return points, {point: error for point, error in found.items() if error > 1e-12}
