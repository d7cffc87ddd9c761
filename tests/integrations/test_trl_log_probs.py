"""TRL's trainers with save_memory="chunked_loss": the same weights, and log-probabilities without whole logits."""

import copy
import functools
import inspect

import pytest
import torch

pytest.importorskip("trl")

import peft
import trl
from transformers import LlamaForCausalLM
from trl.trainer import utils

import autoaccum
from autoaccum._saving.chunked_head import chunked  # tells which head was used
from autoaccum._saving.unmade_logits import UnmadeLogits  # tells which head was used
from autoaccum.integrations.transformers import auto_accumulate
from support.models.small import WITHOUT_WARNINGS
from support.models.trainers import SETTINGS, weights
from support.models.trl_trainers import TRAINERS, data, generated, model, tokenizer, trained

pytestmark = [WITHOUT_WARNINGS, pytest.mark.usefixtures("accelerate_as_it_was")]
# TRL's own head in chunks, which newer versions have, computes in single precision.
HAS_OWN_CHUNKS = hasattr(utils, "add_fused_lm_head")
EXACT = {"rtol": 0.0, "atol": 3e-7 if HAS_OWN_CHUNKS else 1e-10}
IDS = torch.randint(37, (3, 11), generator=torch.Generator().manual_seed(0))
TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2},
}


@pytest.fixture(autouse=True)
def few_tokens_at_a_time(monkeypatch):
    monkeypatch.setattr("autoaccum._saving.chunked_loss.CHUNK", 7)


def with_temperature(logits):
    if "temperature" in inspect.signature(utils.selective_log_softmax).parameters:
        return utils.selective_log_softmax(logits, IDS, temperature=0.7)
    return utils.selective_log_softmax(logits / 0.7, IDS)


def together(logits):
    if hasattr(utils, "selective_log_softmax_and_entropy"):
        mask = IDS > 5
        return torch.stack(utils.selective_log_softmax_and_entropy(logits, IDS, temperature=0.7, row_mask=mask))
    return utils.selective_log_softmax(logits, IDS) + utils.entropy_from_logits(logits)


FUNCTIONS = {
    "selective_log_softmax": lambda logits: utils.selective_log_softmax(logits, IDS),
    "with a temperature": with_temperature,
    "shifted": lambda logits: utils.selective_log_softmax(logits[:, :-1][:, -5:, :] / 0.7, IDS[:, -5:]),
    "entropy": utils.entropy_from_logits,
    "both": together,
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_trl_compute_the_same_of_logits_in_chunks(name, dtype):
    network, results = model("sft").to(dtype), []
    for around in (chunked([network]), torch.enable_grad()):
        network.zero_grad()
        with around:
            logits = network(IDS).logits
            found = FUNCTIONS[name](logits)
            found.square().sum().backward()
        assert isinstance(logits, UnmadeLogits) != bool(results)
        results.append((found.detach(), {one: p.grad for one, p in network.named_parameters()}))

    torch.testing.assert_close(results[0][0], results[1][0], **TOLERANCE[dtype])
    if dtype is not torch.bfloat16:
        torch.testing.assert_close(results[0][1], results[1][1], **TOLERANCE[dtype])


def cut(base):
    return auto_accumulate(base, micro_batch=4, save_memory="chunked_loss")


def asked(monkeypatch):
    """Count what stood for logits."""
    made, own = [], UnmadeLogits.of

    def of(*arguments):
        made.append(own(*arguments))
        return made[-1]

    monkeypatch.setattr(UnmadeLogits, "of", staticmethod(of))
    return made


def assert_same_weights(ours, theirs):
    torch.testing.assert_close(weights(ours), weights(theirs), **EXACT)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_parameters_are_those_of_whole_logits(kind, tmp_path, monkeypatch):
    """DPO has a reference model, which computes no gradients."""
    made = asked(monkeypatch)
    ours = trained(cut(TRAINERS[kind][0]), kind, tmp_path)

    assert ours.autoaccum.plan.micro_batches == (4, 4, 4)
    assert bool(made) != HAS_OWN_CHUNKS
    assert_same_weights(ours, trained(TRAINERS[kind][0], kind, tmp_path))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_adapters_of_lora_are_trained_as_of_whole_logits(kind, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    ours, theirs = (
        trained(functools.partial(wrap(TRAINERS[kind][0]), peft_config=config), kind, tmp_path, eval_strategy="no")
        for wrap in (cut, lambda base: base)
    )

    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("loss_type", [["sigmoid", "bco_pair"], "ipo"], ids=str)
def test_losses_of_preferences_are_those_of_whole_logits(loss_type, tmp_path):
    options = {"loss_type": loss_type, "eval_strategy": "no", "use_weighting": True}
    ours, theirs = (trained(wrap(trl.DPOTrainer), "dpo", tmp_path, **options) for wrap in (cut, lambda base: base))

    assert_same_weights(ours, theirs)


@pytest.mark.parametrize(
    "options", [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 24}], ids=str
)
def test_packed_rows_are_trained_as_of_whole_logits(options, tmp_path):
    options |= {"eval_strategy": "no"}
    ours, theirs = (trained(wrap(trl.SFTTrainer), "sft", tmp_path, **options) for wrap in (cut, lambda base: base))

    assert ours.autoaccum.plan.accum_steps > 1
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_losses_of_tokens_that_trl_computes_of_logits_are_those_of_whole_ones(loss_type, tmp_path, monkeypatch):
    options = {"loss_type": loss_type, "label_smoothing_factor": 0.1 if loss_type == "nll" else 0.0}
    made = asked(monkeypatch)
    ours = trained(cut(trl.SFTTrainer), "sft", tmp_path, eval_strategy="no", **options)

    assert made or (loss_type == "dft" and HAS_OWN_CHUNKS)
    theirs = trained(trl.SFTTrainer, "sft", tmp_path, eval_strategy="no", **options)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=3e-7)  # smoothing sums in float32


@pytest.mark.parametrize(("kind", "loss_type"), [("grpo", "grpo"), ("grpo", "dapo"), ("rloo", None)])
def test_generated_batches_are_trained_as_of_whole_logits(kind, loss_type, tmp_path, monkeypatch):
    """With a reference model, which TRL loads, a temperature, and entropies that are logged."""
    model("sft").save_pretrained(tmp_path / "model")

    def networks():
        return {"network": LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)}

    made, options = asked(monkeypatch), {"beta": 0.1, "temperature": 0.7}
    ours = generated(cut, kind, tmp_path, loss_type, **options, **networks())

    assert max(ours.autoaccum.last_backward.micro_batches) <= 4
    assert bool(made) != HAS_OWN_CHUNKS
    theirs = generated(lambda base: base, kind, tmp_path, loss_type, **options, **networks())
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=10 * EXACT["atol"])


def test_adapters_are_trained_by_generated_batches_beside_the_model_without_them(tmp_path):
    layers = ["q_proj", "v_proj"] if HAS_OWN_CHUNKS else ["q_proj", "lm_head"]
    config = peft.LoraConfig(r=2, target_modules=layers, lora_dropout=0.0)
    ours, theirs = (
        generated(lambda base, wrap=wrap: functools.partial(wrap(base), peft_config=config), "grpo", tmp_path, "dapo")
        for wrap in (cut, lambda base: base)
    )

    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=10 * EXACT["atol"])


def judged(wrap, folder, loss_type="apo_zero_unpaired"):
    """KTO on answers of which each is good or bad."""
    rows = data("sft", 26)
    network = model("sft")
    settings = SETTINGS | {"eval_strategy": "no", "bf16": False, "gradient_checkpointing": False}
    return wrap(trl.KTOTrainer)(
        model=network,
        ref_model=copy.deepcopy(network),
        args=trl.KTOConfig(str(folder), loss_type=loss_type, **settings),
        train_dataset=rows.add_column("label", [number % 3 != 0 for number in range(len(rows))]),
        processing_class=tokenizer(),
    )


def test_answers_that_are_good_or_bad_are_trained_as_of_whole_batches_and_logits(tmp_path):
    trainers = [judged(wrap, tmp_path) for wrap in (cut, lambda base: base)]
    for trainer in trainers:
        trainer.train()

    assert trainers[0].autoaccum.last_backward.micro_batches == (2,)
    assert trainers[0].autoaccum.plan.micro_batches == (4, 4, 4)
    assert_same_weights(*trainers)


def test_loss_of_kto_that_compares_samples_is_refused(tmp_path):
    trainer = judged(cut, tmp_path, loss_type="kto")

    with pytest.raises(autoaccum.InvalidInputError, match=r"loss_type='kto' .* \(KL\), .*apo_zero_unpaired"):
        trainer.train()


def test_trainer_without_a_layer_for_a_vocabulary_is_refused_before_anything_moves(tmp_path):
    ours = trained(cut(trl.RewardTrainer), "reward", tmp_path, train=False)
    before = weights(ours)

    with pytest.raises(autoaccum.InvalidInputError, match="no layer that makes logits was found"):
        ours.train()

    assert torch.equal(weights(ours), before)
