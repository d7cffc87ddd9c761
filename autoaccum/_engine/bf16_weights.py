"""Keeps a model's large weights in bf16, and updates them in float32: rounded stochastically, or on a master copy.

During an optimizer's step a weight is float32, the master or the weight itself made wide, so that any optimizer
computes as for a model in float32. Afterwards it is rounded into the memory where it was. Gradients are float32
throughout (`Tensor.grad_dtype`), so that those of a window's micro-batches are added without losing digits.

The rounding draws from generators of its own, seeded by the number of the update, which the optimizer's first group
keeps: ranks round alike, a repeated step rounds as the first, a resumed run as the undisturbed one, and nobody else's
random numbers move.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from autoaccum._arguments import check_choice
from autoaccum._engine.eight_bit_adam import AdamW8bit
from autoaccum._engine.optimizer_list import OptimizerList, name_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# By stochastic rounding, or with an fp32 master.
BF16, BF16_MASTER = "bf16", "bf16-master"
WEIGHTS = (BF16, BF16_MASTER)
# Where an optimizer keeps what belongs to the weights: in each parameter's state, and in its first group.
MASTER = "master"
UPDATES = "bf16_updates"
# Smaller ones (biases, scales of norms) take little memory, and kernels of norms want them in float32.
_LEAST_DIMENSIONS = 2
# Weights that are wide at the same time, and numbers drawn at once: 64 and 16 MiB. The kernels of a card are busy with
# fewer, and one weight at a time would take a step of the optimizer each.
_WIDE_AT_ONCE = 1 << 24
_DRAWN_AT_ONCE = 1 << 22
# A bf16 number is the upper half of a float32 number.
_LOWER_HALF = 1 << 16


def check_weights(weights: str | None, precision: str) -> None:
    """Check the argument `weights`, and that it goes with the precision.

    Raises:
        InvalidInputError: It does not, or this PyTorch cannot keep gradients in another type than weights.
    """
    if weights is None:
        return
    check_choice("weights", weights, WEIGHTS)
    if precision not in ("auto", "bf16"):
        raise InvalidInputError(
            f"weights={weights!r} computes with bf16 weights, and precision={precision!r} in another type; pass "
            "precision='bf16' or leave it out"
        )
    if not hasattr(Tensor, "grad_dtype"):
        raise InvalidInputError(
            f"weights={weights!r} adds gradients of bf16 weights in float32, which requires PyTorch 2.10 or later, and "
            f"this is {torch.version.__version__}; install a newer one, or leave weights= out"
        )


def gradient_type(parameter: Tensor) -> torch.dtype:
    """Return the type of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


class Bf16Weights:
    """Converts the weights of modules, and steps an optimizer over them.

    Args:
        name: One of `WEIGHTS`.
        modules: The model, and losses that are modules. Parameters of float32 with two or more dimensions become bf16,
            in place, except for those of recurrent layers, whose kernels want one type for all, and of sparse
            embeddings.
        optimizer: Holds parameters of theirs.

    Attributes:
        name: As above.

    Raises:
        InvalidInputError: There is no such parameter, one is fp16, or the optimizer's update cannot be made one
            parameter at a time.
    """

    def __init__(self, name: str, modules: Iterable[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.name = name
        self._converted = _chosen(modules, name)
        self._check(optimizer)
        self._widths = [parameter.dtype for parameter in self._converted]
        narrow, lost = self._narrowed()
        self._lost: list[Tensor | None] | None = lost
        originals = [parameter.detach().float() for parameter in self._converted]
        for parameter, values in zip(self._converted, narrow, strict=True):
            parameter.data = values
            parameter.grad_dtype = torch.float32
        self.begin(optimizer, dict(zip(self._converted, originals, strict=True)))

    def _narrowed(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the parameters in bf16, and what that loses of each; None where a master keeps it."""
        narrow: list[Tensor] = []
        lost: list[Tensor | None] = []
        for parameter in self._converted:
            is_kept = self.name == BF16_MASTER or parameter.dtype is torch.bfloat16
            values, lower = (parameter.detach().bfloat16(), None) if is_kept else rounded(parameter.detach())
            narrow.append(values)
            lost.append(lower)
        return narrow, lost

    def begin(self, optimizer: torch.optim.Optimizer, originals: dict[nn.Parameter, Tensor] | None = None) -> None:
        """Prepare an optimizer.

        Args:
            optimizer: The optimizer.
            originals: The weights before they were rounded.

        Raises:
            InvalidInputError: As for the constructor.
        """
        self._check(optimizer)
        if self.name == BF16:
            optimizer.param_groups[0].setdefault(UPDATES, 0)
            return
        for parameter in _held(optimizer):
            if parameter.dtype is torch.bfloat16 and MASTER not in optimizer.state[parameter]:
                wide = (originals or {}).get(parameter)
                optimizer.state[parameter][MASTER] = parameter.detach().float() if wide is None else wide

    def end(self) -> None:
        """Let gradients have the type of their weights again."""
        for parameter in self._converted:
            parameter.grad = None
            parameter.grad_dtype = parameter.dtype

    def widen(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the conversion, bit for bit, where no update was made."""
        lost = self._lost or [None] * len(self._converted)
        for parameter, width, lower in zip(self._converted, self._widths, lost, strict=True):
            master = optimizer.state[parameter].pop(MASTER, None) if parameter in optimizer.state else None
            if master is not None:
                parameter.data = master.to(width)
            else:
                parameter.data = parameter.detach().to(width) if lower is None else unrounded(parameter.detach(), lower)
            if parameter in optimizer.state and not optimizer.state[parameter]:
                del optimizer.state[parameter]
        if not optimizer.param_groups[0].get(UPDATES, 1):
            del optimizer.param_groups[0][UPDATES]
        self.end()

    def forget_originals(self) -> None:
        """Let go of what `widen` needs, once an update is made."""
        self._lost = None

    def has_state(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has state of its own, beside masters."""
        return any(values.keys() - {MASTER} for values in optimizer.state.values())

    def step(self, optimizer: torch.optim.Optimizer, run: Callable[[], object], *, at_once: bool) -> None:
        """Step an optimizer with its weights in float32, then round them.

        Args:
            optimizer: The optimizer.
            run: Steps it.
            at_once: Whether `run` may be called only once, since hooks are called by it.
        """
        held = [parameter for parameter in _held(optimizer) if parameter.grad is not None]
        narrow = [parameter for parameter in held if parameter.dtype is torch.bfloat16]
        if self.name == BF16_MASTER:
            self._update(optimizer, narrow, run, None)
            return
        optimizer.param_groups[0][UPDATES] += 1
        update = optimizer.param_groups[0][UPDATES]
        parts = [narrow] if at_once else list(_parts(narrow))
        others = [parameter for parameter in held if parameter.dtype is not torch.bfloat16]
        with torch.no_grad(), _Narrowed(optimizer) as groups:
            for number, part in enumerate(parts or [[]]):
                groups.hold({*part, *(others if number == 0 else ())})
                self._update(optimizer, part, run, (update << 24) + number)

    def _update(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], run: Callable[[], object], seed: Any
    ) -> None:
        """Step with some parameters wide, and round them: stochastically with a seed, to the nearest without."""
        narrow = [parameter.detach() for parameter in parameters]
        masters = [optimizer.state[parameter].pop(MASTER, None) for parameter in parameters]
        try:
            # What an update needs is there before anything is written.
            wide = [
                values.float() if master is None else master for values, master in zip(narrow, masters, strict=True)
            ]
            for parameter, values in zip(parameters, wide, strict=True):
                parameter.data = values
                if parameter.grad is not None and parameter.grad.dtype is not torch.float32:
                    parameter.grad = parameter.grad.float()  # of a parameter that came later
            run()
            with torch.no_grad():
                generator = None
                for values, result in zip(narrow, wide, strict=True):
                    if seed is None:
                        values.copy_(result)
                        continue
                    if generator is None:
                        generator = self.generator(values.device, seed)
                    round_stochastically(result, values, generator)
            if self.name == BF16_MASTER:
                masters = wide
        finally:
            for parameter, values, master in zip(parameters, narrow, masters, strict=True):
                parameter.data = values
                if master is not None:
                    optimizer.state[parameter][MASTER] = master

    def generator(self, device: torch.device, seed: int) -> torch.Generator:
        """Return what rounding on a device draws from."""
        return torch.Generator(device=device).manual_seed(seed)

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        if self.name == BF16 and not all(map(_goes_by_parameter, _parts_of(optimizer))):
            raise InvalidInputError(
                f"weights={BF16!r} updates a few parameters at a time, as optimizers of torch.optim and 'adamw8bit' "
                f"allow, and {name_of(optimizer)} is not known to; pass weights={BF16_MASTER!r}, or one of those"
            )


def round_stochastically(wide: Tensor, into: Tensor, generator: torch.Generator) -> None:
    """Round float32 numbers to one of their two bf16 neighbours, such that their expected value stays the same.

    Args:
        wide: The numbers, which are overwritten.
        into: Where they are rounded to.
        generator: Says which neighbour: the farther, the less often.
    """
    bits = wide.view(torch.int32)
    flat = bits.view(-1) if bits.is_contiguous() else bits
    for part in torch.split(flat, _DRAWN_AT_ONCE) if flat.dim() == 1 else (flat,):
        drawn = torch.empty_like(part).random_(0, _LOWER_HALF, generator=generator)
        part.add_(drawn).bitwise_and_(-_LOWER_HALF)
    into.copy_(wide)


def rounded(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 numbers rounded to the nearest bf16 numbers, and their lower halves, in host memory.

    Two bf16 numbers may be as near; the one nearer to 0 is taken, so that `unrounded` knows which it was.
    """
    values, bits = wide.bfloat16(), wide.view(torch.int32)
    lower = bits.bitwise_and(_LOWER_HALF - 1)
    values.view(torch.int16).copy_(
        torch.where(lower == _LOWER_HALF // 2, bits.bitwise_right_shift(16).to(torch.int16), values.view(torch.int16))
    )
    return values, (lower - _LOWER_HALF // 2).to(torch.int16).cpu()


def unrounded(values: Tensor, lost: Tensor) -> Tensor:
    """Return the numbers that `rounded` rounded; NaN of a payload is NaN.

    Args:
        values: The bf16 numbers.
        lost: The lower halves.
    """
    lower = lost.to(values.device, torch.int32)  # above 0 is above the middle, which was rounded away from 0
    upper = values.view(torch.int16).to(torch.int32) - (lower > 0).to(torch.int32)
    return (upper.bitwise_left_shift(16) + lower + _LOWER_HALF // 2).view(torch.float32)


class _Narrowed:
    """A context in which an optimizer holds only some of its parameters.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._every = [group["params"] for group in self._groups]

    def __enter__(self) -> Self:
        return self

    def hold(self, parameters: set[nn.Parameter]) -> None:
        """Let it hold these."""
        for group, every in zip(self._groups, self._every, strict=True):
            group["params"] = [parameter for parameter in every if parameter in parameters]

    def __exit__(self, *_: object) -> None:
        for group, every in zip(self._groups, self._every, strict=True):
            group["params"] = every


def _chosen(modules: Iterable[nn.Module], name: str) -> list[nn.Parameter]:
    """Return the parameters to keep in bf16, those that are already included.

    Raises:
        InvalidInputError: There is none, or one is fp16.
    """
    modules = list(modules)
    every = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
    if any(parameter.dtype is torch.float16 for parameter in every):
        raise InvalidInputError(
            f"weights={name!r} keeps weights in bf16, and the model has some in fp16; call model.float() before"
        )
    kept = {
        parameter
        for module in modules
        for part in module.modules()
        if isinstance(part, nn.RNNBase) or getattr(part, "sparse", False) is True
        for parameter in part.parameters(recurse=False)
    }
    found = [
        parameter
        for parameter in every
        if parameter.dtype is torch.bfloat16
        or (parameter.dtype is torch.float32 and parameter.dim() >= _LEAST_DIMENSIONS and parameter not in kept)
    ]
    if not found:
        raise InvalidInputError(
            f"weights={name!r} keeps weights of two or more dimensions in bf16, and the model has none in float32 "
            "outside of recurrent layers and sparse embeddings; leave it out"
        )
    return found


def _parts(parameters: Sequence[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    """Yield parameters in parts that are not too large, in order."""
    part: list[nn.Parameter] = []
    for parameter in parameters:
        if part and sum(one.numel() for one in part) + parameter.numel() > _WIDE_AT_ONCE:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part


def _parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    return optimizer.parts if isinstance(optimizer, OptimizerList) else [optimizer]


def _goes_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer updates each parameter regardless of the others."""
    kind = type(optimizer)
    return kind is AdamW8bit or (kind.__module__.startswith("torch.optim.") and kind is not torch.optim.SparseAdam)


def _held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
