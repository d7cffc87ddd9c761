"""A backward pass without autograd's engine, for fake tensors of a device that is not there.

The engine asks a CUDA driver for its streams as soon as a graph holds CUDA tensors, fake ones too (pytorch issue
92627); the graph's nodes do not, and can be called from Python. This calls them in the engine's order, adds gradients
that meet (in place where nobody else holds them), lets go of each node once it has run, and adds to `.grad`. A node
dies, with what was saved for it, when nobody else holds it: a loss that is still in use must have been `loosened`. Only
for estimates: hooks on nodes are not run, and nothing is differentiated twice.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# To a tensor that only a buffer holds: the buffer's, the name under which it is looked at, and the question itself.
_REFERENCES = 3
_arrivals = itertools.count()
# Numbers of backward passes, which the engine counts from 0 on.
_passes = itertools.count(2**32)
# By node, the gradients that have come in; None where none has.
_Buffers = dict[Any, list[Tensor | None]]


def loosened(value: Tensor) -> Tensor:
    """Return a tensor in place of another, from which `backward` goes on into the other's graph.

    Whoever holds the one that goes out does not hold the graph, which is let go of as the pass goes on. The engine
    empties its nodes itself, which cannot be asked of them from Python.
    """
    if value.grad_fn is None:
        return value
    loose = value.detach().requires_grad_()
    loose._goes_on = ((value.grad_fn, value.output_nr),)  # type: ignore[attr-defined]
    return loose


def backward(root: Tensor) -> None:
    """Go back from a scalar to the parameters, adding to their gradients."""
    backward_from([root], [torch.ones_like(root, memory_format=torch.preserve_format)])


def backward_from(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Go back from several tensors, of which the gradients are known, as `torch.autograd.backward` does."""
    buffers: _Buffers = {}
    node: Any = None
    root: Tensor | None
    gradient: Tensor | None
    with torch.no_grad():
        for root, gradient in zip(roots, gradients, strict=True):
            node, slot = get_gradient_edge(root)[:2]
            _collect(buffers, node, slot, gradient)
    # Whoever is given a gradient is to be the only one who holds it.
    del gradients
    root = gradient = None
    waiting = _dependencies(list(buffers))
    ready = sorted(_entry(node) for node in buffers if node not in waiting)
    node = follower = None
    with torch.no_grad(), _known_as_one_pass():
        while ready:
            node = heapq.heappop(ready)[-1]
            edges, outputs = _edges(node), _called(node, buffers.pop(node))
            node = None
            # In the engine a gradient is held by whoever it goes to, and by no one else.
            for (follower, slot), output in zip(edges, _emptied(outputs), strict=False):
                if follower is None:
                    continue
                if output is not None:
                    _collect(buffers, follower, slot, output)
                del output
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    del waiting[follower]
                    if follower in buffers:
                        heapq.heappush(ready, _entry(follower))
                    else:
                        _skip(follower, waiting, buffers, ready)
            follower = None


@contextmanager
def _known_as_one_pass() -> Iterator[None]:
    """Answer who asks which backward pass is running.

    A checkpoint computes its block again once a pass. Outside of the engine there is none to ask about, and it would
    do so, and keep all of it, for every tensor that is needed.
    """
    asked, number = torch._C._current_graph_task_id, next(_passes)
    torch._C._current_graph_task_id = lambda: number
    try:
        yield
    finally:
        torch._C._current_graph_task_id = asked


def _emptied(outputs: list[Tensor | None]) -> Any:
    """Yield what a list holds without holding it any longer."""
    outputs.reverse()
    while outputs:
        yield outputs.pop()


def _skip(node: Any, waiting: dict[Any, int], buffers: _Buffers, ready: list[tuple[int, int, Any]]) -> None:
    """Pass over a node that no gradient has reached."""
    for follower, _ in _edges(node):
        if follower is None:
            continue
        waiting[follower] -= 1
        if waiting[follower] == 0:
            del waiting[follower]
            if follower in buffers:
                heapq.heappush(ready, _entry(follower))
            else:
                _skip(follower, waiting, buffers, ready)


def _dependencies(roots: Sequence[Any]) -> dict[Any, int]:
    """Count for each node how many others send it a gradient."""
    waiting: dict[Any, int] = {}
    stack, seen = list(roots), set(roots)
    while stack:
        for follower, _ in _edges(stack.pop()):
            if follower is None:
                continue
            if follower not in seen:
                seen.add(follower)
                stack.append(follower)
            waiting[follower] = waiting.get(follower, 0) + 1
    return waiting


def _entry(node: Any) -> tuple[int, int, Any]:
    # What was made last goes first, and gradients are added to as soon as they are there; then who came first.
    return (-node._sequence_nr(), next(_arrivals), node)


def _edges(node: Any) -> Any:
    """Return where a node's gradients go to: nodes, and which of their inputs; for a loosened tensor, its graph."""
    return getattr(node.variable, "_goes_on", ()) if hasattr(node, "variable") else node.next_functions


def _called(node: Any, gradients: list[Tensor | None]) -> list[Tensor | None]:
    if hasattr(node, "variable"):
        if hasattr(node.variable, "_goes_on"):
            del node.variable._goes_on
            return gradients
        _accumulate(node.variable, gradients[0])
        return []
    if hasattr(node, "needs_input_grad"):  # a torch.autograd.Function
        metadata = node._input_metadata
        whole = [
            torch.zeros(about.shape, dtype=about.dtype, device=about.device) if gradient is None else gradient
            for about, gradient in zip(metadata, gradients, strict=True)
        ]
        del gradients
        made = node.apply(*whole)
        made = made if isinstance(made, tuple) else (made,)
        # A result for every argument, but an edge only for tensors.
        wanted = iter([value for value, needed in zip(made, node.needs_input_grad, strict=False) if needed])
        return [None if follower is None else next(wanted, None) for follower, _ in node.next_functions]
    given = tuple(gradients)
    gradients.clear()
    made = node(*given)
    return list(made) if isinstance(made, tuple) else [made]


def _collect(buffers: _Buffers, node: Any, slot: int, gradient: Tensor) -> None:
    metadata = node._input_metadata
    about = metadata[slot]
    # What broadcasting and casts did in the forward pass, back.
    if gradient.shape != torch.Size(about.shape):
        gradient = gradient.sum_to_size(about.shape)
    if gradient.dtype != about.dtype:
        gradient = gradient.to(about.dtype)
    buffer = buffers.setdefault(node, [None] * len(metadata))
    present = buffer[slot]
    if present is None:
        buffer[slot] = gradient
    elif sys.getrefcount(present) <= _REFERENCES and _is_held_by_one(present):
        present.add_(gradient)
    else:
        buffer[slot] = present + gradient


def _is_held_by_one(tensor: Tensor) -> bool:
    # One for the tensor, one for the Python object that asks.
    owners = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return owners <= 2 and tensor.is_contiguous()  # noqa: PLR2004 - as said


def _accumulate(variable: Tensor, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    if variable.grad is None:
        variable.grad = gradient.detach()
    else:
        variable.grad.add_(gradient)
    for hook in (getattr(variable, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(variable)
