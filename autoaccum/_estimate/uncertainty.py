"""How much more memory a step may take on a GPU than predicted, from published trainings on real GPUs.

The margins are printed by `python benchmarks/margins.py` from the results of `make published`, and a test compares
them: of the runs of one kind and precision, 95% took at most this share more than predicted. Too few models with
convolutions were trained in half precision to tell it from fp32, so both count together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable


class Margin(NamedTuple):
    """A margin and the runs it comes from.

    Attributes:
        share: The share of the prediction that a step may take in addition.
        runs: The number of published runs.
        kind: What the runs trained, for the note.
    """

    share: float
    runs: int
    kind: str

    @property
    def basis(self) -> str:
        """The margin and its origin, as a note."""
        return (
            f"safe sizes leave {self.share:.1%} of the prediction free: 95% of {self.runs} published trainings of "
            f"{self.kind} took at most that much more than predicted"
        )


# By kind of model and precision.
MARGINS = {
    ("convolutions", "fp32"): Margin(0.138, 62, "models with convolutions"),
    ("convolutions", "half"): Margin(0.138, 62, "models with convolutions"),
    ("others", "fp32"): Margin(0.091, 96, "models without convolutions in fp32"),
    ("others", "half"): Margin(0.048, 51, "models without convolutions in half precision"),
}


def margin_for(modules: Iterable[nn.Module], precision: str) -> Margin:
    """Return the margin for a model.

    Args:
        modules: The model's modules.
        precision: "fp32", "bf16" or "fp16".
    """
    # One convolution alone makes patches or an embedding.
    convolves = sum(isinstance(one, nn.modules.conv._ConvNd) for one in modules) > 1
    return MARGINS["convolutions" if convolves else "others", "fp32" if precision == "fp32" else "half"]
