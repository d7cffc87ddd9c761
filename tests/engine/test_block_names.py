"""Names of blocks: a number of the first ones, or ranges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoaccum._engine.block_names import is_name, name_of, numbers_in


@given(st.sets(st.integers(0, 40), min_size=1))
def test_names_are_read_as_they_are_written(numbers):
    name = name_of(numbers)

    assert is_name(name)
    assert numbers_in(name, 41) == numbers


@pytest.mark.parametrize(
    ("numbers", "name"), [({0, 1, 2}, "3"), ({0}, "1"), ({1}, "1-1"), ({0, 1, 4, 6, 7}, "0-1,4-4,6-7")]
)
def test_first_blocks_are_written_as_their_number(numbers, name):
    assert name_of(numbers) == name


@pytest.mark.parametrize("count", [1, 3, 100])
def test_blocks_that_a_model_does_not_have_are_left_out(count):
    assert numbers_in("50", count) == set(range(min(count, 50)))
    assert numbers_in("0-0,2-70", count) == {0, *range(2, min(count, 71))}


@pytest.mark.parametrize(
    "text",
    ["", "0", "-1", "01", "1-0", "0-2,2-3", "0-2,1-1", "1,2", "2-", "-", "1-2,", " 1", "1-2, 3-4", "²", "9" * 30],
)
def test_other_texts_are_no_names(text):
    assert not is_name(text)
