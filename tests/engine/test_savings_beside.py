"""What saves memory beside everything else that `fit` does: the run ends bit for bit as one that never needed it."""

import functools

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Simulated
from fallback_models import Wide, data, seed

# One sample does not fit the first without saving memory, and does with it.
SCARCE, PLENTY = "2MiB", "1GiB"


def trained(capacity, *, model=None, loader=None, **options):
    """Train in micro-batches of one sample, so that the cut is the same whatever the memory."""
    model = model or Wide()
    seed()
    made = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)}
    made = {"loss": torch.nn.CrossEntropyLoss()} | made | options
    result = autoaccum.fit(
        model, loader or data()[:2], 8, device=Simulated(capacity), micro_batch=1, progress=False, **made
    )
    return model, result


def assert_same(one, other):
    """Parameters, buffers and every step's loss are bitwise equal, and every window was cut the same."""
    (model, result), (expected, reference) = one, other
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(_tensors(model), _tensors(expected), strict=True))
    assert [report.loss for report in result.history] == [report.loss for report in reference.history]
    assert {report.micro_batches for report in (*result.history, *reference.history)} == {(1,) * 8}


def _tensors(model):
    return [*model.parameters(), *model.buffers()]


def is_plain(model):
    return all("forward" not in vars(module) for module in model.modules())


@functools.cache
def plain():
    """What training without anything beside it gives where memory is not scarce."""
    return trained(PLENTY)


def both(**options):
    """Train where memory is scarce, with memory="auto", and where it is not, without."""
    with pytest.raises(autoaccum.DoesNotFitError):
        trained(SCARCE, **options)
    changed = trained(SCARCE, memory="auto", **options)
    assert is_plain(changed[0])
    return changed, trained(PLENTY, **options) if options else plain()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision):
    assert_same(*both(precision=precision, loader=data()[:1]))


def test_several_losses():
    def entropy(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def size(model, batch):
        return model(batch[0]).pow(2).mean()

    assert_same(*both(loss=[entropy, size], loss_reduction="mean"))


def test_a_loss_over_the_whole_window():
    def contrast(outputs, targets):
        alike = outputs @ outputs.T
        return nn.functional.cross_entropy(alike, torch.arange(len(targets)))

    assert_same(*both(loss=contrast, loss_scope="window"))


def test_a_run_that_is_gone_on_with(tmp_path):
    changed, first = trained(SCARCE, memory="auto", checkpoint=tmp_path, max_steps=1)
    again = trained(SCARCE, memory="auto", checkpoint=tmp_path, max_steps=2)
    expected, whole = trained(PLENTY, max_steps=2)

    assert first.steps == 1
    assert is_plain(changed)
    assert [report.step for report in again[1].history] == [2]
    assert [report.loss for report in again[1].history] == [report.loss for report in whole.history][1:]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(_tensors(again[0]), _tensors(expected), strict=True))


class Interrupting(Wide):
    """Is interrupted once, within a block: in the forward pass of one step, or when it is computed again."""

    def __init__(self, call):
        super().__init__()
        self.left = call
        self.blocks[2].inner[1].register_forward_pre_hook(self._interrupt)

    def _interrupt(self, *_):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


# Calls of a block: one that fails for lack of memory, then two for each of the 8 micro-batches of a step.
@pytest.mark.parametrize("call", [24, 25])
def test_an_interrupt(tmp_path, call):
    model = Interrupting(call)
    with pytest.raises(KeyboardInterrupt):
        trained(SCARCE, model=model, memory="auto", checkpoint=tmp_path, checkpoint_every=1)
    assert is_plain(model)

    again = trained(SCARCE, memory="auto", checkpoint=tmp_path)
    expected, _ = plain()

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(_tensors(again[0]), _tensors(expected), strict=True))
