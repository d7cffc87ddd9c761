"""What saves memory in the steps of a model: by name from the start, or added wherever not even one sample fits.

`chunked_head.py`, `checkpointing.py` and `offloaded` change the modules of a step in place, and undo that.
"""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from autoaccum._arguments import is_one_of, listed, shown
from autoaccum._oom import clear_traceback_frames
from autoaccum._saving.checkpointing import blocks_of, checkpointed, is_checkpointed_already
from autoaccum._saving.chunked_head import chunked, find_heads
from autoaccum._saving.replaced_forward import are_compiled, forward_replaced, is_compiled, is_replaced
from autoaccum.errors import DoesNotFitError, InvalidInputError, SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices


_T = TypeVar("_T")
CHUNKED, CHECKPOINT, OFFLOAD = "chunked_loss", "checkpoint", "offload"
# From the cheapest on.
SAVINGS = (CHUNKED, CHECKPOINT, OFFLOAD)
# Takes these one after the other where not even one sample fits.
AUTO = "auto"
# What another level may avoid: not one sample fits, or the model or its loss does not bear what is in force.
AVOIDABLE = (DoesNotFitError, SavingRefusedError, CheckpointError)
# What is in force together, by names of `save_memory`.
SavingLevel = tuple[str, ...]


class Savings:
    """Saves memory in steps. Ranks escalate each by itself.

    Attributes:
        is_auto: Whether to escalate.
        names: What saves memory in the next step, in order.
    """

    def __init__(
        self, modules: Sequence[nn.Module], names: Sequence[str], memory: MemoryBackend, notices: Notices
    ) -> None:
        self._modules = modules
        self._memory = memory
        self._notices = notices
        self.is_auto = AUTO in names
        self.names: SavingLevel = () if self.is_auto else tuple(names)
        for name in self.names:
            check_place(name, modules)
        self._left: list[str] = []
        self._ways: SavingLevel = ()  # in words
        self._reason = ""  # why something else is in force from the next step on
        if self.is_auto:
            self.begin()

    def begin(self, known: SavingLevel | None = None) -> None:
        """Begin with what an earlier run has needed, if it can be had here; only with "auto"."""
        self._left = [name for name in SAVINGS if not _left_out(name, self._modules, self._memory)]
        self.names = known if known and list(known) == [name for name in self._left if name in known] else ()
        if self.names:
            del self._left[: self._left.index(self.names[-1]) + 1]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Save memory in this block; the modules are then as before."""
        with ExitStack() as changed:
            adapted = [in_force(name, self._modules, self._memory) for name in self.names]
            self._ways = tuple(map(changed.enter_context, adapted))
            if self._reason:
                said = "; ".join(self._ways) or "nothing saves memory"
                self._notices.say(f"{self._reason}; from now on {said} (save_memory='auto')")
                self._reason = ""
            elif not self.is_auto:
                for name, way in zip(self.names, self._ways, strict=True):
                    self._notices.say(f"{way} (save_memory={name!r})", key=f"save_memory={name!r}")
            yield

    def run(
        self,
        work: Callable[[], _T],
        *,
        on_escalate: Callable[[], object] = lambda: None,
        is_past_return: Callable[[], bool] = lambda: False,
    ) -> _T:
        """Do work with what saves memory, and again with more where that may avoid its error.

        Args:
            work: A step.
            on_escalate: Called before it is done again, with modules as they were.
            is_past_return: Whether work that has failed must not be done again.
        """
        while True:
            try:
                with self.in_force() if self.names or self._reason else nullcontext():
                    return work()
            except AVOIDABLE as error:
                if is_past_return() or not self._climbs(error):
                    raise
                clear_traceback_frames(error)
            # After the handler: inside it the traceback still pins the activations.
            self._memory.release()
            on_escalate()

    def _climbs(self, error: Exception) -> bool:
        """Save memory in another way from the next step on; return whether one may avoid an error of `AVOIDABLE`.

        What the model or its loss refuses is left out from then on.
        """
        before = self.names
        if self.is_auto:
            self._escalate(error)
        if self.names == before:
            if self._ways:
                error.add_note(f"autoaccum: in force already: {'; '.join(self._ways)}")
            return False
        text = str(error).partition("\n")[0]
        self._reason = text if isinstance(error, SavingRefusedError) else f"this fails: {type(error).__name__}: {text}"
        if isinstance(error, DoesNotFitError):
            self._reason = "not even one sample fits"
        return True

    def _escalate(self, error: Exception) -> None:
        if not isinstance(error, DoesNotFitError):
            says = f"save_memory={CHECKPOINT!r}" if isinstance(error, CheckpointError) else str(error)
            kept = tuple(name for name in self.names if not says.startswith(f"save_memory={name!r}"))
            if kept == self.names:
                return
            self.names = kept
            if self.names:
                return
        elif not error.saving_helps:
            return
        for name in SAVINGS:
            if reason := _left_out(name, self._modules, self._memory):
                self._notices.say(f"save_memory='auto' leaves out {name!r}: {reason}", key=f"left out {name}")
        if self._left:
            self.names = (*self.names, self._left.pop(0))


# --- the argument `save_memory` ---------------------------------------------------------------------------------------


def check_savings(save_memory: Sequence[str] | str | None, backend: MemoryBackend | None = None) -> tuple[str, ...]:
    """Return the names from `fit`'s argument `save_memory`, in order; without a device, whatever can be had on one."""
    names = () if save_memory is None else (save_memory,) if isinstance(save_memory, str) else save_memory
    if not isinstance(names, list | tuple):
        raise InvalidInputError(
            f"save_memory={shown(save_memory)} is neither a name nor a list of names, such as ['checkpoint']"
        )
    if AUTO in names and len(names) > 1:
        raise InvalidInputError(f"save_memory={shown(save_memory)}: 'auto' takes all of them in turn; pass it alone")
    for name in names:
        if not _is_known(name):
            raise InvalidInputError(
                f"save_memory={shown(name)} is unknown; choose from {', '.join(map(repr, (AUTO, *SAVINGS)))} or "
                "'checkpoint:NAME' with the name or the class of the blocks"
            )
    if OFFLOAD in names and backend is not None and backend.is_host:
        raise InvalidInputError(
            f"save_memory='offload' moves activations to host memory, and on {backend.name} they already are there; "
            "choose 'checkpoint'"
        )
    kinds = [name.partition(":")[0] for name in names]
    if twice := [name for name, kind in zip(names, kinds, strict=True) if kinds.count(kind) > 1]:
        raise InvalidInputError(
            f"save_memory={shown(save_memory)}: {' and '.join(map(repr, twice))} say the same twice, or two things; "
            "keep one"
        )
    return tuple(names)


def _is_known(name: object) -> bool:
    if not isinstance(name, str):
        return False
    kind, colon, rest = name.partition(":")
    return (kind == CHECKPOINT and bool(rest)) if colon else is_one_of(name, (AUTO, *SAVINGS))


def check_place(name: str, modules: Sequence[nn.Module]) -> None:
    """Refuse what has no place in modules, by a name of `save_memory`."""
    if reason := _why_not(name, modules):
        raise InvalidInputError(f"save_memory={name!r}: {reason}; or leave it out")


def in_force(name: str, modules: Sequence[nn.Module], memory: MemoryBackend) -> AbstractContextManager[str]:
    """Return a context in which modules save memory, by a name of `save_memory`; it gives what is done in words."""
    kind, _, rest = name.partition(":")
    if kind == CHUNKED:
        return chunked(modules)
    return offloaded(modules, memory) if kind == OFFLOAD else checkpointed(modules, rest or None)


def ways_left(modules: Sequence[nn.Module], memory: MemoryBackend) -> list[str]:
    """Return what saves memory, by names of `save_memory`, that is not in force yet and would change anything."""
    changed = {CHUNKED: find_heads(modules), CHECKPOINT: blocks_of(modules), OFFLOAD: modules}
    in_force = [name for name, parts in changed.items() if any(map(is_replaced, parts))]
    return [name for name in SAVINGS if name not in in_force and not _left_out(name, modules, memory)]


def _left_out(name: str, modules: Sequence[nn.Module], memory: MemoryBackend) -> str:
    """Return why something would change nothing here, or has no place; empty if it saves memory."""
    if name == OFFLOAD:
        return f"on {memory.name} everything is there already" if memory.is_host else ""
    if name == CHECKPOINT and is_checkpointed_already(modules):
        return "the model checkpoints its blocks already"
    return _why_not(name, modules)


def _why_not(name: str, modules: Sequence[nn.Module]) -> str:
    """Return what was looked for and found where something has no place in modules, with what to do; else nothing."""
    kind, _, rest = name.partition(":")
    if kind == CHUNKED and are_compiled(modules):
        return "the model is compiled; use autoaccum.ChunkedLoss(head) in it"
    if kind == CHUNKED and not find_heads(modules):
        return (
            "no layer that makes logits was found (what get_output_embeddings of a Transformers model returns, an "
            "nn.Linear); use autoaccum.ChunkedLoss(head), which takes hidden states"
        )
    if kind != CHECKPOINT:
        return ""
    blocks = set(blocks_of(modules, rest or None))
    if not blocks:
        found = sorted({type(part).__name__ for module in modules for part in module.modules()})
        looked = f"no module has the name or the class {rest!r}" if rest else "the model has no repeated blocks"
        return f"{looked} to compute again, among {listed(found, 8)}; name them, as in save_memory='checkpoint:Block'"
    for part in (part for module in modules for part in module.modules()):
        if is_compiled(part) and blocks.intersection(part.modules()):
            return "the blocks are compiled, and torch.compile fails on what is computed again; compile without them"
    return ""


# --- the host's memory ------------------------------------------------------------------------------------------------


# Smaller tensors are not worth the transfer to the host and back.
_LEAST_OFFLOADED_BYTES = 4096


@contextmanager
def offloaded(modules: Sequence[nn.Module], memory: MemoryBackend) -> Iterator[str]:
    """Keep tensors saved for backward in host memory until the backward pass needs them; yields that in words."""
    with ExitStack() as changed:
        for module in modules:
            changed.enter_context(forward_replaced(module, functools.partial(_offloaded, module, memory)))
        yield "what backward needs is kept in the host's memory"


def _offloaded(module: nn.Module, memory: MemoryBackend, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Parameters and buffers stay on the device anyway.
    stays = {part.untyped_storage()._cdata for part in (*module.parameters(), *module.buffers())}
    is_pinned = memory.device.type == "cuda"

    def pack(tensor: Tensor) -> Any:
        # An expanded tensor occupies less memory than its shape suggests.
        is_moved = tensor.layout is torch.strided and tensor.device == memory.device and 0 not in tensor.stride()
        if not is_moved or tensor.nbytes < _LEAST_OFFLOADED_BYTES or tensor.untyped_storage()._cdata in stays:
            # An output that is kept as it is would keep its graph, and that the output: a forward pass that fails
            # before its backward pass would leave both in memory.
            return tensor.detach()
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
