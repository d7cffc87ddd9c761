"""Optimizers that save memory, by torchao and bitsandbytes, and fused ones, are passed like any other.

torchao compiles its steps, which takes a minute each; here they run as they are written.
"""

import pytest
import torch
from torch import nn

import autoaccum
from support.faults.places import Fault, lack
from support.models.small import a_few_of, assert_bitwise, fit_quietly, state_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
SAMPLES, MICRO_BATCH, WINDOWS = 8, 4, 4
# 4,096 numbers are the fewest that torchao keeps in 8 bits.
WIDTH = 64


def of_8_bits(parameters):
    """The moments in 8 bits, by torchao."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    return optim.AdamW8bit(parameters, lr=0.01)


def rounded_stochastically(parameters):
    """Updates of weights in bf16 that are rounded stochastically, by torchao."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    return optim._AdamW(parameters, lr=0.01, bf16_stochastic_round=True)


def of_bitsandbytes(parameters):
    """The moments in 8 bits, by bitsandbytes."""
    optim = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").optim
    return optim.AdamW8bit(parameters, lr=0.01, min_8bit_size=0)


def fused(parameters):
    """One kernel for all parameters."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


OPTIMIZERS = (of_8_bits, rounded_stochastically, of_bitsandbytes, fused)


@pytest.fixture(autouse=True)
def eager():
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def network(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.ReLU(), nn.Linear(WIDTH, 4))
    return model.bfloat16() if make is rounded_stochastically else model


def data(make):
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if make is rounded_stochastically else torch.float32
    return [
        (
            torch.randn(SAMPLES, WIDTH, generator=generator).to(dtype),
            torch.randint(0, 4, (SAMPLES,), generator=generator),
        )
        for _ in range(WINDOWS)
    ]


class Short(autoaccum.Simulated):
    """Lacks memory once, in the reservation for a step."""

    is_short, failed = False, 0

    def reserve(self, size):
        if self.is_short:
            self.is_short, self.failed = False, self.failed + 1
            raise lack()
        super().reserve(size)


def trained(make, where=None):
    model, device = network(make), Short("1GiB")
    runner = autoaccum.Runner(
        model,
        make,
        autoaccum.plan(SAMPLES, MICRO_BATCH),
        loss=nn.CrossEntropyLoss(),
        device=device,
        precision="auto" if make is rounded_stochastically else "fp32",
    )
    hook = Fault(0 if where == "first step, written" else 2)
    if where == "first step, written":
        runner.optimizer.register_step_post_hook(hook)
    elif where == "step":
        runner.optimizer.register_step_pre_hook(hook)
    torch.manual_seed(2)
    events = 0
    for number, window in enumerate(data(make)):
        device.is_short = where == "reservation" and number == 2
        events += runner.step(window).oom_events
    return state_of(model), events, hook.hits + device.failed


@pytest.mark.parametrize(("make", "where"), a_few_of(OPTIMIZERS, ["first step, written", "reservation", "step"]))
def test_memory_that_runs_out_around_the_step_changes_no_bit(make, where):
    undisturbed, _, _ = trained(make)
    if where == "step" and make in (of_bitsandbytes, fused):  # whether their kernels have written cannot be told
        with pytest.raises(autoaccum.StateDamagedError, match="after it had begun to write"):
            trained(make, where)
        return

    found, events, failed = trained(make, where)

    if not failed:
        assert where == "reservation"
        pytest.skip("a step of it takes no memory that would be given back")
    assert failed == events == 1
    assert_bitwise(found, undisturbed)


class Stop(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        if report.step == 2:
            raise KeyboardInterrupt


def fit(make, model, **options):
    torch.manual_seed(2)
    return fit_quietly(
        model,
        data(make),
        SAMPLES,
        loss=nn.CrossEntropyLoss(),
        optimizer=make,
        micro_batch=MICRO_BATCH,
        precision="auto" if make is rounded_stochastically else "fp32",
        **options,
    )


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_resumed_run_ends_bit_for_bit_as_the_undisturbed_one(make, tmp_path):
    undisturbed, resumed = network(make), network(make)
    fit(make, undisturbed)
    with pytest.raises(KeyboardInterrupt):
        fit(make, network(make), checkpoint=tmp_path, checkpoint_every=1, callbacks=[Stop()])

    result = fit(make, resumed, checkpoint=tmp_path)

    assert result.resumed_from == 2
    assert_bitwise(state_of(resumed), state_of(undisturbed))


def bytes_of_state(optimizer):
    def bytes_of(value):
        if not isinstance(value, torch.Tensor):
            return 0
        if hasattr(value, "__tensor_flatten__"):
            return sum(bytes_of(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return value.untyped_storage().nbytes()

    return sum(bytes_of(value) for state in optimizer.state.values() for value in state.values())


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_report_counts_the_bytes_of_their_state(make):
    model = nn.Linear(1024, 1024, bias=False)
    model = model.bfloat16() if make is rounded_stochastically else model
    inputs = torch.randn(4, 1024, dtype=model.weight.dtype)
    made = make(model.parameters())
    model(inputs).sum().backward()
    before = model.weight.detach().clone()

    report = autoaccum.preflight(
        model,
        (inputs, torch.zeros(4, dtype=torch.long)),
        4,
        loss=nn.CrossEntropyLoss(),
        optimizer=make,
        device=autoaccum.Simulated("1GiB"),
    )
    made.step()

    found = report.measured.footprint.optimizer_bytes
    assert found == pytest.approx(bytes_of_state(made), rel=0.05)
    assert not torch.equal(model.weight, before)  # the report had left it


@pytest.mark.gpu_fakes
def test_prediction_for_a_gpu_counts_the_bytes_of_8_bits():
    model = nn.Linear(1024, 1024, bias=False)
    batch = torch.randn(4, 1024), torch.zeros(4, dtype=torch.long)

    report = autoaccum.preflight(
        model, batch, 4, loss=nn.CrossEntropyLoss(), optimizer=of_8_bits, gpus="h100-80gb", measure=False
    )

    found = report.predicted[0].footprint.optimizer_bytes
    assert found == pytest.approx(2 * 1024 * 1024 * (1 + 4 / 256), rel=1e-2)


@pytest.mark.sweep  # the compiler takes a minute
def test_torchaos_compiled_step_is_like_the_plain_one():
    torch.compiler.set_stance("default")
    model, plain = network(of_8_bits), network(of_8_bits)

    fit(of_8_bits, model)
    torch.compiler.set_stance("force_eager")
    fit(of_8_bits, plain)

    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=0, atol=0.02)
