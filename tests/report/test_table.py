import io
from dataclasses import replace

import pytest
from rich.console import Console

from support.data.reports import MANY_GPUS, NOTHING_FITS, PREDICTED_ONLY, REPORT

ALL = [REPORT, NOTHING_FITS, PREDICTED_ONLY, MANY_GPUS]


@pytest.mark.parametrize("report", ALL)
def test_plain_text_fits_in_80_columns_without_escape_codes(report):
    text = str(report)

    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_a_report_prints_as_its_table_of_verdicts_plans_warnings_and_choices():
    assert repr(REPORT) == str(REPORT)
    assert str(REPORT).startswith("Pre-flight report: ResNet, target batch 256\n")
    for told in ("fits  NVIDIA GeForce RTX 3060: 256 in 2 micro-batches", "128+128", "BatchNorm", "AdamW(lr=1e-3)"):
        assert told in str(REPORT)


def test_no_number_and_no_name_of_a_gpu_is_broken():
    gpus = tuple(replace(one, gpu=replace(one.gpu, name="h100-pcie-80gb")) for one in MANY_GPUS.predicted)

    text = str(replace(MANY_GPUS, predicted=gpus))

    assert text.count("h100-pcie-80gb") == 4 * len(gpus)


def test_what_looks_like_markup_is_printed_as_it_is():
    named = REPORT.__class__(**{**vars(REPORT), "warnings": ("loss '[red]x[/red]' is odd",)})

    assert "loss '[red]x[/red]' is odd" in str(named)


def test_on_a_terminal_it_has_colours():
    file = io.StringIO()

    Console(file=file, force_terminal=True, width=80).print(REPORT)

    assert "\x1b[1;32m" in file.getvalue()


def test_what_is_required_and_does_not_fit_is_red_and_names_the_gpu():
    asked = replace(PREDICTED_ONLY, required_micro_batch=200)

    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    console.print(asked)
    text = console.file.getvalue()

    (fits,) = [line for line in text.splitlines() if "l4: " in line]
    (fails,) = [line for line in text.splitlines() if "rtx-3070: " in line]
    assert "\x1b[1;32m  fits" in fits
    assert "\x1b[1;31m  fails" in fails
    assert "200 at once are required" in fails


def test_what_is_tight_is_neither_green_nor_red():
    one = PREDICTED_ONLY.predicted[0]
    uncertain = replace(one, safe_micro_batch=0, uncertainty=0.141)

    text = str(replace(PREDICTED_ONLY, predicted=(uncertain,)))

    assert "  tight l4: 256 or more at once, predicted; it may take 14.1% more" in text
