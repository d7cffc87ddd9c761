"""BatchNorm in a window that is cut: says once what differs, and on request sets its momentum right.

A BatchNorm layer in training mode normalises by the statistics of what it is given, which is a micro-batch and not the
window. No cut can keep that. What can be kept is how fast the running statistics forget. Nothing but the layers'
`momentum` is ever written here, and every value is put back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm

from autoaccum._arguments import check_choice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from autoaccum._system.notices import Notices

BATCHNORM_MODES = ("keep", "rescale")


def check_batchnorm(mode: object) -> None:
    """Check the argument `batchnorm`.

    Raises:
        InvalidInputError: It is unknown.
    """
    check_choice("batchnorm", mode, BATCHNORM_MODES)


class BatchNorms:
    """The BatchNorm layers of a training step.

    Args:
        modules: Searched for layers.
        mode: "keep": the running statistics move by the layer's momentum with every micro-batch, so that they forget
            faster than with the whole batch; "rescale": over a window they forget what one update would.
        notices: Where it is said that micro-batches are normalised one by one.

    Raises:
        InvalidInputError: The mode is unknown.

    Attributes:
        rescales: Whether the mode is "rescale".
        is_there: Whether there are such layers.
    """

    def __init__(self, modules: Iterable[nn.Module], mode: str, notices: Notices) -> None:
        check_batchnorm(mode)
        self._modules = list(modules)
        self.rescales = mode == "rescale"
        self._notices = notices
        self._has_spoken = False
        self._own: list[tuple[_BatchNorm, float]] = []
        self.search()

    def search(self) -> None:
        """Search the modules for layers, which may have changed since; not within a window."""
        parts = dict.fromkeys(part for module in self._modules for part in module.modules())
        self._layers = [part for part in parts if isinstance(part, _BatchNorm)]
        self.is_there = bool(self._layers)

    @property
    def need_several(self) -> bool:
        """Whether a layer takes its statistics of the samples at hand, of which one alone may have none."""
        return any(map(_uses_batch_statistics, self._layers))

    def announce(self, sizes: Sequence[int]) -> None:
        """Say, once, that the cut changes what BatchNorm does, if it does.

        Args:
            sizes: Sizes of the window's micro-batches.
        """
        if self._has_spoken or not self._layers or len(sizes) == 1:
            return
        count = sum(map(_uses_batch_statistics, self._layers))
        if not count:
            return
        self._has_spoken = True
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
            "BatchNorm (eval() and requires_grad_(False)) make no difference between cuts (docs/batchnorm.md)"
        )

    def rescale(self, share: float) -> None:
        """Set the momentum for a micro-batch, from `m` to `1 - (1 - m) ** share`.

        The old running statistics are multiplied by `(1 - m) ** share`; as the shares of a window add up to 1, all of
        its micro-batches together multiply them by `1 - m`, as one update with the whole batch does. Layers that
        average over all batches (momentum=None), have no running statistics or are in evaluation mode are left alone.

        Args:
            share: The micro-batch's part of the window's samples. It holds until the next call, so that a forward pass
                that activation checkpointing runs again finds it too.
        """
        if not self.rescales:
            return
        if not self._own:
            self._own = [
                (layer, layer.momentum)
                for layer in self._layers
                if layer.training and layer.running_mean is not None
                if layer.momentum is not None and 0.0 <= layer.momentum <= 1.0
            ]
        for layer, momentum in self._own:
            # As it is where the micro-batch is the window: the formula would round it.
            layer.momentum = momentum if share == 1.0 else 1.0 - (1.0 - momentum) ** share

    def put_back(self) -> None:
        """Give every layer the momentum that it had; to be called after each window, done or failed."""
        for layer, momentum in self._own:
            layer.momentum = momentum
        self._own = []


def _uses_batch_statistics(layer: _BatchNorm) -> bool:
    # Without running statistics there is nothing else to normalise by, in evaluation mode neither.
    return layer.training or layer.running_mean is None
