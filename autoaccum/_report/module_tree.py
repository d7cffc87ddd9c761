"""Lays out the tree of a model's modules by the memory that they hold. Nothing here draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from autoaccum._estimate.moments import ModuleMemory

_MODEL, _LOSS, _NONE = "(model)", "(loss)", "outside modules"
_NAMES = {_MODEL: "model", _LOSS: "loss"}
# Parts with a smaller share of the whole are summed.
_SHARE_SHOWN = 0.006
# Levels below the model; deeper modules count to those that hold them.
_LEVELS = 4


@dataclass(frozen=True, slots=True)
class Cell:
    """A module with all modules inside it, as a span of memory.

    Attributes:
        path: Its path.
        label: The part of its path that the module around it lacks.
        level: How many modules are around it.
        start: The bytes of what comes before it.
        bytes_by_kind: What it holds, by kind.
    """

    path: str
    label: str
    level: int
    start: int
    bytes_by_kind: Mapping[str, int]

    @property
    def held_bytes(self) -> int:
        """What it holds in all."""
        return sum(self.bytes_by_kind.values())

    @property
    def main_kind(self) -> str:
        """The kind that most of it is."""
        return max(self.bytes_by_kind, key=lambda kind: self.bytes_by_kind[kind])


@dataclass
class _Node:
    path: str
    held: Counter[str] = field(default_factory=Counter)
    inside: dict[str, _Node] = field(default_factory=dict)


def cells_of(modules: Sequence[ModuleMemory]) -> list[Cell]:
    """Return the cells, each after the one that it is inside. A cell's own memory comes behind that of its parts."""
    top = _Node("")
    for one in modules:
        first, *parts = _parts(one.module)
        node = top
        for part in (first, *parts[:_LEVELS]):
            node.held.update(one.bytes_by_kind)
            # Parts of the model are named by their path, without the model's own name.
            path = ".".join(filter(None, (node.path if node.path != _MODEL else "", part)))
            node = node.inside.setdefault(part, _Node(path))
        node.held.update(one.bytes_by_kind)
    return list(_cells(top, 0, 0, _SHARE_SHOWN * sum(top.held.values())))


def _parts(module: str) -> list[str]:
    if not module:
        return [_NONE]
    parts = module.split(".")
    return parts if parts[0] in _NAMES else [_MODEL, *parts]


def _cells(node: _Node, level: int, start: int, least: float) -> Iterator[Cell]:
    rest: Counter[str] = Counter()
    left_out = 0
    for inside in node.inside.values():
        held = sum(inside.held.values())
        if held < least:
            rest.update(inside.held)
            left_out += 1
        elif held:
            shown = inside
            while len(shown.inside) == 1 and (only := next(iter(shown.inside.values()))).held == shown.held:
                shown = only  # a container of one module says nothing of its own
            label = _NAMES.get(shown.path, shown.path.removeprefix(f"{node.path}."))
            yield Cell(shown.path, label, level, start, dict(shown.held))
            yield from _cells(shown, level + 1, start, least)
            start += held
    if sum(rest.values()) >= least and rest:
        yield Cell(f"{node.path or 'all'}: {left_out} small parts", f"{left_out} small parts", level, start, dict(rest))
