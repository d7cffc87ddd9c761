"""What a window says of an error that only micro-batches of a size raise, and of why it was begun again."""

import json

import pytest
import torch
from torch import nn

import autoaccum


class Squeezed(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).squeeze()


class Paired(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).view(-1, 2).flatten()


def train(model, targets, micro_batch, loss):
    batch = torch.randn(12, 6), targets
    return autoaccum.fit(model, [batch], 12, loss=loss, micro_batch=micro_batch, progress=False)


@pytest.mark.parametrize(
    ("model", "targets", "size", "said"),
    [
        (
            Squeezed(6, 4),
            torch.arange(12) % 4,
            1,
            r"size mismatch.*\n.*a micro-batch of 1 of the window's 12 samples.*micro_batch=",
        ),
        (Paired(6, 1), torch.randn(12), 3, r"shape '\[-1, 2\]'.*\n.*a micro-batch of 3 of the"),
    ],
    ids=["squeeze", "view of pairs"],
)
def test_error_of_a_size_tells_the_size_and_the_remedy(model, targets, size, said):
    loss = nn.CrossEntropyLoss() if targets.dtype is torch.int64 else nn.MSELoss()
    before = [parameter.detach().clone() for parameter in model.parameters()]

    with pytest.raises(RuntimeError, match=said):
        train(model, targets, size, loss)

    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_single_output_that_was_squeezed_is_not_taken_for_the_loss_of_the_model():
    with pytest.raises(autoaccum.InvalidInputError, match=r"a single number for a micro-batch of 1.*squeeze\(-1\)"):
        train(Squeezed(6, 1), torch.randn(12), 1, None)


class Later(autoaccum.Callback):
    """Knows whether the first four windows are done."""

    def __init__(self):
        self.has_come = False

    def on_step(self, report, *, epoch):
        self.has_come = report.step >= 4


def repeats_of(folder, later, **options):
    """Why windows were begun again: of reports, and as the log has it."""
    log = folder / "run.jsonl"
    batches = [(torch.randn(16, 3), torch.randn(16, 1), torch.rand(16, 1) + 0.1) for _ in range(6)]
    callbacks = [later, autoaccum.JSONLinesLog(log)]
    result = autoaccum.fit(
        nn.Linear(3, 1), batches, 16, micro_batch=8, device="cpu", callbacks=callbacks, progress=False, **options
    )
    lines = map(json.loads, log.read_text().splitlines())
    return [report.repeats for report in result.history], [
        tuple(line["repeats"]) for line in lines if line["event"] == "step"
    ]


def test_window_that_is_begun_again_for_its_loss_says_so(tmp_path):
    later = Later()

    def loss(outputs, batch):
        errors = (outputs - batch[1]).square()
        return (errors * batch[2]).sum() / batch[2].sum() if later.has_come else errors.mean()

    reported, logged = repeats_of(tmp_path, later, forward=lambda model, batch: model(batch[0]), loss=loss)

    assert [len(each) for each in reported] == [0, 0, 0, 0, 1, 0]
    assert "than when it was checked" in reported[4][0]
    assert logged == reported


def test_window_that_is_begun_again_for_lack_of_memory_says_so(tmp_path):
    later = Later()

    def forward(model, batch):
        if later.has_come and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("all is taken")
        return model(batch[0])

    loss = lambda outputs, batch: (outputs - batch[1]).square().mean()  # noqa: E731
    reported, logged = repeats_of(tmp_path, later, forward=forward, loss=loss)

    assert reported[:4] == [()] * 4
    assert reported[4][0] == "out of memory: forward of 8 samples"
    assert logged == reported
