"""Keeps what the backward pass needs in the host's memory; gradients stay bit-identical."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autoaccum._engine.replaced_forward import forward_replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from autoaccum._memory.base import MemoryBackend

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
