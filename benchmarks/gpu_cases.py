"""The parts of gpu.py, each a function of its `Findings`: what is run on the GPU, and what is promised of it.

On the public API and on torch's own counts, so that the numbers stay comparable when autoaccum changes inside. The one
exception is the traced step behind a prediction, whose `tensor_float` has no public name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.metadata
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import log_probs
import torch
from finders import FINDERS, limited, run_once, truth
from isolated import call, prepare
from measuring import in_turn, quartiles, spread
from overhead import compared, loops, network
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from workloads import (
    GPU_WORKLOADS,
    Workload,
    cut,
    gpt2,
    hugging_face_model,
    labelled_tokens,
    photographs,
    placed,
    tensors_of,
    torchvision_model,
)

import autoaccum
from gpu import NO_GPU, NO_TIME, ROOT

MIB, GIB = 2**20, 2**30
PACKAGES = ("torch", "torchvision", "transformers", "accelerate", "lightning", "peft", "pytest", "hypothesis")
PACKAGES += ("torchao", "triton", "autoaccum")


def size(n_bytes):
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"


def settle():
    """Free everything unreferenced, to come close to the memory of a fresh process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def nvml(of=lambda pynvml, gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used):
    """Ask NVML, by default for the memory in use on the first GPU; None if it does not say."""
    try:
        import pynvml  # noqa: PLC0415 - its library comes with the driver

        pynvml.nvmlInit()
        return of(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the other counts remain
        return None


# --- machine ----------------------------------------------------------------------------------------------------------


def machine(findings):
    """Describe the machine; measure what a context takes, and cuBLAS."""
    versions = {name.replace("-", "_"): _version(name) for name in PACKAGES}
    # Of the wheel, not of a source beside it.
    commit = ROOT / "build" / "gpu-bundle" / "commit"
    is_wheel = commit.exists() and not Path(autoaccum.__file__).is_relative_to(ROOT)
    findings.keep(
        gpu=None,
        packages=versions,
        autoaccum_from=autoaccum.__file__,
        commit=commit.read_text().strip() if is_wheel else None,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=os.cpu_count(),
    )
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    findings.add("versions", f"Python {platform.python_version()}, {listed}", ok=True)
    if not findings.on_gpu or not torch.cuda.is_available():
        findings.skip("GPU", NO_GPU)
        return
    used = nvml()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    after, reserved = nvml(), torch.cuda.memory_reserved()
    properties = torch.cuda.get_device_properties(0)
    driver = nvml(lambda pynvml, _: str(pynvml.nvmlSystemGetDriverVersion()))
    findings.keep(
        gpu=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        total_bytes=properties.total_memory,
        driver=driver,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
    )
    text = f"{properties.name}, {size(properties.total_memory)}, driver {driver}, CUDA {torch.version.cuda}"
    findings.add("GPU", text, ok=True)
    for dtype in (torch.float32, torch.bfloat16):
        found = _workspaces(dtype)
        said = ", ".join(f"{what} {size(n_bytes)}" for what, n_bytes in found.items())
        findings.add(f"cuBLAS's workspaces, {str(dtype).removeprefix('torch.')}", said, **found)
    if used is not None and after is not None:
        loaded = nvml() - used - torch.cuda.memory_reserved()
        text = f"{size(after - used - reserved)}, with the kernels of these products {size(loaded)}"
        findings.add("CUDA's context", text, bytes=after - used - reserved, loaded_bytes=loaded)


def _version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _workspaces(dtype):
    """Return what cuBLAS holds after a product, after one with a bias, and after a backward pass."""
    torch._C._cuda_clearCublasWorkspaces()
    base, found = torch.cuda.memory_allocated(), {}
    square = torch.ones(512, 512, device="cuda", dtype=dtype, requires_grad=True)
    bias = torch.ones(512, device="cuda", dtype=dtype)
    base += square.nbytes + bias.nbytes
    torch.mm(square.detach(), square.detach())
    found["mm"] = torch.cuda.memory_allocated() - base
    functional.linear(square.detach(), square.detach(), bias)
    found["linear with bias"] = torch.cuda.memory_allocated() - base
    (square @ square).sum().backward()
    found["and backward"] = torch.cuda.memory_allocated() - base - square.grad.nbytes
    return found


# --- tests ------------------------------------------------------------------------------------------------------------


# Writes down each test as it begins, and as it ends, so that one that hangs or ends the process hides no other.
_RECORDER = """
import json, sys, pytest, torch
share, path, *arguments = json.loads(sys.argv[1])
if share:
    torch.cuda.set_per_process_memory_fraction(share)
class Recorder:
    def keep(self, test, outcome, text=""):
        with open(path, "a") as file:
            file.write(json.dumps([test, outcome, text]) + "\\n")
    def pytest_runtest_logstart(self, nodeid):
        self.keep(nodeid, "not ended")
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.keep(report.nodeid, report.outcome, report.longreprtext[-2500:] if report.failed else "")
sys.exit(pytest.main(arguments, plugins=[Recorder()]))
"""


def _pytest(findings, *where):
    """Run pytest under a share of the memory."""
    share = min(0.2, 12 * GIB / findings.machine["total_bytes"]) if findings.on_gpu else None
    # Warnings are no errors: nobody has run the suite with this combination of versions.
    options = ["-v", f"--timeout={60 if findings.on_gpu else 300}", "-p", "no:cacheprovider"]
    options += ["-o", "filterwarnings=default", *where]
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "tests.jsonl"
        command = [sys.executable, "-c", _RECORDER, json.dumps([share, str(record), *options])]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=ROOT, timeout=max(5.0, findings.left_s() - 3), check=False)
        lines = record.read_text().splitlines() if record.exists() else ()
    ended = {test: (outcome, text) for test, outcome, text in map(json.loads, lines)}
    counts = Counter(outcome for outcome, _ in ended.values())
    counts["on the GPU"] = findings.on_gpu * sum(
        outcome == "passed" and ("[cuda" in test or "tests/gpu/" in test) for test, (outcome, _) in ended.items()
    )
    found = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    ran = counts["on the GPU" if findings.on_gpu else "passed"] > 0
    ok = ran and not counts["failed"] and not counts["not ended"]
    findings.add("tests", found or "none ran", ok=ok, **counts)
    for test, (outcome, text) in ended.items():
        if outcome in ("failed", "not ended"):
            last = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-1:] or [outcome]
            findings.add(test, last[0], ok=False, text=text)


def survival(findings):
    """Let memory run out at each moment, under tight limits, and for good; lose the device."""
    _pytest(findings, "tests/gpu/test_survival_on_a_gpu.py")


def neighbour(findings):
    """Train beside a process that takes the memory and gives it back."""
    _pytest(findings, "tests/gpu/test_neighbour_on_a_gpu.py")


def tests(findings):
    """Run the other tests of the GPU, and the contract of the backends."""
    files = () if findings.tiny else ("tests/gpu/test_paths_on_a_gpu.py", "tests/gpu/test_report_on_a_gpu.py")
    _pytest(findings, *files, "tests/memory/test_base.py")


# --- models under fully_shard, in a world of one ----------------------------------------------------------------------


def sharded(findings):
    """Train under fully_shard by NCCL in a world of one: communication between GPUs is not shown by this."""
    device, width, samples = findings.device, *((16, 12) if findings.tiny else (2048, 256))
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if findings.on_gpu else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            _sharded(findings, device, width, samples)
        finally:
            torch.distributed.destroy_process_group()


def _sharded(findings, device, width, samples):
    def made(*, spreads, double=True):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)]
        model = nn.Sequential(*blocks, nn.Linear(width, 10)).to(device)
        model = model.double() if double else model
        for block in blocks if spreads else ():
            fully_shard(block)
        return fully_shard(model) if spreads else model

    def gradients(model, batch, **options):
        options |= {"loss": nn.CrossEntropyLoss(), "device": device, "precision": "fp32"}
        report = autoaccum.Accumulator(model, **options).backward(batch)
        found = [parameter.grad for parameter in model.parameters()]
        return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found], report

    torch.manual_seed(1)
    batch = torch.randn(samples, width, dtype=torch.float64), torch.randint(10, (samples,))
    whole, _ = gradients(made(spreads=False), batch, micro_batch=samples)
    found, report = gradients(made(spreads=True), batch, micro_batch=samples // 3)
    apart = max(float((one - other).norm() / other.norm()) for one, other in zip(found, whole, strict=True))
    text = f"{apart:.1e} from the whole batch's, in {len(report.micro_batches)} passes of float64"
    findings.add("gradient", text, ok=apart <= 1e-12, apart=apart)

    # Sizes grow from one sample by what passes take, then most of what is free is taken away.
    batch = batch[0].float().repeat(16, 1), batch[1].repeat(16)
    model = made(spreads=True, double=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    accumulator = autoaccum.Accumulator(
        model, loss=nn.CrossEntropyLoss(), device=device, precision="fp32", memory_limit="4GiB"
    )
    sizes, taken, failures = [], None, 0
    for number in range(16 if findings.on_gpu else 8):
        if number == 12:
            free = (4 << 30) - torch.cuda.memory_allocated()
            torch.cuda.empty_cache()
            taken = torch.empty(int(0.8 * free), dtype=torch.uint8, device=device)
        report = accumulator.backward(batch)
        sizes.append(max(report.micro_batches))
        failures += report.oom_events
        optimizer.step()
        optimizer.zero_grad()
    text = f"{'+'.join(map(str, sizes))}; memory ran out before a pass {failures} times, and never within one"
    findings.add("sizes by window", text, ok=sizes[0] == 1 and sizes[min(11, len(sizes) - 1)] > 1, sizes=sizes)
    del taken
    if findings.on_gpu:  # the host's passes are not measured
        seen = accumulator._accumulating._peers._room._seen  # type: ignore[attr-defined]
        least = min(of_pass for own in seen.values() for of_pass in own.values())
        findings.add("least that a pass took", f"{least >> 10} KiB, though the cache was warm", ok=least > 0)


# --- predictions ------------------------------------------------------------------------------------------------------

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def _language_model(kind, attention=None, *, checkpointed=False, lora=False, half=False, **settings):
    model = hugging_face_model(kind, attention, **settings)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora or half:
        model.bfloat16()
    if lora:
        import peft  # noqa: PLC0415 - its import makes a context on the GPU

        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model


class UNet(nn.Module):
    """A U-Net of four levels with BatchNorm; logits (N, classes, side, side)."""

    def __init__(self, width=64, classes=21):
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.down = nn.ModuleList(self._block(a, b) for a, b in itertools.pairwise([3, *widths]))
        self.bottom = self._block(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.join = nn.ModuleList(self._block(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(inputs, outputs):
        layers = []
        for channels in (inputs, outputs):
            convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers)

    def forward(self, images):
        """Return the logits."""
        kept = []
        for block in self.down:
            images = block(images)
            kept.append(images)
            images = functional.max_pool2d(images, 2)
        images = self.bottom(images)
        for up, join in zip(self.up, self.join, strict=True):
            images = join(torch.cat([kept.pop(), up(images)], 1))
        return self.head(images)


def jobs(tiny, device="cuda"):
    """Return the trainings whose memory is predicted and measured, by name, the most important first."""
    part = functools.partial
    if tiny:
        narrow = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        llama = narrow | {"num_attention_heads": 4, "num_key_value_heads": 2}
        mixtral, bert = llama | {"num_local_experts": 4}, narrow | {"num_attention_heads": 4}
        t5 = {"vocab_size": 256, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    else:
        deep = {"intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
        llama = {"vocab_size": 128256, "hidden_size": 2048, "tie_word_embeddings": True} | deep
        flat = {"intermediate_size": 1792, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
        mixtral, bert = {"vocab_size": 32000, "hidden_size": 512} | flat, {"vocab_size": 30522}
        t5 = {"vocab_size": 32128, "d_model": 512, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
    length, side = (32, 32) if tiny else (1024, 224)
    make_gpt2, gpt2_text = gpt2(length, **SMALL_GPT2 if tiny else {})
    lm, lm_text = part(_language_model, "LlamaForCausalLM", **llama), part(labelled_tokens, llama["vocab_size"], length)
    encoder = part(_language_model, "BertForMaskedLM", **bert)
    text = part(labelled_tokens, bert["vocab_size"], length // 2)
    mixture = part(_language_model, "MixtralForCausalLM", half=True, **mixtral)
    t5_model = part(_language_model, "T5ForConditionalGeneration", decoder_start_token_id=0, **t5)
    pairs = part(labelled_tokens, t5["vocab_size"], length // 2, targets=length // 8)
    mixed_text = part(labelled_tokens, mixtral["vocab_size"], length)
    resnet, images = part(torchvision_model, "resnet18" if tiny else "resnet50"), part(photographs, side, 1000)
    unet, masks = part(UNet, 8 if tiny else 64), part(photographs, 32 if tiny else 256, 21, masks=True)
    convnext, vit = part(torchvision_model, "convnext_tiny"), part(torchvision_model, "vit_b_16")
    listed = {
        "GPT-2 124M, bf16": (make_gpt2, gpt2_text, 8),
        "ResNet-50, fp32 with TF32": (resnet, images, 64, "fp32", SGD),
        "Llama 1B, bf16": (lm, lm_text, 2),
        "BERT-base sdpa, bf16": (part(encoder, "sdpa"), text, 16),
        "ConvNeXt-T, bf16": (convnext, images, 64),
        "GPT-2 124M, fp32": (make_gpt2, gpt2_text, 4, "fp32"),
        "ResNet-50, bf16": (resnet, images, 128, "bf16", SGD),
        "Llama 1B, bf16, checkpointed": (part(lm, checkpointed=True), lm_text, 4),
        "Llama 1B, bf16, LoRA": (part(lm, lora=True), lm_text, 2),
        "U-Net, bf16": (unet, masks, 16),
        "Mixtral (8 experts of 512), bf16": (mixture, mixed_text, 4),
        "T5-small, bf16": (t5_model, pairs, 16),
        "GPT-2 124M, fp16 with a scaler": (make_gpt2, gpt2_text, 8, "fp16"),
        "ResNet-50, bf16, channels last": (part(resnet, channels_last=True), images, 128, "bf16", SGD),
        "BERT-base eager, bf16": (part(encoder, "eager"), text, 16),
        "ViT-B/16, bf16": (vit, part(photographs, 224, 1000), 64),
        "ResNet-50, fp32 without TF32": (resnet, images, 64, "fp32", SGD, False),
    }
    if tiny:
        kept = ("GPT-2 124M, bf16", "ResNet-50, bf16", "Llama 1B, bf16, LoRA", "U-Net, bf16")
        listed = {name: (*listed[name][:2], 2, *listed[name][3:]) for name in kept}
    return {name: _job(name, device, *of) for name, of in listed.items()}


SMALL_GPT2 = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2}


def _job(name, device, make, batch, samples, precision="bf16", optimizer=ADAMW, tf32=True):
    has_own_loss = isinstance(batch(1), dict)
    way = {"device": device, "precision": precision, "has_own_loss": has_own_loss, "tf32": tf32}
    return Workload(name, 0, samples, make, batch, optimizer, **way)


def predictions(findings):
    """Trace each job on the cores, while it is measured, also with expandable segments; each in a process of its own.

    What a process allocates and reserves does not depend on its neighbours.
    """
    # Not peft, whose import makes a context on the GPU, which a forked child could not use.
    prepare(["torch", "torchvision", "transformers", "autoaccum", "gpu_cases"])
    gpu = findings.machine.get("gpu") or "h100-80gb"
    large = threading.Semaphore(1)  # one of some 30 GiB at a time
    most_s = 75.0 if findings.on_gpu else 300.0

    def asked(function, name, *arguments):
        is_large = function is _measure and name.startswith("Llama")
        with large if is_large else contextlib.nullcontext():
            if findings.left_s() < 8:
                return None, NO_TIME
            timeout_s = min(most_s, findings.left_s() - 3)
            return call(function, name, findings.tiny, *arguments, timeout_s=timeout_s)[1:]

    lanes = [ThreadPoolExecutor(workers) for workers in (max(1, min(6, (os.cpu_count() or 2) - 6)), 2, 1)]
    rows = [
        (
            name,
            lanes[0].submit(asked, _trace, name, gpu),
            lanes[1].submit(asked, _measure, name, findings.device, False),
            lanes[2].submit(asked, _measure, name, findings.device, True),
        )
        for name in jobs(findings.tiny)
    ]
    for name, *futures in rows:
        answers = dict(zip(("predicted", "real", "expandable"), (one.result() for one in futures), strict=True))
        failed = {what: why for what, (_, why) in answers.items() if why}
        if set(failed.values()) == {NO_TIME}:
            findings.skip(name, NO_TIME)
            continue
        found = {what: value or {} for what, (value, _) in answers.items()}
        texts = [f"{what}: {why}" for what, why in failed.items()]
        for what in ("allocated", "reserved"):
            said, true = (found[of].get(f"{what}_bytes") for of in ("predicted", "real"))
            if said:
                texts.append(
                    f"{what} {size(true)}, predicted {said / true - 1:+.1%}" if true else f"predicted {size(said)}"
                )
        # Whether a prediction is near enough is judged where all of them are seen.
        findings.add(name, "; ".join(texts), ok=not failed, job=name, **found, failed=failed)


def _trace(_connection, name, tiny, gpu):
    """Predict a job in a process that sees no GPU; return its bytes."""
    from autoaccum._estimate.estimate import trace_step  # noqa: PLC0415 - tensor_float= has no public name
    from autoaccum._estimate.gpus import custom_gpu, gpu_named  # noqa: PLC0415 - as above

    try:
        gpu = gpu_named(gpu)
    except autoaccum.InvalidInputError:
        gpu = custom_gpu(f"{torch.cuda.get_device_properties(0).total_memory / GIB:.1f}GiB")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    job, began = jobs(tiny)[name], time.perf_counter()
    way = {"loss": job.criterion, "optimizer": job.optimizer, "precision": job.precision, "tensor_float": job.tf32}
    traced = trace_step(job.model, job.batch(min(job.target, 2)), kind="cuda", sizes=[job.target], gpu=gpu, **way)
    footprint = traced.estimate(gpu).footprints[-1]
    return {
        "samples": job.target,
        "precision": job.precision,
        "allocated_bytes": footprint.peak_bytes,
        "reserved_bytes": footprint.reserved_bytes,
        "phase": footprint.phase,
        "uncertainty": traced.uncertainty,
        "seconds": time.perf_counter() - began,
    }


def _measure(_connection, name, tiny, device, expandable):
    """Train a job by hand, then with `Runner`; return the peaks."""
    job, on_gpu = jobs(tiny, device)[name], device == "cuda"
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = job.tf32
    if on_gpu and expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    model, _ = job.made()
    # Made on the device for speed, and moved there as a user's model is.
    model.cpu()
    settle()
    model.to(device)
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    batch = job.batch(job.target)
    scaler = torch.amp.GradScaler(device, enabled=job.precision == "fp16")
    step = functools.partial(job.step, model, optimizer, [batch, batch], scaler)
    losses = [float(step()) for _ in range(2)]
    assert all(map(math.isfinite, losses)), losses
    found = {"losses": losses}
    if not on_gpu:
        return found | _with_runner(model, job, batch, device)
    torch.cuda.synchronize()
    process_bytes = nvml(
        lambda pynvml, one: {
            process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(one)
        }.get(os.getpid())
    )
    found |= _peaks() | {"nvml_process_bytes": process_bytes}
    if not expandable:
        del step, optimizer
        model.zero_grad()
        settle()
        found |= _with_runner(model, job, batch, device)
    return found


def _peaks(prefix=""):
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip((f"{prefix}allocated_bytes", f"{prefix}reserved_bytes"), peaks, strict=True))


def _with_runner(model, job, batch, device):
    """Return the peaks of `Runner`: of its first windows, and of a later one."""
    plan, window = autoaccum.Plan(2 * job.target, (job.target,) * 2), autoaccum.Window([batch, batch])
    runner = autoaccum.Runner(model, job.optimizer, plan, loss=job.criterion, device=device, precision=job.precision)
    for _ in range(2):
        runner.step(window)
    if device == "cpu":
        return {}
    first = _peaks("runner_first_")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    report = runner.step(window)
    torch.cuda.synchronize()
    assert report.micro_batches == plan.micro_batches, report
    return first | _peaks("runner_")


# --- overhead and transfer --------------------------------------------------------------------------------------------

# Hidden layers, width, and samples of a micro-batch. Launching the kernels of the smallest takes longer than 0.1 ms by
# hand.
SIZES = {
    "6 tensors, smallest": (1, 64, 8),
    "6 tensors, about 1 ms": (1, 2048, 512),
    "6 tensors, about 10 ms": (1, 4096, 1536),
    "150 tensors, smallest": (73, 64, 8),
    "150 tensors, about 10 ms": (73, 1024, 1024),
}
_MICRO_BATCHES = 4


def overhead(findings):
    """Time windows of Runner, of Accumulator and of the loop by hand, in turn."""
    for name, (layers, *shape) in SIZES.items():
        if findings.left_s() < 3:
            findings.skip(name, NO_TIME)
            continue
        width, samples = (16, 8) if findings.tiny else shape
        torch.manual_seed(0)
        batch = torch.randn(_MICRO_BATCHES * samples, width), torch.randint(width, (_MICRO_BATCHES * samples,))
        functions = loops(
            network(layers, width, features=width, classes=width), _pinned(batch, findings), samples, findings.device
        )
        turns = {"device": findings.device, "warm_up": 6, "has_time": lambda: findings.left_s() > 3}
        times = in_turn(functions, 8 if findings.tiny else 40, **turns)
        for ours in ("Runner", "Accumulator"):
            found = compared(times, ours, _MICRO_BATCHES)
            text = (
                f"{spread(found['by_hand_ms'], ' ms')} a micro-batch by hand; ratio {spread(found['ratio'], digits=3)}"
            )
            text += f"; added {spread(found['added_us'], ' µs', 1)}"
            findings.add(f"{ours}, {name}", text, **{key: quartiles(values) for key, values in found.items()})


def _pinned(batch, findings):
    return tuple(part.pin_memory() for part in batch) if findings.on_gpu else batch


def transfer(findings):
    """Time windows whose transfer takes a large part of their time: pinned, pageable, and on the device already."""
    side, samples, rounds = (32, 4, 3) if findings.tiny else (224, 64, 12)
    torch.manual_seed(0)
    patches = nn.Sequential(nn.Conv2d(3, 256, 16, stride=16), nn.GELU(), nn.Conv2d(256, 256, 1), nn.Flatten())
    light = nn.Sequential(patches, nn.Linear(256 * (side // 16) ** 2, 10))
    pageable, functions = photographs(side, 10, 8 * samples), {}
    pinned = _pinned(pageable, findings)
    there = placed(pinned, findings.device)
    for name, batch in (("pinned", pinned), ("pageable", pageable), ("on the device", there)):
        found = loops(light, batch, samples, findings.device)
        functions |= {f"{way}, {name}": found[way] for way in ("Runner", "by hand")}
    turns = {"device": findings.device, "warm_up": 4, "has_time": lambda: findings.left_s() > 2}
    times = in_turn(functions, rounds, **turns)
    pure, usual = (quartiles(times[f"by hand, {name}"])[1] for name in ("on the device", "pinned"))
    for way, took in times.items():
        # What is promised is not to be slower than the usual loop.
        ok = quartiles(took)[1] <= 1.1 * usual if way == "Runner, pinned" and findings.on_gpu else None
        text = f"{spread([1e3 * one for one in took], ' ms')}; {quartiles(took)[1] / pure:.2f} of computing alone"
        findings.add(way, text, ok=ok, seconds=took)


# --- throughput -------------------------------------------------------------------------------------------------------


class _Trials(autoaccum.Callback):
    def __init__(self):
        self.trials = []

    def on_trial(self, trial):
        self.trials.append(trial)


def throughput(findings):
    """Let `fit` choose the size for GPT-2, and time it against the best size by hand."""
    length, target = (32, 8) if findings.tiny else (1024, 96)
    device = findings.device
    limit_bytes = torch.cuda.get_device_properties(0).total_memory // 2 if findings.on_gpu else GIB
    model_and_text = gpt2(length, **SMALL_GPT2 if findings.tiny else {})
    way = {"device": device, "precision": "bf16", "has_own_loss": True}
    job = Workload("GPT-2", limit_bytes, target, *model_and_text, ADAMW, **way)
    model, _ = job.made()
    batch = job.batch(target)
    window, watch, began = (
        dict(zip(batch, _pinned(tensors_of(batch), findings), strict=True)),
        _Trials(),
        time.perf_counter(),
    )
    way = {"optimizer": job.optimizer, "device": device, "precision": "bf16"}
    limit = {"memory_limit": limit_bytes} if findings.on_gpu else {}
    result = autoaccum.fit(model, [window] * 10, target, callbacks=[watch], **limit, **way)
    plan, chosen = result.plan, result.plan.micro_batches[0]
    text = (
        f"micro-batches {'+'.join(map(str, plan.micro_batches))}; {len(watch.trials)} trials, {result.oom_events} times"
    )
    text += f" out of memory; {time.perf_counter() - began:.1f} s in all"
    findings.add("fit chose", text, ok=result.steps == 10, sizes=plan.micro_batches)
    settle()
    runner = autoaccum.Runner(model, job.optimizer, plan, device=device, precision="bf16")
    by_hand = copy.deepcopy(model)
    optimizer, rates = job.optimizer(by_hand.parameters()), {}

    def step(samples):
        sizes = (samples,) * (target // samples) + ((target % samples,) if target % samples else ())
        return functools.partial(job.step, by_hand, optimizer, cut(window, sizes))

    for samples in sorted({chosen, *((1, 2, 4) if findings.tiny else (8, 16, 32, 48))}):
        if findings.left_s() < 18:
            break
        settle()
        try:
            with limited(job) if findings.on_gpu else contextlib.nullcontext():
                rates[samples] = target * length / min(in_turn({"": step(samples)}, 2, device=device, warm_up=1)[""])
        except torch.OutOfMemoryError:
            break
    by_hand.zero_grad()
    if not rates:
        findings.skip("by hand", NO_TIME)
        return
    best = max(rates, key=rates.get)
    listed = ", ".join(f"{samples}: {rate:.0f}" for samples, rate in rates.items())
    findings.add("by hand, by size", f"{listed} tokens a second; best {best}", rates=rates)
    settle()
    for _ in range(8):  # the eighth makes checks
        runner.step(window)
    functions = {"Runner, as fit chose": lambda: runner.step(window), f"by hand, {best}": step(best)}
    times = in_turn(functions, 5, device=device, has_time=lambda: findings.left_s() > 3)
    for name, took in times.items():
        rate = [target * length / one for one in took]
        findings.add(name, spread(rate, " tokens a second", 0), tokens_per_s=quartiles(rate))
    ratio = [other / one for one, other in zip(*times.values(), strict=True)]
    ok = statistics.median(ratio) > 0.95 if findings.on_gpu else None
    findings.add("fit's rate over the best by hand", spread(ratio, digits=3), ok=ok, ratio=quartiles(ratio))


# --- the probe and other finders --------------------------------------------------------------------------------------


def _searched(findings):
    prepare(["torch", "torchvision", "transformers", "autoaccum", "lightning.pytorch", "accelerate", "finders"])
    return list(GPU_WORKLOADS) if findings.on_gpu else ["mlp", "gpt"]


def _found(findings, name, finder, **promised):
    row = run_once(name, finder, timeout_s=max(1.0, findings.left_s() - 2))
    what = f"{name}: {'find_micro_batch' if finder == 'autoaccum' else FINDERS[finder]}"
    if row["answer"] is None:
        findings.add(what, row["ended"], **promised)
    else:
        text = f"{row['answer']}; {len(row['trials'])} sizes, {row['failed']} failed, {row['seconds']:.1f} s"
        findings.add(what, text, size=row["answer"], trials=len(row["trials"]), seconds=row["seconds"])
    return row["answer"]


def probe(findings):
    """Let `find_micro_batch` search under a limit, and find the truth with a fresh process for each size."""
    names = _searched(findings)
    # Two models are searched for at once, and each process has a context beside the limit.
    at_once = min(5, int((findings.machine["total_bytes"] / GIB - 8) / 9 / 2)) if findings.on_gpu else 1

    def look(name):
        answer = _found(findings, name, "autoaccum", ok=False)
        if answer is None:
            return
        low, high, tried = truth(name, answer, at_once=at_once, left_s=findings.left_s)
        share = answer / low if low else 0.0
        text = f"{low} fits, {high} does not" + ("" if high == low + 1 else " (not closed)")
        # On the CPU, where this is a rehearsal, other processes may take memory meanwhile.
        ok = (tried.get(answer) is not False and share >= 0.9) if findings.on_gpu else None
        data = {"low": low, "high": high, "share": share, "closed": high == low + 1, "tried": tried}
        findings.add(f"{name}: the truth", f"{text}; the answer is {share:.1%} of it", ok=ok, **data)

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(look, names))


def finders(findings):
    """Let Accelerate's and Lightning's finders search under the same limit."""
    names = _searched(findings)

    def look(name):
        for finder in ("accelerate", "lightning-binsearch"):
            _found(findings, name, finder)  # another finder's failure is a finding

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(look, names))


# --- save_memory= and ResNet-101 --------------------------------------------------------------------------------------


def saving(findings):
    """Train GPT-2 with each way to save memory: peak and seconds of a window; time the kernels of a head's loss."""
    prepare(["torch", "transformers", "autoaccum", "gpu_cases"])
    heads = ((64, 8, 50),) if findings.tiny else ((4096, 768, 50257), (8192, 2048, 32000), (8192, 4096, 128256))
    for tokens, features, classes in heads:
        what = f"loss of a head of {features} x {classes}, {tokens} tokens"
        arguments = (tokens, features, classes, findings.device)
        _, found, why = call(_head, *arguments, timeout_s=max(1.0, findings.left_s() - 2))
        text = "; ".join(f"{way} {1e3 * one:.1f} ms" for way, one in (found or {}).items())
        findings.add(what, why or text, ok=False if why else None, seconds=found)
    _add_log_probs(findings)
    for name in ("nothing", "chunked_loss", "checkpoint", "offload"):
        # Without a GPU everything is on the host already.
        no_gpu = name == "offload" and not findings.on_gpu
        if findings.left_s() < 3 or no_gpu:
            findings.skip(name, NO_GPU if no_gpu else NO_TIME)
            continue
        way = None if name == "nothing" else name
        _, found, why = call(_saved, way, findings.tiny, findings.device, timeout_s=findings.left_s() - 2)
        if found is None:
            findings.add(name, why, ok=False)
            continue
        text = f"{spread([1e3 * one for one in found['seconds']], ' ms', 1)} a window"
        text += f"; first loss {found['losses'][0]:.5f}"
        text += f"; {size(found['allocated_bytes'])} at most" if findings.on_gpu else ""
        findings.add(name, text, ok=all(map(math.isfinite, found["losses"])), **found)


def _add_log_probs(findings):
    """Add a row: peaks and times of log-probabilities of whole logits and in chunks, which need less memory."""
    settings, texts, peaks = log_probs.SMALL if findings.tiny else log_probs.LARGE, [], []
    for way in log_probs.WAYS[::2]:
        arguments = (way, settings, findings.device, 3, 16 if findings.tiny else 1024)
        _, found, why = call(log_probs.measured, *arguments, timeout_s=max(1.0, findings.left_s() - 2))
        if found is None:
            texts.append(f"{way}: {why}")
            continue
        peaks.append(found["peak_bytes"])
        texts.append(f"{way}: {spread([1e3 * one for one in found['seconds']], ' ms', 1)}, {size(peaks[-1])} at most")
    ok = len(peaks) == len(texts) and peaks[1] < peaks[0]
    what = f"log-probabilities of GPT-2 over {settings['vocab_size']:,} classes"
    findings.add(what, "; ".join(texts), ok=ok, peaks=peaks)


def _head(_connection, tokens, features, classes, device):
    """Return median seconds of forward and backward of a head's loss: of whole logits, and in chunks."""
    head = nn.Linear(features, classes, bias=False, device=device)
    hidden = torch.randn(tokens, features, device=device, requires_grad=True)
    labels, loss = torch.randint(classes, (tokens,), device=device), autoaccum.ChunkedLoss(head)

    def whole(rows, targets):
        return functional.cross_entropy(head(rows).float(), targets)

    def run(compute):
        with torch.autocast(device, torch.bfloat16):
            compute(hidden, labels).backward()
        head.weight.grad = hidden.grad = None

    ways = {"whole logits": whole, "chunks": loss}
    times = in_turn({way: functools.partial(run, of) for way, of in ways.items()}, 5, device=device)
    return {way: statistics.median(values) for way, values in times.items()}


def _saved(_connection, way, tiny, device):
    """Train a few windows of GPT-2 with this `save_memory=`; return seconds, losses and peaks."""
    length, samples = (32, 2) if tiny else (1024, 4)
    make, tokens = gpt2(length, **SMALL_GPT2 if tiny else {})
    torch.manual_seed(0)
    with torch.device(device):
        model = make()
    window, plan = tokens(2 * samples), autoaccum.plan(2 * samples, samples)
    runner = autoaccum.Runner(model, ADAMW, plan, device=device, precision="bf16", save_memory=way)
    losses = [runner.step(window).loss for _ in range(2)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # The fourth window makes checks, and so does the eighth.
    seconds = in_turn({"": lambda: runner.step(window)}, 3, device=device)[""]
    return {"seconds": seconds, "losses": losses} | (_peaks() if device == "cuda" else {})


def resnet101(findings):
    """Train ResNet-101 with a target batch of 100 under a limit in which 50 fit, end to end."""
    name, side, target, fit = ("resnet18", 32, 12, 6) if findings.tiny else ("resnet101", 224, 100, 50)
    make, batch = functools.partial(torchvision_model, name), photographs(side, 100, target)
    adam = functools.partial(torch.optim.Adam, lr=5e-4)
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": adam, "device": findings.device}
    limit, watch = None, _Trials()
    if findings.on_gpu:
        found = autoaccum.find_micro_batch(make(), batch, max_micro_batch=fit, **options)
        limit = int(found.fixed_bytes + (fit + 0.5) * found.bytes_per_sample)
        findings.add("memory limit", f"{size(limit)}, in which {fit} samples were to fit", limit_bytes=limit)
        settle()
    result = autoaccum.fit(make(), [batch] * 6, target, memory_limit=limit, callbacks=[watch], **options)
    largest = max((trial.size for trial in watch.trials if trial.fits), default=max(result.plan.micro_batches))
    ok = 0.9 * fit <= largest <= 1.1 * fit if findings.on_gpu else None
    findings.add("largest that fits", f"{largest}, after {len(watch.trials)} trials", ok=ok, largest=largest)
    losses, chosen = [report.loss for report in result.history], "+".join(map(str, result.plan.micro_batches))
    text = f"{result.steps} in {result.elapsed_s:.1f} s, at last of {chosen}; memory ran out {result.oom_events} times"
    findings.add("updates", text, ok=result.steps == 6 and all(map(math.isfinite, losses)), losses=losses)
    if findings.on_gpu:
        peak = max(report.peak_bytes for report in result.history)
        findings.add("peak", f"{size(peak)} of {size(limit)} ({peak / limit:.1%})", ok=peak <= limit, peak=peak)
