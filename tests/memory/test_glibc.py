"""Blocks taken from the heap are given back also when the interpreter ends, as a Runner's limit does."""

import ctypes

import pytest

from autoaccum._memory import _glibc


def test_blocks_are_given_back_when_nothing_can_be_looked_up_any_more(monkeypatch):
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__libc_malloc"):
        pytest.skip("this C library is not glibc")
    holes = _glibc.Holes()
    holes.take()
    if not holes._taken:
        pytest.skip("the heap has no free block of 16 KiB")
    monkeypatch.setattr(_glibc, "_libc", None)

    holes.free()

    assert not holes._taken
