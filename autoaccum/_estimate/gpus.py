"""Looks up GPUs by name: the memory of each, and how much of it a process can use (`gpus.csv`).

Nothing is guessed: a name that matches several GPUs raises an error that lists them, an unknown name one with the
nearest.

What CUDA takes for a process outside PyTorch's allocator is the difference in messages of torch.OutOfMemoryError
between "in use" and "allocated" plus "reserved but unallocated", rounded up. Architectures without a message of their
own count as the next one:
- some 300 MiB with lazy loading on Volta: https://github.com/pytorch/pytorch/issues/107667
- 440 on Ada: https://github.com/DINGYANB/MTVCrafter/issues/21
- 677 on Hopper: https://github.com/ali-vilab/VACE/issues/56
- 501 on an A100: https://github.com/TianheWu/CoSeR/issues/10
- 503 on an RTX 4090: https://github.com/3DTopia/Phidias-Diffusion/issues/8
- on the RTX 3060 and 4060 at most what the fullest of xMem's runs left
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass, replace
from importlib import resources

from autoaccum._arguments import shown
from autoaccum._memory.limits import parse_size
from autoaccum.errors import InvalidInputError

_MIB = 2**20
# For a GPU that is not listed: the most that CUDA takes on one that is.
_MOST_CONTEXT_MIB = 704
# Ampere, which introduced bfloat16 and TF32.
_AMPERE = (8, 0)
_SUGGESTED = 3


@dataclass(frozen=True, slots=True)
class GPU:
    """One kind of device.

    Attributes:
        name: Its name in the table, such as "h100-80gb".
        total_bytes: Its memory, as `torch.cuda.get_device_properties` reports it.
        context_bytes: The part that CUDA itself uses for each process.
        capability: Its compute capability; for a GPU that is not in the table, the lowest with bfloat16.
        source: The origin of its memory.
        display_bytes: The part that a display uses.
    """

    name: str
    total_bytes: int
    context_bytes: int
    capability: tuple[int, int]
    source: str
    display_bytes: int = 0

    @property
    def bf16(self) -> bool:
        """Whether it supports bfloat16, and computes float32 with Tensor Cores (TF32)."""
        return self.capability >= _AMPERE

    @property
    def free_bytes(self) -> int:
        """The memory that a process alone on the GPU can reserve."""
        return self.total_bytes - self.context_bytes - self.display_bytes


def known_gpus() -> tuple[GPU, ...]:
    """Return every GPU of the table, older architectures first."""
    return tuple(_GPUS.values())


def gpu_named(name: str) -> GPU:
    """Return the GPU of this name, ignoring case, spaces, dashes and underscores.

    Raises:
        InvalidInputError: No GPU matches, or several do.
    """
    if not isinstance(name, str):
        raise InvalidInputError(f"gpus: {shown(name)} is not the name of a GPU; pass one such as 'h100-80gb'")
    asked = _plain(name)
    if asked in _BY_NAME:
        return _BY_NAME[asked]
    several = [gpu.name for key, gpu in _GPUS.items() if asked and key.startswith(asked)]
    if len(several) > 1:
        raise InvalidInputError(f"gpus: {name!r} matches several GPUs: {', '.join(several)}; name one of them")
    near = difflib.get_close_matches(asked, list(_BY_NAME), n=2 * _SUGGESTED, cutoff=0.5)
    names = list(dict.fromkeys(_BY_NAME[key].name for key in near))[:_SUGGESTED]
    nearest = f"nearest: {', '.join(names)}" if names else f"known: {', '.join(gpu.name for gpu in known_gpus())}"
    raise InvalidInputError(
        f"gpus: the GPU {shown(name)} is unknown ({nearest}); for other GPUs pass device_memory='24GiB'"
    )


def is_known(name: object) -> bool:
    """Whether this is the name of one GPU."""
    return isinstance(name, str) and _plain(name) in _BY_NAME


def custom_gpu(device_memory: str) -> GPU:
    """Return a GPU that is not in the table.

    Args:
        device_memory: Its total memory, such as "24GiB", including the part that CUDA uses.

    Raises:
        InvalidInputError: The text is not a size, or not more than CUDA itself uses.
    """
    total, context = parse_size(device_memory, name="device_memory"), _MOST_CONTEXT_MIB * _MIB
    if total <= context:
        raise InvalidInputError(
            f"device_memory={device_memory!r} is too small: CUDA itself uses up to {context // _MIB} MiB; pass more"
        )
    return GPU(f"device of {device_memory.strip()}", total, context, _AMPERE, "device_memory")


def with_display(gpu: GPU, display: str) -> GPU:
    """Return a GPU of whose memory a display uses a part, such as "600MiB".

    Raises:
        InvalidInputError: The text is not a size, or leaves nothing.
    """
    taken = parse_size(display, name="display")
    if taken >= gpu.free_bytes:
        raise InvalidInputError(
            f"display={display!r} leaves nothing of {gpu.name}, of which {gpu.free_bytes // _MIB} MiB are free; pass "
            "less"
        )
    return replace(gpu, display_bytes=taken)


def _plain(name: str) -> str:
    plain = re.sub(r"[\s_-]+", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla|quadro)?", "", plain)


def _read() -> tuple[dict[str, GPU], dict[str, GPU]]:
    """Return the GPUs of the table, by their names and by their other names."""
    gpus: dict[str, GPU] = {}
    others: dict[str, GPU] = {}
    text = resources.files("autoaccum._estimate").joinpath("gpus.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        major, _, minor = row["capability"].partition(".")
        total, context = int(row["total_bytes"]), int(row["context_mib"]) * _MIB
        gpu = GPU(row["name"], total, context, (int(major), int(minor)), row["source"])
        gpus[_plain(gpu.name)] = gpu
        others |= {_plain(name): gpu for name in row["other_names"].split()}
    return gpus, others


_GPUS, _OTHERS = _read()
_BY_NAME = _GPUS | _OTHERS
