"""A loss divided by a number that each of the loader's batches carries is exact in that batch, or refused."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from support.losses.gradients import cut_gradient, distance, joined
from support.models.small import CPU, fit_quietly
from support.models.tiny_transformers import tiny

pytest.importorskip("transformers")

V, T = 23, 8
LENGTHS = ([8, 1, 5, 2], [3, 8, 8, 2], [8, 8, 8, 8])
NAME = "num_items_in_batch"


def sentences(lengths, seed=0, *, shifted=False, items=int, name=NAME):
    """A loader's batch of sentences of these lengths, with the number of its labels that count."""
    ids = torch.randint(3, V, (len(lengths), T), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~mask, -100)
    count = (labels[:, 1:] if shifted else labels).ne(-100).sum()
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels, name: items(count)}


def together(batches, name=NAME):
    tensors = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0] if key != name}
    return {**tensors, name: sum(batch[name] for batch in batches)}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, 5)
        self.head = nn.Linear(5, V)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def divided(outputs, batch, name=NAME):
    return functional.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="sum") / batch[name]


def items_of(batch):
    """How such a batch may be laid out, with a loss of (outputs, batch) and a function of (model, batch)."""
    targets = {name: value for name, value in batch.items() if name != "input_ids"}
    return {
        "a mapping": (batch, divided, None),
        "a pair": ((batch["input_ids"], targets), divided, None),
        "a tuple": (
            tuple(batch.values()),
            lambda outputs, batch: divided(outputs, {"labels": batch[2], NAME: batch[3]}),
            lambda model, batch: model(batch[0]),
        ),
    }


def tagger():
    torch.manual_seed(0)
    return Tagger().double()


def assert_whole(model, loss, window, sizes, batch, *, tolerance=1e-12, most=None, **options):
    whole = copy.deepcopy(model)
    if most is not None:
        model.register_forward_pre_hook(functools.partial(refuse_more_than, most), with_kwargs=True)
    value = whole(**batch).loss if loss is None else loss(whole(batch["input_ids"]), batch)
    value.backward()
    found, report = cut_gradient(model, loss, window, sizes, **options)
    assert distance(found, joined(whole)) <= tolerance
    assert report.loss == pytest.approx(value.item(), rel=tolerance)


@pytest.mark.parametrize(
    ("layout", "items", "sizes"),
    [("a mapping", int, (12,)), ("a pair", torch.as_tensor, (6, 6)), ("a tuple", int, (5, 5, 2))],
)
def test_window_of_several_batches_or_of_a_part_of_one_is_refused(layout, items, sizes):
    batches = [items_of(sentences([8] * 4, seed, items=items)) for seed in range(3)]
    window = autoaccum.Window([batch[layout][0] for batch in batches])
    _, loss, forward = batches[0][layout]

    for some, cut in ((window, sizes), (window.part(0, 3), (2, 1))):
        with pytest.raises(autoaccum.InvalidInputError, match=r"a number of a batch of the loader"):
            cut_gradient(tagger(), loss, some, cut, forward=forward)


def test_number_of_the_whole_window_or_a_scale_is_left_as_it_is_where_the_loss_is_said_to_be_a_sum():
    """As Transformers' own trainer passes it."""
    batches = [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    whole = together(batches)
    batches = [batch | {NAME: whole[NAME]} for batch in batches]

    assert_whole(tagger(), divided, autoaccum.Window(batches), (4, 4, 4), whole, loss_reduction="sum")


def test_part_of_a_larger_batch_is_refused_after_batches_that_were_whole_windows():
    def loss(outputs, batch):
        return (outputs - batch["target"]).square().sum() / batch["samples"]

    loader = [{"input": torch.randn(n, 3), "target": torch.randn(n, 1), "samples": float(n)} for n in (8, 8, 16, 8)]
    forward = lambda model, batch: model(batch["input"])  # noqa: E731

    with pytest.raises(
        autoaccum.errors.InvalidInputError, match="a sum divided by 'samples', a number of a batch"
    ) as caught:
        autoaccum.fit(nn.Linear(3, 1), loader, 8, micro_batch=8, loss=loss, forward=forward, device=CPU, progress=False)

    assert caught.value.result.steps == 2


def test_windows_that_are_the_loaders_batches_are_trained_on():
    batches = [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    model, by_hand = tagger(), tagger()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        divided(by_hand(batch["input_ids"]), batch).backward()
        optimizer.step()

    result = fit_quietly(
        model,
        batches,
        4,
        loss=divided,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        precision="fp32",
        micro_batch=2,
    )

    torch.testing.assert_close(model.state_dict(), by_hand.state_dict(), rtol=1e-12, atol=1e-14)
    assert result.warnings == ()


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_batch_that_is_cut_keeps_its_count(sizes):
    batch = sentences(LENGTHS[0])

    assert_whole(tagger(), divided, batch, sizes, batch)


def refuse_more_than(most, model, inputs, named):
    if len([*inputs, *named.values()][0]) > most:
        raise torch.OutOfMemoryError("told to")


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize("items", [int, torch.as_tensor])
def test_batch_of_which_one_sample_fits_at_once_keeps_its_count(items):
    batch = sentences(LENGTHS[0], items=items)

    assert_whole(tagger(), divided, batch, (1, 1, 1, 1), batch, most=1)


@pytest.mark.parametrize("lengths", [[0, 3, 0, 8, 1, 0, 0, 2], [5, 0, 0, 0, 0, 0, 0, 0]])
def test_batch_keeps_its_count_where_memory_runs_out_and_nothing_counts_in_some_samples_that_fit(lengths):
    model, batch = tagger(), sentences(lengths)
    expected = copy.deepcopy(model)
    divided(expected(batch["input_ids"]), batch).backward()
    model.register_forward_pre_hook(functools.partial(refuse_more_than, 2), with_kwargs=True)

    report = autoaccum.Accumulator(model, loss=divided, device=CPU, precision="fp32", micro_batch=4).backward(batch)

    assert report.micro_batches == (2, 2, 2, 2)
    assert distance(joined(model), joined(expected)) <= 1e-12


def by_token(outputs, batch):
    return functional.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")


def at_least_one(outputs, batch):
    return by_token(outputs, batch).sum() / batch["labels"].ne(-100).sum().clamp(min=1)


def mean_if_any(outputs, batch):
    tokens = batch["labels"].ne(-100).sum()
    return by_token(outputs, batch).sum() / tokens if tokens else 0.0 * outputs.sum()


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize("loss", [at_least_one, mean_if_any])
@pytest.mark.parametrize("lengths", [[0, 3, 0, 8], [5, 0, 2, 1], [0, 0, 0, 2]])
def test_mean_is_exact_where_one_sample_fits_at_once_and_nothing_counts_in_some(lengths, loss):
    batch = {key: value for key, value in sentences(lengths).items() if key != NAME}

    assert_whole(tagger(), loss, batch, (1, 1, 1, 1), batch, most=1)


def masked(outputs, batch):
    return (outputs.square().mean((1, 2)) * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1)


def sentences_kept_by(mask):
    batch = {key: value for key, value in sentences([1, 2, 3, 0, 5, 1]).items() if key != NAME}
    return batch | {"mask": torch.tensor(mask, dtype=torch.float64)}


@pytest.mark.parametrize(("sizes", "most"), [((2, 2, 2), 2), ((3, 3), 3), ((2, 2, 2), None), ((1, 2, 1, 2), None)])
@pytest.mark.parametrize("mask", [[0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 1, 1]])
def test_mean_over_at_least_one_sample_that_a_mask_keeps_is_exact_and_warned_of_nowhere(mask, sizes, most):
    batch = sentences_kept_by(mask)

    assert_whole(tagger(), masked, batch, sizes, batch, most=most)


def test_sample_alone_that_a_mask_leaves_out_is_exact_though_the_two_of_a_check_do_not_tell_the_mask_from_samples():
    batch = sentences_kept_by([1, 1, 0, 0, 1, 1])

    assert_whole(tagger(), masked, batch, (3, 1, 2), batch, most=3)


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
def test_loss_of_two_terms_with_one_divisor_is_reported_whole_where_nothing_counts_in_the_first_of_single_samples():
    def smoothed(outputs, batch):
        return functional.cross_entropy(outputs.transpose(1, 2), batch["labels"], label_smoothing=0.1)

    model, batch = tagger(), {key: value for key, value in sentences([0, 3, 1, 8]).items() if key != NAME}
    expected = smoothed(model(batch["input_ids"]), batch).item()
    model.register_forward_pre_hook(functools.partial(refuse_more_than, 1), with_kwargs=True)

    report = autoaccum.Accumulator(model, loss=smoothed, device=CPU, precision="fp32", micro_batch=4).backward(batch)

    assert report.loss == pytest.approx(expected, rel=1e-9)


# Divided by the same in each sample, as by a number of the whole batch, and means all the same.
MEANS = {
    "a number is the length": (lambda outputs, batch: by_token(outputs, batch).mean(), {"longest": T}),
    "a number is one sample": (lambda outputs, batch: by_token(outputs, batch).sum() / len(outputs), {"epoch": 1}),
    "a mask of the loss": (lambda outputs, batch: by_token(outputs, batch)[:, 1:4].sum() / (3 * len(outputs)), {}),
}


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize("kind", MEANS)
def test_mean_of_which_one_sample_fits_at_once_is_not_taken_for_a_sum(kind):
    loss, numbers = MEANS[kind]
    batch = {key: value for key, value in sentences([8, 8, 8, 8]).items() if key != NAME} | numbers

    assert_whole(tagger(), loss, batch, (1, 1, 1, 1), batch, most=1)


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize(("sizes", "most"), [((4, 5, 3), None), ((1,) * 12, 1)])
def test_count_that_a_collator_makes_for_each_micro_batch_is_that_of_the_micro_batch(sizes, most):
    lengths = [length for batch in LENGTHS for length in batch]
    whole = sentences(lengths)
    samples = [{key: whole[key][row] for key in ("input_ids", "labels")} for row in range(len(lengths))]

    def collate(samples):
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        return batch | {NAME: int(batch["labels"].ne(-100).sum())}

    window = autoaccum.Window([samples], autoaccum.ListOfSamples(collate))
    assert_whole(tagger(), divided, window, sizes, whole, split=window.split, most=most)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_models_that_ignore_the_count_are_weighted_by_their_targets(name):
    batches = [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]

    assert_whole(tiny(name, V, T), None, autoaccum.Window(batches), (4, 4, 4), together(batches), tolerance=1e-5)


def test_evaluation_divides_by_the_sum_too():
    model, batches = tagger(), [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    whole = together(batches)
    runner = autoaccum.Runner(model, None, autoaccum.plan(4, 2), loss=divided, device=CPU, precision="fp32")

    found = runner.evaluate(batches)

    assert float(found.loss if hasattr(found, "loss") else found) == pytest.approx(
        divided(model(whole["input_ids"]), whole).item(), rel=1e-12
    )
