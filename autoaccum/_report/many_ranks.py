"""What a report on one of several ranks asks: its share of the target batch, and what its step holds in addition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum._arguments import check_bool, check_positive_int
from autoaccum._estimate.ranks import in_buckets, sharding
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from autoaccum._estimate.allocation_trace import Timeline


@dataclass(frozen=True, slots=True)
class ManyRanks:
    """The processes that train together.

    Attributes:
        number: How many; 1 for one that trains alone.
        target_batch: Samples per update, of all together.
        fsdp: Whether `fully_shard` shards the model over them.
    """

    number: int
    target_batch: int
    fsdp: bool

    def __post_init__(self) -> None:
        """Check the arguments `ranks` and `fsdp`."""
        check_positive_int("ranks", self.number)
        check_bool("fsdp", self.fsdp)
        if self.number > self.target_batch:
            raise InvalidInputError(
                f"ranks={self.number}: a target batch of {self.target_batch} has not one sample for each; use fewer "
                "ranks, or a larger target batch"
            )
        if self.fsdp and self.number == 1:
            raise InvalidInputError("fsdp=True: nothing is sharded over one rank; pass ranks=, such as ranks=8")

    @property
    def share(self) -> int:
        """Samples per update on one rank."""
        return -(-self.target_batch // self.number)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is assumed of them."""
        if self.number == 1:
            return ()
        how = "each holds the whole model, and buckets of gradients"
        if self.fsdp:
            how = "fully_shard of each repeated block and of the model, which was not confirmed on cards"
        told = f"ranks: {self.share} samples on each of {self.number}; {how}"
        return (f"{told}; the network library's own memory is not counted",)

    def changed(self, model: nn.Module) -> Callable[[Timeline], Timeline]:
        """Return what makes the step of one rank from that of a process that trains alone."""
        if self.number == 1:
            return lambda timeline: timeline
        return sharding(model, self.number) if self.fsdp else in_buckets
