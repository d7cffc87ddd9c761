"""A device of any size, for tests and dry runs: storages are counted exactly and the real exception is raised.

A dispatch mode sees every operation that PyTorch runs, those of the backward pass on the CPU included. What an
operation returns in a storage of its own counts from then on; a view counts nothing; a storage stops counting when it
dies. So peaks are exact and the same in every run. What kernels take and give back within one operation is not seen:
an estimate of a real device needs more than this.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import TYPE_CHECKING, Any, override

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoaccum.errors import InvalidInputError
from autoaccum.memory.base import MemoryBackend
from autoaccum.memory.limits import format_bytes, parse_limit
from autoaccum.records import MemoryReading

if TYPE_CHECKING:
    from collections.abc import Iterator
