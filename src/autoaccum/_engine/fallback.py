"""Makes a step take less memory: keep fewer activations for backward, keep them on the host, or no logits at all.

Changes the modules of a training step in place and restores them at the end. Gradients stay bit-identical, except for
the rounding of a loss in chunks: recomputation starts from the random state, buffers and plain attributes of the first
computation, and a block that modifies its inputs is rejected.
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from autoaccum._arguments import is_one_of, shown
from autoaccum._engine.chunked_logits import CHUNK, find_heads, logits_of
from autoaccum._snapshot import RandomState
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from autoaccum._memory.base import MemoryBackend

FALLBACKS = ("checkpoint", "offload")
# What `memory` takes; behind the first, a colon and the name of a layer may follow.
CHUNKED = "chunked_loss"
SAVINGS = (CHUNKED, *FALLBACKS)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Attributes that hide those of the module's class while a fallback is active.
_HIDDEN = ("forward", "__getstate__")
# Smaller tensors are not worth the transfer to the host and back.
_LEAST_OFFLOADED_BYTES = 4096
# Buffers that a forward pass updates are small (statistics, counters); masks and position tables do not change.
_LARGEST_MOVED_ELEMENTS = 65_536
# Attributes of these types (counters, flags) are restored; blocks are responsible for larger objects that they change.
_PLAIN = (bool, int, float, str, type(None))


def check_fallback(fallback: Sequence[str] | str | None, memory: MemoryBackend, *, compiles: bool) -> tuple[str, ...]:
    """Return the fallback names from `fit`'s argument, in order.

    Raises:
        InvalidInputError: A name is unknown, or its fallback has no effect here.
    """
    names = _names(fallback, "fallback")
    for name in names:
        if not is_one_of(name, FALLBACKS):
            raise InvalidInputError(f"fallback={shown(name)} is unknown; choose from {', '.join(map(repr, FALLBACKS))}")
    if "offload" in names and memory.is_host:
        raise InvalidInputError(
            f"fallback='offload' moves activations to host memory, and on {memory.name} they already are there; "
            "choose 'checkpoint'"
        )
    if names and compiles:
        raise InvalidInputError("fallback= changes the model while it trains, which compile= does not see; choose one")
    return names


def check_memory(
    memory: Sequence[str] | str | None,
    fallback: Sequence[str] | str | None,
    backend: MemoryBackend,
    *,
    compiles: bool,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names from `fit`'s arguments `memory` and `fallback`, in order.

    Raises:
        InvalidInputError: A name is unknown, or has no effect here; or both are given.
    """
    fallbacks, names = check_fallback(fallback, backend, compiles=compiles), _names(memory, "memory")
    if names and fallback is not None:
        raise InvalidInputError(
            f"memory={shown(memory)} saves memory from the start, and fallback={shown(fallback)} where not even one "
            "sample fits; pass one of them"
        )
    for name in names:
        kind, colon, layer = name.partition(":") if isinstance(name, str) else (name, "", "")
        if not is_one_of(kind, SAVINGS) or (colon and (kind != CHUNKED or not layer)):
            raise InvalidInputError(
                f"memory={shown(name)} is unknown; choose from {', '.join(map(repr, SAVINGS))}, or "
                f"'{CHUNKED}:NAME' with the name of the layer that makes the logits"
            )
    if "offload" in names and backend.is_host:
        raise InvalidInputError(
            f"memory='offload' moves activations to host memory, and on {backend.name} they already are there; "
            "choose 'checkpoint'"
        )
    if names and compiles:
        raise InvalidInputError("memory= changes the model while it trains, which compile= does not see; choose one")
    return names, fallbacks


def _names(given: Sequence[str] | str | None, argument: str) -> tuple[str, ...]:
    if given is None or isinstance(given, str):
        return () if given is None else (given,)
    if not isinstance(given, list | tuple):
        raise InvalidInputError(
            f"{argument}={shown(given)} is neither a name nor a list of names, such as ['checkpoint']"
        )
    return tuple(given)


class Fallbacks:
    """Reduces the memory that a step needs, one fallback after another.

    Args:
        modules: The modules of the step.
        names: The fallbacks, in order.
        memory: The device.
        savings: What saves memory from the start, in order.

    Attributes:
        ways: Descriptions of the active fallbacks and savings.
        found_no_blocks: Whether checkpointing was requested but the model has no blocks to checkpoint.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        names: Sequence[str],
        memory: MemoryBackend,
        savings: Sequence[str] = (),
    ) -> None:
        self._savings = savings
        self._modules = modules
        self._names = list(names)
        self._memory = memory
        self._in_force = ExitStack()
        self.ways: list[str] = []
        self.found_no_blocks = False

    def begin(self, say: Callable[[str], None]) -> None:
        """Activate the savings.

        Args:
            say: Reports to the user what is done.

        Raises:
            InvalidInputError: One of them has no place in the model.
        """
        for name in self._savings:
            kind, _, layer = name.partition(":")
            if kind == CHUNKED:
                way = self._in_force.enter_context(chunked(self._modules, layer or None, say))
                lack = (
                    "no head found (what get_output_embeddings of a Transformers model returns, an nn.Linear); name "
                    f"the layer that makes the logits, as in memory='{CHUNKED}:lm_head'"
                )
            else:
                way, lack = self._activated(kind), "the model has no repeated blocks"
            if not way:
                raise InvalidInputError(f"memory={name!r}: {lack}, or leave it out")
            self.ways.append(way)
            say(f"{way} (memory={name!r})")

    def next(self) -> bool:
        """Activate the next fallback that changes anything; return whether there was one."""
        while self._names:
            if way := self._activated(self._names.pop(0)):
                self.ways.append(way)
                return True
            self.found_no_blocks = True
        return False

    def _activated(self, name: str) -> str:
        """Activate a fallback; return what it does, or nothing if it has no place in the model."""
        if name == "offload":
            self._in_force.enter_context(offloaded(self._modules, self._memory))
            return "what backward needs is kept in the host's memory"
        done = self._in_force.enter_context(checkpointed(self._modules, self._memory.device))
        return done and f"activation checkpointing of {done}"

    def end(self) -> None:
        """Restore the modules."""
        self._in_force.close()


def ways_left(modules: Sequence[nn.Module], memory: MemoryBackend) -> list[str]:
    """Return the fallbacks, written as `fit` arguments, that are not active yet and would change anything."""
    ways = []
    own = [part for module in modules for part in _with_checkpointing_of_their_own(module)]
    blocks = [block for module in modules for block in repeated_blocks(module, leave_out=own)]
    recompute = any(getattr(part, "gradient_checkpointing", False) for module in own for part in module.modules())
    if (own or blocks) and not recompute and not any(map(_is_changed, blocks)):
        what = f"{len(blocks)} {type(blocks[0]).__name__} blocks" if blocks else type(own[0]).__name__
        ways.append(f"fit(..., fallback='checkpoint') (activation checkpointing of {what})")
    if not memory.is_host and not any(map(_is_changed, modules)):
        ways.append("fit(..., fallback='offload') (what backward needs on the host)")
    return ways


def _is_changed(module: nn.Module) -> bool:
    return all(name in vars(module) for name in _HIDDEN)


# --- computed again ---------------------------------------------------------------------------------------------------


@contextmanager
def checkpointed(modules: Sequence[nn.Module], device: torch.device) -> Iterator[str]:
    """Keep only the inputs of each repeated block, and recompute the rest in the backward pass.

    Yields:
        What is checkpointed, such as "33 Bottleneck blocks"; empty if no block repeats.
    """
    with ExitStack() as changed:
        own = [part for module in modules for part in _with_checkpointing_of_their_own(module)]
        for part in own:
            changed.enter_context(_own_checkpointing(part))
        blocks = [block for module in modules for block in repeated_blocks(module, leave_out=own)]
        for block in blocks:
            changed.enter_context(_replaced_forward(block, functools.partial(_checkpointed, _Before(block, device))))
        named = Counter(type(block).__name__ for block in blocks)
        said = [f"{count} {name} blocks" for name, count in named.items()]
        yield " and ".join([f"{type(part).__name__} by its own" for part in own] + said)


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


def _is_composite(module: nn.Module) -> bool:
    """Whether the module contains others that have parameters."""
    return next((part for child in module.children() for part in child.parameters()), None) is not None


def _with_checkpointing_of_their_own(module: nn.Module) -> list[nn.Module]:
    """Return the outermost parts that can checkpoint themselves, such as the models of Transformers."""
    if getattr(module, "supports_gradient_checkpointing", False) and hasattr(module, "gradient_checkpointing_enable"):
        return [module]
    return [part for child in module.children() for part in _with_checkpointing_of_their_own(child)]


@contextmanager
def _own_checkpointing(model: Any) -> Iterator[None]:
    if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        yield  # the user's own choice, which stays
        return
    # Transformers 5 renamed it.
    name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    # The key/value cache is for generation; Transformers turns it off under checkpointing anyway, with a warning.
    config: Any = getattr(model, "config", None)
    caches = getattr(config, "use_cache", None)
    getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
    try:
        if caches:
            config.use_cache = False
        yield
    finally:
        if caches:
            config.use_cache = caches
        getattr(model, f"{name}_checkpointing_disable")()


def _checkpointed(before: _Before, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    given = _looks_of((*args, *kwargs.values()))
    outputs = checkpoint(
        forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=before.contexts, **kwargs
    )
    if _looks_of((*args, *kwargs.values())) != given:
        raise InvalidInputError(
            f"a {before.name} changes its inputs in place, so it cannot be recomputed from them; leave "
            "fallback='checkpoint' out, or let the block work on a copy"
        )
    return outputs


def _looks_of(values: Iterable[Any]) -> list[Any]:
    """Return values that reveal whether tensors were written or the members of lists and mappings changed."""
    looks: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            looks.append(value._version)
        elif isinstance(value, list | tuple | set):
            looks.append([len(value), *map(id, value), *_looks_of(value)])
        elif isinstance(value, dict):
            looks.append([*value, *map(id, value.values()), *_looks_of(value.values())])
    return looks


class _Taken(NamedTuple):
    random: tuple[Any, ...]
    buffers: list[tuple[Tensor, Tensor]]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]


class _Before:
    """A block's state before its first computation, for recomputing it: random state, buffers, plain attributes."""

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._random = RandomState(device, [block])
        self._block = block

    @property
    def name(self) -> str:
        """The block's class."""
        return type(self._block).__name__

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts for computing and for recomputing the block."""
        return nullcontext(), self._again(self._taken())

    @contextmanager
    def _again(self, first: _Taken) -> Iterator[None]:
        now = self._taken()
        self._put_back(first)
        try:
            yield
        finally:
            self._put_back(now)

    def _taken(self) -> _Taken:
        self._random.take()
        small = (buffer for buffer in self._block.buffers() if buffer.numel() <= _LARGEST_MOVED_ELEMENTS)
        return _Taken(
            self._random.taken,
            [(buffer, buffer.detach().clone()) for buffer in small],
            [
                (holder, {name: value for name, value in holder.items() if isinstance(value, _PLAIN)})
                for holder in map(vars, self._block.modules())
            ],
        )

    def _put_back(self, taken: _Taken) -> None:
        self._random.assume(taken.random)
        self._random.put_back()
        for holder, plain in taken.attributes:
            holder.update(plain)
        for buffer, value in taken.buffers:
            # Through .data, so that tensors which other operators saved for backward do not count as modified in place.
            buffer.data.copy_(value)


# --- logits in chunks -------------------------------------------------------------------------------------------------


@contextmanager
def chunked(modules: Sequence[nn.Module], name: str | None, say: Callable[[str], None]) -> Iterator[str]:
    """Compute logits and their cross entropy in chunks of tokens.

    Args:
        modules: The modules of the step.
        name: The name of the layer that makes the logits; None for those of Transformers' models.
        say: Reports to the user what has to be computed whole.

    Yields:
        What is computed in chunks; empty if there is no such layer.

    Raises:
        InvalidInputError: There is no layer of that name.
    """

    def tell(function: str) -> None:
        say(
            f"memory='{CHUNKED}': the loss asks for all logits at once ({function}), so they are computed whole there; "
            "torch.nn.functional.cross_entropy of them is computed in chunks"
        )

    with ExitStack() as changed:
        heads = find_heads(modules, name)
        for head in heads:
            changed.enter_context(_replaced_forward(head, functools.partial(logits_of, tell, CHUNK, head)))
        sizes = ", ".join(f"{head.out_features:,}" for head in heads)
        yield f"logits over {sizes} classes are computed {CHUNK:,} tokens at a time" if heads else ""


# --- kept on the host -------------------------------------------------------------------------------------------------


@contextmanager
def offloaded(modules: Sequence[nn.Module], memory: MemoryBackend) -> Iterator[None]:
    """Keep tensors saved for backward in host memory until the backward pass needs them."""
    with ExitStack() as changed:
        for module in modules:
            changed.enter_context(_replaced_forward(module, functools.partial(_offloaded, module, memory)))
        yield


def _offloaded(module: nn.Module, memory: MemoryBackend, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Parameters and buffers stay on the device anyway.
    stays = {part.untyped_storage()._cdata for part in (*module.parameters(), *module.buffers())}
    is_pinned = memory.device.type == "cuda"

    def pack(tensor: Tensor) -> Any:
        # An expanded tensor occupies less memory than its shape suggests.
        is_moved = tensor.layout is torch.strided and tensor.device == memory.device and 0 not in tensor.stride()
        if not is_moved or tensor.nbytes < _LEAST_OFFLOADED_BYTES or tensor.untyped_storage()._cdata in stays:
            return tensor
        with memory.elsewhere():
            on_host = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
            return on_host.copy_(tensor), tensor.device

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        on_host, device = packed
        # Always a copy: with a simulated device, both are in the same memory.
        return torch.empty_like(on_host, device=device).copy_(on_host, non_blocking=is_pinned)

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


@contextmanager
def _replaced_forward(module: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """Call `around(forward, ...)` in place of a module's forward, as an instance attribute that hides the class's.

    Copies and pickles made meanwhile (a callback that keeps the best model) have the module's own forward.
    """
    before, own = module.forward, {name: vars(module)[name] for name in _HIDDEN if name in vars(module)}

    def state() -> dict[str, Any]:
        kind: Any = type(module)
        kept: dict[str, Any] = kind.__getstate__(module)
        return {name: value for name, value in kept.items() if name not in _HIDDEN} | own

    vars(module).update(forward=functools.wraps(before)(functools.partial(around, before)), __getstate__=state)
    try:
        yield
    finally:
        for name in _HIDDEN:
            vars(module).pop(name, None)
        vars(module).update(own)
