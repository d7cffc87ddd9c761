"""Reports and searches of steps with `weights=`: the bytes are those of real steps, and nothing changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.errors import InvalidInputError
from helpers import CPU, assert_bitwise, needs_grad_dtype, state_of

pytestmark = needs_grad_dtype

WEIGHTS = ("bf16", "bf16-master")
SAMPLES = 16
BATCH = torch.randn(SAMPLES, 128), torch.randint(8, (SAMPLES,))
WAY = {"loss": functional.cross_entropy}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 512), nn.LayerNorm(512), nn.GELU(), nn.Linear(512, 512), nn.Linear(512, 8))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def of_8_bits(parameters):
    pytest.importorskip("torchao.optim", reason="torchao is not installed")
    return autoaccum.adamw8bit(parameters)


def held_by_a_real_step(weights, optimizer):
    """Return the bytes of weights, gradients in the step, and the optimizer's state after it."""
    model = network()
    runner = autoaccum.Runner(
        model,
        optimizer,
        autoaccum.plan(SAMPLES, SAMPLES),
        device=CPU,
        weights=weights,
        **WAY,
    )
    gradients = []
    runner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: gradients.append(sum(one.grad.nbytes for one in optimizer.param_groups[0]["params"]))
    )
    runner.step(BATCH)
    state = [value for values in runner.optimizer.state.values() for value in values.values()]
    return sum(one.nbytes for one in model.parameters()), gradients[0], sum(one.nbytes for one in state)


@pytest.mark.card_fakes
@pytest.mark.parametrize("card", [{"device_memory": "64GiB"}, {"gpus": "h100-80gb"}], ids=["any card", "h100"])
@pytest.mark.parametrize(
    "optimizer",
    [adamw, pytest.param(momentum, marks=pytest.mark.sweep), pytest.param(of_8_bits, marks=pytest.mark.sweep)],
)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_predicted_bytes_are_those_of_a_real_step(weights, optimizer, card):
    report = autoaccum.preflight(
        network, BATCH, SAMPLES, optimizer=optimizer, weights=weights, measure=False, **card, **WAY
    )

    footprint = report.predicted[0].estimate.footprints[-1]

    found = footprint.parameters_bytes, footprint.gradients_bytes, footprint.optimizer_bytes
    assert found == pytest.approx(held_by_a_real_step(weights, optimizer), abs=64)  # counts of steps


@pytest.mark.parametrize("weights", WEIGHTS)
def test_measured_report_counts_them_too_and_leaves_everything_bit_for_bit(weights):
    model = network()
    optimizer = adamw(model.parameters())
    functional.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    before, gradients = state_of(model), [one.grad.clone() for one in model.parameters()]

    report = autoaccum.preflight(model, BATCH, 32, optimizer=optimizer, weights=weights, device="cpu", **WAY)

    footprint = report.measured.footprint
    found = footprint.parameters_bytes, footprint.gradients_bytes, footprint.optimizer_bytes
    assert found == pytest.approx(held_by_a_real_step(weights, adamw), abs=64)
    assert report.measured.precision == "bf16"
    assert any(note.startswith(f"weights={weights!r}") for note in report.notes)
    assert_bitwise(state_of(model), before)
    assert_bitwise([one.grad for one in model.parameters()], gradients)
    assert not optimizer.state
    assert optimizer.param_groups[0].keys() == adamw(network().parameters()).param_groups[0].keys()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_search_leaves_everything_bit_for_bit(weights):
    model = network()
    optimizer = adamw(model.parameters())
    functional.cross_entropy(model(BATCH[0]), BATCH[1]).backward()
    before, gradients = state_of(model), [one.grad.clone() for one in model.parameters()]

    found = autoaccum.find_micro_batch(model, BATCH, optimizer=optimizer, weights=weights, device="cpu", **WAY)

    assert found.micro_batch == SAMPLES
    assert_bitwise(state_of(model), before)
    assert_bitwise([one.grad for one in model.parameters()], gradients)
    assert not optimizer.state
    assert {one.grad_dtype for one in model.parameters()} == {torch.float32}


@pytest.mark.card_fakes
@pytest.mark.parametrize("weights", WEIGHTS)
def test_remedies_advise_no_weights_that_are_in_bf16_already(weights):
    report = autoaccum.preflight(
        network, BATCH, 2**17, optimizer=adamw, weights=weights, device_memory="750MiB", measure=False, **WAY
    )

    names = [remedy.name for remedy in report.remedies]
    assert names
    assert not any("bf16" in name for name in names)
    assert any("8-bit" in name for name in names) == (weights == "bf16")


def test_8_bits_are_refused_with_shards_too():
    with pytest.raises(InvalidInputError, match=r"'adamw8bit' does not go with fully_shard.*optimizer='adamw'"):
        autoaccum.preflight(
            network, BATCH, 32, optimizer=of_8_bits, ranks=2, fsdp=True, device_memory="1GiB", measure=False, **WAY
        )


def test_sharded_weights_are_refused_with_the_way_out():
    with pytest.raises(InvalidInputError, match=r"weights='bf16' does not go with fully_shard.*leave one of"):
        autoaccum.preflight(
            network, BATCH, 32, weights="bf16", ranks=2, fsdp=True, device_memory="1GiB", measure=False, **WAY
        )
