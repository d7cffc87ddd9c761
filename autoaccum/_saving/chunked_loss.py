"""Cross entropy of what a head makes, a few tokens at a time, so that the logits of all are never there together."""

from __future__ import annotations

import functools
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoaccum._arguments import check_choice, shown
from autoaccum.errors import InvalidInputError, SavingRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

# The most tokens computed at once: more take more memory, and are no faster (benchmarks/results/chunked_loss.json).
CHUNK = 1024
# Fewer tokens than four chunks are computed in four parts, but of no fewer than these: kernels become small, and the
# head's weight is read for each.
_LEAST, _PARTS = 256, 4
REDUCTIONS = ("mean", "sum", "none")
_IDS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class ChunkedLoss(nn.Module):
    """`nn.CrossEntropyLoss` of a head's logits that are never there together: at most 1,024 tokens at a time.

        loss = autoaccum.ChunkedLoss(model.lm_head)
        loss(hidden, labels)  # nn.CrossEntropyLoss()(model.lm_head(hidden).flatten(0, -2), labels.flatten())

    The logits are computed once more in the backward pass. The loss is in float32 at least. What is kept for the
    backward pass is the hidden states alone.

    Args:
        head: Makes logits, shape (..., classes), of hidden states, shape (..., features), for each token by itself. It
            may be a part of the model, tied or not.
        weight: As for `nn.CrossEntropyLoss`, shape (classes,).
        ignore_index: Likewise.
        reduction: Likewise; "none" gives the losses in the shape of the labels.
        label_smoothing: Likewise.

    Raises:
        InvalidInputError: An argument cannot be used.
    """

    def __init__(
        self,
        head: nn.Module,
        *,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        if not isinstance(head, nn.Module):
            raise InvalidInputError(
                f"ChunkedLoss({shown(head)}): pass the module that makes logits of hidden states, as model.lm_head"
            )
        check_choice("reduction", reduction, REDUCTIONS)
        if weight is not None and not (isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 1):
            raise InvalidInputError(
                f"weight={shown(weight)} is no weight for each class; pass a tensor of floating-point numbers, shape "
                "(classes,)"
            )
        if type(ignore_index) is not int or not -(2**63) <= ignore_index < 2**63:
            raise InvalidInputError(
                f"ignore_index={shown(ignore_index)} is no class; pass a whole number, such as -100"
            )
        if type(label_smoothing) not in (int, float) or not 0 <= label_smoothing <= 1:
            raise InvalidInputError(f"label_smoothing={shown(label_smoothing)} must be a number from 0 to 1")
        self.head = head
        self.weight: Tensor | None
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the loss.

        Args:
            hidden: The head's inputs, shape (..., features).
            labels: The class of each token, shape (...).

        Raises:
            InvalidInputError: The shapes do not agree, or the labels are no classes.
        """
        return chunked_cross_entropy(
            self.head,
            self.head,
            hidden,
            labels,
            asked="a loss in chunks",
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )

    def log_probs(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probability of a class for each token; `weight`, `reduction` and smoothing do not count.

            loss.log_probs(hidden, ids)  # head(hidden).log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)

        Args:
            hidden: The head's inputs, shape (..., features), in the head's type or under autocast.
            ids: The class of each token, integers of shape (...). Where it is `ignore_index`, 0 is returned.

        Returns:
            Shape (...), in float32 at least, with gradients unless under `torch.no_grad`. Waits for the device once.

        Raises:
            InvalidInputError: The shapes or the types do not agree, or an id is no class.
        """
        given = [(one.dtype, tuple(one.shape)) if isinstance(one, Tensor) else shown(one) for one in (hidden, ids)]
        are_tensors = isinstance(hidden, Tensor) and isinstance(ids, Tensor)
        if not are_tensors or ids.dtype not in _IDS or not hidden.dim() or ids.shape != hidden.shape[:-1]:
            raise InvalidInputError(
                f"log_probs takes the head's inputs, shape (..., features), and the class of each token, integers of "
                f"shape (...), and got {given[0]} and {given[1]}"
            )
        check_head(self.head, hidden)
        checked = range_check(ids.where(ids != self.ignore_index, 0))
        return -chunked_cross_entropy(
            lambda rows: checked(self.head(rows)),
            self.head,
            hidden,
            ids,
            asked="log-probabilities in chunks",
            ignore_index=self.ignore_index,
            reduction="none",
        )


def chunked_cross_entropy(
    make: Callable[[Tensor], Tensor],
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    asked: str,
    held: Held | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the cross entropy as `ChunkedLoss` does, of logits that `make` makes of some tokens.

    The layer `head` does so with the parameters in `held`, by default its own. `asked` names this in errors.
    """
    held = held or Held(head)
    if labels.is_floating_point() or labels.shape != hidden.shape[:-1]:
        raise InvalidInputError(
            f"a loss in chunks takes the class of each token, as integers of shape {tuple(hidden.shape[:-1])}, and the "
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; pass other labels, or use nn.CrossEntropyLoss"
        )
    held.check(head, asked)
    weight = None if weight is None else weight.to(hidden.device, copy=True)  # it may change before the backward pass
    rows, classes = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    counts = classes != ignore_index

    def losses_of(rows: Tensor, classes: Tensor) -> tuple[Tensor]:
        held.check(head, asked)
        logits = make(rows)
        losses = functional.cross_entropy(
            logits if logits.dtype is torch.float64 else logits.float(),
            classes,
            weight=weight,
            ignore_index=ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        )
        return (losses,)

    (losses,) = in_chunks(losses_of, rows, classes)
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    if weight is not None:
        return losses.sum() / (weight.to(losses)[classes.where(counts, 0)] * counts).sum()
    # The mean of those that count, as cross entropy itself computes it: micro-batches are weighted as with that.
    return functional.nll_loss(-losses.unsqueeze(1), torch.where(counts, 0, -100))


def in_chunks(compute: Callable[..., tuple[Tensor, ...]], *by_token: Tensor) -> tuple[Tensor, ...]:
    """Return what `compute` makes of tensors of the same tokens, shape (tokens, ...), a chunk at a time.

    For a gradient, each chunk is computed once more in the backward pass.
    """
    size = min(CHUNK, max(-(-len(by_token[0]) // _PARTS), _LEAST))
    some = functools.partial(checkpoint, compute, use_reentrant=False) if torch.is_grad_enabled() else compute
    chunks = zip(*(torch.split(one, size) for one in by_token), strict=True)
    return tuple(map(torch.cat, zip(*(some(*chunk) for chunk in chunks), strict=True)))


class Held:
    """A head's parameters and buffers, and other tensors, which must be the same until the last chunk is computed."""

    def __init__(self, head: nn.Module, *others: Tensor) -> None:
        self._parameters = list(head.parameters())
        self._tensors = (*self._parameters, *head.buffers(), *others)
        self._states = self._now()

    def _now(self) -> list[tuple[int, bool]]:
        return [(0 if one.is_inference() else one._version, one.requires_grad) for one in self._tensors]

    def check(self, head: nn.Module, asked: str) -> None:
        """Refuse other parameters, other values, and those that are frozen or trained since."""
        is_other = not all(map(is_, head.parameters(), self._parameters))
        if is_other or self._now() != self._states:
            why = "torch.func.functional_call puts them in for a call alone" if is_other else "changed in place"
            is_trained = [trained for _, trained in self._now()] == [trained for _, trained in self._states]
            why = why if is_trained else "frozen or trained since, as by another adapter"
            raise SavingRefusedError(
                f"{asked}: the head has other parameters or hidden states where its logits are computed than where it "
                f"was called ({why}); compute the loss of whole logits"
            )


def check_head(head: Any, hidden: Tensor) -> None:
    """Refuse hidden states of another width or type than a linear head's."""
    if type(head) is not nn.Linear or head._forward_pre_hooks:
        return
    is_cast = torch.is_autocast_enabled(hidden.device.type) and hidden.is_floating_point()
    if hidden.shape[-1:] != (head.in_features,) or (hidden.dtype is not head.weight.dtype and not is_cast):
        raise InvalidInputError(
            f"hidden states of shape {tuple(hidden.shape)} in {hidden.dtype} for a head of {head.in_features:,} "
            f"features in {head.weight.dtype}; pass the head's inputs, (..., features), in its type or under autocast"
        )


def range_check(ids: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what refuses logits that lack a class of `ids`, and returns others; waits for the device once."""
    is_unknown = isinstance(ids, FakeTensor) or not ids.numel()
    least, most = (0, -1) if is_unknown else torch.stack(torch.aminmax(ids)).tolist()

    def checked(logits: Tensor) -> Tensor:
        if least < 0 or most >= logits.shape[-1]:
            raise InvalidInputError(
                f"ids from {least} to {most} for logits of {logits.shape[-1]:,} classes; pass ids from 0 to "
                f"{logits.shape[-1] - 1}: clamp ids of padding, and leave out their log-probabilities by a mask"
            )
        return logits

    return checked
