"""`fit` with models that `fully_shard` has spread over ranks: the gradient of the global window all the same."""

import itertools
import re

import pytest
import torch
from torch.utils.data import DataLoader

import autoaccum
from support.ranks import training
from support.ranks.training import FAR, assert_alike, assert_trained_as, far


def alone(*, norm=False, **arguments):
    return training.train(0, 1, model=training.net(norm=norm), **arguments)


# Of sums and of tokens: the others are weighted as one of these, and those of several ranks have tests without FSDP.
QUICK = {("pair", 2), ("tokens, found out", 3)}


def losses():
    for case in itertools.product((name for name in training.LOSSES if name != "several"), (2, 3)):
        yield pytest.param(*case, marks=() if case in QUICK else pytest.mark.sweep)


@pytest.mark.parametrize(("loss", "size"), list(losses()))
def test_parameters_are_those_of_one_process_with_the_whole_batch(rank_pool, loss, size):
    expected = alone(loss=loss, target_batch=16, micro_batch=16, epochs=2)

    found = rank_pool.run(
        "sharded:train", size=size, loss=loss, target_batch=16, micro_batch=3, epochs=2, shard_data=True
    )

    for one in found:
        assert far(one["parameters"], expected["parameters"]) <= FAR
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert one["samples"] == expected["samples"]


def test_layers_that_stay_gathered_after_a_forward_pass_train_as_any_others(rank_pool):
    loader = DataLoader(training.vectors(20, seed=5), batch_size=10)
    asked = {"target_batch": 16, "micro_batch": 4, "epochs": 2, "shard_data": True, "val_loader": loader}
    expected = alone(target_batch=16, micro_batch=16, epochs=2)

    found = rank_pool.run("sharded:train", size=2, stays_gathered=True, **asked)

    assert_trained_as(found, expected)


def test_ranks_may_have_other_numbers_of_samples_and_none_at_the_end(rank_pool):
    lengths = [23, 9, 2]

    found = rank_pool.run(
        "sharded:with_own_samples",
        lengths,
        size=3,
        target_batch=12,
        micro_batch=3,
        loss="tokens, found out",
    )
    whole = rank_pool.run(
        "training:with_own_samples",
        lengths,
        size=3,
        target_batch=12,
        micro_batch=3,
        loss="tokens, found out",
    )

    assert_alike(found)
    assert [one["samples"] for one in found] == [one["samples"] for one in whole]
    assert far(found[0]["parameters"], whole[0]["parameters"]) <= FAR


def test_micro_batch_in_which_nothing_counts_takes_part_in_its_pass(rank_pool):
    data = training.texts(16, nothing_counts_below=5)
    expected = alone(loss="tokens, found out", data=data, target_batch=16, micro_batch=16)

    found = rank_pool.run(
        "sharded:train",
        size=2,
        data=data,
        loss="tokens, found out",
        target_batch=16,
        micro_batch=2,
        shard_data=True,
    )

    assert_trained_as(found, expected)


@pytest.mark.parametrize("job", ["training:train", "sharded:train"])
def test_window_in_which_nothing_counts_on_any_rank_goes_by_where_its_loss_exists(rank_pool, job):
    data = training.texts(16, nothing_counts_below=16) + training.texts(32)
    asked = {"loss": "tokens, if any", "data": data, "target_batch": 16}
    expected = alone(**asked, micro_batch=16)

    found = rank_pool.run(job, size=2, **asked, micro_batch=2, shard_data=True)

    assert expected["losses"][0] == 0.0
    assert_trained_as(found, expected)


@pytest.mark.parametrize("job", ["training:train", "sharded:train"])
@pytest.mark.filterwarnings("ignore::autoaccum.errors.LossWarning")  # at most 1 is no count
def test_one_of_two_losses_in_which_nothing_counts_on_any_rank_goes_by(rank_pool, job):
    data = training.texts(16) + training.texts(16, nothing_counts_below=16) + training.texts(16, seed=1)
    asked = {"loss": "two means", "data": data, "target_batch": 16}
    expected = alone(**asked, micro_batch=16)

    found = rank_pool.run(job, size=2, **asked, micro_batch=2, shard_data=True)

    assert_trained_as(found, expected)


def test_loss_that_one_rank_refuses_within_a_pass_ends_all_at_once(rank_pool):
    data = training.texts_of_one_length(48, but=31)
    asked = {"loss": training.tokens_if_all_count, "data": data, "target_batch": 16, "micro_batch": 2}

    answers = rank_pool.answers("sharded:train", size=2, **asked, shard_data=True)

    assert {type(answer) for answer in answers} == {autoaccum.InvalidInputError, autoaccum.RankFailedError}
    assert any("return the same form in every micro-batch" in str(answer) for answer in answers)


def test_running_statistics_and_clipping_are_those_of_whole_models_on_the_same_ranks(rank_pool):
    asked = {"target_batch": 16, "micro_batch": 4, "shard_data": True, "clip_grad_norm": 0.1, "epochs": 2, "norm": True}
    asked["data"] = training.vectors(48)

    found = rank_pool.run("sharded:train", size=2, **asked)
    whole = rank_pool.run("sharded:unsharded", size=2, **asked)

    rounding = FAR if torch.__version__ >= "2.9" else 1e-6  # PyTorch 2.8 adds up the norms of shards in float32
    assert_alike(found)
    assert found[0]["norms"] == found[1]["norms"]
    assert found[0]["norms"] == pytest.approx(whole[0]["norms"], rel=max(1e-9, rounding))
    for one, other in zip(found[0]["buffers"], whole[0]["buffers"], strict=True):
        torch.testing.assert_close(one, other, rtol=rounding, atol=0.0)
    assert far(found[0]["parameters"], whole[0]["parameters"]) <= rounding


def test_evaluation_counts_every_sample_once_where_ranks_have_other_numbers_of_them(rank_pool):
    asked = {"target_batch": 8, "micro_batch": 4, "epochs": 2}

    found = rank_pool.run("sharded:evaluated", [13, 3], size=2, **asked)
    whole = rank_pool.run("training:evaluated", [13, 3], size=2, **asked)

    assert [one["evaluations"] for one in found] == [one["evaluations"] for one in found[:1] * 2]
    (loss, metrics, samples), (expected, its_metrics, its_samples) = (
        found[0]["evaluations"][-1],
        whole[0]["evaluations"][-1],
    )
    assert samples == its_samples
    assert loss == pytest.approx(expected, rel=1e-9)
    assert metrics["size"] == pytest.approx(its_metrics["size"], rel=1e-9)


@pytest.mark.parametrize("lengths", [[13, 3], [0, 13]])
def test_metrics_may_take_a_forward_pass_of_their_own_where_ranks_have_other_numbers_of_samples(rank_pool, lengths):
    asked = {"loss": "list", "target_batch": 8, "micro_batch": 4}

    found = rank_pool.run("sharded:evaluated", lengths, size=2, **asked)

    assert found[0]["evaluations"] == found[1]["evaluations"]
    assert found[0]["evaluations"][0][2] == sum(lengths)


@pytest.mark.parametrize(
    ("kind", "samples"),  # 3 are on the first rank alone
    [("detached", 20), *(pytest.param(*case, marks=pytest.mark.sweep) for case in (("detached", 3), ("several", 20)))],
)
def test_run_that_goes_on_with_an_evaluation_adds_up_the_losses_that_were_trained(rank_pool, tmp_path, kind, samples):
    """No window of this process has shown them, nor given a rank without samples any for its passes."""
    expected = rank_pool.run("sharded:evaluation_of_names", kind, samples, size=2)
    ended = rank_pool.run("sharded:evaluation_of_names", kind, samples, tmp_path, ends_after=2, size=2)

    found = rank_pool.run("sharded:evaluation_of_names", kind, samples, tmp_path, size=2)

    assert ended == [None, None]
    assert found == expected


def test_evaluation_takes_no_more_samples_at_once_than_training_since_a_failure_would_end_every_rank(rank_pool):
    found = rank_pool.run("sharded:greedy_in_evaluation", 3, size=2, target_batch=16, micro_batch=3, shard_data=True)

    assert [one["evaluations"][0][2] for one in found] == [40, 40]


@pytest.mark.parametrize("backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lack_of_memory_within_a_pass_ends_every_rank(rank_pool, backward):
    found = rank_pool.answers(
        "sharded:greedy",
        4,
        backward=backward,
        wait_s=2,
        size=2,
        target_batch=16,
        micro_batch=8,
        shard_data=True,
    )

    assert isinstance(found[1], autoaccum.StartAgainError), found
    assert found[1].micro_batch == 8
    assert isinstance(found[0], autoaccum.StartAgainError), found
    assert found[0].micro_batch is None
    assert all("rank 1 ran out of memory" in str(one) for one in found)


@pytest.mark.parametrize("norm", [pytest.param(False, marks=pytest.mark.slow), True])
def test_lack_of_memory_that_no_smaller_cut_would_mend_is_told_as_such(rank_pool, norm):
    asked = {"target_batch": 16, "micro_batch": 2 if norm else 1, "norm": norm, "shard_data": True}

    found = rank_pool.answers("sharded:greedy", 0, wait_s=2, size=2, **asked)

    assert isinstance(found[1], autoaccum.DoesNotFitError), found
    assert isinstance(found[0], autoaccum.RankFailedError), found


@pytest.mark.parametrize("optimizer", [training.sgd, training.plain_sgd])  # with and without a state
def test_sizes_grow_from_the_smallest_by_what_smaller_ones_show(rank_pool, optimizer):
    asked = {"target_batch": 16, "epochs": 3, "optimizer": optimizer}
    found = rank_pool.run("sharded:train", size=2, shard_data=True, **asked)
    expected = alone(micro_batch=16, **asked)

    assert_trained_as(found, expected)
    sizes = [max(cut) for cut in found[0]["cuts"] if len(cut) and sum(cut) == 8]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] == 8


# --- checkpoints ------------------------------------------------------------------------------------------------------

RUN = {"target_batch": 12, "micro_batch": 4, "shard_data": True, "epochs": 2, "norm": True, "dropout": 0.3}
RUN |= {"data": training.vectors(48), "optimizer": training.adam}


@pytest.fixture(scope="module")
def undisturbed(rank_pool):
    return rank_pool.run("sharded:train", size=2, **RUN)


@pytest.mark.parametrize("steps", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_training_goes_on_from_its_checkpoint_bit_for_bit(rank_pool, tmp_path, steps, undisturbed):
    rank_pool.run("sharded:train", size=2, checkpoint=tmp_path, **{**RUN, "epochs": None, "max_steps": steps})

    found = rank_pool.run("sharded:train", size=2, checkpoint=tmp_path, resume=True, **RUN)

    for one in found:
        assert all(map(torch.equal, one["parameters"], undisturbed[0]["parameters"]))
        assert all(map(torch.equal, one["buffers"], undisturbed[0]["buffers"]))
        assert one["losses"] == undisturbed[0]["losses"][steps:]


def test_other_number_of_ranks_goes_on_after_an_epoch(rank_pool, tmp_path):
    run = {**RUN, "norm": False, "dropout": 0.0}
    rank_pool.run("sharded:train", size=3, checkpoint=tmp_path, **{**run, "epochs": 1})

    found = rank_pool.run("sharded:train", size=2, checkpoint=tmp_path, resume=True, **run)

    expected = alone(target_batch=12, micro_batch=12, epochs=2, data=run["data"], optimizer=run["optimizer"])
    assert far(found[0]["parameters"], expected["parameters"]) <= FAR


OF_SIZES = [f'{{"micro_batch": {size}}}' for size in ("-5", "0", "true", "1e400", "1" + "0" * 400, '"8"')]


@pytest.mark.parametrize("found", ["", "{", "[]", "3", "{}", "[" * 100_000, *OF_SIZES])
def test_note_of_lack_of_memory_that_nothing_here_has_written_is_passed_over(tmp_path, capsys, found):
    (tmp_path / "out-of-memory.json").write_text(found)

    trained = alone(target_batch=16, micro_batch=16, checkpoint=tmp_path, progress="lines")

    assert trained["cuts"][0] == (16,)
    assert "ran out of memory before" not in capsys.readouterr().err


@pytest.mark.parametrize(("before", "after"), [("train", "unsharded"), ("unsharded", "train")])
def test_whole_models_and_spread_ones_go_on_from_each_others_checkpoints(rank_pool, tmp_path, before, after):
    run = {name: value for name, value in RUN.items() if name not in ("norm", "dropout")}
    expected = rank_pool.run("sharded:unsharded", size=2, **run)
    rank_pool.run(f"sharded:{before}", size=2, checkpoint=tmp_path, **{**run, "epochs": None, "max_steps": 3})

    found = rank_pool.run(f"sharded:{after}", size=2, checkpoint=tmp_path, resume=True, **run)

    assert found[0]["resumed from"] == 3
    assert far(found[0]["parameters"], expected[0]["parameters"]) <= FAR


@pytest.mark.slow  # the others wait for five seconds
def test_rank_0_without_room_for_the_whole_state_tells_the_others(rank_pool, tmp_path):
    found = rank_pool.answers("sharded:without_room", wait_s=5, size=2, checkpoint=tmp_path, **RUN)

    assert isinstance(found[0], MemoryError), found
    assert isinstance(found[1], autoaccum.RankFailedError), found
    assert "rank 0: MemoryError" in str(found[1])


# --- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"noise_scale": 5}, "noise_scale=5 is not for a model"),
        ({"last_layer_is_whole": True}, "parameter '3.weight' is trained and on every rank whole"),
    ],
)
def test_what_every_rank_would_do_by_itself_is_refused(rank_pool, arguments, text):
    answers = rank_pool.answers("sharded:train", size=2, target_batch=16, shard_data=True, **arguments)

    for answer in answers:
        assert isinstance(answer, autoaccum.InvalidInputError), answer
        assert re.search(text, str(answer))


def test_one_process_is_told_to_have_others(rank_pool):
    (answer,) = rank_pool.answers("sharded:train", size=1, target_batch=16)

    assert isinstance(answer, autoaccum.InvalidInputError), answer
    assert "parameter '0.weight' is a DTensor" in str(answer)
