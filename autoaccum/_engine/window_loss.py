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

import functools
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import Window, repeated
from autoaccum._data.nesting import as_leaf, copied, map_tensors, without_graphs
from autoaccum._data.random_state import RandomState
from autoaccum._data.splits import FIRST, Along
from autoaccum._engine.gradients import LossSum, PartResult
from autoaccum._engine.out_of_memory import Phase
from autoaccum._loss import reported
from autoaccum._loss.closures import used_by
from autoaccum._loss.graph_reader import nodes_of
from autoaccum._loss.known_shares import SingleMicroBatch
from autoaccum._loss.loss_sources import no_gradient
from autoaccum._loss.loss_values import is_pair
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.savepoint import SavedState
    from autoaccum._loss.loss_values import LossValue

    # Called before each micro-batch, twice in all, with its first sample and its size, and with None as the size before
    # the loss of the whole window.
    Entering = Callable[[int, int | None], None]

# Tolerance between the second forward pass and the first, relative to the first: kernels that add in another order stay
# far below, another dropout mask or other noise goes far beyond.
_SAME = 1e-2
_ITEMS = "num_items_in_batch"  # Transformers' name for the number of targets that count in a batch


class WindowLoss:
    """A loss over the whole window, for outputs that are computed part by part."""

    def __init__(self, step: GradientStep) -> None:
        loss = step.objective.calls.loss
        if loss is None or isinstance(loss, list | tuple):
            given = "no loss=" if loss is None else "a list of losses, each with a forward of its own"
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
        """Return the representations of one micro-batch that is on the device."""
        with self._step.precision.autocast():
            outputs = self._step.objective.calls.outputs(batch)
        _check_representations(outputs, samples)
        return outputs

    def join(self, parts: Sequence[Any]) -> Any:
        """Join the representations of all micro-batches as if they came from one."""
        samples = [next(len(tensor) for tensor in tensors_of(part) if tensor.dim()) for part in parts]
        return _join(parts, samples, "what the model returned for the window's micro-batches")

    def batch(self, window: Window) -> Any:
        """Return the window's batch for the loss, on the device.

        For (inputs, targets) pairs, these are the targets, with None in place of the inputs. Items of a mapping are
        joined and moved when the loss reads them. Anything else is joined and moved whole; if it cannot be joined, the
        `Window` itself is returned.
        """
        is_one = len(window.groups()) == 1
        if is_one and not window.is_plain:  # as the split joins them
            parts, samples = [window.cut(0, window.samples)], [window.samples]
        else:
            parts, samples = map(list, zip(*window.parts(0, window.samples), strict=True))
        if is_pair(parts[0]):
            return None, self._whole([part[1] for part in parts], samples, window)
        return self._whole(parts, samples, window) if is_one or isinstance(parts[0], Mapping) else window

    def _whole(self, parts: list[Any], samples: list[int], window: Window) -> Any:
        """Return parts of the window's batches as one batch on the device."""

        def placed(found: list[Any], what: str) -> Any:
            # Copies, since the loss may modify what it is given, and the window may be restarted.
            return self._step.transfer.place(copied(found[0]) if len(found) == 1 else _join(found, samples, what))

        def item(name: Any) -> Any:
            if name == _ITEMS and window.carries_numbers():
                raise InvalidInputError(
                    f"the loss reads {name!r}, which counts a batch of the loader, and the window is no such batch; "
                    "count in the loss what the window holds"
                )
            return placed([part[name] for part in parts], f"{name!r} of the window's batches, which the loss reads")

        if isinstance(parts[0], Mapping):
            return _Items([name for name in parts[0] if all(name in part for part in parts)], item)
        return placed(parts, f"the targets of the window's {len(parts)} batches")

    def values(self, outputs: Any, batch: Any, samples: int) -> list[LossValue]:
        """Return the losses of the window's representations; arguments as for `Objective.values_of`."""
        with self._step.precision.autocast():
            return self._step.objective.values_of(outputs, batch, samples)


class _Items(Mapping[Any, Any]):
    """The mappings of a window as one, of which `read` returns an item."""

    def __init__(self, names: Sequence[Any], read: Callable[[Any], Any]) -> None:
        self._names = names
        self._read = functools.cache(read)

    def __getitem__(self, name: Any) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __getattr__(self, name: str) -> Any:
        # Some mappings (a Transformers BatchEncoding) also give their items as attributes.
        if name.startswith("_") or name not in self._names:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self._read(name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class WholeWindow:
    """Accumulates the gradient of a loss over whole windows."""

    def __init__(self, step: GradientStep) -> None:
        self._step = step
        self._loss = WindowLoss(step)
        self._after_loss: SavedState | None = None
        self._after_forward: SavedState | None = None
        self._random = RandomState(step.memory.device, step.objective.modules, used_by(step.objective.calls.functions))
        # Every micro-batch runs twice on the same data, which a model may modify in place.
        step.transfer.copy_always()

    def run(
        self,
        window: Window,
        sizes: Sequence[int],
        at_start: SavedState,
        *,
        entering: Entering = lambda _, __: None,
        is_first: bool = False,
    ) -> PartResult:
        """Accumulate the gradient of the window's loss in `.grad`, scaled if there is a scaler.

        Afterwards buffers and random state are as after one pass over the micro-batches and the loss.

        Args:
            window: The samples.
            sizes: Sizes of its micro-batches. If they are fewer samples, their outputs stand for those of the others.
            at_start: The state before the window.
            entering: Follows the window.
            is_first: Whether to check that the loss reaches the model by its outputs alone, and that the second pass
                gives what the first has given.
        """
        if sizes[0] == window.samples:
            given = self._run_at_once(window, entering, is_first=is_first)
        else:
            given = self._run_twice(window, sizes, at_start, entering, is_first=is_first)
        if not self._step.holds_gradients():
            raise InvalidInputError(
                "nothing that the loss depends on has a gradient: no output of the model does; look for .detach() or "
                "torch.no_grad() in the model, and for parameters with requires_grad=False"
            )
        return given

    def _run_at_once(self, window: Window, entering: Entering, *, is_first: bool) -> PartResult:
        """Run a window that is a single micro-batch, which needs no second pass."""
        with closing(self._batches(window, [window.samples], entering, {})) as batches:
            _, size, batch = next(batches)
        outputs = self._loss.outputs(batch, size)
        if window.carries_numbers():
            batch = self._loss.batch(window)
        kept = [without_graphs(outputs)] if self._step.keeps_outputs else []
        joined = map_tensors(as_leaf, outputs)
        given = self._backward(joined, batch, size, kept, is_first=is_first)
        self._pass_on(outputs, 0, joined, compares=False)
        return given

    def _run_twice(
        self, window: Window, sizes: Sequence[int], at_start: SavedState, entering: Entering, *, is_first: bool
    ) -> PartResult:
        """Run the micro-batches forward, then the loss, then the micro-batches forward and backward."""
        savepoint = self._step.savepoint
        states: dict[int, Any] = {}
        parts = []
        with closing(self._batches(window, sizes, entering, states)) as batches:
            for start, size, batch in batches:
                # The last with a graph, so that a loss shows that reads what the model has left in an attribute.
                with torch.set_grad_enabled(is_first and start + size == window.samples):
                    # Copies: an output may be a view of a whole layer, or be overwritten by the next pass.
                    parts.append(copied(without_graphs(self._loss.outputs(batch, size))))
                del batch  # before the next comes
        self._step.stage.phase = Phase.FORWARD
        entering(window.samples, None)
        kept = list(parts) if self._step.keeps_outputs else []
        joined, is_rehearsal = self._loss.join(parts), sum(sizes) < window.samples
        if is_rehearsal:
            joined = repeated(joined, window.samples, FIRST)
        joined = map_tensors(as_leaf, joined)
        del parts
        given = self._backward(joined, self._loss.batch(window), window.samples, kept, is_first=is_first)
        self._after_loss = savepoint.save(self._after_loss, copies_all=is_first or is_rehearsal)
        at_start.restore()
        # If the user wraps everything in autocast, casts of the weights are cached. Before PyTorch's pull request
        # 165068, those made under no_grad have no graph.
        torch.clear_autocast_cache()
        with closing(self._batches(window, sizes, entering, states)) as batches:
            for start, size, batch in batches:
                outputs = self._loss.outputs(batch, size)
                self._after_forward = savepoint.save(self._after_forward, copies_all=False)
                self._pass_on(outputs, start, joined, compares=is_first)
                # Activation checkpointing repeats forward passes in backward, and updates buffers that the next pass
                # may read.
                self._after_forward.restore()
                del batch, outputs
        self._after_loss.restore()
        return given

    def _batches(
        self, window: Window, sizes: Sequence[int], entering: Entering, states: dict[int, Any]
    ) -> Generator[tuple[int, int, Any], None, None]:
        """Yield the micro-batches on the device, each with its first sample and its size.

        The random state at each is kept in `states`, by its first sample, and restored from there the second time.
        """
        start, rest = 0, window.samples - sum(sizes)
        # Where sizes are only the first of a window, the next micro-batch takes its memory all the same.
        with self._step.transfer.feed(window, [*sizes, min(sizes[0], rest)] if rest else sizes) as feed:
            for size in sizes:
                self._step.stage.phase = Phase.TRANSFER
                entering(start, size)
                batch = next(feed)
                self._step.stage.phase = Phase.FORWARD
                if start in states:
                    self._random.restore(states[start])
                else:
                    states[start] = self._random.capture()
                yield start, size, batch
                del batch
                start += size

    def _backward(self, joined: Any, batch: Any, samples: int, outputs: list[Any], *, is_first: bool) -> PartResult:
        """Compute the window's loss, and its gradient with respect to the representations."""
        # Copies, since the loss may modify them in place like a model's outputs.
        found = self._loss.values(map_tensors(Tensor.clone, joined), batch, samples)
        alone = SingleMicroBatch(self._step.objective.knowledge)
        values = {loss.name: alone.weigh(loss) for loss in found if not loss.is_reported}
        noted: dict[reported.Slot, list[Any]] = {}
        reported.note(found, samples, alone, noted)
        total = torch.stack(list(values.values())).sum() if len(values) > 1 else next(iter(values.values()))
        if not total.requires_grad:
            raise no_gradient(values)
        if is_first:
            self._refuse_other_ways(total)
        self._step.backward(total)
        losses = {name: LossSum([value.detach()]) for name, value in values.items()}
        return PartResult(samples, losses, reported=noted, outputs=outputs)

    def _refuse_other_ways(self, total: Tensor) -> None:
        """Check that the loss of detached outputs reaches no parameters of the model."""
        names = {id(parameter): name for name, parameter in self._step.objective.calls.model.named_parameters()}
        reached = [names.get(id(getattr(node, "variable", None))) for node in nodes_of(total.grad_fn)]
        if found := [name for name in reached if name is not None]:
            raise InvalidInputError(
                f"loss_scope='window' computes the loss from the model's outputs, and this loss reaches {found[0]} in "
                "another way, as by a term that forward() leaves in an attribute of the model (an auxiliary loss); let "
                "the model, or forward=, return the term among its outputs, and add it in the loss from there"
            )

    def _pass_on(self, outputs: Any, start: int, joined: Any, *, compares: bool) -> None:
        """Go backward from a micro-batch's outputs, given the window's, which have the gradient of its loss."""
        tensors, wholes = tensors_of(outputs), tensors_of(joined)
        if len(tensors) != len(wholes):
            raise _other_outputs(f"{len(tensors)} tensors instead of {len(wholes)}")
        ends, gradients = [], []
        for tensor, whole in zip(tensors, wholes, strict=True):
            rows = slice(start, start + len(tensor)) if tensor.dim() else ...
            if compares:
                _check_same(tensor.detach(), whole.detach()[rows])
            # What all micro-batches share has its gradient from the first.
            if tensor.requires_grad and whole.grad is not None and (tensor.dim() or not start):
                ends.append(tensor)
                gradients.append(whole.grad[rows])
        self._step.stage.phase = Phase.BACKWARD
        if ends:
            torch.autograd.backward(ends, gradients)


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the tensors in a model's return value, in order of nesting."""
    found: list[Tensor] = []
    map_tensors(found.append, outputs)
    return found


def _check_representations(outputs: Any, samples: int) -> None:
    tensors = tensors_of(outputs)
    wrong = [tensor for tensor in tensors if tensor.dim() and tensor.shape[0] != samples]
    if not wrong and any(tensor.dim() for tensor in tensors):
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
        "buffers, and move parameters (a momentum encoder) after the optimizer step"
    )


def _join(parts: Sequence[Any], samples: Sequence[int], what: str) -> Any:
    """Return parts of a window as one, given the samples of each."""
    # Each beside a tensor, since there may be none in it (a list of names).
    window = Window([(part, torch.empty(count, 0)) for part, count in zip(parts, samples, strict=True)], FIRST)
    if len(window.groups()) > 1:
        pieces = [span.piece for span in window.spans]
        other = next(index for index, piece in enumerate(pieces) if not piece.joins(pieces[0]))
        raise InvalidInputError(
            f"loss_scope='window' cannot join {what}: {_described(parts[0])} against {_described(parts[other])}. "
            "Samples go along the first dimension and the other sizes must agree (let the loader pad them to one "
            "length); a tensor without dimensions (logit_scale) and whatever is no tensor must be the same for all"
        )
    return window.cut(0, window.samples)[0]


def _described(part: Any) -> str:
    tensors = [
        f"{tensor.dtype} of shape {tuple(tensor.shape)}" if tensor.dim() else f"the value {tensor.item()}"
        for tensor in tensors_of(part)
    ]
    return f"a {type(part).__name__} with {', '.join(tensors)}"
