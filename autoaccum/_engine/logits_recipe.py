"""Knows how logits come about that are not computed yet: a call of the head, and what is done to each token's since.

What is computed later is what would have been computed at once: without a gradient where there was to be none, in the
autocast of that time, and of the same hidden states. Where that cannot be had any more, it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoaccum._engine.fused_loss import sum_of_losses
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

Step = Callable[[Tensor], Tensor]


class HeadCall:
    """A call of the layer that makes logits.

    Args:
        layer: The layer.
        forward: Its own forward.
        hidden: Its inputs, shape (..., D).
        classes: V, the number of classes.
        size: Tokens computed at once.
        say: Reports what is computed whole after all.

    Attributes:
        is_single: Whether all tokens are computed at once, so that computing them again would save nothing.
        is_linear: Whether it is a product and nothing else, which draws no random numbers.
        has_gradients: Whether gradients may flow into the layer.
        computed_in: The type in which the layer computes.
    """

    def __init__(
        self,
        layer: nn.Module,
        forward: Callable[[Tensor], Tensor],
        hidden: Tensor,
        *,
        classes: int,
        size: int,
        say: Callable[[str], None],
    ) -> None:
        kind = hidden.device.type
        self.classes, self.size, self.say = classes, size, say
        self.is_single = hidden.numel() // max(hidden.shape[-1], 1) <= size
        self.is_linear = isinstance(layer, nn.Linear) and getattr(forward, "__func__", None) is nn.Linear.forward
        self.computed_in = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        self._layer, self._forward = layer, forward
        # Weights may be computed (torch.nn.utils.parametrize), or put in for this call (torch.func.functional_call).
        self._product = (layer.weight, layer.bias) if self.is_linear and isinstance(layer, nn.Linear) else None
        held = self._product if self._product is not None else self._state()
        self._held = [(tensor, _changes_of(tensor)) for tensor in held if tensor is not None]
        self.has_gradients = any(tensor.requires_grad for tensor, _ in self._held)
        self._hidden = None if self.is_linear else hidden
        self._drawn: list[tuple[int, int]] = []

    def _state(self) -> tuple[Tensor, ...]:
        return (*self._layer.parameters(), *self._layer.buffers())

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states, shape (..., V), as the layer would have made them when it was called.

        Raises:
            SavingRefusedError: Its weights or buffers are others now.
        """
        self._check()
        if self._product is not None:
            return functional.linear(hidden, *self._product)
        found = self._forward(hidden)
        self._check()
        return found

    def _check(self) -> None:
        is_other = self._product is None and any(
            tensor is not held for tensor, (held, _) in zip(self._state(), self._held, strict=True)
        )
        if is_other or any(_changes_of(held) != changes for held, changes in self._held):
            raise SavingRefusedError(
                "memory='chunked_loss': the layer that makes the logits has other weights or buffers than when it was "
                "called (it changes its buffers, or they were changed or put in for that call alone), and the logits "
                "are computed later; leave 'chunked_loss' out"
            )

    def fused(self, hidden: Tensor, classes: Tensor, ignore_index: int) -> Tensor | None:
        """Return the sum of the cross entropies by a kernel; None where none computes what the layer does.

        Args:
            hidden: Hidden states, shape (N, D).
            classes: The class of each, shape (N,).
            ignore_index: The class whose tokens do not count.
        """
        # Fake tensors are for the prediction, which knows chunks.
        is_real = type(hidden) is Tensor and torch.is_grad_enabled()
        if self._product is None or self.is_single or not is_real:
            return None
        self._check()
        return sum_of_losses(*self._product, hidden, classes, ignore_index, self.computed_in)

    @contextmanager
    def read(self, hidden: Tensor) -> Iterator[None]:
        """Compute the logits of some hidden states within the block, once where they are drawn.

        Raises:
            SavingRefusedError: They have been drawn before, and would not be the same.
        """
        # Fake tensors are for predictions.
        if self.is_linear or type(hidden) is not Tensor:
            yield
            return
        place = self._place(hidden)
        if any(place[0] < end and start < place[1] for start, end in self._drawn):
            raise SavingRefusedError(
                "memory='chunked_loss': the loss reads the same logits twice, and the layer that makes them draws "
                "random numbers (Dropout), so that they would be others; set its dropout to 0, or leave "
                "'chunked_loss' out"
            )
        before = _random_state(hidden.device)
        yield
        if any(not torch.equal(now, then) for now, then in zip(_random_state(hidden.device), before, strict=True)):
            self._drawn.append(place)

    def _place(self, hidden: Tensor) -> tuple[int, int]:
        """Return where hidden states lie in memory, from and to; that of all where they are copies of some."""
        assert self._hidden is not None
        is_part = hidden.untyped_storage().data_ptr() == self._hidden.untyped_storage().data_ptr()
        part = hidden if is_part else self._hidden
        extent = 1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
        return part.data_ptr(), part.data_ptr() + extent * part.element_size()


def _random_state(device: torch.device) -> list[Tensor]:
    on_host = [torch.get_rng_state()]
    return on_host if device.type == "cpu" else [*on_host, torch.get_device_module(device).get_rng_state(device)]


@dataclass(frozen=True, slots=True)
class _Autocast:
    """How autocast was set for a kind of device."""

    kind: str
    is_enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, kind: str) -> _Autocast:
        return cls(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    def again(self) -> AbstractContextManager[Any]:
        """Set it as it was, for a block."""
        if _Autocast.now(self.kind) == self:
            return nullcontext()
        return torch.autocast(self.kind, dtype=self.dtype, enabled=self.is_enabled)


@dataclass(slots=True)
class _Elements:
    """What views of the same logits share: how often it has been changed in place."""

    changes: int = 0


@dataclass(frozen=True, slots=True)
class Recipe:
    """How logits come about.

    Attributes:
        head: The call of the head.
        hidden: Its inputs of these tokens, shape (..., D).
        make: Makes logits, shape (..., V), of such inputs, each token by itself.
        has_parameters: Whether gradients may flow into the head.
        steps: What is done to the logits of each token, in order.
        is_plain: Whether those only cast them to a type of as many digits or more.
        dtype: The type of the elements after that.
        is_turned: Whether classes are the second dimension, of (N, V, T), and not the last.
    """

    head: HeadCall
    hidden: Tensor
    make: Step
    has_parameters: bool
    dtype: torch.dtype
    steps: tuple[Step, ...] = ()
    is_plain: bool = True
    is_turned: bool = False
    _hidden_changes: int = 0
    _elements: _Elements = field(default_factory=_Elements)
    _changes: int = 0

    @classmethod
    def of(cls, head: HeadCall, hidden: Tensor) -> Recipe:
        """Return the recipe of what a head makes of hidden states."""
        autocast = _Autocast.now(hidden.device.type)
        return cls(
            head,
            hidden,
            functools.partial(_as_then, autocast, head.logits),
            has_parameters=head.has_gradients,
            dtype=head.computed_in,
            _hidden_changes=_changes_of(hidden),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        *leading, _ = self.hidden.shape
        return (leading[0], self.head.classes, leading[1]) if self.is_turned else (*leading, self.head.classes)

    @property
    def class_dim(self) -> int:
        """The dimension of the classes."""
        return 1 if self.is_turned else len(self.shape) - 1

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows through the logits."""
        return self.hidden.requires_grad or self.has_parameters

    # --- others, made of this one -------------------------------------------------------------------------------------

    def with_step(self, step: Step, by: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Recipe:
        """Return the recipe after a further step.

        Args:
            step: Takes logits with classes last.
            by: A tensor that it takes, too.
            dtype: The type of what it returns; None for that of before.
        """
        if by is not None:
            step = unchanged(step, by)
        return replace(
            self,
            steps=(*self.steps, functools.partial(_as_then, _Autocast.now(self.hidden.device.type), step)),
            is_plain=False,
            dtype=dtype or self.dtype,
            has_parameters=self.has_parameters or (by is not None and by.requires_grad),
            _elements=_Elements(),
            _changes=0,
        )

    def cast(self, dtype: torch.dtype) -> Recipe:
        """Return the recipe of the logits in another type."""
        is_plain = self.is_plain and torch.finfo(dtype).eps <= torch.finfo(self.dtype).eps
        return replace(self.with_step(lambda values: values.to(dtype), dtype=dtype), is_plain=is_plain)

    def with_hidden(self, hidden: Tensor) -> Recipe:
        """Return the recipe of the logits of some of the tokens, or of the same in another shape."""
        return replace(self, hidden=hidden, _hidden_changes=_changes_of(hidden))

    def turned(self) -> Recipe:
        """Return the recipe with the last two of three dimensions exchanged."""
        return replace(self, is_turned=not self.is_turned)

    def without_grad(self) -> Recipe:
        """Return the recipe of logits that were made where no gradient is recorded."""
        return replace(
            self,
            hidden=self.hidden.detach(),
            make=functools.partial(_without_grad, self.make, self.steps),
            steps=(),
            has_parameters=False,
            is_plain=False,
        )

    def in_place_of(self, changed: Recipe) -> Recipe:
        """Return this recipe for the elements of another, which are changed to it; other views of those are stale."""
        changed._elements.changes += 1
        return replace(self, _elements=changed._elements, _changes=changed._elements.changes)

    def check(self) -> None:
        """Check that the logits can still be computed as they were.

        Raises:
            SavingRefusedError: Something was changed in place since.
        """
        if self._changes != self._elements.changes:
            raise SavingRefusedError(
                "memory='chunked_loss': the loss reads logits that were changed in place by way of another view of "
                "them; write it without changing them, as in logits = logits / temperature"
            )
        if self._hidden_changes != _changes_of(self.hidden):
            raise SavingRefusedError(
                "memory='chunked_loss': the model changes the inputs of the layer that makes its logits in place after "
                "it has called that layer, and the logits are computed later; write it without changing them"
            )

    # --- results ------------------------------------------------------------------------------------------------------

    def computed(self, hidden: Tensor) -> Tensor:
        """Return the logits of some hidden states, with classes last."""
        found = self.make(hidden)
        for step in self.steps:
            found = step(found)
        return found

    def whole(self) -> Tensor:
        """Return all of the logits."""
        with self.head.read(self.hidden):
            found = self.computed(self.hidden)
        return found.transpose(1, 2) if self.is_turned else found

    def by_tokens(self, answer: Callable[..., Tensor], *beside: Tensor) -> list[Tensor]:
        """Return what is asked of the logits, a few tokens at a time.

        Args:
            answer: Takes logits, shape (n, V), and as many of what is beside them; it is called again in the backward
                pass.
            beside: What belongs to each token, with the tokens first.
        """
        split = [torch.split(each, self.head.size) for each in (self._flat(), *beside)]
        with self.head.read(self.hidden):
            return [self._of_few(answer, *few) for few in zip(*split, strict=True)]

    def _flat(self) -> Tensor:
        return self.hidden.reshape(-1, self.hidden.shape[-1])

    def _of_few(self, answer: Callable[..., Tensor], hidden: Tensor, *beside: Tensor) -> Tensor:
        def run(hidden: Tensor, *beside: Tensor) -> Tensor:
            return answer(self.computed(hidden), *beside)

        if self.head.is_single or not torch.is_grad_enabled() or not self.requires_grad:
            return run(hidden, *beside)
        draws = not self.head.is_linear
        found: Tensor = checkpoint(run, hidden, *beside, use_reentrant=False, preserve_rng_state=draws)
        return found

    def fused(self, classes: Tensor, ignore_index: int) -> Tensor | None:
        """Return the sum of the cross entropies by a kernel; None where none computes what this recipe does."""
        found = self.head.fused(self._flat(), classes, ignore_index) if self.is_plain else None
        return None if found is None else found.to(torch.promote_types(self.dtype, torch.float32))


def _changes_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _as_then(autocast: _Autocast, step: Step, values: Tensor) -> Tensor:
    with autocast.again():
        return step(values)


def unchanged(function: Callable[..., Tensor], *tensors: Tensor) -> Callable[..., Tensor]:
    """Return a function that refuses to run once tensors that it takes are changed in place."""
    changes = list(map(_changes_of, tensors))

    def checked(*arguments: Tensor) -> Tensor:
        if list(map(_changes_of, tensors)) != changes:
            raise SavingRefusedError(
                "memory='chunked_loss': a tensor that the loss takes beside logits (a temperature, class weights) was "
                "changed in place before they were computed; write it without changing it"
            )
        return function(*arguments)

    return checked


def _without_grad(make: Step, steps: tuple[Step, ...], hidden: Tensor) -> Tensor:
    with torch.no_grad():
        found = make(hidden)
        for step in steps:
            found = step(found)
        return found
