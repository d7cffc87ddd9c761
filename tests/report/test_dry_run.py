import pytest
import torch
from torch import nn

from autoaccum import Simulated, plan
from autoaccum._report.dry_run import rehearse
from support.models.small import classifier, labelled, live_tensors
from support.training.steps import training_step


def rehearsed(model, batch, target=12, most=4, loss=None, optimizer=torch.optim.Adam, **options):
    step = training_step(model, loss, optimizer, memory=Simulated("64MiB"), **options)
    return rehearse(step, batch, plan(target, most), None)


def test_an_update_is_as_long_as_its_micro_batches_and_the_optimizer():
    pace = rehearsed(classifier(), labelled(8)).pace

    assert pace.step_s == pytest.approx(3 * pace.micro_batch_s + pace.optimizer_s)
    assert pace.samples_per_s == pytest.approx(12 / pace.step_s)


class Half(nn.Module):
    """Has a branch that this batch does not reach."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.used(inputs)


def test_parameters_that_got_no_gradient_are_warned_of():
    (warning,) = rehearsed(Half(), (torch.randn(4, 4), torch.randn(4, 3)), target=4).warnings

    assert "2 parameters (60 B) require a gradient and got none" in warning


def test_a_loss_that_cannot_be_found_out_is_warned_of():
    def contrastive(outputs, targets):
        return (outputs @ outputs.T).logsumexp(dim=1).mean()

    warnings = rehearsed(nn.Linear(4, 3), (torch.randn(8, 4), torch.randn(8, 3)), loss=contrastive).warnings

    assert any("neither a mean nor a sum" in warning for warning in warnings)
    assert any("loss_scope='window'" in warning for warning in warnings)


def test_a_loss_that_is_known_is_not():
    assert rehearsed(classifier(), labelled(8), loss=nn.CrossEntropyLoss()).warnings == ()


def test_where_memory_does_not_suffice_after_all_nothing_is_said():
    step = training_step(nn.Linear(256, 256), None, torch.optim.Adam, memory=Simulated("300KiB"))

    assert rehearse(step, (torch.randn(2, 256), torch.randn(2, 256)), plan(2, 2), None) is None


def test_forward_pass_that_fails_keeps_no_tensor():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4), nn.Softmax(1))

        def forward(self, inputs):
            self.inner(inputs)
            raise torch.OutOfMemoryError("simulated lack of memory")

    model, batch = Fails(), (torch.randn(8, 16), torch.randn(8, 4))
    rehearsed(model, batch, loss=nn.MSELoss())
    before = live_tensors()

    rehearsed(model, batch, loss=nn.MSELoss())

    assert live_tensors() == before
