"""What only the terminal has: columns, and colours."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from support.data.reports import MANY_GPUS, NOTHING_FITS, PREDICTED_ONLY, REPORT

LONG_NAMES = replace(
    MANY_GPUS,
    predicted=tuple(replace(one, gpu=replace(one.gpu, name="h100-pcie-80gb")) for one in MANY_GPUS.predicted),
)


@pytest.mark.parametrize("report", [REPORT, NOTHING_FITS, PREDICTED_ONLY, MANY_GPUS, LONG_NAMES])
def test_plain_text_fits_in_80_columns_without_escape_codes_or_a_broken_name(report):
    text = str(report)

    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    for name in {one.gpu.name for one in report.predicted}:
        assert text.count(name) >= 4 * sum(one.gpu.name == name for one in report.predicted)


def test_a_report_prints_as_its_table_with_numbers_to_the_right_and_words_to_the_left():
    assert repr(REPORT) == str(REPORT)
    assert str(REPORT).startswith(
        "Pre-flight report: ResNet, target batch 256\n  fits  NVIDIA GeForce RTX 3060: 256 in"
    )
    assert "\n  rtx-3070   180 or more    180        128+128    5.2 GiB     2.3 GiB\n" in str(REPORT)
    assert "\n  process 7       Xorg, an unknown share\n" in str(REPORT)


@pytest.mark.parametrize(
    ("report", "answers"),
    [
        (REPORT, {"1;32m  fits": "l4: "}),
        (replace(PREDICTED_ONLY, required_micro_batch=200), {"1;32m  fits": "l4: ", "1;31m  fails": "rtx-3070: "}),
    ],
)
def test_on_a_terminal_what_fits_is_green_and_what_does_not_is_red(report, answers):
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)

    console.print(report)

    lines = console.file.getvalue().splitlines()
    for coloured, place in answers.items():
        (line,) = [line for line in lines if place in line]
        assert f"\x1b[{coloured}" in line


def test_what_is_tight_is_neither_green_nor_red():
    uncertain = replace(PREDICTED_ONLY.predicted[0], safe_micro_batch=0, uncertainty=0.141)

    assert "  tight l4: 256 or more at once" in str(replace(PREDICTED_ONLY, predicted=(uncertain,)))
