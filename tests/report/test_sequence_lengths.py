"""Batches of the length that is asked for, and what is said of lengths where nothing is."""

import pytest
import torch

from autoaccum import Simulated, preflight
from autoaccum._report.records import Lengths
from autoaccum._report.sequence_lengths import may_vary, of_length
from autoaccum.errors import InvalidInputError


def tokens(length, samples=4):
    return torch.arange(samples * length).reshape(samples, length) % 50


def padded_by_batch(*lengths):
    return [{"input_ids": tokens(length), "attention_mask": torch.ones(4, length)} for length in lengths]


class Classifier(torch.nn.Module):
    """Takes sequences of any length, and memory in proportion to it."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 64)
        self.head = torch.nn.Linear(64, 2)

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)).mean(1))


def labelled(length):
    return tokens(length), torch.zeros(4, dtype=torch.long)


def test_batches_that_differ_show_where_sequences_run():
    batches = padded_by_batch(37, 512, 90)

    made, lengths = of_length(batches[0], batches, None)

    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == {
        "input_ids": (4, 512),
        "attention_mask": (4, 512),
    }
    assert lengths == Lengths(37, 512, 3, 512, is_asked=False, varies=True)


def test_tokens_run_along_the_second_dimension_where_batches_do_not_differ():
    made, lengths = of_length(labelled(16), [], 40)

    assert [tuple(tensor.shape) for tensor in made] == [(4, 40), (4,)]
    assert lengths == Lengths(16, 16, 1, 40, is_asked=True, varies=False)


def test_what_is_put_in_is_what_was_there():
    made, _ = of_length(labelled(3), [], 7)

    assert torch.equal(made[0][0], torch.tensor([0, 1, 2, 0, 1, 2, 0]))


def test_batches_are_cut_too():
    made, _ = of_length(labelled(16), [], 5)

    assert torch.equal(made[0], tokens(16)[:, :5])


def test_masks_of_tokens_by_tokens_grow_in_both_dimensions():
    batches = [{"ids": tokens(length), "mask": torch.ones(4, 1, length, length)} for length in (8, 12)]

    made, _ = of_length(batches[0], batches, 20)

    assert made["mask"].shape == (4, 1, 20, 20)


def test_sounds_differ_in_their_frames():
    batches = [(torch.randn(4, frames, 80), torch.zeros(4)) for frames in (100, 140)]

    made, lengths = of_length(batches[0], batches, None)

    assert made[0].shape == (4, 140, 80)
    assert (lengths.shortest, lengths.longest) == (100, 140)


def test_a_batch_that_is_right_already_stays_the_same_object():
    batch = labelled(16)

    assert of_length(batch, [], None)[0] is batch
    assert of_length(batch, [], 16)[0] is batch


def test_sequences_of_unequal_length_have_to_be_named():
    batch = {"input_ids": tokens(20), "labels": tokens(8)}

    with pytest.raises(InvalidInputError, match=r"(?s)input_ids: 20, labels: 8.*--length input_ids=64"):
        of_length(batch, [], 64)
    made, lengths = of_length(batch, [], {"input_ids": 64})

    assert [made[name].shape[1] for name in ("input_ids", "labels")] == [64, 8]
    assert lengths.used == 64


def test_sequences_of_a_pair_are_named_by_their_place():
    made, _ = of_length((tokens(20), tokens(8)), [], {"1": 30})

    assert [tensor.shape[1] for tensor in made] == [20, 30]


@pytest.mark.parametrize(("length", "told"), [({"words": 3}, "input_ids"), (0, "got 0"), ({"input_ids": -1}, "-1")])
def test_a_length_that_cannot_be_is_refused(length, told):
    with pytest.raises(InvalidInputError, match=told):
        of_length({"input_ids": tokens(20)}, [], length)


def test_a_batch_without_sequences_has_no_length():
    images = torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)

    assert of_length(images, [], None) == (images, None)
    assert not may_vary(images)
    with pytest.raises(InvalidInputError, match="holds no sequences"):
        of_length(images, [], 64)


@pytest.mark.parametrize(("length", "used"), [(None, 512), (100, 100)])
def test_a_report_holds_for_the_longest_or_for_what_is_asked(length, used):
    loader = [labelled(length) for length in (37, 512, 90)]

    report = preflight(Classifier(), loader[0], 8, loader=loader, gpus="l4", measure=False, length=length)

    assert report.lengths == Lengths(37, 512, 3, used, is_asked=length is not None, varies=True)
    assert report.to_dict()["lengths"]["used"] == used
    assert any("--length" in warning for warning in report.warnings) == (length is None)
    assert f"{used}" in str(report)


def test_trials_are_of_that_length_too():
    def largest(length):
        device = Simulated("400KiB")
        return preflight(
            Classifier(), labelled(16), 64, device=device, optimizer=torch.optim.SGD, length=length
        ).micro_batch

    assert largest(16) > largest(64) > 0


def test_a_loader_that_can_be_gone_through_only_once_is_left_alone():
    batches = iter([labelled(37), labelled(512)])

    report = preflight(Classifier(), labelled(20), 8, loader=batches, gpus="l4", measure=False)

    assert report.lengths == Lengths(20, 20, 1, 20, is_asked=False, varies=False)
    assert len(list(batches)) == 2
