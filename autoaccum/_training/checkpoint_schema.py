"""Checks the form of a whole checkpoint before anything is changed.

A file can be whole and yet hold what no training wrote: another version's, edited by hand, or made to do harm. This
module checks autoaccum's own values, and random states by setting a spare generator to them. `checkpoint_trial` checks
those of the optimizer and the scheduler; objects of the user's own judge theirs.
"""

from __future__ import annotations

import math
import random
import sys
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from autoaccum._data.loader_state import Position
from autoaccum._records import SAMPLES, TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from autoaccum._data.loader_state import RandomStates

# As torch counts.
_LARGEST = 2**63 - 1
# No window has more.
_MOST_SAMPLES = 2**53
# Of a generator on a card: a seed and an offset.
_CARD_STATE_BYTES = 16
_STATES = 5
# What every file of that format holds; what came later is not in files from before.
_KEYS = ("target_batch", "windows", "samples", "device", "random", "position", "cutting", "modules", "optimizer")
_KEYS_MAYBE_NONE = ("scheduler", "scaler")
_CUTTING = ("plan", "largest", "plans", "asked", "oom_events")
_CUTTING_LATER = ("frontier", "is_found", "is_timed", "memory")


class MalformedError(ValueError):
    """A value is not what a checkpoint holds at its place."""


def check(content: Mapping[str, Any], like: RandomStates) -> None:
    """Raise `MalformedError` unless all of a checkpoint that is autoaccum's own has the right form.

    Args:
        content: The content of a file.
        like: The states of this run's random generators.
    """
    for name in (*_KEYS, *_KEYS_MAYBE_NONE):
        need(name in content, name, "is missing")
    for name in ("autoaccum", "torch"):
        need(type(content.get(name, "")) is str, name, "is not a version")
    whole(content["target_batch"], "target_batch", least=1, most=_MOST_SAMPLES)
    need(type(content["device"]) is str, "device", "is not a name")
    _check_counts(content)
    _check_modules(content["modules"])
    _check_optimizer(content["optimizer"])
    if content["scheduler"] is not None:
        mapping(content["scheduler"], "scheduler", {"type", "state"})
        need(type(content["scheduler"]["type"]) is str, "scheduler: type", "is not a name")
        need(isinstance(content["scheduler"]["state"], dict), "scheduler: state", "is not a dictionary")
    if content["scaler"] is not None:
        _check_scaler(content["scaler"])
    ranks, target = content.get("ranks"), content["target_batch"]
    if content.get("counts") == TOKENS:
        target = sys.maxsize  # sizes are in samples
    _check_part(content, like, target, is_whole=ranks is None and target != sys.maxsize)
    if ranks is not None:
        need(type(ranks) is list and len(ranks) > 0, "ranks", "is not a list of what each rank has")
        for number, part in enumerate(ranks):
            with _within(f"ranks: {number}"):
                mapping(part, "", {"random", "position", "cutting"})
                loader = part.get("loader", "whole")
                need(type(loader) is str and loader in ("whole", "windows", "own"), "loader", "is not a word for one")
                _check_part(part, like, target, is_whole=False)


def _check_counts(content: Mapping[str, Any]) -> None:
    whole(content["windows"], "windows")
    whole(content["samples"], "samples")
    if content.get("evaluated") is not None:
        whole(content["evaluated"], "evaluated")
    stopped = content.get("stopped")
    if stopped is not None:
        with _within("stopped"):
            mapping(stopped, "", {"reason", "epochs", "max_steps"}, exactly=True)
            need(type(stopped["reason"]) is str, "reason", "is not a text")
            for name in ("epochs", "max_steps"):
                if stopped[name] is not None:
                    whole(stopped[name], name, least=1)
    noise = content.get("noise_scale")
    if noise is not None:
        with _within("noise_scale"):
            mapping(noise, "", {"measured", "variance", "squared_norm"}, exactly=True)
            whole(noise["measured"], "measured")
            number(noise["variance"], "variance")
            number(noise["squared_norm"], "squared_norm")
    most = content["windows"] * content["target_batch"]
    counts = content.get("counts", SAMPLES)
    need(type(counts) is str and counts in (SAMPLES, TOKENS), "counts", "is not a word for what windows are counted in")
    holds = counts == TOKENS or content["windows"] <= content["samples"] <= most
    need(holds, "samples", "is not what so many windows hold")


def _check_part(part: Mapping[str, Any], like: RandomStates, target_batch: int, *, is_whole: bool) -> None:
    """Check the values that each rank has for itself."""
    with _within("random"):
        check_states(part["random"], like)
    with _within("position"):
        _check_position(part["position"], like, len(part["random"][-1]))
    with _within("cutting"):
        _check_cutting(part["cutting"], target_batch, is_whole=is_whole)


# --- random states ----------------------------------------------------------------------------------------------------


def check_states(states: Any, like: RandomStates, own_count: int | None = None) -> None:
    """Raise `MalformedError` unless generators of the kinds of this run can be set to some random states.

    Args:
        states: The states in a file.
        like: Those of this run.
        own_count: How many generators of modules there must be; None where another function checks that.
    """
    need(type(states) is tuple and len(states) == _STATES, "", "is not a tuple of the generators' states")
    on_host, on_device, of_python, of_numpy, own = states
    check_generator(on_host, "torch")
    need(on_device is None or _is_bytes(on_device), "torch on the device", "is not a state of a generator")
    _check_python(of_python, "Python")
    check_numpy(of_numpy, like[3], "NumPy")
    need(type(own) is list, "the modules' own", "is not a list")
    need(own_count in (None, len(own)), "the modules' own", f"is not of {own_count} generators")
    if len(own) == len(like[4]):  # else it is of another model
        for place, (state, now) in enumerate(zip(own, like[4], strict=True)):
            _check_own(state, now, f"the modules' own {place}")


def check_generator(state: Any, where: str) -> None:
    """Raise `MalformedError` unless something is the state of a generator of torch's, on the host or on a card."""
    need(_is_bytes(state), where, "is not a state of a generator")
    if state.numel() != _CARD_STATE_BYTES:
        _try(where, lambda: torch.Generator().set_state(state))


def check_numpy(state: Any, like: Any, where: str) -> None:
    """Raise `MalformedError` unless something is the state of the same kind of NumPy's generators as another.

    NumPy itself does not check the position in a generator's buffer, and reads beyond its end where that is too large.
    """
    with _within(where):
        _check_as_numpys(state, like)
    made = getattr(np.random, str(like["bit_generator"]), None)
    if made is not None:
        generator = made()

        def set_it() -> None:
            generator.state = {name: state[name] for name in generator.state}

        _try(where, set_it)


def _check_as_numpys(state: Any, like: Mapping[str, Any]) -> None:
    mapping(state, "", set(like), exactly=True)
    for name, now in like.items():
        then = state[name]
        if isinstance(now, dict):
            with _within(name):
                _check_as_numpys(then, now)
        elif isinstance(now, np.ndarray):
            need(
                type(then) is np.ndarray and then.dtype == now.dtype and then.shape == now.shape,
                name,
                f"is not an array of shape {now.shape} and {now.dtype}",
            )
        elif isinstance(now, str):
            need(type(then) is str and then == now, name, f"is not {now}")
        elif isinstance(now, float):
            number(then, name)
        else:
            most = _of_buffer(name, like)
            whole(then, name, most=2**128 - 1 if most is None else most)


def _of_buffer(name: str, like: Mapping[str, Any]) -> int | None:
    """Return the largest value of a place in a generator's buffer, or of a mark; None where it is neither."""
    for place, buffer in (("pos", "key"), ("buffer_pos", "buffer")):
        if name == place and isinstance(like.get(buffer), np.ndarray):
            return len(like[buffer])
    return 1 if name.startswith("has_") else None


def _check_python(state: Any, where: str) -> None:
    need(type(state) is tuple, where, "is not a state of a generator")
    _try(where, lambda: random.Random().setstate(state))  # noqa: S311 - to be set, not drawn from
    need(state[2] is None or (type(state[2]) is float and math.isfinite(state[2])), where, "holds no next number")


def _check_own(state: Any, now: Any, where: str) -> None:
    if isinstance(now, Tensor):
        check_generator(state, where)
        need(state.shape == now.shape, where, "is the state of another kind of generator")
    elif isinstance(now, tuple):
        _check_python(state, where)
    else:
        check_numpy(state, now, where)


# --- where a run stands -----------------------------------------------------------------------------------------------


def _check_position(position: Any, like: RandomStates, own_count: int) -> None:
    known = {field.name for field in fields(Position)}
    mapping(position, "", {"epoch", "batches", "used", "closed", "start"})
    need(not position.keys() - known, "", f"has {', '.join(sorted(map(str, position.keys() - known)))}")
    whole(position["epoch"], "epoch", least=1)
    whole(position["batches"], "batches", most=_MOST_SAMPLES)
    whole(position["used"], "used", most=_MOST_SAMPLES)
    whole(position.get("behind", 0), "behind", most=position["batches"])
    for name in ("closed", "put_back"):
        need(type(position.get(name, False)) is bool, name, "is neither true nor false")
    has_rest = position["used"] or position.get("put_back", False)
    for name in ("length", "batch_size"):
        if position.get(name) is not None:
            whole(position[name], name)
    for name in ("start", "before_last"):
        if position.get(name) is not None:
            with _within(name):
                check_states(position[name], like, own_count)
    need(not position["batches"] or position["start"] is not None, "start", "is missing")
    need(not has_rest or position.get("before_last") is not None, "before_last", "is missing")
    need(bool(position["batches"]) or not has_rest, "used", "is of no batch")
    need(type(position.get("generators", ())) is tuple, "generators", "is not a tuple")
    for place, state in enumerate(position.get("generators", ())):
        check_generator(state, f"generators {place}")
    with _within("loader_state"):
        _check_windows_of(position.get("loader_state"), like, is_begun=bool(position["batches"]))


def _check_windows_of(state: Any, like: RandomStates, *, is_begun: bool) -> None:
    """Check the state of autoaccum's own loader; any other loader checks its own."""
    if not isinstance(state, dict) or state.keys() != {"source", "windows", "samples"}:
        return
    whole(state["windows"], "windows", most=_MOST_SAMPLES)
    if state["samples"] is not None:
        whole(state["samples"], "samples", most=_MOST_SAMPLES)
    source = state["source"]
    need(source is not None or not is_begun, "source", "is missing")
    if source is None:
        return
    need(type(source) is tuple and len(source) == 4 and type(source[3]) in (list, tuple), "source", "is not a state")  # noqa: PLR2004
    check_generator(source[0], "source: torch")
    _check_python(source[1], "source: Python")
    check_numpy(source[2], like[3], "source: NumPy")
    for place, one in enumerate(source[3]):
        check_generator(one, f"source: generators {place}")


def _check_cutting(cutting: Any, target_batch: int, *, is_whole: bool) -> None:
    mapping(cutting, "", set(_CUTTING))
    for name in ("plan", "largest"):
        _check_sizes(cutting[name], name, target_batch, is_whole=is_whole)
    need(type(cutting["plans"]) is list, "plans", "is not a list")
    for place, plan in enumerate(cutting["plans"]):
        need(type(plan) is list and len(plan) == 2, f"plans {place}", "is not a pair of a step and sizes")  # noqa: PLR2004
        whole(plan[0], f"plans {place}")
        _check_sizes(plan[1], f"plans {place}", target_batch, is_whole=is_whole)
    if type(cutting["asked"]) is not str or cutting["asked"] != "auto":
        whole(cutting["asked"], "asked", least=1)
    whole(cutting["oom_events"], "oom_events")
    for name in ("is_found", "is_timed"):
        need(type(cutting.get(name, True)) is bool, name, "is neither true nor false")
    memory = cutting.get("memory")
    if memory is not None:
        need(type(memory) is list and all(type(name) is str for name in memory), "memory", "is not a list of names")


def _check_sizes(sizes: Any, where: str, target_batch: int, *, is_whole: bool) -> None:
    need(type(sizes) is list and len(sizes) > 0, where, "is not a list of sizes")
    for size in sizes:
        whole(size, where, least=1, most=target_batch)
    total = sum(sizes)
    need(total == target_batch if is_whole else total <= target_batch, where, f"sums to {total} samples")


# --- model, optimizer, scaler -----------------------------------------------------------------------------------------


def _check_modules(modules: Any) -> None:
    need(type(modules) is list, "modules", "is not a list")
    for place, module in enumerate(modules):
        with _within(f"modules: {place}"):
            mapping(module, "", {"state", "buffers"})
            for part in ("state", "buffers", "spread"):
                kept = module.get(part, {})
                need(isinstance(kept, dict), part, "is not a dictionary")
                for name, value in kept.items():
                    need(type(name) is str, part, "has a key that is not a name")
                    _check_kept(part, name, value)


def _check_kept(part: str, name: str, value: Any) -> None:
    if part == "spread":
        need(type(value) is str, f"spread: {name}", "is not a form of a tensor")
    elif isinstance(value, Tensor):
        need(_has_numbers(value), f"{part}: {name}", "is a tensor without numbers")
    elif part == "buffers":
        need(value is None, f"buffers: {name}", "is neither a tensor nor none")


def _check_optimizer(optimizer: Any) -> None:
    with _within("optimizer"):
        mapping(optimizer, "", {"type", "state"})
        need(type(optimizer["type"]) is str, "type", "is not a name")
        state = optimizer["state"]
        mapping(state, "state", {"state", "param_groups"})
        need(isinstance(state["state"], dict), "state", "is not a dictionary")
        groups = state["param_groups"]
        need(type(groups) is list, "param_groups", "is not a list")
        for place, group in enumerate(groups):
            mapping(group, f"param_groups: {place}", {"params"})
            is_list = type(group["params"]) is list and all(type(one) is int for one in group["params"])
            need(is_list, f"param_groups: {place}: params", "is not a list of numbers")
        if "parameters" in optimizer:
            names = optimizer["parameters"]
            need(type(names) is list and all(map(_is_names, names)), "parameters", "is not a list of names")
            numbers = [len(group["params"]) for group in groups]
            need([len(each) for each in names] == numbers, "parameters", "has not a name for each parameter")


def _check_scaler(scaler: Any) -> None:
    with _within("scaler"):
        need(isinstance(scaler, dict), "", "is not a dictionary")
        if not scaler:
            return  # of one that is switched off
        mapping(scaler, "", {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"})
        for name in ("scale", "growth_factor", "backoff_factor"):
            number(scaler[name], name)
            need(scaler[name] > 0, name, "is not positive")
        whole(scaler["growth_interval"], "growth_interval", least=1, most=2**31 - 1)
        whole(scaler["_growth_tracker"], "_growth_tracker", most=2**31 - 1)


def _is_names(value: Any) -> bool:
    return type(value) is list and all(type(name) is str for name in value)


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"  # and not "meta", whatever was asked for when it was loaded


# --- the pieces -------------------------------------------------------------------------------------------------------


def whole(value: Any, where: str, *, least: int = 0, most: int = _LARGEST) -> None:
    """Raise `MalformedError` unless something is a whole number within bounds."""
    need(type(value) is int, where, f"is a {type(value).__name__} in place of a whole number")
    need(least <= value <= most, where, f"is not within {least} and {most}")


def number(value: Any, where: str) -> None:
    """Raise `MalformedError` unless something is a finite number."""
    is_one = (type(value) is int and abs(value) <= _LARGEST) or (type(value) is float and math.isfinite(value))
    need(is_one, where, "is not a finite number")


def mapping(value: Any, where: str, keys: Collection[str], *, exactly: bool = False) -> None:
    """Raise `MalformedError` unless something is a dictionary with certain keys."""
    need(isinstance(value, dict), where, f"is a {type(value).__name__} in place of a dictionary")
    lacking = sorted(set(keys) - value.keys())
    need(not lacking, where, f"lacks {', '.join(lacking)}")
    need(not exactly or len(value) == len(keys), where, "holds more than it should")


def _is_bytes(value: Any) -> bool:
    return type(value) is Tensor and value.dtype is torch.uint8 and value.dim() == 1 and _has_numbers(value)


def need(is_so: bool, where: str, otherwise: str) -> None:
    """Raise `MalformedError` unless something is so."""
    if not is_so:
        raise MalformedError(f"{where} {otherwise}".strip())


def _try(where: str, action: Callable[[], object]) -> None:
    try:
        action()
    except Exception as error:
        raise MalformedError(f"{where} is not a state of a generator ({error})".strip()) from error


@contextmanager
def _within(where: str) -> Iterator[None]:
    try:
        yield
    except MalformedError as error:
        raise MalformedError(f"{where}: {error}") from error.__cause__
