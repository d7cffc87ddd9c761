"""What would make a step smaller: tried on the same step, listed only where it helps."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._estimate.estimate import trace_step
from autoaccum._report import remedies
from autoaccum._report.capacity import Asked
from autoaccum._report.remedies import MANY_MICRO_BATCHES, Remedies, are_due, computes_bf16
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
        assert remedy.cost
        assert remedy.description


@pytest.mark.gpu_fakes
def test_all_ways_are_named_for_a_model_that_has_all(small):
    names = {remedy.name for remedy in small.remedies}

    assert {
        "bf16",
        "activation checkpointing",
        "offloaded activations",
        "8-bit optimizer",
        "activation checkpointing + 8-bit optimizer + bf16",
    } <= names
    described = {remedy.name: remedy.description for remedy in small.remedies}
    assert "2 Block blocks" in described["activation checkpointing"]


def test_all_together_help_most(small):
    found = {remedy.name: remedy for remedy in small.remedies}
    together = next(remedy for remedy in small.remedies if " + " in remedy.name)

    for name in together.name.split(" + "):
        assert together.micro_batch >= found[name].micro_batch
    assert "precision='bf16'" in together.description
    assert "save_memory='checkpoint'" in together.description


def test_a_change_with_which_the_model_fails_is_told_and_our_own_errors_are_raised(monkeypatch):
    class Fixed(Language):
        def forward(self, tokens):
            outputs = super().forward(tokens)
            if outputs.dtype is torch.bfloat16:
                raise ValueError("in float32 only")
            return outputs

    tokens = torch.zeros(4, 512, dtype=torch.long)
    options = {"loss": loss, "device_memory": "1GiB", "measure": False, "precision": "fp32"}

    report = autoaccum.preflight(Fixed(), (tokens, tokens), 256, **options)

    assert any("the model fails with bf16 (ValueError: in float32 only)" in one for one in report.warnings)

    monkeypatch.setattr(remedies, "_BITS8_BYTES", "a bug")
    with pytest.raises(TypeError):
        autoaccum.preflight(Fixed(), (tokens, tokens), 256, **options)


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
    assert any("none of the changes tried" in warning for warning in report.warnings)


def test_what_would_help_is_told_for_the_first_that_needs_it_and_that_is_said():
    report = autoaccum.preflight(
        Language, (torch.zeros(4, 512, dtype=torch.long),) * 2, 64, loss=loss, gpus=["t4", "l4"], measure=False,
        precision="fp32", memory_limit="40MiB",
    )  # fmt: skip

    assert report.remedies_on == "t4"
    assert any("on t4: listed only for it; for l4 run a report" in note for note in report.notes)


@pytest.mark.slow  # goes through the training of a large model for each of its remedies
def test_what_takes_no_less_than_what_was_tried_and_failed_is_not_advised():
    model = nn.Sequential(nn.Linear(256, 4096), nn.Tanh(), nn.Linear(4096, 4096), nn.Linear(4096, 10)).to("meta")
    batch = (torch.zeros(2, 256), torch.zeros(2, dtype=torch.long))
    optimizer = torch.optim.AdamW(model.parameters())
    device = replace(DEVICE, device="cpu", room_bytes=400 * 2**20, holds_model=False)
    found = replace(MEASURED, device=device, precision="fp32")

    def trace(precision):
        options = {"optimizer": optimizer, "loss": nn.CrossEntropyLoss(), "sizes": [1, 8192]}
        return trace_step(model, batch, precision=precision, **options)

    def names(**tried):
        asked = Asked(batch, 8192, 8192, None, "micro_batch")
        unchanged = trace("fp32").estimate()
        remedies = Remedies(asked, replace(found, **tried), unchanged, trace, model, optimizer).all()
        return {remedy.name for remedy in remedies}

    assert "bf16" in names(micro_batch=8, trials=())
    assert "bf16" not in names(micro_batch=0, trials=())


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
    said = next(remedy for remedy in report.remedies if remedy.name == "activation checkpointing")

    result = autoaccum.fit(
        Language(), [(inputs, inputs)] * 32, 64, loss=loss, device=memory, precision="fp32", save_memory="checkpoint",
        progress=False,
    )  # fmt: skip

    assert report.measured.micro_batch < said.micro_batch
    assert result.steps == 1


@pytest.mark.parametrize(("capability", "computes"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_at_hand_before_ampere_are_advised_of_no_bf16(monkeypatch, capability, computes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)

    assert computes_bf16(MEASURED) is computes
    assert computes_bf16(replace(MEASURED, device=replace(DEVICE, device="cpu")))


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

    by_name = {remedy.name: remedy for remedy in report.remedies}
    alone = by_name["loss in chunks"]
    together = next(remedy for name, remedy in by_name.items() if name.startswith("activation checkpointing + loss in"))
    assert alone.description == "save_memory='chunked_loss'"
    assert alone.micro_batch > 2 * report.predicted[0].micro_batch
    assert together.micro_batch >= alone.micro_batch
