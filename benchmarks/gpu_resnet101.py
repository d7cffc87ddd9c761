"""Part of gpu.py: ResNet-101 on 224 x 224 images with Adam, target batch 100, under a limit in which about 50 fit.

The limit is derived from this card: two trials without a limit measure the memory of a sample, and the limit is set for
50.5 samples. Reported are the size that `fit` then finds and its cost.
"""

from __future__ import annotations

import math

import torch
from gpu_common import missing, run_part, settle, size, timed
from torch import nn

import autoaccum
from autoaccum._memory import backend_for

_UPDATES = 12


def fit_under_a_limit(findings, options):
    """Find the limit, and train under it."""
    if missing(["torchvision"]):
        findings.add("ResNet-101", "not run: torchvision is missing")
        return
    import torchvision  # noqa: PLC0415 - it may be missing

    device = torch.device(options.device)
    make, side, target, tolerable = torchvision.models.resnet101, 224, 100, 50
    if options.tiny:
        make, side, target, tolerable = torchvision.models.resnet18, 64, 16, 8
    torch.manual_seed(0)
    images, labels = torch.randn(target, 3, side, side), torch.randint(100, (target,))
    if device.type == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=5e-4)

    limit = _limit_for(tolerable, make(), (images, labels), adam, device)
    settle(device)
    model = make()
    loader = [(images, labels)] * _UPDATES
    reports, trials = [], []

    class Watch(autoaccum.Callback):
        def on_trial(self, trial):
            trials.append(trial)

        def on_step(self, report, *, epoch):  # noqa: ARG002 - as the base has it
            report.loss  # noqa: B018 - waits for the device, so that its time is this update's
            reports.append(report)

    memory = backend_for(device)
    result = autoaccum.fit(
        model,
        loader,
        target,
        loss=nn.CrossEntropyLoss(),
        optimizer=adam,
        max_steps=_UPDATES,
        device=memory,
        memory_limit=limit,
        callbacks=[Watch()],
    )
    _tell(findings, result, reports, trials, limit, target, tolerable, counts_peaks=device.type == "cuda")
    _by_hand(findings, model, (images, labels), adam, device, result.plan)


def _limit_for(tolerable, model, batch, adam, device):
    """Return a limit in which `tolerable` samples fit and few more."""
    found = autoaccum.find_micro_batch(
        model, batch, loss=nn.CrossEntropyLoss(), optimizer=adam, device=device, max_micro_batch=tolerable
    )
    if found.micro_batch < tolerable or found.fixed_bytes is None:
        raise RuntimeError(f"without a limit {found.micro_batch} fit, which tells too little: {found.trials}")
    return int(found.fixed_bytes + (tolerable + 0.5) * found.bytes_per_sample)


def _tell(findings, result, reports, trials, limit, target, tolerable, *, counts_peaks):
    findings.add("memory limit", f"{size(limit)}, of which {tolerable} samples were to fit", limit_bytes=limit)
    listed = ", ".join(
        f"{trial.size} {'fits' if trial.fits else 'does not fit'}"
        + (f" ({size(trial.peak_bytes)})" if trial.peak_bytes else "")
        for trial in trials
    )
    took = sum(trial.elapsed_s for trial in trials)
    findings.add("trials", f"{len(trials)} in {took:.1f} s: {listed}", trials=[str(trial) for trial in trials])
    fits = max((trial.size for trial in trials if trial.fits), default=0)
    findings.add("largest that fits", fits, ok=0.8 * tolerable <= fits <= 1.2 * tolerable if counts_peaks else None)
    cuts = sorted({report.micro_batches for report in reports})
    findings.add("cut", " or ".join("+".join(map(str, cut)) for cut in cuts), ok=all(sum(c) == target for c in cuts))
    peak = max((report.peak_bytes or 0 for report in reports), default=0)
    # On the host a peak counts resident memory, and a limit address space.
    ok = peak <= limit if counts_peaks else None
    findings.add("peak", f"{size(peak)} of {size(limit)} ({peak / limit:.1%})", ok=ok, peak=peak)
    # Sizes may be tried in the first windows; only the resulting plan counts.
    planned = [report.elapsed_s for report in reports if report.micro_batches == result.plan.micro_batches]
    settled = planned[1:] or [report.elapsed_s for report in reports[1:]]
    losses = [report.loss for report in reports]
    failed = sum(not trial.fits for trial in trials)
    findings.add("out of memory in training", f"{result.oom_events} times, {failed} trials failed")
    findings.add(
        "updates",
        f"{len(reports)}; by the plan {len(settled) / sum(settled):.2f} a second, "
        f"{target * len(settled) / sum(settled):.0f} samples a second; the whole call took {result.elapsed_s:.1f} s",
        ok=len(reports) == _UPDATES and all(map(math.isfinite, losses)),
        seconds=settled,
        losses=losses,
        call_s=result.elapsed_s,
    )


def _by_hand(findings, model, batch, adam, device, plan):
    """Time the hand-written loop for the known cut, without the limit, on the trained model."""
    criterion, optimizer = nn.CrossEntropyLoss(), adam(model.parameters())
    half = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16

    def update():
        optimizer.zero_grad()
        start = 0
        for length in plan.micro_batches:
            part = [tensor[start : start + length].to(device, non_blocking=True) for tensor in batch]
            with torch.autocast(device.type, dtype=half, enabled=device.type == "cuda"):
                loss = criterion(model(part[0]), part[1])
            (loss * (length / plan.target_batch)).backward()
            start += length
        optimizer.step()

    timed(device, update)
    took = [timed(device, update) for _ in range(_UPDATES - 1)]
    findings.add("the same by hand", f"{len(took) / sum(took):.2f} updates a second", seconds=took)


if __name__ == "__main__":
    run_part(fit_under_a_limit, __doc__)
