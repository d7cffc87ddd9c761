import io
from dataclasses import replace

import pytest
from rich.console import Console

from report_examples import MANY_CARDS, NOTHING_FITS, PREDICTED_ONLY, REPORT

ALL = [REPORT, NOTHING_FITS, PREDICTED_ONLY, MANY_CARDS]


@pytest.mark.parametrize("report", ALL)
def test_plain_text_fits_in_80_columns_without_escape_codes(report):
    text = str(report)

    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_a_report_prints_as_its_table():
    assert repr(REPORT) == str(REPORT)
    assert str(REPORT).startswith("Pre-flight report: ResNet, target batch 256\n")


@pytest.mark.parametrize(
    "told",
    [
        "fits  NVIDIA GeForce RTX 3060: 256 in 2 micro-batches",
        "128+128",
        "does not fit",
        "BatchNorm",
        "optimizer: AdamW",
    ],
)
def test_the_table_tells_verdicts_plans_trials_warnings_and_choices(told):
    assert told in str(REPORT)


def test_no_word_of_a_remedy_is_broken():
    how = "fallback='offload', or torch.autograd.graph.save_on_cpu or bitsandbytes.optim.PagedAdamW8bit"
    remedies = (replace(REPORT.remedies[0], name="offloaded activations", description=how, cost=how),)

    words = str(replace(REPORT, remedies=remedies)).split()

    assert all(words.count(word) >= 2 for word in how.split())


def test_no_number_and_no_name_of_a_card_is_broken():
    cards = tuple(replace(one, card=replace(one.card, name="h100-pcie-80gb")) for one in MANY_CARDS.predicted)

    text = str(replace(MANY_CARDS, predicted=cards))

    assert text.count("h100-pcie-80gb") == 4 * len(cards)


def test_what_looks_like_markup_is_printed_as_it_is():
    named = REPORT.__class__(**{**vars(REPORT), "warnings": ("loss '[red]x[/red]' is odd",)})

    assert "loss '[red]x[/red]' is odd" in str(named)


def test_on_a_terminal_it_has_colours():
    file = io.StringIO()

    Console(file=file, force_terminal=True, width=80).print(REPORT)

    assert "\x1b[1;32m" in file.getvalue()
