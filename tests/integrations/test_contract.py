"""What holds of every adapter: the framework's training goes on as if each batch had fitted at once.

What is one framework's alone, as its logs, outputs and kinds of batches, is in the file of that framework.
"""

import re

import accelerate
import pytest
import torch

import autoaccum
from support.frameworks import by_lightning
from support.frameworks.jobs import FRAMEWORKS, EndedError, alone, on_ranks
from support.models.small import WITHOUT_WARNINGS
from support.ranks.training import FAR

pytestmark = [WITHOUT_WARNINGS, pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")]
EVERY = pytest.mark.parametrize("by", FRAMEWORKS)
# PyTorch 2.8 adds up the norms of shards in float32, by which frameworks clip.
CLIPPED = FAR if torch.__version__ >= "2.9" else 1e-6


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")


def row(by, *marks, **given):
    """A case for `parametrize`: a framework, and what is said of the job or of the outcome."""
    named = [f"{name}={[*value] if isinstance(value, dict) else value}" for name, value in given.items()]
    return pytest.param(by, given, marks=[getattr(pytest.mark, mark) for mark in marks], id=", ".join([by, *named]))


def rows(*those):
    return pytest.mark.parametrize(("by", "given"), those)


def assert_same(found, expected, rounding=FAR):
    torch.testing.assert_close(found["parameters"], expected["parameters"], rtol=0.0, atol=rounding)
    for name in ("steps", "types", "scaler"):
        assert found[name] == expected[name]
    assert_same_log(found["log"], expected["log"], rel=max(rounding, 1e-6), abs=max(rounding, 1e-9))


def assert_same_log(found, expected, **near):
    """Field by field; some of the numbers are of single precision."""
    assert [sorted(entry) for entry in found] == [sorted(entry) for entry in expected]
    for mine, other in zip(found, expected, strict=True):
        assert mine == pytest.approx(other, nan_ok=True, **near)


# --- one process ------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("task", ["ignored", "words"])
def test_updates_logs_and_evaluations_are_those_of_whole_batches(by, task):
    job = {"task": task, "evaluates": True}

    found, whole = alone(by, **job, most=5), alone(by, **job, ours=None)

    assert_same(found, whole)
    assert whole["steps"] == len(found["cuts"]) == 3
    assert max(map(max, found["cuts"])) <= 5


def points_of(count, most):
    return range(1, count + 1, max(1, count // most))


def counted(predictions):
    return {"shape": sum(predictions.predictions.shape), "sum": float(predictions.predictions.sum())}


JUDGED = {"kind": by_lightning.Judged}


@pytest.mark.parametrize("most", [None, pytest.param(60, marks=pytest.mark.sweep)])
@rows(
    row("accelerate", place="training"),
    row("lightning", place="training", further=JUDGED, ours={"micro_batch": 6}),
    row("lightning", place="evaluation", further=JUDGED, ours={"micro_batch": 6}),
    row("trainer", place="training", task="gpt2", samples=24),
    row("trainer", place="training", task="bert", samples=24),
    row("trainer", place="evaluation", task="bert", samples=12, further={"compute_metrics": counted}),
)
def test_memory_that_runs_out_at_any_operator_changes_neither_parameters_nor_the_log(by, given, most):
    place, job = given["place"], {"evaluates": True} | {name: given[name] for name in given if name != "place"}
    whole, calm = alone(by, **job | {"ours": None}), alone(by, **job, fails={place: ()})
    count = calm["operators"][place]

    for point in points_of(count, most or (15 if by == "accelerate" else 2)):
        points = (point, point + count // 3) if by == "trainer" else (point,)
        found = alone(by, **job, fails={place: points})
        assert found["hits"]
        assert_same(found, whole)


@EVERY
@pytest.mark.parametrize(("batches", "most"), [(2, None), (3, 5)])
def test_batches_that_the_framework_accumulates_are_added_up(by, batches, most):
    job = {"batch": 7, "accumulates": batches, "epochs": 2}

    assert_same(alone(by, **job, most=most), alone(by, **job, ours=None))


@EVERY
@pytest.mark.parametrize(("half", "rounding"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_half_precision_and_its_scaler_are_the_frameworks_own(by, half, rounding):
    """The first scale of fp16 overflows, so that update is skipped."""
    found, whole = alone(by, half=half, most=5), alone(by, half=half, ours=None)

    assert found["types"] == {torch.bfloat16 if half == "bf16" else torch.float16}
    assert_same(found, whole, rounding)
    assert half == "bf16" or found["scaler"]["scale"] == 512.0


@EVERY
@pytest.mark.parametrize("most", [3, pytest.param(12, marks=pytest.mark.sweep)])
def test_memory_that_runs_out_in_fp16_is_not_taken_for_an_overflow(by, most):
    whole, calm = alone(by, half="fp16", ours=None), alone(by, half="fp16", fails={"training": ()})

    for point in points_of(calm["operators"]["training"], most):
        found = alone(by, half="fp16", fails={"training": (point,)})
        assert found["hits"] == 1
        assert_same(found, whole, 1e-3)


@EVERY
@pytest.mark.parametrize("half", [None, "fp16"])
def test_training_that_is_resumed_from_the_frameworks_checkpoint_ends_as_one_that_was_not(by, half, tmp_path):
    job = {"epochs": 2, "half": half, "ours": {"micro_batch": 5}}
    whole = alone(by, **job)

    with pytest.raises(EndedError):  # Transformers 4 by itself goes on otherwise within the second epoch
        alone(by, **job, folder=tmp_path, ends_at=3 if by == "trainer" else 5)
    found = alone(by, **job, folder=tmp_path, resumes=True)

    assert all(map(torch.equal, found["parameters"], whole["parameters"]))
    assert found["scaler"] == whole["scaler"]
    logs = [[entry for entry in one["log"] if "train_loss" not in entry] for one in (found, whole)]
    assert_same_log(logs[0], logs[1][-len(logs[0]) :], rel=0.0, abs=0.0)
    assert by == "trainer" or 0 < len(logs[0]) < len(logs[1])


@EVERY
def test_compiled_model_is_trained(by):
    torch.compiler.reset()
    found, whole = alone(by, compiles="framework"), alone(by, ours=None)
    torch.compiler.reset()

    assert_same(found, whole)


@rows(
    row("accelerate", said=r"Accelerator.log .* not once a batch; log what"),
    row("lightning", said=r"log_metrics .* not once a batch; use self.log, or"),
    row("trainer", said=r"Trainer.log .* not once a batch; .*last_backward.losses"),
)
def test_log_within_the_loss_is_refused(by, given, tmp_path):
    with pytest.raises(autoaccum.InvalidInputError, match=given["said"]):
        alone(by, folder=tmp_path, further={"logs": True})


@rows(
    *(row("accelerate", refused=kind) for kind in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")),
    *(row("lightning", refused=kind) for kind in ("FSDPStrategy", "DeepSpeedStrategy")),
    *(row("trainer", refused=kind) for kind in ("DEEPSPEED", "FSDP")),
)
def test_strategy_that_divides_the_model_or_reduces_in_each_pass_is_refused_by_name(by, given):
    said = f"{given['refused']}.*find_executable_micro_batch.*autoaccum run"

    with pytest.raises(autoaccum.InvalidInputError, match=said):
        alone(by, further=given)


# --- several ranks ----------------------------------------------------------------------------------------------------

RANKED = {"task": "ignored", "samples": 24, "epochs": 2}
# In what the ranks' own batches do not matter, or are summed up by the framework.
OF_ALL = {"loss", "rate", "norm", "grad_norm", "gathered", "samples", "mean_epoch"}


def of_all(log, names):
    return [{name: value for name, value in entry.items() if name in names} for entry in log]


def assert_ranks_end_as(found, whole, rounding, near):
    for one in found:
        assert all(map(torch.equal, one["parameters"], found[0]["parameters"]))
        assert one["log"] == found[0]["log"]
    torch.testing.assert_close(found[0]["parameters"], whole["parameters"], rtol=0.0, atol=rounding)
    assert found[0]["steps"] == whole["steps"]
    names = OF_ALL | {name for name in whole["log"][-1] if name.startswith("validation")}
    assert_same_log(of_all(found[0]["log"], names), of_all(whole["log"], names), rel=near, abs=1e-9)


LACKING = {"most": {1: 2}, "evaluates": True}
AS_WHOLE = {"shards": None, "most": None, "fails": {}, "compiles": None, "batch": 12, "accumulates": 1, "further": {}}


@rows(
    row("accelerate", **LACKING),
    row("accelerate", **LACKING, compiles="inside"),
    row("lightning", **LACKING),
    row("lightning", "slow", **LACKING, compiles="framework"),
    row("trainer", "slow", **LACKING),
    row("trainer", "slow", task="gpt2", fails={"training": (700,), "evaluation": (20, 60)}, evaluates=True),
    row("trainer", "slow", task="bert", fails={"training": (700,)}),  # by itself a mean of the ranks' means
    row("trainer", "slow", task="gpt2", batch=6, accumulates=2),
    row("trainer", "slow", task="gpt2", further={"average_tokens_across_devices": False}),
    row("accelerate", shards="full"),
    row("lightning", shards="full", evaluates=True),
    row("trainer", "slow", shards="full", evaluates=True, task="gpt2"),
    row("trainer", "slow", shards="full", evaluates=True, task="sft"),
)
def test_ranks_end_with_the_parameters_of_one_process_whichever_lacks_memory(by, given, rank_pool):
    whole = alone(by, **RANKED | given | AS_WHOLE | {"ours": None})

    found = on_ranks(rank_pool.run, by, **RANKED | given)

    is_spread, is_single = "shards" in given, given.get("task") == "sft"  # TRL computes its loss in float32
    rounding = 1e-6 if is_single else CLIPPED if is_spread else FAR
    assert_ranks_end_as(found, whole, rounding, near=1e-4 if is_spread else 1e-6)
    cuts = {"shards": [(3, 3), (3, 3)], "most": [(6,), (2, 2, 2)]}
    assert [one["cuts"][-1] for one in found] in [cuts[name] for name in cuts if name in given] or "task" in given
    assert found[1]["hits"] == sum(map(len, given.get("fails", {}).values()))
    if "evaluation" in given.get("fails", {}):
        plain = on_ranks(rank_pool.run, by, **RANKED | given | {"fails": {}, "ours": None})
        assert_same_log(found[0]["log"], plain[0]["log"], rel=1e-6, abs=1e-9)
    for name, value in found[0].get("state", {}).items():
        assert name != "body.0.weight" or value == found[0]["parameters"][0].tolist()


@rows(row("accelerate"), row("trainer", "slow"))
def test_model_that_the_framework_compiles_around_its_wrapper_is_refused_and_left_as_it_is(by, given, rank_pool):
    for one in on_ranks(rank_pool.answers, by, compiles="framework", **RANKED):
        assert isinstance(one, autoaccum.InvalidInputError), one
        assert re.search(r"DistributedDataParallel.* model\.compile\(\)", str(one))


@pytest.mark.slow  # a rank is killed, and imports anew what it needs
@rows(
    *(row(by, shards=state) for by in ("accelerate", "lightning") for state in ("full", "sharded")),
    row("trainer", "sweep", shards="full", task="gpt2"),  # both as Accelerate's
    row("trainer", shards="sharded", task="gpt2"),
)
def test_ranks_go_on_from_the_frameworks_own_state_where_they_were_killed(by, given, rank_pool, tmp_path):
    if accelerate.__version__.startswith("1.10.") and (by, given["shards"]) in OTHERWISE_BY_ITSELF:
        pytest.skip("Accelerate 1.10 itself goes on otherwise from this state, also without autoaccum")
    job = RANKED | given
    calm = on_ranks(rank_pool.run, by, **job)

    ended = on_ranks(rank_pool.answers, by, **job, folder=tmp_path, ends_at=4, wait_s=5)
    found = on_ranks(rank_pool.run, by, **job, folder=tmp_path, resumes=True)

    assert all("exit code -9" in str(one) for one in ended), ended
    for one in found:
        assert all(map(torch.equal, one["parameters"], found[0]["parameters"]))
    # In the last bits, gradients depend on which samples showed what a loss runs over.
    torch.testing.assert_close(found[0]["parameters"], calm[0]["parameters"], rtol=0.0, atol=FAR)


OTHERWISE_BY_ITSELF = [("accelerate", "sharded"), ("trainer", "full"), ("trainer", "sharded")]


@pytest.mark.slow  # the other waits for 3 s
@EVERY
def test_all_ranks_end_where_one_lacks_memory_within_a_pass_that_they_share(by, rank_pool):
    found = on_ranks(rank_pool.answers, by, **RANKED, shards="full", most={1: 2}, wait_s=3)

    assert [type(one) for one in found] == [autoaccum.StartAgainError] * 2, found


@pytest.mark.slow  # the other waits for 5 s
@pytest.mark.parametrize("by", ["lightning", "trainer"])
def test_evaluation_of_a_model_that_ranks_share_is_cut_on_no_rank_alone(by, rank_pool):
    job = RANKED | {"shards": "full", "evaluates": True, "ours": {"micro_batch": 3}}

    first, second = on_ranks(rank_pool.answers, by, **job, most={1: 4}, wait_s=5)

    assert isinstance(second, torch.OutOfMemoryError), second  # the framework's own
    assert isinstance(first, Exception), first


@rows(
    row("accelerate", said="FSDP", strategy={"fsdp_version": 1}),
    row(
        "lightning",
        said=r"ModelParallelStrategy\(tensor_parallel_size=2\)",
        strategy={"data_parallel_size": 1, "tensor_parallel_size": 2},
    ),
)
def test_parallelism_that_shares_samples_or_reduces_in_each_pass_is_refused(by, given, rank_pool):
    for one in on_ranks(rank_pool.answers, by, **RANKED, shards="full", strategy=given["strategy"]):
        assert isinstance(one, autoaccum.InvalidInputError), one
        assert re.search(f"{given['said']}.*find_executable_micro_batch.*autoaccum run", str(one))
