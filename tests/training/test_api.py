"""`fit` from end to end: what a user may pass, and what comes of it."""

import copy
import itertools
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import autoaccum
from support.models.small import fit_quietly


def classification(samples=64, classes=3):
    torch.manual_seed(0)
    inputs = torch.randn(samples, 8)
    return inputs, inputs[:, :classes].argmax(1)


def classifier(classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, classes))


def loader_of(*tensors, batch_size=16, **options):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, **options)


def quiet_fit(model, loader, target_batch, **options):
    return autoaccum.fit(model, loader, target_batch, progress=False, **{"device": "cpu", **options})


class Recorder(autoaccum.Callback):
    """Notes each event, in order, with what is passed by name."""

    def __init__(self):
        self.events = []

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)
        return lambda *_, **named: self.events.append((name, *named.values()))


# --- windows ----------------------------------------------------------------------------------------------------------


def test_iterable_dataset_without_a_length_trains():
    class Endless(IterableDataset):
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            for _ in itertools.count():
                inputs = torch.randn(8, generator=generator)
                yield inputs, inputs[:3].argmax()

    result = quiet_fit(classifier(), DataLoader(Endless(), batch_size=6), 10, max_steps=4, micro_batch=4)

    assert [report.micro_batches for report in result.history] == [(4, 3, 3)] * 4


def test_generator_is_read_once_and_the_early_end_is_said(capsys):
    inputs, labels = classification()

    result = autoaccum.fit(
        classifier(), ((inputs[i : i + 8], labels[i : i + 8]) for i in range(0, 64, 8)), 32, epochs=3, micro_batch=32,
        device="cpu", progress="lines",
    )  # fmt: skip

    assert result.steps == 2
    assert "gave nothing in epoch 2" in capsys.readouterr().err


# --- learning rate, schedulers, precision -----------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "moves"), [("step", 6), ("epoch", 3)])
def test_scheduler_moves_once_an_update_or_an_epoch(interval, moves):
    optimizer = torch.optim.SGD((model := classifier()).parameters(), lr=1.0)
    options = {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        "scheduler_interval": interval,
    }

    quiet_fit(model, loader_of(*classification()), 32, epochs=3, micro_batch=10, **options)

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5**moves)


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rate_is_scaled_once_and_said(rule, factor, capsys):
    optimizer = torch.optim.SGD((model := classifier()).parameters(), lr=0.01)

    autoaccum.fit(
        model, loader_of(*classification()), 32, optimizer=optimizer, lr_scaling=rule, base_batch=8, micro_batch=32,
        device="cpu", epochs=2,
    )  # fmt: skip

    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * factor)
    assert capsys.readouterr().err.count(f"({rule}, 8 -> 32)") == 1


def test_window_that_the_scaler_skips_counts_as_done_and_the_scheduler_stays():
    inputs, labels = classification()
    optimizer = torch.optim.SGD((model := classifier()).parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())

    result = quiet_fit(
        model,
        [(inputs, labels)],
        64,
        precision="fp16",
        optimizer=optimizer,
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets) * 1e4,  # overflows when scaled
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        micro_batch=32,
        loss_reduction="mean",
    )

    assert [report.skipped for report in result.history] == [True]
    assert result.steps == 1
    assert optimizer.param_groups[0]["lr"] == 1.0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


# --- evaluation, callbacks, messages ----------------------------------------------------------------------------------


def test_callbacks_are_told_in_order():
    recorder = Recorder()
    data = loader_of(*classification())

    quiet_fit(classifier(), data, 64, epochs=2, micro_batch=40, val_loader=data, callbacks=[recorder])

    assert recorder.events == [
        ("on_fit_start", 2, None, 1),
        ("on_plan", 1, None),
        ("on_step", 1),
        ("on_epoch_end",),
        ("on_evaluation", 1, 1),
        ("on_step", 2),
        ("on_epoch_end",),
        ("on_evaluation", 2, 2),
        ("on_fit_end",),
    ]


def test_all_choices_are_told_in_one_line_with_their_arguments_before_anything_else(capfd):
    autoaccum.fit(classifier(), loader_of(*classification()), 32, epochs=3)

    out, err = capfd.readouterr()
    first, *others = err.splitlines()
    assert out == ""
    for choice in (
        "device cpu (device=)",
        "AdamW(lr=1e-3) (optimizer=)",
        "precision fp32 (precision=)",
        "cross_entropy",
    ):
        assert choice in first
    assert not any("chosen:" in line for line in others)


def test_remembered_sizes_and_a_resumed_checkpoint_are_told_with_how_to_do_without(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("AUTOACCUM_CACHE_DIR", str(tmp_path / "cache"))

    def chosen(epochs, **options):
        autoaccum.fit(classifier(), loader_of(*classification()), 32, epochs=epochs, memory_limit="1GiB", **options)
        (line,) = [line for line in capfd.readouterr().err.splitlines() if "chosen:" in line]
        return line

    assert "has no checkpoint yet (resume=True requires one)" in chosen(1, checkpoint=tmp_path / "run")
    assert "(the environment variable AUTOACCUM_CACHE_DIR, set to nothing)" in chosen(1)
    assert "(resume=False starts from scratch)" in chosen(2, checkpoint=tmp_path / "run")


# --- when memory runs out ---------------------------------------------------------------------------------------------


def test_loaders_own_error_is_the_loaders_whatever_it_says():
    inputs, labels = classification()
    mine = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def batches():
        yield inputs[:32], labels[:32]
        raise mine

    recorder = Recorder()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        quiet_fit(classifier(), batches(), 32, micro_batch=32, callbacks=[recorder])

    assert caught.value is mine
    assert [name for name, *_ in recorder.events] == ["on_fit_start", "on_plan", "on_step", "on_fit_end"]


def test_history_holds_the_last_updates(monkeypatch):
    monkeypatch.setattr("autoaccum._training.loop._HISTORY", 3)

    result = quiet_fit(classifier(), loader_of(*classification()), 5)

    assert [report.step for report in result.history] == [result.steps - 2, result.steps - 1, result.steps]


@pytest.mark.parametrize(("name", "kind"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_optimizer_by_name(name, kind):
    made = []

    def scheduler(optimizer):
        made.append(optimizer)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    quiet_fit(classifier(), loader_of(*classification()), 20, optimizer=name, scheduler=scheduler)

    assert isinstance(made[0], kind)


@pytest.mark.parametrize(("alias", "said"), [("no", None), ("bf16-mixed", "bf16"), ("16-mixed", "fp16")])
def test_precision_has_the_names_of_other_frameworks(alias, said):
    seen = []
    model = classifier()
    model.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs.dtype))

    quiet_fit(model, loader_of(*classification()), 20, precision=alias)

    assert {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[said] in seen


class Slow(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.randn(4), torch.tensor(index % 3)


def test_fit_tells_what_it_waited_for(tmp_path):
    result = fit_quietly(
        nn.Linear(4, 3),
        DataLoader(Slow(), batch_size=8),
        target_batch=8,
        val_loader=DataLoader(Slow(), batch_size=8),
        epochs=1,
        checkpoint=tmp_path / "run",
    )

    found = result.time_spent
    assert min(found["waiting for data"], found["evaluations"]) >= 24 * 0.005
    assert min(found["checkpoints"], found["search"], found["starting up"]) > 0
    assert found["computing again"] == 0
    assert sum(found.values()) <= result.elapsed_s


def test_windows_that_ran_out_of_memory_count_by_what_was_computed_again():
    failures = iter([True])

    class Fails(nn.Linear):
        def forward(self, inputs):
            if len(inputs) > 2 and next(failures, False):
                raise torch.OutOfMemoryError("CUDA out of memory (injected)")
            return super().forward(inputs)

    batches = [(torch.randn(8, 4), torch.arange(8) % 3)] * 3
    loss = {"loss": nn.CrossEntropyLoss(), "loss_reduction": "mean"}  # nothing fails in a check
    result = fit_quietly(Fails(4, 3), batches, target_batch=8, micro_batch=4, **loss)

    (report,) = [report for report in result.history if report.oom_events]
    share = report.recomputed_samples / (8 + report.recomputed_samples)
    assert result.time_spent["computing again"] == pytest.approx(report.elapsed_s * share)


@pytest.mark.parametrize(("target", "is_said"), [(100, True), (30, False), (20, False)])
def test_target_of_more_samples_than_an_epoch_has_is_said(target, is_said, capsys):
    data = [(torch.randn(10, 4), torch.randn(10, 1)) for _ in range(3)]

    autoaccum.fit(nn.Linear(4, 1), data, target, epochs=2, micro_batch=10, device="cpu")

    said = f"an epoch has 30 samples, fewer than target_batch={target}"
    assert capsys.readouterr().err.count(said) == is_said
