"""Buckets carry tensors of any form, in pieces where they are large, and send on what they have where filling fails.

By `Buckets` itself: those of a training hold megabytes, and `tests/across/test_ranks_gradients.py` has small tensors.
"""

import pytest
import torch

from autoaccum._distributed.buckets import Buckets, Outcome


def double(bucket):
    bucket.mul_(2)


def add_up(given, *, like=None, bucket_bytes=2**20, wanted=None, copied=()):
    """Send buckets to nobody; return what was sent, and the failure."""
    sent, outcome = [], Outcome()
    buckets = Buckets(given if like is None else like, torch.device("cpu"), copied, bucket_bytes)
    buckets.add_up(
        outcome, given, lambda bucket: sent.append(bucket.clone()), factors=[1.0] * len(given), wanted=wanted
    )
    return sent, outcome.failure


def tensors():
    return [
        torch.randn(3, 4),
        torch.randn(100),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7, dtype=torch.float64),
        torch.tensor(3),
        torch.randn(2, 2, dtype=torch.complex64),
        torch.empty(0),
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 200, 2**20])
def test_what_comes_of_each_tensor_is_taken_over_in_place(bucket_bytes):
    given = tensors()
    before, outcome = [tensor.clone() for tensor in given], Outcome()

    buckets = Buckets(given, torch.device("cpu"), [4], bucket_bytes)
    buckets.add_up(outcome, given, double, factors=[1.0] * len(given))

    assert outcome.failure is None
    assert all(torch.equal(now, 2 * then) for now, then in zip(given, before, strict=True))


def test_nothing_larger_than_a_bucket_is_sent():
    sent, _ = add_up([torch.zeros(100), torch.zeros(3)], bucket_bytes=64)

    assert max(bucket.nbytes for bucket in sent) <= 64
    assert sum(bucket.nbytes for bucket in sent) == 103 * 4


def test_only_what_is_wanted_is_sent_and_missing_tensors_are_zeros():
    given = [torch.ones(2), None, torch.ones(3)]

    sent, _ = add_up(given, like=[torch.zeros(2), torch.zeros(4), torch.zeros(3)], wanted=[True, True, False])

    assert torch.equal(torch.cat(sent), torch.tensor([1.0, 1, 0, 0, 0, 0]))


def test_what_is_copied_goes_as_bytes():
    sent, _ = add_up([torch.ones(2), torch.tensor([3], dtype=torch.uint16)], copied=[1])

    assert [bucket.dtype for bucket in sent] == [torch.float32, torch.uint8]


def test_bucket_that_cannot_be_filled_is_sent_all_the_same_and_the_failure_returned():
    sent, failure = add_up([torch.zeros(5), torch.zeros(4)], like=[torch.zeros(4), torch.zeros(4)], bucket_bytes=16)

    assert isinstance(failure, RuntimeError)
    assert [bucket.numel() for bucket in sent] == [4, 4]
