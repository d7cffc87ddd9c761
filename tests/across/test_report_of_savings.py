"""A report of a job that saves memory is of steps that do."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import InvalidInputError


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(4000, 32), nn.Linear(32, 4000)

    def forward(self, tokens):
        return self.head(self.tokens(tokens)).mT

    def get_output_embeddings(self):
        return self.head


TOKENS = torch.arange(4096).view(4, 1024) % 4000


def reported(model=None, tokens=TOKENS, **options):
    model = model or Language()
    report = autoaccum.preflight(model, (tokens, tokens), 16, precision="fp32", **options)
    assert "forward" not in vars(model.head)
    return report


@pytest.mark.parametrize(
    "where",
    [
        {"device_memory": "900MiB", "measure": False},
        {"device": autoaccum.Simulated("40MiB"), "tokens": TOKENS[:, :256]},
    ],
    ids=["predicted", "measured"],
)
def test_more_samples_fit_with_a_loss_in_chunks(where):
    plain, in_chunks = (reported(save_memory=memory, **where) for memory in (None, "chunked_loss"))

    found = [report.predicted[0] if report.predicted else report.measured for report in (plain, in_chunks)]
    assert found[1].micro_batch > 2 * found[0].micro_batch
    assert not any(remedy.save_memory == "chunked_loss" for remedy in in_chunks.remedies)


def test_what_is_not_known_yet_is_said():
    report = reported(save_memory="auto", device_memory="1GiB", measure=False)

    assert any(note.startswith("save_memory='auto': the report is of steps without it") for note in report.notes)


@pytest.mark.parametrize("where", [{"device_memory": "900MiB", "measure": False}, {"device": "cpu"}])
def test_name_that_is_no_block_is_refused_and_the_model_stays(where):
    model, drawn = Language(), torch.get_rng_state()
    before = [dict(vars(part)) for part in model.modules()]

    with pytest.raises(InvalidInputError, match="no module has the name or the class 'Blok' to compute again, among"):
        reported(model, save_memory="checkpoint:Blok", **where)

    assert [dict(vars(part)) for part in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), drawn)
