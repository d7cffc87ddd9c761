"""Runs a backward pass without autograd's engine, for fake tensors of an absent device.

The engine needs a CUDA driver's streams as soon as a graph holds CUDA tensors, even fake ones (pytorch issue
92627); the graph's nodes do not, and can be called from Python. This calls them in the engine's order, adds gradients
that meet (in place if nothing else refers to them), frees each node after it has run, and accumulates into `.grad`. A
node and its saved tensors are freed when nothing else refers to it, so a loss that is still in use must have been
`loosened`. Only for estimates: hooks on nodes do not run, and nothing is differentiated twice.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge

from autoaccum._estimate.own_thread import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# References to a tensor that only a buffer holds: the buffer, the local variable, the argument to `getrefcount`.
_REFERENCES = 3
_arrivals = itertools.count()
# Ids of backward passes; the engine numbers its own from 0.
_passes = itertools.count(2**32)
# For each node, the gradients received by each of its inputs.
_Buffers = dict[Any, list[Tensor | None]]


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()


def _own_themselves() -> bool:
    """Whether the node of a `torch.autograd.Function` outlives its output and the nodes before it."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        node: Any = _Same.apply(torch.zeros(1, device="cpu", requires_grad=True)).grad_fn
    try:
        return bool(node.next_functions)
    except RuntimeError:
        return False


_OWN_THEMSELVES = _own_themselves()


def loosened(value: Tensor) -> Tensor:
    """Return a tensor without the graph of `value`, from which `backward` continues into that graph.

    It does not keep the graph alive, so nodes are freed as the pass proceeds. The engine clears its nodes itself, which
    Python cannot do.
    """
    if value.grad_fn is None:
        return value
    loose = value.detach().requires_grad_()
    loose._goes_on = ((value.grad_fn, value.output_nr),)  # type: ignore[attr-defined]
    return loose


@contextmanager
def functions_heard() -> Iterator[None]:
    """Record what a `torch.autograd.Function` declares of its gradients in its forward pass.

    Its node does not give it back: PyTorch's attributes for it can only be written, or are emptied after the pass.
    """

    def materializes(context: Any, value: bool) -> None:
        context._takes_none = not value
        originals["set_materialize_grads"](context, value)

    def types(context: Any, *dtypes: torch.dtype | None) -> None:
        context._gradient_types = dtypes
        originals["set_output_grad_dtype"](context, *dtypes)

    # The second is of newer versions.
    heard: dict[str, Any] = {"set_materialize_grads": materializes, "set_output_grad_dtype": types}
    originals: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, function in heard.items():
            if hasattr(FunctionCtx, name):
                originals[name] = stack.enter_context(replaced(FunctionCtx, name, function))
        yield


def backward(root: Tensor) -> None:
    """Differentiate a scalar, accumulating into the parameters' gradients."""
    backward_from([root], [torch.ones_like(root, memory_format=torch.preserve_format)])


def backward_from(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Differentiate tensors with given gradients, as `torch.autograd.backward` does."""
    buffers: _Buffers = {}
    node: Any = None
    root: Tensor | None
    gradient: Tensor | None
    with torch.no_grad():
        for root, gradient in zip(roots, gradients, strict=True):
            node, slot = get_gradient_edge(root)[:2]
            _collect(buffers, node, slot, gradient)
    # The node that receives a gradient must hold the only reference to it.
    del gradients
    root = gradient = None
    waiting = _dependencies(list(buffers))
    ready = sorted(_entry(node) for node in buffers if node not in waiting)
    owners: dict[Any, Any] = {}
    node = follower = None
    with torch.no_grad(), _known_as_one_pass() as at_work:
        while ready:
            node = heapq.heappop(ready)[-1]
            at_work.append(node)
            edges, outputs = _edges(node), _called(node, buffers.pop(node))
            at_work.clear()
            owner: Any = node, owners.pop(node, None)
            owners |= {follower: owner for follower, _ in edges if _needs_owner(follower)}
            node = owner = follower = None
            # In the engine only the receiver of a gradient holds it.
            for (follower, slot), output in zip(edges, _emptied(outputs), strict=False):
                if follower is None:
                    continue
                if output is not None:
                    _collect(buffers, follower, slot, output)
                del output
                _count_down(follower, waiting, buffers, ready)
            follower = None


def _needs_owner(node: Any) -> bool:
    """Whether a node ends with the node before it: a `torch.autograd.Function`, in PyTorch 2.11 and before.

    What the node before has saved then stays until the function has run, longer than in the engine; in a chain of
    functions until the last of them has.
    """
    return not _OWN_THEMSELVES and hasattr(node, "needs_input_grad")


@contextmanager
def _known_as_one_pass() -> Iterator[list[Any]]:
    """Report one backward pass as running, at the node in the list that is yielded.

    A checkpoint recomputes its block once per pass. Outside the engine there is no pass, and it would recompute and
    keep the block for every tensor needed. The ledger asks for the node (`_estimate/owners.py`).
    """
    number = next(_passes)
    at_work: list[Any] = []
    with (
        replaced(torch._C, "_current_graph_task_id", lambda: number),
        replaced(torch._C, "_current_autograd_node", lambda: at_work[-1] if at_work else None),
    ):
        yield at_work


def _emptied(outputs: list[Tensor | None]) -> Any:
    """Yield the items of a list, removing each."""
    outputs.reverse()
    while outputs:
        yield outputs.pop()


def _count_down(node: Any, waiting: dict[Any, int], buffers: _Buffers, ready: list[tuple[int, int, Any]]) -> None:
    """Record that a predecessor of a node has run; after the last, queue the node, or skip it without a gradient."""
    waiting[node] -= 1
    if waiting[node]:
        return
    del waiting[node]
    if node in buffers:
        heapq.heappush(ready, _entry(node))
        return
    for follower, _ in _edges(node):
        if follower is not None:
            _count_down(follower, waiting, buffers, ready)


def _dependencies(roots: Sequence[Any]) -> dict[Any, int]:
    """Count, for each node, the nodes that send it a gradient."""
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
    # The latest forward operator first, with accumulation as soon as a gradient exists; then in order of arrival.
    return (-node._sequence_nr(), next(_arrivals), node)


def _edges(node: Any) -> Any:
    """Return the nodes, and their inputs, that receive a node's gradients; for a loosened tensor, its graph."""
    return getattr(node.variable, "_goes_on", ()) if hasattr(node, "variable") else node.next_functions


def _called(node: Any, gradients: list[Tensor | None]) -> list[Tensor | None]:
    if hasattr(node, "variable"):
        if hasattr(node.variable, "_goes_on"):
            del node.variable._goes_on
            return gradients
        _accumulate(node.variable, gradients[0])
        return []
    if hasattr(node, "needs_input_grad"):  # a torch.autograd.Function
        whole = gradients if getattr(node, "_takes_none", False) else _with_zeros(node._input_metadata, gradients)
        del gradients
        # A list, where the function lets go of gradients on the way.
        boxed = getattr(node._forward_cls, "boxed_grads_call", False)
        made = node.apply_boxed(whole) if boxed else node.apply(*whole)
        made = made if isinstance(made, tuple) else (made,)
        # It returns a result for every argument, but only tensors have an edge.
        wanted = iter([value for value, needed in zip(made, node.needs_input_grad, strict=False) if needed])
        return [None if follower is None else next(wanted, None) for follower, _ in node.next_functions]
    given = tuple(gradients)
    gradients.clear()
    made = node(*given)
    return list(made) if isinstance(made, tuple) else [made]


def _with_zeros(metadata: Any, gradients: list[Tensor | None]) -> list[Tensor]:
    return [
        torch.zeros(about.shape, dtype=about.dtype, device=about.device) if gradient is None else gradient
        for about, gradient in zip(metadata, gradients, strict=True)
    ]


def _collect(buffers: _Buffers, node: Any, slot: int, gradient: Tensor) -> None:
    metadata = node._input_metadata
    about = metadata[slot]
    # Undo the forward pass's broadcasts and casts.
    if gradient.shape != torch.Size(about.shape):
        gradient = gradient.sum_to_size(about.shape)
    declared = getattr(node, "_gradient_types", None)
    dtype = about.dtype if declared is None else declared[slot]
    if hasattr(node, "variable"):
        dtype = node.variable.dtype
    if dtype is not None and gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    buffer = buffers.setdefault(node, [None] * len(metadata))
    present = buffer[slot]
    if present is None:
        buffer[slot] = gradient
    elif sys.getrefcount(present) <= _REFERENCES and _is_held_by_one(present):
        present.add_(gradient)
    else:
        buffer[slot] = present + gradient


def _is_held_by_one(tensor: Tensor) -> bool:
    # One for the tensor, one for the Python object.
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
