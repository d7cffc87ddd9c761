"""Placeholders and variables."""

import pytest
from autoaccum._launch.command import filled, numbers_of, placeholders, variables
from autoaccum._launch.cuts import cut_within

CUT = cut_within(256, 4, 16)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("{micro_batch}", "16"),
        ("--x={accum_steps}", "--x=4"),
        ("{target_batch}/{world_size}", "256/4"),
        ('{"batch": {micro_batch}, "name": "{x}"}', '{"batch": 16, "name": "{x}"}'),
        ("{}", "{}"),
        ("{micro_batch", "{micro_batch"),
        ("{ micro_batch }", "{ micro_batch }"),
        ("%d $x \\1", "%d $x \\1"),
    ],
)
def test_our_placeholders_are_filled_and_nothing_else_is_touched(argument, expected):
    assert filled([argument], numbers_of(CUT)) == [expected]


def test_placeholders_are_found_anywhere():
    assert placeholders(["python", "--a={micro_batch}", "{world_size}{y}"]) == {"micro_batch", "world_size"}


def test_variables_tell_the_cut_the_cap_and_the_attempt(tmp_path):
    told = variables(CUT, 16, attempt=2, reason_file=tmp_path / "r")

    assert told == {
        "AUTOACCUM_MICRO_BATCH": "16",
        "AUTOACCUM_ACCUM_STEPS": "4",
        "AUTOACCUM_TARGET_BATCH": "256",
        "AUTOACCUM_WORLD_SIZE": "4",
        "AUTOACCUM_MAX_MICRO_BATCH": "16",
        "AUTOACCUM_ATTEMPT": "2",
        "AUTOACCUM_REASON_FILE": str(tmp_path / "r"),
    }


def test_without_a_target_no_cut_is_told(tmp_path):
    assert set(variables(None, None, attempt=0, reason_file=tmp_path)) == {"AUTOACCUM_ATTEMPT", "AUTOACCUM_REASON_FILE"}
