"""What is said of BatchNorm in a window that is cut, and how its momentum is set right and put back."""

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoaccum
from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._system.notices import Notices
from helpers import classifier

MOMENTUM = 0.1


def layer(**options):
    return nn.BatchNorm1d(3, dtype=torch.float64, **{"momentum": MOMENTUM} | options)


def begun(**options):
    """A layer whose running mean is far from 0, so that it is seen how fast it is forgotten."""
    norm = layer(**options)
    norm.running_mean.copy_(torch.tensor([1.0, -2.0, 30.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.5, 9.0]))
    return norm


def train(norm, batch, sizes, mode="rescale"):
    """Run one window through the layer as a runner does."""
    norms = BatchNorms([norm], mode, Notices(silent=True))
    for part in batch.split(list(sizes)):
        norms.rescale(len(part) / len(batch))
        norm(part)
    norms.put_back()


# --- the momentum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (5, 7), (4, 4, 4), (2, 10), (2,) * 6], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.01, 0.1, 0.9, 1.0])
def test_window_forgets_as_much_as_one_update_with_the_whole_batch(sizes, momentum):
    """Of zeros all that is seen is how much of the old value is left, which is exactly 1 - momentum."""
    norm, batch = begun(momentum=momentum), torch.zeros(12, 3, dtype=torch.float64)
    expected = norm.running_mean * (1 - momentum), norm.running_var * (1 - momentum)

    train(norm, batch, sizes)

    torch.testing.assert_close((norm.running_mean, norm.running_var), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_mean_is_the_whole_batchs_where_the_micro_batches_have_the_same(count):
    part = torch.randn(4, 3, dtype=torch.float64)
    cut, whole, batch = begun(), begun(), part.repeat(count, 1)

    train(cut, batch, [4] * count)
    whole(batch)

    torch.testing.assert_close(cut.running_mean, whole.running_mean, rtol=1e-12, atol=1e-12)


def test_mean_is_a_weighted_mean_of_the_old_one_and_the_micro_batches():
    norm, batch = begun(), torch.randn(12, 3, dtype=torch.float64)
    old, first, second = norm.running_mean.clone(), batch[:6].mean(0), batch[6:].mean(0)
    kept = math.sqrt(1 - MOMENTUM)

    train(norm, batch, (6, 6))

    expected = (1 - MOMENTUM) * old + kept * (1 - kept) * first + (1 - kept) * second
    torch.testing.assert_close(norm.running_mean, expected, rtol=1e-12, atol=1e-12)


def test_mean_is_far_nearer_to_the_whole_batchs_than_with_the_layers_momentum():
    batch = torch.randn(64, 3, dtype=torch.float64)
    expected = begun()
    expected(batch)

    def off(mode):
        norm = begun()
        train(norm, batch, [8] * 8, mode)
        return float((norm.running_mean - expected.running_mean).norm())

    assert off("rescale") < off("keep") / 50


def test_uncut_window_is_run_with_the_layers_momentum_to_the_last_bit():
    norm = layer()

    BatchNorms([norm], "rescale", Notices(silent=True)).rescale(1.0)

    assert norm.momentum == MOMENTUM


@pytest.mark.parametrize(
    "spared",
    [layer(momentum=None), layer(track_running_stats=False), layer().eval()],
    ids=["cumulative", "no running statistics", "evaluation mode"],
)
def test_other_layers_are_left_alone(spared):
    before = spared.momentum
    other = layer()
    norms = BatchNorms([nn.ModuleList([spared, other])], "rescale", Notices(silent=True))

    norms.rescale(0.5)

    assert spared.momentum == before
    assert other.momentum != MOMENTUM


def test_keep_changes_nothing():
    norm = layer()
    norms = BatchNorms([norm], "keep", Notices(silent=True))

    norms.rescale(0.5)

    assert norm.momentum == MOMENTUM


def test_momentum_is_put_back_bitwise_also_after_a_failure_and_twice():
    odd = [layer(momentum=value) for value in (0.1, 0.37, 1 / 3)]
    norms = BatchNorms([nn.ModuleList(odd)], "rescale", Notices(silent=True))

    norms.put_back()
    for share in (0.25, 0.5, 0.25):  # and no put_back after a failure of the third
        norms.rescale(share)
    norms.put_back()
    norms.put_back()

    assert [norm.momentum for norm in odd] == [0.1, 0.37, 1 / 3]


def test_momentum_and_mode_that_the_user_changes_between_windows_count():
    changed, frozen = layer(), layer()
    norms = BatchNorms([nn.ModuleList([changed, frozen])], "rescale", Notices(silent=True))
    norms.rescale(0.5)
    norms.put_back()
    changed.momentum = 0.5
    frozen.eval()

    norms.rescale(0.5)
    used = changed.momentum, frozen.momentum
    norms.put_back()

    assert used == (pytest.approx(1 - math.sqrt(0.5)), MOMENTUM)
    assert (changed.momentum, frozen.momentum) == (0.5, MOMENTUM)


def test_state_dict_in_the_middle_of_a_window_holds_nothing_of_it():
    norm = layer()
    norms = BatchNorms([norm], "rescale", Notices(silent=True))
    names = list(norm.state_dict())

    norms.rescale(0.5)

    assert list(norm.state_dict()) == names


def test_layer_that_two_modules_share_is_rescaled_once():
    norm = layer()
    norms = BatchNorms([nn.Sequential(norm), nn.Sequential(norm)], "rescale", Notices(silent=True))

    norms.rescale(0.5)

    assert norm.momentum == pytest.approx(1 - math.sqrt(1 - MOMENTUM))


def test_checkpointed_forward_pass_finds_the_same_momentum_the_second_time():
    norm, batch = begun(), torch.zeros(12, 3, dtype=torch.float64, requires_grad=True)
    norms = BatchNorms([norm], "rescale", Notices(silent=True))
    before = norm.running_mean.clone()

    norms.rescale(0.5)
    checkpoint(norm, batch[:6], use_reentrant=False).sum().backward()
    norms.rescale(0.5)
    checkpoint(norm, batch[6:], use_reentrant=False).sum().backward()
    norms.put_back()

    # Moved twice by each, as in any loop: torch's checkpointing does not put statistics back.
    torch.testing.assert_close(norm.running_mean, before * (1 - MOMENTUM) ** 2, rtol=1e-12, atol=0)


def test_loss_over_the_window_moves_statistics_by_the_same_momentum():
    model = nn.Sequential(nn.Linear(3, 3).double(), begun())
    batch = torch.randn(12, 3, dtype=torch.float64), torch.zeros(12)
    expected = begun()
    train(expected, model[0](batch[0]), (6, 6))
    runner = autoaccum.Runner(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        autoaccum.plan(12, 6),
        loss=lambda outputs, targets: outputs.square().mean(),
        loss_scope="window",
        batchnorm="rescale",
        device="cpu",
        notices=Notices(silent=True),
    )

    runner.step(batch)

    torch.testing.assert_close(model[1].running_mean, expected.running_mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(model[1].running_var, expected.running_var, rtol=1e-12, atol=0)


# --- what is said ----------------------------------------------------------------------------------------------------


def said(modules, sizes, mode="keep"):
    notices = Notices(silent=True)
    norms = BatchNorms(modules, mode, notices)
    for _ in range(3):
        norms.announce(sizes)
    return notices.texts


def test_number_of_layers_what_differs_and_what_to_do_are_said_once(capsys):
    model = nn.Sequential(layer(), layer(), layer().eval())
    norms = BatchNorms([model], "keep", Notices())

    norms.announce((5, 7))
    norms.announce((6, 6))

    (line,) = capsys.readouterr().err.splitlines()
    assert "2 layers in training mode normalise by each micro-batch's own mean and variance" in line
    assert "5 to 7 samples" in line
    for remedy in ("batchnorm='rescale'", "GroupNorm", "LayerNorm", "frozen"):
        assert remedy in line


def test_one_layer_is_told_as_one():
    (text,) = said([layer()], (2, 2))

    assert text.startswith("BatchNorm: 1 layer in training mode normalises by each micro-batch's own")


def test_rescaling_is_not_proposed_where_it_is_done():
    (line,) = said([layer()], (6, 6), "rescale")

    assert "1 layer in training mode" in line
    assert "sets right" not in line
    assert "as far as with one batch (batchnorm='rescale')" in line
    assert "GroupNorm" in line


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LazyBatchNorm1d])
def test_every_kind_of_batchnorm_counts(kind):
    norm = kind() if kind is nn.LazyBatchNorm1d else kind(3)

    assert len(said([norm], (6, 6))) == 1


def test_layers_without_running_statistics_count_in_evaluation_mode_too():
    assert len(said([layer(track_running_stats=False).eval()], (6, 6))) == 1


@pytest.mark.parametrize(
    ("modules", "sizes"),
    [
        ([classifier()], (12,)),
        ([classifier().eval()], (6, 6)),
        ([nn.Sequential(nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.InstanceNorm1d(3))], (6, 6)),
    ],
    ids=["uncut", "evaluation mode", "other layers"],
)
def test_nothing_is_said_where_nothing_differs(modules, sizes):
    assert said(modules, sizes) == ()


def test_first_cut_window_is_the_one_that_it_is_said_of():
    notices = Notices(silent=True)
    model = layer().eval()
    norms = BatchNorms([model], "keep", notices)
    norms.announce((12,))
    norms.announce((6, 6))
    assert notices.texts == ()

    model.train()
    norms.announce((6, 6))

    assert len(notices.texts) == 1
