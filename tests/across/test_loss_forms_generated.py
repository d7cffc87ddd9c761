"""No loss that is put together from masks, weights, sums, means, counts, clamps and factors trains silently wrong."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from support.losses.forms import Form, N, each, window
from support.losses.gradients import cuts
from support.losses.outcomes import by_accumulator, by_runner, by_split, outcome

# Of tokens, (N, T). Some labels are ignored, whose losses are 0.
LOSSES = {
    "ce": lambda o, b: each(o, b, "labels"),
    "square": lambda o, b: (o - b["z"]).square().mean(-1),
    "abs": lambda o, b: (o - b["z"]).abs().sum(-1),
}
WEIGHTS = {
    "nothing": lambda b: torch.ones_like(b["mask"]),
    "mask": lambda b: b["mask"],
    "has": lambda b: b["has"][:, None] * b["mask"],
    "samples": lambda b: b["has"][:, None].expand(b["mask"].shape),
    "nearly": lambda b: b["nearly"][:, None].expand(b["mask"].shape),
    "w": lambda b: b["w"][:, None] * b["mask"],
    "w_tokens": lambda b: b["w_tokens"],
}
# From (N, T) to (N,); the means over time that divide by a sample's own weights are those of sequences.
OVER_TIME = {
    "sum": lambda losses, w: (losses * w).sum(1),
    "mean": lambda losses, w: (losses * w).mean(1),
    "weighted mean": lambda losses, w: (losses * w).sum(1) / (w.sum(1) + 1e-6),
}
OVER_SAMPLES = {"sum": torch.sum, "mean": torch.mean, "none": lambda losses: losses}
DIVISORS = {
    "nothing": lambda b, w: 1,
    "weights": lambda b, w: w.sum(),
    "weights, clamped": lambda b, w: w.sum().clamp(min=1),
    "weights, float": lambda b, w: max(1.0, w.sum().item()),
    # What one token a sample counts; what 2 * max(2, n) divides by is told only once n was more than 4.
    "positives, at least 1": lambda b, w: w[:, 0].sum().clamp(min=1),
    "positives, at least 2": lambda b, w: w[:, 0].sum().clamp(min=2),
    "positives, at least 3": lambda b, w: w[:, 0].sum().clamp(min=3),
    "positives, twice": lambda b, w: 2 * w[:, 0].sum().clamp(min=1),
    "labels": lambda b, w: (b["labels"] != -100).sum(),
    "samples": lambda b, w: len(b["x"]),
    "constant": lambda b, w: 16,
}


CLAMPED = [name for name in DIVISORS if name.startswith(("weights, ", "positives"))]


@dataclass(frozen=True)
class Term:
    """One term of a loss, by the names of its parts; a factor of None is another number in each window."""

    loss: str
    weights: str
    over_time: str
    over_samples: str
    divisor: str
    factor: float

    def __call__(self, o, b):
        weights = WEIGHTS[self.weights](b)
        losses = OVER_TIME[self.over_time](LOSSES[self.loss](o, b), weights)
        value = OVER_SAMPLES[self.over_samples](losses) / DIVISORS[self.divisor](b, weights)
        factor = 1 + 0.1 * float(b["window"][0]) if self.factor is None else self.factor
        return value if factor == 1 else factor * value

    @property
    def is_clamped(self):
        return self.divisor in CLAMPED

    @property
    def is_divided_once(self):
        """Whether it is a sum, a mean or a weighted mean: a mean divided by a count again is none of them."""
        return self.over_samples == "sum" or self.divisor in ("nothing", "constant")


def terms(weights, over_time, over_samples, divisors, factors):
    return st.builds(
        Term,
        st.sampled_from(list(LOSSES)),
        *map(st.sampled_from, (weights, over_time, over_samples, divisors, factors)),
    )


TERMS = terms([*WEIGHTS], [*OVER_TIME], ["sum", "mean"], [*DIVISORS], [1, 0.3, 5, -1, None])
VECTORS = terms([*WEIGHTS], [*OVER_TIME], ["none"], ["nothing", "constant"], [1, 0.3])
# Means over what a mask of the batch counts, beside another mask that counts nearly as much.
MEANS = terms(["samples", "nearly"], ["mean"], ["sum"], CLAMPED, [1, 2, -1, None])


@dataclass(frozen=True)
class Loss:
    """The sum of some terms, as one number or by name."""

    terms: tuple[Term, ...]
    is_named: bool

    def __call__(self, o, b):
        values = [term(o, b) for term in self.terms]
        if self.is_named:
            return {str(number): value for number, value in enumerate(values)}
        return sum(values[1:], values[0])

    @property
    def is_clamped(self):
        return any(term.is_clamped for term in self.terms)

    @property
    def is_simple(self):
        """Whether it has to be trained on."""
        (first, *others) = self.terms
        return not others and first.is_divided_once and not first.divisor.startswith("positives")


LOSSES_OF_TERMS = {
    "any": st.one_of(
        st.builds(Loss, st.one_of(st.tuples(TERMS), st.tuples(VECTORS)), st.just(value=False)),
        st.builds(Loss, st.tuples(TERMS, TERMS), st.booleans()),
    ),
    "clamped": st.one_of(
        st.builds(Loss, st.tuples(MEANS), st.just(value=False)),
        st.builds(Loss, st.tuples(MEANS, st.one_of(MEANS, TERMS)), st.booleans()),
    ),
}
# The lengths of a window's samples, and which of these are positive, as digits.
LENGTHS = st.text("123456", min_size=N, max_size=N)
POSITIVES = st.text("01", min_size=N, max_size=N).filter(lambda digits: "1" in digits)
WINDOWS = {kind: st.tuples(*[st.tuples(LENGTHS, POSITIVES)] * number) for kind, number in (("any", 3), ("clamped", 6))}


# Twice the positive numbers of an entry are the weights of the samples that are tried.
COUNTED_BY_ACCIDENT = {
    "loss": Loss(
        (
            Term("square", "has", "sum", "sum", "weights, float", 0.3),
            Term("ce", "has", "mean", "sum", "weights, float", 5),
        ),
        is_named=False,
    ),
    "several": (("2111143222", "1100011100"), ("4535126324", "1101101101"), ("5355563413", "1100100100")),
    "seed": 87,
    "cut": (3, 5, 2),
}
# In the first window, nothing counts in one of two parts.
MEAN_DIVIDED_AGAIN = {
    "loss": Loss(
        (Term("ce", "w", "mean", "sum", "labels", 5), Term("ce", "has", "weighted mean", "mean", "weights", 1)),
        is_named=False,
    ),
    "several": (("3511616565", "0000100000"), ("6321413112", "0010001010"), ("5513632525", "1000011101")),
    "seed": 1,
    "cut": (1,) * N,
}
DIVIDED_AGAIN = Term("square", "has", "weighted mean", "mean", "weights, clamped", 0.3)
MEAN_OF_ONE_DIVIDED_AGAIN = {
    "loss": Loss((DIVIDED_AGAIN, DIVIDED_AGAIN), is_named=True),
    "several": (("3556351141", "0000000001"), ("3556351141", "0000000001"), ("3641254622", "0000000001")),
    "seed": 59,
    "cut": (6, 4),
}


def numbers(digits):
    return [int(digit) for digit in digits]


def with_another_mask(window):
    """Adds a mask that is another than "has" in the last sample alone, in windows of an odd number."""
    flipped = (torch.arange(N) == N - 1) & (window["window"] % 2 == 1)
    return window | {"nearly": torch.where(flipped, 1 - window["has"], window["has"])}


@pytest.mark.parametrize("examples", [8, pytest.param(400, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("kind", "way", "dtype"),
    [
        ("any", by_runner, torch.float64),
        ("any", by_runner, torch.float32),
        ("any", by_accumulator, torch.float64),
        ("clamped", by_runner, torch.float64),
        ("clamped", by_split, torch.float64),
    ],
    ids=["runner", "runner in float32", "accumulator", "clamped", "clamped, of a split"],
)
def test_no_loss_trains_silently_wrong(kind, way, dtype, examples):
    @settings(
        max_examples=examples,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller one takes minutes
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @example(**COUNTED_BY_ACCIDENT)
    @example(**MEAN_DIVIDED_AGAIN)
    @example(**MEAN_OF_ONE_DIVIDED_AGAIN)
    @given(loss=LOSSES_OF_TERMS[kind], several=WINDOWS[kind], seed=st.integers(0, 99), cut=cuts(N))
    def assert_of(loss, several, seed, cut):
        windows = [window(number, *map(numbers, each), seed) for number, each in enumerate(several)]
        allowed = ["exact", "doubted", "warned"]
        if loss.is_clamped:
            allowed += ["stopped"]
        if not loss.is_simple:
            allowed += ["refused", "stopped"]

        mixes = len(loss.terms) > 1 and not loss.is_named
        low = {"lr": 0.1, "tolerance": 1e-3} if dtype is torch.float32 else {"lr": 1e-3, "tolerance": 1e-8}
        form = Form(loss, batch=with_another_mask, windows=windows, cut=cut, dtype=dtype, mixes=mixes, **low)

        assert outcome(form, way) in allowed

    assert_of()
