"""`memory=`: by name from the start, or with "auto" added wherever not even one sample fits, kept and remembered."""

import random
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum import Simulated
from autoaccum._engine.checkpointing import checkpointed
from autoaccum._engine.savings import offloaded
from fallback_models import Feed, Stack, Wide, data, seed
from helpers import CPU, assert_bitwise, live_tensors, state_of
from rung_training import STEPS, assert_same, is_plain, replayed, trained


def test_what_is_needed_is_taken_and_updates_are_the_same_bit_for_bit(capsys):
    model, result = trained("3MiB")

    assert result.steps == STEPS
    assert result.memory == ("checkpoint",)
    assert_same(model, replayed(result))
    assert is_plain(model)
    assert "not even one sample fits; from now on activation checkpointing of 4" in capsys.readouterr().err


def test_next_run_begins_with_what_was_needed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path))
    _, first = trained("3MiB", remembers=True)
    assert "not even one sample fits" in capsys.readouterr().err

    for _ in range(2):
        model, second = trained("3MiB", remembers=True, max_steps=4)

        assert second.memory == first.memory
        assert is_plain(model)
        assert "not even one sample fits" not in capsys.readouterr().err


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
        progress="lines",
        **options,
    )


def test_auto_takes_the_loss_in_chunks_first():
    result = tagged("30MiB", 2, memory="auto")

    assert result.memory == ("chunked_loss",)


def in_place(outputs, batch):
    """A loss that logits which are not computed refuse."""
    return functional.cross_entropy(outputs.add_(1.0).flatten(0, 1), batch["labels"].flatten())


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


# --- by name, and what errors say ---


def peak_of(model, *contexts):
    memory = Simulated("1GiB")
    seed()
    with memory.limited(None), ExitStack() as changed:
        inputs, targets = torch.randn(512, 32), torch.randint(0, 4, (512,))
        for context in contexts:
            changed.enter_context(context(memory))
        nn.functional.cross_entropy(model(inputs), targets).backward()
        return memory.peak_bytes()


def test_each_way_takes_less_memory_and_both_less_than_checkpointing():
    def by_checkpoint(memory):
        return checkpointed([model])

    def by_offload(memory):
        return offloaded([model], memory)

    model = Stack(depth=12)
    plain = peak_of(model)
    model = Stack(depth=12)
    less = peak_of(model, by_checkpoint)
    model = Stack(depth=12)
    on_host = peak_of(model, by_offload)
    model = Stack(depth=12)
    both = peak_of(model, by_checkpoint, by_offload)

    assert max(less, on_host) < plain
    assert both < less


class FailsLate(nn.Module):
    """Runs out of memory behind layers whose outputs are kept for the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4), nn.Softmax(1))

    def forward(self, inputs):
        self.inner(inputs)
        raise torch.OutOfMemoryError("simulated lack of memory")


@pytest.mark.parametrize("samples", [2, 2000])
def test_forward_pass_that_fails_under_offloading_keeps_no_tensor(samples):
    model, inputs = FailsLate(), torch.randn(samples, 32)
    before = live_tensors()

    with offloaded([model], Simulated("1GiB")), pytest.raises(torch.OutOfMemoryError):
        model(inputs)

    assert live_tensors() == before


def fit(capacity, **options):
    model = Wide()
    seed()
    options = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
        "loss": nn.CrossEntropyLoss(),
        "progress": "lines",
    } | options
    result = autoaccum.fit(model, data(), 16, device=Simulated(capacity), **options)
    return model, result


def test_error_names_what_is_not_in_force_yet():
    with pytest.raises(autoaccum.DoesNotFitError) as neither:
        fit("800KiB")
    with pytest.raises(autoaccum.DoesNotFitError) as one:
        fit("800KiB", memory="checkpoint")
    with pytest.raises(autoaccum.DoesNotFitError) as both:
        fit("800KiB", memory=["checkpoint", "offload"])

    assert "memory='checkpoint'" in str(neither.value)
    assert "memory='offload'" in str(neither.value)
    assert "memory='checkpoint'" not in str(one.value)
    assert "memory='offload'" in str(one.value)
    assert "memory='" not in str(both.value)
    assert "less state" not in str(neither.value)  # SGD has none


def lacks_memory(*_):
    raise torch.OutOfMemoryError("simulated lack of memory in the optimizer")


def test_runner_computes_nothing_again_where_memory_lacks_for_the_optimizers_step():
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lacks_memory)
    runner = autoaccum.Runner(
        model, optimizer, autoaccum.plan(16, 8), loss=nn.CrossEntropyLoss(), device=CPU, memory="auto"
    )

    with pytest.raises(autoaccum.DoesNotFitError, match="even with no activations alive"):
        runner.step((torch.randn(16, 32), torch.zeros(16, dtype=torch.long)))

    assert runner.memory == ()


# --- in a loop of the user's own ---


LOSS = nn.CrossEntropyLoss()
NAMES = ["checkpoint", "checkpoint:Feed", "offload", ["checkpoint", "offload"]]


def stepped(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return autoaccum.Runner(model, optimizer, autoaccum.plan(8, options.pop("micro_batch")), **options).step


def accumulated(model, **options):
    return autoaccum.Accumulator(model, **options).backward


def worked(entry, memory, capacity="1GiB", micro_batch=2):
    """Return a model and the reports on two of its windows."""
    model = Wide()
    work = entry(model, loss=LOSS, device=Simulated(capacity), memory=memory, micro_batch=micro_batch)
    seed()
    reports = []
    for batch in data()[:2]:
        reports.append(work(batch))
        assert is_plain(model)
    return model, reports


def tensors(model):
    return [tensor for one in model.parameters() for tensor in (one, one.grad) if tensor is not None]


@pytest.mark.parametrize("entry", [stepped, accumulated])
@pytest.mark.parametrize("memory", NAMES, ids=str)
def test_updates_are_bitwise_those_without(entry, memory):
    (model, reports), (expected, plain) = worked(entry, memory), worked(entry, None)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(model), tensors(expected), strict=True))
    assert [report.loss for report in reports] == [report.loss for report in plain]


@pytest.mark.parametrize("entry", [stepped, accumulated])
def test_one_sample_fits_that_does_not_without(entry):
    with pytest.raises(autoaccum.DoesNotFitError):
        worked(entry, None, "2MiB", 1)

    _, reports = worked(entry, "checkpoint", "2MiB", 1)

    assert [report.micro_batches for report in reports] == [(1,) * 8] * 2


@pytest.mark.parametrize("entry", [stepped, accumulated])
def test_auto_saves_memory_once_not_one_sample_fits(entry, capsys):
    (model, reports), (expected, _) = worked(entry, "auto", "2MiB", 1), worked(entry, None, "1GiB", 1)

    assert [report.micro_batches for report in reports] == [(1,) * 8] * 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(model), tensors(expected), strict=True))
    assert "not even one sample fits; from now on activation checkpointing of" in capsys.readouterr().err


@pytest.mark.parametrize("entry", [stepped, accumulated])
def test_auto_changes_nothing_where_batches_fit(entry, capsys):
    (model, _), (expected, _) = worked(entry, "auto"), worked(entry, None)

    assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors(model), tensors(expected), strict=True))
    assert "memory=" not in capsys.readouterr().err


def test_error_where_nothing_helps_names_what_is_in_force():
    for entry in (stepped, accumulated):
        with pytest.raises(autoaccum.DoesNotFitError) as caught:
            worked(entry, "auto", "800KiB", 1)
        (note,) = caught.value.__notes__
        assert note.startswith("autoaccum: in force already: activation checkpointing of 4 Feed blocks; what backward")


def a_runner(model, **options):
    return autoaccum.Runner(model, torch.optim.SGD(model.parameters(), lr=0.1), autoaccum.plan(8, 4), **options)


@pytest.mark.parametrize("make", [autoaccum.Accumulator, a_runner])
@pytest.mark.parametrize(
    ("memory", "said"),
    [
        ("nope", "is unknown"),
        ("offload", "already are there"),
        ("chunked_loss", "no layer that makes logits was found"),
        ("checkpoint", "no repeated blocks to compute again, among Linear"),
        ("checkpoint:Blok", "no module has the name or the class 'Blok' to compute again, among Linear"),
        ("checkpoint:3.", "no module has the name"),
        (["auto", "checkpoint"], "pass it alone"),
    ],
)
def test_what_has_no_effect_is_refused_when_it_is_made(make, memory, said):
    with pytest.raises(autoaccum.InvalidInputError, match=said):
        make(nn.Linear(4, 4), device="cpu", memory=memory)


def test_search_saves_memory_as_training_does():
    def found(memory):
        model = Wide()
        result = autoaccum.find_micro_batch(model, data()[0], device=Simulated("2MiB"), memory=memory, loss=LOSS)
        assert is_plain(model)
        return result.micro_batch

    with pytest.raises(autoaccum.DoesNotFitError):
        found(None)
    assert found("auto") == found("checkpoint") > 0


def test_block_that_draws_from_pythons_generator_is_refused_each_time():
    class Draws(Feed):
        def forward(self, inputs):
            return super().forward(inputs * (1 + random.random()))  # noqa: S311

    model = Stack(depth=0)
    model.blocks = nn.ModuleList([Draws() for _ in range(2)])
    before = state_of(model)
    runner = a_runner(model, loss=LOSS, device="cpu", precision="fp32", memory="checkpoint")

    for _ in range(2):
        seed()
        drawn = random.getstate()
        with pytest.raises(autoaccum.InvalidInputError, match="a Draws draws from Python's or NumPy's generators"):
            runner.step(data()[0])
        assert_bitwise(state_of(model), before)
        assert is_plain(model)
        assert random.getstate() == drawn


@pytest.mark.parametrize("memory", [None, "checkpoint", "offload"])
def test_frozen_blocks_that_torchao_has_quantised_save_memory_like_others(memory):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

    def made():
        model = Stack(depth=0)
        model.blocks = nn.ModuleList([Feed() for _ in range(2)]).eval().requires_grad_(requires_grad=False)
        quantization.quantize_(model.blocks, quantization.Int8WeightOnlyConfig())
        return model

    model, expected = made(), made()
    for batch, targets in data()[:2]:
        nn.functional.cross_entropy(expected(batch), targets).backward()
        torch.optim.SGD(expected.last.parameters(), lr=0.1).step()
        expected.zero_grad()

    autoaccum.fit(
        model,
        data()[:2],
        8,
        loss=LOSS,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device=Simulated("1GiB"),
        precision="fp32",
        micro_batch=4,
        memory=memory,
        progress=False,
    )

    torch.testing.assert_close(model.last.weight, expected.last.weight)
    assert is_plain(model)


@pytest.mark.parametrize("compiles", [lambda model: model, lambda model: model.blocks[1]], ids=["model", "block"])
def test_compiled_blocks_are_not_computed_again(compiles, capsys):
    model = Wide()
    compiles(model).compile(backend="aot_eager")

    with pytest.raises(autoaccum.InvalidInputError, match="memory='checkpoint': the blocks are compiled"):
        a_runner(model, loss=LOSS, device="cpu", memory="checkpoint")

    _, result = trained("2MiB", model=model, max_steps=1)

    assert result.memory == ("offload",)
    assert "memory='auto' leaves out 'checkpoint': the blocks are compiled" in capsys.readouterr().err
    assert is_plain(model)
