"""Takes nested batches apart into leaves, and puts them together again. Knows nothing of samples.

The nodes are tuples, lists, named tuples and mappings of any type; everything else is a leaf.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optree
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_NAMESPACE = "autoaccum"
# The mappings that optree flattens itself; others (a Transformers BatchEncoding, a ModelOutput) are flattened here and
# rebuilt as their own type.
_OPTREE_MAPPINGS = (dict, OrderedDict, defaultdict)


def copied(batch: Any) -> Any:
    """Return the batch with copies of its tensors, and of objects that hold some."""
    return map_tensors(Tensor.clone, batch, objects=copy.deepcopy)


def without_graphs(outputs: Any) -> Any:
    """Return outputs with their tensors detached, and None for other objects that hold some, such as a cache."""
    return map_tensors(Tensor.detach, outputs, objects=lambda _: None)


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

    leaves, spec = flatten(batch)
    return unflatten(spec, list(map(of, leaves)))


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in the order of its nesting; those inside of other objects come after them."""
    leaves = flatten(batch)[0]
    hidden = (value for leaf in leaves if hides_tensors(leaf) for value in _inside(leaf) if holds_tensor(value))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [
        one for value in hidden for one in tensors_in(value)
    ]


def shapes_of(batch: Any) -> str:
    """Return the paths and shapes of a batch's tensors in words."""
    return ", ".join(f"{path or 'batch'}: {tuple(tensor.shape)}" for path, tensor in _with_paths(batch))


def shapes_of_sample(batch: Any, *, has_rows: bool) -> list[str]:
    """Return the shapes of a sample's tensors, each with its path unless the batch is one tensor or a list of some.

    Args:
        batch: A batch of one sample.
        has_rows: Whether samples run along the first dimension, which is left out.
    """
    found = _with_paths(batch)
    is_list = isinstance(batch, tuple | list) and all("/" not in path for path, _ in found)
    named = [(path if path and not is_list else "", tensor) for path, tensor in found]
    leaves = {id(leaf) for leaf in flatten(batch)[0]}
    hidden = [("", tensor) for tensor in tensors_in(batch) if id(tensor) not in leaves]
    return [
        f"{name} {tuple(tensor.shape[1:] if has_rows and tensor.shape[0] == 1 else tensor.shape)}".lstrip()
        for name, tensor in (*named, *hidden)
        if tensor.dim()
    ]


def _with_paths(batch: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors among the leaves of a batch that are no single numbers, each with its path."""
    leaves = zip(paths_of(batch), flatten(batch)[0], strict=True)
    return [("/".join(map(str, path)), leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]


class _ForeignType:
    """A prototype for rebuilding a mapping as its own type; equal if type and keys are."""

    __slots__ = ("keys", "prototype")

    def __init__(self, prototype: Mapping[Any, Any]) -> None:
        self.prototype = prototype
        self.keys = tuple(prototype)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _ForeignType)
            and type(self.prototype) is type(other.prototype)
            and self.keys == other.keys
        )

    def __hash__(self) -> int:
        return hash((type(self.prototype), self.keys))


class _Foreign:
    """A mapping of a type unknown to optree, as a node of the tree."""

    __slots__ = ("kind", "values")

    def __init__(self, kind: _ForeignType, values: Sequence[Any]) -> None:
        self.kind = kind
        self.values = values


def _rebuild_foreign(kind: _ForeignType, values: Iterable[Any]) -> Any:
    items = dict(zip(kind.keys, values, strict=True))
    try:
        made = _copied(kind.prototype)
        for key, value in items.items():
            made[key] = value  # type: ignore[index]
    except TypeError:  # a read-only mapping: its type has to accept a dict
        return type(kind.prototype)(items)  # type: ignore[call-arg]
    # Attributes that duplicate an item (batch.labels for batch["labels"]) are updated with it.
    attributes = getattr(made, "__dict__", {})
    attributes.update((name, items[name]) for name in attributes.keys() & items.keys())
    return made


def _copied(mapping: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a copy with the same values that can be modified without affecting the original."""
    if isinstance(mapping, dict) or hasattr(mapping, "__copy__"):
        return copy.copy(mapping)
    # A shallow copy of a mapping that wraps a dict would share the original's dict.
    return copy.deepcopy(mapping, {id(value): value for value in mapping.values()})


optree.register_pytree_node(
    _Foreign,  # type: ignore[arg-type]
    lambda node: (node.values, node.kind, node.kind.keys),  # type: ignore[attr-defined]
    _rebuild_foreign,  # type: ignore[arg-type]
    namespace=_NAMESPACE,
)


def _is_foreign(node: Any) -> bool:
    return isinstance(node, Mapping) and type(node) not in _OPTREE_MAPPINGS


def _with_foreign_mappings(batch: Any, whole: frozenset[int]) -> Any:
    """Return the batch with mappings unknown to optree wrapped in nodes that it knows; see `flatten` for `whole`."""
    if id(batch) in whole:
        return batch
    if _is_foreign(batch):
        return _Foreign(_ForeignType(batch), [_with_foreign_mappings(value, whole) for value in batch.values()])
    if isinstance(batch, Tensor) or not isinstance(batch, Mapping | tuple | list):
        return batch
    if all(isinstance(item, Tensor) for item in (batch.values() if isinstance(batch, Mapping) else batch)):
        return batch
    return optree.tree_map(
        lambda leaf: _with_foreign_mappings(leaf, whole) if _is_foreign(leaf) else leaf,
        batch,  # type: ignore[arg-type]
        is_leaf=_leaves_by(whole),
        none_is_leaf=True,
        namespace=_NAMESPACE,
    )


def flatten(batch: Any, whole: frozenset[int] = frozenset()) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves of a batch, and its nesting.

    Args:
        batch: Any nesting.
        whole: The ids of further nodes to take for leaves.
    """
    return optree.tree_flatten(
        _with_foreign_mappings(batch, whole), is_leaf=_leaves_by(whole), none_is_leaf=True, namespace=_NAMESPACE
    )


def paths_of(batch: Any) -> list[tuple[Any, ...]]:
    """Return the path of every leaf of a batch: its keys and positions from the outermost node inwards."""
    return flatten(batch)[1].paths()


def unflatten(spec: optree.PyTreeSpec, leaves: list[Any]) -> Any:
    """Put leaves together again."""
    return optree.tree_unflatten(spec, leaves)


def _leaves_by(whole: frozenset[int]) -> Callable[[Any], bool]:
    return (lambda node: id(node) in whole or _is_whole(node)) if whole else _is_whole


def _is_whole(node: Any) -> bool:
    """Whether a node is a leaf (a list of file names, a PackedSequence) and not a level of the nesting."""
    if isinstance(node, PackedSequence):
        return True
    return type(node) in (list, tuple) and not any(holds_tensor(item) for item in node)


def holds_tensor(node: Any) -> bool:
    """Whether a tensor is among the leaves of a node."""
    if isinstance(node, Tensor):
        return True
    if isinstance(node, Mapping):
        return any(holds_tensor(value) for value in node.values())
    return isinstance(node, list | tuple) and any(holds_tensor(item) for item in node)


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf that is no tensor has tensors inside: a PackedSequence, a graph, a dataclass."""
    return not isinstance(leaf, Tensor) and any(map(holds_tensor, _inside(leaf)))


def _inside(leaf: Any) -> Iterable[Any]:
    """Return the attributes of an object; those in slots are not seen."""
    return leaf if isinstance(leaf, PackedSequence) else getattr(leaf, "__dict__", {}).values()


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the numbers of a tensor: those within a subclass, as of states in 8 bits, or it."""
    if not is_traceable_wrapper_subclass(tensor) or hasattr(tensor, "device_mesh"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]
