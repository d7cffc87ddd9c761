"""Part of gpu.py: a GPT-2 in bf16, trained with the plan that `fit` finds and with a hand-written loop of that cut.

The model is made from its configuration, with random weights; without transformers, a model of the same size replaces
it. Both trainings start with the same weights and use the same windows, in turn.
"""

from __future__ import annotations

import copy
import math

import torch
from gpu_common import in_turn, missing, quartiles, run_part, settle, size, spread
from gpu_models import SmallGpt

import autoaccum
from autoaccum._memory import backend_for
from autoaccum._system.notices import Notices

_ROUNDS = 6
_FIT_STEPS = 8  # sizes may be tried in the first few


def gpt2(findings, options):
    """Let fit find its plan, then time it against the hand-written loop."""
    device = torch.device(options.device)
    precision = "bf16" if device.type == "cpu" or torch.cuda.is_bf16_supported() else "fp16"
    target, length = (8, 16) if options.tiny else (96, 1024)
    torch.manual_seed(0)
    name, model, words = _model(options.tiny, length)
    window = _window(words, target, length, device)
    start = copy.deepcopy(model.state_dict())
    memory = backend_for(device)
    # Half of the card: two models and two optimizers must fit later.
    limit = "400MiB" if options.tiny else 0.5
    shown = []

    class Watch(autoaccum.Callback):
        def on_trial(self, trial):
            shown.append(trial)

    result = autoaccum.fit(
        model,
        [window] * _FIT_STEPS,
        target,
        optimizer=_adamw,
        device=memory,
        precision=precision,
        memory_limit=limit,
        callbacks=[Watch()],
    )
    plan = result.plan
    cut = "+".join(map(str, plan.micro_batches))
    tokens = target * length
    parameters = sum(parameter.numel() for parameter in model.parameters())
    findings.add(
        "fit",
        f"{name}, {parameters / 1e6:.0f} M parameters, {target} x {length} tokens an update, {precision}: cut {cut}, "
        f"{len(shown)} trials in {sum(trial.elapsed_s for trial in shown):.1f} s; the whole call took "
        f"{result.elapsed_s:.1f} s; peak {size(max((t.peak_bytes or 0 for t in shown), default=0))}",
        ok=result.steps == _FIT_STEPS,
        oom_events=result.oom_events,
        trials=[str(trial) for trial in shown],
    )
    model.load_state_dict(start)
    by_hand = copy.deepcopy(model)
    settle(device)
    runner = autoaccum.Runner(model, _adamw, plan, device=memory, precision=precision, notices=Notices(silent=True))
    ours, theirs = [], []
    hand_update = _by_hand(by_hand, window, plan, device, precision)
    functions = {
        "the plan of fit": lambda: ours.append(runner.step(window).loss),
        "by hand, the same cut": lambda: theirs.append(hand_update()),
    }
    times = in_turn(device, functions, _ROUNDS, left_s=lambda: findings.left_s() - 3)
    rates = {way: [tokens / seconds for seconds in took] for way, took in times.items()}
    for way, values in rates.items():
        findings.add(way, f"{spread(values, ' tokens a second', 0)}", tokens_per_s=values)
    ratio = quartiles([a / b for a, b in zip(*rates.values(), strict=True)])[1]
    findings.add("ratio", f"{ratio:.3f}", ok=ratio > 0.95 if device.type == "cuda" else None)
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    finite = all(map(math.isfinite, ours))
    findings.add(
        "losses",
        f"{ours[0]:.4f} to {ours[-1]:.4f}; at most {apart:.2g} apart from those by hand",
        ok=finite and apart < 0.05,
        ours=ours,
        by_hand=theirs,
    )


def _model(tiny, length):
    if missing(["transformers"]):
        settings = {"words": 256, "width": 32, "layers": 2, "heads": 2} if tiny else {"words": 50257, "width": 768}
        further = {} if tiny else {"layers": 12, "heads": 12}
        model = SmallGpt(**settings, **further, length=length)
        return "a GPT of this project (transformers is missing)", model, model.words.num_embeddings
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - it may be missing

    small = {"vocab_size": 256, "n_positions": length, "n_embd": 32, "n_layer": 2, "n_head": 2} if tiny else {}
    # The cache of keys and values is only for generation.
    # No dropout, so that two trainings that draw differently can be compared.
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**small, **dropout, use_cache=False, bos_token_id=0, eos_token_id=0)
    return "GPT2LMHeadModel", GPT2LMHeadModel(config).train(), config.vocab_size


def _window(words, target, length, device):
    tokens = torch.randint(words, (target, length))
    tokens = tokens.pin_memory() if device.type == "cuda" else tokens
    return {"input_ids": tokens, "labels": tokens}


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def _by_hand(model, window, plan, device, precision):
    optimizer = _adamw(model.parameters())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")

    def update():
        optimizer.zero_grad()
        start, losses = 0, []
        for length in plan.micro_batches:
            part = {
                name: tensor[start : start + length].to(device, non_blocking=True) for name, tensor in window.items()
            }
            with torch.autocast(device.type, dtype=dtype):
                loss = model(**part)["loss"] * (length / plan.target_batch)
            scaler.scale(loss).backward()
            losses.append(loss.detach())
            start += length
        scaler.step(optimizer)
        scaler.update()
        return float(torch.stack(losses).sum())

    return update


if __name__ == "__main__":
    run_part(gpt2, __doc__)
