"""A function of one batch takes batches of any size, and gives what it would have given for all of it."""

import pytest
import torch
from torch import nn

import autoaccum
from support.models.tiny_transformers import tiny


def limited(most, function):
    sizes = []

    def of(batch, *args, **kwargs):
        sizes.append(len(batch if isinstance(batch, torch.Tensor) else batch["x"]))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return function(batch, *args, **kwargs)

    return of, sizes


def batched(function, **options):
    return autoaccum.batched(function, **({"device": "cpu"} | options))


def test_results_are_those_of_the_whole_batch_in_its_order():
    model, inputs = nn.Linear(3, 2), torch.randn(10, 3)
    of, sizes = limited(4, model)

    torch.testing.assert_close(batched(of)(inputs), model(inputs))

    assert sizes == [10, 5, 3, 3, 3, 1]


def test_size_is_remembered_and_grows_back():
    of, sizes = limited(4, lambda batch: batch)
    run = batched(of, device=autoaccum.Simulated("1MiB"))  # on which a failure costs nothing
    run(torch.zeros(8))
    sizes.clear()

    for _ in range(40):
        run(torch.zeros(8))

    assert sizes[:2] == [4, 4]
    assert 8 in sizes


def test_size_stays_on_the_cpu():
    of, sizes = limited(4, lambda batch: batch)
    run = batched(of)

    for _ in range(40):
        run(torch.zeros(8))

    assert sizes == [8, *[4] * 80]


def test_parts_halve_while_they_fail_and_grow_back_to_as_few_as_fit():
    of, sizes = limited(112, lambda batch: batch)
    run = batched(of, device=autoaccum.Simulated("1MiB"))
    run(torch.zeros(3000))
    first = list(sizes)

    for _ in range(24):
        run(torch.zeros(3000))

    assert first == [3000, 1500, 750, 375, 188, *[94] * 31, 86]
    assert sizes[-27:] == [*[112] * 26, 88]


def test_results_may_be_nested_and_hold_lists():
    of, _ = limited(2, lambda batch: {"y": batch["x"] + 1, "text": [str(int(x)) for x in batch["x"]], "cache": None})

    found = batched(of)({"x": torch.arange(5)})

    assert found["y"].tolist() == [1, 2, 3, 4, 5]
    assert found["text"] == ["0", "1", "2", "3", "4"]
    assert found["cache"] is None


class Given:
    """A split of one's own that gives the function the batch itself."""

    def count(self, batch):
        return len(batch["x"])

    def cut(self, batch, sizes):
        return [{"x": rows, "mask": batch["mask"]} for rows in torch.split(batch["x"], list(sizes))]

    def join(self, batches):
        return batches[0]


@pytest.mark.parametrize("split", [None, Given()])
@pytest.mark.parametrize("more", [{}, {"names": list("abcde")}])
def test_what_a_function_takes_out_of_the_batch_is_there_again_after_memory_ran_out(more, split):
    def masked(batch):
        kept = batch.pop("mask", 1.0)
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch["x"] * kept

    batch = {"x": torch.ones(5), "mask": torch.tensor(0.5), **more}

    assert batched(masked, split=split)(batch).tolist() == [0.5] * 5
    assert "mask" in batch


def test_random_state_is_that_of_parts_that_did_not_fail():
    of, _ = limited(2, lambda batch: batch + torch.rand(len(batch)))
    torch.manual_seed(0)
    found = batched(of)(torch.zeros(4))
    torch.manual_seed(0)

    assert torch.equal(found, torch.cat([torch.rand(2), torch.rand(2)]))


class Counting(nn.Module):
    def __init__(self, place):
        super().__init__()
        if place == "a buffer":
            self.register_buffer("seen", torch.zeros(()))
        else:
            self.seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    @torch.no_grad()
    def forward(self, inputs):
        self.seen += len(inputs)
        if len(inputs) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return inputs


@pytest.mark.parametrize("place", ["a buffer", "a frozen parameter"])
@pytest.mark.parametrize("is_inference", [False, True])
def test_what_a_part_that_failed_wrote_is_put_back(place, is_inference):
    with torch.inference_mode(is_inference):  # whose tensors can be written there alone
        model = Counting(place)

    batched(torch.inference_mode(is_inference)(model))(torch.zeros(10))

    assert model.seen == 10


def test_weights_that_are_kept_elsewhere_between_passes_are_left_alone():
    class Offloaded(nn.Linear):
        def forward(self, inputs):
            there, self.weight = self.weight, nn.Parameter(torch.ones(2, 3))
            try:
                if len(inputs) > 4:
                    raise torch.OutOfMemoryError("CUDA out of memory.")
                return super().forward(inputs)
            finally:
                self.weight = there

    model = Offloaded(3, 2, bias=False, device="meta")

    assert batched(model)(torch.ones(10, 3)).tolist() == [[3.0, 3.0]] * 10


def test_micro_batch_is_the_most_at_once():
    of, sizes = limited(9, lambda batch: batch)

    batched(of, micro_batch=3)(torch.zeros(7))

    assert sizes == [3, 3, 1]


def test_list_of_outputs_is_joined_by_output_where_parts_show_that_it_is_one():
    of, _ = limited(4, lambda batch: [batch, 2 * batch])

    assert [one.tolist() for one in batched(of, micro_batch=4)(torch.arange(6.0))] == [
        [0, 1, 2, 3, 4, 5],
        [0, 2, 4, 6, 8, 10],
    ]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_model_generates_for_a_batch_of_any_size_as_for_all_of_it():
    pytest.importorskip("transformers")
    model = tiny("LlamaForCausalLM", 20, 16)
    ids, options = torch.randint(3, 20, (9, 4)), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ends = int(model.generate(ids, **options)[0, 6])  # so that sequences are of unlike length
    whole = model.generate(ids, eos_token_id=ends, **options)
    of, sizes = limited(2, lambda batch: model.generate(batch, eos_token_id=ends, **options))

    def padded(parts):
        rows = [row for part in parts for row in part]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)

    found = batched(of, join=padded)(ids)

    assert torch.equal(found, whole[:, : found.shape[1]])
    assert not whole[:, found.shape[1] :].any()
    assert sizes[-1] <= 2


def test_sample_that_does_not_fit_alone_is_named():
    of, _ = limited(0, lambda batch: batch)

    with pytest.raises(autoaccum.DoesNotFitError, match="sample"):
        batched(of)(torch.zeros(2))


def test_gradients_are_off():
    assert not batched(nn.Linear(2, 2))(torch.ones(3, 2)).requires_grad
