"""Models with their own loss get the gradient of the whole window: GPT-2 (shifts by one), T5 and BERT (do not)."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autoaccum
from gradients import (
    assert_full_batch_gradient,
    cut_gradient,
    cuts,
    distance,
    full_batch_gradient,
)
from helpers import a_few_of
from tiny_transformers import tiny

loss_utils = pytest.importorskip("transformers.loss.loss_utils")

V, N, T = 60, 9, 8


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, **_):
    """The loss of Transformers' causal models, but for its cast to float32, which hides what float64 shows."""
    labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return loss_utils.fixed_cross_entropy(logits.reshape(-1, vocab_size), labels.reshape(-1), num_items_in_batch)


def gpt2():
    model = tiny("GPT2LMHeadModel", V, T, n_layer=2).double()
    model.loss_function = causal_loss
    return model


def t5():
    return tiny("T5ForConditionalGeneration", V, T).double()


def bert():
    return tiny("BertForMaskedLM", V, T, num_hidden_layers=2).double()


MODELS = {"GPT-2": gpt2, "T5": t5, "BERT": bert}
CUTS = [(6, 2, 1), (1,) * 9]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


def sentences(lengths, seed=0):
    """Sentences of these lengths, padded; labels of -100 where there is nothing to predict."""
    ids = torch.randint(3, V, (len(lengths), T), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids.masked_fill(~mask, 0),
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }


# Of a sentence of one token GPT-2 has nothing to predict; cut singly there are micro-batches in which nothing counts.
PADDED = sentences([8, 1, 5, 2, 8, 1, 3, 7, 2])


@pytest.mark.parametrize("sizes", CUTS)
def test_padded_window_has_the_full_batch_gradient(sizes, model):
    assert_full_batch_gradient(model, None, PADDED, sizes)


def test_micro_batch_in_which_nothing_counts_adds_nothing(model):
    batch = sentences([8, 1, 5, 2, 8, 6, 3, 7, 2])
    batch["labels"][4:6] = -100

    assert_full_batch_gradient(model, None, batch, (4, 2, 3))


@pytest.mark.parametrize(("sizes", "model"), a_few_of(CUTS, MODELS), indirect=["model"])
def test_prompt_that_is_seen_but_does_not_count_is_told_from_padding(sizes, model):
    """Until it comes, counting labels and counting the mask give the same."""
    plain, prompted = sentences([8, 1, 5, 2, 8, 1, 3, 7, 2]), sentences([8, 4, 5, 6, 8, 5, 3, 7, 2])
    for row, prompt in enumerate([1, 3, 0, 5, 7, 2, 2, 1, 0]):
        prompted["labels"][row, :prompt] = -100
    expected, loss = full_batch_gradient(model, None, prompted)
    gradients = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    )
    runner = autoaccum.Runner(model, optimizer, autoaccum.Plan(N, sizes), device="cpu", precision="fp32")

    runner.step(plain)
    report = runner.step(prompted)

    assert distance(gradients[1], expected) <= 1e-12
    assert report.loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize(("sizes", "model", "items"), a_few_of(CUTS, MODELS, [7, torch.tensor(7)]), indirect=["model"])
def test_number_of_items_in_the_batch_is_heeded_or_ignored_as_the_model_does(items, sizes, model):
    """GPT-2 divides its sum by it; T5 and BERT accept it and go on with a mean."""
    assert_full_batch_gradient(model, None, PADDED | {"num_items_in_batch": items}, sizes)


def test_bfloat16_parameters_do_not_silently_hide_what_the_loss_runs_over(model, capsys):
    in_half = copy.deepcopy(model).bfloat16()
    expected, _ = full_batch_gradient(in_half, None, PADDED)

    found, by_samples = (
        cut_gradient(in_half, None, PADDED, (1, 5, 3), loss_reduction=said)[0].double() for said in (None, "mean")
    )

    # Bfloat16 itself takes the gradient of a cut some percent away; weighed by samples it is far off.
    is_right = distance(found, expected.double()) < 0.5 * distance(by_samples, expected.double())
    assert is_right or "do not determine its reduction" in capsys.readouterr().err


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(MODELS)),
    lengths=st.lists(st.integers(2, T), min_size=2, max_size=N),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_lengths_in_any_cut_have_the_full_batch_gradient(name, lengths, seed, data):
    torch.manual_seed(seed)

    assert_full_batch_gradient(MODELS[name](), None, sentences(lengths, seed), data.draw(cuts(len(lengths))))
