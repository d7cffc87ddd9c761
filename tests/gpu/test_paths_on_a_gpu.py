"""Each way that the library takes on a GPU only, from steady windows to a device that is lost."""

import contextlib
import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum import Window
from autoaccum._cli.doctor import examine  # seen on a GPU alone
from autoaccum._data.transfer import Transfer  # seen on a GPU alone
from autoaccum._memory.available_devices import backend_for  # seen on a GPU alone
from autoaccum._saving.savings import offloaded  # seen on a GPU alone
from support.models.small import assert_bitwise, logged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU here"),
    pytest.mark.filterwarnings("ignore"),
]

SAMPLES, SIZES, WIDTH = 16, (4, 4, 4, 4), 64


@pytest.fixture(autouse=True)
def clean_gpu():
    yield
    torch.cuda.set_sync_debug_mode("default")
    gc.collect()
    torch.cuda.empty_cache()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, 4))


def windows_of(count, *, pinned=False):
    torch.manual_seed(1)
    windows = [(torch.randn(SAMPLES, WIDTH), torch.randint(4, (SAMPLES,))) for _ in range(count)]
    return [tuple(half.pin_memory() for half in window) for window in windows] if pinned else windows


def runner_of(model, precision, clip=None):
    return autoaccum.Runner(
        model,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        autoaccum.Plan(SAMPLES, SIZES),
        loss=nn.CrossEntropyLoss(),
        device="cuda",
        precision=precision,
        clip_grad_norm=clip,
    )


# fp16's scaler reads whether a gradient has overflowed, by hand as here.
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_steady_window_waits_for_nothing(clip, precision):
    runner, windows = runner_of(network(), precision, clip), windows_of(6, pinned=True)
    for window in windows[:5]:  # the sixth is neither the first nor a power of two
        runner.step(window)
    torch.cuda.synchronize()

    torch.cuda.set_sync_debug_mode("error")
    report = runner.step(windows[5])
    torch.cuda.set_sync_debug_mode("default")

    assert report.micro_batches == SIZES
    assert report.loss > 0


@pytest.fixture(params=[False, True], ids=["", "deterministic"])
def filled(request):
    """Whether PyTorch fills new memory, so that reading what nobody wrote is reproducible."""
    torch.use_deterministic_algorithms(request.param, warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.parametrize("pinned", [False, True])
def test_micro_batches_that_arrive_beside_the_computing_are_the_samples(pinned, filled):
    gpu = torch.device("cuda", torch.cuda.current_device())
    transfer, busy = Transfer(gpu), torch.randn(2048, 2048, device=gpu)
    window = torch.randn(64, 4096)
    given = window.pin_memory() if pinned else window
    seen = []

    for batch in transfer.feed(Window([given]), (16, 16, 16, 16)):
        for _ in range(20):
            busy = busy @ busy / busy.norm()
        seen.append(batch + 0)

    assert_bitwise(torch.cat(seen).cpu(), window)


def test_window_that_is_given_up_while_a_batch_is_on_its_way_harms_no_other():
    gpu = torch.device("cuda", torch.cuda.current_device())
    transfer, window = Transfer(gpu), torch.randn(64, 4096).pin_memory()
    for _ in range(20):
        feed = transfer.feed(Window([window]), (16,) * 4)
        next(feed)
        feed.close()
        others = torch.zeros(16, 4096, device=gpu)
        assert not others.any()


def test_precision_by_default_is_what_the_gpu_does_well():
    with logged() as lines:
        runner = autoaccum.Runner(network(), None, autoaccum.plan(16, 4), loss=nn.CrossEntropyLoss(), device="cuda")

    expected = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    assert runner._step.precision.name == expected
    assert any(f"precision {expected}" in line for line in lines)
    assert (runner._step.precision.scaler is None) == (expected == "bf16")


def test_what_backward_needs_goes_to_the_host_and_back_bit_for_bit():
    memory = backend_for(torch.device("cuda"))
    model, inputs = network().cuda(), torch.randn(4096, WIDTH, device="cuda")

    def gradients(context):
        torch.manual_seed(3)
        with context:
            loss = model(inputs).square().mean()
            held = torch.cuda.memory_allocated()
            loss.backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        return found, held

    gradients(contextlib.nullcontext())  # cuBLAS takes its workspace
    expected, held = gradients(contextlib.nullcontext())
    found, less = gradients(offloaded([model], memory))

    assert_bitwise(found, expected)
    assert less < held


def test_run_that_goes_on_from_a_checkpoint_ends_bit_for_bit_where_the_undisturbed_ends(tmp_path):
    def train(folder, steps):
        model = network()
        torch.manual_seed(2)
        autoaccum.fit(
            model,
            windows_of(4),
            SAMPLES,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
            device="cuda",
            precision="fp16",
            micro_batch=4,
            max_steps=steps,
            checkpoint=folder,
            progress=False,
        )
        return [parameter.detach().cpu() for parameter in model.parameters()]

    expected = train(tmp_path / "whole", 4)
    train(tmp_path / "parts", 2)

    assert_bitwise(train(tmp_path / "parts", 4), expected)  # dropout draws from the GPU's generator


def test_nan_is_named_with_its_step(capsys):
    windows = windows_of(6)
    windows[3] = (windows[3][0] * float("nan"), windows[3][1])

    result = autoaccum.fit(
        network(), windows, SAMPLES, loss=nn.CrossEntropyLoss(), device="cuda", micro_batch=4,
        progress=False,
    )  # fmt: skip

    said = [line for line in capsys.readouterr().err.splitlines() if "not finite" in line]
    assert len(said) == 1
    assert "step 4: not finite" in said[0]
    assert result.steps == 6


def test_doctor_finds_the_gpu_that_pytorch_uses():
    found = examine().facts["devices"]

    assert found["used by PyTorch"] == f"{torch.cuda.device_count()} x cuda"
    assert found["NVIDIA driver"]
    assert torch.cuda.get_device_properties(0).name in found["GPU 0"]


def test_fit_finds_a_size_that_a_limit_allows_and_stays_within_it():
    torch.manual_seed(0)
    samples, width = 16, 768
    # All 16 samples take some 500 MiB; cuBLAS takes up to 64 for itself.
    limit = torch.cuda.memory_reserved() + 256 * 2**20
    windows = [(torch.randn(samples, 2048, width), torch.randint(4, (samples,)))] * 3

    result = autoaccum.fit(
        nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)),
        windows,
        samples,
        loss=nn.CrossEntropyLoss(),
        forward=lambda model, batch: model(batch[0]).mean(1),
        device="cuda",
        precision="fp32",
        memory_limit=limit,
        progress=False,
    )

    assert result.plan.accum_steps > 1
    assert result.samples == 3 * samples
    assert all(report.peak_bytes <= limit for report in result.history)


LOST = """
import sys, torch, autoaccum
from torch import nn
class Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)
    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1))
good, bad = ((tokens, torch.randint(4, (16,))) for tokens in (torch.randint(10, (16, 6)), torch.full((16, 6), 100)))
model, options = Looking(), {"loss": nn.CrossEntropyLoss(), "device": "cuda"}
try:
    if sys.argv[1] == "fit":
        autoaccum.fit(model, [good, bad, *[good] * 20], 16, micro_batch=8, progress=False, **options)
    elif sys.argv[1] == "find_micro_batch":
        autoaccum.find_micro_batch(model, bad, **options)
    else:
        runner = autoaccum.Runner(model, None, autoaccum.plan(16, 8), **options)
        for window in [good, bad, *[good] * 20]:
            runner.step(window)
except autoaccum.DeviceLostError as error:
    print("told:", error)
"""


@pytest.mark.parametrize("way", ["Runner.step", "fit", "find_micro_batch"])
def test_device_that_a_kernel_has_broken_is_told_as_lost(way):
    done = subprocess.run([sys.executable, "-c", LOST, way], capture_output=True, text=True, check=False, timeout=60)

    assert "can no longer be used by this process" in done.stdout
