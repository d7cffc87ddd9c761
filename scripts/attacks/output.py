"""Output that fails: a full disk, a pipe without a reader, a closed stream, a file that may not grow.

Each try is a process forked from one that has imported torch. Its training is compared, bit for bit, with the same
training with working output.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import resource
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import autoaccum
from attacks import Row

STEPS = 6
WAYS = ("well", "full disk", "no reader", "closed", "closed later", "may not grow")
DONE = 0


@dataclass(frozen=True)
class _Try:
    stderr: str
    stdout: str
    progress: str
    log: str

    def __str__(self) -> str:
        return f"fit(progress={self.progress!r}), stderr: {self.stderr}, stdout: {self.stdout}, log: {self.log}"


def attack(folder: Path, seed: int, share: float) -> list[Row]:
    """Train with output that fails in every way; check that training is complete."""
    torch.set_num_threads(1)  # a forked child has no OpenMP threads
    torch.optim.AdamW(nn.Linear(1, 1).parameters())  # imports much, once instead of in every child
    fits = [_Try(e, o, p, g) for e, o, p, g in itertools.product(WAYS, WAYS[:4], ("lines", "bar"), WAYS[:2])]
    fits += [_Try("well", "well", "lines", "may not grow")]
    drawn = random.Random(seed)  # noqa: S311 - which are tried
    chosen = drawn.sample(fits, max(1, min(len(fits), round(share * len(fits)))))
    expected = _trained(_Try("well", "well", "lines", "well"), folder)
    assert expected.parameters is not None, expected.said
    losses = [f"{one}: {wrong}" for one in chosen if (wrong := _wrong(_trained(one, folder), expected))]
    return [Row("output of fit that fails", len(chosen), tuple(losses))]


@dataclass(frozen=True)
class _Trained:
    code: int
    parameters: list[list[float]] | None
    said: str


def _wrong(found: _Trained, expected: _Trained) -> str | None:
    """Return what a try lost; None for nothing."""
    if found.code != DONE:
        return f"exit code {found.code} {found.said}"
    if found.parameters != expected.parameters:
        return "the parameters are not those of a training whose output went well"
    return None


def _trained(one: _Try, folder: Path) -> _Trained:
    kept, said = folder / "kept.json", folder / "said.txt"
    for left in (kept, said):
        left.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = _in_child(one, folder, kept)
        except BaseException:  # noqa: BLE001 - what a user would see
            _limit_files(resource.RLIM_INFINITY)
            said.write_text(traceback.format_exc())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    content = json.loads(kept.read_text()) if kept.exists() else None
    return _Trained(os.waitstatus_to_exitcode(status), content, said.read_text() if said.exists() else "")


def _in_child(one: _Try, folder: Path, kept: Path) -> int:
    _redirect(2, one.stderr, folder)
    _redirect(1, one.stdout, folder)
    log = Path("/dev/full") if one.log == "full disk" else folder / f"{os.getpid()}.jsonl"
    if "may not grow" in (one.stderr, one.stdout, one.log):
        _limit_files(200)
    code = _by_call(one, log, kept)
    for stream in (sys.stdout, sys.stderr):  # as Python does at its end
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            code = code or 120
    return code


def _by_call(one: _Try, log: Path, kept: Path) -> int:
    torch.manual_seed(0)
    os.environ["AUTOACCUM_CACHE_DIR"] = ""  # nothing is remembered
    batches = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(STEPS)]
    model = nn.Linear(3, 2)
    autoaccum.fit(
        model,
        batches,
        4,
        micro_batch=4,
        device="cpu",
        progress=autoaccum._training.console.LineProgress(every_s=0) if one.progress == "lines" else "bar",
        callbacks=[autoaccum.JSONLinesLog(log)],
    )
    _limit_files(resource.RLIM_INFINITY)
    _keep(model, kept)
    return DONE


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _keep(model: nn.Module, kept: Path) -> None:
    kept.write_text(json.dumps([parameter.detach().double().flatten().tolist() for parameter in model.parameters()]))


def _redirect(number: int, way: str, folder: Path) -> None:
    """Make a standard stream fail, as the parent of Python would."""
    name = "stderr" if number == 2 else "stdout"  # noqa: PLR2004 - stderr's
    if way == "closed":  # Python then has None
        with contextlib.suppress(OSError):
            os.close(number)
        setattr(sys, name, None)
        return
    if way == "full disk":
        target = os.open("/dev/full", os.O_WRONLY)
    elif way == "no reader":
        reader, target = os.pipe()
        os.close(reader)
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        target = os.open(folder / f"{name}.txt", flags, 0o600)
        if way == "may not grow":
            os.write(target, b"x" * 300)
    os.dup2(target, number)
    os.close(target)
    setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
    if way == "closed later":
        os.close(number)
