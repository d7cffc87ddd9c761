"""A model is let go of with its last name: no cycle through it, so that its memory does not wait for the collector."""

import gc
import weakref

import pytest
import torch
from torch import nn

import autoaccum
from support.faults.modes import FailAt
from support.models.small import batches_of, classifier, labelled


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def with_parts(window):
    """A model with an optimizer and a runner, and what tells whether each of them is alive."""
    model = classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(12, 6), loss=nn.CrossEntropyLoss(), device="cpu")
    watched = [weakref.ref(part) for part in (model, optimizer, runner, model[0].weight)]
    return runner, watched


def step(runner, window, model):
    assert runner.step(window).micro_batches == (6, 6)


def evaluate(runner, window, model):
    runner.step(window)
    assert runner.evaluate([window]) > 0


def run_out(runner, window, model):
    runner.step(window)  # which compares gradients, and tells of no failure in that
    with FailAt(30) as fail:
        report = runner.step(window)
    assert report.oom_events == fail.hits == 1


def run_out_in_evaluation(runner, window, model):
    with FailAt(4):
        runner.evaluate([window])


def fail(runner, window, model):
    with pytest.raises(RuntimeError):
        runner.step((window[0][:, :2], window[1]))


def take_another_optimizer(runner, window, model):
    runner.step(window)
    runner.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    runner.step(window)


def change(runner, window, model):
    runner.step(window)
    model().append(nn.Linear(3, 3).double())
    runner.step(window)


@pytest.mark.parametrize(
    "use",
    [lambda *_: None, step, evaluate, run_out, run_out_in_evaluation, fail, take_another_optimizer, change],
    ids=["made", "step", "evaluate", "out of memory", "out of memory in evaluation", "error", "optimizer", "changed"],
)
def test_runner_that_is_dropped_is_gone_at_once_with_its_model(use):
    window = labelled(12)
    runner, watched = with_parts(window)
    use(runner, window, watched[0])

    del runner

    assert [reference() for reference in watched] == [None] * len(watched)


@pytest.mark.parametrize("loss", [None, [lambda model, batch: model(batch[0]).square().mean()]])
@pytest.mark.parametrize("loss_scope", ["micro_batch", "window"])
def test_losses_of_every_kind_hold_no_cycle(loss, loss_scope):
    if loss_scope == "window":
        loss = nn.CrossEntropyLoss()
    model, window = classifier(), labelled(12)
    alive = weakref.ref(model)
    runner = autoaccum.Runner(model, None, autoaccum.plan(12, 6), loss=loss, loss_scope=loss_scope, device="cpu")
    runner.step(window)

    del runner, model

    assert alive() is None


def test_search_leaves_nothing_that_holds_the_model():
    model, window = classifier(), labelled(12)
    alive = weakref.ref(model)
    autoaccum.find_micro_batch(model, window, loss=nn.CrossEntropyLoss(), device=autoaccum.Simulated("24KiB"))

    del model

    assert alive() is None


@pytest.mark.parametrize("options", [{}, {"oom_report": "reports", "checkpoint": "runs"}], ids=["plain", "kept"])
def test_fit_leaves_nothing_that_holds_the_model(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    model, loader = classifier(), batches_of(labelled(48), 12, 12, 12, 12)
    alive = weakref.ref(model)
    result = autoaccum.fit(
        model,
        loader,
        24,
        loss=nn.CrossEntropyLoss(),
        val_loader=loader,
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).double().mean()},
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        device=autoaccum.Simulated("24KiB"),
        epochs=2,
        progress=False,
        **options,
    )

    del model

    assert result.steps == 4
    assert alive() is None


@pytest.mark.parametrize("known", [0, 1, 5])
def test_batch_is_gone_with_its_step(known):
    runner, _ = with_parts(labelled(12))
    for _ in range(known):
        runner.step(labelled(12))
    window = labelled(12)
    inputs = weakref.ref(window[0])

    runner.step(window)
    del window

    assert inputs() is None


def test_a_batch_is_let_go_of_though_its_window_was_refused_before_it_began():
    model, batch = classifier(), [*labelled(12)]
    accumulator = autoaccum.Accumulator(model, loss=nn.CrossEntropyLoss(), micro_batch=6, device="cpu")
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    watched = weakref.ref(batch[0])

    with pytest.raises(autoaccum.InvalidInputError, match="post-accumulate-grad hook"):
        accumulator.backward(tuple(batch))
    batch.clear()

    assert watched() is None


def test_micro_batches_that_a_split_has_made_are_let_go_of_one_after_the_other():
    alive, most = [], []

    def collated(samples):
        return {"x": torch.stack([x for x, _ in samples]), "mask": torch.stack([mask for _, mask in samples])}

    def loss(outputs, batch):
        most.append(sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(batch["x"]))
        return (outputs.square().mean(1) * batch["mask"]).sum() / batch["mask"].sum()

    model = nn.Linear(6, 4)
    options = {"forward": lambda model, batch: model(batch["x"]), "split": autoaccum.ListOfSamples(collated)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(16, 2), loss=loss, device="cpu", **options)
    for _ in range(3):
        alive.clear()
        most.clear()
        runner.step([(torch.randn(6), torch.tensor(1.0)) for _ in range(16)])

    assert max(most) <= 1
