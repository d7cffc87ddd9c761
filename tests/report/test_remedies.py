"""What would make a step smaller: tried on the same step, listed only where it helps."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._estimate.estimate import trace_step  # an argument
from autoaccum._report import remedies
from autoaccum._report.capacity import Question
from autoaccum._report.remedies import MANY_MICRO_BATCHES, are_due
from support.data.reports import DEVICE, MEASURED, predicted


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, inputs):
        return inputs + self.inner(inputs)


class Language(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.tokens = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def report_for(memory, target=256, length=512, **options):
    tokens = torch.zeros(4, length, dtype=torch.long)
    return autoaccum.preflight(
        Language(),
        (tokens, tokens),
        target,
        loss=loss,
        device_memory=memory,
        measure=False,
        precision="fp32",
        **options,
    )


@pytest.fixture(scope="module")
def small():
    return report_for("1GiB")


def test_every_remedy_takes_less_or_lets_more_samples_fit(small):
    before = small.predicted[0]

    assert small.remedies_on == before.gpu.name
    for remedy in small.remedies:
        assert remedy.micro_batch >= before.micro_batch


@pytest.mark.gpu_fakes
def test_all_ways_that_the_model_has_are_named(small):
    assert {remedy.save_memory for remedy in small.remedies} == {"checkpoint", "offload"}


@pytest.mark.gpu_fakes
def test_what_a_remedy_says_is_what_is_predicted_with_its_save_memory():
    def reported(save_memory):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)) for _ in range(12)])
        batch = torch.zeros(2, 1024, 256), torch.zeros(2, 1024, 256)
        options = {"loss": nn.MSELoss(), "optimizer": "sgd", "device_memory": "900MiB", "max_micro_batch": 48}
        return autoaccum.preflight(
            model, batch, 512, measure=False, precision="fp32", save_memory=save_memory, **options
        )

    (remedy,) = reported(["checkpoint"]).remedies
    (with_it,) = reported(remedy.save_memory).predicted

    assert remedy.micro_batch == with_it.micro_batch
    assert remedy.save_memory == ("checkpoint", "offload")


@pytest.mark.gpu_fakes
def test_a_way_with_which_the_model_fails_is_told_and_our_own_errors_are_raised(monkeypatch):
    class Fixed(Block):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            if "forward" in vars(self):
                raise ValueError("is called by another name")
            return outputs

    def reported():
        model = Language()
        model.blocks = nn.ModuleList([Fixed(), Fixed()])
        tokens = torch.zeros(4, 512, dtype=torch.long)
        return autoaccum.preflight(
            model, (tokens, tokens), 256, loss=loss, device_memory="1GiB", measure=False, precision="fp32"
        )

    said = "the model fails with save_memory='checkpoint' (ValueError: is called by another name)"
    assert any(said in one for one in reported().warnings)

    monkeypatch.setattr(remedies, "OFFLOAD", [])
    monkeypatch.setattr(remedies, "Remedy", "a bug")
    with pytest.raises(TypeError):
        reported()


def test_a_large_loss_is_worth_mending_below_many_micro_batches_too():
    def with_loss(largest, **held):
        found = predicted(micro_batch=largest)
        parts = {f"{kind}_bytes": size for kind, size in held.items()}
        return replace(found, footprint=replace(found.footprint, peak_bytes=sum(held.values()), **parts))

    assert are_due(with_loss(32, loss=8, activations=11), 64)
    assert not are_due(with_loss(32, loss=2, activations=11), 64)
    assert not are_due(with_loss(64, loss=8), 64)


def test_the_one_that_helps_most_comes_first(small):
    sizes = [remedy.micro_batch for remedy in small.remedies]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > small.predicted[0].micro_batch


@pytest.mark.gpu_fakes
def test_where_no_change_helps_it_is_said():
    report = autoaccum.preflight(
        lambda: nn.Sequential(*(nn.Linear(200_000, 200_000) for _ in range(4))), torch.zeros(2, 200_000), 64,
        loss=lambda outputs, _: outputs.mean(), optimizer=torch.optim.SGD, gpus="h100-80gb", measure=False,
    )  # fmt: skip

    assert report.remedies == ()
    assert any("nothing that save_memory takes" in warning for warning in report.warnings)


def test_what_would_help_is_told_for_the_first_that_needs_it_and_that_is_said():
    report = autoaccum.preflight(
        Language, (torch.zeros(4, 512, dtype=torch.long),) * 2, 64, loss=loss, gpus=["t4", "l4"], measure=False,
        precision="fp32", memory_limit="40MiB",
    )  # fmt: skip

    assert report.remedies_on == "t4"
    assert any("on t4: listed only for it; for l4 run a report" in note for note in report.notes)


def test_what_fits_then_takes_less_than_what_was_tried_and_failed():
    model, tokens = Language(), torch.zeros(2, 64, dtype=torch.long)
    options = {"optimizer": torch.optim.SGD(model.parameters()), "loss": loss, "sizes": [1, 256], "precision": "fp32"}
    unchanged = trace_step(model, (tokens, tokens), **options).estimate()
    device = replace(DEVICE, device="cpu", room_bytes=400 * 2**20, holds_model=False)

    def helped(**tried):
        place = replace(MEASURED, device=device, precision="fp32", trials=(), **tried)
        return remedies.suggested(Question((tokens, tokens), 256, 256, None, "micro_batch"), place, unchanged, model)[0]

    assert [one.save_memory for one in helped(micro_batch=8)] == ["checkpoint"]
    assert all(one.peak_bytes < unchanged.at(1).reserved_bytes for one in helped(micro_batch=0))


def test_nothing_is_advised_where_few_micro_batches_do():
    report = report_for("24GiB", target=64)

    assert report.remedies == ()
    assert report.remedies_on is None


@pytest.mark.parametrize(
    ("largest", "target", "due"),
    [(0, 1, True), (1, 1, False), (8, 64, True), (9, 64, False), (1, MANY_MICRO_BATCHES, True), (64, 64, False)],
)
def test_a_cut_into_many_pieces_is_worth_mending(largest, target, due):
    assert are_due(predicted(micro_batch=largest), target) is due


def test_what_checkpointing_is_said_to_take_is_what_it_takes():
    """On a simulated device, where every storage is counted."""
    inputs = torch.zeros(2, 256, dtype=torch.long)
    memory = autoaccum.Simulated("40MiB")
    report = autoaccum.preflight(
        Language(), (inputs, inputs), 64, loss=loss, device=memory, precision="fp32", loader=None
    )
    said = next(remedy for remedy in report.remedies if remedy.save_memory == "checkpoint")

    result = autoaccum.fit(
        Language(), [(inputs, inputs)] * 32, 64, loss=loss, device=memory, precision="fp32", save_memory="checkpoint",
        progress=False,
    )  # fmt: skip

    assert report.measured.micro_batch < said.micro_batch
    assert result.steps == 1


def test_safe_sizes_of_remedies_are_told(small):
    assert all(0 <= remedy.safe_micro_batch <= remedy.micro_batch for remedy in small.remedies)
    assert any(remedy.safe_micro_batch < remedy.micro_batch for remedy in small.remedies)


@pytest.mark.slow
def test_a_loss_in_chunks_is_advised_for_a_language_model_with_many_classes():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.zeros(2, 1024, dtype=torch.long)
    report = autoaccum.preflight(
        transformers.LlamaForCausalLM(config),
        {"input_ids": tokens, "labels": tokens},
        16,
        device_memory="900MiB",
        measure=False,
        precision="fp32",
    )

    (in_chunks,) = (one for one in report.remedies if one.save_memory == "chunked_loss")
    assert in_chunks.micro_batch > 2 * report.predicted[0].micro_batch
