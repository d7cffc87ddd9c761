"""Faults: modes in which an operator fails or is interrupted, and what a step may leave behind, to be compared."""

import ast
import functools
import hashlib
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FailAt(TorchDispatchMode):
    """Raises torch's out-of-memory error, or another, at given operators, counted from 1; counts them all.

    Args:
        points: The operators at which it raises.
        error: What it raises; None makes a new out-of-memory error each time.

    Attributes:
        count: Operators so far.
        hits: How often it has raised.
        where: Name of the operator at which it raised last.
    """

    def __init__(self, *points, error=None):
        super().__init__()
        self.points = set(points)
        self.error = error
        self.count = self.hits = 0
        self.where = ""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        if self.count in self.points:
            self.hits += 1
            self.where = str(operator)
            self.fail()
        return operator(*args, **(kwargs or {}))

    def fail(self):
        raise self.error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (injected)")


class InterruptAt(FailAt):
    """Delivers a signal at given operators, which run all the same if its handler lets them."""

    def fail(self):
        signal.raise_signal(signal.SIGINT)


@functools.cache
def _out_of_reach(filename):
    """The lines of a file between which and the one before no signal comes, or cannot be made to come by tracing.

    Tracing stops once more between the end of a block and the exit of its context, and at a bare `try`, where no signal
    can come. And since Python 3.12, which runs comprehensions in the frame around them, what a trace function raises in
    one passes by the contexts around it; what anything else raises there does not.
    """
    lines = set()
    for node in ast.walk(ast.parse(Path(filename).read_text())):
        if isinstance(node, ast.With):
            lines.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.Try):
            lines.add(node.lineno)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp) and sys.version_info >= (3, 12):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


class InterruptAtLine:
    """Delivers a signal before the n-th line of a package that runs; counts them all.

    Args:
        package: Its name.
        point: The line, counted from 1; 0 for none.
    """

    def __init__(self, package, point=0):
        self.point = point
        self.count = self.hits = 0
        self.where = ""
        self._part = f"{os.sep}{package}{os.sep}"

    def __enter__(self):
        self._tracer = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_):
        sys.settrace(self._tracer)

    def _enter_frame(self, frame, event, argument):
        return self._count if self._part in frame.f_code.co_filename else None

    def _count(self, frame, event, argument):
        if event == "line" and frame.f_lineno not in _out_of_reach(frame.f_code.co_filename):
            self.count += 1
            if self.count == self.point:
                self.hits += 1
                self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"  # noqa: PTH119
                signal.raise_signal(signal.SIGINT)
        return self._count


def state_of(model, optimizer, scaler=None):
    """Everything that a step may leave behind, to be compared bit for bit."""
    state = {f"model.{name}": _value(tensor) for name, tensor in model.state_dict().items()}
    for number, parameter in enumerate(model.parameters()):
        for name, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{number}.{name}"] = _value(value)
    state["optimizer holds"] = len(optimizer.state)
    state["gradients"] = tuple(parameter.grad is None for parameter in model.parameters())
    state["hooks"] = tuple(bool(p._backward_hooks or p._post_accumulate_grad_hooks) for p in model.parameters())
    state["groups"] = repr([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])
    state["modes"] = tuple(module.training for module in model.modules())
    own = [v for module in model.modules() for v in vars(module).values() if isinstance(v, torch.Generator)]
    generators = [_value(state) for state in (torch.get_rng_state(), *(generator.get_state() for generator in own))]
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global generator, which models draw from
    state["random"] = (generators, random.getstate(), (name, keys.tobytes(), *rest))
    if scaler is not None:
        state["scaler"] = (scaler.state_dict(), [repr(stage) for stage in scaler._per_optimizer_states.values()])
    return state


def differences(one, other):
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _value(value):
    if not isinstance(value, torch.Tensor):
        return repr(value)
    flat = value.detach().cpu().contiguous().view(-1)
    return str(value.dtype), tuple(value.shape), _digest(flat.view(torch.uint8).numpy() if flat.numel() else b"")


def _digest(values):
    # Not the bytes themselves: where memory is about to run out, they would have to be allocated.
    return hashlib.blake2b(values).digest()
