"""Takes the state of a run as plain values and tensors, compares it with another run's, and restores it bit for bit.

A checkpoint of another model, optimizer or run (by names, shapes and types) is refused before anything is changed.
`checkpoint_files` reads and writes the files, `checkpoints` decides when one is due.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss

from autoaccum import _oom
from autoaccum._arguments import listed, shown
from autoaccum._data.loader_state import Position
from autoaccum._distributed.whole_state import as_spread
from autoaccum._engine.dtensor import is_sharded
from autoaccum._engine.optimizers import OptimizerList
from autoaccum._records import SAMPLES
from autoaccum._sizing.cutting import Cutting
from autoaccum._training.checkpoint_types import check_types
from autoaccum.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from autoaccum._data.loader_state import RandomStates
    from autoaccum._training.fit_context import FitContext

# Of a `LoopState`.
_COUNTS = ("windows", "samples", "stopped", "evaluated", "last_val_loss")


@dataclass(frozen=True)
class LoopState:
    """The state of the loop between two windows, without what the model and the optimizer hold.

    Attributes:
        windows: Windows done.
        samples: Samples used.
        position: Where the loader stands.
        random: The state of the random generators; None: as they are now.
        stopped: Set if a callback has ended the run here, which is then complete for calls of the same length:
            "reason", and "epochs" and "max_steps" of the call.
        evaluated: Windows that were done at the last evaluation; None before the first.
        last_val_loss: The loss of that evaluation.
    """

    windows: int
    samples: int
    position: Position
    random: RandomStates | None = None
    stopped: dict[str, Any] | None = None
    evaluated: int | None = None
    last_val_loss: float | None = None

    @property
    def val_loss(self) -> float | None:
        """The validation loss of this state; None if it was not evaluated, or the loss is not finite."""
        loss = self.last_val_loss
        return loss if self.evaluated == self.windows and loss is not None and math.isfinite(loss) else None


class Contents:
    """What a checkpoint holds of one call of `fit`."""

    def __init__(self, call: FitContext) -> None:
        self._call, self._step, self._schedule = call, call.step, call.schedule
        self._random, self._noise = call.random, call.noise
        # A loss without state, as torch's usually are, may become a function and the reverse.
        self._modules = [module for module in self._step.objective.modules if _has_state(module)]

    @property
    def is_sharded(self) -> bool:
        """Whether there are tensors of which this rank holds a part only."""
        return is_sharded(self._step.objective.modules)

    def taken(
        self, state: LoopState, kept: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Return everything, tensors not copied.

        Args:
            state: The state of the loop.
            kept: How windows are cut, as plain values.
            ranks: `part` of each rank, where there are several.
        """
        return {
            "ranks": None if ranks is None else list(ranks),
            **{name: getattr(state, name) for name in _COUNTS},
            **self._own(),
            **self.part(state, kept),
        }

    def _own(self) -> dict[str, Any]:
        """Return what does not depend on the state of the loop, or is in it whatever that is."""
        optimizer, scheduler, precision = self._step.optimizer, self._schedule.scheduler, self._step.precision
        state = optimizer.state_dict()
        return {
            "target_batch": self._call.target_batch,
            "counts": self._call.counts,
            # With the buffers that `state_dict` leaves out: training moves those too.
            "modules": [{"state": one.state_dict(), "buffers": _buffers_of(one)} for one in self._modules],
            "optimizer": {
                "type": _type_name(optimizer),
                "state": state,
                "parameters": self._parameter_names(),
            },
            "scheduler": None
            if scheduler is None
            else {"type": _type_name(scheduler), "state": scheduler.state_dict()},
            "scaler": None if precision.scaler is None else precision.scaler.state_dict(),
            "precision": precision.name,
            "device": self._step.memory.device.type,
            "noise_scale": None if self._noise is None else self._noise.state_dict(),
        }

    def part(self, state: LoopState, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return what each of several ranks has for itself."""
        return {
            "random": state.random or self._random.capture(),
            "position": {field.name: getattr(state.position, field.name) for field in fields(Position)},
            "cutting": kept,
        }

    def check(self, content: Mapping[str, Any], path: Path) -> None:
        """Refuse a checkpoint that is not this run's.

        Raises:
            CheckpointError: It is of another model, optimizer, scheduler, precision or target batch.
            KeyError: It is another program's, as are other errors of types and values.
        """
        check_types(content)
        now = self._own()
        here, there = _description(now | {"random": self._random.capture()}), _description(content)
        for what, own in here.items():
            if found := _difference(there[what], own):
                raise CheckpointError(
                    f"the checkpoint {path} is of another {what}: {found}; make everything as it was for that run, "
                    "pass another folder as checkpoint=, or resume=False to start from scratch"
                )
        _check_others(content, now)

    def check_part(self, part: Mapping[str, Any]) -> None:
        """Check what a checkpoint holds of this rank.

        Raises:
            ValueError: It is not what was written, as are other errors of types and values.
        """
        position = part["position"]
        for states in (part["random"], position["start"], position["before_last"]):
            if states is not None:
                self._random.check(states)
        cutting = Cutting.of_state(part["cutting"])
        for plan in (cutting.plan, cutting.largest_plan):
            if self._call.counts == SAMPLES and plan.target_batch != self._call.world.target_batch:
                raise ValueError(f"a plan is for {plan.target_batch} samples")

    def loop_state(self, content: Mapping[str, Any], part: Mapping[str, Any] | None = None) -> LoopState:
        """Return the state of the loop that a checkpoint holds.

        Args:
            content: What is in it.
            part: What it holds of this rank, where there were several.
        """
        part = content if part is None else part
        rest = {name: content[name] for name in _COUNTS}
        return LoopState(position=Position(**part["position"]), random=part["random"], **rest)

    def restore(self, content: dict[str, Any]) -> None:
        """Set model, optimizer, scheduler and scaler to what a checkpoint holds that was checked, in place.

        Raises:
            CheckpointError: One of them refuses what it is given, by code of its own: shapes and types were checked.
                Those before it, and a part of it, may hold the checkpoint's state.
        """
        optimizer, scheduler, scaler = self._step.optimizer, self._schedule.scheduler, self._step.precision.scaler
        # What may refuse and holds little comes first.
        if content["scheduler"] is not None:
            kept = copy.deepcopy(content["scheduler"]["state"])  # some take parts of it out
            _offer(scheduler, lambda: scheduler.load_state_dict(kept))
        if content["scaler"] is not None:
            assert scaler is not None
            _offer(scaler, lambda: scaler.load_state_dict(content["scaler"]))
        for module, saved in zip(self._modules, content["modules"], strict=True):
            _offer(module, lambda: _put_module_back(module, saved, self._step.memory.device))  # noqa: B023 - at once
        _offer(optimizer, lambda: _put_optimizer_back(optimizer, content["optimizer"]["state"]))
        if self._noise is not None and content["noise_scale"] is not None:  # a run may begin to measure it
            self._noise.load_state_dict(content["noise_scale"])

    def overridden(self, content: Mapping[str, Any]) -> list[str]:
        """Return the settings of the optimizer and of torch's losses that differ in a checkpoint that was checked."""
        # Schedulers move some of what they find, and keep where it began.
        moved = set() if self._schedule.scheduler is None else {"lr", "momentum", "betas"}
        found: dict[str, None] = {}
        groups = content["optimizer"]["state"]["param_groups"]
        for own, kept in zip(self._step.optimizer.param_groups, groups, strict=True):
            for name in (name for name in own.keys() & kept.keys() if name not in {"params", *moved}):
                here, there = _plain(own[name]), _plain(kept[name])
                if here != there:
                    found[f"{name.removeprefix('initial_')}={shown(there)} ({shown(here)} in this call)"] = None
        for module, saved in zip(self._modules, content["modules"], strict=True):
            for name, buffer in module.named_buffers() if isinstance(module, _Loss) else ():
                if _plain(buffer) != _plain(saved["state"].get(name)):
                    found[f"{name} of {type(module).__name__}"] = None
        return sorted(found)

    def _parameter_names(self) -> list[list[str]]:
        """Return for each group of the optimizer what its parameters are called, with the number of their module."""
        names = {
            parameter: f"{number}.{name}"
            for number, module in enumerate(self._modules)
            for name, parameter in module.named_parameters()
        }
        groups = self._step.optimizer.param_groups
        return [[names.get(parameter, "of no module") for parameter in group["params"]] for group in groups]


def _description(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by what a run is known: names, shapes and types; None for a buffer, which may come, go and grow."""
    optimizer, modules = content["optimizer"], content["modules"]
    parts: dict[str, Any] = {}
    for number, saved in enumerate(modules):
        forms = {**{name: _form(value) for name, value in saved["state"].items()}, **dict.fromkeys(saved["buffers"])}
        parts |= {f"{name} " if len(modules) == 1 else f"{number}.{name} ": form for name, form in forms.items()}
    names = {
        f"parameter {place} of group {number}, ": name
        for number, group in enumerate(optimizer["parameters"])
        for place, name in enumerate(group)
    }
    groups = [len(group["params"]) for group in optimizer["state"]["param_groups"]]
    unit = "" if content["counts"] == SAMPLES else " tokens"
    return {
        "model": {**parts, "a number of random generators of ": len(content["random"][-1])},
        "optimizer": {"": optimizer["type"], "groups of parameters of lengths ": groups, **names},
        "scheduler": {"": "none" if content["scheduler"] is None else content["scheduler"]["type"]},
        "precision": {"": content["precision"], "a gradient scaler, ": content["scaler"] is not None},
        "device": {"": content["device"]},  # whose generator has another state
        "target_batch": {"": f"{content['target_batch']}{unit}"},
    }


def _check_others(content: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check what the modules and the optimizer have kept, by what those of this call keep.

    Raises:
        ValueError: It is of another kind.
    """
    for saved, here in zip(content["modules"], own["modules"], strict=True):
        buffers = saved["buffers"]
        if buffers.keys() != here["buffers"].keys() or (saved["state"].keys() ^ here["state"].keys()) - buffers.keys():
            raise ValueError("a parameter is among the buffers, or the reverse")
        for name, value in buffers.items():
            is_alike = _form(here["state"].get(name)) == _form(here["buffers"][name])  # no hook of the model's own
            if not isinstance(value, Tensor | None) or (is_alike and _form(saved["state"].get(name)) != _form(value)):
                raise ValueError(f"the buffer {name} is no tensor, or not as in the module's state")
    kept = content["optimizer"]["state"]
    for group, other in zip(own["optimizer"]["state"]["param_groups"], kept["param_groups"], strict=True):
        if other["params"] != group["params"]:
            raise ValueError("the optimizer's parameters have other numbers")


def _difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    for name in (name for name in here if name in there):
        if None not in (there[name], here[name]) and there[name] != here[name]:
            return f"it was made with {name}{there[name]}, and this call has {here[name]}"
    if missing := here.keys() - there.keys():
        return f"it lacks {_listed(missing)}, which is here"
    if unexpected := there.keys() - here.keys():
        return f"it has {_listed(unexpected)}, which is not here"
    return None


def _offer(owner: Any, load: Callable[[], object]) -> None:
    """Give an object what a checkpoint holds of it.

    Raises:
        CheckpointError: It refuses that.
    """
    try:
        load()
    except Exception as error:
        if _oom.is_device_lost(error) or _oom.is_oom(error):
            raise
        raise CheckpointError(
            f"{type(owner).__name__} refuses its state in the checkpoint ({type(error).__name__}: "
            f"{_oom.first_line(error)}), and may hold a part of it now; make it anew as it was for that run, or pass "
            "resume=False to start from scratch"
        ) from error


# --- modules ----------------------------------------------------------------------------------------------------------


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in chain(module.parameters(), module.buffers())) or bool(module.state_dict())


def _buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return all buffers, also those that are not persistent, and those that are None."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
    }


@torch.no_grad()
def _put_module_back(module: nn.Module, saved: Mapping[str, Any], device: torch.device) -> None:
    buffers = {**saved["state"], **saved["buffers"]}
    for prefix, part in module.named_modules():
        for name, buffer in list(part._buffers.items()):
            full_name = f"{prefix}.{name}" if prefix else name
            if full_name not in buffers:
                continue  # the model's own hooks keep it under another name
            kept = buffers[full_name]
            if kept is None or buffer is None or _form(buffer) != _form(kept):
                # A buffer of another size, or one that came later, or went: it is replaced, as the model replaced it.
                part._buffers[name] = None if kept is None else kept.to(device, copy=True)
            else:
                buffer.copy_(kept)
    own = module.state_dict()
    module.load_state_dict({name: as_spread(value, own.get(name)) for name, value in saved["state"].items()})


def _form(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else "no tensor"


# --- optimizer and scheduler ------------------------------------------------------------------------------------------


def _type_name(owner: Any) -> str:
    """Return the name of a type, and for a scheduler made of others, or several optimizers, theirs too."""
    parts = owner.parts if isinstance(owner, OptimizerList) else getattr(owner, "_schedulers", None)
    within = f"({', '.join(map(_type_name, parts))})" if isinstance(parts, list | tuple) else ""
    return f"{type(owner).__name__}{within}"


def _put_optimizer_back(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    like = dict(zip(numbers, parameters, strict=True))
    state = {
        number: {name: as_spread(value, like[number]) for name, value in values.items()} if number in like else values
        for number, values in saved["state"].items()
    }
    saved = {**saved, "state": state}
    optimizer.load_state_dict(saved)
    # Schedulers warn when they move before the optimizer has: it has, in an earlier process.
    optimizer._opt_called = True  # type: ignore[attr-defined]
    # Floating state is cast to the type of its parameter there, and fp32 moments of bf16 parameters lose their bits.
    for number, parameter in like.items():
        for name, value in saved["state"].get(number, {}).items():
            now = optimizer.state[parameter].get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(now.device)


def _plain(value: object) -> object:
    value = value.tolist() if isinstance(value, Tensor) else value
    return list(value) if isinstance(value, tuple) else value


def _listed(names: set[str]) -> str:
    return listed([name.strip(", ") for name in sorted(names)])
