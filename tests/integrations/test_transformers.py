"""Transformers' trainer computes the gradient of its whole batch, whatever fits at once and whatever fails."""

import contextlib
import pickle
from collections.abc import Sized

import pytest
import torch
from torch import nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments  # noqa: E402

import autoaccum  # noqa: E402
from autoaccum.integrations.transformers import auto_accumulate  # noqa: E402
from support.models.trainers import MODELS, TEXT, WIDTH, collated, history, model_of, rows_of, trained, weights  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.usefixtures("accelerate_as_it_was"),
]


def cut(trainer=Trainer, **options):
    return auto_accumulate(trainer, **({"micro_batch": 5} | options))


def assert_same(ours, theirs, rounding=1e-12):
    """Parameters, and the log field by field; the loss in it is a single-precision number."""
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=rounding)
    assert ours.state.global_step == theirs.state.global_step
    assert [list(entry) for entry in history(ours)] == [list(entry) for entry in history(theirs)]
    for mine, other in zip(history(ours), history(theirs), strict=True):
        assert mine == pytest.approx(other, rel=1e-6, abs=1e-9)


# --- the whole batch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_log_are_those_of_whole_batches(tmp_path, name):
    ours = trained(cut(), tmp_path, name, eval_strategy="epoch", num_train_epochs=2)

    assert ours.autoaccum.plan.micro_batches == (4, 4, 4)
    assert_same(ours, trained(Trainer, tmp_path, name, eval_strategy="epoch", num_train_epochs=2))


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize(
    ("name", "options"), [("gpt2", {}), ("llama", {}), ("vit", {}), ("vit", {"label_smoothing_factor": 0.1})]
)
def test_batch_of_which_one_sample_fits_at_once_keeps_its_loss(tmp_path, name, options):
    model = model_of(name)
    model.register_forward_pre_hook(alone, with_kwargs=True)

    ours = trained(cut(micro_batch="auto"), tmp_path, name, model=model, **options)

    rounding = 1e-7 if options else 1e-12  # Transformers sums what it smooths in single precision
    assert_same(ours, trained(Trainer, tmp_path, name, **options), rounding)


def alone(module, inputs, named):
    if len(next(iter(named.values()))) > 1:
        raise torch.OutOfMemoryError("told to")


@pytest.mark.parametrize("name", ["gpt2", "bert", "bert for rows"])
def test_accumulation_of_smaller_batches_is_one_mean_over_all_of_them(tmp_path, name):
    """Of a model without `num_items_in_batch`, the trainer by itself takes the mean of the batches' means."""
    ours = trained(cut(), tmp_path, name, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    theirs = trained(Trainer, tmp_path, name)

    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=1e-11)
    losses = [[entry["loss"] for entry in history(trainer)[:-1]] for trainer in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert ours.autoaccum.last_backward.samples == 2


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_batch_that_an_epoch_leaves_over_counts_in_the_mean_of_the_next_update(tmp_path):
    """Of streams, the trainer adds it to the update that follows, but each is a mean over tokens of its own."""
    rows = rows_of("gpt2", 26)
    stream = {"train_dataset": Stream(rows), "max_steps": 3, "learning_rate": 0.0, "gradient_accumulation_steps": 3}
    ours = trained(cut(), tmp_path, per_device_train_batch_size=4, **stream)
    whole = {"train_dataset": rows[24:] + rows[:12], "per_device_train_batch_size": 14, "learning_rate": 0.0}
    theirs = trained(Trainer, tmp_path, **whole)

    assert ours.autoaccum.last_backward.samples == 14
    for name in ("loss", "grad_norm"):
        assert history(ours)[2][name] == pytest.approx(history(theirs)[0][name], rel=1e-6)


def smoothed(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.2)
    return total / num_items_in_batch


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing_factor": 0.1},
        {"compute_loss_func": smoothed},
        {"gradient_checkpointing": True},
        {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"average_tokens_across_devices": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_trainer_work_as_without(tmp_path, options):
    # Label smoothing adds up in single precision.
    rounding = 1e-9 if "label_smoothing_factor" in options else 1e-12
    assert_same(trained(cut(), tmp_path, **options), trained(Trainer, tmp_path, **options), rounding)


@pytest.mark.parametrize("memory", ["chunked_loss", "checkpoint:GPT2Block", "auto"])
def test_what_saves_memory_changes_nothing_but_rounding(tmp_path, memory):
    ours = trained(cut(save_memory=memory), tmp_path, "gpt2")
    theirs = trained(Trainer, tmp_path, "gpt2")

    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=1e-7)
    assert ours.state.global_step == theirs.state.global_step


def greedy(module, inputs, named):
    if len(named["input_ids"]) > 3:
        raise torch.OutOfMemoryError("told to")


class OfSums(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        loss = outputs.logits.square().sum()
        return (loss, outputs) if return_outputs else loss


class OfAtLeast(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        kept = inputs["labels"] != -100
        loss = (outputs.logits.square().mean(2) * kept).sum() / kept.sum().clamp(min=20)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("trainer", [Trainer, OfSums])
@pytest.mark.parametrize("within", [contextlib.nullcontext, torch.inference_mode])
def test_evaluation_in_parts_has_the_loss_of_whole_batches_whatever_that_is(tmp_path, within, trainer):
    """Of gpt2 the trainer counts first labels, which have no loss; in one batch nothing counts."""
    rows = rows_of("gpt2", 16)
    for number, row in enumerate(rows):
        row["labels"] = row["input_ids"].clone() if number < 8 else torch.full_like(row["input_ids"], -100)
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True)
    options = {"args": args, "eval_dataset": rows, "data_collator": collated}
    model = model_of("gpt2")
    whole = trainer(model, **options).evaluate()["eval_loss"]

    model.register_forward_pre_hook(greedy, with_kwargs=True)
    with within():
        found = cut(trainer)(model, **options).evaluate()["eval_loss"]

    # Transformers 4 by itself has no number where nothing counts.
    assert found == pytest.approx(whole, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("short", [[3, 4, 5], range(8)], ids=["in one part", "in all"])
def test_evaluation_in_parts_of_a_mean_over_at_least_so_many_is_exact(tmp_path, short):
    lengths = [3 if number in short else 15 for number in range(8)]
    rows = [dict.fromkeys(("input_ids", "labels"), torch.arange(length) % 5 + 2) for length in lengths]
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True)
    options = {"args": args, "eval_dataset": rows, "data_collator": collated}
    model = model_of("gpt2")
    whole = OfAtLeast(model, **options).evaluate()["eval_loss"]
    model.register_forward_pre_hook(greedy, with_kwargs=True)

    found = cut(OfAtLeast)(model, **options).evaluate()["eval_loss"]

    assert found == pytest.approx(whole, rel=1e-6)


@pytest.mark.filterwarnings("ignore:autoaccum. two samples that can be joined do not fit at once")
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_evaluation_of_which_one_sample_fits_at_once_has_the_loss_of_whole_batches(tmp_path, name):
    args = TrainingArguments(str(tmp_path), per_device_eval_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True)
    options = {"args": args, "eval_dataset": rows_of(name, 16), "data_collator": collated}
    model = model_of(name)
    whole = Trainer(model, **options).evaluate()["eval_loss"]

    model.register_forward_pre_hook(alone, with_kwargs=True)

    assert cut()(model, **options).evaluate()["eval_loss"] == pytest.approx(whole, rel=1e-6)


class Lacks(autoaccum.Callback):
    """Keeps in which step memory ran out, in how many samples."""

    def __init__(self):
        self.seen = []

    def on_oom(self, event, *, step):
        self.seen.append((step, event.size))


def wide(module, inputs, named):
    torch.empty(len(named["input_ids"]), 64 << 20, dtype=torch.uint8)


@pytest.mark.parametrize(
    "options", [{"memory_limit": "150MiB"}, {"device": autoaccum.Simulated("150MiB")}], ids=["limit", "device"]
)
def test_evaluation_keeps_to_the_limit_and_tells_callbacks(tmp_path, options):
    args = TrainingArguments(
        str(tmp_path), per_device_eval_batch_size=32, report_to=[], use_cpu=True, disable_tqdm=True
    )
    given = {"args": args, "eval_dataset": rows_of("gpt2", 32), "data_collator": collated}
    model, lacks = model_of("gpt2"), Lacks()
    model.register_forward_pre_hook(wide, with_kwargs=True)
    whole = Trainer(model, **given).evaluate()["eval_loss"]

    found = cut(callbacks=[lacks], **options)(model, **given).evaluate()["eval_loss"]

    assert found == pytest.approx(whole, rel=1e-6)
    assert lacks.seen[0] == (1, 32)
    assert {step for step, _ in lacks.seen} == {1}


def test_evaluation_in_which_not_one_sample_fits_says_so(tmp_path, monkeypatch):
    ours = trained(cut(), tmp_path, samples=12)
    monkeypatch.setattr(
        type(ours.model), "forward", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("told to"))
    )

    with pytest.raises(autoaccum.DoesNotFitError, match=r"a sample of shapes .* in an evaluation on .*told to"):
        ours.evaluate()


def test_trainer_can_train_twice(tmp_path):
    ours, theirs = trained(cut(), tmp_path, samples=12), trained(Trainer, tmp_path, samples=12)
    for trainer in (ours, theirs):
        trainer.train()

    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=1e-11)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_anything_but_a_trainers_class_is_refused(tmp_path):
    with pytest.raises(autoaccum.InvalidInputError, match="pass the class"):
        auto_accumulate(nn.Linear)
    with pytest.raises(autoaccum.InvalidInputError, match="already"):
        auto_accumulate(auto_accumulate(Trainer))


class OwnStep(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()


class OwnStepAfterwards(auto_accumulate(Trainer)):
    training_step = OwnStep.training_step


class SkipsABatch(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step == 1:
            return torch.zeros(())
        return super().training_step(model, inputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("kind", "updates"), [(auto_accumulate(OwnStep), 0), (OwnStepAfterwards, 0), (auto_accumulate(SkipsABatch), 1)]
)
def test_training_step_that_bypasses_micro_batches_is_refused(tmp_path, kind, updates):
    made = []

    class Kept(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    with pytest.raises(autoaccum.InvalidInputError, match=r"(OwnStep|SkipsABatch).* has not called super\(\)"):
        trained(Kept, tmp_path)

    assert made[0].state.global_step == updates


def test_training_step_that_calls_the_trainers_is_used_as_it_is(tmp_path):
    losses = []

    class Watching(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            losses.append(super().training_step(model, inputs, num_items_in_batch))
            return losses[-1]

    ours = trained(cut(Watching), tmp_path)

    assert_same(ours, trained(Trainer, tmp_path))
    assert len(losses) == 3
    assert "training_step" not in vars(ours)


def test_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = cut()(model=model_of("gpt2"), args=args, train_dataset=rows_of("gpt2", 4))
    trainer.args.optim = "lomo"

    with pytest.raises(autoaccum.InvalidInputError, match="'lomo' steps in the backward pass"):
        trainer.train()


def packed(rows):
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "labels": torch.cat([row["labels"] for row in rows])[None],
        "position_ids": torch.cat([torch.arange(len(row["labels"])) for row in rows])[None],
    }


def test_packed_rows_of_an_unknown_collator_name_the_split(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=4)
    rows = rows_of("llama", 8)
    trainer = cut()(model=model_of("llama"), args=args, train_dataset=rows, data_collator=packed)

    with pytest.raises(autoaccum.InvalidInputError, match=r"split=autoaccum.PackedRows\(\)"):
        trainer.train()


# --- the class --------------------------------------------------------------------------------------------------------


class Written(auto_accumulate(Trainer, micro_batch=3), Sized):
    def __len__(self):
        return 1


def test_class_prints_its_own_name_and_one_that_is_written_can_be_pickled():
    assert repr(cut(OfSums)) == "<class 'autoaccum.integrations.transformers.AutoAccumulateOfSums'>"
    assert "Written" in repr(Written)
    assert pickle.loads(pickle.dumps(Written)) is Written  # noqa: S301


# --- losses of several terms ------------------------------------------------------------------------------------------


class Weighed(Trainer):
    """Adds a penalty on weights, and the z-loss: a constant and a mean beside what is divided by all tokens."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.01 * sum(parameter.square().mean() for parameter in model.parameters())
        loss = loss + 0.01 * outputs.logits.logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


class OfPairs(Trainer):
    """Returns losses by name, as sums and weights; with outputs their means, as the trainer evaluates them."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs, labels = model(input_ids=inputs["input_ids"]), inputs["labels"]
        loss = functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        pairs = {"tokens": (loss, (labels != -100).sum()), "rows": (outputs.logits[:, 0].square().sum(), len(labels))}
        return (loss / (labels != -100).sum(), outputs) if return_outputs else pairs


def test_losses_may_be_returned_by_name_as_pairs(tmp_path):
    one, two = (trained(cut(OfPairs, micro_batch=most), tmp_path, **PLAIN) for most in (12, 5))

    torch.testing.assert_close(weights(one), weights(two), rtol=0.0, atol=1e-12)
    two.model.register_forward_pre_hook(greedy, with_kwargs=True)
    assert two.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"], rel=1e-6)


PLAIN = {"samples": 12, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}


@pytest.mark.parametrize("most", [3, *(pytest.param(most, marks=pytest.mark.sweep) for most in (6, 1))])
def test_terms_beside_one_divided_by_all_tokens_have_their_own_weight(tmp_path, most):
    whole = trained(Weighed, tmp_path, **PLAIN)
    ours = trained(cut(Weighed, micro_batch=most), tmp_path, **PLAIN)

    torch.testing.assert_close(weights(ours), weights(whole), rtol=0.0, atol=1e-12)
    parts = {"per_device_train_batch_size": most, "gradient_accumulation_steps": 12 // most}
    theirs = trained(Weighed, tmp_path, **PLAIN, **parts)
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=1e-3)  # the z-loss depends on padding


class Reporting(Trainer):
    """Reports a number beside the loss, and logs it once an optimizer step."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs, labels = model(**inputs), inputs["labels"]
        right = (outputs.logits.argmax(-1) == labels).double()
        return {"loss": outputs.loss, "right": (right.sum(), labels.numel()), "share": right.mean(1)}

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        losses = self.autoaccum.last_backward.losses
        self.log({name: losses[name] for name in ("right", "share")})
        return loss


def test_numbers_beside_the_loss_are_logged_once_an_optimizer_step(tmp_path):
    whole, ours = (trained(cut(Reporting, micro_batch=most), tmp_path, "bert") for most in (12, 5))

    found = [[entry for entry in history(one) if "right" in entry] for one in (whole, ours)]
    assert len(found[0]) == 3
    assert found[1] == [pytest.approx(entry) for entry in found[0]]


def losses_of(trainer):
    return [entry["loss"] for entry in history(trainer) if "loss" in entry]


def mixtral():
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    routers = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    config = transformers.MixtralConfig(num_key_value_heads=1, **experts, **routers, **TEXT, **WIDTH)
    return transformers.MixtralForCausalLM(config).double()


@pytest.mark.filterwarnings("ignore::autoaccum.LossWarning")
def test_mixture_of_experts_is_no_farther_from_whole_batches_than_accumulation(tmp_path):
    whole = weights(trained(Trainer, tmp_path, model=mixtral(), **PLAIN))
    ours = trained(cut(micro_batch=3), tmp_path, model=mixtral(), **PLAIN)
    parts = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    theirs = trained(Trainer, tmp_path, model=mixtral(), **PLAIN, **parts)

    off, theirs_off = [float((weights(one) - whole).norm()) for one in (ours, theirs)]
    assert off < theirs_off / 4
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=1e-3)
