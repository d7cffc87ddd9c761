"""Models that Transformers itself has sharded while it loaded them."""

import pytest
import torch
import transformers

import autoaccum
from support.frameworks.jobs import alone, on_ranks
from support.ranks.training import FAR

pytestmark = pytest.mark.skipif(transformers.__version__ < "5.1", reason="Transformers 5 shards models that it loads")
JOB = {"task": "llama", "samples": 24, "epochs": 2, "evaluates": True, "ours": {"micro_batch": 4}}


def by_ranks(answers, folder, loads=(("fsdp_size", 2),), **asked):
    return on_ranks(answers, "trainer", **JOB | asked, folder=folder, further={"loads": dict(loads)})


@pytest.mark.slow  # ranks import Transformers
def test_model_that_transformers_has_loaded_in_shards_trains_and_evaluates_as_one_process(rank_pool, tmp_path):
    whole = alone("trainer", **JOB | {"ours": None})

    found = by_ranks(rank_pool.run, tmp_path)

    for one in found:
        assert all(map(torch.equal, one["parameters"], found[0]["parameters"]))
        torch.testing.assert_close(one["parameters"], whole["parameters"], rtol=0.0, atol=FAR)
    evaluations = [[entry["eval_loss"] for entry in one["log"] if "eval_loss" in entry] for one in found]
    assert len(evaluations[0]) == 2
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow  # the other waits for 5 s
def test_evaluation_of_a_model_in_shards_is_cut_on_no_rank_alone(rank_pool, tmp_path):
    first, second = by_ranks(rank_pool.answers, tmp_path, most={1: 3}, wait_s=5)

    assert isinstance(second, torch.OutOfMemoryError), second  # the framework's own
    assert isinstance(first, Exception), first


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"task": "reward"}, "RewardTrainer was never tried with auto_accumulate() and FSDP2"),
        ({"loads": [("pp_size", 2)]}, "pp_size=2"),
    ],
    ids=str,
)
def test_other_trainers_and_parallelism_of_a_model_in_shards_are_refused(rank_pool, tmp_path, asked, said):
    for one in by_ranks(rank_pool.answers, tmp_path, **asked):
        assert isinstance(one, autoaccum.InvalidInputError), one
        assert said in str(one)
        assert "find_executable_micro_batch" in str(one)
