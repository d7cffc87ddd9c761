"""Runs operators on fake tensors; from the second time on the same forms, only makes their results.

PyTorch's fakes look results up by forms too, but take several times as long.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autoaccum._memory._storages import key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Recipe = Callable[[Sequence[FakeTensor]], Any]

_aten = torch.ops.aten
_SEQUENCES = (tuple, list)
_PLAIN = frozenset(
    (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)  # fmt: skip


class QuickFakes:
    """The results of operators, by the forms of their arguments."""

    def __init__(self) -> None:
        self._recipes: dict[Any, Recipe | None] = {}

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return an operator's results."""
        given: list[FakeTensor] = []
        form = _form((args, *kwargs.items()), given)
        if form is None or not given:
            return func(*args, **kwargs)
        key = func, form
        recipe = self._recipes.get(key)
        if recipe is not None:
            return recipe(given)
        storages = list(map(_storage_of, given))
        rule = _RULES.get(func)
        result = None if rule is None else rule(*args)
        if result is None:
            result = func(*args, **kwargs)
        if key not in self._recipes:
            # An operator that changes the form or the storage of its arguments runs every time.
            is_pure = form == _form((args, *kwargs.items()), []) and storages == list(map(_storage_of, given))
            self._recipes[key] = _recipe(result, given) if is_pure else None
        return result


def _storage_of(tensor: Tensor) -> int:
    return key_of(tensor.untyped_storage())


def _form(value: Any, given: list[FakeTensor]) -> Any:
    """Return what results depend on, and collect the tensors; None if there is more to it."""
    kind = type(value)
    if kind is FakeTensor:
        if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
            return None
        given.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if kind in _SEQUENCES:
        forms = []
        for item in value:
            form = _form(item, given)
            if form is None:
                return None
            forms.append(form)
        return tuple(forms)
    return (kind, value) if kind in _PLAIN else None


def _recipe(value: Any, given: Sequence[FakeTensor]) -> Recipe | None:
    """Return what makes an operator's results of its tensors; None if their forms are not enough."""
    if type(value) in _SEQUENCES:
        several = [_recipe(one, given) for one in value]
        kind, made = type(value), [recipe for recipe in several if recipe is not None]
        storages = [_storage_of(one) for one in value if isinstance(one, Tensor)]
        is_apart = len(set(storages)) == len(storages) or set(storages) <= set(map(_storage_of, given))
        return (lambda given: kind(recipe(given) for recipe in made)) if len(made) == len(value) and is_apart else None
    if type(value) in _PLAIN:
        return lambda _: value
    form = _form(value, []) if type(value) is FakeTensor else None
    if form is None or value.fake_mode is not given[0].fake_mode:
        return None
    return _recipe_of_tensor(value, form, given)


def _recipe_of_tensor(value: FakeTensor, form: Any, given: Sequence[FakeTensor]) -> Recipe | None:
    shape, stride, offset, dtype, device = form
    mode = value.fake_mode
    itself = next((number for number, one in enumerate(given) if one is value), None)
    base = next((number for number, one in enumerate(given) if _storage_of(one) == _storage_of(value)), None)
    if itself is not None:
        return itemgetter(itself)
    if base is not None:
        return lambda given: _view(given[base], mode, form)
    if offset or value.untyped_storage().nbytes() != _bytes_of(value):
        return None

    def fresh(_: Sequence[FakeTensor]) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(mode, made, device)

    return fresh


def _view(base: FakeTensor, mode: Any, form: Any) -> FakeTensor:
    shape, stride, offset, dtype, device = form
    storage = base.untyped_storage()
    with torch._C._DisableTorchDispatch():
        made = torch.empty(0, dtype=dtype, device="meta").set_(storage, offset, shape, stride)
    return FakeTensor(mode, made, device)


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor that has its storage to itself."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _batch_norm(source: Tensor, *others: Any) -> tuple[Tensor, ...] | None:
    """Return normalised values and the statistics kept for backward, which PyTorch's fake decomposes for long."""
    training = others[4]
    if not training:
        return None
    # On a GPU, statistics of half-precision inputs are in float32.
    is_half = source.dtype in (torch.float16, torch.bfloat16) and source.device.type != "cpu"
    dtype = torch.float32 if is_half else source.dtype
    return torch.empty_like(source), *(source.new_empty(source.shape[1], dtype=dtype) for _ in range(2))


def _batch_norm_backward(_: Tensor, source: Tensor, weight: Any, *others: Any) -> tuple[Tensor | None, ...] | None:
    *_, training, _eps, mask = others
    if not training or weight is None:
        return None
    alike = source, weight, weight
    return tuple(torch.empty_like(one) if is_asked else None for one, is_asked in zip(alike, mask, strict=True))


def _grid_sampler(source: Tensor, grid: Tensor) -> Tensor:
    made: Tensor = source.new_empty(*source.shape[:2], *grid.shape[1:3])
    return made


def _grid_sampler_backward(source: Tensor, grid: Tensor, _gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(source), torch.empty_like(grid)


# Where PyTorch's fakes take long; it has none of cuDNN's grid sampler.
_RULES: dict[Any, Callable[..., Any]] = {
    _aten.native_batch_norm.default: _batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
    _aten.cudnn_grid_sampler.default: _grid_sampler,
    _aten.cudnn_grid_sampler_backward.default: _grid_sampler_backward,
}
