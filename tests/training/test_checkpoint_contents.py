"""When checkpoints are written, what is done at signals and damage, and which checkpoints are refused."""

import contextlib
import errno
import os
import signal
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.errors import (
    CheckpointError,
    DeviceLostError,
    InvalidInputError,
    StateDamagedError,
    StepCompleteError,
)
from support.faults.places import Fault
from support.models.small import a_few_of, fit_quietly, one_in
from support.processes import fork_server
from support.training.checkpoint_edits import DAMAGES
from support.training.long_runs import (
    EPOCHS,
    STEPS_PER_EPOCH,
    Model,
    Noisy,
    Run,
    StopAt,
    StoppedError,
    checkpoints,
    loader_of,
    stopped_at,
)

STEPS = EPOCHS * STEPS_PER_EPOCH


@pytest.fixture(scope="module")
def undisturbed():
    run = Run()
    run.fit()
    return run.end


class Told(autoaccum.Callback):
    def __init__(self):
        self.saved = []
        self.resumed = []

    def on_checkpoint(self, path, *, step):
        assert (path / "manifest.json").is_file()
        self.saved.append(step)

    def on_resume(self, path, *, step, epoch):
        self.resumed.append((path.name, step, epoch))


class At(autoaccum.Callback):
    def __init__(self, step, action):
        self.step = step
        self.action = action

    def on_step(self, report, *, epoch):
        if report.step == self.step:
            self.step = None
            self.action()


# --- when -------------------------------------------------------------------------------------------------------------


def test_call_that_handles_an_earlier_damage_leaves_checkpoints_too(tmp_path):
    try:
        raise autoaccum.StateDamagedError("of an earlier call")  # noqa: TRY301 - as by an earlier call
    except autoaccum.StateDamagedError:
        with pytest.raises(StoppedError):
            Run(checkpoint=tmp_path).fit(StopAt(3))

    assert checkpoints(tmp_path) == ["step-00000003"]


def test_checkpoints_are_written_every_so_many_minutes(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Minute(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            now[0] += 60.0

    told = Told()

    Run(checkpoint=tmp_path, checkpoint_every="4 min", val_loader=None).fit(Minute(), told)

    assert told.saved == [4, 8, 12, STEPS]


class Losses:
    """Metric and loss of an evaluation that come out as is wanted, one after the other."""

    def __init__(self, *losses):
        self.left = list(losses)

    def __call__(self, outputs, batch):
        if outputs.requires_grad or outputs.dtype == torch.float64:
            return nn.functional.cross_entropy(outputs, batch[1])
        return outputs.sum() * 0 + self.left[0]


def test_one_with_the_lowest_validation_loss_is_kept_beside_the_newest_two(tmp_path):
    losses, told = Losses(3.0, 1.0, 2.0), Told()

    class Next(autoaccum.Callback):
        def on_evaluation(self, evaluation, *, epoch, step):
            losses.left.pop(0)

    result = Run(checkpoint=tmp_path, checkpoint_every=4, loss=losses).fit(Next(), told)

    assert [evaluation.loss for evaluation in result.evaluations] == [3.0, 1.0, 2.0]
    assert told.saved == [4, 5, 8, 10, 12, STEPS]  # 5 and 10 were the lowest by then
    assert checkpoints(tmp_path) == ["step-00000010", "step-00000012", "step-00000015"]
    assert (result.best_checkpoint, result.checkpoint) == (tmp_path / "step-00000010", tmp_path / "step-00000015")
    assert Run(checkpoint=tmp_path).fit().best_checkpoint == result.best_checkpoint


# --- resume= ----------------------------------------------------------------------------------------------------------


def test_resume_true_wants_a_checkpoint_and_what_was_saved_and_is_resumed_is_said(tmp_path, capsys):
    with pytest.raises(CheckpointError, match=r"resume=True, and there is no checkpoint in .*; pass the folder"):
        Run(checkpoint=tmp_path, resume=True).fit()

    with pytest.raises(StoppedError):
        Run(checkpoint=tmp_path).fit(StopAt(7), progress="lines")
    told = Told()
    assert Run(checkpoint=tmp_path, resume=True).fit(told, progress="lines").resumed_from == 7
    assert told.resumed == [("step-00000007", 7, 2)]
    said = capsys.readouterr().err
    assert "after StoppedError, step 7 is saved in" in said  # an error of the user's own, and no error of saving
    assert "resuming after step 7 from" in said


def test_resume_false_starts_anew_and_moves_the_old_ones_aside_with_its_first(tmp_path, undisturbed, capsys):
    stopped_at(9, tmp_path)
    run = Run(checkpoint=tmp_path, resume=False, checkpoint_every=3)

    found = []
    looks = [At(step, lambda: found.append(checkpoints(tmp_path)[-1])) for step in (2, 4)]
    result = run.fit(*looks, progress="lines")

    assert run.end == undisturbed
    assert result.resumed_from is None
    assert found == ["step-00000009", "step-00000003"]
    assert checkpoints(tmp_path / "earlier-1")[-1] == "step-00000009"
    assert "starts from scratch (resume=False)" in capsys.readouterr().err


class Own:
    """Something of a user's that only running code could rebuild."""


LOOP = []
LOOP.append(LOOP)


def scheduler_that_keeps(value, since=0):
    class Keeps(torch.optim.lr_scheduler.StepLR):
        def state_dict(self):
            return super().state_dict() | {"own": value if self.last_epoch >= since else 0}

    return lambda optimizer: Keeps(optimizer, 1)


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize(
    "value",
    [Own(), lambda: 0, Path("x"), nn.Linear(1, 1), np.array(["a", None]), LOOP],
    ids=lambda value: type(value).__name__,
)
def test_state_that_cannot_be_loaded_safely_is_refused_before_training_or_before_it_replaces_anything(
    tmp_path, value, since
):
    steps, data = [], [(torch.randn(4, 3), torch.randn(4, 2))] * 3
    options = {"scheduler": scheduler_that_keeps(value, since), "checkpoint": tmp_path, "checkpoint_every": 1}

    with pytest.raises(CheckpointError, match="cannot be kept in a checkpoint"):
        fit_quietly(nn.Linear(3, 2), data, 4, callbacks=[At(1, lambda: steps.append(1))], **options)

    assert steps == ([] if since == 0 else [1])
    assert checkpoints(tmp_path) == ([] if since == 0 else ["step-00000001"])


VALUES = [np.arange(3, dtype=np.uint32), 1 << 100, {1, 2}, (1, [2.5, None])]
SCALARS = [np.float32(0.5), np.int64(3), np.bool_(True)]


@pytest.mark.parametrize(
    ("value", "back"),
    [*((value, repr(value)) for value in VALUES), (SCALARS, "[0.5, 3, True]")],
)
def test_values_of_python_and_arrays_come_back_as_they_were(tmp_path, value, back):
    stopped_at(1, tmp_path, scheduler=scheduler_that_keeps(value))
    run = Run(checkpoint=tmp_path, scheduler=scheduler_that_keeps(value))

    assert run.fit().resumed_from == 1

    assert repr(run.scheduler.own) == back


# --- errors -----------------------------------------------------------------------------------------------------------


def fail_for_lack_of_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_checkpoint_that_cannot_be_written_is_a_note_of_an_error_and_else_ends_training(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail_for_lack_of_room)
    due = Run(checkpoint=tmp_path / "due", val_loader=None, checkpoint_every=2)

    with pytest.raises(StoppedError) as stopped:
        Run(checkpoint=tmp_path, val_loader=None).fit(StopAt(3))
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        due.fit()

    (note,) = stopped.value.__notes__
    assert "autoaccum: no checkpoint of step 3 could be written" in note
    assert "No space left on device" in note
    assert max(due.samples.windows) == 2
    assert not getattr(caught.value, "__notes__", [])


def test_half_an_update_is_never_left_behind(tmp_path):
    class Broken(torch.optim.lr_scheduler.StepLR):
        def step(self, *arguments):
            if self.last_epoch == 5:
                raise ValueError("the scheduler's")
            super().step(*arguments)

    with pytest.raises(StepCompleteError, match=r"optimizer step 6 is made.*ValueError: the scheduler's"):
        Run(checkpoint=tmp_path, val_loader=None, checkpoint_every=3, scheduler=lambda it: Broken(it, 4)).fit()

    assert checkpoints(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("where", ["training", "evaluation", "callback"])
def test_lost_device_names_the_checkpoint_and_is_not_read(tmp_path, monkeypatch, where):
    run = Run(checkpoint=tmp_path, checkpoint_every=2)
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")

    def lose():
        monkeypatch.setattr(torch, "save", lambda *_: pytest.fail("the device was read"))
        if where == "callback":  # which reads a loss
            raise lost
        hook = Fault(0, error=lost)
        run.model.last.register_forward_pre_hook(
            lambda module, _: hook() if module.training == (where == "training") else None
        )

    with pytest.raises(
        DeviceLostError, match=r"start a new one, and go on from the checkpoint .*step-00000002"
    ) as caught:
        run.fit(At(3, lose), val_every=3 if where == "evaluation" else None)

    causes = caught.value.__cause__, caught.value.__cause__.__cause__
    assert lost in causes


# --- damage -----------------------------------------------------------------------------------------------------------


class Damaging(torch.optim.Adam):
    """Fails, at the n-th of its steps, when it has written a part of the parameters."""

    fails_at = ()
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps in self.fails_at:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError("failed half-way")
        return super().step(closure)


def damaging(*steps):
    def make(parameters):
        made = Damaging(parameters, lr=0.01)
        made.fails_at = steps
        return made

    return make


def test_damage_names_the_last_checkpoint_and_the_same_call_resumes_as_if_it_had_not_happened(tmp_path, undisturbed):
    with pytest.raises(StateDamagedError, match="failed after it had begun to write") as caught:
        Run(checkpoint=tmp_path, checkpoint_every=3, optimizer=damaging(9)).fit()
    run = Run(checkpoint=tmp_path, optimizer=damaging())
    result = run.fit()

    assert "the last one is " + str(tmp_path / "step-00000006") in caught.value.__notes__[-1]
    assert result.resumed_from == 6
    assert run.end == undisturbed


def test_generator_that_another_call_has_read_from_is_refused_and_a_new_one_is_not(tmp_path):
    def once():
        return (batch for batch in list(loader_of(Noisy(), shuffle=False)))

    run = stopped_at(2, tmp_path, loader=once)

    with pytest.raises(CheckpointError, match="can be read only once and has been read from"):
        run.fit()
    assert Run(checkpoint=tmp_path, loader=once).fit().resumed_from == 2


def test_interrupt_that_waited_for_a_damaged_update_leaves_no_checkpoint_of_it(tmp_path):
    class Interrupted(Damaging):
        def step(self, closure=None):
            if self.steps + 1 in self.fails_at:
                signal.raise_signal(signal.SIGINT)
            return super().step(closure)

    def make(parameters):
        made = Interrupted(parameters, lr=0.01)
        made.fails_at = (6,)
        return made

    with pytest.raises(KeyboardInterrupt):
        Run(checkpoint=tmp_path, val_loader=None, checkpoint_every=4, optimizer=make).fit()

    assert checkpoints(tmp_path) == ["step-00000004"]


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def handlers():
    """Puts a handler of the user's in place for a signal, and takes it away again."""
    former = {}

    def install(number, handler):
        former[number] = signal.signal(number, handler)

    yield install
    for number, handler in former.items():
        signal.signal(number, handler)


def in_window_8(run, action):
    """Do something inside a forward pass, between two micro-batches of a window."""
    call = 20  # three a window, and one for the short last window of the first epoch
    calls, own = [], run.model.last.weight

    def hook(module, _):
        if module.training and module.weight is own:  # and no copy, by which gradients are compared
            calls.append(1)
            if len(calls) == call:
                action()

    run.model.last.register_forward_pre_hook(hook)


def test_sigterm_is_saved_at_the_end_of_the_window_where_a_handler_may_return_and_training_then_goes_on(
    tmp_path, undisturbed, handlers
):
    files = []
    handlers(signal.SIGTERM, lambda *_: files.append(checkpoints(tmp_path)))
    run = Run(checkpoint=tmp_path, val_loader=None)
    in_window_8(run, lambda: signal.raise_signal(signal.SIGTERM))

    result = run.fit()

    assert files == [["step-00000008"]]
    assert run.end == undisturbed
    assert result.steps == STEPS


def test_second_sigterm_does_not_disturb_what_the_first_has_set_going(tmp_path, handlers, monkeypatch):
    arrived = []
    handlers(signal.SIGTERM, lambda *_: arrived.append(checkpoints(tmp_path)))
    run = Run(checkpoint=tmp_path, val_loader=None)
    save = torch.save

    def saved_under_fire(*arguments):
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGTERM)
        save(*arguments)

    in_window_8(
        run, lambda: monkeypatch.setattr(torch, "save", saved_under_fire) or signal.raise_signal(signal.SIGTERM)
    )

    run.fit()

    assert arrived == [["step-00000008"]]


def test_sigusr1_saves_at_the_end_of_the_window_and_training_goes_on(tmp_path, undisturbed):
    run, told = Run(checkpoint=tmp_path, val_loader=None), Told()
    in_window_8(run, lambda: signal.raise_signal(signal.SIGUSR1))

    run.fit(told)

    assert told.saved == [8, STEPS]
    assert run.end == undisturbed


@pytest.mark.parametrize("fails", [False, True])
def test_handlers_are_those_from_before_however_the_call_ends_and_without_checkpoints_all_the_time(tmp_path, fails):
    def now():
        return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]

    before, inside = now(), []
    looks = At(1, lambda: inside.append(now()[:2]))

    with contextlib.suppress(StoppedError):
        Run(checkpoint=tmp_path).fit(looks, *([StopAt(2)] if fails else []))
    after = now()
    Run().fit(At(1, looks.action))

    assert after == now() == before
    assert inside[0] != before[:2]
    assert inside[1] == before[:2]


# --- what they hold ---------------------------------------------------------------------------------------------------


class Queued(Model):
    """Collects what its last layer saw in a buffer, which `Emptying` empties once an optimizer step."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(20, 3))
        self.register_buffer("pending", torch.empty(0, 3))

    def forward(self, inputs):
        found = super().forward(inputs)
        self.pending = torch.cat([self.pending, found.detach()])
        return found + self.queue.mean(0)


class Emptying(autoaccum.Callback):
    def __init__(self, run):
        self.model = run.model

    def on_step(self, report, *, epoch):
        self.model.queue = torch.cat([self.model.queue, self.model.pending])[-20:]
        self.model.pending = self.model.pending[:0].clone()


def test_run_whose_buffers_change_their_shape_is_gone_on_with(tmp_path):
    def run(folder, epochs, before=None):  # an evaluation at the end of each epoch leaves rows in `pending`
        it = before or Run(model=Queued, checkpoint=folder)
        it.fit(Emptying(it), epochs=epochs)
        return it

    undisturbed = run(None, 4)
    first = run(tmp_path, 1)
    assert len(first.model.pending)
    run(tmp_path, 2, first)  # with what the first call has left
    run(tmp_path, 3)

    assert run(tmp_path, 4).end["model"] == undisturbed.end["model"]


OPTIMIZERS = [name for name in vars(torch.optim) if name[0].isupper() and name != "Optimizer"]


def fit_linear(kind, folder, steps):
    """Train a layer with one of torch's optimizers."""
    model, settings = nn.Linear(6, 3, bias=False), {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **settings)
    data = TensorDataset(torch.ones(64, 6), torch.arange(64) % 3)
    return fit_quietly(
        model, DataLoader(data, 8), 8, optimizer=optimizer, max_steps=steps, checkpoint=folder, micro_batch=4
    )


@pytest.mark.parametrize("kind", one_in(3, [name for name in OPTIMIZERS if name not in ("LBFGS", "SparseAdam")]))
def test_state_of_every_optimizer_of_torchs_is_resumed(tmp_path, kind):
    fit_linear(kind, tmp_path, 2)

    assert fit_linear(kind, tmp_path, 4).resumed_from == 2


def test_cap_after_lack_of_memory_is_forgotten_once_it_has_helped(tmp_path):
    def fit(steps):
        loader = DataLoader(TensorDataset(torch.ones(256, 3), torch.zeros(256, dtype=torch.int64)), 64)
        return (
            fit_quietly(nn.Linear(3, 2), loader, 64, max_steps=steps, epochs=9, checkpoint=tmp_path)
            .history[-1]
            .micro_batches
        )

    (tmp_path / "out-of-memory.json").write_text('{"micro_batch": 10}')
    capped, *later = [fit(steps) for steps in (4, 10, 16, 22)]

    assert max(capped) == 7
    assert later == [(64,)] * 3


@pytest.mark.parametrize("resume", ["auto", False])
def test_folder_in_place_of_the_note_on_lack_of_memory_is_refused_in_words_at_the_start(tmp_path, resume):
    (tmp_path / "out-of-memory.json").mkdir()
    run = Run(checkpoint=tmp_path, resume=resume)

    with pytest.raises(InvalidInputError, match=r"out-of-memory\.json is a folder"):
        run.fit()

    assert not list(tmp_path.glob("*step-*"))


@pytest.mark.parametrize(
    "capacity", [138_000, 146_000, *(pytest.param(one, marks=pytest.mark.sweep) for one in (142_000, 150_000))]
)
def test_resume_on_a_tight_device_trains_where_the_first_call_did(tmp_path, capacity):
    def fit(steps):
        torch.manual_seed(0)
        parts = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        data = TensorDataset(torch.randn(256, 32), torch.randint(0, 4, (256,)))
        device = autoaccum.Simulated(capacity)
        return autoaccum.fit(
            nn.Sequential(*parts), DataLoader(data, 64), 64, max_steps=steps, device=device, checkpoint=tmp_path
        )

    first = fit(6)

    assert fit(12).plan.micro_batch >= first.plan.micro_batch


@pytest.mark.parametrize(("kind", "name"), a_few_of(DAMAGES, ["state.pt", "manifest.json"]))
def test_damaged_newest_is_said_and_the_one_before_is_gone_on_from(tmp_path, undisturbed, capsys, kind, name):
    stopped_at(6, tmp_path, checkpoint_every=4, val_loader=None)
    DAMAGES[kind](tmp_path / "step-00000006" / name)
    run = Run(checkpoint=tmp_path)

    result = run.fit(progress="lines")

    assert result.resumed_from == 4
    assert run.end == undisturbed
    assert "step-00000006 is cut short or damaged" in capsys.readouterr().err


def test_checkpoint_can_be_read_without_autoaccum(tmp_path):
    run = Run(checkpoint=tmp_path)
    result = run.fit()

    content = torch.load(result.checkpoint / "state.pt", weights_only=True)

    fresh = Model()
    fresh.load_state_dict(content["modules"][0]["state"])
    assert torch.equal(fresh.last.weight, run.model.last.weight)


_LARGE_BATCHES = """
    import os, signal, sys, torch, autoaccum
    from torch import nn
    from torch.utils.data import DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    kind, target, evaluates, killed_at = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "evaluates", int(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Images(torch.utils.data.Dataset):  # a batch of 512 takes 24 MiB
        def __len__(self):
            return 1536

        def __getitem__(self, index):
            generator = torch.Generator().manual_seed(index)
            return torch.randn(3, 64, 64, generator=generator), torch.tensor(index % 4)

    class Kill(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            print(report.step, report.loss, report.samples, max(report.micro_batches))

        def on_checkpoint(self, path, *, step):
            if step == killed_at:
                sys.stdout.flush()
                os.kill(os.getpid(), signal.SIGKILL)

    make = StatefulDataLoader if kind == "stateful" else DataLoader
    loader = make(Images(), 512, shuffle=True, num_workers=1 if kind == "workers" else 0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    model.append(nn.Linear(64, 4))
    autoaccum.fit(
        model, loader, target, max_steps=6, device="cpu", memory_limit="10MiB", checkpoint="run", checkpoint_every=1,
        micro_batch=16, callbacks=[Kill()], progress=False,
        val_loader=DataLoader(Images(), 512) if evaluates else None
    )
    print(sum(parameter.double().abs().sum().item() for parameter in model.parameters()))
"""


@pytest.mark.parametrize(
    ("kind", "target", "evaluates", "killed_at"),
    [
        pytest.param("plain", 512, "evaluates", 3, marks=pytest.mark.slow),  # where the epoch ends
        ("plain", 400, "", 2),  # windows that take from two batches
        pytest.param("stateful", 512, "", 4, marks=pytest.mark.slow),
        pytest.param("workers", 512, "evaluates", 2, marks=pytest.mark.slow),
    ],
)
def test_batch_of_the_loader_larger_than_a_real_limit_trains_also_after_a_kill(
    tmp_path, kind, target, evaluates, killed_at
):
    def lines(folder, killed_at):
        (tmp_path / folder).mkdir(exist_ok=True)
        words = kind, str(target), evaluates, str(killed_at)
        arguments = [*fork_server.python(), "-c", textwrap.dedent(_LARGE_BATCHES), *words]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False, cwd=tmp_path / folder)
        assert done.returncode == (-signal.SIGKILL if killed_at else 0), done.stderr
        return done.stdout.splitlines()

    undisturbed = lines("undisturbed", 0)

    assert [*lines("killed", killed_at), *lines("killed", 0)] == undisturbed


@pytest.mark.parametrize("losses", [(functional.cross_entropy, nn.CrossEntropyLoss()), (nn.CrossEntropyLoss(), None)])
def test_loss_without_state_may_become_a_function_and_the_reverse(tmp_path, losses):
    data = [(torch.randn(8, 4), torch.randint(3, (8,)))]
    for epochs, loss in enumerate(losses, start=1):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        result = fit_quietly(model, data, 8, loss=loss, epochs=epochs, checkpoint=tmp_path, checkpoint_every=1)

    assert result.resumed_from == 1


@pytest.mark.parametrize("has_scheduler", [False, True])
def test_resume_says_which_settings_the_checkpoint_overrides_of_a_rate_under_a_scheduler_where_it_began(
    tmp_path, capsys, has_scheduler
):
    data = [(torch.randn(4, 3), torch.randint(2, (4,)))]

    def train(steps, rate=0.1, weight=2.0):
        torch.manual_seed(0)
        model, options = nn.Linear(3, 2), {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight]))}
        groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=rate)
        if has_scheduler:
            options = {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
        options |= {"device": "cpu", "checkpoint": tmp_path, "optimizer": optimizer, "max_steps": steps}
        autoaccum.fit(model, data, 4, **options)
        return [line for line in capsys.readouterr().err.splitlines() if "override" in line]

    assert train(1) == train(2) == []
    (line,) = train(3, 0.01, 3.0)
    assert "settings override this call's: lr=0.1 (0.01 in this call)" in line
    assert has_scheduler or ", weight of CrossEntropyLoss" in line
