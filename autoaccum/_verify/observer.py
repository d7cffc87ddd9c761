"""Watches a training in its process: the gradients that its first optimizer steps see, and how they came about.

Loaded by its path into processes that may lack autoaccum: it needs the standard library and torch alone. Of gradients
it keeps random projections, from before they are clipped. Dropout is off, BatchNorm uses its running statistics, and
forward passes draw random numbers of their own, so that the loader's do not depend on how many there are.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import sys
import time
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as modules
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# The mean of the squared projections on random signs is the squared norm.
PROJECTIONS, _BLOCK, _CHUNK = 8, 4096, 4096 * 1024
# A process that has written waits to be killed: other ranks may need it, and a shell would go on to what follows.
_WAIT_S = 60.0
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
# Modules that drop by draws of their own, and the attribute that says how much.
_DROPS = {"RNN": "dropout", "LSTM": "dropout", "GRU": "dropout", "DropPath": "drop_prob", "StochasticDepth": "p"}
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")
_IGNORED_LABEL = -100


class _Seen:
    """What was seen of an optimizer: its steps, and the window that leads to the next."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.name = weakref.ref(optimizer), type(optimizer).__name__
        self.steps: list[dict[str, Any]] = []
        self.skipped = 0  # steps, by a scaler
        self.begin()

    def begin(self) -> None:
        self.unclipped: dict[int, torch.Tensor] = {}  # by the clip since the last backward pass
        self.done: set[str] = set()  # to the gradients since the last backward pass
        self.known: torch.Tensor | None = None  # after the last backward pass, unscaling or clip that was seen
        self.window: dict[str, Any] = {name: [] for name in ("parts", "elements", "labels", "samples", "between")}

    def skip(self) -> None:
        self.skipped += 1
        self.begin()

    def parameters(self) -> list[torch.Tensor]:
        groups = getattr(self.optimizer(), "param_groups", [])
        return [parameter for group in groups for parameter in group["params"]]

    def sketch(self) -> torch.Tensor:
        """Return the projections of all gradients: (parameters, projections)."""
        return torch.stack([_sketch(one) for one in self.parameters()] or [torch.zeros(PROJECTIONS).double()])

    def note_changes(self, now: torch.Tensor) -> None:
        """Note what the loop has done to the gradients since the last backward pass of the window."""
        ratio = _ratio(now, self.known)
        if ratio is not None and abs(ratio - 1) > 1e-6:  # noqa: PLR2004
            self.done.add("changed" if ratio else "cleared")
        if self.window["parts"]:
            self.window["between"] += self.done
        self.unclipped, self.done = {}, set()


class Observer:
    """Watches while its block runs.

    Args:
        steps: Optimizer steps to see.
        keep_dropout: Whether to leave dropout as it is.
        again: Whether this is the second of two equal runs: forward passes draw other random numbers, and gradients get
            errors like those of rounding, to see how much either matters.
        finish: Called before the last of the steps is made; it must not return.
    """

    def __init__(self, steps: int, keep_dropout: bool, again: bool, finish: Callable[[], Any]) -> None:
        self._most, self._keep_dropout, self._seed, self._finish = steps, keep_dropout, int(again), finish
        self._undo = contextlib.ExitStack()
        self.optimizers: list[_Seen] = []
        self._roots: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._depth = self._labels = self._backwards = 0
        self._is_busy = False  # in a backward pass
        self._random: Any = None  # that of a forward pass
        self._batchnorm: set[str] = set()  # kinds in training mode
        self._types: set[str] = set()  # of outputs and gradients

    def __enter__(self) -> Observer:  # noqa: PYI034 - Self came with Python 3.11
        undo = self._undo.callback
        undo(register_optimizer_step_pre_hook(self._before_step).remove)
        undo(modules.register_module_forward_pre_hook(self._before_forward).remove)
        after = modules.register_module_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        undo(modules._global_forward_hooks_with_kwargs.pop, after.id)  # torch forgets it
        undo(after.remove)
        self._replace(Optimizer, "__init__", self._optimizer_made)
        self._replace(torch.autograd, "backward", self._backward)
        self._replace(torch.amp.grad_scaler.GradScaler, "unscale_", self._unscale)
        self._replace(functional, "batch_norm", _batch_norm)
        self._undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"Using .torch\.compile\(module\). when there are global hooks")
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

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        drop = _DROPS.get(type(module).__name__)
        if drop and not self._keep_dropout and getattr(module, drop, None):
            self._set(module, drop, 0.0)
        self._depth += 1
        if self._depth == 1 and not self._is_busy and torch.is_grad_enabled():
            gpus = range(torch.cuda.device_count()) if _uses_cuda() else ()
            self._random = torch.random.fork_rng(gpus)
            self._random.__enter__()
            torch.default_generator.manual_seed(self._seed)
            if gpus:
                torch.cuda.manual_seed_all(self._seed)

    def _after_forward(self, module: nn.Module, args: Any, named: Any, output: Any = None) -> None:
        # After an exception, such as ends the recomputation of a checkpoint, torch passes neither `named` nor output.
        if torch.compiler.is_compiling() or not self._depth:
            return
        self._depth -= 1
        if isinstance(output, torch.Tensor):
            self._types.add(str(output.dtype))
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            self._batchnorm.add(type(module).__name__)
        if self._depth or not self._random:
            return
        self._random.__exit__(None, None, None)
        self._random = None
        tensors = list(_tensors((args, named)))
        if output is not None and not any(one.requires_grad for one in tensors):  # else a loss, or a later part
            self._roots[id(module)] = module
            with contextlib.suppress(Exception):  # of inputs of unknown kinds
                self._note_samples([one for one in tensors if one.dim()])

    def _note_samples(self, tensors: list[torch.Tensor]) -> None:
        if tensors:
            kind = tensors[0].device.type
            self._types |= {str(torch.get_autocast_dtype(kind))} if torch.is_autocast_enabled(kind) else set()
            numbers = _rows(tensors)
            for seen in self.optimizers:
                seen.window["elements"].append(tensors[0].numel())
                seen.window["samples"] += numbers
            labels = [one for one in tensors if not one.is_floating_point() and (one == _IGNORED_LABEL).any()]
            self._labels += sum(int((one != _IGNORED_LABEL).sum()) for one in labels)

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
        self._is_busy = True
        try:
            result = original(*args, **named)
        finally:
            self._is_busy = False
        self._backwards += 1
        for seen, sketch in before:
            now = seen.sketch()
            if now.shape == sketch.shape and bool((now != sketch).any()):
                seen.known = now
                seen.window["parts"].append((now - sketch).tolist())
                seen.window["labels"].append(self._labels)
        self._labels = 0
        return result

    def _unscale(self, original: Any, scaler: Any, optimizer: Optimizer) -> None:
        original(scaler, optimizer)
        seen = self._of(optimizer)
        seen.done.add("changed")
        seen.known = seen.sketch()
        if not seen.known.isfinite().all():
            seen.skip()

    def _wrap_clip(self, function: Any) -> None:
        """Wrap a function of torch for all who have imported it, in the cell where its decorator holds it."""
        for cell in getattr(function, "__closure__", None) or ():
            if callable(cell.cell_contents):
                self._replace(cell, "cell_contents", self._clip)

    def _clip(self, clip: Callable[..., Any], parameters: Any, *args: Any, **named: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = {id(one) for one in parameters}
        concerned = [(seen, one) for seen in self.optimizers for one in seen.parameters() if id(one) in ids]
        for seen, one in concerned:
            seen.unclipped.setdefault(id(one), _sketch(one))
        result = clip(parameters, *args, **named)
        for seen in {id(seen): seen for seen, _ in concerned}.values():
            seen.done.add("clipped")
            seen.known = seen.sketch()
        return result

    def _before_step(self, optimizer: Optimizer, args: Any, named: Any) -> Any:
        closure = named.get("closure") or (args[1] if len(args) > 1 else None)
        if not callable(closure):
            return self._note_step(optimizer)
        results = []

        def noted() -> Any:  # the gradient is there once the closure has run
            results.append(closure())
            if len(results) == 1:
                self._note_step(optimizer)
            return results[-1]

        return args[:1], {**named, "closure": noted}

    def _note_step(self, optimizer: Optimizer) -> None:
        seen = self._of(optimizer)
        if getattr(optimizer, "found_inf", None):  # a fused step skips itself
            seen.skip()
            return
        if len(seen.steps) >= self._most:  # others lag behind, or never step
            self._finish()
        now, scale = seen.sketch(), getattr(optimizer, "grad_scale", None)  # of a fused step, which unscales
        gradients, names = [], self._names()
        for one, row in zip(seen.parameters(), now, strict=True):
            unclipped = seen.unclipped.get(id(one), row) / (1.0 if scale is None else float(scale))
            name = names.get(id(one), "a parameter of no known module")
            gradients.append([name, None if one.grad is None else unclipped.tolist()])
            self._types |= set() if one.grad is None else {str(one.grad.dtype)}
        step = {"gradients": gradients, "skipped": seen.skipped, "factor": _ratio(now, seen.known)}
        seen.steps.append({**seen.window, **step})
        seen.begin()
        alive = [one for one in self.optimizers if any(parameter.requires_grad for parameter in one.parameters())]
        if all(len(one.steps) >= self._most for one in alive):
            self._finish()
        elif self._seed:
            _add_rounding(seen.parameters())

    def _names(self) -> dict[int, str]:
        """Return the names of parameters by the modules that were seen, without what wraps them, by identity."""
        names: dict[int, str] = {}
        for root in list(self._roots.values()):
            for name, one in root.named_parameters():
                path = [part for part in name.split(".") if part not in {"module", "_orig_mod"}]
                names.setdefault(id(one), ".".join(path if len(path) > 1 else [type(root).__name__, *path]))
        return names

    def seen(self) -> dict[str, Any]:
        """Return what was seen, for JSON."""
        if _uses_cuda() and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
            self._types.add("tf32")
        optimizers = [{"name": one.name, "steps": one.steps} for one in self.optimizers]
        kinds = {"types": sorted(self._types), "batchnorm": sorted(self._batchnorm)}
        return {"optimizers": optimizers, "backwards": self._backwards, **kinds}


def observe_process(settings: str) -> None:
    """Watch this process until all is seen; `settings` are JSON: `folder`, `deterministic`, `Observer`'s arguments."""
    given = json.loads(settings)
    folder, process = Path(given.pop("folder")), os.getpid()
    random.seed(0)
    torch.default_generator.manual_seed(0)
    if "numpy" in sys.modules:  # torch imports it where there is one
        sys.modules["numpy"].random.seed(0)
    torch.use_deterministic_algorithms(given.pop("deterministic"), warn_only=True)

    def write() -> None:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        has_stepped = any(one.steps for one in observer.optimizers)
        path = folder / (f"rank-{rank}.json" if has_stepped else f"idle-{os.getpid()}.json")
        if not path.exists():
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"rank": rank, "world": world, **observer.seen()}), encoding="utf-8")
            part.replace(path)

    def finish() -> None:
        write()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        time.sleep(_WAIT_S)
        os._exit(0)  # a SystemExit may be caught

    observer = Observer(finish=finish, **given).__enter__()
    atexit.register(lambda: write() if os.getpid() == process else None)  # else it was forked


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _sketch(parameter: torch.Tensor) -> torch.Tensor:
    """Return the projections of this rank's part of a gradient; zeros where there is none."""
    total = torch.zeros(PROJECTIONS, dtype=torch.float64, device="cpu")
    if parameter.grad is None:
        return total
    gradient = parameter.grad.detach()
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # of fully_shard
    gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
    flat = (torch.view_as_real(gradient) if gradient.is_complex() else gradient).reshape(-1)
    for number, part in enumerate(flat.split(_CHUNK)):
        part = (part.cpu() if part.device.type == "mps" else part).double()  # noqa: PLW2901
        blocks = torch.cat([part, part.new_zeros(-len(part) % _BLOCK)]).view(-1, _BLOCK)
        signs = _signs(number + 1, len(blocks)).to(part.device)
        total += ((blocks @ _signs(0, _BLOCK).to(part.device)) * signs).sum(0).cpu()
    return total


def _signs(seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 2, (rows, PROJECTIONS), generator=generator, device="cpu").double() * 2 - 1


def _ratio(now: torch.Tensor, known: torch.Tensor | None) -> float | None:
    """Return how large gradients are, of what they were; None if that is unknown or was 0."""
    is_known = known is not None and known.shape == now.shape and bool(known.any())
    return float(now.norm() / known.norm()) if is_known else None  # type: ignore[union-attr]


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
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return original(**dict(zip(names, args, strict=False)) | named | {"dropout_p": 0.0})


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
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
