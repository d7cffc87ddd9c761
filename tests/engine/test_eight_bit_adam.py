"""AdamW with moments of 8 bits: what it keeps, that it fails whole, and what is said where no package has it."""

import importlib
import io

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._engine.optimizer_copy import OptimizerCopy
from fault_cases import Case
from fault_sweep import Budget, Sweep
from helpers import CPU, assert_bitwise

IN, HIDDEN, CLASSES = 64, 128, 10


@pytest.fixture(scope="module", autouse=True)
def _torchao():
    pytest.importorskip("torchao.optim", reason="torchao is not installed")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def batches(count, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, IN, generator=generator), torch.randint(CLASSES, (size,), generator=generator))
        for _ in range(count)
    ]


def train(model, optimizer, data):
    for inputs, targets in data:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def test_moments_take_a_byte_and_a_share_of_a_scale_each():
    model = network()
    optimizer = autoaccum.adamw8bit(model.parameters())

    train(model, optimizer, batches(1))

    state = optimizer.state[model[0].weight]
    kept = sum(value.numel() * value.element_size() for name, value in state.items() if name != "step")
    assert kept == 2 * (IN * HIDDEN + 4 * IN * HIDDEN // 256)
    assert optimizer.state[model[0].bias]["exp_avg"].dtype is torch.float32


def test_updates_are_those_of_torchao_up_to_rounding():
    optim = importlib.import_module("torchao.optim")
    mine, theirs = network(), network()
    eager = torch.compiler.set_stance("force_eager")  # torchao compiles its step, which takes a minute

    train(mine, autoaccum.adamw8bit(mine.parameters(), lr=0.01), batches(5))
    with eager:
        train(theirs, optim.AdamW8bit(theirs.parameters(), lr=0.01), batches(5))

    torch.testing.assert_close(list(mine.parameters()), list(theirs.parameters()), rtol=0, atol=1e-6)


def test_slices_of_a_parameter_are_updated_as_the_whole(monkeypatch):
    whole, cut = network(), network()

    train(whole, autoaccum.adamw8bit(whole.parameters()), batches(3))
    monkeypatch.setattr("autoaccum._engine.eight_bit_adam._AT_ONCE", {"cpu": 1024})
    train(cut, autoaccum.adamw8bit(cut.parameters()), batches(3))

    assert_bitwise(dict(whole.named_parameters()), dict(cut.named_parameters()))


def test_parameter_in_another_memory_format_is_updated_in_place():
    layer, other = nn.Conv2d(16, 32, 3), nn.Conv2d(16, 32, 3)
    other.load_state_dict(layer.state_dict())
    other.to(memory_format=torch.channels_last)
    images = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))

    for each in (layer, other):
        optimizer = autoaccum.adamw8bit(each.parameters())
        each.weight.grad = torch.ones_like(each.weight) * 0.5
        optimizer.step()

    assert other.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(images), other(images))


def test_state_survives_a_file_that_is_loaded_without_running_code():
    model, resumed = network(), network()
    optimizer, loaded = autoaccum.adamw8bit(model.parameters()), autoaccum.adamw8bit(resumed.parameters())
    first, second = batches(4)[:2], batches(4)[2:]
    train(model, optimizer, first)
    file = io.BytesIO()

    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    content = torch.load(file, weights_only=True)
    resumed.load_state_dict(content["model"])
    loaded.load_state_dict(content["optimizer"])
    for each, steps in ((model, optimizer), (resumed, loaded)):
        train(each, steps, second)

    assert_bitwise(dict(model.named_parameters()), dict(resumed.named_parameters()))


def test_snapshot_of_torchaos_own_states_keeps_their_values():
    """torchao's `to` of a state shares memory with it."""
    kind = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
    parameter = nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.SGD([parameter])
    state = kind.zeros(parameter.shape, device=CPU, dtype=torch.float32)
    state.copy_(torch.linspace(-1, 1, 4096))
    optimizer.state[parameter]["exp_avg"] = state
    before = state.codes.clone(), state.scale.clone()

    snapshot = OptimizerCopy(optimizer)
    state.copy_(torch.ones(4096))
    snapshot.undo()

    assert torch.equal(optimizer.state[parameter]["exp_avg"].codes, before[0])
    assert torch.equal(optimizer.state[parameter]["exp_avg"].scale, before[1])


def test_fault_at_any_operator_changes_nothing_but_the_cut():
    """Its model has moments of both kinds, and its step is taken in several slices."""
    case = Case("wide layers", "fp32", "adamw8bit", clip=0.5)

    tally = Sweep(case).run(Budget(memory=6, first=6, troubled=2, twice=1, smallest=1, errors=2, interrupts=2, lines=2))

    assert tally.mismatches == []
    assert tally.survived > 8
