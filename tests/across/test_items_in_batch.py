"""A loss divided by a number that each of the loader's batches carries is exact in that batch, or refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from support.losses.gradients import cut_gradient, distance, full_batch_gradient, joined
from support.models.small import CPU, fit_quietly

V, T = 23, 8
LENGTHS = ([8, 1, 5, 2], [3, 8, 8, 2], [8, 8, 8, 8])
NAME = "num_items_in_batch"


def sentences(lengths, seed=0, items=int):
    """A loader's batch of sentences of these lengths, with the number of its labels that count."""
    ids = torch.randint(3, V, (len(lengths), T), generator=torch.Generator().manual_seed(seed))
    labels = ids.masked_fill(torch.arange(T) >= torch.tensor(lengths)[:, None], -100)
    return {"input_ids": ids, "labels": labels, NAME: items(labels.ne(-100).sum())}


def together(batches):
    tensors = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0] if key != NAME}
    return {**tensors, NAME: sum(batch[NAME] for batch in batches)}


BATCHES = [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
WHOLE = together(BATCHES)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(V, 5), nn.Linear(5, V)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def of_ids(model, batch):
    return model(batch["input_ids"])


def divided(outputs, batch):
    return functional.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="sum") / batch[NAME]


def items_of(batch):
    """How such a batch may be laid out, with a loss of (outputs, batch) and a function of (model, batch)."""
    targets = {name: value for name, value in batch.items() if name != "input_ids"}
    return {
        "a mapping": (batch, divided, of_ids),
        "a pair": ((batch["input_ids"], targets), divided, None),
        "a tuple": (
            tuple(batch.values()),
            lambda outputs, batch: divided(outputs, {"labels": batch[1], NAME: batch[2]}),
            lambda model, batch: model(batch[0]),
        ),
    }


@pytest.mark.parametrize(
    ("layout", "items", "sizes"),
    [("a mapping", int, (12,)), ("a pair", torch.as_tensor, (6, 6)), ("a tuple", int, (5, 5, 2))],
)
def test_window_of_several_batches_or_of_a_part_of_one_is_refused(layout, items, sizes):
    batches = [items_of(sentences([8] * 4, seed, items)) for seed in range(3)]
    window = autoaccum.Window([batch[layout][0] for batch in batches])
    _, loss, forward = batches[0][layout]

    for some, cut in ((window, sizes), (window.part(0, 3), (2, 1))):
        with pytest.raises(autoaccum.InvalidInputError, match=r"a number of a batch of the loader"):
            cut_gradient(Tagger().double(), loss, some, cut, forward=forward)


def assert_whole(window, sizes, **options):
    model = Tagger().double()
    expected, value = full_batch_gradient(model, divided, WHOLE, of_ids)
    found, report = cut_gradient(model, divided, window, sizes, forward=of_ids, **options)
    assert distance(found, expected) <= 1e-12
    assert report.loss == pytest.approx(value, rel=1e-12)


def test_number_of_the_whole_window_or_a_scale_is_left_as_it_is_where_the_loss_is_said_to_be_a_sum():
    """As Transformers' own trainer passes it."""
    window = autoaccum.Window([batch | {NAME: WHOLE[NAME]} for batch in BATCHES])

    assert_whole(window, (4, 4, 4), loss_reduction="sum")


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize("sizes", [(4, 5, 3), (1,) * 12])
def test_count_that_a_collator_makes_for_each_micro_batch_is_that_of_the_micro_batch(sizes):
    samples = [{key: WHOLE[key][row] for key in ("input_ids", "labels")} for row in range(12)]

    def collate(samples):
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        return batch | {NAME: int(batch["labels"].ne(-100).sum())}

    window = autoaccum.Window([samples], autoaccum.ListOfSamples(collate))
    assert_whole(window, sizes, split=window.split)


def test_part_of_a_larger_batch_is_refused_after_batches_that_were_whole_windows():
    def loss(outputs, batch):
        return (outputs - batch["target"]).square().sum() / batch["samples"]

    loader = [{"input": torch.randn(n, 3), "target": torch.randn(n, 1), "samples": float(n)} for n in (8, 8, 16, 8)]
    options = {"micro_batch": 8, "loss": loss, "forward": lambda model, batch: model(batch["input"])}

    with pytest.raises(
        autoaccum.errors.InvalidInputError, match="a sum divided by 'samples', a number of a batch"
    ) as caught:
        fit_quietly(nn.Linear(3, 1), loader, 8, **options)

    assert caught.value.result.steps == 2


def test_batch_keeps_its_count_where_memory_runs_out_of_an_accumulator():
    model, batch = Tagger().double(), sentences([5, 0, 0, 0, 0, 3, 0, 8])
    expected, _ = full_batch_gradient(model, divided, batch, of_ids)

    def forward(model, batch):
        if len(batch["input_ids"]) > 2:
            raise torch.OutOfMemoryError("told to")
        return of_ids(model, batch)

    options = {"loss": divided, "forward": forward, "device": CPU, "precision": "fp32", "micro_batch": 4}
    report = autoaccum.Accumulator(model, **options).backward(batch)

    assert report.micro_batches == (2, 2, 2, 2)
    assert distance(joined(model), expected) <= 1e-12


def test_evaluation_divides_by_the_sum_too():
    model = Tagger().double()
    options = {"loss": divided, "forward": of_ids, "device": CPU, "precision": "fp32"}
    runner = autoaccum.Runner(model, None, autoaccum.plan(4, 2), **options)

    found = runner.evaluate(BATCHES)

    assert found == pytest.approx(divided(of_ids(model, WHOLE), WHOLE).item(), rel=1e-12)


# --- means that a number of the batch multiplies ----------------------------------------------------------------------


def mixed(weight, seed, samples=4):
    """A batch of inputs that were mixed, each with two classes, of which the first has this weight."""
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"input": inputs, "first": torch.arange(samples) % 2, "second": torch.arange(samples) % 3, "weight": weight}


def mixup(outputs, batch, reduction="mean"):
    first, second = (
        functional.cross_entropy(outputs, batch[name], reduction=reduction) for name in ("first", "second")
    )
    return batch["weight"] * first + (1 - batch["weight"]) * second


def of_each_sample(outputs, batch):
    return mixup(outputs, batch, "none")


def of_input(model, batch):
    return model(batch["input"])


def classifier():
    torch.manual_seed(0)
    return nn.Linear(3, 3).double()


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_mean_times_a_number_that_differs_in_a_window_is_refused(number):
    window = autoaccum.Window([mixed(number(weight), seed) for seed, weight in enumerate((0.3, 0.9, 0.6))])

    with pytest.raises(autoaccum.InvalidInputError, match=r"a number of a batch of the loader.* one value per sample"):
        cut_gradient(classifier(), mixup, window, (2,) * 6, forward=of_input)


@pytest.mark.parametrize(
    ("loss", "weights"), [(of_each_sample, (0.3, 0.9, 0.6)), (mixup, (0.3, 0.3, 0.3))], ids=["each", "one number"]
)
def test_mean_times_a_number_is_exact_for_each_sample_or_if_the_number_is_one(loss, weights):
    batches = [mixed(weight, seed) for seed, weight in enumerate(weights)]
    model = classifier()
    sum(mixup(of_input(model, batch), batch) / len(batches) for batch in batches).backward()
    expected = joined(model)

    found, _ = cut_gradient(classifier(), loss, autoaccum.Window(batches), (2,) * 6, forward=of_input)

    assert distance(found, expected) <= 1e-12


def test_mean_times_another_number_in_each_window_is_exact_until_a_window_has_two():
    loader = [mixed(weight, seed, 8) for seed, weight in enumerate((0.3, 0.9))]
    loader += [mixed(weight, seed, 4) for seed, weight in enumerate((0.3, 0.9))]

    with pytest.raises(autoaccum.InvalidInputError, match=r"a mean times a number .* of the loader") as caught:
        fit_quietly(classifier(), loader, 8, micro_batch=3, loss=mixup, forward=of_input)

    assert caught.value.result.steps == 2
