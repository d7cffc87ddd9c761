"""How windows are to be cut, and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoaccum._records import Plan
from autoaccum._sizing.costs import Costs
from autoaccum._sizing.frontier import Frontier

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoaccum._sizing.frontier import Widths


@dataclass(frozen=True)
class SizingOptions:
    """Requirements for the cut.

    Attributes:
        is_uniform: Whether all sizes are to be equal, for compiled models.
        by_width: Whether memory decides how large micro-batches are, for samples of each width. Otherwise none exceeds
            the plan's size.
        learns: Whether to learn from the first windows how large micro-batches may be.
        times_after: Windows after which autotuning starts; None for never.
        fits: A size that micro-batches may have though it exceeds the plan's.
        begins_with: An initial size that is known to have fitted in an earlier run.
        frontier: What was known to fit then; empty if nothing.
        most: The most samples allowed in a micro-batch, however small they are; None for no cap.
    """

    is_uniform: bool = False
    by_width: bool = False
    learns: bool = False
    times_after: int | None = None
    fits: int = 0
    begins_with: int | None = None
    frontier: Frontier = field(default_factory=Frontier)
    most: int | None = None


@dataclass(frozen=True)
class Cutting:
    """How windows are cut. A runner passes it on to the next, and a checkpoint to the run that resumes from it.

    Attributes:
        plan: The current plan.
        largest_plan: The plan that was set or found, which sizes grow back to after failures.
        frontier: What is known to fit; None if nothing.
        is_found: Whether learning has finished.
        is_timed: Whether autotuning has finished.
        compared_to: The largest size that autotuning has compared; 0 if there was none.
        widths: Those of the samples that the plan was made for; None if they are not known.
        costs: The times that were measured.
    """

    plan: Plan
    largest_plan: Plan
    frontier: Frontier | None = None
    is_found: bool = False
    is_timed: bool = False
    compared_to: int = 0
    widths: Widths | None = None
    costs: Costs = field(default_factory=Costs)

    @classmethod
    def of(cls, plan: Plan) -> Cutting:
        """Return how windows are cut by a plan alone."""
        return cls(plan, plan)

    def state(self) -> dict[str, Any]:
        """Return it as plain values, for `of_state`."""
        return {
            "plan": list(self.plan.micro_batches),
            "largest": list(self.largest_plan.micro_batches),
            "frontier": None if self.frontier is None else self.frontier.state(),
            "is_found": self.is_found,
            "is_timed": self.is_timed,
            "compared_to": self.compared_to,
            "widths": None if self.widths is None else list(self.widths),
            "costs": [list(one) for one in self.costs.measured()],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Cutting:
        """Return what `state` has returned."""
        plan, largest = (Plan(sum(sizes), tuple(sizes)) for sizes in (state["plan"], state["largest"]))
        names = ("is_found", "is_timed", "compared_to")
        widths = None if state["widths"] is None else tuple(state["widths"])
        frontier, costs = Frontier.of_state(state["frontier"]), Costs.of_state(state.get("costs"))
        return cls(plan, largest, frontier, **{name: state[name] for name in names}, widths=widths, costs=costs)
