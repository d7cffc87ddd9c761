"""Several optimizers over disjoint parameters as one: their groups in order, one state, one step.

An update is then all of their steps or none, as with a single optimizer, and snapshots, checkpoints, gradient scalers
and schedulers see a single one. Nothing is copied: settings and state are those of the parts.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, such as "AdamW", or of several: "SGD and Adam"."""
    parts = optimizer.parts if isinstance(optimizer, OptimizerList) else [optimizer]
    return " and ".join(dict.fromkeys(type(part).__name__ for part in parts))


class OptimizerList(torch.optim.Optimizer):
    """Steps several optimizers, one after the other.

    Args:
        parts: The optimizers.

    Raises:
        InvalidInputError: Two of them hold the same parameter.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        held: set[torch.Tensor] = set()
        for part in self.parts:
            own = {parameter for group in part.param_groups for parameter in group["params"]}
            if shared := held & own:
                raise InvalidInputError(
                    f"optimizer=[...]: {len(shared)} parameters are in more than one of the {len(self.parts)} "
                    f"optimizers (the {type(part).__name__} holds them again), and would be updated twice; give each "
                    "parameter to one of them"
                )
            held |= own
        state: defaultdict[Any, Any] = defaultdict(dict)
        for part in self.parts:
            state.update(part.state)
        self.state = state
        # The base's __init__ would make groups and a state of its own; this makes the rest, as for a copy.
        super().__setstate__({"defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, in order."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        for part, own in zip(self.parts, self._by_part(groups), strict=True):
            part.param_groups = own

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state that all parts share: each has that of its own parameters in it."""
        return self.parts[0].state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        for part in self.parts:
            part.state = state

    def _by_part(self, groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        rest = iter(groups)
        return [list(islice(rest, len(part.param_groups))) for part in self.parts]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: which part would step it is not known.

        Raises:
            InvalidInputError: Always.
        """
        raise InvalidInputError(
            f"a group of {len(list(param_group.get('params', ())))} parameters cannot be added to several "
            "optimizers together; call add_param_group of the one that is to step it"
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each part.

        Raises:
            InvalidInputError: A closure was given, which each part would call again.
        """
        if closure is not None:
            raise InvalidInputError("closure= cannot be given to several optimizers, since each would call it again")
        for part in self.parts:
            part.step()

    def __getstate__(self) -> dict[str, Any]:
        """Return the parts, which hold everything."""
        return {"defaults": self.defaults, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copy's parts; or a state and groups for all parts, which become parts of this object alone."""
        if "parts" not in state:
            parts = []
            for part, groups in zip(self.parts, self._by_part(state["param_groups"]), strict=True):
                own = object.__new__(type(part))
                own.__dict__ = {name: value for name, value in vars(part).items() if name != "step"}  # a scheduler's
                own.__setstate__({"state": state["state"], "param_groups": groups})
                parts.append(own)
            state = {"parts": parts}
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the parts themselves."""
        parts = self.parts
        super().load_state_dict(state_dict)
        loaded, self.parts = self.parts, parts
        for part, new in zip(parts, loaded, strict=True):
            part.__setstate__({"state": new.state, "param_groups": new.param_groups})
