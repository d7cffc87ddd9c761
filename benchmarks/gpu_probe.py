"""Part of gpu.py: compares the probe's answer with the largest size that really fits and with other finders.

All search for the largest batch of a ResNet-50 and of a small GPT under the same limit on the process. The truth is
found with a fresh process per size: several at once if the card has room, and none once the bracket is closed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_common import GIB, MIB, last_json, missing, run_part, settle, size, start_child

MODELS = ("ResNet-50", "small GPT")
_WANTED = 512  # the most a user wants, from which Accelerate starts
_TRIES_S = 45.0  # for one process
_OTHERS_S = 40.0  # kept for the other finders, which come last


def probes(findings, options):
    """Run every finder, then find the truth."""
    limit = 260 * MIB if options.tiny else _limit(options.device)
    findings.add("memory limit on the process", size(limit), limit_bytes=limit)
    finders = ["autoaccum", *(["Accelerate"] if not missing(["accelerate"]) else [])]
    finders += ["Lightning"] if not missing(["lightning"]) else []
    for finder in finders:
        told = _ask(finder, options, limit, findings.left_s())
        answers = {model: told.get(model) or {"error": told["error"]} for model in MODELS}
        for model, answer in answers.items():
            _tell(findings, finder, model, answer)
        if finder == "autoaccum":
            _judge(findings, options, limit, {m: answer["size"] for m, answer in answers.items() if "size" in answer})


def _tell(findings, finder, model, answer):
    if "size" not in answer:
        findings.add(f"{model}: {finder}", answer["error"][:300], ok=False if finder == "autoaccum" else None, **answer)
        return
    findings.add(
        f"{model}: {finder}",
        f"{answer['size']}; {answer['trials']} trials of {answer['steps']} steps in all, {answer['failures']} failed, "
        f"{answer['seconds']:.1f} s",
        **answer,
    )


def _limit(device):
    """Return at most half of the free memory, so that finders do not reach the card's own limit."""
    code = f"import torch; print('{{\"free\":', torch.cuda.mem_get_info('{device}')[0], '}}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return min(8 * GIB, last_json(done.stdout)["free"] // 2)


def _ask(finder, options, limit, left_s):
    arguments = ["--child", finder, options.device, str(limit), "tiny" if options.tiny else "full"]
    child = start_child("gpu_probe.py", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = child.communicate(timeout=max(1.0, min(_TRIES_S * (3 if options.tiny else 1), left_s - 1)))
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        err += "\nstopped: it took too long"
    told = {}
    for line in out.splitlines():
        if line.startswith('{"model"'):
            found = json.loads(line)
            told[found.pop("model")] = found
    tail = err.strip().splitlines()[-1:] or [""]
    return {"error": f"ended with {child.returncode}: {tail[0]}"} | told


# --- the truth --------------------------------------------------------------------------------------------------------


def _judge(findings, options, limit, answers):
    """Find the truth for all models at once, each with its own processes."""
    at_once = 1 if options.tiny else _at_once(limit, options.device)

    def found(model):
        return bracket(
            answers[model],
            lambda sizes: _fit_in_fresh_processes(sizes, options, limit, model, findings.left_s()),
            at_once=at_once,
            left_s=lambda: findings.left_s() - _OTHERS_S,
            least_s=25.0,
        )

    with ThreadPoolExecutor(len(MODELS)) as pool:
        truths = dict(zip(answers, pool.map(found, answers), strict=True))
    for model, (low, high, asked) in truths.items():
        answer = answers[model]
        listed = ", ".join(f"{n} {'fits' if fits else 'does not'}" for n, fits in sorted(asked.items()))
        if low is None:
            findings.add(f"{model}: the truth", f"not found: {listed or 'the time is over'}", asked=asked)
            continue
        until = "" if high is None else f", {high} does not"
        until += f"; no more than {_WANTED} were asked for" if answer == _WANTED else ""
        part = answer / low
        ok = asked.get(answer) is not False and (part >= 0.9 or answer == _WANTED)
        findings.add(
            f"{model}: the truth", f"{low} fits{until}; the answer is {part:.1%} of it ({listed})", ok=ok, asked=asked
        )


def bracket(answer, fit, *, at_once, left_s, least_s):
    """Close a bracket around the largest size that fits, starting at an answer.

    Args:
        answer: A size near the truth.
        fit: Returns whether each of several sizes fits, leaving out those it cannot determine.
        at_once: The number of sizes to try at a time.
        left_s: Returns the seconds left.
        least_s: The seconds of a round.

    Returns:
        The largest size seen to fit, the smallest seen not to, each None if there is none; and all sizes tried.
    """
    asked = {}
    sizes = sorted({round(answer * factor) for factor in (1.0, 1.03, 1.07, 1.15, 1.3, 1.6)} | {answer + 1})[:at_once]
    while sizes and left_s() > least_s:
        told = fit(sizes)
        if not told:
            break
        asked |= told
        low = max((n for n, fits in asked.items() if fits), default=0)
        high = min((n for n, fits in asked.items() if not fits and n > low), default=None)
        if high is None:
            sizes = sorted({round(low * factor) for factor in (1.3, 1.7, 2.5, 4.0)} | {low + 1})[-at_once:]
        else:
            inside = range(low + 1, high)
            number = min(at_once, len(inside))
            sizes = sorted({inside[(2 * k + 1) * len(inside) // (2 * number)] for k in range(number)})
    low = max((n for n, fits in asked.items() if fits), default=None)
    high = min((n for n, fits in asked.items() if not fits and n > (low or 0)), default=None)
    return low, high, asked


def _at_once(limit, device):
    import torch  # noqa: PLC0415 - children need it first

    free, _ = torch.cuda.mem_get_info(device)
    room = free // (limit + 1.5 * GIB)  # a context uses memory in addition to the limit
    return max(1, min(6, (os.cpu_count() or 2) // 2, int(room / len(MODELS))))


def _fit_in_fresh_processes(sizes, options, limit, model, left_s):
    tiny = "tiny" if options.tiny else "full"
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for n in sizes:
            log = Path(folder) / f"{n}.txt"
            with log.open("w") as output:
                arguments = ["--child", f"fits:{n}:{model}", options.device, str(limit), tiny]
                children[n] = start_child("gpu_probe.py", *arguments, stdout=output, stderr=subprocess.STDOUT), log
        ends = time.monotonic() + max(1.0, left_s - 2)
        told = {}
        for n, (child, log) in children.items():
            try:
                child.wait(max(0.1, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            answer = last_json(log.read_text())
            if answer is not None:
                told[n] = answer["fits"]
            else:
                print(f"{model} of {n}: {log.read_text()[-600:]}")
        return told


# --- in the child -----------------------------------------------------------------------------------------------------


def child(what, device_name, limit, sizes):
    """Run one finder for all models, or test whether one size fits; print the result."""
    import torch  # noqa: PLC0415 - the parent need not wait for it

    import autoaccum  # noqa: PLC0415
    from autoaccum._memory import backend_for  # noqa: PLC0415

    device, limit, tiny = torch.device(device_name), int(limit), sizes == "tiny"
    if what.startswith("fits:"):
        _, n, model = what.split(":")
        memory = backend_for(device)
        made, batch_of, loss_of = _job(model, tiny=tiny)
        fits = True
        with memory.limited(limit):
            try:
                _train(made.to(device), batch_of(int(n)), loss_of, device, micro_batches=2, updates=2)
            except Exception as error:
                if not autoaccum.is_oom(error):
                    raise
                fits = False
        print(json.dumps({"fits": fits, "peak": memory.peak_bytes()}), flush=True)
        return
    finder = {"autoaccum": _autoaccum, "Accelerate": _accelerate, "Lightning": _lightning}[what]
    for model in MODELS:
        settle(device)
        started = time.perf_counter()
        try:
            found = finder(*_job(model, tiny=tiny), device, limit, 128 if tiny else _WANTED)
        except Exception as error:  # noqa: BLE001 - another finder's failure is a finding
            found = {"error": f"{type(error).__name__}: {error}"}
        found.setdefault("seconds", time.perf_counter() - started)
        print(json.dumps({"model": model} | found), flush=True)


def _job(model, *, tiny):
    """Return a model, a function that makes a batch of n samples, and one that maps (model, batch) to the loss."""
    import torch  # noqa: PLC0415
    import torchvision  # noqa: PLC0415
    from gpu_models import SmallGpt  # noqa: PLC0415
    from torch.nn import functional  # noqa: PLC0415

    torch.manual_seed(0)
    if model == "ResNet-50":
        made = torchvision.models.resnet18() if tiny else torchvision.models.resnet50()
        side = 48 if tiny else 224
        image = torch.randn(1, 3, side, side)

        def images(n):
            return image.expand(n, -1, -1, -1).contiguous(), torch.zeros(n, dtype=torch.long)

        return made, images, lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1])
    settings = {"words": 256, "width": 64, "layers": 2, "heads": 2, "length": 64} if tiny else {}
    made = SmallGpt(**settings)
    length, words = made.places.num_embeddings, made.words.num_embeddings

    def sentences(n):
        tokens = torch.randint(words, (1, length)).expand(n, -1).contiguous()
        return {"input_ids": tokens, "labels": tokens}

    return made, sentences, lambda model, batch: model(**batch)["loss"]


def _autocast(device):
    import torch  # noqa: PLC0415

    half = torch.bfloat16 if device.type == "cpu" or torch.cuda.is_bf16_supported() else torch.float16
    return torch.autocast(device.type, dtype=half, enabled=device.type == "cuda")


def _moved(batch, device):
    if isinstance(batch, dict):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return tuple(tensor.to(device) for tensor in batch)


def _train(model, batch, loss_of, device, *, micro_batches, updates):
    """Run a few updates as a hand-written loop does."""
    import torch  # noqa: PLC0415

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(updates):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            with _autocast(device):
                loss = loss_of(model, _moved(batch, device))
            (loss / micro_batches).backward()
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()


def _autoaccum(model, batch_of, loss_of, device, limit, wanted):  # noqa: ARG001 - as the others are called
    import torch  # noqa: PLC0415

    import autoaccum  # noqa: PLC0415

    batch = batch_of(8)
    started = time.perf_counter()
    found = autoaccum.find_micro_batch(
        model,
        batch,
        loss=None if isinstance(batch, dict) else torch.nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        device=device,
        memory_limit=limit,
        max_micro_batch=wanted,
    )
    failed = sum(not trial.fits for trial in found.trials)
    return {
        "size": found.micro_batch,
        "trials": len(found.trials),
        "steps": len(found.trials) + 1,  # the first trial makes two, to create the optimizer's state
        "failures": failed,
        "seconds": time.perf_counter() - started,
        "tried": [[trial.size, trial.fits, trial.peak_bytes] for trial in found.trials],
    }


def _accelerate(model, batch_of, loss_of, device, limit, wanted):
    from accelerate.utils import find_executable_batch_size  # noqa: PLC0415

    from autoaccum._memory import backend_for  # noqa: PLC0415

    tried = []

    @find_executable_batch_size(starting_batch_size=wanted)
    def train(batch_size):
        tried.append(batch_size)
        model.zero_grad(set_to_none=True)
        _train(model, batch_of(batch_size), loss_of, device, micro_batches=1, updates=2)
        return batch_size

    started = time.perf_counter()
    model.to(device)
    with backend_for(device).limited(limit):
        answer = train()
    return {
        "size": answer,
        "trials": len(tried),
        "steps": len(tried) + 1,
        "failures": len(tried) - 1,
        "seconds": time.perf_counter() - started,
        "tried": tried,
    }


def _lightning(model, batch_of, loss_of, device, limit, wanted):
    import logging  # noqa: PLC0415
    import warnings  # noqa: PLC0415

    import lightning.pytorch as pl  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from lightning.pytorch.tuner import Tuner  # noqa: PLC0415

    from autoaccum._memory import backend_for  # noqa: PLC0415

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    one = batch_of(1)
    tried = []

    class Same(torch.utils.data.Dataset):
        def __len__(self):
            return 4 * wanted

        def __getitem__(self, index):
            return {k: v[0] for k, v in one.items()} if isinstance(one, dict) else tuple(v[0] for v in one)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.batch_size = model, 2

        def training_step(self, batch, index):  # noqa: ARG002 - Lightning's own
            tried.append(len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0]))
            return loss_of(self.model, tuple(batch) if isinstance(batch, list) else batch)

        def train_dataloader(self):
            return torch.utils.data.DataLoader(Same(), batch_size=self.batch_size)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    with tempfile.TemporaryDirectory() as folder:
        on_card = device.type == "cuda"
        trainer = pl.Trainer(
            accelerator="gpu" if on_card else "cpu",
            devices=1,
            precision=("bf16-mixed" if torch.cuda.is_bf16_supported() else "16-mixed") if on_card else "32-true",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        started = time.perf_counter()
        with backend_for(device).limited(limit):
            answer = Tuner(trainer).scale_batch_size(Module(), mode="binsearch", init_val=2, steps_per_trial=3)
        took = time.perf_counter() - started
    sizes = list(dict.fromkeys(tried))
    # A size that ended its steps was tried as often as there are steps.
    failures = sum(tried.count(n) < 3 for n in sizes)
    return {
        "size": answer,
        "trials": len(sizes),
        "steps": len(tried),
        "failures": failures,
        "seconds": took,
        "tried": sizes,
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        sys.stdout.flush()
        os._exit(0)
    run_part(probes, __doc__)
