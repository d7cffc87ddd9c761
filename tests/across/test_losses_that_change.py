"""Losses with settings that change, and frozen parameters that take no memory where it runs out."""

import subprocess
import textwrap

import pytest
import torch
from torch import nn

from support.losses.gradients import distance, full_batch_gradient
from support.models.small import runner_of
from support.processes import fork_server

OTHER = torch.tensor([5.0, 1.0, 0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: setattr(loss, "weight", OTHER),
        lambda loss: loss.weight.mul_(OTHER),
        lambda loss: setattr(loss, "ignore_index", 1),
        lambda loss: setattr(loss, "reduction", "sum"),
        lambda loss: setattr(loss, "reduction", "none"),
    ],
    ids=["other weights", "weights in place", "another ignored value", "a sum", "a vector"],
)
def test_settings_of_a_loss_that_change_between_windows_are_followed(change):
    batch = torch.randn(15, 3, dtype=torch.float64), torch.arange(15) % 7 % 3
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))
    model = nn.Linear(3, 3, dtype=torch.float64)
    runner = runner_of(model, torch.optim.SGD(model.parameters(), lr=1.0), 15, 4, loss=loss)
    runner.step(batch)
    change(loss)
    expected, value = full_batch_gradient(model, loss, batch)
    before = torch.cat([p.detach().flatten() for p in model.parameters()])

    report = runner.step(batch)

    assert distance(before - torch.cat([p.detach().flatten() for p in model.parameters()]), expected) < 1e-12
    assert report.loss == pytest.approx(value, rel=1e-12)


@pytest.mark.slow  # it really fills its memory
def test_checksums_of_frozen_parameters_take_no_memory_from_a_window_that_failed():
    """They are in double precision, and the failed micro-batch's graph lives as long as its error is handled."""
    script = textwrap.dedent(
        """
        import torch, autoaccum
        from torch import nn
        torch.set_num_threads(1)
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.frozen = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(4)]).requires_grad_(False)
                self.scale = nn.Parameter(torch.ones(1024))
            def forward(self, inputs):
                inputs = inputs * self.scale
                for _ in range(3000):
                    inputs = torch.tanh(inputs)
                return self.frozen[0](inputs).mean(1, keepdim=True)
        result = autoaccum.fit(
            Model(), [(torch.randn(64, 1024), torch.randn(64, 1))], 64, micro_batch=64, memory_limit="64MiB",
            loss=nn.MSELoss(), max_steps=1, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), progress=False,
            precision="fp32", device="cpu",
        )
        print(result.oom_events)
        """
    )
    ended = subprocess.run(
        [*fork_server.python(), "-c", script], capture_output=True, text=True, timeout=300, check=False
    )

    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 0
