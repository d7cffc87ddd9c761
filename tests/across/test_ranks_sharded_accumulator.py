"""An accumulator of a model that `fully_shard` has spread over ranks: the gradient of all their batches together."""

import pytest
import torch

import autoaccum
from support.ranks import accumulating
from support.ranks import sharded_accumulating as sharded
from support.ranks.training import FAR, assert_alike, assert_trained_as, far


@pytest.mark.parametrize("loss", accumulating.LOSSES)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_parameters_are_those_of_one_process_with_the_whole_batch(rank_pool, loss, size):
    alone = sharded.train(0, 1, loss=loss)

    found = rank_pool.run("sharded_accumulating:train", size=size, loss=loss)

    assert_trained_as(found, alone)
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-12)
    assert found[0]["samples"] == [accumulating.BATCH] * 3
    assert len({len(cut) for cut in (one["cuts"][0] for one in found)}) > 1  # ranks have unlike numbers


@pytest.mark.parametrize(("how", "size"), [("kept", 2), ("frozen", 2), ("frozen whole", 2), ("tied", 2), ("hybrid", 4)])
def test_any_way_of_spreading_gives_the_parameters_of_one_process(rank_pool, how, size):
    alone = sharded.train(0, 1, how=how.replace(" whole", ""))

    found = rank_pool.run("sharded_accumulating:train", size=size, how=how)

    assert_trained_as(found, alone)


def test_passes_in_a_lower_precision_give_alike_parameters_near_those_of_one_process(rank_pool):
    alone = sharded.train(0, 1)

    found = rank_pool.answers("sharded_accumulating:train", size=2, how="half")

    if torch.__version__ < "2.9":  # whose gloo takes sums for means of what is not in float64
        assert all("adds up the gradients that fully_shard averages" in str(one) for one in found)
        return
    assert_alike(found)
    assert 1e-9 < far(found[0]["parameters"], alone["parameters"]) < 1e-6  # of float32


def test_texts_in_lengths_of_their_own_give_the_parameters_of_one_process(rank_pool):
    alone = sharded.train(0, 1, loss="tokens", is_ragged=True)

    found = rank_pool.run("sharded_accumulating:train", size=3, loss="tokens", is_ragged=True)

    assert_trained_as(found, alone)


@pytest.mark.parametrize("lacks", [None, (1, "enter", 5)])
def test_batches_add_up_and_are_clipped_as_in_one_process_also_where_memory_runs_out(rank_pool, lacks):
    alone = sharded.train(0, 1, twice=True, clip=0.1)

    found = rank_pool.run("sharded_accumulating:train", size=2, twice=True, clip=0.1, lacks=lacks)

    rounding = FAR if torch.__version__ >= "2.9" else 1e-6  # PyTorch 2.8 adds up the norms of shards in float32
    assert_alike(found)
    assert far(found[0]["parameters"], alone["parameters"]) <= rounding
    assert found[0]["norms"] == pytest.approx(alone["norms"], rel=max(rounding, 1e-9))


def test_scaler_skips_the_step_on_all_ranks_where_one_has_an_infinite_gradient(rank_pool):
    whole = sharded.train(0, 1, scaler=64.0, steps=4)
    found = rank_pool.run("sharded_accumulating:train", size=2, scaler=64.0, steps=4)
    spoiled = rank_pool.run("sharded_accumulating:train", size=2, scaler=64.0, steps=1, spoils=(0, 1))

    assert_trained_as(found, whole)
    assert {one["scale"] for one in found} == {whole["scale"]} == {256.0}
    assert {one["scale"] for one in spoiled} == {32.0}
    assert all(map(torch.equal, spoiled[0]["parameters"], sharded.train(0, 1, steps=0)["parameters"]))


@pytest.mark.parametrize(
    ("where", "fails_at", "cut"), [("enter", 3, True), ("transfer", 2, True), ("after the passes", 2, False)]
)
def test_lack_of_memory_outside_of_a_pass_begins_the_batch_anew_on_all_ranks(rank_pool, where, fails_at, cut):
    alone = sharded.train(0, 1)
    calm = rank_pool.run("sharded_accumulating:train", size=2)

    found = rank_pool.run("sharded_accumulating:train", size=2, lacks=(1, where, fails_at))

    assert_trained_as(found, alone)
    assert [one["oom_events"] for one in found] == [1, 1]
    assert any(map(lambda one, other: one["cuts"] != other["cuts"], found, calm)) is cut


@pytest.mark.parametrize("backward", [False, True])
def test_lack_of_memory_within_a_pass_ends_every_rank_with_the_word_to_start_again(rank_pool, backward):
    found = rank_pool.answers("sharded_accumulating:train", greedy=1, backward=backward, wait_s=2, size=2)

    assert [type(one) for one in found] == [autoaccum.StartAgainError] * 2, found
    assert all("rank 1 ran out of memory with" in str(one) for one in found)
    assert [one.micro_batch is None for one in found] == [True, False]
    assert "autoaccum run" in str(found[1])


@pytest.mark.parametrize("most", [3, pytest.param(60, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.slow  # a rank waits for seconds for one that has left a pass
def test_operator_that_lacks_memory_anywhere_ends_all_ranks_or_changes_nothing_but_cuts(rank_pool, who, most):
    calm = rank_pool.run("sharded_accumulating:faulted", {}, size=2)
    operators = calm[who]["operators"]
    ends = set()

    for point in range(1, operators, -(-operators // most)):
        found = rank_pool.answers("sharded_accumulating:faulted", {who: point}, size=2, wait_s=2)

        kinds = [type(one) for one in found]
        ends.add(kinds[0])
        if dict in kinds:
            assert [one["hits"] for one in found] == [int(rank == who) for rank in range(2)]
            assert all(map(torch.equal, found[0]["gradients"], found[1]["gradients"]))
            assert far(found[0]["gradients"], calm[0]["gradients"]) <= FAR
        else:
            assert kinds == [autoaccum.StartAgainError] * 2, (point, found)
    assert autoaccum.StartAgainError in ends  # most operators are within passes


def test_error_before_a_pass_on_one_rank_ends_the_others_at_once(rank_pool):
    first, second = rank_pool.answers("sharded_accumulating:train", size=2, fails=(1,), wait_s=2)

    assert isinstance(first, autoaccum.RankFailedError), first
    assert isinstance(second, LookupError), second


def test_statistics_of_batchnorm_are_alike(rank_pool):
    assert_alike(rank_pool.run("sharded_accumulating:train", size=2, how="norm"))


def test_sizes_grow_from_the_smallest_by_what_smaller_ones_show(rank_pool):
    alone = sharded.train(0, 1, steps=8)

    found = rank_pool.run("sharded_accumulating:growing", ["1GiB", "1GiB"], size=2)

    assert_trained_as(found, alone)
    plans = found[0]["plans"]
    assert plans[0] == 1
    assert plans == sorted(plans)
    assert plans[-1] == found[1]["plans"][-1] == 8  # the samples of rank 0


def test_rank_with_less_memory_holds_the_sizes_of_all(rank_pool):
    found = rank_pool.run("sharded_accumulating:growing", ["1GiB", "4KiB"], size=2)

    assert_alike(found)
    assert [one["plans"] for one in found] == [[1] * 8] * 2


@pytest.mark.parametrize(
    ("capacity", "sizes"),
    [
        pytest.param(200_000, [1, 1, 2, 4, 8, 16, 16, 16], marks=pytest.mark.sweep),
        (60_000, [1, 1, 2, 4, 6, 6, 6, 6]),
    ],
)
def test_sizes_grow_by_what_tensors_take_and_not_by_what_an_allocator_has_cached(rank_pool, capacity, sizes):
    found = rank_pool.run("sharded_accumulating:growing_with_a_cache", capacity, size=2)

    assert [one["sizes"] for one in found] == [sizes] * 2
    assert max(one["held"] for one in found) <= 0.85 * capacity


def test_report_tells_of_the_largest_pass_and_not_of_the_last(rank_pool):
    for said, most in rank_pool.run("sharded_accumulating:reported_peak", size=2):
        assert said == most


def test_sizes_grow_once_the_optimizer_has_its_state(rank_pool):
    for found in rank_pool.run("sharded_accumulating:before_the_first_step", size=2):
        for sizes in found:
            assert sizes[:4] == [1] * 4  # what the batch after the step takes shows in the next
            assert sizes[-1] == 8


@pytest.mark.parametrize("error", [RuntimeError("no skip connection: timeout"), ValueError("gloo")], ids=str)
def test_own_error_within_a_pass_keeps_its_type_and_no_batch_follows_it(rank_pool, error):
    (of_other,), (own, *later) = rank_pool.answers("sharded_accumulating:own_error", error, size=2, wait_s=2)

    assert type(own) is type(error)
    assert str(own) == str(error)
    assert isinstance(of_other, autoaccum.RankFailedError), of_other
    assert [type(one) for one in later] == [autoaccum.RankFailedError]
    assert "has left a pass of the model by an error" in str(later[0])


def test_lack_of_memory_in_a_pass_for_the_others_names_the_size_of_this_ranks_own(rank_pool):
    found = rank_pool.answers("sharded_accumulating:train", size=2, lacks=(0, "spare pass", 1), wait_s=2)

    assert [type(one) for one in found] == [autoaccum.StartAgainError] * 2, found
    assert found[0].micro_batch == 4  # of 8 samples in two
    assert "in a pass for the others, which has" in str(found[1])


def test_one_process_of_its_own_group_trains_as_without(rank_pool):
    alone = sharded.train(0, 1)

    (found,) = rank_pool.run("sharded_accumulating:alone_in_a_group", size=1)

    assert_trained_as([found], alone)


def test_parameters_that_an_evaluation_left_gathered_are_spread_again(rank_pool):
    alone, _ = sharded.after_an_evaluation(0, 1)

    for found, _ in rank_pool.run("sharded_accumulating:after_an_evaluation", size=2):
        assert far(found, alone) < FAR


def test_gradients_are_reduced_where_the_loop_has_switched_that_off(rank_pool):
    alone = sharded.without_sync(0, 1)

    for found in rank_pool.run("sharded_accumulating:without_sync", size=2):
        assert far(found, alone) < FAR


@pytest.mark.parametrize(
    ("how", "size", "said"),
    [
        ("late", 2, "fully_shard was called after this Accumulator was made"),
        ("partly", 2, "parameter '3.weight' is trained and on every rank whole"),
        ("offload", 2, "CPUOffloadPolicy"),
        ("unlike layers", 2, "another model than rank 0"),
        ("unlike policies", 2, "reshard_after_forward"),
        ("one rank", 2, "another model than rank 0"),
        ("tensor parallel", 2, "find_executable_micro_batch"),
        ("tensor parallel too", 4, "find_executable_micro_batch"),
        ("some ranks", 4, "is spread over 2 ranks, and this training has 4"),
        ("divided", 2, "set_gradient_divide_factor"),
        ("unlike dimensions", 2, "Shard(dim=1)"),
        ("unlike order", 2, "of 3.weight, 3.bias, 0.weight, 0.bias"),
        ("unlike blocks", 2, "another model than rank 0"),
        ({"save_memory": "checkpoint"}, 2, "save_memory='checkpoint' is not for a model"),
        ({"loss_scope": "window"}, 2, "loss_scope='window'"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_on_all_ranks_before_anything_is_touched(rank_pool, how, size, said):
    found = rank_pool.run("sharded_accumulating:refused", how, size=size)

    assert all(said in one for one in found), found


def test_model_that_is_sharded_between_two_batches_is_refused(rank_pool):
    found = rank_pool.run("sharded_accumulating:late_in_the_middle", size=2)

    assert all("fully_shard was called after this Accumulator was made" in one for one in found), found
