"""Answers a model's questions about the GPU for which its step is traced: capability, name, memory, bf16.

Models choose kernels by such answers (Transformers' mixtures of experts by the capability), on a machine that has no
driver or another GPU. What the table of GPUs does not know raises an error that says so.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._estimate.own_thread import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from autoaccum._estimate.gpus import GPU

# The capability that stands for all GPUs with or without TF32, if none is named.
_OF_ANY = {True: (8, 0), False: (7, 0)}


class UnknownOfGPUError(RuntimeError):
    """A model asked for a property of the GPU that is not in the table."""


def properties_of(gpu: GPU) -> Mapping[str, object]:
    """Return what is known of a GPU, by the names of `torch.cuda.get_device_properties`."""
    return _of_capability(gpu.capability) | {"name": gpu.name, "total_memory": gpu.total_bytes}


def _of_capability(capability: tuple[int, int]) -> dict[str, object]:
    return {"major": capability[0], "minor": capability[1], "is_integrated": 0, "is_multi_gpu_board": 0}


class GPUAnswers:
    """What `torch.cuda` says of one GPU; its properties are attributes.

    Args:
        gpu: The GPU; None for the one at hand, or any with or without TF32.
        tensor_float: Without a GPU, whether it computes float32 with Tensor Cores.

    Attributes:
        answered: The properties that were asked for, and the answers. A trace holds for GPUs that answer the same.
    """

    def __init__(self, gpu: GPU | None = None, *, tensor_float: bool = True) -> None:
        self._is_at_hand = gpu is None and torch.cuda.is_available()
        self._known = _of_capability(_OF_ANY[tensor_float]) if gpu is None else properties_of(gpu)
        self.answered: dict[str, object] = {}

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let `torch.cuda` answer as this GPU while entered."""
        if self._is_at_hand:
            yield
            return
        with (
            replaced(torch.cuda, "get_device_properties", lambda *_, **__: self),
            replaced(torch.cuda, "is_bf16_supported", self._is_bf16_supported),
            replaced(torch.cuda, "current_device", lambda: 0),
        ):
            yield

    def __getattr__(self, name: str) -> Any:
        """Return a property of the GPU.

        Raises:
            UnknownOfGPUError: It is not among those known without the GPU.
        """
        if name.startswith("_"):  # what copy and pickle look for
            raise AttributeError(name)
        if name not in self._known:
            raise UnknownOfGPUError(
                f"the model asks for the GPU's {name!r}, and without the GPU only {', '.join(self._known)} are known"
            )
        self.answered[name] = self._known[name]
        return self._known[name]

    def _is_bf16_supported(self, including_emulation: bool = True) -> bool:
        # Every GPU stores bfloat16, which PyTorch calls emulation. `torch.autocast` asks for it too, which is no
        # question of the model's.
        return including_emulation or bool(self.major >= _OF_ANY[True][0])
