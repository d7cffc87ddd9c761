"""A prediction for a GPU replaces functions of torch; other threads of the process must not notice."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from autoaccum import preflight
from autoaccum._estimate.own_thread import replaced  # the last test: of torch's functions none can be kept this way


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x):
        return functional.scaled_dot_product_attention(
            *self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        )


def train(stop, failures, steps):
    """Attention, a checkpoint and a convolution, forward and back, as another thread computes them."""
    x, image = torch.randn(2, 8, 32, requires_grad=True), torch.randn(1, 2, 8, 8, requires_grad=True)
    model, convolution = Attends(), nn.Conv2d(2, 2, 3)
    while not stop.is_set():
        try:
            y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
            torch.autograd.backward(y.sum() + convolution(image).sum())
            steps.append(x.grad)
        except Exception as error:  # noqa: BLE001 - whatever it is
            failures.append(error)


@pytest.mark.gpu_fakes
def test_another_thread_trains_while_two_predict():
    stop, failures, steps, found = threading.Event(), [], [], []
    way = {"loss": lambda y, _: y.mean(), "gpus": "h100-80gb", "precision": "fp16", "measure": False}

    def predict():
        found.extend(preflight(Attends(), torch.randn(4, 16, 32), 4, **way).predicted[0] for _ in range(3))

    threads = [threading.Thread(target=predict) for _ in range(2)]
    trains = threading.Thread(target=train, args=(stop, failures, steps))
    for thread in (trains, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    trains.join()

    assert failures == []
    assert steps
    assert len(found) == 6
    assert all(one == found[0] for one in found)


def test_a_function_kept_by_another_ends_with_the_replacement():
    class Owner:
        def ask(self=None):
            return "original"

    with replaced(Owner, "ask", lambda: "ours"):
        kept = Owner.ask
        assert kept() == "ours"

    assert kept() == "original"
    assert Owner.ask() == "original"
