"""Keeps only the inputs of a model's blocks, and computes the rest once more in the backward pass.

By `torch.utils.checkpoint` without reentry: torch's random state and the modes of modules are as in the first
computation, and the statistics of BatchNorm move once. What else a block keeps or draws from is the user's
(docs/memory.md).
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from autoaccum._saving.replaced_forward import forward_replaced
from autoaccum.errors import SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LISTS = (nn.ModuleList, nn.ModuleDict)


@contextmanager
def checkpointed(modules: Sequence[nn.Module], name: str | None = None) -> Iterator[str]:
    """Keep only the inputs of blocks (`blocks_of`), and recompute the rest in the backward pass.

    Yields:
        What is done, such as "activation checkpointing of 33 Bottleneck blocks"; empty if there is no block.
    """
    if is_checkpointed_already(modules):
        yield "activation checkpointing by the model's own"
        return
    blocks, checked = blocks_of(modules, name), set[nn.Module]()
    with ExitStack() as changed:
        for block in blocks:
            changed.enter_context(forward_replaced(block, functools.partial(_checkpointed, block, checked)))
        changed.enter_context(_without_caches(modules))
        counted = Counter(type(block).__name__ for block in blocks)
        said = " and ".join(f"{count} {kind} blocks" for kind, count in counted.items())
        yield said and f"activation checkpointing of {said}"


def blocks_of(modules: Sequence[nn.Module], name: str | None = None) -> list[nn.Module]:
    """Return the blocks to checkpoint: those of a name, or those that the model stacks.

    A name is what blocks are called in their model, alone or as a list of them, also where others (DDP, PEFT, a
    compiled module) are around it; or their class.
    """
    if name is None:
        found = [block for module in modules for block in repeated_blocks(module)]
        return list(dict.fromkeys(found))
    named = [
        part
        for module in modules
        for path, part in module.named_modules()
        if part is not module and (f".{path}".endswith(f".{name}") or name == type(part).__name__)
    ]
    parts = [one for part in named for one in (part.children() if isinstance(part, _LISTS) else [part])]
    within = {id(inner) for part in parts for inner in part.modules() if inner is not part}
    return [part for part in dict.fromkeys(parts) if id(part) not in within]


def is_checkpointed_already(modules: Sequence[nn.Module]) -> bool:
    """Whether the user has turned on the checkpointing that a model of Transformers brings."""
    parts = (part for module in modules for part in module.modules())
    return any(getattr(part, "gradient_checkpointing", False) is True for part in parts)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model stacks: the outermost modules whose class occurs more than once among siblings.

    Lists and sequences of modules are searched first, then the attributes of any module; as a last resort,
    sequences themselves count as blocks.
    """
    for holders, no_blocks in ((_CONTAINERS, _CONTAINERS), ((nn.Module,), _CONTAINERS), (_CONTAINERS, _LISTS)):
        if found := _blocks(model, holders, no_blocks):
            return found
    return []


def _blocks(module: nn.Module, holders: tuple[type, ...], no_blocks: tuple[type, ...]) -> list[nn.Module]:
    children = list(dict.fromkeys(module.children()))
    kinds = Counter(type(child) for child in children if _is_composite(child) and not isinstance(child, no_blocks))
    found = []
    for child in children:
        if isinstance(module, holders) and kinds[type(child)] > 1:
            found.append(child)
        else:
            found += _blocks(child, holders, no_blocks)
    return found


def _is_composite(module: nn.Module) -> bool:
    """Whether the module contains others that have parameters."""
    return next((part for child in module.children() for part in child.parameters()), None) is not None


@contextmanager
def _without_caches(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Turn off key/value caches of Transformers models, which are for generation, and which each computation fills."""
    parts = (part for module in modules for part in module.modules())
    configs: dict[int, Any] = {id(config): config for part in parts if (config := getattr(part, "config", None))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _checkpointed(
    block: nn.Module, checked: set[nn.Module], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # The caller may add to lists that it gives to one block after the other, as DenseNet does.
    args, kwargs = _own_containers(args), _own_containers(kwargs)
    contexts = functools.partial(_contexts, block, checked)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(
    block: nn.Module, checked: set[nn.Module]
) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the contexts for computing and for recomputing a block."""
    # `torch.autograd.grad` leaves the mode in which losses are tried, and with it the kernels that were chosen there.
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    functions = [mode for mode in stack if type(mode).__module__.startswith("autoaccum.")]
    modes = [part.training for part in block.modules()]
    return nullcontext(), _once_more(block, modes, functions, checked)


@contextmanager
def _once_more(
    block: nn.Module, modes: Sequence[bool], functions: Sequence[Any], checked: set[nn.Module]
) -> Iterator[None]:
    """Compute a block in the modes of the first time, and put back these and the statistics of BatchNorm.

    Args:
        block: The block.
        modes: Which of its modules were in training mode.
        functions: Modes of functions that were in force.
        checked: Blocks of which it is known that they draw nothing that is not put back.
    """
    parts = list(block.modules())
    norms = [part for part in parts if isinstance(part, _NormBase)]
    before = [(buffer, buffer.detach().clone()) for norm in norms for buffer in norm.buffers()]
    modes_now = [part.training for part in parts]
    _set_modes(parts, modes)
    drawn = None if block in checked else _host_random()
    try:
        with ExitStack() as entered:
            for mode in functions:
                entered.enter_context(mode)
            yield
    finally:
        _set_modes(parts, modes_now)
        for buffer, values in before:
            buffer.data.copy_(values)  # by `data`, since autograd has saved them and would take them for modified
        if drawn is not None and _host_random() != drawn:
            raise SavingRefusedError(
                f"save_memory='checkpoint': a {type(block).__name__} draws from Python's or NumPy's generators, and "
                "would draw other numbers where it is computed again; draw by torch, or leave 'checkpoint' out"
            )
        checked.add(block)


def _set_modes(parts: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for part, mode in zip(parts, modes, strict=True):
        part.training = mode


def _host_random() -> tuple[Any, ...]:
    _, words, place, *_ = np.random.get_state()  # noqa: NPY002 - the global generator
    return random.getstate(), place, int(words[0])


def _own_containers(value: Any) -> Any:
    """Return lists, tuples and dicts anew, with the same contents."""
    if type(value) is dict:
        return {name: _own_containers(one) for name, one in value.items()}
    return type(value)(map(_own_containers, value)) if type(value) in (list, tuple) else value
