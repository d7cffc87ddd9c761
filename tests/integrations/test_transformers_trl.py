"""TRL's trainers train as if each batch had fitted at once, and log as their own accumulation does."""

import functools

import pytest
import torch

pytest.importorskip("trl")

import peft
import trl
from datasets import Dataset

import autoaccum
from autoaccum._system.notices import Notices
from autoaccum._training.accumulator import Accumulator
from autoaccum.integrations._trainer_evaluation import EvaluationInParts
from autoaccum.integrations.transformers import windowed
from faults import FailAt
from torchrun import found_by_ranks
from trainers import history, weights
from trl_trainers import GENERATING, TRAINERS, generated, trained

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
# TRL computes log-probabilities in single precision.
ROUNDING = 3e-7


@pytest.fixture(autouse=True)
def environment_of_its_own(monkeypatch):
    """Transformers 4 sets variables of Accelerate's."""
    monkeypatch.setenv("ACCELERATE_USE_IPEX", "false")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


def cut(kind, **options):
    kind = TRAINERS[kind][0] if isinstance(kind, str) else kind
    return windowed(kind, **({"micro_batch": 4, "notices": Notices(silent=True)} | options))


def assert_same_weights(ours, theirs):
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=ROUNDING)


def log(trainer):
    """The log; how far an epoch is, and its operations, depend on the loader's batches, and times on the clock."""
    left_out = ("total_flos", "epoch", "step_time")
    return [{key: value for key, value in entry.items() if key not in left_out} for entry in history(trainer)]


@pytest.fixture(scope="module", params=TRAINERS)
def plain(request, tmp_path_factory):
    kind = request.param
    return kind, trained(TRAINERS[kind][0], kind, tmp_path_factory.mktemp("plain"))


def test_parameters_are_those_of_whole_batches_and_metrics_those_of_accumulation(plain, tmp_path):
    kind, whole = plain
    ours = trained(cut(kind), kind, tmp_path, samples=24)
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "samples": 24}
    theirs = trained(TRAINERS[kind][0], kind, tmp_path, **accumulated)

    assert ours.autoaccum.plan.micro_batches == (4, 4, 4)
    assert_same_weights(ours, theirs)
    for mine, other in zip(log(ours), log(theirs), strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert_same_weights(trained(cut(kind), kind, tmp_path), whole)


def test_memory_that_runs_out_changes_nothing_and_logs_nothing_more(plain, tmp_path, monkeypatch):
    kind, theirs = plain
    patched = [(Accumulator, "backward"), (EvaluationInParts, "run")]

    def run(points):
        modes = [FailAt(*points) for _ in patched]
        with monkeypatch.context() as patch:
            for (owner, method), mode in zip(patched, modes, strict=True):
                patch.setattr(owner, method, within(mode, getattr(owner, method)))
            return trained(cut(kind), kind, tmp_path), modes

    undisturbed, whole = run(())
    ours, modes = run([int(0.6 * min(mode.count for mode in whole))])

    assert all(mode.hits for mode in modes)
    assert_same_weights(ours, theirs)
    assert [list(entry) for entry in log(ours)] == [list(entry) for entry in log(undisturbed)]


def within(mode, function):
    def with_faults(*args, **kwargs):
        with mode:
            return function(*args, **kwargs)

    return with_faults


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    return found_by_ranks("trl_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_two_ranks_end_as_one_with_the_whole_batch(of_ranks, kind, tmp_path):
    theirs = trained(TRAINERS[kind][0], kind, tmp_path, samples=24, evaluated=12)
    (first, log_of_first, _), (second, log_of_second, failures) = (found[kind, "ours"] for found in of_ranks)

    assert all(failures)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, weights(theirs), rtol=0.0, atol=ROUNDING)
    assert log_of_first == log_of_second


# --- rows of several sequences, and trainers that generate ------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 24}], ids=str
)
def test_packed_rows_are_cut_at_their_sequences(tmp_path, options):
    options |= {"eval_strategy": "no", "num_train_epochs": 2}
    ours = trained(cut("sft", micro_batch=3), "sft", tmp_path, **options)

    assert max(ours.autoaccum.last_backward.micro_batches) <= 3
    assert ours.autoaccum.plan.accum_steps > 1
    assert_same_weights(ours, trained(trl.SFTTrainer, "sft", tmp_path, **options))


def test_tokens_of_the_assistant_alone_count(tmp_path):
    """Masks of unlike length, as chat templates make them."""
    samples = [range(2, 5 + number % 7) for number in range(26)]
    rows = [{"input_ids": [*row], "assistant_masks": [int(word > 3) for word in row]} for row in samples]
    ours, theirs = (
        trained(kind, "sft", tmp_path, rows=Dataset.from_list(rows), eval_strategy="no")
        for kind in (cut("sft"), trl.SFTTrainer)
    )

    assert_same_weights(ours, theirs)


def test_adapters_of_lora_are_trained(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    ours, theirs, untrained = (
        trained(functools.partial(kind, peft_config=config), "sft", tmp_path, eval_strategy="no", **options)
        for kind, options in ((cut("sft"), {}), (trl.SFTTrainer, {}), (trl.SFTTrainer, {"train": False}))
    )

    assert ours.autoaccum.plan.micro_batches == (4, 4, 4)
    assert_same_weights(ours, theirs)
    assert not torch.equal(weights(ours), weights(untrained))


@pytest.mark.parametrize("loss_type", ["hinge", "ipo", "robust", "apo_zero"])
def test_losses_of_preferences_that_are_means_over_pairs_are_those_of_whole_batches(tmp_path, loss_type):
    options = {"loss_type": loss_type, "eval_strategy": "no", "label_smoothing": 0.1 if loss_type == "robust" else 0.0}
    ours, theirs = (trained(kind, "dpo", tmp_path, **options) for kind in (cut("dpo"), trl.DPOTrainer))

    assert_same_weights(ours, theirs)


@pytest.mark.parametrize(("kind", "loss_type"), GENERATING)
def test_batches_are_cut_after_generation(tmp_path, kind, loss_type):
    """Of two accumulated batches, each has its own normalisers, as without."""
    ours = generated(lambda base: cut(base, micro_batch=3), kind, tmp_path, loss_type)
    theirs = generated(lambda base: base, kind, tmp_path, loss_type)

    assert ours.autoaccum.last_backward.micro_batches == (3, 3, 2)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=10 * ROUNDING)
    for name in ("reward", "num_tokens", "completions/mean_length"):
        assert [entry[name] for entry in log(ours)[:-1]] == [entry[name] for entry in log(theirs)[:-1]]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired", "sft", ["sigmoid", "bco_pair", "sft"]], ids=str)
def test_losses_of_preferences_that_are_no_means_over_pairs_are_refused(tmp_path, loss_type):
    trainer = trained(cut("dpo"), "dpo", tmp_path, train=False, loss_type=loss_type)

    with pytest.raises(autoaccum.InvalidInputError, match=r"loss_type='(aot|sft).*find_executable_micro_batch"):
        trainer.train()


@pytest.mark.parametrize(
    ("kind", "option", "text"),
    [("dpo", "aux_loss_enabled", "router's balancing loss"), ("sft", "use_adaptive_entropy", "entropy_coef=")],
)
def test_options_that_need_the_whole_batch_are_refused(tmp_path, kind, option, text):
    trainer = trained(cut(kind), kind, tmp_path, train=False)
    setattr(trainer, option, True)

    with pytest.raises(autoaccum.InvalidInputError, match=text):
        trainer.train()


def test_class_of_trl_that_was_never_tried_is_refused_by_name(tmp_path):
    class KTOTrainer(trl.SFTTrainer):
        __module__ = "trl.trainer.kto_trainer"

    trainer = trained(cut(KTOTrainer), "sft", tmp_path, train=False)

    with pytest.raises(autoaccum.InvalidInputError, match="KTOTrainer was never tried"):
        trainer.train()
