"""Saves and restores random generators: torch's, Python's, NumPy's, and those that objects hold as attributes."""

from __future__ import annotations

import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


class RandomState:
    """The generators that a model, a loss or a transform may draw from.

    These are the global ones of torch, Python and NumPy, and generators that modules hold as attributes.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module] = (), further: Iterable[Any] = ()) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        parts = (part for module in modules for part in module.modules())
        values = [*(value for part in parts for value in vars(part).values()), *further]
        self._own = list({id(value): value for value in values if is_generator(value)}.values())

    def capture(self, *, of_host: bool = True) -> tuple[Any, ...]:
        """Return the current states, which are never modified, for `restore`.

        Args:
            of_host: Whether to include Python's and NumPy's too, which takes 42 microseconds.
        """
        return (
            torch.default_generator.get_state(),
            None if self._module is None else self._module.get_rng_state(self._device),
            random.getstate() if of_host else None,
            np.random.get_state(legacy=False) if of_host else None,  # noqa: NPY002 - the user's global generator
            tuple(map(_state, self._own)),
        )

    def restore(self, states: tuple[Any, ...]) -> None:
        """Restore states that `take` has returned, of the same device and modules."""
        of_torch, of_device, of_python, of_numpy, own = states
        torch.set_rng_state(of_torch)
        if self._module is not None:
            self._module.set_rng_state(of_device, self._device)
        if of_python is not None:
            random.setstate(of_python)
            np.random.set_state(_within(of_numpy))  # noqa: NPY002
        set_states(self._own, own)

    def check(self, states: tuple[Any, ...]) -> None:
        """Check that states, which a file may hold, are of these generators and can be restored; all stays as it is.

        Raises:
            ValueError: They are not, as are errors of other types.
        """
        before = self.capture()
        if len(states) != len(before) or any(
            (one is None) != (here is None) for one, here in zip(states, before, strict=True)
        ):
            raise ValueError("the states of random generators are not those of this process")
        try:
            self.restore(states)
        finally:
            self.restore(before)

    def seed(self, seed: int) -> None:
        """Seed every generator that `take` saves."""
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            with self._module.device(self._device):
                self._module.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the user's global generator
        for generator in self._own:
            _seed(generator, seed)


def host_has_moved(states: tuple[Any, ...]) -> bool:
    """Whether Python's or NumPy's generator has moved since `RandomState.take` returned these states with them."""
    _, _, of_python, of_numpy, _ = states
    now = np.random.get_state(legacy=False)  # noqa: NPY002 - the user's global generator
    return of_python is None or random.getstate() != of_python or pickle.dumps(now) != pickle.dumps(of_numpy)


def moved(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[bool]:
    """Return of torch's, Python's and NumPy's generator whether two states that were taken of it differ."""
    one, other = ((str(states[0].tolist()), str(states[2]), str(states[3])) for states in (before, after))
    return [part != also for part, also in zip(one, other, strict=True)]


def is_generator(value: Any) -> bool:
    """Whether a value is a random generator with a state, and none of the global ones."""
    if not isinstance(value, _KINDS) or isinstance(value, random.SystemRandom):
        return False
    shared: tuple[Any, ...] = (torch.default_generator, random.seed.__self__, np.random.mtrand._rand)  # type: ignore[attr-defined]
    return all(value is not one for one in shared)


def states_of(generators: Iterable[Any]) -> tuple[Any, ...]:
    """Return the states of generators, which are never modified."""
    return tuple(map(_state, generators))


def set_states(generators: Iterable[Any], states: Iterable[Any]) -> None:
    """Restore the states of generators."""
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(_within(state))
        else:
            _bits_of(generator).state = _within(state)


def _within(state: Any) -> Any:
    """Return a state of NumPy's, which reads beyond its numbers where a file says so."""
    if state["bit_generator"] == "MT19937" and not 0 <= state["state"]["pos"] <= len(state["state"]["key"]):
        raise ValueError(f"a state of NumPy's generator has the position {state['state']['pos']}")
    return state


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return _bits_of(generator).state


def _bits_of(generator: Any) -> Any:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random | np.random.RandomState):
        generator.seed(seed)
    else:
        bits = _bits_of(generator)
        bits.state = type(bits)(seed).state
