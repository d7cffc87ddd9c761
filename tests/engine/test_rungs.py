"""memory="auto": what saves memory is tried in windows that train, chosen by the clock, kept and remembered."""

import contextlib
import io
import re

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import autoaccum
from fallback_models import Wide
from rung_training import STEPS, assert_same, data, is_plain, replayed, trained


@pytest.fixture(scope="module")
def said():
    """What the training of the next fixture has printed."""
    return io.StringIO()


@pytest.fixture(scope="module")
def tried(said):
    """A training in which not one sample fits with nothing saved; it trains in pieces with the rungs above."""
    with contextlib.redirect_stderr(said):
        return trained("3MiB")


def test_windows_that_tried_something_are_updates_bit_for_bit(tried):
    model, result = tried

    assert result.steps == STEPS
    assert len({report.micro_batches for report in result.history}) > 1
    assert_same(model, replayed(result))
    assert is_plain(model)


def test_all_that_was_tried_is_recorded_and_the_fastest_is_in_force(tried):
    _, result = tried

    first, *others = result.memory_trials
    assert (first.memory, first.micro_batch, first.seconds) == ((), None, None)
    assert [trial.memory for trial in others[:4]] == [
        ("checkpoint:1",),
        ("checkpoint:2",),
        ("checkpoint:3",),
        ("checkpoint",),
    ]
    timed = {trial.memory: trial.seconds for trial in others if trial.seconds is not None}
    assert timed[result.memory] <= min(timed.values()) * 1.02
    assert all(trial.peak_bytes > 0 for trial in others if trial.seconds is not None)


def test_nothing_is_tried_where_a_window_fits_at_once(capsys):
    model, result = trained("1GiB")

    assert (result.memory, result.memory_trials) == ((), ())
    assert "memory='auto'" not in capsys.readouterr().err
    assert_same(model, replayed(result))


def test_where_windows_are_few_only_what_is_needed_is_taken(capsys):
    _, plenty = trained("8MiB", max_steps=10)
    _, scarce = trained("3MiB", max_steps=10)

    assert plenty.memory == () != scarce.memory
    said = capsys.readouterr().err
    assert "not even one sample fits; from now on activation checkpointing of 1 of 4" in said
    assert "memory='auto' compares nothing in fewer than 40 windows, and 10 are to come" in said


@pytest.mark.parametrize("windows", [3, 5, 7, 9])
def test_run_that_ends_while_it_compares_reports_what_ran(capsys, windows):
    _, result = trained("8MiB", loader=data(windows))

    (told,) = re.findall(r"done: .* cut ([\d+x]+), 0 oom", capsys.readouterr().err)
    largest = max(result.history[-1].micro_batches)
    assert max(map(int, re.split("[+x]", told))) == largest
    assert all(trial.micro_batch is not None for trial in result.memory_trials)
    assert result.plan.micro_batch >= largest


def test_what_was_tried_is_told_where_the_run_ends_before_the_choice(capsys):
    trained("8MiB", loader=data(7))

    assert "was still comparing when the training ended; tried: nothing" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"micro_batch": 2}, {"probe": "off"}, {"micro_batch": 2, "max_steps": 3}])
def test_user_is_told_where_nothing_is_compared(capsys, options):
    trained("8MiB", **options)

    assert "memory='auto' compares nothing where sizes are not searched for" in capsys.readouterr().err


@pytest.mark.usefixtures("tried")
def test_user_is_told_once_what_was_tried(said):
    (line,) = [line for line in said.getvalue().splitlines() if "tried:" in line]

    assert "memory='auto' takes checkpoint" in line
    assert "nothing does not fit; checkpoint:1 does not fit; checkpoint:2" in line


def test_what_is_tried_is_said_before_the_plans_that_are_found_with_it(capsys):
    trained("8MiB", progress="lines")

    said = capsys.readouterr().err
    tried = re.findall(r"memory='auto' tries (\S+) from the next window on", said)
    assert tried
    assert len(tried) == len(set(tried))
    assert "nothing" not in tried  # which is what it begins with


@pytest.mark.parametrize("probe", ["inline", pytest.param("before", marks=pytest.mark.sweep)])
def test_next_run_begins_with_what_was_measured(tmp_path, monkeypatch, capsys, probe):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    _, first = trained("3MiB", cache=True, probe=probe)
    said = capsys.readouterr().err
    (tried,) = re.findall(r"; tried: (nothing does not fit; .* MiB\).*)", said)

    model, second = trained("3MiB", cache=True, probe=probe, max_steps=4)
    of_second = capsys.readouterr().err
    trained("3MiB", cache=True, probe=probe, max_steps=4)

    assert "as an earlier run has measured" not in said
    assert f"as an earlier run has measured: {tried}" in of_second
    assert f"as an earlier run has measured: {tried}" in capsys.readouterr().err
    assert second.memory == first.memory
    assert second.memory_trials == ()
    assert is_plain(model)


@pytest.mark.slow
def test_what_auto_has_found_is_not_taken_for_a_run_that_saves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    trained("8MiB", cache=True)

    _, result = trained("8MiB", memory=None, cache=True)

    assert result.memory == ()
    assert len(list(tmp_path.glob("plan-*.json"))) == 2


class Stop(autoaccum.Callback):
    def __init__(self, step):
        self._step = step

    def on_step(self, report, *, epoch):
        if report.step == self._step:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_resumed_run_keeps_what_was_chosen_and_ends_bit_for_bit_as_undisturbed(tmp_path):
    options = {"checkpoint": tmp_path, "strategy": "balanced", "progress": False}
    with pytest.raises(KeyboardInterrupt) as caught:
        trained("3MiB", callbacks=[Stop(STEPS - 6)], **options)
    before = caught.value.result

    model, result = trained("3MiB", **options)

    assert result.resumed_from == STEPS - 6
    assert result.memory == before.memory != ()
    assert result.memory_trials == ()
    assert {report.micro_batches for report in result.history} == {before.plan.micro_batches}
    assert_same(model, replayed(before, result))


@pytest.mark.slow
def test_run_that_is_resumed_while_it_measures_begins_to_measure_again(tmp_path):
    options = {"checkpoint": tmp_path, "progress": False, "loader": data(2 * STEPS)}
    with pytest.raises(KeyboardInterrupt) as caught:
        trained("3MiB", callbacks=[Stop(4)], **options)

    model, result = trained("3MiB", **options)

    assert len(result.memory_trials) >= 3
    assert result.steps == 2 * STEPS
    assert_same(model, replayed(caught.value.result, result))


@pytest.mark.parametrize(
    "memory",
    [["auto", "checkpoint"], ["auto", "auto"], ["auto", "chunked_loss"], ["auto", "chunked_loss:a", "offload"]],
)
def test_auto_beside_names_is_refused(memory):
    with pytest.raises(autoaccum.InvalidInputError, match="pass it alone, or with 'chunked_loss:NAME'"):
        trained("3MiB", memory=memory)


class Tagger(nn.Module):
    """Has a head that nothing but its name tells."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(3000, 16)
        self.head = nn.Linear(16, 3000)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def tagged(capacity, windows, **options):
    tokens = torch.randint(3000, (4, 1024), generator=torch.Generator().manual_seed(3))
    return autoaccum.fit(
        Tagger(),
        [{"tokens": tokens, "labels": tokens}] * windows,
        4,
        loss=lambda outputs, batch: functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device=autoaccum.Simulated(capacity),
        cache=False,
        progress="lines",
        **options,
    )


def test_auto_takes_the_loss_in_chunks_of_a_layer_that_the_user_names():
    result = tagged("30MiB", 2, memory=["auto", "chunked_loss:head"])

    assert result.memory == ("chunked_loss:head",)


def in_place(outputs, batch):
    """A loss that logits which are not computed refuse."""
    return functional.cross_entropy(outputs.add_(1.0).flatten(0, 1), batch["labels"].flatten())


def by_fit(model, memory, capacity, windows):
    tokens = torch.randint(3000, (4, 1024), generator=torch.Generator().manual_seed(3))
    result = autoaccum.fit(
        model,
        [{"tokens": tokens, "labels": tokens}] * windows,
        4,
        loss=in_place,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device=autoaccum.Simulated(capacity),
        cache=False,
        progress="lines",
        precision="fp32",
        memory=memory,
    )
    return model, result.memory_trials


def by_accumulator(model, memory, capacity, windows):
    tokens = torch.randint(3000, (4, 1024), generator=torch.Generator().manual_seed(3))
    accumulator = autoaccum.Accumulator(
        model, loss=in_place, device=autoaccum.Simulated(capacity), cache=False, memory=memory
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(windows):
        accumulator.backward({"tokens": tokens, "labels": tokens})
        optimizer.step()
        optimizer.zero_grad()
    return model, accumulator.memory_trials


@pytest.mark.parametrize("train", [by_fit, by_accumulator])
def test_auto_leaves_out_what_the_loss_refuses(train):
    with contextlib.redirect_stderr(io.StringIO()) as told:
        found, trials = train(Tagger(), ["auto", "chunked_loss:head"], "110MiB", 12)
    expected, _ = train(Tagger(), None, "1GiB", 12)

    assert [(trial.memory, trial.is_refused) for trial in trials[:2]] == [((), False), (("chunked_loss:head",), True)]
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    said = told.getvalue()
    assert "changes logits in place (add_)" in said
    assert "from now on what backward needs is kept in the host's memory (memory='auto')" in said


class Failing(Wide):
    """Fails under the first of what "auto" tries, in a way that nothing knows."""

    def forward(self, inputs):
        if "forward" in vars(self.blocks[0]):
            raise RuntimeError("not with this")
        return super().forward(inputs)


def test_auto_leaves_out_what_fails_when_it_is_first_tried(capsys):
    model, result = trained("8MiB", model=Failing())

    assert result.steps == STEPS
    assert {trial.memory for trial in result.memory_trials if trial.is_refused} >= {("checkpoint",)}
    assert result.memory in ((), ("offload",))
    assert "this fails: RuntimeError: not with this; from now on" in capsys.readouterr().err
    assert_same(model, replayed(result))


def test_error_that_has_nothing_to_do_with_memory_is_the_users():
    class Broken(Wide):
        calls = 0

        def forward(self, inputs):
            self.calls += 1
            if self.calls > 40:
                raise RuntimeError("the model's own")
            return super().forward(inputs)

    with pytest.raises(RuntimeError, match="the model's own"):
        trained("8MiB", model=Broken())


def test_what_the_user_names_is_refused_with_an_error_where_the_loss_refuses_it():
    with pytest.raises(autoaccum.SavingRefusedError, match="changes logits in place"):
        by_fit(Tagger(), "chunked_loss:head", "1GiB", 2)


def test_accumulators_auto_takes_the_layer_that_the_user_names():
    tokens = torch.randint(3000, (4, 1024), generator=torch.Generator().manual_seed(3))
    accumulator = autoaccum.Accumulator(
        Tagger(),
        loss=lambda outputs, batch: functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()),
        device=autoaccum.Simulated("30MiB"),
        cache=False,
        memory=["auto", "chunked_loss:head"],
    )

    accumulator.backward({"tokens": tokens, "labels": tokens})

    assert accumulator.memory == ("chunked_loss:head",)


@pytest.mark.parametrize("options", [{"memory": "auto"}, {"fallback": "checkpoint"}])
def test_user_is_told_which_layer_to_name_where_none_is_found(capsys, options):
    with pytest.raises(autoaccum.DoesNotFitError) as caught:
        tagged("30MiB", 2, **options)

    assert "memory='chunked_loss:head'" in str(caught.value)
    told = "memory=['auto', 'chunked_loss:head'] names it" in capsys.readouterr().err
    assert told == ("memory" in options)


def test_layer_that_is_named_beside_auto_must_be_there():
    with pytest.raises(autoaccum.InvalidInputError, match="'body' is not there"):
        tagged("1GiB", 2, memory=["auto", "chunked_loss:body"])


def test_error_where_no_rung_fits_names_what_is_in_force():
    with pytest.raises(autoaccum.DoesNotFitError) as caught:
        trained("800KiB")

    (note,) = caught.value.__notes__
    assert note.startswith("autoaccum: in force already: activation checkpointing of 4 Feed blocks; what backward")


@pytest.mark.slow
def test_language_model_is_trained_as_without_up_to_rounding_and_tries_its_loss_in_chunks():
    config = transformers.LlamaConfig(
        vocab_size=2000, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.randint(2000, (4, 1024), generator=torch.Generator().manual_seed(3))

    def parameters_after(**options):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        result = autoaccum.fit(
            model,
            [{"input_ids": tokens, "labels": tokens}] * 10,  # a list does not tell how few windows these are
            4,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            cache=False,
            progress=False,
            **options,
        )
        return list(model.parameters()), result

    expected, _ = parameters_after(device="cpu", micro_batch=4)
    found, result = parameters_after(device=autoaccum.Simulated("44MiB"), memory="auto")

    tried = {trial.memory: trial for trial in result.memory_trials}
    assert tried["chunked_loss",].micro_batch > tried[()].micro_batch
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
