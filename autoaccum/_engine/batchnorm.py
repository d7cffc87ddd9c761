"""BatchNorm in windows cut into micro-batches: warns once about the difference, and corrects momentum on request.

A BatchNorm layer in training mode normalises by the statistics of its input, which is a micro-batch instead of the
window. No cut can preserve that. What can be preserved is how fast the running statistics decay. This module only ever
writes the layers' `momentum`, and always restores it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from autoaccum._system.notices import Notices


class BatchNorms:
    """The BatchNorm layers of a training step.

    Args:
        modules: Searched for layers.
        mode: "keep": running statistics move by the layer's momentum with every micro-batch, and so decay faster
            than with the whole batch; "rescale": over a window they decay as much as in one optimizer step.
        notices: Reports that micro-batches are normalised separately.
    """

    def __init__(self, modules: Iterable[nn.Module], mode: str, notices: Notices) -> None:
        self._modules = list(modules)
        self.rescales = mode == "rescale"
        self._notices = notices
        self._own: list[tuple[_BatchNorm, float]] = []
        self._is_announced = False
        self.search()

    def search(self) -> None:
        """Search the modules for layers again, in case they changed. Must not be called within a window."""
        parts = dict.fromkeys(part for module in self._modules for part in module.modules())
        self._layers = [part for part in parts if isinstance(part, _BatchNorm)]
        self.is_there = bool(self._layers)

    @property
    def need_several(self) -> bool:
        """Whether any layer uses batch statistics, which a single sample may not provide."""
        return any(map(_uses_batch_statistics, self._layers))

    def announce(self, sizes: Sequence[int]) -> None:
        """Report once that a cut in micro-batches of these sizes changes what BatchNorm computes, if it does."""
        if self._is_announced or len(sizes) <= 1:  # none: a rank without samples
            return
        count = sum(map(_uses_batch_statistics, self._layers))
        if not count:
            return
        self._is_announced = True
        layers = f"{count} layers in training mode normalise" if count > 1 else "1 layer in training mode normalises"
        remedy = (
            "Running statistics move as far as with one batch (batchnorm='rescale'). "
            if self.rescales
            else "batchnorm='rescale' sets right how fast running statistics move; "
        )
        found = str(max(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
        self._notices.say(
            f"BatchNorm: {layers} by each micro-batch's own mean and variance (here of {found} samples), not "
            f"by the window's, so the gradient is not quite the whole batch's. {remedy}GroupNorm, LayerNorm or frozen "
            "BatchNorm (eval() and requires_grad_(False)) give the same for every micro-batch size (docs/losses.md)",
            key="batchnorm",
        )

    def rescale(self, share: float) -> None:
        """Set the momentum for a micro-batch, a share of the window's samples, from `m` to `1 - (1 - m) ** share`.

        The old running statistics are multiplied by `(1 - m) ** share`. The shares of a window add up to 1, so together
        its micro-batches multiply them by `1 - m`, as one optimizer step with the whole batch does. Layers that average
        over all batches (momentum=None), have no running statistics or are in evaluation mode are left alone. The
        momentum holds until the next call, so that a forward pass repeated by activation checkpointing sees it too.
        """
        if not self._own:
            self._own = [
                (layer, layer.momentum)
                for layer in self._layers
                if layer.training and layer.running_mean is not None
                if layer.momentum is not None and 0.0 <= layer.momentum <= 1.0
            ]
        for layer, momentum in self._own:
            # Unchanged if the micro-batch is the window: the formula would round it.
            layer.momentum = momentum if share == 1.0 else 1.0 - (1.0 - momentum) ** share

    def restore(self) -> None:
        """Restore every layer's momentum. Call after each window, whether it completed or failed."""
        for layer, momentum in self._own:
            layer.momentum = momentum
        self._own = []


def _uses_batch_statistics(layer: _BatchNorm) -> bool:
    # Without running statistics, batch statistics are used even in evaluation mode.
    return layer.training or layer.running_mean is None
