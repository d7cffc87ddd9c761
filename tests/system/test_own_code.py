"""Code of the package is told from the user's by its name, wherever its files stand."""

import pytest

import autoaccum
from autoaccum._system import own_code


def error_of(function, *arguments):
    with pytest.raises(Exception) as caught:
        function(*arguments)
    return caught.value


def test_error_of_the_package_itself_is_its_own():
    assert own_code.raised_here(error_of(autoaccum.plan, "no number", 1))


def test_error_in_code_of_the_user_is_not():
    def loss():
        raise ValueError

    assert not own_code.raised_here(error_of(loss))


def test_files_of_the_package_are_known_and_others_are_not(tmp_path):
    assert own_code.is_own_file(own_code.__file__)
    assert not own_code.is_own_file(str(tmp_path / "recipe.py"))
