"""Reads from the autograd graph of a loss what each of its terms is divided by.

A loss that people write is a sum of terms, each a number times a sum over elements: `loss = sum_k s_k / w_k`. A mean
over tokens has `w = tokens`, a weighted mean the sum of its weights, a sum a constant. The graph from the loss to the
first real reduction of each term holds all of these numbers, so that nothing has to be guessed. The nodes that autograd
saves numbers in are described in "Autograd mechanics" of PyTorch's documentation; an unknown one makes its term unread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# What changes the form of a number, and not its value.
_UNCHANGED = (
    *("ToCopy", "Squeeze", "Unsqueeze", "View", "Clone", "Alias", "ReshapeAlias", "UnsafeView", "Permute"),
    *("Transpose", "T", "NanToNum", "Where", "Expand", "AsStrided", "Contiguous"),
)
_MEAN, _SUM = 1, 2  # torch's numbers for reduction="mean" and "sum"
_OF_ELEMENTS = (
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss"),
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"),
)
# Modules whose hooks on saved tensors give the same tensor back, only from elsewhere.
_ONLY_MOVE = ("autoaccum.", "torch.autograd.graph")


_OF_CLASSES = ("NllLossBackward0", "NllLoss2DBackward0")
_FULL = (torch.float32, torch.float64)
_INFINITE = (math.inf, -math.inf)


class _UnreadError(Exception):
    """A node is unknown, or is no number times its input."""


@dataclass(slots=True)
class ReadTerm:
    """A term of a loss.

    Attributes:
        node: The node of the graph that only this term's gradient flows through.
        weight: What its sum over elements is divided by, on the device where that is no number on the host. None if it
            could not be read.
        divides: Whether the gradient of the term is NaN where its weight is 0.
        divisor: The last divisor that the graph holds; None if there is none.
        is_counted: Whether its weight comes from a count or a divisor.
        end: The node whose result is summed, as far as its elements have one factor.
    """

    node: Any
    weight: float | Tensor | None
    divides: bool = False
    divisor: float | Tensor | None = None
    is_counted: bool = False
    end: Any = None

    def at(self, node: Any, weight: float | Tensor | None = None) -> ReadTerm:
        """Return the same for another node, and another weight if given."""
        weight = self.weight if weight is None else weight
        return ReadTerm(node, weight, self.divides, self.divisor, self.is_counted)


def read(loss: Tensor) -> list[ReadTerm]:
    """Return the terms of a loss.

    Args:
        loss: A single number with a graph, which stays as it is.
    """
    found: list[ReadTerm] = []
    node = loss.grad_fn
    if node is None:  # a parameter
        return [ReadTerm(None, None)]
    _read_number(node, 0, ReadTerm(node, 1.0), found)
    return found if len(found) == 1 else _merged(found)


def weight_at_once(loss: Tensor) -> float | None:
    """Return what cross entropy on the host is divided by, by a look at the only node that says it; None otherwise.

    Args:
        loss: A number whose graph was read before, in the same form.
    """
    node: Any = loss.grad_fn
    if node is None or node.name() not in _OF_CLASSES or node._saved_reduction != _MEAN:
        return None
    total = node._saved_total_weight
    is_plain = total.device.type == "cpu" and total.dtype in _FULL
    return total.tolist() if is_plain else None


def _merged(terms: list[ReadTerm]) -> list[ReadTerm]:
    """Return terms of which no two have the same node, since their gradients could not be told apart."""
    by_node: dict[int, ReadTerm] = {}
    for term in terms:
        first = by_node.setdefault(id(term.node), term)
        if first is not term:
            is_read = first.weight is not None and term.weight is not None
            first.weight = _together(first.weight, term.weight) if is_read else None
    # What is multiplied by 0 is not there.
    left = [term for term in by_node.values() if isinstance(term.weight, Tensor) or term.weight not in _INFINITE]
    return left or terms[:1]


def _together(one: Any, other: Any) -> Any:
    """Return what the sum of two terms with the same elements is divided by."""
    both = one + other
    return one * other / both if isinstance(both, Tensor) or both else 0.0


# --- numbers ----------------------------------------------------------------------------------------------------------


def _read_number(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:
    """Follow a number to what it was computed from; `term` holds the divisors on the way from the loss."""
    kind = node.name()
    handler = _HANDLERS.get(kind)
    if handler is None:
        handler = _HANDLERS[kind] = _handler_of(kind)
    try:
        handler(node, number, term, found)
    except _UnreadError:
        term.weight, term.end = None, node
        found.append(term)


def _handler_of(kind: str) -> Callable[[Any, int, ReadTerm, list[ReadTerm]], None]:
    name = kind.rstrip("0123456789").removesuffix("Backward")
    if name in _UNCHANGED:
        return _unchanged
    if name in _OF_ELEMENTS:
        return _elementwise
    handlers: dict[str, Callable[[Any, int, ReadTerm, list[ReadTerm]], None]] = {
        "Neg": _negative,
        "Mul": _product,
        "Div": _quotient,
        "Add": _added,
        "Sub": _added,
        "Rsub": _added,
        "Mean": _mean,
        "Sum": _sum,
        "NllLoss": _nll,
        "NllLoss2D": _nll,
        "MultiMarginLoss": _margin,
        "MultilabelMarginLoss": _margin,
        "Dot": _contraction,
        "Mv": _contraction,
        "Mm": _contraction,
        "Bmm": _contraction,
    }
    return handlers.get(name, _unknown)


def _unknown(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    raise _UnreadError


def _only_input(node: Any) -> tuple[Any, int, int]:
    """Return the only input of a node that has a graph: its node, its number among that node's results, its place."""
    inputs = [(one, number, place) for place, (one, number) in enumerate(node.next_functions) if one is not None]
    if len(inputs) != 1:
        raise _UnreadError
    return inputs[0]


def _shape(node: Any, number: int) -> Sequence[int]:
    """Return the shape of a node's result."""
    if hasattr(node, "variable"):
        return node.variable.shape  # type: ignore[no-any-return]
    return node._input_metadata[number].shape  # type: ignore[no-any-return]


def _unchanged(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    inner, of_inner, _ = _only_input(node)
    if math.prod(_shape(inner, of_inner)) != 1:
        raise _UnreadError
    _read_number(inner, of_inner, term, found)


def _negative(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    inner, of_inner, _ = _only_input(node)
    term.weight = -_known(term.weight)
    _read_number(inner, of_inner, term, found)


def _product(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    inner, of_inner, place = _only_input(node)
    other = _number(node, "_saved_other" if place == 0 else "_saved_self")
    term.weight = _divided(_known(term.weight), other)
    _read_number(inner, of_inner, term, found)


def _quotient(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    inner, of_inner, place = _only_input(node)
    if place != 0:  # a number divided by something with a gradient
        raise _UnreadError
    _divide(term, _number(node, "_saved_other"))
    _read_number(inner, of_inner, term, found)


def _added(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    inputs = [(one, of_one, place) for place, (one, of_one) in enumerate(node.next_functions) if one is not None]
    is_subtraction, is_reversed = "Sub" in node.name(), node.name().startswith("Rsub")
    alpha, weight, own = getattr(node, "_saved_alpha", 1), _known(term.weight), list[ReadTerm]()
    for inner, of_inner, place in inputs:
        if math.prod(_shape(inner, of_inner)) != 1:
            raise _UnreadError
        is_second = (place == 0) if is_reversed else (place == 1)
        scaled = weight / alpha if is_second and alpha != 1 else weight
        if is_subtraction and is_second:
            scaled = -scaled
        # With a single input the rest is a constant, and the gradient of the whole node is that of the term.
        at = inner if len(inputs) > 1 else term.node
        _read_number(inner, of_inner, term.at(at, scaled), own)
    found += _as_one(term, node, own)


def _as_one(term: ReadTerm, node: Any, parts: list[ReadTerm]) -> list[ReadTerm]:
    """Return parts of a sum, as one term if they are sums that are divided together, as those of chunks are."""
    if len(parts) > 1 and all(one.weight is term.weight for one in parts):
        term.end = node
        return [term]
    return parts


# --- reductions -------------------------------------------------------------------------------------------------------


def _mean(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:
    inner, of_inner, _ = _only_input(node)
    if math.prod(_shape(node, number)) != 1:
        raise _UnreadError
    term.weight, term.is_counted = _known(term.weight) * _elements(node, inner, of_inner), True
    _read_elements(inner, of_inner, term, found)


def _elements(node: Any, inner: Any, of_inner: int) -> int:
    try:
        return int(node._saved_self_sym_numel)
    except AttributeError:  # a mean over chosen dimensions
        return math.prod(_shape(inner, of_inner))


def _margin(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    """Read a loss whose mean runs over samples, which are rows of its input."""
    if node._saved_reduction == _MEAN:
        inner, of_inner, _ = _only_input(node)
        shape = _shape(inner, of_inner)
        term.weight, term.is_counted = _known(term.weight) * (shape[0] if len(shape) > 1 else 1), True
    elif node._saved_reduction != _SUM:
        raise _UnreadError
    term.end = node
    found.append(term)


def _sum(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:
    inner, of_inner, _ = _only_input(node)
    if math.prod(_shape(node, number)) != 1:
        raise _UnreadError
    _read_elements(inner, of_inner, term, found)


def _contraction(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:
    """Read a sum of products, of which one factor is constant."""
    _only_input(node)
    if math.prod(_shape(node, number)) != 1:
        raise _UnreadError
    term.end = node
    found.append(term)


def _nll(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    if node._saved_reduction == _MEAN:
        term.weight, term.is_counted = _known(term.weight) * _total_weight(node), True
    elif node._saved_reduction != _SUM:
        raise _UnreadError
    term.end = node
    found.append(term)


def _total_weight(node: Any) -> float | Tensor:
    """Return what cross entropy divides by: the targets that count, each times the weight of its class."""
    total: Tensor = _saved(node, "_saved_total_weight")
    if total.dtype in (torch.float32, torch.float64):
        return _on_host(total)
    # In half precision 999 reads as 1,000.
    target = _saved(node, "_saved_target")
    counts = target != node._saved_ignore_index
    if node._raw_saved_weight is None or (weights := _saved(node, "_saved_weight")) is None:
        return _on_host(counts.sum())
    return _on_host((weights.float()[target.clamp(min=0)] * counts).sum())


def _elementwise(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:  # noqa: ARG001
    if node._saved_reduction == _MEAN:
        inner, of_inner = next(one for one in node.next_functions if one[0] is not None)
        term.weight, term.is_counted = _known(term.weight) * math.prod(_shape(inner, of_inner)), True
    elif node._saved_reduction != _SUM:
        raise _UnreadError
    term.end = node
    found.append(term)


# --- what is reduced --------------------------------------------------------------------------------------------------


def _read_elements(node: Any, number: int, term: ReadTerm, found: list[ReadTerm]) -> None:
    """Follow a tensor whose elements are summed, as far as all of them are multiplied by the same number."""
    shape = _shape(node, number)
    if not shape:
        _read_number(node, number, term, found)
        return
    inputs = [(place, *one) for place, one in enumerate(node.next_functions) if one[0] is not None]
    kind = node.name().rstrip("0123456789")
    if kind in ("StackBackward", "CatBackward", "ExpandBackward"):
        if all(math.prod(_shape(inner, of_inner)) == 1 for _, inner, of_inner in inputs):
            own = list[ReadTerm]()
            for _, inner, of_inner in inputs:
                one = term.at(inner if len(inputs) > 1 else term.node)
                if kind == "ExpandBackward":  # copies of one number
                    one.weight = _divided(_known(one.weight), math.prod(shape))
                _read_number(inner, of_inner, one, own)
            found += _as_one(term, node, own)
            return
    elif len(inputs) == 1 and _scale(node, kind, inputs[0][0], term):
        _read_elements(inputs[0][1], inputs[0][2], term, found)
        return
    term.end = node
    found.append(term)


def _scale(node: Any, kind: str, place: int, term: ReadTerm) -> bool:
    """Note the number that a node multiplies all elements of its only input by; return whether there is one."""
    if kind == "NegBackward":
        term.weight = -_known(term.weight)
        return True
    if kind not in ("MulBackward", "DivBackward") or (kind == "DivBackward" and place):
        return False
    other = _saved_number(node, place)
    if other is None:
        return False
    if kind == "DivBackward":
        _divide(term, other)
    else:
        term.weight = _divided(_known(term.weight), other)
    return True


def _saved_number(node: Any, place: int) -> float | Tensor | None:
    """Return the other operand if it is one number for all elements; None if each has its own."""
    try:
        other = _saved(node, "_saved_other" if place == 0 else "_saved_self")
    except _UnreadError:
        return None
    return other if not isinstance(other, Tensor) else _on_host(other) if other.dim() == 0 else None


# --- saved numbers ----------------------------------------------------------------------------------------------------


def _known(weight: float | Tensor | None) -> Any:
    assert weight is not None
    return weight


def _divide(term: ReadTerm, divisor: Any) -> None:
    term.weight = _known(term.weight) * divisor
    term.divides = term.is_counted = True
    term.divisor = divisor


def _divided(weight: Any, number: Any) -> Any:
    if isinstance(number, Tensor) or number:
        return weight / number
    return math.inf


def _number(node: Any, name: str) -> float | Tensor:
    value = _saved(node, name)
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1:
        raise _UnreadError
    return _on_host(value)


def _on_host(value: Tensor) -> float | Tensor:
    """Return a number on the host if it is there, otherwise the tensor, in full precision."""
    if value.device.type == "cpu":
        # This reads it without an operator of torch, which a mode that watches operators would see.
        number: Any = value.tolist()
        while isinstance(number, list):  # of a tensor with dimensions
            (number,) = number
        return float(number)
    value = value.detach().reshape(())
    return value.float() if value.device.type == "mps" or value.dtype is torch.float32 else value.double()


def _saved(node: Any, name: str) -> Any:
    """Return what a node has saved, unless unpacking it would run a forward pass once more.

    Raises:
        _UnreadError: It is not there, or hooks for saved tensors are in force.
    """
    raw = getattr(node, "_raw" + name, None)
    if raw is not None:
        try:
            hook = raw.unpack_hook
        except AttributeError:  # torch < 2.10
            _refuse_hooks(raw)
        else:
            if hook is not None and not getattr(hook, "__module__", "").startswith(_ONLY_MOVE):
                raise _UnreadError
    try:
        return getattr(node, name)
    except (AttributeError, RuntimeError):
        raise _UnreadError from None


def _refuse_hooks(raw: Any) -> None:
    try:
        raw.register_hooks(_same, _same)  # refused where there are hooks
    except RuntimeError:
        raise _UnreadError from None


def _same(tensor: Tensor) -> Tensor:
    return tensor


_HANDLERS: dict[str, Callable[[Any, int, ReadTerm, list[ReadTerm]], None]] = {}
