"""Keeps only the inputs of a model's repeated blocks, and computes the rest once more in the backward pass.

Gradients stay bit-identical: recomputation starts from what the block found the first time (`block_state`).
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoaccum._data.random_state import RandomState
from autoaccum._engine.block_state import Before, own_containers
from autoaccum._engine.replaced_forward import forward_replaced
from autoaccum._system.exceptions import contextmanager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# What Transformers sets on a model and its layers.
_OF_CHECKPOINTING = frozenset({"gradient_checkpointing", "_gradient_checkpointing_func"})


@contextmanager
def checkpointed(modules: Sequence[nn.Module], device: torch.device, which: str | None = None) -> Iterator[str]:
    """Keep only the inputs of repeated blocks, and recompute the rest in the backward pass.

    Args:
        modules: The modules of the step.
        device: Their device.
        which: The number of blocks, from the model's first; None for all.

    Yields:
        What is checkpointed, such as "33 Bottleneck blocks"; empty if no block repeats.
    """
    layers = [(part, _layers_of_their_own(part)) for part in with_their_own(modules)]
    blocks = _plain_blocks(modules)
    count = sum(len(some) for _, some in layers) + len(blocks)
    taken = range(count if which is None else min(int(which), count))
    first, said = 0, []
    with ExitStack() as changed:
        for part, some in layers:
            left_out = [layer for number, layer in enumerate(some, start=first) if number not in taken]
            first += len(some)
            if which is None or not some:
                said.append(f"{type(part).__name__} by its own")
            elif len(left_out) < len(some):
                said.append(f"{len(some) - len(left_out)} of {len(some)} blocks of {type(part).__name__} by its own")
            if not some or len(left_out) < len(some):
                changed.enter_context(_own_checkpointing(part, left_out))
        random_state = RandomState(device, modules)
        chosen = [block for number, block in enumerate(blocks, start=first) if number in taken]
        for block in chosen:
            changed.enter_context(forward_replaced(block, functools.partial(_checkpointed, random_state, block)))
        whole = "" if len(chosen) == len(blocks) else f" of {len(blocks)}"
        said += [f"{number}{whole} {name} blocks" for name, number in Counter(map(_class_of, chosen)).items()]
        yield " and ".join(said)


def all_blocks(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that can be checkpointed each by itself, as they are numbered."""
    return [layer for part in with_their_own(modules) for layer in _layers_of_their_own(part)] + _plain_blocks(modules)


def with_their_own(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the outermost parts of several modules that can checkpoint themselves."""
    return [part for module in modules for part in with_checkpointing_of_their_own(module)]


def _plain_blocks(modules: Sequence[nn.Module]) -> list[nn.Module]:
    own = with_their_own(modules)
    return [block for module in modules for block in repeated_blocks(module, leave_out=own)]


def is_checkpointed_already(modules: Sequence[nn.Module]) -> bool:
    """Whether the user has turned on the checkpointing that a model brings."""
    own = with_their_own(modules)
    return any(getattr(part, "gradient_checkpointing", False) for model in own for part in model.modules())


def repeated_blocks(model: nn.Module, *, leave_out: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return the blocks that a model stacks: the outermost modules whose class occurs more than once among siblings.

    Lists and sequences of modules are searched first, then the attributes of any module; as a last resort,
    sequences themselves count as blocks.

    Args:
        model: The model.
        leave_out: Parts that are not searched.
    """
    for holders, no_blocks in (
        (_CONTAINERS, _CONTAINERS),
        ((nn.Module,), _CONTAINERS),
        (_CONTAINERS, (nn.ModuleList, nn.ModuleDict)),
    ):
        if found := _blocks(model, leave_out, holders, no_blocks):
            return found
    return []


def _blocks(
    module: nn.Module, leave_out: Sequence[nn.Module], holders: tuple[type, ...], no_blocks: tuple[type, ...]
) -> list[nn.Module]:
    if any(module is part for part in leave_out):
        return []
    children = list(dict.fromkeys(module.children()))
    kinds = Counter(type(child) for child in children if _is_composite(child) and not isinstance(child, no_blocks))
    found = []
    for child in children:
        if isinstance(module, holders) and kinds[type(child)] > 1:
            found.append(child)
        else:
            found += _blocks(child, leave_out, holders, no_blocks)
    return found


def _class_of(module: nn.Module) -> str:
    return type(module).__name__


def _is_composite(module: nn.Module) -> bool:
    """Whether the module contains others that have parameters."""
    return next((part for child in module.children() for part in child.parameters()), None) is not None


def with_checkpointing_of_their_own(module: nn.Module) -> list[nn.Module]:
    """Return the outermost parts that can checkpoint themselves, such as the models of Transformers."""
    if getattr(module, "supports_gradient_checkpointing", False) and hasattr(module, "gradient_checkpointing_enable"):
        return [module]
    return [part for child in module.children() for part in with_checkpointing_of_their_own(child)]


def _layers_of_their_own(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that can each be checkpointed by the model itself; none for older Transformers."""
    return [block for block in repeated_blocks(model) if hasattr(block, "gradient_checkpointing")]


@contextmanager
def _own_checkpointing(model: Any, left_out: Sequence[Any]) -> Iterator[None]:
    if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        yield  # the user's own choice, which stays
        return
    before = [
        (own := vars(part), {name: own[name] for name in _OF_CHECKPOINTING & own.keys()}) for part in model.modules()
    ]
    # Transformers 5 renamed it.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    with _without_hooks_on_inputs(model):
        getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    try:
        for layer in left_out:
            layer.gradient_checkpointing = False
        with without_cache(model):
            yield
    finally:
        with _without_hooks_on_inputs(model):
            getattr(model, f"{name}_checkpointing_disable")()
        for own, kept in before:
            for attribute in _OF_CHECKPOINTING:
                own.pop(attribute, None)
            own.update(kept)


@contextmanager
def _without_hooks_on_inputs(model: nn.Module) -> Iterator[None]:
    """Keep a Transformers model from hooking its embeddings, and from removing the user's hooks there.

    By these hooks the outputs of embeddings require gradients, which only reentrant checkpointing needs. They would
    stay behind, and could not be pickled.
    """
    parts = [part for part in model.modules() if hasattr(type(part), "enable_input_require_grads")]
    hidden = dict.fromkeys(("enable_input_require_grads", "disable_input_require_grads"), _do_nothing)
    own = [{name: vars(part)[name] for name in hidden.keys() & vars(part).keys()} for part in parts]
    for part in parts:
        vars(part).update(hidden)
    try:
        yield
    finally:
        for part, kept in zip(parts, own, strict=True):
            for name in hidden:
                del vars(part)[name]
            vars(part).update(kept)


def _do_nothing() -> None:
    pass


@contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """Turn off a Transformers model's key/value cache, which is for generation.

    Transformers turns it off under checkpointing anyway, with a warning.
    """
    config: Any = getattr(model, "config", None)
    caches = getattr(config, "use_cache", None)
    try:
        if caches:
            config.use_cache = False
        yield
    finally:
        if caches:
            config.use_cache = caches


def _checkpointed(
    random_state: RandomState, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # The caller may add to lists that it gives to one block after the other, as DenseNet does.
    args, kwargs = own_containers(args), own_containers(kwargs)
    before = Before(block, random_state, args, kwargs)
    outputs = checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=before.contexts, **kwargs
    )
    before.check()
    return outputs
