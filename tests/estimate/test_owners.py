import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoaccum._estimate.allocation_trace import Category
from autoaccum._estimate.estimate import trace_step
from autoaccum._estimate.owners import is_of_loss

BATCH = torch.randn(4, 3, 8, 8), torch.randint(2, (4,))
KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_fakes)]


class Net(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Linear(4 * 36, 2)
        self.recomputes = recomputes

    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)
        return self.last(x.flatten(1))


def storages(kind="cpu", model=None, **options):
    return trace_step(model or Net(), BATCH, kind=kind, sizes=[4], **options).step_of(4).storages


def modules_of(made, operator):
    return [one.module for one in made if one.operator.startswith(operator) and one.category is not Category.WORKSPACE]


@pytest.mark.parametrize("kind", KINDS)
def test_what_operators_make_forward_and_back_belongs_to_the_module_of_the_forward_pass(kind):
    made = storages(kind)

    assert set(modules_of(made, "aten.convolution.default")) == {"first.0"}
    assert set(modules_of(made, "aten.relu.default")) == {"first.2"}
    assert set(modules_of(made, "aten.addmm.default")) == {"last"}
    assert set(modules_of(made, "aten.convolution_backward")) == {"first.0"}
    assert set(modules_of(made, "aten.threshold_backward")) == {"first.2"}
    assert set(modules_of(made, "aten.mm.default")) == {"last"}


def test_what_is_computed_once_more_belongs_to_its_module_both_times():
    made = storages(model=Net(recomputes=True))

    assert modules_of(made, "aten.convolution.default") == ["first.0", "first.0"]
    assert set(modules_of(made, "aten.convolution_backward")) == {"first.0"}


def test_parameters_gradients_and_state_belong_to_their_module():
    made = storages(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.1))

    of_last = [one.category for one in made if one.module == "last" and not one.operator]
    assert of_last.count(Category.PARAMETERS) == of_last.count(Category.GRADIENTS) == 2
    assert of_last.count(Category.OPTIMIZER) >= 4
    assert {one.module for one in made if one.category is Category.BUFFERS} == {"first.1"}
    assert {one.module for one in made if one.category is Category.INPUTS} == {""}


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss(), nn.functional.cross_entropy])
def test_the_loss_is_told_from_the_model(loss):
    made = storages(loss=loss)

    of_loss = [one for one in made if one.category is Category.LOSS]
    assert {one.operator.partition(".")[2].partition(".")[0] for one in of_loss} >= {
        "_log_softmax",
        "_log_softmax_backward_data",
    }
    assert all(one.module.startswith("(loss)") for one in of_loss)


def test_a_loss_inside_the_model_is_told_by_its_operators():
    assert is_of_loss("(model)", "aten._log_softmax_backward_data.default")
    assert is_of_loss("(loss)", "aten.mul.Tensor")
    assert not is_of_loss("encoder.attention", "aten._softmax.default")


def test_the_update_belongs_to_no_module():
    timeline = trace_step(Net(), BATCH, sizes=[4], optimizer=torch.optim.Adam).step_of(4)

    start = next(start for start, name in timeline.phases if name == "optimizer")
    made = {timeline.storages[event].module for event in timeline.events[start:] if event >= 0}
    assert made == {""}


def test_other_sizes_are_derived_with_their_modules():
    traced = trace_step(Net(), BATCH, sizes=[2, 4, 64])

    assert [one.module for one in traced.step_of(64).storages] == [one.module for one in traced.step_of(4).storages]
