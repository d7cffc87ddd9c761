"""Batches of any nesting are counted, cut and joined; a loader's stream becomes windows."""

import itertools
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import rnn
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

import autoaccum
from autoaccum._data.batches import Window, as_window, count
from autoaccum._data.nesting import map_tensors
from autoaccum._data.pieces import NestedPiece as Piece
from autoaccum._data.regrouping import stream, windows
from autoaccum.errors import InvalidInputError

Pair = namedtuple("Pair", ["inputs", "targets"])  # noqa: PYI024 - the untyped form is what loaders yield


class Wrapped(MutableMapping):
    """A mapping around a dict of its own, as users write them."""

    def __init__(self, items):
        self._items = dict(items)

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        self._items[key] = value

    def __delitem__(self, key):
        del self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class AttributeDict(dict):
    """Its items are its attributes too."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclass
class Record:
    inputs: torch.Tensor


def numbered(samples, start=0, width=2):
    """Samples that tell which they are: row i is filled with start + i."""
    return torch.arange(start, start + samples).unsqueeze(1).expand(samples, width).clone()


def in_every_nesting(x, y):
    return {
        "tensor": x,
        "list": [x, y],
        "namedtuple": Pair(x, y),
        "dict of mixed keys": {"z": x, 1: y},
        "OrderedDict": OrderedDict([("z", x), ("a", y)]),
        "defaultdict": defaultdict(list, {"inputs": x, "labels": y}),
        "custom mapping": Wrapped({"inputs": x, "labels": y}),
        "mapping proxy": types.MappingProxyType({"inputs": x, "labels": y}),
        "dict with attributes": AttributeDict(inputs=x, labels=y),
        "BatchEncoding": BatchEncoding({"input_ids": x, "labels": y}),
        "ModelOutput": CausalLMOutput(loss=None, logits=x, hidden_states=(y, y)),
        "deep": {"a": [(x, Pair(y, {"b": BatchEncoding({"input_ids": x})}))], "none": None},
    }


NESTINGS = list(in_every_nesting(None, None))


def tensors_in(batch):
    found = []
    map_tensors(found.append, batch)
    return found


def rows(batch):
    """Which samples a batch holds, by the first column of its first tensor."""
    return tensors_in(batch)[0][:, 0].tolist()


# --- cutting and joining ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NESTINGS)
def test_batch_of_any_nesting_is_cut_joined_and_left_as_it_was(kind):
    batch = in_every_nesting(numbered(5), numbered(5, 10))[kind]
    before = tensors_in(batch)
    piece = Piece(batch)

    cut = piece.cut(1, 3)
    joined = Window([piece.cut(0, 2), piece.cut(2, 3), piece.cut(3, 5)]).joined()
    (window,) = windows([batch, batch], 10)

    assert type(cut) is type(joined) is type(window) is type(batch)
    assert all(map(torch.equal, tensors_in(cut), [tensor[1:3] for tensor in before]))
    assert all(map(torch.equal, tensors_in(joined), before))
    assert rows(window) == [0, 1, 2, 3, 4] * 2
    assert all(one is other for one, other in zip(tensors_in(batch), before, strict=True))


def test_nothing_is_copied_that_is_cut_and_a_whole_batch_is_handed_on_as_the_object_it_is():
    inputs = numbered(4)
    batch = Wrapped({"inputs": inputs})

    (first, _) = stream([inputs], 3)

    assert Piece(inputs).cut(1, 3).data_ptr() == inputs[1].data_ptr()
    assert first[0].data_ptr() == inputs.data_ptr()
    assert Piece(batch).cut(0, 4) is batch


def test_data_beside_tensors_is_cut_and_joined_where_it_is_as_long_as_the_batch():
    batch = {
        "inputs": numbered(3),
        "names": ["a", "b", "c"],
        "pair": ("left", "right"),
        "boxes": np.arange(6).reshape(3, 2),
        "anchors": np.arange(4),
        "temperature": 0.5,
        "scale": torch.tensor(2.0),
        "note": "abc",
        "nothing": None,
        "box": types.SimpleNamespace(name="a"),
    }

    cut = Piece(batch).cut(1, 3)

    assert cut["names"] == ["b", "c"]
    assert cut["boxes"].tolist() == [[2, 3], [4, 5]]
    for name in ("pair", "anchors", "temperature", "scale", "note", "nothing", "box"):
        assert cut[name] is batch[name]
    joined = Window([batch, batch]).joined()
    assert joined["names"] == ["a", "b", "c"] * 2
    assert joined["boxes"][:, 0].tolist() == [0, 2, 4] * 2


# --- what is no batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), [], {}, "text", 7, None, ["a", "b"], np.zeros(3), torch.tensor(1.0)])
def test_batch_without_a_tensor_of_samples_is_refused_by_its_type(batch):
    with pytest.raises(InvalidInputError, match=rf"{type(batch).__name__} holds no tensor.*default_collate"):
        count(batch)


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), ["0: (4, 2)", "1: (3,)"]),
        ({"inputs": torch.zeros(4), "masks": [torch.zeros(4), torch.zeros(5, 1)]}, ["inputs: (4,)", "masks/1: (5, 1)"]),
        ([torch.zeros(2, 5), torch.zeros(3, 5)], ["0: (2, 5)", "1: (3, 5)"]),
    ],
)
def test_tensors_of_unequal_first_size_are_refused_with_their_shapes(batch, shapes):
    with pytest.raises(InvalidInputError) as caught:
        count(batch)

    assert all(shape in str(caught.value) for shape in shapes)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.eye(4).to_sparse(), "sparse_coo"),
        (lambda: torch.eye(4).to_sparse_csr(), "sparse_csr"),
        (lambda: rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)]), "PackedSequence"),
        (lambda: rnn.pack_sequence([torch.zeros(4, 2)]), "PackedSequence"),
        (lambda: Record(torch.zeros(4)), "Record"),
        (lambda: types.SimpleNamespace(boxes=[torch.zeros(4)]), "SimpleNamespace"),
        (lambda: torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)]), "nested tensor"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors")
def test_what_cannot_be_cut_is_refused_by_its_kind(make, name):
    hidden = make()

    with pytest.raises(InvalidInputError, match=rf"holds a {name}.*cannot be cut"):
        count((torch.zeros(4), hidden))


# --- pieces beside each other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float64)),
        ((torch.zeros(2), 0.5), (torch.zeros(2), 0.6)),
        ((torch.zeros(2), torch.tensor(1)), (torch.zeros(2), torch.tensor(2))),
        ((torch.zeros(2), np.zeros((2, 3))), (torch.zeros(2), np.zeros((2, 4)))),
        ((torch.zeros(2), ["a", "b"]), (torch.zeros(2), ("a", "b"))),
        ((torch.zeros(2), np.zeros(5)), (torch.zeros(2), np.ones(5))),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}),
        (BatchEncoding({"a": torch.zeros(2)}), BatchEncoding({"b": torch.zeros(2)})),
        (Wrapped({"a": torch.zeros(2)}), {"a": torch.zeros(2)}),
        (torch.zeros(2), (torch.zeros(2),)),
    ],
)
def test_unlike_pieces_are_never_joined(one, other):
    window = Window([one, other])

    assert window.groups() == [2, 2]
    assert window.joined() is window


def test_window_is_a_sequence_of_its_pieces_and_cut_across_them():
    window = Window([numbered(3), numbered(1, 3), numbered(4, 4)])

    assert [rows(window.cut(*span)) for span in [(0, 2), (2, 5), (7, 8)]] == [[0, 1], [2, 3, 4], [7]]
    assert [(rows(part), samples) for part, samples in window.parts(2, 6)] == [([2], 1), ([3], 1), ([4, 5], 2)]
    assert [rows(piece) for piece in window] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert rows(window[-1]) == [4, 5, 6, 7]
    assert [rows(piece) for piece in window[:1]] == [[0, 1, 2]]
    assert repr(window) == "Window(8 samples in 3 pieces)"


@given(data=st.data(), pieces=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2)), min_size=1, max_size=8))
def test_any_cut_within_a_group_holds_the_samples_asked_for(data, pieces):
    starts = [sum(samples for samples, _ in pieces[:index]) for index in range(len(pieces) + 1)]
    window = Window([numbered(samples, start, width) for (samples, width), start in zip(pieces, starts, strict=False)])
    groups = window.groups()
    group = data.draw(st.integers(0, len(groups) - 1))
    begin = sum(groups[:group])
    start = data.draw(st.integers(begin, begin + groups[group]))
    stop = data.draw(st.integers(start, begin + groups[group]))

    parts = window.parts(start, stop)

    assert sum(groups) == window.samples == starts[-1]
    assert [row for part, _ in parts for row in rows(part)] == list(range(start, stop))
    if stop > start:
        assert rows(window.cut(start, stop)) == list(range(start, stop))


# --- a loader's stream -----------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 9), max_size=12), target=st.integers(1, 12), widths=st.lists(st.integers(1, 2)))
def test_every_sample_is_in_one_window_and_in_order(sizes, target, widths):
    widths = (widths + [1] * len(sizes))[: len(sizes)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    loader = [numbered(*each) for each in zip(sizes, starts, widths, strict=True)]

    made = [as_window(window) for window in windows(loader, target)]
    dropped = [as_window(window).samples for window in windows(loader, target, drop_last=True)]

    assert [row for window in made for part in window for row in rows(part)] == list(range(sum(sizes)))
    assert all(window.samples == target for window in made[:-1])
    assert dropped == [target] * (sum(sizes) // target)
    for window in made:
        bounds = itertools.pairwise(itertools.accumulate(window.groups(), initial=0))
        assert all(len({part.shape[1] for part, _ in window.parts(*span)}) == 1 for span in bounds)


# --- what a user calls a window --------------------------------------------------------------------------------------

X, Y = torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("given_window", "pieces"),
    [
        (X, 1),
        ((X, Y), 1),
        ([X, Y], 1),
        ([X, X], 1),
        ([X, X, X], 1),
        ({"inputs": X}, 1),
        ([(X, Y)], 1),
        ([(X, Y)] * 3, 3),
        ([[X, Y]] * 3, 3),
        ([{"inputs": X}] * 3, 3),
        ([(X, Y), (X[:2], Y[:2])], 2),
        ([{"inputs": X}, {"inputs": X[:1]}], 2),
        ([{"image": X}, {"label": Y}], 1),
        ([(X, X), {"label": Y}], 1),
        (((X, Y), (X, Y)), 1),
        pytest.param(iter([(X, Y), (X, Y)]), 2, id="an iterator"),
        (Window([(X, Y), (X, Y)]), 2),
        (next(stream([(X, Y), (X, Y)], 6)), 2),
    ],
    ids=str,
)
def test_what_is_given_as_a_window_is_one_batch_or_a_sequence_of_them(given_window, pieces):
    assert len(as_window(given_window)) == pieces


@pytest.mark.parametrize(
    "pair", [[(X, Y), (X, Y)], [{"a": X}, {"a": X}], [[X, Y], [X, Y]]], ids=["pairs", "dicts", "lists"]
)
def test_list_of_two_batches_of_one_form_is_refused_as_ambiguous(pair):
    with pytest.raises(InvalidInputError, match=r"autoaccum\.Window\(\[first, second\]\).*tuple \(inputs, targets\)"):
        as_window(pair)


@pytest.mark.parametrize(
    ("nothing", "message"),
    [
        ((X[:0], Y[:0]), "0 samples"),
        ([(X[:0], Y[:0])] * 3, "0 samples"),
        (Window([X[:0]]), "0 samples"),
        ([], "holds no tensor"),
        (iter([]), "at least one batch"),
        ([[]], "holds no tensor"),
        (None, "holds no tensor"),
    ],
)
def test_window_without_samples_is_refused(nothing, message):
    with pytest.raises(InvalidInputError, match=message):
        as_window(nothing)


# --- samples over again, samples picked ------------------------------------------------------------------------------


def test_dataset_in_place_of_a_loader_is_refused_unless_it_yields_batches_itself():
    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([torch.zeros(4, 2)])

    with pytest.raises(InvalidInputError, match=r"is a dataset.*wrap it in torch.utils.data.DataLoader"):
        autoaccum.windows(torch.utils.data.TensorDataset(torch.zeros(4, 2)), 2)
    assert [len(window) for window in autoaccum.windows(Batches(), 2)] == [2, 2]
