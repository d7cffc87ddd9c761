"""Updates of tokens, and samples by length, have the gradient of the whole batch, whatever fails on the way."""

import itertools
import re
import time

import pytest
import torch
from torch import nn

import autoaccum
import rank_tokens
from autoaccum.errors import DoesNotFitError, InvalidInputError
from faults import FailAt
from helpers import assert_bitwise
from ragged import Causal, lengths_of, loader_of, padded, texts

SAMPLES, BATCH, TOKENS = 48, 8, 90


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(loader, *, model=None, optimizer=sgd, **options):
    model = model or Causal()
    result = autoaccum.fit(
        model, loader, optimizer=optimizer, device="cpu", precision="fp32", **({"progress": False} | options)
    )
    return model, result


def by_hand(windows):
    """One update from each window, with all its samples at once, padded to the longest of them."""
    model = Causal()
    optimizer = sgd(model.parameters())
    for window in windows:
        optimizer.zero_grad()
        model(**padded(window))["loss"].backward()
        optimizer.step()
    return model


def assert_same(found, expected, tolerance=1e-12):
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def windows_by_tokens(each, target):
    """The definition: whole samples, as near to the target as they come. A text of n tokens has n labels."""
    windows, held = [[]], 0
    for text in each:
        if held and abs(held + len(text) - target) > abs(held - target):
            windows, held = [*windows, []], 0
        windows[-1].append(text)
        held += len(text)
        if held >= target:
            windows, held = [*windows, []], 0
    return [window for window in windows if window]


HOW = {
    "auto": {},
    "fixed": {"micro_batch": 30},
    "one at a time": {"micro_batch": 1},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_update_of_tokens_is_that_of_all_its_samples_at_once(how):
    expected = by_hand(windows_by_tokens(texts(*lengths_of(SAMPLES)), TOKENS))

    found, result = trained(loader_of(SAMPLES, BATCH), target_tokens=TOKENS, **how)

    assert_same(found, expected)
    assert result.samples == SAMPLES
    assert result.plan.counts == "tokens"
    assert result.plan.target_batch == TOKENS


@pytest.mark.parametrize("how", [{}, {"micro_batch": 5}, {"micro_batch": 5, "strategy": "uniform"}], ids=str)
@pytest.mark.parametrize("left", [False, True])
def test_order_by_length_leaves_the_update_as_it_is(how, left):
    how_padded = {"left": left, "positions": True} | ({"width": 26} if left else {})
    expected, _ = trained(loader_of(SAMPLES, BATCH, **how_padded), target_batch=16, micro_batch=16)

    found, result = trained(loader_of(SAMPLES, BATCH, **how_padded), target_batch=16, order="length", **how)

    assert_same(found, expected)
    assert result.steps == SAMPLES // 16
    assert result.plan.counts == "samples"


def test_micro_batches_hold_little_padding():
    as_it_came, by_length = Causal(), Causal()
    trained(loader_of(SAMPLES, BATCH), model=as_it_came, target_batch=24, micro_batch=4)

    trained(loader_of(SAMPLES, BATCH), model=by_length, target_batch=24, micro_batch=4, order="length")

    # The first forward passes ask what the loss runs over.
    computed = [sum(rows * columns for rows, columns in model.shapes[-12:]) for model in (as_it_came, by_length)]
    real = sum(lengths_of(SAMPLES))
    assert computed[1] - real < (computed[0] - real) / 2


def test_no_micro_batch_of_several_samples_exceeds_the_plan():
    model = Causal()
    _, result = trained(loader_of(SAMPLES, BATCH), model=model, target_tokens=TOKENS, micro_batch=30)

    sizes = [rows * columns for rows, columns in model.shapes if rows > 1]
    assert sizes
    # All samples of a window are seen at once where it is asked what the loss runs over; those shapes are few.
    assert sorted(sizes)[len(sizes) // 2] <= 30
    assert result.plan.micro_batch == 30


def test_lists_of_samples_make_updates_of_tokens_too():
    each = texts(*lengths_of(SAMPLES))
    expected = by_hand(windows_by_tokens(each, TOKENS))
    lists = [each[at : at + BATCH] for at in range(0, SAMPLES, BATCH)]

    found, _ = trained(
        lists, target_tokens=TOKENS, tokens=lambda batch: list(map(len, batch)), split=autoaccum.ListOfSamples(padded)
    )

    assert_same(found, expected)


def test_loop_of_the_users_own_makes_the_same_updates():
    expected, _ = trained(loader_of(SAMPLES, BATCH), target_tokens=TOKENS, micro_batch=30)
    model = Causal()
    plan = autoaccum.plan(TOKENS, 30, counts="tokens")
    runner = autoaccum.Runner(model, sgd(model.parameters()), plan, device="cpu", precision="fp32")

    for window in autoaccum.windows(loader_of(SAMPLES, BATCH), target_tokens=TOKENS):
        runner.step(window)

    assert_same(model, expected)


@pytest.mark.parametrize("how", [{"target_tokens": TOKENS}, {"target_batch": 16, "order": "length"}], ids=str)
@pytest.mark.parametrize("micro_batch", ["auto", 30])
def test_lack_of_memory_anywhere_leaves_the_update_as_it_is(how, micro_batch):
    options = how | {"micro_batch": micro_batch, "strategy": "balanced", "max_steps": 3, "cache": False}
    undisturbed, _ = trained(loader_of(SAMPLES, BATCH), **options)
    with FailAt() as counter:
        trained(loader_of(SAMPLES, BATCH), **options)
    points = range(counter.count // 3, counter.count, counter.count // 8 + 1)

    hits = 0
    for point in points:
        try:
            with FailAt(point) as failing:
                found, result = trained(loader_of(SAMPLES, BATCH), **options)
        except autoaccum.StateDamagedError:
            continue  # the optimizer had begun to write
        except torch.OutOfMemoryError:
            assert failing.where == "aten._local_scalar_dense.default"  # reads a number, which takes no memory
            continue
        hits += result.oom_events
        assert failing.hits == 1
        assert result.steps == 3
        assert_same(found, undisturbed)
    assert hits


class StopAt(autoaccum.Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, report, *, epoch):
        if report.step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("batch", [1, 3, BATCH])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_run_that_goes_on_ends_where_the_undisturbed_one_ends(batch, step, tmp_path):
    options = {"target_tokens": TOKENS, "micro_batch": 30, "epochs": 2, "seed": 3}
    whole, undisturbed = trained(loader_of(SAMPLES, batch), model=Causal(dropout=0.2), **options)
    options["checkpoint"] = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        trained(loader_of(SAMPLES, batch), model=Causal(dropout=0.2), callbacks=[StopAt(step)], **options)

    found, result = trained(loader_of(SAMPLES, batch), model=Causal(dropout=0.2), **options)

    assert result.resumed_from == step
    assert result.samples == undisturbed.samples == 2 * SAMPLES
    assert_bitwise(found.state_dict(), whole.state_dict())


def test_checkpoint_of_samples_is_not_gone_on_with_in_tokens(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained(loader_of(SAMPLES, BATCH), target_batch=TOKENS, checkpoint=tmp_path, callbacks=[StopAt(1)], epochs=2)

    with pytest.raises(autoaccum.CheckpointError, match="made with 90, and this call has 90 tokens"):
        trained(loader_of(SAMPLES, BATCH), target_tokens=TOKENS, checkpoint=tmp_path, epochs=2)


class Greedy(Causal):
    """Cannot take more than so many columns."""

    def forward(self, input_ids, **others):
        if input_ids.shape[1] > 20:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB. (injected)")
        return super().forward(input_ids, **others)


@pytest.mark.parametrize("how", [{"target_tokens": TOKENS}, {"target_batch": 4, "order": "length"}], ids=str)
@pytest.mark.parametrize("micro_batch", ["auto", 4])
def test_sample_that_does_not_fit_alone_is_named(how, micro_batch):
    loader = [padded(texts(3, 5, 4, 31))]

    with pytest.raises(
        DoesNotFitError, match=r"sample 3 of the window, 31 columns long, of shapes .*\(31,\),? and .* does not fit on"
    ):
        trained(loader, model=Greedy(), micro_batch=micro_batch, **how)


def test_samples_that_cannot_be_ordered_stay_as_they_come(capsys):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)

        def forward(self, inputs):
            return self.linear(inputs)

    loader = [(torch.randn(4, 3), torch.randn(4, 1))]

    trained(loader, model=Plain(), target_batch=4, order="length", progress="lines")

    said = capsys.readouterr().err
    assert "samples stay in the loader's order (order='length'): a batch has no attention_mask" in said


class Last(nn.Module):
    """Reads the last token that counts, as embedding models do with either side of padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(23, 8).double(), nn.Linear(8, 3).double()

    def forward(self, input_ids, attention_mask, labels, classes):
        hidden = (self.tokens(input_ids) * attention_mask[..., None]).cumsum(1)
        last = attention_mask.shape[1] - 1 if attention_mask[:, -1].all() else attention_mask.sum(1) - 1
        pooled = hidden[torch.arange(len(hidden)), last]
        return {"loss": nn.functional.cross_entropy(self.head(pooled), classes)}


@pytest.mark.parametrize("left", [False, True])
def test_order_by_length_leaves_the_token_that_a_model_reads_where_it_is(left):
    loader = [batch | {"classes": batch["input_ids"].sum(1) % 3} for batch in loader_of(32, 8, left=left)]
    options = {"target_batch": 16, "micro_batch": 8, "max_steps": 1}
    expected, _ = trained(loader, model=Last(), **options)

    found, _ = trained(loader, model=Last(), order="length", **options)

    assert_same(found, expected)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"loss_scope": "window"}, "loss_scope='window' joins the outputs"),
        ({"split": autoaccum.Along(1)}, "runs samples along another dimension"),
        ({"probe": "before"}, "tries numbers of samples"),
    ],
)
def test_what_needs_another_order_is_refused(given, told):
    with pytest.raises(InvalidInputError, match=told):
        trained(loader_of(SAMPLES, BATCH), target_tokens=TOKENS, **given)


@pytest.mark.parametrize("as_lists", [False, True])
@pytest.mark.parametrize("how", [{"target_tokens": TOKENS}, {"target_batch": 16, "order": "length"}], ids=str)
def test_noise_is_measured_from_random_micro_batches_with_as_little_padding(how, as_lists, capsys):
    loader, collated = loader_of(SAMPLES, BATCH), {}
    if as_lists:
        each = texts(*lengths_of(SAMPLES))
        loader = [[{"input_ids": one} for one in each[at : at + BATCH]] for at in range(0, SAMPLES, BATCH)]
        collated = {"split": autoaccum.ListOfSamples(lambda samples: padded([one["input_ids"] for one in samples]))}
        if "target_tokens" in how:
            collated["tokens"] = lambda samples: [len(one["input_ids"]) for one in samples]
    micro_batch = {"micro_batch": 60 if "target_tokens" in how else 5}
    plain, _ = trained(loader, **how, **collated, **micro_batch)
    model = Causal()

    found, result = trained(loader, model=model, noise_scale=1, progress="lines", **how, **collated, **micro_batch)

    assert_same(found, plain)
    assert all(report.noise_scale is None or report.noise_scale > 0 for report in result.history)
    assert sum(len(report.micro_batches) > 1 for report in result.history) == result.steps
    last = [rows for rows, _ in model.shapes[-len(result.history[-1].micro_batches) :]]
    assert sum(last) == result.history[-1].samples
    assert "gradient noise scale" in capsys.readouterr().err


def test_tokens_that_cannot_be_counted_are_refused_before_anything_is_trained():
    model = nn.Linear(3, 1)
    before = model.weight.clone()

    with pytest.raises(InvalidInputError, match=r"pass tokens=, a function of a batch"):
        trained([(torch.randn(4, 3), torch.randn(4, 1))], model=model, target_tokens=10)
    assert torch.equal(model.weight, before)


def test_dropout_masks_of_other_samples_are_told_once(capsys):
    trained(loader_of(SAMPLES, BATCH), model=Causal(dropout=0.1), target_batch=16, order="length", progress="lines")

    assert capsys.readouterr().err.count("dropout masks meet other samples") == 1


class Texts(torch.utils.data.Dataset):
    """A dataset that knows the lengths of its samples, and counts how many were loaded."""

    def __init__(self, *lengths):
        self.texts, self.lengths, self.loaded = texts(*lengths), list(lengths), []

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        self.loaded.append(index)
        return self.texts[index]


@pytest.mark.parametrize("how", [{"target_tokens": 30}, {"target_batch": 4, "order": "length"}], ids=str)
@pytest.mark.parametrize("as_list", [False, True])
def test_longest_sample_that_does_not_fit_is_named_before_training(how, as_list):
    dataset = Texts(3, 5, 4, 6, 31, 5)
    loader = torch.utils.data.DataLoader(dataset.texts if as_list else dataset, 2, collate_fn=padded)
    model = Greedy()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    with pytest.raises(
        DoesNotFitError, match=r"sample 4 of the dataset, 31 columns long, of shapes .* does not fit on"
    ):
        trained(loader, model=model, **how)

    assert_bitwise(model.state_dict(), before)
    assert [shape for shape in model.shapes if shape != (1, 31)] == []


def test_trying_the_longest_sample_leaves_no_trace():
    def run(dataset):
        torch.manual_seed(4)
        loader = torch.utils.data.DataLoader(dataset, 4, collate_fn=padded, shuffle=True)
        return trained(loader, model=Causal(dropout=0.2), target_tokens=40, micro_batch=30)[0]

    told, untold = Texts(*lengths_of(SAMPLES)), Texts(*lengths_of(SAMPLES))
    del untold.lengths

    assert_bitwise(run(told).state_dict(), run(untold).state_dict())
    assert len(told.loaded) == len(untold.loaded) + 1


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("micro_batch", ["auto", 3])
def test_ranks_take_their_parts_of_a_window_by_length(crew, micro_batch):
    expected, _ = trained(loader_of(SAMPLES, BATCH), target_batch=16, micro_batch=16)

    answers = crew.run(
        "rank_tokens:train", SAMPLES, BATCH, size=2, target_batch=16, order="length", micro_batch=micro_batch
    )

    for found in answers:
        torch.testing.assert_close(found["parameters"], flat(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("micro_batch", ["auto", 30])
@pytest.mark.parametrize("loader", ["list", "shuffling"])
def test_ranks_make_the_updates_of_one_process_from_a_target_in_tokens(crew, loader, micro_batch, size):
    options = {"target_tokens": TOKENS, "micro_batch": micro_batch, "epochs": 2}
    result, expected = rank_tokens.run(rank_tokens.loaders(SAMPLES, BATCH)[loader](), **options)

    answers = crew.run("rank_tokens:train", SAMPLES, BATCH, size=size, loader=loader, **options)

    for found in answers:
        assert found["samples"] == [report.samples for report in result.history]
        torch.testing.assert_close(found["parameters"], flat(expected), rtol=1e-12, atol=1e-12)


def test_ranks_with_samples_of_their_own_each_come_nearest_to_their_part_of_the_target(crew):
    each = texts(*lengths_of(SAMPLES))
    of_rank = [
        windows_by_tokens(
            [text for at in range(rank * BATCH, SAMPLES, 2 * BATCH) for text in each[at : at + BATCH]], 45
        )
        for rank in range(2)
    ]
    windows = [one + other for one, other in itertools.zip_longest(*of_rank, fillvalue=[])]
    expected = by_hand(windows)

    answers = crew.run("rank_tokens:train", SAMPLES, BATCH, size=2, loader="own", target_tokens=90, shard=False)

    for found in answers:
        assert found["samples"] == list(map(len, windows))
        torch.testing.assert_close(found["parameters"], flat(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shard", [True, False])
def test_last_windows_that_are_too_short_are_left_out_on_all_ranks(crew, shard):
    options = {"target_tokens": TOKENS, "drop_last": True, "shard": shard, "micro_batch": 30}
    loader = "list" if shard else "own, of unlike number"
    whole, _ = rank_tokens.run(loader_of(SAMPLES, BATCH), target_tokens=TOKENS)

    one, other = crew.run("rank_tokens:train", SAMPLES, BATCH, size=2, loader=loader, **options)

    assert one["samples"] == other["samples"]
    assert torch.equal(one["parameters"], other["parameters"])
    if shard:
        assert one["samples"] == [report.samples for report in whole.history][:-1]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_go_on_in_tokens_end_where_the_undisturbed_end(crew, ranks, tmp_path):
    options = {"loader": "shuffling", "target_tokens": TOKENS, "micro_batch": 30, "dropout": 0.2, "shares": "equal"}
    undisturbed = crew.run("rank_tokens:train", SAMPLES, BATCH, size=2, max_steps=7, **options)
    crew.run("rank_tokens:train", SAMPLES, BATCH, size=2, max_steps=3, checkpoint=tmp_path, **options)

    found = crew.run("rank_tokens:train", SAMPLES, BATCH, size=ranks, max_steps=7, checkpoint=tmp_path, **options)

    assert all(one["resumed"] == 3 for one in found)
    assert found[0]["samples"] == undisturbed[0]["samples"][3:]
    if ranks == 2:  # of another number, other masks are drawn
        assert all(torch.equal(one["parameters"], undisturbed[0]["parameters"]) for one in found)


def test_one_process_goes_on_with_a_training_of_ranks_in_tokens(crew, tmp_path):
    options = {"target_tokens": TOKENS, "micro_batch": 30}
    _, expected = rank_tokens.run(rank_tokens.loaders(SAMPLES, BATCH)["shuffling"](), max_steps=7, **options)
    crew.run(
        "rank_tokens:train", SAMPLES, BATCH, size=2, loader="shuffling", max_steps=3, checkpoint=tmp_path, **options
    )

    loader = rank_tokens.loaders(SAMPLES, BATCH)["shuffling"]()
    result, found = rank_tokens.run(loader, max_steps=7, checkpoint=tmp_path, **options)

    assert result.resumed_from == 3
    assert_same(found, expected)


def test_fewer_tokens_than_ranks_are_refused(crew):
    for answer in crew.answers("rank_tokens:train", SAMPLES, BATCH, size=2, target_tokens=1):
        assert isinstance(answer, InvalidInputError)
        assert "target_tokens=1 is less than the number of ranks, 2" in str(answer)


def test_ranks_share_tokens_by_their_speed(crew):
    options = {"target_tokens": 300, "micro_batch": 60, "epochs": 4}
    _, expected = rank_tokens.run(loader_of(SAMPLES, BATCH), **options)

    for found in crew.run("rank_tokens:train", SAMPLES, BATCH, size=2, shares="speed", **options):
        torch.testing.assert_close(found["parameters"], flat(expected), rtol=1e-12, atol=1e-12)


def test_lines_name_tokens_where_sizes_count_them(capsys):
    trained(loader_of(400, BATCH), target_tokens=TOKENS, progress="lines")

    said = capsys.readouterr().err
    assert re.search(r"trial of \d+ tokens: fits", said)
    assert re.search(r"largest that fits \d+ tokens, found in", said)
    assert " a token" in said
    assert " a sample" not in said
    assert re.search(r"done: .* cut [\d,]+ tokens with padding", said)


def test_next_run_begins_with_tokens_that_fit_beyond_the_target(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    trained(loader_of(400, BATCH), target_tokens=TOKENS, progress="lines")
    largest = int(re.search(r"largest that fits (\d+) tokens", capsys.readouterr().err)[1])
    assert largest > TOKENS  # with padding

    trained(loader_of(400, BATCH), target_tokens=TOKENS, progress="lines")

    said = capsys.readouterr().err
    assert "damaged" not in said
    assert f"a micro-batch of {largest} fitted in an earlier run" in said


@pytest.mark.parametrize("target", [{"target_tokens": TOKENS}, {"target_batch": 16, "order": "length"}], ids=str)
def test_windows_that_the_clock_compares_are_cut_as_it_asks(target):
    """Micro-batches half as large take twice as long here, so that the largest win."""

    class Slow(Causal):
        def forward(self, *args, **inputs):
            time.sleep(0.004)
            return super().forward(*args, **inputs)

    model = Slow()
    _, result = trained(loader_of(1200, BATCH), model=model, **target)

    timed = [len(report.micro_batches) for report in result.history[8:40]]
    assert max(timed) >= 3  # smaller sizes were tried
    if result.plan.accum_steps == 1:  # as the clock says, unless other work disturbs it: padding does not cut what fits
        assert {len(report.micro_batches) for report in result.history[-20:-1]} <= {1, 2}
