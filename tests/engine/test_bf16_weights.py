"""Weights in bf16: gradients are added and updates are made in float32, and rounding favours no side."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._engine import bf16_weights
from autoaccum._engine.bf16_weights import MASTER, round_stochastically
from autoaccum._system.notices import Notices
from fault_cases import Case
from fault_sweep import Budget, Sweep
from faults import FailAt
from helpers import CPU, a_few_of, assert_bitwise, needs_grad_dtype

pytestmark = needs_grad_dtype

IN, HIDDEN, CLASSES, SAMPLES = 12, 32, 5, 24


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES))


def batch(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SAMPLES, IN, generator=generator), torch.randint(CLASSES, (SAMPLES,), generator=generator)


def runner_of(model, weights, optimizer="adamw", size=1, **options):
    return autoaccum.Runner(
        model,
        optimizer,
        autoaccum.plan(SAMPLES, size),
        loss=functional.cross_entropy,
        device=CPU,
        weights=weights,
        notices=Notices(silent=True),
        **options,
    )


def gradients_seen(runner):
    """Return a list that receives the gradients of each step."""
    seen = []
    runner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append([one.grad.clone() for one in optimizer.param_groups[0]["params"]])
    )
    return seen


def drawn_generator(seed=0):
    return torch.Generator().manual_seed(seed)


# --- rounding ---------------------------------------------------------------------------------------------------------


def test_expected_value_of_rounding_is_the_number():
    number, draws = 1.0 + 3 / 1024, 200_000  # 3/8 of the way between two bf16 numbers
    rounded = torch.empty(draws, dtype=torch.bfloat16)

    round_stochastically(torch.full((draws,), number), rounded, drawn_generator())

    low, high = 1.0, 1.0 + 1 / 128
    share = (rounded.float() == high).double().mean().item()
    assert set(rounded.float().tolist()) == {low, high}
    assert abs(share - 3 / 8) < 4 * (3 / 8 * 5 / 8 / draws) ** 0.5


def test_negative_numbers_are_rounded_as_their_opposites():
    numbers = torch.randn(1000, generator=drawn_generator(2))
    rounded = [torch.empty(1000, dtype=torch.bfloat16) for _ in range(2)]

    for sign, into in zip((1, -1), rounded, strict=True):
        round_stochastically(sign * numbers, into, drawn_generator())

    assert torch.equal(rounded[0], -rounded[1])


@pytest.mark.parametrize("number", [0.0, -0.0, 1.5, -3.0, float("inf"), float("-inf"), 2.0**-130])
def test_number_that_bf16_has_stays(number):
    numbers = torch.full((1000,), number)
    rounded = torch.empty(1000, dtype=torch.bfloat16)

    round_stochastically(numbers.clone(), rounded, drawn_generator())

    assert_bitwise(rounded.float(), numbers)


def test_not_a_number_stays_none():
    rounded = torch.zeros(1000, dtype=torch.bfloat16)

    round_stochastically(torch.full((1000,), float("nan")), rounded, drawn_generator())

    assert rounded.isnan().all()


def of_bits(bits):
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    "numbers",
    [
        of_bits(torch.randint(-(2**31), 2**31, (100_000,), generator=drawn_generator())),
        of_bits((torch.arange(-(2**15), 2**15) << 16) | 2**15),  # as near to one bf16 number as to another
        torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last),
    ],
    ids=["any", "between two", "channels last"],
)
def test_rounding_to_the_nearest_can_be_undone_bit_for_bit(numbers):
    numbers = torch.where(numbers.isnan(), torch.ones_like(numbers), numbers)

    narrow, lost = bf16_weights.rounded(numbers)

    assert_bitwise(bf16_weights.unrounded(narrow, lost), numbers)
    off, least = (each.double() - numbers.double() for each in (narrow, numbers.bfloat16()))
    is_finite = numbers.bfloat16().isfinite()
    assert torch.equal(off[is_finite].abs(), least[is_finite].abs())


def test_number_that_is_none_stays_none_when_rounding_is_undone():
    nothing = of_bits(torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1]))

    narrow, lost = bf16_weights.rounded(nothing)

    assert narrow.isnan().all()
    assert bf16_weights.unrounded(narrow, lost).isnan().all()


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", bf16_weights.WEIGHTS)
def test_gradient_of_a_window_is_the_float32_sum_of_its_micro_batches_gradients(weights):
    model, (inputs, targets) = network(), batch()
    runner = runner_of(model, weights)
    seen = gradients_seen(runner)
    sums = [torch.zeros(one.shape) for one in model.parameters()]
    for sample, target in zip(inputs.split(1), targets.split(1), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(sample), target)
        for total, gradient in zip(sums, torch.autograd.grad(loss / SAMPLES, [*model.parameters()]), strict=True):
            total.add_(gradient)

    runner.step((inputs, targets))

    assert_bitwise(seen[0], sums)


def test_cut_moves_the_gradient_by_less_than_one_rounding_of_its_parts_to_bf16():
    """The claim of docs/memory.md: digits are lost in each micro-batch's gradient once, and not in their sum."""
    inputs, targets = batch()
    exact = network().double()
    for parameter in exact.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.bfloat16().double()
    functional.cross_entropy(exact(inputs.double()), targets).backward()
    off = {}

    for size in (SAMPLES, 1):
        model = network()
        runner = runner_of(model, "bf16-master", size=size)
        seen = gradients_seen(runner)
        runner.step((inputs, targets))
        errors = [
            (found - one.grad).norm() / one.grad.norm() for found, one in zip(seen[0], exact.parameters(), strict=True)
        ]
        off[size] = max(errors).item()

    assert off[1] < 2**-6
    assert off[1] < 2 * off[SAMPLES]


# --- updates ----------------------------------------------------------------------------------------------------------


def by_hand(model, data, make):
    """Train with a master copy, written out; return the masters."""
    masters = [nn.Parameter(one.detach().clone()) for one in model.parameters()]
    optimizer = make(masters)
    for one in model.parameters():
        if one.dim() > 1:
            one.data = one.data.bfloat16()
    for inputs, targets in data:
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(inputs), targets)
        for master, gradient in zip(masters, torch.autograd.grad(loss, [*model.parameters()]), strict=True):
            master.grad = gradient.float()
        optimizer.step()
        with torch.no_grad():
            for one, master in zip(model.parameters(), masters, strict=True):
                one.copy_(master)
    return masters


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    ],
    ids=["AdamW", "SGD", "Adafactor"],
)
def test_master_goes_as_in_a_loop_written_by_hand(make):
    data = [batch(seed) for seed in range(3)]
    model, other = network(), network()
    runner = runner_of(model, "bf16-master", make, size=SAMPLES)

    for window in data:
        runner.step(window)
    masters = by_hand(other, data, make)

    assert_bitwise(list(model.parameters()), list(other.parameters()))
    for one, master in zip(model.parameters(), masters, strict=True):
        assert_bitwise(runner.optimizer.state[one].get(MASTER, one.detach()), master.detach())


def test_stochastic_update_is_that_of_float32_rounded_to_a_neighbour():
    model, other, window = network(), network(), batch()
    runner = runner_of(model, "bf16", lambda parameters: torch.optim.SGD(parameters, lr=0.1), size=SAMPLES)
    started = [one.detach().bfloat16().float() for one in network().parameters()]
    seen = gradients_seen(runner)

    runner.step(window)

    for one, before, gradient in zip(model.parameters(), started, seen[0], strict=True):
        if one.dim() > 1:
            wide = before - 0.1 * gradient
            off = (one.float() - wide).abs()
            assert one.dtype is torch.bfloat16
            assert (off <= wide.abs() / 128).all()
            assert off.any()
    assert {one.dtype for one in other.parameters()} == {torch.float32}


def test_updates_too_small_for_bf16_add_up_all_the_same():
    layer = nn.Linear(64, 64, bias=False)
    nn.init.ones_(layer.weight)
    runner = autoaccum.Runner(
        layer,
        lambda parameters: torch.optim.SGD(parameters, lr=2.0**-12),
        autoaccum.plan(1, 1),
        loss=lambda outputs, targets: (outputs * targets).sum(),
        loss_reduction="sum",
        device=CPU,
        weights="bf16",
        notices=Notices(silent=True),
    )

    for _ in range(16):
        runner.step((torch.ones(1, 64), torch.ones(1, 64)))

    # 16 updates of 2 ** -12, of which rounding to the nearest would lose every one.
    mean, spread = layer.weight.float().mean().item(), 16**0.5 * 2.0**-8 / 64
    assert abs(mean - (1 - 16 * 2.0**-12)) < 4 * spread
    assert mean < 1 - 8 * 2.0**-12


def test_nothing_draws_from_the_random_numbers_of_others():
    runner = runner_of(network(), "bf16")
    before = torch.get_rng_state()

    runner.step(batch())

    assert torch.equal(torch.get_rng_state(), before)


def test_weights_widened_a_few_at_a_time_are_updated_as_all_at_once(monkeypatch):
    models = [network(), network()]

    for model, at_once in zip(models, (1 << 24, 1), strict=True):
        monkeypatch.setattr(bf16_weights, "_WIDE_AT_ONCE", at_once)
        monkeypatch.setattr(bf16_weights, "round_stochastically", lambda wide, into, _: into.copy_(wide))
        runner = runner_of(model, "bf16")
        for seed in range(2):
            runner.step(batch(seed))

    assert_bitwise(dict(models[0].named_parameters()), dict(models[1].named_parameters()))


def test_small_and_recurrent_weights_stay_in_float32():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 8)
            self.recurrent = nn.LSTM(8, 8, batch_first=True)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, tokens):
            return self.head(self.recurrent(self.words(tokens).float())[0][:, -1])

    model = Model()

    runner_of(model, "bf16")

    halved = {name for name, one in model.named_parameters() if one.dtype is torch.bfloat16}
    assert halved == {"words.weight", "head.weight"}


@pytest.mark.parametrize("optimizer", ["adamw8bit", lambda parameters: torch.optim.AdamW(parameters, lr=0.01)])
def test_master_of_weights_that_were_bf16_before_is_float32(optimizer):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 32).bfloat16(), nn.Linear(32, 3)

        def forward(self, inputs):
            return self.head(self.body(inputs.to(self.body.weight.dtype)).float())

    model = Mixed()
    chosen = []

    def make(parameters):
        chosen.append(autoaccum.adamw8bit(parameters) if optimizer == "adamw8bit" else optimizer(parameters))
        return chosen[0]

    batches = [(torch.randn(4, 8), torch.arange(4) % 3)] * 3
    autoaccum.fit(model, batches, 4, weights="bf16-master", optimizer=make, device="cpu", progress=False)

    masters = [state["master"] for state in chosen[0].state.values() if "master" in state]
    assert len(masters) == 3  # of both weights, and of the bias that is in bf16
    assert {master.dtype for master in masters} == {torch.float32}


@pytest.mark.parametrize(
    ("model", "weights", "optimizer"),
    a_few_of(
        ["mlp", "convolutional", "transformer", "tied weights"],
        bf16_weights.WEIGHTS,
        ["Adam, loop", "SGD, foreach", "adamw8bit"],
    ),
)
def test_fault_at_any_operator_changes_nothing_but_the_cut(model, weights, optimizer):
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao.optim", reason="torchao is not installed")
    case = Case(model, "bf16", optimizer, clip=0.5, weights=weights)

    tally = Sweep(case).run(Budget(memory=3, first=3, troubled=1, twice=1, smallest=1, errors=1, interrupts=1, lines=2))

    assert tally.mismatches == []
    assert tally.survived > 4


def test_weights_are_their_masters_rounded_wherever_memory_runs_out_in_the_first_step():
    window, places = batch(), set()
    for point in itertools.count(1, 5):
        model = network()
        runner = runner_of(model, "bf16-master", size=SAMPLES)

        with FailAt(point) as fault:
            runner.step(window)

        halved = [one for one in model.parameters() if one.dim() > 1]
        assert_bitwise(
            [one.detach() for one in halved], [runner.optimizer.state[one][MASTER].bfloat16() for one in halved]
        )
        assert [state["step"].item() for state in runner.optimizer.state.values()] == [1] * 6
        if not fault.hits:
            break
        places.add(fault.where)
    assert len(places) > 5


@pytest.mark.parametrize("weights", ["bf16", "bf16-master"])
def test_older_torch_is_told_which_one_it_takes(weights, monkeypatch):
    monkeypatch.setattr(bf16_weights, "hasattr", lambda *_: False, raising=False)
    model = network()

    with pytest.raises(
        autoaccum.InvalidInputError, match=r"requires PyTorch 2\.10 or later, and this is \d.*leave weights= out"
    ):
        autoaccum.fit(model, [], 8, weights=weights, device="cpu", progress=False)

    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
