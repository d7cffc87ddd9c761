"""A runner's window begins from no gradients, whoever left some: another runner, a backward pass, a failure."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import autoaccum
from support.faults.modes import FailAt
from support.losses.gradients import distance
from support.models.small import assert_bitwise, classifier, labelled, runner_of

SAMPLES, LATENT, WIDTH = 12, 3, 5


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def two_networks():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(LATENT, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()
    discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return generator, discriminator


def drawn(windows):
    torch.manual_seed(1)
    options = {"dtype": torch.float64}
    return [(torch.randn(SAMPLES, LATENT, **options), torch.randn(SAMPLES, WIDTH, **options)) for _ in range(windows)]


def losses_of(generator, discriminator):
    def of_discriminator(_, batch):
        real, made = discriminator(batch[1]), discriminator(generator(batch[0]))  # without detach()
        return cross_entropy(real, torch.ones_like(real)) + cross_entropy(made, torch.zeros_like(made))

    def of_generator(_, batch):
        made = discriminator(generator(batch[0]))
        return cross_entropy(made, torch.ones_like(made))

    return of_discriminator, of_generator


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def by_hand(windows, clip):
    generator, discriminator = two_networks()
    of_discriminator, of_generator = losses_of(generator, discriminator)
    pairs = [(discriminator, optimizer_of(discriminator), of_discriminator)]
    pairs += [(generator, optimizer_of(generator), of_generator)]
    for window in windows:
        for model, optimizer, loss in pairs:
            optimizer.zero_grad()
            loss(None, window).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return [*generator.parameters(), *discriminator.parameters()]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("shared", [False, True], ids=["two models", "one model"])
def test_two_runners_over_a_gan_train_as_the_loop_written_by_hand(shared, clip):
    generator, discriminator = two_networks()
    of_discriminator, of_generator = losses_of(generator, discriminator)
    whole = nn.ModuleList([generator, discriminator])
    plan, options = autoaccum.plan(SAMPLES, 5), {"device": "cpu", "clip_grad_norm": clip}
    one, other = (
        autoaccum.Runner(whole if shared else model, optimizer_of(model), plan, loss=[loss], **options)
        for model, loss in ((discriminator, of_discriminator), (generator, of_generator))
    )

    for window in drawn(4):
        one.step(window)
        other.step(window)

    found = flat([*generator.parameters(), *discriminator.parameters()])
    assert distance(found, flat(by_hand(drawn(4), clip))) < 1e-12


def two_windows(leave, *, point=None):
    """Train two windows in one cut, with something left in `.grad` before the second, in which memory may run out."""
    torch.manual_seed(0)
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = runner_of(model, optimizer, 12, 6, loss_reduction="mean")
    for number, window in enumerate((labelled(12), labelled(12))):
        if number == 1:
            leave(model, runner)
            runner.plan = autoaccum.Plan(12, (6, 6))
        with FailAt(*([point] if point is not None and number == 1 else [])):
            report = runner.step(window)
        runner.plan = autoaccum.Plan(12, (6, 6))
    return model.state_dict(), report


def nothing(model, runner):
    pass


def much(model, runner):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e4)


def backward_pass(model, runner):
    random = torch.get_rng_state()
    statistics = copy.deepcopy(model.state_dict())
    model(labelled(5)[0]).square().sum().backward()
    model.load_state_dict(statistics)
    torch.set_rng_state(random)


def failed_window(model, runner):
    targets = torch.arange(6) % 3
    good, bad = ((torch.ones(6, width).double(), targets) for width in (4, 2))
    with pytest.raises(RuntimeError):  # after the backward pass of its first micro-batch
        runner.step(autoaccum.Window([good, bad]))


@pytest.mark.parametrize("leave", [much, backward_pass, failed_window])
def test_window_is_the_same_whatever_was_left_before_it(leave):
    torch.manual_seed(7)
    expected, *_ = two_windows(nothing)
    torch.manual_seed(7)
    found, *_ = two_windows(leave)

    assert_bitwise(found, expected)


@pytest.mark.parametrize("point", [None, 1, 40, 75])
def test_what_was_left_is_dropped_with_memory_to_spare_and_without(point, capsys):
    def run(leave):
        torch.manual_seed(7)
        state, report = two_windows(leave, point=point)
        return state, report.micro_batches, report.oom_events, capsys.readouterr().err

    (expected, cut, failures, quiet), (found, same_cut, same_failures, said) = run(nothing), run(much)

    assert (same_cut, same_failures) == (cut, failures)
    assert failures == (point is not None)
    assert_bitwise(found, expected)
    assert [text.count("gradients that were there") for text in (quiet, said)] == [0, 1]


def test_gradients_on_models_that_are_not_its_own_are_left_as_a_loop_by_hand_leaves_them():
    generator, discriminator = two_networks()
    of_generator = losses_of(generator, discriminator)[1]
    (window,) = drawn(1)
    expected = torch.autograd.grad(of_generator(None, window), list(discriminator.parameters()))
    runner = runner_of(generator, optimizer_of(generator), SAMPLES, 5, loss=[of_generator])

    runner.step(window)

    assert distance(flat(parameter.grad for parameter in discriminator.parameters()), flat(expected)) < 1e-12
    assert all(parameter.grad is None for parameter in generator.parameters())


def test_norm_is_that_of_what_the_optimizer_holds():
    torch.manual_seed(0)
    model, window = classifier(), labelled(12)
    model[3].p = 0.0
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model[4].parameters(), lr=1.0)
    nn.functional.cross_entropy(expected(window[0]), window[1]).backward()
    norm = nn.utils.clip_grad_norm_(expected[4].parameters(), 1e-3)

    report = runner_of(model, optimizer, 12, 12, clip_grad_norm=1e-3).step(window)

    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-12)
    moved = (expected[4].weight - model[4].weight).detach()
    assert torch.allclose(moved, expected[4].weight.grad, rtol=1e-9)


def test_gradient_is_added_to_an_expanded_one():
    model, batch = nn.Linear(3, 2), (torch.randn(6, 3), torch.randint(0, 2, (6,)))
    accumulator = autoaccum.Accumulator(model, loss=nn.functional.cross_entropy, micro_batch=2)
    accumulator.backward(batch)
    expected = [parameter.grad + 1.0 for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones(1).expand(parameter.shape)
    accumulator.backward(batch)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
