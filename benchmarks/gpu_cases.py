"""The parts of gpu.py, each a function of its `Findings`: what is run on the GPU, and what is promised of it.

On the public API and on torch's own counts, so that the numbers stay comparable when autoaccum changes inside. The one
exception is the traced step behind a prediction, whose timeline has no public name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import gzip
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import torch
from isolated import Child, call, prepare
from torch import nn
from torch.nn import functional

import autoaccum
from faults import differences, state_of
from gpu import NO_GPU, NO_TIME, ROOT

MIB, GIB = 2**20, 2**30
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Import name: distribution.
PACKAGES = {name: name for name in ("torch", "torchvision", "transformers", "accelerate", "lightning", "peft")}
PACKAGES |= {name: name for name in ("pytest", "hypothesis", "torchao", "triton", "autoaccum")}
PACKAGES |= {"liger_kernel": "liger-kernel"}


def size(n_bytes):
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.1f} MiB"


def quartiles(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 4], statistics.median(ordered), ordered[(3 * len(ordered)) // 4]


def spread(values, unit="", digits=2):
    low, median, high = quartiles(values)
    return f"{median:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def settle():
    """Free everything unreferenced, to come close to the memory of a fresh process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


def in_turn(device, functions, rounds, has_time=lambda: True, warm_up=2):
    """Time functions in turn, in an order that is reversed each round; return the seconds of each round by name."""
    times = {name: [] for name in functions}
    for number in range(rounds + warm_up):
        if number > warm_up and not has_time():
            break
        for name in list(functions)[:: 1 if number % 2 else -1]:
            wait_for(device)
            began = time.perf_counter()
            functions[name]()
            wait_for(device)
            if number >= warm_up:
                times[name].append(time.perf_counter() - began)
    return times


def nvml(of=lambda pynvml, gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used):
    """Ask NVML, by default for the memory in use on the first GPU; None if it does not say."""
    try:
        import pynvml  # noqa: PLC0415 - its library comes with the driver

        pynvml.nvmlInit()
        return of(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
    except Exception:  # noqa: BLE001 - whatever is wrong with it, the other counts remain
        return None


def nvml_of_this_process():
    """Return what NVML says that this process holds of the GPU."""

    def own(pynvml, gpu):
        return {one.pid: one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}[os.getpid()]

    return nvml(own)


# --- machine ----------------------------------------------------------------------------------------------------------


def machine(findings):
    """Describe the machine; measure what a context takes, and cuBLAS."""
    versions = {name: _version(name) for name in PACKAGES}
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
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(PACKAGES[name])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


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


# --- survival ---------------------------------------------------------------------------------------------------------

WINDOWS, CLASSES = 3, 5
MOMENTS = ("forward", "backward", "reserve", "optimizer")
OPTIMIZERS = {
    "Adam, foreach": functools.partial(torch.optim.Adam, lr=1e-3, foreach=True),
    "Adam, for-loop": functools.partial(torch.optim.Adam, lr=1e-3, foreach=False),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=1e-3, fused=True),
}
# Body, precision, optimizer; most important first.
CASES = (
    ("layers", "fp32", "Adam, foreach"),
    ("layers", "fp16", "Adam, foreach"),
    ("layers", "bf16", "AdamW, fused"),
    ("attention", "fp16", "Adam, for-loop"),
    ("convolutions", "fp32", "Adam, foreach"),
    ("layers", "fp16", "AdamW, fused"),
    ("layers", "fp32", "Adam, for-loop"),
    ("attention", "bf16", "Adam, foreach"),
    ("convolutions", "bf16", "Adam, for-loop"),
    ("layers", "fp32", "AdamW, fused"),
    ("layers", "bf16", "Adam, foreach"),
)
# How far convolutions may be apart, as a share of the weights, where cuDNN took other kernels.
_ROUNDING = 1e-3


class Layers(nn.Module):
    """Layers with BatchNorm and dropout, applied at many positions of each sample."""

    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.second, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, features):
        """Return logits for (N, positions, width)."""
        hidden = torch.relu(self.norm(self.first(features.flatten(0, 1))))
        hidden = torch.tanh(self.second(functional.dropout(hidden, 0.2, self.training)))
        return self.head(hidden.view_as(features).mean(1))


class Attention(nn.Module):
    """One block of attention, written out: the fused kernels' backward passes are not deterministic."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, features):
        """Return logits for (N, positions, width)."""
        queries, keys, values = self.mix(self.norm(features)).chunk(3, dim=-1)
        weights = torch.softmax(queries @ keys.transpose(1, 2) / keys.shape[-1] ** 0.5, dim=-1)
        mixed = functional.dropout(weights, 0.1, self.training) @ values
        return self.head((features + self.out(mixed)).mean(1))


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm between them."""

    def __init__(self, width):
        super().__init__()
        channels = max(4, width // 16)
        self.first, self.norm = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.head = nn.Conv2d(channels, channels, 3, padding=1), nn.Linear(channels, CLASSES)

    def forward(self, features):
        """Return logits for (N, positions, width), seen as images."""
        hidden = torch.relu(self.norm(self.first(features.unsqueeze(1))))
        hidden = self.second(functional.dropout(hidden, 0.2, self.training))
        return self.head(hidden.mean((2, 3)))


BODIES = {"layers": Layers, "attention": Attention, "convolutions": Convolutions}


class Witnessed(nn.Module):
    """A network that records the numbers of its samples, in order, in a buffer."""

    def __init__(self, body, samples):
        super().__init__()
        self.body = body
        self.register_buffer("order", torch.full((4 * samples,), -1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        """Return the body's outputs."""
        features, ids = inputs
        start = int(self.seen)
        self.order[start : start + len(ids)] = ids
        self.seen += len(ids)
        return self.body(features)

    def noted(self):
        """Return the numbers."""
        return self.order[: int(self.seen)].tolist()


@dataclass(frozen=True)
class Work:
    """A training that is the same in every run: windows of `samples`, each of (positions, width)."""

    body: str
    samples: int
    positions: int
    width: int
    windows: int = WINDOWS

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a frozen record, and few of them
    def batches(self):
        """Return the windows, a batch each, with samples numbered through; do not write to them."""
        generator = torch.Generator().manual_seed(5)
        shape = (self.samples, self.positions, self.width)
        numbers = torch.arange(self.windows * self.samples).split(self.samples)
        return [
            ((torch.randn(shape, generator=generator), ids), torch.randint(CLASSES, ids.shape, generator=generator))
            for ids in numbers
        ]

    def model(self, epochs=1):
        """Seed the generators and return a model."""
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator, which is compared
        return Witnessed(BODIES[self.body](self.width), epochs * self.windows * self.samples)


class Hog(autoaccum.Callback):
    """Takes all memory at one moment of one window, in this process, and frees it after memory ran out.

    Args:
        moment: One of `MOMENTS`; in forward and backward that of the second of two micro-batches, so that a part of the
            window is complete. "reserve" is when the last backward pass ends.
        window: The window, counted from 0; None never takes any.
        keeps: Whether it never frees the memory.
    """

    def __init__(self, moment="", window=None, *, keeps=False):
        self._moment, self._window, self._keeps = moment, window, keeps
        self._armed, self._passes, self._blocks = True, 0, []
        self.now = 0
        self.phases = []
        self.hit = False  # whether memory ran out in the window in which it was taken

    def hang_on(self, model, optimizer):
        """Attach to the model and the optimizer."""
        self._device = next(model.parameters()).device
        if self._moment == "forward":
            model.body.register_forward_pre_hook(lambda *_: self._take() if self._is_second() else None)
        elif self._moment == "backward":
            model.body.register_forward_hook(self._before_backward)
        elif self._moment == "reserve":
            model.body.register_forward_hook(functools.partial(self._before_backward, take=self._after_backward))
        elif self._moment == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: self._take() if self._is_time() else None)

    def on_oom(self, event, *, step):  # noqa: ARG002 - as the base has it
        """Record the phase, and free the memory."""
        self.phases.append(event.phase)
        self.hit |= not self._armed and self.now == self._window
        if not self._keeps:
            self.give()

    def give(self):
        """Free everything."""
        self._blocks.clear()

    def _before_backward(self, _module, _inputs, outputs, take=None):
        if outputs.requires_grad and self._is_second():
            outputs.register_hook(lambda _: (take or self._take)())

    def _after_backward(self):
        torch.autograd.Variable._execution_engine.queue_callback(self._take)

    def _take(self):
        if not self._armed:
            return
        self._armed = False
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.empty_cache()
        # On a GPU the loss and its like, which have segments of their own, must fail nothing before the reservation.
        block, least = (2**40, 2 * MIB if self._moment == "reserve" else MIB) if on_gpu else (GIB, 256)
        while block >= least:  # ever smaller, to take free memory inside the allocator's segments as well
            try:
                self._blocks.append(torch.empty(block, dtype=torch.uint8, device=self._device))
            except torch.OutOfMemoryError:
                block //= 2

    def _is_second(self):
        self._passes += self._is_time()
        return self._is_time() and self._passes == 2

    def _is_time(self):
        return self._armed and self.now == self._window


@dataclass
class Played:
    """The record of a training: states before the first window and after each, sizes, and the error raised."""

    states: list = field(default_factory=list)
    sizes: list = field(default_factory=list)
    events: int = 0
    peak_bytes: int = 0
    order: list = field(default_factory=list)
    weights: Any = None
    error: Exception | None = None
    left: dict | None = None


def _scalers():
    return [one for one in gc.get_objects() if type(one) is torch.amp.GradScaler]


def play(device, work, precision, optimizer, *, sizes=(), limit_bytes=None, hog=None):
    """Train all windows of a work with `Runner`.

    Args:
        device: "cuda", or "cpu" for a simulated device.
        work: The work.
        precision: As for `Runner`.
        optimizer: A name in `OPTIMIZERS`.
        sizes: The micro-batch sizes of the first windows; the others are halves, or the runner's choice.
        limit_bytes: The memory limit; None for none.
        hog: Takes memory.
    """
    settle()
    played, hog, model, earlier = Played(), hog or Hog(), work.model(), _scalers()
    runner = autoaccum.Runner(
        model,
        OPTIMIZERS[optimizer],
        autoaccum.plan(work.samples, work.samples // 2),
        loss=nn.CrossEntropyLoss(),
        precision=precision,
        device=device if device == "cuda" else autoaccum.Simulated(limit_bytes or GIB),
        memory_limit=limit_bytes if device == "cuda" else None,
        callbacks=[hog],
    )
    hog.hang_on(model, runner.optimizer)
    # A scaler has no public name.
    scaler = next((one for one in _scalers() if all(one is not other for other in earlier)), None)

    def state():
        found = state_of(model, runner.optimizer, scaler)
        return found | ({"GPU's random state": torch.cuda.get_rng_state().tolist()} if device == "cuda" else {})

    played.states.append(state())
    for number, window in enumerate(work.batches()):
        if number < len(sizes):
            runner.plan = autoaccum.Plan(work.samples, tuple(sizes[number]))
        hog.now = number
        try:
            report = runner.step(window)
        except Exception as error:  # noqa: BLE001 - it is what is looked at
            hog.give()
            link = played.error = error
            while link is not None:  # its frames hold tensors
                link.__traceback__ = None
                link = link.__cause__ or link.__context__
            played.left = state()
            break
        played.sizes.append(report.micro_batches)
        played.events += report.oom_events
        played.peak_bytes = max(played.peak_bytes, report.peak_bytes or 0)
        played.states.append(state())
    played.order = model.noted()
    played.weights = torch.cat([parameter.detach().double().flatten().cpu() for parameter in model.parameters()])
    hog.give()
    return played


class Judge:
    """Compares trainings in which memory ran out with undisturbed ones of the same micro-batch sizes."""

    def __init__(self, device, work, precision, optimizer):
        self.play = functools.partial(play, device, work, precision, optimizer)
        self.work, self._clean = work, {}
        self.wrong, self.phases = [], Counter()
        self.damaged = self.gave_up = self.rounded = 0

    def clean(self, sizes=()):
        """Return the training with these sizes from the start."""
        key = tuple(map(tuple, sizes))
        if key not in self._clean:
            self._clean[key] = self.play(sizes=sizes)
        return self._clean[key]

    def look(self, what, hog, *, is_tight=False, **options):
        """Train with a hog, and record what came of it.

        Args:
            what: For the report.
            hog: The hog.
            is_tight: Whether the limit is tight. cuDNN takes other kernels where there is no memory for the first
                one's workspace, so convolutions are equal but for rounding there.
            options: As for `play`.
        """
        played = self.play(hog=hog, **options)
        hog.hit |= played.error is not None
        self.phases.update(hog.phases)
        if isinstance(played.error, autoaccum.StateDamagedError):
            self.damaged += 1  # reported, never silent: the only exception
        elif played.error is not None:
            self.gave_up += isinstance(played.error, autoaccum.DoesNotFitError)
            names = differences(played.states[-1], played.left)
            self.wrong += [f"{what}: {type(played.error).__name__} left changed: {names[:6]}"] * bool(names)
            if not isinstance(played.error, autoaccum.DoesNotFitError):
                self.wrong.append(f"{what}: raised {type(played.error).__name__}: {str(played.error)[:300]}")
        else:
            self._compare(what, played, is_tight=is_tight)
        return played

    def _compare(self, what, played, *, is_tight):
        reference = self.clean(played.sizes)
        if reference.events or reference.error is not None:
            self.wrong.append(f"{what}: the training that it is held against failed itself: {reference.error}")
            return
        if played.order != list(range(WINDOWS * self.work.samples)):
            self.wrong.append(f"{what}: samples were not used once each, in order")
        for number, (one, other) in enumerate(zip(reference.states, played.states, strict=True)):
            names = differences(one, other)
            if names and is_tight and self.work.body == "convolutions":
                apart = float((played.weights - reference.weights).norm() / reference.weights.norm())
                self.rounded += 1
                self.wrong += [f"{what}: weights are {apart:.1e} apart"] * (apart > _ROUNDING)
                return
            if names:
                self.wrong.append(f"{what}: window {number} differs in {len(names)} of {len(one)}: {names[:6]}")

    def told(self):
        """Return the outcome as text and as data."""
        phases = ", ".join(f"{number} in {phase}" for phase, number in sorted(self.phases.items()))
        texts = [phases or "memory never ran out"]
        texts.append(f"NOT THE SAME: {self.wrong[:3]}" if self.wrong else "every bit the same")
        texts += [f"{self.rounded} equal but for the rounding of cuDNN's other kernels"] * bool(self.rounded)
        texts += [f"{self.damaged} told as damage"] * bool(self.damaged)
        texts += [f"{self.gave_up} gave up, unchanged"] * bool(self.gave_up)
        data = {"phases": dict(self.phases), "wrong": self.wrong, "damaged": self.damaged, "gave_up": self.gave_up}
        return "; ".join(texts), data | {"rounded": self.rounded}


def deterministic():
    """Make equal work give equal bits; CUBLAS_WORKSPACE_CONFIG must be set too."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def survival(findings):
    """Let memory run out at each moment, under tight limits, and for good."""
    deterministic()
    torch.set_num_threads(1)
    # Large enough on a GPU that a tensor has its own segment of the allocator.
    shapes = {"layers": (48, 256, 768), "attention": (48, 256, 768), "convolutions": (48, 64, 256)}
    for number, (body, precision, optimizer) in enumerate(CASES):
        name, shape = f"{body}, {precision}, {optimizer}", (8, 6, 16) if findings.tiny else shapes[body]
        if findings.left_s() < 8:
            findings.skip(name, NO_TIME)
            continue
        judge = Judge(findings.device, Work(body, *shape), precision, optimizer)
        one, other = judge.clean(), judge.play()
        if one.error is not None or any(itertools.starmap(differences, zip(one.states, other.states, strict=True))):
            findings.add(name, f"undisturbed, twice: not the same bits, or an error: {one.error}", ok=False)
            continue
        room = _held() + 2 * one.peak_bytes + (64 * MIB if findings.on_gpu else 0)
        # The third is neither the first, in which the optimizer makes its state, nor one that makes checks.
        moments = list(itertools.product(MOMENTS, (2, 0) if number < 2 else (2,)))
        hogs = {(moment, window): Hog(moment, window) for moment, window in moments}
        for (moment, window), hog in hogs.items():
            judge.look(f"{moment} of window {window}", hog, limit_bytes=room)
        _tight(judge, findings)
        text, data = judge.told()
        missed = [f"{moment} of window {window}" for (moment, window), hog in hogs.items() if not hog.hit]
        text += f"; nothing failed in {', '.join(missed)}" if missed else ""
        # A step that needs no more memory than was reserved cannot fail.
        ok = not judge.wrong and {"forward", "backward"} <= judge.phases.keys()
        findings.add(name, text, ok=ok, body=body, precision=precision, optimizer=optimizer, missed=missed, **data)
        if number == 0:
            _for_good(findings, judge, room)


def _held():
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def _tight(judge, findings):
    """Limits under which the whole window at once does not fit, and half of it does."""
    samples = judge.work.samples
    whole, half = (judge.clean([part] * WINDOWS).peak_bytes for part in ((samples,), (samples // 2,) * 2))
    for part in (0.85, 0.5, 0.2) if whole > half else ():
        if findings.left_s() < 5:
            return
        settle()
        limit = max(int(half + part * (whole - half)), _held() + MIB)
        judge.look(f"limit of {size(limit)}", Hog(), is_tight=True, sizes=[(samples,)], limit_bytes=limit)


def _for_good(findings, judge, room):
    """The memory stays taken: an error says so, and everything is as before the window."""
    for moment in MOMENTS:
        before = len(judge.wrong)
        # Where what is left suffices for smaller micro-batches, going on is right.
        played = judge.look(moment, Hog(moment, 2, keeps=True), limit_bytes=room)
        names = [] if played.left is None else differences(played.states[-1], played.left)
        raised = "nothing was raised" if played.error is None else f"{type(played.error).__name__}: {played.error}"
        found = f"{raised[:200]}; {f'changed: {names[:6]}' if names else 'nothing changed'}"
        findings.add(f"memory taken in {moment} for good", found, ok=len(judge.wrong) == before)


# --- lost and tests ---------------------------------------------------------------------------------------------------


def lost(findings):
    """Break the device in child processes, all at once, and read the errors."""
    prepare(["torch", "autoaccum", "gpu_cases"])
    ways = ("Runner.step", "fit", "find_micro_batch")
    with ThreadPoolExecutor(len(ways)) as pool:
        answers = list(pool.map(lambda way: call(_lost, way, timeout_s=findings.left_s() - 1), ways))
    for way, (_, told, why) in zip(ways, answers, strict=True):
        if told is None:
            findings.add(way, why, ok=False)
        else:
            findings.add(way, f"{told['type']}: {told['text']}", ok=told["type"] == "DeviceLostError", **told)


class _Looking(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1))


def _lost(_connection, way):
    """Train until a kernel's assertion breaks the device; return what was raised."""
    good, bad = ((tokens, torch.randint(4, (16,))) for tokens in (torch.randint(10, (16, 6)), torch.full((16, 6), 100)))
    model, options = _Looking(), {"loss": nn.CrossEntropyLoss(), "device": "cuda"}
    told = {"type": "none", "text": "nothing was raised"}
    try:
        if way == "fit":
            autoaccum.fit(model, [good, bad, *[good] * 20], 16, micro_batch=8, progress=False, **options)
        elif way == "find_micro_batch":
            autoaccum.find_micro_batch(model, bad, **options)
        else:
            runner = autoaccum.Runner(model, None, autoaccum.plan(16, 8), **options)
            for window in [good, bad, *[good] * 20]:
                runner.step(window)
    except Exception as error:  # noqa: BLE001 - it is what is looked at
        told = {"type": type(error).__name__, "text": str(error).splitlines()[0][:300]}
    return told


def tests(findings):
    """Run pytest under a share of the memory, and read its report."""
    where = [*([] if findings.tiny else ["tests/gpu"]), "tests/memory/test_base.py"]
    share = min(0.2, 12 * GIB / findings.machine["total_bytes"]) if findings.on_gpu else None
    code = f"import torch; torch.cuda.set_per_process_memory_fraction({share}); " if share else ""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Warnings are no errors: nobody has run the suite with this combination of versions.
        options = ["-v", "--timeout=60", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
        code += f"import sys, pytest; sys.exit(pytest.main({[*options, f'--junitxml={report}', *where]!r}))"
        try:
            limit_s = max(5.0, findings.left_s() - 3)
            subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            findings.add("tests", "not done in time", ok=False)
            return
        if not report.exists():
            findings.add("tests", "pytest ended without a report", ok=False)
            return
        counts, failures = Counter(), {}
        for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - our own report
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            failed, skipped = [*case.findall("failure"), *case.findall("error")], case.find("skipped")
            outcome = "failed" if failed else "skipped" if skipped is not None else "passed"
            counts[outcome] += 1
            counts["on the GPU"] += outcome == "passed" and ("[cuda" in name or ".gpu." in name)
            if failed:
                failures[name] = (failed[0].text or failed[0].get("message") or "")[-2500:]
    ran = counts["on the GPU" if findings.on_gpu else "passed"] > 0
    found = ", ".join(f"{number} {what}" for what, number in counts.items())
    findings.add("tests", found, ok=ran and not failures, **counts)
    for name, text in failures.items():
        last = [line for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-1:] or ["failed"]
        findings.add(name, last[0], ok=False, text=text)


# --- predictions ------------------------------------------------------------------------------------------------------

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Job:
    """A training whose memory is predicted and measured.

    Attributes:
        make: Makes the model; called on the meta device for a prediction.
        batch: Makes a batch of n samples on the CPU.
        samples: In a micro-batch.
        precision: As for `fit`.
        loss: As for `fit`; None for the model's own.
        optimizer: Makes the optimizer.
        tf32: Whether convolutions in float32 may use Tensor Cores.
    """

    make: Any
    batch: Any
    samples: int
    precision: str = "bf16"
    loss: Any = None
    optimizer: Any = ADAMW
    tf32: bool = True

    def loss_of(self, model, batch):
        """Run the model and return the loss, as a loop by hand does."""
        first = next(model.parameters())
        autocasts = self.precision in HALF and first.dtype is torch.float32
        with torch.autocast(first.device.type, HALF.get(self.precision), enabled=autocasts):
            return model(**batch).loss if self.loss is None else self.loss(model(batch[0]), batch[1])


def _placed(batch, device):
    if isinstance(batch, dict):
        return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


def _tokens(words, length, n, targets=None):
    tokens = torch.randint(3, words, (n, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens[:, :targets].clone()}


def _images(side, classes, n, *, masks=False):
    """Return images, of which at most eight differ, and their classes, or those of their pixels."""
    some = torch.randn(min(n, 8), 3, side, side, generator=torch.Generator().manual_seed(0))
    return some.repeat(-(-n // 8), 1, 1, 1)[:n], torch.randint(classes, (n, side, side) if masks else (n,))


def _sequences(length, width, n):
    return torch.randn(n, length, width), torch.randint(CLASSES, (n,))


def _transformer(kind, attention=None, *, checkpointed=False, lora=False, half=False, **settings):
    import transformers  # noqa: PLC0415 - large, and only some jobs need it

    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**ends, **settings)
    if kind != "T5ForConditionalGeneration":
        config.use_cache = False
    if attention:
        config._attn_implementation = attention
    model = model_class(config).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora or half:
        model.bfloat16()
    if lora:
        import peft  # noqa: PLC0415 - as above

        adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
    return model


def gpt2(tiny, length=1024):
    """Return what makes a GPT-2 of 124 million parameters, and its batches."""
    small = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2} if tiny else {}
    make = functools.partial(_transformer, "GPT2LMHeadModel", n_positions=length, **small)
    return make, functools.partial(_tokens, 256 if tiny else 50257, length)


def _vision(name, channels_last=False):
    import torchvision  # noqa: PLC0415 - as above

    model = getattr(torchvision.models, name)().train()
    return model.to(memory_format=torch.channels_last) if channels_last else model


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


class Recurrent(nn.Module):
    """A recurrent network that classifies sequences (N, length, width)."""

    def __init__(self, kind, width, layers):
        super().__init__()
        self.body = getattr(nn, kind)(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, sequences):
        """Return logits."""
        return self.head(self.body(sequences)[0][:, -1])


def jobs(tiny):
    """Return the jobs by name, the most important first."""
    part, ce = functools.partial, nn.CrossEntropyLoss()
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
    make_gpt2, gpt2_text = gpt2(tiny, length)
    lm, llama_text = part(_transformer, "LlamaForCausalLM", **llama), part(_tokens, llama["vocab_size"], length)
    encoder, text = part(_transformer, "BertForMaskedLM", **bert), part(_tokens, bert["vocab_size"], length // 2)
    mixture = part(_transformer, "MixtralForCausalLM", half=True, **mixtral)
    translator = part(_transformer, "T5ForConditionalGeneration", decoder_start_token_id=0, **t5)
    pairs = part(_tokens, t5["vocab_size"], length // 2, targets=length // 8)
    resnet, images = part(_vision, "resnet18" if tiny else "resnet50"), part(_images, side, 1000)
    unet, masks = part(UNet, 8 if tiny else 64), part(_images, 32 if tiny else 256, 21, masks=True)
    recurrent, sequences = part(Recurrent, width=length), part(_sequences, length // 4, length)
    vision_t, vit = part(_vision, "convnext_tiny"), part(_vision, "vit_b_16")
    listed = {
        "GPT-2 124M, bf16": Job(make_gpt2, gpt2_text, 8),
        "ResNet-50, fp32 with TF32": Job(resnet, images, 64, "fp32", ce, SGD),
        "Llama 1B, bf16": Job(lm, llama_text, 2),
        "BERT-base sdpa, bf16": Job(part(encoder, "sdpa"), text, 16),
        "LSTM 4 x 1024, fp32": Job(part(recurrent, "LSTM", layers=4), sequences, 64, "fp32", ce),
        "ConvNeXt-T, bf16": Job(vision_t, images, 64, "bf16", ce),
        "GPT-2 124M, fp32": Job(make_gpt2, gpt2_text, 4, "fp32"),
        "ResNet-50, bf16": Job(resnet, images, 128, "bf16", ce, SGD),
        "Llama 1B, bf16, checkpointed": Job(part(lm, checkpointed=True), llama_text, 4),
        "Llama 1B, bf16, LoRA": Job(part(lm, lora=True), llama_text, 2),
        "U-Net, bf16": Job(unet, masks, 16, "bf16", ce),
        "Mixtral (8 experts of 512), bf16": Job(mixture, part(_tokens, mixtral["vocab_size"], length), 4),
        "T5-small, bf16": Job(translator, pairs, 16),
        "GPT-2 124M, fp16 with a scaler": Job(make_gpt2, gpt2_text, 8, "fp16"),
        "ResNet-50, bf16, channels last": Job(part(resnet, channels_last=True), images, 128, "bf16", ce, SGD),
        "BERT-base eager, bf16": Job(part(encoder, "eager"), text, 16),
        "ViT-B/16, bf16": Job(vit, part(_images, 224, 1000), 64, "bf16", ce),
        "ResNet-50, fp32 without TF32": Job(resnet, images, 64, "fp32", ce, SGD, tf32=False),
        "GRU 2 x 1024, fp32": Job(part(recurrent, "GRU", layers=2), sequences, 64, "fp32", ce),
    }
    if not tiny:
        return listed
    kept = ("GPT-2 124M, bf16", "ResNet-50, bf16", "Llama 1B, bf16, LoRA", "LSTM 4 x 1024, fp32", "U-Net, bf16")
    return {name: Job(*(vars(listed[name]) | {"samples": 2}).values()) for name in kept}


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
            _, value, why = call(
                function, name, findings.tiny, *arguments, timeout_s=min(most_s, findings.left_s() - 3)
            )
            return value, why

    kept = {"timelines": {}, "allocations": {}}
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
        kept["timelines"][name] = found["predicted"].pop("timeline", None)
        kept["allocations"][name] = {what: found[what].pop("allocations", None) for what in ("real", "expandable")}
        texts = [f"{what}: {why}" for what, why in failed.items()]
        for what in ("allocated_bytes", "reserved_bytes"):
            said, true = found["predicted"].get(what), found["real"].get(what)
            if said and true:
                texts.append(f"{what.removesuffix('_bytes')} {size(true)}, predicted {said / true - 1:+.1%}")
        if not findings.on_gpu:
            texts.append(f"predicted {size(found['predicted'].get('allocated_bytes', 0))}")
        # Whether a prediction is near enough is judged where all of them are seen.
        findings.add(name, "; ".join(texts), ok=not failed, job=name, **found, failed=failed)
        for file, jobs_kept in kept.items():
            (findings.folder / f"{file}.json.gz").write_bytes(gzip.compress(json.dumps(jobs_kept).encode()))


def _trace(_connection, name, tiny, gpu):
    """Predict a job in a process that sees no GPU; return bytes and the timeline."""
    from autoaccum._estimate.estimate import trace_step  # noqa: PLC0415 - timelines have no public name
    from autoaccum._estimate.gpus import card_named, custom_card  # noqa: PLC0415 - as above

    try:
        card = card_named(gpu)
    except autoaccum.InvalidInputError:
        card = custom_card(f"{torch.cuda.get_device_properties(0).total_memory / GIB:.1f}GiB")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    job, began = jobs(tiny)[name], time.perf_counter()
    way = {"loss": job.loss, "optimizer": job.optimizer, "precision": job.precision, "tensor_float": job.tf32}
    batch = job.batch(min(job.samples, 2))
    traced = trace_step(job.make, batch, kind="cuda", sizes=[job.samples], card=card, **way)
    footprint, timeline = traced.estimate(card).footprints[-1], traced.step_of(job.samples)
    operators, modules = (sorted({getattr(one, what) for one in timeline.storages}) for what in ("operator", "module"))
    return {
        "samples": job.samples,
        "precision": job.precision,
        "allocated_bytes": footprint.peak_bytes,
        "reserved_bytes": footprint.reserved_bytes,
        "phase": footprint.phase,
        "uncertainty": traced.uncertainty,
        "seconds": time.perf_counter() - began,
        "timeline": {
            "operators": operators,
            "modules": modules,
            # Bytes, category, number of the operator, number of the module.
            "storages": [
                (one.size_bytes, one.category.value, operators.index(one.operator), modules.index(one.module))
                for one in timeline.storages
            ],
            "events": timeline.events,
            "phases": timeline.phases,
        },
    }


def _measure(_connection, name, tiny, device, expandable):
    """Train a job by hand, then with `Runner`; return the peaks, and every allocation of one update by hand."""
    job, on_gpu = jobs(tiny)[name], device == "cuda"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = job.tf32
    if on_gpu and expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    with torch.device(device):
        model = job.make()
    # Made on the device for speed, and moved there as a user's model is.
    model.cpu()
    settle()
    model.to(device)
    batch = job.batch(job.samples)
    update = _by_hand(model, job, [batch, batch], device)
    losses = [float(update()) for _ in range(2)]
    assert all(map(math.isfinite, losses)), losses
    found = {"losses": losses}
    if not on_gpu:
        return found | _with_runner(model, job, batch, device)
    torch.cuda.synchronize()
    found |= _peaks() | {"nvml_process_bytes": nvml_of_this_process(), "allocations": _allocations_of(update)}
    if not expandable:
        del update
        model.zero_grad()
        settle()
        found |= _with_runner(model, job, batch, device)
    return found


def _peaks(prefix=""):
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip((f"{prefix}allocated_bytes", f"{prefix}reserved_bytes"), peaks, strict=True))


def _by_hand(model, job, batches, device):
    """Return a function that makes one update by hand from these micro-batches; the next is on its way meanwhile."""
    optimizer = job.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    scaler = torch.amp.GradScaler(device, enabled=job.precision == "fp16")

    def update():
        total, coming = 0.0, _placed(batches[0], device)
        for following in (*batches[1:], None):
            here = coming
            coming = None if following is None else _placed(following, device)
            loss = job.loss_of(model, here) / len(batches)
            scaler.scale(loss).backward()
            total = total + loss.detach()
            del loss
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total

    return update


def _with_runner(model, job, batch, device):
    """Return the peaks of `Runner`: of its first windows, and of a later one."""
    plan, window = autoaccum.Plan(2 * job.samples, (job.samples,) * 2), autoaccum.Window([batch, batch])
    runner = autoaccum.Runner(model, job.optimizer, plan, loss=job.loss, device=device, precision=job.precision)
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


def _allocations_of(update):
    """Return every allocation of one update: bytes by number, and numbers as they come; `~number` where one ends."""
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=1_000_000)
    update()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    sizes, events, alive = [], [], {}
    for entry in trace:
        if entry["action"] == "alloc":
            alive[entry["addr"]] = len(sizes)
            events.append(len(sizes))
            sizes.append(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in alive:
            events.append(~alive.pop(entry["addr"]))
    return {"sizes": sizes, "events": events}


# --- neighbour --------------------------------------------------------------------------------------------------------

_TAKEN_AFTER, _GIVEN_AFTER, _EPOCHS = 16, 40, 30
_ROOM = 0.6  # share of a whole window's memory, beside what is always held


def _hold(connection):
    """Take and free memory of the GPU on command: bytes to leave, or None to give all back."""
    torch.zeros(1, device="cuda")
    connection.send(("told", 0))
    blocks = []
    while True:
        room = connection.recv()
        if room is None:
            blocks.clear()
            torch.cuda.empty_cache()
        for block in (GIB, 128 * MIB, 16 * MIB, 2 * MIB) if room is not None else ():
            with contextlib.suppress(torch.OutOfMemoryError):
                while torch.cuda.mem_get_info()[0] - room >= block:
                    blocks.append(torch.empty(block, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        connection.send(("told", sum(block.nbytes for block in blocks)))


class _Neighbour:
    """Another process on the GPU; without one, this process on a simulated device."""

    def __init__(self, device):
        self._device, self._block = device, None
        self._child = Child(_hold) if device == "cuda" else None
        if self._child:
            self._child.receive(60)

    def leave(self, room_bytes):
        """Take all memory but this, or with None give all back; return the bytes held."""
        if self._child:
            self._child.send(room_bytes)
            return self._child.receive(30)[1]
        self._block, reading = None, self._device.reading()
        taken = 0 if room_bytes is None else max(0, reading.total_bytes - reading.used_bytes - room_bytes)
        self._block = torch.empty(taken, dtype=torch.uint8)
        return taken

    def end(self):
        """End it."""
        if self._child:
            self._child.end()


def neighbour(findings):
    """Train beside a neighbour, then alone with the sizes that were used."""
    deterministic()
    prepare(["torch", "autoaccum", "gpu_cases"])
    work = Work("layers", *((8, 64, 16) if findings.tiny else (64, 256, 2048)), windows=4)
    device = "cuda" if findings.on_gpu else autoaccum.Simulated("1GiB")
    other, reports, seconds, took = _Neighbour(device), [], [], {}

    class Watch(autoaccum.Callback):
        last = None

        def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
            report.loss  # noqa: B018 - waits for the device
            seconds.append(None if self.last is None else time.perf_counter() - self.last)
            reports.append(report)
            if report.step == _TAKEN_AFTER:
                # Nobody can take what this process's allocator holds, so it lets go of its cache, as evaluations do.
                if findings.on_gpu:
                    peak = torch.cuda.max_memory_reserved()
                    torch.cuda.empty_cache()
                    held = torch.cuda.memory_reserved()
                else:
                    peak, held = device.peak_bytes(), device.reading().used_bytes
                took["room"] = int(_ROOM * (peak - held))
                took["taken"] = other.leave(took["room"])
            elif report.step == _GIVEN_AFTER:
                other.leave(None)
            self.last = time.perf_counter()

    model = work.model(_EPOCHS)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    options = {"loss": nn.CrossEntropyLoss(), "device": device, "precision": "fp32"}
    way = {"epochs": _EPOCHS, "micro_batch": work.samples, "callbacks": [Watch()], "progress": False} | options
    try:
        autoaccum.fit(model, work.batches(), work.samples, optimizer=optimizer, **way)
    finally:
        other.end()
    state, used = state_of(model, optimizer), model.noted()
    findings.add("the neighbour took", f"{size(took['taken'])}, and left {size(took['room'])}", ok=took["taken"] > 0)
    sizes = [report.micro_batches for report in reports]
    spans = {"before": (1, _TAKEN_AFTER), "during": (_TAKEN_AFTER, _GIVEN_AFTER), "after": (_GIVEN_AFTER, len(reports))}
    for name, (begin, end) in spans.items():
        ms = [1e3 * one for one in seconds[begin:end]]
        ran_out = sum(report.oom_events for report in reports[begin:end])
        seen = list(dict.fromkeys("+".join(map(str, one)) for one in sizes[begin:end]))
        text = f"micro-batches {', '.join(seen)}; memory ran out {ran_out} times; {spread(ms, ' ms a step')}"
        ok = {"before": ran_out == 0, "during": ran_out > 0, "after": len(sizes[-1]) == 1}[name]
        findings.add(f"{name}: steps {begin + 1} to {end}", text, ok=ok, sizes=seen, ran_out=ran_out)
    once = used == list(range(work.windows * work.samples)) * _EPOCHS
    findings.add("samples", "each once an epoch, in order" if once else "NOT each once, in order", ok=once)
    model = work.model(_EPOCHS)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(work.samples, work.samples), **options)
    for window, one in zip(work.batches() * _EPOCHS, sizes, strict=True):
        runner.plan = autoaccum.Plan(work.samples, one)
        runner.step(window)
    names = differences(state, state_of(model, optimizer))
    text = f"NOT THE SAME: {names[:6]}" if names else "every bit the same"
    findings.add("an undisturbed run with these sizes", text, ok=not names)


# --- overhead and transfer --------------------------------------------------------------------------------------------

_MICRO_BATCHES = 4
# Layers (two parameter tensors each), width and samples of a micro-batch. Launching the kernels of the smallest takes
# longer than 0.1 ms by hand.
SIZES = {
    "6 tensors, smallest": (3, 64, 8),
    "6 tensors, about 1 ms": (3, 2048, 512),
    "6 tensors, about 10 ms": (3, 4096, 1536),
    "150 tensors, smallest": (75, 64, 8),
    "150 tensors, about 10 ms": (75, 1024, 1024),
}


class _Deep(nn.Module):
    def __init__(self, layers, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = functional.relu(layer(x))
        return x


def overhead(findings):
    """Time windows of Runner, of Accumulator and of the loop by hand, in turn."""
    if not findings.on_gpu:
        torch.set_num_threads(1)
    for name, (layers, *shape) in SIZES.items():
        if findings.left_s() < 3:
            findings.skip(name, NO_TIME)
            continue
        width, samples = (16, 8) if findings.tiny else shape
        torch.manual_seed(0)
        models = [_Deep(layers, width).to(findings.device) for _ in range(3)]
        batch = torch.randn(_MICRO_BATCHES * samples, width), torch.randint(width, (_MICRO_BATCHES * samples,))
        loops = _loops(models, _pinned(batch, findings), samples, findings.device)
        rounds = 8 if findings.tiny else 40
        times = in_turn(findings.device, loops, rounds, lambda: findings.left_s() > 3, warm_up=6)
        by_hand = [1e3 * one / _MICRO_BATCHES for one in times["by hand"]]
        for ours in ("Runner", "Accumulator"):
            pairs = list(zip(times[ours], times["by hand"], strict=True))
            added = [1e6 * (one - other) / _MICRO_BATCHES for one, other in pairs]
            ratio = [one / other for one, other in pairs]
            text = f"{spread(by_hand, ' ms')} a micro-step by hand; ratio {spread(ratio, digits=3)}"
            data = {"by_hand_ms": quartiles(by_hand), "ratio": quartiles(ratio), "added_us": quartiles(added)}
            findings.add(f"{ours}, {name}", f"{text}; added {spread(added, ' µs', 1)}", **data)


def _pinned(batch, findings):
    return tuple(part.pin_memory() for part in batch) if findings.on_gpu else batch


def _loops(models, batch, samples, device):
    loss, (inputs, targets) = nn.CrossEntropyLoss(), batch
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
    options = {"loss": loss, "device": device, "precision": "fp32"}
    runner = autoaccum.Runner(models[0], optimizers[0], autoaccum.plan(len(targets), samples), **options)
    accumulator = autoaccum.Accumulator(models[1], micro_batch=samples, **options)

    def accumulate():
        optimizers[1].zero_grad()
        accumulator.backward(batch)
        optimizers[1].step()

    def by_hand():
        optimizers[2].zero_grad()
        for start in range(0, len(targets), samples):
            part = slice(start, start + samples)
            outputs = models[2](inputs[part].to(device, non_blocking=True))
            (loss(outputs, targets[part].to(device, non_blocking=True)) * samples / len(targets)).backward()
        optimizers[2].step()

    return {"Runner": lambda: runner.step(batch), "Accumulator": accumulate, "by hand": by_hand}


def transfer(findings):
    """Time windows whose transfer takes a large part of their time: pinned, pageable, and on the device already."""
    side, samples, rounds = (32, 4, 3) if findings.tiny else (224, 64, 12)
    torch.manual_seed(0)
    patches = nn.Sequential(nn.Conv2d(3, 256, 16, stride=16), nn.GELU(), nn.Conv2d(256, 256, 1), nn.Flatten())
    light = nn.Sequential(patches, nn.Linear(256 * (side // 16) ** 2, 10))
    pageable, functions = _images(side, 10, 8 * samples), {}
    pinned = _pinned(pageable, findings)
    there = _placed(pinned, findings.device)
    for name, batch in (("pinned", pinned), ("pageable", pageable), ("on the device", there)):
        models = [copy.deepcopy(light).to(findings.device) for _ in range(3)]
        loops = _loops(models, batch, samples, findings.device)
        functions |= {f"{way}, {name}": loops[way] for way in ("Runner", "by hand")}
    times = in_turn(findings.device, functions, rounds, lambda: findings.left_s() > 2, warm_up=4)
    pure, usual = (quartiles(times[f"by hand, {name}"])[1] for name in ("on the device", "pinned"))
    for way, took in times.items():
        # What is promised is not to be slower than the usual loop.
        ok = quartiles(took)[1] <= 1.1 * usual if way == "Runner, pinned" and findings.on_gpu else None
        text = f"{spread([1e3 * one for one in took], ' ms')}; {quartiles(took)[1] / pure:.2f} of computing alone"
        findings.add(way, text, ok=ok, seconds=took)


# --- throughput -------------------------------------------------------------------------------------------------------


def throughput(findings):
    """Let `fit` choose the size for GPT-2, and time it against the best size by hand."""
    length, target = (32, 8) if findings.tiny else (1024, 96)
    device, (make, tokens) = findings.device, gpt2(findings.tiny, length)
    torch.manual_seed(0)
    with torch.device(device):
        model = make()
    names, parts = zip(*tokens(target).items(), strict=True)
    window = dict(zip(names, _pinned(parts, findings), strict=True))
    job, trials, began = Job(make, tokens, target), [], time.perf_counter()

    class Watch(autoaccum.Callback):
        def on_trial(self, trial):
            trials.append(trial)

    limit_bytes = torch.cuda.get_device_properties(0).total_memory // 2 if findings.on_gpu else None
    way = {"optimizer": job.optimizer, "device": device, "precision": "bf16"}
    result = autoaccum.fit(model, [window] * 10, target, memory_limit=limit_bytes, callbacks=[Watch()], **way)
    plan, chosen = result.plan, result.plan.micro_batches[0]
    text = (
        f"micro-batches {'+'.join(map(str, plan.micro_batches))}; {len(trials)} trials, {result.oom_events} times out "
    )
    text += f"of memory; {time.perf_counter() - began:.1f} s in all"
    findings.add("fit chose", text, ok=result.steps == 10, sizes=plan.micro_batches)
    settle()
    runner = autoaccum.Runner(model, job.optimizer, plan, device=device, precision="bf16")
    by_hand, rates = copy.deepcopy(model), {}

    def updates(model, samples):
        pieces = zip(*(part.split(samples) for part in window.values()), strict=True)
        return _by_hand(model, job, [dict(zip(window, piece, strict=True)) for piece in pieces], device)

    for samples in sorted({chosen, *((1, 2, 4) if findings.tiny else (8, 16, 32, 48))}):
        if findings.left_s() < 18:
            break
        settle()
        try:
            with _limited(by_hand, device, limit_bytes):
                took = in_turn(device, {"": updates(by_hand, samples)}, 2, warm_up=1)[""]
        except torch.OutOfMemoryError:
            break
        rates[samples] = target * length / min(took)
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
    functions = {"Runner, as fit chose": lambda: runner.step(window), f"by hand, {best}": updates(by_hand, best)}
    times = in_turn(device, functions, 5, lambda: findings.left_s() > 3)
    for name, took in times.items():
        rate = [target * length / one for one in took]
        findings.add(name, spread(rate, " tokens a second", 0), tokens_per_s=quartiles(rate))
    ratio = [other / one for one, other in zip(*times.values(), strict=True)]
    ok = statistics.median(ratio) > 0.95 if findings.on_gpu else None
    findings.add("fit's rate over the best by hand", spread(ratio, digits=3), ok=ok, ratio=quartiles(ratio))


# --- the probe and other finders --------------------------------------------------------------------------------------

_LIMIT_BYTES = 8 * 10**9
_WANTED = 512  # the most a user wants, from which Accelerate starts
_FIT_ON_CPU = 21  # samples, where there is no GPU whose memory could be limited


@contextlib.contextmanager
def _limited(model, device, limit_bytes):
    """Limit this process's share of the GPU; without one, the samples that the model takes."""

    def refuse(_module, args, kwargs):
        if len(args[0] if args else kwargs["input_ids"]) > _FIT_ON_CPU:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (rehearsed)")

    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(0).total_memory)
    handle = model.register_forward_pre_hook(refuse, with_kwargs=True) if device == "cpu" else None
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
        else:
            handle.remove()


def _searched(name, tiny):
    """Return one of the two jobs for which sizes are searched."""
    if name == "ResNet-50":
        vision, side = ("resnet18", 32) if tiny else ("resnet50", 224)
        make, images = functools.partial(_vision, vision), functools.partial(_images, side, 1000)
        return Job(make, images, 8, "bf16", nn.CrossEntropyLoss())
    return Job(*gpt2(tiny, 32 if tiny else 512), 8)


def probe(findings):
    """Let `find_micro_batch` search under a limit, and find the truth with a fresh process for each size."""
    prepare(["torch", "torchvision", "transformers", "autoaccum", "gpu_cases"])
    # Two models are searched for at once, and each process has a context beside the limit.
    at_once = min(5, int((findings.machine["total_bytes"] / GIB - 8) / 9 / 2)) if findings.on_gpu else 1

    def look(name):
        job = name, findings.tiny, findings.device
        _, found, why = call(_probed, *job, timeout_s=findings.left_s() - 2)
        if found is None:
            findings.add(f"{name}: find_micro_batch", why, ok=False)
            return
        text = f"{found['size']}; {found['trials']} trials, {found['failures']} failed, {found['seconds']:.1f} s"
        findings.add(f"{name}: find_micro_batch", text, **found)

        def fits(n):
            return call(_fits, *job, n, timeout_s=max(1.0, min(30.0, findings.left_s() - 1)))[1]

        with ThreadPoolExecutor(at_once) as pool:
            all_fit = lambda sizes: dict(zip(sizes, pool.map(fits, sizes), strict=True))  # noqa: E731
            low, high, tried = bracket(found["size"], all_fit, at_once, lambda: findings.left_s() > 8)
        share = found["size"] / low if low else 0.0
        text = f"{low} fits, {high} does not" + ("" if high == low + 1 else " (not closed)")
        ok = tried.get(found["size"]) is not False and share >= 0.9
        data = {"low": low, "high": high, "share": share, "closed": high == low + 1, "tried": tried}
        findings.add(f"{name}: the truth", f"{text}; the answer is {share:.1%} of it", ok=ok, **data)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(look, ("ResNet-50", "GPT-2")))


def bracket(answer, fit, at_once, has_time):
    """Close a bracket around the largest size that fits, starting at an answer.

    Args:
        answer: A size near the truth.
        fit: Returns for each of several sizes whether it fits, or None if that could not be found out.
        at_once: Sizes to try at a time.
        has_time: Whether there is time for another round.

    Returns:
        The largest size seen to fit (0 if none), the smallest above it seen not to (None if none), and all sizes tried.
    """
    tried, low, high = {}, 0, None
    sizes = sorted({answer, answer + 1, *(math.ceil(answer * factor) for factor in (1.02, 1.05, 1.1))})[:at_once]
    while sizes and has_time():
        told = {n: fits for n, fits in fit(sizes).items() if fits is not None}
        if not told:
            break
        tried |= told
        low = max((n for n, fits in tried.items() if fits), default=0)
        high = min((n for n, fits in tried.items() if not fits and n > low), default=None)
        if high is None:
            sizes = sorted({low + 1, *(math.ceil(low * factor) for factor in (1.15, 1.3, 1.7, 2.5))})[-at_once:]
        else:
            inside = range(low + 1, high)
            number = min(at_once, len(inside))
            sizes = sorted({inside[(2 * k + 1) * len(inside) // (2 * number)] for k in range(number)})
    return low, high, tried


def _probed(_connection, name, tiny, device):
    job = _searched(name, tiny)
    model, began = job.make(), time.perf_counter()
    way = {"loss": job.loss, "optimizer": job.optimizer, "device": device, "precision": job.precision}
    limit = {"memory_limit": _LIMIT_BYTES} if device == "cuda" else {}
    with contextlib.nullcontext() if device == "cuda" else _limited(model, device, None):
        found = autoaccum.find_micro_batch(model, job.batch(8), max_micro_batch=_WANTED, **way, **limit)
    failures, seconds = sum(not trial.fits for trial in found.trials), time.perf_counter() - began
    return {"size": found.micro_batch, "trials": len(found.trials), "failures": failures, "seconds": seconds}


def _fits(_connection, name, tiny, device, n):
    """Whether two updates by hand, of two micro-batches of n samples, fit."""
    job = _searched(name, tiny)
    model = job.make().to(device)
    with _limited(model, device, _LIMIT_BYTES):
        try:
            _hand_updates(model, job, n, device, micro_batches=2)
        except torch.OutOfMemoryError:
            return False
    return True


def _hand_updates(model, job, n, device, micro_batches=1):
    update = _by_hand(model, job, [job.batch(n)] * micro_batches, device)
    for _ in range(2):
        update()
    wait_for(device)


def finders(findings):
    """Let Accelerate's and Lightning's finders search under the same limit."""
    prepare(["torch", "torchvision", "transformers", "autoaccum", "lightning.pytorch", "accelerate", "gpu_cases"])

    def look(name):
        for finder in ("Accelerate", "Lightning"):
            job = name, findings.tiny, findings.device
            _, found, why = call(_found_by, finder, *job, timeout_s=max(1.0, findings.left_s() - 2))
            if found is None:  # another finder's failure is a finding
                findings.add(f"{name}: {finder}", why)
            else:
                text = f"{found['size']}; {found['sizes']} sizes, {found['seconds']:.1f} s"
                findings.add(f"{name}: {finder}", text, **found)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(look, ("ResNet-50", "GPT-2")))


def _found_by(_connection, finder, name, tiny, device):
    job = _searched(name, tiny)
    model, began = job.make().to(device), time.perf_counter()
    with _limited(model, device, _LIMIT_BYTES):
        answer, tried = (_accelerate if finder == "Accelerate" else _lightning)(job, model, device)
    tried = list(dict.fromkeys(tried))
    return {"size": answer, "sizes": len(tried), "seconds": time.perf_counter() - began, "tried": tried}


def _accelerate(job, model, device):
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415 - a peer

    tried = []

    @find_executable_batch_size(starting_batch_size=_WANTED)
    def train(batch_size):
        tried.append(batch_size)
        model.zero_grad()
        _hand_updates(model, job, batch_size, device)
        return batch_size

    return train(), tried


def _lightning(job, model, device):
    import lightning.pytorch as pl  # noqa: PLC0415 - a peer
    from lightning.pytorch.tuner import Tuner  # noqa: PLC0415 - as above

    one, tried = job.batch(1), []

    class Same(torch.utils.data.Dataset):
        def __len__(self):
            return 4 * _WANTED

        def __getitem__(self, index):
            is_text = isinstance(one, dict)
            return {name: part[0] for name, part in one.items()} if is_text else tuple(part[0] for part in one)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.batch_size = model, 2

        def training_step(self, batch, _):
            tried.append(len(batch["input_ids"] if isinstance(batch, dict) else batch[0]))
            return self.model(**batch).loss if isinstance(batch, dict) else job.loss(self.model(batch[0]), batch[1])

        def train_dataloader(self):
            return torch.utils.data.DataLoader(Same(), batch_size=self.batch_size)

        def configure_optimizers(self):
            return job.optimizer(self.parameters())

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    where = {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1, "precision": "bf16-mixed"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(max_epochs=1, default_root_dir=folder, **where, **quiet)
        return Tuner(trainer).scale_batch_size(Module(), mode="binsearch", init_val=2, steps_per_trial=3), tried


# --- memory= and ResNet-101 -------------------------------------------------------------------------------------------


def saving(findings):
    """Train GPT-2 with each way to save memory: peak and seconds of a window."""
    prepare(["torch", "transformers", "autoaccum", "gpu_cases"])
    sizes = ((64, 8, 50),) if findings.tiny else ((4096, 768, 50257), (8192, 2048, 32000), (8192, 4096, 128256))
    _, found, why = call(_heads, sizes, findings.device, timeout_s=findings.left_s() - 2)
    if found is None:
        findings.add("losses of heads", why, ok=False)
    for (tokens, features, classes), seconds in zip(sizes, found or (), strict=False):
        text = "; ".join(f"{way} {1e3 * one:.1f} ms" for way, one in seconds.items())
        findings.add(f"loss of a head of {features} x {classes}, {tokens} tokens", text, seconds=seconds)
    ways = {"nothing": None, "chunked_loss": "chunked_loss", "checkpoint": "checkpoint", "offload": "offload"}
    for name, way in ways.items():
        if findings.left_s() < 3 or (way == "offload" and not findings.on_gpu):
            # Without a GPU everything is on the host already.
            findings.skip(name, NO_TIME if findings.left_s() < 3 else NO_GPU)
            continue
        _, found, why = call(_saved, way, findings.tiny, findings.device, timeout_s=findings.left_s() - 2)
        if found is None:
            findings.add(name, why, ok=False)
            continue
        text = (
            f"{spread([1e3 * one for one in found['seconds']], ' ms', 1)} a window; first loss {found['losses'][0]:.5f}"
        )
        text += f"; {size(found['allocated_bytes'])} at most" if findings.on_gpu else ""
        findings.add(name, text, ok=all(map(math.isfinite, found["losses"])), **found)


def _heads(_connection, sizes, device):
    """Return median seconds of forward and backward of heads' losses: of whole logits, in chunks, by Liger."""
    return [_head(*one, device) for one in sizes]


def _head(tokens, features, classes, device):
    from autoaccum._engine import chunked_loss  # noqa: PLC0415 - which kernel is taken has no public name

    head = nn.Linear(features, classes, bias=False, device=device)
    hidden = torch.randn(tokens, features, device=device, requires_grad=True)
    labels, loss = torch.randint(classes, (tokens,), device=device), autoaccum.ChunkedLoss(head)
    chosen = chunked_loss.has_kernel

    def whole(rows, targets):
        return functional.cross_entropy(head(rows).float(), targets)

    def run(way):
        chunked_loss.has_kernel = chosen if way == "chosen" else lambda *_: way == "Liger"
        compute = whole if way == "whole" else loss
        with torch.autocast(device, torch.bfloat16):
            compute(hidden, labels).backward()
        head.weight.grad = hidden.grad = None

    ways = {"whole logits": "whole", "chunks": "chunks", "as chosen": "chosen"}
    ways |= {"Liger": "Liger"} if device == "cuda" and chunked_loss._of_liger() else {}
    times = in_turn(device, {way: functools.partial(run, kernel) for way, kernel in ways.items()}, 5, warm_up=2)
    return {way: statistics.median(values) for way, values in times.items()}


def _saved(_connection, way, tiny, device):
    """Train a few windows of GPT-2 with this `memory=`; return seconds, losses and peaks."""
    length, samples = (32, 2) if tiny else (1024, 4)
    make, tokens = gpt2(tiny, length)
    torch.manual_seed(0)
    with torch.device(device):
        model = make()
    window, plan = tokens(2 * samples), autoaccum.plan(2 * samples, samples)
    runner = autoaccum.Runner(model, ADAMW, plan, device=device, precision="bf16", memory=way)
    losses = [runner.step(window).loss for _ in range(2)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    # The fourth window makes checks, and so does the eighth.
    seconds = in_turn(device, {"": lambda: runner.step(window)}, 3, warm_up=2)[""]
    return {"seconds": seconds, "losses": losses} | (_peaks() if device == "cuda" else {})


def resnet101(findings):
    """Train ResNet-101 with a target batch of 100 under a limit in which 50 fit, end to end."""
    name, side, target, fit = ("resnet18", 32, 12, 6) if findings.tiny else ("resnet101", 224, 100, 50)
    make, batch = functools.partial(_vision, name), _images(side, 100, target)
    adam = functools.partial(torch.optim.Adam, lr=5e-4)
    options = {"loss": nn.CrossEntropyLoss(), "optimizer": adam, "device": findings.device}
    limit = None
    if findings.on_gpu:
        found = autoaccum.find_micro_batch(make(), batch, max_micro_batch=fit, **options)
        limit = int(found.fixed_bytes + (fit + 0.5) * found.bytes_per_sample)
        findings.add("memory limit", f"{size(limit)}, in which {fit} samples were to fit", limit_bytes=limit)
        settle()
    trials = []

    class Watch(autoaccum.Callback):
        def on_trial(self, trial):
            trials.append(trial)

    result = autoaccum.fit(make(), [batch] * 6, target, memory_limit=limit, callbacks=[Watch()], **options)
    largest = max((trial.size for trial in trials if trial.fits), default=max(result.plan.micro_batches))
    ok = 0.9 * fit <= largest <= 1.1 * fit if findings.on_gpu else None
    findings.add("largest that fits", f"{largest}, after {len(trials)} trials", ok=ok, largest=largest)
    losses, chosen = [report.loss for report in result.history], "+".join(map(str, result.plan.micro_batches))
    text = f"{result.steps} in {result.elapsed_s:.1f} s, at last of {chosen}; memory ran out {result.oom_events} times"
    findings.add("updates", text, ok=result.steps == 6 and all(map(math.isfinite, losses)), losses=losses)
    if findings.on_gpu:
        peak = max(report.peak_bytes for report in result.history)
        findings.add("peak", f"{size(peak)} of {size(limit)} ({peak / limit:.1%})", ok=peak <= limit, peak=peak)
