"""Promises that attacks of the engine have found broken."""

import collections

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BatchEncoding

import autoaccum

QUIET = {"progress": False}


def _data():
    torch.manual_seed(0)
    return torch.randn(6, 3), torch.randint(0, 2, (6,))


def test_metric_that_writes_into_outputs_leaves_a_loss_over_the_window_as_it_is():
    batch, losses = _data(), []
    for metric in (lambda outputs, targets: 0.0, lambda outputs, targets: outputs.zero_().sum()):
        torch.manual_seed(1)
        model = nn.Linear(3, 2)
        result = autoaccum.fit(
            model, [batch], 6, loss=functional.cross_entropy, loss_scope="window", val_loader=[batch],
            metrics={"m": metric}, max_steps=1, **QUIET,
        )  # fmt: skip
        losses.append(result.evaluations[-1].loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("micro_batch", [6, 3])
def test_loss_over_the_window_reads_items_of_a_batch_encoding_as_attributes(micro_batch):
    model, (inputs, _) = nn.Linear(3, 4), _data()
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        autoaccum.plan(6, micro_batch),
        loss=lambda outputs, batch: functional.cross_entropy(outputs @ outputs.T, batch.y),
        loss_scope="window",
        forward=lambda model, batch: model(batch["x"]),
    )
    outputs = model(inputs)
    expected = functional.cross_entropy(outputs @ outputs.T, torch.arange(6))
    assert float(runner.step(BatchEncoding({"x": inputs, "y": torch.arange(6)})).loss) == pytest.approx(expected.item())


class _Counting(torch.optim.Optimizer):
    """SGD that counts its steps in several places before it writes."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.param_groups[0] |= {"tensor": torch.zeros(()), "list": [], "set": set()}
        self.fails = False

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        state = self.state[group["params"][0]]
        state.setdefault("counter", collections.Counter())["n"] += 1
        state.setdefault("set", set()).add(len(state["set"]))
        group["list"].append(0)
        group["set"].add(len(group["set"]))
        self._maybe_fail()
        for parameter in group["params"]:
            self.state[parameter]["is_there"] = True
            parameter.sub_(group["lr"] * parameter.grad)

    def _maybe_fail(self):
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_containers_in_state_and_groups_are_put_back(at):
    model = nn.Linear(3, 2)
    optimizer = _Counting(model.parameters())
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(6, 3), loss=functional.cross_entropy)
    for number in range(3):
        optimizer.fails = number == at
        runner.step(_data())
    (group,) = optimizer.param_groups
    state = optimizer.state[model.weight]
    assert (len(group["list"]), len(group["set"]), state["counter"]["n"], len(state["set"])) == (3, 3, 3, 3)


def test_step_that_fails_after_it_wrote_a_tensor_of_its_group_is_not_repeated():
    class Writes(_Counting):
        def _maybe_fail(self):
            self.param_groups[0]["tensor"].add_(1)
            super()._maybe_fail()

    model = nn.Linear(3, 2)
    optimizer = Writes(model.parameters())
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(6, 3), loss=functional.cross_entropy)
    runner.step(_data())
    runner.step(_data())
    optimizer.fails = True
    with pytest.raises(autoaccum.errors.StateDamagedError):
        runner.step(_data())


def test_parameters_that_come_later_have_to_be_finite_in_checkpoints(tmp_path, capsys):
    class Late(nn.Sequential):
        pass

    model, batch = Late(nn.Linear(3, 2)), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Adds(autoaccum.Callback):
        def on_step(self, report, **_):
            if report.step == 2:
                model.append(nn.Linear(2, 2))
                optimizer.add_param_group({"params": list(model[1].parameters())})
            if report.step == 4:
                with torch.no_grad():
                    model[1].bias.fill_(float("nan"))

    autoaccum.fit(
        model, [batch] * 5, 6, loss=functional.cross_entropy, optimizer=optimizer, callbacks=[Adds()],
        checkpoint=tmp_path, checkpoint_every=1, **QUIET,
    )  # fmt: skip
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000003"]
    assert "step 4: no checkpoint is written, since it would hold NaN or infinity (1.bias)" in capsys.readouterr().err


def test_dense_gradients_are_added_to_sparse_ones():
    table = nn.Embedding(5, 3, sparse=True)
    words = torch.tensor([0, 1, 1, 4])
    table(words).sum().backward()
    expected = table.weight.grad.to_dense() + 2.0
    accumulator = autoaccum.Accumulator(
        table, closure=lambda words: (table.weight.sum() * 2.0).expand(len(words)), micro_batch=2
    )
    accumulator.backward(words)
    torch.testing.assert_close(table.weight.grad, expected)


def test_gradient_is_added_to_an_expanded_one():
    model, batch = nn.Linear(3, 2), _data()
    accumulator = autoaccum.Accumulator(model, loss=functional.cross_entropy, micro_batch=2)
    accumulator.backward(batch)
    expected = [parameter.grad + 1.0 for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones(1).expand(parameter.shape)
    accumulator.backward(batch)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_callback_that_fails_once_a_gradient_is_added_is_noted():
    class Fails(autoaccum.Callback):
        def on_plan(self, plan, *, step, probe):
            raise RuntimeError("mine")

    model, (inputs, targets) = nn.Linear(3, 2), _data()
    accumulator = autoaccum.Accumulator(
        model, loss=functional.cross_entropy, device=autoaccum.Simulated("1MiB"), callbacks=[Fails()]
    )

    def train():
        for _ in range(8):
            model.zero_grad()
            accumulator.backward((inputs, targets))

    with pytest.raises(RuntimeError, match="mine") as caught:
        train()
    assert model.weight.grad is not None
    assert "gradient of this batch is in .grad" in " ".join(caught.value.__notes__)


def test_callback_that_cannot_be_called_is_refused_before_anything_is_trained():
    class Counts(autoaccum.Callback):
        def on_step(self, report):
            pass

    model, batch = nn.Linear(3, 2), _data()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(autoaccum.InvalidInputError, match=r"Counts.on_step .*on_step\(self, report, \*, epoch\)"):
        autoaccum.fit(model, [batch], 6, loss=functional.cross_entropy, callbacks=[Counts()], **QUIET)
    assert all(map(torch.equal, before, model.parameters()))
