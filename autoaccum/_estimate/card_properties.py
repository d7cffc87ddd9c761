"""Answers a model's questions about the card for which its step is traced: capability, name, memory, bf16.

Models choose kernels by such answers (Transformers' mixtures of experts by the capability), on a machine that has no
driver or another card. Comes in: a card of the table. Goes out: a context in which `torch.cuda` answers as that card
does. What the table does not know raises an error that says so.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._estimate.own_thread import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from autoaccum._estimate.gpus import Card

# The capability that stands for all cards with or without TF32, if none is named.
_OF_ANY = {True: (8, 0), False: (7, 0)}


class UnknownOfCardError(RuntimeError):
    """A model asked for a property of the card that is not in the table."""


def properties_of(card: Card) -> Mapping[str, object]:
    """Return what is known of a card, by the names of `torch.cuda.get_device_properties`."""
    return _of_capability(card.capability) | {"name": card.name, "total_memory": card.total_bytes}


def _of_capability(capability: tuple[int, int]) -> dict[str, object]:
    return {"major": capability[0], "minor": capability[1], "is_integrated": 0, "is_multi_gpu_board": 0}


class CardAnswers:
    """What `torch.cuda` says of one card.

    Args:
        card: The card; None for the card at hand, or any with or without TF32.
        tensor_float: Without a card, whether it computes float32 with Tensor Cores.

    Attributes:
        told: The properties that were asked for, and the answers. A trace holds for cards that answer the same.
    """

    def __init__(self, card: Card | None = None, *, tensor_float: bool = True) -> None:
        self._is_at_hand = card is None and torch.cuda.is_available()
        self._known = _of_capability(_OF_ANY[tensor_float]) if card is None else properties_of(card)
        self.told: dict[str, object] = {}

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let `torch.cuda` answer as this card while entered."""
        if self._is_at_hand:
            yield
            return
        with (
            replaced(torch.cuda, "get_device_properties", lambda *_, **__: _Properties(self)),
            replaced(torch.cuda, "is_bf16_supported", self._is_bf16_supported),
            replaced(torch.cuda, "current_device", lambda: 0),
        ):
            yield

    def tell(self, name: str) -> Any:
        """Return a property of the card.

        Raises:
            UnknownOfCardError: It is not in the table of cards.
        """
        if name not in self._known:
            raise UnknownOfCardError(
                f"the model asks for the card's {name!r}, and without the card only {', '.join(self._known)} are known"
            )
        self.told[name] = self._known[name]
        return self._known[name]

    def _is_bf16_supported(self, including_emulation: bool = True) -> bool:
        # Every card stores bfloat16, which PyTorch calls emulation. `torch.autocast` asks for it too, which is no
        # question of the model's.
        return including_emulation or bool(self.tell("major") >= _OF_ANY[True][0])


class _Properties:
    """Properties of a card, each asked for by its name."""

    def __init__(self, answers: CardAnswers) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy and pickle look for
            raise AttributeError(name)
        return self._answers.tell(name)
