"""Ctrl-C once or several times, at any moment: what the same process can do afterwards, and what is written."""

import subprocess
import textwrap

import pytest
import torch

import autoaccum
from autoaccum._engine.window import Engine  # a place that is interrupted
from support.processes import fork_server
from support.training.long_runs import Run, checkpoints

_PRESSES = """
    import fcntl, os, random, resource, signal, sys, tempfile, threading, time
    import torch
    from torch import nn
    import autoaccum

    torch.set_num_threads(1)
    inputs = torch.randn(96, 6)
    data = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    device = autoaccum.Simulated(10**9) if sys.argv[1] == "simulated" else "cpu"

    def fit(folder, epochs):
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        limit = "200MiB" if sys.argv[1] == "limit" else None
        autoaccum.fit(model, loader, 16, micro_batch=8, epochs=epochs, checkpoint=folder, checkpoint_every=50,
                      progress=False, optimizer=optimizer, device=device, memory_limit=limit)

    def now():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
        return handlers, resource.getrlimit(resource.RLIMIT_DATA), torch.is_grad_enabled()

    def press(times, done):
        time.sleep(random.uniform(0.0, 0.1))
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(random.uniform(0.0, 0.01))
        done.set()

    random.seed(0)
    fit(tempfile.mkdtemp(), 1)
    before = now()
    for number in range(12):
        folder, done = tempfile.mkdtemp(), threading.Event()
        try:
            threading.Thread(target=press, args=(number % 4 + 1, done)).start()
            fit(folder, 200)
        except KeyboardInterrupt:
            pass
        while True:
            try:
                done.wait()
                time.sleep(0.005)  # for the last of them
                break
            except KeyboardInterrupt:
                pass
        assert now() == before, now()
        fit(folder, 1)
        assert now() == before, now()
        held = os.open(os.path.join(folder, ".lock"), os.O_RDWR)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(held)
"""


@pytest.mark.parametrize(
    "device", ["cpu", *(pytest.param(one, marks=pytest.mark.slow) for one in ("simulated", "limit"))]
)
def test_interrupted_up_to_four_times_the_process_trains_on_in_the_same_folder_with_everything_as_before(device):
    arguments = [*fork_server.python(), "-c", textwrap.dedent(_PRESSES), device]

    done = subprocess.run(arguments, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_second_interrupt_that_keeps_a_window_from_being_restored_keeps_it_out_of_the_checkpoint(tmp_path, monkeypatch):
    run = Run(checkpoint=tmp_path, checkpoint_every=3, val_loader=None)

    def interrupted(*_):
        raise KeyboardInterrupt

    class Presses(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            if report.step == 4:
                run.model.norm.register_forward_hook(interrupted)  # in the next window, after the running statistics
                monkeypatch.setattr(Engine, "restore", interrupted)

    with pytest.raises(KeyboardInterrupt):
        run.fit(Presses())

    assert checkpoints(tmp_path) == ["step-00000003"]


def test_interrupt_within_no_grad_or_autocast_of_torch_leaves_neither_as_it_was_there(tmp_path):
    class Presses(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            torch.set_grad_enabled(False)  # as where their own exit is interrupted
            torch.set_autocast_enabled("cpu", True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Run(checkpoint=tmp_path).fit(Presses())

    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
