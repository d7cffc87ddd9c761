"""TRL's trainers train as if each batch had fitted at once, and log as their own accumulation does."""

import functools
import importlib
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

import peft
import trl
from datasets import Dataset

import autoaccum
from autoaccum import Accumulator
from autoaccum.integrations._trainer_evaluation import EvaluationInParts
from autoaccum.integrations.transformers import auto_accumulate
from support.faults.modes import FailAt
from support.models.small import WITHOUT_WARNINGS
from support.models.trainers import history, weights
from support.models.trl_trainers import GENERATING, TRAINERS, generated, mixture, trained

pytestmark = [WITHOUT_WARNINGS, pytest.mark.usefixtures("accelerate_as_it_was")]
# TRL computes log-probabilities in single precision.
ROUNDING = 3e-7


def cut(kind, **options):
    kind = TRAINERS[kind][0] if isinstance(kind, str) else kind
    return auto_accumulate(kind, **({"micro_batch": 4} | options))


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


@pytest.mark.slow  # three trainings for each trainer
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


OF_PAIRS = ["hinge", "ipo", "robust", "apo_zero", "bco_pair", "exo_pair", "nca_pair", ["sigmoid", "bco_pair"]]


# Every other one, with the list of several.
@pytest.mark.parametrize(
    "loss_type",
    [pytest.param(one, marks=pytest.mark.sweep if number % 2 else ()) for number, one in enumerate(reversed(OF_PAIRS))],
    ids=str,
)
def test_losses_of_preferences_that_are_means_over_pairs_are_those_of_whole_batches(tmp_path, loss_type):
    options = {"loss_type": loss_type, "eval_strategy": "no", "label_smoothing": 0.1 if loss_type == "robust" else 1e-3}
    ours, theirs = (trained(kind, "dpo", tmp_path, **options) for kind in (cut("dpo"), trl.DPOTrainer))

    assert_same_weights(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "loss_type"),
    [pytest.param(*one, marks=() if one[1] in ("grpo", None) else pytest.mark.slow) for one in GENERATING],
)
def test_batches_are_cut_after_generation(tmp_path, kind, loss_type):
    """Of two accumulated batches, each has its own normalisers, as without."""
    ours = generated(lambda base: cut(base, micro_batch=3), kind, tmp_path, loss_type)
    theirs = generated(lambda base: base, kind, tmp_path, loss_type)

    assert ours.autoaccum.last_backward.micro_batches == (3, 3, 2)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=10 * ROUNDING)
    for name in ("reward", "num_tokens", "completions/mean_length"):
        assert [entry[name] for entry in log(ours)[:-1]] == [entry[name] for entry in log(theirs)[:-1]]


def test_coefficient_of_entropy_is_that_of_whole_batches(tmp_path):
    """Which the error about use_adaptive_entropy names instead."""
    if not hasattr(trl.GRPOConfig, "entropy_coef"):
        pytest.skip(f"TRL {trl.__version__} has no entropy_coef")
    ours = generated(lambda base: cut(base, micro_batch=3), "grpo", tmp_path, "dapo", entropy_coef=0.1)
    theirs = generated(lambda base: base, "grpo", tmp_path, "dapo", entropy_coef=0.1)

    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=10 * ROUNDING)


# --- mixtures of experts ----------------------------------------------------------------------------------------------

PLAIN = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


def losses(trainer):
    return [entry["loss"] for entry in history(trainer) if "loss" in entry]


def of_experts(kind, folder, **options):
    network = mixture()
    network.config.output_router_logits = True
    return trained(kind, "sft", folder, network=network, samples=24, eval_strategy="no", **PLAIN, **options)


def test_loss_of_a_router_that_is_logged_and_not_trained_is_not_taken_off(tmp_path):
    """TRL leaves it out where labels are smoothed."""
    ours, theirs = (of_experts(kind, tmp_path, label_smoothing_factor=0.1) for kind in (cut("sft"), trl.SFTTrainer))

    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-6)


@pytest.mark.filterwarnings("ignore::autoaccum.LossWarning")
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_loss_of_a_router_is_logged_once_beside_one_of_generated_tokens(tmp_path, loss_type):
    ours, theirs = (
        generated(wrap, "grpo", tmp_path, loss_type, network=mixture(), **PLAIN)
        for wrap in (lambda base: cut(base, micro_batch=3), lambda base: base)
    )

    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-3)  # of which a router's is 0.1


def test_preferences_of_a_mixture_of_experts_are_trained_without_the_routers_loss(tmp_path):
    """As the error says that is raised with it."""
    options = {"network": mixture(), "eval_strategy": "no"}
    with pytest.raises(autoaccum.InvalidInputError, match=r"router_aux_loss_coef=0\.0 to DPOConfig"):
        trained(cut("dpo"), "dpo", tmp_path, **options)

    options["router_aux_loss_coef"] = 0.0
    ours, theirs = (trained(kind, "dpo", tmp_path, **options) for kind in (cut("dpo"), trl.DPOTrainer))

    assert_same_weights(ours, theirs)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["aot", "aot_unpaired", "sft", ["sigmoid", "bco_pair", "sft"]], ids=str)
def test_losses_of_preferences_that_are_no_means_over_pairs_are_refused(tmp_path, loss_type):
    trainer = trained(cut("dpo"), "dpo", tmp_path, train=False, loss_type=loss_type)

    with pytest.raises(autoaccum.InvalidInputError, match=r"loss_type='(aot|sft).*find_executable_micro_batch"):
        trainer.train()


def test_options_that_need_the_whole_batch_are_refused(tmp_path):
    trainer = trained(cut("sft"), "sft", tmp_path, train=False)
    trainer.use_adaptive_entropy = True

    with pytest.raises(autoaccum.InvalidInputError, match="entropy_coef="):
        trainer.train()


def classes_of_trl():
    """All trainers of TRL, by name, also those whose modules are experimental."""
    root = Path(trl.__file__).parent
    for path in sorted(root.rglob("*_trainer.py")):
        module = ".".join(["trl", *path.relative_to(root).with_suffix("").parts])
        for name in re.findall(r"^class ([A-Z]\w+Trainer)\(", path.read_text(), re.MULTILINE):
            yield pytest.param(module, name, id=name)


@pytest.mark.parametrize(("module", "name"), [*classes_of_trl()])
def test_every_class_of_trl_was_tried_or_is_refused_by_name(module, name):
    """ORPO and CPO among them."""
    kind = getattr(importlib.import_module(module), name)
    if name in {"SFTTrainer", "RewardTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer", "KTOTrainer"}:
        assert issubclass(auto_accumulate(kind), kind)
        return

    for one in (kind, type("Own", (kind,), {})):
        with pytest.raises(autoaccum.InvalidInputError, match=f"{name} was never tried.*find_executable_micro_batch"):
            auto_accumulate(one)


def test_class_that_is_refused_trains_in_a_function_that_begins_again(tmp_path):
    """As every refusal says: its own accumulation, in micro-batches that fit."""
    made, sizes = [], []

    @autoaccum.find_executable_micro_batch(target=8)
    def train(micro_batch, accumulation_steps):
        sizes.append(micro_batch)
        made.append(preferred(tmp_path, micro_batch, accumulation_steps))
        made[-1].model.register_forward_pre_hook(greedy, with_kwargs=True)
        made[-1].train()

    def greedy(module, inputs, named):
        if len(named["input_ids"]) > 4:
            raise torch.OutOfMemoryError("told to")

    train()
    theirs = preferred(tmp_path, 2, 4)
    theirs.train()

    assert sizes == [8, 4, 2]
    assert torch.equal(weights(made[-1]), weights(theirs))


def preferred(folder, size, steps):
    batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
    return trained(trl.DPOTrainer, "dpo", folder, train=False, loss_type="aot", eval_strategy="no", **batches)
