from dataclasses import replace

import pytest

from autoaccum._report.wording import (
    OUTSIDE,
    are_numbers,
    format_seconds,
    headline_of,
    notes_of,
    parts_of,
    sections_of,
    verdicts_of,
)
from support.data.reports import DEVICE, GIB, MANY_GPUS, MEASURED, MIB, NOTHING_FITS, PREDICTED_ONLY, REPORT, predicted


def section(report, title):
    (found,) = [one for one in sections_of(report) if one.title == title]
    return found


def facts(report, title):
    return dict(section(report, title).rows)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.000568, "0.568 ms"), (0.0123, "12.3 ms"), (0.254, "0.25 s"), (7530, "2:05:30")]
)
def test_times_are_told_as_people_tell_them(seconds, text):
    assert format_seconds(seconds) == text


def test_each_place_has_its_verdict_with_the_cut_measured_ones_first():
    assert [(one.answer, one.found.name) for one in verdicts_of(REPORT)] == [
        ("fits", "NVIDIA GeForce RTX 3060"),
        ("fits", "l4"),
        ("fits", "rtx-3070"),
    ]
    assert verdicts_of(REPORT)[0].text == "256 in 2 micro-batches, 128+128, measured"
    assert verdicts_of(REPORT)[1].text == "256 or more at once, predicted"


def test_a_verdict_tells_a_window_from_the_larger_micro_batch_that_was_asked_about():
    capped = predicted("h100-80gb", 79 * GIB, 512)
    full = predicted("l4", 22 * GIB, 546)
    report = replace(PREDICTED_ONLY, predicted=(capped, full))

    assert capped.is_capped
    assert not full.is_capped
    assert [row[1] for row in section(report, "Largest micro-batch and plan").rows] == ["512 or more", "546"]
    assert [one.text for one in verdicts_of(report)] == [
        "256 at once, 512 or more would fit, predicted",
        "256 at once, 546 would fit, predicted",
    ]


def test_a_measured_size_is_safe():
    row, *_ = section(REPORT, "Largest micro-batch and plan").rows

    assert row[1:3] == ("145", "145")


def test_a_verdict_tells_why_nothing_fits():
    measured, foreseen = verdicts_of(NOTHING_FITS)

    assert measured.answer == foreseen.answer == "does not fit"
    assert "a sample of shape (3, 224, 224) does not fit" in measured.text
    assert "a micro-batch of 1 is predicted to take 260.0 MiB" in foreseen.text


def test_a_gpu_tells_what_cuda_takes_of_it():
    told = facts(replace(PREDICTED_ONLY, predicted=(predicted(total=GIB),)), "GPUs")

    assert told["l4"] == "1.0 GiB less 448.0 MiB for CUDA, which leaves 576.0 MiB"


def test_a_gpu_tells_the_limit_that_it_is_held_to():
    limited = replace(PREDICTED_ONLY, predicted=(replace(predicted(), room_bytes=2 * GIB),))

    assert facts(limited, "GPUs")["l4"].endswith("; limit 2.0 GiB")


def test_notes_on_predictions_are_no_choices():
    report = replace(REPORT, notes=(*REPORT.notes, "counted in bf16."))

    assert dict(notes_of(report)) == {
        "Chosen by default": ("AdamW(lr=1e-3) (optimizer=)",),
        "About the predictions": ("counted in bf16.",),
    }


def test_rows_are_as_long_as_their_header():
    for report in (REPORT, NOTHING_FITS, PREDICTED_ONLY, MANY_GPUS):
        for one in sections_of(report):
            assert {len(row) for row in one.rows} == {len(one.header) or 2}


def test_what_was_measured_and_what_is_foreseen_stand_side_by_side():
    table = section(REPORT, "Memory of a step")

    assert table.header == ("", "measured", "l4", "rtx-3070")
    assert ("optimizer state", "86.0 MiB", "86.0 MiB", "86.0 MiB") in table.rows


def test_many_gpus_are_told_a_few_at_a_time():
    tables = [one for one in sections_of(MANY_GPUS) if one.title == "Memory of a step"]

    assert [len(one.header) for one in tables] == [5, 3]


def test_long_names_of_gpus_leave_room_for_fewer():
    gpus = tuple(predicted("h100-pcie-80gb") for _ in range(4))
    tables = [one for one in sections_of(replace(MANY_GPUS, predicted=gpus)) if one.title == "Memory of a step"]

    assert [len(one.header) for one in tables] == [4, 2]


def test_neighbours_are_named_with_what_they_hold():
    told = facts(REPORT, "Device")

    assert told["process 4242"] == "python3, 5.0 GiB"
    assert told["process 7"] == "Xorg, an unknown share"


def test_on_the_host_it_is_told_what_counts_beside_the_model():
    on_host = replace(REPORT, measured=replace(MEASURED, device=replace(DEVICE, holds_model=False)))

    rows = {name: first for name, first, *_ in section(on_host, "Memory of a step").rows}

    assert rows["excluding model"] == "5.2 GiB"


@pytest.mark.parametrize(
    ("texts", "numbers"), [(["1", "-"], True), (["fits"], False), (["-1 B", "2 B"], True), (["-"], False), ([], False)]
)
def test_columns_of_numbers_are_told_from_columns_of_words(texts, numbers):
    assert are_numbers(texts) is numbers


def test_what_would_help_tells_what_fits_then():
    told = facts(REPORT, "What would help on l4")

    assert told["save_memory='checkpoint'"] == "micro-batches of 128 (120 safely), 6.0 GiB"
    assert not any(one.title.startswith("What would help") for one in sections_of(PREDICTED_ONLY))


@pytest.mark.parametrize(("size", "most"), [(256, None), (128, 128)])
def test_a_remedy_that_takes_the_largest_size_of_interest_may_take_more(size, most):
    remedies = (replace(REPORT.remedies[0], micro_batch=size),)
    subject = replace(REPORT.subject, max_micro_batch=most)

    told = facts(replace(REPORT, subject=subject, remedies=remedies), "What would help on l4")

    assert f"micro-batches of {size} or more" in told["save_memory='checkpoint'"]


def test_parts_add_up_to_the_peak_in_all():
    (*_, outside), whole = parts_of(MEASURED.footprint).items(), MEASURED.footprint.reserved_bytes

    assert outside == (OUTSIDE, 20 * MIB)
    assert sum(parts_of(MEASURED.footprint).values()) == whole
    rows = {name: first for name, first, *_ in section(REPORT, "Memory of a step").rows}
    assert (rows[OUTSIDE], rows["peak in all"]) == ("20.0 MiB", "5.2 GiB")


def test_a_peak_above_the_limit_that_counts_as_fitting_is_explained():
    device = replace(DEVICE, room_bytes=5300 * MIB, limit_bytes=5300 * MIB)
    report = replace(REPORT, measured=replace(MEASURED, device=device), predicted=())

    assert verdicts_of(report)[0].text.endswith(
        "; its peak is 40.0 MiB (0.8%) above the limit, and on the CPU up to 3% above it count as fitting"
    )


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (replace(PREDICTED_ONLY, predicted=(predicted(),)), "Fits on l4. 256 or more at once, predicted."),
        (
            PREDICTED_ONLY,
            "Fits on all 2 devices. rtx-3070, which holds least: 256 in 2 micro-batches, 128+128, predicted.",
        ),
        (
            replace(REPORT, predicted=NOTHING_FITS.predicted),
            "Does not fit on tiny. tiny: a micro-batch of 1 is predicted",
        ),
    ],
    ids=["one", "all", "the worst"],
)
def test_the_headline_is_a_sentence_for_a_stranger(report, told):
    _, headline, verdict = headline_of(report)

    assert f"{headline} {verdict}".startswith(told)
