"""Running out of memory changes nothing but the cut: bit for bit what the same cut gives without a fault."""

import copy
import gc
import random
import signal

import numpy as np
import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.notices import Notices
from faults import FailAt, differences, state_of

SAMPLES = 12


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny operators on several threads spend their time waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Noisy(nn.Module):
    """Draws from all three generators, moves BatchNorm's statistics, writes a buffer and replaces another."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs):
        hidden = self.drop(torch.relu(self.norm(self.first(inputs))))
        self.seen += len(inputs)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.last(hidden) * (1.0 + 0.01 * random.random() + 0.01 * np.random.randn())  # noqa: NPY002, S311


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 3)
    )


def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), Last())


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, hidden):
        return self.head(hidden[:, 0])


def energy(model, batch):
    return model(batch[0]).square().mean()


def entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


MODELS = {
    "noisy": (Noisy, lambda: torch.randn(SAMPLES, 6), None),
    "convolutional": (convolutional, lambda: torch.randn(SAMPLES, 1, 6, 6), nn.CrossEntropyLoss()),
    "attention": (attention, lambda: torch.randint(0, 9, (SAMPLES, 5)), nn.CrossEntropyLoss(reduction="sum")),
    "several losses": (Noisy, lambda: torch.randn(SAMPLES, 6), [entropy, energy]),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
}


class Case:
    """Two windows on one model; memory runs out in the second. The first settles what is found out and made lazily."""

    def __init__(self, name, optimizer, precision="fp32", clip=None):
        make, inputs, self.loss = MODELS[name]
        torch.manual_seed(0)
        self.template = make()
        self.windows = [(inputs(), torch.randint(0, 3, (SAMPLES,))) for _ in range(2)]
        self.optimizer, self.precision, self.clip = OPTIMIZERS[optimizer], precision, clip

    def run(self, fault, sizes=(6, 6)):
        """Take both windows, the second under `fault`; return the state, the report and what was raised."""
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        model = copy.deepcopy(self.template)
        runner = autoaccum.Runner(
            model,
            self.optimizer,
            autoaccum.plan(SAMPLES, 6),
            loss=self.loss,
            precision=self.precision,
            device="cpu",
            clip_grad_norm=self.clip,
            notices=Notices(silent=True),
        )
        runner.step(self.windows[0])
        runner.plan = autoaccum.Plan(SAMPLES, sizes)
        scaler = runner._step.precision.scaler
        self.before = state_of(model, runner.optimizer, scaler)
        report, error = None, None
        try:
            with fault:
                report = runner.step(self.windows[1])
        except Exception as caught:  # noqa: BLE001 - whatever it is, it is looked at
            error = caught
        return state_of(model, runner.optimizer, scaler), report, error


@pytest.mark.parametrize(
    ("name", "optimizer", "precision", "clip"),
    [
        ("noisy", "adam", "fp32", None),
        ("noisy", "sgd", "bf16", 0.1),
        ("convolutional", "sgd", "fp32", 1.0),
        ("attention", "adamw loop", "fp32", None),
        ("several losses", "adam", "fp32", 0.5),
        ("noisy", "adam", "fp16", 1.0),
    ],
)
def test_memory_that_runs_out_at_any_operator_changes_nothing_but_the_cut(name, optimizer, precision, clip):
    case = Case(name, optimizer, precision, clip)
    counter = FailAt()
    case.run(counter)
    clean = {}
    outcomes = {"same": 0, "damaged": 0}
    step = max(1, counter.count // 60)

    for point in range(1, counter.count + 1, step):
        state, report, error = case.run(FailAt(point))
        if isinstance(error, autoaccum.StateDamagedError):
            outcomes["damaged"] += 1
            continue
        assert error is None, f"operator {point}: {error!r}"
        assert report.oom_events == 1
        if report.micro_batches not in clean:
            clean[report.micro_batches] = case.run(FailAt(), report.micro_batches)[0]
        assert differences(state, clean[report.micro_batches]) == [], f"operator {point}, cut {report.micro_batches}"
        outcomes["same"] += 1

    assert outcomes["same"] > 0.5 * counter.count / step
    assert set(clean) <= {(6, 6), (4, 4, 4)}


def test_error_of_the_users_own_arrives_unchanged_and_leaves_the_state_before_the_window():
    case = Case("noisy", "adam")
    mine = RuntimeError("shapes do not match")
    counter = FailAt()
    case.run(counter)

    for point in range(1, int(counter.count * 0.6), 3):
        state, _, error = case.run(FailAt(point, error=mine))

        assert error is mine
        assert differences(state, case.before) == [], f"operator {point}"


def test_two_faults_in_one_window_are_survived():
    case = Case("noisy", "adam")

    state, report, error = case.run(FailAt(20, 60))

    assert error is None
    assert report.oom_events == 2
    assert differences(state, case.run(FailAt(), report.micro_batches)[0]) == []


def test_one_sample_that_does_not_fit_raises_and_leaves_the_state_before_the_window():
    case = Case("attention", "adam")

    state, _, error = case.run(FailAt(*range(5, 100_000, 5)))

    assert isinstance(error, autoaccum.DoesNotFitError)
    assert "micro_batch=1" in str(error)
    assert "try" in str(error)
    assert differences(state, case.before) == []


def test_a_fault_in_the_first_optimizer_step_takes_back_the_state_it_had_begun_to_make():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    runner = autoaccum.Runner(
        model, OPTIMIZERS["adam"], autoaccum.plan(8, 8), loss=nn.CrossEntropyLoss(), device="cpu", precision="fp32"
    )
    window = torch.randn(8, 4), torch.randint(0, 3, (8,))

    class InOptimizer(FailAt):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if "zeros_like" in str(operator):
                self.count += 1
                if self.count == 3:
                    raise self.error
            return operator(*args, **(kwargs or {}))

    before = state_of(model, runner.optimizer)
    fault = InOptimizer()
    undone = []

    class Watch(autoaccum.Callback):
        def on_oom(self, event, *, step):
            undone.append((event.phase, differences(state_of(model, runner.optimizer), before)))

    runner._callbacks = (Watch(),)
    with fault:
        report = runner.step(window)

    assert undone == [("optimizer", [])]
    assert report.micro_batches == (8,)


def test_interrupt_during_the_update_waits_for_its_end():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 8), loss=nn.CrossEntropyLoss(), device="cpu")
    optimizer.register_step_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    before = model.weight.detach().clone()

    with pytest.raises(KeyboardInterrupt):
        runner.step((torch.randn(8, 4), torch.randint(0, 3, (8,))))

    assert not torch.equal(model.weight, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_interrupt_in_the_forward_pass_leaves_the_state_before_the_window():
    case = Case("noisy", "adam")
    fault = FailAt(15, error=KeyboardInterrupt())

    with pytest.raises(KeyboardInterrupt):
        case.run(fault)

    assert fault.hits == 1


def test_memory_that_runs_out_pins_no_tensor():
    case = Case("noisy", "adam")

    def alive():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    case.run(FailAt())
    before = alive()

    case.run(FailAt(25))

    assert alive() <= before


class InPlace(nn.Module):
    """Normalises its input in place, as a careless transform does; no more than `most` samples fit."""

    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.most = nn.Linear(6, 3), most

    def forward(self, inputs):
        inputs.sub_(0.5).div_(0.25)
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.head(inputs)


def in_place_runner(most):
    model = InPlace(most)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return autoaccum.Runner(
        model, optimizer, autoaccum.plan(12, 12), loss=nn.CrossEntropyLoss(), device="cpu", notices=Notices(silent=True)
    )


def test_model_that_changes_its_input_is_given_copies_once_that_is_seen():
    runner = in_place_runner(12)
    inputs, targets = torch.rand(12, 6), torch.randint(0, 3, (12,))
    runner.step((inputs.clone(), targets))
    runner._step.objective.model.most = 5
    given = inputs.clone()

    report = runner.step((given, targets))

    assert report.micro_batches == (4, 4, 4)
    assert torch.equal(given, inputs)


def test_window_whose_data_the_model_has_changed_is_not_silently_done_again():
    runner = in_place_runner(5)

    with pytest.raises(autoaccum.InvalidInputError, match="changed its input in place"):
        runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))


def test_memory_that_runs_out_while_the_weighting_is_found_out_is_said(capsys):
    class Picky(nn.Linear):
        def forward(self, inputs):
            if len(inputs) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().forward(inputs)

    def plain(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    runner = autoaccum.Runner(Picky(6, 3), None, autoaccum.plan(12, 1), loss=plain, device="cpu")

    report = runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))

    assert report.oom_events == 0
    assert "could not be found out" in capsys.readouterr().err


def test_optimizer_that_fails_with_an_error_of_its_own_after_writing_says_so():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(12, 6), loss=nn.CrossEntropyLoss(), device="cpu")
    mine = ValueError("mine")

    def fail(*_):
        raise mine

    optimizer.register_step_post_hook(fail)

    with pytest.raises(autoaccum.StateDamagedError) as caught:
        runner.step((torch.rand(12, 6), torch.randint(0, 3, (12,))))

    assert caught.value.__cause__ is mine


def test_hooks_on_the_optimizer_do_not_count_trials():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    batch = torch.rand(12, 6), torch.randint(0, 3, (12,))

    autoaccum.find_micro_batch(model, batch, optimizer=optimizer, device="cpu")

    assert calls == []
    optimizer.step()
    assert calls == [1]


def test_plain_function_with_class_weights_is_not_taken_for_a_mean_over_samples(capsys):
    weight = torch.tensor([0.1, 1.0, 1.0])
    targets = torch.zeros(64, dtype=torch.long)
    targets[[5, 9, 20]] = 1
    model = nn.Linear(4, 3)

    def weighted(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, weight=weight)

    runner = autoaccum.Runner(model, None, autoaccum.plan(64, 10), loss=weighted, device="cpu")

    runner.step((torch.randn(64, 4), targets))

    assert "could not be found out" in capsys.readouterr().err
