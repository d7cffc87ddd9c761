"""Modules mark what they make, and leave nothing else behind."""

import copy

import pytest
import torch
from torch import nn

from autoaccum._engine.tensor_origins import MODEL, Places, mark_of


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, inputs, *, scale):
        weights = torch.softmax(self.project(inputs) * scale, -1)
        return self.out(input=weights)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        return {"logits": self.head(torch.relu(self.attention(inputs, scale=2.0)))}


@pytest.fixture
def marked():
    """Begins to mark, and ends it whatever happens."""
    begun = []

    def begin(*modules):
        places = Places(modules)
        places.begin()
        begun.append(places)
        return places

    yield begin
    for places in begun:
        places.end()


def marks_behind(tensor):
    """By the operator's name, the modules that have marked it, over the whole graph."""
    found, waiting = {}, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        place = mark_of(node)
        if place is not None:
            found.setdefault(node.name(), []).append(place.module)
        waiting += [before for before, _ in node.next_functions]
    return found


def test_outputs_are_marked_by_the_innermost_module_and_inputs_by_the_one_around(marked):
    model = Model()
    marked(model)

    found = marks_behind(model(torch.randn(3, 4))["logits"])

    assert found["AddmmBackward0"] == ["head", "attention.out", "attention.project"]
    assert found["ReluBackward0"] == [MODEL]
    assert found["SoftmaxBackward0"] == ["attention"]  # given as a keyword


def test_line_of_a_layer_is_where_the_model_calls_it(marked):
    model = Model()
    marked(model)

    place = mark_of(model(torch.randn(3, 4))["logits"].grad_fn)

    file, _, line = place.source.rpartition(":")
    assert file == __file__
    with open(__file__) as source:  # noqa: PTH123
        assert "self.head(" in source.read().splitlines()[int(line) - 1]


def test_modules_that_an_exception_came_through_are_at_work(marked):
    model = Model()
    places = marked(model)

    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5))
    assert [place.module for place in places.at_work] == [MODEL, "attention", "attention.project"]

    model(torch.randn(3, 4))
    assert places.at_work == ()


def test_loss_that_is_a_module_has_a_name_of_its_own(marked):
    model, loss = nn.Linear(4, 2), nn.CrossEntropyLoss()
    marked(model, loss)

    value = loss(model(torch.randn(3, 4)), torch.tensor([0, 1, 0]))

    assert mark_of(value.grad_fn).module == "(loss)"


def test_other_models_are_not_marked(marked):
    marked(nn.Linear(4, 2))

    assert marks_behind(nn.Linear(4, 2)(torch.randn(3, 4))) == {}


def test_copy_of_a_model_has_no_hooks(marked):
    model = Model()
    marked(model)

    copied = copy.deepcopy(model)

    assert not any(part._forward_hooks or part._forward_pre_hooks for part in copied.modules())


def test_outputs_and_gradients_are_the_same_to_the_last_bit(marked):
    model, inputs = Model(), torch.randn(3, 4)
    plain = copy.deepcopy(model)
    marked(model)

    outputs, expected = model(inputs)["logits"], plain(inputs)["logits"]
    outputs.sum().backward()
    expected.sum().backward()

    assert torch.equal(outputs, expected)
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), plain.parameters(), strict=True)
    )


def test_compiled_model_is_left_alone(marked):
    model = Model()
    model.head._compiled_call_impl = model.head._call_impl  # as Module.compile sets it

    marked(model)

    assert not nn.modules.module._global_forward_hooks


def test_without_a_graph_there_is_nothing_to_mark(marked):
    model = Model()
    places = marked(model)

    with torch.no_grad():
        outputs = model(torch.randn(3, 4))["logits"]

    assert outputs.grad_fn is None
    assert places.at_work == ()
