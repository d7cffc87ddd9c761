"""A loss divided by a count that each of the loader's batches carries is, over a window, divided by the sum of them."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from gradients import cut_gradient, distance, joined
from helpers import CPU
from tiny_transformers import tiny

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
    """The batches as one, with the sum of their counts."""
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


def tagger():
    torch.manual_seed(0)
    return Tagger().double()


def gpt2():
    return tiny("GPT2LMHeadModel", V, T, loss_type="ForCausalLM")


def assert_whole(model, loss, window, sizes, batch, *, tolerance=1e-12, **options):
    """Check gradient and loss of a window against those of one batch."""
    whole = copy.deepcopy(model)
    value = whole(**batch).loss if loss is None else loss(whole(batch["input_ids"]), batch)
    value.backward()
    found, report = cut_gradient(model, loss, window, sizes, **options)
    assert distance(found, joined(whole)) <= tolerance
    assert report.loss == pytest.approx(value.item(), rel=tolerance)


CUTS = [(4, 4, 4), (2,) * 6, (1,) * 12]


@pytest.mark.parametrize("sizes", CUTS)
@pytest.mark.parametrize("items", [int, float, torch.as_tensor], ids=["int", "float", "tensor"])
def test_window_of_several_batches_is_divided_by_the_sum_of_their_counts(sizes, items):
    batches = [sentences(lengths, seed, items=items) for seed, lengths in enumerate(LENGTHS)]

    assert_whole(tagger(), divided, autoaccum.Window(batches), sizes, together(batches))


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (5, 5, 2), (1,) * 12])
def test_batches_of_equal_counts_are_joined_and_divided_by_the_sum(sizes):
    """Uncut, the loss is that of one batch with the count of one of three."""
    batches = [sentences([8] * 4, seed) for seed in range(3)]

    assert_whole(tagger(), divided, autoaccum.Window(batches), sizes, together(batches))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_batch_that_is_cut_keeps_its_count(sizes):
    batch = sentences(LENGTHS[0])

    assert_whole(tagger(), divided, batch, sizes, batch)


@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "labels but the first"])
def test_windows_that_end_within_a_batch_take_the_count_of_their_part(shifted):
    model, batches = tagger(), [sentences(lengths, seed, shifted=shifted) for seed, lengths in enumerate(LENGTHS)]
    tensors = {key: torch.cat([batch[key] for batch in batches]) for key in ("input_ids", "labels")}

    for number, window in enumerate(autoaccum.windows(batches, 6)):
        whole = {key: tensor[6 * number : 6 * number + 6] for key, tensor in tensors.items()}
        whole[NAME] = int((whole["labels"][:, 1:] if shifted else whole["labels"]).ne(-100).sum())
        assert_whole(model, divided, window, (2, 2, 2), whole)


@pytest.mark.parametrize("sizes", [(3,), (2, 1)])
def test_part_of_one_batch_takes_the_count_of_its_part(sizes):
    batch = sentences(LENGTHS[0])
    (window, _) = autoaccum.windows([batch], 3)
    whole = {key: batch[key][:3] for key in ("input_ids", "labels")}
    whole[NAME] = int(whole["labels"].ne(-100).sum())

    assert_whole(tagger(), divided, window, sizes, whole)


def test_count_that_is_no_count_of_targets_is_shared_by_samples_where_a_window_ends_within_a_batch():
    batches = [sentences([8] * 4, seed) | {NAME: 100} for seed in range(3)]
    window = next(iter(autoaccum.windows(batches, 6)))
    whole = {key: torch.cat([batches[0][key], batches[1][key][:2]]) for key in ("input_ids", "labels")} | {NAME: 150}

    with pytest.warns(autoaccum.LossWarning, match="the part is given its share by samples"):
        assert_whole(tagger(), divided, window, (2, 2, 2), whole)


def test_count_of_the_window_on_each_of_its_batches_is_not_added_up():
    """As Transformers' own trainer passes it."""
    batches = [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    whole = together(batches)
    batches = [batch | {NAME: whole[NAME]} for batch in batches]

    assert_whole(tagger(), divided, autoaccum.Window(batches), (4, 4, 4), whole)


def test_count_that_a_collator_makes_for_each_micro_batch_is_that_of_the_micro_batch():
    lengths = [length for batch in LENGTHS for length in batch]
    whole = sentences(lengths)
    samples = [{key: whole[key][row] for key in ("input_ids", "labels")} for row in range(len(lengths))]

    def collate(samples):
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        return batch | {NAME: int(batch["labels"].ne(-100).sum())}

    window = autoaccum.Window([samples], autoaccum.ListOfSamples(collate))
    assert_whole(tagger(), divided, window, (4, 5, 3), whole, split=window.split)


def test_count_of_any_name_is_known_by_its_value():
    name = "weight"
    batches = [sentences(lengths, seed, name=name) for seed, lengths in enumerate(LENGTHS)]
    loss = functools.partial(divided, name=name)

    assert_whole(tagger(), loss, autoaccum.Window(batches), (4, 4, 4), together(batches, name))


def test_count_in_the_targets_of_a_pair_is_found():
    batches = [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    pairs = [(batch.pop("input_ids"), batch) for batch in copy.deepcopy(batches)]
    whole = together(batches)
    model = tagger()
    divided(model(whole["input_ids"]), whole).backward()

    found, _ = cut_gradient(tagger(), divided, autoaccum.Window(pairs), (4, 4, 4))

    assert distance(found, joined(model)) <= 1e-12


def test_count_that_is_an_item_of_a_tuple_is_known_by_its_value():
    batches = [tuple(sentences(lengths, seed).values()) for seed, lengths in enumerate(LENGTHS)]
    whole = together([sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)])
    model = tagger()
    divided(model(whole["input_ids"]), whole).backward()

    found, _ = cut_gradient(
        tagger(),
        lambda outputs, batch: divided(outputs, {"labels": batch[2], NAME: batch[3]}),
        autoaccum.Window(batches),
        (4, 4, 4),
        forward=lambda model, batch: model(batch[0]),
    )

    assert distance(found, joined(model)) <= 1e-12


@pytest.mark.parametrize("sizes", CUTS)
def test_transformers_causal_model_gets_the_gradient_of_the_window(sizes):
    batches = [sentences(lengths, seed, shifted=True, items=torch.as_tensor) for seed, lengths in enumerate(LENGTHS)]

    assert_whole(gpt2(), None, autoaccum.Window(batches), sizes, together(batches), tolerance=1e-5)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5ForConditionalGeneration"])
def test_models_that_ignore_the_count_are_weighted_by_their_targets(name):
    batches = [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]

    assert_whole(tiny(name, V, T), None, autoaccum.Window(batches), (4, 4, 4), together(batches), tolerance=1e-5)


def test_number_that_scales_a_loss_is_left_as_it_is():
    batches = [{"input": torch.randn(6, 4).double(), "y": torch.arange(6) % 3, "temperature": t} for t in (0.5, 0.7)]
    model = nn.Linear(4, 3).double()

    def scaled(outputs, batch):
        return functional.cross_entropy(outputs, batch["y"], reduction="sum") / batch["temperature"]

    sum(scaled(model(batch["input"]), batch) for batch in batches).backward()
    expected = joined(model)
    model.zero_grad()
    with pytest.warns(autoaccum.LossWarning, match="'temperature' differs between .* taken for a scale and not"):
        found, _ = cut_gradient(model, scaled, autoaccum.Window(batches), (6, 6))

    assert distance(found, expected) <= 1e-12


def test_evaluation_divides_by_the_sum_too():
    model, batches = tagger(), [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    whole = together(batches)
    runner = autoaccum.Runner(model, None, autoaccum.plan(4, 2), loss=divided, device=CPU, precision="fp32")

    found = runner.evaluate(batches)

    assert float(found.loss if hasattr(found, "loss") else found) == pytest.approx(
        divided(model(whole["input_ids"]), whole).item(), rel=1e-12
    )


def test_fit_makes_the_updates_of_whole_windows():
    batches = [sentences(lengths, seed) for seed, lengths in enumerate(LENGTHS * 2)]
    model, by_hand = tagger(), tagger()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for start in (0, 3):
        whole = together(batches[start : start + 3])
        optimizer.zero_grad()
        divided(by_hand(whole["input_ids"]), whole).backward()
        optimizer.step()

    autoaccum.fit(
        model,
        batches,
        12,
        loss=divided,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device="cpu",
        precision="fp32",
        micro_batch=2,
        progress=False,
    )

    torch.testing.assert_close(model.state_dict(), by_hand.state_dict(), rtol=1e-12, atol=1e-14)
