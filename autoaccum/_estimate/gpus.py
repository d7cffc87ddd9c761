"""Looks up cards by name: the memory of each, and how much of it a process can use.

Nothing is guessed: a name that matches several cards raises an error that lists them, an unknown name one with the
nearest.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from autoaccum._arguments import shown
from autoaccum._memory.limits import parse_size
from autoaccum.errors import InvalidInputError

_MIB, _GIB = 2**20, 2**30

# The share of nvidia-smi's memory (or of the nominal memory, if only that is known) that PyTorch reports: the lowest
# among the cards below for which both are known, the T4's 14.56 GiB of 15360 MiB.
_USABLE_SHARE = 0.97
_SMI = "https://github.com/modal-labs/modal-client/pull/2797"
_XMEM = "https://github.com/Stone-ResearchLife/xMem/tree/main/plot/data"
_SPECS = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"

# CUDA's memory for a process outside PyTorch's allocator, in MiB, by architecture: the difference in messages of
# torch.OutOfMemoryError between "in use" and "allocated" plus "reserved but unallocated", rounded up. It grows with the
# kernels loaded.
_CONTEXT_MIB = {
    "pascal": 320,  # as volta: no message of its own was found
    "volta": 320,  # "~300MB" with lazy loading: https://github.com/pytorch/pytorch/issues/107667
    "turing": 320,  # as volta; 135 in https://github.com/Zheng-Chong/CatVTON/issues/133
    "ampere": 448,  # as ada: no message of its own was found
    "ada": 448,  # 440: https://github.com/DINGYANB/MTVCrafter/issues/21
    "hopper": 704,  # 677: https://github.com/ali-vilab/VACE/issues/56
    "blackwell": 704,  # as hopper: no message of its own was found
}
# Where a message of the card itself gives more than its architecture has above. Of three from RTX 4090s the largest is
# 503 MiB (https://github.com/3DTopia/Phidias-Diffusion/issues/8); an A100 took 501
# (https://github.com/TianheWu/CoSeR/issues/10).
_CONTEXT_OF_CARD_MIB = {"rtx-4090": 512, "a100-40gb": 512, "a100-80gb": 512}
# Memory of an RTX 4090 that was neither free nor used by a process of CUDA: the message above, and
# https://github.com/pinokiofactory/flux-webui/issues/11.
DISPLAY_MIB = (368, 897)
_WITHOUT_BF16 = ("pascal", "volta", "turing")
# Compute capabilities by architecture, and the cards that differ: https://developer.nvidia.com/cuda-gpus
_CAPABILITY = {
    "pascal": (6, 0),
    "volta": (7, 0),
    "turing": (7, 5),
    "ampere": (8, 6),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
}
_CAPABILITY_OF_CARD = {"a30": (8, 0), "a100-40gb": (8, 0), "a100-80gb": (8, 0), "rtx-5090": (12, 0)}
_SUGGESTED = 3


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of device.

    Attributes:
        name: Its name in this table, such as "h100-80gb".
        total_bytes: Its memory, as `torch.cuda.get_device_properties` reports it.
        context_bytes: The part that CUDA itself uses for each process.
        bf16: Whether it supports bfloat16.
        source: The origin of the numbers.
        basis: How `total_bytes` is known: read from a card, or derived from its nominal size.
        display_bytes: The part that a display uses.
        capability: Its compute capability; for a card that is not in the table, the lowest with its types.
    """

    name: str
    total_bytes: int
    context_bytes: int
    bf16: bool
    source: str
    basis: str = ""
    display_bytes: int = 0
    capability: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        """Fill in the capability where it is unknown."""
        if self.capability == (0, 0):
            object.__setattr__(self, "capability", (8, 0) if self.bf16 else (7, 0))

    @property
    def has_outputs(self) -> bool:
        """Whether it is made for workstations, where a display may use a part of its memory."""
        return self.name.startswith(("rtx", "titan"))

    @property
    def tensor_float(self) -> bool:
        """Whether it computes float32 with Tensor Cores (TF32), introduced together with bfloat16."""
        return self.bf16

    @property
    def free_bytes(self) -> int:
        """The memory that a process alone on the card can reserve."""
        return self.total_bytes - self.context_bytes - self.display_bytes


def known_cards() -> tuple[Card, ...]:
    """Return every card of the table, older architectures first."""
    return tuple(_CARDS.values())


def card_named(name: str) -> Card:
    """Return the card of this name, ignoring case, spaces, dashes and underscores.

    Raises:
        InvalidInputError: No card matches, or several do.
    """
    if not isinstance(name, str):
        raise InvalidInputError(f"gpus: {shown(name)} is not the name of a card; pass one such as 'h100-80gb'")
    asked = _plain(name)
    if asked in _BY_NAME:
        return _BY_NAME[asked]
    several = [card.name for key, card in _CARDS.items() if asked and key.startswith(asked)]
    if len(several) > 1:
        raise InvalidInputError(f"gpus: {name!r} matches several cards: {', '.join(several)}; name one of them")
    near = difflib.get_close_matches(asked, list(_BY_NAME), n=2 * _SUGGESTED, cutoff=0.5)
    names = list(dict.fromkeys(_BY_NAME[key].name for key in near))[:_SUGGESTED]
    nearest = f"nearest: {', '.join(names)}" if names else f"known: {', '.join(card.name for card in known_cards())}"
    raise InvalidInputError(
        f"gpus: the card {shown(name)} is unknown ({nearest}); for other cards pass --device-memory, such as 24GiB"
    )


def custom_card(device_memory: str) -> Card:
    """Return a card that is not in the table.

    Args:
        device_memory: Its total memory, such as "24GiB", including the part that CUDA uses.

    Raises:
        InvalidInputError: The text is not a size, or not more than CUDA itself uses.
    """
    total, context = parse_size(device_memory, name="device_memory"), max(_CONTEXT_MIB.values()) * _MIB
    if total <= context:
        raise InvalidInputError(
            f"device_memory={device_memory!r} is too small: CUDA itself uses up to {context // _MIB} MiB; pass more"
        )
    return Card(
        f"device of {device_memory.strip()}", total, context, bf16=True, source="--device-memory", basis="given"
    )


def display_bytes(display: int | str) -> int:
    """Return the memory that a display uses, given in bytes or as "600MiB".

    Raises:
        InvalidInputError: It is no size.
    """
    if isinstance(display, bool) or not isinstance(display, int | str) or (isinstance(display, int) and display < 0):
        raise InvalidInputError(f"display={shown(display)} must be bytes, or a size such as '600MiB'")
    return display if isinstance(display, int) else parse_size(display, name="display")


def with_display(card: Card, display: int | str) -> Card:
    """Return a card of whose memory a display uses a part.

    Args:
        card: The card.
        display: The part, in bytes or as "600MiB".

    Raises:
        InvalidInputError: It is no size, or leaves nothing for training.
    """
    taken = display_bytes(display)
    if taken >= card.free_bytes:
        raise InvalidInputError(
            f"display={shown(display)} leaves nothing of {card.name}, of which {card.free_bytes // _MIB} MiB are free "
            "beside CUDA; pass less"
        )
    return replace(card, display_bytes=taken)


def _plain(name: str) -> str:
    plain = re.sub(r"[\s_-]+", "", name.lower())
    return re.sub(r"^(nvidia)?(geforce|tesla|quadro)?", "", plain)


def _card(
    name: str, architecture: str, total_bytes: float, page: str, basis: str, context_mib: int | None = None
) -> Card:
    return Card(
        name,
        int(total_bytes),
        (context_mib or _CONTEXT_OF_CARD_MIB.get(name) or _CONTEXT_MIB[architecture]) * _MIB,
        bf16=architecture not in _WITHOUT_BF16,
        source=page if page.startswith("https") else f"https://www.nvidia.com/en-us/{page}",
        basis=basis,
        capability=_CAPABILITY_OF_CARD.get(name, _CAPABILITY[architecture]),
    )


def _read(
    name: str, architecture: str, total_bytes: int, page: str, where: str, context_mib: int | None = None
) -> Card:
    """A card whose memory was read from its driver, in bytes."""
    left = "" if context_mib is None else f"; CUDA uses at most the {context_mib} MiB left by the fullest run there"
    return _card(name, architecture, total_bytes, page, f"read from a card: {where}{left}", context_mib)


def _told(name: str, architecture: str, total_gib: float, page: str, where: str) -> Card:
    """A card whose memory is known to 0.01 GiB from a message of PyTorch."""
    return _card(name, architecture, total_gib * _GIB, page, f"from a torch.OutOfMemoryError: {where}")


def _shown(name: str, architecture: str, shown_mib: int, page: str, where: str) -> Card:
    """A card for which only the memory shown by nvidia-smi is known."""
    basis = f"derived: {_USABLE_SHARE:.0%} of the {shown_mib} MiB of nvidia-smi ({where})"
    return _card(name, architecture, _USABLE_SHARE * shown_mib * _MIB, page, basis)


def _sold(name: str, architecture: str, sold_gib: int, page: str, *, loses_ecc: bool = False) -> Card:
    """A card for which only the nominal size is known.

    Data-centre cards with GDDR6 store error-correcting codes in a sixteenth of it (the T4 shows 15360 of 16384 MiB);
    HBM stores them separately.
    """
    without = " less a sixteenth for ECC" if loses_ecc else ""
    basis = f"derived: {_USABLE_SHARE:.0%} of the nominal {sold_gib} GiB{without}"
    return _card(name, architecture, _USABLE_SHARE * sold_gib * (15 / 16 if loses_ecc else 1) * _GIB, page, basis)


_TABLE = (
    _read("p100-16gb", "pascal", 17066885120, "data-center/tesla-p100/", f"{_SPECS}/p100.txtpb"),
    _read("v100-16gb", "volta", 16935682048, "data-center/v100/", f"{_SPECS}/v100.txtpb"),
    _told("v100-32gb", "volta", 31.74, "data-center/v100/", "https://github.com/liucongg/ChatGLM-Finetuning/issues/73"),
    _told("t4", "turing", 14.56, "data-center/tesla-t4/", "https://github.com/Zheng-Chong/CatVTON/issues/133"),
    _sold("rtx-2080-ti", "turing", 11, "geforce/graphics-cards/rtx-2080-ti/"),
    _sold("titan-rtx", "turing", 24, "deep-learning-ai/products/titan-rtx/"),
    _sold("a2", "ampere", 16, "data-center/products/a2/", loses_ecc=True),
    _shown("a10", "ampere", 23028, "data-center/products/a10-gpu/", _SMI),
    _sold("a10g", "ampere", 24, "https://aws.amazon.com/ec2/instance-types/g5/", loses_ecc=True),
    _told(
        "a30",
        "ampere",
        23.53,
        "data-center/products/a30-gpu/",
        "https://github.com/google/RB-Modulation/issues/5",
    ),
    _shown("a40", "ampere", 46068, "data-center/a40/", "https://github.com/sgl-project/sglang/issues/1522"),
    _read("a100-40gb", "ampere", 42298834944, "data-center/a100/", f"{_SPECS}/a100_sxm_40.txtpb"),
    _read("a100-80gb", "ampere", 85100068864, "data-center/a100/", f"{_SPECS}/a100_sxm_80.txtpb"),
    # CUDA uses at most what the fullest run left free: one had 11606 of 12037 MiB.
    _read("rtx-3060", "ampere", 12622168064, "geforce/graphics-cards/30-series/rtx-3060-3060ti/", _XMEM, 431),
    _sold("rtx-3080", "ampere", 10, "geforce/graphics-cards/30-series/rtx-3080-3080ti/"),
    _told(
        "rtx-3090",
        "ampere",
        23.69,
        "geforce/graphics-cards/30-series/rtx-3090-3090ti/",
        "https://github.com/AIFSH/ComfyUI-ChatTTS/issues/9",
    ),
    _read("rtx-a6000", "ampere", 51041271808, "design-visualization/rtx-a6000/", f"{_SPECS}/a6000.txtpb"),
    _shown("l4", "ada", 23034, "data-center/l4/", _SMI),
    _shown("l40s", "ada", 46068, "data-center/l40s/", _SMI),
    # Likewise: one had 7826 of 7932 MiB.
    _read("rtx-4060", "ada", 8318222336, "geforce/graphics-cards/40-series/rtx-4060-4060ti/", _XMEM, 107),
    _sold("rtx-4080", "ada", 16, "geforce/graphics-cards/40-series/rtx-4080-family/"),
    _told(
        "rtx-4090",
        "ada",
        23.61,  # 23.64 and 23.65 in others; the smallest counts
        "geforce/graphics-cards/40-series/rtx-4090/",
        "https://github.com/pinokiofactory/flux-webui/issues/11",
    ),
    _told(
        "rtx-6000-ada",
        "ada",
        44.43,
        "design-visualization/rtx-6000/",
        "https://github.com/DINGYANB/MTVCrafter/issues/21 (with ECC)",
    ),
    _read("h100-80gb", "hopper", 84942979072, "data-center/h100/", f"{_SPECS}/h100_sxm.txtpb"),
    _read("h100-pcie-80gb", "hopper", 84942979072, "data-center/h100/", f"{_SPECS}/h100_pcie.txtpb"),
    _told("h100-nvl-94gb", "hopper", 93.0, "data-center/h100/", "https://github.com/ali-vilab/VACE/issues/56"),
    _sold("gh200-96gb", "hopper", 96, "data-center/grace-hopper-superchip/"),
    # 141 GB are 131 GiB, yet nvidia-smi shows 140 and PyTorch 139.8, so its GB are GiB.
    _sold("h200-141gb", "hopper", 141, "data-center/h200/"),
    _read("b200-180gb", "blackwell", 191514411008, "data-center/dgx-b200/", f"{_SPECS}/b200.txtpb"),
    _read(
        "rtx-5090",
        "blackwell",
        33677180928,
        "geforce/graphics-cards/50-series/rtx-5090/",
        "https://github.com/aikitoria/open-gpu-kernel-modules/issues/1",
    ),
)
_CARDS = {_plain(card.name): card for card in _TABLE}
# The driver's names, and short names that mean one card.
_ALIASES = {
    "h100-sxm": "h100-80gb",
    "h100-sxm-80gb": "h100-80gb",
    "h100-80gb-hbm3": "h100-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "h100-nvl": "h100-nvl-94gb",
    "h200": "h200-141gb",
    "h200-sxm": "h200-141gb",
    "gh200": "gh200-96gb",
    "b200": "b200-180gb",
    "p100": "p100-16gb",
    "p100-pcie-16gb": "p100-16gb",
    "p100-sxm2-16gb": "p100-16gb",
    "v100-sxm2-16gb": "v100-16gb",
    "v100-pcie-16gb": "v100-16gb",
    "v100-sxm2-32gb": "v100-32gb",
    "v100-pcie-32gb": "v100-32gb",
    "a100-sxm4-40gb": "a100-40gb",
    "a100-pcie-40gb": "a100-40gb",
    "a100-sxm4-80gb": "a100-80gb",
    "a100-pcie-80gb": "a100-80gb",
    "a100-80gb-pcie": "a100-80gb",
    "a6000": "rtx-a6000",
    "rtx-6000-ada-generation": "rtx-6000-ada",
    "2080-ti": "rtx-2080-ti",
    "3060": "rtx-3060",
    "3080": "rtx-3080",
    "3090": "rtx-3090",
    "4060": "rtx-4060",
    "4080": "rtx-4080",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}
_BY_NAME = _CARDS | {_plain(alias): _CARDS[_plain(name)] for alias, name in _ALIASES.items()}
