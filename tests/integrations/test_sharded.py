"""Accelerate, Transformers, TRL and Lightning with FSDP2, by processes that each hold a shard of the model."""

import accelerate
import pytest
import torch
import transformers

import autoaccum
from support.ranks.training import FAR, far

FORMS = ["full", "sharded"]


# PyTorch 2.8 adds up the norms of shards in float32, by which frameworks clip.
CLIPPED = FAR if torch.__version__ >= "2.9" else 1e-6


def assert_ends_alike(found, alone, rounding=FAR):
    for one in found:
        assert all(map(torch.equal, one["parameters"], found[0]["parameters"]))
    assert far(found[0]["parameters"], alone["parameters"]) <= rounding


def assert_goes_on_where_it_was_killed(rank_pool, name, folder, state, kill_at, **settings):
    settings |= {"state": state, "size": 2}
    calm = rank_pool.run(name, folder / "calm", **settings)

    ended = rank_pool.answers(name, folder / "killed", kill_at=kill_at, wait_s=5, **settings)
    found = rank_pool.run(name, folder / "killed", resumes=True, **settings)

    assert all("exit code -9" in str(one) for one in ended), ended
    # In the last bits, gradients depend on which samples showed what a loss runs over.
    assert_ends_alike(found, calm[0])


# --- Accelerate -------------------------------------------------------------------------------------------------------


def test_accelerate_trains_as_one_process_and_clips_and_gathers_by_itself(rank_pool):
    (alone,) = rank_pool.run("adapters:accelerate", size=1, is_ours=False)

    found = rank_pool.run("adapters:accelerate", is_spread=True, size=2)

    assert_ends_alike(found, alone, CLIPPED)
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=CLIPPED)
    assert found[0]["gathered"] == [12] * 6
    assert found[0]["cuts"][0] == (3, 3)
    assert found[0]["state"]["body.0.weight"] == found[0]["parameters"][0].tolist()


@pytest.mark.slow  # a rank is killed, and imports anew what it needs
@pytest.mark.parametrize("state", FORMS)
def test_accelerate_goes_on_from_its_own_state_where_it_was_killed(rank_pool, tmp_path, state):
    if state == "sharded" and accelerate.__version__.startswith("1.10."):
        pytest.skip("Accelerate 1.10 itself goes on otherwise from sharded states, also without autoaccum")
    assert_goes_on_where_it_was_killed(rank_pool, "adapters:accelerate", tmp_path, state, 5, is_spread=True)


@pytest.mark.slow  # the other waits for 3 s
def test_accelerate_ends_all_ranks_where_one_lacks_memory_within_a_pass(rank_pool):
    found = rank_pool.answers("adapters:accelerate", is_spread=True, size=2, most={1: 2}, wait_s=3)

    assert [type(one) for one in found] == [autoaccum.StartAgainError] * 2, found


def test_accelerate_refuses_fsdp1_and_says_what_there_is(rank_pool):
    found = rank_pool.answers("adapters:accelerate", is_spread=True, size=2, version=1)

    for one in found:
        assert isinstance(one, autoaccum.InvalidInputError), one
        assert "find_executable_micro_batch" in str(one)
        assert "autoaccum run" in str(one)


# --- Lightning --------------------------------------------------------------------------------------------------------


def test_lightning_trains_as_one_process_and_clips_logs_and_evaluates_by_itself(rank_pool):
    (alone,) = rank_pool.run("adapters:lightning", size=1, is_ours=False)

    found = rank_pool.run("adapters:lightning", is_spread=True, size=2)

    assert_ends_alike(found, alone, CLIPPED)
    assert found[0]["steps"] == alone["steps"] == 6
    assert found[0]["logged"] == pytest.approx(alone["logged"], rel=max(CLIPPED, 1e-9))
    assert found[0]["sizes"] == ((3, 3),) * 6


@pytest.mark.slow  # a rank is killed, and imports anew what it needs
@pytest.mark.parametrize("state", FORMS)
def test_lightning_goes_on_from_its_own_checkpoint_where_it_was_killed(rank_pool, tmp_path, state):
    assert_goes_on_where_it_was_killed(
        rank_pool, "adapters:lightning", tmp_path, state, 4, is_spread=True
    )  # after an epoch


def test_lightning_refuses_tensor_parallelism_and_says_what_there_is(rank_pool):
    found = rank_pool.answers("adapters:lightning", is_spread=True, size=2, tensors=2)

    for one in found:
        assert isinstance(one, autoaccum.InvalidInputError), one
        assert "find_executable_micro_batch" in str(one)
        assert "autoaccum run" in str(one)


# --- Transformers and TRL ---------------------------------------------------------------------------------------------


@pytest.mark.slow  # ranks import Transformers, and TRL
@pytest.mark.parametrize("kind", ["gpt2", "sft"])
def test_trainer_trains_as_one_process_and_clips_logs_and_evaluates_by_itself(rank_pool, tmp_path, kind):
    (alone,) = rank_pool.run("adapters:trainer", tmp_path, kind=kind, size=1)

    found = rank_pool.run("adapters:trainer", tmp_path, kind=kind, size=2)

    assert_ends_alike(found, alone, FAR if kind == "gpt2" else 1e-6)  # TRL computes its loss in float32
    for ours, theirs in zip(found[0]["log"], alone["log"], strict=True):
        names = [name for name in ("loss", "grad_norm") if name in theirs]
        assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-4)
    evaluations = [[entry["eval_loss"] for entry in one["log"] if "eval_loss" in entry] for one in found]
    assert len(evaluations[0]) == 2
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow  # a rank is killed, and imports anew what it needs
@pytest.mark.parametrize("state", [pytest.param("full", marks=pytest.mark.sweep), "sharded"])  # both as Accelerate's
def test_trainer_goes_on_from_its_own_checkpoint_where_it_was_killed(rank_pool, tmp_path, state):
    if accelerate.__version__.startswith("1.10."):
        pytest.skip("Accelerate 1.10 itself goes on otherwise from any state of a Trainer, also without autoaccum")
    (tmp_path / "calm").mkdir()
    (tmp_path / "killed").mkdir()
    assert_goes_on_where_it_was_killed(rank_pool, "adapters:trainer", tmp_path, state, 4)


# --- models that Transformers itself has sharded while it loaded them -------------------------------------------------

IN_SHARDS = pytest.mark.skipif(transformers.__version__ < "5.1", reason="Transformers 5 shards models that it loads")


@pytest.mark.slow  # ranks import Transformers
@IN_SHARDS
def test_model_that_transformers_has_loaded_in_shards_trains_and_evaluates_as_one_process(rank_pool, tmp_path):
    (alone,) = rank_pool.run("adapters:loaded_in_shards", tmp_path, size=1)

    found = rank_pool.run("adapters:loaded_in_shards", tmp_path, size=2)

    assert_ends_alike(found, alone)
    evaluations = [[entry["eval_loss"] for entry in one["log"] if "eval_loss" in entry] for one in found]
    assert len(evaluations[0]) == 2
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow  # the other waits for 5 s
@IN_SHARDS
def test_evaluation_of_a_model_in_shards_is_cut_on_no_rank_alone(rank_pool, tmp_path):
    first, second = rank_pool.answers("adapters:loaded_in_shards", tmp_path, most=(99, 3), size=2, wait_s=5)

    assert isinstance(second, torch.OutOfMemoryError), second  # the framework's own
    assert isinstance(first, Exception), first


@IN_SHARDS
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kind": "reward"}, "RewardTrainer was never tried with auto_accumulate() and FSDP2"),
        ({"pp_size": 2}, "pp_size=2"),
    ],
    ids=str,
)
def test_other_trainers_and_parallelism_of_a_model_in_shards_are_refused(rank_pool, tmp_path, asked, said):
    for one in rank_pool.answers("adapters:loaded_in_shards", tmp_path, **asked, size=2):
        assert isinstance(one, autoaccum.InvalidInputError), one
        assert said in str(one)
        assert "find_executable_micro_batch" in str(one)
