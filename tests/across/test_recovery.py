"""What a failure costs: what its window has done at the most, and it is told; sizes come back after the trouble."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autoaccum
from support.faults.modes import differences, state_of
from support.faults.places import Fault, lack, passed_back
from support.models.small import runner_of
from support.ranks import losses, training
from support.ranks.sharded import Greedy

SAMPLES = 24
# Within so many windows sizes have grown back.
LATER = 64


class Failing(nn.Module):
    """Runs out of memory in the n-th forward or backward pass of training, counted from when it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.arm()

    def arm(self, *, forward=0, backward=0):
        self.ahead, self.back = Fault(forward - 1), Fault(backward - 1)

    def forward(self, inputs):
        if not self.training:  # a few samples are compared in evaluation mode
            return self.body(inputs)
        self.ahead()
        # Behind the last layer on the way back, whose gradients have arrived by then.
        return self.body[3](passed_back(self.body[:3](inputs), self.back))


def made(plan=None, **options):
    model = Failing()
    runner = autoaccum.Runner(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        plan or autoaccum.plan(SAMPLES, 6),
        loss=nn.CrossEntropyLoss(),
        loss_reduction="mean",  # no sample runs twice for a check
        device="cpu",
        **options,
    )
    return model, runner


def window(seed=1):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, 6, generator=chance), torch.randint(0, 3, (SAMPLES,), generator=chance)


def assert_same_as_without_a_fault(model, runner, reports):
    """Run the same windows with the cuts that were reported, without a fault."""
    clean, other = made()
    torch.manual_seed(5)
    for seed, report in enumerate(reports):
        other.plan = autoaccum.Plan(SAMPLES, report.micro_batches)
        other.step(window(seed))
    assert differences(state_of(model, runner.optimizer), state_of(clean, other.optimizer)) == []


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_failure_in_a_pass_costs_what_its_window_has_done_at_the_most(where, number):
    model, runner = made()
    torch.manual_seed(5)
    first = runner.step(window(0))
    model.arm(**{where: number})

    report = runner.step(window(1))

    assert (report.oom_events, runner.plan.micro_batch) == (1, 5)
    assert 6 <= report.recomputed_samples <= 6 * number
    assert_same_as_without_a_fault(model, runner, [first, report])


def test_rest_that_would_leave_a_sample_alone_has_the_window_begin_again():
    model, runner = made(plan=autoaccum.plan(SAMPLES, 3))
    torch.manual_seed(5)
    first = runner.step(window(0))
    model.arm(forward=8)  # the rest of 3 would be cut into 2 and 1, which BatchNorm refuses

    report = runner.step(window(1))

    assert report.micro_batches == (2,) * 12
    assert report.recomputed_samples == SAMPLES
    assert_same_as_without_a_fault(model, runner, [first, report])


def test_hooks_of_the_user_on_arriving_gradients_see_the_sum_so_far():
    def gradients_seen(runner, model):
        seen = []
        weight = model.body[3].weight
        hook = weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
        runner.step(window(2))
        hook.remove()
        return seen

    (troubled, runner), (clean, other) = made(), made(plan=autoaccum.plan(SAMPLES, 5))
    torch.manual_seed(5)
    runner.step(window(0))
    troubled.arm(forward=1)
    runner.step(window(1))
    clean.load_state_dict(troubled.state_dict())
    state = torch.get_rng_state()
    seen = gradients_seen(runner, troubled)
    torch.set_rng_state(state)

    assert all(torch.equal(*pair) for pair in zip(seen, gradients_seen(other, clean), strict=True))


def test_sizes_grow_back_once_the_trouble_is_over_and_all_are_told(capsys):
    told = []

    class Note(autoaccum.Callback):
        def on_plan(self, plan, *, step, probe):
            told.append(plan)

    model, runner = made(callbacks=[Note()])
    runner.step(window(0))
    planned = runner.plan
    model.arm(forward=1)
    runner.step(window(1))

    for _ in range(LATER):
        report = runner.step(window(2))

    assert [plan.micro_batch for plan in told] == [5, 6]
    assert runner.plan is planned
    assert report.micro_batches == planned.micro_batches
    said = capsys.readouterr().err
    assert "out of memory in step 2, forward of 6 samples: CUDA out of memory." in said
    assert "at most 5 samples at once from step 2 on" in said
    assert re.search(r"at most 6 samples at once from step \d+ on", said)


def test_plan_that_had_shrunk_grows_back_where_training_goes_on_from_a_checkpoint(tmp_path):
    def fit(steps, **where):
        model = Failing()
        model.arm(**where)
        windows = [window(seed) for seed in range(LATER + 2)]
        options = {"device": "cpu", "micro_batch": 6, "progress": False, "checkpoint": tmp_path}
        return autoaccum.fit(model, windows, SAMPLES, loss=nn.CrossEntropyLoss(), max_steps=steps, **options)

    shrunk = fit(2, forward=6)
    result = fit(LATER + 2)

    assert (shrunk.plan.micro_batch, result.resumed_from) == (5, 2)
    assert max(result.history[0].micro_batches) == 5
    assert result.plan.micro_batch == 6


class Momentum(nn.Module):
    """A teacher that moves in every forward pass, by noise from a generator of the model's own."""

    def __init__(self, begins):
        super().__init__()
        self.waits = begins
        self.student = Failing()
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.noise = torch.Generator().manual_seed(3)

    def arm(self, **where):
        self.student.arm(**where)

    def forward(self, inputs):
        self.waits -= 1
        if self.waits < 0:
            with torch.no_grad():
                self.teacher.weight.mul_(0.9).add_(torch.randn(3, 6, generator=self.noise), alpha=0.1)
        return self.student(inputs) + self.teacher(inputs)


def momentum_runner(begins=0):
    torch.manual_seed(0)
    model = Momentum(begins)
    optimizer = torch.optim.Adam(model.student.parameters(), lr=0.01)
    options = {"loss": nn.CrossEntropyLoss(), "device": "cpu"}
    return model, autoaccum.Runner(model, optimizer, autoaccum.plan(SAMPLES, 6), **options)


def test_teacher_that_begins_to_move_later_is_seen_then():
    (model, runner), (clean, other) = momentum_runner(6), momentum_runner(6)
    for index in range(3):
        if index == 2:
            model.arm(forward=3)
        torch.manual_seed(index)
        report = runner.step(window(index))
        other.plan = autoaccum.Plan(SAMPLES, report.micro_batches)
        torch.manual_seed(index)
        other.step(window(index))

    assert report.oom_events == 1
    assert differences(state_of(model, runner.optimizer), state_of(clean, other.optimizer)) == []


@pytest.mark.parametrize("window_number", [1, 2])
@pytest.mark.parametrize("where", ["loss", "optimizer"])
def test_error_of_the_users_own_tells_of_parameters_that_the_model_wrote_and_that_were_not_put_back(
    where, window_number
):
    model, runner = momentum_runner()
    for index in range(window_number - 1):
        runner.step(window(index))
    before = state_of(model, runner.optimizer)
    mine = LookupError("the user's own")

    def fail(*_):
        raise mine

    register = model.student.register_forward_hook if where == "loss" else runner.optimizer.register_step_pre_hook
    register(fail)
    with pytest.raises(LookupError) as caught:
        runner.step(window(0))

    assert caught.value is mine
    lost = differences(state_of(model, runner.optimizer), before)
    told = ["had written teacher.weight" in note for note in getattr(mine, "__notes__", ())]
    assert ["teacher.weight" in each for each in lost] == told == [True] * len(lost)
    assert window_number == 1 or not lost


class Queue(nn.Module):
    """MoCo in small: keys from an encoder that follows the other one in every forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.keys = nn.Linear(6, 4).double(), nn.Linear(6, 4).double().requires_grad_(False)

    def forward(self, inputs):
        with torch.no_grad():
            self.keys.weight.mul_(0.5).add_(self.encoder.weight, alpha=0.5)
        return self.encoder(inputs), self.keys(inputs)


def test_momentum_encoder_moves_once_a_micro_batch_also_where_the_loss_is_over_the_window():
    def contrast(outputs, _):
        return nn.functional.cross_entropy(outputs[0] @ outputs[1].T, torch.arange(len(outputs[0])))

    model = Queue()
    expected = model.keys.weight.detach().clone()
    for _ in range(4):
        expected = 0.5 * expected + 0.5 * model.encoder.weight.detach()
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
    runner = runner_of(model, optimizer, SAMPLES, 6, loss=contrast, loss_scope="window")

    runner.step((window(0)[0].double(), window(0)[1]))

    torch.testing.assert_close(model.keys.weight, expected)


def test_expanded_buffers_go_back_too():
    model = Failing()
    model.register_buffer("shape", torch.ones(1, 4).expand(3, 4))
    runner = runner_of(model, samples=SAMPLES, micro_batch=6, loss_reduction="mean")
    model.arm(forward=2)

    assert runner.step(window(0)).oom_events == 1


def test_leftover_sample_that_fails_once_does_not_end_a_run_in_which_more_have_fitted():
    torch.manual_seed(0)
    model = Failing()
    loss = {"loss": nn.CrossEntropyLoss(), "loss_reduction": "mean"}
    runner = autoaccum.Runner(model, None, autoaccum.Plan(SAMPLES, (SAMPLES - 1, 1)), **loss)
    model.arm(forward=2)

    report = runner.step(window(0))

    assert report.oom_events == 1
    assert sum(report.micro_batches) == SAMPLES
    assert runner.plan.micro_batch < SAMPLES - 1


def test_memory_that_runs_out_within_cross_entropy_makes_micro_batches_smaller(monkeypatch):
    compute = nn.functional.cross_entropy

    def lacking(outputs, targets, **options):
        if len(outputs) > 6:
            raise lack()
        return compute(outputs, targets, **options)

    runner = runner_of(nn.Linear(6, 3), samples=SAMPLES, micro_batch=SAMPLES, loss_reduction="mean")
    monkeypatch.setattr(nn.functional, "cross_entropy", lacking)

    assert runner.step(window(0)).micro_batches == (6,) * 4


@pytest.mark.parametrize("micro_batch", ["auto", 6])
@pytest.mark.parametrize("most", [1, 2, 5])
def test_memory_that_runs_out_where_weights_of_pairs_are_counted_makes_micro_batches_smaller(most, micro_batch):
    whole = with_pairs(training.net(), micro_batch=12)
    model = training.net()
    model.insert(2, Greedy(most))

    found = with_pairs(model, micro_batch=micro_batch)

    assert max(max(report.micro_batches) for report in found.history) <= most
    assert [report.loss for report in found.history] == pytest.approx([report.loss for report in whole.history])


def with_pairs(model, **arguments):
    """Train with real failures of the allocator; pairs weigh micro-batches by what all of them count."""
    return autoaccum.fit(
        model,
        DataLoader(training.texts(48), batch_size=12),
        12,
        loss=losses.two_pairs,
        optimizer=training.sgd,
        device="cpu",
        progress=False,
        **arguments,
    )


def few(samples):
    return tuple(part[:samples] for part in window())


def test_sample_that_fitted_before_may_fail_twice_in_a_row():
    model, fails = nn.Linear(6, 3), Fault()
    model.register_forward_pre_hook(fails)
    runner = runner_of(model, micro_batch=1)
    for _ in range(5):  # the sixth makes no checks, so that each call is a sample's
        runner.step(few(8))
    fails.arm(2, 5, 8)  # the third sample, each time the window begins again

    report = runner.step(few(8))

    assert (fails.hits, report.oom_events) == (3, 3)


def test_sample_of_an_evaluation_may_fail_twice_in_a_row():
    model, fails = nn.Linear(6, 3), Fault()
    runner = runner_of(model)
    expected = runner.evaluate([few(2)])
    model.register_forward_pre_hook(fails)
    fails.arm(0, 1, 2)  # both samples at once, then the first alone

    found = runner.evaluate([few(2)])

    assert fails.hits == 3
    assert found == pytest.approx(expected, rel=1e-6)
