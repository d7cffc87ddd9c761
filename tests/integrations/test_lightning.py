"""Lightning's Trainer trains, logs and calls back with AutoAccumulate as it does with the whole batch at once."""

import csv
from typing import NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.integrations.lightning import AutoAccumulate
from support.data.small_samples import BATCH, CLASSES, vectors
from support.frameworks.by_lightning import QUIET, VALUE_OF_PARTS, Classifier, Judged, fitted
from support.models.small import a_few_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pytorch_lightning"),
]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", "")


def auto_accumulate(**options):
    settings = {"device": autoaccum.Simulated("1GiB")}
    return AutoAccumulate(**(settings | options))


def assert_close(one, other, tolerance=1e-12):
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=tolerance)


def rows(folder):
    with next(folder.rglob("metrics.csv")).open() as file:
        return list(csv.DictReader(file))


def assert_same_log(plain, other):
    assert len(plain) == len(other)
    for one, two in zip(plain, other, strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert (two[name] == "") == (value == "")
            assert value == "" or float(two[name]) == pytest.approx(float(value), rel=1e-6, abs=1e-9), name


# --- parameters and logs ----------------------------------------------------------------------------------------------


def test_logs_are_those_of_whole_batches_field_by_field(tmp_path):
    fitted(Judged(), vectors(), folder=tmp_path / "plain", epochs=2, validates=True)

    fitted(Judged(most=5), vectors(), auto_accumulate(), folder=tmp_path / "auto_accumulate", epochs=2, validates=True)

    plain, other = (rows(tmp_path / name) for name in ("plain", "auto_accumulate"))
    for row in plain + other:
        row.pop(VALUE_OF_PARTS)
    assert_same_log(plain, other)
    assert {"loss_step", "accuracy_epoch", "validation accuracy_epoch"} <= plain[0].keys()


class Constant(Classifier):
    def __init__(self, most=None, size=7):
        super().__init__(most)
        self.size = size

    def loss_of(self, batch):
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.run_out(batch[0])
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("loss", loss, False, None, False, True, batch_size=self.size)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation", self.loss_of(batch), batch_size=self.size)


# 3 is also that of a part, of the first batch as well.
@pytest.mark.parametrize(("size", "reduction"), a_few_of([1, 3, 7], [None, "mean"]))
def test_a_batch_size_that_is_constant_is_that_of_the_batch_for_whatever_reads_epochs_means(size, reduction, tmp_path):
    """Else they would weigh batches by their number of parts."""
    found = []
    for name, most, adapters in (
        ("plain", None, []),
        ("ours", 5, [auto_accumulate(micro_batch=3, loss_reduction=reduction)]),
    ):
        kept = ModelCheckpoint(tmp_path / name, monitor="loss", save_top_k=1)
        stops = pl.callbacks.EarlyStopping("loss", check_on_train_epoch_end=True, min_delta=10.0, patience=2)
        trainer = fitted(Constant(most, size), vectors(), *adapters, kept, stops, epochs=5, validates=True)
        read = [kept.best_model_score, stops.best_score, *trainer.callback_metrics.values()]
        found.append([trainer.current_epoch, *map(float, read)])

    assert found[0][0] == 3
    assert found[1] == pytest.approx(found[0], rel=1e-6)


class Weighing(Constant):
    """Gives each loader a batch size of its own, and training and the last loader one that depends on the batch."""

    def loss_of(self, batch):
        self.log("accuracy", self.accuracy(self(batch[0]), batch[1]), batch_size=len(batch[0]))
        self.of_validation(self(batch[0]), batch[1])
        self.log("of all", self.of_validation, on_epoch=True)
        return super().loss_of(batch)

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=batch[0].numel())
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        sizes = [3, 6, len(batch[0]), batch[0].numel()]
        self.log("loss", self.loss_of(batch), batch_size=sizes[dataloader_idx])


def test_a_batch_size_that_depends_on_the_part_is_added_up_in_each_loader_by_itself(tmp_path):
    loaders = [DataLoader(vectors(), batch_size=BATCH)] * 4
    expected = pl.Trainer(**QUIET).validate(Weighing(), loaders, verbose=False)
    found = pl.Trainer(callbacks=[auto_accumulate()], **QUIET).validate(Weighing(most=5), loaders, verbose=False)
    assert found == [pytest.approx(results) for results in expected]

    fitted(Weighing(), vectors(), folder=tmp_path / "plain")
    fitted(Weighing(), vectors(), auto_accumulate(micro_batch=4, loss_reduction="mean"), folder=tmp_path / "ours")
    assert_same_log(rows(tmp_path / "plain"), rows(tmp_path / "ours"))


class Ignoring(Classifier):
    """Means over the samples that count, which are NaN where none does."""

    def training_step(self, batch, batch_idx):
        outputs, counts = self(batch[0]), batch[1] != -100
        highest = outputs.max(1).values[counts].mean()
        loss = functional.cross_entropy(outputs, batch[1])
        self.log_dict({"loss": loss, "highest": highest}, on_step=True, on_epoch=True)
        most = outputs[counts].max() if counts.any() else torch.nan
        self.log("most", most, reduce_fx="max", on_step=True, on_epoch=True)
        return {"loss": loss, "highest": highest, "number": highest.item()}


def test_micro_batches_in_which_nothing_counts_are_left_out_of_logs_and_outputs(tmp_path):
    inputs, targets = vectors().tensors
    ignored = TensorDataset(inputs, targets.masked_fill(torch.arange(len(targets)) % 3 == 0, -100))
    plain, other = Outputs(), Outputs()
    fitted(Ignoring(), ignored, plain, folder=tmp_path / "plain")

    fitted(Ignoring(), ignored, auto_accumulate(micro_batch=1), other, folder=tmp_path / "ours")

    assert_same_log(rows(tmp_path / "plain"), rows(tmp_path / "ours"))
    torch.testing.assert_close([one for one, _ in other.seen], [one for one, _ in plain.seen])


class Skipping(Classifier):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_batch_is_skipped_where_the_step_returns_none():
    plain, other = Skipping(), Skipping(most=5)
    one, two = fitted(plain, vectors()), fitted(other, vectors(), auto_accumulate())

    assert two.global_step == one.global_step
    assert_close(plain, other)


class Recorder(pl.Callback):
    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        hidden = "on_save_checkpoint", "on_load_checkpoint"
        if not name.startswith(("on_", "setup", "teardown")) or name in hidden:
            return found

        def noted(trainer, module, *arguments, **keywords):
            self.events.append((name, trainer.global_step))
            return found(trainer, module, *arguments, **keywords)

        return noted


def test_hooks_run_once_a_batch_in_the_same_order():
    plain, other = Recorder(), Recorder()
    fitted(Classifier(), vectors(), plain, epochs=2, validates=True)

    fitted(Classifier(most=5), vectors(), auto_accumulate(), other, epochs=2, validates=True)

    assert other.events == plain.events


class Outputs(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((outputs, len(batch[0])))

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append((outputs, len(batch[0])))


def test_outputs_given_to_callbacks_are_of_whole_batches():
    plain, other = Outputs(), Outputs()
    fitted(Classifier(), vectors(), plain, validates=True)

    fitted(Classifier(most=5), vectors(), auto_accumulate(), other, validates=True)

    torch.testing.assert_close(other.seen, plain.seen)


# --- what stays Lightning's -------------------------------------------------------------------------------------------


def test_clipping_and_early_stopping_work_as_without_it():
    plain, other = Classifier(), Classifier(most=5)
    options = {"gradient_clip_val": 0.1, "epochs": 8, "validates": True}

    def stopping():
        return pl.callbacks.EarlyStopping("validation loss", patience=1, min_delta=0.02)

    one = fitted(plain, vectors(), stopping(), **options)
    two = fitted(other, vectors(), auto_accumulate(), stopping(), **options)

    assert two.current_epoch == one.current_epoch < 8
    assert_close(plain, other)


class Single(Classifier):
    def __init__(self, most=None):
        super().__init__(most)
        self.body.float()

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0].float(), batch[1]], batch_idx)


class Logging(Single):
    def training_step(self, batch, batch_idx):
        outputs = self.body(batch[0].float())
        loss = functional.cross_entropy(outputs, batch[1])
        self.log_dict({"loss": loss, "highest": outputs.max(), "samples": float(len(outputs))}, on_epoch=True)
        return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_module_is_compiled_for_its_micro_batches_alone():
    """And not for each log, or the few samples that show what the loss runs over."""

    def trained(module):
        return fitted(module, vectors(), auto_accumulate(device=None, micro_batch=4), epochs=2).callback_metrics

    plain, other = Logging(), Logging()
    logged = trained(plain)

    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=5):
        compiled = trained(torch.compile(other, backend="eager"))
    torch.compiler.reset()

    torch.testing.assert_close(dict(compiled), dict(logged))
    assert_close(plain, other, 1e-5)


class ByLbfgs(Classifier):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def test_an_optimizer_may_call_its_closure_several_times(tmp_path):
    plain, other = ByLbfgs(), ByLbfgs(most=5)
    fitted(plain, vectors(), folder=tmp_path / "plain")

    fitted(other, vectors(), auto_accumulate(), folder=tmp_path / "auto_accumulate")

    assert_close(plain, other, 1e-10)


class Several(Classifier):
    """Several loaders to evaluate on, and another step to test with."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.run_out(batch[0])
        self.log("test loss", functional.cross_entropy(outputs, batch[1]), on_step=True, on_epoch=True)


def test_several_loaders_and_a_test_are_evaluated_in_parts():
    plain, other = Several(), Several(most=5)
    loaders = [DataLoader(vectors(seed), batch_size=BATCH) for seed in (1, 2)]

    one = pl.Trainer(**QUIET)
    expected = [*one.validate(plain, loaders, verbose=False), *one.test(plain, loaders[0], verbose=False)]
    two = pl.Trainer(callbacks=[auto_accumulate()], **QUIET)
    found = [*two.validate(other, loaders, verbose=False), *two.test(other, loaders[0], verbose=False)]

    assert found == [pytest.approx(results) for results in expected]


class Predicted(NamedTuple):
    outputs: torch.Tensor
    further: dict


class Predicting(Classifier):
    """Returns rows, lists of rows, means, a number of samples, and what is the same for all."""

    def predict_step(self, batch, batch_idx):
        outputs = self(batch[0])
        self.run_out(batch[0])
        means = outputs.mean(), outputs.mean().item()
        named = {"classes": outputs.argmax(1).tolist(), "samples": len(outputs), "name": "the same", "none": None}
        return Predicted(outputs, named | {"means": means, "columns": CLASSES, "first": f"{outputs[0]}"})


def test_predictions_are_made_in_parts():
    loader = DataLoader(vectors(), batch_size=BATCH)

    expected = pl.Trainer(**QUIET).predict(Predicting(), loader)
    trainer = pl.Trainer(callbacks=[auto_accumulate()], **QUIET)
    found = trainer.predict(Predicting(most=6), loader)

    for one, other in zip(found, expected, strict=True):
        assert type(one) is Predicted
        torch.testing.assert_close(one.outputs, other.outputs)
        torch.testing.assert_close(one.further.pop("means"), other.further.pop("means"))
        assert other.further.pop("first") in one.further.pop("first")  # a list of what parts returned
        assert one.further == other.further
    assert "predict_step" not in vars(trainer.strategy)


class Detecting(pl.LightningModule):
    """Returns a list with a record for each sample, of as many rows as a part of two has samples."""

    def __init__(self, most=None):
        super().__init__()
        self.most = most

    def predict_step(self, batch, batch_idx):
        if self.most is not None and len(batch) > self.most:
            raise torch.OutOfMemoryError("told to")
        records = [{"boxes": sample.repeat(2, 4), "of": [sample, sample + 1]} for sample in batch]
        return {"records": records, "samples": [*batch]}


def test_lists_with_a_record_for_each_sample_are_put_together_sample_by_sample():
    loader = DataLoader(torch.arange(4.0), batch_size=4)

    expected = pl.Trainer(**QUIET).predict(Detecting(), loader)
    found = pl.Trainer(callbacks=[auto_accumulate()], **QUIET).predict(Detecting(most=2), loader)

    torch.testing.assert_close(found, expected)


class Varied(Classifier):
    """Returns lists of rows, and of samples of one class alone, if there are any."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        own = batch[0][batch[1] == 0]
        lists = {"rows": [*outputs["outputs"]], "own": [*own], "mean": outputs["mean"]}
        return {"loss": outputs["loss"], **lists, **({"last": own[-1]} if len(own) else {})}


def test_outputs_that_differ_between_micro_batches_are_joined_key_by_key():
    plain, other, one, two = Outputs(), Outputs(), Varied(), Varied(most=3)

    fitted(one, vectors(), plain)
    fitted(two, vectors(), auto_accumulate(), other)

    assert_close(one, two)
    for (of_batch, _), (of_parts, _) in zip(plain.seen, other.seen, strict=True):
        for name in ("rows", "mean"):
            torch.testing.assert_close(of_parts[name], of_batch[name])
        assert {"own", "last"} <= of_parts.keys()


def test_module_of_the_packages_older_name_trains_in_parts():
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.LightningModule):
        def __init__(self, most=None):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.most = nn.Linear(5, CLASSES).double(), most

        def training_step(self, batch):
            if self.most is not None and len(batch[0]) > self.most:
                raise torch.OutOfMemoryError("told to")
            return functional.cross_entropy(self.body(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    plain, other, callback = Older(), Older(most=5), auto_accumulate()
    for module, callbacks in ((plain, []), (other, [callback])):
        trainer = older.Trainer(callbacks=callbacks, **QUIET)
        trainer.fit(module, DataLoader(vectors(), batch_size=BATCH))

    assert callback.report.micro_batches == (4,)
    assert_close(plain, other)


def test_trainer_is_as_before_after_an_error():
    class Broken(Classifier):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    trainer = pl.Trainer(callbacks=[auto_accumulate()], **QUIET)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Broken(), DataLoader(vectors(), batch_size=BATCH))

    assert "training_step" not in vars(trainer.strategy)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Classifier):
    def backward(self, loss):
        loss.backward()


class Fetching(Classifier):
    def training_step(self, dataloader_iter):
        return self.body(next(dataloader_iter)[0][0]).mean()


class Pairs(Classifier):
    """Returns the sum and the weight of a loss, which is a mean weighted by classes."""

    def training_step(self, batch, batch_idx):
        weights = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
        loss = functional.cross_entropy(self(batch[0]), batch[1], weights, reduction="sum")
        return loss, weights[batch[1]].sum()


def test_a_pair_of_sum_and_weight_may_be_returned():
    one, two = Pairs(), Pairs()
    fitted(one, vectors(), auto_accumulate(micro_batch=12))
    fitted(two, vectors(), auto_accumulate(micro_batch=5))

    assert_close(one, two)


def test_batches_of_several_loaders_of_unlike_size_are_named():
    loaders = {"a": DataLoader(vectors(), batch_size=12), "b": DataLoader(vectors(), batch_size=6)}
    trainer = pl.Trainer(callbacks=[auto_accumulate()], **QUIET)

    with pytest.raises(autoaccum.InvalidInputError, match=r"2 loaders \(CombinedLoader\).*same batch_size.*split="):
        trainer.fit(Classifier(), loaders)


@pytest.mark.filterwarnings("ignore::autoaccum.LossWarning")
def test_a_batch_size_that_may_be_a_constant_or_a_samples_is_refused():
    loader = DataLoader(vectors(), batch_size=BATCH)

    with pytest.raises(autoaccum.InvalidInputError, match=r"'validation', batch_size=1.*leave batch_size out"):
        pl.Trainer(callbacks=[auto_accumulate()], **QUIET).validate(Constant(1, 1), loader, verbose=False)
    with pytest.raises(autoaccum.InvalidInputError, match=r"'loss', batch_size=7.*leave batch_size out"):
        fitted(Constant(most=1), vectors(), auto_accumulate())


class Lossless(Classifier):
    def training_step(self, batch, batch_idx):
        return {"error": self.body(batch[0]).mean()}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Manual, "autoaccum.Accumulator"),
        (OwnBackward, "autoaccum.Accumulator"),
        (Fetching, "dataloader_iter"),
        (Lossless, "'loss'"),
    ],
)
def test_what_micro_batches_cannot_be_a_part_of_is_refused(module, text):
    with pytest.raises(autoaccum.errors.InvalidInputError, match=text):
        fitted(module(), vectors(), auto_accumulate())


def test_batch_size_finder_is_refused():
    trainer = pl.Trainer(callbacks=[BatchSizeFinder()], **QUIET)

    with pytest.raises(autoaccum.errors.InvalidInputError, match="BatchSizeFinder"):
        auto_accumulate().setup(trainer, Classifier(), "fit")


def test_what_cannot_save_memory_in_the_module_is_refused():
    with pytest.raises(autoaccum.errors.InvalidInputError, match="no repeated blocks"):
        fitted(Classifier(), vectors(), auto_accumulate(save_memory="checkpoint"))
