"""Lets torch.compile compute activations again in the backward pass, until they take a share of what they would.

PyTorch chooses which: those that are cheapest for their bytes (`torch._functorch.config.activation_memory_budget`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch import config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# What `memory` calls it, followed by a colon and the share.
BUDGET = "budget"
_SHARE = re.compile(r"0|0\.[0-9]{1,6}|1|1\.0{1,6}")


def is_share(text: str) -> bool:
    """Whether a text is a share from 0 to 1, such as "0.5"."""
    return _SHARE.fullmatch(text) is not None


def within_budget(options: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return options for torch.compile that compile within a budget, by a backend that only these options have.

    Graphs that were compiled with another budget are then not taken for these.

    Args:
        options: The user's own options.
        share: The share of activations to keep.
    """
    others = {name: value for name, value in options.items() if name not in ("backend", "mode", "options")}
    compiler = _compiler(options)

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=share):
            return compiler(graph, inputs)

    return {**others, "backend": backend}


def _compiler(options: Mapping[str, Any]) -> Callable[[Any, Any], Any]:
    backend = options.get("backend", "inductor")
    if backend == "inductor":
        from torch._inductor.compile_fx import compile_fx  # noqa: PLC0415 - slow to import, and few need it

        settings = dict(torch._inductor.list_mode_options(options["mode"])) if options.get("mode") else {}
        settings.update(options.get("options") or {})
        return lambda graph, inputs: compile_fx(graph, inputs, config_patches=settings)
    found: Callable[[Any, Any], Any] = backend if callable(backend) else torch._dynamo.lookup_backend(backend)
    return found
