"""Finds layers that move on every forward pass, and so more often in a window that is cut than in a whole batch.

Spectral norm, the queue and the momentum encoder of MoCo, codebooks and other moving averages change their buffers (or
parameters without a gradient) in `forward`; others keep numbers, tensors or lists in plain attributes. No cut can
preserve that; it is reported once, with what to do. BatchNorm has a module of its own (`_engine/batchnorm.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from autoaccum import _oom
from autoaccum._engine.plain_state import PlainState
from autoaccum._metric_states import is_metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from autoaccum._snapshot import Mark
    from autoaccum._system.notices import Notices

_DOCS = "docs/moving-layers.md"
# The most modules, and buffers of each, that are named in a message.
_NAMED = 3
# The counter of normalisation layers, which only momentum=None reads.
_OF_NORMS = "num_batches_tracked"


@dataclass(frozen=True)
class _Kind:
    """A kind of layer that moves.

    Attributes:
        name: What the message calls it.
        differs: What differs from the whole batch.
        remedy: What to do about it.
    """

    name: str
    differs: str
    remedy: str


_SPECTRAL = _Kind(
    "spectral norm",
    "each makes a step of its power iteration, so micro-batches of one update meet slightly different weights",
    "for the whole batch's gradient, put them into eval mode and move them once an update, from a callback's on_step",
)
_INSTANCE = _Kind(
    "InstanceNorm",
    "running statistics forget faster; the gradient is not affected in training mode",
    "for the same speed, set its momentum m to 1 - (1 - m) ** (1 / number of micro-batches)",
)
_QUEUE = _Kind(
    "queue",
    "later micro-batches are compared with the earlier ones of their own window, and not only with earlier windows",
    "for the whole batch's gradient, let forward() collect what is to be queued, and queue it once an update, from a "
    "callback's on_step",
)
_AVERAGE = _Kind(
    "moving average or codebook",
    "it decays once for each micro-batch, and later micro-batches meet other values than the first",
    "let forward() collect the samples, and move it once an update, from a callback's on_step; or set its decay d to "
    "d ** (1 / number of micro-batches)",
)
_ENCODER = _Kind(
    "parameters that forward() itself writes (a momentum encoder)",
    "they move once for each micro-batch",
    "for the whole batch's gradient, move them once an update, from a callback's on_step; or set their momentum m to "
    "m ** (1 / number of micro-batches)",
)
_COUNTER = _Kind(
    "counters",
    "what forward() computes from them (annealing, a warm-up) runs ahead by as much",
    "count updates, from a callback's on_step, if anything depends on the count",
)
_OTHER = _Kind(
    "layers with state",
    "what they hold afterwards, and what later micro-batches compute from it, is not the whole batch's",
    "move that state once an update, from a callback's on_step, if it matters",
)


@dataclass
class _Found:
    """The layers of one kind that have moved, each with the names of what moved."""

    layers: dict[str, list[str]] = field(default_factory=dict)


class MovingLayers:
    """Reports once which layers move with every micro-batch.

    Args:
        modules: The model, and losses that are modules.
        notices: Reports them.

    Attributes:
        has_looked: Whether a window was looked at; nothing is left to do then.
    """

    def __init__(self, modules: Iterable[nn.Module], notices: Notices) -> None:
        self._modules = list(modules)
        self._notices = notices
        self.has_looked = False
        self._has_lacked = False
        self._noted: PlainState | None = None

    def note(self) -> None:
        """Note plain attributes before a micro-batch that is not the first, which may make what is kept ever after."""
        # What a metric has counted is put back, and is meant to move.
        self._noted = PlainState((path, part) for path, part in self._parts() if not is_metric(part))

    def look(self, before: Mark, at_window: Mark, sizes: Sequence[int], written: Iterable[nn.Parameter]) -> None:
        """Look at a window whose forward passes are done, and report what moved.

        Args:
            before: Taken before the last micro-batch, or before the window if that is not known.
            at_window: Taken before the window.
            sizes: Sizes of the window's micro-batches.
            written: Parameters that the model itself writes in its forward pass.

        Raises:
            torch.OutOfMemoryError: Memory ran out for the first time.
        """
        if self.has_looked or len(sizes) < 2:  # noqa: PLR2004 - several
            return
        try:
            found = self._find(before, at_window, sizes[-1])
        except Exception as error:
            # At first, the caller frees memory, and tells that it ran out; after that, a later window has another look.
            if not _oom.is_oom(error) or not self._has_lacked:
                self._has_lacked = True
                raise
            _oom.let_go(error)
            return
        self.has_looked = True
        self._name_parameters(found, written)
        self._name_attributes(found)
        for kind, layers in found.items():
            self._say(kind, layers.layers, len(sizes))

    def _find(self, before: Mark, at_window: Mark, size: int) -> dict[_Kind, _Found]:
        parts = self._parts()
        empty = at_window.empty_ones()
        found: dict[_Kind, _Found] = {}
        for number, changes in before.changes().items():
            path, part = parts[number]
            # What is empty before each window collects its samples, as the remedies say.
            moved = {name: pair for name, pair in changes.items() if (number, name) not in empty}
            if isinstance(part, _BatchNorm) or not moved.keys() - {_OF_NORMS}:
                continue
            are_counts = all(_is_count(*pair, size) for pair in moved.values())
            found.setdefault(_COUNTER if are_counts else _kind_of(part, moved), _Found()).layers[path] = list(moved)
        return found

    def _parts(self) -> list[tuple[str, nn.Module]]:
        return [
            (_path(number, name, module), part)
            for number, module in enumerate(self._modules)
            for name, part in module.named_modules()
        ]

    def _name_attributes(self, found: dict[_Kind, _Found]) -> None:
        changed = [] if self._noted is None else self._noted.changed()
        self._noted = None
        for path, part, names in changed:
            are_counts = all(isinstance(getattr(part, name, None), int) for name in names)
            layers = found.setdefault(_COUNTER if are_counts else _kind_of(part, names), _Found()).layers
            layers[path] = [*layers.get(path, ()), *names]

    def _name_parameters(self, found: dict[_Kind, _Found], written: Iterable[nn.Parameter]) -> None:
        frozen = {parameter for parameter in written if not parameter.requires_grad}
        for number, module in enumerate(self._modules):
            for name, part in module.named_modules():
                own = [key for key, value in part.named_parameters(recurse=False) if value in frozen]
                if own:
                    found.setdefault(_ENCODER, _Found()).layers[_path(number, name, module)] = own

    def _say(self, kind: _Kind, layers: dict[str, list[str]], times: int) -> None:
        shown = [f"{path} ({_listed(names)})" for path, names in list(layers.items())[:_NAMED]]
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        self._notices.say(
            f"{kind.name}: {', '.join(shown)}{more} moved in every forward pass, {times} times in this update instead "
            f"of once: {kind.differs}. {kind.remedy[0].upper()}{kind.remedy[1:]} ({_DOCS})",
            key=kind.name,
        )


def _path(number: int, name: str, module: nn.Module) -> str:
    if number == 0:
        return name or type(module).__name__
    return f"{type(module).__name__}.{name}" if name else type(module).__name__


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _kind_of(part: nn.Module, moved: Iterable[str]) -> _Kind:
    hooks = part._forward_pre_hooks.values()
    if isinstance(part, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks):
        return _SPECTRAL
    if isinstance(part, _InstanceNorm):
        return _INSTANCE
    names = " ".join(moved).lower()
    if any(word in names for word in ("queue", "bank")):
        return _QUEUE
    if any(word in names for word in ("ema", "avg", "average", "momentum", "codebook", "cluster", "embed", "running")):
        return _AVERAGE
    return _OTHER


def _is_count(before: Tensor | None, now: Tensor | None, size: int) -> bool:
    """Whether a buffer only counts forward passes or samples."""
    if before is None or now is None or now.numel() != 1 or before.numel() != 1:
        return False
    return float(now) - float(before) in (1.0, float(size))
