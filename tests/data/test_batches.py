"""Batches of any nesting are counted, cut and joined; a loader's stream becomes windows."""

import itertools
import types
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Mapping, MutableMapping, MutableSequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

import autoaccum
from autoaccum._data.batches import Window, as_window
from autoaccum._data.nesting import map_tensors
from autoaccum._data.pieces import NestedPiece as Piece
from autoaccum._data.regrouping import stream, windows
from support.models.small import Limited

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
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


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


def empty(batch):
    """Take all out of a batch, as models take out labels."""
    for part in batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ():
        empty(part)
    if isinstance(batch, MutableMapping | MutableSequence):
        batch.clear()


LISTS = {
    "names beside tensors": {"x": numbered(5), "names": list("abcde")},
    "lists of samples": (list(torch.rand(5, 3, 8, 8)), [{"boxes": torch.rand(1, 4)} for _ in range(5)]),
}


@pytest.mark.parametrize("kind", [*NESTINGS, *LISTS])
def test_what_is_taken_out_of_a_micro_batch_stays_in_the_batch_also_where_it_is_all_of_it(kind):
    batch = ({**in_every_nesting(numbered(5), numbered(5, 10)), **LISTS})[kind]
    before, names = tensors_in(batch), list("abcde")
    window = Window([batch])

    for cut in (window.cut(0, 5), window.cut(1, 3), window.peek(0, 5), window[0], window.joined(), *window.raw()):
        empty(cut)

    assert all(one is other for one, other in zip(tensors_in(batch), before, strict=True))
    assert kind != "names beside tensors" or batch["names"] == names


class Letters:
    """A split of one's own that gives the model the batch itself."""

    def count(self, batch):
        return len(batch["x"])

    def cut(self, batch, sizes):
        parts = zip(*(torch.split(rows, list(sizes)) for rows in batch.values()), strict=True)
        return [dict(zip(batch, part, strict=True)) for part in parts]

    def join(self, batches):
        return batches[0] if len(batches) == 1 else {name: torch.cat([one[name] for one in batches]) for name in "xw"}


WEIGHTED = {
    "dict": (lambda x, w: {"x": x, "w": w}, None),
    "names beside tensors": (lambda x, w: {"x": x, "w": w, "names": ["a"] * len(x)}, None),
    "BatchEncoding": (lambda x, w: BatchEncoding({"x": x, "w": w}), None),
    "pair": (lambda x, w: ({"x": x, "w": w}, x), None),
    "a split of one's own": (lambda x, w: {"x": x, "w": w}, Letters()),
}


def weighted(model, batch):
    """A loss that takes its weights out of the batch, and would be another one without them."""
    own = batch[0] if isinstance(batch, tuple) else batch
    weights = own.pop("w", None)
    values = model(own["x"]).square()
    return (values if weights is None else values * weights).mean()


@pytest.mark.parametrize("kind", WEIGHTED)
def test_model_that_takes_items_out_of_a_batch_finds_them_there_after_memory_ran_out(kind):
    batch_of, split = WEIGHTED[kind]
    x, w = torch.randn(8, 2), torch.rand(8, 1)
    weighted(whole := torch.nn.Linear(2, 1), {"x": x, "w": w}).backward()
    model = Limited(torch.nn.Linear(2, 1), None)
    model.body.load_state_dict(whole.state_dict())
    window = autoaccum.Accumulator(
        model, closure=lambda batch: weighted(model, batch), split=split, micro_batch=8, device="cpu"
    )
    for _ in range(4):  # later windows are checked less
        window.backward(batch_of(x, w))
    model.zero_grad()
    model.most = 4

    assert window.backward(batch_of(x, w)).micro_batches == (4, 4)

    torch.testing.assert_close(model.body.weight.grad, whole.weight.grad)


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


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("micro_batch", [2, "auto"])
def test_batch_without_samples_in_a_window_changes_nothing(micro_batch, place, width):
    def gradient(*batches):
        torch.manual_seed(0)
        accumulator = autoaccum.Accumulator(
            model := torch.nn.Linear(2, 1), loss=torch.nn.MSELoss(), micro_batch=micro_batch, device="cpu"
        )
        accumulator.backward(Window(batches))
        return model.weight.grad

    batches = [(torch.randn(4, 2), torch.randn(4, 1)), (torch.randn(3, 2), torch.randn(3, 1))]
    more = list(batches)
    more.insert(place, (torch.zeros(0, width), torch.zeros(0, 1)))

    torch.testing.assert_close(gradient(*more), gradient(*batches))


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
        ((X, Y), 1),
        ([X, X, X], 1),
        ({"inputs": X}, 1),
        ([(X, Y)] * 3, 3),
        ([[X, Y]] * 3, 3),
        ([{"inputs": X}] * 3, 3),
        ([(X, Y), (X[:2], Y[:2])], 2),
        ([{"inputs": X}, {"other": X[:1]}], 2),
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
