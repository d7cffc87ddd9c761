"""Reads from the autograd graph of a loss what each of its terms is divided by.

A loss that people write is a sum of terms, each a number times a sum over elements: `loss = sum_k s_k / w_k`. A mean
over tokens has `w = tokens`, a weighted mean the sum of its weights, a sum a constant. The graph from the loss to the
first real reduction of each term holds all of these numbers, so that nothing has to be guessed. The nodes that autograd
saves numbers in are described in "Autograd mechanics" of PyTorch's documentation; an unknown one makes its term unread.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable

# What changes the form of a number, and not its value.
_UNCHANGED = (
    *("ToCopy", "Squeeze", "Unsqueeze", "View", "Clone", "Alias", "ReshapeAlias", "UnsafeView", "Permute"),
    *("Transpose", "T", "NanToNum", "Where", "Expand", "AsStrided", "Contiguous"),
)
# What is linear for some samples and not for others, as of flooding, (loss - b).abs() + b.
_NONLINEAR = (
    *("Abs", "Clamp", "ClampMin", "ClampMax", "Relu", "LeakyRelu", "Maximum", "Minimum", "Max", "Min"),
    *("Sqrt", "Rsqrt", "Pow", "Exp", "Log", "Log1P", "Reciprocal", "Sigmoid", "Tanh", "Softplus"),
)
_MEAN, _SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_OF_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0")
_FULL = (torch.float32, torch.float64)
_INFINITE = (math.inf, -math.inf)
# Modules whose hooks on saved tensors give the same tensor back, only from elsewhere.
_ONLY_MOVE = ("autoaccum.", "torch.autograd.graph")


class _UnreadError(Exception):
    """A node is unknown, or is no number times its input."""


@dataclass(slots=True)
class Summand:
    """A term of a loss.

    Attributes:
        node: The node of the graph that only this term's gradient flows through.
        weight: What its sum over elements is divided by, on the device where that is no number on the host. None if it
            could not be read.
        divisor: The last divisor that the graph holds, None if there is none: where it is 0, the gradient is NaN.
        is_counted: Whether its weight comes from a count or a divisor.
        is_mean: Whether a mean over elements is part of it.
        divided_by: The last divisor as the graph holds it.
        end: The node whose result is summed, as far as its elements have one factor.
        product: The node that multiplies it by a number with a gradient of its own, if any.
        is_nonlinear: Whether it could not be read because a number is no multiple of what it is computed from.
    """

    node: Any
    weight: Any
    divisor: float | Tensor | None = None
    is_counted: bool = False
    is_mean: bool = False
    divided_by: Any = None
    end: Any = None
    product: Any = None
    is_nonlinear: bool = False

    def at(self, node: Any, weight: Any) -> Summand:
        """Return the same for another node and weight."""
        return Summand(node, weight, self.divisor, self.is_counted, self.is_mean, divided_by=self.divided_by)

    def ends(self, node: Any) -> list[Summand]:
        """Return this term alone, which is a sum over what a node gives."""
        self.end = node
        return [self]


def read(loss: Tensor) -> list[Summand]:
    """Return the terms of a loss."""
    node = loss.grad_fn
    if node is None:  # a parameter
        return [Summand(None, None)]
    found = _read(node, Summand(node, 1.0))
    return found if len(found) == 1 else _merged(found)


def weight_at_once(loss: Tensor) -> float | None:
    """Return what cross entropy on the host is divided by, by a look at the only node that says it; None otherwise."""
    node: Any = loss.grad_fn
    if not is_mean_over_classes(node):
        return None
    total = node._saved_total_weight
    is_plain = total.is_cpu and total.dtype in _FULL
    return total.tolist() if is_plain else None


def is_mean_over_classes(node: Any) -> bool:
    """Whether a node is the mean of torch's negative log-likelihood."""
    return node is not None and node.name() in _OF_CLASSES and node._saved_reduction == _MEAN


def has_only_weights_of_0(node: Any) -> bool:
    """Whether a node is that mean, of targets that count but for their classes' weights of 0."""
    try:
        if not is_mean_over_classes(node) or node._raw_saved_weight is None or _saved(node, "_saved_weight") is None:
            return False
        return bool((_saved(node, "_saved_target") != node._saved_ignore_index).any())
    except _UnreadError:
        return False


def _merged(terms: list[Summand]) -> list[Summand]:
    """Return terms of which no two have the same node, since their gradients could not be told apart."""
    nodes = {id(term.node) for term in terms}
    by_node: dict[int, Summand] = {}
    for term in terms:
        term.node = _shared(term, nodes)
        first = by_node.setdefault(id(term.node), term)
        if first is not term:
            is_read = first.weight is not None and term.weight is not None
            first.weight = _together(first.weight, term.weight) if is_read else None
    # What is multiplied by 0 is not there.
    left = [term for term in by_node.values() if isinstance(term.weight, Tensor) or term.weight not in _INFINITE]
    return left or terms[:1]


def _shared(term: Summand, nodes: set[int]) -> Any:
    """Return the last node on the way to a term's elements that is another term's too, as of m in m + 0.5 * m."""
    node = shared = term.node
    while node is not None and node is not term.end:
        inputs = _inputs(node)
        node = inputs[0][0] if len(inputs) == 1 else None
        shared = node if id(node) in nodes else shared
    return shared


def _together(one: Any, other: Any) -> Any:
    """Return what the sum of two terms with the same elements is divided by."""
    both = one + other
    return one * other / both if isinstance(both, Tensor) or both else 0.0


# --- numbers ----------------------------------------------------------------------------------------------------------


def _read(node: Any, term: Summand) -> list[Summand]:
    """Follow a number to what it was computed from; `term` holds the divisors on the way from the loss."""
    try:
        return _reader_of(node.name())(node, term)
    except _UnreadError:
        term.weight, term.end = None, node
        return [term]


def _unknown(_: Any, __: Summand) -> list[Summand]:
    raise _UnreadError


def _nonlinear(_: Any, term: Summand) -> list[Summand]:
    term.is_nonlinear = True
    raise _UnreadError


def _only_input(node: Any) -> tuple[Any, int, int]:
    """Return the only input of a node that has a graph: its node, its number among that node's results, its place."""
    inputs = _inputs(node)
    if len(inputs) != 1:
        raise _UnreadError
    return inputs[0]


def _inputs(node: Any) -> list[tuple[Any, int, int]]:
    return [(one, number, place) for place, (one, number) in enumerate(node.next_functions) if one is not None]


def shape_of(node: Any, number: int) -> Any:
    """Return the shape of a node's result. Sizes come from here, and never from a saved activation."""
    return node.variable.shape if hasattr(node, "variable") else node._input_metadata[number].shape


def dims_of(node: Any) -> list[int]:
    """Return the dimensions that a node is told of, which it keeps without their signs."""
    before, number = node.next_functions[0]
    dims, of_all = getattr(node, "_saved_dim", ()), len(shape_of(before, number))
    return [dim if dim < of_all else dim - 2**64 + of_all for dim in (dims if isinstance(dims, tuple) else [dims])]


def _unchanged(node: Any, term: Summand) -> list[Summand]:
    term.is_nonlinear = node.name().startswith("Where") and len(_inputs(node)) > 1
    inner, number, _ = _only_input(node)
    if math.prod(shape_of(inner, number)) != 1:  # of which the number is one element
        raise _UnreadError
    return _read(inner, term)


def _times(node: Any, term: Summand) -> list[Summand]:
    if len(_inputs(node)) > 1:
        return _product(node, term)
    inner, _, place = _only_input(node)
    if not _scales(node, place, term, lambda other: other.numel() == 1):
        raise _UnreadError
    return _read(inner, term)


def _product(node: Any, term: Summand) -> list[Summand]:
    """Read a sum or a mean times (or over) a number with a gradient of its own, as a learned weight of a task has one.

    That number cannot be read, or else is not counted.
    """
    if any(math.prod(shape_of(inner, number)) != 1 for inner, number, _ in _inputs(node)):
        raise _UnreadError
    places = [place for *_, place in _inputs(node)]
    read = [_read(inner, Summand(term.node, term.weight, term.divisor)) for inner, *_ in _inputs(node)]
    known = [n for n, terms in enumerate(read) if len(terms) == 1 and terms[0].weight is not None]
    counted = [n for n in known if read[n][0].is_counted] or known
    if len(counted) != 1 or (node.name().startswith("Div") and places[counted[0]] == 1):
        raise _UnreadError
    (found,) = read[counted[0]]
    found.product, found.is_counted = node, found.is_counted or term.is_counted
    return [found]


def _scales(node: Any, place: int, term: Summand, is_number: Callable[[Tensor], bool]) -> bool:
    """Note the number that a node multiplies its only input by; return whether there is one."""
    kind = node.name()
    if kind.startswith("Neg"):
        term.weight = -term.weight
        return True
    is_division = kind.startswith("Div")
    if is_division and place:  # a number divided by something with a gradient
        return False
    other = _saved(node, "_saved_self" if place else "_saved_other")
    if isinstance(other, Tensor) and not is_number(other):
        return False
    given, other = other, _on_host(other) if isinstance(other, Tensor) else float(other)
    if is_division:
        term.divided_by = given
        term.weight, term.divisor, term.is_counted = term.weight * other, other, True
    else:
        term.weight = _divided(term.weight, other)
    return True


def _added(node: Any, term: Summand) -> list[Summand]:
    inputs, own = _inputs(node), list[Summand]()
    kind, alpha = node.name(), getattr(node, "_saved_alpha", 1)
    second = 0 if kind.startswith("Rsub") else 1
    for inner, _, place in inputs:
        factor = 1.0
        if place == second:
            factor = (1.0 if kind.startswith("Add") else -1.0) / alpha
        weight = term.weight if factor == 1.0 else term.weight * factor
        # With a single input the rest is a constant, and the gradient of the whole node is that of the term.
        own += _read(inner, term.at(inner if len(inputs) > 1 else term.node, weight))
    return _as_one(term, node, own)


def _as_one(term: Summand, node: Any, parts: list[Summand]) -> list[Summand]:
    """Return parts of a sum, as one term if they are sums that are divided together, as those of chunks are."""
    if len(parts) > 1 and all(one.weight is term.weight for one in parts):
        return term.ends(node)
    return parts


# --- reductions -------------------------------------------------------------------------------------------------------


def _summed(node: Any, term: Summand) -> list[Summand]:
    """Read a sum or a mean over all elements, or over the first dimension, that of samples, and perhaps others."""
    inner, number, _ = _only_input(node)
    if node.name().startswith("Mean"):
        times = math.prod(shape_of(inner, number)) // math.prod(shape_of(node, 0))
        term.weight, term.is_counted = term.weight * times, True
        term.is_mean = True
    return _read_elements(inner, number, term)


def _contraction(node: Any, term: Summand) -> list[Summand]:
    """Read a sum of products, of which one factor is constant."""
    _only_input(node)
    return term.ends(node)


def _reduced(node: Any, term: Summand) -> list[Summand]:
    """Read a loss of torch: a sum, or a mean over targets that count, over rows for margins, or over elements."""
    if node._saved_reduction not in (_MEAN, _SUM):
        raise _UnreadError
    if node._saved_reduction == _MEAN:
        shape, kind = shape_of(*_inputs(node)[0][:2]), node.name()
        if kind.startswith("Nll"):
            count = _total_weight(node)
        else:
            count = math.prod(shape[:-1] if kind.startswith("Multi") else shape)
        term.weight, term.is_counted = term.weight * count, True
    return term.ends(node)


def _total_weight(node: Any) -> float | Tensor:
    """Return what cross entropy divides by: the targets that count, each times the weight of its class."""
    total: Tensor = _saved(node, "_saved_total_weight")
    if total.dtype in _FULL:
        return _on_host(total)
    # In half precision 999 reads as 1,000.
    target = _saved(node, "_saved_target")
    counts = target != node._saved_ignore_index
    if node._raw_saved_weight is None or (weights := _saved(node, "_saved_weight")) is None:
        return _on_host(counts.sum())
    return _on_host((weights.float()[target.clamp(min=0)] * counts).sum())


# --- what is reduced --------------------------------------------------------------------------------------------------


def _read_elements(node: Any, number: int, term: Summand) -> list[Summand]:
    """Follow a tensor whose elements are summed, as far as all of them are multiplied by the same number."""
    shape = shape_of(node, number)
    if not shape:
        return _read(node, term)
    inputs, kind = _inputs(node), node.name().rstrip("0123456789")
    if kind in ("StackBackward", "CatBackward", "ExpandBackward"):
        if all(math.prod(shape_of(inner, of_inner)) == 1 for inner, of_inner, _ in inputs):
            own = list[Summand]()
            for inner, *_ in inputs:  # of numbers; an expanded one is there several times
                weight = _divided(term.weight, math.prod(shape)) if kind == "ExpandBackward" else term.weight
                own += _read(inner, term.at(inner if len(inputs) > 1 else term.node, weight))
            # What cannot be read is a row that has one element.
            return term.ends(node) if any(one.weight is None for one in own) else _as_one(term, node, own)
    elif kind in ("MeanBackward", "SumBackward") and 0 in dims_of(node):
        return _summed(node, term)
    elif kind in ("UnsqueezeBackward", "ViewBackward") and not shape_of(*inputs[0][:2]):
        return _read(inputs[0][0], term)  # a number
    elif len(inputs) == 1 and kind in ("NegBackward", "MulBackward", "DivBackward"):
        inner, of_inner, place = inputs[0]
        try:
            if _scales(node, place, term, lambda other: other.dim() == 0):
                return _read_elements(inner, of_inner, term)
        except _UnreadError:  # hidden by a hook
            pass
    return term.ends(node)


_BY_NAME: dict[str, Callable[[Any, Summand], list[Summand]]] = {
    **dict.fromkeys(_UNCHANGED, _unchanged),
    **dict.fromkeys(("Neg", "Mul", "Div"), _times),
    **dict.fromkeys(("Add", "Sub", "Rsub"), _added),
    **dict.fromkeys(_NONLINEAR, _nonlinear),
    **dict.fromkeys(("Mean", "Sum"), _summed),
    **dict.fromkeys(("NllLoss", "NllLoss2D", "MultiMarginLoss", "MultilabelMarginLoss"), _reduced),
    **dict.fromkeys(("MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss"), _reduced),
    **dict.fromkeys(("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"), _reduced),
    **dict.fromkeys(("Dot", "Mv", "Mm", "Bmm"), _contraction),
}


@functools.cache
def _reader_of(kind: str) -> Callable[[Any, Summand], list[Summand]]:
    """Return what reads nodes of a name."""
    return _BY_NAME.get(kind.rstrip("0123456789").removesuffix("Backward"), _unknown)


def nodes_of(last: Any) -> list[Any]:
    """Return a node of a graph, None for none, and all that it is computed from."""
    found: list[Any] = [] if last is None else [last]
    seen = set(found)
    for node in found:  # which grows
        for further, _ in node.next_functions:
            if further is not None and further not in seen:
                seen.add(further)
                found.append(further)
    return found


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors at which gradients of a loss end."""
    return [node.variable for node in nodes_of(loss.grad_fn) if hasattr(node, "variable")]


def stop(term: Summand, but: Summand | None = None) -> list[Any]:
    """Let no gradient of a term pass, `but` for what it shares with another; return the handles of the hooks.

    A division by 0, which would make NaN of 0, is between its two ends.
    """
    nodes = [node for node in (term.node, term.end) if node is not None and not hasattr(node, "variable")]
    nodes = [node for node in nodes if but is None or node is not but.end]
    handles = [node.register_prehook(_zeros) for node in nodes]
    if term.product is not None:
        handles.append(term.product.register_hook(lambda gradients, _: _zeros(gradients)))
    return handles


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else torch.zeros_like(one) for one in gradients)


# --- saved numbers ----------------------------------------------------------------------------------------------------


def _divided(weight: Any, number: Any) -> Any:
    return weight / number if isinstance(number, Tensor) or number else math.inf


def _on_host(value: Tensor) -> float | Tensor:
    """Return a number on the host if it is there, otherwise the tensor, in full precision."""
    if value.is_cpu:
        # This reads it without an operator of torch, which a mode that watches operators would see.
        number: Any = value.tolist()
        while isinstance(number, list):  # of a tensor with dimensions
            (number,) = number
        return float(number)
    value = value.detach().reshape(())
    return value.float() if value.device.type == "mps" or value.dtype is torch.float32 else value.double()


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved, unless unpacking it would run a forward pass once more."""
    raw = getattr(node, "_raw" + name, None)
    if raw is not None:
        try:
            hook = raw.unpack_hook
        except AttributeError:  # torch < 2.10
            if name not in node.metadata:  # which is read a second time, with the hooks of the first
                _refuse_hooks(raw)
                node.metadata[name] = True
        else:
            if hook is not None and not (getattr(hook, "__module__", None) or "").startswith(_ONLY_MOVE):
                raise _UnreadError
    try:
        return getattr(node, name)
    except (AttributeError, RuntimeError):
        raise _UnreadError from None


def _refuse_hooks(raw: Any) -> None:
    try:
        with _disable_current_modes():  # in which the hooks would get no tensor
            raw.register_hooks(_same, _same)  # refused where there are hooks
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "value None" not in str(error):
            raise _UnreadError from None


def _same(tensor: Tensor) -> Tensor:
    return tensor
