"""Takes nested batches apart into leaves, and puts them together again. Knows nothing of samples.

The nodes are lists, tuples and named tuples that hold tensors, and mappings of any type. All else is a leaf: a list of
file names, a PackedSequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# The keys and positions that lead to a leaf, from the outermost node inwards.
Path = tuple[Any, ...]
_NONE: frozenset[int] = frozenset()


def map_leaves(function: Callable[[Any], Any], node: Any, whole: frozenset[int] = _NONE) -> Any:
    """Return a nesting with `function` applied to its leaves, in their order."""
    keys, children = _inner(node, whole)
    if children is None:
        return function(node)
    made = [function(one) if isinstance(one, Tensor) else map_leaves(function, one, whole) for one in children]
    if isinstance(node, Mapping):
        return _rebuilt(node, dict(zip(keys, made, strict=True)))
    return type(node)(*made) if hasattr(node, "_fields") else type(node)(made)


def leaves_of(node: Any, whole: frozenset[int] = _NONE, path: Path = ()) -> list[tuple[Path, Any]]:
    """Return the leaves of a nesting in their order, each with its path; arguments as for `map_leaves`."""
    keys, children = _inner(node, whole)
    if children is None:
        return [(path, node)]
    parts = zip(keys, children, strict=True)
    return [found for key, child in parts for found in leaves_of(child, whole, (*path, key))]


def form_of(node: Any, whole: frozenset[int] = _NONE) -> Any:
    """Return what is the same for nestings of one kind: types, keys and dimensions, but no sizes."""
    if isinstance(node, Tensor):
        return node.dtype, node.ndim, node.device.type
    keys, children = _inner(node, whole)
    return type(node) if children is None else (type(node), *keys, *[form_of(child, whole) for child in children])


def map_tensors(function: Callable[[Tensor], Any], batch: Any, *, objects: Callable[[Any], Any] | None = None) -> Any:
    """Return the batch with `function` applied to every tensor; everything else is passed on.

    Args:
        function: Applied to every tensor.
        batch: Any nesting.
        objects: Applied to every object of another type that holds tensors, such as a graph; None passes them on.
    """

    def of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return leaf if objects is None or not hides_tensors(leaf) else objects(leaf)

    return map_leaves(of, batch)


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors, and of objects that hold some."""
    return map_tensors(Tensor.clone, batch, objects=copy.deepcopy)


def without_graphs(outputs: Any) -> Any:
    """Return outputs with their tensors detached, and None for other objects that hold some, such as a cache."""
    return map_tensors(Tensor.detach, outputs, objects=lambda _: None)


def as_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor without its graph, at which a gradient can end."""
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in the order of its nesting; those inside of other objects come after them."""
    leaves = [leaf for _, leaf in leaves_of(batch)]
    hidden = (value for leaf in leaves if hides_tensors(leaf) for value in _inside(leaf) if holds_tensor(value))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [
        one for value in hidden for one in tensors_in(value)
    ]


def numbers_in(batch: Any) -> dict[Path, float]:
    """Return the numbers that a batch carries beside its samples, by their paths; synchronises with their device.

    Each is a Python or NumPy number, or a tensor without dimensions, in a tuple or in mappings; those in a list of
    samples are not returned.
    """
    most = 1 if isinstance(batch, list) else None  # deeper ones belong to samples
    return {
        path: float(leaf)
        for path, leaf in leaves_of(batch)
        if path and path[:most] == path and _is_number(leaf) and all(isinstance(key, str) for key in path[1:])
    }


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return leaf.dim() == 0 and not leaf.is_complex() and leaf.dtype is not torch.bool
    return isinstance(leaf, int | float | np.integer | np.floating) and not isinstance(leaf, bool)


def elements_of(sample: Any) -> int:
    """Return the elements of a sample's largest tensor, array or list of numbers; 0 if it holds none."""
    if isinstance(sample, Tensor):
        return sample.numel()
    if isinstance(sample, list) and sample and isinstance(sample[0], int | float):
        return len(sample)
    if isinstance(sample, list | tuple | Mapping):
        items = sample.values() if isinstance(sample, Mapping) else sample
        return max(map(elements_of, items), default=0)
    if isinstance(sample, np.ndarray):
        return sample.size
    is_plain = isinstance(sample, int | float | str | bytes | None)
    return 0 if is_plain else max(map(Tensor.numel, tensors_in(sample)), default=0)


def shapes_of(batch: Any) -> str:
    """Return the paths and shapes of a batch's tensors in words."""
    return ", ".join(f"{path or 'batch'}: {tuple(tensor.shape)}" for path, tensor in _spelled(batch))


def shapes_of_sample(batch: Any, *, has_rows: bool) -> list[str]:
    """Return the shapes of a sample's tensors, each with its path unless the batch is one tensor or a list of some."""
    found = _spelled(batch)
    is_list = isinstance(batch, tuple | list) and all("/" not in path for path, _ in found)
    names = {id(tensor): "" if is_list else path for path, tensor in found}
    return [
        f"{names.get(id(one), '')} {tuple(one.shape[1:] if has_rows and len(one) == 1 else one.shape)}".lstrip()
        for one in tensors_in(batch)
        if one.dim()
    ]


def holds_tensor(node: Any) -> bool:
    """Whether a tensor is among the leaves of a node."""
    if isinstance(node, Tensor):
        return True
    if isinstance(node, Mapping):
        return any(map(holds_tensor, node.values()))
    return isinstance(node, list | tuple) and any(map(holds_tensor, node))


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf that is no tensor has tensors inside: a PackedSequence, a graph, a dataclass."""
    return not isinstance(leaf, Tensor) and any(map(holds_tensor, _inside(leaf)))


def _inside(leaf: Any) -> Iterable[Any]:
    """Return the attributes of an object; those in slots are not seen."""
    return leaf if isinstance(leaf, PackedSequence) else getattr(leaf, "__dict__", {}).values()


def _inner(node: Any, whole: frozenset[int]) -> tuple[Iterable[Any], Iterable[Any] | None]:
    """Return the keys and the children of a node; None in place of the children of a leaf."""
    if isinstance(node, Tensor):
        return (), None
    if isinstance(node, Mapping):
        return ((), None) if id(node) in whole else (node.keys(), node.values())
    if not isinstance(node, list | tuple) or isinstance(node, PackedSequence) or id(node) in whole:
        return (), None
    return (range(len(node)), node) if any(map(holds_tensor, node)) else ((), None)


def _rebuilt(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other items."""
    if type(mapping) is dict:
        return items
    # A shallow copy of a mapping that wraps a dict would share the original's dict.
    is_shallow = isinstance(mapping, dict) or hasattr(mapping, "__copy__")
    try:
        made: Any = (
            copy.copy(mapping) if is_shallow else copy.deepcopy(mapping, {id(one): one for one in mapping.values()})
        )
        for key, value in items.items():
            made[key] = value
    except TypeError:  # a read-only mapping: its type has to accept a dict
        return type(mapping)(items)  # type: ignore[call-arg]
    # Attributes that duplicate an item (batch.labels for batch["labels"]) are updated with it.
    attributes = getattr(made, "__dict__", {})
    attributes.update((name, items[name]) for name in attributes.keys() & items.keys())
    return made


def _spelled(batch: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors among the leaves of a batch that are no single numbers, each with its path as text."""
    return [
        ("/".join(map(str, path)), leaf)
        for path, leaf in leaves_of(batch)
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    ]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the numbers of a tensor: those within a subclass, as of states in 8 bits, or it."""
    if not is_traceable_wrapper_subclass(tensor) or hasattr(tensor, "device_mesh"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]
