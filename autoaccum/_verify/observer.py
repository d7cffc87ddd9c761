"""Watches a training in its process: the gradients that its first optimizer steps see, and how they came about.

Loaded by its path into processes that may lack autoaccum, so it needs the standard library and torch alone. Of gradients
it keeps random projections, read before they are clipped. Dropout is off, BatchNorm uses its running statistics, and
forward passes draw random numbers of their own, so that those of the loader do not depend on how many there are.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as all_modules
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The mean of the squared projections on random signs is the squared norm.
PROJECTIONS = 8
_BLOCK, _CHUNK = 4096, 4096 * 1024
# A rank that has written waits this long for the others, whose last collectives may need it.
_WAIT_S = 30.0
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
# Modules that drop by draws of their own, and the attribute that says how much.
_DROPS = {"RNN": "dropout", "LSTM": "dropout", "GRU": "dropout", "DropPath": "drop_prob", "StochasticDepth": "p"}
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")
_IGNORED_LABEL = -100
_FLAGS = ("clipped_between", "changed_between", "cleared")


class _Seen:
    """What was seen of an optimizer: its steps, and the window that leads to the next."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.name = weakref.ref(optimizer), type(optimizer).__name__
        self.steps: list[dict[str, Any]] = []
        self.begin()

    def begin(self) -> None:
        self.unclipped: dict[int, torch.Tensor] = {}  # by the clip since the last backward pass
        self.known: torch.Tensor | None = None  # after the last backward pass, unscaling or clip that was seen
        lists: dict[str, Any] = {name: [] for name in ("parts", "rows", "tokens", "samples")}
        self.window = lists | dict.fromkeys(_FLAGS, False)

    def parameters(self) -> list[torch.Tensor]:
        optimizer = self.optimizer()
        return [] if optimizer is None else [one for group in optimizer.param_groups for one in group["params"]]

    def sketch(self) -> torch.Tensor:
        """Return the projections of all gradients: (parameters, projections)."""
        return torch.stack([torch.zeros(0, PROJECTIONS).double().sum(0), *map(_sketch, self.parameters())])[1:]

    def note_changes(self, now: torch.Tensor) -> None:
        """Note what the loop has done to the gradients since the last backward pass of the window."""
        self.window["clipped_between"] |= bool(self.unclipped)
        self.unclipped = {}
        ratio = _ratio(now, self.known) if self.window["parts"] else None
        self.window["cleared"] |= ratio == 0
        self.window["changed_between"] |= bool(ratio) and abs(ratio - 1) > 1e-6  # type: ignore[operator]  # noqa: PLR2004


class Observer:
    """Watches while its block runs.

    Args:
        steps: Optimizer steps to see.
        keep_dropout: Whether to leave dropout as it is.
        again: Whether this is the second of two equal runs: forward passes draw other random numbers, and gradients get
            errors like those of rounding, to see how much either matters.
        finish: Called before the last of the steps is made; it must not return.
    """

    def __init__(self, *, steps: int, keep_dropout: bool, again: bool, finish: Callable[[], Any]) -> None:
        self._most, self._keep_dropout, self._seed, self._finish = steps, keep_dropout, int(again), finish
        self._undo = contextlib.ExitStack()
        self.optimizers: list[_Seen] = []
        self._roots: dict[int, weakref.ref[nn.Module]] = {}
        self._depth = self._tokens = self._backwards = 0
        self._is_busy = False  # in a backward pass, or a clip
        self._random: tuple[Any, ...] = ()
        self._kinds: set[str] = set()  # of BatchNorm in training mode
        self._types: set[str] = set()  # of outputs and gradients

    def __enter__(self) -> Self:
        keep = self._undo.callback
        keep(register_optimizer_step_pre_hook(self._before_step).remove)
        keep(all_modules.register_module_forward_pre_hook(self._before_forward).remove)
        after = all_modules.register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        keep(all_modules._global_forward_hooks_with_kwargs.pop, after.id)  # torch forgets it
        keep(after.remove)
        self._replace(Optimizer, "__init__", self._optimizer_made)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.amp.grad_scaler.GradScaler, "unscale_", self._unscale)
        self._replace(functional, "batch_norm", _batch_norm)
        for name in ("cross_entropy", "nll_loss"):
            self._replace(functional, name, self._loss)
        for name in _CLIPS:
            self._wrap_clip(getattr(nn.utils.clip_grad, name, None))
        if not self._keep_dropout:
            for owner, name in ((torch, "dropout"), *((functional, name) for name in _DROPOUTS)):
                self._replace(owner, name, lambda _original, input, *_args, **_named: input)  # noqa: A006
            self._replace(functional, "scaled_dot_product_attention", _attention)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def _replace(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        """Replace a function by one that receives it as its first argument."""
        original = getattr(owner, name)
        self._set(owner, name, lambda *args, **named: by(original, *args, **named))

    # --- forward passes -----------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        drop = _DROPS.get(type(module).__name__)
        if drop and not self._keep_dropout and getattr(module, drop, 0):
            self._set(module, drop, 0.0)
        self._depth += 1
        if self._depth == 1 and not self._is_busy and torch.is_grad_enabled():
            on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
            self._random = (torch.get_rng_state(), on_gpus)
            torch.default_generator.manual_seed(self._seed)
            if on_gpus:
                torch.cuda.manual_seed_all(self._seed)

    def _after_forward(self, module: nn.Module, args: Any, named: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._depth:
            return
        self._depth -= 1
        if isinstance(output, torch.Tensor):
            self._types.add(str(output.dtype))
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            self._kinds.add(type(module).__name__)
        if self._depth or not self._random:
            return
        torch.set_rng_state(self._random[0])
        if self._random[1]:
            torch.cuda.set_rng_state_all(self._random[1])
        self._random = ()
        tensors = list(_tensors((args, named)))
        if output is None or any(one.requires_grad for one in tensors):  # it failed; or it is a loss, or a later part
            return
        self._roots[id(module)] = weakref.ref(module)
        tensors = [one for one in tensors if one.dim()]
        if tensors:
            kind = tensors[0].device.type
            self._types |= {str(torch.get_autocast_dtype(kind))} if torch.is_autocast_enabled(kind) else set()
            numbers = _rows(tensors)
            for seen in self.optimizers:
                seen.window["rows"].append(len(numbers))
                seen.window["samples"] += numbers
            labels = [one for one in tensors if not one.is_floating_point() and bool((one == _IGNORED_LABEL).any())]
            # Negative until a loss of torch counts its targets, which shifts may have moved out.
            self._tokens = self._tokens or -sum(int((one != _IGNORED_LABEL).sum()) for one in labels)

    def _loss(self, original: Any, x: Any, target: torch.Tensor, *args: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and not target.is_floating_point() and not torch.compiler.is_compiling():
            self._tokens = max(self._tokens, 0) + int((target != named.get("ignore_index", _IGNORED_LABEL)).sum())
        return original(x, target, *args, **named)

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _optimizer_made(self, original: Any, optimizer: Optimizer, *args: Any, **named: Any) -> None:
        original(optimizer, *args, **named)
        self._of(optimizer)

    def _of(self, optimizer: Optimizer) -> _Seen:
        found = next((seen for seen in self.optimizers if seen.optimizer() is optimizer), None)
        if found is None:
            self.optimizers.append(found := _Seen(optimizer))
        return found

    def _backward(self, original: Any, *args: Any, **named: Any) -> Any:
        if self._is_busy:  # of a checkpoint
            return original(*args, **named)
        before = [(seen, seen.sketch()) for seen in self.optimizers]
        for seen, sketch in before:
            seen.note_changes(sketch)
        with self._busy():
            result = original(*args, **named)
        self._backwards += 1
        for seen, sketch in before:
            now = seen.sketch()
            if now.shape == sketch.shape and bool((now != sketch).any()):
                seen.known = now
                seen.window["parts"].append((now - sketch).tolist())
                seen.window["tokens"].append(abs(self._tokens))
        self._tokens = 0
        return result

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _unscale(self, original: Any, scaler: Any, optimizer: Optimizer) -> None:
        original(scaler, optimizer)
        self._of(optimizer).known = self._of(optimizer).sketch()

    def _wrap_clip(self, function: Any) -> None:
        """Wrap a function of torch for all who have imported it, in the cell where its decorator holds it."""
        cell = next((one for one in getattr(function, "__closure__", None) or () if callable(one.cell_contents)), None)
        if cell is None:
            return
        clip = cell.cell_contents

        def clipped(parameters: Any, *args: Any, **named: Any) -> Any:
            if self._is_busy:
                return clip(parameters, *args, **named)
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            ids = {id(one) for one in parameters}
            concerned = [seen for seen in self.optimizers if ids & set(map(id, seen.parameters()))]
            for seen in concerned:
                for one in seen.parameters():
                    if id(one) in ids and id(one) not in seen.unclipped:
                        seen.unclipped[id(one)] = _sketch(one)
            with self._busy():
                result = clip(parameters, *args, **named)
            for seen in concerned:
                seen.known = seen.sketch()
            return result

        self._set(cell, "cell_contents", clipped)

    def _before_step(self, optimizer: Optimizer, args: Any, named: Any) -> Any:
        closure = named.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            return self._note_step(optimizer)
        calls = []

        def noted() -> Any:  # the gradient is there once the closure has run
            calls.append(closure())
            if len(calls) == 1:
                self._note_step(optimizer)
            return calls[-1]

        return (args[0],), {**named, "closure": noted}

    def _note_step(self, optimizer: Optimizer) -> None:
        seen = self._of(optimizer)
        if len(seen.steps) >= self._most:  # others lag behind, or never step
            self._finish()
        now, scale = seen.sketch(), getattr(optimizer, "grad_scale", None)  # of a fused step, which unscales
        gradients = []
        for one, row in zip(seen.parameters(), now, strict=True):
            row = seen.unclipped.get(id(one), row) / (1.0 if scale is None else float(scale))  # noqa: PLW2901
            gradients.append([self._name(one), None if one.grad is None else row.tolist()])
            self._types |= set() if one.grad is None else {str(one.grad.dtype)}
        seen.steps.append({**seen.window, "gradients": gradients, "factor": _ratio(now, seen.known)})
        seen.begin()
        alive = [one for one in self.optimizers if any(parameter.requires_grad for parameter in one.parameters())]
        if all(len(one.steps) >= self._most for one in alive):
            self._finish()
        elif self._seed:
            _add_rounding(seen.parameters())

    def _name(self, parameter: torch.Tensor) -> str:
        for module in filter(None, (root() for root in self._roots.values())):
            for name, one in module.named_parameters():
                if one is parameter:
                    inner = (part for part in name.split(".") if part not in {"module", "_orig_mod"})
                    return ".".join(inner)
        return "a parameter of no known module"

    def seen(self) -> dict[str, Any]:
        """Return what was seen, for JSON."""
        if torch.cuda.is_initialized() and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
            self._types.add("tf32")
        return {
            "optimizers": [{"name": one.name, "steps": one.steps} for one in self.optimizers],
            "types": sorted(self._types),
            "batchnorm": sorted(self._kinds),
            "backwards": self._backwards,
        }


def observe_process(settings: str) -> None:
    """Watch this process up to the moment at which all is seen, which ends it.

    Args:
        settings: JSON of `folder` (for results), `deterministic`, and of `Observer`'s arguments.
    """
    given = json.loads(settings)
    folder, process = Path(given.pop("folder")), os.getpid()
    random.seed(0)
    if given.pop("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=True)

    def write() -> int:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        has_stepped = any(one.steps for one in observer.optimizers)
        path = folder / (f"rank-{rank}.json" if has_stepped else f"idle-{process}.json")
        if os.getpid() == process and not path.exists():  # else it was forked
            part = path.with_suffix(f".{process}")
            part.write_text(json.dumps({"rank": rank, "world": world, **observer.seen()}), encoding="utf-8")
            part.replace(path)
        return world

    def finish() -> None:
        world, end = write(), time.monotonic() + _WAIT_S
        while len(list(folder.glob("rank-*.json"))) < world and time.monotonic() < end:
            time.sleep(0.02)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)  # a SystemExit may be caught

    observer = Observer(finish=finish, **given).__enter__()  # noqa: PLC2801 - to the end of the process
    atexit.register(write)


def _sketch(parameter: torch.Tensor) -> torch.Tensor:
    """Return the projections of this rank's part of a gradient; zeros where there is none."""
    total = torch.zeros(PROJECTIONS, dtype=torch.float64, device="cpu")
    gradient = parameter.grad
    if gradient is not None:
        gradient = gradient.detach()
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # of fully_shard
        gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
        flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
        for number, start in enumerate(range(0, len(flat), _CHUNK)):
            part = flat[start : start + _CHUNK]
            part = (part.cpu() if part.device.type == "mps" else part).double()
            blocks = torch.cat([part, part.new_zeros(-len(part) % _BLOCK)]).view(-1, _BLOCK)
            signs = _signs(number + 1, len(blocks)).to(part.device)
            total += ((blocks @ _signs(0, _BLOCK).to(part.device)) * signs).sum(0).cpu()
    return total


def _signs(seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 2, (rows, PROJECTIONS), generator=generator, device="cpu").double() * 2 - 1


def _ratio(now: torch.Tensor, known: torch.Tensor | None) -> float | None:
    """Return how large gradients are, of what they were; None if that is unknown or was 0."""
    if known is None or known.shape != now.shape or not bool(known.any()):
        return None
    return float(now.norm() / known.norm())


def _add_rounding(parameters: list[torch.Tensor]) -> None:
    generator = torch.Generator("cpu").manual_seed(1)
    for one in parameters:
        if one.grad is not None and one.grad.layout == torch.strided and not hasattr(one.grad, "to_local"):
            error = torch.randn(one.grad.shape, generator=generator, device="cpu").to(one.grad)
            one.grad += error * one.grad.abs().amax() * torch.finfo(one.grad.dtype).eps if one.grad.numel() else 0


def _batch_norm(original: Any, x: Any, mean: Any, var: Any, *args: Any, **named: Any) -> Any:
    named |= dict(zip(("weight", "bias", "training", "momentum", "eps"), args, strict=False))
    return original(x, mean, var, **named | ({} if mean is None else {"training": False}))


def _attention(original: Any, *args: Any, **named: Any) -> Any:
    """Call scaled_dot_product_attention without dropout, its fifth argument."""
    return (
        original(*args[:4], 0.0, *args[5:], **named) if len(args) > 4 else original(*args, **named | {"dropout_p": 0.0})
    )  # noqa: PLR2004, E501


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list) or hasattr(value, "values"):
        for one in value.values() if hasattr(value, "values") else value:
            yield from _tensors(one)


def _rows(tensors: list[torch.Tensor]) -> list[str]:
    """Return a number for each sample, in which padding of 0 and -100 does not count."""
    rows = [one.detach().reshape(len(one), -1).cpu() for one in tensors if len(one) == len(tensors[0]) and one.numel()]
    rows = [(one.abs() if one.is_complex() else one).double() for one in rows]
    generator = torch.Generator("cpu").manual_seed(2)
    longest = max((one.shape[1] for one in rows), default=0)
    weights = torch.rand(longest, generator=generator, dtype=torch.float64, device="cpu") + 0.5
    numbers = [0.0] * len(tensors[0])
    for place, one in enumerate(rows):
        for row, values in enumerate(one):
            kept = values[(values != 0) & (values != _IGNORED_LABEL)]
            numbers[row] += float(kept @ weights[: len(kept)]) * (1 + place / 7)
    return [f"{number:.5g}" for number in numbers]
