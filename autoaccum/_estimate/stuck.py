"""Tells why a step cannot be traced on fake tensors, where a real step can answer instead.

Comes in: the exception that the trace ended with. Goes out: a reason for the user, or None for an error that a real
step would raise as well.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from autoaccum._estimate.card_properties import UnknownOfCardError
from autoaccum._estimate.fake import NoFakesError
from autoaccum._oom import first_line

_UNFORMED = "; register one with torch.library.register_fake"
# What messages name that come of a missing driver; they differ by build and machine. The last is autograd's engine,
# which needs the driver's context if a model calls torch.autograd.grad.
_OF_DRIVER = ("CUDA", "NVIDIA", "hasPrimaryContext")


def why_stuck(error: Exception) -> str | None:
    """Return why the step could not be traced on fakes; None for other errors."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return f"the model branches on values, with {error.func}"
    if isinstance(error, UnsupportedOperatorException):
        return f"the operator {error.func} has no fake implementation{_UNFORMED}"
    if isinstance(error, UnknownOfCardError | NoFakesError):
        return str(error)
    return _why_by_message(error, str(error))


def _why_by_message(error: Exception, text: str) -> str | None:
    """Return the reason for errors that only their messages tell from others."""
    if isinstance(error, RuntimeError) and "no fake impl" in text:  # custom operators of torch.library
        return f"a custom operator has no fake implementation ({first_line(error)}){_UNFORMED}"
    if isinstance(error, RuntimeError) and ".numpy() is not supported" in text:
        return "the model reads values, with .numpy()"
    asks = any(name in text for name in _OF_DRIVER)
    if isinstance(error, RuntimeError | AssertionError) and not torch.cuda.is_available() and asks:
        return f"an operator needs a CUDA driver, and there is none here ({first_line(error)})"
    return None
