"""memory="auto": what saves memory is added wherever not even one sample fits, kept and remembered."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from fallback_models import Feed, Wide
from rung_training import STEPS, assert_same, is_plain, replayed, trained


def test_what_is_needed_is_taken_and_updates_are_the_same_bit_for_bit(capsys):
    model, result = trained("3MiB")

    assert result.steps == STEPS
    assert result.memory == ("checkpoint",)
    assert_same(model, replayed(result))
    assert is_plain(model)
    assert "not even one sample fits; from now on activation checkpointing of 4" in capsys.readouterr().err


def test_nothing_is_taken_where_samples_fit(capsys):
    model, result = trained("8MiB")

    assert result.memory == ()
    assert len(result.history[0].micro_batches) > 1
    assert "memory='auto'" not in capsys.readouterr().err
    assert_same(model, replayed(result))


@pytest.mark.parametrize("probe", ["inline", pytest.param("before", marks=pytest.mark.sweep)])
def test_next_run_begins_with_what_was_needed(tmp_path, monkeypatch, capsys, probe):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    _, first = trained("3MiB", cache=True, probe=probe)
    assert "not even one sample fits" in capsys.readouterr().err

    for _ in range(2):
        model, second = trained("3MiB", cache=True, probe=probe, max_steps=4)

        assert second.memory == first.memory
        assert is_plain(model)
        assert "not even one sample fits" not in capsys.readouterr().err


class Stop(autoaccum.Callback):
    def __init__(self, step):
        self._step = step

    def on_step(self, report, *, epoch):
        if report.step == self._step:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_resumed_run_keeps_what_was_chosen_and_ends_bit_for_bit_as_undisturbed(tmp_path):
    options = {"checkpoint": tmp_path, "progress": False}
    with pytest.raises(KeyboardInterrupt) as caught:
        trained("3MiB", callbacks=[Stop(STEPS - 6)], **options)
    before = caught.value.result

    model, result = trained("3MiB", **options)

    assert result.resumed_from == STEPS - 6
    assert result.memory == before.memory != ()
    assert {report.micro_batches for report in result.history} == {before.plan.micro_batches}
    assert_same(model, replayed(before, result))


@pytest.mark.parametrize(
    "memory",
    [["auto", "checkpoint"], ["auto", "auto"], ["auto", "chunked_loss", "offload"]],
)
def test_auto_beside_names_is_refused(memory):
    with pytest.raises(autoaccum.InvalidInputError, match="pass it alone"):
        trained("3MiB", memory=memory)


class Tagger(nn.Module):
    """Tells its head as the models of Transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(3000, 16)
        self.head = nn.Linear(16, 3000)

    def forward(self, tokens):
        return self.head(self.embed(tokens))

    def get_output_embeddings(self):
        return self.head


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


def test_auto_takes_the_loss_in_chunks_first():
    result = tagged("30MiB", 2, memory="auto")

    assert result.memory == ("chunked_loss",)


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
    return model, result


class Speaker(nn.Module):
    """Has blocks that keep much, and a head over many classes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(3000, 32), nn.Linear(32, 3000)
        self.blocks = nn.ModuleList([Feed() for _ in range(24)])

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def get_output_embeddings(self):
        return self.head


def test_auto_leaves_out_what_the_loss_refuses(capsys):
    tokens = torch.randint(3000, (4, 256), generator=torch.Generator().manual_seed(3))

    def train(**options):
        model = Speaker().eval()  # of which no cut draws other numbers
        result = autoaccum.fit(
            model,
            [{"tokens": tokens, "labels": tokens}] * 3,
            4,
            loss=in_place,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            cache=False,
            progress="lines",
            precision="fp32",
            loss_reduction="mean",
            **options,
        )
        return model, result

    found, result = train(device=autoaccum.Simulated("13MiB"), memory="auto")
    said = capsys.readouterr().err
    expected, _ = train(device=autoaccum.Simulated("1GiB"))

    assert result.memory == ("checkpoint",)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert "add_ is computed of logits that are never made" in said
    assert "from now on activation checkpointing of 24" in said


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
    with pytest.raises(autoaccum.SavingRefusedError, match="add_ is computed of logits"):
        by_fit(Tagger(), "chunked_loss", "1GiB", 2)


def test_accumulators_auto_takes_the_loss_in_chunks_first():
    tokens = torch.randint(3000, (4, 1024), generator=torch.Generator().manual_seed(3))
    accumulator = autoaccum.Accumulator(
        Tagger(),
        loss=lambda outputs, batch: functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten()),
        device=autoaccum.Simulated("30MiB"),
        cache=False,
        memory="auto",
    )

    accumulator.backward({"tokens": tokens, "labels": tokens})

    assert accumulator.memory == ("chunked_loss",)


def test_error_where_no_rung_fits_names_what_is_in_force():
    with pytest.raises(autoaccum.DoesNotFitError) as caught:
        trained("800KiB")

    (note,) = caught.value.__notes__
    assert note.startswith("autoaccum: in force already: activation checkpointing of 4 Feed blocks; what backward")
