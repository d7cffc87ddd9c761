"""Buckets carry tensors of any form, in pieces where they are large, and send on what they have where filling fails."""

import pytest
import torch

from autoaccum._distributed.buckets import Buckets


def double(bucket):
    """Doubles a bucket once it is waited for."""
    return lambda: bucket.mul_(2)


def exchange(buckets, given, look, **arguments):
    """Send buckets to nobody."""

    def send(bucket):
        look(bucket)
        return lambda: None

    return buckets.begin(given, send, **arguments)()


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
    given = [tensor.contiguous() if tensor.numel() * 4 > bucket_bytes else tensor for tensor in tensors()]
    before = [tensor.clone() for tensor in given]

    failure = Buckets(given, 2 * bucket_bytes).begin(given, double)()

    assert failure is None
    assert all(torch.equal(now, 2 * then) for now, then in zip(given, before, strict=True))


def test_nothing_larger_than_a_bucket_is_sent():
    sent = []

    exchange(
        Buckets([torch.zeros(100), torch.zeros(3)], 128),
        [torch.zeros(100), torch.zeros(3)],
        lambda bucket: sent.append(bucket.nbytes),
    )

    assert max(sent) <= 64
    assert sum(sent) == 103 * 4


def test_only_what_is_wanted_is_sent_and_missing_tensors_are_zeros():
    given = [torch.ones(2), None, torch.ones(3)]
    sent = []

    exchange(
        Buckets([torch.zeros(2), torch.zeros(4), torch.zeros(3)]),
        given,
        lambda bucket: sent.append(bucket.clone()),
        wanted=[True, True, False],
    )

    assert torch.equal(torch.cat(sent), torch.tensor([1.0, 1, 0, 0, 0, 0]))


def test_buckets_under_way_do_not_share_memory_where_one_between_them_is_not_wanted():
    given = [torch.full((4,), value) for value in (1.0, 2.0, 3.0)]

    def send(bucket):
        return lambda: bucket.mul_(10.0)  # as a network that is done only when it is waited for

    Buckets(given, 32).begin(given, send, wanted=[True, False, True])()

    assert [tensor[0].item() for tensor in given] == [10.0, 2.0, 30.0]


def test_rank_that_holds_nothing_sends_zeros():
    sent = []

    failure = exchange(Buckets([torch.ones(2)]), [None], lambda bucket: sent.append(bucket.clone()))

    assert failure is None
    assert torch.equal(sent[0], torch.zeros(2))


def test_tensors_are_multiplied_before_they_are_sent():
    given = [torch.full((2,), 3.0)]

    exchange(Buckets(given), given, lambda bucket: None, factor=0.5)

    assert torch.equal(given[0], torch.full((2,), 1.5))


def test_bucket_that_cannot_be_filled_is_sent_all_the_same_and_the_failure_returned():
    like = [torch.zeros(4), torch.zeros(4)]
    sent = []

    failure = exchange(Buckets(like, 32), [torch.zeros(5), torch.zeros(4)], lambda bucket: sent.append(bucket.numel()))

    assert isinstance(failure, RuntimeError)
    assert sent == [4, 4]


def test_tensor_that_goes_in_parts_is_made_contiguous_and_no_other():
    buckets = Buckets([torch.zeros(6, 6)], 128)

    assert buckets.make_sendable(torch.zeros(6, 6).T).is_contiguous()
    assert not buckets.make_sendable(torch.zeros(4, 3).T).is_contiguous()
    assert buckets.make_sendable(None) is None
