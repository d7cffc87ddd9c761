"""Updates of tokens, and of lists of samples by size, have the gradient of the whole batch, whatever fails."""

import itertools

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._launch.script import FitCall  # the report's, which has no way in of its own for a batch
from support.data.ragged import Causal, lengths_of, loader_of, padded, texts
from support.faults.modes import FailAt
from support.models.small import assert_bitwise
from support.ranks import expect
from support.ranks.rows import Row, table
from support.ranks.training import FAR, far
from support.training.long_runs import StopAt, StoppedError

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


def lists(samples=SAMPLES, batch=BATCH):
    """The same texts, as lists of samples that each micro-batch collates."""
    each = texts(*lengths_of(samples))
    return [[{"input_ids": text} for text in each[at : at + batch]] for at in range(0, samples, batch)]


def collated(samples):
    return padded([sample["input_ids"] for sample in samples])


LISTS = {"split": autoaccum.ListOfSamples(collated)}
HOW = {"auto": {}, "fixed": {"micro_batch": 5}, "one at a time": {"micro_batch": 1}}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("as_lists", [False, True])
def test_update_of_tokens_is_that_of_all_its_samples_at_once(how, as_lists):
    windows = windows_by_tokens(texts(*lengths_of(SAMPLES)), TOKENS)
    loader, split = (lists(), LISTS) if as_lists else (loader_of(SAMPLES, BATCH), {})

    found, result = trained(loader, target_tokens=TOKENS, **how, **split)

    assert_same(found, by_hand(windows))
    assert [report.samples for report in result.history] == list(map(len, windows))
    if "micro_batch" in how:
        assert {max(report.micro_batches) for report in result.history} <= set(range(1, how["micro_batch"] + 1))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_lists_of_samples_by_size_leave_the_update_as_it_is(how):
    expected, _ = trained(loader_of(SAMPLES, BATCH), target_batch=16, micro_batch=16)

    found, result = trained(lists(), target_batch=16, **LISTS, **how)

    assert_same(found, expected)
    assert result.steps == SAMPLES // 16


def test_micro_batches_of_lists_hold_little_padding_the_largest_samples_first():
    as_it_came, by_size = Causal(), Causal()
    options = {"target_batch": 24, "micro_batch": 4, "loss_reduction": "mean"}  # so that no losses are tried
    trained(loader_of(SAMPLES, BATCH), model=as_it_came, **options)

    trained(lists(), model=by_size, **options, **LISTS)

    computed = [sum(rows * columns for rows, columns in model.shapes) for model in (as_it_came, by_size)]
    real = sum(lengths_of(SAMPLES))
    assert computed[1] - real < (computed[0] - real) / 2
    widths = [columns for _, columns in by_size.shapes[-6:]]
    assert widths == sorted(widths, reverse=True)


def test_samples_of_one_size_stay_in_the_order_of_the_loader():
    seen = []

    def collate(samples):
        seen.append(samples)
        return torch.stack([torch.full((3,), float(number)) for number in samples]), torch.zeros(len(samples), 1)

    loader = [[0, 1, 2], [3, 4, 5]]
    trained(
        loader, model=nn.Linear(3, 1), target_batch=6, micro_batch=2, loss=nn.MSELoss(),
        split=autoaccum.ListOfSamples(collate),
    )  # fmt: skip

    assert seen[-3:] == [[0, 1], [2, 3], [4, 5]]


def test_outputs_of_an_accumulator_are_in_the_order_of_the_samples():
    model = Causal()

    def closure(batch):
        return {"loss": model(**batch)["loss"], "outputs": batch["input_ids"]}

    accumulator = autoaccum.Accumulator(model, closure=closure, device="cpu", micro_batch=3, **LISTS)
    (window, *_) = lists(8, 8)
    report = accumulator.backward(window, keep="outputs")

    rows = [row[row != 0] for part in report.outputs for row in part]
    assert all(torch.equal(row, sample["input_ids"]) for row, sample in zip(rows, window, strict=True))


def test_loss_over_the_window_meets_the_samples_in_the_order_of_the_loader():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.tokens = nn.Embedding(23, 1).double()

        def forward(self, input_ids, attention_mask, labels):
            return (self.tokens(input_ids)[..., 0] * attention_mask).sum(1)

    def weighed_by_place(scores, batch):
        return (scores * torch.arange(len(scores))).sum()

    model, by_hand = Scores(), Scores()
    whole = padded([sample["input_ids"] for part in lists(16, 8) for sample in part])
    optimizer = sgd(by_hand.parameters())
    weighed_by_place(by_hand(**whole), None).backward()
    optimizer.step()

    trained(
        lists(16, 8), model=model, target_batch=16, micro_batch=4, loss=weighed_by_place, loss_scope="window", **LISTS
    )

    assert_same(model, by_hand)


def test_loop_of_the_users_own_makes_the_same_updates():
    expected, _ = trained(loader_of(SAMPLES, BATCH), target_tokens=TOKENS, micro_batch=5)
    model = Causal()
    runner = autoaccum.Runner(model, sgd(model.parameters()), autoaccum.plan(20, 5), device="cpu", precision="fp32")

    for window in autoaccum.windows(loader_of(SAMPLES, BATCH), target_tokens=TOKENS):
        runner.step(window)

    assert_same(model, expected)


@pytest.mark.parametrize(("as_lists", "how"), [(False, {"target_tokens": TOKENS}), (True, {"target_batch": 16})])
def test_labels_that_are_the_inputs_themselves_are_not_written_to(how, as_lists):
    """A collator may return `labels=input_ids`, one object: -100 in its padding would be no token."""

    def shared(texts):
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids}

    each = texts(*lengths_of(SAMPLES))
    loader = [each[at : at + BATCH] for at in range(0, SAMPLES, BATCH)]
    split = {"split": autoaccum.ListOfSamples(shared)}
    if not as_lists:
        loader, split = list(map(shared, loader)), {}
    before = [[ids.clone() for ids in (part if as_lists else part["input_ids"])] for part in loader]

    # Padding counts as a target here, so the loss of lists depends on how they are cut.
    _, result = trained(loader, micro_batch=5, loss_reduction="mean", **how, **split)

    assert result.samples == SAMPLES
    for part, earlier in zip(loader, before, strict=True):
        assert all(map(torch.equal, part if as_lists else part["labels"], earlier))


@pytest.mark.parametrize(
    ("how", "micro_batch"), [({"target_tokens": TOKENS}, "auto"), ({"target_batch": 16}, 5)], ids=["tokens", "samples"]
)
def test_lack_of_memory_anywhere_leaves_the_update_as_it_is(how, micro_batch):
    options = how | LISTS | {"micro_batch": micro_batch, "max_steps": 3}
    undisturbed, _ = trained(lists(), **options)
    with FailAt() as counter:
        trained(lists(), **options)
    points = range(counter.count // 3, counter.count, counter.count // 8 + 1)

    hits = 0
    for point in points:
        try:
            with FailAt(point) as failing:
                found, result = trained(lists(), **options)
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


@pytest.mark.parametrize(
    ("as_lists", "batch", "step"),
    [
        *(pytest.param(*row, marks=pytest.mark.sweep) for row in [(False, 1, 4), (True, BATCH, 4)]),
        *[(False, 3, 1), (True, 3, 2)],
    ],
)
def test_run_that_goes_on_ends_where_the_undisturbed_one_ends(as_lists, batch, step, tmp_path):
    options = {"target_tokens": TOKENS, "micro_batch": 5, "epochs": 2} | (LISTS if as_lists else {})
    loader = lists(SAMPLES, batch) if as_lists else loader_of(SAMPLES, batch)
    whole, undisturbed = trained(loader, model=Causal(dropout=0.2), **options)
    options["checkpoint"] = tmp_path / "run"
    with pytest.raises(StoppedError):
        trained(loader, model=Causal(dropout=0.2), callbacks=[StopAt(step)], **options)

    found, result = trained(loader, model=Causal(dropout=0.2), **options)

    assert result.resumed_from == step
    assert result.samples == undisturbed.samples == 2 * SAMPLES
    assert_bitwise(found.state_dict(), whole.state_dict())


VOID = {"input_ids": torch.ones(4, 5, dtype=torch.long), "labels": torch.full((4, 5), -100)}


@pytest.mark.parametrize(("batch", "how"), [(VOID, {}), (["a text", "another"], LISTS)], ids=["no label", "texts"])
def test_samples_without_a_token_are_refused_in_words_about_tokens(batch, how):
    for call in (
        lambda: trained([batch] * 3, target_tokens=TOKENS, **how),
        lambda: list(autoaccum.windows([batch] * 3, target_tokens=TOKENS, **how)),
        lambda: FitCall({"target_tokens": TOKENS, **how}).samples_of_target(batch),
    ):
        with pytest.raises(autoaccum.InvalidInputError, match=r"no .*token.*labels other than -100.*texts tokenized"):
            call()


def test_a_loader_without_samples_gives_no_window_in_tokens_as_in_samples():
    assert list(autoaccum.windows([], target_tokens=TOKENS)) == list(autoaccum.windows([], 4)) == []


# --- several ranks ----------------------------------------------------------------------------------------------------


def padded_batches(*, shuffle=False):
    return torch.utils.data.DataLoader(texts(*lengths_of(SAMPLES)), BATCH, shuffle=shuffle, collate_fn=padded)


LOADERS = {
    "in order": lambda rank, size, _: padded_batches(),
    "shuffling": lambda rank, size, _: padded_batches(shuffle=True),
    "own": lambda rank, size, _: loader_of(SAMPLES, BATCH)[rank::size],
    "own, of unlike number": lambda rank, size, _: loader_of(SAMPLES, BATCH)[: 2 + rank],
}


def on_ranks(loader, *, dropout=0.0, **given):
    options = {"target_batch": None, "target_tokens": TOKENS, "micro_batch": 5, "precision": "fp32"}
    options |= {"make_loader": LOADERS[loader], "shard_data": not loader.startswith("own")} | given
    return lambda *_: options | {"model": Causal(dropout=dropout)}


def nearest_to_half_of_the_target(found):
    each = texts(*lengths_of(SAMPLES))
    starts = [range(rank * BATCH, SAMPLES, 2 * BATCH) for rank in (0, 1)]
    of_rank = [
        windows_by_tokens([text for at in those for text in each[at : at + BATCH]], TOKENS // 2) for those in starts
    ]
    windows = [one + other for one, other in itertools.zip_longest(*of_rank, fillvalue=[])]
    assert found[0]["samples"] == list(map(len, windows))
    assert far(found[0]["parameters"], [one.detach() for one in by_hand(windows).parameters()]) <= FAR


def some_are_left_out(found):
    assert sum(found[0]["samples"]) < SAMPLES


ROWS = table(
    __file__,
    *(
        Row(f"ranks each come nearest to their part of the target in batches {loader}",
            on_ranks(loader, micro_batch="auto"), holds=expect.outcomes(nearest_to_half_of_the_target))
        for loader in ("own", "in order")
    ),
    *(
        Row(f"last windows that are too short are left out on all ranks, in batches {loader}",
            on_ranks(loader, drop_last=True), holds=expect.outcomes(some_are_left_out))
        for loader in ("in order", "own, of unlike number")
    ),
    Row("ranks that go on end where the undisturbed end", on_ranks("shuffling", dropout=0.2),
        holds=expect.goes_on({"max_steps": 3}, {"max_steps": 7}, kept=3)),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
