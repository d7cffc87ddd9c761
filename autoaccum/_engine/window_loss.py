"""Losses that are no sum over parts of a batch, over a whole window in the memory of one micro-batch.

Such a loss compares samples with each other (contrastive and metric losses), chooses among them (hard example mining),
or is a function of their mean (its root). It only has to be a function of per-sample outputs. The model's outputs
(representations) are therefore computed first, for all micro-batches and without graphs; then the loss and its gradient
with respect to them, over the whole window; then each micro-batch runs forward once more, with the random state that it
had, and backward from its rows of that gradient. By the chain rule this gives the whole batch's gradient
(gradient caching: Gao, Zhang, Han and Callan 2021, arXiv:2101.06983).

Nothing is caught here. The caller undoes a window that fails, and restarts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import Window, repeated
from autoaccum._data.nesting import copied, map_tensors, without_graphs
from autoaccum._data.numbers import ITEMS, numbers_in, with_number
from autoaccum._data.random_state import RandomState
from autoaccum._data.splits import FIRST, Along
from autoaccum._engine.forward_backward import check_weight
from autoaccum._engine.gradient_checks import nodes
from autoaccum._engine.phases import Phase
from autoaccum._engine.savepoint import Savepoint
from autoaccum._loss import divisor, reported
from autoaccum._loss.closures import used_by
from autoaccum._loss.counting import is_pair
from autoaccum._loss.objective import Factors, no_gradient
from autoaccum._loss.weighting import Over
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from autoaccum._data.numbers import Path
    from autoaccum._data.pieces import NestedPiece
    from autoaccum._data.transfer import Transfer
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._loss.terms import Term


# Tolerance between the second forward pass and the first, relative to the first: kernels that add in another order stay
# far below, another dropout mask or other noise goes far beyond.
_SAME = 1e-2
# Factors for a loss computed over a whole window.
_ALL_AT_ONCE = Factors(1.0, 1.0, alone=True)


class WindowLoss:
    """A loss over the whole window, for outputs that are computed part by part.

    Args:
        step: The training step. It is only read.

    Raises:
        InvalidInputError: The loss does not take outputs.
    """

    def __init__(self, step: GradientStep) -> None:
        if step.objective.loss is None or isinstance(step.objective.loss, list | tuple):
            given = "no loss=" if step.objective.loss is None else "a list of losses, each with a forward of its own"
            raise InvalidInputError(
                f"loss_scope='window' takes one loss over the outputs of the whole window, but there is {given}; pass "
                "loss=, a callable of (outputs, targets) or (outputs, batch), and let the model (or forward=) return "
                "representations"
            )
        split = step.objective.split
        if isinstance(split, Along) and not split.is_first:
            raise InvalidInputError(
                f"loss_scope='window' needs outputs whose first dimension is the samples, and split={split!r} says "
                "otherwise; pass split=autoaccum.ListOfSamples(collate) and let forward= return samples first"
            )
        self._step = step

    def outputs(self, batch: Any, samples: int) -> Any:
        """Return the representations of one micro-batch that is on the device.

        Raises:
            InvalidInputError: The model did not return representations.
        """
        with self._step.precision.autocast():
            outputs = self._step.objective.outputs(batch)
        _check_representations(outputs, samples)
        return outputs

    def terms(self, outputs: Any, batch: Any, samples: int) -> list[Term]:
        """Return the loss terms of the window's representations; arguments as for `Objective.terms_of`."""
        with self._step.precision.autocast():
            return self._step.objective.terms_of(outputs, batch, samples)

    def join(self, parts: Sequence[Any]) -> Any:
        """Join the representations of all micro-batches as if they came from one.

        Raises:
            InvalidInputError: They cannot be joined.
        """
        window = Window(parts, FIRST)
        if len(window.groups()) > 1:
            raise InvalidInputError(
                "loss_scope='window' cannot join what the model returned for the window's micro-batches: "
                f"{_difference(parts)}. Samples go along the first dimension and the other sizes must agree; a "
                "tensor without dimensions (logit_scale) and whatever is no tensor must be the same for all"
            )
        return window.cut(0, window.samples)

    def batch(self, window: Window) -> Any:
        """Return the window's batch for the loss, on the device, without using memory for what the loss does not read.

        For (inputs, targets) pairs, these are the targets, with None in place of the inputs. For mappings, items are
        joined and moved when the loss reads them; those that cannot be joined (padded to unequal lengths) are left out.
        Anything else is joined and moved whole; if it cannot be joined, the `Window` itself is returned.

        Raises:
            InvalidInputError: The targets cannot be joined.
        """
        if not window.is_plain and len(window.groups()) == 1:
            whole = self._step.transfer.place(copied(window.cut(0, window.samples)))
            return (None, whole[1]) if is_pair(whole) else whole
        parts = window.parts(0, window.samples)
        first = parts[0][0]
        counts = _counts(window)
        if isinstance(first, Mapping):
            return _WholeMapping(parts, self._step.transfer, {path[-1]: total for path, total in counts.items()})
        if is_pair(first):
            targets = [(batch[1], samples) for batch, samples in parts]
            if not _can_be_joined(targets):
                raise InvalidInputError(
                    f"the targets of the window's {len(parts)} batches cannot be joined, as loss_scope='window' needs "
                    "them (other shapes, types or nesting); let the loader pad them to one length, or yield mappings"
                )
            joined = _joined(targets, self._step.transfer)
            for path, total in counts.items():
                joined = with_number(joined, path[1:], total) if path[0] == 1 else joined
            return None, joined
        return _joined(parts, self._step.transfer) if _can_be_joined(parts) else window


class WholeWindow:
    """Accumulates the gradient of a loss over whole windows.

    Args:
        step: The training step.
        mark: Taken by the caller at the beginning of each window.

    Attributes:
        reported: Values that the last window's loss reported in addition to its total, as recorded by `reported.note`.
        parts: What the model returned for each micro-batch of the last window, if the step keeps outputs.

    Raises:
        InvalidInputError: The loss does not take outputs.
    """

    def __init__(self, step: GradientStep, mark: Savepoint) -> None:
        modules, device = step.objective.modules, step.memory.device
        self._step = step
        self._loss = WindowLoss(step)
        self._at_start = mark
        functions = step.objective.functions
        self._after_loss = mark.like_it()
        self._after_forward = Savepoint(modules, device, functions)
        self._random = RandomState(device, modules, used_by(functions))
        self.reported: dict[reported.Slot, list[Any]] = {}
        self.parts: list[Any] = []
        # Every micro-batch runs twice on the same data, which a model may modify in place.
        step.transfer.copy_always()

    def run(
        self, window: Window, sizes: Sequence[int], *, entering: Callable[[int | None], None], is_first: bool = False
    ) -> dict[str, Tensor]:
        """Accumulate the gradient of the window's loss in `.grad`, scaled if there is a scaler.

        Afterwards buffers and random state are as after one pass over the micro-batches and the loss.

        Args:
            window: The samples.
            sizes: Sizes of its micro-batches.
            entering: Called before each micro-batch, twice in all, with its size, and with None before the loss of the
                whole window.
            is_first: Whether to check that the loss reaches the model by its outputs alone, and that the second pass
                gives what the first has given.

        Returns:
            The window's losses by name, on the device.

        Raises:
            InvalidInputError: The model or the loss cannot be used in this way.
        """
        feed = self._step.transfer.feed
        if len(sizes) == 1:
            with closing(feed(window, sizes)) as batches:
                return self._at_once(batches, sizes[0], entering, window, is_first=is_first)
        states: list[tuple[Any, ...]] = []
        with closing(feed(window, sizes)) as batches:
            last = len(sizes) - 1
            parts = [
                self._look(batches, size, entering, states, with_graph=is_first and number == last)
                for number, size in enumerate(sizes)
            ]
        self.parts = list(parts) if self._step.keeps_outputs else []
        self._step.stage.phase = Phase.FORWARD
        entering(None)
        joined = _Representations(self._loss.join(parts))
        parts.clear()
        losses = self._of_whole(joined, window, is_first=is_first)
        self._after_loss.take()
        self._at_start.restore()
        # If the user wraps everything in autocast, casts of the weights are cached. Before PyTorch's pull request
        # 165068, those made under no_grad have no graph.
        torch.clear_autocast_cache()
        with closing(feed(window, sizes)) as batches:
            for size, state in zip(sizes, states, strict=True):
                self._pass_back(batches, size, entering, state, joined, compare=is_first)
        if not self._step.holds_gradients():
            raise InvalidInputError(
                "nothing that the loss depends on has a gradient: no output of the model does; look for .detach() or "
                "torch.no_grad() in the model, and for parameters with requires_grad=False"
            )
        self._after_loss.restore()
        return losses

    def rehearse(self, window: Window, size: int) -> None:
        """Use all the memory that a window cut in `size` needs, but process only one micro-batch.

        Args:
            window: A window of the usual length. Only its first samples are processed; their representations are
                repeated in place of the other micro-batches'.
            size: Samples in the micro-batch.
        """
        feed = self._step.transfer.feed
        if size >= window.samples:
            with closing(feed(window, [window.samples])) as batches:
                self._at_once(batches, window.samples, _ignored, window)
            return
        sizes = [size, min(size, window.samples - size)]  # the second is transferred while the first is used
        states: list[tuple[Any, ...]] = []
        with closing(feed(window, sizes)) as batches:
            part = self._look(batches, size, _ignored, states)
        joined = _Representations(repeated(part, window.samples, FIRST))
        del part
        self._of_whole(joined, window)
        self._after_loss.take()
        with closing(feed(window, sizes)) as batches:
            self._pass_back(batches, size, _ignored, states[0], joined, compare=False)

    def _at_once(
        self,
        batches: Iterator[Any],
        size: int,
        entering: Callable[[int | None], None],
        window: Window,
        *,
        is_first: bool = False,
    ) -> dict[str, Tensor]:
        """Run a window that is a single micro-batch, which needs no second pass."""
        batch = self._begin(batches, size, entering)
        outputs = self._loss.outputs(batch, size)
        self.parts = [without_graphs(outputs)] if self._step.keeps_outputs else []
        if window.carries_counts():
            batch = self._loss.batch(window)
        if not is_first:
            return self._backward(self._loss.terms(outputs, batch, size), size)
        joined = _Representations(outputs)
        losses = self._backward(self._loss.terms(joined.for_loss(), batch, size), size, is_first=True)
        self._step.stage.phase = Phase.BACKWARD
        if shares := joined.next_shares(tensors_of(outputs), size, compare=False):
            torch.autograd.backward([output for output, _ in shares], [share for _, share in shares])
        return losses

    def _look(
        self,
        batches: Iterator[Any],
        size: int,
        entering: Callable[[int | None], None],
        states: list[tuple[Any, ...]],
        *,
        with_graph: bool = False,
    ) -> Any:
        """Return a micro-batch's representations without a graph, and record its initial random state.

        With `with_graph`, what the model keeps in attributes has its graph, so that a loss that reads it shows.
        """
        batch = self._begin(batches, size, entering)
        self._random.take()
        states.append(self._random.taken)
        with nullcontext() if with_graph else torch.no_grad():
            # Copies: an output may be a view that keeps a whole layer alive, or be overwritten by the next pass.
            return map_tensors(_copy, self._loss.outputs(batch, size))

    def _of_whole(self, joined: _Representations, window: Window, *, is_first: bool = False) -> dict[str, Tensor]:
        """Compute the window's loss, and its gradient with respect to the representations."""
        terms = self._loss.terms(joined.for_loss(), self._loss.batch(window), window.samples)
        return self._backward(terms, window.samples, is_first=is_first)

    def _pass_back(
        self,
        batches: Iterator[Any],
        size: int,
        entering: Callable[[int | None], None],
        state: tuple[Any, ...],
        joined: _Representations,
        *,
        compare: bool,
    ) -> None:
        """Run a micro-batch again, with its graph this time, and backward from its rows of the gradient."""
        batch = self._begin(batches, size, entering)
        self._random.assume(state)
        self._random.put_back()
        outputs = tensors_of(self._loss.outputs(batch, size))
        shares = joined.next_shares(outputs, size, compare=compare)
        self._after_forward.take()
        self._step.stage.phase = Phase.BACKWARD
        if shares:
            torch.autograd.backward([output for output, _ in shares], [share for _, share in shares])
        # Activation checkpointing repeats forward passes there, and updates buffers that the next pass may read.
        self._after_forward.restore()

    def _begin(self, batches: Iterator[Any], size: int, entering: Callable[[int | None], None]) -> Any:
        self._step.stage.phase = Phase.TRANSFER
        entering(size)
        batch = next(batches)
        self._step.stage.phase = Phase.FORWARD
        return batch

    def _backward(self, terms: Sequence[Term], samples: int, *, is_first: bool = False) -> dict[str, Tensor]:
        values = {term.name: _value(term) for term in terms if not term.is_reported}
        self.reported = {}
        reported.note(terms, samples, _ALL_AT_ONCE, self._step.objective.weighting, self.reported)
        total = torch.stack(list(values.values())).sum() if len(values) > 1 else next(iter(values.values()))
        if not total.requires_grad:
            raise no_gradient(values)
        if is_first:
            self._refuse_other_ways(total)
        self._step.backward(total)
        return {name: value.detach() for name, value in values.items()}

    def _refuse_other_ways(self, total: Tensor) -> None:
        """Check that the loss of detached outputs reaches no parameters of the model.

        Raises:
            InvalidInputError: It does.
        """
        names = {id(parameter): name for name, parameter in self._step.objective.model.named_parameters()}
        reached = [names.get(id(getattr(node, "variable", None))) for node in nodes(total)]
        if found := [name for name in reached if name is not None]:
            raise InvalidInputError(
                f"loss_scope='window' computes the loss from the model's outputs, and this loss reaches {found[0]} in "
                "another way, as by a term that forward() leaves in an attribute of the model (an auxiliary loss); let "
                "the model, or forward=, return the term among its outputs, and add it in the loss from there"
            )


class _Representations:
    """The window's representations, which are passed to the loss and then supply their gradient row by row.

    Args:
        joined: The model's return value, for the whole window.
    """

    def __init__(self, joined: Any) -> None:
        self._joined = map_tensors(_with_gradient, joined)
        self._tensors = tensors_of(self._joined)
        self._start = 0

    def for_loss(self) -> Any:
        """Return them with their graph; as copies, since the loss may modify them in place like a model's outputs."""
        return map_tensors(Tensor.clone, self._joined)

    def next_shares(self, outputs: Sequence[Tensor], size: int, *, compare: bool) -> list[tuple[Tensor, Tensor]]:
        """Return the next micro-batch's outputs that need a gradient, each with its share of the gradient.

        Args:
            outputs: The micro-batch's recomputed outputs.
            size: Its samples.
            compare: Whether to check that they equal the first ones; waits for the device.

        Raises:
            InvalidInputError: They differ.
        """
        start, self._start = self._start, self._start + size
        if len(outputs) != len(self._tensors):
            raise _other_outputs(f"{len(outputs)} tensors instead of {len(self._tensors)}")
        shares = []
        for output, whole in zip(outputs, self._tensors, strict=True):
            gradient = whole.grad
            if output.dim():
                gradient = None if gradient is None else gradient[start : start + size]
            elif start:
                gradient = None  # shared by all micro-batches; the first has passed it on
            if compare:
                _check_same(output.detach(), whole.detach()[start : start + size] if output.dim() else whole.detach())
            if gradient is not None and output.requires_grad:
                shares.append((output, gradient))
        return shares


class _WholeMapping(Mapping[str, Any]):
    """The mappings of a window as one; each item is joined and moved to the device when it is read."""

    def __init__(self, parts: Sequence[tuple[Any, int]], transfer: Transfer, counts: Mapping[str, float]) -> None:
        self._parts = parts
        self._transfer = transfer
        self._there: dict[str, Any] = dict(counts)
        self._names = [name for name in parts[0][0] if self._has(name)]

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            why = " (it cannot be joined over the window)" if name in self._parts[0][0] else ""
            raise KeyError(f"{name}{why}")
        if name not in self._there:
            self._there[name] = _joined(self._items(name), self._transfer)
        return self._there[name]

    def __getattr__(self, name: str) -> Any:
        # Some mappings (a Transformers BatchEncoding) also expose their items as attributes.
        if name.startswith("_") or name not in self._names:
            raise AttributeError(name)
        return self[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _has(self, name: str) -> bool:
        return name in self._there or (
            all(name in batch for batch, _ in self._parts) and _can_be_joined(self._items(name))
        )

    def _items(self, name: str) -> list[tuple[Any, int]]:
        return [(batch[name], samples) for batch, samples in self._parts]


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the tensors in a model's return value, in order of nesting."""
    found: list[Tensor] = []
    map_tensors(found.append, outputs)
    return found


def _check_representations(outputs: Any, samples: int) -> None:
    tensors = tensors_of(outputs)
    wrong = [tensor for tensor in tensors if tensor.dim() and tensor.shape[0] != samples]
    if tensors and not wrong and any(tensor.dim() for tensor in tensors):
        return
    if wrong:
        found = f"a tensor of shape {tuple(wrong[0].shape)} for {samples} samples"
    elif tensors:
        found = "only tensors without dimensions, as if the model computed the loss itself"
    else:
        found = f"a {type(outputs).__name__} in which no tensor is found"
    raise InvalidInputError(
        f"loss_scope='window' needs representations, one row a sample, but the model returned {found}; let the model, "
        "or forward=, return a tensor (or a tuple, list or mapping of tensors) of shape (samples, ...), what all "
        "samples share as tensors without dimensions, and pass loss="
    )


def _check_same(second: Tensor, first: Tensor) -> None:
    if second.shape != first.shape:
        raise _other_outputs(f"shape {tuple(second.shape)} instead of {tuple(first.shape)}")
    if not second.is_floating_point() or not second.numel():
        return
    size, difference = first.float().norm(), (second.float() - first.float()).norm()
    if difference > _SAME * size:
        raise _other_outputs(f"a difference of {float(difference / size):.2g} of their norm")


def _other_outputs(found: str) -> InvalidInputError:
    return InvalidInputError(
        f"loss_scope='window' runs every micro-batch twice, and the second time the model returned something else "
        f"({found}): it draws from a generator that is not torch's, Python's or NumPy's own and no attribute of a "
        "module, writes its own parameters, or keeps state that is no buffer; draw from those, register state as "
        "buffers, and move parameters (a momentum encoder) after the update"
    )


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _with_gradient(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else tensor


def _value(term: Term) -> Tensor:
    """Return the window's loss; it covers all samples, so no weighting is needed."""
    if term.over is not Over.PAIR:
        return term.value
    assert term.weight is not None
    check_weight(term.name, term.weight)
    return term.value / term.weight


def _counts(window: Window) -> dict[Path, float]:
    """Return the numbers of items that the loader's batches carry, each as that of the whole window."""
    if not window.carries_counts():
        return {}
    paths = [path for path in numbers_in(window.spans[0].piece.batch) if path[-1] == ITEMS]
    totals = {path: divisor.of_window(path, window).total for path in paths}
    return {path: int(total) if total.is_integer() else total for path, total in totals.items()}


def _counted(parts: Sequence[tuple[Any, int]]) -> Window:
    """Return parts of batches as a window; paired with a count, since they may contain no tensor (a list of names)."""
    return Window([(part, torch.empty(samples, 0)) for part, samples in parts], FIRST)


def _can_be_joined(parts: Sequence[tuple[Any, int]]) -> bool:
    return len(parts) == 1 or len(_counted(parts).groups()) == 1


def _joined(parts: Sequence[tuple[Any, int]], transfer: Transfer) -> Any:
    # A copy if joining makes none: the loss may modify what it is given, and the window may be restarted.
    window = _counted(parts)
    return transfer.place(copied(parts[0][0]) if len(parts) == 1 else window.cut(0, window.samples)[0])


def _difference(parts: Sequence[Any]) -> str:
    pieces = [FIRST.piece(part) for part in parts]
    other = next(piece for piece in pieces if not piece.joins(pieces[0]))
    return f"{_described(pieces[0])} against {_described(other)}"


def _described(piece: NestedPiece) -> str:
    tensors = [
        f"{tensor.dtype} of shape {tuple(tensor.shape)}" if tensor.dim() else f"the value {tensor.item()}"
        for tensor in piece.tensors()
    ]
    return f"a {type(piece.batch).__name__} with {', '.join(tensors)}"


def _ignored(_: int | None) -> None:
    pass
