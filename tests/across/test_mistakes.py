"""What people most likely do wrong is answered in a few lines, with what to do."""

import re

import pytest

import autoaccum
from mistakes import MISTAKES, MOST_LINES, AnsweredError, answer, lines_of

# Answers that are torch's own.
OF_OTHERS = ("one sample and BatchNorm",)
# What a user can do begins with one of these, or is a bound.
NEXT_STEP = re.compile(
    r"\b(pass|call|choose|check|give|look|make|return|set|try|wrap|write|name|use|have|correct|assign|wants?|must|"
    r"has '|can only|end|load|at least|at most|cannot be started|help shows what there is)\b"
)


def test_there_are_sixty_of_them():
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in OF_OTHERS])
def test_mistake_is_answered_in_three_lines_with_what_to_do(name):
    error = answer(name)

    lines = lines_of(error)
    assert isinstance(error, autoaccum.AutoaccumError | AnsweredError), f"{type(error).__name__}: {error}"
    if "File" not in lines[0]:  # with the place in the user's own file, a few more
        assert len(lines) <= MOST_LINES, "\n".join(lines)
    assert NEXT_STEP.search(str(error)), str(error)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_mistake_that_others_answer_names_what_is_wrong(name):
    assert lines_of(answer(name))
