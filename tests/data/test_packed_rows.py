"""A row of packed sequences is cut at its sequences, and put together again."""

import pytest
import torch

from autoaccum import PackedRows, Window

LENGTHS = [3, 1, 4, 2]


def row(lengths=LENGTHS, *, bounds=True):
    tokens = torch.arange(sum(lengths))[None]
    batch = {
        "input_ids": tokens,
        "labels": tokens + 100,
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "seq_idx": torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None],
        "flag": True,
    }
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return batch | ({"cu_seq_lens_q": ends, "max_length_q": max(lengths)} if bounds else {})


@pytest.mark.parametrize("bounds", [True, False], ids=["cu_seq_lens", "position_ids"])
def test_parts_hold_whole_sequences_as_if_each_had_been_packed_alone(bounds):
    first, second = PackedRows().cut(row(bounds=bounds), [1, 3])

    assert first["input_ids"].tolist() == [[0, 1, 2]]
    assert second["labels"].tolist() == [[103, 104, 105, 106, 107, 108, 109]]
    assert second["position_ids"].tolist() == [[0, 0, 1, 2, 3, 0, 1]]
    assert second["seq_idx"].tolist() == [[0, 1, 1, 1, 1, 2, 2]]
    if bounds:
        assert second["cu_seq_lens_q"].tolist() == [0, 1, 5, 7]
        assert (first["max_length_q"], second["max_length_q"]) == (3, 4)


def test_joined_parts_are_the_row():
    whole = row()
    joined = PackedRows().join(PackedRows().cut(whole, [2, 2]))

    for key in ("input_ids", "labels", "position_ids", "seq_idx", "cu_seq_lens_q", "max_length_q"):
        assert torch.equal(torch.as_tensor(joined[key]), torch.as_tensor(whole[key]))


def test_window_counts_sequences():
    assert Window([row(), row([2, 5])], PackedRows()).samples == 6
